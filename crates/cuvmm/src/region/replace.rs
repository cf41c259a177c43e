//! Other memory with the same bytes under the same addresses.
//!
//! Whoever calls has seen to it that no work uses the extents, and lets none begin.

use std::collections::BTreeSet;
use std::ops::Range;

use super::Region;
use super::completed::Completed;
use super::copies::wait_for;
use super::fence::{Fence, Unused};
use super::place::Unmapped;
use super::space::Space;
use super::taken::{NotPutBack, TakenOut};
use crate::error::MemoryError;
use crate::own::{Access, Stream};

/// Memory, and the offset where it is to be placed.
type New = Vec<(u64, Unmapped)>;

/// Memory was not replaced.
#[derive(Debug)]
pub(crate) struct NotReplaced {
    pub(crate) error: MemoryError,
    /// What is mapped nowhere and of no use: new memory, or old memory whose place new memory keeps.
    pub(crate) physicals: Vec<Unmapped>,
    /// What was there and could not be put back.
    pub(crate) lost: Option<NotPutBack>,
    /// Whether the stream may be copying still. It reads what is there, and what it writes to is kept.
    pub(crate) running: bool,
}

impl NotReplaced {
    /// Nothing was done with the new memory.
    pub(crate) fn unchanged(error: impl Into<MemoryError>, new: New) -> Box<Self> {
        Box::new(Self {
            error: error.into(),
            physicals: new.into_iter().map(|(_, unmapped)| unmapped).collect(),
            lost: None,
            running: false,
        })
    }
}

impl Completed<'_> {
    /// Copies the bytes of extents to other memory and puts that in their places, where no device has
    /// more access than `most`. It begins and ends where extents do. Returns the old memory. All or
    /// nothing.
    pub(crate) fn replace(
        &mut self,
        new: New,
        most: Access,
        stream: &Stream,
    ) -> Result<TakenOut, Box<NotReplaced>> {
        let new = self.space.copy_to(new, stream)?;
        let covered = new.iter().flat_map(|(offset, unmapped)| {
            let extents = self.space.extents_in(*offset, offset + unmapped.size());
            extents.map(|extent| extent.offset)
        });
        let covered: BTreeSet<u64> = covered.collect();
        let mut old = TakenOut::default();
        if let Err(error) = self.take_out(covered.into_iter().rev(), &mut old) {
            return Err(Box::new(NotReplaced {
                error: error.into(),
                physicals: new.into_iter().map(|(_, unmapped)| unmapped).collect(),
                lost: self.space.put_back(old).err(),
                running: false,
            }));
        }
        let mut placed: Vec<Range<u64>> = vec![];
        let mut new = new.into_iter();
        while let Some((offset, unmapped)) = new.next() {
            let size = unmapped.size();
            match self.space.place_for(offset, vec![unmapped], most) {
                Ok(()) => placed.push(offset..offset + size),
                Err(failed) => {
                    let mut physicals = failed.physicals;
                    physicals.extend(new.map(|(_, unmapped)| unmapped));
                    // It has the same bytes: where it cannot be taken out it stays.
                    placed.retain(|range| {
                        let mut new = self.space.never_used(range.start);
                        match new.withdraw_back(range.start) {
                            Ok(here) => physicals.extend(here),
                            Err(_) => return true,
                        }
                        false
                    });
                    physicals.extend(old.split_off(&placed));
                    return Err(Box::new(NotReplaced {
                        error: failed.error,
                        physicals,
                        lost: self.space.put_back(old).err(),
                        running: false,
                    }));
                }
            }
        }
        Ok(old)
    }
}

