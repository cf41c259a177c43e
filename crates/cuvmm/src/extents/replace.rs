//! Replacement: other memory with the same bytes under the same addresses.
//!
//! Copies go through a second reservation, `beside`, in which one of the two memories is mapped as
//! well. By default that is the new memory, which is unmapped there and mapped in place of the old
//! when it has the bytes. If the new memory is host memory, which takes many times as long to map,
//! the old memory is mapped beside, and the new memory is mapped in its place before it has the
//! bytes. Either way, one extent is copied while another is mapped. While a copy to host memory runs,
//! giving access takes a millisecond, so all mappings beside are made before the first copy; while
//! copies from host memory run it takes no longer than alone, so each is made before its own copy
//! (`docs/decisions/17-growth-moves-exchanges.md`).
//!
//! The caller ensures that no work uses the extents, and that none begins. A panic of the driver is
//! undone as a refusal is. Only the extent whose call panicked may be lost, and its addresses.
//!
//! Keeps I-35.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::resume_unwind;

use cuvmm_driver::LocationKind;

use super::completed::Completed;
use super::copies::wait_for;
use super::failure::Failure;
use super::new_memory::{New, NewMemory};
use super::place::Unmapped;
use super::space::Space;
use super::taken::{NotPutBack, TakenOut};
use crate::error::MemoryError;
use crate::own::{Access, Event, Stream};

/// The copies to host memory that are queued before the first is waited for. By then the first has
/// most likely ended, and its memory beside is unmapped while the next copies run.
const AHEAD: usize = 3;

#[derive(Debug)]
pub(crate) struct NotReplaced {
    pub(crate) failure: Failure,
    /// Unmapped physicals without a use: new memory, or old memory that new memory has replaced.
    pub(crate) physicals: Vec<Unmapped>,
    /// Memory that was in place and could not be put back.
    pub(crate) lost: Option<NotPutBack>,
    /// Set if the stream may still be copying to or from the memory in place. The memory at the
    /// other end is kept.
    pub(crate) running: bool,
    /// The bytes of addresses to copy through that stay reserved, or may after a panic of the driver.
    pub(crate) reserved: u64,
}

impl NotReplaced {
    /// A failure before anything was done with the new memory.
    pub(crate) fn unchanged(error: impl Into<MemoryError>, new: New) -> Box<Self> {
        Self::before(Failure::Error(error.into()), new.into(), 0)
    }

    fn before(failure: Failure, new: NewMemory, reserved: u64) -> Box<Self> {
        Box::new(Self {
            failure,
            physicals: new.into_created(),
            lost: None,
            running: false,
            reserved,
        })
    }
}

struct Exchange<'a, 'b> {
    there: &'a mut Completed<'b>,
    /// The reservation to copy through, in which the ranges are mapped one behind the other.
    beside: Space,
    most: Access,
    stream: &'a Stream,
    /// The old memory taken out.
    old: TakenOut,
    /// New memory on its way to its places, with their offsets.
    moving: VecDeque<(u64, Unmapped)>,
    placed: Vec<Exchanged>,
    spare: Vec<Unmapped>,
    queued: bool,
    /// Set if a copy may be running.
    running: bool,
}

/// Old extents, and the ranges of the new memory that comes in their place.
struct Part {
    old: Range<u64>,
    new: Vec<Range<u64>>,
}

