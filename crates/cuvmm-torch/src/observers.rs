//! The observer of shortages: a function of the program that is called after a request of PyTorch
//! has found too little memory, before PyTorch gets the exception.
//!
//! It takes the interpreter's lock, so it is called as the [collector](crate::collecting) is: with no
//! lock of this library held, not within itself or a collection, and not once the interpreter ends.
//!
//! `unsafe` is used to call the observer.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use crate::edge::guard;
use crate::{collecting, fork, heaps};

/// A function that gets a device, the bytes of the request, the bytes of the device's limit, and those
/// that are free on the device.
pub(crate) type Observer = unsafe extern "C" fn(c_int, u64, u64, u64);

static OBSERVER: Mutex<Option<Observer>> = Mutex::new(None);

/// Sets the observer of shortages: a function that is called when a request of
/// [`cuvmm_malloc`](crate::cuvmm_malloc) has found too little memory, with the device, the bytes of the
/// request, the limit of the device's memory in bytes, and the bytes that the driver has free there.
/// Null removes it.
///
/// The observer runs on the allocating thread, with no lock of this library held, also for memory of
/// pools. It is not called from within itself or a collector.
///
/// # Safety
/// Any thread may call the observer until it is replaced, and it unwinds into no caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_set_observer(observer: Option<Observer>) {
    guard((), || {
        // A forked child may find the lock held, and allocates nothing.
        if !fork::is_child() {
            *OBSERVER.lock().unwrap_or_else(PoisonError::into_inner) = observer;
        }
    });
}

/// Calls the observer, if one is set.
pub(crate) fn notify(device: c_int, bytes: u64) {
    let observer = *OBSERVER.lock().unwrap_or_else(PoisonError::into_inner);
    let (Some(observer), Some(of)) = (observer, heaps::known(device)) else {
        return;
    };
    let limit = of.pool.stats().limit;
    let free = of.device.memory_info().map_or(0, |info| info.free);
    // SAFETY: its setter permits calls from any thread until it is replaced.
    collecting::within(|| unsafe { observer(device, bytes, limit, free) });
}
