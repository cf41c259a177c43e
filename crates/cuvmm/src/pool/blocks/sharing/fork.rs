//! Forks: blocks that begin with the bytes of other blocks. Whole extents of the prefix are mapped
//! a second time, read-only, and then [shared](super::shared); the rest of the prefix, and exported
//! memory, is copied on the device.
//!
//! The user promises that kernels no longer write to the prefix through either block.
//!
//! Keeps I-61.

use std::collections::BTreeMap;

use crate::error::{ArgumentError, BlockError};
use crate::extents::{LastWriter, Unmapped, Uses};
use crate::own::{Access, Physical};
use crate::pool::accounts::Amount;
use crate::pool::blocks::ahead::Pace;
use crate::pool::blocks::slots::{BYTES, BlockPlace, Occupant, Slot, SlotId};
use crate::pool::blocks::{Block, Change, Fit, PlacedMemory};
use crate::pool::core::{Core, Locked};
use crate::pool::line::Wait;
use crate::pool::state::gone;
use crate::pool::tenant::Tenant;
use crate::store::Ranges;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefix {
    /// The bytes taken from the other block: at most its size.
    pub(crate) bytes: u64,
    /// The size of the fork: at least `bytes`, at most the other block's capacity.
    pub(crate) size: u64,
}

/// The slots of forked blocks, while they are out.
type Sources = BTreeMap<SlotId, Box<Slot>>;

#[derive(Debug)]
struct Forked {
    slot: Box<Slot>,
    change: Change,
    from: SlotId,
    /// The offset up to which both blocks share memory.
    shared: u64,
}

impl Forked {
    /// Notes that queued work writes to the fork's own memory, on the home stream or on a stream
    /// that its fence names.
    const fn note_written(&mut self, written: bool) {
        if let Some(given) = &mut self.change.given {
            given.filled |= written;
        }
    }
}

impl Tenant {
    /// Forks several of the tenant's blocks: makes a block of `size` bytes for each, which begins
    /// with the forked block's first `bytes` bytes, all of them or none. `bytes` is at least 1 and
    /// at most `size` and each block's size; `size` is at most each block's capacity. If memory is
    /// short, calls pressure hooks, and waits for at most the longest timeout of the blocks. Does
    /// not wait for work on the GPU.
    ///
    /// A fork has new addresses (`cuMemAddressReserve`). Whole extents of the prefix are mapped
    /// there a second time, read-only: `cuMemMap` and `cuMemSetAccess` for each, about 25 us, and
    /// no memory. They are charged once, as [`shared`](crate::pool::TenantStats::shared), until the last
    /// block that maps them is gone. The rest of the prefix is copied behind the work queued on the
    /// home stream (`cuMemcpyDtoDAsync`), so blocks that are to be forked should have [small
    /// extents](crate::pool::BlockBuilder::largest_extent). Without a home stream the copy is made at
    /// once and ordered behind nothing: work that writes to the prefix must be complete. Exported
    /// memory is copied as well.
    ///
    /// A fork has its block's capacity, home stream, tag, growth and timeout. It is an ordinary
    /// block: it grows and shrinks, is forked, sleeps and is dropped, in any order with the others.
    /// Forks of blocks that were [allocated side by side](crate::pool::BlockBuilder::allocate_adjacent),
    /// given in their order, are side by side as well.
    ///
    /// Memory that several blocks share must not be written through any of them:
    /// [`Block::read_only`] returns its size. A kernel that writes there in a fork loses the
    /// context; a kernel that writes there in the forked block changes the bytes of its forks. A
    /// block that shrinks into the shared prefix gets memory of its own there when it grows again.
    /// That [growth](Block::grow_to) is refused while a lease, or work already queued on the block,
    /// may use the shared memory ([`BlockError::SharedInUse`]). Blocks with shared memory go to no
    /// stream cache: a dropped block is unmapped once its work is complete.
    ///
    /// # Errors
    /// [`BlockError`] when a size is out of its range; when a block is another tenant's or sleeps;
    /// when memory is short, with the figures; when bytes must be copied while a capture is
    /// running; and when a driver call fails. Every block is then as before. If one copy fails,
    /// memory that other copies are writing to stays charged until they are complete.
    #[doc(alias("cuMemMap", "copy-on-write", "prefix sharing"))]
    pub fn fork_all(
        &self,
        blocks: &[&Block],
        bytes: u64,
        size: u64,
    ) -> Result<Vec<Block>, BlockError> {
        let prefix = self.prefix_of(blocks, bytes, size)?;
        self.fork_blocks(blocks, prefix)
    }

