//! Memory of a memory pool that other processes may use.
//!
//! Keeps I-64.

use std::sync::{Arc, Mutex, PoisonError};

use super::pool_memory::PoolMemory;
use super::processes::Recipients;
use crate::error::CallError;

/// Memory of a memory pool, and the processes that it was given to. Its drop frees the memory,
/// unless one of them uses it.
pub(super) struct GivenMemory {
    memory: PoolMemory,
    holders: Mutex<Vec<Arc<dyn Recipients>>>,
}

impl GivenMemory {
    pub(super) const fn new(memory: PoolMemory) -> Self {
        Self {
            memory,
            holders: Mutex::new(Vec::new()),
        }
    }

    pub(super) const fn memory(&self) -> &PoolMemory {
        &self.memory
    }

    /// Notes processes that are about to get the memory, and removes those that have released it.
    pub(super) fn hold(&self, holder: Arc<dyn Recipients>) {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.retain(|holder| !holder.is_over());
        // Several parts may be given at once.
        if !holders
            .last()
            .is_some_and(|last| Arc::ptr_eq(last, &holder))
        {
            holders.push(holder);
        }
    }

    /// Returns `true` if a process that was given the memory may still use it; `false` in a forked
    /// child, whose parent keeps it.
    pub(super) fn is_held(&self) -> bool {
        if self.memory.device().is_forked() {
            return false;
        }
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.retain(|holder| !holder.is_over());
        !holders.is_empty()
    }

    /// Returns `true` if the memory could be freed now, as far as is known.
    pub(super) fn is_returned(&self) -> bool {
        !self.is_held() && matches!(self.memory.is_captured(), Ok(false))
    }

    pub(super) fn free(&self) -> Result<(), CallError> {
        self.memory.device().own_process()?;
        match self.memory.is_ours() && self.is_held() {
            true => Err(CallError::InUse),
            false => self.memory.free(),
        }
    }
}

impl Drop for GivenMemory {
    fn drop(&mut self) {
        let freed = self.free();
        let (device, size) = (self.memory.device(), self.memory.size());
        // A lost context takes its memory with it.
        if let (Err(error), None) = (freed, device.lost()) {
            if !device.is_forked() {
                device.report_leak(size);
                // The processes that use the memory learn that it stays.
                let holders = self.holders.get_mut();
                let holders = holders.unwrap_or_else(PoisonError::into_inner);
                std::mem::forget(std::mem::take(holders));
            }
            device.report_drop("pool allocation", size, error);
        }
    }
}
