//! Allocations that are offered to other processes.
//!
//! An offer has whole extents, so it shows what lies beside an allocation too. While an allocation
//! lives its extents stay mapped where they are, and a heap with exported memory does not sleep. An
//! exported extent that the heap gives up is released: no other tenant gets it.

use std::sync::Arc;

use cuvmm_driver::DeviceAddress;

use super::allocation::Allocation;
use crate::error::MemoryError;
use crate::own::Physical;
use crate::pool::OfferingPool;

impl Allocation {
    /// Returns the pool that the heap has its memory from.
    pub(crate) fn offering_pool(&self) -> OfferingPool {
        self.heap().tenant.offering_pool()
    }

    /// Returns the physicals under the allocation with the addresses of their mappings, in the order
    /// of the addresses.
    ///
    /// # Errors
    /// [`MemoryError`] in a forked child, and while the heap sleeps or moves.
    pub(crate) fn physicals(
        self: &Arc<Self>,
    ) -> Result<Vec<(DeviceAddress, Physical)>, MemoryError> {
        self.with_physicals(|_| {})
    }

    /// Marks the physicals under the allocation as exported.
    ///
    /// # Errors
    /// As [`physicals`](Self::physicals).
    pub(crate) fn mark_exported(self: &Arc<Self>) -> Result<(), MemoryError> {
        self.with_physicals(Physical::mark_exported).map(drop)
    }

    fn with_physicals(
        &self,
        each: impl Fn(&Physical),
    ) -> Result<Vec<(DeviceAddress, Physical)>, MemoryError> {
        let core = &self.heap().core;
        core.device.own_process()?;
        let mut state = core.lock();
        if !state.rest.is_awake() {
            return Err(MemoryError::HeapAsleep(state.large.held()));
        }
        state.is_offered = true;
        let parts = state.large.parts(self.address().0, self.size().max(1));
        let found = parts.filter_map(|((id, _), at)| {
            let physical = state.physicals.get(id)?.as_ref()?;
            each(physical);
            Some((DeviceAddress(at), physical.clone()))
        });
        let mut found: Vec<_> = found.collect();
        found.reverse();
        Ok(found)
    }
}
