//! The functions of C for several treatments of contents at once, and for contents that sleep.
//!
//! `unsafe` is used to export the functions under their C names, and for the addresses that C
//! passes.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::slice;

use crate::edge::{self, status};
use crate::error::Error;
use crate::tags;

/// Puts tags to sleep, each with a `keep` of its own, given by a JSON object of names with numbers:
/// `{"weights": 1, "cache": 0}`. All of them sleep, or none. Everything else is as for
/// [`cuvmm_sleep`](crate::cuvmm_sleep).
///
/// # Safety
/// The requirements of [`cuvmm_sleep`](crate::cuvmm_sleep).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_sleep_each(tags: *const c_char) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let tags = unsafe { edge::read(tags) }?.ok_or(Error::NotText)?;
        tags::sleep::sleep_each(tags)
    })
}

/// Copies `bytes` bytes of the contents that were kept of memory under a tag when it fell asleep.
/// Makes no driver call, and the tag stays asleep. `address` is where the memory is when awake.
///
/// Returns 0 if the bytes were copied, and 1 if the memory is awake, or under no tag. An error
/// (contents that were discarded, a range that exceeds the allocation, a forked child) is negative.
/// After it and after 1 the bytes at `buffer` are not set.
///
/// # Safety
/// `buffer` is null or valid for writing `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_read_kept(
    address: *const c_void,
    bytes: usize,
    buffer: *mut c_void,
) -> c_int {
    let mut is_kept = true;
    let status = status(|| {
        if buffer.is_null() {
            return Err(Error::Null);
        }
        // SAFETY: the caller says so, and bytes of any value are valid.
        let buffer = unsafe { slice::from_raw_parts_mut(buffer.cast::<u8>(), bytes) };
        is_kept = tags::kept::read(address.addr(), buffer)?;
        Ok(())
    });
    match is_kept {
        true => status,
        false => 1,
    }
}
