//! The lock around a pool's state, and waiting, which happens here and nowhere below.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::budget::TenantId;
use super::pace::Growth;
use super::pressure::{Pressure, PressureHook};
use super::slot::Place;
use super::state::State;
use crate::device::Device;
use crate::error::{AllocateError, CallError, ShrinkError};
use crate::own::{ExportMark, Stream};
use crate::region::Extent;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How long a waiting allocation sleeps before it asks the fences again.
const ASK_AGAIN: Duration = Duration::from_micros(200);

pub(crate) struct Core {
    pub(crate) device: Device,
    state: Mutex<State>,
    /// Told when memory becomes idle.
    freed: Condvar,
    /// Those who wait for that.
    waiting: AtomicUsize,
    /// Told when the mapper has placed something.
    placed: Condvar,
}

pub(super) type Locked<'a> = MutexGuard<'a, State>;

/// What came of an attempt, and the lock it was made under.
pub(super) type Attempt<'a, T> = (Locked<'a>, Result<T, AllocateError>);

/// What a block is to be.
#[derive(Clone, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) size: u64,
    pub(crate) capacity: u64,
    pub(crate) home: Option<&'a Stream>,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) zeroed: bool,
    pub(crate) grain: Grain,
    /// Idle memory serves only where nothing of an extent is left over behind the block.
    pub(crate) snug: bool,
    /// What the distance of blocks side by side is a multiple of, in bytes.
    pub(crate) stride: u64,
}

/// What a block's memory comes in, where that is another thing than the pool says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Grain {
    pub(crate) growth: Option<Growth>,
    /// The largest extent in bytes.
    pub(crate) largest: Option<u64>,
}

impl Core {
    pub(crate) fn new(device: Device, state: State) -> Self {
        Self {
            device,
            state: Mutex::new(state),
            freed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            placed: Condvar::new(),
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
        if self.is_awaited() {
            self.freed.notify_all();
        }
    }

    /// Whether somebody waits for memory. One who begins to wait just now sweeps the shelves and
    /// tries once more after having said so.
    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// An extent was placed ahead: whoever waits for it can go on.
    pub(crate) fn placed(&self) {
        self.placed.notify_all();
    }

    pub(crate) fn try_allocate(
        &self,
        tenant: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<Place, AllocateError> {
        let (mut state, outcome) = self.attempt_to_allocate(self.lock(), tenant, wanted);
        let outcome = outcome.inspect_err(|error| state.count_refusal(tenant, error));
        Self::let_go(state);
        outcome
    }

    pub(crate) fn allocate(
        &self,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        deadline: Option<Instant>,
    ) -> Result<Place, AllocateError> {
        self.insist(tenant, wanted.size, deadline, |state| {
            self.attempt_to_allocate(state, tenant, wanted)
        })
    }

    pub(crate) fn grow(
        &self,
        place: &Place,
        size: u64,
        deadline: Option<Instant>,
    ) -> Result<(), AllocateError> {
        let mut state = self.lock();
        let more = size.saturating_sub(state.size_of(place));
        if state.grow_within(place, size) {
            Self::let_go(state);
            return Ok(());
        }
        let state = self
            .mend_cuts(state, place.tenant, &[(*place, size)], deadline)
            .map_err(|refused| refused.cause)?;
        Self::let_go(state);
        self.insist(place.tenant, more, deadline, |state| {
            self.attempt_to_grow(state, place, size)
        })
    }

    pub(crate) fn try_grow(&self, place: &Place, size: u64) -> Result<(), AllocateError> {
        let mut state = self.lock();
        if state.grow_within(place, size) {
            Self::let_go(state);
            return Ok(());
        }
        let state = self
            .try_mend_cuts(state, place.tenant, &[(*place, size)])
            .map_err(|refused| refused.cause)?;
        let (mut state, outcome) = self.attempt_to_grow(state, place, size);
        let outcome = outcome.inspect_err(|error| state.count_refusal(place.tenant, error));
        Self::let_go(state);
        outcome
    }

    fn attempt_to_allocate<'a>(
        &'a self,
        mut state: Locked<'a>,
        tenant: TenantId,
        wanted: &Wanted<'_>,
    ) -> Attempt<'a, Place> {
        let outcome = state.allocate(tenant, wanted);
        state.look_behind();
        (state, outcome)
    }

