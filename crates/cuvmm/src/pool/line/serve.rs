//! The mapper's service for [futures](super::futures): its thread attempts their requests in the
//! order of arrival, and wakes a future whose request is granted, or refused for good.
//!
//! A pass gives each request its turn, from the front of the queue. It passes over a request that
//! does not fit, and does not attempt requests behind it that cannot fit either. So the earliest of
//! the requests that fit is served first. After a grant the next request alike is not attempted if
//! nothing is left for it. If another thread or a hook gives memory up meanwhile, the pass starts
//! again at the front. A hook may take long: behind each one the pass is interrupted, and the mapper
//! does its other work for all pools before the pass goes on.
//!
//! Keeps I-144 and I-148.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::queue::{Group, Pass, Turn, Want};
use super::queued::HolderWant;
use super::relief::Demand;
use super::wait::Wait;
use crate::error::BlockError;
use crate::pool::blocks::Blocks;
use crate::pool::core::Core;
use crate::pool::memory::Memory;
use crate::sync::atomic::{AtomicBool, Ordering};

enum Served {
    Granted,
    /// The request was refused or granted otherwise, or its future is gone.
    Ended,
    /// The request does not fit, and neither does a larger request.
    Short(BlockError),
    /// The request waits for something else than memory.
    Waits,
}

/// Runs what may call hooks for a future. Returns `None` if a hook panicked.
fn unless_panic<T>(run: impl FnOnce() -> T) -> Option<T> {
    let outcome = catch_unwind(AssertUnwindSafe(run));
    if outcome.is_err() {
        let what = "a pressure hook that was called for a future panicked";
        log!(error, "{what}");
    }
    outcome.ok()
}

impl Want {
    fn with_demand<T>(&self, run: impl FnOnce(Demand<'_>) -> T) -> T {
        match self {
            Self::Block(wish) => run(Demand::Bytes(wish.wanted().size)),
            Self::Growth(place, size, _) => run(Demand::Growth(&[(*place, *size)])),
            Self::Holder(want) => run(want.demand()),
            Self::Notification(..) => run(Demand::Bytes(0)),
        }
    }
}

impl Core {
    /// Serves the queue. Returns the time until the next service, unless the mapper is woken
    /// before.
    pub(in crate::pool) fn serve(&self, stop: &AtomicBool) -> Option<Duration> {
        let is_empty = self.look(|state| {
            let is_empty = state.memory.line.queue.is_empty();
            if is_empty {
                state.memory.line.queue.rest = None;
                self.queue_in_ledger(None);
            }
            is_empty
        });
        if is_empty {
            return None;
        }
        let mut served = false;
        let mut starts_again = true;
        while starts_again {
            served |= self.serve_once(stop);
            starts_again = self.look(|state| {
                let queue = &state.memory.line.queue;
                queue.passes > 0 && queue.rest.is_none()
            });
        }
        self.look(|state| self.queue_in_ledger(state.memory.line.queue.show_lacking()));
        served |= self.tell_listeners();
        // If only a synchronization shows whether fences are complete, it is made here and not in a
        // poll.
        let (mut state, settled) = match self.settle_device(self.lock()) {
            Ok(settled) => settled,
            // The next attempt reports the error to all requests.
            Err(_) => (self.lock(), true),
        };
        let queue = &mut state.memory.line.queue;
        let nap = queue.nap(served || settled);
        match queue.rest {
            Some(_) => nap.map(|_| Duration::ZERO),
            None => nap,
        }
    }

