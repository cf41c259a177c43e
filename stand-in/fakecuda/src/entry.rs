//! Finding functions by name and version: `cuGetProcAddress`.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use cuvmm_sys::{CUresult, CUuuid};

use crate::edge::{Outcome, export_also, present, put};
use crate::listed::FUNCTIONS;
use crate::rest::ADDRESSES;
use crate::state;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// A function under the name that is searched for.
#[derive(Clone, Copy, Debug)]
struct Version {
    since: i32,
    per_thread: bool,
    address: usize,
}

fn versions() -> &'static HashMap<&'static str, Vec<Version>> {
    static VERSIONS: OnceLock<HashMap<&str, Vec<Version>>> = OnceLock::new();
    VERSIONS.get_or_init(|| {
        let mut versions = HashMap::<_, Vec<_>>::new();
        for (function, address) in FUNCTIONS.iter().zip(ADDRESSES) {
            versions.entry(function.base).or_default().push(Version {
                since: function.since,
                per_thread: function.is_per_thread(),
                address: address.expose_provenance(),
            });
        }
        versions
    })
}

/// Results of a search, as the driver numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Found = 0,
    Unknown = 1,
    TooOld = 2,
}

/// Searches for a function of a version that this driver has.
fn search(name: &str, wanted: i32, flags: u64, driver: i32) -> (Option<usize>, Status) {
    let known = versions().get(name).map_or(&[][..], Vec::as_slice);
    let newest = |per_thread: bool| {
        let usable = known.iter().filter(|version| {
            version.per_thread == per_thread && version.since <= wanted.min(driver)
        });
        usable.max_by_key(|version| version.since)
    };
    // A function with a variant for the thread's own stream is found in that variant only.
    let own = flags & 2 != 0 && known.iter().any(|version| version.per_thread);
    match newest(own) {
        Some(found) => (Some(found.address), Status::Found),
        None if known.iter().any(|version| version.since <= driver) => (None, Status::TooOld),
        None => (None, Status::Unknown),
    }
}

/// Finds a function for both versions of the call.
///
/// # Safety
/// The pointers are null or valid: a C string, and the place for the result.
unsafe fn look_up(
    name: *const c_char,
    found: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> Outcome<(*mut c_void, Status)> {
    present(name)?;
    present(found)?;
    if flags > 3 {
        return Err(INVALID);
    }
    // SAFETY: the caller promises a C string.
    let name = unsafe { CStr::from_ptr(name) };
    let driver = state::version()?;
    if version > driver {
        return Err(INVALID);
    }
    // As recorded, a negative version finds the newest function.
    let version = if version < 0 { driver } else { version };
    let name = name.to_str().map_err(|_| INVALID)?;
    let (address, status) = search(name, version, flags, driver);
    let pointer = std::ptr::with_exposed_provenance_mut(address.unwrap_or_default());
    Ok((pointer, status))
}

export_also! {
    fn cuGetProcAddress(
        name: *const c_char,
        found: *mut *mut c_void,
        version: i32,
        flags: u64,
    ) {
        // SAFETY: the caller passes a C string and a place for the result, or null.
        match unsafe { look_up(name, found, version, flags) }? {
            // SAFETY: the caller passes a place for the result.
            (pointer, Status::Found) => unsafe { put(found, pointer) },
            (_, Status::Unknown | Status::TooOld) => Err(CUresult::CUDA_ERROR_NOT_FOUND),
        }
    }

    fn cuGetProcAddress_v2(
        name: *const c_char,
        found: *mut *mut c_void,
        version: i32,
        flags: u64,
        status: *mut i32,
    ) {
        // SAFETY: the caller passes a C string and a place for the result, or null.
        let (pointer, result) = unsafe { look_up(name, found, version, flags) }?;
        // SAFETY: the caller passes a place for the result.
        unsafe { put(found, pointer) }?;
        if status.is_null() {
            return Ok(());
        }
        // SAFETY: the caller passes a valid pointer for the status.
        unsafe { put(status, result as i32) }
    }

    fn cuGetExportTable(table: *mut *const c_void, _id: *const CUuuid) {
        present(table)?;
        // The tables are private to NVIDIA's own libraries: none is known here.
        // SAFETY: C's promise (see `edge`).
        unsafe { put(table, std::ptr::null()) }?;
        Err(INVALID)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_up_to_the_wanted_one_is_found() {
        let at = |name, wanted, flags| search(name, wanted, flags, 13_000);
        let first = at("cuCtxCreate", 3_020, 0).0;
        assert!(first.is_some());
        assert_ne!(first, at("cuCtxCreate", 12_050, 0).0);
        assert_eq!(
            at("cuCtxCreate", 12_040, 0).0,
            at("cuCtxCreate", 11_040, 0).0
        );
        assert_eq!(at("cuMemCreate", 10_010, 0), (None, Status::TooOld));
        assert_eq!(at("cuMemCreat", 13_000, 0), (None, Status::Unknown));
        let (shared, own) = (
            at("cuStreamQuery", 12_000, 0),
            at("cuStreamQuery", 12_000, 2),
        );
        assert_ne!(shared.0, own.0);
        assert_eq!(
            at("cuStreamCreate", 12_000, 2),
            at("cuStreamCreate", 12_000, 0)
        );
    }
}
