//! Objects that belong to a context and end with it.
//!
//! `unsafe` is allowed here to end them: their context ends, so nothing may use them any more.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use cuvmm_driver::{DeviceAddress, Driver, EventHandle, Ordinal, StreamHandle};
use cuvmm_model::host::HostDriver;
use cuvmm_sys::CUcontext;

use crate::stack::top;

/// An object of a context, by its handle or address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Object {
    Stream(u64),
    Event(u64),
    /// Device memory that `cuMemFree` frees, and managed memory.
    Memory(u64),
    /// Memory that `cuMemFreeHost` frees.
    Pinned(u64),
    /// A graph that can be launched. It belongs to the process.
    Executable(u64),
    /// Registered host memory of the program, by its first byte.
    Registered(u64),
}

/// Properties of an object that the host driver does not keep.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    pub(crate) context: usize,
    pub(crate) device: i32,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) size: u64,
    /// A number that no other object has.
    pub(crate) id: u64,
    pub(crate) recorded: Option<Instant>,
}

impl Known {
    /// Returns the properties of an object on a device, all others default.
    pub(crate) fn of(device: Ordinal) -> Self {
        Self {
            device: device.0,
            ..Self::default()
        }
    }
}

#[derive(Debug)]
struct Table {
    objects: BTreeMap<Object, Known>,
    last: u64,
}

static TABLE: Mutex<Table> = Mutex::new(Table {
    objects: BTreeMap::new(),
    last: 0,
});

fn table<T>(act: impl FnOnce(&mut Table) -> T) -> T {
    act(&mut TABLE.lock().unwrap_or_else(PoisonError::into_inner))
}

pub(crate) fn own(object: Object, known: Known) {
    let context = top().map_or(0, |context| context.addr());
    table(|table| {
        table.last += 1;
        let id = table.last;
        let known = Known {
            context,
            id,
            ..known
        };
        table.objects.insert(object, known);
    });
}

pub(crate) fn forget(object: Object) {
    table(|table| table.objects.remove(&object));
}

pub(crate) fn known(object: Object) -> Option<Known> {
    table(|table| table.objects.get(&object).copied())
}

pub(crate) fn change(object: Object, act: impl FnOnce(&mut Known)) {
    table(|table| table.objects.get_mut(&object).map(act));
}

/// Returns the registered memory that contains an address, by its first byte, with its properties.
pub(crate) fn registered(address: u64) -> Option<(u64, Known)> {
    table(|table| {
        let below = Object::Registered(0)..=Object::Registered(address);
        let (object, known) = table.objects.range(below).next_back()?;
        let Object::Registered(start) = *object else {
            return None;
        };
        (address - start < known.size).then_some((start, *known))
    })
}

pub(crate) fn end(driver: &HostDriver, device: Ordinal, context: CUcontext) {
    let of_it = |known: &Known| known.context == context.addr();
    let ended: Vec<Object> = table(|table| {
        let found = table.objects.iter().filter(|(_, known)| of_it(known));
        found.map(|(&object, _)| object).collect()
    });
    for object in ended {
        forget(object);
        // The host driver refuses an object that is gone already, which makes no difference.
        // SAFETY: the context that the objects belong to ends, and with it all use of them.
        let _ = unsafe {
            match object {
                Object::Stream(stream) => driver.stream_destroy(device, StreamHandle(stream)),
                Object::Event(event) => driver.event_destroy(device, EventHandle(event)),
                Object::Memory(address) => driver.free(device, DeviceAddress(address)),
                Object::Pinned(address) => {
                    let memory = std::ptr::with_exposed_provenance_mut(address as usize);
                    driver.host_free(device, memory)
                }
                Object::Registered(address) => {
                    let memory = std::ptr::with_exposed_provenance_mut(address as usize);
                    driver.host_unregister(device, memory)
                }
                Object::Executable(_) => Ok(()),
            }
        };
    }
}
