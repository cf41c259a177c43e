//! Definitions from the list of all functions that the header declares: their addresses, and those
//! that this library does not implement.

use cuvmm_sys::CUresult;

use crate::edge::Outcome;
use crate::state;

/// Defines the table of the addresses of exported functions.
macro_rules! addresses {
    ($($name:ident)*) => {
        unsafe extern "C" {
            $(fn $name();)*
        }

        /// Every exported function of the driver API, by name.
        pub(crate) const ADDRESSES: &[(&str, unsafe extern "C" fn())] =
            &[$((stringify!($name), $name),)*];
    };
}
pub(crate) use addresses;

/// Defines functions that answer `NOT_SUPPORTED`, whatever they are called with. C passes arguments
/// so that a function need not take them.
macro_rules! unsupported {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> cuvmm_sys::CUresult {
            $crate::edge::answer($crate::listed::refuse)
        }
    )*};
}
pub(crate) use unsupported;

/// Answers for a function that this library does not implement.
pub(crate) fn refuse() -> Outcome {
    state::state()?;
    Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
}
