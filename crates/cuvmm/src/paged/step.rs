//! Steps of an engine, which release blocks before the work that still uses them is queued.

use std::fmt;

use super::PagedKv;

/// A step that is being prepared: blocks that are [released](PagedKv::release) while it lives keep
/// their memory until it is dropped. It is dropped once the step's kernels are queued, and the memory
/// then waits for them.
///
/// Several steps may be prepared at a time. A block keeps its memory until all steps that lived when
/// it was released are dropped. A step that is leaked lives as long as the cache, and so does the
/// memory of all blocks that are released from its beginning on.
#[must_use = "dropping it ends the step"]
pub struct Step<'a> {
    kv: &'a PagedKv,
    /// `None` in a forked child.
    number: Option<u64>,
}

impl<'a> Step<'a> {
    pub(super) const fn new(kv: &'a PagedKv, number: Option<u64>) -> Self {
        Self { kv, number }
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.kv.end_step(number);
        }
    }
}

impl fmt::Debug for Step<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step").finish_non_exhaustive()
    }
}
