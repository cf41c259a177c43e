//! Blocks that begin with the bytes of others: whole extents are mapped a second time, to be read
//! only, and what is left of the prefix is copied on the device.
//!
//! The other block goes on reading and writing at its own addresses; that kernels of neither write
//! before the point of the fork any more is their user's promise. From then on the memory is
//! [shared](super::shared). What was exported is not shared but copied.
//!
//! Forks of blocks that lie side by side lie side by side.

use std::collections::BTreeMap;

use super::block::Block;
use super::budget::Amount;
use super::change::Change;
use super::commit::{Fit, Furnished};
use super::core::{Core, Locked};
use super::fills::{Unfinished, is_capturing};
use super::ids::BYTES;
use super::ids::{BlockPlace, SlotId};
use super::pace::Pace;
use super::slot::{Occupant, Slot};
use super::state::gone;
use super::tenant::Tenant;
use super::wait::Wait;
use crate::error::{ArgumentError, BlockError, MemoryError};
use crate::own::{Access, Physical};
use crate::region::{LastWriter, Unmapped, Uses};

/// What a fork is to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefix {
    /// So many bytes are the other block's; no more than that has.
    pub(crate) bytes: u64,
    /// So many there are; no fewer, and no more than the other block has.
    pub(crate) size: u64,
}

/// The slots of the blocks that are forked, while they are out.
type Sources = BTreeMap<SlotId, Box<Slot>>;

/// A block that was forked, whose slot is out.
#[derive(Debug)]
struct Forked {
    slot: Box<Slot>,
    /// How to undo it.
    change: Change,
    /// The slot of the other block.
    from: SlotId,
    /// Up to where they share memory.
    shared: u64,
}

impl Forked {
    /// The home stream, or one that its fence names, has been told to write to its own memory.
    const fn note_written(&mut self, written: bool) {
        if let Some(given) = &mut self.change.given {
            given.filled |= written;
        }
    }
}

impl Tenant {
    /// A block of `size` bytes for each of several of the tenant's, which begins with its first
    /// `bytes` bytes: all of them or none. Asks pressure hooks, and waits as long as the most patient
    /// of the blocks may; not for work on the GPU.
    ///
    /// A fork has new addresses (`cuMemAddressReserve`). Whole extents of the prefix are mapped there
    /// a second time, to be read only: `cuMemMap` and `cuMemSetAccess` for each, about 25 us, and no
    /// memory; they are charged once, as [`shared`](super::TenantStats::shared), and go with the last
    /// block that shows them. What is left of the prefix is copied behind what the home stream has
    /// queued (`cuMemcpyDtoDAsync`), so that a block which is to be forked wants [small
    /// extents](super::BlockBuilder::largest_extent). Where there is no home stream the copy is made
    /// at once, and ordered behind nothing: what writes to the prefix has to have passed. What was
    /// exported is copied as well.
    ///
    /// A fork has its block's capacity, home stream, tag, growth and timeout, and is one like any
    /// other: it grows and shrinks, is forked, sleeps and is dropped, in any order with the others. Forks
    /// of blocks that were [allocated side by side](super::BlockBuilder::allocate_adjacent), given in
    /// their order, lie side by side as well.
    ///
    /// What several blocks show is written by none of them: [`Block::read_only`] says how much that
    /// is. A kernel that writes there in a fork loses the context; one that writes there in the
    /// block which was forked changes what the forks read. A block that shrinks to less has memory of
    /// its own behind that when it grows again, which it does not while a lease or work that is
    /// queued may use what was there ([`BlockError::SharedInUse`]). What shows shared memory goes
    /// in no stream cache: when it is dropped it is unmapped, once its work has passed.
    ///
    /// # Errors
    /// [`BlockError`] says why a block cannot be forked so, or how memory is short, with the figures. Every block is as before then. What a copy is just writing to when another one fails
    /// stays charged until that has passed.
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

    /// The same if that needs no waiting.
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

    /// What blocks of this tenant are to be forked with.
    fn prefix_of(&self, blocks: &[&Block], bytes: u64, size: u64) -> Result<Prefix, BlockError> {
        match blocks.iter().position(|block| !self.has(block)) {
            Some(index) => Err(BlockError::NotOurs { index }),
            None => Prefix::of(blocks, bytes, size),
        }
    }

    /// [`Self::fork_all`] of blocks of this tenant that can be forked so.
    pub(crate) fn fork_blocks(
        &self,
        blocks: &[&Block],
        prefix: Prefix,
    ) -> Result<Vec<Block>, BlockError> {
        let wait = Wait::of_any(blocks.iter().map(|block| block.patience()));
        fork(self.core(), blocks, prefix, wait)
    }

    /// The same if that needs no waiting.
    pub(crate) fn try_fork_blocks(
        &self,
        blocks: &[&Block],
        prefix: Prefix,
    ) -> Result<Vec<Block>, BlockError> {
        fork(self.core(), blocks, prefix, Wait::Never)
    }
}

