//! Memory under tags, for `torch.cuda.MemPool`: each tag has a tenant in each device's pool, and
//! can sleep and wake.
//!
//! The functions serve PyTorch's own allocator, which asks for whole segments and expects a free to
//! wait for the work of the device, as `cudaFree` does. So the blocks have no home stream: freed
//! memory is reused, and sleeping memory unmapped, only when all work of the device is complete.

pub(crate) mod exchange;
pub(crate) mod host;
pub(crate) mod kept;
mod members;
mod moving;
pub(crate) mod shared;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use cuvmm::sleep::PreparedSleep;
use cuvmm::{Block, Contents, HostStore, SleepError, Tenant};
use serde::Serialize;

use crate::blocks::{Blocks, block_for};
use crate::entered::{self, OfGraphs};
use crate::error::Error;
use crate::figures::Figures;
use crate::heaps::{self, DeviceHeap};
use crate::history::{self, Seen};
use crate::live::{self, Entry};
use crate::paged::caches::{self, Cache};
use crate::{fork, graphs, shareable};

use self::members::{Members, bytes_of_heaps};
use self::moving::Moving;

/// The tag of allocations on threads without a tag.
const NO_TAG: &str = "default";

/// The default timeout of sleeping for work that may use the memory, and of waking for memory.
pub(crate) const LONGEST: Duration = Duration::from_secs(60);

/// The library's tags of blocks: of other memory than that of graphs, and of graphs whose contents
/// are kept and are not.
const PLAIN: &str = "memory";
const KEPT: &str = "graphs";
const WRITTEN: &str = "graphs that write first";

/// Stores of contents are multiples of this, in bytes.
const PART: u64 = 2 << 20;

struct Tag {
    device: i32,
    name: String,
    tenant: Tenant,
    of: &'static DeviceHeap,
    is_asleep: bool,
    /// `true` if other processes may get the memory.
    is_shareable: bool,
    /// `true` once a block for graphs was allocated.
    has_graphs: bool,
    /// Read-locked while a block is allocated. Write-locked once the tag counts as asleep, before
    /// its memory moves: a block that came meanwhile would be awake under a sleeping tag, or asleep
    /// unknown.
    still: Arc<RwLock<()>>,
    /// Host memory for the contents.
    store: Option<HostStore>,
    /// The use of the host memory after waking.
    host: Host,
}

/// The use of the host memory of contents after waking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// It is kept for the next sleep.
    Keep,
    /// It goes back to the system.
    Release,
}

impl Host {
    /// Returns the use that C names by 1 or 2, or `None` for 0: the contents are lost.
    ///
    /// # Errors
    /// Another number.
    pub(crate) fn of(keep: i32) -> Result<Option<Self>, Error> {
        match keep {
            0 => Ok(None),
            1 => Ok(Some(Self::Keep)),
            2 => Ok(Some(Self::Release)),
            _ => Err(Error::Keep(keep)),
        }
    }
}

struct State {
    tags: Vec<Tag>,
    /// The blocks, with indices into `tags`.
    blocks: Option<Blocks>,
}

static STATE: Mutex<State> = Mutex::new(State {
    tags: Vec::new(),
    blocks: None,
});

/// Held while tags are put to sleep or woken.
static MOVING: Mutex<()> = Mutex::new(());

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates a block under this thread's tag. Returns its address, or 0 for a size of 0.
pub(crate) fn allocate(size: isize, device: i32, seen: Option<&Seen>) -> Result<usize, Error> {
    fork::check()?;
    let size = match u64::try_from(size) {
        Ok(0) => return Ok(0),
        Ok(size) => size,
        Err(_) => return Err(Error::NegativeSize),
    };
    let name = entered::innermost().unwrap_or_else(|| NO_TAG.to_owned());
    let (index, tenant, still) = tag(device, &name)?;
    let _still = still.read().unwrap_or_else(PoisonError::into_inner);
    let mut state = lock();
    if state.tags[index].is_asleep {
        return Err(Error::Asleep(name));
    }
    if let Some(address) = state.blocks.get_or_insert_default().share(index, size) {
        let of = state.tags[index].count_made(address, size, seen);
        drop(state);
        if let Some(seen) = seen {
            seen.report(of, address, size);
        }
        return Ok(address);
    }
    let is_shareable = state.tags[index].is_shareable;
    drop(state);
    let (of, bytes) = (heaps::of(device)?, block_for(size));
    // Kept until the memory is charged.
    let _room = match is_shareable {
        true => Some(shared::room(of, bytes)?),
        false => None,
    };
    let block = || tenant.block(bytes).tag(PLAIN);
    let block = match block().allocate() {
        Ok(block) => block,
        Err(error) => live::again(of, None, error.into(), |wait| {
            Ok(match wait {
                Some(wait) => block().timeout(wait).allocate(),
                None => block().allocate(),
            }?)
        })?,
    };
    Ok(add(index, size, block, seen))
}

