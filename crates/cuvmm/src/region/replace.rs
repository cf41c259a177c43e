//! Replacement of a region's memory, and the region after a failed replacement.
//!
//! Keeps I-130.

use std::collections::BTreeMap;
use std::ops::Range;

use cuvmm_driver::PhysicalHandle;

use super::Region;
use crate::error::MemoryError;
use crate::extents::{Fence, New, NewMemory, NotReplaced, Space, TakenOut, Unmapped, Unused};
use crate::own::{Access, Physical, Stream};

/// A replacement of a region's memory. Its end, also by a panic of the driver in a roll-back, leaves
/// nothing committed that has no memory, or other memory than before or after.
struct Replacing<'a> {
    region: &'a mut Region,
    stream: &'a Stream,
    /// The ranges of the extents that new memory replaces.
    places: Vec<Range<u64>>,
    /// The memory in them, by its offsets.
    before: BTreeMap<u64, PhysicalHandle>,
    /// The physicals that the tenant's pool has lent, each with its number of mappings.
    lent: BTreeMap<PhysicalHandle, (Physical, usize)>,
    /// The mappings that the tenant is charged for, those of new memory included.
    charged: u64,
    /// The bytes of addresses to copy through, which count as the pool's.
    through: u64,
    is_settled: bool,
}

impl Region {
    /// Replaces the memory of extents by physicals, to be read and written, and releases the old
    /// memory. Extents that even the roll-back lost are no longer committed.
    pub(super) fn replace(
        &mut self,
        new: impl Into<NewMemory>,
        stream: &Stream,
        proof: Unused,
    ) -> Result<(), MemoryError> {
        let new = new.into();
        let replacing = Replacing::begin(self, &new, stream);
        let mut space = replacing.region.space.proved(proof);
        let replaced = space.replace(new, Access::ReadWrite, stream);
        replacing.settle(replaced)
    }
}

impl<'a> Replacing<'a> {
    fn begin(region: &'a mut Region, new: &NewMemory, stream: &'a Stream) -> Self {
        let ranges = new.ranges();
        let places = region.replaced_by(&ranges);
        let here = region.parts_in(&places);
        let before = here.map(|(at, physical)| (at, physical.as_raw())).collect();
        let mut lent: BTreeMap<PhysicalHandle, (Physical, usize)> = BTreeMap::new();
        if region.supply.family().is_some() {
            let old = region.parts_in(&places).map(|(_, physical)| physical);
            let new = new.created().map(|unmapped| &unmapped.physical);
            for physical in old.chain(new) {
                let lent = lent.entry(physical.as_raw());
                lent.or_insert_with(|| (physical.clone(), 0)).1 += 1;
            }
        }
        let charged = region.space.count() + region.space.stuck_count() + ranges.len() as u64;
        let through = ranges.iter().map(|range| range.end - range.start).sum();
        if let Some(family) = region.supply.family() {
            family.tenant.hold_addresses(through);
        }
        Self {
            region,
            stream,
            places,
            before,
            lent,
            charged,
            through,
            is_settled: false,
        }
    }

    fn settle(
        mut self,
        replaced: Result<(TakenOut, Space), Box<NotReplaced>>,
    ) -> Result<(), MemoryError> {
        self.is_settled = true;
        let failed = match replaced {
            Ok((old, beside)) => {
                self.lent.clear();
                let old = old.into_parts().map(|(_, unmapped)| unmapped);
                self.region.release_replaced(old.collect(), self.charged);
                // Last: the driver may panic in it.
                self.free_addresses(beside.give_back());
                return Ok(());
            }
            Err(failed) => failed,
        };
        self.free_addresses(self.through - failed.reserved);
        if failed.running {
            self.note_copies();
        }
        let rest = failed.lost.iter().flat_map(|lost| lost.rest.handles());
        let unmapped = failed.physicals.iter().map(|it| it.physical.as_raw());
        let known: Vec<PhysicalHandle> = unmapped.chain(rest).collect();
        let mut back = failed.physicals;
        back.extend(self.not_in(known));
        let ranges = failed.lost.map(|lost| {
            log!(error, error = %lost.error, offset = lost.offset, "extents are lost");
            // Of an extent that could not be put back, new memory may have replaced a part.
            let ranges = self.region.end_commits(&lost.ranges());
            back.extend(lost.rest.into_parts().map(|(_, unmapped)| unmapped));
            ranges
        });
        // Last: the driver may panic in it.
        self.region.release_replaced(back, self.charged);
        let error = failed.failure.into_error();
        Err(match ranges {
            None => error,
            Some(ranges) => MemoryError::Lost {
                ranges,
                cause: Box::new(error),
            },
        })
    }

