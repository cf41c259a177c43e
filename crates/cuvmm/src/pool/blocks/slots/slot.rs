//! Slots: places for blocks, with their addresses, the memory under them, and the streams that use
//! it.
//!
//! Memory is a prefix of a slot's addresses. The first `used` bytes belong to the block. The memory
//! from there up to `reach` has been used before: it is idle. The memory behind `reach` was placed
//! ahead of the block's growth and never used: it is precommitted. When the block is gone all
//! memory is idle: it stays mapped, waits for its fence, and can be reused, or reclaimed from the
//! end. Memory of the first bytes that the slot [shares](crate::pool::blocks::sharing::shared) with other slots is in none
//! of its figures.

use std::ops::Range;
use std::sync::Arc;

use super::ids::{BlockPlace, SlotId};
use super::sleep_state::SleepState;
use crate::error::{CallError, MemoryError};
use crate::extent_sizes::ExtentSizes;
use crate::extents::{Completed, Extent, Fence, Space, Uses};
use crate::growth::Growth;
use crate::own::{Physical, Stream};
use crate::pool::blocks::ahead::Pace;
use crate::store::Ranges;
use crate::wanted::Purpose;

/// The state of a slot's idle memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Freed {
    /// Its fence is complete.
    #[default]
    Cached,
    /// Its fence is not known to be complete.
    PendingFree,
    /// A lease lives.
    Leased,
}

/// A class of slots. A block can use any slot of its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Class {
    /// Follows from the capacities of the blocks.
    pub(crate) size: u64,
    /// The sizes of the extents under the blocks.
    pub(crate) sizes: ExtentSizes,
}

#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) id: SlotId,
    pub(crate) space: Space,
    pub(crate) class: Class,
    pub(crate) block: Option<Occupant>,
    /// The leases on the block in the slot, or on the last block.
    pub(crate) leases: u64,
    /// The streams that may use a freed block's memory that leases keep.
    pub(crate) kept: Uses,
    /// `true` if the block has shrunk while a lease lived, which keeps the memory given up.
    pub(in crate::pool) keeps_tail: bool,
    /// The fence that must be complete before idle memory may be unmapped or used by another
    /// stream.
    pub(crate) fence: Fence,
    /// The time of the last use, on the pool's clock.
    pub(crate) touched: u64,
    /// `true` if a roll-back failed in the slot: it [serves](Self::serves_once) its block and no
    /// other.
    pub(crate) broken: bool,
    /// `true` in a hardened pool: the slot serves one block, since its addresses are not used
    /// again.
    pub(crate) single: bool,
    /// `true` if some of the memory was [exported](crate::pool::blocks::exported), or is about to be: the slot
    /// serves one block, since importers can write to the memory.
    pub(crate) exported: bool,
    /// `true` if the slot may have larger extents than its class allows, which a fork of another block
    /// could not share: the slot serves one block.
    pub(crate) merged: bool,
    /// The offset up to which other slots map the memory too. While it is not zero the slot serves
    /// one block.
    pub(crate) shared: u64,
    /// The offset up to which the slot may only read, since it shares or shared another slot's
    /// earlier memory. While it is not zero the slot serves one block.
    pub(crate) lent: u64,
    /// `true` while an operation may still undo its changes to the block: no other operation may
    /// move the block.
    pub(crate) pinned: bool,
    pub(in crate::pool) purging: bool,
    /// Bytes that the mapper is placing behind the slot's memory, charged already. Meanwhile the
    /// memory neither grows nor is reclaimed.
    pub(crate) coming: u64,
    pub(in crate::pool) sleep_state: SleepState,
}

