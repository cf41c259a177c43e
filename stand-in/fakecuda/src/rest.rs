//! Addresses of the exported functions, and definitions of those that are not implemented.
//!
//! `unsafe` is allowed here to export and to declare them.
#![allow(unsafe_code)]
#![allow(clashing_extern_declarations)]

use cuvmm_sys::CUresult;

use crate::edge::{Outcome, answer};
use crate::state;
use crate::symbols::symbols;

/// Declares a function of another file, or defines one that answers `NOT_SUPPORTED` for any
/// arguments: in C a function need not take the arguments that it is passed.
macro_rules! function {
    ($name:ident here) => {
        unsafe extern "C" {
            fn $name();
        }
    };
    ($name:ident nowhere) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> CUresult {
            answer(refuse)
        }
    };
}

macro_rules! functions {
    ($($name:ident $base:ident $since:literal $stream:ident $place:ident)*) => {
        $(function!($name $place);)*

        /// The addresses in the order of the names.
        pub(crate) const ADDRESSES: &[*const ()] = &[$($name as *const (),)*];
    };
}

symbols!(functions);

fn refuse() -> Outcome {
    state::state()?;
    Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
}