/// Allocates a block for graphs, under a tag for graphs. Returns its address, or 0 for a size of 0.
/// Breaks no capture: waits for no memory, and asks for no work.
pub(crate) fn allocate_for_graphs(
    size: isize,
    device: i32,
    seen: Option<&Seen>,
) -> Result<usize, Error> {
    fork::check()?;
    let size = match u64::try_from(size) {
        Ok(0) => return Ok(0),
        Ok(size) => size,
        Err(_) => return Err(Error::NegativeSize),
    };
    let tag_of_graphs = entered::of_graphs_anywhere().unwrap_or_else(|| OfGraphs {
        name: NO_TAG.to_owned(),
        keeps: true,
    });
    shareable::refuse_graphs(&tag_of_graphs.name)?;
    let (index, tenant, still) = tag(device, &tag_of_graphs.name)?;
    let _still = still.read().unwrap_or_else(PoisonError::into_inner);
    if lock().tags[index].is_asleep {
        return Err(Error::Asleep(tag_of_graphs.name));
    }
    let library_tag = if tag_of_graphs.keeps { KEPT } else { WRITTEN };
    // No block is shared: each belongs to graphs whole.
    let bytes = size.max(block_for(0));
    let guard = heaps::of(device)?.pool.capture_guard();
    let block = tenant.block(bytes).tag(library_tag).allocate()?;
    drop(guard);
    lock().tags[index].has_graphs = true;
    Ok(add(index, bytes, block, seen))
}

/// Notes a block for an allocation. Returns the address.
fn add(index: usize, size: u64, block: Block, seen: Option<&Seen>) -> usize {
    let mut state = lock();
    let blocks = state.blocks.get_or_insert_default();
    let address = blocks.add(index, size, block);
    let of = state.tags[index].count_made(address, size, seen);
    drop(state);
    if let Some(seen) = seen {
        seen.report(of, address, size);
    }
    address
}

/// Returns the index of a tag, made if needed, its tenant and the lock that keeps it from moving.
fn tag(device: i32, name: &str) -> Result<(usize, Tenant, Arc<RwLock<()>>), Error> {
    let of = heaps::of(device)?;
    if shareable::has(name) {
        // The pool is made without the lock.
        of.publishing()?;
    }
    let mut state = lock();
    let is = |tag: &Tag| tag.device == device && tag.name == name;
    if let Some(index) = state.tags.iter().position(is) {
        let tag = &state.tags[index];
        return match tag.is_asleep {
            true => Err(Error::Asleep(name.to_owned())),
            false => Ok((index, tag.tenant.clone(), Arc::clone(&tag.still))),
        };
    }
    let is_shareable = shareable::has(name);
    let tenant = of.tag_tenant(name, is_shareable)?;
    let still = Arc::default();
    state.tags.push(Tag {
        device,
        name: name.to_owned(),
        tenant: tenant.clone(),
        of,
        is_asleep: false,
        is_shareable,
        has_graphs: false,
        still: Arc::clone(&still),
        store: None,
        host: Host::Keep,
    });
    Ok((state.tags.len() - 1, tenant, still))
}

/// Returns the index and the tenant of a tag for a paged cache, made if needed.
///
/// # Errors
/// The tag sleeps or is shareable, or the name is that of the heap's tenant.
pub(crate) fn for_cache(of: &DeviceHeap, name: &str) -> Result<(usize, Tenant), Error> {
    if of.tenant().name() == name {
        return Err(Error::PagedInHeap(name.to_owned()));
    }
    shareable::refuse_paged(name)?;
    let (index, tenant, _) = tag(of.device.ordinal().0, name)?;
    Ok((index, tenant))
}

