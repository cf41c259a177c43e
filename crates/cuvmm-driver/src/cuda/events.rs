//! Events, and waiting for a whole context.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use std::ptr;

use cuvmm_sys::{CUevent, CUstream};

use super::CudaDriver;
use super::answer::{ask, ask_optional, done};
use crate::{EventFlags, EventHandle, Ordinal, Result, StreamHandle};

pub(super) fn event_create(
    driver: &CudaDriver,
    device: Ordinal,
    flags: EventFlags,
) -> Result<EventHandle> {
    let _current = driver.enter(device)?;
    let mut event = ptr::null_mut();
    ask_optional!(driver, EventCreate: cuEventCreate(&mut event, flags.bits()))?;
    Ok(EventHandle(event as u64))
}

/// # Safety
/// See [`Driver::event_destroy`](crate::Driver::event_destroy).
pub(super) unsafe fn event_destroy(
    driver: &CudaDriver,
    device: Ordinal,
    event: EventHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, EventDestroy: cuEventDestroy_v2(event.0 as CUevent))
}

/// # Safety
/// See [`Driver::event_record`](crate::Driver::event_record).
pub(super) unsafe fn event_record(
    driver: &CudaDriver,
    device: Ordinal,
    event: EventHandle,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let (event, stream) = (event.0 as CUevent, stream.0 as CUstream);
    ask_optional!(driver, EventRecord: cuEventRecord(event, stream))
}

/// # Safety
/// See [`Driver::context_record_event`](crate::Driver::context_record_event).
pub(super) unsafe fn context_record_event(
    driver: &CudaDriver,
    device: Ordinal,
    event: EventHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let context = driver.context(device)?;
    ask_optional!(driver, CtxRecordEvent: cuCtxRecordEvent(context, event.0 as CUevent))
}

/// # Safety
/// See [`Driver::event_query`](crate::Driver::event_query).
pub(super) unsafe fn event_query(
    driver: &CudaDriver,
    device: Ordinal,
    event: EventHandle,
) -> Result<bool> {
    let _current = driver.enter(device)?;
    done(ask_optional!(driver, EventQuery: cuEventQuery(event.0 as CUevent)))
}

/// # Safety
/// See [`Driver::event_synchronize`](crate::Driver::event_synchronize).
pub(super) unsafe fn event_synchronize(
    driver: &CudaDriver,
    device: Ordinal,
    event: EventHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, EventSynchronize: cuEventSynchronize(event.0 as CUevent))
}

pub(super) fn context_synchronize(driver: &CudaDriver, device: Ordinal) -> Result<()> {
    let _current = driver.enter(device)?;
    ask!(driver, CtxSynchronize: cuCtxSynchronize())
}
