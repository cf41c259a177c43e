//! The device's context on the measuring thread.
//!
//! `unsafe` here: the two calls of the bare table that push and pop it, which the trait `Driver`
//! does by itself around each call that needs a context. A program that uses the device has it
//! current anyway, and the rivals' figures must not hold our pushing and popping.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use anyhow::ensure;
use cuvmm::driver::Ordinal;
use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::sys::CUresult;

/// While it lives, the context is current on this thread.
#[derive(Debug)]
pub(super) struct Current {
    driver: Arc<CudaDriver>,
    /// Not `Send`: each thread has its own current context.
    _thread: PhantomData<*const ()>,
}

impl Current {
    /// # Errors
    /// When there is no context.
    pub(super) fn enter(driver: Arc<CudaDriver>, device: Ordinal) -> anyhow::Result<Self> {
        let context = driver.context(device)?;
        // SAFETY: the context is valid for as long as the driver is, which is kept here.
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
        // SAFETY: what is popped was pushed by `enter`; the result goes to a local. A context that
        // is lost is current all the same, so there is nothing to do about an error.
        let _ = unsafe { (self.driver.api().cuCtxPopCurrent_v2)(&mut popped) };
    }
}
