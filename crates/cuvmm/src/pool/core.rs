//! The lock around a pool's state, and waiting, which happens here and nowhere below.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuvmm_driver::DeviceAddress;

use super::budget::TenantId;
use super::state::{Pressure, PressureHook, State};
use crate::device::Device;
use crate::error::{AllocateError, ShrinkError};
use crate::own::Stream;
use crate::region::Extent;

/// How long a waiting allocation sleeps before it asks the fences again.
const ASK_AGAIN: Duration = Duration::from_micros(200);

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

    /// Every extent of the slot that a block is or was in, in order.
    pub(crate) fn extents(&self, place: &Place) -> Vec<Extent> {
        let state = self.lock();
        let slot = state.slot(place.tenant, place.slot);
        slot.map_or_else(Vec::new, |slot| slot.space.extents().collect())
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
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
