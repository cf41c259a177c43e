//! The physical memory under a range of addresses, for libraries that register memory.
//!
//! The driver is asked, since memory of heaps, of tags and of publications has its extents in different
//! places, and memory of `cudaMalloc` has them nowhere here.
//!
//! `unsafe` is used to export the function under its C name, and for the buffer that C passes.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

use cuvmm::CallError;
use cuvmm::driver::{CUresult, DeviceAddress, Driver as _, DriverError, Ordinal};

use crate::edge::{self, guard};
use crate::error::Error;
use crate::{fork, heaps};

/// Writes the extents of device memory under `size` bytes as JSON, a list of pairs: the first address and the
/// bytes of each in the order of the addresses. The first may begin before `address`, and the last end
/// behind the range. An empty list for a size of 0.
///
/// Each is one physical allocation that is mapped there, or one of `cudaMalloc`. They stay until the memory
/// is freed, its tag sleeps, or a capture's memory does. Makes `cuMemGetAddressRange` for each.
///
/// Returns the bytes needed, or 0 with an error for [`cuvmm_last_error`](crate::cuvmm_last_error) where
/// an address has no memory that the device has access to, and before the first allocation here.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_extents(
    address: *const c_void,
    size: u64,
    device: c_int,
    buffer: *mut c_char,
    length: usize,
) -> usize {
    let listed = guard(None, || {
        let listed = listed(address.addr() as u64, size, device);
        let json = listed.and_then(|all| Ok(serde_json::to_vec(&all)?));
        json.inspect_err(edge::keep).ok()
    });
    // SAFETY: the caller says so.
    listed.map_or(0, |json| unsafe { edge::write(json, buffer, length) })
}

/// Returns the first address and the bytes of each extent under a range.
///
/// # Errors
/// An address of the range has no memory of which the device's driver says where it begins.
fn listed(address: u64, size: u64, device: c_int) -> Result<Vec<(u64, u64)>, Error> {
    fork::check()?;
    let driver = heaps::driver().ok_or(Error::NotAllocated)?;
    let (mut all, mut at) = (Vec::new(), address);
    let end = address.checked_add(size).ok_or(Error::NotMapped(address))?;
    while at < end {
        let missing = |error: DriverError| match error.code() {
            Some(CUresult::CUDA_ERROR_NOT_FOUND | CUresult::CUDA_ERROR_INVALID_VALUE) => {
                Error::NotMapped(at)
            }
            _ => CallError::from(error).into(),
        };
        let found = driver.address_range(Ordinal(device), DeviceAddress(at));
        let (first, bytes) = found.map_err(missing)?;
        all.push((first.0, bytes));
        match first.0.checked_add(bytes) {
            Some(behind) if behind > at => at = behind,
            _ => return Err(Error::NotMapped(at)),
        }
    }
    Ok(all)
}
