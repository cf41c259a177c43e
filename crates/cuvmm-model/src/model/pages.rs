//! Host memory that devices can access too: pinned and managed memory.
//!
//! Programs access it directly, so it is real on every backend, including the model. This file has
//! the system calls for it, which are `unsafe` because they create and remove mappings.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::answer::{Answer, OUT_OF_MEMORY};

/// Zeroed pages of this process, unmapped on drop. Pages that were never accessed use no memory.
#[derive(Debug)]
pub(crate) struct Pages {
    address: u64,
    size: usize,
}

impl Pages {
    pub(crate) fn new(size: u64) -> Answer<Self> {
        let size = usize::try_from(size).map_err(|_| OUT_OF_MEMORY)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address chosen by the system touches no other.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), size, protection, flags) }
            .map_err(|_| OUT_OF_MEMORY)?;
        Ok(Self {
            address: start.expose_provenance() as u64,
            size,
        })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let start = ptr::with_exposed_provenance_mut::<c_void>(self.address as usize);
        // SAFETY: `new` made the mapping. The caller that freed the allocation (`host_free`,
        // `free`) promised that no reference into it is live. A failure leaves it mapped, which
        // does no harm.
        let _ = unsafe { munmap(start, self.size) };
    }
}
