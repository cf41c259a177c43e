//! Relocation: moves committed memory to another place under the same addresses, such as to host
//! memory when the device is short of memory, and back.

use std::ops::Range;

use cuvmm_driver::LocationKind;

use super::Region;
use crate::error::MemoryError;
use crate::extents::{Extent, NewMemory, Unmapped, Unused};
use crate::own::{Physical, Place, Stream, reachable};

impl Region {
    /// Moves a committed range to another place, keeping addresses and bytes. Extents that are
    /// already there stay. Returns the bytes moved.
    ///
    /// Waits for all work of the devices with access, copies on `stream` and waits for the copies.
    /// Work launched meanwhile must not use the range. The range takes twice its memory until all
    /// of it has moved. All or nothing, with one exception: if the driver cannot say whether a copy
    /// to host memory has ended, the extents copied by then stay at the new place, and other
    /// streams may read wrong bytes there until the copy has ended.
    ///
    /// Makes `cuMemCreate`, a copy, and two unmappings and mappings for each extent, while another
    /// extent is being copied. If all the memory moves from the host to a device, each extent is
    /// created right before its copy, so the device may turn out to be short of memory when some
    /// are copied; otherwise all are created before the first copy. Host memory is taken from the
    /// region's [`HostExtents`](super::HostExtents) as far as they suffice, and returned there when
    /// it is moved away from.
    ///
    /// The host's processors have no access to memory that has moved to the host before
    /// [`host_pointer`](Self::host_pointer) is called.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, cuts an extent or is
    /// [registered](Self::register), the region maps memory twice, part of the range was
    /// [exported](Self::export) and would move, the place cannot be reached or has no memory, or
    /// the driver refuses.
    pub fn relocate(
        &mut self,
        range: Range<u64>,
        place: &Place,
        stream: &Stream,
    ) -> Result<u64, MemoryError> {
        self.supply.check_no_tenant("relocating memory")?;
        stream.check_on(self.device())?;
        self.check_committed(&range)?;
        self.unregistered(&range)?;
        self.check_unaliased()?;
        for user in self.space.users() {
            reachable(user, place)?;
        }
        self.check_whole(&range)?;
        let location = place.location();
        let moving: Vec<Extent> = self
            .space
            .extents_in(range.start, range.end)
            .filter(|extent| extent.location != location)
            .collect();
        self.check_unexported(&moving)?;
        if moving.is_empty() {
            return Ok(0);
        }
        let bytes = moving.iter().map(|extent| extent.size).sum();
        let from_host = |extent: &Extent| extent.location.kind == LocationKind::HOST_NUMA;
        let moved = match location.kind {
            LocationKind::DEVICE if moving.iter().all(from_host) => {
                self.move_one_by_one(&moving, place, stream)
            }
            _ => self.move_all(&moving, place, stream),
        };
        let asked = moving.iter().map(|extent| (extent.size, place));
        moved.map_err(|error| self.with_figures(error, asked))?;
        Ok(bytes)
    }

    /// Moves extents to memory that is obtained before the first copy.
    fn move_all(
        &mut self,
        moving: &[Extent],
        place: &Place,
        stream: &Stream,
    ) -> Result<(), MemoryError> {
        let mut new = vec![];
        let proof = self
            .overwritten(moving, place, &mut new)
            .and_then(|()| Ok(Unused::after_drain(self.space.users())?));
        match proof {
            Ok(proof) => self.replace(new, stream, proof),
            Err(error) => {
                let unused = new.into_iter().map(|(_, unmapped)| unmapped);
                unused.for_each(|unmapped| self.release_unmapped(unmapped));
                Err(error)
            }
        }
    }

    /// Moves extents of host memory to a device. Each physical there is created while the copies
    /// before its own run.
    fn move_one_by_one(
        &mut self,
        moving: &[Extent],
        place: &Place,
        stream: &Stream,
    ) -> Result<(), MemoryError> {
        let proof = Unused::after_drain(self.space.users())?;
        let ranges = moving.iter().map(|extent| extent.offset..extent.end());
        let (device, props) = (place.through(self.device()).clone(), self.props_at(place));
        let new = NewMemory::one_by_one(ranges.collect(), move |size| {
            let physical = Physical::builder(&device, size)
                .with_props(props)
                .create()?;
            Ok(Unmapped::fresh(physical))
        });
        self.replace(new, stream, proof)
    }
}
