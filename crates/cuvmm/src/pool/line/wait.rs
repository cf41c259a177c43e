//! How a request waits for memory: not at all, for pressure hooks, or until a deadline. No module
//! below this waits for memory.
//!
//! Keeps I-46 and I-47.

use std::time::{Duration, Instant};

use super::queue::Turn;
use super::relief::Demand;
use super::{Line, Pause};
use crate::deferred::{self, Quiet};
use crate::device::Device;
use crate::error::{BlockError, CallError};
use crate::ledger::{InLine, Waiting};
use crate::own::Stream;
use crate::pool::accounts::TenantId;
use crate::pool::core::{Core, Locked};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::wanted::Lacking;

/// How often an operation that finds too little memory waits for other operations in flight.
const ATTEMPTS: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Is refused.
    Never,
    /// Calls pressure hooks.
    Hooks,
    /// Calls pressure hooks, and waits until this time, calling them again now and then.
    Until(Instant),
    /// Waits in the queue as the future's request with this number, and calls hooks in some turns
    /// (`appeals`).
    Turn { number: u64, appeals: bool },
}

/// Returns the time `wait` from now, limited to a century.
pub(crate) fn after(wait: Duration) -> Instant {
    let now = Instant::now();
    let century = Duration::from_secs(100 * 365 * 86_400);
    now.checked_add(wait.min(century)).unwrap_or(now)
}

/// The result of an attempt, and its lock.
pub(in crate::pool) type Attempt<'a, T, E = BlockError> = (Locked<'a>, Result<T, E>);

impl Wait {
    pub(crate) fn of(timeout: Option<Duration>) -> Self {
        timeout.map_or(Self::Hooks, |timeout| Self::Until(after(timeout)))
    }

    pub(in crate::pool) fn of_any(timeouts: impl Iterator<Item = Option<Duration>>) -> Self {
        Self::of(timeouts.flatten().max())
    }

    pub(super) const fn turn(turn: &Turn) -> Self {
        let (number, appeals) = (turn.number, turn.appeals);
        Self::Turn { number, appeals }
    }

    const fn calls_hooks(self) -> bool {
        !matches!(self, Self::Never | Self::Turn { appeals: false, .. })
    }

    pub(in crate::pool) const fn waits(self) -> bool {
        matches!(self, Self::Until(_) | Self::Turn { .. })
    }

    pub(super) const fn deadline(self) -> Option<Instant> {
        match self {
            Self::Until(deadline) => Some(deadline),
            Self::Never | Self::Hooks | Self::Turn { .. } => None,
        }
    }
}

