//! Host memory, allocated in advance, for the contents of sleeping device memory.
//!
//! A [`HostStore`] has pinned memory, which devices copy to and from at the full speed of the bus;
//! pageable memory, which costs the system less and is reached through a small pinned staging area;
//! or both, in which case the pinned part is used first. Touching memory for the first time and
//! pinning it is slower than a copy. So a store is built with memory, and one with a higher
//! [limit](HostStoreBuilder::limit) takes more as contents come: copies to the first pieces run
//! while later ones are prepared.
//!
//! Contents are kept in parts of 2 MiB, which return to the store when the contents are dropped.
//! [`HostStore::shrink_to`] gives memory without contents back to the system.
//!
//! A forked child does not inherit the memory.
//!
//! # Not provided
//! This module maps and unmaps no device memory, and does not decide what is kept.

#[cfg(not(target_os = "linux"))]
mod anywhere;
mod available;
mod builder;
mod copies;
mod growth;
mod lanes;
#[cfg(target_os = "linux")]
mod near;
mod ranges;
mod saved;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};

use crate::device::Device;
use crate::error::{ArgumentError, MemoryError, SleepError};
use crate::own::{HostPart, Stream};
use crate::size::Granularity;
use crate::sync::{Condvar, Mutex, MutexGuard};

#[cfg(not(target_os = "linux"))]
use anywhere as near;

pub use builder::HostStoreBuilder;
pub(crate) use copies::{Contents, Copies, Direction, Done, Job, PARTS, Stage, copy};
pub(crate) use growth::{Grown, Growth};
pub(crate) use ranges::Ranges;
pub(crate) use saved::Saved;

/// The size of the parts that contents are kept in.
pub(crate) const PART: usize = 2 << 20;

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
    /// Memory is pinned by registering it. Otherwise the driver refused that, and allocates it.
    registers: bool,
    memory: Mutex<Memory>,
    /// Parts that copies may still be using, and the streams of these copies.
    unfinished: Mutex<Vec<(Vec<Stream>, Vec<HostPart>)>>,
    /// The lanes that copies use.
    lanes: Mutex<Lanes>,
    /// Notified when lanes return, or when the thread that has them calls user code.
    lanes_changed: Condvar,
}

struct Memory {
    /// The free parts. Pinned parts are at the end and are taken first.
    free: Vec<HostPart>,
    /// The bytes of all parts.
    bytes: u64,
    /// The most bytes of all parts when more are taken.
    limit: u64,
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

    /// Returns the bytes of host memory that the store has, with or without contents. Returns 0 in a
    /// forked child.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.shared.memory_of(|memory| memory.bytes)
    }

    /// Returns the most bytes of host memory up to which the store takes more. Returns 0 in a forked
    /// child.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.shared.memory_of(|memory| memory.limit)
    }

    /// Sets the most bytes of host memory up to which the store takes more. It keeps what it has;
    /// [`shrink_to`](Self::shrink_to) gives that back. Does nothing in a forked child.
    pub fn set_limit(&self, bytes: u64) {
        if !self.shared.device.is_forked() {
            self.shared.memory().limit = bytes;
        }
    }

    /// Takes host memory until at least `bytes` bytes are free, so that contents of that size are
    /// kept as fast as possible. Does nothing if they are free already.
    ///
    /// # Errors
    /// [`SleepError::StoreFull`] if that is more than the limit allows, and [`SleepError::Memory`]
    /// if the system has too little memory ([`MemoryError::HostOutOfMemory`]) or the driver refuses
    /// to pin it. The store has as much memory as before.
    #[doc(alias = "cuMemHostRegister")]
    pub fn reserve(&self, bytes: u64) -> Result<(), SleepError> {
        self.shared
            .device
            .own_process()
            .map_err(MemoryError::from)?;
        let (new, growth) = self.take(&[bytes], Free::Stays)?;
        let _new = Saved::new(new, Ranges::default(), Arc::clone(&self.shared));
        let grown = growth.finish(|| Ok::<(), SleepError>(()))?;
        grown.keep();
        Ok(())
    }

    /// Gives free memory back to the system until the store has at most `bytes` bytes
    /// (`cuMemHostUnregister`), and returns the bytes given back. Memory is given back in the pieces
    /// in which it was taken, of up to 64 MiB, and only if no part of the piece has contents. So the
    /// store may then have less than `bytes`, by less than a piece. Where the driver allocates the
    /// memory, each step in which the store has grown is a piece.
    #[doc(alias = "cuMemHostUnregister")]
    #[doc(alias = "shrink_to_fit")]
    pub fn shrink_to(&self, bytes: u64) -> u64 {
        if self.shared.device.is_forked() {
            return 0;
        }
        self.shared.recover();
        let given = self.shared.withdraw(bytes);
        given.iter().map(bytes_of).sum()
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

    /// Takes parts for contents of several blocks, for each of which `contents` has the ranges: for
    /// all of them, or none. Those of the returned growth have no bytes before it is finished.
    pub(crate) fn rooms(&self, contents: Vec<Ranges>) -> Result<(Vec<Saved>, Growth), SleepError> {
        let sizes: Vec<u64> = contents.iter().map(Ranges::bytes).collect();
        let (found, growth) = self.take(&sizes, Free::First)?;
        let mut found = found.into_iter();
        let rooms = contents.into_iter().map(|ranges| {
            let parts = found.by_ref().take(parts(ranges.bytes()) as usize);
            Saved::new(parts.collect(), ranges, Arc::clone(&self.shared))
        });
        Ok((rooms.collect(), growth))
    }

    /// Takes parts for contents of several sizes.
    fn take(&self, sizes: &[u64], use_of: Free) -> Result<(Vec<HostPart>, Growth), SleepError> {
        let count = sizes.iter().map(|&bytes| parts(bytes)).sum();
        let taken = self.shared.take(count, use_of);
        taken.map_err(|refused| match refused {
            Refused::Full { free, capacity } => SleepError::StoreFull {
                wanted: sizes.iter().sum(),
                free,
                capacity,
            },
            Refused::Memory(error) => error.into(),
        })
    }
}

