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
//! The caller ensures that no work uses the extents, and that none begins.
//!
//! Keeps I-35.

use std::collections::VecDeque;
use std::ops::Range;

use cuvmm_driver::LocationKind;

use super::completed::Completed;
use super::copies::wait_for;
use super::place::Unmapped;
use super::space::Space;
use super::taken::{NotPutBack, TakenOut};
use crate::error::MemoryError;
use crate::own::{Access, Event, Stream};

/// Physicals, each with the offset to map it at, in ascending order.
pub(crate) type New = Vec<(u64, Unmapped)>;

/// The copies to host memory that are queued before the first is waited for. By then the first has
/// most likely ended, and its memory beside is unmapped while the next copies run.
const AHEAD: usize = 3;

#[derive(Debug)]
pub(crate) struct NotReplaced {
    pub(crate) error: MemoryError,
    /// Unmapped physicals without a use: new memory, or old memory that new memory has replaced.
    pub(crate) physicals: Vec<Unmapped>,
    /// Memory that was in place and could not be put back.
    pub(crate) lost: Option<NotPutBack>,
    /// Set if the stream may still be copying to or from the memory in place. The memory at the
    /// other end is kept.
    pub(crate) running: bool,
}

impl NotReplaced {
    /// A failure before anything was done with the new memory.
    pub(crate) fn unchanged(error: impl Into<MemoryError>, new: New) -> Box<Self> {
        Box::new(Self {
            error: error.into(),
            physicals: new.into_iter().map(|(_, unmapped)| unmapped).collect(),
            lost: None,
            running: false,
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
    /// extent in part is copied to beside. Returns the old memory.
    ///
    /// All or nothing, unless it is unknown whether a copy has ended: new host memory then stays
    /// mapped.
    pub(crate) fn replace(
        &mut self,
        new: New,
        most: Access,
        stream: &Stream,
    ) -> Result<TakenOut, Box<NotReplaced>> {
        // In a capture, a copy would become part of the graph and not be executed.
        match stream.is_capturing() {
            Ok(false) => {}
            Ok(true) => return Err(NotReplaced::unchanged(MemoryError::Capturing, new)),
            Err(error) => return Err(NotReplaced::unchanged(error, new)),
        }
        let size = new.iter().map(|(_, unmapped)| unmapped.size()).sum();
        let beside = match Space::reserve(self.space.device(), size) {
            Ok(beside) => beside,
            Err(error) => return Err(NotReplaced::unchanged(error, new)),
        };
        let mut exchange = Exchange {
            there: self,
            beside,
            most,
            stream,
            old: TakenOut::default(),
            placed: vec![],
            spare: vec![],
            queued: false,
            running: false,
        };
        let kind = |(_, unmapped): &(_, Unmapped)| unmapped.physical.location().kind;
        let exchanged = match new.first().map(kind) {
            Some(LocationKind::HOST_NUMA) if exchange.covers_whole_extents(&new) => {
                exchange.in_place(new)
            }
            _ => exchange.through_beside(new),
        };
        match exchanged {
            Ok(()) => Ok(exchange.old),
            Err(error) => Err(Box::new(exchange.undo(error))),
        }
    }
}

impl Exchange<'_, '_> {
    /// Returns `true` if each part of the new memory begins and ends where extents do.
    fn covers_whole_extents(&self, new: &New) -> bool {
        new.iter().all(|(offset, unmapped)| {
            let (start, end) = (*offset, offset + unmapped.size());
            let mut old = self.there.space.extents_in(start, end);
            old.all(|extent| start <= extent.offset && extent.end() <= end)
        })
    }

    /// Copies to new memory beside, and maps it in the place of one old extent after the other
    /// while the next copies run.
    fn through_beside(&mut self, new: New) -> Result<(), MemoryError> {
        let parts = self.parts(&new);
        let mut memory = new.into_iter().map(|(_, unmapped)| unmapped);
        let copies = self.copy_beside(parts, &mut memory);
        self.spare.extend(memory);
        for (part, at, event) in copies? {
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
        memory: &mut impl Iterator<Item = Unmapped>,
    ) -> Result<Vec<(Part, u64, Option<Event>)>, MemoryError> {
        let one_by_one = self.copies_from_host(&parts);
        if !one_by_one {
            self.place_beside(0, memory.by_ref().collect())?;
        }
        let mut at = 0;
        let mut copies = vec![];
        let count = parts.len();
        for (number, part) in parts.into_iter().enumerate() {
            let first = at;
            if one_by_one {
                self.place_beside(at, memory.by_ref().take(part.new.len()).collect())?;
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

    /// Returns `true` if all old memory of some parts is host memory.
    fn copies_from_host(&self, parts: &[Part]) -> bool {
        let old = parts.iter().map(|part| &part.old);
        let mut old = old.flat_map(|old| self.there.space.extents_in(old.start, old.end));
        old.all(|extent| extent.location.kind == LocationKind::HOST_NUMA)
    }

    fn place_beside(&mut self, at: u64, memory: Vec<Unmapped>) -> Result<(), MemoryError> {
        let placed = self.beside.place(at, memory);
        placed.map_err(|failed| {
            self.spare.extend(failed.physicals);
            failed.error
        })
    }

    /// Groups new memory by the old extents in whose place it comes.
    fn parts(&self, new: &New) -> Vec<Part> {
        let mut parts: Vec<Part> = vec![];
        for (offset, unmapped) in new {
            let range = *offset..offset + unmapped.size();
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
        let Range { start, end } = part.old;
        let mut new = vec![];
        let mut outcome = Ok(());
        for range in part.new {
            match self.beside.never_used(0).withdraw_back(at) {
                Ok(withdrawn) => new.extend(withdrawn.map(|unmapped| (range.start, unmapped))),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
            at += range.end - range.start;
        }
        if outcome.is_ok() {
            let old = self.there.space.extents_in(start, end);
            let old: Vec<u64> = old.map(|extent| extent.offset).collect();
            outcome = self.there.take_out(old, &mut self.old);
        }
        match outcome {
            Ok(()) => self.place(start..end, new, Bytes::There),
            Err(error) => {
                self.spare.extend(new.into_iter().map(|(_, new)| new));
                Err(error.into())
            }
        }
    }

    /// Maps the old memory beside, and copies from there to the new memory in place, each extent
    /// while the next is mapped.
    fn in_place(&mut self, new: New) -> Result<(), MemoryError> {
        let mut new = new.into_iter();
        let placed = self.place_and_copy(&mut new);
        self.spare.extend(new.map(|(_, unmapped)| unmapped));
        placed?;
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

    fn place_and_copy(
        &mut self,
        new: &mut std::vec::IntoIter<(u64, Unmapped)>,
    ) -> Result<(), MemoryError> {
        let mut memory = vec![];
        for (offset, unmapped) in new.as_slice() {
            let parts = self.there.space.parts_in(*offset, offset + unmapped.size());
            memory.extend(parts.map(|(_, physical)| Unmapped::fresh(physical.clone())));
        }
        let placed = self.beside.place(0, memory);
        placed.map_err(|failed| failed.error)?;
        let mut at = 0;
        let mut copies = VecDeque::new();
        for (offset, unmapped) in new {
            let size = unmapped.size();
            let range = offset..offset + size;
            let covered = self.there.space.extents_in(range.start, range.end);
            let covered: Vec<u64> = covered.map(|extent| extent.offset).collect();
            if let Err(error) = self.there.take_out(covered, &mut self.old) {
                self.spare.push(unmapped);
                return Err(error.into());
            }
            self.place(range, vec![(offset, unmapped)], Bytes::Missing)?;
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

    /// Maps new memory in the place of old extents that were taken out.
    fn place(&mut self, old: Range<u64>, new: New, bytes: Bytes) -> Result<(), MemoryError> {
        let mut placed = Exchanged {
            old,
            new: vec![],
            bytes,
            is_whole: false,
        };
        let mut outcome = Ok(());
        let mut new = new.into_iter();
        for (offset, unmapped) in new.by_ref() {
            let end = offset + unmapped.size();
            let there = &mut self.there.space;
            if let Err(failed) = there.place_for(offset, vec![unmapped], self.most) {
                self.spare.extend(failed.physicals);
                outcome = Err(failed.error);
                break;
            }
            placed.new.push(offset..end);
        }
        self.spare.extend(new.map(|(_, unmapped)| unmapped));
        placed.is_whole = outcome.is_ok();
        self.placed.push(placed);
        outcome
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

    fn undo(mut self, error: MemoryError) -> NotReplaced {
        self.settle();
        let Self {
            there,
            mut beside,
            mut old,
            placed,
            spare: mut physicals,
            running,
            ..
        } = self;
        if !running {
            let extents = beside.extents().map(|extent| extent.offset);
            for offset in extents.collect::<Vec<u64>>() {
                let here = beside.never_used(0).withdraw_back(offset);
                physicals.extend(here.ok().flatten());
            }
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
        if beside.count() + beside.stuck_count() > 0 {
            there.space.beside.push(beside);
        }
        NotReplaced {
            error,
            physicals,
            lost,
            running,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::{Call, Location, Ordinal, PhysicalHandle, PhysicalProps};

    use super::*;
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
        Result<TakenOut, Box<NotReplaced>>,
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
        let old = old.unwrap().into_parts();
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
        assert_eq!((space.beside.len(), space.stuck_bytes()), (0, 0));
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
        let old: Vec<_> = old.unwrap().handles().collect();
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

    #[test]
    fn a_failure_while_extents_are_moved_one_by_one_leaves_all_of_them_as_they_were() {
        // More extents than are copied before the first is waited for.
        const COUNT: u64 = AHEAD as u64 + 3;
        let calls = [
            Call::MemAddressReserve,
            Call::MemMap,
            Call::MemSetAccess,
            Call::MemUnmap,
            Call::MemcpyDtoDAsync,
        ];
        let (device, host) = (Location::device(Ordinal(0)), Location::host_numa(0));
        let ways = [(device, device), (device, host), (host, device)];
        for ((from, to), call) in ways.iter().flat_map(|way| calls.map(|call| (*way, call))) {
            // Each extent is mapped and unmapped twice, and in a roll-back once more.
            for nth in 1..=3 * COUNT {
                let rig = rig();
                let stream = Stream::new(&rig.device).unwrap();
                let memory = |location| {
                    let builder = Physical::builder(&rig.device, G);
                    let memory = builder.with_props(PhysicalProps::at(location)).create();
                    Unmapped::fresh(memory.unwrap())
                };
                let mut space = Space::reserve(&rig.device, COUNT * G).unwrap();
                let old = (0..COUNT).map(|_| memory(from)).collect();
                space.place_for(0, old, Access::ReadWrite).unwrap();
                let before = handles(&space);
                let new: New = (0..COUNT).map(|at| (at * G, memory(to))).collect();
                let raws: Vec<_> = new.iter().map(|(_, it)| it.physical.as_raw()).collect();
                rig.fail(call, nth);
                let outcome = space.promised().replace(new, Access::ReadWrite, &stream);
                rig.heal();
                assert_eq!(space.stuck_bytes(), 0, "{call:?} {nth}");
                let Err(failed) = outcome else {
                    assert_eq!(handles(&space), raws, "{call:?} {nth}");
                    continue;
                };
                assert!(failed.lost.is_none() && !failed.running, "{call:?} {nth}");
                assert_eq!(handles(&space), before, "{call:?} {nth}");
                let back = raw(&failed.physicals);
                let times = |one: &PhysicalHandle| back.iter().filter(|it| *it == one).count();
                assert!(raws.iter().all(|one| times(one) == 1), "{call:?} {nth}");
            }
        }
    }

    #[test]
    fn device_memory_is_mapped_beside_one_by_one_for_copies_from_host_memory() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let host = || {
            let builder = Physical::builder(&rig.device, G);
            let memory = builder.with_props(PhysicalProps::at(Location::host_numa(0)));
            Unmapped::fresh(memory.create().unwrap())
        };
        let mut of_host = Space::reserve(&rig.device, 3 * G).unwrap();
        let memory = (0..3).map(|_| host()).collect();
        of_host.place_for(0, memory, Access::ReadWrite).unwrap();
        // The third extent cannot be mapped beside: the copies of two are queued, or none yet.
        for (mut space, copies) in [(of_host, 2), (rig.space(3), 0)] {
            let (new, _) = new(&rig, &[(0, 1), (1, 1), (2, 1)]);
            let before = rig.count(Call::MemcpyDtoDAsync);
            rig.fail(Call::MemSetAccess, 3);
            let failed = space.promised().replace(new, Access::ReadWrite, &stream);
            assert!(failed.unwrap_err().lost.is_none());
            assert_eq!(rig.count(Call::MemcpyDtoDAsync) - before, copies);
            rig.heal();
        }
    }
}
