//! The builder of a store, which allocates all of its memory.

use std::sync::Arc;
use std::thread;

use cuvmm_driver::Location;

use super::{HostStore, Lane, Lanes, PART, Shared};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};
use crate::own::{HostPart, Stream};
use crate::size::Granularity;
use crate::sync::{Condvar, Mutex};

/// The number of streams for copies to and from pinned memory: while one is waited for, the next is
/// copying.
const LANES: usize = 4;

/// The name of a store's size in errors.
const BYTES: &str = "bytes of a store";

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
}

impl<'a> HostStoreBuilder<'a> {
    pub(super) const fn new(device: &'a Device) -> Self {
        Self {
            device,
            pinned: 0,
            ordinary: 0,
            staging: None,
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

    /// Allocates the memory (`cuMemHostAlloc`), touches its pageable part, and creates streams for
    /// copies. This takes seconds for some gigabytes.
    ///
    /// # Errors
    /// [`MemoryError`] if the size is zero, or there is not enough memory.
    #[doc(alias = "cuMemHostAlloc")]
    pub fn build(self) -> Result<HostStore, MemoryError> {
        ArgumentError::not_zero(BYTES, self.pinned.saturating_add(self.ordinary))?;
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let (count, staging) = match self.ordinary {
            0 => (LANES, Vec::new()),
            _ => {
                let staging = self.arena(self.staging.unwrap_or(STAGING).max(1))?;
                let most = cores.clamp(LANES, MOST_LANES);
                (most.min(staging.len()), staging)
            }
        };
        let mut free = self.touched()?;
        if self.pinned > 0 {
            free.extend(self.arena(self.pinned)?);
        }
        let lanes = self.lanes(count, staging)?;
        let capacity = free.iter().map(super::bytes_of).sum();
        let shared = Shared {
            device: self.device.clone(),
            capacity,
            free: Mutex::new(free),
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

    fn arena(&self, bytes: u64) -> Result<Vec<HostPart>, MemoryError> {
        let size = whole(bytes)?;
        let parts = HostPart::pinned(self.device, size, PART);
        parts.map_err(|cause| MemoryError::Create {
            size: bytes,
            location: Location::HOST,
            cause,
        })
    }

    /// Allocates pageable memory in whole parts, and touches it from several threads.
    fn touched(&self) -> Result<Vec<HostPart>, MemoryError> {
        let bytes = self.ordinary;
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let size = whole(bytes)?;
        let parts = HostPart::ordinary(size, PART);
        let mut parts = parts.ok_or(MemoryError::HostOutOfMemory(bytes))?;
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let share = parts.len().div_ceil(threads.min(MOST_LANES)).max(1);
        thread::scope(|scope| {
            for parts in parts.chunks_mut(share) {
                // If a thread cannot be started, its share is touched by the first copy.
                let touch = move || parts.iter_mut().for_each(HostPart::touch);
                drop(thread::Builder::new().spawn_scoped(scope, touch));
            }
        });
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

/// Rounds up to whole parts.
fn whole(value: u64) -> Result<usize, ArgumentError> {
    let part = Granularity::new(PART as u64);
    let whole = part.and_then(|part| part.round_up(value)?.try_into().ok());
    whole.ok_or(ArgumentError::Overflow { what: BYTES, value })
}
