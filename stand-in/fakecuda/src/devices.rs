//! Queries about devices: number, names, attributes, memory.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_char;

use cuvmm_driver::Driver;
use cuvmm_sys::{CUdevice, CUdevice_attribute, CUresult, CUuuid};

use crate::contexts::current;
use crate::edge::{Outcome, code, export, present, put};
use crate::identity;
use crate::state::{driver, state};

/// # Safety
/// The pointer is null or valid for writing.
unsafe fn identity(uuid: *mut CUuuid, device: CUdevice) -> Outcome {
    let state = state()?;
    present(uuid)?;
    let device = state.device(device)?;
    let bytes = state.driver.device_uuid(device).map_err(code)?;
    // SAFETY: as the caller promises.
    unsafe {
        put(
            uuid,
            CUuuid {
                bytes: bytes.map(|byte| byte as c_char),
            },
        )
    }
}

export! {
    fn cuDeviceGetCount(count: *mut i32) {
        let found = driver()?.device_count().map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(count, found) }
    }

    fn cuDeviceGet(device: *mut CUdevice, ordinal: i32) {
        let state = state()?;
        present(device)?;
        let found = state.device(ordinal)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(device, found.0) }
    }

    fn cuDeviceGetName(name: *mut c_char, len: i32, device: CUdevice) {
        let state = state()?;
        present(name)?;
        // A negative length passes for a large one, as measured.
        let room = (len as u32 as usize)
            .checked_sub(1)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let text = state.driver.device_name(state.device(device)?).map_err(code)?;
        let written = text.bytes().take(room).chain(std::iter::once(0));
        for (index, byte) in written.enumerate() {
            // SAFETY: the caller passes `len` writable bytes, and no more are written.
            unsafe { put(name.add(index), byte as c_char) }?;
        }
        Ok(())
    }

    fn cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice) {
        // SAFETY: C's promise (see `edge`).
        unsafe { identity(uuid, device) }
    }

    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) {
        // SAFETY: C's promise (see `edge`).
        unsafe { identity(uuid, device) }
    }

    fn cuDeviceGetAttribute(value: *mut i32, attribute: CUdevice_attribute, device: CUdevice) {
        let state = state()?;
        present(value)?;
        let device = state.device(device)?;
        let found = identity::attribute(device, attribute.0)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(value, found) }
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) {
        let state = state()?;
        present(bytes)?;
        let found = state.driver.total_memory(state.device(device)?).map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(bytes, found as usize) }
    }

    fn cuDeviceCanAccessPeer(can: *mut i32, device: CUdevice, peer: CUdevice) {
        let state = state()?;
        present(can)?;
        let (device, peer) = (state.device(device)?, state.device(peer)?);
        let found = state.driver.can_access_peer(device, peer).map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(can, i32::from(found)) }
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let device = current()?;
        present(free)?;
        present(total)?;
        let found = driver()?.memory_info(device).map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe {
            put(free, found.free as usize)?;
            put(total, found.total as usize)
        }
    }
}
