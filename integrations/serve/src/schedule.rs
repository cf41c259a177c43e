//! The schedule: which requests wait, run, come next or are evicted. It has no clock, memory or
//! model, only numbers.
//!
//! Requests are numbered in the order of their arrival, and older ones have precedence: the oldest
//! is admitted first, and the youngest is evicted when memory is short. Models that share memory
//! form a group with one common order; otherwise each model has its own.

use std::collections::BTreeSet;

pub(crate) type Id = usize;

#[derive(Debug)]
pub(crate) struct Schedule {
    models: Vec<Queue>,
    shared: bool,
    slots: usize,
}

#[derive(Clone, Debug, Default)]
struct Queue {
    waiting: BTreeSet<Id>,
    running: BTreeSet<Id>,
}

impl Schedule {
    /// Creates a schedule with at most `slots` running requests for each model.
    pub(crate) fn new(models: usize, shared: bool, slots: usize) -> Self {
        Self {
            models: vec![Queue::default(); models],
            shared,
            slots,
        }
    }

    pub(crate) fn arrive(&mut self, model: usize, id: Id) {
        self.models[model].waiting.insert(id);
    }

    /// Returns one model of each group.
    pub(crate) fn groups(&self) -> std::ops::Range<usize> {
        0..if self.shared { 1 } else { self.models.len() }
    }

    pub(crate) fn group(&self, model: usize) -> std::ops::Range<usize> {
        match self.shared {
            true => 0..self.models.len(),
            false => model..model + 1,
        }
    }

    /// Returns the oldest waiting request in the group whose model has a free slot, with its model.
    pub(crate) fn next(&self, model: usize) -> Option<(usize, Id)> {
        let heads = self.group(model).filter_map(|model| {
            let queue = &self.models[model];
            let head = queue.waiting.first();
            head.filter(|_| queue.running.len() < self.slots)
                .map(|&id| (model, id))
        });
        heads.min_by_key(|&(_, id)| id)
    }

    pub(crate) fn admit(&mut self, model: usize, id: Id) {
        let queue = &mut self.models[model];
        queue.waiting.remove(&id);
        queue.running.insert(id);
    }

    /// Returns the request to evict first: the youngest running request in the group, with its
    /// model. Returns `None` if only one runs, because its eviction would free no memory for
    /// another.
    pub(crate) fn victim(&self, model: usize) -> Option<(usize, Id)> {
        if self
            .group(model)
            .map(|model| self.running(model).len())
            .sum::<usize>()
            < 2
        {
            return None;
        }
        let last = |model: usize| Some((model, *self.models[model].running.last()?));
        self.group(model).filter_map(last).max_by_key(|&(_, id)| id)
    }

    /// Returns a running request to its place among the waiting ones.
    pub(crate) fn throw_out(&mut self, model: usize, id: Id) {
        self.finish(model, id);
        self.models[model].waiting.insert(id);
    }

    pub(crate) fn finish(&mut self, model: usize, id: Id) {
        self.models[model].running.remove(&id);
    }

    pub(crate) fn running(&self, model: usize) -> &BTreeSet<Id> {
        &self.models[model].running
    }

    pub(crate) fn waiting(&self, model: usize) -> usize {
        self.models[model].waiting.len()
    }

    /// Returns `true` if a request waits in the group and none runs.
    pub(crate) fn is_still(&self, model: usize) -> bool {
        let mut queues = self.group(model).map(|model| &self.models[model]);
        let waits = queues.clone().any(|queue| !queue.waiting.is_empty());
        waits && queues.all(|queue| queue.running.is_empty())
    }

    /// Returns `true` if no request waits for the model or runs in it.
    pub(crate) fn is_idle(&self, model: usize) -> bool {
        let queue = &self.models[model];
        queue.waiting.is_empty() && queue.running.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(shared: bool) -> Schedule {
        let mut schedule = Schedule::new(2, shared, 2);
        for (model, id) in [(1, 0), (0, 1), (0, 2), (1, 3), (0, 4)] {
            schedule.arrive(model, id);
        }
        schedule
    }

    fn admit_all(schedule: &mut Schedule) -> Vec<(usize, Id)> {
        let mut admitted = Vec::new();
        for group in schedule.groups() {
            while let Some((model, id)) = schedule.next(group) {
                schedule.admit(model, id);
                admitted.push((model, id));
            }
        }
        admitted
    }

    #[test]
    fn the_oldest_goes_first_and_full_slots_hold_nobody_else_up() {
        let mut shared = schedule(true);
        assert_eq!(admit_all(&mut shared), [(1, 0), (0, 1), (0, 2), (1, 3)]);
        assert_eq!((shared.waiting(0), shared.waiting(1)), (1, 0));
        shared.finish(0, 1);
        assert_eq!(shared.next(1), Some((0, 4)));
        let mut apart = schedule(false);
        assert_eq!(admit_all(&mut apart), [(0, 1), (0, 2), (1, 0), (1, 3)]);
        assert_eq!((apart.next(0), apart.next(1)), (None, None));
    }

    #[test]
    fn the_youngest_has_to_go_and_comes_back_before_the_younger() {
        let mut shared = schedule(true);
        admit_all(&mut shared);
        assert_eq!(shared.victim(0), Some((1, 3)));
        shared.throw_out(1, 3);
        assert_eq!(shared.victim(0), Some((0, 2)));
        shared.throw_out(0, 2);
        assert_eq!(shared.next(0), Some((0, 2)));
        shared.throw_out(0, 1);
        // Only one is left, and no other request could give up memory for it.
        assert_eq!(shared.victim(0), None);
        assert_eq!(shared.running(1).iter().copied().collect::<Vec<_>>(), [0]);
        let mut apart = schedule(false);
        admit_all(&mut apart);
        assert_eq!(
            (apart.victim(0), apart.victim(1)),
            (Some((0, 2)), Some((1, 3)))
        );
        apart.throw_out(0, 2);
        assert_eq!((apart.victim(0), apart.victim(1)), (None, Some((1, 3))));
    }

    #[test]
    fn a_group_is_still_that_waits_and_does_not_run() {
        let mut apart = schedule(false);
        assert!(apart.is_still(0) && apart.is_still(1));
        apart.admit(1, 0);
        assert!(apart.is_still(0) && !apart.is_still(1));
        let mut shared = schedule(true);
        shared.admit(1, 0);
        assert!(!shared.is_still(0));
        shared.throw_out(1, 0);
        assert!(shared.is_still(0));
        assert!(!Schedule::new(2, true, 2).is_still(0));
    }

    #[test]
    fn idle_is_who_has_nothing_to_do() {
        let mut schedule = schedule(true);
        for id in [0, 3] {
            assert!(!schedule.is_idle(1));
            schedule.admit(1, id);
            schedule.finish(1, id);
        }
        assert!(schedule.is_idle(1) && !schedule.is_idle(0));
    }
}
