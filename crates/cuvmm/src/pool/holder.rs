//! Owners of extents that are in no slot, such as heaps: what the pool asks of them.
//!
//! A holder belongs to one tenant, which is charged for its extents. It decides by itself what it
//! uses them for. The pool asks how much it could give back, and takes extents from it when another
//! request needs memory.

use std::sync::Arc;

use crate::error::CallError;
use crate::region::{Space, Unmapped};

/// The number of a holder, never used twice in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HolderId(pub(crate) u64);

impl HolderId {
    /// The number of no holder.
    pub(crate) const NONE: Self = Self(u64::MAX);
}

/// Figures of a holder, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HolderFigures {
    /// Bytes of all extents.
    pub(crate) held: u64,
    /// Bytes in use, as requested.
    pub(crate) in_use: u64,
    /// Bytes beyond these that nothing else can use.
    pub(crate) padding: u64,
    /// Free bytes whose work is not known to be complete.
    pub(crate) pending_free: u64,
    /// Bytes of extents that are wholly free.
    pub(crate) idle: u64,
}

impl HolderFigures {
    /// Returns the free bytes whose work is complete.
    pub(crate) const fn cached(&self) -> u64 {
        self.held - self.in_use - self.padding - self.pending_free
    }

    /// Returns the free bytes in extents with bytes in use.
    pub(crate) const fn stranded(&self) -> u64 {
        self.cached() + self.pending_free - self.idle
    }
}

/// Extents that left a holder.
#[derive(Debug, Default)]
pub(crate) struct Given {
    /// The extents, which no mapping of the holder shows any more.
    pub(crate) extents: Vec<Unmapped>,
    /// The number of mappings that were unmapped.
    pub(crate) mappings: u64,
    /// The error of the driver that ended it.
    pub(crate) error: Option<CallError>,
}

impl Given {
    pub(crate) fn bytes(&self) -> u64 {
        self.extents.iter().map(Unmapped::size).sum()
    }
}

/// An owner of extents. Its lock, if it has one, is taken under the pool's lock, never the other
/// way round.
pub(crate) trait Holder: Send + Sync {
    /// Returns the current figures. Makes no driver call.
    fn figures(&self) -> HolderFigures;

    /// Returns the sizes of the extents that [`give`](Self::give) can take out now, the least
    /// recently used first. Polls fences if `polls` is `true`. Called under the pool's lock.
    fn reclaimable(&self, polls: bool) -> Vec<u64>;

    /// Takes out extents that are wholly free and whose work is complete, the least recently used
    /// first, until they have `wanted` bytes (`cuMemUnmap`). Called without the pool's lock.
    fn give(&self, wanted: u64) -> Given;

    /// Unmaps mappings that nothing uses (`cuMemUnmap`), down to a number that is worth keeping.
    /// Returns how many it unmapped. Polls nothing. Called without the pool's lock, by the mapper.
    fn tidy(&self) -> u64;

    /// Waits until the work on all free bytes is complete. Called without the pool's lock.
    fn settle(&self) -> Result<(), CallError>;

    /// Sets whether memory that becomes free is reported to the pool at once, since the pool has to
    /// take it back.
    fn report_freed(&self, yes: bool);

    /// Refuses all further requests: the tenant is unregistered.
    fn close(&self);

    /// Takes out the space, at the end of the holder. Nothing is mapped in it, except what is stuck.
    fn take_space(&self) -> Option<Space>;
}

/// A holder, and what its tenant is charged for it.
pub(crate) struct Held {
    pub(crate) id: HolderId,
    pub(crate) holder: Arc<dyn Holder>,
    /// Bytes of extents, including those on their way to the holder or from it.
    pub(crate) bytes: u64,
    pub(crate) mappings: u64,
    pub(crate) addresses: u64,
    /// Set when its owner is gone: what it still has goes to the pool as its work is complete.
    pub(crate) ended: bool,
    /// Set while mappings of it are unmapped that it is still charged for. It stays until then.
    pub(crate) tidied: bool,
}

impl Held {
    /// Returns the bytes that can be reclaimed once work is complete that is not known to be.
    pub(crate) fn pending(&self) -> u64 {
        let ready: u64 = self.holder.reclaimable(false).iter().sum();
        self.holder.figures().idle.saturating_sub(ready)
    }

    /// Returns the bytes that cannot be reclaimed, however long a request waits for the GPU.
    pub(crate) fn kept(&self) -> u64 {
        self.bytes - self.holder.figures().idle.min(self.bytes)
    }
}
