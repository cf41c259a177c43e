//! The lock around a pool's state, and waiting, which happens here and nowhere below.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::budget::{Budget, TenantId};
pub(super) use super::locked::Locked;
use super::pace::Growth;
use super::relief::{Appeal, Demand};
use super::slot::SlotId;
use super::state::State;
use crate::device::Device;
use crate::error::{AllocateError, CallError, ShrinkError};
use crate::own::{ExportMark, Stream};
use crate::region::{Extent, Waker};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex};

/// How long a waiting allocation sleeps before it asks the fences again for the first time. The pause
/// doubles each time, up to the second figure: memory that other threads free ends it at once, and
/// what only the GPU can complete is worth no more of the pool's time.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_micros(100), Duration::from_micros(1600));

/// How often an operation that finds too little waits for others that are in flight.
const ATTEMPTS: usize = 32;

pub(crate) struct Core {
    pub(crate) device: Device,
    pub(super) state: Mutex<State>,
    /// What a forked child finds: the state of a pool without tenants. Nothing locks it here.
    pub(super) childs: Mutex<State>,
    /// Told when memory becomes idle.
    freed: Condvar,
    /// Those who wait for that.
    waiting: AtomicUsize,
    /// Told when an operation that was in flight has ended, and when the mapper has placed something.
    pub(super) settled: Condvar,
    /// Held by whoever asks the driver what is free, and creates then.
    pub(super) creating: Mutex<()>,
    /// How to call the pool's mapper, if it was built with one.
    pub(super) waker: OnceLock<Waker>,
}

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
        let childs = State::new(
            device.clone(),
            state.policy,
            Budget::new(state.budget.limits()),
        );
        Self {
            device,
            state: Mutex::new(state),
            childs: Mutex::new(childs),
            freed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            settled: Condvar::new(),
            creating: Mutex::new(()),
            waker: OnceLock::new(),
        }
    }

    /// Memory became idle: whoever waits may try again.
    pub(crate) fn announce(&self) {
        if self.is_awaited() {
            // Under the lock, so that nobody who has just looked begins to wait after this.
            self.lock().told += 1;
            self.freed.notify_all();
        }
    }

    /// Whether somebody waits for memory. One who begins to wait just now sweeps the stream caches and
    /// tries once more after having said so.
    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Locks, once no operation has the slot that a block is or was in.
    pub(super) fn lock_with(&self, place: &SlotId) -> Locked<'_> {
        let mut state = self.lock();
        while state.is_out(place.tenant, place.slot) {
            state = state.wait(&self.settled, None);
        }
        state
    }

    /// Waits until no operation has any of some slots, and the mapper has placed what they want if it
    /// is just placing that: each is to have this number of bytes. Whoever calls has no slot out.
    pub(super) fn await_slots<'a>(
        &'a self,
        mut state: Locked<'a>,
        wanted: impl Iterator<Item = (SlotId, u64)> + Clone,
    ) -> Locked<'a> {
        let waits = |state: &State| {
            wanted.clone().any(|(place, size)| {
                let (id, index) = (place.tenant, place.slot);
                state.is_out(id, index) || state.waits_for_mapper(id, index, size)
            })
        };
        while waits(&state) {
            state = state.wait(&self.settled, None);
        }
        state
    }

    /// Attempts something. Where it finds too little while other operations are in flight, which may
    /// give back what they took, it is attempted again when one of them has ended.
    pub(super) fn beside_others<'a, T>(
        &'a self,
        state: Locked<'a>,
        attempt: &impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Attempt<'a, T> {
        let mut ended = state.flights.ended();
        let (mut state, mut outcome) = attempt(state);
        for _ in 0..ATTEMPTS {
            // One that ended meanwhile may have given back what was missed.
            let missed = state.flights.ended() > ended;
            if shortage_in(&outcome).is_none() || !(missed || state.has_company()) {
                break;
            }
            if !missed {
                state = state.wait(&self.settled, None);
            }
            ended = state.flights.ended();
            (state, outcome) = attempt(state);
        }
        (state, outcome)
    }

    pub(crate) fn try_allocate(
        &self,
        tenant: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<SlotId, AllocateError> {
        let attempt = |state| self.attempt_to_allocate(state, tenant, wanted);
        let (mut state, outcome) = self.beside_others(self.lock(), &attempt);
        let demand = Demand::Bytes(wanted.size);
        let outcome = outcome.map_err(|error| state.refuse(tenant, demand, error));
        Self::let_go(state);
        outcome
    }

    pub(crate) fn allocate(
        &self,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        deadline: Option<Instant>,
    ) -> Result<SlotId, AllocateError> {
        self.insist(tenant, wanted.size, deadline, |state| {
            self.attempt_to_allocate(state, tenant, wanted)
        })
    }

    pub(crate) fn grow(
        &self,
        place: &SlotId,
        size: u64,
        deadline: Option<Instant>,
    ) -> Result<(), AllocateError> {
        let mut state = self.lock();
        if state.grow_within(place, size) {
            Self::let_go(state);
            return Ok(());
        }
        self.device.own_process()?;
        let state = self.await_slots(state, std::iter::once((*place, size)));
        let state = self
            .unshare_cuts(state, place.tenant, &[(*place, size)], deadline)
            .map_err(|refused| refused.cause)?;
        Self::let_go(state);
        let demand = Demand::Growth(&[(*place, size)]);
        self.insist(place.tenant, demand, deadline, |state| {
            self.attempt_to_grow(state, place, size)
        })
    }

    pub(crate) fn try_grow(&self, place: &SlotId, size: u64) -> Result<(), AllocateError> {
        let mut state = self.lock();
        if state.grow_within(place, size) {
            Self::let_go(state);
            return Ok(());
        }
        self.device.own_process()?;
        let state = self.await_slots(state, std::iter::once((*place, size)));
        let state = self
            .try_unshare_cuts(state, place.tenant, &[(*place, size)])
            .map_err(|refused| refused.cause)?;
        let attempt = |state| self.attempt_to_grow(state, place, size);
        let (mut state, outcome) = self.beside_others(state, &attempt);
        let demand = Demand::Growth(&[(*place, size)]);
        let outcome = outcome.map_err(|error| state.refuse(place.tenant, demand, error));
        Self::let_go(state);
        outcome
    }

    fn attempt_to_allocate<'a>(
        &'a self,
        mut state: Locked<'a>,
        tenant: TenantId,
        wanted: &Wanted<'_>,
    ) -> Attempt<'a, SlotId> {
        let outcome = state.allocate(tenant, wanted);
        state.look_behind();
        (state, outcome)
    }

    /// Grows; where the mapper is just placing what the block wants, behind that.
    fn attempt_to_grow<'a>(
        &'a self,
        mut state: Locked<'a>,
        place: &SlotId,
        size: u64,
    ) -> Attempt<'a, ()> {
        state.purge_some();
        state = self.await_slots(state, std::iter::once((*place, size)));
        let outcome = state.grow(place, size);
        if outcome.is_ok() {
            state.ask_precommit(place.tenant, place.slot);
        }
        state.look_behind();
        (state, outcome)
    }

    /// Lets the lock go, and wakes the mapper if an operation asked for that.
    pub(super) fn let_go(mut state: Locked<'_>) {
        let waker = state.take_urgency();
        drop(state);
        if let Some((waker, urgency)) = waker {
            waker.wake(urgency);
        }
    }

    /// Tries; asks other tenants to give memory back, where they can help; and tries again until the
    /// deadline, where waiting can help.
    pub(super) fn insist<'a, 'd, T>(
        &'a self,
        tenant: TenantId,
        demand: impl Into<Demand<'d>>,
        deadline: Option<Instant>,
        attempt: impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Result<T, AllocateError> {
        let demand = demand.into();
        let (mut state, outcome) = self.try_until(tenant, demand, deadline, attempt)?;
        let outcome = outcome.map_err(|error| state.refuse(tenant, demand, error));
        Self::let_go(state);
        outcome
    }

    fn try_until<'a, T>(
        &'a self,
        tenant: TenantId,
        demand: Demand<'_>,
        deadline: Option<Instant>,
        attempt: impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Result<Attempt<'a, T>, CallError> {
        let (mut state, mut outcome) = self.beside_others(self.lock(), &attempt);
        let mut asked = Vec::new();
        while let Some(error) = shortage_in(&outcome) {
            if !state.can_be_given(tenant, demand, error) {
                break;
            }
            let appeal = state.next_appeal(tenant, demand, error, deadline, &asked)?;
            let Some(Appeal { to, hook, pressure }) = appeal else {
                break;
            };
            asked.push(to);
            Self::let_go(state);
            hook(&pressure);
            // This may be the last owner by now.
            drop(hook);
            (state, outcome) = self.beside_others(self.lock(), &attempt);
        }
        let waits = |error| state.can_ever(tenant, demand, error);
        let (Some(true), Some(deadline)) = (shortage_in(&outcome).map(waits), deadline) else {
            return Ok((state, outcome));
        };
        let _waiter = Waiter::of(&self.waiting);
        state.sweep_each();
        let mut nap = ASK_AGAIN.0;
        let mut told = state.told;
        (state, outcome) = attempt(state);
        while let Some(error) = shortage_in(&outcome) {
            let left = deadline.checked_duration_since(Instant::now());
            let Some(left) = left.filter(|_| state.can_ever(tenant, demand, error)) else {
                break;
            };
            (state, told) = self.pause(state, told, left.min(nap))?;
            nap = (2 * nap).min(ASK_AGAIN.1);
            (state, outcome) = attempt(state);
        }
        Ok((state, outcome))
    }

    /// Waits for a moment, at most `left`: for memory to become idle, unless that was told since the
    /// count was `told`, or for the device where only that tells whether something has passed.
    /// Returns the count, to be told the next time.
    fn pause<'a>(
        &'a self,
        mut state: Locked<'a>,
        told: u64,
        left: Duration,
    ) -> Result<(Locked<'a>, u64), CallError> {
        if state.needs_synchronise && state.capturing == 0 {
            state.synchronising += 1;
            drop(state);
            let waited = self.device.settle();
            state = self.lock();
            state.synchronising -= 1;
            // A guard of captures waits for that.
            self.settled.notify_all();
            match waited {
                Ok(()) => {
                    state.needs_synchronise = false;
                    return Ok((state, told));
                }
                Err(error) if self.device.usable().is_err() => return Err(error),
                // Another library captures, for instance. The caller tries again later.
                Err(error) => tracing::debug!(%error, "the device could not be waited for"),
            }
        }
        if state.told == told {
            state = state.wait(&self.freed, Some(left));
        }
        let told = state.told;
        Ok((state, told))
    }

    /// Tries until the deadline, as long as `again` says that trying again may help.
    pub(super) fn until<'a, T, E: From<CallError>>(
        &'a self,
        deadline: Option<Instant>,
        attempt: impl Fn(Locked<'a>) -> (Locked<'a>, Result<T, E>),
        again: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        let (mut state, mut outcome) = attempt(self.lock());
        if let Some(deadline) = deadline {
            let _waiter = Waiter::of(&self.waiting);
            let mut nap = ASK_AGAIN.0;
            let mut told = state.told;
            (state, outcome) = match outcome {
                Err(error) if again(&error) => attempt(state),
                outcome => (state, outcome),
            };
            while matches!(&outcome, Err(error) if again(error)) {
                let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                    break;
                };
                (state, told) = self.pause(state, told, left.min(nap))?;
                nap = (2 * nap).min(ASK_AGAIN.1);
                (state, outcome) = attempt(state);
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
    pub(crate) fn extents(&self, place: &SlotId) -> Vec<Extent> {
        let state = self.lock_with(place);
        let slot = state.slot(place.tenant, place.slot);
        slot.map_or_else(Vec::new, |slot| slot.space.extents().collect())
    }

    /// The same, each with what marks its memory as exported.
    pub(crate) fn marked_extents(&self, place: &SlotId) -> Vec<(Extent, ExportMark)> {
        let state = self.lock_with(place);
        let slot = state.slot(place.tenant, place.slot);
        slot.map_or_else(Vec::new, |slot| {
            slot.space.marked_in(0, slot.space.size()).collect()
        })
    }

    pub(crate) fn free(&self, place: &SlotId) {
        let mut state = self.lock_with(place);
        state.free(place);
        Self::let_go(state);
        self.announce();
    }

    pub(crate) fn end_lease(&self, place: &SlotId) {
        let mut state = self.lock_with(place);
        let given = state.end_lease(place);
        Self::let_go(state);
        // Most leases end on blocks that live on: those who wait are not woken for nothing.
        if given {
            self.announce();
        }
    }

    pub(crate) fn unregister(&self, tenant: TenantId) {
        let mut state = self.lock();
        state.unregister(tenant);
        Self::let_go(state);
        self.announce();
    }

    pub(crate) fn shrink(&self, steps: &[(SlotId, u64)]) -> Result<(), ShrinkError> {
        self.device.own_process()?;
        let wanted = steps.iter().map(|(place, _)| (*place, 0));
        let mut state = self.await_slots(self.lock(), wanted);
        let outcome = state.shrink(steps);
        Self::let_go(state);
        if outcome.is_ok() {
            self.announce();
        }
        outcome
    }
}

/// Why an attempt failed, if something was short.
fn shortage_in<T>(outcome: &Result<T, AllocateError>) -> Option<&AllocateError> {
    outcome.as_ref().err().filter(|error| error.is_shortage())
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

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
