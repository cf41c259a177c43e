//! The memory of a heap as data: extents, their mappings, and their free bytes.
//!
//! An *extent* is one physical. It may be mapped at several addresses of the heap. A *window* is a
//! range of addresses with mappings side by side; unused addresses separate it from the next, and
//! no extent is searched twice in one window. A free part is a fact of the extent: a range of its
//! bytes, with the work that must be complete before the bytes may be used ([`Tag`]). Through each
//! mapping that is *searched*, free bytes are part of a free [run](super::ranges), which may go on
//! in the next mapping of the window. A mapping that is not searched only serves the allocations in
//! it, until the last of them is freed and the mapping can be unmapped.
//!
//! This module makes no driver call.
//!
//! Keeps I-74.

mod anywhere;
#[cfg(debug_assertions)]
mod check;
mod extent;
mod lists;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use self::extent::{Counted, Ends, insert};
use super::ranges::Runs;
use super::sorted::Sorted;
use super::tag::{Class, Tag};

pub(super) use self::extent::{Extent, Mapping};
pub(super) use self::work::work_of;

pub(super) type ExtentId = usize;

/// Runs join wherever they are adjacent.
const EVERYWHERE: Range<u64> = 0..u64::MAX;

/// The bytes of an extent that an operation took, and the work that each piece waits for.
pub(super) type Taken = (ExtentId, Vec<(Range<u64>, Tag)>);

pub(super) type Part = (ExtentId, Range<u64>);

#[derive(Debug, Default)]
pub(super) struct Extents {
    extents: Vec<Option<Extent>>,
    /// The numbers of removed extents; `true` if the number is in `stale`.
    vacant: Vec<(ExtentId, bool)>,
    line: BTreeMap<u64, ExtentId>,
    pub(super) runs: Runs,
    whole: BTreeSet<(u64, ExtentId)>,
    prefixes: BTreeSet<(u64, ExtentId)>,
    suffixes: BTreeSet<(u64, ExtentId)>,
    /// Extents whose listed ends may be out of date. Few requests need the lists.
    stale: Vec<ExtentId>,
    wholes: usize,
    held: u64,
    free: u64,
    ready: u64,
    /// Bytes of wholly free extents without leaving mappings.
    idle: u64,
    mappings: u64,
    /// The first address and the end of each window.
    windows: BTreeMap<u64, u64>,
    clock: u64,
    /// The addresses at which bytes became free or used in the current operation. Empty between
    /// operations.
    shown: Vec<Range<u64>>,
    /// The parts of a range in the current operation. Empty between operations.
    walked: Vec<(Part, u64)>,
}

impl Extents {
    pub(super) const fn held(&self) -> u64 {
        self.held
    }

    pub(super) const fn free(&self) -> u64 {
        self.free
    }

    pub(super) const fn ready(&self) -> u64 {
        self.ready
    }

    pub(super) const fn idle(&self) -> u64 {
        self.idle
    }

    pub(super) const fn mappings(&self) -> u64 {
        self.mappings
    }

    pub(super) fn windows(&self) -> u64 {
        self.windows.len() as u64
    }

    fn window(&self, at: u64) -> Option<Range<u64>> {
        let (&start, &end) = self.windows.range(..=at).next_back()?;
        (at < end).then_some(start..end)
    }

    /// Returns `true` if an extent is searched in the window that contains an address.
    pub(super) fn is_searched_beside(&self, id: ExtentId, at: u64) -> bool {
        let (Some(extent), Some(window)) = (self.extent(id), self.window(at)) else {
            return false;
        };
        let mut mappings = extent.mappings.iter();
        mappings.any(|mapping| mapping.searched && window.contains(&mapping.at))
    }

    pub(super) fn extent(&self, id: ExtentId) -> Option<&Extent> {
        self.extents.get(id)?.as_ref()
    }

    fn extent_mut(&mut self, id: ExtentId) -> Option<&mut Extent> {
        self.extents.get_mut(id)?.as_mut()
    }

