//! Streams.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use std::ptr;

use cuvmm_sys::{CU_EVENT_WAIT_DEFAULT, CUevent, CUstream};

use super::CudaDriver;
use super::answer::{ask_optional, done};
use crate::{EventHandle, Ordinal, Result, StreamFlags, StreamHandle};

pub(super) fn stream_create(
    driver: &CudaDriver,
    device: Ordinal,
    flags: StreamFlags,
) -> Result<StreamHandle> {
    let _current = driver.enter(device)?;
    let mut stream = ptr::null_mut();
    ask_optional!(driver, StreamCreate: cuStreamCreate(&mut stream, flags.bits()))?;
    Ok(StreamHandle(stream as u64))
}

/// # Safety
/// See [`Driver::stream_destroy`](crate::Driver::stream_destroy).
pub(super) unsafe fn stream_destroy(
    driver: &CudaDriver,
    device: Ordinal,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, StreamDestroy: cuStreamDestroy_v2(stream.0 as CUstream))
}

/// # Safety
/// See [`Driver::stream_synchronize`](crate::Driver::stream_synchronize).
pub(super) unsafe fn stream_synchronize(
    driver: &CudaDriver,
    device: Ordinal,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, StreamSynchronize: cuStreamSynchronize(stream.0 as CUstream))
}

/// # Safety
/// See [`Driver::stream_query`](crate::Driver::stream_query).
pub(super) unsafe fn stream_query(
    driver: &CudaDriver,
    device: Ordinal,
    stream: StreamHandle,
) -> Result<bool> {
    let _current = driver.enter(device)?;
    done(ask_optional!(driver, StreamQuery: cuStreamQuery(stream.0 as CUstream)))
}

/// # Safety
/// See [`Driver::stream_wait_event`](crate::Driver::stream_wait_event).
pub(super) unsafe fn stream_wait_event(
    driver: &CudaDriver,
    device: Ordinal,
    stream: StreamHandle,
    event: EventHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let (stream, event) = (stream.0 as CUstream, event.0 as CUevent);
    ask_optional!(driver, StreamWaitEvent:
        cuStreamWaitEvent(stream, event, CU_EVENT_WAIT_DEFAULT))
}
