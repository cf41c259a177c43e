//! Streams and events.
//!
//! `unsafe` exports functions (see `state`). The C caller promises valid handles,
//! and the host driver refuses others.
#![allow(unsafe_code)]

use std::time::Instant;

use cuvmm_driver::{CaptureStatus, EventFlags, EventHandle, Ordinal, StreamFlags, StreamHandle};
use cuvmm_sys::{CUcontext, CUevent, CUresult, CUstream};

use crate::contexts::{current, name};
use crate::diagnosis::books::Class;
use crate::edge::{Outcome, code, export, export_also, present, put};
use crate::owned::{self, Known, Object};
use crate::per_thread;
use crate::stack;
use crate::state::{driver, state};

/// Converts a stream to the trait's handle; the pointer is only a number. Null is the thread's own
/// stream in calls of `per_thread`.
pub(crate) fn stream_handle(stream: CUstream) -> StreamHandle {
    match StreamHandle(stream.addr() as u64) {
        StreamHandle::NULL if per_thread::is_meant() => StreamHandle::PER_THREAD,
        stream => stream,
    }
}

pub(crate) fn event_handle(event: CUevent) -> EventHandle {
    EventHandle(event.addr() as u64)
}

/// The flag of an event without a time.
pub(crate) const TIMELESS: u32 = 2;

/// The flag of an event that other processes open.
pub(crate) const SHARED: u32 = 4;

/// Checks the flags of a new event, and returns the host driver's part.
fn event_flags(flags: u32) -> Outcome<u32> {
    if flags & SHARED != 0 && flags & TIMELESS == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(flags & !SHARED)
}

fn done(done: bool) -> Outcome {
    if done {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_NOT_READY)
    }
}

/// Returns the device of a stream. Only a default stream needs a current context, to which it
/// belongs.
pub(crate) fn device_of(stream: StreamHandle) -> Outcome<Ordinal> {
    if stream.0 <= StreamHandle::PER_THREAD.0 {
        return current();
    }
    let known = owned::known(Object::Stream(stream.0));
    if known.is_none() {
        driver()?.note_use(Class::Stream, stream.0);
    }
    let known = known.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    Ok(Ordinal(known.device))
}

/// Returns a stream, `None` being the default stream, and the device that its work runs on. Needs a
/// current context, which may be another device's.
pub(crate) fn target(stream: Option<StreamHandle>) -> Outcome<(Ordinal, StreamHandle)> {
    current()?;
    let stream = stream.unwrap_or(StreamHandle::NULL);
    Ok((device_of(stream)?, stream))
}

fn live_event(event: CUevent) -> Outcome<(EventHandle, Ordinal, usize)> {
    state()?;
    let event = event_handle(event);
    let known = owned::known(Object::Event(event.0));
    if known.is_none() {
        driver()?.note_use(Class::Event, event.0);
    }
    let known = known.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    Ok((event, Ordinal(known.device), known.context))
}

/// Returns a live stream's context as a number; for a default stream, the current context.
pub(crate) fn context_of(stream: StreamHandle) -> usize {
    match owned::known(Object::Stream(stream.0)) {
        Some(known) => known.context,
        None => stack::top().map_or(0, |context| context.addr()),
    }
}

fn live_stream(stream: CUstream) -> Outcome<(StreamHandle, Ordinal)> {
    state()?;
    let stream = stream_handle(stream);
    Ok((stream, device_of(stream)?))
}

pub(crate) const HIGHEST: i32 = -5;

/// # Safety
/// The pointer is null or valid for writing.
unsafe fn create(stream: *mut CUstream, flags: u32, priority: i32) -> Outcome {
    let device = current()?;
    present(stream)?;
    let made = driver()?
        .stream_create(device, StreamFlags::from_bits_retain(flags))
        .map_err(code)?;
    // A priority outside the range counts as the nearest in it.
    let known = Known {
        flags,
        priority: priority.clamp(HIGHEST, 0),
        ..Known::of(device)
    };
    owned::own(Object::Stream(made.0), known);
    // SAFETY: as the caller promises.
    unsafe { put(stream, std::ptr::without_provenance_mut(made.0 as usize)) }
}

fn destroy(stream: CUstream) -> Outcome {
    let (stream, device) = live_stream(stream)?;
    // SAFETY: the host driver refuses wrong handles.
    unsafe { driver()?.stream_destroy(device, stream) }.map_err(code)?;
    owned::forget(Object::Stream(stream.0));
    Ok(())
}

fn destroy_event(event: CUevent) -> Outcome {
    let (event, device, _) = live_event(event)?;
    // SAFETY: the host driver refuses wrong handles.
    unsafe { driver()?.event_destroy(device, event) }.map_err(code)?;
    owned::forget(Object::Event(event.0));
    Ok(())
}

