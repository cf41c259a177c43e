//! Pools of graphs: while a pool is open for a stream, the stream's allocations come from the
//! pool's heap, which keeps its memory while the pool has users.
//!
//! While a graph may be captured, no thread of this library waits for a device. A wait needs leave
//! from [`waiting`], and [`begin`] waits until earlier leaves end. Meanwhile an operation that
//! needs leave is refused, or put off until [`collect`] gets it.
//!
//! A pool that was first opened under a [tag for graphs](crate::entered) has its heap in the tag's
//! tenant, and sleeps with the tag. Each tag also has a pool for allocations under the tag in
//! captures that began before the tag was entered: it serves captures only, and stays.
//!
//! Operations outside of open pools do not take the lock here.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use cuvmm::Heap;
use cuvmm::driver::StreamHandle;

use crate::captures::{Capture, Open};
use crate::cxx::Filter;
use crate::entered::{self, OfGraphs};
use crate::error::Error;
use crate::heaps::{self, DeviceHeap};
use crate::table::PoolId;
use crate::{fork, guards, shareable};

/// The first number of the pools of tags. PyTorch counts from 0.
const OF_TAGS: u64 = u64::MAX;

/// A pool that serves a request, and the [moment](entered::now) when its capture began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    id: PoolId,
    since: u64,
}

struct GraphPool {
    device: i32,
    id: PoolId,
    tag: Option<OfGraphs>,
    /// `None` until the heap could be built.
    heap: Option<Heap>,
    /// Times opened, less times released.
    users: u64,
    open: Vec<Open>,
}

/// The heap of a pool without users.
struct Released {
    of: &'static DeviceHeap,
    id: PoolId,
    tag: Option<OfGraphs>,
    heap: Heap,
}

/// A heap that sleeps with a tag.
pub(crate) struct Tagged {
    pub(crate) id: PoolId,
    pub(crate) keeps: bool,
    pub(crate) heap: Heap,
}

struct State {
    pools: Vec<GraphPool>,
    /// Heaps of pools without users. They end after a wait for the device's work, since a graph may
    /// be running. If allocations outlive the pool, the heap is then an ordinary one.
    released: Vec<Released>,
    /// Heaps of tags that have ended, and that have allocations.
    outlived: Vec<Released>,
    put_off: Vec<fn(&Waiting)>,
    /// The number of leaves to wait for devices.
    waiting: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    pools: Vec::new(),
    released: Vec::new(),
    outlived: Vec::new(),
    put_off: Vec::new(),
    waiting: 0,
});

/// Notified when no leave is left.
static WAITED: Condvar = Condvar::new();

/// The number of filters that may be called.
static OPEN: AtomicUsize = AtomicUsize::new(0);

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Leave to wait for devices and to unmap what they have used. No capture begins while it lives:
/// drop it before the calling thread opens a pool.
pub(crate) struct Waiting(());

/// Returns leave to wait for devices, unless a graph may be captured now.
pub(crate) fn waiting() -> Option<Waiting> {
    let mut state = lock();
    state.look();
    let may_run = state.may_capture();
    state.waiting += usize::from(!may_run);
    settle(state);
    if may_run {
        return None;
    }
    // Another thread may still be dropping the guards, under which pools refuse to wait.
    guards::apply();
    Some(Waiting(()))
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = lock();
        state.waiting -= 1;
        if state.waiting == 0 {
            WAITED.notify_all();
        }
    }
}

/// Has [`collect`] call a function once.
pub(crate) fn put_off(act: fn(&Waiting)) {
    let put_off = &mut lock().put_off;
    if !put_off.iter().any(|&other| ptr::fn_addr_eq(other, act)) {
        put_off.push(act);
    }
}

/// Returns the route to the most recently opened pool that accepts a stream of a device.
///
/// Calls functions of C++, which may throw: no caller may catch the exception.
#[inline]
pub(crate) fn route(device: i32, stream: *mut c_void) -> Option<Route> {
    match OPEN.load(Ordering::Relaxed) {
        0 => None,
        _ => asked(device, stream),
    }
}

#[cold]
fn asked(device: i32, stream: *mut c_void) -> Option<Route> {
    if fork::is_child() {
        return None;
    }
    let mut state = lock();
    let pools = state.pools.iter_mut().rev();
    let mut pools = pools.filter(|pool| pool.device == device);
    let found = pools.find_map(|pool| {
        let mut open = pool.open.iter_mut();
        let since = open.find_map(|open| {
            let accepts = open.accepts(device, stream);
            accepts.then_some(open.since())
        })?;
        Some(Route { id: pool.id, since })
    });
    settle(state);
    found
}

impl Route {
    /// Returns the pool that serves this thread: that of the tag which the thread has entered since
    /// the capture began, or else the open pool.
    pub(crate) fn pool(self, device: i32) -> PoolId {
        match entered::entered_after(self.since) {
            Some(name) => of_tag(device, name),
            None => self.id,
        }
    }
}