    /// Returns all mappings: their extents and addresses, in the order of the addresses.
    pub(super) fn all_mappings(&self) -> Vec<(ExtentId, u64)> {
        self.line.iter().map(|(&at, &id)| (id, at)).collect()
    }

    /// Sets whether all extents are [settled](Self::settle).
    pub(super) fn settle_all(&mut self, settled: bool) {
        for id in 0..self.extents.len() {
            self.settle(id, settled);
        }
    }

    /// Notes work that uses all mappings, and that the heap has not queued.
    pub(super) fn add_work(&mut self, work: &Tag) {
        let extents = self.extents.iter_mut().flatten();
        let mappings = extents.flat_map(|extent| &mut extent.mappings);
        mappings.for_each(|mapping| mapping.tag.merge(work));
    }

    pub(super) fn extents(&self) -> impl Iterator<Item = (ExtentId, &Extent)> {
        let all = self.extents.iter().enumerate();
        all.filter_map(|(id, extent)| Some((id, extent.as_ref()?)))
    }

    pub(super) fn add_extent(&mut self, size: u64) -> ExtentId {
        let vacant = self.vacant.pop();
        let extent = Extent {
            size,
            free: Sorted::default(),
            free_bytes: 0,
            mappings: Vec::new(),
            listed: Ends::default(),
            counted: Counted::default(),
            is_stale: vacant.is_some_and(|(_, is_stale)| is_stale),
            freed_at: 0,
            leaving: 0,
            settled: true,
        };
        self.held += size;
        if let Some((id, _)) = vacant
            && let Some(place) = self.extents.get_mut(id)
        {
            *place = Some(extent);
            return id;
        }
        self.extents.push(Some(extent));
        self.extents.len() - 1
    }

    pub(super) fn remove_extent(&mut self, id: ExtentId) {
        self.list_with(id, Ends::default());
        let Some(extent) = self.extents.get_mut(id).and_then(Option::take) else {
            return;
        };
        self.count_whole(extent.counted, Counted::default());
        debug_assert!(extent.mappings.is_empty(), "an extent leaves with mappings");
        self.held -= extent.size;
        self.free -= extent.free_bytes;
        self.ready -= extent.ready();
        self.vacant.push((id, extent.is_stale));
    }

    /// Adds a mapping of an extent, in which `live` allocations lie already.
    pub(super) fn add_mapping(&mut self, id: ExtentId, at: u64, live: u32) {
        let mapping = Mapping {
            at,
            searched: true,
            live,
            tag: Tag::Ready,
        };
        let Some(extent) = self.extents.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        extent.mappings.push(mapping);
        self.line.insert(at, id);
        self.mappings += 1;
        let (mut start, mut end) = (at, at + extent.size);
        if let Some((&first, &to)) = self.windows.range(..at).next_back()
            && to == at
        {
            start = first;
        }
        if let Some(to) = self.windows.remove(&end) {
            end = to;
        }
        self.windows.insert(start, end);
        for (start, free) in extent.free.all() {
            let range = at + start..at + free.end;
            self.runs.join(range, free.tag.class(), &EVERYWHERE);
        }
    }

    pub(super) fn stop_searching(&mut self, id: ExtentId, at: u64) {
        let Some(extent) = self.extents.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let mapping = extent.mappings.iter_mut().find(|mapping| mapping.at == at);
        let Some(mapping) = mapping.filter(|mapping| mapping.searched) else {
            return;
        };
        mapping.searched = false;
        // Bytes of an unsettled extent are in no run.
        for (start, free) in extent.free.all().filter(|_| extent.settled) {
            self.runs.cut(at + start..at + free.end);
        }
    }

    /// Removes a mapping in which no allocation lies.
    pub(super) fn remove_mapping(&mut self, id: ExtentId, at: u64) {
        self.stop_searching(id, at);
        if let Some(extent) = self.extent_mut(id) {
            let end = at + extent.size;
            extent.mappings.retain(|mapping| mapping.at != at);
            self.line.remove(&at);
            self.mappings -= 1;
            if let Some(window) = self.window(at) {
                self.windows.remove(&window.start);
                let left = [window.start..at, end..window.end];
                let left = left.into_iter().filter(|range| !range.is_empty());
                self.windows
                    .extend(left.map(|range| (range.start, range.end)));
            }
        }
    }

