//! Assignment of a store's lanes to copies.
//!
//! A copy takes all lanes of its store, and another copy waits until they return. The exception is
//! a copy that starts while the thread that has the lanes runs user code: that code may be waiting
//! for this very copy, on the same thread or on another. Such a copy uses a stream of its own.

use std::sync::PoisonError;

use super::{Lane, Shared};
use crate::error::CallError;
use crate::own::Stream;

/// The lanes of one copy, which return to the store on drop.
pub(super) struct Taken<'a> {
    shared: &'a Shared,
    pub(super) lanes: Vec<Lane>,
    /// The lane was created for this copy alone.
    extra: bool,
}

/// A guard for the time in which a copying thread runs user code.
struct UserCode<'a>(&'a Shared);

impl Shared {
    /// Takes all lanes of the store, or creates one if user code is running (`cuStreamCreate`).
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
            // Pageable memory then goes through the driver's own staging.
            true => vec![Lane::new(Stream::new(&self.device)?)],
        };
        Ok(Taken {
            shared: self,
            lanes,
            extra,
        })
    }

    /// Runs user code in the middle of a copy.
    pub(super) fn aside<T>(&self, run: impl FnOnce() -> T) -> T {
        self.lanes().aside += 1;
        self.lanes_changed.notify_all();
        let _aside = UserCode(self);
        run()
    }
}

impl Drop for UserCode<'_> {
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
