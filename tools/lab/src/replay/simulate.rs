//! The replay itself: requests in virtual time over a real memory.
//!
//! A request waits in its model's queue until a block for its context fits, reads its context, then
//! generates. Token k has come when the memory for context and k tokens is there. When its growth
//! does not fit, the youngest running request of the model gives its block up and goes to the head
//! of the queue; that may be the growing request itself. A preempted request reads its context and
//! its earlier tokens before it goes on, and is admitted again only when its next token fits too:
//! so every run but the first yields a token, and the replay ends.
//!
//! Two invariants hold at all times, and the rest depends on them: within a model, every running
//! request is older than every waiting one; and a queue is in the order of arrival.
//!
//! Tokens are not events. A running request has one event ahead: the next token that needs memory,
//! or else its first or its last token.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use anyhow::ensure;
use cuvmm_command::terminal::counted;
use serde::{Deserialize, Serialize};

use super::memory::{Memory, Usage};
use super::settings::{Nanos, Settings};
use super::timeline::Timeline;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) model: usize,
    /// Virtual time of the arrival.
    pub(crate) arrival: Nanos,
    /// Tokens of context.
    pub(crate) context: u32,
    /// Tokens to generate.
    pub(crate) generated: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Fate {
    /// The request did not come to its end: [`run`] never returns this.
    Unfinished,
    /// The request is larger than its model's memory can ever be.
    Rejected,
    Completed {
        /// From arrival to the first token, or to the end of the context without one.
        first_token: Nanos,
    },
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) fate: Fate,
    /// The number of preemptions.
    pub(crate) preempted: u32,
    /// The total time in the queue.
    pub(crate) waited: Nanos,
}

#[derive(Clone, Debug)]
pub(crate) struct Played {
    /// In the order of the requests.
    pub(crate) outcomes: Vec<Outcome>,
    /// Granules of the blocks.
    pub(crate) timeline: Timeline,
    pub(crate) waiting: Timeline,
    /// Figures of the memory, if it keeps account of them.
    pub(crate) held: Option<Held>,
}

/// The models' memory beside the blocks of running requests.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// Bytes of the memory.
    pub(crate) memory: Timeline,
    /// Bytes of the blocks that are kept.
    pub(crate) kept: Timeline,
    /// Blocks evicted, by model.
    pub(crate) evicted: Vec<u64>,
}

/// Plays `requests`, in the order of their arrival, and calls `progress` for each that is done.
///
/// # Errors
/// The memory fails, or refuses a request which it could hold although nothing else runs.
pub(crate) fn run<M: Memory>(
    requests: &[Request],
    models: usize,
    settings: &Settings,
    memory: &mut M,
    progress: &mut dyn FnMut(),
) -> anyhow::Result<Played> {
    debug_assert!(requests.is_sorted_by_key(|request| request.arrival));
    let mut state = State {
        requests,
        settings,
        granule: memory.granule(),
        memory,
        progress,
        lives: requests.iter().map(|_| Life::new()).collect(),
        models: (0..models).map(|_| Model::default()).collect(),
        steps: BinaryHeap::new(),
        timeline: Timeline::new(models),
        waiting: Timeline::new(models),
        held: None,
        now: 0,
    };
    if state.memory.keeps_course() {
        state.timeline.keep_course();
        state.waiting.keep_course();
    }
    state.play()?;
    let outcomes: Vec<_> = state.lives.iter().map(|life| life.outcome).collect();
    let lost = outcomes
        .iter()
        .filter(|outcome| outcome.fate == Fate::Unfinished)
        .count();
    ensure!(
        lost == 0,
        "{lost} of {} requests were lost in the replay",
        requests.len()
    );
    Ok(Played {
        outcomes,
        timeline: state.timeline,
        waiting: state.waiting,
        held: state.held,
    })
}

/// A request between its arrival and its end.
struct Life<B> {
    outcome: Outcome,
    /// Tokens generated so far; while the request runs, as of its last event.
    tokens: u64,
    first_token: Option<Nanos>,
    waiting_since: Nanos,
    running: Option<Running<B>>,
    /// Distinguishes a live event from one of an earlier run of the request.
    run: u32,
}

struct Running<B> {
    block: B,
    granules: u64,
    /// The time at which the context and the earlier tokens are read.
    ready: Nanos,
    /// Tokens when this run began.
    had: u64,
    /// The token of its event.
    next: u64,
}

impl<B> Life<B> {
    fn new() -> Self {
        let outcome = Outcome {
            fate: Fate::Unfinished,
            preempted: 0,
            waited: 0,
        };
        Self {
            outcome,
            tokens: 0,
            first_token: None,
            waiting_since: 0,
            running: None,
            run: 0,
        }
    }
}

#[derive(Default)]
struct Model {
    queue: VecDeque<usize>,
    running: BTreeSet<usize>,
}

