//! A clock that orders memory by its last use.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts uses of a pool's memory. It has a cache line of its own, because threads that share
/// nothing else read it.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Clock(AtomicU64);

impl Clock {
    pub(super) fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn tick(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}
