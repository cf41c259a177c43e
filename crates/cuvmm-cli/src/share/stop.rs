//! Ctrl-C and its like, as something to wait for: what is left behind is cleaned up by its owners.

use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Heard of when the process is asked to end: SIGINT, SIGTERM, SIGHUP.
#[derive(Debug)]
pub(super) struct Stop(Receiver<()>);

impl Stop {
    /// Takes the signals over.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn on_signals() -> anyhow::Result<Self> {
        let (sender, receiver) = channel();
        ctrlc::set_handler(move || {
            // Nobody waits when it is ending already.
            let _ = sender.send(());
        })?;
        Ok(Self(receiver))
    }

    /// Whether the process is asked to end within so long.
    pub(super) fn within(&self, time: Duration) -> bool {
        !matches!(self.0.recv_timeout(time), Err(RecvTimeoutError::Timeout))
    }

    /// Waits until it is.
    pub(super) fn wait(&self) {
        // The handler is never dropped.
        let _ = self.0.recv();
    }

    /// An error if it was asked to end by now.
    ///
    /// # Errors
    /// [`Stopped`].
    pub(super) fn check(&self) -> Result<(), Stopped> {
        match self.within(Duration::ZERO) {
            true => Err(Stopped),
            false => Ok(()),
        }
    }
}

/// The process was asked to end before something was done.
#[derive(Debug)]
pub(super) struct Stopped;

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted before everything was published")
    }
}

impl std::error::Error for Stopped {}
