//! Live allocations by address: allocating, freeing, recording uses.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuvmm::Allocation;
use cuvmm::driver::StreamHandle;

use crate::error::Error;
use crate::fork;
use crate::heaps::{self, DeviceHeap};

/// Locks that share the table, so that threads seldom wait for each other.
const SHARDS: usize = 16;

type Shard = BTreeMap<usize, Live>;

/// The table. An address is removed before its memory is freed, so the next allocation there finds
/// its place empty.
static TABLE: [Mutex<Shard>; SHARDS] = [const { Mutex::new(BTreeMap::new()) }; SHARDS];

/// A live allocation.
struct Live {
    allocation: Allocation,
    heap: &'static DeviceHeap,
    /// The handle of the stream that it was made for.
    home: u64,
    /// `true` if a use could not be recorded: the memory is never reused.
    is_kept: bool,
}

/// Allocates memory and returns its address; 0 for a size of 0.
pub(crate) fn allocate(size: isize, device: i32, stream: u64) -> Result<usize, Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let size = match u64::try_from(size) {
        Ok(0) => return Ok(0),
        Ok(size) => size,
        Err(_) => return Err(Error::NegativeSize),
    };
    let heap = heaps::of(device)?;
    let home = one_name(stream);
    let allocation = heap.heap.allocate(size, 1, &heap.stream(home)?)?;
    let address = usize::try_from(allocation.address().0).unwrap_or(usize::MAX);
    let live = Live {
        allocation,
        heap,
        home,
        is_kept: false,
    };
    shard(address).insert(address, live);
    Ok(address)
}

/// Frees the allocation at an address, behind what its streams have queued. `stream` is one of them.
///
/// # Errors
/// An address that is not allocated. A stream whose use cannot be recorded: the memory is then never
/// reused.
pub(crate) fn free(address: usize, stream: u64) -> Result<(), Error> {
    if address == 0 || fork::is_child() {
        return Ok(());
    }
    let live = shard(address).remove(&address);
    let mut live = live.ok_or(Error::NotAllocated)?;
    let recorded = live.record(stream);
    if live.is_kept {
        std::mem::forget(live.allocation);
    }
    recorded
}

/// Records that work of a stream uses the allocation at an address, if there is one.
///
/// # Errors
/// A stream whose use cannot be recorded.
pub(crate) fn record(address: usize, stream: u64) -> Result<(), Error> {
    if address == 0 || fork::is_child() {
        return Ok(());
    }
    match shard(address).get_mut(&address) {
        Some(live) => live.record(stream),
        None => Ok(()),
    }
}

impl Live {
    fn record(&mut self, stream: u64) -> Result<(), Error> {
        let stream = one_name(stream);
        if stream == self.home {
            return Ok(());
        }
        let other = self.heap.stream(stream);
        let recorded = other.and_then(|other| Ok(self.allocation.record_use(&other)?));
        self.is_kept |= recorded.is_err();
        recorded
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

fn shard(address: usize) -> MutexGuard<'static, Shard> {
    // Addresses are multiples of 512, and large ones of 2 MiB: their upper bits are mixed in.
    let mixed = (address >> 9) ^ (address >> 21) ^ (address >> 27);
    TABLE[mixed % SHARDS]
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::one_name;

    #[test]
    fn the_legacy_stream_has_one_name() {
        assert_eq!(one_name(0), one_name(1));
        assert_ne!(one_name(2), one_name(0));
        assert_eq!(one_name(0x1000), 0x1000);
    }
}
