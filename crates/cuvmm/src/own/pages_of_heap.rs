//! Pages of the process's memory on systems other than Linux, from the program's allocator.
//!
//! No child inherits memory there, and huge pages are not asked for.
//!
//! `unsafe` is used to allocate and free memory.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// The alignment of the pages, as on Linux.
pub(super) const ALIGNMENT: usize = 2 << 20;

/// Zeroed memory of the program's allocator.
#[derive(Debug)]
pub(super) struct Pages {
    base: NonNull<u8>,
    layout: Layout,
}

impl Pages {
    /// Allocates `size` bytes, more than zero. Returns `None` if the allocator has too few.
    pub(super) fn new(size: usize) -> Option<Self> {
        let layout = Layout::from_size_align(size, ALIGNMENT).ok()?;
        if size == 0 {
            return None;
        }
        // SAFETY: the size is more than zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, layout })
    }

    pub(super) const fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout, and no reference to it is left.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
