//! Calling functions of the table and converting their result codes.
//!
//! # Safety, for the whole of `cuda/`
//!
//! Every driver call goes through [`ask!`] or [`ask_optional!`] and rests on one argument:
//!
//! - the functions come from [`Api`](cuvmm_sys::Api), whose signatures are compared with NVIDIA's
//!   headers, and `cuInit` has succeeded before a [`CudaDriver`](super::CudaDriver) exists;
//! - pointers for results point to locals of the calling function that are as large as the driver
//!   writes, and pointers to input point to locals or to slices that outlive the call;
//! - where a wrong address or handle could do damage, the trait method is `unsafe` and its caller
//!   promises that it is right; in the safe methods, the driver returns an error code for a wrong
//!   argument, as measured.
//!
//! `unsafe` is allowed in the files of `cuda/` for these calls only, except for the two other uses
//! that `context` and `physical` state themselves.

use cuvmm_sys::{CUresult, Optional};

use crate::{Call, DriverError, Result};

/// Converts a result code into a `Result` that names the call.
pub(super) fn outcome(call: Call, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(DriverError::new(call, code))
    }
}

/// Converts the outcome of a query whose result code says if the work is done.
pub(super) fn done(outcome: Result<()>) -> Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.code() == Some(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns a function that the driver may lack, or the error that it is missing.
pub(super) fn present<F: Copy>(call: Call, function: &Optional<F>) -> Result<F> {
    function
        .get()
        .map_err(|missing| DriverError::MissingSymbol {
            call,
            symbol: missing.symbol,
            since: missing.since,
        })
}

/// Calls a function that every driver has: `ask!(driver, MemUnmap: cuMemUnmap(address, size))`.
macro_rules! ask {
    ($driver:expr, $call:ident: $function:ident($($argument:expr),* $(,)?)) => {{
        let function = $driver.api().$function;
        // SAFETY: see the documentation of the module `answer`.
        let code = unsafe { function($($argument),*) };
        $crate::cuda::answer::outcome($crate::Call::$call, code)
    }};
}

/// Calls a function that the driver may lack, or returns the error that it is missing.
macro_rules! ask_optional {
    ($driver:expr, $call:ident: $function:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::answer::present($crate::Call::$call, &$driver.api().$function).and_then(
            |function| {
                // SAFETY: see the documentation of the module `answer`.
                let code = unsafe { function($($argument),*) };
                $crate::cuda::answer::outcome($crate::Call::$call, code)
            },
        )
    };
}

pub(super) use {ask, ask_optional};
