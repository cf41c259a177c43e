//! The lock around a pool's state, and the operations that a block, a lease or a tenant makes
//! through it: allocate, grow, shrink, free. Waiting is here, and nowhere below.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuvmm_driver::DeviceAddress;

use super::budget::TenantId;
use super::slot::{Occupant, Slot};
use super::state::{Pressure, PressureHook, State};
use crate::device::Device;
use crate::error::{AllocateError, ShrinkError};
use crate::own::Stream;
use crate::region::{Fence, Space};

/// How long a waiting allocation sleeps before it asks the fences again.
const ASK_AGAIN: Duration = Duration::from_micros(200);

/// Idle slots looked at for the best one.
const CANDIDATES: usize = 8;

pub(crate) struct Core {
    pub(crate) device: Device,
    state: Mutex<State>,
    /// Told when memory becomes idle.
    freed: Condvar,
}

/// What a block is to be.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) size: u64,
    pub(crate) capacity: u64,
    pub(crate) home: Option<Stream>,
    pub(crate) tag: Option<String>,
    pub(crate) zeroed: bool,
}

/// Where a block is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) tenant: TenantId,
    pub(crate) slot: usize,
    pub(crate) address: DeviceAddress,
    pub(crate) capacity: u64,
}

impl Core {
    pub(crate) fn new(device: Device, state: State) -> Self {
        Self {
            device,
            state: Mutex::new(state),
            freed: Condvar::new(),
        }
    }

    /// A panic elsewhere leaves counters that are right for what was done until then.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state_mut(&mut self) -> &mut State {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory became idle: whoever waits may try again.
    pub(crate) fn announce(&self) {
        self.freed.notify_all();
    }

    pub(crate) fn try_allocate(
        &self,
        tenant: TenantId,
        wanted: &Wanted,
    ) -> Result<Place, AllocateError> {
        let mut state = self.lock();
        state
            .allocate(tenant, wanted)
            .inspect_err(|error| state.count_refusal(tenant, error))
    }

    pub(crate) fn allocate(
        &self,
        tenant: TenantId,
        wanted: &Wanted,
        deadline: Option<Instant>,
    ) -> Result<Place, AllocateError> {
        self.insist(tenant, wanted.size, deadline, |state| {
            state.allocate(tenant, wanted)
        })
    }

    pub(crate) fn grow(
        &self,
        place: &Place,
        size: u64,
        deadline: Option<Instant>,
    ) -> Result<(), AllocateError> {
        let more = size.saturating_sub(self.lock().size_of(place));
        self.insist(place.tenant, more, deadline, |state| {
            state.grow(place, size)
        })
    }

    pub(crate) fn try_grow(&self, place: &Place, size: u64) -> Result<(), AllocateError> {
        let mut state = self.lock();
        state
            .grow(place, size)
            .inspect_err(|error| state.count_refusal(place.tenant, error))
    }

    /// Tries, asks other tenants to give memory back, and tries again until the deadline.
    fn insist<T>(
        &self,
        tenant: TenantId,
        bytes: u64,
        deadline: Option<Instant>,
        attempt: impl Fn(&mut State) -> Result<T, AllocateError>,
    ) -> Result<T, AllocateError> {
        self.try_until(tenant, bytes, deadline, attempt)
            .inspect_err(|error| self.lock().count_refusal(tenant, error))
    }

    fn try_until<T>(
        &self,
        tenant: TenantId,
        bytes: u64,
        deadline: Option<Instant>,
        attempt: impl Fn(&mut State) -> Result<T, AllocateError>,
    ) -> Result<T, AllocateError> {
        let mut state = self.lock();
        let mut refusal = match attempt(&mut state) {
            Err(error) if error.is_shortage() => error,
            outcome => return outcome,
        };
        let (name, hooks) = state.hooks_of_others(tenant);
        for hook in hooks {
            drop(state);
            hook(&Pressure {
                wanted_by: name.clone(),
                bytes,
                deadline,
            });
            state = self.lock();
            match attempt(&mut state) {
                Err(error) if error.is_shortage() => refusal = error,
                outcome => return outcome,
            }
        }
        let Some(deadline) = deadline else {
            return Err(refusal);
        };
        loop {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Err(refusal);
            };
            if state.needs_synchronise && state.capturing == 0 {
                let since = state.clock;
                drop(state);
                self.device.synchronize()?;
                state = self.lock();
                state.synchronised(since);
            } else {
                state = self
                    .freed
                    .wait_timeout(state, left.min(ASK_AGAIN))
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
            match attempt(&mut state) {
                Err(error) if error.is_shortage() => refusal = error,
                outcome => return outcome,
            }
        }
    }

    pub(crate) fn free(&self, place: &Place) {
        let mut state = self.lock();
        state.free(place);
        drop(state);
        self.announce();
    }

    pub(crate) fn shrink(&self, place: &Place, size: u64) -> Result<(), ShrinkError> {
        self.lock().shrink(place, size)?;
        self.announce();
        Ok(())
    }
}