/// Adds a paged cache to a tag. Returns the cache's number.
///
/// # Errors
/// The tag sleeps.
pub(crate) fn admit(index: usize, cache: Arc<Cache>) -> Result<u64, Error> {
    let state = lock();
    let tag = &state.tags[index];
    match tag.is_asleep {
        true => Err(Error::Asleep(tag.name.clone())),
        // Under the lock: a tag that falls asleep from here on has the cache.
        false => Ok(caches::add(cache)),
    }
}

/// Gives the host memory of a tag up after the end of a paged cache, if it has no memory left.
pub(crate) fn ended_cache(of: &DeviceHeap, name: &str) {
    let state = lock();
    let is = |tag: &Tag| std::ptr::eq(tag.of, of) && tag.name == name;
    let index = state.tags.iter().position(is);
    drop(state);
    if let Some(index) = index {
        host::give_up(index);
    }
}

pub(crate) fn free(address: usize, seen: Option<&Seen>) -> Result<(), Error> {
    if address == 0 || fork::is_child() {
        return Ok(());
    }
    let mut state = lock();
    let removed = state.blocks.get_or_insert_default().remove(address);
    let removed = removed.ok_or(Error::NotAllocated)?;
    let tag = &state.tags[removed.tag];
    let is_last = removed.block.is_some() && state.sizes(removed.tag).next().is_none();
    let has_store = is_last && tag.store.is_some();
    // Before the memory is freed, so that no more is counted than is held.
    match tag.is_asleep {
        true => tag.of.figures().ended_asleep(removed.size),
        false => tag.of.figures().ended(removed.size),
    }
    let (of, is_asleep) = (tag.of, tag.is_asleep);
    drop(state);
    if let Some(seen) = seen {
        seen.ended(of, (address, removed.size), 0, is_asleep);
    }
    // The lock is released by now.
    drop(removed.block);
    if let Some(seen) = seen {
        seen.report_end(of, address, removed.size);
    }
    if has_store {
        host::give_up(removed.tag);
    }
    Ok(())
}

/// The allocations under tags of a device, by address.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    pub(crate) awake: Vec<Entry>,
    pub(crate) asleep: Vec<Entry>,
}

/// Calls a function with all allocations under tags of a device. Meanwhile none of them ends or
/// falls asleep, and no allocation of the device's heaps ends.
pub(crate) fn with_entries<T>(of: &DeviceHeap, look: impl FnOnce(Entries, &mut Figures) -> T) -> T {
    let state = lock();
    let mut entries = Entries::default();
    for (address, size, tag) in state.blocks.iter().flat_map(Blocks::allocations) {
        let tag = &state.tags[tag];
        if std::ptr::eq(tag.of, of) {
            let list = match tag.is_asleep {
                true => &mut entries.asleep,
                false => &mut entries.awake,
            };
            list.push(Entry::block(address, size));
        }
    }
    for list in [&mut entries.awake, &mut entries.asleep] {
        list.sort_unstable_by_key(|entry| entry.address);
    }
    look(entries, &mut of.figures())
}

#[derive(Debug, Serialize)]
pub(crate) struct TagFigures {
    name: String,
    /// All memory, with that of heaps of graphs and of paged caches.
    bytes: u64,
    /// The part of `bytes` that paged caches have, or get when they wake.
    paged: u64,
    asleep: bool,
    /// The bytes of host memory kept for its contents.
    host: u64,
    /// The bytes that are marked to be kept by a sleep that discards the rest.
    kept: u64,
}

impl TagFigures {
    pub(crate) const fn kept(&self) -> u64 {
        self.kept
    }

    pub(crate) const fn host(&self) -> u64 {
        self.host
    }
}

/// Returns the figures of a device's tags, in the order of their first allocations.
pub(crate) fn figures(of: &DeviceHeap) -> Vec<TagFigures> {
    note_tags_of_graphs();
    // Without the lock, since a cache has its own while the driver is called.
    let paged = caches::bytes(of);
    let state = lock();
    let tags = state.tags.iter().enumerate();
    let ours = tags.filter(|(_, tag)| std::ptr::eq(tag.of, of));
    let figures = ours.map(|(index, tag)| {
        let paged = paged.get(&tag.name).copied().unwrap_or(0);
        TagFigures {
            name: tag.name.clone(),
            bytes: state.sizes(index).sum::<u64>() + bytes_of_heaps(of, &tag.name) + paged,
            paged,
            asleep: tag.is_asleep,
            host: tag.store.as_ref().map_or(0, HostStore::capacity),
            kept: state.marked(index).sum(),
        }
    });
    figures.collect()
}

