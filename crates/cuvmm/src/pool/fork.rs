//! Blocks that begin with the bytes of others: whole extents are mapped a second time, to be read
//! only, and what is left of the prefix is copied on the device.
//!
//! The other block goes on reading and writing at its own addresses; that neither writes before the
//! point of the fork any more is its user's promise. From then on the memory is
//! [shared](super::shared). What was exported is not shared but copied.

use std::time::Instant;

use super::block::{Block, after};
use super::budget::TenantId;
use super::commit::{Fit, Furnished, is_capturing};
use super::core::{Attempt, Core, Locked};
use super::grow::gone;
use super::pace::Pace;
use super::slot::{Occupant, Place, Slot};
use super::state::State;
use super::tenant::Tenant;
use crate::error::AllocateError;
use crate::own::{Physical, Right};
use crate::region::{Fence, Piece, PlaceError, Stain};

/// What a fork is to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefix {
    /// So many bytes are the other block's; no more than that has.
    pub(crate) bytes: u64,
    /// So many there are; no fewer, and no more than the other block has.
    pub(crate) size: u64,
}

/// A block that was forked.
#[derive(Debug)]
struct Forked {
    place: Place,
    /// The slot of the other block.
    from: usize,
    /// Up to where they share memory.
    shared: u64,
    /// Whether the home stream has been told to write to the rest.
    written: bool,
}

impl Tenant {
    /// A block for each of several of this tenant's that begins with the same bytes: all of them or
    /// none. What a copy is writing to when another one fails stays charged until that has passed.
    /// Asks pressure hooks, and waits as long as the most patient of the blocks may.
    pub(crate) fn fork_all(
        &self,
        blocks: &[Block],
        prefix: Prefix,
    ) -> Result<Vec<Block>, AllocateError> {
        let patience = blocks.iter().filter_map(Block::patience);
        let until = patience.max().map(after);
        let made = self
            .core()
            .fork_all(self.id(), &places(blocks), prefix, until)?;
        Ok(forked(blocks, made, prefix.size))
    }

    /// The same if that needs no waiting.
    pub(crate) fn try_fork_all(
        &self,
        blocks: &[Block],
        prefix: Prefix,
    ) -> Result<Vec<Block>, AllocateError> {
        let made = self
            .core()
            .try_fork_all(self.id(), &places(blocks), prefix)?;
        Ok(forked(blocks, made, prefix.size))
    }
}

fn places(blocks: &[Block]) -> Vec<Place> {
    blocks.iter().map(|block| *block.place()).collect()
}

fn forked(blocks: &[Block], made: Vec<Place>, size: u64) -> Vec<Block> {
    let pairs = blocks.iter().zip(made);
    pairs
        .map(|(block, place)| block.forked(place, size))
        .collect()
}

impl Core {
    fn try_fork_all(
        &self,
        tenant: TenantId,
        blocks: &[Place],
        prefix: Prefix,
    ) -> Result<Vec<Place>, AllocateError> {
        let (mut state, outcome) = Self::attempt_to_fork(self.lock(), blocks, prefix);
        let outcome = outcome.inspect_err(|error| state.count_refusal(tenant, error));
        Self::let_go(state);
        outcome
    }

    fn fork_all(
        &self,
        tenant: TenantId,
        blocks: &[Place],
        prefix: Prefix,
        until: Option<Instant>,
    ) -> Result<Vec<Place>, AllocateError> {
        let state = self.lock();
        let own = |block: &Place| {
            let parts = state.slot(block.tenant, block.slot);
            let parts = parts.map(|slot| whole_parts(slot, prefix.bytes));
            let shared = parts.into_iter().flatten().map(|physical| physical.size());
            prefix.size.saturating_sub(shared.sum())
        };
        let bytes = blocks.iter().map(own).fold(0, u64::saturating_add);
        drop(state);
        self.insist(tenant, bytes, until, |state| {
            Self::attempt_to_fork(state, blocks, prefix)
        })
    }

    fn attempt_to_fork<'a>(
        mut state: Locked<'a>,
        blocks: &[Place],
        prefix: Prefix,
    ) -> Attempt<'a, Vec<Place>> {
        let outcome = state.fork_all(blocks, prefix);
        state.look_behind();
        (state, outcome)
    }
}

impl State {
    fn fork_all(&mut self, blocks: &[Place], prefix: Prefix) -> Result<Vec<Place>, AllocateError> {
        self.retire_some();
        let mut made = Vec::with_capacity(blocks.len());
        let outcome = self.fork_each(blocks, prefix, &mut made);
        if let Err(error) = outcome {
            made.into_iter()
                .rev()
                .for_each(|forked| self.unfork(forked));
            return Err(error);
        }
        for forked in &made {
            self.settle(&forked.place, forked.shared);
        }
        Ok(made.into_iter().map(|forked| forked.place).collect())
    }

    /// First all memory, then all copies: as long as none is running, all can be undone at once.
    fn fork_each(
        &mut self,
        blocks: &[Place],
        prefix: Prefix,
        made: &mut Vec<Forked>,
    ) -> Result<(), AllocateError> {
        for block in blocks {
            made.push(self.fork(block, prefix)?);
        }
        made.iter_mut()
            .try_for_each(|forked| self.copy_rest(forked, prefix.bytes))
    }

