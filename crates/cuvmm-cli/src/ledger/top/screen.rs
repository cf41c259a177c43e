//! The terminal while the live picture is shown.
//!
//! It is restored when the screen is dropped, and before the message of a panic is printed, on
//! whatever thread that is.

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

/// The terminal's alternate screen in raw mode.
#[derive(Debug)]
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    /// Restores the terminal after the last draw.
    taken: Taken,
}

/// The fact that the terminal is to be restored. Shared by the screen and the panic hook.
#[derive(Clone, Debug)]
struct Taken(Arc<AtomicBool>);

impl Screen {
    /// Takes the terminal that is standard output.
    ///
    /// # Errors
    /// An error of the terminal, which is then as it was.
    pub(super) fn open() -> io::Result<Self> {
        let taken = Taken(Arc::new(AtomicBool::new(false)));
        let (hooked, before) = (taken.clone(), panic::take_hook());
        panic::set_hook(Box::new(move |panic| {
            hooked.restore();
            before(panic);
        }));
        enable_raw_mode()?;
        taken.0.store(true, Ordering::SeqCst);
        // A terminal that has no second screen shows what was written before.
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

    /// Draws the state. Returns `false` if the terminal was restored because a thread panicked.
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
    /// Restores the terminal the first time it is called.
    fn restore(&self) {
        if self.0.swap(false, Ordering::SeqCst) {
            // An error of the terminal itself cannot be reported on it.
            let _ = disable_raw_mode();
            let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        }
    }
}

#[cfg(test)]
mod tests;
