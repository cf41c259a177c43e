//! Allocating: the best idle slot or a new one, furnished; or nothing.

use super::budget::TenantId;
use super::commit::{Fit, Furnished};
use super::core::{Grain, Wanted};
use super::pace::{Growth, Pace};
use super::slot::{Class, Occupant, Place, Slot};
use super::state::State;
use crate::error::{AllocateError, CallError};
use crate::own::Stream;

/// Idle slots looked at for the best one.
const CANDIDATES: usize = 8;

/// A block that takes over idle memory strands at most this part of its size, or a granule: what
/// lies behind it in the extent that its end falls into.
const STRANDED_PART: u64 = 8;

/// A block that was allocated, and what its slot was before.
#[derive(Debug)]
pub(super) struct Allocated {
    pub(super) place: Place,
    pub(super) given: Furnished,
    /// The slot was opened for it.
    pub(super) new: bool,
    /// When the slot had been used last.
    pub(super) touched: u64,
}

impl State {
    pub(crate) fn allocate(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<Place, AllocateError> {
        let allocated = self.allocate_unsettled(id, wanted)?;
        self.settle(&allocated.place, allocated.given.begun);
        Ok(allocated.place)
    }

    /// The same, and what it took can still be told from what was there.
    pub(super) fn allocate_unsettled(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<Allocated, AllocateError> {
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
        self.retire_some();
        let bound = match wanted.snug {
            true => 0,
            false => granule.bytes().max(used / STRANDED_PART),
        };
        let mut picked = self.pick(id, class, (used, bound), home)?;
        let lacks = |index| {
            self.slot(id, index)
                .is_none_or(|slot| slot.space.bytes() < used)
        };
        // What was freed a moment ago may have all that is wanted.
        if picked.is_none_or(lacks) && self.sweep(id) {
            picked = self.pick(id, class, (used, bound), home)?;
        }
        if let Some(index) = picked {
            let revived = self.slot(id, index).map_or(0, |slot| slot.space.bytes());
            self.permit_reuse(id, revived.min(used))?;
        }
        let (index, mut slot, new) = match picked {
            Some(index) => match self.take_slot(id, index) {
                Some(slot) => (index, slot, false),
                None => return Err(too_large),
            },
            None => {
                let (index, slot) = self.open_slot(id, class)?;
                (index, slot, true)
            }
        };
        let zeroed = wanted.zeroed;
        let given = match self.furnish(id, &mut slot, &Fit::new(used, home, zeroed)) {
            Ok(given) => given,
            Err(error) => {
                if new {
                    self.drop_slot(id, index, slot);
                } else {
                    self.put_slot(id, index, slot);
                }
                return Err(error);
            }
        };
        let stained = slot.space.stain(0, used, id.0);
        let touched = std::mem::replace(&mut slot.touched, self.tick());
        slot.block = Some(Occupant {
            requested: size,
            ever: size,
            used,
            most,
            reach: slot.space.bytes(),
            stained,
            growth: self.growth(wanted.grain),
            pace: Pace::default(),
            home: home.cloned(),
            users: Vec::new(),
            anywhere: false,
            tag: wanted.tag.clone(),
            zeroed,
        });
        let place = Place {
            tenant: id,
            slot: index,
            address: slot.space.address(),
            capacity,
        };
        self.put_slot(id, index, slot);
        Ok(Allocated {
            place,
            given,
            new,
            touched,
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
    fn pick(
        &mut self,
        id: TenantId,
        class: Class,
        (used, most_stranded): (u64, u64),
        home: Option<&Stream>,
    ) -> Result<Option<usize>, AllocateError> {
        let Some(tenancy) = self.tenants.get(&id) else {
            return Ok(None);
        };
        // Too little memory is worse than a fence, and a fence is worse than too much memory.
        let mut candidates = [(true, true, u64::MAX, usize::MAX); CANDIDATES];
        let fitting = tenancy
            .reusable(class)
            .take(CANDIDATES)
            .filter(|(_, slot)| slot.stranded_by(used) <= most_stranded);
        let mut count = 0;
        for ((index, slot), candidate) in fitting.zip(&mut candidates) {
            let held = slot.space.bytes();
            let ready =
                slot.fence.is_passed() || home.is_some_and(|home| slot.fence.precedes(home));
            *candidate = (held < used, !ready, held.abs_diff(used), index);
            count += 1;
        }
        let candidates = candidates.get_mut(..count).unwrap_or_default();
        candidates.sort_unstable();
        let capturing = self.capturing;
        for &mut (_, unready, _, index) in candidates {
            if !unready {
                return Ok(Some(index));
            }
            if capturing > 0 {
                continue;
            }
            let needs = &mut self.needs_synchronise;
            let Some(slot) = self
                .tenants
                .get_mut(&id)
                .and_then(|tenancy| tenancy.slot_mut(index))
            else {
                continue;
            };
            let ready = match home {
                Some(home) => {
                    slot.fence.order_before(home)? || Self::poll(capturing, needs, &mut slot.fence)?
                }
                None => Self::poll(capturing, needs, &mut slot.fence)?,
            };
            if ready {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Addresses for a new slot, not yet in its place.
    fn open_slot(
        &mut self,
        id: TenantId,
        class: Class,
    ) -> Result<(usize, Box<Slot>), AllocateError> {
        let guard = self.guard();
        let addresses = class.size.saturating_add(guard).saturating_add(guard);
        self.make_address_room(addresses);
        if self.budget.addresses_left() < addresses {
            return Err(AllocateError::OutOfAddresses {
                wanted: addresses,
                held: self.budget.addresses(),
                limit: self.budget.limits().addresses,
            });
        }
        self.budget.charge_addresses(id, addresses);
        let space = match self.reserve(class.size, guard) {
            Ok(space) => space,
            Err(error) => {
                self.budget.refund_addresses(id, addresses);
                return Err(error.into());
            }
        };
        let slot = Slot::new(space, class, self.now(), self.hardening.is_some());
        match self.tenants.get_mut(&id) {
            Some(tenancy) => Ok((tenancy.vacancy(), Box::new(slot))),
            None => Err(AllocateError::Unregistered {
                tenant: String::new(),
            }),
        }
    }
}
