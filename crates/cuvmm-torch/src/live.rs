//! Live allocations by address: allocating, freeing, recording uses.

use std::sync::Arc;
use std::time::Duration;

use cuvmm::driver::StreamHandle;
use cuvmm::{Allocation, BlockError, Heap, Stream};

use crate::edge;
use crate::error::Error;
use crate::fork;
use crate::graphs;
use crate::heaps::{self, DeviceHeap};
use crate::history::{self, Seen};
use crate::limits;
use crate::table::{Held, Live, PoolId};

/// The timeout of a request to other processes of a ledger for memory.
pub(crate) const NEIGHBOURS: Duration = Duration::from_secs(2);

/// Allocates memory and returns its address, or 0 for a size of 0.
///
/// Errors are boxed: an address is passed on in a register then.
pub(crate) fn allocate(
    size: isize,
    device: i32,
    stream: u64,
    pool: Option<PoolId>,
    seen: Option<&Seen>,
) -> Result<usize, Box<Error>> {
    fork::check()?;
    let size = match u64::try_from(size) {
        Ok(0) => return Ok(0),
        Ok(size) => size,
        Err(_) => return Err(Box::new(Error::NegativeSize)),
    };
    let of = heaps::of(device)?;
    let home = one_name(stream);
    let ended = heaps::ended();
    let address = of.with_stream(home, |stream| -> Result<usize, Box<Error>> {
        let allocation = match pool {
            None => match of.heap.allocate(size, 1, stream) {
                Ok(allocation) => allocation,
                Err(error) => retry(of, &of.heap, size, stream, error)?,
            },
            Some(pool) => from_pool(of, pool, size, stream)?,
        };
        let address = usize::try_from(allocation.address().0).unwrap_or(usize::MAX);
        if let Some(seen) = seen {
            seen.made(of, address, size, home);
        }
        let live = Live {
            allocation: Held::Own(allocation),
            home,
            ended,
            pool,
            is_asleep: false,
            is_kept: false,
        };
        of.table().add(address, live);
        Ok(address)
    })?;
    if let Some(seen) = seen {
        seen.report(of, address, size);
    }
    Ok(address)
}

#[cold]
fn from_pool(
    of: &DeviceHeap,
    pool: PoolId,
    size: u64,
    stream: &Stream,
) -> Result<Allocation, Box<Error>> {
    let heap = graphs::heap(of.device.ordinal().0, pool)?;
    let allocated = heap.allocate(size, 1, stream);
    let allocated = allocated.or_else(|error| retry(of, &heap, size, stream, error));
    allocated.map_err(|error| Box::new(error.in_pool(pool.0, pool.1)))
}

