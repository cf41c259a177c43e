//! Plain device memory, stream-ordered device memory, and pinned host memory.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_driver::DeviceAddress;
use cuvmm_sys::{CUdeviceptr, CUresult, CUstream};

use crate::anywhere;
use crate::buffers;
use crate::contexts::current;
use crate::edge::{Outcome, code, export, export_also, present, put};
use crate::owned::{self, Known, Object};
use crate::state::driver;
use crate::streams::{stream_handle, target};

/// The multiple that the length of a row of `cuMemAllocPitch` is rounded up to.
const PITCH: usize = 512;

/// # Safety
/// The pointer is null or valid for writing.
unsafe fn pinned(address: *mut *mut c_void, bytes: usize, flags: u32) -> Outcome {
    let device = current()?;
    present(address)?;
    let made = driver()?
        .host_alloc(device, bytes as u64, flags)
        .map_err(code)?;
    let known = Known {
        flags,
        ..Known::of(device)
    };
    owned::own(Object::Pinned(made.addr() as u64), known);
    // SAFETY: as the caller promises.
    unsafe { put(address, made.cast()) }
}

fn freed(address: u64) {
    owned::forget(Object::Memory(address));
    buffers::forget(address, 1);
}

export! {
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) {
        let device = current()?;
        present(address)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(address, 0) }?;
        let made = driver()?.alloc(device, bytes as u64).map_err(code)?;
        owned::own(Object::Memory(made.0), Known::of(device));
        // SAFETY: C's promise (see `edge`).
        unsafe { put(address, made.0) }
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        driver()?;
        if address == 0 {
            return Ok(());
        }
        let device = current()?;
        // SAFETY: the caller passes an allocation that nothing uses.
        unsafe { driver()?.free(device, DeviceAddress(address)) }.map_err(code)?;
        freed(address);
        Ok(())
    }

    fn cuMemAllocAsync + ptsz(address: *mut CUdeviceptr, bytes: usize, stream: CUstream) {
        current()?;
        present(address)?;
        if bytes == 0 {
            // SAFETY: C's promise (see `edge`).
            return unsafe { put(address, 0) };
        }
        let (device, stream) = target(Some(stream_handle(stream)))?;
        // SAFETY: the caller passes a stream that it created and has not destroyed.
        let made = unsafe { driver()?.alloc_async(device, bytes as u64, stream) }
            .map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(address, made.0) }
    }

    fn cuMemFreeAsync + ptsz(address: CUdeviceptr, stream: CUstream) {
        current()?;
        if address == 0 {
            return Ok(());
        }
        let (device, stream) = target(Some(stream_handle(stream)))?;
        // SAFETY: the caller passes an allocation that nothing uses after the stream's work.
        unsafe { driver()?.free_async(device, DeviceAddress(address), stream) }.map_err(code)?;
        freed(address);
        Ok(())
    }

    fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize) {
        // SAFETY: C's promise (see `edge`).
        unsafe { pinned(address, bytes, 0) }
    }

    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: u32) {
        // SAFETY: C's promise (see `edge`).
        unsafe { pinned(address, bytes, flags) }
    }

    fn cuMemFreeHost(address: *mut c_void) {
        let device = current()?;
        if address.is_null() {
            return Ok(());
        }
        let driver = driver()?;
        driver.finish_host_work(device);
        // SAFETY: the caller passes pinned memory that nothing uses.
        unsafe { driver.host_free(device, address.cast()) }.map_err(code)?;
        owned::forget(Object::Pinned(address.addr() as u64));
        buffers::forget(address.addr() as u64, 1);
        Ok(())
    }

    fn cuMemHostGetDevicePointer_v2(
        address: *mut CUdeviceptr,
        host: *mut c_void,
        flags: u32,
    ) {
        let device = current()?;
        present(address)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(address, 0) }?;
        if flags != 0 || !anywhere::is_pinned(device, host.addr() as u64) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // Host and devices share one address space.
        // SAFETY: C's promise (see `edge`).
        unsafe { put(address, host.addr() as u64) }
    }
}

export_also! {
    fn cuMemAllocPitch_v2(
        address: *mut CUdeviceptr,
        pitch: *mut usize,
        width: usize,
        height: usize,
        element: u32,
    ) {
        let device = current()?;
        present(address)?;
        present(pitch)?;
        if width == 0 || height == 0 || ![4, 8, 16].contains(&element) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(PITCH);
        let bytes = row.and_then(|row| row.checked_mul(height));
        let (Some(row), Some(bytes)) = (row, bytes) else {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        };
        let made = driver()?.alloc(device, bytes as u64).map_err(code)?;
        owned::own(Object::Memory(made.0), Known::of(device));
        // SAFETY: C's promise (see `edge`).
        unsafe {
            put(address, made.0)?;
            put(pitch, row)
        }
    }
}