    fn free_addresses(&self, bytes: u64) {
        if let Some(family) = self.region.supply.family() {
            family.tenant.free_addresses(bytes);
        }
    }

    /// Keeps the memory in place until the copies on the stream are complete.
    fn note_copies(&mut self) {
        let region = &mut *self.region;
        let here = |place: &Range<u64>| region.space.extents_in(place.start, place.end);
        for extent in self.places.iter().flat_map(here) {
            let withdrawn = region.withdrawn.entry(extent.offset);
            let fence = withdrawn.or_insert_with(Fence::complete);
            fence.merge(Fence::stream(self.stream.clone()));
        }
    }

    /// Returns the lent physicals that are neither in place nor known, once for each mapping. The
    /// tenant's pool gets them, and quarantines those that are stuck in a mapping until that ends.
    fn not_in(&mut self, known: Vec<PhysicalHandle>) -> Vec<Unmapped> {
        let here = self.region.parts_in(&self.places);
        let here = here.map(|(_, physical)| physical.as_raw());
        for handle in here.chain(known) {
            if let Some((_, count)) = self.lent.get_mut(&handle) {
                *count = count.saturating_sub(1);
            }
        }
        let lent = std::mem::take(&mut self.lent).into_values();
        let times = |(physical, count)| std::iter::repeat_n(physical, count);
        lent.flat_map(times).map(Unmapped::fresh).collect()
    }
}

impl Drop for Replacing<'_> {
    /// Settles after a panic in the roll-back: copies may run, and new memory may lack the bytes.
    fn drop(&mut self) {
        if self.is_settled {
            return;
        }
        let new = self.region.parts_in(&self.places);
        let new = new.filter(|(at, it)| self.before.get(at) != Some(&it.as_raw()));
        let new: Vec<u64> = new.map(|(at, _)| at).collect();
        for offset in new {
            self.region.space.quarantine(offset);
        }
        self.note_copies();
        self.region.end_commits(&self.places);
        let back = self.not_in(vec![]);
        self.region.release_replaced(back, self.charged);
    }
}

impl Region {
    /// Returns the ranges of the extents that new memory of these ranges replaces.
    fn replaced_by(&self, new: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut places: Vec<Range<u64>> = vec![];
        for range in new {
            let here = self.space.extents_in(range.start, range.end);
            for extent in here {
                match places.last() {
                    Some(last) if last.end > extent.offset => {}
                    _ => places.push(extent.offset..extent.end()),
                }
            }
        }
        places
    }

    /// Returns the memory in some ranges, with its offsets.
    fn parts_in(&self, places: &[Range<u64>]) -> impl Iterator<Item = (u64, &Physical)> {
        let here = move |place: &Range<u64>| self.space.parts_in(place.start, place.end);
        let here = places.iter().flat_map(here);
        here.map(|(extent, physical)| (extent.offset, physical))
    }

    /// Ends the commits of all parts of some ranges that have no memory. Returns them.
    fn end_commits(&mut self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        let holes = ranges.iter().flat_map(|range| self.holes(range));
        let ended: Vec<Range<u64>> = holes.flat_map(|hole| self.committed.parts(hole)).collect();
        for range in &ended {
            self.committed.remove(range.clone());
        }
        ended
    }