/// New memory in the place of old extents.
struct Exchanged {
    /// The range of the old extents.
    old: Range<u64>,
    new: Vec<Range<u64>>,
    bytes: Bytes,
    /// `false` while some of the new memory is not in place.
    is_whole: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bytes {
    /// Not copied, or unknown.
    Missing,
    Queued,
    There,
}

impl Completed<'_> {
    /// Copies bytes of extents to other memory and maps it in their place, where no device has more
    /// access than `most`. Bytes of an extent that no new memory covers are given up with it. The
    /// location of the first physical decides the method for all, but host memory that covers an
    /// extent in part is copied to beside. Returns the old memory, and the empty reservation that was
    /// copied through, whose drop frees its addresses (`cuMemAddressFree`).
    ///
    /// All or nothing, unless it is unknown whether a copy has ended: new host memory then stays
    /// mapped.
    pub(crate) fn replace(
        &mut self,
        new: impl Into<NewMemory>,
        most: Access,
        stream: &Stream,
    ) -> Result<(TakenOut, Space), Box<NotReplaced>> {
        let mut new = new.into();
        let ranges = new.ranges();
        let size = ranges.iter().map(|range| range.end - range.start).sum();
        let beside = Failure::of(|| {
            // In a capture, a copy would become part of the graph and not be executed.
            match stream.is_capturing()? {
                true => Err(MemoryError::Capturing),
                false => Space::reserve(self.space.device(), size),
            }
        });
        let beside = match beside {
            Ok(beside) => beside,
            Err(failure @ Failure::Error(_)) => return Err(NotReplaced::before(failure, new, 0)),
            Err(panic) => return Err(NotReplaced::before(panic, new, size)),
        };
        let mut exchange = Exchange {
            there: self,
            beside,
            most,
            stream,
            old: TakenOut::default(),
            moving: VecDeque::new(),
            placed: vec![],
            spare: vec![],
            queued: false,
            running: false,
        };
        let first = new.created().next();
        let to_host =
            first.is_some_and(|new| new.physical.location().kind == LocationKind::HOST_NUMA);
        let exchanged = Failure::of(|| match to_host && exchange.covers_whole_extents(&ranges) {
            true => exchange.in_place(&mut new),
            false => exchange.through_beside(ranges, &mut new),
        });
        exchange.spare.extend(new.into_created());
        match exchanged {
            Ok(()) => Ok((exchange.old, exchange.beside)),
            Err(failure) => Err(Box::new(exchange.undo(failure))),
        }
    }
}

impl Exchange<'_, '_> {
    /// Returns `true` if each range begins and ends where extents do.
    fn covers_whole_extents(&self, ranges: &[Range<u64>]) -> bool {
        ranges.iter().all(|range| {
            let mut old = self.there.space.extents_in(range.start, range.end);
            old.all(|extent| range.start <= extent.offset && extent.end() <= range.end)
        })
    }

    /// Copies to new memory beside, and maps it in the place of one old extent after the other
    /// while the next copies run.
    fn through_beside(
        &mut self,
        ranges: Vec<Range<u64>>,
        new: &mut NewMemory,
    ) -> Result<(), MemoryError> {
        let parts = self.parts(ranges);
        for (part, at, event) in self.copy_beside(parts, new)? {
            self.wait(event)?;
            self.exchange(part, at)?;
        }
        Ok(())
    }

    /// Maps new memory beside and queues the copies of all parts. Returns for each part where it
    /// lies beside, and an event behind its copy.
    fn copy_beside(
        &mut self,
        parts: Vec<Part>,
        new: &mut NewMemory,
    ) -> Result<Vec<(Part, u64, Option<Event>)>, MemoryError> {
        let one_by_one = matches!(new, NewMemory::OneByOne(..));
        if !one_by_one {
            self.place_beside(0, new)?;
        }
        let mut at = 0;
        let mut copies = vec![];
        let count = parts.len();
        for (number, part) in parts.into_iter().enumerate() {
            let first = at;
            if one_by_one {
                self.place_beside(at, &mut new.by_ref().take(part.new.len()))?;
            }
            for range in &part.new {
                let size = range.end - range.start;
                self.queued = true;
                let there = &self.there.space;
                self.beside
                    .copy_within(self.stream, at, there, range.start, size)?;
                at += size;
            }
            // The last copy needs no event: the stream is waited for.
            let event = match number + 1 == count {
                true => None,
                false => self.mark(),
            };
            copies.push((part, first, event));
        }
        Ok(copies)
    }

    fn place_beside(
        &mut self,
        mut at: u64,
        new: &mut dyn Iterator<Item = Result<(u64, Unmapped), MemoryError>>,
    ) -> Result<(), MemoryError> {
        for new in new {
            let (_, unmapped) = new?;
            let size = unmapped.size();
            let placed = self.beside.place(at, vec![unmapped]);
            placed.map_err(|failed| {
                self.spare.extend(failed.physicals);
                failed.error
            })?;
            at += size;
        }
        Ok(())
    }