    /// Forks several of the tenant's blocks, all of them or none, if that needs no waiting. See
    /// [`fork_all`](Self::fork_all).
    ///
    /// # Errors
    /// As [`Self::fork_all`].
    pub fn try_fork_all(
        &self,
        blocks: &[&Block],
        bytes: u64,
        size: u64,
    ) -> Result<Vec<Block>, BlockError> {
        let prefix = self.prefix_of(blocks, bytes, size)?;
        self.try_fork_blocks(blocks, prefix)
    }

    fn prefix_of(&self, blocks: &[&Block], bytes: u64, size: u64) -> Result<Prefix, BlockError> {
        match blocks.iter().position(|block| !self.has(block)) {
            Some(index) => Err(BlockError::WrongTenant { index }),
            None => Prefix::of(blocks, bytes, size),
        }
    }

    pub(crate) fn fork_blocks(
        &self,
        blocks: &[&Block],
        prefix: Prefix,
    ) -> Result<Vec<Block>, BlockError> {
        let wait = Wait::of_any(blocks.iter().map(|block| block.patience()));
        fork(self.core(), blocks, prefix, wait)
    }

    pub(crate) fn try_fork_blocks(
        &self,
        blocks: &[&Block],
        prefix: Prefix,
    ) -> Result<Vec<Block>, BlockError> {
        fork(self.core(), blocks, prefix, Wait::Never)
    }
}

fn fork(
    core: &Core,
    blocks: &[&Block],
    prefix: Prefix,
    wait: Wait,
) -> Result<Vec<Block>, BlockError> {
    core.device.own_process()?;
    let Some(first) = blocks.first() else {
        return Ok(Vec::new());
    };
    let tenant = first.place().slot.tenant;
    let places: Vec<BlockPlace> = blocks.iter().map(|block| *block.place()).collect();
    let bytes = core.bytes_of_forks(&places, prefix);
    let slots = || places.iter().map(|place| (place.slot, 0));
    let made = core.request(tenant, bytes, wait, |mut state| {
        state.purge_some();
        state = core.await_slots(state, slots());
        let outcome = state.fork_all(&places, prefix);
        (state, outcome)
    })?;
    let pairs = blocks.iter().zip(made);
    Ok(pairs
        .map(|(block, place)| block.forked(place, prefix.size))
        .collect())
}

impl Block {
    /// Forks the block: makes a block of `size` bytes that begins with this block's first `bytes`
    /// bytes and shares the whole extents among them. See [`Tenant::fork_all`].
    ///
    /// # Errors
    /// As [`Tenant::fork_all`].
    #[doc(alias("cuMemMap", "copy-on-write"))]
    pub fn fork(&self, bytes: u64, size: u64) -> Result<Self, BlockError> {
        self.fork_one(bytes, size, Wait::of(self.patience()))
    }

    /// Forks the block if that needs no waiting. See [`Tenant::fork_all`].
    ///
    /// # Errors
    /// As [`Tenant::fork_all`].
    pub fn try_fork(&self, bytes: u64, size: u64) -> Result<Self, BlockError> {
        self.fork_one(bytes, size, Wait::Never)
    }

    fn fork_one(&self, bytes: u64, size: u64, wait: Wait) -> Result<Self, BlockError> {
        let prefix = Prefix::of(&[self], bytes, size)?;
        let made = fork(self.core(), &[self], prefix, wait)?;
        made.into_iter().next().ok_or_else(gone)
    }

    /// Returns how many of the block's first bytes must not be written: those that it shares with
    /// its [forks](Self::fork), or with the block that it is a fork of. A fork may not write them
    /// even if it is the last block that maps them. A forked block may write them again once all
    /// its forks are gone. Memory behind these bytes is the block's own, unless the block has
    /// shrunk since.
    #[must_use]
    pub fn read_only(&self) -> u64 {
        let state = self.core().lock_with(self.place().slot);
        let slot = state.blocks.slots.get(self.place().slot);
        slot.map_or(0, |slot| slot.bound().min(slot.requested()))
    }
}

impl Prefix {
    fn of(blocks: &[&Block], bytes: u64, size: u64) -> Result<Self, BlockError> {
        let what = "bytes that a fork begins with";
        ArgumentError::not_zero(what, bytes)?;
        ArgumentError::at_most(what, bytes, size)?;
        for block in blocks {
            let (has, capacity) = (block.size(), block.capacity());
            ArgumentError::at_most(what, bytes, has)?;
            ArgumentError::at_most(BYTES, size, capacity)?;
        }
        Ok(Self { bytes, size })
    }
}

