//! Host memory, allocated in advance, for the contents of sleeping device memory.
//!
//! A [`HostStore`] has pinned memory, which devices copy to and from at the full speed of the bus;
//! pageable memory, which costs the system less and is reached through a small pinned staging area;
//! or both, in which case the pinned part is used first. All of it is allocated when the store is
//! built, because pinning memory and touching it for the first time is slower than any copy.
//!
//! Contents are kept in parts of 2 MiB, which return to the store when the contents are dropped.
//!
//! # Not provided
//! This module maps and unmaps no device memory, and does not decide what is kept.

mod builder;
mod copies;
mod lanes;
mod saved;

use std::fmt;
use std::sync::{Arc, PoisonError};

use crate::device::Device;
use crate::error::SleepError;
use crate::own::{HostPart, Stream};
use crate::sync::{Condvar, Mutex, MutexGuard};

pub use builder::HostStoreBuilder;
pub(crate) use copies::{Direction, Job, copy};
pub(crate) use saved::Saved;

/// The size of the parts that contents are kept in.
const PART: usize = 2 << 20;

/// Host memory for the contents of device memory. Clones share one store; its memory is freed when
/// the last clone and all contents in it are dropped.
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let pool = cuvmm::Pool::builder(&device).limit(cuvmm::Limit::Bytes(64 << 20)).build()?;
/// # let tenant = pool.tenant("model").register()?;
/// use std::time::Duration;
/// use cuvmm::{Contents, HostStore};
///
/// let store = HostStore::builder(&device).pinned(4 << 20).build()?; // slow, so do it in advance
/// let weights = tenant.allocate(4 << 20)?;
/// tenant.blocks().timeout(Duration::from_secs(1)).sleep(Contents::Keep(&store))?;
/// assert!(weights.is_asleep());
/// assert_eq!(store.free(), 0);
///
/// tenant.blocks().wake()?;
/// assert_eq!(store.free(), store.capacity());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct HostStore {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    /// The bytes that can be kept.
    capacity: u64,
    /// The free parts. Pinned parts are at the end and are taken first.
    free: Mutex<Vec<HostPart>>,
    /// Parts that copies may still be using, and the streams of these copies.
    unfinished: Mutex<Vec<(Vec<Stream>, Vec<HostPart>)>>,
    /// The lanes that copies use.
    lanes: Mutex<Lanes>,
    /// Notified when lanes return, or when the thread that has them calls user code.
    lanes_changed: Condvar,
}

struct Lanes {
    free: Vec<Lane>,
    /// The number of copying threads that are running user code, which may be waiting for another
    /// copy.
    aside: usize,
}

/// A stream for copies, and the pinned staging parts through which they reach pageable memory.
struct Lane {
    stream: Stream,
    staging: Vec<HostPart>,
    /// A copy failed to be waited for, and may still be using the staging parts.
    unfinished: bool,
}

impl HostStore {
    /// Returns a builder for a store for a device's memory.
    pub const fn builder(device: &Device) -> HostStoreBuilder<'_> {
        HostStoreBuilder::new(device)
    }

    /// Returns the device whose memory the store is for.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Returns the total bytes that can be kept.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.shared.capacity
    }

    /// Returns the free bytes. Contents take whole parts of 2 MiB. Returns 0 in a forked child.
    ///
    /// Parts of a copy that the driver failed to wait for are free again when its stream is idle,
    /// which this method queries (`cuStreamQuery`).
    #[must_use]
    pub fn free(&self) -> u64 {
        if !self.shared.device.is_forked() {
            self.shared.recover();
        }
        self.shared.free_bytes()
    }

    /// Returns a number that identifies the store.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.shared).addr()
    }

    /// Takes parts for contents of several sizes, `wanted` bytes in all: for all of them, or none.
    pub(crate) fn rooms(
        &self,
        sizes: impl Iterator<Item = u64>,
        wanted: u64,
    ) -> Result<Vec<Saved>, SleepError> {
        let mut rooms = Vec::new();
        for bytes in sizes {
            // Parts that were taken before return when they are dropped.
            let Some(parts) = self.shared.take(bytes) else {
                drop(rooms);
                return Err(SleepError::StoreFull {
                    wanted,
                    free: self.free(),
                    capacity: self.shared.capacity,
                });
            };
            rooms.push(Saved::new(parts, bytes, Arc::clone(&self.shared)));
        }
        Ok(rooms)
    }
}

