//! Blocks that begin with the bytes of others: whole extents are mapped a second time, to be read
//! only, and what is left of the prefix is copied on the device.
//!
//! The other block goes on reading and writing at its own addresses; that kernels of neither write
//! before the point of the fork any more is their user's promise. From then on the memory is
//! [shared](super::shared). What was exported is not shared but copied.
//!
//! Forks of blocks that lie side by side lie side by side.

use std::collections::BTreeMap;
use std::time::Instant;

use super::block::{Block, after};
use super::budget::TenantId;
use super::commit::{Fit, Furnished, Unfinished, is_capturing};
use super::core::{Attempt, Core, Locked};
use super::grow::gone;
use super::pace::Pace;
use super::relief::Demand;
use super::slot::{Occupant, Slot, SlotId};
use super::state::State;
use super::tenant::Tenant;
use crate::error::{AllocateError, ForkBlocksError};
use crate::own::{Access, Physical};
use crate::region::{Fence, LastWriter, PlaceError, Unmapped, Unused, Uses};

/// What a fork is to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefix {
    /// So many bytes are the other block's; no more than that has.
    pub(crate) bytes: u64,
    /// So many there are; no fewer, and no more than the other block has.
    pub(crate) size: u64,
}

/// The slots of the blocks that are forked, by their numbers, while they are out.
type Sources = BTreeMap<usize, Box<Slot>>;

/// A block that was forked, whose slot is out.
#[derive(Debug)]
struct Forked {
    place: SlotId,
    slot: Box<Slot>,
    /// The slot of the other block.
    from: usize,
    /// Up to where they share memory.
    shared: u64,
    /// Whether the home stream, or one that its fence names, has been told to write to the rest.
    written: bool,
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
    /// queued may use what was there ([`AllocateError::SharedInUse`]). What shows shared memory goes
    /// in no stream cache: when it is dropped it is unmapped, once its work has passed.
    ///
    /// # Errors
    /// [`ForkBlocksError`] says which block cannot be forked so, or how memory is short, with the
    /// figures. Every block is as before then. What a copy is just writing to when another one fails
    /// stays charged until that has passed.
    #[doc(alias("cuMemMap", "copy-on-write", "prefix sharing"))]
    pub fn fork_all(
        &self,
        blocks: &[&Block],
        bytes: u64,
        size: u64,
    ) -> Result<Vec<Block>, ForkBlocksError> {
        let prefix = self.prefix_of(blocks, bytes, size)?;
        Ok(self.fork_blocks(blocks, prefix)?)
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
    ) -> Result<Vec<Block>, ForkBlocksError> {
        let prefix = self.prefix_of(blocks, bytes, size)?;
        Ok(self.try_fork_blocks(blocks, prefix)?)
    }

    /// What blocks of this tenant are to be forked with.
    fn prefix_of(
        &self,
        blocks: &[&Block],
        bytes: u64,
        size: u64,
    ) -> Result<Prefix, ForkBlocksError> {
        match blocks.iter().position(|block| !self.has(block)) {
            Some(index) => Err(ForkBlocksError::NotOurs { index }),
            None => Prefix::of(blocks, bytes, size),
        }
    }

    /// [`Self::fork_all`] of blocks of this tenant that can be forked so.
    pub(crate) fn fork_blocks(
        &self,
        blocks: &[&Block],
        prefix: Prefix,
    ) -> Result<Vec<Block>, AllocateError> {
        let patience = blocks.iter().filter_map(|block| block.patience());
        let until = patience.max().map(after);
        let made = self
            .core()
            .fork_all(self.id(), &places(blocks), prefix, until)?;
        Ok(forked(blocks, made, prefix.size))
    }

    /// The same if that needs no waiting.
    pub(crate) fn try_fork_blocks(
        &self,
        blocks: &[&Block],
        prefix: Prefix,
    ) -> Result<Vec<Block>, AllocateError> {
        let made = self
            .core()
            .try_fork_all(self.id(), &places(blocks), prefix)?;
        Ok(forked(blocks, made, prefix.size))
    }
}

