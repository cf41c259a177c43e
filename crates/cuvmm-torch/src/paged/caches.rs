//! The caches, their steps and their hooks. A cache has its memory in the tenant of a
//! [tag](crate::tags), and sleeps with the tag.
//!
//! `unsafe` is used to keep a step beside the cache that it borrows.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm::error::PagedKvError;
use cuvmm::paged::{PagedStats, Step};
use cuvmm::pool::Pressure;
use cuvmm::{BlockError, MemoryError, PagedKv, Stream};
use serde::Serialize;

use super::pressure::{self, OnPressure};
use crate::error::Error;
use crate::heaps::DeviceHeap;
use crate::{fork, live};

/// A cache with its steps.
pub(crate) struct Cache {
    /// The steps being prepared. They borrow `kv`, and are dropped before it.
    steps: Mutex<Steps>,
    kv: PagedKv,
    of: &'static DeviceHeap,
    /// `true` if requests wait for memory in use.
    waits: bool,
    hook: Mutex<Option<OnPressure>>,
}

/// A turn of a request for memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// It waits as the cache's terms say.
    First,
    /// Garbage has been collected after a first turn. It does not wait again.
    AfterCollecting,
}

#[derive(Default)]
struct Steps {
    open: BTreeMap<u64, Step<'static>>,
    begun: u64,
}

struct State {
    caches: BTreeMap<u64, Arc<Cache>>,
    count: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    caches: BTreeMap::new(),
    count: 0,
});

/// Held while the hook of a tenant is set, so that the last setter has seen all caches.
static HOOKING: Mutex<()> = Mutex::new(());

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a cache. Returns its number.
pub(crate) fn add(cache: Arc<Cache>) -> u64 {
    let mut state = lock();
    state.count += 1;
    let token = state.count;
    state.caches.insert(token, cache);
    token
}

/// Sets the function that a pool calls for memory of a tag's tenant: one that asks the tag's caches,
/// if one of them has a function of the program.
fn hook_tenant(of: &'static DeviceHeap, cache: &Cache) -> Result<(), Error> {
    let tenant = cache.kv.tenant();
    let name = tenant.name().to_owned();
    let _hooking = HOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let has_hook = of_tag(of, &name).iter().any(|it| it.hook().is_some());
    let ask = move |pressure: &Pressure| ask(of, &name, pressure.bytes);
    Ok(tenant.set_hook(has_hook.then(|| Arc::new(ask) as _))?)
}

/// Calls the functions of the caches of a tag that are awake: the others have nothing to give up.
fn ask(of: &DeviceHeap, name: &str, bytes: u64) {
    if !pressure::may_call() {
        return;
    }
    let caches = lock().caches.clone();
    let awake = caches
        .iter()
        .filter(|(_, cache)| cache.is_of(of, name) && !cache.kv.is_asleep());
    let hooks = awake.filter_map(|(&token, cache)| Some((token, cache.hook()?)));
    let hooks: Vec<(u64, OnPressure)> = hooks.collect();
    // A cache that a function ends gives its memory up at once.
    drop(caches);
    for (token, function) in hooks {
        pressure::call(function, token, bytes);
    }
}

pub(super) fn find(token: u64) -> Result<Arc<Cache>, Error> {
    fork::check()?;
    let cache = lock().caches.get(&token).cloned();
    cache.ok_or(Error::NoPaged(token))
}

/// Ends a cache, as `cuvmm_paged_end` describes, after the calls of other threads that use it. Returns
/// its device and its tag, if it had not ended.
pub(super) fn end(token: u64) -> Option<(&'static DeviceHeap, String)> {
    if fork::is_child() {
        return None;
    }
    let ended = lock().caches.remove(&token)?;
    if ended.hook().is_some() {
        // A tenant that has ended has no hook.
        let _ = hook_tenant(ended.of, &ended);
    }
    Some((ended.of, ended.name().to_owned()))
}

pub(super) fn begin_step(token: u64) -> Result<u64, Error> {
    let cache = find(token)?;
    let mut steps = cache.steps();
    steps.begun += 1;
    let number = steps.begun;
    // SAFETY: the cache is behind an `Arc`, so it does not move. The step is in it, or dropped by
    // `end_step` while that has the `Arc`; and the cache's fields are dropped in their order.
    let kv: &'static PagedKv = unsafe { &*std::ptr::from_ref(&cache.kv) };
    steps.open.insert(number, kv.step());
    Ok(number)
}

pub(super) fn end_step(token: u64, step: u64) {
    if let Ok(cache) = find(token) {
        let ended = cache.steps().open.remove(&step);
        drop(ended);
    }
}

impl Cache {
    pub(super) fn new(kv: PagedKv, of: &'static DeviceHeap, waits: bool) -> Self {
        Self {
            steps: Mutex::default(),
            kv,
            of,
            waits,
            hook: Mutex::new(None),
        }
    }

    pub(crate) const fn kv(&self) -> &PagedKv {
        &self.kv
    }

    /// Returns the name of its tag.
    fn name(&self) -> &str {
        self.kv.tenant().name()
    }

    fn is_of(&self, of: &DeviceHeap, name: &str) -> bool {
        std::ptr::eq(self.of, of) && self.name() == name
    }

    /// Returns the bytes that it holds, or gets when it wakes.
    pub(crate) fn bytes(&self) -> u64 {
        self.kv
            .stats()
            .map_or(0, |stats| stats.held.max(stats.asleep))
    }

    /// Returns the bytes of the extents whose contents a sleep keeps.
    pub(crate) fn contents(&self) -> u64 {
        self.kv.stats().map_or(0, |stats| stats.committed)
    }

