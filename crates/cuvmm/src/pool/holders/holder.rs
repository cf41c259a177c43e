//! Holders: owners of memory that is in no slot.
//!
//! A holder belongs to one tenant, which is charged for its memory, and decides by itself what it
//! uses the memory for. The pool takes memory from it when another request needs memory. Heaps get
//! extents from the pool and give them back to it. Memory pools of the driver get memory from the
//! driver and return it there, within the bytes charged for them.

use crate::error::CallError;
use crate::extents::{Space, Unmapped};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HolderFigures {
    /// Bytes of all extents, or the most that memory pools of the driver may hold.
    pub(crate) held: u64,
    /// Bytes in use, as requested.
    pub(crate) in_use: u64,
    /// Bytes beside those in use that nothing else can use.
    pub(crate) padding: u64,
    /// Free bytes whose work is not known to be complete.
    pub(crate) pending_free: u64,
    /// Bytes of wholly free extents, or bytes that memory pools of the driver do not need.
    pub(crate) idle: u64,
    /// Bytes that memory pools of the driver held when last read.
    pub(crate) obtained: u64,
    /// Bytes that were exported.
    pub(crate) exported: u64,
    /// Bytes that a sleeping heap or paged cache gets when it wakes, which are not held.
    pub(crate) asleep: u64,
    /// Bytes in use that only graphs need, which may be launched again.
    pub(crate) kept: u64,
}

impl HolderFigures {
    pub(crate) const fn cached(&self) -> u64 {
        self.held - self.in_use - self.padding - self.pending_free
    }

    pub(crate) const fn stranded(&self) -> u64 {
        self.cached() + self.pending_free - self.idle
    }
}

#[derive(Debug, Default)]
pub(crate) struct Given {
    /// Extents that no mapping of the holder shows any more.
    pub(crate) extents: Vec<Unmapped>,
    /// Bytes that memory pools of the driver cannot hold any more.
    pub(crate) returned: u64,
    /// Bytes that memory pools of the driver held beyond the charge when last read. They are to be
    /// charged, and then [acknowledged](Holder::acknowledge).
    pub(crate) overdrawn: u64,
    /// The number of mappings unmapped.
    pub(crate) mappings: u64,
    /// The driver's error that ended the giving.
    pub(crate) error: Option<CallError>,
}

impl Given {
    pub(crate) fn bytes(&self) -> u64 {
        self.extents.iter().map(Unmapped::size).sum::<u64>() + self.returned
    }

    pub(super) const fn is_nothing(&self) -> bool {
        self.extents.is_empty() && self.returned == 0 && self.mappings == 0
    }
}

/// An owner of memory. A lock of its own is taken under the pool's lock, never the other way round.
pub(crate) trait Holder: Send + Sync {
    /// Makes no driver call.
    fn figures(&self) -> HolderFigures;

    /// Returns the sizes of the extents that [`give`](Self::give) can take out now, the least
    /// recently used first. Polls fences with `polls`. Called under the pool's lock.
    fn reclaimable(&self, polls: bool) -> Vec<u64>;

    /// Takes out wholly free extents whose work is complete, the least recently used first, until
    /// they have `wanted` bytes (`cuMemUnmap`), and adds them to `given` one by one: what was taken out
    /// before a panic of the driver is given. Called without the pool's lock.
    fn give(&self, wanted: u64, given: &mut Given);

    /// Gives up memory that is not worth keeping: unused mappings (`cuMemUnmap`), or memory of the
    /// driver's pools that was freed meanwhile. Polls no fence. Called without the pool's lock, by
    /// the mapper.
    fn tidy(&self) -> Given;

    /// Returns `true` if the mapper should soon tidy again.
    fn is_untidy(&self) -> bool {
        false
    }

    /// Returns `true` if memory pools of the driver have the memory. Such a holder is not asked
    /// while a capture guard lives.
    fn is_of_driver(&self) -> bool {
        false
    }

    /// Reads the figures that only the driver knows. Called without the pool's lock, before memory
    /// is reclaimed.
    fn refresh(&self) -> Given {
        Given::default()
    }

    /// Notes that [overdrawn](Given::overdrawn) bytes are charged now. Called without the pool's
    /// lock.
    fn acknowledge(&self, _bytes: u64) {}

    /// Returns the bytes that the driver has given out. Called without the pool's lock.
    fn obtained(&self) -> u64 {
        0
    }

    /// Returns `true` while more is being charged for the holder. Its own tenant then takes nothing
    /// from it.
    fn is_growing(&self) -> bool {
        false
    }

    /// Waits until the work on all free bytes is complete. Called without the pool's lock.
    fn settle(&self) -> Result<(), CallError>;

    /// Sets whether freed memory is reported to the pool at once, since the pool has to take it
    /// back.
    fn report_freed(&self, yes: bool);

    fn close(&self);

    /// Takes out the spaces in which nothing is mapped. Called under the pool's lock.
    fn take_free_spaces(&self) -> Vec<Space> {
        Vec::new()
    }

    /// Takes out all spaces, at the end of the holder. Only stuck mappings are left in them.
    fn take_spaces(&self) -> Vec<Space> {
        Vec::new()
    }
}