impl Core {
    /// Attempts a tenant's request. If it finds too little memory and another attempt may help,
    /// tries again: when movable blocks have given memory back, when another operation has ended,
    /// after a pressure hook, and when memory may have become free.
    pub(in crate::pool) fn request<'a, 'd, T>(
        &'a self,
        tenant: TenantId,
        demand: impl Into<Demand<'d>>,
        wait: Wait,
        attempt: impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Result<T, BlockError> {
        self.request_while(tenant, demand, wait, &|| true, attempt)
    }

    /// Attempts a [request](Self::request) that waits only while `wanted` returns `true`.
    pub(in crate::pool) fn request_while<'a, 'd, T>(
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
            let (memory, blocks) = state.halves();
            blocks.request_free_memory(memory);
            (state, outcome)
        };
        let mut attempted = self.beside_others(self.lock(), &attempt);
        if shortage_in(&attempted.1).is_some() {
            attempted = self.after_cuts(attempted, tenant, &attempt);
        }
        if wait.calls_hooks() {
            attempted = self.call_hooks(attempted, tenant, demand, wait, &attempt);
        }
        if let Wait::Until(deadline) = wait {
            let again = |state: &Locked<'_>, error: &BlockError| {
                let least = demand.least(&state.blocks);
                let may_come = error.is_shortage() && wanted();
                may_come && state.memory.can_be_met(tenant, least, error, true)
            };
            let lacks = |state: &mut Locked<'_>, error: &BlockError| {
                state.lacking_in_ledger(tenant, demand, error)
            };
            let ask = |attempted, place| {
                let attempt = |mut state: Locked<'a>| {
                    state.place = place;
                    attempt(state)
                };
                self.call_hooks(attempted, tenant, demand, wait, &attempt)
            };
            let attempt = |state| self.after_cuts(attempt(state), tenant, &attempt);
            attempted = self.repeat(attempted, deadline, again, lacks, ask, &attempt)?;
        }
        let (mut state, outcome) = attempted;
        let outcome = outcome.map_err(|error| match wait {
            // The request goes on waiting in the queue.
            Wait::Turn { .. } => error,
            _ => state.refuse(tenant, demand, error),
        });
        Self::unlock(state);
        outcome
    }

    /// Makes the whole attempt of a holder. If memory is short, repeats it as
    /// [`request`](Self::request) does, each time with no lock held and nothing out: memory that is
    /// freed into the holder may serve it. The bytes of the demand count as new memory, though the
    /// holder may have a part. Waits for no memory while `home`, on which the holder works, captures.
    /// The attempt is given the request's place in the line of a ledger: `place` for one that waits in
    /// the queue.
    pub(in crate::pool) fn request_of_holder<T>(
        &self,
        tenant: TenantId,
        demand: Demand<'_>,
        home: Option<&Stream>,
        (wait, place): (Wait, Option<InLine>),
        attempt: impl Fn(Option<InLine>) -> Result<T, BlockError>,
    ) -> Result<T, BlockError> {
        let captures = || home.is_some_and(|home| home.is_capturing().unwrap_or(true));
        let queued = matches!(wait, Wait::Turn { .. });
        // In the queue another attempt follows anyway.
        if !queued {
            match attempt(None) {
                // The capture ends only after this call; and to wait for work, or to poll it, may
                // break the capture.
                Err(error @ BlockError::Capturing(_)) if captures() => return Err(error),
                Err(error) if error.is_shortage() => {}
                done => return done,
            }
        }
        let outcome = self.request_while(tenant, demand, wait, &|| !captures(), |state| {
            let place = state.place.or(place);
            Self::unlock(state);
            let quiet = Quiet::begin::<Self>(self);
            let outcome = attempt(place);
            let own_ended = quiet.ended();
            drop(quiet);
            let mut state = self.lock();
            state.own_ended = own_ended;
            (state, outcome)
        });
        // What the attempts gave back. The mapper serves the whole queue.
        if !queued {
            self.announce();
        }
        outcome
    }

    /// Repeats a refused attempt while movable blocks give memory back.
    #[cold]
    fn after_cuts<'a, T>(
        &'a self,
        (mut state, mut outcome): Attempt<'a, T>,
        tenant: TenantId,
        attempt: &impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Attempt<'a, T> {
        while let Some(refused) = shortage_in(&outcome)
            && state.cut_for(tenant, refused)
        {
            let place = state.place;
            Self::unlock(state);
            let mut again = self.lock();
            again.place = place;
            (state, outcome) = attempt(again);
        }
        (state, outcome)
    }

    /// Repeats an attempt until the deadline, while `again` returns `true` for the error. Does not
    /// wait in a hook.
    pub(in crate::pool) fn until<'a, T, E: From<CallError>>(
        &'a self,
        deadline: Option<Instant>,
        attempt: impl Fn(Locked<'a>) -> Attempt<'a, T, E>,
        again: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        let mut attempted = attempt(self.lock());
        let deadline = deadline.filter(|_| !deferred::is_in_hook());
        if let Some(deadline) = deadline {
            let again = |_: &Locked<'_>, error: &E| again(error);
            let lacks = |_: &mut Locked<'_>, _: &E| None;
            let ask = |attempted, _| attempted;
            attempted = self.repeat(attempted, deadline, again, lacks, ask, &attempt)?;
        }
        let (state, outcome) = attempted;
        Self::unlock(state);
        outcome
    }

    /// Makes an attempt. If it finds too little memory while other operations are in flight, which
    /// may give memory back, tries again when one has ended.
    fn beside_others<'a, T>(
        &'a self,
        state: Locked<'a>,
        attempt: &impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Attempt<'a, T> {
        let mut ended = state.memory.gate.ended();
        let (mut state, mut outcome) = attempt(state);
        for _ in 0..ATTEMPTS {
            // Not those of the attempt itself.
            ended += state.own_ended;
            // An operation that ended meanwhile may have given back the missing memory.
            let missed = state.memory.gate.ended() > ended;
            if shortage_in(&outcome).is_none() || !(missed || state.others_in_flight()) {
                break;
            }
            state = state.wait_for_end(ended);
            ended = state.memory.gate.ended();
            (state, outcome) = attempt(state);
        }
        (state, outcome)
    }

    /// Calls hooks to give memory back, first the tenant's own and then those of other tenants, in
    /// turn, each once, while they can help and the request is not withdrawn. A turn in the queue calls
    /// one of them. Releases the lock for each hook.
    pub(super) fn call_hooks<'a, T>(
        &'a self,
        (mut state, mut outcome): Attempt<'a, T>,
        tenant: TenantId,
        demand: Demand<'_>,
        wait: Wait,
        attempt: &impl Fn(Locked<'a>) -> Attempt<'a, T>,
    ) -> Attempt<'a, T> {
        let queued = match wait {
            // Where no attempt could be made, the round goes on in another turn.
            Wait::Turn { number, .. } if shortage_in(&outcome).is_some() => Some(number),
            _ => None,
        };
        let round = |number| state.memory.line.queue.take_round(number);
        let mut asked = queued.map_or_else(Vec::new, round);
        while let Some(error) = shortage_in(&outcome) {
            if queued.is_some_and(|number| !state.memory.line.has(number)) {
                break;
            }
            let least = demand.least(&state.blocks);
            if !state.memory.can_be_met(tenant, least, error, false) {
                break;
            }
            let terms = (wait.waits(), wait.deadline());
            let hook_call = state.next_hook_call(tenant, demand, error, terms, &asked);
            let Some(hook_call) = hook_call else {
                break;
            };
            asked.push(hook_call.to());
            if let Some(number) = queued {
                let asked = std::mem::take(&mut asked);
                state.memory.line.queue.keep_round(number, asked);
            }
            Self::unlock(state);
            hook_call.call();
            (state, outcome) = self.beside_others(self.lock(), attempt);
            if queued.is_some() {
                break;
            }
        }
        (state, outcome)
    }

    /// Repeats a failed attempt each time memory may have become free. `lacks` returns the memory
    /// that it lacks of a ledger, if it waits for that. `ask` calls hooks again, at the request's
    /// place in the line of the ledger.
    fn repeat<'a, T, E: From<CallError>>(
        &'a self,
        (mut state, mut outcome): Attempt<'a, T, E>,
        deadline: Instant,
        again: impl Fn(&Locked<'_>, &E) -> bool,
        lacks: impl Fn(&mut Locked<'_>, &E) -> Option<Lacking>,
        ask: impl Fn(Attempt<'a, T, E>, Option<InLine>) -> Attempt<'a, T, E>,
        attempt: &impl Fn(Locked<'a>) -> Attempt<'a, T, E>,
    ) -> Result<Attempt<'a, T, E>, E> {
        if !matches!(&outcome, Err(error) if again(&state, error)) {
            return Ok((state, outcome));
        }
        let _waiter = Waiter::of(&self.waiting);
        state.blocks.sweep_each();
        let mut pause = Pause::default();
        let mut heard = self.heard(&state.memory.line);
        // The place stays while the request lacks something else.
        let (mut in_ledger, mut place) = (None, None);
        // The caller has called hooks.
        let mut called = state.memory.line.clock.now();
        (state, outcome) = attempt(state);
        while let Err(error) = &outcome
            && again(&state, error)
        {
            let lacking = lacks(&mut state, error);
            self.show_in_ledger((&mut in_ledger, place), lacking, deadline);
            place = in_ledger.as_ref().map(Waiting::place).or(place);
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                break;
            };
            let longest = left.min(pause.next());
            (state, heard) = self.pause(state, heard, in_ledger.as_ref(), longest)?;
            // The pause may have released the lock.
            state.place = place;
            (state, outcome) = attempt(state);
            if state.memory.line.clock.is_time_again(called)
                && Instant::now() < deadline
                && matches!(&outcome, Err(error) if again(&state, error))
            {
                (state, outcome) = ask((state, outcome), place);
                called = state.memory.line.clock.now();
            }
        }
        Ok((state, outcome))
    }

    /// Returns what was announced so far, for the pause after the next attempt.
    fn heard(&self, line: &Line) -> Heard {
        Heard {
            told: line.told(),
            woken: self.ledger.get().map_or(0, |it| it.member.wake_ups()),
            ended: false,
        }
    }

    /// Waits at most `longest`: for memory to become idle, or to come back to the ledger if the
    /// request waits there, unless that was announced since `heard`; or for the device if only that
    /// shows whether a fence is complete. Returns what was announced, for the next call.
    fn pause<'a>(
        &'a self,
        state: Locked<'a>,
        heard: Heard,
        in_ledger: Option<&Waiting>,
        longest: Duration,
    ) -> Result<(Locked<'a>, Heard), CallError> {
        let (mut state, settled) = self.settle_device(state)?;
        if settled {
            return Ok((state, heard));
        }
        let mut ended = false;
        if state.memory.line.told() == heard.told {
            // What a failed attempt gives back to the ledger may look like enough. So only each
            // other pause ends for it.
            (state, ended) = match (self.ledger.get(), in_ledger) {
                (Some(joined), Some(waiting)) if !heard.ended => {
                    self.await_refund(state, &joined.awaiting, waiting, heard, longest)
                }
                _ => (state.wait(&self.freed, Some(longest)), false),
            };
        }
        let heard = Heard {
            ended,
            ..self.heard(&state.memory.line)
        };
        Ok((state, heard))
    }

    /// Waits for memory that comes back to the ledger, and for idle memory of the pool. Returns
    /// `true` if memory that came back ended the wait.
    fn await_refund<'a>(
        &'a self,
        state: Locked<'a>,
        awaiting: &AtomicUsize,
        waiting: &Waiting,
        heard: Heard,
        longest: Duration,
    ) -> (Locked<'a>, bool) {
        // Counted under the lock: each announcement from here on wakes this thread.
        let _waiter = Waiter::of(awaiting);
        let mut ended = false;
        let is_told = || self.look(|state| state.memory.line.told() != heard.told);
        let state =
            state.wait_unlocked(|| ended = waiting.await_refund(heard.woken, longest, is_told));
        let is_told = state.memory.line.told() != heard.told;
        (state, ended && !is_told)
    }

    /// Waits for the device if a polled fence needs a synchronization. Returns `true` if it waited.
    pub(super) fn settle_device<'a>(
        &'a self,
        mut state: Locked<'a>,
    ) -> Result<(Locked<'a>, bool), CallError> {
        if !state.memory.gate.is_to_synchronise() {
            return Ok((state, false));
        }
        drop(state);
        let Some(polling) = self.polling() else {
            return Ok((self.lock(), false));
        };
        let waited = Device::settle_all(self.users());
        drop(polling);
        state = self.lock();
        match waited {
            Ok(()) => {
                state.memory.gate.note_synchronised();
                Ok((state, true))
            }
            Err(error) if self.device.usable().is_err() => Err(error),
            Err(error) => {
                // For instance, another library captures. The caller tries again later.
                log!(debug, %error, "the device could not be waited for");
                Ok((state, false))
            }
        }
    }
}

fn shortage_in<T>(outcome: &Result<T, BlockError>) -> Option<&BlockError> {
    outcome.as_ref().err().filter(|error| error.is_shortage())
}

/// The announcements that a waiting request knows of.
#[derive(Clone, Copy)]
struct Heard {
    /// How often the pool has announced idle memory.
    told: u64,
    /// How often the ledger has woken requests that wait there.
    woken: u32,
    /// `true` if memory that came back to the ledger ended the last pause.
    ended: bool,
}

/// A waiting request, counted while this value lives.
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
