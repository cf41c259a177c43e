//! A place for a block: addresses, the memory under them, and who uses it.
//!
//! Memory lies in a slot as a prefix of its addresses. The first `used` bytes belong to the block.
//! Up to `reach` it has been used before: that part is idle. What lies behind was put there ahead
//! of the block's growth and never used: margin. When the block is gone, everything is idle: it
//! stays mapped, waits for its fence, and can be revived or taken back from the end. What its first
//! bytes [share](super::shared) with other slots is in none of its figures.

use std::ops::Range;
use std::sync::Arc;

use cuvmm_driver::DeviceAddress;

use super::budget::TenantId;
use super::pace::{Growth, Pace};
use super::slumber::Slumber;
use crate::own::Stream;
use crate::region::{Extent, Fence, Space};

/// Where a slot's memory stands when it is not in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Idle {
    /// Its fence has passed.
    Warm,
    /// It is not known whether its fence has passed.
    Limbo,
    /// A lease lives.
    Leased,
}

/// Where a block is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) tenant: TenantId,
    pub(crate) slot: usize,
    pub(crate) address: DeviceAddress,
    pub(crate) capacity: u64,
}

/// Blocks that may trade places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Class {
    /// The size of their slots, from which their capacities are.
    pub(crate) size: u64,
    /// The largest extent that may lie under them.
    pub(crate) largest: u64,
}

#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) space: Space,
    /// The blocks it serves.
    pub(crate) class: Class,
    /// The block in it, if there is one.
    pub(crate) block: Option<Occupant>,
    /// Leases on the block that is in it or was in it last.
    pub(crate) leases: u64,
    /// What must pass before idle memory may be unmapped or given to another stream.
    pub(crate) fence: Fence,
    /// When it was used last, on the pool's clock.
    pub(crate) touched: u64,
    /// A roll-back failed in it: it serves its block and no other.
    pub(crate) broken: bool,
    /// The pool is hardened: as above, since its addresses are not used again.
    pub(crate) single: bool,
    /// Some of its memory was [exported](super::exported), or is about to be: as above, since
    /// somebody else can write there.
    pub(crate) exported: bool,
    /// Up to where other slots show its memory too: as above, while it is not zero.
    pub(crate) shared: u64,
    /// Up to where it may only read, since it shares or shared what another slot had before: as
    /// above.
    pub(crate) lent: u64,
    /// Whether it is listed to be unmapped.
    pub(crate) retiring: bool,
    /// Bytes that the mapper is putting behind what is there, charged already. Until it is done
    /// the memory in the slot neither grows nor is taken back.
    pub(crate) coming: u64,
    /// Whether its block has its memory.
    pub(crate) slumber: Slumber,
}

#[derive(Debug)]
pub(crate) struct Occupant {
    /// Bytes the block was asked to have.
    pub(crate) requested: u64,
    /// The most bytes that it was ever asked to have.
    pub(crate) ever: u64,
    /// The bytes it is asked to have, in whole granules.
    pub(crate) used: u64,
    /// What it may grow to, in whole granules.
    pub(crate) most: u64,
    /// Up to where memory was used since it was placed.
    pub(crate) reach: u64,
    /// Up to where its extents are marked as written to by it. For what it has grown over since the
    /// slot was taken out last that is [still to be done](Slot::stain).
    pub(crate) stained: u64,
    /// How much memory it gets at once when it outgrows what it has.
    pub(crate) growth: Growth,
    /// How fast it grows.
    pub(crate) pace: Pace,
    /// The stream it was allocated on.
    pub(crate) home: Option<Stream>,
    /// Other streams that used it.
    pub(crate) users: Vec<Stream>,
    /// Whether work on streams that nobody named used it too.
    pub(crate) anywhere: bool,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) zeroed: bool,
}

impl Occupant {
    /// What it would show of what it gave up before, if it grew to `size` bytes within the granules
    /// that it has.
    pub(crate) fn stale(&self, size: u64) -> Range<u64> {
        let end = size.min(self.ever).min(self.used);
        self.requested..end.max(self.requested)
    }

    /// What must pass once memory of the block is withdrawn.
    pub(crate) fn fence(&self, space: &Space) -> Fence {
        match self.streams() {
            Some(streams) => Fence::streams(streams),
            None => Fence::device(space.device().clone()),
        }
    }

    /// The streams that used it, the home first; nothing where that may have been any.
    pub(crate) fn streams(&self) -> Option<Vec<Stream>> {
        let home = self.home.as_ref().filter(|_| !self.anywhere)?;
        let mut streams = Vec::with_capacity(1 + self.users.len());
        streams.push(home.clone());
        streams.extend(self.users.iter().cloned());
        Some(streams)
    }
}

impl Slot {
    pub(crate) const fn new(space: Space, class: Class, now: u64, single: bool) -> Self {
        Self {
            space,
            class,
            block: None,
            leases: 0,
            fence: Fence::passed(),
            touched: now,
            broken: false,
            single,
            exported: false,
            shared: 0,
            lent: 0,
            retiring: false,
            coming: 0,
            slumber: Slumber::Awake,
        }
    }