impl Space {
    /// Writes the bytes of extents to other memory, at addresses that are had for that alone.
    fn copy_to(&mut self, new: New, stream: &Stream) -> Result<New, Box<NotReplaced>> {
        let (offsets, memory): (Vec<u64>, Vec<Unmapped>) = new.into_iter().unzip();
        let sizes: Vec<u64> = memory.iter().map(Unmapped::size).collect();
        let not = |error, physicals, running| {
            Box::new(NotReplaced {
                error,
                physicals,
                lost: None,
                running,
            })
        };
        let mut beside = match Self::reserve(self.device(), sizes.iter().sum()) {
            Ok(beside) => beside,
            Err(error) => return Err(not(error, memory, false)),
        };
        if let Err(failed) = beside.place(0, memory) {
            if failed.stuck > 0 {
                self.beside.push(beside);
            }
            return Err(not(failed.error, failed.physicals, false));
        }
        let mut at = 0;
        let mut queued = Ok(());
        for (&offset, &size) in offsets.iter().zip(&sizes) {
            queued = queued.and_then(|()| beside.copy_within(stream, at, self, offset, size));
            at += size;
        }
        let waited = match wait_for(stream) {
            Err(failed) if !failed.ended => {
                // The copy may be running: its memory stays where it is.
                self.beside.push(beside);
                return Err(not(failed.error.into(), vec![], true));
            }
            waited => waited.map_err(|failed| failed.error),
        };
        let mut copied = Ok(());
        let mut memory = vec![];
        let extents: Vec<u64> = beside.extents().map(|extent| extent.offset).collect();
        for offset in extents {
            match beside.never_used(0).withdraw_back(offset) {
                Ok(here) => memory.extend(here),
                Err(error) => copied = Err(error.into()),
            }
        }
        if beside.count() > 0 {
            self.beside.push(beside);
        }
        let copied = copied.and(queued).and_then(|()| Ok(waited?));
        match copied {
            Ok(()) => Ok(offsets.into_iter().zip(memory).collect()),
            Err(error) => Err(not(error, memory, false)),
        }
    }
}

