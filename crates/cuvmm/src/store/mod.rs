//! Memory of the host, prepared beforehand, that the contents of device memory are kept in.
//!
//! A [`HostStore`] has pinned memory, which devices copy to and from at the full speed of the bus;
//! ordinary memory, which costs the system less, for what goes through a small pinned arena on its
//! way; or both: the pinned part is used first. All of it is had when the store is built, since
//! pinning and first touching it is slower than any copy.
//!
//! What is kept lies in parts of 2 MiB, and comes back to the store when it is dropped.
//!
//! # What is not here
//! No device memory is mapped or unmapped here, and nothing is decided about what is kept.

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

/// What is kept lies in parts of this size.
const PART: usize = 2 << 20;

/// Host memory for the contents of device memory. Clones are the same store; its memory is freed
/// when the last clone and all that is kept in it have gone.
#[derive(Clone)]
pub struct HostStore {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    /// Bytes that can be kept.
    capacity: u64,
    /// What nothing is kept in: pinned parts at the end, to be taken first.
    free: Mutex<Vec<HostPart>>,
    /// Parts that copies may still be using, and the streams of these copies.
    unfinished: Mutex<Vec<(Vec<Stream>, Vec<HostPart>)>>,
    /// What copies are made with.
    lanes: Mutex<Lanes>,
    /// Told when lanes come back, or the thread that has them turns to the user's code.
    lanes_changed: Condvar,
}

/// The lanes that are free: all, or none while a copy has them.
struct Lanes {
    free: Vec<Lane>,
    /// Threads that copy and are in the user's code, which may be waiting for another copy.
    aside: usize,
}

/// A stream for copies, and pinned parts through which they reach ordinary memory.
struct Lane {
    stream: Stream,
    staging: Vec<HostPart>,
    /// Whether a copy could not be waited for, which may still be using the staging memory.
    unfinished: bool,
}

impl HostStore {
    /// Sets out to build a store for a device's memory.
    pub const fn builder(device: &Device) -> HostStoreBuilder<'_> {
        HostStoreBuilder::new(device)
    }

    /// The device whose memory it is for.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Bytes that can be kept in all.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.shared.capacity
    }

    /// Bytes that nothing is kept in. What is kept takes whole parts of 2 MiB. 0 in a forked child.
    ///
    /// Memory of a copy that the driver refused to wait for counts again when its stream is done,
    /// which is asked here (`cuStreamQuery`).
    #[must_use]
    pub fn free(&self) -> u64 {
        if !self.shared.device.is_forked() {
            self.shared.recover();
        }
        self.shared.free_bytes()
    }

    /// A number that no other store has.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.shared).addr()
    }

    /// Room for contents of several sizes, `wanted` in all: for all of them or none.
    pub(crate) fn rooms(
        &self,
        sizes: impl Iterator<Item = u64>,
        wanted: u64,
    ) -> Result<Vec<Saved>, SleepError> {
        let mut rooms = Vec::new();
        for bytes in sizes {
            // What was taken before goes back when it is dropped.
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

    /// Bytes that nothing is kept in now; 0 in a forked child, where the lock may be held for good.
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

    /// Keeps parts from use until the copies on these streams have ended.
    fn set_aside(&self, streams: Vec<Stream>, parts: Vec<HostPart>) {
        if !self.device.is_forked() {
            self.unfinished().push((streams, parts));
        }
    }

    /// Takes back the parts that were set aside and that no copy uses any more.
    fn recover(&self) {
        // Under the lock: a copy that is set aside meanwhile may be on a stream that was just done.
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

    /// Parts for so many bytes; nothing if there are too few.
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

    /// Takes parts back: pinned ones to where they are taken first.
    fn take_back(&self, parts: Vec<HostPart>) {
        // Another thread of the parent may have had the lock when the child was forked.
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

/// Whether no copy runs on a stream of ours.
fn is_done(stream: &Stream) -> bool {
    let device = stream.device();
    let done = device.relaxed(|| stream.is_done());
    matches!(done, Ok(Ok(true))) || device.lost().is_some()
}

impl Drop for Shared {
    /// Leaves memory allocated for good that a copy may still be using.
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
            tracing::error!(bytes, "host memory is leaked: a copy may still be using it");
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

    /// Whether a copy that could not be waited for may still be using the staging memory.
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