    fn steps(&self) -> MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hook(&self) -> Option<OnPressure> {
        *self.hook.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_hook(&self, function: Option<OnPressure>) -> Result<(), Error> {
        *self.hook.lock().unwrap_or_else(PoisonError::into_inner) = function;
        hook_tenant(self.of, self)
    }

    pub(super) fn back(&self, numbers: &[u32], turn: Turn) -> Result<(), Error> {
        self.request(turn, || match turn {
            Turn::First => self.kv.back(numbers),
            Turn::AfterCollecting => self.kv.try_back(numbers),
        })
    }

    /// Returns `false` if memory is short.
    pub(super) fn try_back(&self, numbers: &[u32]) -> Result<bool, Error> {
        match self.kv.try_back(numbers) {
            Ok(()) => Ok(true),
            Err(error) if error.is_shortage() => Ok(false),
            Err(error) => Err(self.explained(error.into())),
        }
    }

    pub(super) fn reserve(&self, count: u32, turn: Turn) -> Result<(), Error> {
        self.request(turn, || match turn {
            Turn::First => self.kv.reserve(count),
            Turn::AfterCollecting => self.kv.try_reserve(count),
        })
    }

    fn request(
        &self,
        turn: Turn,
        request: impl FnMut() -> Result<(), PagedKvError>,
    ) -> Result<(), Error> {
        let waits = self.waits && turn == Turn::First;
        let done = repeated(self.of, self.kv.home_stream(), waits, request);
        done.map_err(|error| self.explained(error))
    }

    pub(super) fn release(&self, numbers: &[u32]) -> Result<(), Error> {
        let released = self.kv.release(numbers);
        released.map_err(|error| self.explained(error.into()))
    }

    /// Names the tag in the error of a cache that sleeps.
    pub(super) fn explained(&self, error: Error) -> Error {
        match error {
            Error::Paged(
                PagedKvError::Memory(MemoryError::CacheAsleep(_))
                | PagedKvError::Back {
                    cause: BlockError::Memory(MemoryError::CacheAsleep(_)),
                    ..
                },
            ) => Error::PagedAsleep(self.name().to_owned()),
            other => other,
        }
    }

    pub(super) fn record(&self, stream: u64) -> Result<(), Error> {
        self.of
            .with_stream(stream, |stream| Ok(self.kv.record_use(stream)?))
    }
}

/// Makes a request. One that does not wait is repeated where memory was short, as allocations are.
pub(super) fn repeated(
    of: &DeviceHeap,
    home: &Stream,
    waits: bool,
    mut request: impl FnMut() -> Result<(), PagedKvError>,
) -> Result<(), Error> {
    match request() {
        Err(error) if !waits => live::again(of, Some(home), error.into(), |_| Ok(request()?)),
        outcome => Ok(outcome?),
    }
}

/// Figures of a live cache.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    name: String,
    #[serde(flatten)]
    stats: PagedStats,
}

fn of_device(of: &DeviceHeap) -> Vec<Arc<Cache>> {
    let state = lock();
    let caches = state.caches.values();
    let ours = caches.filter(|cache| std::ptr::eq(cache.of, of));
    ours.cloned().collect()
}

/// Returns the caches of a tag of a device.
pub(crate) fn of_tag(of: &DeviceHeap, name: &str) -> Vec<Arc<Cache>> {
    let state = lock();
    let caches = state.caches.values();
    caches
        .filter(|cache| cache.is_of(of, name))
        .cloned()
        .collect()
}

/// Returns the bytes that the caches of a device hold, or get when they wake, by their tags.
pub(crate) fn bytes(of: &DeviceHeap) -> BTreeMap<String, u64> {
    let mut bytes = BTreeMap::new();
    for cache in of_device(of) {
        *bytes.entry(cache.name().to_owned()).or_default() += cache.bytes();
    }
    bytes
}

/// Returns the bytes that the sleeping caches of a device get when they wake.
pub(crate) fn asleep(of: &DeviceHeap) -> u64 {
    let caches = of_device(of).into_iter();
    let stats = caches.filter_map(|cache| cache.kv.stats().ok());
    stats.map(|stats| stats.asleep).sum()
}

/// Returns the tag of the sleeping cache that contains an address.
pub(crate) fn asleep_at(address: u64) -> Option<String> {
    let caches: Vec<Arc<Cache>> = lock().caches.values().cloned().collect();
    let found = caches.iter().find(|cache| {
        let first = cache.kv.view(0, 0, 0).map(|view| view.address().0);
        let stats = cache.kv.stats().ok();
        let inside = first.zip(stats).is_some_and(|(first, stats)| {
            let offset = address.checked_sub(first);
            offset.is_some_and(|offset| offset < stats.reserved_addresses)
        });
        inside && cache.kv.is_asleep()
    });
    found.map(|cache| cache.name().to_owned())
}

/// Returns the figures of a device's caches.
pub(crate) fn figures(of: &DeviceHeap) -> Vec<Figures> {
    let caches = of_device(of).into_iter();
    let figures = caches.filter_map(|cache| {
        let name = cache.kv.tenant().name().to_owned();
        let stats = cache.kv.stats().ok()?;
        Some(Figures { name, stats })
    });
    figures.collect()
}

/// Returns the address of each of a device's caches that has memory, or gets it when it wakes, and the
/// bytes under its blocks in use.
pub(crate) fn memory(of: &DeviceHeap) -> Vec<(u64, u64)> {
    let caches = of_device(of).into_iter();
    let memory = caches.filter_map(|cache| {
        let first = cache.kv.view(0, 0, 0)?.address().0;
        let stats = cache.kv.stats().ok()?;
        Some((first, stats.committed + stats.asleep))
    });
    memory.filter(|&(_, bytes)| bytes > 0).collect()
}