/// Marks memory of an allocation under a tag, as `cuvmm_keep` describes. Returns the mark's token.
pub(crate) fn keep(address: usize, size: u64) -> Result<u64, Error> {
    fork::check()?;
    let mut state = lock();
    let blocks = state.blocks.get_or_insert_default();
    let tag = blocks.tag_of(address, size).ok_or(Error::NotInPool)?;
    if state.tags[tag].is_asleep {
        return Err(Error::Asleep(state.tags[tag].name.clone()));
    }
    let blocks = state.blocks.get_or_insert_default();
    blocks.mark(address, size).ok_or(Error::NotInPool)
}

/// Ends a mark, if it has not ended.
pub(crate) fn end_mark(token: u64) {
    if !fork::is_child() {
        lock().blocks.get_or_insert_default().end_mark(token);
    }
}

/// Returns the name of the tag under which the memory at an address was allocated.
pub(crate) fn name_of(address: usize) -> Option<String> {
    if fork::is_child() {
        return None;
    }
    let state = lock();
    let tag = state.blocks.as_ref()?.tag_of(address, 1)?;
    Some(state.tags[tag].name.clone())
}

/// Makes the tags that only heaps of graphs have.
fn note_tags_of_graphs() {
    for (_, of) in heaps::all() {
        for name in graphs::tags(of) {
            // A tag that is known and asleep is refused.
            let _ = tag(of.device.ordinal().0, &name);
        }
    }
}

impl Tag {
    /// Counts and notes an allocation, which may have begun before the tag fell asleep. Returns the
    /// device's heap.
    fn count_made(&self, address: usize, size: u64, seen: Option<&Seen>) -> &'static DeviceHeap {
        let mut figures = self.of.figures();
        figures.made(size);
        if let Some(seen) = seen {
            seen.made(self.of, address, size, 0);
        }
        if self.is_asleep {
            figures.slept(size);
            history::moved(self.of, address, size, 0, true);
        }
        self.of
    }
}

impl State {
    fn sizes(&self, tag: usize) -> impl Iterator<Item = u64> {
        self.blocks.iter().flat_map(move |all| all.sizes(tag))
    }

    fn marked(&self, tag: usize) -> impl Iterator<Item = u64> {
        self.blocks.iter().flat_map(move |all| all.marked(tag))
    }

    fn set_asleep(&mut self, index: usize, is_asleep: bool) {
        let tag = &mut self.tags[index];
        if tag.is_asleep == is_asleep {
            return;
        }
        tag.is_asleep = is_asleep;
        let mut figures = tag.of.figures();
        let all = self.blocks.iter().flat_map(Blocks::allocations);
        for (address, size, _) in all.filter(|&(.., of)| of == index) {
            match is_asleep {
                true => figures.slept(size),
                false => figures.woke(size),
            }
            history::moved(tag.of, address, size, 0, is_asleep);
        }
    }
}

pub(crate) fn asleep() -> BTreeSet<String> {
    if fork::is_child() {
        return BTreeSet::new();
    }
    let state = lock();
    let asleep = state.tags.iter().filter(|tag| tag.is_asleep);
    asleep.map(|tag| tag.name.clone()).collect()
}

/// Returns the indices of tags by name, or of all sleeping or awake tags without names.
///
/// # Errors
/// A name is unknown, or not all its tags are in the expected state.
fn chosen(names: Option<&[String]>, are_asleep: bool) -> Result<Vec<usize>, Error> {
    note_tags_of_graphs();
    let state = lock();
    let tags = || state.tags.iter().enumerate();
    let Some(names) = names else {
        let found = tags().filter(|(_, tag)| tag.is_asleep == are_asleep);
        return Ok(found.map(|(index, _)| index).collect());
    };
    let mut chosen = Vec::new();
    for name in names {
        let mut is_known = false;
        for (index, tag) in tags().filter(|(_, tag)| &tag.name == name) {
            is_known = true;
            match (tag.is_asleep, are_asleep) {
                (true, false) => return Err(Error::Asleep(name.clone())),
                (false, true) => return Err(Error::Awake(name.clone())),
                _ if !chosen.contains(&index) => chosen.push(index),
                _ => {}
            }
        }
        if !is_known {
            return Err(Error::UnknownTag(name.clone()));
        }
    }
    Ok(chosen)
}

