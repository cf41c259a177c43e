//! Allocating: the best idle slot or a new one, furnished; or nothing.

use super::budget::TenantId;
use super::commit::{Fit, Furnished};
use super::core::{Grain, Wanted};
use super::grow::gone;
use super::locked::Locked;
use super::pace::{Growth, Pace};
use super::slot::{Class, Occupant, Slot, SlotId};
use super::state::State;
use crate::error::{AllocateError, CallError};
use crate::own::Stream;
use crate::region::{Fence, Uses};

/// Idle slots looked at for the best one.
pub(super) const CANDIDATES: usize = 8;

/// A block that takes over idle memory strands at most this part of its size, or a granule: what
/// lies behind it in the extent that its end falls into.
const STRANDED_PART: u64 = 8;

/// What a block asks of its slot. Bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    pub(super) class: Class,
    /// What it uses, in whole granules.
    pub(super) used: u64,
    /// What it may grow to, in whole granules.
    most: u64,
    /// What it may strand at most.
    pub(super) strands: u64,
}

/// A block that was put in a slot, and what that was before.
#[derive(Debug)]
pub(super) struct Moved {
    pub(super) given: Furnished,
    /// When the slot had been used last.
    touched: u64,
}

/// A block that was allocated.
#[derive(Debug)]
pub(super) struct Allocated {
    pub(super) place: SlotId,
    pub(super) moved: Moved,
    /// The slot was opened for it.
    pub(super) new: bool,
}

