//! The mapper's service for [futures](super::futures): its thread attempts their requests in the
//! order of arrival, and wakes a future whose request is granted, or refused for good.
//!
//! A pass gives each request its turn, from the front of the queue. It passes over a request that
//! does not fit, and does not attempt requests behind it that cannot fit either. So the earliest of
//! the requests that fit is served first. After a grant the next request alike is not attempted if
//! nothing is left for it. If another thread or a hook gives memory up meanwhile, the pass starts
//! again at the front.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::queue::{Group, Turn, Want};
use super::relief::Demand;
use super::wait::Wait;
use crate::error::BlockError;
use crate::pool::accounts::TenantId;
use crate::pool::blocks::slots::{Freed, Give, PurgeQueue, Tenancy};
use crate::pool::core::{Core, Locked};
use crate::pool::reclaim::Plan;
use crate::pool::state::State;
use crate::sync::atomic::{AtomicBool, Ordering};

/// How often a pass starts again because memory became free.
const PASSES: usize = 8;

enum Served {
    Granted,
    /// The request was refused or granted otherwise, or its future is gone.
    Ended,
    /// The request does not fit, and neither does a larger request.
    Short(BlockError),
    /// The request waits for something else than memory.
    Waits,
}

impl Want {
    fn grows_zeroed(&self, state: &State) -> bool {
        let Self::Growth(place, ..) = self else {
            return false;
        };
        let block = state
            .blocks
            .slots
            .get(place.slot)
            .and_then(|slot| slot.block.as_ref());
        block.is_some_and(|block| block.zeroed)
    }

    fn with_demand<T>(&self, run: impl FnOnce(Demand<'_>) -> T) -> T {
        match self {
            Self::Block(wish) => run(Demand::Bytes(wish.wanted().size)),
            Self::Growth(place, size, _) => run(Demand::Growth(&[(*place, *size)])),
            Self::Notification(..) => run(Demand::Bytes(0)),
        }
    }
}

impl Core {
    /// Serves the queue. Returns the time until the next service, unless the mapper is woken
    /// before.
    pub(in crate::pool) fn serve(&self, stop: &AtomicBool) -> Option<Duration> {
        if self.look(|state| state.memory.line.queue.is_empty()) {
            self.queue_in_ledger(None);
            return None;
        }
        let mut served = false;
        for pass in 1..=PASSES {
            served |= self.serve_once(stop, pass < PASSES);
            if !self.lock().memory.line.queue.memory_freed {
                break;
            }
        }
        let lacking = self.look(|state| state.memory.line.queue.lacking.take());
        self.queue_in_ledger(lacking);
        served |= self.tell_listeners();
        // If only a synchronization shows whether fences are complete, it is made here and not in a
        // poll.
        let (mut state, settled) = match self.settle_device(self.lock()) {
            Ok(settled) => settled,
            // The next attempt reports the error to all requests.
            Err(_) => (self.lock(), true),
        };
        state.memory.line.queue.nap(served || settled)
    }

