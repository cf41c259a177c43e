//! Growth from the first byte: memory is committed in steps proportional to the size, so that
//! extents stay few. Only the owner knows the length of the data in use.

use super::{DEFAULT_LARGEST_EXTENT, Region};
use crate::error::MemoryError;
use crate::growth::Steps;

impl Region {
    /// Commits the first `size` bytes, a multiple of the granule, and some beyond if there is enough
    /// memory, as a [`DeviceVec`](crate::vec::DeviceVec) grows: as much again up to 16 MiB, or up to
    /// a 512th of the device's memory outside a tenant, then an eighth. Steps are powers of two
    /// granules. Returns how many bytes from the first one on are committed now.
    ///
    /// # Errors
    /// Those of [`Self::commit`].
    pub fn grow_to(&mut self, size: u64) -> Result<u64, MemoryError> {
        self.check(&(0..size))?;
        let held = self.committed.prefix();
        if size > held {
            let (device, family) = (self.device(), self.supply.family());
            let memory = family.map_or(device.total_memory(), |_| 0);
            let steps = Steps::of_region(device.granule(), DEFAULT_LARGEST_EXTENT, memory);
            let mut wish = steps.end(held, held, size, self.size());
            // No tenant's memory is reclaimed for growth beyond the need.
            if family.is_some_and(|family| !family.tenant.has_spare(wish - held)) {
                wish = size;
            }
            if wish == size || self.commit(held..wish).is_err() {
                self.commit(held..size)?;
            }
        }
        Ok(self.committed.prefix())
    }
}
