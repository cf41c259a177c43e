//! The memory that a [holder](crate::pool::Holder)'s request needs, which can change while it waits.

use crate::sync::atomic::{AtomicU64, Ordering};

/// The memory that a holder's request needs, as of its last attempt: it changes with what the holder uses.
/// The holder notes it after a refused attempt, and the pool reads it under its lock.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    more: AtomicU64,
    least: AtomicU64,
}

impl Needs {
    pub(crate) fn of(bytes: u64) -> Self {
        let needs = Self::default();
        needs.note((bytes, bytes));
        needs
    }

    /// Notes the new memory that the request lacks, and the bytes that the holder has at least once it is
    /// granted, whatever the holder gives up before.
    pub(crate) fn note(&self, (more, least): (u64, u64)) {
        self.more.store(more, Ordering::Relaxed);
        self.least.store(least.max(more), Ordering::Relaxed);
    }

    pub(crate) fn more(&self) -> u64 {
        self.more.load(Ordering::Relaxed)
    }

    pub(super) fn least(&self) -> u64 {
        self.least.load(Ordering::Relaxed)
    }
}
