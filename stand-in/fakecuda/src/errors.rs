//! The names and texts of result codes.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use cuvmm_sys::CUresult;

use crate::edge::{Outcome, export, put};
use crate::texts::TEXTS;

type Texts = (CString, CString);

/// Returns the texts of a known code. They are never freed or moved, like the driver's.
fn texts(code: CUresult) -> Option<&'static Texts> {
    static KNOWN: OnceLock<BTreeMap<CUresult, Texts>> = OnceLock::new();
    let all = || {
        let known = TEXTS.iter().map(|&(code, text)| (CUresult(code), text));
        known
            .filter_map(|(code, text)| {
                let texts = (CString::new(code.name()?).ok()?, CString::new(text).ok()?);
                Some((code, texts))
            })
            .collect()
    };
    KNOWN.get_or_init(all).get(&code)
}

/// Writes a text of a code; null, with an error, for a code without a name.
///
/// # Safety
/// The pointer is null or valid for writing.
unsafe fn tell(text: Option<&'static CString>, to: *mut *const c_char) -> Outcome {
    let found = text.map_or(std::ptr::null(), |text| text.as_ptr());
    // SAFETY: as the caller promises.
    unsafe { put(to, found) }?;
    text.map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

export! {
    fn cuGetErrorName(code: CUresult, text: *mut *const c_char) {
        // SAFETY: C's promise (see `edge`).
        unsafe { tell(texts(code).map(|texts| &texts.0), text) }
    }

    fn cuGetErrorString(code: CUresult, text: *mut *const c_char) {
        // SAFETY: C's promise (see `edge`).
        unsafe { tell(texts(code).map(|texts| &texts.1), text) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_is_that_of_a_code_with_a_name() {
        for &(code, text) in TEXTS {
            let found = texts(CUresult(code)).expect("a name");
            assert_eq!(found.1.to_str(), Ok(text));
        }
        let name = |code| texts(CUresult(code)).and_then(|texts| texts.0.to_str().ok());
        assert_eq!(name(1), Some("CUDA_ERROR_INVALID_VALUE"));
        assert_eq!(name(12_345), None);
    }
}