    /// Gives each request its turn; returns `true` if one was answered. Returns early behind a hook,
    /// and if memory became free meanwhile and the pass may start again.
    fn serve_once(&self, stop: &AtomicBool) -> bool {
        let Pass {
            mut heads,
            mut short,
        } = self.begin_pass();
        let mut served = false;
        while let Some((number, group)) = heads.pop_first() {
            let mut state = self.lock();
            if stop.load(Ordering::Acquire) || state.memory.line.queue.starts_again() {
                break;
            }
            let lacks = group.beyond_own(&state.blocks);
            let behind = short.iter().find(|(short, _)| lacks.is_short_like(short));
            let freed_count = state.memory.line.freed_count();
            let turn = state.memory.line.turn(number, behind.is_none());
            drop(state);
            let Some(turn) = turn else {
                continue;
            };
            let came = match behind {
                Some((_, error)) => self.pass_over(&turn, error),
                None => self.take_turn(&turn),
            };
            let mut state = self.lock();
            if turn.appeals && state.memory.line.note_called(&turn, freed_count) {
                heads.insert(number, group);
                state.memory.line.queue.rest = Some(Pass { heads, short });
                return served;
            }
            match came {
                Served::Granted | Served::Ended => {
                    served = true;
                    // After a refusal the next request may be refused too. A request that is not
                    // attempted keeps no request behind it from its attempt.
                    let last = matches!(came, Served::Granted)
                        && self.has_nothing_for(&state.memory, &state.blocks, group)
                        && !heads.values().any(|other| other.is_short_like(&group));
                    let next = state.memory.line.queue.head_of(group).filter(|_| !last);
                    heads.extend(next.map(|next| (next, group)));
                }
                Served::Short(error) => short.push((group, error)),
                Served::Waits => {}
            }
        }
        self.lock().memory.line.queue.end_pass();
        served
    }

    /// Begins a pass at the front of the queue, or goes on with one that a hook has interrupted unless
    /// that starts again.
    fn begin_pass(&self) -> Pass {
        let mut state = self.lock();
        let queue = &mut state.memory.line.queue;
        let starts_again = queue.starts_again();
        if let Some(rest) = queue.rest.take().filter(|_| !starts_again) {
            return rest;
        }
        queue.memory_freed = false;
        queue.passes += 1;
        if !state.memory.line.queue.swept {
            // Blocks freed while requests wait are announced instead of going to a stream cache.
            state.blocks.sweep_each();
            state.memory.line.queue.swept = true;
        }
        Pass {
            heads: state.memory.line.queue.heads(),
            short: Vec::new(),
        }
    }

    fn take_turn(&self, turn: &Turn) -> Served {
        // A hook's panic ends neither the mapper nor the request.
        match unless_panic(|| self.attempt_turn(turn)) {
            Some(Ok(true)) => Served::Granted,
            Some(Err(error)) => self.requeue_or_refuse(turn, error),
            Some(Ok(false)) | None => Served::Waits,
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
            let least = demand.least(&state.blocks);
            if error.is_shortage() && state.memory.can_be_met(tenant, least, &error, true) {
                if let Some(lacking) = state.lacking_in_ledger(tenant, demand, &error) {
                    state.memory.line.queue.note_lacking(turn.number, lacking);
                }
                let of_memory = matches!(
                    error,
                    BlockError::OutOfMemory(_) | BlockError::DriverOutOfMemory { .. }
                );
                let alone = matches!(turn.want, Want::Growth(it, ..)
                    if state.blocks.may_wait_alone(it.slot));
                let is_short = of_memory && !alone;
                return match is_short {
                    true => Served::Short(error),
                    false => Served::Waits,
                };
            }
            let refused = state.refuse(tenant, demand, error);
            self.answer(&mut state.memory.line, turn.number, Err(refused));
            Served::Ended
        })
    }

