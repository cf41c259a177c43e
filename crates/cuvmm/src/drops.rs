//! Failures of drops to release what they owned.
//!
//! Every drop of the library that can fail reports here, and nowhere else. Each failure is counted,
//! logged as an error, and passed to the hook that the user of the device has set. Two failures are
//! silent, because nothing is lost by them: those of a driver that is being torn down at exit, and
//! those in a forked child, which owns nothing.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::display::Bytes;
use crate::error::CallError;

/// An object that a drop failed to release. It is lost to the process until it exits.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DropFailure {
    /// The kind of object: "mapping", "physical", "reservation", "managed memory", "unified
    /// buffer", "stream", "event", "memory pool", "current memory pool", "pool allocation",
    /// "region", "registration", "attachment", "imported tensor",
    /// "imported allocation", "imported memory pool".
    pub what: &'static str,
    /// Its size in bytes; 0 if it has none.
    pub bytes: u64,
    /// The reason.
    pub error: CallError,
}

impl fmt::Display for DropFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "failed to release a dropped {} of {}: {}",
            self.what,
            Bytes(self.bytes),
            self.error
        )
    }
}

/// A hook called for each failure.
pub type DropHook = Arc<dyn Fn(&DropFailure) + Send + Sync>;

/// The counter and the hook of a device's drop failures.
#[derive(Default)]
pub(crate) struct Drops {
    count: AtomicU64,
    hook: Mutex<Option<DropHook>>,
}

impl Drops {
    /// Counts and logs a failure; returns the hook to call with it.
    pub(crate) fn count_failure(&self, failure: &DropFailure) -> Option<DropHook> {
        match &failure.error {
            CallError::Forked { .. } => return None,
            error if error.driver().is_some_and(|error| error.is_deinitialized()) => return None,
            _ => {}
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        log!(error, what = failure.what, bytes = failure.bytes, error = %failure.error, "drop failed");
        let hook = self.hook.lock().unwrap_or_else(PoisonError::into_inner);
        hook.clone()
    }

    pub(crate) fn take_hook(&mut self) -> Option<DropHook> {
        let hook = self.hook.get_mut();
        hook.unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub(crate) fn set_hook(&self, hook: Option<DropHook>) {
        let mut known = self.hook.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *known, hook);
        drop(known);
        // The old hook belongs to the user, and is dropped without the lock.
        drop(before);
    }
}
