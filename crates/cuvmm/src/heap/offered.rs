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
        self.with_physicals(|found| Some(found.to_vec()))
    }

    /// Marks the physicals under the allocation as exported, which are those that it had before.
    ///
    /// # Errors
    /// As [`physicals`](Self::physicals), and if the heap has slept since: nothing is marked then.
    pub(crate) fn mark_exported(
        self: &Arc<Self>,
        before: &[(DeviceAddress, Physical)],
    ) -> Result<(), MemoryError> {
        self.with_physicals(|found| {
            let raw = |list: &[(DeviceAddress, Physical)]| -> Vec<_> {
                list.iter().map(|(at, it)| (at.0, it.as_raw())).collect()
            };
            (raw(found) == raw(before)).then(|| found.iter().for_each(|(_, it)| it.mark_exported()))
        })
    }

    fn with_physicals<T>(
        &self,
        used: impl FnOnce(&[(DeviceAddress, Physical)]) -> Option<T>,
    ) -> Result<T, MemoryError> {
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
            Some((DeviceAddress(at), physical.clone()))
        });
        let mut found: Vec<_> = found.collect();
        found.reverse();
        used(&found).ok_or_else(|| MemoryError::HeapAsleep(state.large.held()))
    }
}
