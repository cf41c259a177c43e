//! The operating system's handles on Windows: NT handles, and their security attributes.
//!
//! `unsafe` takes ownership of handles that the driver has just made, and makes a security descriptor,
//! which is freed once.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::windows::io::{FromRawHandle as _, OwnedHandle, RawHandle};
use std::ptr;

use cuvmm_sys::CUresult;
use windows_sys::Wdk::Foundation::OBJECT_ATTRIBUTES;
use windows_sys::Win32::Foundation::{INVALID_HANDLE_VALUE, LocalFree};
use windows_sys::Win32::Security::Authorization::{
    ConvertStringSecurityDescriptorToSecurityDescriptorW, SDDL_REVISION_1,
};
use windows_sys::Win32::Security::{PSECURITY_DESCRIPTOR, SECURITY_ATTRIBUTES};
use windows_sys::w;

use crate::{Call, DriverError, HandleTypes, Result};

/// Takes ownership of the handle that `call` has written to the first bytes of a buffer.
pub(super) fn own(call: Call, [a, b, c, d, e, f, g, h, ..]: [u8; 64]) -> Result<OwnedHandle> {
    let value = usize::from_ne_bytes([a, b, c, d, e, f, g, h]);
    let handle = ptr::without_provenance_mut::<c_void>(value);
    if handle.is_null() || handle == INVALID_HANDLE_VALUE {
        return Err(DriverError::new(call, CUresult::CUDA_ERROR_UNKNOWN));
    }
    // SAFETY: the driver has made this handle for the caller and does not use it.
    Ok(unsafe { OwnedHandle::from_raw_handle(handle) })
}

/// Converts a handle to the pointer that an import takes: the handle is the pointer's value.
pub(super) const fn pointer_of(handle: RawHandle) -> *mut c_void {
    handle
}

/// The security attributes of handles that memory is exported as, which the driver requires at the
/// creation of memory that can be exported as [`HandleTypes::WIN32`].
///
/// CUDA's header says so of `win32HandleMetaData` (an `OBJECT_ATTRIBUTES`) and `win32SecurityAttributes` (a
/// `SECURITY_ATTRIBUTES`); for other memory they must be null. The attributes give all access to the owner
/// of the memory, which is the user of this process, and to the system, and none to other users. Child
/// processes do not inherit the handles.
pub(super) struct Security(Option<Attributes>);

struct Attributes {
    /// Made by the system and freed when this value is dropped.
    descriptor: PSECURITY_DESCRIPTOR,
    of_physical: OBJECT_ATTRIBUTES,
    of_pool: SECURITY_ATTRIBUTES,
}

impl Security {
    /// Makes the attributes for memory that can be exported as these types: none without `WIN32`.
    pub(super) fn of(call: Call, types: HandleTypes) -> Result<Self> {
        if !types.contains(HandleTypes::WIN32) {
            return Ok(Self(None));
        }
        let attributes = Attributes::new();
        let failed = || DriverError::new(call, CUresult::CUDA_ERROR_OPERATING_SYSTEM);
        attributes.map(|it| Self(Some(it))).ok_or_else(failed)
    }

    /// Returns the pointer for `cuMemCreate`, which is valid while this value stays where it is.
    pub(super) fn of_physical(&self) -> *mut c_void {
        let attributes = self.0.as_ref();
        attributes.map_or(ptr::null_mut(), |it| {
            ptr::from_ref(&it.of_physical).cast_mut().cast()
        })
    }

    /// Returns the pointer for `cuMemPoolCreate`, which is valid while this value stays where it is.
    pub(super) fn of_pool(&self) -> *mut c_void {
        let attributes = self.0.as_ref();
        attributes.map_or(ptr::null_mut(), |it| {
            ptr::from_ref(&it.of_pool).cast_mut().cast()
        })
    }
}

impl Attributes {
    fn new() -> Option<Self> {
        // A list that inherits nothing (`P`): all access (`GA`) for the owner (S-1-3-4) and the system.
        let text = w!("D:P(A;;GA;;;S-1-3-4)(A;;GA;;;SY)");
        let mut descriptor = ptr::null_mut();
        // SAFETY: the text ends with a zero, and the result is written to a local.
        let made = unsafe {
            ConvertStringSecurityDescriptorToSecurityDescriptorW(
                text,
                SDDL_REVISION_1,
                &mut descriptor,
                ptr::null_mut(),
            )
        };
        (made != 0).then(|| Self {
            descriptor,
            of_physical: OBJECT_ATTRIBUTES {
                Length: size_of::<OBJECT_ATTRIBUTES>() as u32,
                RootDirectory: ptr::null_mut(),
                ObjectName: ptr::null(),
                Attributes: 0,
                SecurityDescriptor: descriptor.cast_const().cast(),
                SecurityQualityOfService: ptr::null(),
            },
            of_pool: SECURITY_ATTRIBUTES {
                nLength: size_of::<SECURITY_ATTRIBUTES>() as u32,
                lpSecurityDescriptor: descriptor,
                bInheritHandle: 0,
            },
        })
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: the system allocated the descriptor for this value, and nothing else frees it.
        unsafe { LocalFree(self.descriptor) };
    }
}
