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
use super::core::Wanted;
use super::slot::{Slot, SlotId};
use super::state::State;
use super::tenancy::Tenancy;
use crate::error::AllocateError;
use crate::own::Stream;

/// How well part of a row serves, the best first: whether memory is lacking, whether a fence has to
/// pass, how long the row is that it is cut from, and how much more or less memory there is.
type Rank = (bool, bool, usize, u64);

impl State {
    /// Places for `count` blocks side by side: all of them, or everything is as before.
    pub(super) fn allocate_adjacent(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
        count: usize,
    ) -> Result<Vec<SlotId>, AllocateError> {
        let needs = self.needs_apart(id, wanted)?;
        self.purge_some();
        // A stream cache hands out single blocks: what lies there is to be had for this only from the pool.
        self.sweep(id);
        let picked = self.pick_row(id, &needs, wanted.home, count)?;
        let new = picked.is_none();
        let mut slots = match picked {
            Some(row) => self.take_row(id, &needs, row)?,
            None => self.open_slots(id, needs.class, count)?,
        };
        let mut moved: Vec<Moved> = Vec::with_capacity(count);
        for (_, slot) in &mut slots {
            match self.move_in(id, slot, wanted, &needs) {
                Ok(done) => moved.push(done),
                Err(error) => {
                    for ((_, slot), moved) in slots.iter_mut().zip(&moved) {
                        self.move_out(id, slot, moved, wanted.home);
                    }
                    self.put_row(id, slots, new);
                    return Err(error);
                }
            }
        }
        for ((_, slot), moved) in slots.iter_mut().zip(&moved) {
            slot.space.settle(moved.given.begun);
        }
        let place = |(index, slot): &(usize, Box<Slot>)| SlotId {
            tenant: id,
            slot: *index,
            address: slot.space.address(),
            capacity: wanted.capacity,
        };
        let places = slots.iter().map(place).collect();
        self.put_row(id, slots, new);
        Ok(places)
    }

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
    ) -> Result<Option<Vec<usize>>, AllocateError> {
        let Some(tenancy) = self.tenants.get(&id) else {
            return Ok(None);
        };
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
                return Ok(Some(part));
            }
        }
        Ok(None)
    }

    /// Takes slots out, whose memory is to be in use again.
    fn take_row(
        &mut self,
        id: TenantId,
        needs: &Needs,
        row: Vec<usize>,
    ) -> Result<Vec<(usize, Box<Slot>)>, AllocateError> {
        let revived = |&index: &usize| {
            let slot = self.slot(id, index);
            slot.map_or(0, |slot| slot.space.bytes().min(needs.used))
        };
        let revived = row.iter().map(revived).sum();
        self.permit_reuse(id, revived)?;
        let take = |index| Some((index, self.take_slot(id, index)?));
        Ok(row.into_iter().filter_map(take).collect())
    }

    /// Puts slots where they were taken out. Those of a new row that nobody moved into go again.
    fn put_row(&mut self, id: TenantId, slots: Vec<(usize, Box<Slot>)>, new: bool) {
        // Memory without a block is just being zeroed, and stays where it is until that has passed.
        let of_use =
            |(_, slot): &(usize, Box<Slot>)| slot.block.is_some() || slot.space.bytes() > 0;
        if new && !slots.iter().any(of_use) {
            for (index, slot) in slots {
                self.drop_slot(id, index, slot);
            }
            return;
        }
        let indices = slots.iter().map(|&(index, _)| index).collect();
        for (index, slot) in slots {
            self.lay_down(id, index, slot);
        }
        if let Some(tenancy) = self.tenants.get_mut(&id).filter(|_| new) {
            tenancy.rows.add(indices);
        }
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
