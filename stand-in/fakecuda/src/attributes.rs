//! Attributes of addresses.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_driver::{AccessFlags, DeviceAddress, Driver, Location, Ordinal, PointerAttribute};
use cuvmm_sys::{CUdeviceptr, CUpointer_attribute, CUresult};

use crate::buffers;
use crate::contexts::{self, current, name};
use crate::edge::{Outcome, code, export, export_also, present, put, take};
use crate::owned::{self, Object};
use crate::stack;
use crate::state::{driver, state};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Pool,
    Pinned,
    Managed,
    Registered,
    Mapping,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) kind: Kind,
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) device: Ordinal,
    pub(crate) on_host: bool,
}

impl Found {
    /// Returns `true` if the host accesses the memory directly: pinned, registered or managed
    /// memory.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Pinned | Kind::Registered | Kind::Managed)
    }

    fn object(&self) -> Object {
        match self.kind {
            Kind::Registered => Object::Registered(self.start),
            Kind::Pinned => Object::Pinned(self.start),
            _ => Object::Memory(self.start),
        }
    }
}

/// Returns the memory that contains an address, or `INVALID_VALUE`.
pub(crate) fn find(device: Ordinal, address: u64) -> Outcome<Found> {
    if let Some((start, known)) = owned::registered(address) {
        return Ok(Found {
            kind: Kind::Registered,
            start,
            size: known.size,
            device: Ordinal(known.device),
            on_host: true,
        });
    }
    let driver = driver()?;
    let ask = |attribute| {
        let asked = driver.pointer_attribute(device, DeviceAddress(address), attribute);
        asked.map_err(code)
    };
    let on_host = ask(PointerAttribute::MEMORY_TYPE)? == 1;
    let mapped = driver.get_access(DeviceAddress(address), Location::device(device));
    let kind = if mapped.is_ok() {
        Kind::Mapping
    } else if ask(PointerAttribute::IS_MANAGED)? != 0 {
        Kind::Managed
    } else if ask(PointerAttribute::MEMPOOL_HANDLE)? != 0 {
        Kind::Pool
    } else if on_host {
        Kind::Pinned
    } else {
        Kind::Plain
    };
    let (start, size) = match kind {
        Kind::Mapping => (
            PointerAttribute::MAPPING_BASE_ADDR,
            PointerAttribute::MAPPING_SIZE,
        ),
        _ => (
            PointerAttribute::RANGE_START_ADDR,
            PointerAttribute::RANGE_SIZE,
        ),
    };
    Ok(Found {
        kind,
        start: ask(start)?,
        size: ask(size)?,
        device: Ordinal(ask(PointerAttribute::DEVICE_ORDINAL)? as i32),
        on_host,
    })
}

/// The value of an attribute, in the width in which it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Int(u32),
    Long(u64),
    /// Zeros for the tokens of a former way to share memory with a network card.
    Tokens,
}

impl Value {
    /// # Safety
    /// The pointer is null or valid for writing the width of the attribute.
    unsafe fn put(self, data: *mut c_void) -> Outcome {
        // SAFETY: the caller promises a place of the attribute's width.
        unsafe {
            match self {
                Self::Int(int) => put(data.cast(), int),
                Self::Long(long) => put(data.cast(), long),
                Self::Tokens => put(data.cast(), [0u64; 2]),
            }
        }
    }
}

const CONTEXT: i32 = 1;
const MEMORY_TYPE: i32 = 2;
const DEVICE_POINTER: i32 = 3;
const HOST_POINTER: i32 = 4;
const TOKENS: i32 = 5;
const SYNC_MEMOPS: i32 = 6;
const DEVICE_ORDINAL: i32 = 9;
const RANGE_START: i32 = 11;
const RANGE_SIZE: i32 = 12;
const LAST: i32 = 21;

/// Returns the value of an attribute that does not apply.
fn nothing(which: i32) -> Value {
    match which {
        MEMORY_TYPE | SYNC_MEMOPS | 8 | 10 | 13 | 15 | 16 | 21 => Value::Int(0),
        DEVICE_ORDINAL => Value::Int(-2_i32 as u32),
        TOKENS => Value::Tokens,
        _ => Value::Long(0),
    }
}

