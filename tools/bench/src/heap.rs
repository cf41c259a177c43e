//! Counts the bytes of host memory that some code keeps.
//!
//! `unsafe` here: an allocator is, by its trait. This allocator passes everything to the system's,
//! and counts while switched on.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// The system's allocator, with a count that can be switched on.
#[derive(Debug)]
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static KEPT: AtomicI64 = AtomicI64::new(0);

fn add(bytes: usize, sign: i64) {
    if COUNTS.load(Ordering::Relaxed) {
        // A layout is at most half of the address space.
        KEPT.fetch_add(sign * bytes as i64, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size(), 1);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size(), 1);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add(layout.size(), -1);
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size, 1);
        add(layout.size(), -1);
        // SAFETY: the caller keeps the contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Calls `act`, and returns the additional bytes that all threads have allocated after it. Not to
/// be nested.
pub(crate) fn kept_by<T>(act: impl FnOnce() -> T) -> (T, i64) {
    let before = KEPT.load(Ordering::Relaxed);
    COUNTS.store(true, Ordering::Relaxed);
    let outcome = act();
    COUNTS.store(false, Ordering::Relaxed);
    (outcome, KEPT.load(Ordering::Relaxed) - before)
}

#[cfg(test)]
mod tests {
    use super::kept_by;

    #[test]
    fn what_is_kept_is_counted_and_what_is_given_back_is_not() {
        // Other tests allocate meanwhile, far less than this.
        const MUCH: usize = 256 << 20;
        let (kept, bytes) = kept_by(|| {
            drop(Vec::<u8>::with_capacity(MUCH));
            let mut growing = Vec::<u8>::with_capacity(MUCH / 2);
            growing.reserve_exact(MUCH);
            growing
        });
        let off = bytes.abs_diff(MUCH as i64);
        assert!(off < MUCH as u64 / 16, "{bytes} for {}", kept.capacity());
    }
}
