//! Lists of extents by their free bytes, for plans.

use std::ops::Range;

use super::super::tag::StreamId;
use super::extent::Ends;
use super::{ExtentId, Extents};

impl Extents {
    /// Returns wholly free extents that a stream can use without waiting (any stream with `None`),
    /// the largest first. [`list`](Self::list) is called before this and the other lists.
    pub(crate) fn whole(&self, stream: Option<StreamId>) -> impl Iterator<Item = (u64, ExtentId)> {
        debug_assert!(self.stale.is_empty(), "the lists are stale");
        let all = self.whole.iter().rev().copied();
        all.filter(move |&(size, id)| self.serves(id, &(0..size), stream))
    }

    /// Returns extents with at least `least` free bytes at the start, the fewest first.
    pub(in crate::heap) fn prefixes(
        &self,
        least: u64,
        stream: Option<StreamId>,
    ) -> impl Iterator<Item = (u64, ExtentId)> {
        debug_assert!(self.stale.is_empty(), "the lists are stale");
        let all = self.prefixes.range((least, 0)..).copied();
        all.filter(move |&(_, id)| self.serves(id, &(0..least), stream))
    }

    /// Returns extents with free bytes at the start, the most first.
    pub(in crate::heap) fn longest_prefixes(
        &self,
        stream: Option<StreamId>,
    ) -> impl Iterator<Item = (u64, ExtentId)> {
        debug_assert!(self.stale.is_empty(), "the lists are stale");
        let all = self.prefixes.iter().rev().copied();
        all.filter(move |&(length, id)| self.serves(id, &(0..length), stream))
    }

    /// Returns extents with at most `most` free bytes at the end, the most first.
    pub(in crate::heap) fn suffixes(
        &self,
        most: u64,
        stream: Option<StreamId>,
    ) -> impl Iterator<Item = (u64, ExtentId)> {
        debug_assert!(self.stale.is_empty(), "the lists are stale");
        let all = self.suffixes.range(..=(most, ExtentId::MAX)).rev().copied();
        all.filter(move |&(length, id)| {
            let extent = self.extents.get(id).and_then(Option::as_ref);
            let size = extent.map_or(0, |extent| extent.size);
            self.serves(id, &(size - length..size), stream)
        })
    }

    fn serves(&self, id: ExtentId, range: &Range<u64>, stream: Option<StreamId>) -> bool {
        let Some(stream) = stream else {
            return true;
        };
        let extent = self.extents.get(id).and_then(Option::as_ref);
        extent.is_some_and(|extent| extent.class(range).serves(stream))
    }

    pub(crate) fn list(&mut self) {
        while let Some(id) = self.stale.pop() {
            if let Some(extent) = self.extents.get_mut(id).and_then(Option::as_mut) {
                extent.is_stale = false;
                let ends = extent.ends();
                self.list_with(id, ends);
            }
        }
        self.vacant
            .iter_mut()
            .for_each(|(_, is_stale)| *is_stale = false);
    }

    pub(super) fn list_with(&mut self, id: ExtentId, ends: Ends) {
        let Some(extent) = self.extents.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let old = std::mem::replace(&mut extent.listed, ends);
        let lists = [
            (&mut self.whole, old.whole, ends.whole),
            (&mut self.prefixes, old.prefix, ends.prefix),
            (&mut self.suffixes, old.suffix, ends.suffix),
        ];
        for (list, old, new) in lists {
            if old == new {
                continue;
            }
            if old > 0 {
                list.remove(&(old, id));
            }
            if new > 0 {
                list.insert((new, id));
            }
        }
    }
}
