//! The locks, condition variables and threads of this crate.
//!
//! They are those of the standard library. Under `--cfg cuvmm_shuttle` they are those of shuttle,
//! which runs a test under many orders of its threads. Two kinds are always those of the standard
//! library and named where they are used: operations in which no thread can be interrupted
//! (counters, `OnceLock` whose initialization takes no lock), and clocks.
//!
//! Shuttle has no time: a wait with a timeout lasts until another thread ends it. So a lost wake-up
//! shows as a deadlock, even if a timeout would hide it. Since the calls of a stand-in driver take
//! no time either, [`yield_point`] marks where a driver would be busy.

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

/// `true` if a wait may spin for a while. Under shuttle the number of steps would depend on the
/// machine's clock, and no schedule could be reproduced.
pub(crate) const SPINS: bool = cfg!(not(cuvmm_shuttle));

/// `true` if a wait with a timeout ends by itself.
pub(crate) const TIMES_OUT: bool = cfg!(not(cuvmm_shuttle));

/// A point at which other threads may run.
#[inline]
pub(crate) fn yield_point() {
    #[cfg(cuvmm_shuttle)]
    thread::sleep(std::time::Duration::ZERO);
}
