//! Guards over the pools of all devices while a graph may be captured.
//!
//! A pool under a guard makes no driver call that could break a capture: see
//! [`cuvmm::pool::CaptureGuard`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuvmm::Pool;
use cuvmm::pool::CaptureGuard;

/// Set while a graph may be captured.
static WANTED: AtomicBool = AtomicBool::new(false);

struct State {
    /// The pools of all devices. They are never dropped.
    pools: Vec<Pool>,
    /// The guards of the first pools: of all or of none, unless a thread is taking them.
    guards: Vec<CaptureGuard>,
}

static STATE: Mutex<State> = Mutex::new(State {
    pools: Vec::new(),
    guards: Vec::new(),
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a pool, before memory is taken from it. It gets a guard at once if a graph may be captured.
pub(crate) fn add(pool: &Pool) {
    lock().pools.push(pool.clone());
    apply();
}

/// Says whether a graph may be captured. Returns `true` if [`apply`] must be called, once the caller
/// holds no lock that an operation of a pool could need.
pub(crate) fn want(wanted: bool) -> bool {
    WANTED.swap(wanted, Ordering::SeqCst) != wanted
}

/// Takes the guards of all pools, or drops them, as was said last. Waits for operations of the pools
/// that began without a guard, and for threads that do the same.
pub(crate) fn apply() {
    let mut state = lock();
    if WANTED.load(Ordering::SeqCst) {
        let without = state.pools.iter().skip(state.guards.len());
        let taken: Vec<CaptureGuard> = without.map(Pool::capture_guard).collect();
        state.guards.extend(taken);
        return;
    }
    state.guards.clear();
}
