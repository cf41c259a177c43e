//! A place for a block: addresses, the memory under them, and who uses it.
//!
//! Memory lies in a slot as a prefix of its addresses. The first `used` bytes belong to the block.
//! Up to `reach` it has been used before: that part is idle. What lies behind was put there ahead
//! of the block's growth and never used: precommitted. When the block is gone, everything is idle: it
//! stays mapped, waits for its fence, and can be revived or taken back from the end. What its first
//! bytes [share](super::shared) with other slots is in none of its figures.

use std::ops::Range;
use std::sync::Arc;

use super::ids::{BlockPlace, SlotId};
use super::pace::Pace;
use super::sleep_state::SleepState;
use crate::error::CallError;
use crate::growth::Growth;
use crate::own::{Physical, Stream};
use crate::region::{Completed, Extent, Fence, Space, Uses};

/// Where a slot's memory stands when it is not in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Freed {
    /// Its fence has passed.
    #[default]
    Cached,
    /// It is not known whether its fence has passed.
    PendingFree,
    /// A lease lives.
    Leased,
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
    pub(crate) id: SlotId,
    pub(crate) space: Space,
    /// The blocks it serves.
    pub(crate) class: Class,
    /// The block in it, if there is one.
    pub(crate) block: Option<Occupant>,
    /// Leases on the block that is in it or was in it last.
    pub(crate) leases: u64,
    /// The streams that may use what leases keep of a block that was freed.
    pub(crate) kept: Uses,
    /// Whether the block has shrunk while a lease lived, which keeps what was given up.
    pub(crate) keeps_tail: bool,
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
    /// It has larger extents than its class allows, which a fork of another block could not share: as
    /// above.
    pub(crate) merged: bool,
    /// Up to where other slots show its memory too: as above, while it is not zero.
    pub(crate) shared: u64,
    /// Up to where it may only read, since it shares or shared what another slot had before: as
    /// above.
    pub(crate) lent: u64,
    /// An operation may still make its block what it was before: nobody moves it meanwhile.
    pub(crate) pinned: bool,
    /// Whether it is listed to be unmapped.
    pub(crate) purging: bool,
    /// Bytes that the mapper is putting behind what is there, charged already. Until it is done
    /// the memory in the slot neither grows nor is taken back.
    pub(crate) coming: u64,
    /// Whether its block has its memory.
    pub(crate) sleep_state: SleepState,
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
    /// slot was taken out last that is [still to be done](Slot::last_writer).
    pub(crate) noted: u64,
    /// How much memory it gets at once when it outgrows what it has.
    pub(crate) growth: Growth,
    /// How fast it grows.
    pub(crate) pace: Pace,
    /// The stream it was allocated on.
    pub(crate) home: Option<Stream>,
    /// What else may use it.
    pub(crate) uses: Uses,
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

    /// What must pass once memory of the block is withdrawn: what uses it until now.
    pub(crate) fn fence(&self, space: &Space) -> Fence {
        let Some(home) = &self.home else {
            let mut fence = self.uses.end();
            fence.merge(Fence::device(space.device().clone()));
            return fence;
        };
        let mut fence = Fence::stream(home.clone());
        fence.merge(self.uses.end());
        fence
    }

    /// The streams that used it, the home first; nothing where that may have been any.
    pub(crate) fn streams(&self) -> Option<Vec<Stream>> {
        let (home, others) = (self.home.as_ref()?, self.uses.streams()?);
        let mut streams = Vec::with_capacity(1 + others.len());
        streams.push(home.clone());
        streams.extend_from_slice(others);
        Some(streams)
    }
}

/// What a slot counts for in its tenant's figures. Bytes, but for counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    /// What its block was asked to have, without what it shares.
    pub(crate) in_use: u64,
    /// What the block has beyond that in whole granules.
    pub(crate) padding: u64,
    pub(crate) precommitted: u64,
    /// What was in use and is not.
    pub(crate) idle: u64,
    /// Where that stands.
    pub(crate) freed: Freed,
    pub(crate) stranded: u64,
    pub(crate) exported: u64,
    pub(crate) asleep: u64,
    /// What cannot be taken back, however long one waits for the GPU.
    pub(crate) kept: u64,
    pub(crate) blocks: u64,
    pub(crate) leases: u64,
    /// Whether its block is not awake.
    pub(crate) sleeps: bool,
}

impl Slot {
    /// What it counts for.
    pub(crate) fn figures(&self) -> Figures {
        // A block that has lost memory has less than it was asked to have.
        let there = self.charged().max(self.shared);
        let in_use = self.requested().min(there).saturating_sub(self.shared);
        Figures {
            in_use,
            padding: self.taken().min(there) - self.shared - in_use,
            precommitted: self.precommitted(),
            idle: self.idle(),
            freed: self.freed_state(),
            stranded: self.stranded(),
            exported: match self.exported {
                true => self.space.exported().map(|extent| extent.size).sum(),
                false => 0,
            },
            asleep: self.asleep(),
            kept: self.kept(),
            blocks: u64::from(self.block.is_some()),
            leases: self.leases,
            sleeps: !self.sleep_state.is_awake(),
        }
    }

