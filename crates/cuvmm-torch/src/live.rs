//! Live allocations by address: allocating, freeing, recording uses.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cuvmm::driver::StreamHandle;
use cuvmm::{Allocation, Heap, Stream};
use serde::Serialize;

use crate::edge;
use crate::error::Error;
use crate::fork;
use crate::graphs::{self, PoolId};
use crate::heaps::{self, DeviceHeap};
use crate::history::{self, Seen};
use crate::limits;

/// The number of locks over the table, so that threads seldom wait for each other.
const SHARDS: usize = 64;

/// The timeout of a request to other processes of a ledger for memory.
pub(crate) const NEIGHBOURS: Duration = Duration::from_secs(2);

type Shard = HashMap<usize, Live, BuildHasherDefault<AddressHasher>>;

/// The table. An address is removed before its memory is freed, so the next allocation there finds
/// its place empty.
static TABLE: [Mutex<Shard>; SHARDS] =
    [const { Mutex::new(HashMap::with_hasher(BuildHasherDefault::new())) }; SHARDS];

struct Live {
    allocation: Held,
    heap: &'static DeviceHeap,
    home: u64,
    /// The number of ended streams at the allocation.
    ended: u64,
    /// The pool of graphs that the allocation belongs to.
    pool: Option<PoolId>,
    /// `true` if the allocation counts as asleep.
    is_asleep: bool,
    /// `true` if a use could not be recorded: the memory is never reused.
    is_kept: bool,
}

/// An allocation, which offers keep too once it was offered.
enum Held {
    Own(Allocation),
    Shared(Arc<Allocation>),
}

impl Deref for Held {
    type Target = Allocation;

