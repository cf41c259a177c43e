//! Growth from the first byte on: memory comes in steps that are a part of what there is, so that
//! extents stay few. How long the owner's data is, is the owner's business.

use super::{DEFAULT_LARGEST_EXTENT, Region};
use crate::error::CommitError;

/// What outgrows its memory gets up to this part of it ahead.
const GROWTH_PART: u64 = 8;

/// Or, as long as that is less, as much again as it has, up to so many bytes: what is small doubles,
/// since each step costs what an extent costs.
const GROWTH_LEAST: u64 = 16 << 20;

impl Region {
    /// Commits the first `need` bytes of which `held` are committed, both whole granules, and some
    /// beyond if there is memory for that. Returns how many bytes are committed now.
    pub(crate) fn grow(&mut self, held: u64, need: u64) -> Result<u64, CommitError> {
        let granule = self.device().granule();
        let part = (held / GROWTH_PART).max(held.min(GROWTH_LEAST));
        let step = granule.step(part, DEFAULT_LARGEST_EXTENT);
        let wish = held.saturating_add(step).min(self.size());
        if wish > need && self.commit(held..wish).is_ok() {
            return Ok(wish);
        }
        self.commit(held..need)?;
        Ok(need)
    }
}
