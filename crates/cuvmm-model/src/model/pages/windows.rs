//! The calls for [`Pages`](super::Pages) on Windows.
//!
//! They are `unsafe` because they create and remove mappings.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use windows_sys::Win32::System::Memory::{
    MEM_COMMIT, MEM_RELEASE, MEM_RESERVE, PAGE_READWRITE, VirtualAlloc, VirtualFree,
};

/// Returns the size of a page of the host in bytes, which is the same on all 64-bit Windows.
pub(crate) const fn page_size() -> u64 {
    4096
}

/// Maps zeroed pages, which count against the system's commit limit at once.
pub(super) fn map(size: usize) -> Option<*mut c_void> {
    // SAFETY: new pages at an address chosen by the system touch no others.
    let start =
        unsafe { VirtualAlloc(ptr::null(), size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) };
    (!start.is_null()).then_some(start)
}

/// Unmaps the pages of a [`Pages`](super::Pages) that is being dropped.
pub(super) fn unmap(address: usize, _: usize) {
    let start = ptr::with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: `map` made the pages. The caller that freed the allocation (`host_free`, `free`) promised
    // that no reference into it is live. A failure leaves them mapped, which does no harm.
    unsafe { VirtualFree(start, 0, MEM_RELEASE) };
}
