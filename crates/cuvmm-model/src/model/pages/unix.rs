//! The calls for [`Pages`](super::Pages) on Unix.
//!
//! They are `unsafe` because they create and remove mappings.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Returns the size of a page of the host in bytes.
pub(crate) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Maps zeroed pages, which use no memory until they are accessed.
pub(super) fn map(size: usize) -> Option<*mut c_void> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new anonymous mapping at an address chosen by the system touches no other.
    unsafe { mmap_anonymous(ptr::null_mut(), size, protection, flags) }.ok()
}

/// Unmaps the pages of a [`Pages`](super::Pages) that is being dropped.
pub(super) fn unmap(address: usize, size: usize) {
    let start = ptr::with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: `map` made the mapping. The caller that freed the allocation (`host_free`, `free`) promised
    // that no reference into it is live. A failure leaves it mapped, which does no harm.
    let _ = unsafe { munmap(start, size) };
}