    /// Gives each request its turn; returns `true` if one was answered. With `may_end`, returns
    /// early if memory became free meanwhile.
    fn serve_once(&self, stop: &AtomicBool, may_end: bool) -> bool {
        let mut state = self.lock();
        state.memory.line.queue.memory_freed = false;
        if !state.memory.line.queue.swept {
            // Blocks freed while requests wait are announced instead of going to a stream cache.
            state.sweep_each();
            state.memory.line.queue.swept = true;
        }
        let mut heads = state.memory.line.queue.heads();
        drop(state);
        let mut served = false;
        let mut short: Vec<(Group, BlockError)> = Vec::new();
        while let Some((number, group)) = heads.pop_first() {
            let mut state = self.lock();
            if stop.load(Ordering::Acquire) || (may_end && state.memory.line.queue.memory_freed) {
                break;
            }
            let (freed_count, turn) = (
                state.memory.line.freed_count(),
                state.memory.line.queue.turn(number),
            );
            drop(state);
            let Some(turn) = turn else {
                continue;
            };
            let behind = short.iter().find(|(short, _)| group.is_short_like(short));
            let came = match behind {
                Some((_, error)) => self.pass_over(&turn, error),
                None => self.take_turn(&turn),
            };
            let mut state = self.lock();
            // Memory that a hook gave up is for the first request that it is enough for.
            state.memory.line.queue.memory_freed |=
                turn.appeals && state.memory.line.freed_count() != freed_count;
            match came {
                Served::Granted | Served::Ended => {
                    served = true;
                    // After a refusal the next request may be refused too. A request that is not
                    // attempted keeps no request behind it from its attempt.
                    let last = matches!(came, Served::Granted)
                        && state.has_nothing_for(group)
                        && !heads.values().any(|other| other.is_short_like(&group));
                    let next = state.memory.line.queue.head_of(group).filter(|_| !last);
                    heads.extend(next.map(|next| (next, group)));
                }
                Served::Short(error) => short.push((group, error)),
                Served::Waits => {}
            }
        }
        served
    }

    fn take_turn(&self, turn: &Turn) -> Served {
        // A hook's panic ends neither the mapper nor the request.
        let attempt = catch_unwind(AssertUnwindSafe(|| self.attempt_turn(turn)));
        match attempt {
            Ok(Ok(())) => Served::Granted,
            Ok(Err(error)) => self.requeue_or_refuse(turn, error),
            Err(_) => {
                log!(
                    error,
                    "a pressure hook that was called for a future panicked"
                );
                Served::Waits
            }
        }
    }

    /// Decides whether a failed request goes on waiting or is refused.
    fn requeue_or_refuse(&self, turn: &Turn, error: BlockError) -> Served {
        let tenant = turn.group.tenant();
        let mut state = self.lock();
        if !state.memory.line.queue.has(turn.number) {
            return Served::Ended;
        }
        turn.want.with_demand(|demand| {
            if error.is_shortage() && state.can_ever(tenant, demand, &error) {
                if let Some(lacking) = state.lacking_in_ledger(tenant, demand, &error) {
                    state.memory.line.queue.note_lacking(turn.number, lacking);
                }
                let of_memory = matches!(
                    error,
                    BlockError::OutOfMemory(_) | BlockError::DriverOutOfMemory { .. }
                );
                // A block that must read as zero may wait for its own work alone.
                let is_short = of_memory && !turn.want.grows_zeroed(&state);
                return match is_short {
                    true => Served::Short(error),
                    false => Served::Waits,
                };
            }
            let refused = state.refuse(tenant, demand, error);
            state.answer(turn.number, Err(refused));
            Served::Ended
        })
    }

    /// Passes over a request, since memory is short for a request before it. The request may still
    /// grow within its block's memory, and hooks are called in its first turn.
    fn pass_over(&self, turn: &Turn, error: &BlockError) -> Served {
        if let Want::Growth(place, size, _) = turn.want {
            let mut state = self.lock();
            let grown = state.memory.line.queue.has(turn.number) && state.grow_within(&place, size);
            if grown {
                state.answer(turn.number, Ok(None));
                Self::unlock(state);
                return Served::Ended;
            }
        }
        let served = self.requeue_or_refuse(turn, error.clone());
        if !turn.appeals || matches!(served, Served::Granted | Served::Ended) {
            return served;
        }
        let tenant = turn.group.tenant();
        let refused = |state| (state, Err::<(), _>(error.clone()));
        let asked = catch_unwind(AssertUnwindSafe(|| {
            turn.want.with_demand(|demand| {
                let wait = Wait::turn(turn.appeals);
                self.call_hooks(refused(self.lock()), tenant, demand, wait, &refused)
                    .1
            })
        }));
        if asked.is_err() {
            log!(
                error,
                "a pressure hook that was called for a future panicked"
            );
        }
        Served::Waits
    }