impl Core {
    fn bytes_of_forks(&self, blocks: &[BlockPlace], prefix: Prefix) -> u64 {
        let size = self.device.granule().round_up(prefix.size);
        let wanted = blocks.iter().map(|block| (block.slot, 0));
        let state = self.await_slots(self.lock(), wanted);
        let own = |block: &BlockPlace| {
            let parts = state.blocks.slots.get(block.slot);
            let parts = parts.map(|slot| whole_parts(slot, prefix.bytes));
            let shared = parts.into_iter().flatten().map(|physical| physical.size());
            size.unwrap_or(u64::MAX).saturating_sub(shared.sum())
        };
        blocks.iter().map(own).fold(0, u64::saturating_add)
    }
}

impl Locked<'_> {
    fn fork_all(
        &mut self,
        blocks: &[BlockPlace],
        prefix: Prefix,
    ) -> Result<Vec<BlockPlace>, BlockError> {
        let take = |block: &BlockPlace| Some((block.slot, self.take_out(block.slot)?));
        let mut sources: Sources = blocks.iter().filter_map(take).collect();
        let mut made: Vec<Forked> = Vec::with_capacity(blocks.len());
        let outcome = self.fork_each(blocks, prefix, &mut sources, &mut made);
        let forks = made.iter().zip(blocks);
        let places = forks.map(|(forked, block)| forked.slot.place(block.capacity));
        let outcome = outcome.map(|()| places.collect());
        for mut forked in made.into_iter().rev() {
            match outcome {
                Ok(_) => {
                    forked.slot.space.settle(forked.shared);
                    self.blocks.put_slot(forked.slot);
                }
                Err(_) => self.undo_out(forked.slot, &forked.change),
            }
        }
        sources
            .into_values()
            .for_each(|slot| self.blocks.put_slot(slot));
        outcome
    }

    /// Makes all forks. Places all memory before it queues the copies: while no copy runs, all
    /// changes can be undone at once.
    fn fork_each(
        &mut self,
        blocks: &[BlockPlace],
        prefix: Prefix,
        sources: &mut Sources,
        made: &mut Vec<Forked>,
    ) -> Result<(), BlockError> {
        let mut left = blocks;
        while let Some(first) = left.first() {
            let guards = self.blocks.guard().saturating_mul(2);
            let count = side_by_side(first, left, sources, guards);
            let (side_by_side, rest) = left.split_at(count);
            self.fork_run(side_by_side, prefix, sources, made)?;
            left = rest;
        }
        made.iter_mut()
            .try_for_each(|forked| self.copy_rest(forked, prefix.bytes, sources))
    }

    /// Forks blocks that are side by side. The forks are side by side too.
    fn fork_run(
        &mut self,
        blocks: &[BlockPlace],
        prefix: Prefix,
        sources: &mut Sources,
        made: &mut Vec<Forked>,
    ) -> Result<(), BlockError> {
        let Some(&BlockPlace { slot, .. }) = blocks.first() else {
            return Ok(());
        };
        let id = slot.tenant;
        self.memory.check_usable(id)?;
        let class = sources.get(&slot).ok_or_else(gone)?.class;
        let mut slots = self.open_slots(id, class, blocks.len())?;
        let mut row = Vec::with_capacity(blocks.len());
        for (block, slot) in blocks.iter().zip(slots.by_ref()) {
            row.push(slot.id.index);
            match self.fork(block, slot, prefix, sources) {
                Ok(forked) => made.push(forked),
                Err(error) => {
                    slots.for_each(|slot| self.drop_slot(slot));
                    return Err(error);
                }
            }
        }
        if let Some(tenancy) = self.blocks.slots.of_mut(id).filter(|_| row.len() > 1) {
            tenancy.rows.add(row);
        }
        Ok(())
    }

    /// Makes a new slot a block with the memory for a prefix of another block. On failure the slot
    /// is gone.
    fn fork(
        &mut self,
        block: &BlockPlace,
        mut slot: Box<Slot>,
        prefix: Prefix,
        sources: &mut Sources,
    ) -> Result<Forked, BlockError> {
        let mut change = Change::of(&slot, slot.place(block.capacity));
        change.new = true;
        let source = sources.get_mut(&block.slot).ok_or_else(gone);
        let lent = source.and_then(|source| self.lend(source, &mut slot, prefix));
        let filled = lent.as_ref().is_ok_and(|given| given.filled);
        change.given = Some(PlacedMemory { begun: 0, filled });
        match lent {
            Ok(given) => Ok(Forked {
                slot,
                change,
                from: block.slot,
                shared: given.begun,
            }),
            Err(error) => {
                self.undo_out(slot, &change);
                Err(error)
            }
        }
    }

    /// Maps whole extents of another slot's prefix in a new slot, places memory of its own behind
    /// them, and puts a block in the slot.
    fn lend(
        &mut self,
        source: &mut Slot,
        slot: &mut Slot,
        prefix: Prefix,
    ) -> Result<PlacedMemory, BlockError> {
        source.block.as_ref().ok_or_else(gone)?;
        source.check_awake()?;
        let used = self.memory.device.granule().whole(BYTES, prefix.size)?;
        let (id, parts) = (slot.id.tenant, whole_parts(source, prefix.bytes));
        let count = parts.len() as u64;
        self.make_mapping_room(id, count, true)?;
        let charge = self.memory.budget.charge(Some(id), Amount::mappings(count));
        let last_writer = Some(LastWriter {
            by: id.0,
            blank: false,
        });
        let physicals = parts.into_iter().map(|physical| Unmapped {
            physical,
            last_writer,
            fresh: false,
        });
        let physicals: Vec<Unmapped> = physicals.collect();
        let shared = physicals.iter().map(Unmapped::size).sum();
        match self.unlocked(|| slot.space.place_for(0, physicals, Access::Read)) {
            Ok(()) => self.memory.budget.keep(charge),
            Err(failed) => {
                self.memory.budget.refund(charge);
                // The stuck mappings refer to memory of the other slot.
                self.memory.budget.quarantine(0, slot.space.stuck_count());
                return Err(self.not_placed(id, shared, failed.error));
            }
        }
        self.blocks.share(source, slot, shared);
        slot.merged = source.merged;
        let other = source.block.as_ref().ok_or_else(gone)?;
        let fit = Fit {
            // Shared memory keeps its contents.
            zeros: None,
            ..Fit::new(used, other.home.as_ref(), other.zeroed)
        };
        let given = self.place_memory(slot, &fit, None)?;
        slot.block = Some(Occupant {
            requested: prefix.size,
            ever: prefix.size,
            used,
            most: other.most,
            reach: slot.space.bytes(),
            noted: slot.space.note_writer(given.begun, used, id.0),
            growth: other.growth,
            pace: Pace::default(),
            home: other.home.clone(),
            uses: Uses::none(),
            tag: other.tag.clone(),
            zeroed: other.zeroed,
            movable: other.movable,
            kept: Ranges::default(),
        });
        Ok(given)
    }

    fn copy_rest(
        &mut self,
        forked: &mut Forked,
        bytes: u64,
        sources: &mut Sources,
    ) -> Result<(), BlockError> {
        let Some(rest) = bytes.checked_sub(forked.shared).filter(|&rest| rest > 0) else {
            return Ok(());
        };
        let source = sources.get_mut(&forked.from).ok_or_else(gone)?;
        let slot = &mut forked.slot;
        let home = slot.home().cloned();
        match self.copy_between(source, slot, (forked.shared, rest), home.as_ref()) {
            Ok(()) => {
                forked.note_written(home.is_some());
                Ok(())
            }
            Err(failed) => {
                let running = !failed.running.is_complete();
                slot.fence.merge(failed.running);
                forked.note_written(running);
                Err(failed.error)
            }
        }
    }
}

/// Returns how many of the blocks, from `first` on, are side by side in the given order, with
/// `guards` bytes of guards between two blocks. Compares addresses, since other slots of the row
/// may be gone.
fn side_by_side(
    first: &BlockPlace,
    blocks: &[BlockPlace],
    sources: &Sources,
    guards: u64,
) -> usize {
    let class = |block: &BlockPlace| Some(sources.get(&block.slot)?.class);
    let first = class(first);
    let distance = first.map(|class| class.size.saturating_add(guards));
    let next = |pair: &&[BlockPlace]| match pair {
        [one, two] => class(two) == first && two.address.0.checked_sub(one.address.0) == distance,
        _ => false,
    };
    1 + blocks.windows(2).take_while(next).count()
}

/// Returns the memory of the whole extents in the first `bytes` bytes of a slot that may be shared.
fn whole_parts(slot: &Slot, bytes: u64) -> Vec<Physical> {
    let parts = slot.space.parts_in(0, bytes);
    parts
        .take_while(|(extent, _)| !slot.exported && extent.end() <= bytes)
        .map(|(_, physical)| physical.clone())
        .collect()
}
