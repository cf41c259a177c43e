//! Blocks side by side: so many of a kind at equal distances, so that together they are one tensor
//! whose rows grow in place.
//!
//! Each has a slot of its own in a [row](super::rows) that is reserved at once. It grows, shrinks, is
//! freed and taken from like any other, and its memory never reaches into its neighbour's addresses.
//! A row that has come free serves the next blocks that are wanted so, with what memory it still
//! has; its slots serve single blocks too. The driver has the addresses again when the last slot has
//! gone: until then they count against the pool's limit, without being a tenant's.

use super::allocate::{CANDIDATES, Moved, Needs};
use super::budget::TenantId;
use super::core::{Attempt, Core, Wanted};
use super::grow::gone;
use super::locked::Locked;
use super::slot::{Slot, SlotId};
use super::state::State;
use super::tenancy::Tenancy;
use crate::error::AllocateError;
use crate::own::Stream;

/// How well part of a row serves, the best first: whether memory is lacking, whether a fence has to
/// pass, how long the row is that it is cut from, and how much more or less memory there is.
type Rank = (bool, bool, usize, u64);

/// Slots side by side that blocks are put in, in their places.
struct Lot {
    /// In the order of their addresses.
    places: Vec<SlotId>,
    needs: Needs,
    /// The slots were opened for it.
    new: bool,
}

impl Core {
    /// Places for `count` blocks side by side: all of them, or everything is as before.
    pub(super) fn line_up<'a>(
        &'a self,
        mut state: Locked<'a>,
        id: TenantId,
        wanted: &Wanted<'_>,
        count: usize,
    ) -> Attempt<'a, Vec<SlotId>> {
        let lot = match state.find_lot(id, wanted, count) {
            Ok(lot) => lot,
            Err(error) => return (state, Err(error)),
        };
        let mut moved: Vec<Moved> = Vec::with_capacity(count);
        let mut outcome = Ok(());
        for place in &lot.places {
            // Another operation may take memory from a slot that has no block yet.
            state = self.await_slots(state, std::iter::once((*place, u64::MAX)));
            match state.move_in_pinned(place, wanted, &lot.needs) {
                Ok(done) => moved.push(done),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        for (index, place) in lot.places.iter().enumerate().rev() {
            state = self.await_slots(state, std::iter::once((*place, u64::MAX)));
            match (&outcome, moved.get(index)) {
                (Ok(()), Some(moved)) => state.settle(place, moved.given.begun),
                (_, moved) => state.move_out_of(place, moved, wanted.home),
            }
        }
        if lot.new {
            state.keep_row(id, &lot.places);
        }
        (state, outcome.map(|()| lot.places))
    }
}

