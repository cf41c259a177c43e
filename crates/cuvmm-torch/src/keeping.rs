//! Memory under tags that a discarding sleep keeps, and memory that goes back to the driver.
//!
//! `unsafe` is used to export the functions under their C names, and for the addresses that C
//! passes.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

use crate::edge::{self, guard, status};
use crate::error::Error;
use crate::{fork, graphs, heaps, tags};

/// Marks memory under a tag, all of it in one allocation: a sleep that discards contents keeps it.
/// The rest of the tag's memory is as new after waking. Writes the mark's token for
/// [`cuvmm_keep_end`]. The mark ends with the allocation, and lasts over sleep and waking.
///
/// An error (memory that is not under a tag, a sleeping tag) marks nothing.
///
/// # Safety
/// `token` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_keep(address: *const c_void, size: u64, token: *mut u64) -> c_int {
    status(|| {
        if token.is_null() {
            return Err(Error::Null);
        }
        let mark = tags::keep(address.addr(), size)?;
        // SAFETY: the caller says so.
        unsafe { token.write(mark) };
        Ok(())
    })
}

/// Ends the mark of a token. Does nothing if it has ended.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_keep_end(token: u64) {
    guard((), || tags::end_mark(token));
}

/// Writes the name of the tag under which the memory at an address was allocated. Returns 0 for
/// other memory.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_tag_of(
    address: *const c_void,
    buffer: *mut c_char,
    length: usize,
) -> usize {
    let name = guard(None, || tags::name_of(address.addr()));
    // SAFETY: the caller says so.
    name.map_or(0, |name| unsafe {
        edge::write(name.into_bytes(), buffer, length)
    })
}

/// Waits for the work of a device and of its peers, gives all free memory of the device's heap and
/// tags back to the driver, and writes the bytes. Refused while a graph is captured. 0 bytes if the
/// device has no heap.
///
/// # Safety
/// `bytes` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_trim(device: c_int, bytes: *mut u64) -> c_int {
    status(|| {
        fork::check()?;
        let given = heaps::known(device).map_or(Ok(0), trimmed)?;
        if !bytes.is_null() {
            // SAFETY: the caller says so.
            unsafe { bytes.write(given) };
        }
        Ok(())
    })
}

fn trimmed(of: &heaps::DeviceHeap) -> Result<u64, Error> {
    let _leave = graphs::waiting().ok_or(Error::Capturing)?;
    of.synchronize()?;
    let before = of.held();
    of.trim()?;
    Ok(before.saturating_sub(of.held()))
}