    #[inline]
    fn deref(&self) -> &Allocation {
        match self {
            Self::Own(allocation) => allocation,
            Self::Shared(allocation) => allocation,
        }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    pub(crate) address: usize,
    size: u64,
    pub(crate) requested: u64,
    stream: u64,
    pool: Option<PoolId>,
}

/// Allocates memory and returns its address, or 0 for a size of 0.
pub(crate) fn allocate(
    size: isize,
    device: i32,
    stream: u64,
    pool: Option<PoolId>,
    seen: Option<&Seen>,
) -> Result<usize, Error> {
    fork::check()?;
    let size = match u64::try_from(size) {
        Ok(0) => return Ok(0),
        Ok(size) => size,
        Err(_) => return Err(Error::NegativeSize),
    };
    let heap = heaps::of(device)?;
    let home = one_name(stream);
    let ended = heaps::ended();
    let allocation = heap.with_stream(home, |stream| match pool {
        None => from_heap(heap, &heap.heap, size, stream),
        Some(pool) => from_heap(heap, &graphs::heap(device, pool)?, size, stream)
            .map_err(|error| error.in_pool(pool.0, pool.1)),
    })?;
    let address = usize::try_from(allocation.address().0).unwrap_or(usize::MAX);
    let live = Live {
        allocation: Held::Own(allocation),
        heap,
        home,
        ended,
        pool,
        is_asleep: false,
        is_kept: false,
    };
    // First, so that what counts as asleep was counted.
    heap.figures().made(size);
    if let Some(seen) = seen {
        seen.made(heap, address, size, home);
    }
    shard(address).insert(address, live);
    if let Some(seen) = seen {
        seen.report(heap, address, size);
    }
    Ok(address)
}

#[inline]
fn from_heap(
    of: &DeviceHeap,
    heap: &Heap,
    size: u64,
    stream: &Stream,
) -> Result<Allocation, Error> {
    let error = match heap.allocate(size, 1, stream) {
        Ok(allocation) => return Ok(allocation),
        Err(error) => error.into(),
    };
    again(of, Some(stream), error, |wait| {
        Ok(match wait {
            Some(wait) => heap.allocate_timeout(size, 1, stream, wait),
            None => heap.allocate(size, 1, stream),
        }?)
    })
}

/// Retries an allocation that lacked memory: after free memory has gone back to the driver, after
/// the device's work if memory waits for it, and after a request to other processes, for which
/// `allocate` may wait.
#[cold]
pub(crate) fn again<T>(
    of: &DeviceHeap,
    stream: Option<&Stream>,
    error: Error,
    mut allocate: impl FnMut(Option<Duration>) -> Result<T, Error>,
) -> Result<T, Error> {
    if !error.is_out_of_memory() {
        return Err(error);
    }
    of.figures().retries += 1;
    graphs::collect();
    // If the driver refuses, the second attempt says more.
    let _ = of.trim();
    let _ = limits::settle(of);
    let mut outcome = allocate(None);
    let captures = |stream: &Stream| stream.is_capturing().unwrap_or(true);
    let leave = match outcome.is_err() && !stream.is_some_and(captures) {
        true => graphs::waiting(),
        false => None,
    };
    // A thread that is about to capture waits for the end of the leave, with the interpreter's lock
    // perhaps.
    let _quiet = leave.is_some().then(edge::without_calling_back);
    // Memory freed under a tag waits for all work of its devices. Memory of a heap waits for
    // streams, which a stream can do itself unless that was turned off.
    if leave.is_some() && outcome.as_ref().is_err_and(Error::is_pending) && of.waits() {
        of.figures().syncs += 1;
        if of.synchronize().is_ok() {
            outcome = allocate(None);
        }
    }
    if leave.is_some() && outcome.is_err() && of.ledger().is_some() {
        outcome = allocate(Some(NEIGHBOURS)).or(outcome);
    }
    if outcome.is_err() {
        of.figures().ooms += 1;
    }
    outcome
}

/// Frees the allocation at an address, behind the queued work of its streams and of `stream`.
///
/// # Errors
/// The address is not allocated, or the use of a stream cannot be recorded: the memory is then
/// never reused.
pub(crate) fn free(address: usize, stream: u64, seen: Option<&Seen>) -> Result<(), Error> {
    if address == 0 || fork::is_child() {
        return Ok(());
    }
    let live = shard(address).remove(&address);
    let mut live = live.ok_or(Error::NotAllocated)?;
    let recorded = live.record(stream);
    if live.is_kept {
        std::mem::forget(live.allocation);
        return recorded;
    }
    let size = live.allocation.size();
    match live.is_asleep {
        true => live.heap.figures().ended_asleep(size),
        false => live.heap.figures().ended(size),
    }
    if let Some(seen) = seen {
        seen.ended(live.heap, (address, size), live.home, live.is_asleep);
        let (of, size) = (live.heap, size);
        drop(live);
        seen.report_end(of, address, size);
    }
    recorded
}

/// Records that work of a stream uses the allocation at an address, if any.
///
/// # Errors
/// The use cannot be recorded.
pub(crate) fn record(address: usize, stream: u64) -> Result<(), Error> {
    if address == 0 || fork::is_child() {
        return Ok(());
    }
    match shard(address).get_mut(&address) {
        Some(live) => live.record(stream),
        None => Ok(()),
    }
}

/// Records a use like [`record`], or changes nothing: then the caller does not use the memory.
///
/// # Errors
/// The address is not allocated, or the use cannot be recorded.
pub(crate) fn try_record(address: usize, stream: u64) -> Result<(), Error> {
    fork::check()?;
    let shard = shard(address);
    let live = shard.get(&address).ok_or(Error::NotAllocated)?;
    live.try_record(stream)
}

/// Returns the first address and the bytes of the allocation that contains an address. Looks at all
/// allocations, unless the address is the first.
pub(crate) fn containing(address: usize) -> Option<(usize, usize)> {
    if fork::is_child() {
        return None;
    }
    let bytes = |live: &Live| usize::try_from(live.allocation.size()).unwrap_or(usize::MAX);
    if let Some(live) = shard(address).get(&address) {
        return Some((address, bytes(live)));
    }
    TABLE.iter().find_map(|shard| {
        let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = shard.iter().map(|(&first, live)| (first, bytes(live)));
        all.find(|&(first, bytes)| address.checked_sub(first).is_some_and(|at| at < bytes))
    })
}

/// Returns the allocation that has some memory, for offers that keep it too, and its device. Returns
/// `None` if the heap's memory is not shareable, a pool of graphs has it, or it is not all in one
/// allocation.
pub(crate) fn share(address: u64, size: u64) -> Option<(Arc<Allocation>, i32)> {
    let address = usize::try_from(address).ok()?;
    let (first, _) = containing(address)?;
    let end = ((address - first) as u64).checked_add(size)?;
    let mut shard = shard(first);
    // Another allocation may have come there meanwhile.
    let live = shard.get(&first)?;
    let is_within = end <= live.allocation.size();
    if !is_within || !live.heap.is_shareable() || live.pool.is_some() {
        return None;
    }
    let device = live.heap.device.ordinal().0;
    let mut live = shard.remove(&first)?;
    let shared = match live.allocation {
        Held::Own(allocation) => Arc::new(allocation),
        Held::Shared(allocation) => allocation,
    };
    live.allocation = Held::Shared(Arc::clone(&shared));
    shard.insert(first, live);
    Some((shared, device))
}

/// Returns the allocations of a device's heaps that are awake, and those that sleep.
pub(crate) fn entries(of: &DeviceHeap) -> (Vec<Entry>, Vec<Entry>) {
    let (mut awake, mut asleep) = (Vec::new(), Vec::new());
    for shard in &TABLE {
        let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        for (&address, live) in shard.iter().filter(|(_, live)| std::ptr::eq(live.heap, of)) {
            let list = match live.is_asleep {
                true => &mut asleep,
                false => &mut awake,
            };
            list.push(live.entry(address));
        }
    }
    for list in [&mut awake, &mut asleep] {
        list.sort_unstable_by_key(|entry: &Entry| entry.address);
    }
    (awake, asleep)
}

/// Counts the allocations of a device's pools of graphs as asleep, or as awake.
pub(crate) fn set_asleep(of: &DeviceHeap, pools: &[PoolId], is_asleep: bool) {
    if pools.is_empty() {
        return;
    }
    // Locked first: an allocation that ends is counted as what it is marked as.
    let mut figures = of.figures();
    for shard in &TABLE {
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let all = shard
            .iter_mut()
            .filter(|(_, live)| std::ptr::eq(live.heap, of));
        let chosen = all.filter(|(_, live)| live.pool.is_some_and(|pool| pools.contains(&pool)));
        for (&address, live) in chosen.filter(|(_, live)| live.is_asleep != is_asleep) {
            live.is_asleep = is_asleep;
            let size = live.allocation.size();
            match is_asleep {
                true => figures.slept(size),
                false => figures.woke(size),
            }
            history::moved(of, address, size, live.home, is_asleep);
        }
    }
}

impl Entry {
    /// Describes a block of a tag, without a stream and a pool.
    pub(crate) const fn block(address: usize, requested: u64) -> Self {
        Self {
            address,
            size: requested.next_multiple_of(cuvmm::heap::ALIGNMENT),
            requested,
            stream: 0,
            pool: None,
        }
    }
}

impl Live {
    /// Records a use. On failure the memory is never reused.
    #[inline]
    fn record(&mut self, stream: u64) -> Result<(), Error> {
        let recorded = self.try_record(stream);
        self.is_kept |= recorded.is_err();
        recorded
    }

