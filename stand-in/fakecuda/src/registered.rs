//! The program's registered host memory, and the flags of pinned memory.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_sys::CUresult;

use crate::attributes::{self, Kind};
use crate::buffers;
use crate::contexts::current;
use crate::edge::{Outcome, export_also, present, put};
use crate::owned::{self, Known, Object};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const TWICE: CUresult = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
const NEVER: CUresult = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;

/// The existing flags: portable, mapped into the device, memory of a device's registers, and
/// read-only.
const FLAGS: u32 = 0xF;

/// The flag of memory of a device's registers, which no program's memory is.
const IO: u32 = 4;

fn register(memory: *mut c_void, bytes: usize, flags: u32) -> Outcome {
    let device = current()?;
    let (start, size) = (memory.addr() as u64, bytes as u64);
    if start == 0 || size == 0 || flags & !FLAGS != 0 || start.checked_add(size).is_none() {
        return Err(INVALID);
    }
    if flags & IO != 0 {
        return Err(INVALID);
    }
    if owned::overlapping(start, size).is_some() {
        return Err(TWICE);
    }
    match attributes::find(device, start) {
        Ok(_) => return Err(INVALID),
        Err(INVALID) => (),
        Err(other) => return Err(other),
    }
    if !crate::anywhere::is_readable(start, bytes) {
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
        current()?;
        let start = memory.addr() as u64;
        if start == 0 {
            return Err(INVALID);
        }
        if owned::known(Object::Registered(start)).is_none() {
            let elsewhere = attributes::find(current()?, start).is_ok();
            return Err(if elsewhere { INVALID } else { NEVER });
        }
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
