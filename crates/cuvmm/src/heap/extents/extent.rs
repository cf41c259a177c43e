//! One extent: its free bytes, and its mappings.

use std::ops::Range;

use super::super::sorted::Sorted;
use super::super::tag::{Class, Tag};

#[derive(Clone, Debug)]
pub(in crate::heap) struct Mapping {
    pub(crate) at: u64,
    /// Set if free bytes are searched through the mapping.
    pub(crate) searched: bool,
    pub(crate) live: u32,
    /// The work of allocations that were freed through the mapping.
    pub(crate) tag: Tag,
}

impl Mapping {
    /// Returns `true` if neither an allocation nor the work of a freed allocation uses the mapping.
    pub(crate) fn is_unused(&self) -> bool {
        self.live == 0 && self.tag == Tag::Ready
    }
}

#[derive(Clone, Debug)]
pub(super) struct Free {
    pub(super) end: u64,
    pub(super) tag: Tag,
}

#[derive(Debug)]
pub(in crate::heap) struct Extent {
    pub(crate) size: u64,
    /// The free pieces by their first byte. Most extents have one or none.
    pub(super) free: Sorted<u64, Free>,
    pub(super) free_bytes: u64,
    /// Oldest first.
    pub(crate) mappings: Vec<Mapping>,
    /// The lengths by which the extent is listed: its size if it is wholly free, and otherwise the
    /// free bytes at its start and its end.
    pub(super) listed: Ends,
    pub(super) counted: Counted,
    /// `true` if `listed` may be out of date.
    pub(super) is_stale: bool,
    /// The time when the extent last became wholly free.
    pub(crate) freed_at: u64,
    /// Removed mappings that are not unmapped yet.
    pub(super) leaving: u32,
    /// `false` while an operation takes the extent away or maps it for the first time.
    pub(crate) settled: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ends {
    pub(super) whole: u64,
    pub(super) prefix: u64,
    pub(super) suffix: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) whole: bool,
    pub(super) idle: u64,
}

impl Extent {
    pub(crate) const fn is_free(&self) -> bool {
        self.free_bytes == self.size
    }

    /// Returns `true` if a removed mapping is not unmapped yet. The pool must not take the extent
    /// then. The heap may map it again.
    pub(crate) const fn is_leaving(&self) -> bool {
        self.leaving > 0
    }

    pub(super) const fn count(&self) -> Counted {
        let whole = self.settled && self.is_free();
        let idle = if whole && !self.is_leaving() {
            self.size
        } else {
            0
        };
        Counted { whole, idle }
    }

    pub(super) fn ends(&self) -> Ends {
        if !self.settled {
            return Ends::default();
        }
        if self.is_free() {
            return Ends {
                whole: self.size,
                ..Ends::default()
            };
        }
        let (mut prefix, mut suffix) = (0, self.size);
        while let Some((start, free)) = self.free.first_from(prefix)
            && start == prefix
        {
            prefix = free.end;
        }
        while let Some((start, free)) = self.free.last_before(suffix)
            && free.end == suffix
        {
            suffix = start;
        }
        let suffix = self.size - suffix;
        Ends {
            prefix,
            suffix,
            ..Ends::default()
        }
    }

    pub(super) fn meeting(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Free)> {
        let before = self.free.last_before(start);
        let before = before.filter(|(_, free)| free.end > start);
        let from = before.map_or(start, |(first, _)| first);
        let pieces = self.free.from(from);
        pieces.take_while(move |&(first, _)| first < end)
    }

    /// Removes `taken` from the free piece that begins at `start` and contains it.
    pub(super) fn cut(&mut self, start: u64, taken: Range<u64>) {
        let Some(free) = self.free.get_mut(start) else {
            return;
        };
        let (end, left) = (free.end, start < taken.start);
        let right = taken.end < end;
        if left {
            free.end = taken.start;
            if right {
                let tag = free.tag.clone();
                self.free.insert(taken.end, Free { end, tag });
            }
        } else if let Some(free) = self.free.remove(start)
            && right
        {
            self.free.insert(taken.end, free);
        }
    }

    pub(super) fn class(&self, range: &Range<u64>) -> Class {
        let pieces = self.meeting(range.start, range.end);
        pieces.fold(Class::Ready, |class, (_, free)| {
            class.with(free.tag.class())
        })
    }

    pub(super) fn ready(&self) -> u64 {
        let ready = self.free.all().filter(|(_, free)| free.tag == Tag::Ready);
        ready.map(|(start, free)| free.end - start).sum()
    }

    pub(super) fn tag(&self) -> Tag {
        let mut all = Tag::Ready;
        self.free.all().for_each(|(_, free)| all.merge(&free.tag));
        all
    }
}

/// Adds a free range, joined with the pieces on either side where their tags allow.
pub(super) fn insert(free: &mut Sorted<u64, Free>, range: Range<u64>, mut tag: Tag) {
    let (mut start, mut end) = (range.start, range.end);
    if let Some((first, left)) = free.last_before(start)
        && left.end == start
        && left.tag.joins(&tag)
    {
        start = first;
        tag.merge(&left.tag);
    }
    if let Some((first, right)) = free.first_from(end)
        && first == end
        && right.tag.joins(&tag)
    {
        tag.merge(&right.tag);
        end = right.end;
        free.remove(first);
    }
    free.insert(start, Free { end, tag });
}
