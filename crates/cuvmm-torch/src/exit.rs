//! The end of the process: the mappers' threads stop before the driver goes.
//!
//! The driver tears itself down in a function that the C library calls at the exit, and a thread that
//! is then within the driver may crash or hang. Functions registered later are called earlier, so the
//! one here is registered after the driver was opened.
//!
//! `unsafe` is used to register that function.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use cuvmm::Mapper;

use crate::fork;

/// How long the exit waits for the mappers. One may be within a call that the driver does not end.
const LONGEST: Duration = Duration::from_secs(2);

static REGISTERED: AtomicBool = AtomicBool::new(false);

/// The mappers of all devices.
static MAPPERS: Mutex<Vec<Mapper>> = Mutex::new(Vec::new());

/// Keeps a mapper until the process exits.
pub(crate) fn keep(mapper: Mapper) {
    MAPPERS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(mapper);
}

/// Registers the function that is called at the exit. Returns `false` if that fails: no mapper may
/// be started then.
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
    // A forked child has no mapper's thread, and may find the lock held.
    if !fork::is_child() {
        crate::edge::guard((), stop);
    }
}

/// Stops all mappers. Waits for them for a bounded time.
fn stop() {
    let mappers = std::mem::take(&mut *MAPPERS.lock().unwrap_or_else(PoisonError::into_inner));
    if mappers.is_empty() {
        return;
    }
    let (done, stopped) = mpsc::channel();
    let stop = move || {
        drop(mappers);
        let _ = done.send(());
    };
    // Without a thread, dropping the closure stops them, and waits as long as it takes.
    if thread::Builder::new().spawn(stop).is_ok() {
        let _ = stopped.recv_timeout(LONGEST);
    }
}
