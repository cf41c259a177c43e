//! Queries about addresses.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};
use std::os::fd::IntoRawFd as _;

use cuvmm_driver::{DeviceAddress, Driver};
use cuvmm_sys::{CUdeviceptr, CUipcMemHandle, CUmemRangeHandleType, CUresult};

use crate::contexts::current;
use crate::edge::{code, export, present, put};
use crate::state::driver;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

export! {
    fn cuMemGetAddressRange_v2(
        base: *mut CUdeviceptr,
        size: *mut usize,
        address: CUdeviceptr,
    ) {
        let device = current()?;
        let (start, bytes) =
            driver()?.address_range(device, DeviceAddress(address)).map_err(code)?;
        // A null pointer asks for no result.
        if !base.is_null() {
            // SAFETY: C's promise (see `edge`).
            unsafe { put(base, start.0) }?;
        }
        if !size.is_null() {
            // SAFETY: C's promise (see `edge`).
            unsafe { put(size, bytes as usize) }?;
        }
        Ok(())
    }

    fn cuMemGetHandleForAddressRange(
        handle: *mut c_void,
        address: CUdeviceptr,
        size: usize,
        handle_type: CUmemRangeHandleType,
        flags: u64,
    ) {
        let device = current()?;
        present(handle)?;
        if handle_type != CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD {
            return Err(INVALID);
        }
        // The flag asks for a mapping through PCIe where there are other ways; here there are none.
        match flags {
            0 => (),
            1 => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            _ => return Err(INVALID),
        }
        // SAFETY: the caller keeps the range mapped while it uses the descriptor.
        let fd = unsafe { driver()?.dma_buf(device, DeviceAddress(address), size as u64) }
            .map_err(code)?;
        // SAFETY: the caller passes a valid pointer for a descriptor.
        unsafe { put(handle.cast(), fd.into_raw_fd()) }
    }

    fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr) {
        let device = current()?;
        present(handle)?;
        let bytes = driver()?.ipc_mem_handle(device, DeviceAddress(address)).map_err(code)?;
        let reserved = bytes.map(|byte| byte as c_char);
        // SAFETY: C's promise (see `edge`).
        unsafe { put(handle, CUipcMemHandle { reserved }) }
    }
}
