//! Events: points in the work of a stream.
//!
//! `unsafe` is used for calls that take handles of events and streams, all of them alive.
#![allow(unsafe_code)]

use cuvmm_driver::{Call, EventFlags, EventHandle};

use super::stream::Stream;
use crate::device::Device;
use crate::error::CallError;

/// An event without timing. It counts as complete until it is recorded.
#[doc(alias = "CUevent")]
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: EventHandle,
}

impl Event {
    /// Creates an event (`cuEventCreate`).
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

    /// Returns the driver's handle, which stays owned by this event.
    #[must_use]
    pub const fn as_raw(&self) -> EventHandle {
        self.handle
    }

    /// Records the event. It then covers all work queued on the stream so far (`cuEventRecord`).
    ///
    /// # Errors
    /// [`CallError`] when the stream belongs to another driver or the driver refuses.
    #[doc(alias = "cuEventRecord")]
    pub fn record(&self, stream: &Stream) -> Result<(), CallError> {
        stream.check_driver(&self.device)?;
        let (event, stream) = (self.handle, stream.handle()?);
        // SAFETY: both handles are alive.
        self.device
            .call(Call::EventRecord, |driver, device| unsafe {
                driver.event_record(device, event, stream)
            })
    }

    /// Records the event behind the work of a stream of its device. Returns `false` if the stream
    /// captures by then: the event must be recorded anew before its next use.
    pub(crate) fn record_uncaptured(&self, stream: &Stream) -> Result<bool, CallError> {
        self.device.record_uncaptured(self.handle, stream.handle()?)
    }

    /// Returns `true` if the covered work is complete (`cuEventQuery`).
    ///
    /// # Errors
    /// [`CallError`]; a fault in a kernel is reported here.
    #[doc(alias = "is_passed")]
    #[doc(alias = "cuEventQuery")]
    pub fn is_complete(&self) -> Result<bool, CallError> {
        let event = self.handle;
        // SAFETY: the handle is alive.
        self.device.call(Call::EventQuery, |driver, device| unsafe {
            driver.event_query(device, event)
        })
    }

    /// Waits until the covered work is complete (`cuEventSynchronize`).
    ///
    /// # Errors
    /// [`CallError`]; a fault in a kernel is reported here.
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
    /// Makes later work of this stream run behind the queued work of another (`cuEventRecord`,
    /// `cuStreamWaitEvent`). The caller has asked whether the streams capture; if one does by now,
    /// the call is refused and draws this stream into no capture. Does nothing if one of them has
    /// ended.
    pub(crate) fn run_behind(&self, other: &Self) -> Result<(), CallError> {
        if self.has_ended() || other.has_ended() {
            return Ok(());
        }
        let event = Event::new(other.device())?;
        if !event.record_uncaptured(other)? {
            return Err(CallError::Capturing);
        }
        self.check_uncaptured()?;
        self.wait(&event)?;
        self.check_uncaptured()
    }

    /// Makes later work of this stream wait for the event's work (`cuStreamWaitEvent`).
    ///
    /// # Errors
    /// [`CallError`] when the event belongs to another driver or the driver refuses.
    #[doc(alias = "cuStreamWaitEvent")]
    pub fn wait(&self, event: &Event) -> Result<(), CallError> {
        self.check_driver(&event.device)?;
        let (handle, event) = (self.handle()?, event.as_raw());
        // SAFETY: both handles are alive.
        self.device()
            .call(Call::StreamWaitEvent, |driver, device| unsafe {
                driver.stream_wait_event(device, handle, event)
            })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.destroy_events([self.handle]);
    }
}
