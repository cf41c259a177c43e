//! Owners of memory that is in no slot: what the pool asks of them.
//!
//! A holder belongs to one tenant, which is charged for its memory. It decides by itself what it
//! uses the memory for. The pool asks how much it could give back, and takes memory from it when
//! another request needs it. Heaps have extents, which come from the pool and go back to it. Memory
//! pools of the driver get their memory from the driver and return it there, within what is charged
//! for them.

use std::sync::Arc;

use crate::error::CallError;
use crate::extents::{Space, Unmapped};

/// The number of a holder, never used twice in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HolderId(pub(crate) u64);

/// Figures of a holder, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HolderFigures {
    /// Bytes of all extents, or that memory pools of the driver may hold.
    pub(crate) held: u64,
    /// Bytes in use, as requested.
    pub(crate) in_use: u64,
    /// Bytes beyond these that nothing else can use.
    pub(crate) padding: u64,
    /// Free bytes whose work is not known to be complete.
    pub(crate) pending_free: u64,
    /// Bytes of extents that are wholly free, or that memory pools of the driver do not need.
    pub(crate) idle: u64,
    /// Bytes that memory pools of the driver were last seen to hold.
    pub(crate) obtained: u64,
    /// Bytes in use that only graphs need, which may be launched again.
    pub(crate) kept: u64,
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

/// Memory that left a holder.
#[derive(Debug, Default)]
pub(crate) struct Given {
    /// The extents, which no mapping of the holder shows any more.
    pub(crate) extents: Vec<Unmapped>,
    /// Bytes that memory pools of the driver cannot hold any more.
    pub(crate) returned: u64,
    /// Bytes that memory pools of the driver were seen to hold beyond the charge. They are to be
    /// charged, and then [acknowledged](Holder::acknowledge).
    pub(crate) overdrawn: u64,
    /// The number of mappings that were unmapped.
    pub(crate) mappings: u64,
    /// The error of the driver that ended it.
    pub(crate) error: Option<CallError>,
}

impl Given {
    pub(crate) fn bytes(&self) -> u64 {
        self.extents.iter().map(Unmapped::size).sum::<u64>() + self.returned
    }

    /// Returns `true` if nothing left the holder.
    pub(crate) const fn is_nothing(&self) -> bool {
        self.extents.is_empty() && self.returned == 0 && self.mappings == 0
    }
}

/// An owner of memory. Its lock, if it has one, is taken under the pool's lock, never the other
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

    /// Gives up what is not worth keeping: mappings that nothing uses (`cuMemUnmap`), or memory of
    /// the driver's pools that was freed meanwhile. Polls no fence. Called without the pool's lock,
    /// by the mapper.
    fn tidy(&self) -> Given;

    /// Returns `true` if the mapper should soon tidy again.
    fn is_untidy(&self) -> bool {
        false
    }

    /// Returns `true` if the memory is in memory pools of the driver. Such a holder is asked for
    /// nothing while a capture guard lives.
    fn is_of_driver(&self) -> bool {
        false
    }

    /// Reads the figures that only the driver knows. Called without the pool's lock, before memory
    /// is reclaimed.
    fn refresh(&self) -> Given {
        Given::default()
    }

    /// Notes that bytes which the driver held beyond the charge are charged now. Called without the
    /// pool's lock.
    fn acknowledge(&self, _bytes: u64) {}

    /// Returns the bytes that the driver has given out. Called without the pool's lock.
    fn obtained(&self) -> u64 {
        0
    }

    /// Returns `true` while more is being charged for it. Its own tenant takes nothing from it then.
    fn is_growing(&self) -> bool {
        false
    }

    /// Waits until the work on all free bytes is complete. Called without the pool's lock.
    fn settle(&self) -> Result<(), CallError>;

    /// Sets whether memory that becomes free is reported to the pool at once, since the pool has to
    /// take it back.
    fn report_freed(&self, yes: bool);

    /// Refuses all further requests: the tenant is unregistered.
    fn close(&self);

    /// Takes out the spaces that the holder does not use: nothing is mapped in them. Called under the
    /// pool's lock.
    fn take_free_spaces(&self) -> Vec<Space> {
        Vec::new()
    }

    /// Takes out all spaces, at the end of the holder. Nothing is mapped in them, except what is stuck.
    fn take_spaces(&self) -> Vec<Space> {
        Vec::new()
    }
}

/// A holder, and what its tenant is charged for it.
pub(crate) struct Held {
    pub(crate) id: HolderId,
    pub(crate) holder: Arc<dyn Holder>,
    /// Bytes that are charged, including those on their way to the holder or from it.
    pub(crate) bytes: u64,
    /// Bytes that the ledger counts as obtained by the driver's memory pools.
    pub(crate) obtained: u64,
    pub(crate) mappings: u64,
    pub(crate) addresses: u64,
    /// Set when its owner is gone: what it still has goes to the pool as its work is complete.
    pub(crate) ended: bool,
    /// Set while mappings of it are unmapped that it is still charged for. It stays until then.
    pub(crate) tidied: bool,
}

impl Held {
    pub(crate) const fn new(id: HolderId, holder: Arc<dyn Holder>) -> Self {
        Self {
            id,
            holder,
            bytes: 0,
            obtained: 0,
            mappings: 0,
            addresses: 0,
            ended: false,
            tidied: false,
        }
    }

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
