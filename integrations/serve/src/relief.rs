//! The sources of memory when the server is short, in this order: memory that is being freed; idle
//! models; prefixes of models in which nothing runs; and for a step also the youngest request,
//! models whose requests all wait, and finally the model's own prefix. This module does not decide
//! what is computed with the memory.

use std::time::Instant;

use anyhow::Context as _;

use super::cache::Caches;
use super::schedule::Id;
use super::state::{Job, Server};

impl Server<'_> {
    /// Gets memory for a request and wakes its model. Returns `true` if both succeeded.
    pub(super) fn make_room(
        &mut self,
        model: usize,
        id: Id,
        may_fork: bool,
    ) -> anyhow::Result<bool> {
        let cache_memory = &self.models[model].cache_memory;
        let sequence = self.prefixes[model].wanted(self.jobs[id].tokens.len() + 1, may_fork);
        loop {
            let asleep = cache_memory.asleep();
            if cache_memory.headroom()? >= sequence + asleep {
                if asleep == 0 {
                    return Ok(true);
                }
                let begun = Instant::now();
                if cache_memory.wake()? {
                    self.figures.woken.push(begun.elapsed());
                    return Ok(true);
                }
            }
            if !self.take_unused(model)? {
                return Ok(false);
            }
        }
    }

    /// Takes unused memory from another model of the group. Returns `true` if there was any.
    pub(super) fn take_unused(&mut self, model: usize) -> anyhow::Result<bool> {
        // If no running request can end, a model with waiting requests may sleep too.
        let stuck = self.stuck[self.schedule.group(model).start] > 0;
        Ok(self.sleep_one(model, stuck)? || self.give_up_one(model))
    }

    /// Puts the longest idle model to sleep, among models without requests or, with `may_wait`,
    /// without running requests.
    fn sleep_one(&mut self, model: usize, may_wait: bool) -> anyhow::Result<bool> {
        let mut idle: Vec<usize> = self
            .unused(model)
            .filter(|&other| may_wait || self.schedule.is_idle(other))
            .collect();
        idle.sort_by_key(|&other| self.busy[other]);
        for other in idle {
            let begun = Instant::now();
            let cache_memory = &self.models[other].cache_memory;
            if cache_memory.sleep()? {
                self.figures.slept.push(begun.elapsed());
                if !cache_memory.keeps_caches() {
                    self.prefixes[other].give_up();
                }
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Releases the prefix of the model that ran least recently.
    fn give_up_one(&mut self, model: usize) -> bool {
        let there = |&other: &usize| self.prefixes[other].is_there();
        let oldest = self
            .unused(model)
            .filter(there)
            .min_by_key(|&other| self.busy[other]);
        oldest.is_some_and(|other| self.prefixes[other].give_up())
    }

    /// Returns the other models of the group that are awake and have no running requests.
    fn unused(&self, model: usize) -> impl Iterator<Item = usize> + '_ {
        let others = self
            .schedule
            .group(model)
            .filter(move |&other| other != model);
        others
            .filter(|&other| self.schedule.running(other).is_empty())
            .filter(|&other| !self.models[other].cache_memory.is_asleep())
    }

    pub(super) fn relieve(
        &mut self,
        model: usize,
        tries: u32,
        error: candle_core::Error,
    ) -> anyhow::Result<()> {
        if tries > 0 && !self.take_unused(model)? {
            if let Some((other, id)) = self.schedule.victim(model) {
                self.throw_out(other, id);
            } else if !self.sleep_one(model, true)? && !self.prefixes[model].give_up() {
                return Err(error).context("a request has all memory and needs more");
            }
        }
        self.models[model].cache_memory.settle()
    }

    fn throw_out(&mut self, model: usize, id: Id) {
        self.schedule.throw_out(model, id);
        let Job { caches, done, .. } = &mut self.jobs[id];
        (*caches, *done) = (Caches::new(), 0);
        self.figures.thrown_out += 1;
    }
}
