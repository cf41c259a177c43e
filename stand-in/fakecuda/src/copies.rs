//! Copies and fills.
//!
//! `unsafe` exports functions (see `state`), and makes slices of the host
//! memory that C passes by pointer and length.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_driver::{DeviceAddress, StreamHandle};
use cuvmm_sys::{CUcontext, CUdeviceptr, CUresult, CUstream};

use crate::anywhere::{self, HostOrder, by_current};
use crate::contexts::{current, named};
use crate::edge::{Outcome, code, export, present};
use crate::fills;
use crate::owned;
use crate::state::driver;
use crate::streams::{stream_handle, target};

/// Copies between two contexts, whose devices need access to memory of pools.
fn between_contexts(
    (to_context, to): (CUcontext, CUdeviceptr),
    (from_context, from): (CUcontext, CUdeviceptr),
    bytes: usize,
    stream: Option<StreamHandle>,
) -> Outcome {
    let (_, source) = named(from_context)?;
    let (_, target) = named(to_context)?;
    driver()?.copying(source, target, || between(to, from, bytes, stream))
}

/// Copies between two device ranges, on a stream or on the default stream. The stream's device
/// copies, so it needs access to mappings in both ranges.
fn between(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: Option<StreamHandle>,
) -> Outcome {
    if owned::registered(to).is_some() || owned::registered(from).is_some() {
        return anywhere::copy(to, from, bytes, stream);
    }
    let (device, order) = target(stream)?;
    let (to, from, bytes) = (DeviceAddress(to), DeviceAddress(from), bytes as u64);
    let driver = driver()?;
    match stream {
        // SAFETY: the caller of the exported function keeps both ranges until the copy is done.
        None => unsafe { driver.copy_on_device(device, to, from, bytes) },
        // SAFETY: the caller of the exported function keeps both ranges until the copy is done.
        Some(_) => unsafe { driver.copy_on_device_async(device, to, from, bytes, order) },
    }
    .map_err(code)
}

/// Refuses a size that no memory of the program can have.
fn check_size(bytes: usize) -> Outcome {
    match isize::try_from(bytes) {
        Ok(_) => Ok(()),
        Err(_) => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

export! {
    fn cuMemcpyHtoD_v2 + ptds(to: CUdeviceptr, from: *const c_void, bytes: usize) {
        let device = current()?;
        if bytes == 0 {
            return Ok(());
        }
        present(from)?;
        check_size(bytes)?;
        // SAFETY: the caller passes `bytes` readable bytes.
        let source = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        // SAFETY: the caller lets nothing else use the destination meanwhile.
        unsafe { driver()?.copy_to_device(device, DeviceAddress(to), source) }.map_err(code)
    }

    fn cuMemcpyDtoH_v2 + ptds(to: *mut c_void, from: CUdeviceptr, bytes: usize) {
        let device = current()?;
        if bytes == 0 {
            return Ok(());
        }
        present(to)?;
        check_size(bytes)?;
        // SAFETY: the caller passes `bytes` writable bytes that nothing else uses.
        let destination = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
        // SAFETY: the caller lets nothing write the source meanwhile.
        unsafe { driver()?.copy_to_host(device, destination, DeviceAddress(from)) }.map_err(code)
    }

    fn cuMemcpyDtoD_v2 + ptds(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        between(to, from, bytes, None)
    }

    fn cuMemcpyPeer + ptds(
        to: CUdeviceptr,
        to_context: CUcontext,
        from: CUdeviceptr,
        from_context: CUcontext,
        bytes: usize,
    ) {
        between_contexts((to_context, to), (from_context, from), bytes, None)
    }

    fn cuMemcpyHtoDAsync_v2 + ptsz(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) {
        current()?;
        present(from)?;
        check_size(bytes)?;
        let (device, stream) = target(Some(stream_handle(stream)))?;
        let order = HostOrder::of(device, stream, to, from.addr() as u64)?;
        let (driver, to, from) = (driver()?, DeviceAddress(to), from.cast::<u8>());
        // SAFETY: the caller passes `bytes` readable bytes, and keeps both ranges until the copy is
        // done.
        by_current(|| unsafe {
            match order {
                HostOrder::Now => {
                    let bytes = std::slice::from_raw_parts(from, bytes);
                    driver.copy_now_to_device(device, to, bytes, stream)
                }
                _ => driver.copy_to_device_async(device, to, from, bytes as u64, stream),
            }
        })?
        .map_err(code)
    }

    fn cuMemcpyDtoHAsync_v2 + ptsz(
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) {
        current()?;
        present(to)?;
        let (device, stream) = target(Some(stream_handle(stream)))?;
        let order = HostOrder::of(device, stream, to.addr() as u64, from)?;
        let (driver, from) = (driver()?, DeviceAddress(from));
        // SAFETY: the caller keeps both ranges until the copy is done.
        by_current(|| unsafe {
            driver.copy_to_host_async(device, to.cast(), from, bytes as u64, stream)
        })?
        .map_err(code)?;
        match order {
            // SAFETY: the stream was named in the call above.
            HostOrder::Done => unsafe { driver.stream_synchronize(device, stream) }.map_err(code),
            _ => Ok(()),
        }
    }

    fn cuMemcpyDtoDAsync_v2 + ptsz(
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) {
        by_current(|| between(to, from, bytes, Some(stream_handle(stream))))?
    }

    fn cuMemcpyPeerAsync + ptsz(
        to: CUdeviceptr,
        to_context: CUcontext,
        from: CUdeviceptr,
        from_context: CUcontext,
        bytes: usize,
        stream: CUstream,
    ) {
        let stream = Some(stream_handle(stream));
        between_contexts((to_context, to), (from_context, from), bytes, stream)
    }

    fn cuMemsetD8_v2 + ptds(to: CUdeviceptr, value: u8, count: usize) {
        fills::fill(to, &[value], count, None)
    }

    fn cuMemsetD8Async + ptsz(to: CUdeviceptr, value: u8, count: usize, stream: CUstream) {
        fills::fill(to, &[value], count, Some(stream_handle(stream)))
    }
}
