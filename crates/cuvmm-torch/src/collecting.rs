//! A function that frees unreachable tensors when memory is short: Python's garbage collector.
//!
//! It takes the interpreter's lock, so no lock of this library is held when it is called. PyTorch holds
//! none that guards its pluggable allocator then; the package's README says which others may be held.
//! It is never called for `torch.cuda.MemPool`, whose lock PyTorch holds.
//!
//! `unsafe` is used to call the function.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::{entered, fork, graphs};

/// Advice in errors for a lack of memory where no garbage was collected.
pub(crate) const ADVICE: &str =
    ". Tensors in reference cycles keep their memory until gc.collect()";

/// A function of C that collects garbage.
pub(crate) type Collector = unsafe extern "C" fn();

struct State {
    collector: Option<Collector>,
    /// `true` from the time when none was set until one is set: no other function is called either.
    has_ended: bool,
    /// The number of threads that are within it.
    running: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    collector: None,
    has_ended: false,
    running: 0,
});

/// Notified when a thread has left the function.
static LEFT: Condvar = Condvar::new();

thread_local! {
    /// `true` while this thread is within the function.
    static COLLECTS: Cell<bool> = const { Cell::new(false) };
}

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the function. Or ends all collections, also those with another function, and waits until no other
/// thread is within one, so that an interpreter can end.
pub(crate) fn set(collector: Option<Collector>) {
    // A forked child has none of the threads, and may find the lock held.
    if fork::is_child() {
        return;
    }
    let mut state = lock();
    state.collector = collector;
    state.has_ended = collector.is_none();
    let own = usize::from(COLLECTS.with(Cell::get));
    while state.has_ended && state.running > own {
        state = LEFT.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

/// A thread that is within the function.
struct Within;

impl Within {
    /// Enters a function, or the one that was set, unless this thread is within one already, as a
    /// finalizer is that allocates.
    fn enter(collector: Option<Collector>) -> Option<(Self, Collector)> {
        if COLLECTS.with(Cell::get) {
            return None;
        }
        let mut state = lock();
        if state.has_ended {
            return None;
        }
        let collector = collector.or(state.collector)?;
        state.running += 1;
        COLLECTS.with(|collects| collects.set(true));
        Some((Self, collector))
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        COLLECTS.with(|collects| collects.set(false));
        // A finalizer may have forked, and a thread that the child lacks may have held the lock.
        if fork::is_child() {
            return;
        }
        lock().running -= 1;
        LEFT.notify_all();
    }
}

/// Collects garbage for a request of PyTorch outside of pools that has failed, with the function that was
/// set. Returns `true` if the request is to be tried again.
#[cold]
pub(crate) fn helps(error: &Error) -> bool {
    !entered::is_entered() && collects(error, None)
}

/// Collects garbage for a request that has failed, with a function or the one that was set. Returns `true`
/// if the request is to be tried again.
///
/// A collection may destroy streams, events and graphs, so there is none while a graph may be captured.
#[cold]
pub(crate) fn collects(error: &Error, collector: Option<Collector>) -> bool {
    if !error.is_out_of_memory() || fork::is_child() {
        return false;
    }
    let Some((_within, collector)) = Within::enter(collector) else {
        return false;
    };
    if graphs::waiting().is_none() {
        return false;
    }
    // SAFETY: who set it has promised that it may be called from any thread until it is set anew.
    unsafe { collector() };
    true
}