    /// Attempts a request, and answers it if it is granted.
    fn attempt_turn(&self, turn: &Turn) -> Result<(), BlockError> {
        let (number, tenant) = (turn.number, turn.group.tenant());
        let wait = Wait::turn(turn.appeals);
        match &turn.want {
            Want::Block(wish) => {
                let wanted = wish.wanted();
                self.request(tenant, wanted.size, wait, |mut state| {
                    state.place = turn.place;
                    let (mut state, outcome) = Self::attempt_to_allocate(state, tenant, &wanted);
                    let outcome = outcome.map(|place| {
                        if !state.answer(number, Ok(Some(place))) {
                            state.free(place.slot);
                        }
                    });
                    (state, outcome)
                })
            }
            Want::Growth(place, size, _) => {
                let steps = [(*place, *size)];
                let grown = self.grow_requested(tenant, &steps, wait, Some(number));
                grown.map_err(|refused| refused.cause)
            }
            Want::Notification(..) => Ok(()),
        }
    }

    /// Notifies requests if memory became free since they were made; returns `true` if it notified
    /// any.
    fn tell_listeners(&self) -> bool {
        let mut state = self.lock();
        let listeners = state.memory.line.queue.listeners();
        if listeners.is_empty() {
            return false;
        }
        if let Err(lost) = state.memory.device.usable() {
            for (number, ..) in listeners {
                state.answer(number, Err(lost.into()));
            }
            return true;
        }
        let (freed_count, pending) = (state.memory.line.freed_count(), state.poll_pending_free());
        let mut told = false;
        for (number, heard, waited_for) in listeners {
            if heard != freed_count || pending < waited_for {
                told |= state.answer(number, Ok(None));
            } else if let Some(request) = state.memory.line.queue.get_mut(number) {
                // Memory that an attempt has made pending meanwhile is waited for too.
                request.want = Want::Notification(heard, pending);
            }
        }
        told
    }
}

impl Locked<'_> {
    /// Returns `true` if an attempt at a request of the group is known to fail: the budget has too
    /// little left for the new block, and nothing could be added to it now.
    fn has_nothing_for(&self, group: Group) -> bool {
        let (tenant, Some(bytes)) = (group.tenant(), group.block_bytes()) else {
            return false;
        };
        let settled = self.blocks.queues.is_empty(PurgeQueue::Registered)
            && !self.memory.has_deferred
            && !self.others_in_flight();
        settled
            && bytes > 0
            && self.core().ledger.get().is_none()
            && self.memory.budget.missing(tenant, bytes).1 > 0
            && self.memory.holders.all().next().is_none()
            && !self.blocks.slots.has_movable()
            && !self
                .blocks
                .slots
                .iter()
                .any(|(_, tenancy)| tenancy.may_give())
    }
}

impl State {
    /// Returns the idle bytes whose fences are not known to be complete. Polls no fence.
    pub(super) fn pending_free(&self) -> u64 {
        let pending = |(id, tenancy): (TenantId, &Tenancy)| {
            let figures = tenancy.figures().map(|(figures, _)| figures);
            let pending = figures.filter(|figures| figures.freed == Freed::PendingFree);
            let idle: u64 = pending.map(|figures| figures.idle).sum();
            idle + tenancy.shared_pending_free() + self.memory.holders.pending_of(id)
        };
        self.blocks.slots.iter().map(pending).sum()
    }

    /// Returns the idle bytes whose fences are incomplete, after polling all fences.
    fn poll_pending_free(&mut self) -> u64 {
        let ids: Vec<TenantId> = self.blocks.slots.tenants();
        let mut plan = Plan::begin(self);
        for give in [Give::Cached, Give::Precommitted] {
            self.plan_from(&ids, give, u64::MAX, false, &mut plan);
        }
        self.pending_free()
    }
}
