//! Names of result codes, and what they mean in words.
//!
//! `unsafe` is allowed here to export functions (see `state`).
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use cuvmm_sys::CUresult;

use crate::edge::{Outcome, export, put};

/// The name of every code that has one. It stays where it is for good, as the driver's do.
fn name(code: CUresult) -> Option<*const c_char> {
    static NAMES: OnceLock<BTreeMap<CUresult, CString>> = OnceLock::new();
    let all = || {
        let known = CUresult::KNOWN.iter();
        known
            .filter_map(|&(name, code)| Some((code, CString::new(name).ok()?)))
            .collect()
    };
    Some(NAMES.get_or_init(all).get(&code)?.as_ptr())
}

/// Writes a code's name; null and an error for one that has none.
///
/// # Safety
/// The pointer is null or valid for writing.
unsafe fn tell(code: CUresult, text: *mut *const c_char) -> Outcome {
    let found = name(code);
    // SAFETY: the caller's promise.
    unsafe { put(text, found.unwrap_or(std::ptr::null())) }?;
    found.map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

export! {
    fn cuGetErrorName(code: CUresult, text: *mut *const c_char) {
        // SAFETY: the caller passes a place for the answer, or null.
        unsafe { tell(code, text) }
    }

    fn cuGetErrorString(code: CUresult, text: *mut *const c_char) {
        // There are no words here but the name.
        // SAFETY: the caller passes a place for the answer, or null.
        unsafe { tell(code, text) }
    }
}
