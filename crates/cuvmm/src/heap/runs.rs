//! Free runs: ranges of addresses that are mapped, in a window that is searched, and free from one
//! end to the other.
//!
//! A run may cross the borders of extents. It is as long as possible: no run is adjacent to
//! another. Its class is at least that of its parts, and is made exact when fences are polled.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::tag::{Class, StreamId};
use crate::size::aligned;

/// The most runs that are tried for an alignment before only longer ones are.
const TRIES: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) end: u64,
    pub(super) class: Class,
}

/// All free runs, by address and by length.
#[derive(Debug, Default)]
pub(super) struct Runs {
    by_start: BTreeMap<u64, Run>,
    /// Lengths and addresses, by class in the order of classes. Most have runs.
    by_length: Vec<(Class, BTreeSet<(u64, u64)>)>,
}

impl Runs {
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, Run)> + '_ {
        self.by_start.iter().map(|(&start, &run)| (start, run))
    }

    /// Returns the length of the longest run.
    pub(super) fn longest(&self) -> u64 {
        let last = |set: &BTreeSet<(u64, u64)>| set.last().map_or(0, |&(length, _)| length);
        let sets = self.by_length.iter().map(|(_, set)| set);
        sets.map(last).max().unwrap_or(0)
    }

    /// Returns the run that contains an address.
    pub(super) fn around(&self, at: u64) -> Option<(u64, Run)> {
        if let Some(&run) = self.by_start.get(&at) {
            return Some((at, run));
        }
        let (&start, &run) = self.by_start.range(..at).next_back()?;
        (at < run.end).then_some((start, run))
    }

    /// Returns the run that ends at an address.
    pub(super) fn ending_at(&self, end: u64) -> Option<(u64, Run)> {
        let (&start, &run) = self.by_start.range(..end).next_back()?;
        (run.end == end).then_some((start, run))
    }

    /// Adds a range that became free, and joins it with the runs on either side.
    pub(super) fn join(&mut self, start: u64, end: u64, class: Class) {
        let (mut from, mut to, mut class) = (start, end, class);
        if let Some(run) = self.by_start.remove(&end) {
            self.unlist(end, run);
            to = run.end;
            class = class.with(run.class);
        }
        if let Some((first, run)) = self.ending_at(start) {
            self.unlist(first, run);
            from = first;
            class = class.with(run.class);
        }
        self.insert(from, Run { end: to, class });
    }

    /// Removes a range that is no longer free, or no longer there, from the run that contains it.
    pub(super) fn cut(&mut self, start: u64, end: u64) {
        let Some((first, run)) = self.around(start) else {
            debug_assert!(false, "{start}..{end} is in no run");
            return;
        };
        debug_assert!(end <= run.end, "{start}..{end} is in several runs");
        self.unlist(first, run);
        let class = run.class;
        if first < start {
            self.insert(first, Run { end: start, class });
        } else {
            self.by_start.remove(&first);
        }
        self.insert(end, run);
    }

    /// Sets the class of a run.
    pub(super) fn set_class(&mut self, start: u64, class: Class) {
        if let Some(&run) = self.by_start.get(&start) {
            self.unlist(start, run);
            self.insert(start, Run { class, ..run });
        }
    }

    /// Returns the index of a class in the lengths, or the one that it would have.
    fn place(&self, class: Class) -> Result<usize, usize> {
        self.by_length
            .binary_search_by_key(&class, |&(named, _)| named)
    }

    fn insert(&mut self, start: u64, run: Run) {
        if start < run.end {
            self.by_start.insert(start, run);
            let place = self.place(run.class);
            let index = place.unwrap_or_else(|index| {
                self.by_length.insert(index, (run.class, BTreeSet::new()));
                index
            });
            if let Some((_, set)) = self.by_length.get_mut(index) {
                set.insert((run.end - start, start));
            }
        }
    }

    /// Removes a run from the lengths. It is removed by its address too, or inserted anew.
    fn unlist(&mut self, start: u64, run: Run) {
        if let Ok(index) = self.place(run.class)
            && let Some((_, set)) = self.by_length.get_mut(index)
        {
            set.remove(&(run.end - start, start));
        }
    }

    /// Returns the first address for `size` bytes in the shortest run that has them and that a
    /// stream can use without waiting, or with `any` in the shortest run of any class.
    pub(super) fn find(
        &self,
        size: u64,
        alignment: u64,
        stream: StreamId,
        any: bool,
    ) -> Option<u64> {
        let best = match any {
            true => {
                let sets = self.by_length.iter().map(|(_, set)| set);
                sets.filter_map(|set| fit(set, size, alignment)).min()
            }
            false => {
                let of = |class| {
                    let (_, set) = self.by_length.get(self.place(class).ok()?)?;
                    fit(set, size, alignment)
                };
                match (of(Class::Ready), of(Class::On(stream))) {
                    (Some(one), Some(other)) => Some(one.min(other)),
                    (one, other) => one.or(other),
                }
            }
        };
        best.map(|(_, at)| at)
    }

    /// Returns the ranges of all runs of a class that is not [`Class::Ready`].
    pub(super) fn waiting(&self) -> Vec<Range<u64>> {
        let waits = |&(_, run): &(u64, Run)| run.class != Class::Ready;
        self.all()
            .filter(waits)
            .map(|(start, run)| start..run.end)
            .collect()
    }
}

/// Returns the length of the shortest run in a set that has `size` bytes, and their address.
fn fit(set: &BTreeSet<(u64, u64)>, size: u64, alignment: u64) -> Option<(u64, u64)> {
    let place = |&(length, start): &(u64, u64)| {
        let at = aligned(start, alignment)?;
        (at - start + size <= length).then_some((length, at))
    };
    let near = set.range((size, 0)..).take(TRIES).find_map(place);
    near.or_else(|| {
        set.range((size.checked_add(alignment)?, 0)..)
            .find_map(place)
    })
}
