//! The caches, their tenants and their steps.
//!
//! `unsafe` is used to keep a step beside the cache that it borrows.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cuvmm::error::PagedKvError;
use cuvmm::paged::{LayerGroup, Layout, PagedStats, Step};
use cuvmm::{PagedKv, Stream, Tenant};
use serde::{Deserialize, Serialize};

use super::pressure::{self, OnPressure};
use crate::error::Error;
use crate::heaps::{self, DeviceHeap};
use crate::{edge, fork, live};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    device: i32,
    stream: u64,
    name: String,
    blocks: u32,
    groups: Vec<Group>,
    layout: Option<Arrangement>,
    extent: Option<u64>,
    pinned: Option<Vec<u32>>,
    precommit: Option<u32>,
    /// In seconds.
    timeout: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    layers: u32,
    tokens: u32,
    /// Heads, elements of a head, bytes of an element.
    parts: Vec<[u32; 3]>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum Arrangement {
    #[serde(rename = "block-major")]
    Block,
    #[serde(rename = "token-major")]
    Token,
    #[serde(rename = "layer-major")]
    Layer,
}

/// A cache with its steps.
pub(crate) struct Cache {
    /// The steps being prepared. They borrow `kv`, and are dropped before it.
    steps: Mutex<Steps>,
    kv: PagedKv,
    of: &'static DeviceHeap,
    /// `true` if requests wait for memory in use.
    waits: bool,
    hook: Mutex<Option<OnPressure>>,
    member: Member,
}

#[derive(Default)]
struct Steps {
    open: BTreeMap<u64, Step<'static>>,
    begun: u64,
}

/// A tenant of caches, with the number of those that it has.
struct Shared {
    tenant: Tenant,
    members: usize,
}

/// A cache's use of its tenant, which ends with the last cache.
struct Member {
    key: (i32, String),
}

struct State {
    caches: BTreeMap<u64, Arc<Cache>>,
    count: u64,
    /// The tenants by device and name.
    tenants: BTreeMap<(i32, String), Shared>,
}