impl Region {
    /// Puts physicals in the places of extents, to be read and written, and lets the old memory go.
    /// What is lost where even undoing it failed is committed no more.
    pub(super) fn replace(
        &mut self,
        new: New,
        stream: &Stream,
        proof: Unused,
    ) -> Result<(), MemoryError> {
        let offsets: Vec<u64> = new.iter().map(|&(offset, _)| offset).collect();
        let mut space = self.space.proved(proof);
        let Err(failed) = space.replace(new, Access::ReadWrite, stream) else {
            return Ok(());
        };
        if failed.running {
            for offset in offsets {
                let withdrawn = self.withdrawn.entry(offset);
                let fence = withdrawn.or_insert_with(Fence::complete);
                fence.merge(Fence::stream(stream.clone()));
            }
        }
        let Some(lost) = failed.lost else {
            return Err(failed.error);
        };
        tracing::error!(error = %lost.error, offset = lost.offset, "extents are lost");
        let ranges = lost.ranges();
        for range in &ranges {
            self.committed.remove(range.clone());
        }
        Err(MemoryError::Lost {
            ranges,
            cause: Box::new(failed.error),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use cuvmm_driver::host::{HostDriver, HostOptions};
    use cuvmm_driver::{Call, Driver, PhysicalHandle};

    use super::*;
    use crate::device::Device;
    use crate::own::Physical;
    use crate::region::rig::{G, Rig, rig};

    fn handles(space: &Space) -> Vec<PhysicalHandle> {
        let parts = space.parts_in(0, space.size());
        parts.map(|(_, physical)| physical.as_raw()).collect()
    }

    /// Memory for some places, each of so many granules at an offset in granules.
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

    /// Replaces three extents in the middle of a space of five; returns what it had, what was to come, what
    /// came of it, and the space.
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
        assert_eq!(old, [(3, before[3]), (2, before[2]), (1, before[1])]);
        assert_eq!(handles(&space), [before[0], raw[0], raw[1], before[4]]);
        assert_eq!(
            (space.most_at(G), space.most_at(3 * G)),
            (Access::Read, Access::Read)
        );
        assert_eq!((space.bytes(), space.beside.len()), (5 * G, 0));
    }

    #[test]
    fn the_bytes_are_the_same() {
        let driver: Arc<dyn Driver> = Arc::new(HostDriver::new(HostOptions::new()));
        let device = Device::open(driver, 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let builder = Region::builder(&device, 3 * G).largest_extent(G);
        let mut region = builder.reserve().unwrap();
        region.commit(0..3 * G).unwrap();
        let bytes = [(0, b"zero"), (G, b"one."), (2 * G, b"two.")];
        for (at, bytes) in bytes {
            region.write(&stream, at, bytes).unwrap();
        }
        let before = handles(&region.space);
        let new = [0, G, 2 * G].map(|at| (at, Physical::new(&device, G).unwrap()));
        let new = new.map(|(at, physical)| (at, Unmapped::fresh(physical)));
        let proof = Unused::never_used();
        region.replace(new.into(), &stream, proof).unwrap();
        let after = handles(&region.space);
        assert!(after.iter().all(|handle| !before.contains(handle)));
        for (at, bytes) in bytes {
            let mut read = [0; 4];
            region.read(&stream, at, &mut read).unwrap();
            assert_eq!(&read, bytes);
        }
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
            assert_eq!(raw(&failed.physicals), raws, "{call:?}");
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
            rig.fail(Call::MemUnmap, 1);
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
        // What was copied there, and cannot be unmapped there.
        let (_, raws, outcome, mut other) = replaced(&rig, &stream, || {
            rig.fail(Call::MemUnmap, 1);
            rig.fail(Call::MemUnmap, 2);
        });
        let failed = outcome.unwrap_err();
        assert_eq!(raw(&failed.physicals), raws[1..]);
        assert_eq!((other.beside.len(), other.stuck_bytes()), (1, G));
        other.promised().retry_stuck().unwrap();
        assert_eq!(other.stuck_bytes(), 0);
        assert_eq!(handles(&space), before);
    }

    #[test]
    fn what_is_being_copied_to_stays_where_it_is() {
        let rig = rig();
        let stream = rig.busy_stream();
        let (before, _, outcome, mut space) = replaced(&rig, &stream, || {
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
        // Three are unmapped where they were copied to, and one of the old.
        let (before, raws, outcome, space) = replaced(&rig, &stream, || {
            rig.fail(Call::MemUnmap, 5);
        });
        let failed = outcome.unwrap_err();
        assert_eq!(raw(&failed.physicals), raws);
        assert!(failed.lost.is_none());
        assert_eq!(handles(&space), before);
    }

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
            rig.fail(Call::MemUnmap, 7);
            rig.fail(Call::MemUnmap, 8);
        });
        let failed = outcome.unwrap_err();
        assert_eq!(raw(&failed.physicals), [raws[1], raws[2], before[1]]);
        assert!(failed.lost.is_none());
        let after = [before[0], raws[0], before[2], before[3], before[4]];
        assert_eq!(handles(&space), after);
    }

    /// A region with an extent in each of two granules, and memory for both.
    fn region(rig: &Rig) -> (Region, New) {
        let builder = Region::builder(&rig.device, 2 * G).largest_extent(G);
        let mut region = builder.reserve().unwrap();
        region.commit(0..2 * G).unwrap();
        (region, new(rig, &[(0, 1), (1, 1)]).0)
    }

    #[test]
    fn what_is_lost_of_a_region_is_committed_no_more() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let (mut region, new) = region(&rig);
        // The second that is taken out, and putting back the first, twice.
        rig.fail(Call::MemUnmap, 4);
        rig.fail(Call::MemMap, 3);
        rig.fail(Call::MemMap, 4);
        let replaced = region.replace(new, &stream, Unused::never_used());
        let Err(MemoryError::Lost { ranges, cause }) = replaced else {
            panic!("{replaced:?}");
        };
        let [range] = &ranges[..] else {
            panic!("one range");
        };
        assert_eq!(*range, G..2 * G);
        assert!(matches!(*cause, MemoryError::Call(_)));
        assert!(region.is_committed(0..G) && !region.is_committed(G..2 * G));
        assert_eq!(region.extents().len(), 1);
        assert!(region.withdrawn.is_empty(), "nothing is being copied");
    }

    #[test]
    fn a_region_keeps_what_is_being_copied_until_the_copy_has_passed() {
        let rig = rig();
        let stream = rig.busy_stream();
        let (mut region, new) = region(&rig);
        rig.fail_from(Call::StreamSynchronize, 1);
        let replaced = region.replace(new, &stream, Unused::never_used());
        assert!(matches!(replaced, Err(MemoryError::Call(_))));
        rig.heal();
        assert_eq!((region.committed(), region.quarantined()), (2 * G, 2 * G));
        let fences: Vec<_> = region.withdrawn.iter().collect();
        assert_eq!(fences.len(), 2);
        for (_, fence) in fences {
            assert!(!fence.is_complete() && fence.precedes(&stream));
        }
        rig.finish(&stream);
    }
}
