//! The loop of the live picture: waits for events and draws.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context as _, anyhow};

use super::keys::{Action, press};
use super::screen::Screen;
use super::state::{Request, State};
use super::worker::{Event, start};
use crate::ledger::find::Where;
use cuvmm_command::signals;

/// Shows the figures until a key or a signal ends the loop, restores the terminal, and returns the
/// signal.
///
/// # Errors
/// A ledger cannot be read at first, or the terminal fails.
pub(super) fn run(at: &Where, interval: Duration) -> anyhow::Result<Option<i32>> {
    // Errors of unreadable ledgers are printed before the screen changes.
    at.open()?;
    let (to, events) = channel();
    let signaled = to.clone();
    signals::forward(move |signal| {
        // Sending fails if the loop has ended.
        let _ = signaled.send(Event::Signal(signal));
    })?;
    let mut screen = Screen::open().context("the terminal cannot be used")?;
    let requests = start(at.clone(), interval, &to)?;
    let mut state = State::default();
    state.folder = at.shown();
    let end = watch(state, &mut screen, &events, &requests);
    drop(screen);
    end
}

/// Returns the signal that ended the loop, or `None` for a key.
fn watch(
    mut state: State,
    screen: &mut Screen,
    events: &Receiver<Event>,
    requests: &Sender<Request>,
) -> anyhow::Result<Option<i32>> {
    loop {
        if !screen.draw(&state)? {
            return Err(anyhow!("a thread ended"));
        }
        let first = events.recv()?;
        // Events that came meanwhile are drawn together.
        for event in std::iter::once(first).chain(events.try_iter()) {
            if let ControlFlow::Break(end) = take(screen, &mut state, event, requests)? {
                return Ok(end);
            }
        }
    }
}

fn take(
    screen: &mut Screen,
    state: &mut State,
    event: Event,
    requests: &Sender<Request>,
) -> anyhow::Result<ControlFlow<Option<i32>>> {
    match event {
        Event::Key(key) => match press(state, key) {
            Action::Quit => return Ok(ControlFlow::Break(None)),
            Action::Send(request) => requests.send(request)?,
            Action::Redraw => screen.clear()?,
            Action::Draw => {}
        },
        Event::Look(look) => state.look(look),
        Event::Said(text) => state.said = text,
        Event::Resized => {}
        Event::NoKeys(error) => return Err(error).context("keys cannot be read"),
        Event::Signal(signal) => return Ok(ControlFlow::Break(Some(signal))),
        Event::Ended => return Err(anyhow!("a thread ended")),
    }
    Ok(ControlFlow::Continue(()))
}
