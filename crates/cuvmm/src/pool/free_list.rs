//! Physical memory that the pool has and nobody holds, by size.

use std::collections::BTreeMap;

use crate::region::Unmapped;

/// Unmapped physicals, kept for reuse.
#[derive(Debug, Default)]
pub(crate) struct FreeList {
    by_size: BTreeMap<u64, Vec<Unmapped>>,
    bytes: u64,
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
            .push(unmapped);
    }

    /// A physical of exactly `size`: one that nobody wrote to, or nobody but `own`, if there is one.
    /// Without `scrub`, only such a one.
    pub(crate) fn take(&mut self, size: u64, own: Option<u64>, scrub: bool) -> Option<Unmapped> {
        let physicals = self.by_size.get_mut(&size)?;
        let as_it_is = |unmapped: &Unmapped| {
            unmapped
                .last_writer
                .is_none_or(|last_writer| Some(last_writer.by) == own)
        };
        let index = match physicals.iter().rposition(as_it_is) {
            Some(index) => index,
            None if scrub => physicals.len().checked_sub(1)?,
            None => return None,
        };
        self.take_at(size, index)
    }

    fn take_at(&mut self, size: u64, index: usize) -> Option<Unmapped> {
        let physicals = self.by_size.get_mut(&size)?;
        let unmapped = physicals.swap_remove(index);
        if physicals.is_empty() {
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
            let fit = (left / size).min(physicals.len() as u64);
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
