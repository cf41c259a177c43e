//! The collector: a function that frees unreachable tensors when memory is short, such as Python's
//! garbage collector.
//!
//! The collector takes the interpreter's lock, so it is called with no lock of this library held.
//! PyTorch then holds no lock that guards its pluggable allocator; the package's README names other
//! locks that may be held. The collector is never called for `torch.cuda.MemPool`, whose lock
//! PyTorch holds.
//!
//! `unsafe` is used to call the collector.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::{entered, fork, graphs};

/// Advice in errors for a lack of memory without a collection.
pub(crate) const ADVICE: &str =
    ". Tensors in reference cycles keep their memory until gc.collect()";

pub(crate) type Collector = unsafe extern "C" fn();

struct State {
    collector: Option<Collector>,
    /// `true` from `set(None)` until a collector is set: none is called meanwhile.
    has_ended: bool,
    running: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    collector: None,
    has_ended: false,
    running: 0,
});

/// Notified when a thread has left a collector.
static LEFT: Condvar = Condvar::new();

thread_local! {
    /// `true` while this thread is within a collector, or another function of [`within`].
    static COLLECTS: Cell<bool> = const { Cell::new(false) };
}

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the collector. `None` ends all collections, also with another collector, and waits until no
/// other thread is within one, so that an interpreter can end.
pub(crate) fn set(collector: Option<Collector>) {
    // A forked child has none of the threads, and may find the lock held.
    if fork::is_child() {
        return;
    }
    let mut state = lock();
    state.collector = collector;
    state.has_ended = collector.is_none();
    let own = usize::from(is_within());
    while state.has_ended && state.running > own {
        state = LEFT.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Returns `true` if this thread is within a function of [`within`], or the collector.
pub(crate) fn is_within() -> bool {
    COLLECTS.with(Cell::get)
}

struct Within;

impl Within {
    /// Enters the function that `find` returns. Returns `None` if this thread is within one already,
    /// as a finalizer that allocates is, or if all have ended.
    fn enter<T>(find: impl FnOnce(&State) -> Option<T>) -> Option<(Self, T)> {
        if is_within() {
            return None;
        }
        let mut state = lock();
        if state.has_ended {
            return None;
        }
        let function = find(&state)?;
        state.running += 1;
        COLLECTS.with(|collects| collects.set(true));
        Some((Self, function))
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

/// Calls another function of the program, under the rules for the collector: not from within one, and
/// not once collections have ended.
pub(crate) fn within(call: impl FnOnce()) {
    if let Some((_within, ())) = Within::enter(|_| Some(())) {
        call();
    }
}

/// Collects garbage with the collector that was set, for a failed request outside of pools. Returns
/// `true` if the request should be tried again.
#[cold]
pub(crate) fn helps(error: &Error) -> bool {
    !entered::is_entered() && collects(error, None)
}

/// Collects garbage with `collector` or the one that was set, for a failed request. Returns `true`
/// if the request should be tried again.
///
/// A collection may destroy streams, events and graphs, so none begins while a graph may be
/// captured.
#[cold]
pub(crate) fn collects(error: &Error, collector: Option<Collector>) -> bool {
    if !error.is_out_of_memory() || fork::is_child() {
        return false;
    }
    let enter = |state: &State| collector.or(state.collector);
    let Some((_within, collector)) = Within::enter(enter) else {
        return false;
    };
    if graphs::waiting().is_none() {
        return false;
    }
    // SAFETY: its setter permits calls from any thread until it is replaced.
    unsafe { collector() };
    true
}