/// Returns an attribute of an address, or `None` where it does not apply.
fn attribute(device: Ordinal, address: u64, which: i32) -> Outcome<Option<Value>> {
    use Value::{Int, Long};
    let found = find(device, address)?;
    let on_host = matches!(found.kind, Kind::Pinned | Kind::Registered);
    let plain = u32::from(found.kind == Kind::Plain);
    let asked = |which| {
        if found.kind == Kind::Registered {
            return Ok(0);
        }
        let asked = driver()?.pointer_attribute(device, DeviceAddress(address), which);
        asked.map_err(code)
    };
    let closed = access(device, address, found.kind)? == 0;
    Ok(Some(match which {
        CONTEXT => match (found.kind, owned::known(found.object())) {
            // Mappings and memory of pools belong to no context.
            (Kind::Mapping | Kind::Pool, _) => Long(0),
            (_, Some(known)) => Long(known.context as u64),
            (_, None) => Long(name(found.device).addr() as u64),
        },
        MEMORY_TYPE => Int(if found.on_host { 1 } else { 2 }),
        DEVICE_POINTER if closed => return Ok(None),
        DEVICE_POINTER => Long(address),
        HOST_POINTER if on_host || found.kind == Kind::Managed => Long(address),
        HOST_POINTER => return Ok(None),
        TOKENS => Value::Tokens,
        SYNC_MEMOPS if found.kind == Kind::Managed => Int(1),
        SYNC_MEMOPS => {
            let known = owned::known(found.object());
            Int(known.map_or(0, |known| known.flags >> 31))
        }
        8 => Int(u32::from(found.kind == Kind::Managed)),
        DEVICE_ORDINAL => Int(found.device.0 as u32),
        RANGE_START if found.kind == Kind::Registered => Long(found.start),
        RANGE_START => Long(asked(PointerAttribute::RANGE_START_ADDR)?),
        RANGE_SIZE if found.kind == Kind::Registered => Long(found.size),
        RANGE_SIZE => Long(asked(PointerAttribute::RANGE_SIZE)?),
        13 => Int(1),
        14 => Long(asked(PointerAttribute::ALLOWED_HANDLE_TYPES)?),
        15 => Int(asked(PointerAttribute::IS_GPU_DIRECT_RDMA_CAPABLE)? as u32),
        10 | 21 => Int(plain),
        16 => Int(access(device, address, found.kind)?),
        17 => Long(asked(PointerAttribute::MEMPOOL_HANDLE)?),
        18 | 19 if found.kind == Kind::Registered => {
            Long([found.size, found.start][which as usize - 18])
        }
        18 => Long(asked(PointerAttribute::MAPPING_SIZE)?),
        19 => Long(asked(PointerAttribute::MAPPING_BASE_ADDR)?),
        // The number of the buffer, and of the memory behind it.
        _ => Long(buffers::number(found.start)),
    }))
}

fn access(device: Ordinal, address: u64, kind: Kind) -> Outcome<u32> {
    if kind != Kind::Mapping {
        return Ok(AccessFlags::READ_WRITE.0 as u32);
    }
    let place = Location::device(device);
    let found = driver()?.get_access(DeviceAddress(address), place);
    Ok(found.map_err(code)?.0 as u32)
}

/// Returns the device of the current context, else device 0.
pub(crate) fn any_device() -> Outcome<Ordinal> {
    let state = state()?;
    let context = stack::top().map(|context| contexts::of(state, context));
    Ok(context.and_then(Result::ok).unwrap_or(Ordinal(0)))
}

export! {
    fn cuPointerGetAttribute(
        data: *mut c_void,
        which: CUpointer_attribute,
        address: CUdeviceptr,
    ) {
        let device = any_device()?;
        present(data)?;
        if !(CONTEXT..=LAST).contains(&which.0) {
            return Err(INVALID);
        }
        let value = attribute(device, address, which.0)?;
        // SAFETY: the caller passes a valid pointer for a value of the attribute's size.
        unsafe { value.unwrap_or(nothing(which.0)).put(data) }?;
        value.map(drop).ok_or(INVALID)
    }
}

export_also! {
    fn cuPointerGetAttributes(
        count: u32,
        attributes: *const i32,
        data: *const *mut c_void,
        address: CUdeviceptr,
    ) {
        let device = any_device()?;
        if count == 0 {
            return Err(INVALID);
        }
        present(attributes)?;
        present(data)?;
        // The count is not trusted: each attribute is checked before more memory is taken.
        let mut values = Vec::new();
        for index in 0..count as usize {
            // SAFETY: the caller passes `count` attributes and places.
            let (which, place) = unsafe { (take(attributes.add(index))?, take(data.add(index))?) };
            if !(CONTEXT..=LAST).contains(&which) {
                return Err(INVALID);
            }
            let value = match attribute(device, address, which) {
                // Memory of the program has a host address and no range.
                Err(INVALID) if which == HOST_POINTER => Value::Long(address),
                Err(INVALID) if [RANGE_START, RANGE_SIZE].contains(&which) => continue,
                Err(INVALID) => nothing(which),
                other => other?.unwrap_or(nothing(which)),
            };
            values.push((value, place));
        }
        for (value, place) in values {
            // SAFETY: the caller passes a valid pointer for each value.
            unsafe { value.put(place) }?;
        }
        Ok(())
    }

    fn cuPointerSetAttribute(data: *const c_void, which: i32, address: CUdeviceptr) {
        const SYNCHRONOUS: i32 = 6;
        current()?;
        present(data)?;
        if which != SYNCHRONOUS {
            return Err(INVALID);
        }
        let device = current()?;
        let found = find(device, address)?;
        match found.kind {
            Kind::Registered | Kind::Pinned => return Err(INVALID),
            Kind::Mapping => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            _ => (),
        }
        // SAFETY: the caller passes an `unsigned int`.
        let on = unsafe { take(data.cast::<u32>()) }? != 0;
        owned::change(Object::Memory(found.start), |known| {
            known.flags = known.flags & !(1 << 31) | u32::from(on) << 31;
        });
        Ok(())
    }
}
