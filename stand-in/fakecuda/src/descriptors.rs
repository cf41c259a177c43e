//! Descriptors of the program, identified by their open file.
//!
//! `unsafe` is allowed here to look at a descriptor that the program may have closed.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// Returns the device and inode of a descriptor's file, or `None` if the descriptor is closed.
pub(crate) fn identity(fd: i32) -> Option<(u64, u64)> {
    let mut found = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: a closed descriptor is an error of the call, and the result is written to a local.
    let done = unsafe { libc::fstat(fd, found.as_mut_ptr()) } == 0;
    // SAFETY: a structure of zeros is a valid one, and the call may have filled it.
    let found = unsafe { found.assume_init() };
    done.then_some((found.st_dev, found.st_ino))
}
