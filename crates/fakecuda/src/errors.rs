//! The names of result codes, and descriptions made from them.
//!
//! `unsafe` is allowed here to export functions (see `state`).
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use cuvmm_sys::CUresult;

use crate::edge::{Outcome, export, put};

/// The name and the description of a code.
type Texts = (CString, CString);

/// Returns the texts of a code, if it has a name. They are never freed or moved, like the driver's.
fn texts(code: CUresult) -> Option<&'static Texts> {
    static TEXTS: OnceLock<BTreeMap<CUresult, Texts>> = OnceLock::new();
    let all = || {
        let known = CUresult::KNOWN.iter();
        known
            .filter_map(|&(name, code)| {
                let texts = (CString::new(name).ok()?, CString::new(words(name)).ok()?);
                Some((code, texts))
            })
            .collect()
    };
    TEXTS.get_or_init(all).get(&code)
}

/// Returns the words of a name: `invalid value` for `CUDA_ERROR_INVALID_VALUE`.
fn words(name: &str) -> String {
    match name.strip_prefix("CUDA_ERROR_") {
        Some(rest) => rest.to_lowercase().replace('_', " "),
        None => "no error".to_owned(),
    }
}

/// Writes a text of a code; null, with an error, for a code without a name.
///
/// # Safety
/// The pointer is null or valid for writing.
unsafe fn tell(text: Option<&'static CString>, to: *mut *const c_char) -> Outcome {
    let found = text.map_or(std::ptr::null(), |text| text.as_ptr());
    // SAFETY: the caller promises that the pointer is null or valid.
    unsafe { put(to, found) }?;
    text.map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

export! {
    fn cuGetErrorName(code: CUresult, text: *mut *const c_char) {
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { tell(texts(code).map(|texts| &texts.0), text) }
    }

    fn cuGetErrorString(code: CUresult, text: *mut *const c_char) {
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { tell(texts(code).map(|texts| &texts.1), text) }
    }
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn a_description_is_the_name_in_words() {
        assert_eq!(words("CUDA_ERROR_OUT_OF_MEMORY"), "out of memory");
        assert_eq!(words("CUDA_SUCCESS"), "no error");
    }
}
