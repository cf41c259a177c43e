//! A mark in the work of a stream, or of all streams of a device.
//!
//! `unsafe` here: calls that take handles of events and streams, all of them alive.
#![allow(unsafe_code)]

use cuvmm_driver::{Call, EventFlags, EventHandle};

use super::stream::Stream;
use crate::device::Device;
use crate::error::CallError;

/// An event without timing. Counts as passed until it is recorded.
#[doc(alias = "CUevent")]
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: EventHandle,
}

impl Event {
    /// Makes an event (`cuEventCreate`).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    #[doc(alias = "cuEventCreate")]
    pub fn new(device: &Device) -> Result<Self, CallError> {
        let handle = device.call(Call::EventCreate, |driver, device| {
            driver.event_create(device, EventFlags::DISABLE_TIMING)
        })?;
        Ok(Self {
            device: device.clone(),
            handle,
        })
    }

    /// The driver's handle. It stays owned by this.
    #[must_use]
    pub const fn as_raw(&self) -> EventHandle {
        self.handle
    }

    /// Covers, from now on, all work queued on the stream so far (`cuEventRecord`).
    ///
    /// # Errors
    /// [`CallError`] when the stream is another driver's or the driver refuses.
    #[doc(alias = "cuEventRecord")]
    pub fn record(&self, stream: &Stream) -> Result<(), CallError> {
        if !stream.device().same_driver(&self.device) {
            return Err(CallError::WrongDriver);
        }
        let (event, stream) = (self.handle, stream.as_raw());
        // SAFETY: both handles are alive.
        self.device
            .call(Call::EventRecord, |driver, device| unsafe {
                driver.event_record(device, event, stream)
            })
    }

    /// Covers, from now on, all work queued on all streams of the device's context so far
    /// (`cuCtxRecordEvent`, CUDA 12.5).
    ///
    /// Breaks a capture that is running on the context.
    ///
    /// # Errors
    /// [`CallError`] when the driver lacks the call, or while a stream of the context captures.
    #[doc(alias = "cuCtxRecordEvent")]
    pub fn record_all(&self) -> Result<(), CallError> {
        let event = self.handle;
        // SAFETY: the handle is alive.
        self.device
            .call(Call::CtxRecordEvent, |driver, device| unsafe {
                driver.context_record_event(device, event)
            })
    }

    /// Whether what it covers is done (`cuEventQuery`).
    ///
    /// # Errors
    /// [`CallError`]; a fault in a kernel shows here.
    #[doc(alias = "is_passed")]
    #[doc(alias = "cuEventQuery")]
    pub fn is_complete(&self) -> Result<bool, CallError> {
        let event = self.handle;
        // SAFETY: the handle is alive.
        self.device.call(Call::EventQuery, |driver, device| unsafe {
            driver.event_query(device, event)
        })
    }

    /// Waits until what it covers is done (`cuEventSynchronize`).
    ///
    /// # Errors
    /// [`CallError`]; a fault in a kernel shows here.
    #[doc(alias = "cuEventSynchronize")]
    pub fn synchronize(&self) -> Result<(), CallError> {
        let event = self.handle;
        // SAFETY: the handle is alive.
        self.device
            .call(Call::EventSynchronize, |driver, device| unsafe {
                driver.event_synchronize(device, event)
            })
    }
}

impl Stream {
    /// Has later work of this stream wait for what the event covers (`cuStreamWaitEvent`).
    ///
    /// # Errors
    /// [`CallError`] when the event is another driver's or the driver refuses.
    #[doc(alias = "cuStreamWaitEvent")]
    pub fn wait(&self, event: &Event) -> Result<(), CallError> {
        if !event.device.same_driver(self.device()) {
            return Err(CallError::WrongDriver);
        }
        let (handle, event) = (self.as_raw(), event.as_raw());
        // SAFETY: both handles are alive.
        self.device()
            .call(Call::StreamWaitEvent, |driver, device| unsafe {
                driver.stream_wait_event(device, handle, event)
            })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let event = self.handle;
        // SAFETY: the handle is ours, and the driver lets an event go while work still refers to
        // its last record.
        let destroyed = self
            .device
            .give_back(Call::EventDestroy, |driver, device| unsafe {
                driver.event_destroy(device, event)
            });
        // What belonged to a context that is lost went with it.
        if let (Err(error), None) = (destroyed, self.device.lost()) {
            self.device.report_drop("event", 0, error);
        }
    }
}