    pub(crate) const fn new(
        id: SlotId,
        space: Space,
        class: Class,
        now: u64,
        single: bool,
    ) -> Self {
        Self {
            id,
            space,
            class,
            block: None,
            leases: 0,
            kept: Uses::none(),
            keeps_tail: false,
            fence: Fence::complete(),
            touched: now,
            broken: false,
            single,
            exported: false,
            merged: false,
            shared: 0,
            lent: 0,
            pinned: false,
            purging: false,
            coming: 0,
            sleep_state: SleepState::Awake,
        }
    }

    /// Has the work on its block that is queued by now pass before its memory may be unmapped.
    pub(crate) fn fence_work(&mut self) {
        if let Some(block) = &self.block {
            let fence = block.fence(&self.space);
            self.fence.merge(fence);
        }
    }

    /// Whether the mapper is at it.
    pub(crate) const fn is_busy(&self) -> bool {
        self.coming > 0
    }

    /// Bytes of memory in it, or on their way into it or out of it.
    fn charged(&self) -> u64 {
        self.space.bytes() + self.coming + self.sleep_state.beside()
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
        match (&self.block, self.sleep_state.is_awake()) {
            (Some(block), true) => of(block),
            (Some(block), false) => of(block).min(self.charged()),
            (None, _) => 0,
        }
    }

    /// Bytes that its block has when it is awake, and does not have now.
    pub(crate) fn asleep(&self) -> u64 {
        match (&self.sleep_state, &self.block) {
            (SleepState::Asleep { .. }, Some(block)) => block.used,
            _ => 0,
        }
    }

    /// Up to where memory is used or shared.
    pub(crate) fn taken(&self) -> u64 {
        self.used().max(self.shared)
    }

    /// Bytes of memory put ahead of the block's growth.
    pub(crate) fn precommitted(&self) -> u64 {
        let reach = |block: &Occupant| block.reach.max(block.used);
        self.block
            .as_ref()
            .map_or(0, |block| self.charged().saturating_sub(reach(block)))
    }

    /// Bytes of memory that were in use and are not.
    pub(crate) fn idle(&self) -> u64 {
        self.charged()
            .saturating_sub(self.taken())
            .saturating_sub(self.precommitted())
    }

    /// Whether what its fence covers comes before whatever is done on `home` next.
    #[inline]
    pub(crate) fn is_before(&self, home: Option<&Stream>) -> bool {
        self.fence.is_complete() || home.is_some_and(|home| self.fence.precedes(home))
    }

    pub(crate) const fn freed_state(&self) -> Freed {
        if self.leases > 0 {
            Freed::Leased
        } else if self.fence.is_complete() {
            Freed::Cached
        } else {
            Freed::PendingFree
        }
    }

    /// Idle bytes, precommitted memory included, that share an extent with bytes in use, and so cannot be taken
    /// back.
    pub(crate) fn stranded(&self) -> u64 {
        self.stranded_by(self.taken())
    }

    /// The same if the first `used` bytes were in use.
    pub(crate) fn stranded_by(&self, used: u64) -> u64 {
        // Memory is a prefix of the addresses: where all of it is used there is none to look for.
        if used >= self.space.bytes() {
            return 0;
        }
        self.space
            .bounds_around(used)
            .filter(|extent| extent.start < used)
            .map_or(0, |extent| extent.end - used)
    }

    /// Bytes that cannot be taken back, however long one waits for the GPU.
    pub(crate) fn kept(&self) -> u64 {
        let kept = if self.leases > 0 {
            self.space.bytes() + self.sleep_state.beside()
        } else {
            self.taken() + self.stranded()
        };
        kept.saturating_sub(self.shared)
    }

    /// Whether another block may be put in it.
    pub(crate) const fn is_vacant(&self) -> bool {
        self.block.is_none() && self.leases == 0 && !self.is_busy() && !self.pinned
    }

    /// Whether it has neither a block nor memory.
    pub(crate) fn is_bare(&self) -> bool {
        self.is_vacant() && self.space.bytes() == 0
    }

    /// Whether it serves its block and no other.
    pub(crate) fn serves_once(&self) -> bool {
        self.broken || self.single || self.exported || self.merged || self.bound() > 0
    }

    /// Whether something lies in it that is not to be kept cached: anything that no block uses if
    /// its pool or tenant keeps nothing, what was exported or merged, and what others show too.
    pub(crate) fn is_to_purge(&self, keeps_nothing: bool) -> bool {
        let gives = match keeps_nothing {
            true => self.is_vacant() || self.has_spare(),
            false => (self.exported || self.merged) && self.is_vacant(),
        };
        gives || self.has_parting()
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

    /// Whether no work can use what is not in use of its memory. While a lease lives that is not
    /// so, whatever the fence says: more work may be queued.
    pub(crate) const fn is_unused(&self) -> bool {
        self.leases == 0 && self.fence.is_complete()
    }

    /// What is not in use of its memory, to be unmapped.
    pub(crate) fn completed(&mut self) -> Result<Completed<'_>, CallError> {
        let fence = Some(&self.fence).filter(|_| self.leases == 0);
        let completed = fence.and_then(|fence| fence.completed(&mut self.space));
        completed.ok_or(CallError::InUse)
    }