    /// Counts a removed mapping that is about to be unmapped (`begins`), or has been.
    pub(super) fn leave(&mut self, id: ExtentId, begins: bool) {
        if let Some(extent) = self.extent_mut(id) {
            extent.leaving = match begins {
                true => extent.leaving + 1,
                false => extent.leaving - 1,
            };
            self.note_ends(id);
        }
    }

    /// Sets whether an extent is settled. Free bytes of an unsettled extent are in no run and no
    /// list.
    pub(super) fn settle(&mut self, id: ExtentId, settled: bool) {
        let extent = self.extents.get_mut(id).and_then(Option::as_mut);
        let Some(extent) = extent.filter(|extent| extent.settled != settled) else {
            return;
        };
        extent.settled = settled;
        for mapping in extent.mappings.iter().filter(|mapping| mapping.searched) {
            for (start, free) in extent.free.all() {
                let range = mapping.at + start..mapping.at + free.end;
                if settled {
                    self.runs.join(range, free.tag.class(), &EVERYWHERE);
                } else {
                    self.runs.cut(range);
                }
            }
        }
        self.note_ends(id);
    }

    /// Marks free bytes of an extent as used. Returns the work that they wait for, in pieces.
    pub(super) fn take(&mut self, id: ExtentId, range: Range<u64>) -> Vec<(Range<u64>, Tag)> {
        let mut pieces = Vec::new();
        self.take_each(id, range, |piece, tag| pieces.push((piece, tag)));
        self.cut_shown();
        pieces
    }

    /// Marks free bytes of an extent as used, which [`cut_shown`](Self::cut_shown) takes out of
    /// their runs. Calls `see` with each piece and the work that it waits for.
    fn take_each(&mut self, id: ExtentId, range: Range<u64>, mut see: impl FnMut(Range<u64>, Tag)) {
        let Some(extent) = self.extents.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let mut from = range.start;
        let mut taken = 0;
        loop {
            let piece = extent.meeting(from, range.end).next();
            let piece = piece.map(|(start, free)| (start, free.end, free.tag.clone()));
            let Some((start, end, tag)) = piece else {
                break;
            };
            let (left, right) = (start.max(range.start), end.min(range.end));
            extent.cut(start, left..right);
            if tag == Tag::Ready {
                self.ready -= right - left;
            }
            taken += right - left;
            see(left..right, tag);
            from = right;
        }
        debug_assert!(taken == range.end - range.start, "bytes in use are taken");
        extent.free_bytes -= taken;
        self.free -= taken;
        show(&mut self.shown, extent, &range);
        self.note_ends(id);
    }

    fn cut_shown(&mut self) {
        let mut shown = std::mem::take(&mut self.shown);
        for_each_joined(&mut shown, |range| {
            self.runs.cut(range);
        });
        self.shown = shown;
    }

    pub(super) fn give(&mut self, id: ExtentId, range: Range<u64>, tag: Tag) {
        let class = tag.class();
        self.give_each(id, range, tag);
        self.join_shown(class);
    }

    fn join_shown(&mut self, class: Class) {
        let mut shown = std::mem::take(&mut self.shown);
        for_each_joined(&mut shown, |range| {
            self.runs.join(range, class, &EVERYWHERE);
        });
        self.shown = shown;
    }

    /// Marks bytes of an extent as free behind some work, which [`join_shown`](Self::join_shown)
    /// adds to the runs.
    fn give_each(&mut self, id: ExtentId, range: Range<u64>, tag: Tag) {
        self.clock += 1;
        let Some(extent) = self.extents.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let bytes = range.end - range.start;
        extent.free_bytes += bytes;
        self.free += bytes;
        if tag == Tag::Ready {
            self.ready += bytes;
        }
        if extent.is_free() {
            extent.freed_at = self.clock;
        }
        show(&mut self.shown, extent, &range);
        insert(&mut extent.free, range, tag);
        self.note_ends(id);
    }

