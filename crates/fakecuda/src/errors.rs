//! The names of result codes, which also serve as their descriptions.
//!
//! `unsafe` is allowed here to export functions (see `state`).
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use cuvmm_sys::CUresult;

use crate::edge::{Outcome, export, put};

/// Returns the name of a code, if it has one. The text is never freed or moved, like the driver's.
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

/// Writes a code's name; null, with an error, for a code without a name.
///
/// # Safety
/// The pointer is null or valid for writing.
unsafe fn tell(code: CUresult, text: *mut *const c_char) -> Outcome {
    let found = name(code);
    // SAFETY: the caller promises that the pointer is null or valid.
    unsafe { put(text, found.unwrap_or(std::ptr::null())) }?;
    found.map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

export! {
    fn cuGetErrorName(code: CUresult, text: *mut *const c_char) {
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { tell(code, text) }
    }

    fn cuGetErrorString(code: CUresult, text: *mut *const c_char) {
        // The name serves as the description.
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { tell(code, text) }
    }
}
