//! An allocation, and the values that it keeps alive.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuvmm_driver::DeviceAddress;

use super::cache::{Place, StreamCache};
use super::core::{Core, PINNED, REPORTS};
use crate::error::CallError;
use crate::own::{Stream, StreamKeys};
use crate::pool::{HolderId, Tenant};

/// A heap. It ends when this value is dropped, with the last handle and the last allocation.
pub(super) struct Shared {
    pub(super) core: Arc<Core>,
    pub(super) tenant: Tenant,
    pub(super) holder: HolderId,
}

impl Shared {
    /// Lets the pool reclaim free memory.
    pub(super) fn end_graphs(&self) {
        let core = &self.core;
        if core.device.is_forked() {
            return;
        }
        core.set(PINNED, false);
        self.tenant.note_freed(core.has(REPORTS));
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.core.device.is_forked() {
            // The store takes the contents of a sleeping heap back without the heap's lock.
            let saved = self.core.lock().rest.take_saved();
            drop(saved);
            self.core.set(PINNED, false);
            self.tenant.detach(self.holder);
        }
    }
}

/// A heap for the allocations of one stream. Each stream's references are counted on cache lines of
/// their own, so that threads with streams of their own do not contend.
#[repr(align(128))]
pub(super) struct Lane {
    shared: Arc<Shared>,
    index: usize,
}

pub(super) struct Lanes {
    pub(super) shared: Arc<Shared>,
    lanes: Box<[Arc<Lane>; StreamKeys::PLACES]>,
}

impl Lanes {
    pub(super) fn new(shared: Shared) -> Self {
        let shared = Arc::new(shared);
        let lane = |index| {
            let shared = Arc::clone(&shared);
            Arc::new(Lane { shared, index })
        };
        Self {
            lanes: Box::new(std::array::from_fn(lane)),
            shared,
        }
    }

    #[inline]
    pub(super) fn of(&self, stream: &Stream) -> (&Arc<Lane>, &StreamCache) {
        let caches = &self.shared.core.caches;
        let index = caches.index_of(stream);
        (StreamKeys::at(&self.lanes, index), caches.at(index))
    }
}

/// Memory that a [`Heap`](super::Heap) allocated. Its address is fixed for life.
///
/// Dropping the allocation frees the memory in the order of its stream, without waiting. The drop
/// makes a driver call only if memory is to go back to the device: because its tenant has ended, a
/// limit was lowered, or the heap has ended and this was its last allocation.
#[doc(alias = "free")]
#[doc(alias = "deallocate")]
#[must_use = "the memory is freed when this is dropped"]
pub struct Allocation {
    lane: Arc<Lane>,
    place: Place,
    /// Set when another stream uses the memory too.
    is_shared: AtomicBool,
}

impl Allocation {
    #[inline]
    pub(super) fn new(lane: &Arc<Lane>, place: Place) -> Self {
        Self {
            lane: Arc::clone(lane),
            place,
            is_shared: AtomicBool::new(false),
        }
    }

    fn core(&self) -> &Core {
        &self.lane.shared.core
    }

    #[cfg(target_os = "linux")]
    pub(super) fn heap(&self) -> &Shared {
        &self.lane.shared
    }

    /// Returns the first address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        DeviceAddress(self.place.at)
    }

    /// Returns the size in bytes, as requested.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.place.size
    }

    /// Records that work of another stream uses the memory. The memory is then reused only when the
    /// work that both streams have queued at its drop is complete, or behind that work.
    ///
    /// # Errors
    /// [`CallError::WrongDriver`] for a stream of a device that has [no
    /// access](super::HeapBuilder::open_to).
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        let core = self.core();
        core.device.own_process()?;
        let mut state = core.lock();
        if !state.is_open_to(self.place.at, stream.device()) {
            return Err(CallError::WrongDriver);
        }
        let id = state.streams.id(stream);
        let uses = state.uses.get(&self.place.at);
        let known = uses.is_some_and(|uses| uses.contains(&id));
        if id != self.place.home && !known {
            state.streams.count(id, true);
            state.uses.entry(self.place.at).or_default().push(id);
            self.is_shared.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    #[cold]
    fn free(&self) {
        let Shared { core, tenant, .. } = &*self.lane.shared;
        let mut state = core.lock();
        state.drain(core.caches.at(self.lane.index), self.place.small);
        state.end(self.place);
        drop(state);
        let reports = core.has(REPORTS);
        if reports || tenant.is_awaited() {
            tenant.note_freed(reports);
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Shared { core, tenant, .. } = &*self.lane.shared;
        if core.device.is_forked() {
            return;
        }
        let is_shared = self.is_shared.load(Ordering::Relaxed);
        let refuses = || core.has_flags() || tenant.is_awaited();
        let cache = core.caches.at(self.lane.index);
        if is_shared || cache.put(self.place, refuses).is_err() {
            self.free();
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation")
            .field("address", &self.address())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}
