//! Creation and release of a region's physicals.

use std::ops::Range;

use cuvmm_driver::PhysicalProps;

use super::Region;
use crate::error::MemoryError;
use crate::extents::{Extent, New, Unmapped};
use crate::own::{Physical, Place};

impl Region {
    pub(super) fn physical(&self, size: u64, place: &Place) -> Result<Physical, MemoryError> {
        Physical::builder(place.through(self.device()), size)
            .with_props(self.props_at(place))
            .create()
    }

    pub(super) fn props_at(&self, place: &Place) -> PhysicalProps {
        let mut props = self.props;
        props.location = place.location();
        props
    }

    /// Returns the offsets and sizes of the extents to be made for a part of a range that is
    /// committed, or is about to be.
    pub(super) fn extents_for(
        &self,
        range: &Range<u64>,
        part: Range<u64>,
    ) -> impl Iterator<Item = (u64, u64)> + use<> {
        let before = match self.sizes.shrinks() {
            true => self.committed.start_before(range.start),
            false => range.start,
        };
        let Range { mut start, end } = part;
        let sizes = self
            .sizes
            .cover(self.device().granule(), start - before..end - before);
        sizes.map(move |size| {
            let offset = start;
            start += size;
            (offset, size)
        })
    }

    /// Obtains memory for copies of extents, which will be overwritten.
    pub(super) fn memory_for_copies(&self, extents: &[Extent]) -> Result<New, MemoryError> {
        let offsets = extents.iter().map(|extent| extent.offset);
        if let Some(family) = self.supply.family() {
            let sizes: Vec<u64> = extents.iter().map(|extent| extent.size).collect();
            return Ok(offsets.zip(family.lend_exactly(&sizes)?).collect());
        }
        let one = |extent: &Extent| {
            let place = self.space.place_of(extent.offset);
            let place = place.unwrap_or_else(|| self.device().into());
            let physical = self.physical(extent.size, &place)?;
            Ok((extent.offset, Unmapped::fresh(physical)))
        };
        extents.iter().map(one).collect()
    }

    /// Obtains memory at a place for the bytes of extents, which will be overwritten.
    pub(super) fn overwritten(
        &self,
        extents: &[Extent],
        place: &Place,
        new: &mut Vec<(u64, Unmapped)>,
    ) -> Result<(), MemoryError> {
        for extent in extents {
            let ready = self.prepared.as_ref();
            let ready =
                ready.and_then(|prepared| prepared.take(extent.size, &self.props_at(place)));
            let physical = ready.map_or_else(|| self.physical(extent.size, place), Ok)?;
            new.push((extent.offset, Unmapped::fresh(physical)));
        }
        Ok(())
    }

    /// Releases an unmapped physical. Host memory is kept for later relocations if the region has
    /// prepared host memory.
    pub(super) fn release_unmapped(&self, unmapped: Unmapped) {
        if let Some(prepared) = &self.prepared {
            let props = self.props_at(&unmapped.physical.place());
            prepared.keep(unmapped.physical, &props);
        }
    }
}