    /// A block with the memory for a prefix of another.
    fn fork(&mut self, block: &Place, prefix: Prefix) -> Result<Forked, AllocateError> {
        let id = block.tenant;
        self.check_usable(id)?;
        let Some(used) = self.device.granule().round_up(prefix.size) else {
            return Err(AllocateError::TooLarge { size: prefix.size });
        };
        let Some(source) = self.slot(id, block.slot) else {
            return Err(gone());
        };
        if !source.slumber.is_awake() {
            let size = source.block.as_ref().map_or(0, |block| block.requested);
            return Err(AllocateError::Asleep { size });
        }
        let class = source.class;
        let Some((index, mut slot)) = self.open_slots(id, class, 1)?.pop() else {
            return Err(gone());
        };
        let given = self.lend(id, block.slot, (index, &mut slot), prefix.bytes, used);
        let other = self
            .slot(id, block.slot)
            .and_then(|slot| slot.block.as_ref());
        let (given, other) = match (given, other) {
            (Ok(given), Some(other)) => (given, other),
            (given, _) => {
                self.unshare(id, index, &mut slot);
                self.drop_slot(id, index, slot);
                return Err(given.err().unwrap_or_else(gone));
            }
        };
        slot.block = Some(Occupant {
            requested: prefix.size,
            ever: prefix.size,
            used,
            most: other.most,
            reach: slot.space.bytes(),
            stained: slot.space.stain(given.begun, used, id.0),
            growth: other.growth,
            pace: Pace::default(),
            home: other.home.clone(),
            users: Vec::new(),
            anywhere: false,
            tag: other.tag.clone(),
            zeroed: other.zeroed,
        });
        let place = Place {
            slot: index,
            address: slot.space.address(),
            ..*block
        };
        self.put_slot(id, index, slot);
        Ok(Forked {
            place,
            from: block.slot,
            shared: given.begun,
            written: given.filled,
        })
    }

    /// Puts whole extents of another slot's first `bytes` under a new one, and memory of its own
    /// behind them.
    fn lend(
        &mut self,
        id: TenantId,
        from: usize,
        (index, slot): (usize, &mut Slot),
        bytes: u64,
        used: u64,
    ) -> Result<Furnished, AllocateError> {
        let extents = |slot: &Slot| whole_parts(slot, bytes).len() as u64;
        let count = self.slot(id, from).map_or(0, extents);
        self.make_mapping_room(id, count, true)?;
        let Some(other) = self.slot(id, from) else {
            return Err(gone());
        };
        let stain = Some(Stain {
            by: id.0,
            blank: false,
        });
        let pieces = whole_parts(other, bytes).into_iter().map(|physical| Piece {
            physical,
            stain,
            fresh: false,
        });
        let pieces: Vec<Piece> = pieces.collect();
        let shared = pieces.iter().map(Piece::size).sum();
        if let Err(PlaceError { error, .. }) = slot.space.place_for(0, pieces, Right::Read) {
            // What is stuck shows memory that the other slot has.
            self.budget.quarantine(0, slot.space.stuck_count());
            return Err(self.not_placed(id, shared, error));
        }
        self.budget.charge_mappings(id, count);
        self.share(id, from, (index, slot), shared);
        let (home, zeroed) = match self.slot(id, from).and_then(|slot| slot.block.as_ref()) {
            Some(block) => (block.home.clone(), block.zeroed),
            None => (None, false),
        };
        let fit = Fit {
            // What is shared is to stay as it is.
            zeros: None,
            ..Fit::new(used, home.as_ref(), zeroed)
        };
        self.furnish(id, slot, &fit)
    }

    /// Copies what of a prefix is not shared.
    fn copy_rest(&mut self, forked: &mut Forked, bytes: u64) -> Result<(), AllocateError> {
        let Some(rest) = bytes.checked_sub(forked.shared).filter(|&rest| rest > 0) else {
            return Ok(());
        };
        let (id, index) = (forked.place.tenant, forked.place.slot);
        let Some(slot) = self.take_slot(id, index) else {
            return Ok(());
        };
        let home = slot.block.as_ref().and_then(|block| block.home.clone());
        let outcome = is_capturing(home.as_ref())
            .map_err(AllocateError::from)
            .and_then(|capturing| match capturing || self.capturing > 0 {
                // It would become part of the graph, and not run now.
                true => Err(AllocateError::Capturing(self.shortage(id, rest, 0))),
                false => {
                    let range = (forked.shared, rest);
                    self.copy_between(id, forked.from, &slot, range, home.as_ref())
                }
            });
        forked.written |= outcome.is_ok() && home.is_some();
        self.put_slot(id, index, slot);
        outcome
    }

    /// Takes a fork back.
    fn unfork(&mut self, forked: Forked) {
        let (id, index) = (forked.place.tenant, forked.place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return;
        };
        let block = slot.block.take();
        if forked.written {
            let home = block.and_then(|block| block.home);
            slot.fence.merge(Fence::streams(home.into_iter().collect()));
            let needs = &mut self.needs_synchronise;
            if !matches!(Self::poll(self.capturing, needs, &mut slot.fence), Ok(true)) {
                return self.lay_down(id, index, slot);
            }
        }
        self.take_out(id, &mut slot, forked.shared);
        self.unshare(id, index, &mut slot);
        self.drop_slot(id, index, slot);
    }
}

/// The memory of the extents that lie in the first `bytes` of a slot and may be shown elsewhere.
fn whole_parts(slot: &Slot, bytes: u64) -> Vec<Physical> {
    let parts = slot.space.parts_in(0, bytes);
    parts
        .take_while(|(extent, _)| !slot.exported && extent.end() <= bytes)
        .map(|(_, physical)| physical.clone())
        .collect()
}