impl Locked<'_> {
    /// Makes a place for a block.
    pub(crate) fn allocate(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<SlotId, AllocateError> {
        let (Allocated { place, moved, .. }, mut slot) = self.allocate_slot(id, wanted)?;
        slot.space.settle(moved.given.begun);
        self.put_slot(id, place.slot, slot);
        Ok(place)
    }

    /// Makes a place for a block in a slot that stays out, so that what it took can still be told
    /// from what was there.
    pub(super) fn allocate_slot(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<(Allocated, Box<Slot>), AllocateError> {
        let needs = self.needs(id, wanted)?;
        self.purge_some();
        let (index, mut slot, new) = match self.find_slot(id, &needs, wanted.home) {
            Some((index, slot)) => (index, slot, false),
            None => {
                let opened = self.open_slots(id, needs.class, 1)?.pop();
                let (index, slot) = opened.ok_or(AllocateError::TooLarge {
                    size: wanted.capacity,
                })?;
                (index, slot, true)
            }
        };
        // Of a new slot nothing is used again.
        let revived = slot.space.bytes().min(needs.used);
        let permitted = self.permit_reuse((id, index), revived);
        let moved = permitted.and_then(|()| self.move_in((id, index), &mut slot, wanted, &needs));
        match moved {
            Ok(moved) => {
                let place = SlotId {
                    tenant: id,
                    slot: index,
                    address: slot.space.address(),
                    capacity: wanted.capacity,
                };
                Ok((Allocated { place, moved, new }, slot))
            }
            Err(error) => {
                if new {
                    self.drop_slot(id, index, slot);
                } else {
                    self.put_slot(id, index, slot);
                }
                Err(error)
            }
        }
    }

    /// Takes the slot that serves best of those that can be reused, if there is one: out of its place
    /// if the lock may be let go for it.
    fn find_slot(
        &mut self,
        id: TenantId,
        needs: &Needs,
        home: Option<&Stream>,
    ) -> Option<(usize, Box<Slot>)> {
        let mut picked = self.pick(id, needs, home);
        let lacks = |state: &State, index| {
            let slot = state.slot(id, index);
            slot.is_none_or(|slot| slot.space.bytes() < needs.used)
        };
        // What was freed a moment ago may have all that is wanted.
        if picked.is_none_or(|index| lacks(self, index)) && self.sweep(id) {
            picked = self.pick(id, needs, home);
        }
        let index = picked?;
        // The usual case makes no driver call that the lock is let go for.
        let slot = match home.is_some() && !lacks(self, index) && !self.budget.is_overdrawn() {
            true => self.take_slot(id, index),
            false => self.take_out(id, index),
        };
        Some((index, slot?))
    }

    /// Puts a block in a slot that is out, and memory under it; or the slot is as before.
    #[inline(always)]
    pub(super) fn move_in(
        &mut self,
        (id, index): (TenantId, usize),
        slot: &mut Slot,
        wanted: &Wanted<'_>,
        needs: &Needs,
    ) -> Result<Moved, AllocateError> {
        let &Wanted {
            size, home, zeroed, ..
        } = wanted;
        let used = needs.used;
        let given = self.furnish((id, index), slot, &Fit::new(used, home, zeroed))?;
        let noted = slot.space.note_writer(0, used, id.0);
        let touched = std::mem::replace(&mut slot.touched, self.tick());
        slot.block = Some(Occupant {
            requested: size,
            ever: size,
            used,
            most: needs.most,
            reach: slot.space.bytes(),
            noted,
            growth: self.growth(wanted.grain),
            pace: Pace::default(),
            home: home.cloned(),
            uses: Uses::none(),
            tag: wanted.tag.clone(),
            zeroed,
        });
        Ok(Moved { given, touched })
    }

    /// Makes a slot that is out what it was before a block was put in it. Memory that is being
    /// zeroed on its home stream stays.
    pub(super) fn move_out(
        &mut self,
        at: (TenantId, usize),
        slot: &mut Slot,
        moved: &Moved,
        home: Option<&Stream>,
    ) {
        slot.block = None;
        slot.touched = moved.touched;
        if moved.given.filled {
            let zeros = Fence::streams(home.into_iter().cloned().collect());
            slot.fence.merge(zeros);
        } else {
            self.give_back_from(at, slot, moved.given.begun);
        }
    }

    /// Addresses for new slots side by side, which are out.
    pub(super) fn open_slots(
        &mut self,
        id: TenantId,
        class: Class,
        count: usize,
    ) -> Result<Vec<(usize, Box<Slot>)>, AllocateError> {
        let (guard, count) = (self.guard(), count as u64);
        let each = class.size.saturating_add(guard).saturating_add(guard);
        let addresses = each.saturating_mul(count);
        self.make_address_room(addresses);
        if self.budget.addresses_left() < addresses {
            return Err(AllocateError::OutOfAddresses {
                wanted: addresses,
                held: self.budget.addresses(),
                limit: self.budget.limits().addresses,
            });
        }
        // From here on the tenant is not empty, and cannot be forgotten.
        let flight = self.flight();
        let tenancy = self.tenants.get_mut(&id).ok_or_else(gone)?;
        let indices: Vec<usize> = (0..count).map(|_| tenancy.vacancy(flight)).collect();
        self.budget.charge_addresses(id, addresses);
        let reserved = self.reserve(class.size, guard, count);
        let (now, single) = (self.now(), self.hardening.is_some());
        match reserved {
            Ok(spaces) => {
                let open = |space| Box::new(Slot::new(space, class, now, single));
                Ok(indices
                    .into_iter()
                    .zip(spaces.into_iter().map(open))
                    .collect())
            }
            Err(error) => {
                self.budget.refund_addresses(id, addresses);
                let unused = indices.into_iter().rev();
                unused.for_each(|index| self.vacate(id, index));
                Err(error.into())
            }
        }
    }
}

impl State {
    /// What a block asks of its slot, if it may be at all.
    #[inline(always)]
    pub(super) fn needs(&self, id: TenantId, wanted: &Wanted<'_>) -> Result<Needs, AllocateError> {
        let &Wanted { size, capacity, .. } = wanted;
        if size == 0 {
            return Err(AllocateError::ZeroSize);
        }
        if size > capacity {
            return Err(AllocateError::OverCapacity { size, capacity });
        }
        let granule = self.device.granule();
        let too_large = AllocateError::TooLarge { size: capacity };
        let (Some(used), Some(most), Some(size_of_slot)) = (
            granule.round_up(size),
            granule.round_up(capacity),
            granule.class(capacity),
        ) else {
            return Err(too_large);
        };
        let home = wanted.home;
        if home.is_some_and(|home| !home.device().is_same(&self.device)) {
            return Err(AllocateError::WrongDevice);
        }
        let class = Class {
            size: size_of_slot,
            largest: self.largest_extent(wanted.grain)?,
        };
        self.check_usable(id)?;
        let strands = match wanted.snug {
            true => 0,
            false => granule.bytes().max(used / STRANDED_PART),
        };
        Ok(Needs {
            class,
            used,
            most,
            strands,
        })
    }

    /// The largest extent under a block.
    fn largest_extent(&self, grain: Grain) -> Result<u64, AllocateError> {
        let pools = self.policy.largest_extent;
        let granule = self.device.granule();
        match grain.largest {
            Some(bytes) if !(bytes.is_power_of_two() && granule.divides(bytes)) => {
                Err(AllocateError::BadExtent {
                    bytes,
                    granularity: granule.bytes(),
                })
            }
            Some(bytes) => Ok(bytes.min(pools)),
            None => Ok(pools),
        }
    }

    /// How a block grows. In a hardened pool nothing lies behind a block's end.
    fn growth(&self, grain: Grain) -> Growth {
        match &self.hardening {
            Some(_) => Growth::Exact,
            None => grain.growth.unwrap_or(self.policy.growth),
        }
    }

    pub(crate) fn check_usable(&self, id: TenantId) -> Result<(), AllocateError> {
        if let Some(error) = self.device.lost() {
            return Err(CallError::ContextLost(error).into());
        }
        if let Some(forked) = self.device.forked() {
            return Err(forked.into());
        }
        match self.tenants.get(&id) {
            Some(tenancy) if tenancy.registered => Ok(()),
            tenancy => Err(AllocateError::Unregistered {
                tenant: tenancy
                    .map(|tenancy| tenancy.name.clone())
                    .unwrap_or_default(),
            }),
        }
    }

    /// The idle slot of a class that serves best, ordered before the work of `home`: one in which a
    /// block strands no more than it may.
    fn pick(&mut self, id: TenantId, needs: &Needs, home: Option<&Stream>) -> Option<usize> {
        let used = needs.used;
        let tenancy = self.tenants.get(&id)?;
        // Too little memory is worse than a fence, and a fence is worse than too much memory. Where
        // that is the same, rows stay whole: what differs does so by whole granules.
        let mut candidates = [(true, true, u64::MAX, usize::MAX); CANDIDATES];
        let fitting = tenancy
            .reusable(needs.class)
            .take(CANDIDATES)
            .filter(|(_, slot)| slot.stranded_by(used) <= needs.strands);
        let mut count = 0;
        for ((index, slot), candidate) in fitting.zip(&mut candidates) {
            let held = slot.space.bytes();
            let ready = slot.is_before(home);
            let differs = held.abs_diff(used) + u64::from(tenancy.rows.has(index));
            *candidate = (held < used, !ready, differs, index);
            count += 1;
        }
        let candidates = candidates.get_mut(..count).unwrap_or_default();
        candidates.sort_unstable();
        for &mut (_, unready, _, index) in candidates {
            if !unready || self.is_ready_for(id, index, home) {
                return Some(index);
            }
        }
        None
    }

    /// Whether what a slot's fence covers comes before the work of `home`, or can be ordered so now.
    /// A slot for which the driver fails is passed over.
    pub(super) fn is_ready_for(
        &mut self,
        id: TenantId,
        index: usize,
        home: Option<&Stream>,
    ) -> bool {
        let (capturing, needs) = (self.capturing, &mut self.needs_synchronise);
        let tenancy = self.tenants.get_mut(&id);
        let Some(slot) = tenancy.and_then(|tenancy| tenancy.slot_mut(index)) else {
            return false;
        };
        if slot.is_before(home) {
            return true;
        }
        if capturing > 0 {
            return false;
        }
        let ordered = match home {
            Some(home) => slot.fence.order_before(home),
            None => Ok(false),
        };
        let ready = ordered
            .and_then(|ordered| Ok(ordered || Self::poll(capturing, needs, &mut slot.fence)?));
        ready.unwrap_or_else(|error| {
            tracing::debug!(%error, "a fence could not be asked: the slot is passed over");
            false
        })
    }
}