#[derive(Debug)]
pub(in crate::pool) struct Occupant {
    pub(crate) requested: u64,
    /// The largest `requested` so far.
    pub(crate) ever: u64,
    /// The size in whole granules.
    pub(crate) used: u64,
    pub(crate) most: u64,
    /// The offset up to which memory was used since it was placed.
    pub(crate) reach: u64,
    /// The offset up to which extents are marked as written by the block. Growth since the slot was
    /// last taken out is [not marked yet](Slot::note_writer).
    pub(crate) noted: u64,
    pub(crate) growth: Growth,
    pub(in crate::pool) pace: Pace,
    pub(crate) home: Option<Stream>,
    /// The further streams that may use the block.
    pub(crate) uses: Uses,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) zeroed: bool,
    /// `true` if the memory may be replaced while no lease lives.
    pub(in crate::pool) movable: bool,
    /// The ranges whose contents a sleep keeps that keeps only marked ones.
    pub(in crate::pool) kept: Ranges,
}

impl Occupant {
    /// Returns the range of old bytes that the block would show if it grew to `size` bytes within
    /// its granules.
    pub(in crate::pool::blocks) fn stale(&self, size: u64) -> Range<u64> {
        let end = size.min(self.ever).min(self.used);
        self.requested..end.max(self.requested)
    }

    /// Returns the fence for withdrawing memory of the block: it covers all use up to now.
    pub(in crate::pool::blocks) fn fence(&self, space: &Space) -> Fence {
        let Some(home) = &self.home else {
            let mut fence = self.uses.end();
            fence.merge(Fence::devices(space.users().cloned().collect()));
            return fence;
        };
        let mut fence = Fence::stream(home.clone());
        fence.merge(self.uses.end());
        fence
    }

    pub(in crate::pool::blocks) fn fence_of_known(&self) -> Fence {
        let others = self.uses.known().iter().chain(&self.home);
        Fence::streams(others.cloned().collect())
    }

