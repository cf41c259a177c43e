//! Detection of forked children of the process that opened a device.
//!
//! It runs at every drop and driver call, so it must cost nothing: it reads a page that the kernel
//! wipes in a child (`madvise(MADV_WIPEONFORK)`, Linux 4.14), or compares the process id if there
//! is no such page.
//!
//! `unsafe` is used to map that page and to read it.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The contents of the page in the process that created it.
const HERE: u64 = 1;

/// The process that created this value.
#[derive(Debug)]
pub(crate) struct OpeningProcess {
    id: u32,
    page: Option<Page>,
}

impl OpeningProcess {
    pub(crate) fn new() -> Self {
        Self {
            id: std::process::id(),
            page: Page::new(),
        }
    }

    pub(crate) const fn id(&self) -> u32 {
        self.id
    }

    /// Returns `true` if the calling process created this value.
    pub(crate) fn is_here(&self) -> bool {
        match &self.page {
            Some(page) => page.word().load(Ordering::Relaxed) == HERE,
            None => std::process::id() == self.id,
        }
    }
}

/// A page that reads zero in a forked child.
#[derive(Debug)]
struct Page {
    address: NonNull<AtomicU64>,
    size: usize,
}

// SAFETY: the page is read and written only as an atomic.
unsafe impl Send for Page {}
// SAFETY: the page is read and written only as an atomic.
unsafe impl Sync for Page {}

impl Page {
    /// Maps a page; `None` if the kernel does not support wiping on fork.
    fn new() -> Option<Self> {
        let size = rustix::param::page_size();
        // SAFETY: a new mapping, placed by the kernel.
        let address = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let page = Self {
            address: NonNull::new(address.ok()?.cast())?,
            size,
        };
        // SAFETY: the range is the page just mapped.
        unsafe { madvise(page.address.as_ptr().cast(), size, Advice::LinuxWipeOnFork) }.ok()?;
        page.word().store(HERE, Ordering::Relaxed);
        Some(page)
    }

    const fn word(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped while `self` lives, aligned, and was zero at first.
        unsafe { self.address.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the range is the page, to which no reference is left.
        if let Err(error) = unsafe { munmap(self.address.as_ptr().cast(), self.size) } {
            log!(warn, %error, "a page could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_had_and_says_here() {
        let born = OpeningProcess::new();
        assert!(
            born.page.is_some(),
            "MADV_WIPEONFORK is in every supported kernel"
        );
        assert!(born.is_here());
        // `tests/fork.rs` checks it in a child.
    }
}
