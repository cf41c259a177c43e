//! The terminal while the live picture is shown.
//!
//! A drop of the screen restores the terminal; so does a panic on any thread, before its message is
//! printed.

use std::io::{self, Stdout};
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

use super::draw::draw;
use super::state::State;

/// The alternate screen of the terminal, in raw mode.
#[derive(Debug)]
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    taken: Taken,
}

/// A flag, shared with the panic hook, that the terminal has to be restored.
#[derive(Clone, Debug)]
struct Taken(Arc<AtomicBool>);

impl Screen {
    /// Takes the terminal of standard output.
    ///
    /// # Errors
    /// An error of the terminal, which is restored.
    pub(super) fn open() -> io::Result<Self> {
        let taken = Taken(Arc::new(AtomicBool::new(false)));
        let (hooked, before) = (taken.clone(), panic::take_hook());
        panic::set_hook(Box::new(move |panic| {
            hooked.restore();
            before(panic);
        }));
        enable_raw_mode()?;
        taken.0.store(true, Ordering::SeqCst);
        // A terminal without an alternate screen would show earlier output.
        let entered = execute!(io::stdout(), EnterAlternateScreen, Clear(ClearType::All));
        let terminal = entered.and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        match terminal {
            Ok(terminal) => Ok(Self { terminal, taken }),
            Err(error) => {
                taken.restore();
                Err(error)
            }
        }
    }

    /// Draws the state. Returns `false` if a panic has restored the terminal.
    ///
    /// # Errors
    /// An error of writing.
    pub(super) fn draw(&mut self, state: &State) -> io::Result<bool> {
        if !self.taken.0.load(Ordering::SeqCst) {
            return Ok(false);
        }
        self.terminal
            .draw(|frame| draw(state, frame.area(), frame.buffer_mut()))?;
        Ok(true)
    }

    /// Makes the next draw write every cell.
    ///
    /// # Errors
    /// An error of writing.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.terminal.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.taken.restore();
    }
}

impl Taken {
    /// Restores the terminal, on the first call only.
    fn restore(&self) {
        if self.0.swap(false, Ordering::SeqCst) {
            // An error of the terminal cannot be reported on the terminal.
            let _ = disable_raw_mode();
            let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        }
    }
}

#[cfg(test)]
mod tests;