    /// Notes that work of a stream uses the memory of the block, or of the one that leases keep. While
    /// others capture the driver is asked nothing.
    pub(crate) fn record_use(&mut self, stream: &Stream, capturing: bool) {
        let ended = match &mut self.block {
            Some(block) if block.home.as_ref() == Some(stream) => return,
            Some(block) => block.uses.add(stream),
            None if self.leases > 0 => self.kept.add(stream),
            None => Fence::stream(stream.clone()),
        };
        if !ended.is_complete() {
            self.fence.merge(ended);
            if !capturing {
                self.fence.prune();
            }
        }
    }

    /// Notes that work on a stream reads its memory.
    pub(super) fn is_read_on(&mut self, stream: &Stream) {
        // Nobody captures: it has just been copied.
        self.record_use(stream, false);
        // Also where that is the home: the memory may be exchanged before the block is freed.
        self.fence.merge(Fence::stream(stream.clone()));
    }

    /// Notes that work on any stream of the device uses that memory.
    pub(crate) fn record_use_anywhere(&mut self) {
        let device = self.space.device();
        match &mut self.block {
            Some(block) => block.uses.add_device(device),
            None if self.leases > 0 => self.kept.add_device(device),
            None => self.fence.merge(Fence::device(device.clone())),
        }
    }

    /// Takes the block out. Its use ends now, unless leases keep its memory.
    pub(crate) fn vacate(&mut self) -> Option<Occupant> {
        let block = self.block.take()?;
        self.fence.merge(block.fence(&self.space));
        if self.leases > 0 {
            match &block.home {
                Some(home) => self.fence.merge(self.kept.add(home)),
                None => self.kept.add_device(self.space.device()),
            }
            self.fence.merge(self.kept.add_all(&block.uses));
        }
        Some(block)
    }

    /// A lease ends. With the last one ends the use of what no block has any more: because it was
    /// freed, or has shrunk. What was found complete while a lease lived says nothing of that use.
    pub(crate) fn end_lease(&mut self) {
        self.leases = self.leases.saturating_sub(1);
        if self.leases > 0 {
            return;
        }
        self.fence.merge(std::mem::take(&mut self.kept).end());
        // What a block shares can be exchanged under it, also if it gave nothing up.
        let exchanged = std::mem::take(&mut self.keeps_tail) || self.bound() > 0;
        if let Some(block) = self.block.as_ref().filter(|_| exchanged) {
            self.fence.merge(block.fence(&self.space));
        }
    }

    /// Marks what the block may have written to since that was done last.
    pub(crate) fn note_writer(&mut self) {
        if let Some(block) = &mut self.block
            && block.used > block.noted
        {
            let by = self.id.tenant.0;
            block.noted = self.space.note_writer(block.noted, block.used, by);
        }
    }

    /// Where its block is, whose capacity is given.
    pub(crate) fn place(&self, capacity: u64) -> BlockPlace {
        BlockPlace {
            slot: self.id,
            address: self.space.address(),
            capacity,
        }
    }

    /// The stream that its block was allocated on.
    pub(crate) fn home(&self) -> Option<&Stream> {
        self.block.as_ref()?.home.as_ref()
    }

    /// Memory may have been taken from its end.
    pub(crate) fn receded(&mut self) {
        let bytes = self.space.bytes();
        self.lent = self.lent.min(bytes);
        if let Some(block) = &mut self.block {
            block.reach = block.reach.min(bytes);
            block.noted = block.noted.min(bytes);
        }
    }
}

impl Slot {
    /// Up to where it may not write, or should not.
    #[inline]
    pub(crate) fn bound(&self) -> u64 {
        self.shared.max(self.lent)
    }

    /// Whether its block has shrunk to less than it may not write: what it grows by is to be
    /// [made its own](super::unshare) first.
    #[inline]
    pub(crate) fn is_cut(&self) -> bool {
        let block = self.block.as_ref();
        block.is_some_and(|block| block.requested < self.bound())
    }

    /// The extents that others show too and its block does not use, last first.
    pub(super) fn parting(&self) -> impl Iterator<Item = Extent> + '_ {
        let (from, to) = (self.used(), self.shared);
        let from = if self.is_free() { from } else { to };
        let extents = self.space.extents().rev();
        extents
            .skip_while(move |extent| extent.offset >= to)
            .take_while(move |extent| extent.offset >= from)
    }

    /// Whether memory that it may not write could be unmapped if its fence has passed.
    #[inline]
    pub(crate) fn has_parting(&self) -> bool {
        // Most share nothing, and are not asked further.
        let bound = self.bound();
        if bound == 0 {
            return false;
        }
        let used = self.used();
        let last = || self.space.last_offset();
        bound > used && self.is_free() && last().is_some_and(|offset| offset >= used)
    }

    /// The memory that it shares and its block uses.
    pub(crate) fn shared_parts(&self) -> impl Iterator<Item = (Extent, &Physical)> + '_ {
        self.space.parts_in(0, self.shared.min(self.used()))
    }
}
