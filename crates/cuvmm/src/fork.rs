//! Whether this process is a forked child of the one that opened a device.
//!
//! Asked at every drop and driver call, so it must cost nothing: a page that the kernel wipes in
//! a child (`madvise(MADV_WIPEONFORK)`, Linux 4.14) tells, and where there is none, the process
//! id does.
//!
//! `unsafe` here: mapping that page and reading it.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// What the page holds in the process that made it.
const HERE: u64 = 1;

/// The process that made this.
#[derive(Debug)]
pub(crate) struct Birthplace {
    id: u32,
    page: Option<Page>,
}

impl Birthplace {
    pub(crate) fn new() -> Self {
        Self {
            id: std::process::id(),
            page: Page::new(),
        }
    }

    /// The process id then.
    pub(crate) const fn id(&self) -> u32 {
        self.id
    }

    /// Whether this is still that process.
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

// SAFETY: the page is read and written as an atomic only.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// Nothing where the kernel has no such pages.
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
        // SAFETY: the range is the page, which nothing refers to any more.
        if let Err(error) = unsafe { munmap(self.address.as_ptr().cast(), self.size) } {
            tracing::warn!(%error, "a page could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_had_and_says_here() {
        let born = Birthplace::new();
        assert!(
            born.page.is_some(),
            "MADV_WIPEONFORK is in every supported kernel"
        );
        assert!(born.is_here());
        // tests/fork.rs asks in a child.
    }
}