impl State {
    /// Tenants to be asked for memory, lower priority first, and who asks.
    fn hooks_of_others(&self, tenant: TenantId) -> (String, Vec<PressureHook>) {
        let name = self
            .tenants
            .get(&tenant)
            .map(|tenancy| tenancy.name.clone());
        let mut others: Vec<_> = self
            .tenants
            .iter()
            .filter(|&(&id, _)| {
                let account = self.budget.account(id);
                id != tenant && account.held > account.guarantee
            })
            .filter_map(|(_, tenancy)| Some((tenancy.priority, tenancy.hook.clone()?)))
            .collect();
        others.sort_by_key(|&(priority, _)| priority);
        (
            name.unwrap_or_default(),
            others.into_iter().map(|(_, hook)| hook).collect(),
        )
    }

    fn size_of(&self, place: &Place) -> u64 {
        self.slot(place.tenant, place.slot)
            .map_or(0, |slot| slot.requested())
    }

    fn count_refusal(&mut self, id: TenantId, error: &AllocateError) {
        if error.is_shortage() {
            self.refusals += 1;
            if let Some(tenancy) = self.tenants.get_mut(&id) {
                tenancy.refusals += 1;
            }
        }
    }

    fn allocate(&mut self, id: TenantId, wanted: &Wanted) -> Result<Place, AllocateError> {
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
                if let Some(home) = home {
                    // A fill may have been queued on it.
                    slot.fence.merge(Fence::streams(vec![home.clone()]));
                }
                self.put_slot(id, index, slot);
            }
            return Err(error);
        }
        if !slot.fence.is_passed() {
            // Work of the home stream comes after it: from here on that stream stands for it.
            slot.fence = Fence::streams(wanted.home.iter().cloned().collect());
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
            return Err(crate::error::CallError::ContextLost(error).into());
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

    fn grow(&mut self, place: &Place, size: u64) -> Result<(), AllocateError> {
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

    fn shrink(&mut self, place: &Place, size: u64) -> Result<(), ShrinkError> {
        if size == 0 {
            return Err(ShrinkError::ZeroSize);
        }
        let granule = self.device.granule();
        let now = self.tick();
        let Some(slot) = self.slot_mut(place.tenant, place.slot) else {
            return Ok(());
        };
        let Some(block) = &mut slot.block else {
            return Ok(());
        };
        if size > block.requested {
            return Err(ShrinkError::WouldGrow {
                size: block.requested,
                wanted: size,
            });
        }
        let used = granule.round_up(size).unwrap_or(block.used);
        block.requested = size;
        if used < block.used {
            block.used = used;
            let fence = block.fence(&slot.space);
            slot.fence.merge(fence);
            slot.touched = now;
        }
        Ok(())
    }

    fn free(&mut self, place: &Place) {
        let now = self.tick();
        let Some(mut slot) = self.take_slot(place.tenant, place.slot) else {
            return;
        };
        if let Some(block) = slot.block.take() {
            let fence = block.fence(&slot.space);
            slot.fence.merge(fence);
        }
        slot.touched = now;
        self.put_slot(place.tenant, place.slot, slot);
        self.collect_if_draining(place.tenant);
    }

    /// Unregisters a tenant: no more allocations, and what is idle goes back to the pool.
    pub(crate) fn unregister(&mut self, id: TenantId) {
        let Some(tenancy) = self.tenants.get_mut(&id) else {
            return;
        };
        if !std::mem::replace(&mut tenancy.registered, false) {
            return;
        }
        tenancy.hook = None;
        self.budget.drain(id);
        self.collect_if_draining(id);
    }

    /// Takes back what a draining tenant no longer uses, as far as that has passed.
    pub(crate) fn collect_if_draining(&mut self, id: TenantId) {
        if self
            .tenants
            .get(&id)
            .is_none_or(|tenancy| tenancy.registered)
        {
            return;
        }
        if let Err(error) = self.take_back_all_of(id) {
            // It stays charged to the draining tenant and is tried again when wanted.
            tracing::warn!(%error, "idle memory of an unregistered tenant stays mapped for now");
        }
        self.drop_empty_slots_if_draining(id);
    }

    pub(crate) fn take_lease(&mut self, place: &Place) {
        if let Some(slot) = self.slot_mut(place.tenant, place.slot) {
            slot.leases += 1;
        }
    }

    pub(crate) fn end_lease(&mut self, place: &Place) {
        let now = self.tick();
        let Some(mut slot) = self.take_slot(place.tenant, place.slot) else {
            return;
        };
        slot.leases = slot.leases.saturating_sub(1);
        slot.touched = now;
        self.put_slot(place.tenant, place.slot, slot);
        self.collect_if_draining(place.tenant);
    }

    /// Notes that a stream uses the block, or used it while a lease kept it.
    pub(crate) fn record_use(&mut self, place: &Place, stream: &Stream) {
        let Some(slot) = self.slot_mut(place.tenant, place.slot) else {
            return;
        };
        match &mut slot.block {
            Some(block) => {
                let known = block.home.as_ref() == Some(stream) || block.users.contains(stream);
                if !known {
                    block.users.push(stream.clone());
                }
            }
            None => slot.fence.merge(Fence::streams(vec![stream.clone()])),
        }
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
