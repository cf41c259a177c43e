//! Memory of memory pools that other processes may use.

use std::sync::Arc;

use super::MemPool;
use super::given_memory::GivenMemory;

/// The most parts of kept memory that an allocation looks at. Each costs system calls.
const FEW: usize = 4;

impl MemPool {
    /// Returns an unguessable number that names the driver's pool to other processes, equal for all
    /// values that wrap the pool.
    pub(crate) fn identity(&self) -> [u8; 16] {
        self.device().name_of(self.as_raw().0)
    }

    /// Frees memory that was dropped while another process used it and that was released since, and
    /// returns the bytes of the rest.
    ///
    /// An [allocation](Self::allocate_on) frees part of it, and all of it before it fails for lack
    /// of memory.
    #[must_use]
    pub fn held_elsewhere(&self) -> u64 {
        self.free_returned();
        match self.device().is_forked() {
            true => 0,
            false => self.kept().bytes(),
        }
    }

    pub(super) fn keep(&self, memory: &Arc<GivenMemory>) {
        self.kept().keep(memory);
    }

    pub(super) fn free_returned(&self) -> bool {
        self.kept().free_returned(self.device(), usize::MAX)
    }

    pub(super) fn free_some_returned(&self) {
        self.kept().free_returned(self.device(), FEW);
    }
}
