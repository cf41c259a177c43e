//! The captures on a device's context that this library knows of: those under a live
//! [capture guard](crate::pool::CaptureGuard).
//!
//! `cuCtxSynchronize` and `cuCtxRecordEvent` break every capture of the context, whatever its mode
//! and the mode of the calling thread. So the library makes them for itself only through
//! [`Device::beside_captures`], which a capture guard excludes. A capture without a guard is not
//! known here.
//!
//! Keeps I-26.

use std::sync::PoisonError;

use super::Device;
use crate::error::CallError;
use crate::sync::{Condvar, Mutex, MutexGuard};

#[derive(Debug, Default)]
pub(super) struct Captures {
    counts: Mutex<Counts>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    guards: u64,
    /// The running calls that concern the whole context.
    calls: u64,
}

impl Captures {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running call that concerns the whole context.
struct Running<'a>(&'a Captures);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().calls -= 1;
        self.0.ended.notify_all();
    }
}

impl Device {
    /// Counts a capture guard, and waits for the running calls that concern the whole context.
    pub(crate) fn begin_guard(&self) {
        let captures = &self.shared.captures;
        let mut counts = captures.lock();
        counts.guards += 1;
        while counts.calls > 0 {
            let ended = captures.ended.wait(counts);
            counts = ended.unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn end_guard(&self) {
        self.shared.captures.lock().guards -= 1;
    }

    /// Refuses an operation that concerns the whole context while a capture guard lives.
    pub(crate) fn check_unguarded(&self) -> Result<(), CallError> {
        self.own_process()?;
        match self.shared.captures.lock().guards {
            0 => Ok(()),
            _ => Err(CallError::Capturing),
        }
    }

    /// Makes a call that concerns the whole context, unless a capture guard lives. No guard begins
    /// before it returns.
    pub(super) fn beside_captures<T>(
        &self,
        call: impl FnOnce() -> Result<T, CallError>,
    ) -> Result<T, CallError> {
        self.own_process()?;
        let captures = &self.shared.captures;
        let mut counts = captures.lock();
        if counts.guards > 0 {
            return Err(CallError::Capturing);
        }
        counts.calls += 1;
        drop(counts);
        let _running = Running(captures);
        call()
    }
}