/// Returns the number of parts that contents take.
const fn parts(bytes: u64) -> u64 {
    bytes.div_ceil(PART as u64)
}

/// Rounds up to whole parts.
fn whole(value: u64) -> Result<usize, ArgumentError> {
    let part = Granularity::new(PART as u64);
    let whole = part.and_then(|part| part.round_up(value)?.try_into().ok());
    whole.ok_or(ArgumentError::Overflow { what: BYTES, value })
}

/// The name of a store's size in errors.
const BYTES: &str = "bytes of a store";

fn bytes_of(part: &HostPart) -> u64 {
    part.size() as u64
}

/// The use of the free parts of a store for contents that need parts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Free {
    /// They are taken first.
    First,
    /// They count, and stay for others.
    Stays,
}

/// The reason why a store has no parts for contents.
enum Refused {
    /// The limit allows `capacity` bytes, of which `free` are free.
    Full { free: u64, capacity: u64 },
    /// The system or the driver has too little memory.
    Memory(MemoryError),
}

impl Shared {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a figure of the memory, or 0 in a forked child, where the lock may be held forever.
    fn memory_of(&self, figure: impl FnOnce(&Memory) -> u64) -> u64 {
        match self.device.is_forked() {
            true => 0,
            false => figure(&self.memory()),
        }
    }

    fn free_bytes(&self) -> u64 {
        self.memory_of(|memory| memory.free.iter().map(bytes_of).sum())
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

    /// Takes a number of parts.
    fn take(&self, count: u64, use_of: Free) -> Result<(Vec<HostPart>, Growth), Refused> {
        self.recover();
        let mut memory = self.memory();
        let Memory { free, bytes, limit } = &mut *memory;
        let found = free.len().min(count.try_into().unwrap_or(usize::MAX));
        let wanted = count.saturating_mul(PART as u64);
        let lacking = wanted - (found * PART) as u64;
        let room = limit.saturating_sub(*bytes);
        if lacking > room {
            return Err(Refused::Full {
                free: (free.len() * PART) as u64 + room,
                capacity: (*bytes).max(*limit),
            });
        }
        let parts = match use_of {
            Free::First => free.split_off(free.len() - found),
            Free::Stays => Vec::new(),
        };
        *bytes += lacking;
        drop(memory);
        let mut taking = Taking {
            store: self,
            parts,
            lacking,
        };
        let (growth, new) = match (lacking, self.registers) {
            (0, _) => (Growth::nothing(&self.device), Vec::new()),
            (_, true) => Growth::new(&self.device, lacking, true).map_err(Refused::Memory)?,
            (_, false) => Growth::allocated(&self.device, lacking).map_err(Refused::Memory)?,
        };
        taking.parts.extend(new);
        Ok((taking.end(), growth))
    }

    /// Takes pieces without contents out of the free list until the store has at most `most` bytes.
    fn withdraw(&self, most: u64) -> Vec<HostPart> {
        let mut memory = self.memory();
        let Memory { free, bytes, .. } = &mut *memory;
        let mut free_of = BTreeMap::new();
        for part in &*free {
            *free_of.entry(part.allocation()).or_insert(0) += 1;
        }
        let mut excess = bytes.saturating_sub(most);
        let mut given = BTreeSet::new();
        for part in &*free {
            let whole = free_of.get(&part.allocation()) == Some(&part.siblings());
            if whole && excess > 0 && given.insert(part.allocation()) {
                excess = excess.saturating_sub((part.siblings() * PART) as u64);
            }
        }
        let (given, kept) = std::mem::take(free)
            .into_iter()
            .partition(|part| given.contains(&part.allocation()));
        *free = kept;
        *bytes -= given.iter().map(bytes_of).sum::<u64>();
        given
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
        // Parts whose growth failed are dropped after the lock is released.
        let (parts, discarded): (Vec<_>, Vec<_>) = parts.into_iter().partition(HostPart::is_kept);
        let (pinned, mut ordinary): (Vec<_>, Vec<_>) =
            parts.into_iter().partition(HostPart::is_pinned);
        let mut memory = self.memory();
        memory.bytes -= discarded.iter().map(bytes_of).sum::<u64>();
        let free = &mut memory.free;
        if !ordinary.is_empty() {
            ordinary.append(free);
            *free = ordinary;
        }
        free.extend(pinned);
    }
}

/// Parts of a store, and room in it for more. Both return to the store on drop, after an error or a
/// panic of the driver too.
struct Taking<'a> {
    store: &'a Shared,
    parts: Vec<HostPart>,
    lacking: u64,
}

impl Taking<'_> {
    /// Returns the parts, which fill the room.
    fn end(mut self) -> Vec<HostPart> {
        self.lacking = 0;
        std::mem::take(&mut self.parts)
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.store.memory().bytes -= self.lacking;
        self.store.take_back(std::mem::take(&mut self.parts));
    }
}

/// Returns `true` if no copy runs on a lane's stream. After a panic of the driver one may: the parts
/// that it uses are not freed by the panic.
fn is_done(stream: &Stream) -> bool {
    let device = stream.device();
    let ask = || device.relaxed(|| stream.is_done());
    let done = catch_unwind(AssertUnwindSafe(ask));
    matches!(done, Ok(Ok(Ok(true)))) || device.lost().is_some()
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
            .field("limit", &self.limit())
            .field("free", &self.shared.free_bytes())
            .finish_non_exhaustive()
    }
}
