//! Creation and release of a region's physicals.

use std::ops::Range;

use cuvmm_driver::PhysicalProps;

use super::Region;
use crate::driver::memory_option;
use crate::error::{MemoryError, Shortage};
use crate::extents::{Extent, New, Unmapped};
use crate::own::{Physical, Place};

/// An extent to be created.
pub(super) struct Planned {
    pub(super) offset: u64,
    pub(super) size: u64,
    pub(super) place: Place,
}

impl Region {
    /// Creates the physicals of planned extents: all of them or none.
    pub(super) fn create(&self, planned: &[Planned]) -> Result<New, MemoryError> {
        let asked = planned.iter().map(|one| (one.size, &one.place));
        let one = |planned: &Planned| {
            let physical = self.physical(planned.size, &planned.place)?;
            Ok((planned.offset, Unmapped::fresh(physical)))
        };
        let created: Result<New, _> = planned.iter().map(one).collect();
        // By now all that was created is released.
        created.map_err(|error| self.with_figures(error, asked))
    }

    /// Adds the figures to the error of a device that had no memory for one of several physicals,
    /// each with its size and place. Those created before are released already.
    pub(super) fn with_figures<'a>(
        &self,
        error: MemoryError,
        asked: impl Iterator<Item = (u64, &'a Place)>,
    ) -> MemoryError {
        let MemoryError::Create {
            location, cause, ..
        } = error
        else {
            return error;
        };
        let there: Vec<_> = asked.filter(|(_, it)| it.location() == location).collect();
        let (true, Some((_, Place::Device(device)))) = (cause.is_out_of_memory(), there.first())
        else {
            return error;
        };
        let wanted = there.iter().map(|(size, _)| size).sum();
        let free = device.memory_info().map_or(0, |info| info.free);
        let device_has = (free, device.total_memory());
        let mut shortage = Box::new(Shortage::of_region(wanted, self.held(), device_has));
        shortage.memory_set_by = memory_option(device.driver().kind());
        MemoryError::OutOfMemory { cause, shortage }
    }

    /// Returns the place of the extent at an offset.
    pub(super) fn place_at(&self, offset: u64) -> Place {
        let place = self.space.place_of(offset);
        place.unwrap_or_else(|| self.device().into())
    }

    fn physical(&self, size: u64, place: &Place) -> Result<Physical, MemoryError> {
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
        let planned = extents.iter().map(|extent| Planned {
            offset: extent.offset,
            size: extent.size,
            place: self.place_at(extent.offset),
        });
        self.create(&planned.collect::<Vec<_>>())
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
