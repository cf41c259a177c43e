//! The operating system's handles on Unix: descriptors.
//!
//! `unsafe` takes ownership of descriptors that the driver has just made.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::ptr;

use cuvmm_sys::CUresult;

use crate::{Call, DriverError, HandleTypes, Result};

/// Takes ownership of the descriptor that `call` has written to the first bytes of a buffer.
pub(super) fn own(call: Call, [a, b, c, d, ..]: [u8; 64]) -> Result<OwnedFd> {
    let descriptor = RawFd::from_ne_bytes([a, b, c, d]);
    if descriptor < 0 {
        return Err(DriverError::new(call, CUresult::CUDA_ERROR_UNKNOWN));
    }
    // SAFETY: the driver has made this descriptor for the caller and does not use it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Converts a descriptor to the pointer that an import takes: the descriptor is the pointer's value.
pub(super) const fn pointer_of(descriptor: RawFd) -> *mut c_void {
    descriptor as isize as *mut c_void
}

/// Security attributes of exported handles, which descriptors do not have.
pub(super) struct Security;

impl Security {
    pub(super) const fn of(_: Call, _: HandleTypes) -> Result<Self> {
        Ok(Self)
    }

    pub(super) const fn of_physical(&self) -> *mut c_void {
        ptr::null_mut()
    }

    pub(super) const fn of_pool(&self) -> *mut c_void {
        ptr::null_mut()
    }
}