impl Block {
    /// A block of `size` bytes that begins with the first `bytes` bytes of this one, and shares the
    /// memory of those as far as they fill whole extents. See [`Tenant::fork_all`].
    ///
    /// # Errors
    /// As [`Tenant::fork_all`].
    #[doc(alias("cuMemMap", "copy-on-write"))]
    pub fn fork(&self, bytes: u64, size: u64) -> Result<Self, ForkBlocksError> {
        let prefix = Prefix::of(&[self], bytes, size)?;
        let until = self.patience().map(after);
        let place = *self.place();
        let made = self
            .core()
            .fork_all(place.tenant, &[place], prefix, until)?;
        self.only_fork(made, size)
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Tenant::fork_all`].
    pub fn try_fork(&self, bytes: u64, size: u64) -> Result<Self, ForkBlocksError> {
        let prefix = Prefix::of(&[self], bytes, size)?;
        let place = *self.place();
        let made = self.core().try_fork_all(place.tenant, &[place], prefix)?;
        self.only_fork(made, size)
    }

    fn only_fork(&self, made: Vec<SlotId>, size: u64) -> Result<Self, ForkBlocksError> {
        let place = made.into_iter().next().ok_or_else(gone)?;
        Ok(self.forked(place, size))
    }

    /// How many of its first bytes must not be written: those that it shows together with its
    /// [forks](Self::fork), or with what it is a fork of. A fork that is the last to show them may
    /// not write them either; a block that was forked may, once all its forks have gone. Unless it
    /// has shrunk since, what lies behind is its own.
    #[must_use]
    pub fn read_only(&self) -> u64 {
        let state = self.core().lock_with(self.place());
        let SlotId { tenant, slot, .. } = *self.place();
        let slot = state.slot(tenant, slot);
        slot.map_or(0, |slot| slot.bound().min(slot.requested()))
    }
}

impl Prefix {
    fn of(blocks: &[&Block], bytes: u64, size: u64) -> Result<Self, ForkBlocksError> {
        if bytes == 0 {
            return Err(ForkBlocksError::NoPrefix);
        }
        if size < bytes {
            return Err(ForkBlocksError::LessThanPrefix { bytes, size });
        }
        for (index, block) in blocks.iter().enumerate() {
            let (has, capacity) = (block.size(), block.capacity());
            if bytes > has {
                return Err(ForkBlocksError::TooLong { index, bytes, has });
            }
            if size > capacity {
                return Err(AllocateError::OverCapacity { size, capacity }.into());
            }
        }
        Ok(Self { bytes, size })
    }
}

fn places(blocks: &[&Block]) -> Vec<SlotId> {
    blocks.iter().map(|block| *block.place()).collect()
}

fn forked(blocks: &[&Block], made: Vec<SlotId>, size: u64) -> Vec<Block> {
    let pairs = blocks.iter().zip(made);
    pairs
        .map(|(block, place)| block.forked(place, size))
        .collect()
}

impl Core {
    fn try_fork_all(
        &self,
        tenant: TenantId,
        blocks: &[SlotId],
        prefix: Prefix,
    ) -> Result<Vec<SlotId>, AllocateError> {
        self.device.own_process()?;
        let demand = self.demand_of_forks(blocks, prefix);
        let attempt = |state| self.attempt_to_fork(state, blocks, prefix);
        let (mut state, outcome) = self.beside_others(self.lock(), &attempt);
        let outcome = outcome.map_err(|error| state.refuse(tenant, demand, error));
        Self::let_go(state);
        outcome
    }

    fn fork_all(
        &self,
        tenant: TenantId,
        blocks: &[SlotId],
        prefix: Prefix,
        until: Option<Instant>,
    ) -> Result<Vec<SlotId>, AllocateError> {
        self.device.own_process()?;
        let demand = self.demand_of_forks(blocks, prefix);
        self.insist(tenant, demand, until, |state| {
            self.attempt_to_fork(state, blocks, prefix)
        })
    }

    fn attempt_to_fork<'a>(
        &'a self,
        mut state: Locked<'a>,
        blocks: &[SlotId],
        prefix: Prefix,
    ) -> Attempt<'a, Vec<SlotId>> {
        state.purge_some();
        state = self.await_slots(state, blocks.iter().map(|block| (*block, 0)));
        let outcome = state.fork_all(blocks, prefix);
        state.look_behind();
        (state, outcome)
    }
}

impl Core {
    /// What forks need beside what they share, each in whole granules.
    fn demand_of_forks(&self, blocks: &[SlotId], prefix: Prefix) -> Demand<'static> {
        let size = self.device.granule().round_up(prefix.size);
        let wanted = blocks.iter().map(|block| (*block, 0));
        let state = self.await_slots(self.lock(), wanted);
        let own = |block: &SlotId| {
            let parts = state.slot(block.tenant, block.slot);
            let parts = parts.map(|slot| whole_parts(slot, prefix.bytes));
            let shared = parts.into_iter().flatten().map(|physical| physical.size());
            size.unwrap_or(u64::MAX).saturating_sub(shared.sum())
        };
        Demand::Bytes(blocks.iter().map(own).fold(0, u64::saturating_add))
    }
}

impl Locked<'_> {
    /// Forks blocks, whose slots are in their places: all of them or none.
    fn fork_all(
        &mut self,
        blocks: &[SlotId],
        prefix: Prefix,
    ) -> Result<Vec<SlotId>, AllocateError> {
        let mut sources = BTreeMap::new();
        for block in blocks {
            let source = self.take_out(block.tenant, block.slot);
            sources.extend(source.map(|source| (block.slot, source)));
        }
        let mut made = Vec::with_capacity(blocks.len());
        let outcome = self.fork_each(blocks, prefix, &mut sources, &mut made);
        let places = made.iter().map(|forked| forked.place).collect();
        match outcome {
            Ok(()) => {
                for mut forked in made {
                    let SlotId { tenant, slot, .. } = forked.place;
                    forked.slot.space.settle(forked.shared);
                    self.put_slot(tenant, slot, forked.slot);
                }
            }
            Err(_) => {
                let made = made.into_iter().rev();
                made.for_each(|forked| self.unfork(forked));
            }
        }
        for (index, source) in sources {
            if let Some(block) = blocks.first() {
                self.put_slot(block.tenant, index, source);
            }
        }
        outcome.map(|()| places)
    }

    /// First all memory, then all copies: as long as none is running, all can be undone at once.
    fn fork_each(
        &mut self,
        blocks: &[SlotId],
        prefix: Prefix,
        sources: &mut Sources,
        made: &mut Vec<Forked>,
    ) -> Result<(), AllocateError> {
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
        blocks: &[SlotId],
        prefix: Prefix,
        sources: &mut Sources,
        made: &mut Vec<Forked>,
    ) -> Result<(), AllocateError> {
        let Some(&SlotId {
            tenant: id, slot, ..
        }) = blocks.first()
        else {
            return Ok(());
        };
        self.check_usable(id)?;
        let class = sources.get(&slot).ok_or_else(gone)?.class;
        let slots = self.open_slots(id, class, blocks.len())?;
        let row: Vec<usize> = slots.iter().map(|&(index, _)| index).collect();
        let mut slots = slots.into_iter();
        for (block, slot) in blocks.iter().zip(slots.by_ref()) {
            match self.fork(block, slot, prefix, sources) {
                Ok(forked) => made.push(forked),
                Err(error) => {
                    slots.for_each(|(index, slot)| self.drop_slot(id, index, slot));
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
        block: &SlotId,
        (index, mut slot): (usize, Box<Slot>),
        prefix: Prefix,
        sources: &mut Sources,
    ) -> Result<Forked, AllocateError> {
        let id = block.tenant;
        let lent = match sources.get_mut(&block.slot) {
            Some(source) => self.room_for_fork(source, prefix.size).and_then(|used| {
                let from = (block.slot, &mut **source);
                self.lend(id, from, (index, &mut slot), prefix.bytes, used)
            }),
            None => Err(gone()),
        };
        let (given, used) = match lent {
            Ok(lent) => lent,
            Err(error) => {
                self.leave_shared(id, index, &mut slot, Some(Unused::never_used()));
                self.drop_slot(id, index, slot);
                return Err(error);
            }
        };
        let source = sources.get(&block.slot);
        if let Some(other) = source.and_then(|source| source.block.as_ref()) {
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
        }
        let place = SlotId {
            slot: index,
            address: slot.space.address(),
            ..*block
        };
        Ok(Forked {
            place,
            slot,
            from: block.slot,
            shared: given.begun,
            written: given.filled,
        })
    }

    /// What a fork of so many bytes takes in whole granules, if the block can be forked.
    fn room_for_fork(&self, source: &Slot, size: u64) -> Result<u64, AllocateError> {
        let block = source.block.as_ref().ok_or_else(gone)?;
        if !source.sleep_state.is_awake() {
            let size = block.requested;
            return Err(AllocateError::Asleep { size });
        }
        let used = self.device.granule().round_up(size);
        used.ok_or(AllocateError::TooLarge { size })
    }

    /// Puts whole extents of another slot's first `bytes` under a new one, and memory of its own
    /// behind them, up to `used`.
    fn lend(
        &mut self,
        id: TenantId,
        (from, source): (usize, &mut Slot),
        (index, slot): (usize, &mut Slot),
        bytes: u64,
        used: u64,
    ) -> Result<(Furnished, u64), AllocateError> {
        let parts = whole_parts(source, bytes);
        let count = parts.len() as u64;
        self.make_mapping_room(id, count, true)?;
        self.budget.charge_mappings(id, count);
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
        let placed = self.unlocked(|| slot.space.place_for(0, physicals, Access::Read));
        if let Err(PlaceError { error, .. }) = placed {
            self.budget.refund_mappings(id, count);
            // What is stuck shows memory that the other slot has.
            self.budget.quarantine(0, slot.space.stuck_count());
            return Err(self.not_placed(id, shared, error));
        }
        self.share(id, (from, source), (index, slot), shared);
        let (home, zeroed) = match &source.block {
            Some(block) => (block.home.clone(), block.zeroed),
            None => (None, false),
        };
        let fit = Fit {
            // What is shared is to stay as it is.
            zeros: None,
            ..Fit::new(used, home.as_ref(), zeroed)
        };
        Ok((self.furnish((id, index), slot, &fit)?, used))
    }

    /// Copies what of a prefix is not shared.
    fn copy_rest(
        &mut self,
        forked: &mut Forked,
        bytes: u64,
        sources: &mut Sources,
    ) -> Result<(), AllocateError> {
        let Some(rest) = bytes.checked_sub(forked.shared).filter(|&rest| rest > 0) else {
            return Ok(());
        };
        let id = forked.place.tenant;
        let source = sources.get_mut(&forked.from).ok_or_else(gone)?;
        let slot = &mut forked.slot;
        let home = slot.block.as_ref().and_then(|block| block.home.clone());
        let outcome = is_capturing(home.as_ref())
            .map_err(Unfinished::from)
            .and_then(|capturing| match capturing || self.capturing > 0 {
                // It would become part of the graph, and not run now.
                true => Err(AllocateError::Capturing(self.shortage(id, rest, 0)).into()),
                false => {
                    let range = (forked.shared, rest);
                    self.copy_between(source, slot, range, home.as_ref())
                }
            });
        forked.written |= outcome.is_ok() && home.is_some();
        outcome.map_err(|failed| {
            forked.written |= !failed.running.is_complete();
            slot.fence.merge(failed.running);
            failed.error
        })
    }

    /// Takes a fork back.
    fn unfork(&mut self, forked: Forked) {
        let (id, index) = (forked.place.tenant, forked.place.slot);
        let mut slot = forked.slot;
        let block = slot.block.take();
        if forked.written {
            let home = block.and_then(|block| block.home);
            slot.fence.merge(Fence::streams(home.into_iter().collect()));
            let state: &mut State = self;
            let needs = &mut state.needs_synchronise;
            if !matches!(
                State::poll(state.capturing, needs, &mut slot.fence),
                Ok(true)
            ) {
                return self.lay_down(id, index, slot);
            }
        }
        self.give_back_from((id, index), &mut slot, forked.shared);
        self.leave_shared(id, index, &mut slot, Some(Unused::never_used()));
        self.drop_slot(id, index, slot);
    }
}

/// How many blocks, of which there is a first, lie side by side in their order, with so many bytes of
/// guards between two. Their addresses tell: of their row other slots may have gone.
fn side_by_side(first: &SlotId, blocks: &[SlotId], sources: &Sources, guards: u64) -> usize {
    let class = |block: &SlotId| Some(sources.get(&block.slot)?.class);
    let first = class(first);
    let distance = first.map(|class| class.size.saturating_add(guards));
    let next = |pair: &&[SlotId]| match pair {
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
