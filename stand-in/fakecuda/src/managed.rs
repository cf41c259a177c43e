//! Managed memory.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_driver::{
    Advice, DeviceAddress, Driver, Location, LocationKind, Ordinal, RangeAttribute,
};
use cuvmm_sys::{
    CU_DEVICE_CPU, CU_DEVICE_INVALID, CUdevice, CUdeviceptr, CUmem_advise, CUmem_range_attribute,
    CUmemLocation, CUresult, CUstream,
};

use crate::contexts::current;
use crate::edge::{LONGEST, Outcome, code, export, present, put};
use crate::owned::{self, Known, Object};
use crate::physicals::location;
use crate::state::driver;
use crate::streams::{stream_handle, target};

/// Converts the first versions' device number, -1 for the host, to a location.
fn place(device: CUdevice) -> Location {
    if device == CU_DEVICE_CPU {
        Location::HOST
    } else {
        Location::device(Ordinal(device))
    }
}

fn prefetch(address: CUdeviceptr, bytes: usize, to: Location, stream: CUstream) -> Outcome {
    let (device, stream) = target(Some(stream_handle(stream)))?;
    // SAFETY: the caller passes a stream that it created and has not destroyed.
    unsafe { driver()?.prefetch(device, DeviceAddress(address), bytes as u64, to, stream) }
        .map_err(code)
}

fn advise(address: CUdeviceptr, bytes: usize, advice: CUmem_advise, at: Location) -> Outcome {
    let (device, advice) = (current()?, Advice(advice.0));
    driver()?
        .advise(device, DeviceAddress(address), bytes as u64, advice, at)
        .map_err(code)
}

/// Writes the locations that access a range to an array, as many as fit, and fills the rest with
/// the number of no device.
fn accessed_by(
    users: *mut CUdevice,
    users_bytes: usize,
    device: Ordinal,
    address: DeviceAddress,
    bytes: usize,
) -> Outcome {
    let longest = LONGEST * size_of::<CUdevice>();
    if !(1..=longest).contains(&users_bytes) || !users_bytes.is_multiple_of(size_of::<CUdevice>()) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let found = driver()?
        .range_accessed_by(device, address, bytes as u64)
        .map_err(code)?;
    let numbers = found.iter().map(|user| match user.kind {
        LocationKind::DEVICE => user.id,
        _ => CU_DEVICE_CPU,
    });
    let numbers = numbers.chain(std::iter::repeat(CU_DEVICE_INVALID));
    for (index, number) in numbers
        .take(users_bytes / size_of::<CUdevice>())
        .enumerate()
    {
        // SAFETY: the caller passes an array of `users_bytes` bytes.
        unsafe { put(users.add(index), number) }?;
    }
    Ok(())
}

export! {
    fn cuMemAllocManaged(address: *mut CUdeviceptr, bytes: usize, flags: u32) {
        let device = current()?;
        present(address)?;
        let made = driver()?.managed_alloc(device, bytes as u64, flags).map_err(code)?;
        owned::own(Object::Memory(made.0), Known::of(device));
        // SAFETY: C's promise (see `edge`).
        unsafe { put(address, made.0) }
    }

    fn cuMemPrefetchAsync + ptsz(
        address: CUdeviceptr,
        bytes: usize,
        destination: CUdevice,
        stream: CUstream,
    ) {
        prefetch(address, bytes, place(destination), stream)
    }

    fn cuMemPrefetchAsync_v2 + ptsz(
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
        if attribute == CUmem_range_attribute::CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY {
            return accessed_by(data.cast(), data_bytes, device, DeviceAddress(address), bytes);
        }
        if data_bytes != size_of::<i32>() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let (address, asked) = (DeviceAddress(address), RangeAttribute(attribute.0));
        let found = driver()?
            .range_attribute(device, address, bytes as u64, asked)
            .map_err(code)?;
        // SAFETY: the caller passes a pointer to four writable bytes.
        unsafe { put(data.cast(), found) }
    }
}
