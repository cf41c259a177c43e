//! The locks, signals and threads of this crate.
//!
//! They are the standard library's. Under `--cfg cuvmm_shuttle` they are shuttle's, which runs a
//! test under one order of its threads after another. Two kinds are the standard library's always,
//! to be named where they are used: what no thread can be interrupted in (counters, `OnceLock`
//! whose making takes no lock), and clocks.
//!
//! Shuttle has no time: there a wait with a timeout lasts until somebody ends it. So a wake-up that
//! is lost shows as a deadlock, even where a timeout would hide it. And since a stand-in's calls
//! take no time either, [`let_others_run`] says where a driver would be busy.

#[cfg(not(cuvmm_shuttle))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread, thread_local,
};

#[cfg(cuvmm_shuttle)]
pub(crate) use shuttle::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread, thread_local,
};

/// Whether a wait may spin for a while. Under shuttle that would be a number of steps which the
/// machine's clock chooses, and no schedule could be run again.
pub(crate) const SPINS: bool = cfg!(not(cuvmm_shuttle));

/// Whether a wait with a timeout ends by itself.
pub(crate) const TIMES_OUT: bool = cfg!(not(cuvmm_shuttle));

/// A moment in which other threads may run.
#[inline]
pub(crate) fn let_others_run() {
    #[cfg(cuvmm_shuttle)]
    thread::sleep(std::time::Duration::ZERO);
}
