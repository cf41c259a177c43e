//! Plain device memory, stream-ordered device memory, and pinned host memory.
//!
//! `unsafe` is allowed here to export functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_driver::DeviceAddress;
use cuvmm_sys::{CUdeviceptr, CUresult, CUstream};

use crate::contexts::current;
use crate::edge::{Outcome, code, export, present, put};
use crate::state::driver;
use crate::streams::stream_handle;

/// Allocates pinned memory and writes its address.
///
/// # Safety
/// The pointer is null or valid for writing.
unsafe fn pinned(address: *mut *mut c_void, bytes: usize, flags: u32) -> Outcome {
    let device = current()?;
    present(address)?;
    let made = driver()?
        .host_alloc(device, bytes as u64, flags)
        .map_err(code)?;
    // SAFETY: the caller promises that the pointer is null or valid.
    unsafe { put(address, made.cast()) }
}

export! {
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) {
        let device = current()?;
        present(address)?;
        let made = driver()?.alloc(device, bytes as u64).map_err(code)?;
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { put(address, made.0) }
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        let device = current()?;
        // SAFETY: the caller passes an allocation that nothing uses.
        unsafe { driver()?.free(device, DeviceAddress(address)) }.map_err(code)
    }

    fn cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream) {
        let device = current()?;
        present(address)?;
        // SAFETY: the caller passes a stream that it created and has not destroyed.
        let made = unsafe { driver()?.alloc_async(device, bytes as u64, stream_handle(stream)) }
            .map_err(code)?;
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { put(address, made.0) }
    }

    fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) {
        let (device, stream) = (current()?, stream_handle(stream));
        // SAFETY: the caller passes an allocation that nothing uses after the stream's work.
        unsafe { driver()?.free_async(device, DeviceAddress(address), stream) }.map_err(code)
    }

    fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize) {
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { pinned(address, bytes, 0) }
    }

    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: u32) {
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { pinned(address, bytes, flags) }
    }

    fn cuMemFreeHost(address: *mut c_void) {
        let device = current()?;
        // SAFETY: the caller passes pinned memory that nothing uses.
        unsafe { driver()?.host_free(device, address.cast()) }.map_err(code)
    }

    fn cuMemHostGetDevicePointer_v2(
        address: *mut CUdeviceptr,
        host: *mut c_void,
        flags: u32,
    ) {
        current()?;
        present(host)?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // Host and devices share one address space.
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { put(address, host.addr() as u64) }
    }
}
