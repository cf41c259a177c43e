//! Memory of a memory pool that was dropped while another process could use it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::given_memory::GivenMemory;
use crate::device::Device;

#[derive(Default)]
pub(super) struct KeptMemory(Mutex<Vec<Arc<GivenMemory>>>);

impl KeptMemory {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<GivenMemory>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.lock().iter().map(|kept| kept.memory().size()).sum()
    }

    /// Keeps memory that another process may use, until it is returned.
    pub(super) fn keep(&self, memory: &Arc<GivenMemory>) {
        let mut kept = self.lock();
        if !kept.iter().any(|known| Arc::ptr_eq(known, memory)) {
            kept.push(Arc::clone(memory));
        }
    }

    /// Looks at up to `most` parts, in turn, and frees returned ones. Returns `true` if there was
    /// one.
    pub(super) fn free_returned(&self, device: &Device, most: usize) -> bool {
        if device.is_forked() {
            return false;
        }
        let returned: Vec<_> = {
            let mut kept = self.lock();
            let looked_at = most.min(kept.len());
            // Other parts come first the next time.
            kept.rotate_left(looked_at);
            let from = kept.len() - looked_at;
            kept.extract_if(from.., |kept| kept.is_returned()).collect()
        };
        // Their drop frees them, without the lock.
        !returned.is_empty()
    }
}
