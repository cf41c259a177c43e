//! Pools of graphs: while one is open for a stream, allocations for the stream come from a heap of
//! its own, which keeps its memory as long as the pool has users.
//!
//! No operation outside of an open pool takes the lock here.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuvmm::Heap;
use serde::Serialize;

use crate::cxx::Filter;
use crate::error::Error;
use crate::fork;
use crate::heaps::{self, DeviceHeap};

/// The identity of a pool: `c10::MempoolId_t`, a `std::pair`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PoolId(pub u64, pub u64);

struct GraphPool {
    device: i32,
    id: PoolId,
    /// `None` until it could be built.
    heap: Option<Heap>,
    /// How often it was opened, less how often it was released.
    users: u64,
    /// The functions that accept streams, for each time that it is open.
    open: Vec<Filter>,
}

struct State {
    pools: Vec<GraphPool>,
    /// Heaps of pools without users. They end when the work of the device has been waited for, since
    /// a graph may be running. With allocations that outlive their pool they are ordinary heaps then.
    released: Vec<(&'static DeviceHeap, Heap)>,
}

static STATE: Mutex<State> = Mutex::new(State {
    pools: Vec::new(),
    released: Vec::new(),
});

/// The number of functions in `open` of all pools.
static OPEN: AtomicUsize = AtomicUsize::new(0);

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns `false` while a pool is open: a capture may be running, which waiting for the device
/// breaks.
pub(crate) fn may_wait() -> bool {
    OPEN.load(Ordering::Relaxed) == 0
}

/// Returns the pool that was opened last of those that are open for a stream of a device.
///
/// It calls functions of C++, which may throw: nothing in the callers must catch that.
#[inline]
pub(crate) fn route(device: i32, stream: *mut c_void) -> Option<PoolId> {
    match OPEN.load(Ordering::Relaxed) {
        0 => None,
        _ => asked(device, stream),
    }
}

#[cold]
fn asked(device: i32, stream: *mut c_void) -> Option<PoolId> {
    if fork::is_child() {
        return None;
    }
    let state = lock();
    let mut pools = state
        .pools
        .iter()
        .rev()
        .filter(|pool| pool.device == device);
    let found = pools.find(|pool| pool.open.iter().any(|filter| filter.accepts(stream)));
    found.map(|pool| pool.id)
}

/// Opens a pool for the streams that a function accepts. The pool is made if there is none.
///
/// # Errors
/// The heap cannot be built. The pool is open nevertheless, so that allocations for it fail.
pub(crate) fn begin(device: i32, id: PoolId, filter: Filter) -> Result<(), Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    collect();
    let mut state = lock();
    // The pool that was opened last is the last.
    let known = state.pools.iter().position(|pool| pool.is(device, id));
    let mut pool = match known {
        Some(at) => state.pools.remove(at),
        None => GraphPool {
            device,
            id,
            heap: None,
            users: 0,
            open: Vec::new(),
        },
    };
    pool.users += 1;
    pool.open.push(filter);
    OPEN.fetch_add(1, Ordering::Relaxed);
    state.pools.push(pool);
    drop(state);
    heap(device, id).map(drop)
}

/// Closes a pool, which must be open.
pub(crate) fn end(device: i32, id: PoolId) -> Result<(), Error> {
    if fork::is_child() {
        return Ok(());
    }
    let mut state = lock();
    let pool = state.pools.iter_mut().find(|pool| pool.is(device, id));
    let filter = pool.and_then(|pool| pool.open.pop());
    let filter = filter.ok_or(Error::NotOpen(id.0, id.1))?;
    OPEN.fetch_sub(1, Ordering::Relaxed);
    drop(state);
    drop(filter);
    Ok(())
}

/// Takes a user from a pool. Without users, its heap ends when the device's work is complete.
pub(crate) fn release(device: i32, id: PoolId) -> Result<(), Error> {
    if fork::is_child() {
        return Ok(());
    }
    let mut state = lock();
    let at = state.pools.iter().position(|pool| pool.is(device, id));
    let at = at.ok_or(Error::NoSuchPool(id.0, id.1))?;
    state.pools[at].users -= 1;
    if state.pools[at].users > 0 {
        return Ok(());
    }
    let pool = state.pools.remove(at);
    OPEN.fetch_sub(pool.open.len(), Ordering::Relaxed);
    if let (Some(heap), Some(of)) = (pool.heap, heaps::known(device)) {
        state.released.push((of, heap));
    }
    drop(state);
    drop(pool.open);
    collect();
    Ok(())
}

/// Ends the heaps of released pools, if the work of their devices can be waited for now.
pub(crate) fn collect() {
    if !may_wait() {
        return;
    }
    let released = std::mem::take(&mut lock().released);
    if released.is_empty() {
        return;
    }
    let (ended, kept): (Vec<_>, Vec<_>) = released
        .into_iter()
        .partition(|(of, _)| of.device.lost().is_some() || of.synchronize().is_ok());
    // Allocations may outlive them.
    ended.iter().for_each(|(_, heap)| heap.end_graphs());
    lock().released.extend(kept);
}

/// Returns the heap of a pool, which is built now if there is none.
pub(crate) fn heap(device: i32, id: PoolId) -> Result<Heap, Error> {
    let of = heaps::of(device)?;
    let mut state = lock();
    let pool = state.pools.iter_mut().find(|pool| pool.is(device, id));
    let pool = pool.ok_or(Error::NoSuchPool(id.0, id.1))?;
    if let Some(heap) = &pool.heap {
        return Ok(heap.clone());
    }
    let heap = of.graph_heap()?;
    Ok(pool.heap.insert(heap).clone())
}

impl GraphPool {
    fn is(&self, device: i32, id: PoolId) -> bool {
        self.device == device && self.id == id
    }
}