    /// Returns the parts of extents that a mapped range of addresses shows, each with the address
    /// of its mapping, the last part first.
    pub(super) fn parts(&self, at: u64, size: u64) -> impl Iterator<Item = (Part, u64)> {
        let end = at + size;
        let mappings = self.line.range(..end).rev();
        mappings.map_while(move |(&mapping, &id)| {
            let last = mapping + self.extent(id)?.size;
            let range = at.max(mapping)..end.min(last);
            let part = range.start.checked_sub(mapping)?..range.end - mapping;
            (!range.is_empty()).then_some(((id, part), mapping))
        })
    }

    /// Calls `each` with the parts of extents that a mapped range of addresses shows and the
    /// address of each part's mapping, in the order of their addresses.
    fn for_each_part(
        &mut self,
        at: u64,
        size: u64,
        mut each: impl FnMut(&mut Self, ExtentId, Range<u64>, u64),
    ) {
        // Most ranges lie in one mapping.
        let mapping = self.line.range(..=at).next_back();
        if let Some((&mapping, &id)) = mapping
            && let Some(extent) = self.extent(id)
            && at + size <= mapping + extent.size
        {
            return each(self, id, at - mapping..at + size - mapping, mapping);
        }
        let mut walked = std::mem::take(&mut self.walked);
        walked.extend(self.parts(at, size));
        for ((id, range), mapping) in walked.drain(..).rev() {
            each(self, id, range, mapping);
        }
        self.walked = walked;
    }

    /// Marks free bytes at an address as used, by an allocation that may still fail. Returns the
    /// work that they wait for, in pieces.
    pub(super) fn take_run(&mut self, at: u64, size: u64) -> Vec<Taken> {
        let mut taken = Vec::new();
        self.for_each_part(at, size, |all, id, range, mapping| {
            all.count(id, mapping, None);
            taken.push((id, all.take(id, range)));
        });
        taken
    }

    /// Undoes [`take_run`](Self::take_run).
    pub(super) fn give_run_back(&mut self, at: u64, size: u64, taken: Vec<Taken>) {
        self.for_each_part(at, size, |all, id, _, mapping| {
            all.count(id, mapping, Some(&Tag::Ready));
        });
        self.give_back(taken);
    }

    pub(super) fn give_back(&mut self, taken: Vec<Taken>) {
        for (id, pieces) in taken {
            for (range, tag) in pieces {
                self.give(id, range, tag);
            }
        }
    }

    /// Counts an allocation in the mapping at `at`, or one less, which was freed behind `freed`.
    fn count(&mut self, id: ExtentId, at: u64, freed: Option<&Tag>) {
        let extent = self.extent_mut(id);
        let mappings = extent.map(|extent| &mut extent.mappings);
        let mapping = mappings.and_then(|all| all.iter_mut().find(|mapping| mapping.at == at));
        if let Some(mapping) = mapping {
            match freed {
                None => mapping.live += 1,
                Some(tag) => {
                    mapping.live -= 1;
                    mapping.tag.merge(tag);
                }
            }
        }
    }

    /// Returns the bytes left of the extent at an address if a range of addresses is taken, or 0 if
    /// the extent is not wholly free.
    fn left_at(&self, at: u64, range: &Range<u64>) -> u64 {
        let mapping = self.line.range(..=at).next_back();
        let extent = mapping.and_then(|(&mapping, &id)| Some((mapping, self.extent(id)?)));
        extent.map_or(0, |(mapping, extent)| {
            let end = mapping + extent.size;
            let taken = range.end.min(end) - range.start.max(mapping);
            if extent.is_free() {
                extent.size - taken
            } else {
                0
            }
        })
    }

