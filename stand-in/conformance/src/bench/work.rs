//! Copies, fills, streams, events and captures for cases.
//!
//! `unsafe` is allowed here for the reasons given at the top of `memory`.
#![allow(unsafe_code)]

use cuvmm_driver::{
    CaptureMode, DeviceAddress, DriverError, EventFlags, EventHandle, GraphHandle, Location,
    Ordinal, StreamFlags, StreamHandle,
};

use super::Bench;
use super::ledger::{note, strike};

impl Bench {
    /// Reads four bytes.
    pub(crate) fn read(&self, address: DeviceAddress) -> Result<[u8; 4], DriverError> {
        let mut bytes = [0xEE; 4];
        self.read_into(address, &mut bytes)?;
        Ok(bytes)
    }

    /// Queues a copy of four bytes to the device and waits for the stream.
    pub(crate) fn write_async(
        &self,
        address: DeviceAddress,
        bytes: [u8; 4],
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        // SAFETY: see `memory`; `bytes` lives until the stream has
        // finished.
        let queued = unsafe {
            self.driver
                .copy_to_device_async(self.device, address, bytes.as_ptr(), 4, stream)
        };
        self.synchronize(stream).and(queued)
    }

    /// Queues a copy of `size` bytes of pages that are never freed to the device, and waits for the
    /// stream.
    pub(crate) fn write_pages_async(
        &self,
        address: DeviceAddress,
        pages: usize,
        size: u64,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        let from = std::ptr::with_exposed_provenance(pages);
        // SAFETY: see `memory`; the pages are never freed.
        let queued = unsafe {
            self.driver
                .copy_to_device_async(self.device, address, from, size, stream)
        };
        self.synchronize(stream).and(queued)
    }

    /// Queues a copy of four bytes to the host and waits for the stream.
    pub(crate) fn read_async(
        &self,
        address: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<[u8; 4], DriverError> {
        let mut bytes = [0xEE; 4];
        // SAFETY: see `memory`; `bytes` lives until the stream has
        // finished.
        let queued = unsafe {
            self.driver
                .copy_to_host_async(self.device, bytes.as_mut_ptr(), address, 4, stream)
        };
        self.synchronize(stream).and(queued).map(|()| bytes)
    }

    pub(crate) fn prefetch(
        &self,
        address: DeviceAddress,
        size: u64,
        location: Location,
    ) -> Result<(), DriverError> {
        self.prefetch_on(StreamHandle::NULL, address, size, location)
    }
}

impl Bench {
    pub(crate) fn stream(&mut self) -> Result<StreamHandle, DriverError> {
        let stream = self
            .driver
            .stream_create(self.device, StreamFlags::NON_BLOCKING)?;
        self.ledger.streams.push((self.device, stream));
        Ok(stream)
    }

    pub(crate) fn event(&mut self) -> Result<EventHandle, DriverError> {
        let event = self
            .driver
            .event_create(self.device, EventFlags::DISABLE_TIMING)?;
        self.ledger.events.push(event);
        Ok(event)
    }

    pub(crate) fn destroy_event(&mut self, event: EventHandle) -> Result<(), DriverError> {
        self.ledger.events.retain(|&other| other != event);
        // SAFETY: see `memory`.
        unsafe { self.driver.event_destroy(self.device, event) }
    }

    pub(crate) fn free_async(
        &mut self,
        address: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.free_async(self.device, address, stream) }?;
        strike(&mut self.ledger.plain, &address);
        Ok(())
    }
}

impl Bench {
    pub(crate) fn capture_begin(
        &mut self,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> Result<(), DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.capture_begin(self.device, stream, mode) }?;
        self.ledger.capturing.push(stream);
        Ok(())
    }

    pub(crate) fn capture_end(&mut self, stream: StreamHandle) -> Result<GraphHandle, DriverError> {
        strike(&mut self.ledger.capturing, &stream);
        // SAFETY: see `memory`.
        let graph = unsafe { self.driver.capture_end(self.device, stream) }?;
        self.ledger.graphs.push(graph);
        Ok(graph)
    }

    /// Ends captures, waits for all work, destroys streams, events and graphs, and adds the
    /// errors.
    pub(super) fn give_back_work(&mut self, troubles: &mut Vec<String>) {
        let device = self.device;
        for stream in std::mem::take(&mut self.ledger.capturing) {
            // An invalidated capture ends with an error, and has then ended.
            let _ = self.capture_end(stream);
        }
        note(troubles, self.driver.context_synchronize(device));
        for exec in std::mem::take(&mut self.ledger.execs) {
            // SAFETY: this bench created it and still holds it.
            note(troubles, unsafe {
                self.driver.graph_exec_destroy(device, exec)
            });
        }
        for graph in std::mem::take(&mut self.ledger.graphs) {
            // SAFETY: this bench created it and still holds it.
            note(troubles, unsafe {
                self.driver.graph_destroy(device, graph)
            });
        }
        for event in std::mem::take(&mut self.ledger.events) {
            // SAFETY: this bench created it and still holds it.
            note(troubles, unsafe {
                self.driver.event_destroy(device, event)
            });
        }
        for (owner, stream) in std::mem::take(&mut self.ledger.streams) {
            // SAFETY: this bench created it and still holds it.
            note(troubles, unsafe {
                self.driver.stream_destroy(owner, stream)
            });
        }
    }

    /// Makes a stream wait for an event that a stream of another device has recorded.
    pub(crate) fn wait_for_device(
        &mut self,
        device: Ordinal,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        let theirs = self
            .driver
            .stream_create(device, StreamFlags::NON_BLOCKING)?;
        self.ledger.streams.push((device, theirs));
        let event = self
            .driver
            .event_create(device, EventFlags::DISABLE_TIMING)?;
        // SAFETY: see `memory`.
        let recorded = unsafe { self.driver.event_record(device, event, theirs) };
        let waited = recorded.and_then(|()| self.wait_event(stream, event));
        // SAFETY: the event was created above, and a stream that waits for it needs it no more.
        waited.and(unsafe { self.driver.event_destroy(device, event) })
    }

    pub(crate) fn fill_from(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        byte: u8,
        size: u64,
    ) -> Result<(), DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.fill(device, address, byte, size) }
    }
}
