//! Allocating and growing: the best idle slot or a new one, furnished; or nothing.

use super::budget::TenantId;
use super::core::{Place, Wanted};
use super::slot::{Occupant, Slot};
use super::state::State;
use crate::error::{AllocateError, CallError};
use crate::own::Stream;
use crate::region::{Fence, Space};

/// Idle slots looked at for the best one.
const CANDIDATES: usize = 8;

impl State {
    pub(crate) fn allocate(
        &mut self,
        id: TenantId,
        wanted: &Wanted,
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
        let (Some(used), Some(class)) = (granule.round_up(size), granule.class(capacity)) else {
            return Err(too_large);
        };
        if wanted
            .home
            .as_ref()
            .is_some_and(|home| !home.device().is_same(&self.device))
        {
            return Err(AllocateError::WrongDevice);
        }
        self.check_usable(id)?;
        let home = wanted.home.as_ref();
        let (index, mut slot, new) = match self.pick(id, class, used, home)? {
            Some(index) => match self.take_slot(id, index) {
                Some(slot) => (index, slot, false),
                None => return Err(too_large),
            },
            None => {
                let (index, slot) = self.open_slot(id, class)?;
                (index, slot, true)
            }
        };
        if let Err(error) = self.furnish(id, &mut slot, (0, used), home, wanted.zeroed) {
            if new {
                self.drop_slot(id, slot);
            } else {
                self.put_slot(id, index, slot);
            }
            return Err(error);
        }
        slot.space.stain(0, used, id.0);
        slot.touched = self.tick();
        slot.block = Some(Occupant {
            requested: size,
            used,
            home: wanted.home.clone(),
            users: Vec::new(),
            tag: wanted.tag.clone(),
            zeroed: wanted.zeroed,
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

    fn check_usable(&self, id: TenantId) -> Result<(), AllocateError> {
        if let Some(error) = self.device.lost() {
            return Err(CallError::ContextLost(error).into());
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
        let Some(listed) = tenancy.idle.get(&class) else {
            return Ok(None);
        };
        let mut candidates: Vec<(bool, bool, u64, usize)> = listed
            .iter()
            .rev()
            .take(CANDIDATES)
            .filter_map(|&index| {
                let slot = tenancy.slots.get(index)?.as_ref()?;
                let held = slot.space.bytes();
                let ready =
                    slot.fence.is_passed() || home.is_some_and(|home| slot.fence.precedes(home));
                Some((held < used, !ready, held.abs_diff(used), index))
            })
            .collect();
        candidates.sort_unstable();
        let capturing = self.capturing;
        for (_, unready, _, index) in candidates {
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
                .and_then(|tenancy| tenancy.slots.get_mut(index)?.as_mut())
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
    fn open_slot(&mut self, id: TenantId, class: u64) -> Result<(usize, Slot), AllocateError> {
        self.make_address_room(class);
        if self.budget.addresses_left() < class {
            return Err(AllocateError::OutOfAddresses {
                wanted: class,
                held: self.budget.addresses(),
                limit: self.budget.limits().addresses,
            });
        }
        let unregistered = AllocateError::Unregistered {
            tenant: String::new(),
        };
        let index = self.vacancy(id).ok_or(unregistered)?;
        self.budget.charge_addresses(id, class);
        match Space::reserve(&self.device, class) {
            Ok(space) => Ok((
                index,
                Slot {
                    space,
                    class,
                    block: None,
                    leases: 0,
                    fence: Fence::passed(),
                    touched: self.clock,
                    broken: false,
                },
            )),
            Err(error) => {
                self.budget.refund_addresses(id, class);
                Err(error.into())
            }
        }
    }

    pub(crate) fn grow(&mut self, place: &Place, size: u64) -> Result<(), AllocateError> {
        let &Place {
            tenant,
            slot: index,
            capacity,
            ..
        } = place;
        if size > capacity {
            return Err(AllocateError::OverCapacity { size, capacity });
        }
        let used = self
            .device
            .granule()
            .round_up(size)
            .ok_or(AllocateError::TooLarge { size })?;
        let now = self.tick();
        let gone = AllocateError::Unregistered {
            tenant: String::new(),
        };
        let Some(slot) = self.slot_mut(tenant, index) else {
            return Err(gone);
        };
        let Some(block) = &mut slot.block else {
            return Err(gone);
        };
        if size < block.requested {
            return Err(AllocateError::WouldShrink {
                size: block.requested,
                wanted: size,
            });
        }
        if used <= block.used {
            block.requested = size;
            slot.touched = now;
            return Ok(());
        }
        self.check_usable(tenant)?;
        let Some(mut slot) = self.take_slot(tenant, index) else {
            return Err(gone);
        };
        let (home, from, zeroed) = match &slot.block {
            Some(block) => (block.home.clone(), block.used, block.zeroed),
            None => (None, 0, false),
        };
        // What was given up a moment ago may still be written to by work that was queued before:
        // zeros must come after that.
        let revived = zeroed && from < slot.space.bytes();
        let outcome = match revived {
            true => self.settle_before(tenant, &mut slot, home.as_ref(), used - from),
            false => Ok(()),
        };
        let outcome = outcome
            .and_then(|()| self.furnish(tenant, &mut slot, (from, used), home.as_ref(), zeroed));
        if outcome.is_ok() {
            slot.space.stain(from, used, tenant.0);
            slot.touched = now;
            if let Some(block) = &mut slot.block {
                block.requested = size;
                block.used = used;
            }
        }
        self.put_slot(tenant, index, slot);
        outcome
    }

    /// Makes sure that what the fence of a slot covers comes before what is done next: on the home
    /// stream by events, elsewhere only if it has passed.
    fn settle_before(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        home: Option<&Stream>,
        bytes: u64,
    ) -> Result<(), AllocateError> {
        if slot.fence.is_passed() || home.is_some_and(|home| slot.fence.precedes(home)) {
            return Ok(());
        }
        if self.capturing > 0 {
            return Err(AllocateError::Capturing(self.shortage(id, bytes, 0)));
        }
        let ordered = match home {
            Some(home) => slot.fence.order_before(home)?,
            None => false,
        };
        let needs = &mut self.needs_synchronise;
        if ordered || Self::poll(0, needs, &mut slot.fence)? {
            return Ok(());
        }
        Err(AllocateError::OutOfMemory(self.shortage(id, bytes, 0)))
    }
}