    /// Returns the streams that used the block, the home stream first, or `None` if any stream may
    /// have used it.
    pub(in crate::pool::blocks) fn streams(&self) -> Option<Vec<Stream>> {
        let (home, others) = (self.home.as_ref()?, self.uses.streams()?);
        let mut streams = Vec::with_capacity(1 + others.len());
        streams.push(home.clone());
        streams.extend_from_slice(others);
        Some(streams)
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    /// The block's size, without shared memory.
    pub(crate) in_use: u64,
    /// Memory of the block beyond its size, in whole granules.
    pub(crate) padding: u64,
    pub(crate) precommitted: u64,
    /// Memory that was in use and is not now.
    pub(crate) idle: u64,
    pub(crate) freed: Freed,
    pub(crate) stranded: u64,
    pub(crate) exported: u64,
    pub(crate) asleep: u64,
    /// Memory that cannot be reclaimed, however long a request waits for the GPU.
    pub(crate) kept: u64,
    pub(crate) blocks: u64,
    pub(crate) leases: u64,
    /// `true` if the block is not awake.
    pub(crate) sleeps: bool,
}

impl Figures {
    /// Returns the figures of a slot that a panic loses: all its memory stays in use.
    pub(super) fn lost(&self) -> Self {
        let all = self.in_use + self.padding + self.precommitted + self.idle;
        Self {
            in_use: all,
            kept: all,
            exported: self.exported,
            ..Self::default()
        }
    }
}

impl Slot {
    pub(super) fn figures(&self) -> Figures {
        // A block that has lost memory has less memory than its size.
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

    pub(in crate::pool::blocks) const fn new(
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

    /// Extends the fence to the work queued on the block now: the memory is unmapped only after
    /// that work.
    pub(in crate::pool::blocks) fn fence_work(&mut self) {
        if let Some(block) = &self.block {
            let fence = block.fence(&self.space);
            self.fence.merge(fence);
        }
    }

    pub(in crate::pool::blocks) const fn is_busy(&self) -> bool {
        self.coming > 0
    }

    /// Returns the bytes of memory in the slot, or on their way into it or out of it, that are
    /// charged for its block.
    pub(in crate::pool::blocks) fn charged(&self) -> u64 {
        self.coming + self.there()
    }

    /// Returns the charged bytes without those that the mapper is placing.
    fn there(&self) -> u64 {
        let all = self.space.bytes() + self.sleep_state.beside();
        all.saturating_sub(self.sleep_state.passed())
    }

    pub(in crate::pool::blocks) fn used(&self) -> u64 {
        self.present(|block| block.used)
    }

    pub(in crate::pool::blocks) fn requested(&self) -> u64 {
        self.present(|block| block.requested)
    }

    /// Returns a size of the block; while the block is not awake, at most the memory that is there.
    #[inline]
    fn present(&self, of: impl Fn(&Occupant) -> u64) -> u64 {
        match (&self.block, self.sleep_state.is_awake()) {
            (Some(block), true) => of(block),
            (Some(block), false) => of(block).min(self.charged()),
            (None, _) => 0,
        }
    }

    /// Returns the bytes that the block has when it is awake, if it sleeps.
    fn asleep(&self) -> u64 {
        match (&self.sleep_state, &self.block) {
            (SleepState::Asleep { .. }, Some(block)) => block.used,
            _ => 0,
        }
    }

    pub(in crate::pool::blocks) fn check_awake(&self) -> Result<(), MemoryError> {
        let size = self.block.as_ref().map_or(0, |block| block.requested);
        match self.sleep_state.is_awake() {
            true => Ok(()),
            false => Err(MemoryError::Asleep(size)),
        }
    }

    /// Returns the offset up to which memory is used or shared.
    pub(in crate::pool::blocks) fn taken(&self) -> u64 {
        self.used().max(self.shared)
    }

    pub(in crate::pool::blocks) fn precommitted(&self) -> u64 {
        let reach = |block: &Occupant| block.reach.max(block.used);
        self.block
            .as_ref()
            .map_or(0, |block| self.charged().saturating_sub(reach(block)))
    }

    pub(in crate::pool::blocks) fn idle(&self) -> u64 {
        self.charged()
            .saturating_sub(self.taken())
            .saturating_sub(self.precommitted())
    }

    /// Returns `true` if the work that the fence covers comes before any work queued on `home` from
    /// now on.
    #[inline]
    pub(in crate::pool::blocks) fn is_before(&self, home: Option<&Stream>) -> bool {
        self.fence.is_complete() || home.is_some_and(|home| self.fence.precedes(home))
    }

    pub(in crate::pool::blocks) const fn freed_state(&self) -> Freed {
        if self.leases > 0 {
            Freed::Leased
        } else if self.fence.is_complete() {
            Freed::Cached
        } else {
            Freed::PendingFree
        }
    }

    /// Returns the idle and precommitted bytes in one extent with bytes in use: they cannot be
    /// reclaimed.
    pub(in crate::pool::blocks) fn stranded(&self) -> u64 {
        self.stranded_by(self.taken())
    }

    /// Returns the bytes that would be stranded if the first `used` bytes were in use.
    pub(in crate::pool::blocks) fn stranded_by(&self, used: u64) -> u64 {
        // Memory is a prefix of the addresses: if all or none of it is used, no extent is looked up.
        if used == 0 || used >= self.space.bytes() {
            return 0;
        }
        self.space
            .bounds_around(used)
            .filter(|extent| extent.start < used)
            .map_or(0, |extent| extent.end - used)
    }

    /// Returns the bytes that cannot be reclaimed, however long a request waits for the GPU.
    pub(super) fn kept(&self) -> u64 {
        let kept = if self.leases > 0 {
            self.there()
        } else {
            self.taken() + self.stranded()
        };
        kept.saturating_sub(self.shared)
    }

    pub(in crate::pool::blocks) const fn is_vacant(&self) -> bool {
        self.block.is_none() && self.leases == 0 && !self.is_busy() && !self.pinned
    }

    pub(in crate::pool::blocks) fn is_bare(&self) -> bool {
        self.is_vacant() && self.space.bytes() == 0
    }

    pub(in crate::pool::blocks) fn serves_once(&self) -> bool {
        self.broken || self.single || self.exported || self.merged || self.bound() > 0
    }

    /// Returns `true` if the slot has memory that must not be kept cached: unused memory if the
    /// pool or tenant keeps none, exported or merged memory, and memory that other slots map too.
    pub(in crate::pool::blocks) fn is_to_purge(&self, keeps_nothing: bool) -> bool {
        let gives = match keeps_nothing {
            true => self.is_vacant() || self.has_spare(),
            false => (self.exported || self.merged) && self.is_vacant(),
        };
        gives || self.has_parting()
    }

    /// Returns `true` if memory could be taken from the slot once its fence is complete.
    pub(in crate::pool::blocks) fn has_spare(&self) -> bool {
        let taken = self.taken();
        let last = || self.space.last_offset();
        self.is_free() && last().is_some_and(|offset| offset >= taken)
    }

    /// Returns the extents that could be reclaimed once the fence is complete, the last first.
    pub(in crate::pool::blocks) fn spare(&self) -> impl Iterator<Item = Extent> + '_ {
        let taken = self.taken();
        let free = self.is_free();
        self.space
            .extents()
            .rev()
            .take_while(move |extent| free && extent.offset >= taken)
    }

    /// Returns `true` if neither a lease nor the mapper keeps the memory behind the used bytes in
    /// place.
    pub(in crate::pool::blocks) const fn is_free(&self) -> bool {
        self.leases == 0 && !self.is_busy()
    }

    pub(in crate::pool::blocks) fn stuck_at(&self, offset: u64, size: u64) -> bool {
        self.space.stuck_in(offset, offset.saturating_add(size)) > 0
    }

    /// Returns `true` if no work can use the idle memory. While a lease lives the fence does not
    /// show that: more work may be queued.
    pub(in crate::pool::blocks) const fn is_unused(&self) -> bool {
        self.leases == 0 && self.fence.is_complete()
    }

    pub(in crate::pool::blocks) fn completed(&mut self) -> Result<Completed<'_>, CallError> {
        let fence = Some(&self.fence).filter(|_| self.leases == 0);
        let completed = fence.and_then(|fence| fence.completed(&mut self.space));
        completed.ok_or(CallError::InUse)
    }