    /// Groups the ranges of new memory by the old extents in whose place it comes.
    fn parts(&self, ranges: Vec<Range<u64>>) -> Vec<Part> {
        let mut parts: Vec<Part> = vec![];
        for range in ranges {
            let covered = self.there.space.extents_in(range.start, range.end);
            let old = covered.fold(range.clone(), |all, extent| {
                all.start.min(extent.offset)..all.end.max(extent.end())
            });
            match parts.last_mut() {
                Some(last) if last.old.end > old.start => {
                    last.old.end = last.old.end.max(old.end);
                    last.new.push(range);
                }
                _ => parts.push(Part {
                    old,
                    new: vec![range],
                }),
            }
        }
        parts
    }

    /// Takes old extents out, and maps the new memory, which lies beside from `at` on, in their
    /// place.
    fn exchange(&mut self, part: Part, mut at: u64) -> Result<(), MemoryError> {
        for range in part.new {
            let withdrawn = self.beside.never_used(0).withdraw_back(at)?;
            let moving = withdrawn.map(|unmapped| (range.start, unmapped));
            self.moving.extend(moving);
            at += range.end - range.start;
        }
        self.place(part.old, Bytes::There)
    }

    /// Maps the old memory beside, and copies from there to the new memory in place, each extent
    /// while the next is mapped.
    fn in_place(&mut self, new: &mut NewMemory) -> Result<(), MemoryError> {
        self.place_and_copy(new)?;
        self.leave(self.placed.len(), self.beside.size(), None)
    }

    /// Waits for the copies to the first `places` ranges, and unmaps the old memory beside up to
    /// `end`, which they were copied from.
    fn leave(&mut self, places: usize, end: u64, event: Option<Event>) -> Result<(), MemoryError> {
        self.wait(event)?;
        for placed in self.placed.iter_mut().take(places) {
            placed.bytes = Bytes::There;
        }
        let mut beside = self.beside.never_used(0);
        let there = beside.space.extents_in(0, end).map(|it| it.offset);
        let there: Vec<u64> = there.collect();
        there
            .into_iter()
            .try_for_each(|offset| Ok(beside.withdraw_back(offset).map(drop)?))
    }

    fn place_and_copy(&mut self, new: &mut NewMemory) -> Result<(), MemoryError> {
        let mut at = 0;
        for range in new.ranges() {
            for (extent, physical) in self.there.space.parts_in(range.start, range.end) {
                let memory = vec![Unmapped::fresh(physical.clone())];
                let placed = self.beside.place(at, memory);
                placed.map_err(|failed| failed.error)?;
                at += extent.size;
            }
        }
        let mut at = 0;
        let mut copies = VecDeque::new();
        for new in new {
            let (offset, unmapped) = new?;
            let size = unmapped.size();
            self.moving.push_back((offset, unmapped));
            self.place(offset..offset + size, Bytes::Missing)?;
            self.queued = true;
            let there = &self.there.space;
            there.copy_within(self.stream, offset, &self.beside, at, size)?;
            if let Some(placed) = self.placed.last_mut() {
                placed.bytes = Bytes::Queued;
            }
            at += size;
            copies.push_back((self.placed.len(), at, self.mark()));
            if copies.len() > AHEAD
                && let Some((places, end, event)) = copies.pop_front()
            {
                self.leave(places, end, event)?;
            }
        }
        Ok(())
    }

    /// Takes old extents out, and maps the new memory that is on its way in their place.
    fn place(&mut self, old: Range<u64>, bytes: Bytes) -> Result<(), MemoryError> {
        let extents = self.there.space.extents_in(old.start, old.end);
        let extents: Vec<u64> = extents.map(|extent| extent.offset).collect();
        match self.there.try_take_out(extents, &mut self.old) {
            Ok(taken) => taken?,
            Err(panic) => resume_unwind(panic),
        }
        self.placed.push(Exchanged {
            old,
            new: vec![],
            bytes,
            is_whole: false,
        });
        while let Some((offset, unmapped)) = self.moving.pop_front() {
            let end = offset + unmapped.size();
            let there = &mut self.there.space;
            let placed = there.place_for(offset, vec![unmapped], self.most);
            placed.map_err(|failed| {
                self.spare.extend(failed.physicals);
                failed.error
            })?;
            if let Some(placed) = self.placed.last_mut() {
                placed.new.push(offset..end);
                placed.is_whole = self.moving.is_empty();
            }
        }
        Ok(())
    }