struct State<'a, M: Memory> {
    requests: &'a [Request],
    settings: &'a Settings,
    granule: u64,
    memory: &'a mut M,
    progress: &'a mut dyn FnMut(),
    lives: Vec<Life<M::Block>>,
    models: Vec<Model>,
    /// Time, request, run: the earliest first, of equals the oldest.
    steps: BinaryHeap<Reverse<(Nanos, usize, u32)>>,
    timeline: Timeline,
    waiting: Timeline,
    held: Option<Held>,
    /// The time of the last event or arrival.
    now: Nanos,
}

impl<M: Memory> State<'_, M> {
    fn play(&mut self) -> anyhow::Result<()> {
        let mut arrived = 0;
        loop {
            self.account()?;
            let step = self.steps.peek().map(|Reverse((at, ..))| *at);
            let arrival = self.requests.get(arrived).map(|request| request.arrival);
            let next = step.into_iter().chain(arrival).min();
            if let Some(now) = self.memory.pause(next)? {
                self.now = now;
                self.admit_all(now)?;
                continue;
            }
            // Ends and growths go before an arrival at the same time.
            match (step, arrival) {
                (Some(step), arrival) if arrival.is_none_or(|arrival| step <= arrival) => {
                    self.step()?;
                }
                (_, Some(_)) => {
                    self.arrive(arrived)?;
                    arrived += 1;
                }
                (_, None) if self.models.iter().all(|model| model.queue.is_empty()) => {
                    return Ok(());
                }
                (_, None) => self.unblock()?,
            }
        }
    }

    /// Records the memory's figures after an event.
    fn account(&mut self) -> anyhow::Result<()> {
        let models = self.models.len();
        let usage = (0..models).map(|model| self.memory.usage(model));
        let Some(usage) = usage.collect::<anyhow::Result<Option<Vec<Usage>>>>()? else {
            return Ok(());
        };
        let keeps = self.memory.keeps_course();
        let timeline = || {
            let mut timeline = Timeline::new(models);
            if keeps {
                timeline.keep_course();
            }
            timeline
        };
        let held = self.held.get_or_insert_with(|| Held {
            memory: timeline(),
            kept: timeline(),
            evicted: Vec::new(),
        });
        let each = |of: fn(&Usage) -> u64| usage.iter().map(of).collect::<Vec<u64>>();
        // Memory from another process was free before it was taken.
        let (now, taken) = (self.now, self.memory.now(self.now));
        held.memory.set(now, taken, &each(|usage| usage.held));
        held.kept.set(now, taken, &each(|usage| usage.kept));
        held.evicted = each(|usage| usage.evicted);
        Ok(())
    }

    fn arrive(&mut self, at: usize) -> anyhow::Result<()> {
        let request = self.requests[at];
        let now = self.memory.now(request.arrival);
        self.now = now;
        let life = &mut self.lives[at];
        life.waiting_since = request.arrival;
        let size = self.settings.granules(
            u64::from(request.context) + u64::from(request.generated),
            self.granule,
        );
        if size > self.memory.ceiling(request.model) {
            life.outcome.fate = Fate::Rejected;
            (self.progress)();
            return Ok(());
        }
        let queue = &mut self.models[request.model].queue;
        queue.push_back(at);
        self.waiting.change(now, request.model, 1);
        if queue.len() == 1 {
            self.admit(request.model, now)?;
        }
        Ok(())
    }

    /// Admits the head of a model's queue, if it fits.
    fn admit(&mut self, model: usize, now: Nanos) -> anyhow::Result<bool> {
        let Some(&at) = self.models[model].queue.front() else {
            return Ok(false);
        };
        let request = &self.requests[at];
        let context = u64::from(request.context);
        let last = u64::from(request.generated);
        let life = &mut self.lives[at];
        let ahead = if life.outcome.preempted > 0 {
            (life.tokens + 1).min(last)
        } else {
            life.tokens
        };
        let granules = self.settings.granules(context + ahead, self.granule);
        let capacity = self.settings.granules(context + last, self.granule);
        let Some(block) = self.memory.allocate(model, at as u64, granules, capacity)? else {
            return Ok(false);
        };
        let queue = &mut self.models[model];
        queue.queue.pop_front();
        self.waiting.change(now, model, -1);
        queue.running.insert(at);
        life.outcome.waited += now - life.waiting_since;
        let ready = now.saturating_add(self.settings.prefill(context + life.tokens));
        life.running = Some(Running {
            block,
            granules,
            ready,
            had: life.tokens,
            next: 0,
        });
        // Memory from another process was free before it was taken.
        let taken = self.memory.now(now);
        self.timeline.change(taken, model, granules.cast_signed());
        self.schedule(at);
        Ok(true)
    }

    /// Admits the requests of all models that fit now, the oldest head first. A head that does not
    /// fit delays its own model only.
    fn admit_all(&mut self, now: Nanos) -> anyhow::Result<bool> {
        let mut open: Vec<usize> = (0..self.models.len()).collect();
        let mut any = false;
        loop {
            open.retain(|&model| !self.models[model].queue.is_empty());
            let Some(&model) = open
                .iter()
                .min_by_key(|&&model| self.models[model].queue.front())
            else {
                return Ok(any);
            };
            if self.admit(model, now)? {
                any = true;
            } else {
                open.retain(|&other| other != model);
            }
        }
    }

    fn schedule(&mut self, at: usize) {
        let request = &self.requests[at];
        let life = &mut self.lives[at];
        let Some(running) = &mut life.running else {
            return;
        };
        let held = self.settings.tokens_in(running.granules, self.granule);
        let outgrown = (held + 1).saturating_sub(u64::from(request.context));
        let next = if life.first_token.is_none() {
            life.tokens + 1
        } else {
            outgrown.max(life.tokens + 1)
        };
        running.next = next.min(u64::from(request.generated));
        let since_ready = (running.next - running.had).saturating_sub(1);
        let time = running
            .ready
            .saturating_add(self.settings.decode(since_ready));
        life.run += 1;
        self.steps.push(Reverse((time, at, life.run)));
    }

    /// Handles the next event of a running request: a token that needs memory, the first, or the
    /// last.
    fn step(&mut self) -> anyhow::Result<()> {
        let Some(Reverse((due, at, run))) = self.steps.pop() else {
            return Ok(());
        };
        let now = self.memory.now(due);
        self.now = now;
        let request = self.requests[at];
        let life = &self.lives[at];
        let Some(running) = life.running.as_ref().filter(|_| life.run == run) else {
            return Ok(());
        };
        let token = running.next;
        let need = self
            .settings
            .granules(u64::from(request.context) + token, self.granule);
        let mut freed = false;
        while !self.grow(at, need, now)? {
            let youngest = self.models[request.model]
                .running
                .last()
                .copied()
                .unwrap_or(at);
            self.preempt(youngest, now)?;
            freed = true;
            if youngest == at {
                break;
            }
        }
        let life = &mut self.lives[at];
        if life.running.is_some() {
            life.tokens = token;
            let first_token = *life.first_token.get_or_insert(now - request.arrival);
            if token == u64::from(request.generated) {
                life.outcome.fate = Fate::Completed { first_token };
                self.release(at, now)?;
                freed = true;
                (self.progress)();
            } else {
                self.schedule(at);
            }
        }
        if freed {
            self.admit_all(now)?;
        }
        Ok(())
    }

    /// Grows the block of a running request to `need` granules; returns `false` if that does not
    /// fit.
    fn grow(&mut self, at: usize, need: u64, now: Nanos) -> anyhow::Result<bool> {
        let Some(running) = &mut self.lives[at].running else {
            return Ok(true);
        };
        let gained = need.saturating_sub(running.granules);
        if gained == 0 {
            return Ok(true);
        }
        if !self.memory.grow(&mut running.block, need)? {
            return Ok(false);
        }
        running.granules = need;
        let taken = self.memory.now(now);
        self.timeline
            .change(taken, self.requests[at].model, gained.cast_signed());
        Ok(true)
    }

    fn preempt(&mut self, at: usize, now: Nanos) -> anyhow::Result<()> {
        let life = &mut self.lives[at];
        if let Some(running) = &life.running {
            // Tokens since its last event needed no memory, and count. A token due right now has
            // not had its turn, since the older request that grows goes first.
            if now > running.ready {
                let since = 1 + self.settings.decoded_within(now - running.ready - 1);
                life.tokens = life
                    .tokens
                    .max((running.had + since).min(running.next.saturating_sub(1)));
            }
        }
        life.outcome.preempted += 1;
        life.waiting_since = now;
        let model = self.requests[at].model;
        self.release(at, now)?;
        self.models[model].queue.push_front(at);
        self.waiting.change(now, model, 1);
        Ok(())
    }

    /// Frees the block of a running request.
    fn release(&mut self, at: usize, now: Nanos) -> anyhow::Result<()> {
        let life = &mut self.lives[at];
        let Some(running) = life.running.take() else {
            return Ok(());
        };
        life.run += 1;
        let model = self.requests[at].model;
        self.models[model].running.remove(&at);
        self.timeline
            .change(now, model, -running.granules.cast_signed());
        self.memory.free(running.block)?;
        // Another process may have this memory before the event ends.
        self.account()
    }

    /// Unblocks a request that waits although nothing runs and nothing arrives: only memory whose
    /// return is pending can be the reason.
    fn unblock(&mut self) -> anyhow::Result<()> {
        self.memory.settle()?;
        let admitted = self.admit_all(self.now)?;
        let waiting: usize = self.models.iter().map(|model| model.queue.len()).sum();
        let refusal = self.memory.last_refusal().unwrap_or_default();
        ensure!(
            admitted,
            "{} waiting and nothing running, yet memory is refused: {refusal}",
            counted(waiting as u64, "request")
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests;