    /// Whether the mapper is at it.
    pub(crate) const fn is_busy(&self) -> bool {
        self.coming > 0
    }

    /// Bytes of memory in it, or on their way into it or out of it.
    fn charged(&self) -> u64 {
        self.space.bytes() + self.coming + self.slumber.beside()
    }

    pub(crate) fn used(&self) -> u64 {
        self.present(|block| block.used)
    }

    pub(crate) fn requested(&self) -> u64 {
        self.present(|block| block.requested)
    }

    /// Bytes of the block, as far as they are there.
    #[inline]
    fn present(&self, of: impl Fn(&Occupant) -> u64) -> u64 {
        match (&self.block, self.slumber.is_awake()) {
            (Some(block), true) => of(block),
            (Some(block), false) => of(block).min(self.charged()),
            (None, _) => 0,
        }
    }

    /// Bytes that its block has when it is awake, and does not have now.
    pub(crate) fn asleep(&self) -> u64 {
        match (&self.slumber, &self.block) {
            (Slumber::Asleep { .. }, Some(block)) => block.used,
            _ => 0,
        }
    }

    /// Up to where memory is used or shared.
    pub(crate) fn taken(&self) -> u64 {
        self.used().max(self.shared)
    }

    /// Bytes of memory put ahead of the block's growth.
    pub(crate) fn margin(&self) -> u64 {
        let reach = |block: &Occupant| block.reach.max(block.used);
        self.block
            .as_ref()
            .map_or(0, |block| self.charged().saturating_sub(reach(block)))
    }

    /// Bytes of memory that were in use and are not.
    pub(crate) fn idle(&self) -> u64 {
        self.charged()
            .saturating_sub(self.taken())
            .saturating_sub(self.margin())
    }

    /// Whether what its fence covers comes before whatever is done on `home` next.
    #[inline]
    pub(crate) fn is_before(&self, home: Option<&Stream>) -> bool {
        self.fence.is_passed() || home.is_some_and(|home| self.fence.precedes(home))
    }

    pub(crate) const fn idle_state(&self) -> Idle {
        if self.leases > 0 {
            Idle::Leased
        } else if self.fence.is_passed() {
            Idle::Warm
        } else {
            Idle::Limbo
        }
    }

    /// Idle bytes, margin included, that share an extent with bytes in use, and so cannot be taken
    /// back.
    pub(crate) fn stranded(&self) -> u64 {
        self.stranded_by(self.taken())
    }

    /// The same if the first `used` bytes were in use.
    pub(crate) fn stranded_by(&self, used: u64) -> u64 {
        self.space
            .extent_around(used)
            .filter(|extent| extent.offset < used)
            .map_or(0, |extent| extent.offset + extent.size - used)
    }

    /// Bytes that cannot be taken back, however long one waits for the GPU.
    pub(crate) fn kept(&self) -> u64 {
        let kept = if self.leases > 0 {
            self.space.bytes() + self.slumber.beside()
        } else {
            self.taken() + self.stranded()
        };
        kept.saturating_sub(self.shared)
    }

    /// Whether another block may be put in it.
    pub(crate) const fn is_vacant(&self) -> bool {
        self.block.is_none() && self.leases == 0 && !self.is_busy()
    }

    /// Whether it serves its block and no other.
    pub(crate) fn serves_once(&self) -> bool {
        self.broken || self.single || self.exported || self.bound() > 0
    }

    /// Whether memory could be taken from it, if its fence has passed.
    pub(crate) fn has_spare(&self) -> bool {
        let taken = self.taken();
        let last = || self.space.last_offset();
        self.is_free() && last().is_some_and(|offset| offset >= taken)
    }

    /// The extents that could be taken back now, last first, if their fence has passed.
    pub(crate) fn spare(&self) -> impl Iterator<Item = Extent> + '_ {
        let taken = self.taken();
        let free = self.is_free();
        self.space
            .extents()
            .rev()
            .take_while(move |extent| free && extent.offset >= taken)
    }

    /// Whether nobody keeps what lies behind the bytes in use where it is.
    pub(crate) const fn is_free(&self) -> bool {
        self.leases == 0 && !self.is_busy()
    }

    /// Whether something that could not be unmapped lies in a range.
    pub(crate) fn stuck_at(&self, offset: u64, size: u64) -> bool {
        self.space.stuck_in(offset, offset.saturating_add(size)) > 0
    }

    /// Whether a lease keeps what no block has any more: because it has gone, or has shrunk since.
    pub(crate) fn is_kept_by_leases(&self) -> bool {
        self.block.is_none() || (self.leases > 0 && self.idle() > 0)
    }

    /// Marks what the block may have written to since that was done last.
    pub(crate) fn stain(&mut self, by: TenantId) {
        if let Some(block) = &mut self.block
            && block.used > block.stained
        {
            block.stained = self.space.stain(block.stained, block.used, by.0);
        }
    }

    /// Memory was taken from its end.
    pub(crate) fn receded(&mut self) {
        let bytes = self.space.bytes();
        self.lent = self.lent.min(bytes);
        if let Some(block) = &mut self.block {
            block.reach = block.reach.min(bytes);
            block.stained = block.stained.min(bytes);
        }
    }
}
