//! Streams and events.
//!
//! `unsafe` is allowed here to export functions (see `state`). The C caller promises valid handles,
//! and the host driver refuses others.
#![allow(unsafe_code)]

use cuvmm_driver::{EventFlags, EventHandle, Ordinal, StreamFlags, StreamHandle};
use cuvmm_sys::{CUcontext, CUevent, CUresult, CUstream};

use crate::contexts::{current, name};
use crate::edge::{Outcome, code, export, present, put};
use crate::state::{driver, state};

/// Converts a stream to the trait's handle. The pointer is used as a number only.
pub(crate) fn stream_handle(stream: CUstream) -> StreamHandle {
    StreamHandle(stream.addr() as u64)
}

fn event_handle(event: CUevent) -> EventHandle {
    EventHandle(event.addr() as u64)
}

/// Returns the code for finished or unfinished work.
fn done(done: bool) -> Outcome {
    if done {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_NOT_READY)
    }
}

/// Returns the device of a stream. A default stream belongs to the current context.
fn device_of(stream: StreamHandle) -> Outcome<Ordinal> {
    if stream.0 <= StreamHandle::PER_THREAD.0 {
        return current();
    }
    let (state, driver) = (state()?, driver()?);
    let devices = (0..state.retained.len()).filter_map(|index| i32::try_from(index).ok());
    let is_its = |device: &Ordinal| {
        // SAFETY: the caller promises valid handles, and others are refused.
        let asked = unsafe { driver.stream_query(*device, stream) };
        asked.map_err(code) != Err(CUresult::CUDA_ERROR_INVALID_HANDLE)
    };
    let found = devices.map(Ordinal).find(is_its);
    found.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

export! {
    fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) {
        let device = device_of(stream_handle(stream))?;
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { put(context, name(device)) }
    }

    fn cuStreamCreate(stream: *mut CUstream, flags: u32) {
        let device = current()?;
        present(stream)?;
        let flags = StreamFlags::from_bits_retain(flags);
        let made = driver()?.stream_create(device, flags).map_err(code)?;
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { put(stream, std::ptr::without_provenance_mut(made.0 as usize)) }
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        let device = current()?;
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.stream_destroy(device, stream_handle(stream)) }.map_err(code)
    }

    fn cuStreamSynchronize(stream: CUstream) {
        let device = current()?;
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.stream_synchronize(device, stream_handle(stream)) }.map_err(code)
    }

    fn cuStreamQuery(stream: CUstream) {
        let device = current()?;
        // SAFETY: the caller promises valid handles, and others are refused.
        done(unsafe { driver()?.stream_query(device, stream_handle(stream)) }.map_err(code)?)
    }

    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) {
        let device = current()?;
        if flags > 1 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let (stream, event) = (stream_handle(stream), event_handle(event));
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.stream_wait_event(device, stream, event) }.map_err(code)
    }

    fn cuEventCreate(event: *mut CUevent, flags: u32) {
        let device = current()?;
        present(event)?;
        let flags = EventFlags::from_bits_retain(flags);
        let made = driver()?.event_create(device, flags).map_err(code)?;
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { put(event, std::ptr::without_provenance_mut(made.0 as usize)) }
    }

    fn cuEventDestroy_v2(event: CUevent) {
        let device = current()?;
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.event_destroy(device, event_handle(event)) }.map_err(code)
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        let device = current()?;
        let (stream, event) = (stream_handle(stream), event_handle(event));
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.event_record(device, event, stream) }.map_err(code)
    }

    fn cuEventQuery(event: CUevent) {
        let device = current()?;
        // SAFETY: the caller promises valid handles, and others are refused.
        done(unsafe { driver()?.event_query(device, event_handle(event)) }.map_err(code)?)
    }

    fn cuEventSynchronize(event: CUevent) {
        let device = current()?;
        // SAFETY: the caller promises valid handles, and others are refused.
        unsafe { driver()?.event_synchronize(device, event_handle(event)) }.map_err(code)
    }
}
