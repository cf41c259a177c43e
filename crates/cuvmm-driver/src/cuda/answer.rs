//! How a function of the table is called and its answer understood.
//!
//! # Safety, for the whole of `cuda/`
//!
//! Every call of the driver goes through [`ask!`] or [`ask_optional!`], and rests on one argument:
//!
//! - the functions come from [`Api`](cuvmm_sys::Api), whose signatures are held against NVIDIA's
//!   headers, and `cuInit` has succeeded before a [`CudaDriver`](super::CudaDriver) exists;
//! - pointers for results are to locals of the calling function that are as large as the driver
//!   writes, and pointers to input are to locals or to slices that outlive the call;
//! - what a wrong address or handle could break is the promise of the trait method's caller,
//!   which is why that method is `unsafe`; in methods that are not, the driver answers a wrong
//!   argument with a code, as measured.
//!
//! `unsafe` is allowed in the files of `cuda/` for these calls and for nothing else, but for the
//! two things that `context` and `physical` state themselves.

use cuvmm_sys::{CUresult, Optional};

use crate::{Call, DriverError, Result};

/// Success, or the code with the call that it answers.
pub(super) fn outcome(call: Call, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(DriverError::new(call, code))
    }
}

/// For questions whose answer is a code: whether the work is done.
pub(super) fn done(outcome: Result<()>) -> Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.code() == Some(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A function that this driver may lack.
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
        // SAFETY: as the module `answer` says.
        let code = unsafe { function($($argument),*) };
        $crate::cuda::answer::outcome($crate::Call::$call, code)
    }};
}

/// Calls a function that this driver may lack, or says that it does.
macro_rules! ask_optional {
    ($driver:expr, $call:ident: $function:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::answer::present($crate::Call::$call, &$driver.api().$function).and_then(
            |function| {
                // SAFETY: as the module `answer` says.
                let code = unsafe { function($($argument),*) };
                $crate::cuda::answer::outcome($crate::Call::$call, code)
            },
        )
    };
}

pub(super) use {ask, ask_optional};
