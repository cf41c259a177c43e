//! The program's registered host memory, and the flags of pinned memory.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_sys::CUresult;

use crate::attributes::{self, Kind};
use crate::buffers;
use crate::contexts::current;
use crate::edge::{Outcome, code, export_also, present, put};
use crate::owned::{self, Known, Object};
use crate::state::driver;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn register(memory: *mut c_void, bytes: usize, flags: u32) -> Outcome {
    let (device, driver) = (current()?, driver()?);
    let (start, size) = (memory.addr() as u64, bytes as u64);
    // SAFETY: the caller of the exported function keeps the memory until it is unregistered.
    unsafe { driver.host_register(device, memory.cast(), size, flags) }.map_err(code)?;
    if !crate::anywhere::is_readable(start, bytes) {
        // SAFETY: registered above, and nothing has used it since.
        unsafe { driver.host_unregister(device, memory.cast()) }.map_err(code)?;
        return Err(INVALID);
    }
    let known = Known {
        flags,
        size,
        ..Known::of(device)
    };
    owned::own(Object::Registered(start), known);
    Ok(())
}

export_also! {
    fn cuMemHostRegister(memory: *mut c_void, bytes: usize, flags: u32) {
        register(memory, bytes, flags)
    }

    fn cuMemHostRegister_v2(memory: *mut c_void, bytes: usize, flags: u32) {
        register(memory, bytes, flags)
    }

    fn cuMemHostUnregister(memory: *mut c_void) {
        let (device, driver) = (current()?, driver()?);
        let start = memory.addr() as u64;
        // SAFETY: the caller of the exported function has no copy of the memory running.
        unsafe { driver.host_unregister(device, memory.cast()) }.map_err(code)?;
        owned::forget(Object::Registered(start));
        buffers::forget(start, 1);
        Ok(())
    }

    fn cuMemHostGetFlags(flags: *mut u32, memory: *mut c_void) {
        const PORTABLE: u32 = 1;
        const MAPPED: u32 = 2;
        const WRITE_COMBINED: u32 = 4;
        let device = current()?;
        present(flags)?;
        let found = attributes::find(device, memory.addr() as u64)?;
        let object = match found.kind {
            Kind::Pinned => Object::Pinned(found.start),
            Kind::Registered => Object::Registered(found.start),
            _ => return Err(INVALID),
        };
        let known = owned::known(object).ok_or(INVALID)?;
        let shown = match found.kind {
            Kind::Registered => PORTABLE,
            _ => WRITE_COMBINED,
        };
        // All host memory is mapped into the devices' one address space.
        // SAFETY: C's promise (see `edge`).
        unsafe { put(flags, known.flags & shown | MAPPED) }
    }
}
