//! Managed memory.
//!
//! `unsafe` is allowed here to export functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_driver::{Advice, DeviceAddress, Driver, Location, Ordinal, RangeAttribute};
use cuvmm_sys::{
    CU_DEVICE_CPU, CUdevice, CUdeviceptr, CUmem_advise, CUmem_range_attribute, CUmemLocation,
    CUresult, CUstream,
};

use crate::contexts::current;
use crate::edge::{Outcome, code, export, present, put};
use crate::physicals::location;
use crate::state::driver;
use crate::streams::stream_handle;

/// A place in the words of the first versions: a device, or -1 for the host.
fn place(device: CUdevice) -> Location {
    if device == CU_DEVICE_CPU {
        Location::HOST
    } else {
        Location::device(Ordinal(device))
    }
}

fn prefetch(address: CUdeviceptr, bytes: usize, to: Location, stream: CUstream) -> Outcome {
    let (device, stream) = (current()?, stream_handle(stream));
    // SAFETY: the caller passes a stream that it made and has not destroyed.
    unsafe { driver()?.prefetch(device, DeviceAddress(address), bytes as u64, to, stream) }
        .map_err(code)
}

fn advise(address: CUdeviceptr, bytes: usize, advice: CUmem_advise, at: Location) -> Outcome {
    let (device, advice) = (current()?, Advice(advice.0));
    driver()?
        .advise(device, DeviceAddress(address), bytes as u64, advice, at)
        .map_err(code)
}

export! {
    fn cuMemAllocManaged(address: *mut CUdeviceptr, bytes: usize, flags: u32) {
        let device = current()?;
        present(address)?;
        let made = driver()?.managed_alloc(device, bytes as u64, flags).map_err(code)?;
        // SAFETY: the caller passes a place for the answer.
        unsafe { put(address, made.0) }
    }

    fn cuMemPrefetchAsync(
        address: CUdeviceptr,
        bytes: usize,
        destination: CUdevice,
        stream: CUstream,
    ) {
        prefetch(address, bytes, place(destination), stream)
    }

    fn cuMemPrefetchAsync_v2(
        address: CUdeviceptr,
        bytes: usize,
        destination: CUmemLocation,
        flags: u32,
        stream: CUstream,
    ) {
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        prefetch(address, bytes, location(destination), stream)
    }

    fn cuMemAdvise(
        address: CUdeviceptr,
        bytes: usize,
        advice: CUmem_advise,
        device: CUdevice,
    ) {
        advise(address, bytes, advice, place(device))
    }

    fn cuMemAdvise_v2(
        address: CUdeviceptr,
        bytes: usize,
        advice: CUmem_advise,
        at: CUmemLocation,
    ) {
        advise(address, bytes, advice, location(at))
    }

    fn cuMemRangeGetAttribute(
        data: *mut c_void,
        data_bytes: usize,
        attribute: CUmem_range_attribute,
        address: CUdeviceptr,
        bytes: usize,
    ) {
        let device = current()?;
        present(data)?;
        if data_bytes != size_of::<i32>() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let (address, asked) = (DeviceAddress(address), RangeAttribute(attribute.0));
        let found = driver()?
            .range_attribute(device, address, bytes as u64, asked)
            .map_err(code)?;
        // SAFETY: the caller passes a place of four bytes.
        unsafe { put(data.cast(), found) }
    }
}