fn names(json: &str) -> Result<Option<Vec<String>>, Error> {
    Ok(serde_json::from_str(json)?)
}

/// Puts tags to sleep, as `cuvmm_sleep` describes.
///
/// # Errors
/// Invalid JSON, an unknown or sleeping tag, work that does not end, too little host memory, or a
/// refusal of the driver. All tags are as before, except that a tag sleeps if the driver refuses to
/// map its memory again.
pub(crate) fn sleep(json: &str, keep: Option<Host>, wait: Duration) -> Result<(), Error> {
    sleep_if(json, keep, wait, &mut || Ok(()))
}

/// Puts tags to sleep if `agreed` returns `Ok`, which is called when all that can fail is done.
pub(crate) fn sleep_if(
    json: &str,
    keep: Option<Host>,
    wait: Duration,
    agreed: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    fork::check()?;
    sleep_as(names(json)?.as_deref(), |_| keep, wait, agreed)
}

/// Puts tags to sleep, each as its value says, as `cuvmm_sleep_each` describes.
///
/// # Errors
/// A value that is no `keep`, and the errors of [`sleep`].
pub(crate) fn sleep_each(json: &str) -> Result<(), Error> {
    fork::check()?;
    let each: BTreeMap<String, i32> = serde_json::from_str(json)?;
    let each = each
        .into_iter()
        .map(|(name, keep)| Ok((name, Host::of(keep)?)));
    let each = each.collect::<Result<BTreeMap<_, _>, Error>>()?;
    let names: Vec<String> = each.keys().cloned().collect();
    let keep = |name: &str| each.get(name).copied().flatten();
    sleep_as(Some(&names), keep, LONGEST, &mut || Ok(()))
}

fn sleep_as(
    names: Option<&[String]>,
    keep: impl Fn(&str) -> Option<Host>,
    wait: Duration,
    agreed: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    let until = Instant::now().checked_add(wait);
    // Leave is not kept during the wait for work: the pools' guards end the wait when a capture
    // begins.
    drop(graphs::waiting().ok_or(Error::Capturing)?);
    let _moving = MOVING.lock().unwrap_or_else(PoisonError::into_inner);
    let chosen = chosen(names, false)?;
    shared::refuse_sent(&chosen)?;
    let moving = Moving::begin(&chosen);
    let mut prepared = Vec::new();
    let outcome: Result<(), Error> = chosen.iter().try_for_each(|&index| {
        let name = lock().tags[index].name.clone();
        prepared.push(prepare_sleep(index, keep(&name), until)?);
        Ok(())
    });
    if let Err(error) = outcome.and_then(|()| agreed()) {
        let cancelled = chosen.iter().zip(prepared);
        return Err(
            cancelled.fold(error, |cause, (&index, one)| match cancel(one) {
                Ok(()) => cause,
                Err(stayed) => Error::Stayed {
                    stayed: Box::new(refused(index, stayed)),
                    cause: Box::new(cause),
                },
            }),
        );
    }
    for one in prepared.into_iter().flatten() {
        one.finish();
    }
    for &index in &chosen {
        give_up_cached(index);
    }
    shared::settle(&chosen);
    moving.end(|_| true);
    Ok(())
}

/// Wakes tags, as `cuvmm_wake` describes.
///
/// # Errors
/// Invalid JSON, an unknown or awake tag, too little memory, or a refusal of the driver. All tags
/// are as before.
pub(crate) fn wake(json: &str, wait: Duration) -> Result<(), Error> {
    wake_if(json, wait, &mut || Ok(()))
}

/// Wakes tags if `agreed` returns `Ok`, which is called when all that can fail is done.
pub(crate) fn wake_if(
    json: &str,
    wait: Duration,
    agreed: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    fork::check()?;
    let (names, until) = (names(json)?, Instant::now().checked_add(wait));
    // Leave is not kept during the wait for memory: the pools' guards end the wait when a capture
    // begins.
    drop(graphs::waiting().ok_or(Error::Capturing)?);
    let _moving = MOVING.lock().unwrap_or_else(PoisonError::into_inner);
    let chosen = chosen(names.as_deref(), true)?;
    let _rooms = shared::rooms(&chosen)?;
    let moving = Moving::begin(&chosen);
    let prepared = chosen.iter().map(|&index| {
        let members = Members::of(index);
        let prepared = members.all().timeout(left(until)).prepare_wake();
        prepared.map_err(|cause| refused(index, cause))
    });
    // Memory that was prepared is taken away again after an error.
    let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
    agreed()?;
    for one in prepared {
        one.finish();
    }
    moving.end(|_| false);
    host::give_back_after(&chosen);
    Ok(())
}