static STATE: Mutex<State> = Mutex::new(State {
    caches: BTreeMap::new(),
    count: 0,
    tenants: BTreeMap::new(),
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a cache, as `cuvmm_paged_new` describes. Returns its number.
pub(super) fn build(json: &str) -> Result<u64, Error> {
    fork::check()?;
    let request: Request = serde_json::from_str(json)?;
    let wait = request.timeout.map(edge::timeout).transpose()?;
    let of = heaps::of(request.device)?;
    // Other processes give what they do not need only to a request that waits.
    let wait = wait.or_else(|| of.ledger().map(|_| live::NEIGHBOURS));
    let (member, tenant) = join(of, request.device, &request.name)?;
    let kv = of.with_stream(request.stream, |home| {
        let mut kv = None;
        let build = || request.build(&tenant, home, wait).map(|it| kv = Some(it));
        repeated(of, home, wait.is_some(), build)?;
        kv.ok_or(Error::Null)
    })?;
    let cache = Arc::new(Cache {
        steps: Mutex::default(),
        kv,
        of,
        waits: wait.is_some(),
        hook: Mutex::new(None),
        member,
    });
    let mut state = lock();
    state.count += 1;
    let token = state.count;
    state.caches.insert(token, cache);
    Ok(token)
}

impl Request {
    fn build(
        &self,
        tenant: &Tenant,
        home: &Stream,
        wait: Option<Duration>,
    ) -> Result<PagedKv, PagedKvError> {
        let mut builder = PagedKv::builder(tenant, home, self.blocks);
        for Group {
            layers,
            tokens,
            parts,
        } in &self.groups
        {
            let group = LayerGroup::new(*layers, *tokens);
            let add = |group: LayerGroup, &[heads, elements, bytes]: &[u32; 3]| {
                group.part(heads, elements, bytes)
            };
            builder = builder.group(parts.iter().fold(group, add));
        }
        if let Some(layout) = self.layout {
            builder = builder.layout(match layout {
                Arrangement::Block => Layout::BlockMajor,
                Arrangement::Token => Layout::TokenMajor,
                Arrangement::Layer => Layout::LayerMajor,
            });
        }
        if let Some(bytes) = self.extent {
            builder = builder.extent(bytes);
        }
        if let Some(wait) = wait {
            builder = builder.timeout(wait);
        }
        builder
            .precommit(self.precommit.unwrap_or(0))
            .pinned(self.pinned.iter().flatten().copied())
            .build()
    }
}

/// Returns the tenant of a name for one more cache, registered if no cache has it.
///
/// # Errors
/// A tag or the heap has the name, or it is empty.
fn join(of: &DeviceHeap, device: i32, name: &str) -> Result<(Member, Tenant), Error> {
    let key = (device, name.to_owned());
    let mut state = lock();
    if !state.tenants.contains_key(&key) {
        let (own, others) = (key.clone(), key.clone());
        // Registering calls no hook.
        let tenant = of.pool.tenant(name);
        let tenant = tenant.on_shortage(move |pressure| ask(&own, pressure.bytes));
        let tenant = tenant.on_pressure(move |pressure| ask(&others, pressure.bytes));
        let tenant = tenant.register()?;
        let shared = Shared { tenant, members: 0 };
        state.tenants.insert(key.clone(), shared);
    }
    let shared = state.tenants.get_mut(&key).ok_or(Error::Null)?;
    shared.members += 1;
    let tenant = shared.tenant.clone();
    Ok((Member { key }, tenant))
}

impl Drop for Member {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        let mut state = lock();
        let Some(shared) = state.tenants.get_mut(&self.key) else {
            return;
        };
        shared.members -= 1;
        if shared.members == 0 {
            let ended = state.tenants.remove(&self.key);
            // Without the lock, since the tenant takes its pool's.
            drop(state);
            drop(ended);
        }
    }
}

/// Calls the functions of the caches of a tenant.
fn ask(key: &(i32, String), bytes: u64) {
    if !pressure::may_call() {
        return;
    }
    let state = lock();
    let ours = state.caches.iter();
    let ours = ours.filter(|(_, cache)| cache.member.key == *key);
    let hooks = ours.filter_map(|(&token, cache)| Some((token, cache.hook()?)));
    let hooks: Vec<(u64, OnPressure)> = hooks.collect();
    drop(state);
    for (token, function) in hooks {
        pressure::call(function, token, bytes);
    }
}

pub(super) fn find(token: u64) -> Result<Arc<Cache>, Error> {
    fork::check()?;
    let cache = lock().caches.get(&token).cloned();
    cache.ok_or(Error::NoPaged(token))
}

/// Ends a cache, as `cuvmm_paged_end` describes, after the calls of other threads that use it.
pub(super) fn end(token: u64) {
    if !fork::is_child() {
        let ended = lock().caches.remove(&token);
        drop(ended);
    }
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
    pub(super) const fn kv(&self) -> &PagedKv {
        &self.kv
    }

    fn steps(&self) -> MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hook(&self) -> Option<OnPressure> {
        *self.hook.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_hook(&self, function: Option<OnPressure>) {
        *self.hook.lock().unwrap_or_else(PoisonError::into_inner) = function;
    }

    pub(super) fn back(&self, numbers: &[u32]) -> Result<(), Error> {
        let request = || self.kv.back(numbers);
        repeated(self.of, self.kv.home_stream(), self.waits, request)
    }

    pub(super) fn reserve(&self, count: u32) -> Result<(), Error> {
        let request = || self.kv.reserve(count);
        repeated(self.of, self.kv.home_stream(), self.waits, request)
    }

    pub(super) fn record(&self, stream: u64) -> Result<(), Error> {
        self.of
            .with_stream(stream, |stream| Ok(self.kv.record_use(stream)?))
    }
}

/// Makes a request. One that does not wait is repeated where memory was short, as allocations are.
fn repeated(
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

/// Returns the address and the bytes in use of a device's caches that have memory.
pub(crate) fn memory(of: &DeviceHeap) -> Vec<(u64, u64)> {
    let caches = of_device(of).into_iter();
    let memory = caches.filter_map(|cache| {
        let first = cache.kv.view(0, 0, 0)?.address().0;
        Some((first, cache.kv.stats().ok()?.committed))
    });
    memory.filter(|&(_, bytes)| bytes > 0).collect()
}
