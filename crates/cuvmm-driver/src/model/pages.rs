//! Host memory that a device reaches too: pinned and managed memory.
//!
//! Programs touch it directly, so it is real on every backend, the model included. This file
//! holds the calls of the system for it, which are `unsafe` because they make and end mappings.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::answer::{Answer, OUT_OF_MEMORY};

/// Zeroed pages of this process, given back on drop. Untouched ones cost nothing.
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
        // SAFETY: a new anonymous mapping at a place of the system's choice touches no other.
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
        // SAFETY: the mapping is ours; whoever freed the allocation promised (`host_free`, `free`)
        // that no reference into it lives. A failure leaves it mapped, which harms nobody.
        let _ = unsafe { munmap(start, self.size) };
    }
}