/// Returns the pool of a tag for captures, made if needed.
fn of_tag(device: i32, name: String) -> PoolId {
    let mut state = lock();
    let is_it = |pool: &&GraphPool| {
        let tag = pool.tag.as_ref();
        pool.id.0 == OF_TAGS && pool.device == device && tag.is_some_and(|tag| tag.name == name)
    };
    if let Some(pool) = state.pools.iter().find(is_it) {
        return pool.id;
    }
    let numbers = state.pools.iter().filter(|pool| pool.id.0 == OF_TAGS);
    let id = PoolId(OF_TAGS, numbers.count() as u64);
    state.pools.push(GraphPool {
        users: 1,
        ..GraphPool::new(device, id, Some(OfGraphs { name, keeps: true }))
    });
    id
}

/// Opens a pool, which it makes if needed, for the streams that a filter accepts. Waits until no
/// thread waits for a device.
///
/// # Errors
/// [`Error::Recording`], with nothing changed, if a capture into the pool may run. If the heap
/// cannot be built the pool is open nevertheless, so that its allocations fail.
pub(crate) fn begin(device: i32, id: PoolId, filter: Filter) -> Result<(), Error> {
    fork::check()?;
    collect();
    let mut state = lock();
    state.look();
    // Pools are kept in the order of their last opening.
    let known = state.pools.iter().position(|pool| pool.is(device, id));
    if known.is_some_and(|at| state.pools[at].is_open()) {
        return Err(Error::Recording(id.0, id.1));
    }
    let mut pool = match known {
        Some(at) => state.pools.remove(at),
        None => GraphPool::new(device, id, entered::of_graphs()),
    };
    pool.users += 1;
    for other in state.open().filter(|open| open.is_mine()) {
        other.supersede();
    }
    pool.open.push(Open::new(filter));
    state.pools.push(pool);
    let closed = state.close();
    state.look();
    // Threads that ask meanwhile need not take the guards: they would wait for the same threads.
    guards::want(true);
    while state.waiting > 0 {
        state = WAITED.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    settle(state);
    // Another thread may still be taking the guards.
    guards::apply();
    drop(closed);
    heap(device, id).map(drop)
}

/// Closes pools that the calling thread opened for captures that are over: PyTorch does not close a
/// pool whose capture has failed. Each loses the user of its opening.
pub(crate) fn close() {
    let mut state = lock();
    state.look();
    let closed = state.close();
    settle(state);
    drop(closed);
}

/// Announces the end of a stream that does not capture.
pub(crate) fn end_stream(stream: StreamHandle) {
    let mut state = lock();
    for pool in &mut state.pools {
        for open in &mut pool.open {
            open.end_stream(pool.device, stream);
        }
    }
    state.look();
    settle(state);
}

pub(crate) fn end(device: i32, id: PoolId) -> Result<(), Error> {
    if fork::is_child() {
        return Ok(());
    }
    let mut state = lock();
    let pool = state.pools.iter_mut().find(|pool| pool.is(device, id));
    let closed = pool.and_then(GraphPool::end);
    let closed = closed.ok_or(Error::NotOpen(id.0, id.1))?;
    settle(state);
    drop(closed);
    Ok(())
}

/// Takes a user from a pool. The heap of a pool without users ends when the device's work is
/// complete.
pub(crate) fn release(device: i32, id: PoolId) -> Result<(), Error> {
    if fork::is_child() {
        return Ok(());
    }
    let mut state = lock();
    let pool = state.pools.iter_mut().find(|pool| pool.is(device, id));
    let pool = pool.ok_or(Error::NoSuchPool(id.0, id.1))?;
    pool.users -= 1;
    let ended = state.end_unused();
    settle(state);
    drop(ended);
    collect();
    Ok(())
}

/// Ends heaps of released pools and calls what was put off, if devices can be waited for now.
pub(crate) fn collect() {
    let Some(leave) = waiting() else {
        return;
    };
    let mut state = lock();
    let released = std::mem::take(&mut state.released);
    let put_off = std::mem::take(&mut state.put_off);
    drop(state);
    let (ended, kept): (Vec<Released>, Vec<Released>) = released
        .into_iter()
        .partition(|it| it.of.device.lost().is_some() || it.of.synchronize().is_ok());
    // Allocations may outlive the heaps.
    ended.iter().for_each(|it| it.heap.end_graphs());
    let mut state = lock();
    state.released.extend(kept);
    let outlived = std::mem::take(&mut state.outlived).into_iter();
    let (outlived, gone) = outlived
        .chain(ended)
        .partition(|it: &Released| it.tag.is_some() && it.heap.stats().allocations > 0);
    state.outlived = outlived;
    drop(state);
    let gone: Vec<Released> = gone;
    drop(gone);
    put_off.into_iter().for_each(|act| act(&leave));
}

/// Returns all heaps of a device's pools, each with `true` if it sleeps with a tag.
pub(crate) fn heaps(of: &DeviceHeap) -> Vec<(Heap, bool)> {
    let state = lock();
    let all = state.heaps(of);
    all.map(|(_, tag, heap)| (heap.clone(), tag.is_some()))
        .collect()
}

/// Returns the heaps of a device that sleep with a tag.
pub(crate) fn tagged(of: &DeviceHeap, name: &str) -> Vec<Tagged> {
    let state = lock();
    let all = state.heaps(of).filter_map(|(id, tag, heap)| {
        let tag = tag.filter(|tag| tag.name == name)?;
        Some(Tagged {
            id,
            keeps: tag.keeps,
            heap: heap.clone(),
        })
    });
    all.collect()
}

/// Returns the names of tags that heaps of a device sleep with. Some come several times.
pub(crate) fn tags(of: &DeviceHeap) -> Vec<String> {
    let state = lock();
    let all = state.heaps(of);
    all.filter_map(|(_, tag, _)| Some(tag?.name.clone()))
        .collect()
}

/// Returns the heap of a pool, built if needed.
pub(crate) fn heap(device: i32, id: PoolId) -> Result<Heap, Error> {
    let of = heaps::of(device)?;
    let mut state = lock();
    let pool = state.pools.iter_mut().find(|pool| pool.is(device, id));
    let pool = pool.ok_or(Error::NoSuchPool(id.0, id.1))?;
    if let Some(heap) = &pool.heap {
        return Ok(heap.clone());
    }
    let heap = match &pool.tag {
        Some(tag) => {
            shareable::refuse_graphs(&tag.name)?;
            of.graph_heap(&of.tag_tenant(&tag.name, false)?)?
        }
        None => of.graph_heap(of.tenant())?,
    };
    Ok(pool.heap.insert(heap).clone())
}

impl GraphPool {
    const fn new(device: i32, id: PoolId, tag: Option<OfGraphs>) -> Self {
        Self {
            device,
            id,
            tag,
            heap: None,
            users: 0,
            open: Vec::new(),
        }
    }

    fn is(&self, device: i32, id: PoolId) -> bool {
        self.device == device && self.id == id
    }

    /// Returns `true` if a capture into the pool may run, or other code allocates from it.
    fn is_open(&self) -> bool {
        let mut open = self.open.iter();
        open.any(|open| open.capture() != Capture::Over)
    }

    /// Removes the last opening by the calling thread, else the last that is over, else the last.
    fn end(&mut self) -> Option<Open> {
        let last = |is: fn(&Open) -> bool| self.open.iter().rposition(is);
        let at = last(Open::is_mine)
            .or_else(|| last(|open| open.capture() == Capture::Over))
            .or_else(|| self.open.len().checked_sub(1))?;
        Some(self.open.remove(at))
    }
}

impl State {
    fn heaps(&self, of: &DeviceHeap) -> impl Iterator<Item = (PoolId, Option<&OfGraphs>, &Heap)> {
        let device = of.device.ordinal().0;
        let pools = self.pools.iter().filter(move |pool| pool.device == device);
        let pools = pools.filter_map(|it| Some((it.id, it.tag.as_ref(), it.heap.as_ref()?)));
        let ended = self.released.iter().chain(&self.outlived);
        let ended = ended.filter(move |it| it.of.device.ordinal().0 == device);
        pools.chain(ended.map(|it| (it.id, it.tag.as_ref(), &it.heap)))
    }

    fn open(&mut self) -> impl Iterator<Item = &mut Open> {
        self.pools.iter_mut().flat_map(|pool| &mut pool.open)
    }

    fn look(&mut self) {
        for pool in &mut self.pools {
            let device = pool.device;
            for open in &mut pool.open {
                open.look(device);
            }
        }
    }

    /// Returns `true` if a graph may be captured, by the last look.
    fn may_capture(&mut self) -> bool {
        self.open().any(|open| open.capture() == Capture::MayRun)
    }

    /// Removes the calling thread's openings for captures that are over, each with a user. Returns
    /// what must be dropped without the lock.
    fn close(&mut self) -> (Vec<Open>, Vec<GraphPool>) {
        let is_over = |open: &mut Open| open.capture() == Capture::Over && open.is_mine();
        let mut closed = Vec::new();
        for pool in &mut self.pools {
            let before = closed.len();
            closed.extend(pool.open.extract_if(.., is_over));
            pool.users = pool.users.saturating_sub((closed.len() - before) as u64);
        }
        (closed, self.end_unused())
    }

    /// Removes pools without users. Returns what must be dropped without the lock.
    fn end_unused(&mut self) -> Vec<GraphPool> {
        let unused = self.pools.extract_if(.., |pool| pool.users == 0);
        let mut ended: Vec<_> = unused.collect();
        for pool in &mut ended {
            if let (Some(heap), Some(of)) = (pool.heap.take(), heaps::known(pool.device)) {
                let (id, tag) = (pool.id, pool.tag.clone());
                self.released.push(Released { of, id, tag, heap });
            }
        }
        ended
    }
}

/// Counts the filters that may be called, and guards the pools of all devices while a graph may be
/// captured. Unlocks first: guards wait for operations of the pools.
fn settle(mut state: MutexGuard<'_, State>) {
    let callable = state.open().filter(|open| open.capture() != Capture::Over);
    OPEN.store(callable.count(), Ordering::Relaxed);
    let has_changed = guards::want(state.may_capture());
    drop(state);
    if has_changed {
        guards::apply();
    }
}
