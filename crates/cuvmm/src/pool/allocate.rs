//! Allocating: the best idle slot or a new one, furnished; or nothing.

use super::budget::TenantId;
use super::core::Wanted;
use super::pace::Pace;
use super::slot::{Occupant, Place, Slot};
use super::state::State;
use crate::error::{AllocateError, CallError};
use crate::own::Stream;

/// Idle slots looked at for the best one.
const CANDIDATES: usize = 8;

/// A block that takes over idle memory strands at most this part of its size, or a granule: what
/// lies behind it in the extent that its end falls into.
const STRANDED_PART: u64 = 8;

impl State {
    pub(crate) fn allocate(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<Place, AllocateError> {
        let &Wanted { size, capacity, .. } = wanted;
        if size == 0 {
            return Err(AllocateError::ZeroSize);
        }
        if size > capacity {
            return Err(AllocateError::OverCapacity { size, capacity });
        }
        let granule = self.device.granule();
        let too_large = AllocateError::TooLarge { size: capacity };
        let (Some(used), Some(most), Some(class)) = (
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
        self.check_usable(id)?;
        self.retire_some();
        let mut picked = self.pick(id, class, used, home)?;
        if picked.is_none() && self.sweep(id) {
            picked = self.pick(id, class, used, home)?;
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
        if let Err(error) =
            self.furnish(id, &mut slot, &super::commit::Fit::new(used, home, zeroed))
        {
            if new {
                self.drop_slot(id, index, slot);
            } else {
                self.put_slot(id, index, slot);
            }
            return Err(error);
        }
        let stained = slot.space.stain(0, used, id.0);
        slot.touched = self.tick();
        slot.block = Some(Occupant {
            requested: size,
            ever: size,
            used,
            most,
            reach: slot.space.bytes(),
            stained,
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
        Ok(place)
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

    /// The idle slot of a class that serves best, ordered before the work of `home`.
    fn pick(
        &mut self,
        id: TenantId,
        class: u64,
        used: u64,
        home: Option<&Stream>,
    ) -> Result<Option<usize>, AllocateError> {
        let Some(tenancy) = self.tenants.get(&id) else {
            return Ok(None);
        };
        // Too little memory is worse than a fence, and a fence is worse than too much memory.
        let mut candidates = [(true, true, u64::MAX, usize::MAX); CANDIDATES];
        let bound = self.device.granularity().max(used / STRANDED_PART);
        let fitting = tenancy
            .reusable(class)
            .take(CANDIDATES)
            .filter(|(_, slot)| slot.stranded_by(used) <= bound);
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
    fn open_slot(&mut self, id: TenantId, class: u64) -> Result<(usize, Box<Slot>), AllocateError> {
        let guard = self.guard();
        let addresses = class.saturating_add(guard).saturating_add(guard);
        self.make_address_room(addresses);
        if self.budget.addresses_left() < addresses {
            return Err(AllocateError::OutOfAddresses {
                wanted: addresses,
                held: self.budget.addresses(),
                limit: self.budget.limits().addresses,
            });
        }
        self.budget.charge_addresses(id, addresses);
        let space = match self.reserve(class, guard) {
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