fn record(event: CUevent, stream: CUstream) -> Outcome {
    let (stream, device) = live_stream(stream)?;
    let (event, _, context) = live_event(event)?;
    if context_of(stream) != context {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    // SAFETY: the host driver refuses wrong handles.
    unsafe { driver()?.event_record(device, event, stream) }.map_err(code)?;
    let now = Instant::now();
    owned::change(Object::Event(event.0), |known| known.recorded = Some(now));
    Ok(())
}

/// Checks the flags of a record or a wait. Nodes for events of other graphs exist in captures only.
fn check_external(device: Ordinal, stream: StreamHandle, flags: u32) -> Outcome {
    match flags {
        0 => Ok(()),
        1 => {
            // SAFETY: the stream was found, so it is live.
            let status = unsafe { driver()?.capture_status(device, stream) };
            match status.map_err(code)? {
                CaptureStatus::NONE => Err(CUresult::CUDA_ERROR_ILLEGAL_STATE),
                _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            }
        }
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

/// Writes the milliseconds between two events.
///
/// # Safety
/// The pointer is null or valid for writing.
unsafe fn elapsed(milliseconds: *mut f32, start: CUevent, end: CUevent) -> Outcome {
    state()?;
    present(milliseconds).map_err(|_| CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    let timed = |event| {
        let known = owned::known(Object::Event(event_handle(event).0));
        let known = known.filter(|known| known.flags & TIMELESS == 0)?;
        Some((known.recorded?, known.context))
    };
    let (Some((first, context)), Some((last, other))) = (timed(start), timed(end)) else {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    };
    if context != other {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    for event in [start, end] {
        let (event, device, _) = live_event(event)?;
        // SAFETY: the event is live.
        done(unsafe { driver()?.event_query(device, event) }.map_err(code)?)?;
    }
    let time = match last.checked_duration_since(first) {
        Some(time) => time.as_secs_f32(),
        None => -first.duration_since(last).as_secs_f32(),
    };
    // SAFETY: as the caller promises.
    unsafe { put(milliseconds, time * 1000.0) }
}

export! {
    fn cuStreamGetCtx + ptsz(stream: CUstream, context: *mut CUcontext) {
        let stream = stream_handle(stream);
        let device = device_of(stream)?;
        let found = match owned::known(Object::Stream(stream.0)) {
            Some(known) => std::ptr::without_provenance_mut(known.context),
            None => stack::top().unwrap_or(name(device)),
        };
        // SAFETY: C's promise (see `edge`).
        unsafe { put(context, found) }
    }

    fn cuStreamCreate(stream: *mut CUstream, flags: u32) {
        // SAFETY: C's promise (see `edge`).
        unsafe { create(stream, flags, 0) }
    }

    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: u32, priority: i32) {
        // SAFETY: C's promise (see `edge`).
        unsafe { create(stream, flags, priority) }
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        destroy(stream)
    }

    fn cuStreamSynchronize + ptsz(stream: CUstream) {
        let (stream, device) = live_stream(stream)?;
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.stream_synchronize(device, stream) }.map_err(code)
    }

    fn cuStreamQuery + ptsz(stream: CUstream) {
        let (stream, device) = live_stream(stream)?;
        // SAFETY: the host driver refuses wrong handles.
        done(unsafe { driver()?.stream_query(device, stream) }.map_err(code)?)
    }

    fn cuStreamWaitEvent + ptsz(stream: CUstream, event: CUevent, flags: u32) {
        let (stream, device) = live_stream(stream)?;
        let (event, _, _) = live_event(event)?;
        check_external(device, stream, flags)?;
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.stream_wait_event(device, stream, event) }.map_err(code)
    }

    fn cuEventCreate(event: *mut CUevent, flags: u32) {
        let device = current()?;
        present(event)?;
        let kept = event_flags(flags)?;
        let kept = EventFlags::from_bits_retain(kept);
        let made = driver()?.event_create(device, kept).map_err(code)?;
        owned::own(Object::Event(made.0), Known { flags, ..Known::of(device) });
        // SAFETY: C's promise (see `edge`).
        unsafe { put(event, std::ptr::without_provenance_mut(made.0 as usize)) }
    }

    fn cuEventDestroy_v2(event: CUevent) {
        destroy_event(event)
    }

    fn cuEventRecord + ptsz(event: CUevent, stream: CUstream) {
        record(event, stream)
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) {
        // SAFETY: C's promise (see `edge`).
        unsafe { elapsed(milliseconds, start, end) }
    }

    fn cuEventQuery(event: CUevent) {
        let (event, device, _) = live_event(event)?;
        // SAFETY: the host driver refuses wrong handles.
        done(unsafe { driver()?.event_query(device, event) }.map_err(code)?)
    }

    fn cuEventSynchronize(event: CUevent) {
        let (event, device, _) = live_event(event)?;
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.event_synchronize(device, event) }.map_err(code)
    }
}

export_also! {
    fn cuStreamDestroy(stream: CUstream) {
        destroy(stream)
    }

    fn cuEventDestroy(event: CUevent) {
        destroy_event(event)
    }

    fn cuEventRecordWithFlags + ptsz(event: CUevent, stream: CUstream, flags: u32) {
        let (handle, device) = live_stream(stream)?;
        check_external(device, handle, flags)?;
        record(event, stream)
    }

    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent) {
        // SAFETY: C's promise (see `edge`).
        unsafe { elapsed(milliseconds, start, end) }
    }
}
