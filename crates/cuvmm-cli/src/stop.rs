//! Termination signals as an event to wait for, so that destructors run before the process ends.

use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use crate::signals;

/// The event that a signal asks the process to end.
#[derive(Debug)]
pub(crate) struct Stop(Receiver<()>);

impl Stop {
    /// Installs handlers for the signals.
    ///
    /// # Errors
    /// The error of installing a handler or of starting the thread.
    pub(crate) fn on_signals() -> anyhow::Result<Self> {
        let (sender, receiver) = channel();
        signals::forward(move |_| {
            // Fails if the process is ending already and has dropped the receiver.
            let _ = sender.send(());
        })?;
        Ok(Self(receiver))
    }

    /// Waits up to `time` and returns `true` if a signal asks the process to end meanwhile.
    pub(crate) fn within(&self, time: Duration) -> bool {
        !matches!(self.0.recv_timeout(time), Err(RecvTimeoutError::Timeout))
    }

    /// Waits until a signal asks the process to end.
    pub(crate) fn wait(&self) {
        // The thread never ends, so the sender is never dropped.
        let _ = self.0.recv();
    }

    /// Checks that no signal has asked the process to end.
    ///
    /// # Errors
    /// [`Stopped`] if a signal has.
    pub(crate) fn check(&self) -> Result<(), Stopped> {
        match self.within(Duration::ZERO) {
            true => Err(Stopped),
            false => Ok(()),
        }
    }
}

/// The error that a signal asked the process to end before the work was done.
#[derive(Debug)]
pub(crate) struct Stopped;

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted before the work was done")
    }
}

impl std::error::Error for Stopped {}
