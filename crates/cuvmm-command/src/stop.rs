//! Requests to end as an event to wait for (termination signals, or the end of standard input), so
//! that destructors run before the process ends.

use std::fmt;
use std::io::{self, Read as _};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::signals;

/// The event that the process is asked to end.
#[derive(Debug)]
pub struct Stop(Receiver<()>);

impl Stop {
    /// Installs handlers for the signals.
    ///
    /// # Errors
    /// A handler cannot be installed or the thread not started.
    pub fn on_signals() -> anyhow::Result<Self> {
        let (sender, receiver) = channel();
        signals::forward(move |_| {
            // Fails if the process is ending already and has dropped the receiver.
            let _ = sender.send(());
        })?;
        Ok(Self(receiver))
    }

    /// Reads standard input on a thread. Its end asks the process to end.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn on_input_end() -> io::Result<Self> {
        let (sender, receiver) = channel();
        thread::Builder::new().spawn(move || {
            while matches!(io::stdin().lock().read(&mut [0; 64]), Ok(read) if read > 0) {}
            drop(sender);
        })?;
        Ok(Self(receiver))
    }

    /// Waits up to `time` and returns `true` if the process is asked to end meanwhile.
    pub fn within(&self, time: Duration) -> bool {
        !matches!(self.0.recv_timeout(time), Err(RecvTimeoutError::Timeout))
    }

    /// Waits until the process is asked to end.
    pub fn wait(&self) {
        // The end of the input drops the sender.
        let _ = self.0.recv();
    }

    /// Checks that the process was not asked to end.
    ///
    /// # Errors
    /// [`Stopped`] if the process was asked to end.
    pub fn check(&self) -> Result<(), Stopped> {
        match self.within(Duration::ZERO) {
            true => Err(Stopped),
            false => Ok(()),
        }
    }
}

/// The error that the process was asked to end before the work was done.
#[derive(Debug)]
pub struct Stopped;

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted before the work was done")
    }
}

impl std::error::Error for Stopped {}
