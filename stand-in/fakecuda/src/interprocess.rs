//! Legacy interprocess handles of events and memory.
//!
//! An event's handle names the process and the event. A process's work is done in the call that
//! submits it, unless a test holds a stream back, so another process's recorded event is complete.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::path::Path;

use cuvmm_driver::{DeviceAddress, EventFlags};
use cuvmm_sys::{CUdeviceptr, CUevent, CUipcMemHandle, CUresult};

use crate::buffers;
use crate::contexts::current;
use crate::edge::{Outcome, code, export_also, present, put};
use crate::owned::{self, Known, Object};
use crate::state::driver;
use crate::streams::{SHARED, TIMELESS, event_handle};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const INVALID_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;

/// The first bytes of an event's handle.
const MARK: [u8; 8] = *b"fakeevnt";

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct EventName {
    bytes: [u8; 64],
}

fn number(bytes: &[u8; 64], at: usize) -> u64 {
    let mut word = [0; 8];
    for (to, from) in word.iter_mut().zip(&bytes[at..]) {
        *to = *from;
    }
    u64::from_le_bytes(word)
}

export_also! {
    fn cuIpcGetEventHandle(name: *mut EventName, event: CUevent) {
        current()?;
        present(name)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(name, EventName { bytes: [0; 64] }) }?;
        let event = event_handle(event);
        let known = owned::known(Object::Event(event.0)).ok_or(INVALID_HANDLE)?;
        if known.flags & SHARED == 0 {
            return Err(INVALID_HANDLE);
        }
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&MARK);
        bytes[8..16].copy_from_slice(&u64::from(std::process::id()).to_le_bytes());
        bytes[16..24].copy_from_slice(&event.0.to_le_bytes());
        // SAFETY: C's promise (see `edge`).
        unsafe { put(name, EventName { bytes }) }
    }

    fn cuIpcOpenEventHandle(event: *mut CUevent, name: EventName) {
        let device = current()?;
        present(event)?;
        let process = number(&name.bytes, 8);
        let alive = Path::new(&format!("/proc/{process}")).exists();
        if name.bytes[..8] != MARK || !alive {
            return Err(CUresult::CUDA_ERROR_MAP_FAILED);
        }
        if process == u64::from(std::process::id()) {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        let flags = EventFlags::from_bits_retain(TIMELESS);
        let made = driver()?.event_create(device, flags).map_err(code)?;
        let known = Known { flags: TIMELESS, ..Known::of(device) };
        owned::own(Object::Event(made.0), known);
        // SAFETY: C's promise (see `edge`).
        unsafe { put(event, std::ptr::without_provenance_mut(made.0 as usize)) }
    }

    fn cuIpcOpenMemHandle(address: *mut CUdeviceptr, name: CUipcMemHandle, flags: u32) {
        // SAFETY: C's promise (see `edge`).
        unsafe { open(address, &name, flags) }
    }

    fn cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, name: CUipcMemHandle, flags: u32) {
        // SAFETY: C's promise (see `edge`).
        unsafe { open(address, &name, flags) }
    }

    fn cuIpcCloseMemHandle(address: CUdeviceptr) {
        driver()?.ipc_close(current()?, DeviceAddress(address))?;
        buffers::forget(address, 1);
        Ok(())
    }
}

/// # Safety
/// The pointer is null or valid for writing.
unsafe fn open(address: *mut CUdeviceptr, name: &CUipcMemHandle, flags: u32) -> Outcome {
    /// The flag that enables access to peers, which the call requires.
    const LAZY: u32 = 1;
    let device = current()?;
    present(address)?;
    if flags != LAZY {
        return Err(INVALID);
    }
    let handle = name.reserved.map(|byte| byte as u8);
    let opened = driver()?.ipc_open(device, &handle)?;
    // SAFETY: as the caller promises.
    unsafe { put(address, opened.0) }
}