/// Forks blocks of one tenant.
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
    /// A block of `size` bytes that begins with the first `bytes` bytes of this one, and shares the
    /// memory of those as far as they fill whole extents. See [`Tenant::fork_all`].
    ///
    /// # Errors
    /// As [`Tenant::fork_all`].
    #[doc(alias("cuMemMap", "copy-on-write"))]
    pub fn fork(&self, bytes: u64, size: u64) -> Result<Self, BlockError> {
        self.fork_one(bytes, size, Wait::of(self.patience()))
    }

    /// The same if that needs no waiting.
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

    /// How many of its first bytes must not be written: those that it shows together with its
    /// [forks](Self::fork), or with what it is a fork of. A fork that is the last to show them may
    /// not write them either; a block that was forked may, once all its forks have gone. Unless it
    /// has shrunk since, what lies behind is its own.
    #[must_use]
    pub fn read_only(&self) -> u64 {
        let state = self.core().lock_with(self.place().slot);
        let slot = state.slot(self.place().slot);
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
    /// How much memory forks need beside what they share, in whole granules.
    fn bytes_of_forks(&self, blocks: &[BlockPlace], prefix: Prefix) -> u64 {
        let size = self.device.granule().round_up(prefix.size);
        let wanted = blocks.iter().map(|block| (block.slot, 0));
        let state = self.await_slots(self.lock(), wanted);
        let own = |block: &BlockPlace| {
            let parts = state.slot(block.slot);
            let parts = parts.map(|slot| whole_parts(slot, prefix.bytes));
            let shared = parts.into_iter().flatten().map(|physical| physical.size());
            size.unwrap_or(u64::MAX).saturating_sub(shared.sum())
        };
        blocks.iter().map(own).fold(0, u64::saturating_add)
    }
}

impl Locked<'_> {
    /// Forks blocks, whose slots are in their places: all of them or none.
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
                    self.put_slot(forked.slot);
                }
                Err(_) => self.undo_out(forked.slot, &forked.change),
            }
        }
        sources.into_values().for_each(|slot| self.put_slot(slot));
        outcome
    }

    /// First all memory, then all copies: as long as none is running, all can be undone at once.
    fn fork_each(
        &mut self,
        blocks: &[BlockPlace],
        prefix: Prefix,
        sources: &mut Sources,
        made: &mut Vec<Forked>,
    ) -> Result<(), BlockError> {
        let mut left = blocks;
        while let Some(first) = left.first() {
            let guards = self.guard().saturating_mul(2);
            let count = side_by_side(first, left, sources, guards);
            let (side_by_side, rest) = left.split_at(count);
            self.fork_run(side_by_side, prefix, sources, made)?;
            left = rest;
        }
        made.iter_mut()
            .try_for_each(|forked| self.copy_rest(forked, prefix.bytes, sources))
    }

    /// Forks blocks that lie side by side, at least one, side by side.
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
        self.check_usable(id)?;
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
        if let Some(tenancy) = self.tenants.get_mut(&id).filter(|_| row.len() > 1) {
            tenancy.rows.add(row);
        }
        Ok(())
    }

    /// Makes a new slot a block with the memory for a prefix of another. If that fails the slot is
    /// gone.
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
        change.given = Some(Furnished { begun: 0, filled });
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

    /// What a fork of so many bytes takes in whole granules, if the block can be forked.
    fn room_for_fork(&self, source: &Slot, size: u64) -> Result<u64, BlockError> {
        let block = source.block.as_ref().ok_or_else(gone)?;
        if !source.sleep_state.is_awake() {
            let size = block.requested;
            return Err(MemoryError::Asleep { size }.into());
        }
        let used = self.device.granule().round_up(size);
        used.ok_or(
            ArgumentError::Uncountable {
                what: BYTES,
                value: size,
            }
            .into(),
        )
    }

    /// Puts whole extents of another slot's prefix under a new one, memory of its own behind them, and
    /// a block in it.
    fn lend(
        &mut self,
        source: &mut Slot,
        slot: &mut Slot,
        prefix: Prefix,
    ) -> Result<Furnished, BlockError> {
        let used = self.room_for_fork(source, prefix.size)?;
        let (id, parts) = (slot.id.tenant, whole_parts(source, prefix.bytes));
        let count = parts.len() as u64;
        self.make_mapping_room(id, count, true)?;
        let charge = self.budget.charge(Some(id), Amount::mappings(count));
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
            Ok(()) => charge.keep(),
            Err(failed) => {
                self.budget.refund(charge);
                // What is stuck shows memory that the other slot has.
                self.budget.quarantine(0, slot.space.stuck_count());
                return Err(self.not_placed(id, shared, failed.error));
            }
        }
        self.share(source, slot, shared);
        slot.merged = source.merged;
        let other = source.block.as_ref().ok_or_else(gone)?;
        let fit = Fit {
            // What is shared is to stay as it is.
            zeros: None,
            ..Fit::new(used, other.home.as_ref(), other.zeroed)
        };
        let given = self.furnish(slot, &fit)?;
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
        });
        Ok(given)
    }

    /// Copies what of a prefix is not shared.
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
        let (id, home) = (slot.id.tenant, slot.home().cloned());
        let outcome = is_capturing(home.as_ref())
            .map_err(Unfinished::from)
            .and_then(|capturing| match capturing || self.capturing > 0 {
                // It would become part of the graph, and not run now.
                true => Err(BlockError::Capturing(self.shortage(id, rest, 0)).into()),
                false => {
                    let range = (forked.shared, rest);
                    self.copy_between(source, slot, range, home.as_ref())
                }
            });
        match outcome {
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

/// How many blocks, of which there is a first, lie side by side in their order, with so many bytes of
/// guards between two. Their addresses tell: of their row other slots may have gone.
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

/// The memory of the extents that lie in the first `bytes` of a slot and may be shown elsewhere.
fn whole_parts(slot: &Slot, bytes: u64) -> Vec<Physical> {
    let parts = slot.space.parts_in(0, bytes);
    parts
        .take_while(|(extent, _)| !slot.exported && extent.end() <= bytes)
        .map(|(_, physical)| physical.clone())
        .collect()
}
