//! Results of the rules, before the name of the call is added.

use cuvmm_driver::sys::CUresult;

/// A value, or the code that the driver would return.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

pub(crate) const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
pub(crate) const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
pub(crate) const INVALID_DEVICE: CUresult = CUresult::CUDA_ERROR_INVALID_DEVICE;
pub(crate) const INVALID_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;
pub(crate) const NOT_SUPPORTED: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;
pub(crate) const NOT_PERMITTED: CUresult = CUresult::CUDA_ERROR_NOT_PERMITTED;
pub(crate) const ILLEGAL_ADDRESS: CUresult = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
pub(crate) const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

pub(crate) fn require(condition: bool, code: CUresult) -> Answer {
    if condition { Ok(()) } else { Err(code) }
}
