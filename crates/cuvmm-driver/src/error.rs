//! What a driver answers when it says no.

use std::fmt;

use cuvmm_sys::{CUresult, CudaVersion};

use crate::Call;

/// The outcome of a driver call.
pub type Result<T, E = DriverError> = std::result::Result<T, E>;

/// A driver call that did not succeed, with the driver's own code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver answered with a code.
    Code {
        /// The call that was made.
        call: Call,
        /// What it answered; never `CUDA_SUCCESS`.
        code: CUresult,
    },
    /// The driver that is loaded lacks the symbol, so nothing was called.
    MissingSymbol {
        /// The call that was wanted.
        call: Call,
        /// The symbol that is not there.
        symbol: &'static str,
        /// The CUDA version that brings it.
        since: CudaVersion,
    },
}

impl DriverError {
    /// An answer with a code.
    #[must_use]
    pub const fn new(call: Call, code: CUresult) -> Self {
        Self::Code { call, code }
    }

    /// The call that failed.
    #[must_use]
    pub const fn call(&self) -> Call {
        match *self {
            Self::Code { call, .. } | Self::MissingSymbol { call, .. } => call,
        }
    }

    /// The driver's code, if the driver was asked at all.
    #[must_use]
    pub const fn code(&self) -> Option<CUresult> {
        match *self {
            Self::Code { code, .. } => Some(code),
            Self::MissingSymbol { .. } => None,
        }
    }

    /// Whether the driver answered `CUDA_ERROR_OUT_OF_MEMORY`: bytes, mappings or addresses are
    /// used up.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code() == Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Whether the driver is being torn down, as happens to calls made while a process exits.
    #[must_use]
    pub fn is_deinitialized(&self) -> bool {
        self.code() == Some(CUresult::CUDA_ERROR_DEINITIALIZED)
    }

    /// Whether the context is lost after this answer: every later launch on it fails too.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        self.code().is_some_and(|code| STICKY.contains(&code))
    }
}

/// The codes after which a context is lost. CUDA's documentation says of each that the process is
/// left in an inconsistent state, that it must be ended, or that the context is gone; what the two
/// uncorrectable errors do to a context it does not say, so they count too.
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
            Self::Code { call, code } => write!(f, "{call} answered {code}"),
            Self::MissingSymbol {
                call,
                symbol,
                since,
            } => write!(
                f,
                "{call} is not to be had: the driver lacks the symbol {symbol}, which CUDA {since} brings"
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
