//! The builder of a store.

use std::sync::Arc;
use std::thread;

use super::growth::Growth;
use super::{BYTES, HostStore, Lane, Lanes, Memory, PART, Shared};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};
use crate::own::{HostPart, Stream};
use crate::sync::{Condvar, Mutex};

/// The number of streams for copies to and from pinned memory: while one is waited for, the next is
/// copying.
const LANES: usize = 4;

/// The most streams where processors copy too, one thread for each stream.
const MOST_LANES: usize = 16;

/// The default size of the staging area for pageable memory, in bytes.
const STAGING: u64 = 256 << 20;

/// A builder for a [`HostStore`].
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is built before `build`"]
pub struct HostStoreBuilder<'a> {
    device: &'a Device,
    pinned: u64,
    ordinary: u64,
    staging: Option<u64>,
    limit: u64,
}

impl<'a> HostStoreBuilder<'a> {
    pub(super) const fn new(device: &'a Device) -> Self {
        Self {
            device,
            pinned: 0,
            ordinary: 0,
            staging: None,
            limit: 0,
        }
    }

    /// Sets the bytes of pinned memory for contents, rounded up to whole parts of 2 MiB.
    pub const fn pinned(mut self, bytes: u64) -> Self {
        self.pinned = bytes;
        self
    }

    /// Sets the bytes of pageable memory for contents, rounded up to whole parts of 2 MiB.
    pub const fn ordinary(mut self, bytes: u64) -> Self {
        self.ordinary = bytes;
        self
    }

    /// Sets the bytes of the pinned staging area for pageable memory, at least one part of 2 MiB.
    /// The default is 256 MiB. No contents are kept in it, and without pageable memory there is
    /// none.
    pub const fn staging(mut self, bytes: u64) -> Self {
        self.staging = Some(bytes);
        self
    }

    /// Sets the most bytes that the store may have, in whole parts of 2 MiB. Contents for which it
    /// has no free memory take more, pinned, up to this limit, and the store keeps it. The default
    /// is the memory that it is built with.
    pub const fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Takes the memory from the system, touches it, pins it (`cuMemHostRegister`), and creates
    /// streams for copies. Some gigabytes take a large part of a second. Where the driver refuses to
    /// pin memory of the process, it allocates pinned memory (`cuMemHostAlloc`), which is ten times
    /// as slow.
    ///
    /// # Errors
    /// [`MemoryError`] if the size and the limit are zero, or there is not enough memory.
    #[doc(alias = "cuMemHostAlloc")]
    #[doc(alias = "cuMemHostRegister")]
    pub fn build(self) -> Result<HostStore, MemoryError> {
        let asked = self.pinned.saturating_add(self.ordinary);
        ArgumentError::not_zero(BYTES, asked.max(self.limit))?;
        self.device.own_process()?;
        let registers = self.registers()?;
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let (count, staging) = match self.ordinary {
            0 => (LANES, Vec::new()),
            _ => {
                let staging = self.staging.unwrap_or(STAGING).max(1);
                let staging = self.prepared(staging, registers, true)?;
                let most = cores.clamp(LANES, MOST_LANES);
                (most.min(staging.len()), staging)
            }
        };
        let mut free = self.prepared(self.ordinary, true, false)?;
        free.extend(self.prepared(self.pinned, registers, true)?);
        let lanes = self.lanes(count, staging)?;
        let bytes = free.iter().map(super::bytes_of).sum::<u64>();
        let shared = Shared {
            device: self.device.clone(),
            registers,
            memory: Mutex::new(Memory {
                free,
                bytes,
                limit: bytes.max(self.limit),
            }),
            unfinished: Mutex::new(Vec::new()),
            lanes: Mutex::new(Lanes {
                free: lanes,
                aside: 0,
            }),
            lanes_changed: Condvar::new(),
        };
        Ok(HostStore {
            shared: Arc::new(shared),
        })
    }

    /// Returns `true` if the driver pins memory of the process, which one part shows.
    fn registers(&self) -> Result<bool, MemoryError> {
        match self.prepared(PART as u64, true, true) {
            Ok(_) => Ok(true),
            Err(MemoryError::Create { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns memory that is ready for use, pinned or pageable. Without `registers` the driver
    /// allocates it.
    fn prepared(
        &self,
        bytes: u64,
        registers: bool,
        pins: bool,
    ) -> Result<Vec<HostPart>, MemoryError> {
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let (growth, parts) = match registers {
            true => Growth::new(self.device, bytes, pins)?,
            false => Growth::allocated(self.device, bytes)?,
        };
        growth.finish(|| Ok::<(), MemoryError>(()))?.keep();
        Ok(parts)
    }

    /// Creates the streams, and distributes the staging area among them.
    fn lanes(&self, count: usize, staging: Vec<HostPart>) -> Result<Vec<Lane>, MemoryError> {
        let streams = (0..count).map(|_| Stream::new(self.device));
        let streams: Result<Vec<Stream>, CallError> = streams.collect();
        let mut lanes: Vec<Lane> = streams?.into_iter().map(Lane::new).collect();
        for (index, part) in staging.into_iter().enumerate() {
            if let Some(lane) = lanes.get_mut(index % count.max(1)) {
                lane.staging.push(part);
            }
        }
        Ok(lanes)
    }
}
