//! Signals that ask a process to end.
//!
//! The first signal is passed to a function. A second signal has its default action, so that a
//! stuck process can always be ended.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;

const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Installs handlers for the signals and calls a function with each, on its own thread.
///
/// # Errors
/// A handler cannot be installed or the thread not started.
pub fn forward(mut to: impl FnMut(i32) + Send + 'static) -> io::Result<()> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in SIGNALS {
        // The order matters: the first signal finds the flag unset, and sets it.
        flag::register_conditional_default(signal, Arc::clone(&asked))?;
        flag::register(signal, Arc::clone(&asked))?;
    }
    let mut signals = Signals::new(SIGNALS)?;
    thread::Builder::new().spawn(move || {
        for signal in signals.forever() {
            to(signal);
        }
    })?;
    Ok(())
}
