//! Places in a row of blocks [side by side](super::adjacent) whose blocks are gone: a new block is
//! put in one, between its neighbors.

use super::Blocks;
use super::allocate::Needs;
use super::slots::{BYTES, BlockPlace, Slot, SlotId};
use crate::error::{ArgumentError, BlockError, MemoryError};
use crate::pool::accounts::TenantId;
use crate::pool::core::{Core, Locked};
use crate::pool::line::{Wait, Wanted};

/// A place in a row: the slot of a block in the row, and the number of places from there.
pub(super) type Beside = (SlotId, isize);

const fn in_use(beside: Beside, occupied: bool) -> BlockError {
    let distance = beside.1;
    BlockError::PlaceInUse { distance, occupied }
}

impl Core {
    /// Puts a block in a place of a row.
    pub(super) fn allocate_beside(
        &self,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        beside: Beside,
        wait: Wait,
    ) -> Result<BlockPlace, BlockError> {
        self.device.own_process()?;
        self.request(tenant, wanted.size, wait, |mut state| {
            let usable = state.memory.check_usable(tenant);
            let slot = match usable.and_then(|()| state.blocks.place_beside(beside)) {
                Ok(slot) => slot,
                Err(error) => return (state, Err(error)),
            };
            // The last block there may be in a stream cache, or its memory is not purged yet.
            state.blocks.sweep(tenant);
            let there = state.blocks.slots.get(slot);
            if there.is_some_and(|slot| slot.purging) {
                state.purge_all();
            }
            state = self.await_slot(state, slot);
            let outcome = state.move_in_beside(tenant, wanted, beside);
            (state, outcome)
        })
    }
}

impl Blocks {
    fn place_beside(&self, (slot, distance): Beside) -> Result<SlotId, BlockError> {
        let SlotId { tenant, index } = slot;
        let tenancy = self.slots.of(tenant);
        let row = tenancy.and_then(|tenancy| tenancy.rows.around(index));
        // A hardened pool uses no address again.
        let row = row.filter(|_| self.hardening.is_none());
        let found = row.and_then(|row| {
            let here = row.iter().position(|&slot| slot == index)?;
            row.get(here.checked_add_signed(distance)?).copied()
        });
        let none = ArgumentError::NoSuch {
            what: "place in the row of the block at distance",
            number: distance as i64,
        };
        let index = found.ok_or(none)?;
        Ok(SlotId { tenant, index })
    }
}

/// Checks that a block with these needs fits in a slot, and that the slot is free.
fn check_place(
    slot: &Slot,
    wanted: &Wanted<'_>,
    needs: &Needs,
    beside: Beside,
) -> Result<(), BlockError> {
    let (extent, largest) = ("bytes of an extent", slot.class.sizes.largest());
    ArgumentError::at_least(extent, needs.class.sizes.largest(), largest)?;
    ArgumentError::at_most(extent, needs.class.sizes.largest(), largest)?;
    ArgumentError::at_most(BYTES, wanted.capacity, slot.class.size)?;
    if slot.block.is_some() {
        return Err(in_use(beside, true));
    }
    if slot.broken {
        let (range, bytes) = (0..slot.class.size, slot.space.stuck_bytes());
        return Err(MemoryError::Quarantined { range, bytes }.into());
    }
    match slot.is_vacant() && !slot.serves_once() {
        true => Ok(()),
        false => Err(in_use(beside, false)),
    }
}

impl Locked<'_> {
    fn move_in_beside(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
        beside: Beside,
    ) -> Result<BlockPlace, BlockError> {
        let needs = Needs::of(&self.memory, id, wanted)?;
        self.leave_to_others(id, needs.used)?;
        // The lock was released since the place was found.
        let place = self.blocks.place_beside(beside)?;
        let slot = self.blocks.slots.get(place).ok_or(in_use(beside, false))?;
        check_place(slot, wanted, &needs, beside)?;
        let (memory, blocks) = self.halves();
        if !blocks.is_ready_for(&mut memory.gate, place, wanted.home) {
            return Err(match memory.gate.is_capturing() {
                true => self.captured(id, needs.used),
                false => in_use(beside, false),
            });
        }
        let moved = self.with_slot_out(place, |state, slot| {
            state.take_unfit(slot, &needs, beside)?;
            let given = state.move_in(slot, wanted, &needs, None)?;
            slot.space.settle(given.begun);
            Ok(slot.place(wanted.capacity))
        });
        moved.unwrap_or(Err(in_use(beside, false)))
    }

    /// Takes memory from a slot, which is out, if the block would strand too much of it.
    fn take_unfit(
        &mut self,
        slot: &mut Slot,
        needs: &Needs,
        beside: Beside,
    ) -> Result<(), BlockError> {
        if slot.stranded_by(needs.used) <= needs.strands {
            return Ok(());
        }
        if !self.memory.gate.poll(&mut slot.fence)? {
            return Err(in_use(beside, false));
        }
        let unfit = slot.spare().take_while(|extent| extent.end() > needs.used);
        let unfit = unfit.map(|extent| extent.offset).collect();
        Ok(self.take_extents(slot, unfit).1?)
    }
}
