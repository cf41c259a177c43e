//! Free ranges of addresses, by address and by length.
//!
//! Each range has a [`Mark`]: the class of its work ([`Class`]) where its parts have work of their
//! own, or the work itself ([`Tag`]).
//!
//! The ranges of extents are *runs*: mapped, in windows that are searched, and free from one end to
//! the other. A run may cross the borders of extents. It is as long as possible: no run is adjacent
//! to another. Its class is at least that of its parts, and is made exact when fences are polled.

use std::collections::BTreeMap;
use std::ops::Range;

use super::lengths::Lengths;
use super::tag::{Class, StreamId, Tag};
use crate::size::aligned;

/// The work that a free range waits for, or its class.
pub(super) trait Mark: Clone {
    fn class(&self) -> Class;

    /// Makes this mark cover an adjacent range with another mark, unless the two ranges are better
    /// kept apart.
    fn join(&mut self, other: &Self) -> bool;
}

impl Mark for Class {
    fn class(&self) -> Class {
        *self
    }

    fn join(&mut self, other: &Self) -> bool {
        *self = self.with(*other);
        true
    }
}

impl Mark for Tag {
    fn class(&self) -> Class {
        Self::class(self)
    }

    /// Ranges that different streams can use without waiting stay apart.
    fn join(&mut self, other: &Self) -> bool {
        let joins = self == other || self.class().with(other.class()) != Class::Mixed;
        if joins {
            self.merge(other);
        }
        joins
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Free<M> {
    pub(super) start: u64,
    pub(super) mark: M,
}

#[derive(Debug)]
pub(super) struct Ranges<M> {
    /// By the end: most allocations begin at the start of a range, and most frees have a free range
    /// behind them, and so neither changes a key.
    by_end: BTreeMap<u64, Free<M>>,
    lengths: ByClass,
}

pub(super) type Runs = Ranges<Class>;

/// Lengths and addresses, in the order of classes. Most classes have ranges.
#[derive(Debug, Default)]
struct ByClass(Vec<(Class, Lengths)>);

impl ByClass {
    /// Returns the index of a class, or the index to insert it at.
    fn place(&self, class: Class) -> Result<usize, usize> {
        self.0.binary_search_by_key(&class, |&(named, _)| named)
    }

    fn of(&self, class: Class) -> Option<&Lengths> {
        let (_, lengths) = self.0.get(self.place(class).ok()?)?;
        Some(lengths)
    }

    fn add(&mut self, class: Class, range: Range<u64>) {
        let index = self.place(class).unwrap_or_else(|index| {
            self.0.insert(index, (class, Lengths::default()));
            index
        });
        if let Some((_, lengths)) = self.0.get_mut(index) {
            lengths.add(range.end - range.start, range.start);
        }
    }

    fn remove(&mut self, class: Class, range: Range<u64>) {
        if let Ok(index) = self.place(class)
            && let Some((_, lengths)) = self.0.get_mut(index)
        {
            lengths.remove(range.end - range.start, range.start);
        }
    }
}

impl<M> Default for Ranges<M> {
    fn default() -> Self {
        Self {
            by_end: BTreeMap::new(),
            lengths: ByClass::default(),
        }
    }
}

impl<M: Mark> Ranges<M> {
    pub(super) fn all(&self) -> impl Iterator<Item = (Range<u64>, &M)> {
        let all = self.by_end.iter();
        all.map(|(&end, free)| (free.start..end, &free.mark))
    }

    /// Returns the ranges that end in a range of addresses, behind its start.
    pub(super) fn ending_in(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, &M)> {
        let ends = self.by_end.range(range.start + 1..=range.end);
        ends.map(|(&end, free)| (free.start..end, &free.mark))
    }

    pub(super) fn bytes(&self) -> u64 {
        let lengths = self.lengths.0.iter().map(|(_, lengths)| lengths);
        lengths.map(Lengths::bytes).sum()
    }

    pub(super) fn bytes_of(&self, class: Class) -> u64 {
        self.lengths.of(class).map_or(0, Lengths::bytes)
    }

    pub(super) fn longest(&self) -> u64 {
        let lengths = self.lengths.0.iter().map(|(_, lengths)| lengths);
        lengths.map(Lengths::longest).max().unwrap_or(0)
    }

    pub(super) fn around(&self, at: u64) -> Option<Range<u64>> {
        let (&end, free) = self.by_end.range(at.checked_add(1)?..).next()?;
        (free.start <= at).then_some(free.start..end)
    }

    pub(super) fn ending_at(&self, end: u64) -> Option<&Free<M>> {
        self.by_end.get(&end)
    }

    /// Adds a range that became free, joined with the ranges on either side if their marks allow
    /// and they lie `within` some addresses.
    pub(super) fn join(&mut self, range: Range<u64>, mut mark: M, within: &Range<u64>) {
        let Range { mut start, end } = range;
        if start > within.start
            && let Some(left) = self.by_end.get(&start)
            && mark.join(&left.mark)
        {
            let (first, class) = (left.start, left.mark.class());
            self.by_end.remove(&start);
            self.lengths.remove(class, first..start);
            start = first;
        }
        if end < within.end
            && let Some((&last, right)) = self.by_end.range_mut(end + 1..).next()
            && right.start == end
            && mark.join(&right.mark)
        {
            self.lengths.remove(right.mark.class(), end..last);
            self.lengths.add(mark.class(), start..last);
            *right = Free { start, mark };
            return;
        }
        self.lengths.add(mark.class(), start..end);
        self.by_end.insert(end, Free { start, mark });
    }

    /// Removes addresses that are no longer free, or gone, from the range that contains them.
    /// Returns its mark.
    pub(super) fn cut(&mut self, range: Range<u64>) -> Option<M> {
        let containing = self.by_end.range_mut(range.end..).next();
        let containing = containing.filter(|(_, free)| free.start <= range.start);
        let Some((&last, free)) = containing else {
            debug_assert!(false, "{range:?} is in no free range");
            return None;
        };
        let (first, mark) = (free.start, free.mark.clone());
        let class = mark.class();
        self.lengths.remove(class, first..last);
        if range.end < last {
            free.start = range.end;
            self.lengths.add(class, range.end..last);
        } else {
            self.by_end.remove(&last);
        }
        if first < range.start {
            self.lengths.add(class, first..range.start);
            let free = Free {
                start: first,
                mark: mark.clone(),
            };
            self.by_end.insert(range.start, free);
        }
        Some(mark)
    }

    /// Changes the marks of all ranges. Calls `see` with each range whose class changed.
    pub(super) fn change(
        &mut self,
        mut change: impl FnMut(Range<u64>, &mut M),
        mut see: impl FnMut(Range<u64>),
    ) {
        for (&end, free) in &mut self.by_end {
            let (range, before) = (free.start..end, free.mark.class());
            change(range.clone(), &mut free.mark);
            let after = free.mark.class();
            if after != before {
                self.lengths.remove(before, range.clone());
                self.lengths.add(after, range.clone());
                see(range);
            }
        }
    }

    /// Returns the shortest range that has `size` bytes at a multiple of `alignment` and that a
    /// stream can use without waiting (with `any`, of any class), from these bytes on.
    pub(super) fn find(
        &self,
        size: u64,
        alignment: u64,
        stream: StreamId,
        any: bool,
    ) -> Option<Range<u64>> {
        let fit = |lengths: &Lengths| lengths.fit(size, alignment);
        let best = match any {
            true => {
                let lengths = self.lengths.0.iter().map(|(_, lengths)| lengths);
                lengths.filter_map(fit).min()
            }
            false => {
                let of = |class| self.lengths.of(class).and_then(fit);
                match (of(Class::Ready), of(Class::On(stream))) {
                    (Some(one), Some(other)) => Some(one.min(other)),
                    (one, other) => one.or(other),
                }
            }
        };
        let (length, start) = best?;
        Some(aligned(start, alignment)?..start + length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);

    fn parts(line: &[Option<Class>]) -> Vec<(Range<u64>, Class)> {
        let mut parts: Vec<(Range<u64>, Class)> = Vec::new();
        for (at, class) in (0..).zip(line) {
            let Some(class) = *class else { continue };
            match parts.last_mut() {
                Some((part, known)) if part.end == at => {
                    part.end = at + 1;
                    *known = known.with(class);
                }
                _ => parts.push((at..at + 1, class)),
            }
        }
        parts
    }

    #[test]
    fn runs_are_what_is_free_of_a_line_as_long_as_possible() {
        let mut random = fastrand::Rng::with_seed(5);
        let (mut runs, mut line) = (Runs::default(), [None; 64]);
        for _ in 0..20_000 {
            let (start, end) = (random.usize(..64), random.usize(1..=64));
            let Some(part) = line.get_mut(start..end).filter(|it| !it.is_empty()) else {
                continue;
            };
            let range = start as u64..end as u64;
            if part.iter().all(Option::is_none) {
                let class = [Class::Ready, Class::On(A), Class::On(B)][random.usize(..3)];
                part.fill(Some(class));
                runs.join(range, class, &(0..u64::MAX));
            } else if part.iter().all(Option::is_some) {
                part.fill(None);
                runs.cut(range);
                // A run keeps its class when it is cut.
                let exact = |range: Range<u64>, class: &mut Class| {
                    let known = parts(&line);
                    let known = known.into_iter().find(|(part, _)| *part == range);
                    *class = known.unwrap().1;
                };
                runs.change(exact, |_| {});
            }
            let all = runs.all().map(|(range, &class)| (range, class));
            let known = parts(&line);
            assert_eq!(all.collect::<Vec<_>>(), known);
            let at = random.u64(..64);
            let around = known.iter().find(|(part, _)| part.contains(&at));
            assert_eq!(runs.around(at), around.map(|(part, _)| part.clone()));
            let ending = known.iter().find(|(part, _)| part.end == at);
            let ending = ending.map(|(part, class)| (part.start, *class));
            assert_eq!(runs.ending_at(at).map(|it| (it.start, it.mark)), ending);
            let length = |part: &Range<u64>| part.end - part.start;
            let size = random.u64(1..64);
            let fits = |&&(ref part, class): &&(Range<u64>, Class)| {
                length(part) >= size && class.serves(A)
            };
            let best = known
                .iter()
                .filter(fits)
                .min_by_key(|(part, _)| length(part));
            assert_eq!(
                runs.find(size, 1, A, false),
                best.map(|(part, _)| part.clone())
            );
            assert_eq!(
                runs.bytes(),
                known.iter().map(|(part, _)| length(part)).sum::<u64>()
            );
        }
    }

    #[test]
    fn what_different_streams_can_use_at_once_stays_apart() {
        let mut free: Ranges<Tag> = Ranges::default();
        let all = |free: &Ranges<Tag>| {
            let all = free.all().map(|(range, tag)| (range, tag.clone()));
            all.collect::<Vec<_>>()
        };
        let within = 0..100;
        free.join(10..20, Tag::on(A, 1), &within);
        free.join(20..30, Tag::on(B, 2), &within);
        free.join(30..40, Tag::Ready, &within);
        let parts = [(10..20, Tag::on(A, 1)), (20..40, Tag::on(B, 2))];
        assert_eq!(all(&free), parts);
        free.join(5..10, Tag::on(A, 9), &within);
        assert_eq!(
            all(&free)[0],
            (5..20, Tag::on(A, 9)),
            "the later work covers both"
        );
        free.join(40..50, Tag::on(B, 1), &(40..100));
        assert_eq!(free.all().count(), 3, "another begins at a border");
        assert_eq!(free.cut(25..30), Some(Tag::on(B, 2)));
        let ranges = free.all().map(|(range, _)| range);
        assert_eq!(ranges.collect::<Vec<_>>(), [5..20, 20..25, 30..40, 40..50]);
        assert_eq!(free.bytes_of(Class::On(A)), 15);
    }
}
