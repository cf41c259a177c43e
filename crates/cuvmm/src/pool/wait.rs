//! How a request waits for memory: not at all, until others have been asked for some, or until a
//! deadline. It happens here, and nowhere below.

use std::time::{Duration, Instant};

use super::budget::TenantId;
use super::core::{Core, Locked};
use super::relief::{Appeal, Demand};
use super::state::State;
use crate::deferred;
use crate::error::{BlockError, CallError};
use crate::sync::atomic::{AtomicUsize, Ordering};

/// How long a waiting request sleeps before it asks the fences again for the first time. The pause
/// doubles each time, up to the second figure: memory that other threads free ends it at once, and
/// what only the GPU can complete is worth no more of the pool's time.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_micros(100), Duration::from_micros(1600));

/// How often an operation that finds too little waits for others that are in flight.
const ATTEMPTS: usize = 32;

/// What a request that finds too little memory may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Nothing: it is refused.
    Never,
    /// Call pressure hooks.
    Hooks,
    /// Call them, and wait until this moment.
    Until(Instant),
    /// Nothing: it is a future's, and waits in the queue. In its first turn it calls hooks; and whether
    /// it was attempted before.
    Turn { appeals: bool, begun: bool },
}

/// The moment so long from now, or one that is as good as never.
pub(crate) fn after(wait: Duration) -> Instant {
    let now = Instant::now();
    let century = Duration::from_secs(100 * 365 * 86_400);
    now.checked_add(wait.min(century)).unwrap_or(now)
}

/// What came of an attempt, and the lock it was made under.
pub(super) type Attempt<'a, T, E = BlockError> = (Locked<'a>, Result<T, E>);

impl Wait {
    /// Of a block that may wait so long, or not at all.
    pub(crate) fn of(timeout: Option<Duration>) -> Self {
        timeout.map_or(Self::Hooks, |timeout| Self::Until(after(timeout)))
    }

    /// As long as the most patient of several blocks may.
    pub(super) fn of_any(timeouts: impl Iterator<Item = Option<Duration>>) -> Self {
        Self::of(timeouts.flatten().max())
    }

    /// Of a future's request.
    pub(super) const fn turn(appeals: bool, begun: bool) -> Self {
        Self::Turn { appeals, begun }
    }

    const fn calls_hooks(self) -> bool {
        !matches!(self, Self::Never | Self::Turn { appeals: false, .. })
    }

    pub(super) fn deadline(self) -> Option<Instant> {
        match self {
            Self::Until(deadline) => Some(deadline),
            // It waits for as long as it takes.
            Self::Turn { .. } => Some(after(Duration::MAX)),
            Self::Never | Self::Hooks => None,
        }
    }
}