    /// Releases physicals that a replacement has unmapped or not mapped. In a tenant, ends the
    /// charge for those of the `charged` mappings that are gone.
    fn release_replaced(&self, unmapped: Vec<Unmapped>, charged: u64) {
        match self.supply.family() {
            None => unmapped
                .into_iter()
                .for_each(|unmapped| self.release_unmapped(unmapped)),
            Some(family) => {
                let left = self.space.count() + self.space.stuck_count();
                // As for memory that is not placed.
                family.give_back_used(unmapped, charged.saturating_sub(left));
            }
        }
    }

    /// Releases memory that was obtained for copies and is not needed.
    pub(super) fn give_copies_back(&self, new: New) {
        let mapped = self.space.count() + self.space.stuck_count();
        let charged = mapped + new.len() as u64;
        let new = new.into_iter().map(|(_, unmapped)| unmapped);
        self.release_replaced(new.collect(), charged);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use cuvmm_driver::{Call, Driver};
    use cuvmm_model::host::{HostDriver, HostOptions};

    use super::*;
    use crate::device::Device;
    use crate::extents::rig::{G, Rig, rig};

    fn handles(region: &Region) -> Vec<PhysicalHandle> {
        region.space.physicals().map(Physical::as_raw).collect()
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
        let before = handles(&region);
        let new = [0, G, 2 * G].map(|at| (at, Physical::new(&device, G).unwrap()));
        let new: New = new
            .map(|(at, physical)| (at, Unmapped::fresh(physical)))
            .into();
        let proof = Unused::never_used();
        region.replace(new, &stream, proof).unwrap();
        let after = handles(&region);
        assert!(after.iter().all(|handle| !before.contains(handle)));
        for (at, bytes) in bytes {
            let mut read = [0; 4];
            region.read(&stream, at, &mut read).unwrap();
            assert_eq!(&read, bytes);
        }
    }

    /// A region with one extent in each of two granules, and new memory for both.
    fn region(rig: &Rig) -> (Region, New) {
        let builder = Region::builder(&rig.device, 2 * G).largest_extent(G);
        let mut region = builder.reserve().unwrap();
        region.commit(0..2 * G).unwrap();
        let new = [0, G].map(|at| (at, rig.memory(1)));
        (region, new.into())
    }

    /// Fails taking out the second extent, and both attempts to put back the first.
    fn lose_first(rig: &Rig) {
        rig.fail(Call::MemUnmap, 4);
        rig.fail(Call::MemMap, 4);
        rig.fail(Call::MemMap, 5);
    }

    #[test]
    fn what_is_lost_of_a_region_is_committed_no_more() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let (mut region, new) = region(&rig);
        lose_first(&rig);
        let replaced = region.replace(new, &stream, Unused::never_used());
        let Err(MemoryError::Lost { ranges, cause }) = replaced else {
            panic!("{replaced:?}");
        };
        let [range] = &ranges[..] else {
            panic!("one range");
        };
        assert_eq!(*range, 0..G);
        assert!(matches!(*cause, MemoryError::Call(_)));
        assert!(!region.is_committed(0..G) && region.is_committed(G..2 * G));
        assert_eq!(region.extents().len(), 1);
        assert!(region.withdrawn.is_empty(), "no copy is running");
    }

    #[test]
    fn what_is_lost_is_committed_no_more_if_the_driver_panics_in_a_release() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let (mut region, new) = region(&rig);
        lose_first(&rig);
        rig.panic_at(Call::MemRelease, 1);
        let replace = || region.replace(new, &stream, Unused::never_used());
        assert!(catch_unwind(AssertUnwindSafe(replace)).is_err());
        assert!(!region.is_committed(0..G) && region.is_committed(G..2 * G));
    }

    #[test]
    fn a_region_keeps_what_is_being_copied_until_the_copy_has_passed() {
        let rig = rig();
        let stream = rig.busy_stream();
        let (mut region, new) = region(&rig);
        rig.fail_from(Call::EventSynchronize, 1);
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