#[cold]
fn retry(
    of: &DeviceHeap,
    heap: &Heap,
    size: u64,
    stream: &Stream,
    error: BlockError,
) -> Result<Allocation, Error> {
    again(of, Some(stream), error.into(), |wait| {
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
    of.table().figures.retries += 1;
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
        of.table().figures.syncs += 1;
        if of.synchronize().is_ok() {
            outcome = allocate(None);
        }
    }
    if leave.is_some() && outcome.is_err() && of.ledger().is_some() {
        outcome = allocate(Some(NEIGHBOURS)).or(outcome);
    }
    if outcome.is_err() {
        of.table().figures.ooms += 1;
    }
    outcome
}

/// Frees the allocation at an address, behind the queued work of its streams and of `stream`. Looks
/// first among the allocations of `device`. Returns `None` if there is none. Does nothing for address
/// 0 and in a forked child.
///
/// # Errors
/// The use of a stream cannot be recorded: the memory is then never reused.
pub(crate) fn free(
    address: usize,
    device: i32,
    stream: u64,
    seen: Option<&Seen>,
) -> Option<Result<(), Box<Error>>> {
    if address == 0 || fork::is_child() {
        return Some(Ok(()));
    }
    let named = heaps::known(device);
    let freed = named.and_then(|of| free_of(of, address, stream, seen));
    freed.or_else(|| heaps::all().find_map(|(_, of)| free_of(of, address, stream, seen)))
}

fn free_of(
    of: &'static DeviceHeap,
    address: usize,
    stream: u64,
    seen: Option<&Seen>,
) -> Option<Result<(), Box<Error>>> {
    let mut table = of.table();
    let live = table.remove(address)?;
    let is_home = live.home == one_name(stream) && live.ended == heaps::ended();
    if live.is_kept || !is_home || seen.is_some() {
        drop(table);
        return Some(free_slowly(of, live, address, stream, seen));
    }
    table.count_end(&live);
    drop(table);
    drop(live);
    Some(Ok(()))
}

/// Frees an allocation that was used on another stream perhaps, or whose end is recorded.
#[cold]
fn free_slowly(
    of: &'static DeviceHeap,
    mut live: Live,
    address: usize,
    stream: u64,
    seen: Option<&Seen>,
) -> Result<(), Box<Error>> {
    let recorded = live.record(of, stream);
    if live.is_kept {
        std::mem::forget(live.allocation);
        return Ok(recorded?);
    }
    of.table().count_end(&live);
    let size = live.allocation.size();
    if let Some(seen) = seen {
        seen.ended(of, (address, size), live.home, live.is_asleep);
    }
    drop(live);
    if let Some(seen) = seen {
        seen.report_end(of, address, size);
    }
    Ok(recorded?)
}

/// Calls a function with the allocation at an address, if any, and with its device.
fn with_live<T>(
    address: usize,
    act: impl FnOnce(&'static DeviceHeap, &mut Live) -> T,
) -> Option<T> {
    let mut act = Some(act);
    heaps::all().find_map(|(_, of)| {
        let mut table = of.table();
        let live = table.get_mut(address)?;
        Some(act.take()?(of, live))
    })
}

/// Records that work of a stream uses the allocation at an address, if any.
///
/// # Errors
/// The use cannot be recorded.
pub(crate) fn record(address: usize, stream: u64) -> Result<(), Error> {
    if address == 0 || fork::is_child() {
        return Ok(());
    }
    with_live(address, |of, live| live.record(of, stream)).unwrap_or(Ok(()))
}

/// Records a use like [`record`], or changes nothing: then the caller does not use the memory.
///
/// # Errors
/// The address is not allocated, or the use cannot be recorded.
pub(crate) fn try_record(address: usize, stream: u64) -> Result<(), Error> {
    fork::check()?;
    let recorded = with_live(address, |of, live| live.try_record(of, stream));
    recorded.unwrap_or(Err(Error::NotAllocated))
}

/// Returns the first address and the bytes of the allocation that contains an address. Looks at all
/// allocations, unless the address is the first.
pub(crate) fn containing(address: usize) -> Option<(usize, usize)> {
    let (_, first, bytes) = found(address)?;
    Some((first, bytes))
}

fn found(address: usize) -> Option<(&'static DeviceHeap, usize, usize)> {
    if fork::is_child() {
        return None;
    }
    let bytes = |live: &Live| usize::try_from(live.allocation.size()).unwrap_or(usize::MAX);
    if let Some((of, bytes)) = with_live(address, |of, live| (of, bytes(live))) {
        return Some((of, address, bytes));
    }
    heaps::all().find_map(|(_, of)| {
        let table = of.table();
        let mut all = table.iter().map(|(first, live)| (first, bytes(live)));
        let is_in = |&(first, bytes): &(usize, usize)| {
            address.checked_sub(first).is_some_and(|at| at < bytes)
        };
        let (first, bytes) = all.find(is_in)?;
        Some((of, first, bytes))
    })
}

/// Returns the allocation that has some memory, for offers that keep it too, and its device. Returns
/// `None` if the heap's memory is not shareable, a pool of graphs has it, or it is not all in one
/// allocation.
pub(crate) fn share(address: u64, size: u64) -> Option<(Arc<Allocation>, i32)> {
    let address = usize::try_from(address).ok()?;
    let (of, first, _) = found(address)?;
    let end = ((address - first) as u64).checked_add(size)?;
    let mut table = of.table();
    // Another allocation may have come there meanwhile.
    let live = table.get(first)?;
    if end > live.allocation.size() || !of.is_shareable() || live.pool.is_some() {
        return None;
    }
    Some((table.share(first)?, of.device.ordinal().0))
}

/// Counts the allocations of a device's pools of graphs as asleep, or as awake.
pub(crate) fn set_asleep(of: &DeviceHeap, pools: &[PoolId], is_asleep: bool) {
    if !pools.is_empty() {
        let moved = |address, size, home| history::moved(of, address, size, home, is_asleep);
        of.table().set_asleep(pools, is_asleep, moved);
    }
}

impl Live {
    /// Records a use. On failure the memory is never reused.
    fn record(&mut self, of: &'static DeviceHeap, stream: u64) -> Result<(), Error> {
        let recorded = self.try_record(of, stream);
        self.is_kept |= recorded.is_err();
        recorded
    }

    fn try_record(&self, of: &'static DeviceHeap, stream: u64) -> Result<(), Error> {
        let stream = one_name(stream);
        // A stream that has ended is not known, and all its work is complete.
        let is_home = || self.ended == heaps::ended() || !of.knows(stream);
        if stream == self.home && is_home() {
            return Ok(());
        }
        let allocation = &self.allocation;
        let record = |other: &Stream| Ok(allocation.record_use(other)?);
        of.with_stream(stream, record)
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
