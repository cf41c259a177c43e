//! The threads that look, send requests and read keys; drawing waits for none of them.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm::LedgerView;
use cuvmm::ledger::Control;
use ratatui::crossterm::event::{self, KeyEvent};

use super::keys::named;
use super::look::look;
use super::state::{Change, Look, Request};
use crate::ledger::find::Where;
use cuvmm_command::size::iec;
use cuvmm_command::terminal::{chain, safe};

/// The timeout of a request. Sleep and wake move memory.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) enum Event {
    Key(KeyEvent),
    Resized,
    /// Keys can no longer be read.
    NoKeys(io::Error),
    Look(Look),
    Said(String),
    Signal(i32),
    Ended,
}

/// Reports the end of a thread, also by a panic, to the drawing thread.
struct Ends(Sender<Event>);

impl Drop for Ends {
    fn drop(&mut self) {
        // Sending fails if the drawing thread has ended.
        let _ = self.0.send(Event::Ended);
    }
}

/// Starts all threads. Returns the channel for requests.
///
/// # Errors
/// A thread cannot be started.
pub(super) fn start(
    at: Where,
    interval: Duration,
    to: &Sender<Event>,
) -> io::Result<Sender<Request>> {
    let (wake, woken) = channel();
    let (requests, asked) = channel();
    let ends = Ends(to.clone());
    thread::Builder::new().spawn(move || looks(&at, interval, &ends, &woken))?;
    let ends = Ends(to.clone());
    thread::Builder::new().spawn(move || answers(&ends, &asked, &wake))?;
    let ends = Ends(to.clone());
    thread::Builder::new().spawn(move || keys(&ends))?;
    Ok(requests)
}

fn looks(at: &Where, interval: Duration, to: &Ends, woken: &Receiver<()>) {
    // A view has to stay open to notice processes that do not answer.
    let mut views = Vec::new();
    loop {
        let (ledgers, wrong) = match at.open_again(std::mem::take(&mut views)) {
            Ok(opened) => {
                views = opened.ledgers;
                (Some(look(&views)), opened.wrong.join("; "))
            }
            Err(error) => (None, chain(&error)),
        };
        let at = Instant::now();
        let look = Look { at, ledgers, wrong };
        if to.0.send(Event::Look(look)).is_err() {
            return;
        }
        match woken.recv_timeout(interval) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn answers(to: &Ends, asked: &Receiver<Request>, wake: &Sender<()>) {
    for request in asked {
        let said = match answer(&request) {
            Ok(said) => said,
            Err(reason) => format!("{}: {}", named(&request), safe(&reason)),
        };
        if to.0.send(Event::Said(said)).is_err() || wake.send(()).is_err() {
            return;
        }
    }
}

fn answer(request: &Request) -> Result<String, String> {
    let control = control(request)?.timeout(PATIENCE);
    let tenant = request.target.tenant.as_ref();
    let tenant = tenant.map(|(_, name)| &**name);
    let name = named(request);
    let said = match request.change {
        Change::Trim => control
            .trim(0)
            .map(|bytes| format!("{name} gave back {}", iec(bytes))),
        Change::Sleep => control.sleep(tenant).map(|()| format!("{name} sleeps")),
        Change::Wake => control.wake(tenant).map(|()| format!("{name} is awake")),
    };
    said.map_err(|error| error.to_string())
}

/// Returns the control of the selected process, if that process is still in its slot.
fn control(request: &Request) -> Result<Control, String> {
    let process = &request.target.process;
    let view = LedgerView::open(&process.path).map_err(|error| error.to_string())?;
    // The owner is checked after `control` is made, so a request to an earlier owner reaches no
    // later one.
    let control = view.control(process.slot);
    let mut processes = view.stats().processes.into_iter();
    let same = |pid, name: &str| pid == process.pid && name == request.target.name;
    match processes.find(|it| it.slot == process.slot) {
        Some(it) if same(it.pid, &it.name) => Ok(control),
        _ => Err("the process is gone".to_owned()),
    }
}

fn keys(to: &Ends) {
    loop {
        let event = match event::read() {
            Ok(event::Event::Key(key)) => Event::Key(key),
            Ok(event::Event::Resize(..)) => Event::Resized,
            Ok(_) => continue,
            Err(error) => Event::NoKeys(error),
        };
        let last = matches!(event, Event::NoKeys(_));
        if to.0.send(event).is_err() || last {
            return;
        }
    }
}
