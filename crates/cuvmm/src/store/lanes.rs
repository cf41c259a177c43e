//! Who copies with which lanes.
//!
//! A copy has all lanes of its store, and another one waits until they are back. But not while the
//! thread that has them is in the user's code: that may be waiting for just this copy, on the same
//! thread or on another. Such a copy makes do with a stream of its own.

use std::sync::PoisonError;

use super::{Lane, Shared};
use crate::error::CallError;
use crate::own::Stream;

/// The lanes of one copy. They come back when this is dropped.
pub(super) struct Taken<'a> {
    shared: &'a Shared,
    pub(super) lanes: Vec<Lane>,
    /// Made for this copy alone.
    extra: bool,
}

/// A stay in the user's code.
struct Aside<'a>(&'a Shared);

impl Shared {
    /// Lanes to copy with: all of the store, or one that is made now (`cuStreamCreate`).
    pub(super) fn take_lanes(&self) -> Result<Taken<'_>, CallError> {
        let mut lanes = self.lanes();
        while lanes.free.is_empty() && lanes.aside == 0 {
            let waited = self.lanes_changed.wait(lanes);
            lanes = waited.unwrap_or_else(PoisonError::into_inner);
        }
        let free = std::mem::take(&mut lanes.free);
        drop(lanes);
        let extra = free.is_empty();
        let lanes = match extra {
            false => free,
            // What ordinary memory there is goes through the driver's own arena.
            true => vec![Lane::new(Stream::new(&self.device)?)],
        };
        Ok(Taken {
            shared: self,
            lanes,
            extra,
        })
    }

    /// Runs the user's code in the middle of a copy.
    pub(super) fn aside<T>(&self, run: impl FnOnce() -> T) -> T {
        self.lanes().aside += 1;
        self.lanes_changed.notify_all();
        let _aside = Aside(self);
        run()
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        let mut lanes = self.0.lanes();
        lanes.aside = lanes.aside.saturating_sub(1);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.extra {
            return;
        }
        self.shared.lanes().free = std::mem::take(&mut self.lanes);
        self.shared.lanes_changed.notify_all();
    }
}