    /// Records an event behind the queued work. Without an event, the stream is waited for.
    fn mark(&self) -> Option<Event> {
        let event = Event::new(self.stream.device());
        let marked = event.and_then(|event| {
            let uncaptured = event.record_uncaptured(self.stream)?;
            Ok(uncaptured.then_some(event))
        });
        marked
            .inspect_err(|error| log!(debug, %error, "a copy is waited for without an event"))
            .ok()
            .flatten()
    }

    fn wait(&mut self, event: Option<Event>) -> Result<(), MemoryError> {
        let event = event.as_ref();
        let passed = event.map(|event| self.stream.device().relaxed(|| event.synchronize()));
        if matches!(passed, Some(Ok(Ok(())))) {
            return Ok(());
        }
        wait_for(self.stream).map_err(|failed| {
            self.running = !failed.ended;
            failed.error.into()
        })
    }

    /// Waits for the queued copies, before what was done is undone.
    fn settle(&mut self) {
        if self.queued
            && !self.running
            && let Err(error) = self.wait(None)
        {
            log!(warn, %error, "it is not known what was copied");
            if !self.running {
                let placed = self.placed.iter_mut();
                let queued = placed.filter(|it| it.bytes == Bytes::Queued);
                queued.for_each(|it| it.bytes = Bytes::Missing);
            }
        }
    }

    fn undo(mut self, failure: Failure) -> NotReplaced {
        let settled = Failure::of(|| {
            self.settle();
            Ok(())
        });
        let Self {
            there,
            beside,
            mut old,
            moving,
            placed,
            spare: mut physicals,
            running,
            ..
        } = self;
        let size = beside.addresses();
        // First, so that a panic of the driver loses no mapping there.
        there.space.beside.push(beside);
        if let Err(panic) = settled {
            panic.into_error();
        }
        physicals.extend(moving.into_iter().map(|(_, unmapped)| unmapped));
        if !running && let Some(beside) = there.space.beside.last_mut() {
            empty(beside, &mut physicals);
        }
        // Where new memory stays in the place of old, and the rest of that new memory.
        let (mut replaced, mut rest) = (vec![], TakenOut::default());
        for placed in placed {
            let mut new = TakenOut::default();
            // Memory that a copy may be writing stays mapped.
            let stays = match running && placed.bytes != Bytes::There {
                true => !placed.new.is_empty(),
                false => {
                    let mut here = there.space.never_used(placed.old.start);
                    let mut ranges = placed.new.iter().rev();
                    ranges.any(|range| here.take_insisting(range.start, &mut new).is_err())
                }
            };
            if stays && placed.bytes == Bytes::Missing {
                let new = placed.new.iter();
                new.for_each(|range| there.space.quarantine(range.start));
            } else if stays {
                // The memory has the bytes, or will have them when the copy ends.
                match placed.is_whole {
                    true => replaced.push(placed.old),
                    false => replaced.extend(placed.new),
                }
                rest.append(std::mem::take(&mut new));
            }
            physicals.extend(new.into_parts().map(|(_, unmapped)| unmapped));
        }
        physicals.extend(old.split_off(&replaced));
        old.append(rest);
        let lost = there.space.put_back(old).err();
        let is_empty = |beside: &mut Space| beside.count() + beside.stuck_count() == 0;
        let empty = there.space.beside.pop_if(is_empty);
        NotReplaced {
            failure,
            physicals,
            lost,
            running,
            reserved: size - empty.map_or(0, Space::give_back),
        }
    }
}

