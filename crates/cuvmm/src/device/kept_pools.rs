//! Memory pools of the driver that are never destroyed, because they were the current pool once.
//!
//! The driver crashes if such a pool is destroyed while another thread is inside of
//! `cuMemAllocAsync`, also some time after another pool was made current (measured on an H200). No
//! one can know whether a thread of another library is. So these pools are emptied and kept, and
//! used again for the next pool of the same kind. They end with the context.

use std::sync::{Mutex, PoisonError};

use cuvmm_driver::{Location, MemPoolHandle, MemPoolProps};

use super::Device;

/// The pools of a device that may not be destroyed, and that no owner has.
#[derive(Debug, Default)]
pub(super) struct KeptPools(Mutex<Vec<KeptPool>>);

/// A pool that may not be destroyed, and that no owner has.
#[derive(Debug)]
pub(crate) struct KeptPool {
    pub(crate) handle: MemPoolHandle,
    pub(crate) props: MemPoolProps,
    pub(crate) granted: Vec<Location>,
    /// It may serve as a new pool once it is empty.
    pub(crate) reusable: bool,
}

impl Device {
    /// Returns the number of memory pools of the driver that were the
    /// [current pool](crate::MemPool::make_current) once, and that have no owner any more. They are
    /// kept for further pools, because destroying one while another library allocates crashes the
    /// driver. They hold only what other libraries have not freed yet.
    #[must_use]
    pub fn kept_memory_pools(&self) -> usize {
        match self.is_forked() {
            true => 0,
            false => self.lock_kept().len(),
        }
    }

    fn lock_kept(&self) -> std::sync::MutexGuard<'_, Vec<KeptPool>> {
        let kept = self.shared.kept_pools.0.lock();
        kept.unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a pool whose owner is gone.
    pub(crate) fn keep_pool(&self, pool: KeptPool) {
        self.lock_kept().push(pool);
    }

    /// Adds the handles of all kept pools. None has an owner that could want it to be current.
    pub(crate) fn add_kept_pools(&self, handles: &mut Vec<MemPoolHandle>) {
        handles.extend(self.lock_kept().iter().map(|pool| pool.handle));
    }

    /// Takes a kept pool with these properties for which `is_empty` returns `true`. It is asked
    /// without a lock.
    pub(crate) fn take_kept_pool(
        &self,
        props: &MemPoolProps,
        is_empty: impl Fn(MemPoolHandle) -> bool,
    ) -> Option<KeptPool> {
        let alike = |pool: &mut KeptPool| pool.reusable && pool.props == *props;
        let mut alike: Vec<KeptPool> = self.lock_kept().extract_if(.., alike).collect();
        let found = alike.iter().position(|pool| is_empty(pool.handle));
        let taken = found.map(|index| alike.swap_remove(index));
        self.lock_kept().append(&mut alike);
        taken
    }
}