fn bytes_of(part: &HostPart) -> u64 {
    part.size() as u64
}

impl Shared {
    fn free(&self) -> MutexGuard<'_, Vec<HostPart>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the free bytes, or 0 in a forked child, where the lock may be held forever.
    fn free_bytes(&self) -> u64 {
        match self.device.is_forked() {
            true => 0,
            false => self.free().iter().map(bytes_of).sum(),
        }
    }

    fn unfinished(&self) -> MutexGuard<'_, Vec<(Vec<Stream>, Vec<HostPart>)>> {
        self.unfinished
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps parts out of use until the copies on these streams have ended.
    fn set_aside(&self, streams: Vec<Stream>, parts: Vec<HostPart>) {
        if !self.device.is_forked() {
            self.unfinished().push((streams, parts));
        }
    }

    /// Returns parts to the free list that were set aside and are no longer in use.
    fn recover(&self) {
        // Holds the lock: otherwise a copy that is set aside meanwhile could be on a stream whose
        // query has already succeeded.
        let mut unfinished = self.unfinished();
        let (ended, left): (Vec<_>, Vec<_>) = std::mem::take(&mut *unfinished)
            .into_iter()
            .partition(|(streams, _)| streams.iter().all(is_done));
        *unfinished = left;
        drop(unfinished);
        for (_, parts) in ended {
            self.take_back(parts);
        }
    }

    /// Takes parts for `bytes` bytes, or returns `None` if there are too few.
    fn take(&self, bytes: u64) -> Option<Vec<HostPart>> {
        self.recover();
        let mut free = self.free();
        let mut have = 0;
        let parts = free.iter().rev().take_while(|part| {
            let lacks = have < bytes;
            have += bytes_of(part);
            lacks
        });
        let from = free.len() - parts.count();
        (have >= bytes).then(|| free.split_off(from))
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns parts to the free list, pinned ones to the end from which they are taken first.
    fn take_back(&self, parts: Vec<HostPart>) {
        // Another thread of the parent may have held the lock during the fork.
        if self.device.is_forked() {
            return;
        }
        let (pinned, mut ordinary): (Vec<_>, Vec<_>) =
            parts.into_iter().partition(HostPart::is_pinned);
        let mut free = self.free();
        if !ordinary.is_empty() {
            ordinary.append(&mut free);
            *free = ordinary;
        }
        free.extend(pinned);
    }
}

/// Returns `true` if no copy runs on a lane's stream.
fn is_done(stream: &Stream) -> bool {
    let device = stream.device();
    let done = device.relaxed(|| stream.is_done());
    matches!(done, Ok(Ok(true))) || device.lost().is_some()
}

impl Drop for Shared {
    /// Leaks memory that a copy may still be using.
    fn drop(&mut self) {
        if self.device.is_forked() {
            return;
        }
        self.recover();
        let unfinished = std::mem::take(&mut *self.unfinished());
        let lanes = std::mem::take(&mut self.lanes().free);
        let running = lanes.into_iter().filter(Lane::is_running);
        let parts = unfinished.into_iter().map(|(_, parts)| parts);
        for parts in parts.chain(running.map(|lane| lane.staging)) {
            let bytes = parts.iter().map(bytes_of).sum();
            log!(
                error,
                bytes,
                "host memory is leaked: a copy may still be using it"
            );
            self.device.report_leak(bytes);
            std::mem::forget(parts);
        }
    }
}

impl Lane {
    const fn new(stream: Stream) -> Self {
        Self {
            stream,
            staging: Vec::new(),
            unfinished: false,
        }
    }

    /// Returns `true` if a copy that failed to be waited for may still be using the staging parts.
    fn is_running(&self) -> bool {
        self.unfinished && !is_done(&self.stream)
    }
}

impl fmt::Debug for HostStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostStore")
            .field("capacity", &self.capacity())
            .field("free", &self.shared.free_bytes())
            .finish_non_exhaustive()
    }
}
