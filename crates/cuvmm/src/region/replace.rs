//! Replacement of a region's memory, and the region after a failed replacement.

use std::collections::BTreeMap;
use std::ops::Range;

use cuvmm_driver::PhysicalHandle;

use super::Region;
use crate::error::MemoryError;
use crate::extents::{Fence, New, NewMemory, Unmapped, Unused};
use crate::own::{Access, Physical, Stream};

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
        let ranges = new.ranges();
        let places = self.replaced_by(&ranges);
        // What the tenant's pool has lent, each physical with its number of mappings.
        let mut lent: BTreeMap<PhysicalHandle, u64> = BTreeMap::new();
        if self.supply.family().is_some() {
            let new = new.created().map(|unmapped| unmapped.physical.as_raw());
            for handle in self.handles_in(&places).into_iter().chain(new) {
                *lent.entry(handle).or_default() += 1;
            }
        }
        // In a tenant, the mappings of the new memory are charged already.
        let charged = self.space.count() + self.space.stuck_count() + ranges.len() as u64;
        let mut space = self.space.proved(proof);
        let failed = match space.replace(new, Access::ReadWrite, stream) {
            Ok(old) => {
                let old = old.into_parts().map(|(_, unmapped)| unmapped);
                self.release_replaced(old.collect(), charged);
                return Ok(());
            }
            Err(failed) => failed,
        };
        if failed.running {
            let here = |place: &Range<u64>| self.space.extents_in(place.start, place.end);
            for extent in places.iter().flat_map(here) {
                let withdrawn = self.withdrawn.entry(extent.offset);
                let fence = withdrawn.or_insert_with(Fence::complete);
                fence.merge(Fence::stream(stream.clone()));
            }
        }
        let rest = failed.lost.iter().flat_map(|lost| lost.rest.handles());
        let unmapped = failed.physicals.iter().map(|it| it.physical.as_raw());
        let unmapped = unmapped.chain(rest);
        for handle in self.handles_in(&places).into_iter().chain(unmapped) {
            if let Some(count) = lent.get_mut(&handle) {
                *count = count.saturating_sub(1);
            }
        }
        let mut back = failed.physicals;
        back.extend(self.stuck_of(&lent));
        self.release_replaced(back, charged);
        let Some(lost) = failed.lost else {
            return Err(failed.error);
        };
        log!(error, error = %lost.error, offset = lost.offset, "extents are lost");
        // Of an extent that could not be put back, new memory may have replaced a part.
        let holes = |range: &Range<u64>| self.holes(range);
        let holes = lost.ranges().iter().flat_map(holes).collect::<Vec<_>>();
        let ranges = holes
            .into_iter()
            .flat_map(|hole| self.committed.parts(hole));
        let ranges: Vec<Range<u64>> = ranges.collect();
        let rest = lost.rest.into_parts().map(|(_, unmapped)| unmapped);
        let charged = self.space.count() + self.space.stuck_count();
        self.release_replaced(rest.collect(), charged);
        for range in &ranges {
            self.committed.remove(range.clone());
        }
        Err(MemoryError::Lost {
            ranges,
            cause: Box::new(failed.error),
        })
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

    fn handles_in(&self, places: &[Range<u64>]) -> Vec<PhysicalHandle> {
        let here = |place: &Range<u64>| self.space.parts_in(place.start, place.end);
        let here = places.iter().flat_map(here);
        here.map(|(_, physical)| physical.as_raw()).collect()
    }

    /// The physicals that are left only in stuck mappings, once for each of `lost` mappings. The
    /// tenant's pool gets them, and quarantines them until the mappings end.
    fn stuck_of(&self, lost: &BTreeMap<PhysicalHandle, u64>) -> Vec<Unmapped> {
        let mut stuck: BTreeMap<PhysicalHandle, &Physical> = BTreeMap::new();
        if lost.values().any(|&count| count > 0) {
            let all = self.space.stuck_physicals().into_iter();
            stuck.extend(all.map(|physical| (physical.as_raw(), physical)));
        }
        let mut found = vec![];
        for (handle, &count) in lost {
            if let Some(&physical) = stuck.get(handle) {
                found.extend((0..count).map(|_| Unmapped::fresh(physical.clone())));
            }
        }
        found
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
                family.give_back_used(unmapped, charged - left);
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

    #[test]
    fn what_is_lost_of_a_region_is_committed_no_more() {
        let rig = rig();
        let stream = Stream::new(&rig.device).unwrap();
        let (mut region, new) = region(&rig);
        // Fails taking out the second extent, and both attempts to put back the first.
        rig.fail(Call::MemUnmap, 4);
        rig.fail(Call::MemMap, 4);
        rig.fail(Call::MemMap, 5);
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