    #[inline]
    fn try_record(&self, stream: u64) -> Result<(), Error> {
        let stream = one_name(stream);
        // A stream that has ended is not known, and all its work is complete.
        let is_home = || self.ended == heaps::ended() || !self.heap.knows(stream);
        if stream == self.home && is_home() {
            return Ok(());
        }
        let allocation = &self.allocation;
        let record = |other: &Stream| Ok(allocation.record_use(other)?);
        self.heap.with_stream(stream, record)
    }

    fn entry(&self, address: usize) -> Entry {
        let requested = self.allocation.size();
        Entry {
            address,
            size: requested.next_multiple_of(cuvmm::heap::ALIGNMENT),
            requested,
            stream: self.home,
            pool: self.pool,
        }
    }
}

/// Returns one handle for both handles of the legacy default stream.
const fn one_name(stream: u64) -> u64 {
    if stream == StreamHandle::LEGACY.0 {
        StreamHandle::NULL.0
    } else {
        stream
    }
}

/// Returns a hash whose bits depend on all bits of an address.
const fn mixed(address: usize) -> u64 {
    // Addresses are multiples of 512, and large ones of 2 MiB.
    let product = (address as u64 >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

const fn shard_of(address: usize) -> usize {
    // Other bits than the shard's map uses to find a place.
    (mixed(address) >> 8) as usize % SHARDS
}

#[inline]
fn shard(address: usize) -> MutexGuard<'static, Shard> {
    TABLE[shard_of(address)]
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    #[inline]
    fn write_usize(&mut self, address: usize) {
        // The map takes the low bits for the place, and the uppermost for a tag.
        self.0 = mixed(address).rotate_left(18);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::Hasher as _;

    use super::{AddressHasher, one_name, shard_of};

    #[test]
    fn the_legacy_stream_has_one_name() {
        assert_eq!(one_name(0), one_name(1));
        assert_ne!(one_name(2), one_name(0));
        assert_eq!(one_name(0x1000), 0x1000);
    }

    #[test]
    fn addresses_spread_over_shards_and_places() {
        for step in [512, 2 << 20, 20 << 20, 1 << 30] {
            let addresses = (0..1024).map(|number| 0x7f00_0000_0000 + number * step);
            let places = addresses.map(|address: usize| {
                let mut hasher = AddressHasher::default();
                hasher.write_usize(address);
                (shard_of(address), hasher.finish() % 64)
            });
            let different: HashSet<(usize, u64)> = places.collect();
            // Of 4096 pairs, 1024 at random have about 900.
            assert!(different.len() > 600, "{step}: {}", different.len());
        }
    }
}