    /// Passes over a request, since memory is short for a request before it. Its first turn calls
    /// hooks all the same.
    fn pass_over(&self, turn: &Turn, error: &BlockError) -> Served {
        let served = self.requeue_or_refuse(turn, error.clone());
        if !turn.appeals || matches!(served, Served::Granted | Served::Ended) {
            return served;
        }
        let tenant = turn.group.tenant();
        let refused = |state| (state, Err::<(), _>(error.clone()));
        let wait = Wait::turn(turn);
        let ask = |demand: Demand<'_>| {
            let state = refused(self.lock());
            self.call_hooks(state, tenant, demand, wait, &refused).1
        };
        unless_panic(|| turn.want.with_demand(ask));
        Served::Waits
    }

    /// Attempts a request, and answers it if it is granted. Returns `false` if no attempt could be
    /// made.
    fn attempt_turn(&self, turn: &Turn) -> Result<bool, BlockError> {
        let (number, tenant) = (turn.number, turn.group.tenant());
        let wait = Wait::turn(turn);
        let granted = match &turn.want {
            Want::Block(wish) => {
                let wanted = wish.wanted();
                self.request(tenant, wanted.size, wait, |mut state| {
                    state.place = turn.place;
                    let (mut state, outcome) = Self::attempt_to_allocate(state, tenant, &wanted);
                    let outcome = outcome.map(|place| {
                        if !self.answer(&mut state.memory.line, number, Ok(Some(place))) {
                            state.free(place.slot);
                        }
                    });
                    (state, outcome)
                })
            }
            Want::Growth(place, size, _) => {
                let steps = [(*place, *size)];
                let grown = self.grow_all(tenant, &steps, wait, Some(number));
                grown.map_err(|refused| refused.cause)
            }
            Want::Holder(want) => return self.attempt_of_holder(turn, want),
            Want::Notification(..) => Ok(()),
        };
        granted.map(|()| true)
    }

    /// Makes the attempt of a holder's request, which a withdrawn one makes in vain: its future gives
    /// back what it was granted.
    fn attempt_of_holder(&self, turn: &Turn, want: &HolderWant) -> Result<bool, BlockError> {
        let refused = RefCell::new(None);
        let attempt = |place| match want.attempt.attempt(place) {
            Some(outcome) => {
                *refused.borrow_mut() = outcome.clone().err();
                outcome.map(|()| true)
            }
            // After a hook the last refusal stands: the turn is over, and calls the hook once.
            None => refused.borrow().clone().map_or(Ok(false), Err),
        };
        let (tenant, wait) = (turn.group.tenant(), Wait::turn(turn));
        let (home, at) = (Some(&want.home), (wait, turn.place));
        let attempted = self.request_of_holder(tenant, want.demand(), home, at, attempt)?;
        let mut state = self.lock();
        match attempted {
            true => drop(self.answer(&mut state.memory.line, turn.number, Ok(None))),
            false if turn.appeals => state.memory.line.queue.appeal_later(turn.number),
            false => {}
        }
        Self::unlock(state);
        Ok(attempted)
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
                self.answer(&mut state.memory.line, number, Err(lost.into()));
            }
            return true;
        }
        state.poll_idle();
        let (memory, blocks) = state.halves();
        let pending = blocks.idle_figures().waiting + memory.holders.pending();
        let freed_count = memory.line.freed_count();
        let mut told = false;
        for (number, heard, waited_for) in listeners {
            if heard != freed_count || pending < waited_for {
                told |= self.answer(&mut memory.line, number, Ok(None));
            } else if let Some(request) = memory.line.queue.get_mut(number) {
                // Memory that an attempt has made pending meanwhile is waited for too.
                request.want = Want::Notification(heard, pending);
            }
        }
        told
    }
}

impl Core {
    /// Returns `true` if memory for another block of a group is certainly lacking, so that an attempt
    /// would fail: no memory can be reclaimed, and no fence can be polled.
    fn has_nothing_for(&self, memory: &Memory, blocks: &Blocks, group: Group) -> bool {
        let (tenant, Some(bytes)) = (group.tenant(), group.block_bytes()) else {
            return false;
        };
        let settled = !memory.has_deferred && !blocks.has_deferred && memory.gate.is_idle();
        settled
            && bytes > 0
            && self.ledger.get().is_none()
            && memory.budget.missing(tenant, bytes).1 > 0
            && memory.holders.is_empty()
            && blocks.can_give_nothing()
    }
}