/// Does every step of putting a tag to sleep that can fail: for the memory whose contents are kept,
/// and for the rest, of which only what is marked is kept.
fn prepare_sleep(
    index: usize,
    keep: Option<Host>,
    until: Option<Instant>,
) -> Result<Vec<PreparedSleep>, Error> {
    let members = Members::of(index);
    let mut state = lock();
    if let Some(after) = keep {
        state.tags[index].host = after;
    }
    state.blocks.get_or_insert_default().tell_marks(index)?;
    let has_graphs = state.tags[index].has_graphs;
    let marked = host::parts(state.marked(index));
    drop(state);
    let (kept, lost) = fates(has_graphs, keep.is_some());
    // Contents of paged caches are kept or lost with those of blocks that are no memory of graphs.
    let selected = |fate: &[&str], keeps: bool| {
        let blocks = members.selected(fate, keeps, keeps == keep.is_some());
        blocks.timeout(left(until))
    };
    let keeps = keep.is_some() || has_graphs || members.heaps.iter().any(|it| it.keeps);
    let prepare = |store: Option<&HostStore>| {
        let mut prepared = Vec::new();
        if let Some(store) = store.filter(|_| keeps) {
            prepared.push(selected(kept, true).prepare_sleep(Contents::Keep(store))?);
        }
        let contents = match store {
            Some(store) if marked > 0 => Contents::KeepMarked(store),
            _ => Contents::Discard,
        };
        match selected(lost, false).prepare_sleep(contents) {
            Ok(one) => prepared.push(one),
            Err(cause) => return Err(cancel(prepared).err().unwrap_or(cause)),
        }
        Ok(prepared)
    };
    let needed = host::needed(index, keep.is_some()) + marked;
    let store = match keeps || marked > 0 {
        true => Some(host::store(index, needed)?),
        false => None,
    };
    let mut prepared = prepare(store.as_ref());
    drop(store);
    if prepared.as_ref().is_err_and(host::is_unpinned) {
        prepared = prepare(Some(&host::pageable(index, needed)?));
    }
    prepared.map_err(|cause| refused(index, cause))
}

/// Returns the tags of a tenant's blocks whose contents are kept, and of those whose contents are lost,
/// if the contents of what is no memory of graphs are kept, or lost. No tag stands for all blocks.
const fn fates(
    has_graphs: bool,
    keeps: bool,
) -> (&'static [&'static str], &'static [&'static str]) {
    match (has_graphs, keeps) {
        // Without blocks of graphs all have one fate.
        (false, true) => (&[], &[WRITTEN]),
        (false, false) => (&[KEPT], &[]),
        (true, true) => (&[PLAIN, KEPT], &[WRITTEN]),
        (true, false) => (&[KEPT], &[PLAIN, WRITTEN]),
    }
}

/// Ends what was prepared, with all as before.
///
/// # Errors
/// Some memory stays asleep.
fn cancel(prepared: Vec<PreparedSleep>) -> Result<(), SleepError> {
    let mut outcome = Ok(());
    for one in prepared {
        outcome = outcome.and(one.cancel());
    }
    outcome
}

/// Gives the cached memory of a tag up whose blocks sleep.
fn give_up_cached(index: usize) {
    let (tenant, has_graphs) = {
        let state = lock();
        let tag = &state.tags[index];
        (tag.tenant.clone(), tag.has_graphs)
    };
    if has_graphs {
        // If a capture has begun meanwhile, the memory stays cached.
        let _ = tenant.blocks().release(true).sleep(Contents::Discard);
    }
}

/// Returns the time that is left until an instant; without one, as good as forever.
fn left(until: Option<Instant>) -> Duration {
    until.map_or(Duration::MAX, |until| {
        until.saturating_duration_since(Instant::now())
    })
}

fn refused(index: usize, cause: SleepError) -> Error {
    let state = lock();
    let tag = &state.tags[index];
    Error::Sleep {
        tag: tag.name.clone(),
        device: tag.device,
        cause,
    }
}