impl Locked<'_> {
    /// Finds or reserves slots side by side for this number of blocks, and pins them.
    fn find_lot(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
        count: usize,
    ) -> Result<Lot, AllocateError> {
        let needs = self.needs_apart(id, wanted)?;
        self.purge_some();
        // A stream cache hands out single blocks: what lies there is to be had for this only from the pool.
        self.sweep(id);
        let row = self.pick_row(id, &needs, wanted.home, count);
        let new = row.is_none();
        let slots: Vec<(usize, Box<Slot>)> = match row {
            Some(row) => {
                let take = |index| Some((index, self.take_slot(id, index)?));
                row.into_iter().filter_map(take).collect()
            }
            None => self.open_slots(id, needs.class, count)?,
        };
        let mut places = Vec::with_capacity(count);
        for (index, mut slot) in slots {
            places.push(SlotId {
                tenant: id,
                slot: index,
                address: slot.space.address(),
                capacity: wanted.capacity,
            });
            slot.pinned = true;
            self.put_slot(id, index, slot);
        }
        Ok(Lot { places, needs, new })
    }

    /// Puts a block in a slot that is in its place.
    fn move_in_pinned(
        &mut self,
        place: &SlotId,
        wanted: &Wanted<'_>,
        needs: &Needs,
    ) -> Result<Moved, AllocateError> {
        let at = (place.tenant, place.slot);
        let mut slot = self.take_out(at.0, at.1).ok_or_else(gone)?;
        let permitted = self.permit_reuse(at, slot.space.bytes().min(needs.used));
        let moved = permitted.and_then(|()| self.move_in(at, &mut slot, wanted, needs));
        self.put_slot(at.0, at.1, slot);
        moved
    }

    /// Makes a slot that is in its place what it was before a block was put in it, if one was.
    fn move_out_of(&mut self, place: &SlotId, moved: Option<&Moved>, home: Option<&Stream>) {
        let at = (place.tenant, place.slot);
        let Some(mut slot) = self.take_out(at.0, at.1) else {
            return;
        };
        slot.pinned = false;
        if let Some(moved) = moved {
            self.move_out(at, &mut slot, moved, home);
        }
        self.lay_down(at.0, at.1, slot);
    }

    /// Notes that new slots lie side by side, or gives their addresses back if they are of no use.
    fn keep_row(&mut self, id: TenantId, places: &[SlotId]) {
        // Memory without a block is just being zeroed, and stays where it is until that has passed.
        let slots = || places.iter().filter_map(|place| self.slot(id, place.slot));
        // Another operation may have dropped a slot without a block, and its number may be another slot's.
        let lie = slots().map(|slot| slot.space.address());
        if !lie.eq(places.iter().map(|place| place.address)) {
            return;
        }
        if slots().all(Slot::is_bare) {
            // All of them at once: the lock is let go between those that are given back.
            let take = |place: &SlotId| Some((place.slot, self.take_out(id, place.slot)?));
            let slots: Vec<(usize, Box<Slot>)> = places.iter().filter_map(take).collect();
            for (index, slot) in slots {
                self.drop_slot(id, index, slot);
            }
        } else if let Some(tenancy) = self.tenants.get_mut(&id) {
            let slots = places.iter().map(|place| place.slot);
            tenancy.rows.add(slots.collect());
        }
    }
}

impl State {
    /// What blocks need that lie at the distance which is wanted.
    fn needs_apart(&self, id: TenantId, wanted: &Wanted<'_>) -> Result<Needs, AllocateError> {
        if wanted.stride == 0 {
            return Err(AllocateError::ZeroStride);
        }
        let mut needs = self.needs(id, wanted)?;
        let guards = self.guard().saturating_mul(2);
        let granule = self.device.granule();
        needs.class.size = granule
            .class_apart(wanted.capacity, guards, wanted.stride)
            .ok_or(AllocateError::TooLarge {
                size: wanted.capacity,
            })?;
        Ok(needs)
    }

    /// The vacant part of a row that serves best, ordered before the work of `home`.
    fn pick_row(
        &mut self,
        id: TenantId,
        needs: &Needs,
        home: Option<&Stream>,
        count: usize,
    ) -> Option<Vec<usize>> {
        let tenancy = self.tenants.get(&id)?;
        let mut candidates: Vec<(Rank, Vec<usize>)> = tenancy
            .rows
            .iter()
            .flat_map(|row| row.windows(count).map(|part| (row.len(), part)))
            .filter_map(|(len, part)| Some((rank(tenancy, needs, home, len, part)?, part.to_vec())))
            .take(CANDIDATES)
            .collect();
        candidates.sort_unstable();
        for (_, part) in candidates {
            let mut ready = true;
            for &index in &part {
                ready = ready && self.is_ready_for(id, index, home);
            }
            if ready {
                return Some(part);
            }
        }
        None
    }
}

/// Nothing if one of the slots cannot be had, or would strand too much.
fn rank(
    tenancy: &Tenancy,
    needs: &Needs,
    home: Option<&Stream>,
    len: usize,
    part: &[usize],
) -> Option<Rank> {
    let mut rank = (false, false, len, 0u64);
    for &index in part {
        let slot = tenancy.slot(index)?;
        let usable = slot.class == needs.class && slot.is_vacant() && !slot.serves_once();
        if !usable || slot.stranded_by(needs.used) > needs.strands {
            return None;
        }
        let held = slot.space.bytes();
        rank.0 |= held < needs.used;
        rank.1 |= !slot.is_before(home);
        rank.3 = rank.3.saturating_add(held.abs_diff(needs.used));
    }
    Some(rank)
}