impl Core {
    /// Attempts what a tenant wants; where too little memory is found and it may be worth it, again:
    /// when another operation has ended, after a pressure hook, and when memory may have come free.
    pub(super) fn request<'a, 'd, T>(
        &'a self,
        tenant: TenantId,
        demand: impl Into<Demand<'d>>,
        wait: Wait,
        attempt: impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Result<T, BlockError> {
        self.request_while(tenant, demand, wait, &|| true, attempt)
    }

    /// Attempts what a tenant wants as [`request`](Self::request) does, and waits only as long as it is
    /// `wanted`.
    pub(super) fn request_while<'a, 'd, T>(
        &'a self,
        tenant: TenantId,
        demand: impl Into<Demand<'d>>,
        wait: Wait,
        wanted: &dyn Fn() -> bool,
        attempt: impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Result<T, BlockError> {
        let demand = demand.into();
        // A hook that waited for memory, or for other hooks, might wait for itself.
        let wait = match deferred::is_in_hook() {
            true => Wait::Never,
            false => wait,
        };
        let attempt = |state| {
            let (mut state, outcome) = attempt(state);
            state.look_behind();
            (state, outcome)
        };
        let mut attempted = self.beside_others(self.lock(), &attempt);
        if wait.calls_hooks() {
            attempted = self.appeal(attempted, tenant, demand, wait.deadline(), &attempt);
        }
        if let Wait::Until(deadline) = wait {
            let again = |state: &State, error: &BlockError| {
                error.is_shortage() && wanted() && state.can_ever(tenant, demand, error)
            };
            attempted = self.repeat(attempted, deadline, again, &attempt)?;
        }
        let (mut state, outcome) = attempted;
        let outcome = outcome.map_err(|error| match wait {
            // It may wait on.
            Wait::Turn { .. } => error,
            _ => state.refuse(tenant, demand, error),
        });
        Self::let_go(state);
        outcome
    }

    /// Attempts something until the deadline, as long as `again` says that trying again may help.
    pub(super) fn until<'a, T, E: From<CallError>>(
        &'a self,
        deadline: Option<Instant>,
        attempt: impl Fn(Locked<'a>) -> Attempt<'a, T, E>,
        again: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        let mut attempted = attempt(self.lock());
        let deadline = deadline.filter(|_| !deferred::is_in_hook());
        if let Some(deadline) = deadline {
            attempted = self.repeat(attempted, deadline, |_, error| again(error), &attempt)?;
        }
        let (state, outcome) = attempted;
        Self::let_go(state);
        outcome
    }

    /// Attempts something. Where it finds too little while other operations are in flight, which may
    /// give back what they took, it is attempted again when one of them has ended.
    fn beside_others<'a, T>(
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

    /// Asks the tenant itself, then others, to give memory back, one after the other, as long as they
    /// can help.
    pub(super) fn appeal<'a, T>(
        &'a self,
        (mut state, mut outcome): Attempt<'a, T>,
        tenant: TenantId,
        demand: Demand<'_>,
        deadline: Option<Instant>,
        attempt: &impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Attempt<'a, T> {
        let mut asked = Vec::new();
        while let Some(error) = shortage_in(&outcome) {
            if !state.can_be_given(tenant, demand, error) {
                break;
            }
            let appeal = state.next_appeal(tenant, demand, error, deadline, &asked);
            let Some(Appeal { to, hook, pressure }) = appeal else {
                break;
            };
            asked.push(to);
            Self::let_go(state);
            // This may be the hook's last owner by now.
            deferred::call_hook(move || hook(&pressure));
            (state, outcome) = self.beside_others(self.lock(), attempt);
        }
        (state, outcome)
    }

    /// Attempts something that failed again, each time memory may have come free.
    fn repeat<'a, T, E: From<CallError>>(
        &'a self,
        (mut state, mut outcome): Attempt<'a, T, E>,
        deadline: Instant,
        again: impl Fn(&State, &E) -> bool,
        attempt: &impl Fn(Locked<'a>) -> Attempt<'a, T, E>,
    ) -> Result<Attempt<'a, T, E>, E> {
        if !matches!(&outcome, Err(error) if again(&state, error)) {
            return Ok((state, outcome));
        }
        let _waiter = Waiter::of(&self.waiting);
        state.sweep_each();
        let mut nap = ASK_AGAIN.0;
        let mut told = state.told;
        (state, outcome) = attempt(state);
        while matches!(&outcome, Err(error) if again(&state, error)) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
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
        state: Locked<'a>,
        told: u64,
        left: Duration,
    ) -> Result<(Locked<'a>, u64), CallError> {
        let (mut state, settled) = self.settle_device(state)?;
        if settled {
            return Ok((state, told));
        }
        if state.told == told {
            state = state.wait(&self.freed, Some(left));
        }
        let told = state.told;
        Ok((state, told))
    }

    /// Waits for the device, if a fence was asked that only a synchronisation can tell of; whether that
    /// was so and the device was waited for.
    pub(super) fn settle_device<'a>(
        &'a self,
        mut state: Locked<'a>,
    ) -> Result<(Locked<'a>, bool), CallError> {
        if !state.needs_synchronise || state.capturing > 0 {
            return Ok((state, false));
        }
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
                Ok((state, true))
            }
            Err(error) if self.device.usable().is_err() => Err(error),
            Err(error) => {
                // Another library captures, for instance. The caller tries again later.
                tracing::debug!(%error, "the device could not be waited for");
                Ok((state, false))
            }
        }
    }
}

/// Why an attempt failed, if something was short.
fn shortage_in<T>(outcome: &Result<T, BlockError>) -> Option<&BlockError> {
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