    /// Records that work of a stream uses the block's memory, or memory that leases keep. Makes no
    /// driver call while a capture runs.
    pub(in crate::pool::blocks) fn record_use(&mut self, stream: &Stream, capturing: bool) {
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

    pub(in crate::pool::blocks) fn is_read_on(&mut self, stream: &Stream) {
        // No capture runs: the memory has just been copied.
        self.record_use(stream, false);
        // Even on the home stream, since the memory may be replaced before the block is freed.
        self.fence.merge(Fence::stream(stream.clone()));
    }

    /// Records that work on any stream of the devices with access uses the block's memory, or
    /// memory that leases keep.
    pub(in crate::pool::blocks) fn record_use_anywhere(&mut self) {
        let users = self.space.users();
        match &mut self.block {
            Some(block) => users.for_each(|device| block.uses.add_device(device)),
            None if self.leases > 0 => users.for_each(|device| self.kept.add_device(device)),
            None => self.fence.merge(Fence::devices(users.cloned().collect())),
        }
    }

    /// Takes the block out of the slot. Its use ends now, unless leases keep its memory.
    pub(in crate::pool::blocks) fn end_block(&mut self) -> Option<Occupant> {
        let block = self.block.take()?;
        self.fence.merge(block.fence(&self.space));
        if self.leases > 0 {
            match &block.home {
                Some(home) => self.fence.merge(self.kept.add(home)),
                None => self
                    .space
                    .users()
                    .for_each(|device| self.kept.add_device(device)),
            }
            self.fence.merge(self.kept.add_all(&block.uses));
        }
        Some(block)
    }

    /// Ends a lease. The last lease ends the use of memory that no block has any more, because its
    /// block was freed or has shrunk. A fence that was found complete while a lease lived does not
    /// cover that use.
    pub(in crate::pool::blocks) fn end_lease(&mut self) {
        self.leases = self.leases.saturating_sub(1);
        if self.leases > 0 {
            // The operation that moves the block may unmap its memory once the fence is complete.
            if !self.sleep_state.is_awake() {
                self.fence_work();
            }
            return;
        }
        self.fence.merge(std::mem::take(&mut self.kept).end());
        // Shared memory can be replaced under a block that gave nothing up.
        let exchanged = std::mem::take(&mut self.keeps_tail) || self.bound() > 0;
        if let Some(block) = self.block.as_ref().filter(|_| exchanged) {
            self.fence.merge(block.fence(&self.space));
        }
    }

    /// Marks the extents that the block may have written to since the last marking.
    pub(in crate::pool::blocks) fn note_writer(&mut self) {
        if let Some(block) = &mut self.block
            && block.used > block.noted
        {
            let by = self.id.tenant.0;
            block.noted = self.space.note_writer(block.noted, block.used, by);
        }
    }

    pub(in crate::pool::blocks) fn place(&self, capacity: u64) -> BlockPlace {
        BlockPlace {
            slot: self.id,
            address: self.space.address(),
            capacity,
        }
    }

    pub(in crate::pool::blocks) const fn purpose(&self) -> Purpose {
        match self.block {
            Some(_) => Purpose::Growth,
            None => Purpose::New,
        }
    }

    pub(in crate::pool::blocks) fn home(&self) -> Option<&Stream> {
        self.block.as_ref()?.home.as_ref()
    }

    /// Updates the offsets after memory may have been taken from the slot's end.
    pub(in crate::pool::blocks) fn memory_taken(&mut self) {
        let bytes = self.space.bytes();
        self.lent = self.lent.min(bytes);
        if let Some(block) = &mut self.block {
            block.reach = block.reach.min(bytes);
            block.noted = block.noted.min(bytes);
        }
    }

    /// Returns the offset up to which the slot may not write, or should not.
    #[inline]
    pub(in crate::pool::blocks) fn bound(&self) -> u64 {
        self.shared.max(self.lent)
    }

    /// Returns `true` if the block has shrunk into memory that the slot may not write, which must
    /// be [unshared](crate::pool::blocks::sharing::unshare) before the block grows.
    #[inline]
    pub(in crate::pool::blocks) fn is_truncated(&self) -> bool {
        let block = self.block.as_ref();
        block.is_some_and(|block| block.requested < self.bound())
    }

    /// Returns the extents that other slots map too and that the block does not use, the last
    /// first.
    pub(in crate::pool::blocks) fn parting(&self) -> impl Iterator<Item = Extent> + '_ {
        let (from, to) = (self.used(), self.shared);
        let from = if self.is_free() { from } else { to };
        let extents = self.space.extents().rev();
        extents
            .skip_while(move |extent| extent.offset >= to)
            .take_while(move |extent| extent.offset >= from)
    }

    /// Returns `true` if memory that the slot may not write could be unmapped once its fence is
    /// complete.
    #[inline]
    pub(in crate::pool::blocks) fn has_parting(&self) -> bool {
        // Most slots share nothing.
        let bound = self.bound();
        if bound == 0 {
            return false;
        }
        let used = self.used();
        let last = || self.space.last_offset();
        bound > used && self.is_free() && last().is_some_and(|offset| offset >= used)
    }

    pub(in crate::pool::blocks) fn shared_parts(
        &self,
    ) -> impl Iterator<Item = (Extent, &Physical)> + '_ {
        self.space.parts_in(0, self.shared.min(self.used()))
    }
}
