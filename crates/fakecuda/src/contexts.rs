//! Primary contexts, and each thread's stack of current contexts.
//!
//! A context is a number that has the type of a pointer: the device's ordinal plus one. It is never
//! dereferenced.
//!
//! `unsafe` is allowed here to export functions (see `state`).
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::sync::atomic::Ordering;

use cuvmm_driver::{EventHandle, Ordinal};
use cuvmm_sys::{CUcontext, CUdevice, CUevent, CUresult};

use crate::edge::{Outcome, code, export, present, put};
use crate::state::{State, driver, state};

const NONE: CUresult = CUresult::CUDA_ERROR_INVALID_CONTEXT;

thread_local! {
    /// The devices whose contexts were pushed on this thread. The last one is current.
    static CURRENT: RefCell<Vec<Ordinal>> = const { RefCell::new(Vec::new()) };
}

/// Returns the device whose context is current.
pub(crate) fn current() -> Outcome<Ordinal> {
    state()?;
    CURRENT
        .with_borrow(|stack| stack.last().copied())
        .ok_or(NONE)
}

/// Returns the context of a device.
pub(crate) fn name(device: Ordinal) -> CUcontext {
    std::ptr::without_provenance_mut((device.0 as usize + 1) << 12)
}

/// Returns the device of a retained context.
pub(crate) fn of(state: &State, context: CUcontext) -> Outcome<Ordinal> {
    let index = (context.addr() >> 12).wrapping_sub(1);
    let live = state
        .retained
        .get(index)
        .is_some_and(|count| count.load(Ordering::Acquire) > 0);
    let device = i32::try_from(index).map_err(|_| NONE)?;
    if live && name(Ordinal(device)) == context {
        Ok(Ordinal(device))
    } else {
        Err(NONE)
    }
}

fn release(device: CUdevice) -> Outcome {
    let state = state()?;
    let device = state.device(device)?;
    let count = state.retained.get(device.0 as usize).ok_or(NONE)?;
    count
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            count.checked_sub(1)
        })
        .map(drop)
        .map_err(|_| NONE)
}

export! {
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) {
        let state = state()?;
        present(context)?;
        let device = state.device(device)?;
        if let Some(count) = state.retained.get(device.0 as usize) {
            count.fetch_add(1, Ordering::AcqRel);
        }
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { put(context, name(device)) }
    }

    fn cuDevicePrimaryCtxRelease(device: CUdevice) {
        release(device)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) {
        release(device)
    }

    fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut u32, active: *mut i32) {
        let state = state()?;
        present(flags)?;
        present(active)?;
        let device = state.device(device)?;
        let live = of(state, name(device)).is_ok();
        // SAFETY: the caller passes valid pointers for both results.
        unsafe {
            put(flags, 0)?;
            put(active, i32::from(live))
        }
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        let device = of(state()?, context)?;
        CURRENT.with_borrow_mut(|stack| stack.push(device));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: *mut CUcontext) {
        state()?;
        let device = CURRENT.with_borrow_mut(Vec::pop).ok_or(NONE)?;
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { put(context, name(device)) }
    }

    fn cuCtxGetCurrent(context: *mut CUcontext) {
        state()?;
        let found = current().map_or(std::ptr::null_mut(), name);
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { put(context, found) }
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        let state = state()?;
        let device = if context.is_null() { None } else { Some(of(state, context)?) };
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            stack.extend(device);
        });
        Ok(())
    }

    fn cuCtxGetDevice(device: *mut CUdevice) {
        let found = current()?;
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { put(device, found.0) }
    }

    fn cuCtxSynchronize() {
        driver()?.context_synchronize(current()?).map_err(code)
    }

    fn cuCtxRecordEvent(context: CUcontext, event: CUevent) {
        let state = state()?;
        let device = of(state, context)?;
        let event = EventHandle(event.addr() as u64);
        // SAFETY: the caller passes an event that it created and has not destroyed.
        unsafe { state.driver.context_record_event(device, event) }.map_err(code)
    }
}
