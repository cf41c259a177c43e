//! What the mapper's thread does for [futures](super::futures): it attempts what they wait for, in
//! the order in which they came, and wakes those whose request is granted or refused for good.
//!
//! One pass goes through the queue from the front, and gives each request its turn. One that does not
//! fit is passed over, and nothing is attempted for those after it that cannot fit then either: so
//! the request that came first is served first among those that fit. Where another thread gives memory up
//! meanwhile, or a hook does, the pass begins at the front again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::budget::TenantId;
use super::core::{Core, Locked};
use super::queue::{Group, Turn, Want};
use super::reclaim::Plan;
use super::relief::Demand;
use super::slot::Freed;
use super::state::State;
use super::tenancy::{Give, Tenancy};
use super::wait::Wait;
use crate::error::BlockError;
use crate::sync::atomic::{AtomicBool, Ordering};

/// How often a pass begins again because memory came free meanwhile.
const PASSES: usize = 8;

/// What came of a turn.
enum Served {
    /// The request was answered, or its future has gone.
    Ended,
    /// It does not fit, and neither does more.
    Short(BlockError),
    /// It waits for something else.
    Waits,
}

impl Want {
    /// Whether it is the growth of a block that reads as zero.
    fn grows_zeroed(&self, state: &State) -> bool {
        let Self::Growth(place, ..) = self else {
            return false;
        };
        let block = state.slot(place.slot).and_then(|slot| slot.block.as_ref());
        block.is_some_and(|block| block.zeroed)
    }

    /// What taking back is planned and hooks are called for.
    fn with_demand<T>(&self, run: impl FnOnce(Demand<'_>) -> T) -> T {
        match self {
            Self::Block(wish) => run(Demand::Bytes(wish.wanted().size)),
            Self::Growth(place, size, _) => run(Demand::Growth(&[(*place, *size)])),
            Self::News(..) => run(Demand::Bytes(0)),
        }
    }
}

impl Core {
    /// Serves those who wait. Returns after what time to do so again if the mapper is not called before.
    pub(super) fn serve(&self, stop: &AtomicBool) -> Option<Duration> {
        if self.look(|state| state.queue.is_empty()) {
            return None;
        }
        let mut served = false;
        for pass in 1..=PASSES {
            served |= self.serve_once(stop, pass < PASSES);
            if !self.lock().queue.stirred {
                break;
            }
        }
        served |= self.tell_listeners();
        // Where only a synchronisation tells what has passed, it is made here and in no poll.
        let (mut state, settled) = match self.settle_device(self.lock()) {
            Ok(settled) => settled,
            // The next attempt says so to all who wait.
            Err(_) => (self.lock(), true),
        };
        state.queue.nap(served || settled)
    }

    /// Gives each request its turn; whether one was answered. Ends where memory came free meanwhile, if
    /// it may.
    fn serve_once(&self, stop: &AtomicBool, may_end: bool) -> bool {
        let mut state = self.lock();
        state.queue.stirred = false;
        // What comes in a stream cache from here on is announced.
        state.sweep_each();
        let mut heads = state.queue.heads();
        drop(state);
        let mut served = false;
        let mut short: Vec<(Group, BlockError)> = Vec::new();
        while let Some((number, group)) = heads.pop_first() {
            let mut state = self.lock();
            if stop.load(Ordering::Acquire) || (may_end && state.queue.stirred) {
                break;
            }
            let (news, turn) = (state.news, state.queue.turn(number));
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
            // What a hook gave is for the first request that it is enough for.
            state.queue.stirred |= turn.appeals && state.news != news;
            match came {
                Served::Ended => {
                    served = true;
                    let next = state.queue.head_of(group);
                    heads.extend(next.map(|next| (next, group)));
                }
                Served::Short(error) => short.push((group, error)),
                Served::Waits => {}
            }
        }
        served
    }

    /// Attempts what a request asks for.
    fn take_turn(&self, turn: &Turn) -> Served {
        // A hook may panic: that ends neither the mapper nor the waiting.
        let attempt = catch_unwind(AssertUnwindSafe(|| self.attempt_turn(turn)));
        match attempt {
            Ok(Ok(())) => Served::Ended,
            Ok(Err(error)) => self.stay_or_refuse(turn, error),
            Err(_) => {
                tracing::error!("a pressure hook panicked, which was called for a future");
                Served::Waits
            }
        }
    }