    /// Grows; where the mapper is just placing what the block wants, behind that.
    fn attempt_to_grow<'a>(
        &'a self,
        mut state: Locked<'a>,
        place: &Place,
        size: u64,
    ) -> Attempt<'a, ()> {
        state = self.behind_mapper(state, place, size);
        let outcome = state.grow(place, size);
        if outcome.is_ok() {
            state.look_ahead(place.tenant, place.slot);
            state.look_behind();
        }
        (state, outcome)
    }

    /// Waits for what the mapper is just placing, if it is what a block wants.
    pub(super) fn behind_mapper<'a>(
        &'a self,
        mut state: Locked<'a>,
        place: &Place,
        size: u64,
    ) -> Locked<'a> {
        while state.waits_for_mapper(place.tenant, place.slot, size) {
            state = self
                .placed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Lets the lock go, and rings for the mapper if somebody asked for it.
    pub(super) fn let_go(mut state: Locked<'_>) {
        let bell = state.take_ring();
        drop(state);
        if let Some((bell, ring)) = bell {
            bell.ring(ring);
        }
    }

    /// Tries, asks other tenants to give memory back, and tries again until the deadline.
    pub(super) fn insist<'a, T>(
        &'a self,
        tenant: TenantId,
        bytes: u64,
        deadline: Option<Instant>,
        attempt: impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Result<T, AllocateError> {
        let (mut state, outcome) = self.try_until(tenant, bytes, deadline, attempt)?;
        let outcome = outcome.inspect_err(|error| state.count_refusal(tenant, error));
        Self::let_go(state);
        outcome
    }

    fn try_until<'a, T>(
        &'a self,
        tenant: TenantId,
        bytes: u64,
        deadline: Option<Instant>,
        attempt: impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Result<Attempt<'a, T>, CallError> {
        let (mut state, mut outcome) = attempt(self.lock());
        if !is_shortage(&outcome) {
            return Ok((state, outcome));
        }
        let (name, hooks) = state.hooks_of_others(tenant);
        for hook in hooks {
            drop(state);
            hook(&Pressure {
                wanted_by: name.clone(),
                bytes,
                deadline,
            });
            (state, outcome) = attempt(self.lock());
            if !is_shortage(&outcome) {
                return Ok((state, outcome));
            }
        }
        let Some(deadline) = deadline else {
            return Ok((state, outcome));
        };
        let _waiter = Waiter::of(&self.waiting);
        state.sweep_each();
        (state, outcome) = attempt(state);
        while is_shortage(&outcome) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                break;
            };
            state = self.pause(state, left)?;
            (state, outcome) = attempt(state);
        }
        Ok((state, outcome))
    }

    /// Waits for a moment, at most `left`: for memory to become idle, or for the device where only
    /// that tells whether something has passed.
    fn pause<'a>(&'a self, mut state: Locked<'a>, left: Duration) -> Result<Locked<'a>, CallError> {
        if state.needs_synchronise && state.capturing == 0 {
            let since = state.now();
            drop(state);
            self.device.synchronize()?;
            state = self.lock();
            state.synchronised(since);
            return Ok(state);
        }
        let waited = self.freed.wait_timeout(state, left.min(ASK_AGAIN));
        Ok(waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Tries until the deadline, as long as `again` says that trying again may help.
    pub(super) fn until<T, E: From<CallError>>(
        &self,
        deadline: Option<Instant>,
        attempt: impl Fn(&mut State) -> Result<T, E>,
        again: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        let mut state = self.lock();
        let mut outcome = attempt(&mut state);
        if let Some(deadline) = deadline {
            let _waiter = Waiter::of(&self.waiting);
            while matches!(&outcome, Err(error) if again(error)) {
                let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                    break;
                };
                state = self.pause(state, left)?;
                outcome = attempt(&mut state);
            }
        }
        Self::let_go(state);
        outcome
    }

    /// Whether a capture guard lives.
    pub(crate) fn is_capturing(&self) -> bool {
        self.lock().capturing > 0
    }

    /// Every extent of the slot that a block is or was in, in order.
    pub(crate) fn extents(&self, place: &Place) -> Vec<Extent> {
        let state = self.lock();
        let slot = state.slot(place.tenant, place.slot);
        slot.map_or_else(Vec::new, |slot| slot.space.extents().collect())
    }

    /// The same, each with what marks its memory as exported.
    pub(crate) fn marked_extents(&self, place: &Place) -> Vec<(Extent, ExportMark)> {
        let state = self.lock();
        let slot = state.slot(place.tenant, place.slot);
        slot.map_or_else(Vec::new, |slot| {
            slot.space.marked_in(0, slot.space.size()).collect()
        })
    }

    pub(crate) fn free(&self, place: &Place) {
        let mut state = self.lock();
        state.free(place);
        Self::let_go(state);
        self.announce();
    }

    pub(crate) fn end_lease(&self, place: &Place) {
        let mut state = self.lock();
        state.end_lease(place);
        Self::let_go(state);
        self.announce();
    }

    pub(crate) fn unregister(&self, tenant: TenantId) {
        let mut state = self.lock();
        state.unregister(tenant);
        Self::let_go(state);
        self.announce();
    }

    pub(crate) fn shrink(&self, place: &Place, size: u64) -> Result<(), ShrinkError> {
        let mut state = self.lock();
        let outcome = state.shrink(place, size);
        Self::let_go(state);
        if outcome.is_ok() {
            self.announce();
        }
        outcome
    }
}

fn is_shortage<T>(outcome: &Result<T, AllocateError>) -> bool {
    matches!(outcome, Err(error) if error.is_shortage())
}

/// One who waits, counted while it lives.
struct Waiter<'a>(&'a AtomicUsize);

impl<'a> Waiter<'a> {
    fn of(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
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

    pub(super) fn size_of(&self, place: &Place) -> u64 {
        self.slot(place.tenant, place.slot)
            .map_or(0, |slot| slot.requested())
    }

    pub(super) fn count_refusal(&mut self, id: TenantId, error: &AllocateError) {
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
