//! The bytes of pinned, managed and plain memory, which lie at addresses and in no file.
//!
//! `unsafe` is needed to reach them by address.
#![allow(unsafe_code)]

use std::ptr;

/// Copies out of an allocation.
///
/// The caller has looked the range up: it lies in an allocation of this driver. That the program
/// does not touch it meanwhile is what whoever asked for the copy promised.
pub(super) fn read(from: u64, to: &mut [u8]) {
    let source = ptr::with_exposed_provenance::<u8>(from as usize);
    // SAFETY: the range lies in an allocation that lives as long as the driver's lock is held,
    // and `to` is a buffer of somebody else: even where it is pinned memory of ours, `copy`
    // allows an overlap.
    unsafe { ptr::copy(source, to.as_mut_ptr(), to.len()) }
}

/// Copies into an allocation, under the same conditions as [`read`].
pub(super) fn write(to: u64, from: &[u8]) {
    let target = ptr::with_exposed_provenance_mut::<u8>(to as usize);
    // SAFETY: as in `read`.
    unsafe { ptr::copy(from.as_ptr(), target, from.len()) }
}

/// Fills a part of an allocation, under the same conditions as [`read`].
pub(super) fn fill(to: u64, byte: u8, size: u64) {
    let target = ptr::with_exposed_provenance_mut::<u8>(to as usize);
    // SAFETY: as in `read`; the size fits, because the range lies in memory.
    unsafe { ptr::write_bytes(target, byte, size as usize) }
}
