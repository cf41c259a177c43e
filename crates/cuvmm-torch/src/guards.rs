//! Guards over the pools of all devices while a graph may be captured: see
//! [`cuvmm::pool::CaptureGuard`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuvmm::Pool;
use cuvmm::pool::CaptureGuard;

/// Set while a graph may be captured.
static WANTED: AtomicBool = AtomicBool::new(false);

struct State {
    /// The pools of all devices, which are never dropped.
    pools: Vec<Pool>,
    /// The guards of the first pools: of all or none, unless a thread is taking them.
    guards: Vec<CaptureGuard>,
}

static STATE: Mutex<State> = Mutex::new(State {
    pools: Vec::new(),
    guards: Vec::new(),
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a pool before memory is taken from it, with a guard if a graph may be captured.
pub(crate) fn add(pool: &Pool) {
    lock().pools.push(pool.clone());
    apply();
}

/// Sets whether a graph may be captured. After `true` the caller must call [`apply`] once it holds
/// no lock that an operation of a pool could need.
pub(crate) fn want(wanted: bool) -> bool {
    WANTED.swap(wanted, Ordering::SeqCst) != wanted
}

/// Takes or drops the guards of all pools, as [`want`] has set. Waits for pool operations that
/// began without a guard, and for threads in this function.
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
