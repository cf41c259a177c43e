//! The end of the process: the threads of mappers and publishers stop before the driver goes, and heaps
//! give back what is free.
//!
//! The driver tears itself down in a function that the C library calls at the exit, and a thread that
//! is then within the driver may crash or hang. Functions registered later are called earlier, so the
//! one here is registered after the driver was opened.
//!
//! `unsafe` is used to register that function.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use crate::fork;

/// How long the exit waits. A thread may be within a call that the driver does not end.
const LONGEST: Duration = Duration::from_secs(2);

type End = Box<dyn FnOnce() + Send>;

static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Functions that are called at the exit.
struct Ends {
    /// They stop threads and wait for them.
    threads: Vec<End>,
    /// They give memory back. They are called last: what they take of the time may be all of it.
    memory: Vec<End>,
}

static ENDS: Mutex<Ends> = Mutex::new(Ends::NONE);

impl Ends {
    const NONE: Self = Self {
        threads: Vec::new(),
        memory: Vec::new(),
    };
}

fn ends() -> MutexGuard<'static, Ends> {
    ENDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a function that stops threads when the process exits, in a thread, if [`watch`] returned `true`.
pub(crate) fn at_end(stop: impl FnOnce() + Send + 'static) {
    ends().threads.push(Box::new(stop));
}

/// Calls a function that gives memory back when the process exits, behind those that stop threads, if
/// [`watch`] returned `true`.
pub(crate) fn at_last(give: impl FnOnce() + Send + 'static) {
    ends().memory.push(Box::new(give));
}

/// Registers the function that is called at the exit. Returns `false` if that fails: no thread that
/// calls the driver may be started then.
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

/// Calls the functions, in a thread. Waits for that for a bounded time.
fn stop() {
    let Ends { threads, memory } = std::mem::replace(&mut *ends(), Ends::NONE);
    if threads.is_empty() && memory.is_empty() {
        return;
    }
    let (done, stopped) = mpsc::channel();
    let stop = move || {
        threads.into_iter().chain(memory).for_each(|end| end());
        let _ = done.send(());
    };
    // Without a thread, dropping the closure leaves the others as they are.
    if thread::Builder::new().spawn(stop).is_ok() {
        let _ = stopped.recv_timeout(LONGEST);
    }
}

#[cfg(test)]
mod tests {
    use super::{at_end, at_last, stop};
    use std::sync::mpsc::channel;

    #[test]
    fn threads_stop_before_memory_is_given_back() {
        let (tell, told) = channel();
        let says = |what: &'static str| {
            let tell = tell.clone();
            move || tell.send(what).unwrap_or_default()
        };
        at_last(says("memory of the first heap"));
        at_end(says("publishers"));
        at_last(says("memory of the second heap"));
        at_end(says("mapper"));
        stop();
        let said: Vec<_> = told.try_iter().collect();
        assert_eq!(
            said,
            [
                "publishers",
                "mapper",
                "memory of the first heap",
                "memory of the second heap"
            ]
        );
        stop();
        assert!(told.try_recv().is_err(), "once");
    }
}
