//! Attributes of addresses.
//!
//! `unsafe` is allowed here to export functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_driver::{AccessFlags, DeviceAddress, Driver, Location, Ordinal, PointerAttribute};
use cuvmm_sys::{CUdeviceptr, CUpointer_attribute, CUresult};

use crate::buffers;
use crate::contexts::{current, name};
use crate::edge::{Outcome, code, export, export_also, present, put, take};
use crate::owned::{self, Object};
use crate::state::{driver, state};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// The kinds of memory that an address may belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Pool,
    Pinned,
    Managed,
    Registered,
    Mapping,
}

/// The memory that contains an address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) kind: Kind,
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) device: Ordinal,
}

/// Returns the memory that contains an address. `INVALID_VALUE` means that there is none.
pub(crate) fn find(device: Ordinal, address: u64) -> Outcome<Found> {
    if let Some((start, known)) = owned::registered(address) {
        return Ok(Found {
            kind: Kind::Registered,
            start,
            size: known.size,
            device,
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
    Ok(Found {
        kind,
        start: ask(PointerAttribute::RANGE_START_ADDR)?,
        size: ask(PointerAttribute::RANGE_SIZE)?,
        device: Ordinal(ask(PointerAttribute::DEVICE_ORDINAL)? as i32),
    })
}

/// The value of an attribute, in the width in which it is written.
#[derive(Clone, Copy, Debug)]
enum Value {
    Byte(u8),
    Int(u32),
    Long(u64),
}

impl Value {
    /// Writes the value.
    ///
    /// # Safety
    /// The pointer is null or valid for writing the width of the attribute.
    unsafe fn put(self, data: *mut c_void) -> Outcome {
        // SAFETY: the caller promises a place of the attribute's width.
        unsafe {
            match self {
                Self::Byte(byte) => put(data.cast(), byte),
                Self::Int(int) => put(data.cast(), int),
                Self::Long(long) => put(data.cast(), long),
            }
        }
    }
}

/// Returns an attribute of an address.
fn attribute(device: Ordinal, address: u64, which: i32) -> Outcome<Value> {
    use Value::{Byte, Int, Long};
    if !(1..=20).contains(&which) || which == 5 {
        return Err(INVALID);
    }
    let found = find(device, address)?;
    let on_host = matches!(found.kind, Kind::Pinned | Kind::Registered);
    let touchable = on_host || found.kind == Kind::Managed;
    let object = match found.kind {
        Kind::Registered => Object::Registered(found.start),
        Kind::Pinned => Object::Pinned(found.start),
        _ => Object::Memory(found.start),
    };
    let asked = |which| {
        let driver = driver()?;
        let asked = driver.pointer_attribute(device, DeviceAddress(address), which);
        asked.map_err(code)
    };
    let known = owned::known(object);
    Ok(match which {
        1 => match (found.kind, known) {
            // Mappings and memory of pools belong to no context.
            (Kind::Mapping | Kind::Pool, _) => Long(0),
            (_, Some(known)) => Long(known.context as u64),
            (_, None) => Long(name(found.device).addr() as u64),
        },
        2 => Int(if on_host { 1 } else { 2 }),
        3 => Long(address),
        4 if touchable => Long(address),
        4 => return Err(INVALID),
        6 => Int(known.map_or(0, |known| known.flags >> 31)),
        7 => Long(buffers::number(found.start)),
        8 => Byte(u8::from(found.kind == Kind::Managed)),
        9 => Int(found.device.0 as u32),
        10 => Byte(u8::from(found.kind == Kind::Plain)),
        11 => Long(found.start),
        12 => Long(found.size),
        13 => Byte(1),
        14 if found.kind == Kind::Registered => Long(0),
        14 => Long(asked(PointerAttribute::ALLOWED_HANDLE_TYPES)?),
        15 => Byte(u8::from(found.kind == Kind::Plain)),
        16 => Int(access(device, address, found.kind)?),
        17 if found.kind == Kind::Registered => Long(0),
        17 => Long(asked(PointerAttribute::MEMPOOL_HANDLE)?),
        18 => Long(found.size),
        19 => Long(found.start),
        _ => Long(buffers::number(found.start)),
    })
}

/// Returns the access of a device to an address.
fn access(device: Ordinal, address: u64, kind: Kind) -> Outcome<u32> {
    if kind != Kind::Mapping {
        return Ok(AccessFlags::READ_WRITE.0 as u32);
    }
    let place = Location::device(device);
    let found = driver()?.get_access(DeviceAddress(address), place);
    Ok(found.map_err(code)?.0 as u32)
}

/// Returns the value of an attribute for an address that belongs to no memory.
fn nothing(which: i32) -> Value {
    match which {
        8 | 10 | 13 | 15 => Value::Byte(0),
        9 => Value::Int(-2_i32 as u32),
        2 | 6 | 16 => Value::Int(0),
        _ => Value::Long(0),
    }
}

export! {
    fn cuPointerGetAttribute(
        data: *mut c_void,
        which: CUpointer_attribute,
        address: CUdeviceptr,
    ) {
        let device = current()?;
        present(data)?;
        let value = attribute(device, address, which.0)?;
        // SAFETY: the caller passes a valid pointer for a value of the attribute's size.
        unsafe { value.put(data) }
    }
}

export_also! {
    fn cuPointerGetAttributes(
        count: u32,
        attributes: *const i32,
        data: *const *mut c_void,
        address: CUdeviceptr,
    ) {
        let device = current()?;
        if count == 0 {
            return Err(INVALID);
        }
        present(attributes)?;
        present(data)?;
        let mut values = Vec::with_capacity(count as usize);
        for index in 0..count as usize {
            // SAFETY: the caller passes `count` attributes and places.
            let (which, place) = unsafe { (take(attributes.add(index))?, take(data.add(index))?) };
            if !(1..=20).contains(&which) {
                return Err(INVALID);
            }
            let value = match attribute(device, address, which) {
                Err(INVALID) => nothing(which),
                other => other?,
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
        if matches!(found.kind, Kind::Registered | Kind::Pinned) {
            return Err(INVALID);
        }
        state()?;
        // SAFETY: the caller passes an `unsigned int`.
        let on = unsafe { take(data.cast::<u32>()) }? != 0;
        owned::change(Object::Memory(found.start), |known| {
            known.flags = known.flags & !(1 << 31) | u32::from(on) << 31;
        });
        Ok(())
    }
}
