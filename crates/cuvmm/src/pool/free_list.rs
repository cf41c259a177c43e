//! Physical memory that the pool has and nobody holds, by size and by who wrote to it last.

use std::collections::BTreeMap;

use crate::region::Unmapped;

/// Unmapped physicals, kept for reuse.
#[derive(Debug, Default)]
pub(crate) struct FreeList {
    by_size: BTreeMap<u64, Physicals>,
    bytes: u64,
}

/// Physicals of one size, by who wrote to them last. None of the lists is empty.
#[derive(Debug, Default)]
struct Physicals {
    by_writer: BTreeMap<Option<u64>, Vec<Unmapped>>,
    count: u64,
}

impl Physicals {
    fn add(&mut self, unmapped: Unmapped) {
        let writer = unmapped.last_writer.map(|last_writer| last_writer.by);
        self.by_writer.entry(writer).or_default().push(unmapped);
        self.count += 1;
    }

    /// One that `own` wrote to, or nobody; without these, one that somebody else wrote to, if that
    /// may be had.
    fn take(&mut self, own: Option<u64>, foreign: bool) -> Option<Unmapped> {
        let has = |writer: &Option<u64>| self.by_writer.contains_key(writer);
        let as_it_is = [own, None].into_iter().find(has);
        let any = || self.by_writer.keys().next_back().copied();
        let writer = as_it_is.or_else(|| any().filter(|_| foreign))?;
        let list = self.by_writer.get_mut(&writer)?;
        let unmapped = list.pop();
        if list.is_empty() {
            self.by_writer.remove(&writer);
        }
        self.count -= u64::from(unmapped.is_some());
        unmapped
    }
}

impl FreeList {
    pub(crate) const fn new() -> Self {
        Self {
            by_size: BTreeMap::new(),
            bytes: 0,
        }
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn largest(&self) -> u64 {
        self.by_size.keys().next_back().copied().unwrap_or(0)
    }

    /// Only [`State::keep`](super::state::State::keep) does, which knows what may be kept.
    pub(crate) fn add(&mut self, mut unmapped: Unmapped) {
        unmapped.fresh = false;
        self.bytes += unmapped.size();
        self.by_size
            .entry(unmapped.size())
            .or_default()
            .add(unmapped);
    }

    /// A physical of exactly `size`: one that nobody wrote to, or nobody but `own`, if there is one.
    /// Without `scrub`, only such a one.
    pub(crate) fn take(&mut self, size: u64, own: Option<u64>, scrub: bool) -> Option<Unmapped> {
        let physicals = self.by_size.get_mut(&size)?;
        let unmapped = physicals.take(own, scrub)?;
        if physicals.count == 0 {
            self.by_size.remove(&size);
        }
        self.bytes -= size;
        Some(unmapped)
    }

    /// The largest physical of at most `size`, as [`Self::take`].
    pub(crate) fn take_within(
        &mut self,
        size: u64,
        own: Option<u64>,
        scrub: bool,
    ) -> Option<Unmapped> {
        let mut below = size;
        loop {
            let (&size, _) = self.by_size.range(..=below).next_back()?;
            if let Some(unmapped) = self.take(size, own, scrub) {
                return Some(unmapped);
            }
            below = size.checked_sub(1)?;
        }
    }

    /// How many physicals make up `bytes`, the largest that fit first; as good as endless if they do
    /// not suffice.
    pub(crate) fn unmapped_for(&self, bytes: u64) -> u64 {
        let mut left = bytes;
        let mut count = 0;
        for (&size, physicals) in self.by_size.range(..=bytes).rev() {
            let fit = (left / size).min(physicals.count);
            count += fit;
            left -= fit * size;
        }
        if left == 0 { count } else { u64::MAX }
    }

    /// The largest physical, whoever wrote to it, to be given back to the driver.
    pub(crate) fn take_largest(&mut self) -> Option<Unmapped> {
        let size = self.largest();
        self.take(size, None, true)
    }

    /// The smallest physical, to be given back.
    pub(crate) fn take_smallest(&mut self) -> Option<Unmapped> {
        let (&size, _) = self.by_size.first_key_value()?;
        self.take(size, None, true)
    }

    /// The smallest physical that is smaller than `size`, to be given back.
    pub(crate) fn take_below(&mut self, size: u64) -> Option<Unmapped> {
        let (&smallest, _) = self.by_size.first_key_value()?;
        (smallest < size).then(|| self.take(smallest, None, true))?
    }

    /// The smallest physical larger than `size`, to be given back.
    pub(crate) fn take_smallest_above(&mut self, size: u64) -> Option<Unmapped> {
        let (&size, _) = self.by_size.range(size.checked_add(1)?..).next()?;
        self.take(size, None, true)
    }
}