    /// Returns the address for an allocation in a run: at its start, or at its end if that cuts
    /// fewer bytes of wholly free extents. A wholly free extent lies in the run entirely, so only
    /// the extent at the other end of the allocation is cut.
    pub(super) fn choose_end(&self, run: &Range<u64>, size: u64) -> u64 {
        let (at, last) = (run.start, run.end - size);
        if self.wholes == 0 || last == at {
            return at;
        }
        let (first, second) = (at..at + size, last..run.end);
        match self.left_at(first.end - 1, &first) <= self.left_at(last, &second) {
            true => at,
            false => last,
        }
    }

    /// Allocates free bytes at an address. Returns the work that they wait for.
    pub(super) fn allocate(&mut self, at: u64, size: u64) -> Tag {
        let mut work = Tag::Ready;
        self.for_each_part(at, size, |all, id, range, mapping| {
            all.count(id, mapping, None);
            all.take_each(id, range, |_, tag| work.merge(&tag));
        });
        self.cut_shown();
        work
    }

    pub(super) fn free_at(&mut self, at: u64, size: u64, tag: &Tag) {
        self.for_each_part(at, size, |all, id, range, mapping| {
            all.count(id, mapping, Some(tag));
            all.give_each(id, range, tag.clone());
        });
        self.join_shown(tag.class());
    }

    fn class_at(&self, range: &Range<u64>) -> Class {
        let parts = self.parts(range.start, range.end - range.start);
        let classes = parts.map(|((id, range), _)| {
            let extent = self.extent(id);
            extent.map_or(Class::Ready, |extent| extent.class(&range))
        });
        classes.fold(Class::Ready, Class::with)
    }

    fn note_ends(&mut self, id: ExtentId) {
        let Some(extent) = self.extents.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let new = extent.count();
        let old = std::mem::replace(&mut extent.counted, new);
        if !std::mem::replace(&mut extent.is_stale, true) {
            self.stale.push(id);
        }
        self.count_whole(old, new);
    }

    /// Updates the sums after the free bytes of an extent have changed.
    const fn count_whole(&mut self, old: Counted, new: Counted) {
        self.idle = self.idle - old.idle + new.idle;
        self.wholes = self.wholes - old.whole as usize + new.whole as usize;
    }
}

/// Notes the addresses at which bytes of an extent are searched. Bytes of an unsettled extent are
/// in no run.
fn show(shown: &mut Vec<Range<u64>>, extent: &Extent, range: &Range<u64>) {
    let searched = extent.mappings.iter();
    let searched = searched.filter(|mapping| mapping.searched && extent.settled);
    shown.extend(searched.map(|mapping| mapping.at + range.start..mapping.at + range.end));
}

/// Calls `see` with each range, adjacent ranges as one, and empties the list.
fn for_each_joined(ranges: &mut Vec<Range<u64>>, mut see: impl FnMut(Range<u64>)) {
    if ranges.len() > 1 {
        ranges.sort_unstable_by_key(|range| range.start);
    }
    let mut all = ranges.drain(..);
    let Some(mut joined) = all.next() else {
        return;
    };
    for range in all {
        if range.start == joined.end {
            joined.end = range.end;
        } else {
            see(std::mem::replace(&mut joined, range));
        }
    }
    see(joined);
}

#[cfg(test)]
mod tests {
    use super::{Extents, Tag};

    #[test]
    fn an_extent_whose_mapping_is_being_unmapped_serves_the_heap_and_not_the_pool() {
        let mut extents = Extents::default();
        let id = extents.add_extent(64);
        extents.add_mapping(id, 0, 0);
        extents.add_mapping(id, 128, 0);
        extents.give(id, 0..64, Tag::Ready);
        assert_eq!(extents.idle(), 64);
        extents.stop_searching(id, 0);
        extents.remove_mapping(id, 0);
        extents.leave(id, true);
        extents.list();
        assert_eq!(extents.whole(None).collect::<Vec<_>>(), [(64, id)]);
        assert_eq!(extents.idle(), 0);
        extents.check();
        extents.leave(id, false);
        assert_eq!(extents.idle(), 64);
        extents.check();
    }
}
