//! Streams and events.
//!
//! `unsafe` is allowed here to export functions (see `state`). That handles are good is the
//! promise of the C caller, and the host driver refuses those that are not.
#![allow(unsafe_code)]

use cuvmm_driver::{Driver, EventFlags, EventHandle, StreamFlags, StreamHandle};
use cuvmm_sys::{CUevent, CUresult, CUstream};

use crate::contexts::current;
use crate::edge::{Outcome, code, export, present, put};
use crate::state::driver;

/// A stream as the trait names it; the pointer is a number and nothing else.
pub(crate) fn stream_handle(stream: CUstream) -> StreamHandle {
    StreamHandle(stream.addr() as u64)
}

fn event_handle(event: CUevent) -> EventHandle {
    EventHandle(event.addr() as u64)
}

/// The answer to "is it done?" as a code.
fn done(done: bool) -> Outcome {
    if done {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_NOT_READY)
    }
}

export! {
    fn cuStreamCreate(stream: *mut CUstream, flags: u32) {
        let device = current()?;
        present(stream)?;
        let flags = StreamFlags::from_bits_retain(flags);
        let made = driver()?.stream_create(device, flags).map_err(code)?;
        // SAFETY: the caller passes a place for the answer.
        unsafe { put(stream, std::ptr::without_provenance_mut(made.0 as usize)) }
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        let device = current()?;
        // SAFETY: as the top of this file says.
        unsafe { driver()?.stream_destroy(device, stream_handle(stream)) }.map_err(code)
    }

    fn cuStreamSynchronize(stream: CUstream) {
        let device = current()?;
        // SAFETY: as the top of this file says.
        unsafe { driver()?.stream_synchronize(device, stream_handle(stream)) }.map_err(code)
    }

    fn cuStreamQuery(stream: CUstream) {
        let device = current()?;
        // SAFETY: as the top of this file says.
        done(unsafe { driver()?.stream_query(device, stream_handle(stream)) }.map_err(code)?)
    }

    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) {
        let device = current()?;
        if flags > 1 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let (stream, event) = (stream_handle(stream), event_handle(event));
        // SAFETY: as the top of this file says.
        unsafe { driver()?.stream_wait_event(device, stream, event) }.map_err(code)
    }

    fn cuEventCreate(event: *mut CUevent, flags: u32) {
        let device = current()?;
        present(event)?;
        let flags = EventFlags::from_bits_retain(flags);
        let made = driver()?.event_create(device, flags).map_err(code)?;
        // SAFETY: the caller passes a place for the answer.
        unsafe { put(event, std::ptr::without_provenance_mut(made.0 as usize)) }
    }

    fn cuEventDestroy_v2(event: CUevent) {
        let device = current()?;
        // SAFETY: as the top of this file says.
        unsafe { driver()?.event_destroy(device, event_handle(event)) }.map_err(code)
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        let device = current()?;
        let (stream, event) = (stream_handle(stream), event_handle(event));
        // SAFETY: as the top of this file says.
        unsafe { driver()?.event_record(device, event, stream) }.map_err(code)
    }

    fn cuEventQuery(event: CUevent) {
        let device = current()?;
        // SAFETY: as the top of this file says.
        done(unsafe { driver()?.event_query(device, event_handle(event)) }.map_err(code)?)
    }

    fn cuEventSynchronize(event: CUevent) {
        let device = current()?;
        // SAFETY: as the top of this file says.
        unsafe { driver()?.event_synchronize(device, event_handle(event)) }.map_err(code)
    }
}
