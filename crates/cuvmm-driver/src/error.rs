//! Errors of driver calls.

use std::fmt;

use cuvmm_sys::{CUresult, CudaVersion};

use crate::Call;

/// The result of a driver call.
pub type Result<T, E = DriverError> = std::result::Result<T, E>;

/// A driver call that did not succeed, with the driver's own code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver returned an error code.
    Code {
        /// The call.
        call: Call,
        /// The code it returned; never `CUDA_SUCCESS`.
        code: CUresult,
    },
    /// The loaded driver lacks the symbol, so nothing was called.
    MissingSymbol {
        /// The call that was requested.
        call: Call,
        /// The missing symbol.
        symbol: &'static str,
        /// The CUDA version that introduced it.
        since: CudaVersion,
    },
}

impl DriverError {
    /// Returns the error of a call that returned `code`.
    #[must_use]
    pub const fn new(call: Call, code: CUresult) -> Self {
        Self::Code { call, code }
    }

    /// Returns the call that failed.
    #[must_use]
    pub const fn call(&self) -> Call {
        match *self {
            Self::Code { call, .. } | Self::MissingSymbol { call, .. } => call,
        }
    }

    /// Returns the driver's code, or `None` if the driver was not called.
    #[must_use]
    pub const fn code(&self) -> Option<CUresult> {
        match *self {
            Self::Code { code, .. } => Some(code),
            Self::MissingSymbol { .. } => None,
        }
    }

    /// Returns `true` if the driver returned `CUDA_ERROR_OUT_OF_MEMORY`: bytes, mappings or
    /// addresses are used up.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code() == Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Returns `true` if the driver is being torn down, as for calls made while the process exits.
    #[must_use]
    pub fn is_deinitialized(&self) -> bool {
        self.code() == Some(CUresult::CUDA_ERROR_DEINITIALIZED)
    }

    /// Returns `true` if the context is lost after this error: every later launch in it fails too.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        self.code().is_some_and(|code| STICKY.contains(&code))
    }
}

/// The codes after which a context is lost.
///
/// For each of them CUDA's documentation says that the process is left in an inconsistent state,
/// that it must be terminated, or that the context is gone. For the two uncorrectable errors it
/// does not say what happens to the context; they are included.
const STICKY: &[CUresult] = &[
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUresult::CUDA_ERROR_CONTAINED,
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
    CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
    CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
    CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
];

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code { call, code } => write!(f, "{call} returned {code}"),
            Self::MissingSymbol {
                call,
                symbol,
                since,
            } => write!(
                f,
                "{call} is not available: the driver lacks the symbol {symbol}, introduced in CUDA {since}"
            ),
        }
    }
}

impl std::error::Error for DriverError {}

#[cfg(test)]
mod tests {
    use super::{CUresult, Call, DriverError};

    #[test]
    fn the_codes_that_lose_a_context_are_those_of_the_documentation() {
        let sticky = |&(_, code): &(&str, CUresult)| {
            DriverError::new(Call::CtxSynchronize, code).is_sticky()
        };
        let numbers = CUresult::KNOWN.iter().filter(|known| sticky(known));
        let numbers: Vec<_> = numbers.map(|(_, code)| code.0).collect();
        let documented = [
            214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911,
        ];
        assert_eq!(numbers, documented);
    }
}
