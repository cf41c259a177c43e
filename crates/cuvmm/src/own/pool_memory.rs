//! Memory at an address of a memory pool, and the streams that use it.
//!
//! `unsafe` is used to free and to copy. Memory owned here is freed once, behind the work of each
//! named stream.
#![allow(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{Call, DeviceAddress};

use super::Stream;
use super::copy::Span;
use crate::deferred::Section;
use crate::device::Device;
use crate::error::{CallError, MemoryError};

/// The owner who frees the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ownership {
    Ours,
    /// Another library.
    Borrowed,
    Freed,
}

/// Memory of a memory pool in the order of a stream.
pub(super) struct PoolMemory {
    stream: Stream,
    address: DeviceAddress,
    size: u64,
    uses: Mutex<Uses>,
}

struct Uses {
    others: Vec<Stream>,
    ownership: Ownership,
}

impl PoolMemory {
    pub(super) fn new(
        stream: &Stream,
        address: DeviceAddress,
        size: u64,
        ownership: Ownership,
    ) -> Self {
        Self {
            stream: stream.clone(),
            address,
            size,
            uses: Mutex::new(Uses {
                others: vec![],
                ownership,
            }),
        }
    }

    pub(super) const fn address(&self) -> DeviceAddress {
        self.address
    }

    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    pub(super) const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the stream that the memory is freed on: its own, or the legacy default stream once
    /// its own has ended.
    fn queue(&self) -> Stream {
        match self.stream.has_ended() {
            true => Stream::legacy(self.device()),
            false => self.stream.clone(),
        }
    }

    pub(super) fn device(&self) -> &Device {
        self.stream.device()
    }

    pub(super) fn is_ours(&self) -> bool {
        self.uses().ownership == Ownership::Ours
    }

    /// Lets a stream use the memory behind the queued work of the memory's own stream, and frees it
    /// behind the new stream's work.
    pub(super) fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        stream.check_driver(self.device())?;
        self.device().own_process()?;
        // An event's drop may call its hook, which must run without the lock.
        let _section = Section::enter();
        let mut uses = self.uses();
        if *stream == self.stream || uses.others.contains(stream) {
            return Ok(());
        }
        if self.stream.is_capturing()? || stream.is_capturing()? {
            return Err(CallError::InUse);
        }
        run_behind(stream, &self.stream)?;
        uses.others.push(stream.clone());
        Ok(())
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `true` if one of the streams captures: then the memory cannot be freed.
    pub(super) fn is_captured(&self) -> Result<bool, CallError> {
        self.device().own_process()?;
        let others = self.uses().others.clone();
        for stream in others.iter().chain([&self.queue()]) {
            if stream.is_capturing()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn settle(&self) -> Result<(), CallError> {
        self.device().own_process()?;
        let others = self.uses().others.clone();
        let queue = self.queue();
        let mut streams = others.iter().chain([&queue]);
        streams.try_for_each(Stream::settle)
    }

    pub(super) fn read(
        &self,
        stream: &Stream,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), MemoryError> {
        self.record_use(stream)?;
        self.span().read(stream, offset, bytes)
    }

    pub(super) fn write(
        &self,
        stream: &Stream,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), MemoryError> {
        self.record_use(stream)?;
        self.span().write(stream, offset, bytes)
    }

    fn span(&self) -> Span<'_> {
        // SAFETY: the owner of this value calls `free` when it is dropped or closed, and frees
        // borrowed memory no earlier.
        unsafe { Span::new(self.device(), self.address, self.size) }
    }

    /// Frees the memory in the order of its stream, behind the other streams. Does nothing for
    /// freed or borrowed memory.
    pub(super) fn free(&self) -> Result<(), CallError> {
        let device = self.stream.device();
        device.own_process()?;
        let _section = Section::enter();
        let mut uses = self.uses();
        if uses.ownership != Ownership::Ours {
            return Ok(());
        }
        // A captured free would be a node of the graph.
        let stream = self.queue();
        for stream in uses.others.iter().chain([&stream]) {
            if stream.is_capturing()? {
                return Err(CallError::InUse);
            }
        }
        // The streams are kept until the memory is freed: after a refusal, another attempt comes
        // behind what they have queued by then.
        for other in &uses.others {
            run_behind(&stream, other)?;
        }
        let (address, queue) = (self.address, stream.handle()?);
        device.give_back(Call::MemFreeAsync, |driver, device| {
            // SAFETY: the memory is owned here and freed once: it is marked as freed below, and a
            // refused call frees nothing. The free comes behind the queued work of each recorded
            // stream, for which the stream has just been made to wait.
            unsafe { driver.free_async(device, address, queue) }
        })?;
        uses.ownership = Ownership::Freed;
        // A stream without another owner is destroyed without the lock.
        let others = std::mem::take(&mut uses.others);
        drop(uses);
        drop(others);
        Ok(())
    }
}

/// Makes later work of a stream wait for the queued work of another.
fn run_behind(stream: &Stream, other: &Stream) -> Result<(), CallError> {
    let ordered = stream.run_behind(other);
    ordered.map_err(|error| match error.is_of_capture() {
        true => CallError::InUse,
        false => error,
    })
}
