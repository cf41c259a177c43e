//! The bytes of pinned, managed and plain memory, which have addresses and no file.
//!
//! `unsafe` is needed to access them by address.
#![allow(unsafe_code)]

use std::ptr;

/// Copies from an allocation.
///
/// The caller has found the range in an allocation of this driver. The caller of the copy has
/// promised that the program does not access it meanwhile.
pub(super) fn read(from: u64, to: &mut [u8]) {
    let source = ptr::with_exposed_provenance::<u8>(from as usize);
    // SAFETY: the range is in an allocation that lives at least as long as the driver's lock is
    // held, and `to` is a buffer of the caller: even where it is pinned memory of this driver,
    // `copy` allows an overlap.
    unsafe { ptr::copy(source, to.as_mut_ptr(), to.len()) }
}

/// Copies to an allocation, under the conditions of [`read`].
pub(super) fn write(to: u64, from: &[u8]) {
    let target = ptr::with_exposed_provenance_mut::<u8>(to as usize);
    // SAFETY: the range is in a live allocation for the reasons given in `read`, and `copy` allows
    // an overlap.
    unsafe { ptr::copy(from.as_ptr(), target, from.len()) }
}

/// Fills a part of an allocation, under the conditions of [`read`].
pub(super) fn fill(to: u64, byte: u8, size: u64) {
    let target = ptr::with_exposed_provenance_mut::<u8>(to as usize);
    // SAFETY: the range is in a live allocation for the reasons given in `read`; the size fits in
    // `usize` because the range is in memory.
    unsafe { ptr::write_bytes(target, byte, size as usize) }
}
