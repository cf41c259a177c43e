//! Reservations, mappings and access.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use cuvmm_driver::{AccessDesc, AccessFlags, DeviceAddress, Driver, PhysicalHandle};
use cuvmm_sys::{CUdeviceptr, CUmemAccessDesc, CUmemGenericAllocationHandle, CUmemLocation};

use crate::buffers;
use crate::edge::{code, export, present, put, take, take_all};
use crate::physicals::location;
use crate::state::driver;

export! {
    fn cuMemAddressReserve(
        address: *mut CUdeviceptr,
        size: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: u64,
    ) {
        let driver = driver()?;
        present(address)?;
        let found = driver
            .reserve(size as u64, alignment as u64, DeviceAddress(hint), flags)
            .map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(address, found.0) }
    }

    fn cuMemAddressFree(address: CUdeviceptr, size: usize) {
        // SAFETY: the caller passes a reservation that nothing uses.
        unsafe { driver()?.free_reservation(DeviceAddress(address), size as u64) }.map_err(code)
    }

    fn cuMemMap(
        address: CUdeviceptr,
        size: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: u64,
    ) {
        let (address, handle) = (DeviceAddress(address), PhysicalHandle(handle));
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.map(address, size as u64, offset as u64, handle, flags) }.map_err(code)
    }

    fn cuMemUnmap(address: CUdeviceptr, size: usize) {
        // SAFETY: the caller passes a range that nothing uses.
        unsafe { driver()?.unmap(DeviceAddress(address), size as u64) }.map_err(code)?;
        buffers::forget(address, size as u64);
        Ok(())
    }

    fn cuMemSetAccess(
        address: CUdeviceptr,
        size: usize,
        descriptors: *const CUmemAccessDesc,
        count: usize,
    ) {
        let driver = driver()?;
        present(descriptors)?;
        // SAFETY: the caller passes `count` descriptors.
        let access: Vec<_> = unsafe { take_all(descriptors, count) }?
            .into_iter()
            .map(|access| AccessDesc {
                location: location(access.location),
                flags: AccessFlags(access.flags.0),
            })
            .collect();
        // SAFETY: the caller passes a range that nothing uses with access that the call removes.
        unsafe { driver.set_access(DeviceAddress(address), size as u64, &access) }.map_err(code)
    }

    fn cuMemGetAccess(flags: *mut u64, place: *const CUmemLocation, address: CUdeviceptr) {
        let driver = driver()?;
        present(flags)?;
        // SAFETY: the caller passes a location, or null.
        let place = location(unsafe { take(place) }?);
        let found = driver.get_access(DeviceAddress(address), place).map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(flags, found.0 as u64) }
    }
}
