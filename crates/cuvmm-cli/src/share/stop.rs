//! Ctrl-C and its like, as something to wait for: what is left behind is cleaned up by its owners.
//!
//! The first signal is waited for; a second one does what it does to a program that handles none. So a
//! process that is stuck can always be ended.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;

/// The signals that ask a process to end.
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Heard of when the process is asked to end.
#[derive(Debug)]
pub(super) struct Stop(Receiver<()>);

impl Stop {
    /// Takes the signals over.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn on_signals() -> anyhow::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in SIGNALS {
            // In this order: the first signal finds the flag unset, and sets it.
            flag::register_conditional_default(signal, Arc::clone(&asked))?;
            flag::register(signal, Arc::clone(&asked))?;
        }
        let mut signals = Signals::new(SIGNALS)?;
        let (sender, receiver) = channel();
        thread::Builder::new().spawn(move || {
            for _ in signals.forever() {
                // The receiver is gone when the process is ending already.
                let _ = sender.send(());
            }
        })?;
        Ok(Self(receiver))
    }

    /// Waits for `time`, and returns `true` if a signal to end arrives meanwhile.
    pub(super) fn within(&self, time: Duration) -> bool {
        !matches!(self.0.recv_timeout(time), Err(RecvTimeoutError::Timeout))
    }

    /// Waits until it is.
    pub(super) fn wait(&self) {
        // The thread never ends, and so the sender is never dropped.
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
