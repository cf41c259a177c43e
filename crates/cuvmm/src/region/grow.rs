//! Growth from the first byte: memory is committed in steps proportional to the size, so that
//! extents stay few. Only the owner knows the length of the data in use.

use super::{DEFAULT_LARGEST_EXTENT, Region};
use crate::error::MemoryError;
use crate::growth::Steps;

impl Region {
    /// Commits the first `need` bytes, of which `held` are committed already (both whole granules),
    /// and some beyond if there is enough memory: as much again up to 16 MiB, then an eighth, as a
    /// [`DeviceVec`](crate::vec::DeviceVec) grows. Returns how many bytes are committed now.
    ///
    /// # Errors
    /// Those of [`Self::commit`].
    pub fn grow(&mut self, held: u64, need: u64) -> Result<u64, MemoryError> {
        let steps = Steps::of_region(self.device().granule(), DEFAULT_LARGEST_EXTENT);
        let wish = steps.end(held, held, need, self.size());
        if wish > need && self.commit(held..wish).is_ok() {
            return Ok(wish);
        }
        self.commit(held..need)?;
        Ok(need)
    }
}
