//! The end of the process: threads of mappers and publishers stop before the driver shuts down.
//!
//! The driver shuts down in a function that the C library calls at the exit; a thread within the
//! driver may then crash or hang. Functions registered later are called earlier, so the function
//! here is registered after the driver was opened.
//!
//! `unsafe` is used to register the function.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use crate::fork;

/// The longest wait of the exit for threads: one may be within a call that the driver does not end.
const LONGEST: Duration = Duration::from_secs(2);

type End = Box<dyn FnOnce() + Send>;

static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Functions that stop threads at the exit and wait for them.
static ENDS: Mutex<Vec<End>> = Mutex::new(Vec::new());

/// Adds a function to call at the exit, on its own thread, if [`watch`] returned `true`.
pub(crate) fn at_end(end: impl FnOnce() + Send + 'static) {
    let mut ends = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
    ends.push(Box::new(end));
}

/// Registers the exit function. After `false`, no thread that calls the driver may be started.
pub(crate) fn watch() -> bool {
    if REGISTERED.swap(true, Ordering::Relaxed) {
        return true;
    }
    // SAFETY: the function stays loaded: the C library calls it when the library is unloaded.
    let registered = unsafe { libc::atexit(at_exit) } == 0;
    REGISTERED.store(registered, Ordering::Relaxed);
    registered
}

extern "C" fn at_exit() {
    // A forked child has none of the threads, and may find the lock held.
    if !fork::is_child() {
        crate::edge::guard((), stop);
    }
}

/// Stops all threads. Waits for them for at most [`LONGEST`].
fn stop() {
    let ends = std::mem::take(&mut *ENDS.lock().unwrap_or_else(PoisonError::into_inner));
    if ends.is_empty() {
        return;
    }
    let (done, stopped) = mpsc::channel();
    let stop = move || {
        ends.into_iter().for_each(|end| end());
        let _ = done.send(());
    };
    // If no thread can be spawned, the other threads are left running.
    if thread::Builder::new().spawn(stop).is_ok() {
        let _ = stopped.recv_timeout(LONGEST);
    }
}
