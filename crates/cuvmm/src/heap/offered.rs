//! Allocations that are offered to other processes.
//!
//! An offer has whole extents, so it shows what lies beside an allocation too. While an allocation
//! lives its extents stay mapped where they are. A heap does not sleep while an offer is being made,
//! nor with exported memory. An exported extent that the heap gives up is released: no other tenant
//! gets it.
//!
//! Keeps I-121.

use std::sync::Arc;

use cuvmm_driver::DeviceAddress;

use super::allocation::Allocation;
use crate::error::MemoryError;
use crate::own::Physical;
use crate::pool::OfferingPool;

/// The memory under an allocation that is being offered. The heap counts as in use while this value
/// lives: it does not fall asleep.
pub(crate) struct AllocationParts {
    list: Vec<(DeviceAddress, Physical)>,
    allocation: Arc<Allocation>,
}

impl Allocation {
    /// Returns the pool that the heap has its memory from.
    pub(crate) fn offering_pool(&self) -> OfferingPool {
        self.heap().tenant.offering_pool()
    }

    /// Returns the memory under the allocation, to be offered.
    ///
    /// # Errors
    /// [`MemoryError`] in a forked child, and while the heap sleeps or moves.
    pub(crate) fn parts(self: &Arc<Self>) -> Result<AllocationParts, MemoryError> {
        let core = &self.heap().core;
        core.device.own_process()?;
        let mut state = core.lock();
        if !state.rest.is_awake() {
            return Err(MemoryError::HeapAsleep(state.large.held()));
        }
        state.offers_begun += 1;
        let parts = state.large.parts(self.address().0, self.size().max(1));
        let list = parts.filter_map(|((id, _), at)| {
            let physical = state.physicals.get(id)?.as_ref()?;
            Some((DeviceAddress(at), physical.clone()))
        });
        Ok(AllocationParts {
            list: list.collect(),
            allocation: Arc::clone(self),
        })
    }
}

impl AllocationParts {
    /// Returns each physical with the address of its mapping.
    pub(crate) fn physicals(&self) -> impl Iterator<Item = (DeviceAddress, &Physical)> {
        self.list.iter().map(|(at, physical)| (*at, physical))
    }

    /// Marks the memory as exported.
    pub(crate) fn offered(self) -> Arc<Allocation> {
        let mut state = self.allocation.heap().core.lock();
        state.is_offered = true;
        for (_, physical) in &self.list {
            physical.mark_exported();
        }
        drop(state);
        Arc::clone(&self.allocation)
    }
}

impl Drop for AllocationParts {
    fn drop(&mut self) {
        // The heap may give the memory up from here on, and the pool releases none that has another
        // holder.
        self.list.clear();
        let core = &self.allocation.heap().core;
        if !core.device.is_forked() {
            core.lock().offers_begun -= 1;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Contents;
    use crate::error::SleepError;
    use crate::extents::rig::{G, rig};
    use crate::heap::Heap;
    use crate::own::Stream;
    use crate::pool::{Limit, Pool};

    // I-121
    #[test]
    fn a_heap_does_not_fall_asleep_while_an_offer_of_its_memory_is_made() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let allocation = Arc::new(heap.allocate(2 * G, 1, &stream).unwrap());
        let sleep = || heap.alone().sleep(Contents::Discard);

        // An offer that is broken off leaves nothing behind.
        let begun = [allocation.parts().unwrap(), allocation.parts().unwrap()];
        let physicals = || begun.iter().flat_map(AllocationParts::physicals);
        assert_eq!(physicals().map(|(_, it)| it.size()).sum::<u64>(), 4 * G);
        let busy = sleep().unwrap_err();
        assert!(matches!(busy, SleepError::HeapBusy { .. }), "{busy}");
        let [first, second] = begun;
        drop(first);
        assert!(sleep().is_err());
        drop(second);
        assert_eq!(sleep().unwrap().given, 2 * G);
        assert_eq!(pool.stats().quarantined, 0);
        let asleep = allocation.parts().err().unwrap();
        assert!(matches!(asleep, MemoryError::HeapAsleep(_)), "{asleep}");
        heap.alone().wake().unwrap();

        let offered = allocation.parts().unwrap().offered();
        assert!(Arc::ptr_eq(&offered, &allocation));
        let exported = sleep().unwrap_err();
        assert!(
            matches!(exported, SleepError::Exported { .. }),
            "{exported}"
        );
        assert_eq!(tenant.stats().exported, 2 * G);
    }
}
