//! Makes a device's context current on the measuring thread.
//!
//! `unsafe` here: the two driver calls that push and pop the context. The `Driver` trait does both
//! around each call that needs a context. A program that uses the device has its context current
//! anyway, so the baselines must not include these pushes and pops.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use anyhow::ensure;
use cuvmm::driver::Ordinal;
use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::sys::CUresult;

#[derive(Debug)]
pub(super) struct Current {
    driver: Arc<CudaDriver>,
    /// Makes the guard `!Send`: a context is current on one thread only.
    _thread: PhantomData<*const ()>,
}

impl Current {
    pub(super) fn enter(driver: Arc<CudaDriver>, device: Ordinal) -> anyhow::Result<Self> {
        let context = driver.context(device)?;
        // SAFETY: the context is valid for as long as the driver, which the guard keeps alive.
        let code = unsafe { (driver.api().cuCtxPushCurrent_v2)(context) };
        ensure!(code == CUresult::CUDA_SUCCESS, "cuCtxPushCurrent: {code}");
        Ok(Self {
            driver,
            _thread: PhantomData,
        })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: `enter` pushed the popped context, and the result is written to a local. A lost
        // context is current all the same, so an error needs no handling.
        let _ = unsafe { (self.driver.api().cuCtxPopCurrent_v2)(&mut popped) };
    }
}