    /// What becomes of a request that was refused.
    fn stay_or_refuse(&self, turn: &Turn, error: BlockError) -> Served {
        let tenant = turn.group.tenant();
        let mut state = self.lock();
        if !state.queue.has(turn.number) {
            // Also of one whose block has gone.
            state.answer(turn.number, Err(error));
            return Served::Ended;
        }
        turn.want.with_demand(|demand| {
            if error.is_shortage() && state.can_ever(tenant, demand, &error) {
                let of_memory = matches!(
                    error,
                    BlockError::OutOfMemory(_) | BlockError::DriverOutOfMemory { .. }
                );
                // A block that is to show zeros may wait for its own work alone.
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

    /// Passes a request over for which memory is short, as it was for one before it: it may grow within
    /// what its block has. In its first turn hooks are called for it all the same.
    fn pass_over(&self, turn: &Turn, error: &BlockError) -> Served {
        if let Want::Growth(place, size, _) = turn.want {
            let mut state = self.lock();
            let grown = state.queue.has(turn.number) && state.grow_within(&place, size);
            if grown {
                state.answer(turn.number, Ok(None));
                Self::let_go(state);
                return Served::Ended;
            }
        }
        let served = self.stay_or_refuse(turn, error.clone());
        if !turn.appeals || matches!(served, Served::Ended) {
            return served;
        }
        let tenant = turn.group.tenant();
        let refused = |state| (state, Err::<(), _>(error.clone()));
        let asked = catch_unwind(AssertUnwindSafe(|| {
            turn.want.with_demand(|demand| {
                let deadline = Wait::turn(turn.appeals, turn.begun).deadline();
                self.appeal(refused(self.lock()), tenant, demand, deadline, &refused)
                    .1
            })
        }));
        if asked.is_err() {
            tracing::error!("a pressure hook panicked, which was called for a future");
        }
        Served::Waits
    }

    /// Attempts it, and answers the request where it is granted.
    fn attempt_turn(&self, turn: &Turn) -> Result<(), BlockError> {
        let (number, tenant) = (turn.number, turn.group.tenant());
        let wait = Wait::turn(turn.appeals, turn.begun);
        if let Some(request) = self.lock().queue.get_mut(number) {
            request.begun = true;
        }
        match &turn.want {
            Want::Block(wish) => {
                let wanted = wish.wanted();
                self.request(tenant, wanted.size, wait, |state| {
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
                let claim = |state: &mut Locked<'_>| {
                    state.queue.has(number) && state.answer(number, Ok(None))
                };
                let grown = self.grow_claimed(tenant, &steps, wait, claim);
                grown.map_err(|refused| refused.cause)
            }
            Want::News(..) => Ok(()),
        }
    }

    /// Tells those who wait for news if memory came free since they asked; whether there was any.
    fn tell_listeners(&self) -> bool {
        let mut state = self.lock();
        let listeners = state.queue.listeners();
        if listeners.is_empty() {
            return false;
        }
        if let Err(lost) = state.check_alive() {
            for (number, ..) in listeners {
                state.answer(number, Err(lost.into()));
            }
            return true;
        }
        let (news, pending) = (state.news, state.ask_pending_free());
        let mut told = false;
        for (number, heard, waited_for) in listeners {
            if heard != news || pending < waited_for {
                told |= state.answer(number, Ok(None));
            } else if let Some(request) = state.queue.get_mut(number) {
                // What an attempt has made pending since is waited for too.
                request.want = Want::News(heard, pending);
            }
        }
        told
    }
}

impl State {
    /// Idle bytes whose work has not passed, as far as is known: no fence is asked.
    pub(super) fn pending_free(&self) -> u64 {
        let pending = |tenancy: &Tenancy| {
            let figures = tenancy.figures().map(|(figures, _)| figures);
            let pending = figures.filter(|figures| figures.freed == Freed::PendingFree);
            let idle: u64 = pending.map(|figures| figures.idle).sum();
            idle + tenancy.shared_pending_free()
        };
        self.tenants.values().map(pending).sum()
    }

    /// Idle bytes whose work has not passed, after all fences have been asked.
    fn ask_pending_free(&mut self) -> u64 {
        let ids: Vec<TenantId> = self.tenants.keys().copied().collect();
        let mut plan = Plan::begin(self);
        for give in [Give::Cached, Give::Precommitted] {
            self.plan_from(&ids, give, u64::MAX, false, &mut plan);
        }
        self.pending_free()
    }
}
