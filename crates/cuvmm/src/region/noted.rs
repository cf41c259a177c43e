//! Work that may use a region's memory and whose streams the region's owner need not name: the
//! fills and copies that the region has queued, the work of streams that were recorded through its
//! registrations, and work that used its tensors before they were dropped. Memory is withdrawn behind this work as well.
//!
//! The lock here is a leaf, and no user code runs under it.

use std::sync::PoisonError;

use crate::deferred::Section;
use crate::extents::{Fence, Uses};
use crate::own::Stream;
use crate::sync::{Mutex, MutexGuard};

#[derive(Debug)]
pub(super) struct Noted(Mutex<Work>);

#[derive(Debug)]
struct Work {
    /// Covers the fills, the copies and the use of tensors, each up to the point at which it was noted.
    queued: Fence,
    /// The streams on which more work may be queued at any time.
    recorded: Uses,
}

impl Noted {
    pub(super) const fn none() -> Self {
        Self(Mutex::new(Work {
            queued: Fence::complete(),
            recorded: Uses::none(),
        }))
    }

    /// Notes work that is queued by now.
    pub(super) fn queued(&self, work: Fence) {
        // The keep-alive of a stream is dropped without the lock.
        let _section = Section::enter();
        self.work().queue(work);
    }

    /// Notes that work of a stream uses the memory, now and later.
    pub(super) fn record(&self, stream: &Stream) {
        let _section = Section::enter();
        let mut work = self.work();
        let ended = work.recorded.add(stream);
        work.queue(ended);
    }

    /// The recorded streams; `None` if all work of a device counts as recorded.
    pub(super) fn recorded(&self) -> Option<Vec<Stream>> {
        self.work().recorded.streams().map(<[Stream]>::to_vec)
    }

    pub(super) fn fence(&self) -> Fence {
        let work = self.work();
        let mut fence = work.recorded.end();
        fence.merge(work.queued.clone());
        fence
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Work {
    fn queue(&mut self, fence: Fence) {
        self.queued.merge(fence);
        self.queued.limit();
    }
}