/// Unmaps what lies in a reservation that was copied through, and that no copy uses.
fn empty(beside: &mut Space, physicals: &mut Vec<Unmapped>) {
    let extents: Vec<u64> = beside.extents().map(|extent| extent.offset).collect();
    for offset in extents {
        let here = beside.never_used(0).withdraw_back(offset);
        physicals.extend(here.ok().flatten());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::{Call, Location, Ordinal, PhysicalHandle, PhysicalProps};

    use super::*;
    use crate::device::Device;
    use crate::extents::rig::{G, Rig, rig};
    use crate::own::Physical;

    fn handles(space: &Space) -> Vec<PhysicalHandle> {
        let parts = space.parts_in(0, space.size());
        parts.map(|(_, physical)| physical.as_raw()).collect()
    }

    /// Makes physicals for places given as offset and size in granules.
    fn new(rig: &Rig, places: &[(u64, u64)]) -> (New, Vec<PhysicalHandle>) {
        let at = |&(offset, granules): &(u64, u64)| (offset * G, rig.memory(granules));
        let new: New = places.iter().map(at).collect();
        let raw = new.iter().map(|(_, unmapped)| unmapped.physical.as_raw());
        let raw = raw.collect();
        (new, raw)
    }

    fn raw(physicals: &[Unmapped]) -> Vec<PhysicalHandle> {
        physicals.iter().map(|it| it.physical.as_raw()).collect()
    }

    /// Replaces three extents in the middle of a space of five. Returns the old handles, the new
    /// handles, the outcome, and the space.
    #[allow(clippy::type_complexity)]
    fn replaced(
        rig: &Rig,
        stream: &Stream,
        fail: impl FnOnce(),
    ) -> (
        Vec<PhysicalHandle>,
        Vec<PhysicalHandle>,
        Result<(TakenOut, Space), Box<NotReplaced>>,
        Space,
    ) {
        let mut space = rig.space(5);
        let before = handles(&space);
        let (new, raw) = new(rig, &[(1, 1), (2, 1), (3, 1)]);
        fail();
        let outcome = space.promised().replace(new, Access::ReadWrite, stream);
        rig.heal();
        (before, raw, outcome, space)
    }

    #[test]
    fn new_memory_lies_in_the_places_of_the_old() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let mut space = rig.space(5);
        let before = handles(&space);
        let (new, raw) = new(&rig, &[(1, 2), (3, 1)]);
        let old = space.promised().replace(new, Access::Read, &stream);
        let old = old.unwrap().0.into_parts();
        let old: Vec<_> = old
            .map(|(at, old)| (at / G, old.physical.as_raw()))
            .collect();
        assert_eq!(old, [(1, before[1]), (2, before[2]), (3, before[3])]);
        assert_eq!(handles(&space), [before[0], raw[0], raw[1], before[4]]);
        assert_eq!(
            (space.most_at(G), space.most_at(3 * G)),
            (Access::Read, Access::Read)
        );
        assert_eq!((space.bytes(), space.beside.len()), (5 * G, 0));
    }

    #[test]
    fn where_it_cannot_be_copied_to_nothing_has_changed() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        for call in [
            Call::MemAddressReserve,
            Call::MemMap,
            Call::StreamSynchronize,
        ] {
            let (before, raws, outcome, space) = replaced(&rig, &stream, || {
                rig.fail_from(call, 1);
            });
            let failed = outcome.unwrap_err();
            let mut given = raw(&failed.physicals);
            given.sort();
            assert_eq!(given, raws, "{call:?}");
            assert!(failed.lost.is_none() && !failed.running, "{call:?}");
            assert_eq!(
                (handles(&space), space.beside.len()),
                (before, 0),
                "{call:?}"
            );
        }
    }

    #[test]
    fn what_is_stuck_where_it_was_to_be_copied_to_is_kept() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let (before, raws, outcome, mut space) = replaced(&rig, &stream, || {
            rig.fail(Call::MemSetAccess, 1);
            (1..=2).for_each(|nth| rig.fail(Call::MemUnmap, nth));
        });
        let failed = outcome.unwrap_err();
        assert_eq!(raw(&failed.physicals), raws[1..]);
        assert_eq!((space.beside.len(), space.stuck_bytes()), (1, G));
        rig.fail_from(Call::MemUnmap, 1);
        assert!(space.promised().retry_stuck().is_err());
        assert_eq!((space.beside.len(), space.stuck_bytes()), (1, G));
        rig.heal();
        space.promised().retry_stuck().unwrap();
        assert_eq!(space.stuck_bytes(), 0);
        // Memory copied to beside, and cannot be unmapped there.
        let (_, raws, outcome, mut other) = replaced(&rig, &stream, || {
            (1..=4).for_each(|nth| rig.fail(Call::MemUnmap, nth));
        });
        let failed = outcome.unwrap_err();
        assert_eq!(raw(&failed.physicals), raws[1..]);
        assert_eq!((other.beside.len(), other.stuck_bytes()), (1, G));
        other.promised().retry_stuck().unwrap();
        assert_eq!(other.stuck_bytes(), 0);
        assert_eq!(handles(&space), before);
    }

    #[test]
    fn an_extent_is_cut() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let mut space = Space::reserve(&rig.device, 9 * G).unwrap();
        let memory = vec![rig.memory(1), rig.memory(8)];
        space.place_for(0, memory, Access::ReadWrite).unwrap();
        let before = handles(&space);
        let (new, raw) = new(&rig, &[(1, 2), (3, 1), (6, 1)]);
        let old = space.promised().replace(new, Access::ReadWrite, &stream);
        let old: Vec<_> = old.unwrap().0.handles().collect();
        assert_eq!(old, before[1..]);
        let places: Vec<u64> = space.extents().map(|extent| extent.offset / G).collect();
        assert_eq!(places, [0, 1, 3, 6]);
        assert_eq!(handles(&space)[1..], raw);
    }

    #[test]
    fn an_extent_is_taken_out_after_all_copies_from_it() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let mut space = Space::reserve(&rig.device, 5 * G).unwrap();
        let memory = vec![rig.memory(1), rig.memory(2), rig.memory(2)];
        space.place_for(0, memory, Access::ReadWrite).unwrap();
        let before = handles(&space);
        // The last extent is copied to both.
        let (new, _) = new(&rig, &[(0, 4), (4, 1)]);
        rig.fail_from(Call::StreamSynchronize, 1);
        let failed = space.promised().replace(new, Access::ReadWrite, &stream);
        assert!(failed.unwrap_err().lost.is_none());
        assert_eq!(rig.count(Call::MemUnmap), 2, "those of the copies");
        rig.heal();
        assert_eq!(handles(&space), before);
    }

    #[test]
    fn new_memory_that_cannot_be_taken_out_again_keeps_the_bytes() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let mut space = Space::reserve(&rig.device, 16 * G).unwrap();
        let memory = vec![rig.memory(8), rig.memory(8)];
        space.place_for(0, memory, Access::ReadWrite).unwrap();
        let before = handles(&space);
        // The second cut fails: its old extent cannot be unmapped, and of the first cut the first
        // extent cannot.
        let (new, raw) = new(&rig, &[(0, 2), (2, 1), (8, 1)]);
        // Two of the first cut beside, its old extent, one of the second cut beside, its old
        // extent; then the second extent of the first cut, and its first extent twice.
        for nth in [5, 7, 8] {
            rig.fail(Call::MemUnmap, nth);
        }
        let failed = space.promised().replace(new, Access::ReadWrite, &stream);
        let failed = failed.unwrap_err();
        rig.heal();
        assert!(failed.lost.is_none());
        assert_eq!(handles(&space), [raw[0], raw[1], before[1]]);
        let free: Vec<_> = failed
            .physicals
            .iter()
            .map(|it| it.physical.as_raw())
            .collect();
        assert_eq!(free, [raw[2], before[0]]);
    }

    #[test]
    fn what_is_being_copied_to_stays_where_it_is() {
        let rig = rig();
        let stream = rig.busy_stream();
        let (before, _, outcome, mut space) = replaced(&rig, &stream, || {
            rig.fail_from(Call::EventSynchronize, 1);
            rig.fail_from(Call::StreamSynchronize, 1);
        });
        let failed = outcome.unwrap_err();
        assert!(failed.running && failed.physicals.is_empty());
        assert_eq!((space.beside.len(), space.stuck_bytes()), (1, 3 * G));
        assert_eq!(handles(&space), before);
        rig.finish(&stream);
        space.promised().retry_stuck().unwrap();
        assert_eq!(space.stuck_bytes(), 0);
    }

    #[test]
    fn where_old_memory_cannot_be_taken_out_all_of_it_stays() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        // For each extent the new memory is unmapped beside, and then the old memory in place.
        let (before, raws, outcome, space) = replaced(&rig, &stream, || {
            rig.fail(Call::MemUnmap, 4);
        });
        let failed = outcome.unwrap_err();
        assert_eq!(raw(&failed.physicals), [raws[1], raws[2], raws[0]]);
        assert!(failed.lost.is_none());
        assert_eq!(handles(&space), before);
    }

    // I-35
    #[test]
    fn where_new_memory_cannot_be_placed_the_old_is_put_back() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let (before, raws, outcome, space) = replaced(&rig, &stream, || {
            rig.fail(Call::MemMap, 5);
        });
        let failed = outcome.unwrap_err();
        assert_eq!(raw(&failed.physicals), [raws[1], raws[2], raws[0]]);
        assert!(failed.lost.is_none());
        assert_eq!(handles(&space), before);
    }

    #[test]
    fn new_memory_that_cannot_be_taken_out_again_stays_in_the_place_of_the_old() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let (before, raws, outcome, space) = replaced(&rig, &stream, || {
            rig.fail(Call::MemMap, 5);
            rig.fail(Call::MemUnmap, 6);
            rig.fail(Call::MemUnmap, 7);
        });
        let failed = outcome.unwrap_err();
        assert_eq!(raw(&failed.physicals), [raws[1], raws[2], before[1]]);
        assert!(failed.lost.is_none());
        let after = [before[0], raws[0], before[2], before[3], before[4]];
        assert_eq!(handles(&space), after);
    }

    const DEVICE: Location = Location::device(Ordinal(0));
    const HOST: Location = Location::host_numa(0);

    fn memory_at(device: &Device, location: Location) -> Unmapped {
        let builder = Physical::builder(device, G);
        let builder = builder.with_props(PhysicalProps::at(location));
        Unmapped::fresh(builder.create().unwrap())
    }

    fn space_at(rig: &Rig, location: Location, count: u64) -> Space {
        let mut space = Space::reserve(&rig.device, count * G).unwrap();
        let memory = (0..count).map(|_| memory_at(&rig.device, location));
        let placed = space.place_for(0, memory.collect(), Access::ReadWrite);
        placed.unwrap();
        space
    }

    /// New memory for each extent of a space; device memory for host memory is created one by one.
    fn new_for(space: &Space, to: Location) -> NewMemory {
        let from = space.extents().next().unwrap().location;
        let (device, places) = (space.device().clone(), space.extents());
        let places: Vec<u64> = places.map(|extent| extent.offset).collect();
        if (from, to) == (HOST, DEVICE) {
            let ranges = places.into_iter().map(|at| at..at + G).collect();
            return NewMemory::one_by_one(ranges, move |_| {
                let physical = Physical::builder(&device, G).create()?;
                Ok(Unmapped::fresh(physical))
            });
        }
        let new = places.into_iter().map(|at| (at, memory_at(&device, to)));
        new.collect::<New>().into()
    }

    #[test]
    fn a_failure_while_extents_are_moved_one_by_one_leaves_all_of_them_as_they_were() {
        // More extents than are copied before the first is waited for.
        const COUNT: u64 = AHEAD as u64 + 3;
        let calls = [
            Call::MemAddressReserve,
            Call::MemCreate,
            Call::MemMap,
            Call::MemSetAccess,
            Call::MemUnmap,
            Call::MemcpyDtoDAsync,
        ];
        let ways = [(DEVICE, DEVICE), (DEVICE, HOST), (HOST, DEVICE)];
        for ((from, to), call) in ways.iter().flat_map(|way| calls.map(|call| (*way, call))) {
            let mut hits = 0;
            // Each extent is mapped and unmapped twice, and in a roll-back once more.
            for nth in 1..=3 * COUNT {
                let rig = rig();
                let stream = Stream::new(&rig.device).unwrap();
                let mut space = space_at(&rig, from, COUNT);
                let (before, new) = (handles(&space), new_for(&space, to));
                rig.fail(call, nth);
                let outcome = space.promised().replace(new, Access::ReadWrite, &stream);
                rig.heal();
                assert_eq!(space.stuck_bytes(), 0, "{call:?} {nth}");
                match outcome {
                    Ok((old, _)) => {
                        assert_eq!(old.handles().collect::<Vec<_>>(), before, "{call:?} {nth}");
                        assert!(space.extents().all(|extent| extent.location == to));
                    }
                    Err(failed) => {
                        hits += 1;
                        assert!(failed.lost.is_none() && !failed.running, "{call:?} {nth}");
                        assert_eq!(handles(&space), before, "{call:?} {nth}");
                    }
                }
                // What came back has been dropped, and nothing else was kept or lost.
                assert_eq!(rig.machine.live().physicals as u64, COUNT, "{call:?} {nth}");
                assert_eq!(rig.machine.live().mappings as u64, COUNT, "{call:?} {nth}");
            }
            let creates = call != Call::MemCreate || (from, to) == (HOST, DEVICE);
            assert_eq!(hits > 0, creates, "{call:?} from {from} to {to}");
        }
    }

    #[test]
    fn what_is_being_copied_from_the_host_stays_where_it_is() {
        let rig = rig();
        let stream = rig.busy_stream();
        let mut space = space_at(&rig, HOST, 3);
        let (before, new) = (handles(&space), new_for(&space, DEVICE));
        // The third extent cannot be created, and it is not known whether the copies have ended.
        rig.fail(Call::MemCreate, 3);
        rig.fail_from(Call::StreamSynchronize, 1);
        let failed = space.promised().replace(new, Access::ReadWrite, &stream);
        let failed = failed.unwrap_err();
        rig.heal();
        assert!(failed.running && failed.physicals.is_empty() && failed.lost.is_none());
        assert_eq!((handles(&space), rig.count(Call::MemUnmap)), (before, 0));
        assert_eq!((space.beside.len(), space.stuck_bytes()), (1, 2 * G));
        rig.finish(&stream);
        assert!(rig.device.lost().is_none());
        space.promised().retry_stuck().unwrap();
        assert_eq!((space.stuck_bytes(), space.bytes()), (0, 3 * G));
    }

    #[test]
    fn a_panic_of_the_driver_is_undone() {
        let calls = [
            Call::MemAddressReserve,
            Call::MemCreate,
            Call::MemMap,
            Call::MemSetAccess,
            Call::MemcpyDtoDAsync,
            Call::MemUnmap,
            Call::StreamSynchronize,
        ];
        for (from, to) in [(DEVICE, HOST), (HOST, DEVICE), (DEVICE, DEVICE)] {
            for (call, nth) in calls
                .iter()
                .flat_map(|&call| (1..=6).map(move |nth| (call, nth)))
            {
                let rig = rig();
                let stream = Stream::new(&rig.device).unwrap();
                let mut space = space_at(&rig, from, 3);
                let (before, new) = (handles(&space), new_for(&space, to));
                rig.panic_at(call, nth);
                let replaced = space.promised().replace(new, Access::ReadWrite, &stream);
                let Err(failed) = replaced else {
                    continue;
                };
                assert!(matches!(failed.failure, Failure::Panic(_)) && !failed.running);
                // The addresses of an extent whose call panicked may be in use.
                let lost = failed.lost.map_or(vec![], |lost| lost.ranges());
                let changes = [Call::MemMap, Call::MemSetAccess, Call::MemUnmap].contains(&call);
                let most = usize::from(changes);
                assert!(lost.len() <= most, "{call:?} {nth}: {lost:?}");
                // Its mapping is stuck, here or beside, and unmapped once the driver is healed.
                let (live, counted) = (rig.machine.live().mappings as u64, space.count());
                let stuck = space.stuck_count();
                assert!(
                    live <= counted + stuck && stuck <= 2,
                    "{call:?} {nth}: {stuck}"
                );
                let after = handles(&space);
                assert!(after.iter().all(|handle| before.contains(handle)));
                assert_eq!(after.len() + lost.len(), 3, "{call:?} {nth}");
            }
        }
    }

    #[test]
    fn where_the_driver_panics_all_that_running_copies_use_stays_mapped() {
        for (from, to) in [(HOST, DEVICE), (DEVICE, HOST)] {
            for (call, nth) in [Call::MemMap, Call::MemcpyDtoDAsync]
                .iter()
                .flat_map(|&call| (2..=3).map(move |nth| (call, nth)))
            {
                let rig = rig();
                let stream = rig.busy_stream();
                let mut space = space_at(&rig, from, 3);
                let new = new_for(&space, to);
                // Memory that moves to the host is mapped beside before it is taken out.
                let first = match (call, to) {
                    (Call::MemMap, HOST) => 3,
                    _ => 0,
                };
                rig.panic_at(call, first + nth);
                rig.fail_from(Call::StreamSynchronize, 1);
                let failed = space.promised().replace(new, Access::ReadWrite, &stream);
                let failed = failed.unwrap_err();
                rig.heal();
                assert!(matches!(failed.failure, Failure::Panic(_)) && failed.running);
                drop(failed);
                rig.finish(&stream);
                assert!(rig.device.lost().is_none(), "{call:?} {nth}");
            }
        }
    }
}
