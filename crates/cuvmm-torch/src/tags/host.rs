//! Host memory for the contents of tags.
//!
//! Each tag has a store, which takes memory as contents come and keeps it for the next sleep, or
//! gives it back after waking. All stores together stay within one limit: memory that awake tags
//! keep is given back for one that falls asleep.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::thread::{self, JoinHandle};

use cuvmm::driver::Location;
use cuvmm::{HostStore, MemoryError, SleepError};

use super::members::Members;
use super::moving::MOVING;
use super::{chosen, lock, names, refused, unknown};
use crate::error::Error;
use crate::{exit, fork, graphs};

/// Stores of contents are multiples of this, in bytes.
const PART: u64 = 2 << 20;

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

/// The most bytes of all stores.
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Threads that give memory back.
static GIVING: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

/// Sets the most bytes of host memory for contents, of all devices together.
pub(crate) fn set_limit(bytes: u64) {
    LIMIT.store(bytes, Ordering::Relaxed);
}

/// Returns `true` if host memory could not be pinned, and pageable memory may do.
pub(super) const fn is_unpinned(error: &SleepError) -> bool {
    matches!(
        error,
        SleepError::Memory(MemoryError::Create {
            location: Location::HOST,
            ..
        })
    )
}

/// Returns the store of a tag, for contents that need some bytes. Its limit is what the others leave.
pub(super) fn store(index: usize, needed: u64) -> Result<HostStore, Error> {
    let room = room(index, needed)?;
    let mut state = lock();
    let tag = &mut state.tags[index];
    if let Some(store) = &tag.store {
        store.set_limit(room);
        return Ok(store.clone());
    }
    let device = tag.of.device.clone();
    drop(state);
    let store = HostStore::builder(&device).limit(room.max(1)).build()?;
    lock().tags[index].store = Some(store.clone());
    Ok(store)
}

/// Gives up the store of a tag without blocks, unless memory of graphs or a paged cache may sleep in it.
pub(super) fn give_up(index: usize) {
    let members = Members::of(index);
    let mut state = lock();
    let is_unused = !members.has_holders() && state.sizes(index).next().is_none();
    let store = state.tags[index].store.take_if(|_| is_unused);
    drop(state);
    drop(store);
}

/// Gives a tag a store of pageable memory, for contents that need some bytes.
pub(super) fn pageable(index: usize, needed: u64) -> Result<HostStore, Error> {
    let mut state = lock();
    let tag = &mut state.tags[index];
    // The old store may cause the lack of memory.
    let old = tag.store.take();
    let device = tag.of.device.clone();
    drop(state);
    drop(old);
    let store = HostStore::builder(&device)
        .ordinary(needed.max(PART))
        .build()?;
    lock().tags[index].store = Some(store.clone());
    Ok(store)
}

/// Returns the bytes that contents of some sizes take in whole parts.
pub(super) fn parts(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.map(|size| size.next_multiple_of(PART)).sum()
}

/// Returns the bytes that the contents of a tag take: of all memory, or of that which graphs keep.
pub(super) fn needed(index: usize, all: bool) -> u64 {
    let holders = Members::of(index).contents(all);
    let state = lock();
    let sizes = state.sizes(index);
    parts(sizes.filter(|_| all || state.tags[index].has_graphs)) + holders
}

/// Returns the most bytes that a tag's store may have. If they are fewer than `needed`, the stores of
/// other tags give free memory back first.
fn room(index: usize, needed: u64) -> Result<u64, Error> {
    let limit = LIMIT.load(Ordering::Relaxed);
    let others: Vec<HostStore> = {
        let state = lock();
        let tags = state.tags.iter().enumerate();
        let others = tags.filter(|&(other, _)| other != index);
        others.filter_map(|(_, tag)| tag.store.clone()).collect()
    };
    let room = || {
        let taken = others.iter().map(HostStore::capacity).sum();
        limit.saturating_sub(taken)
    };
    for other in &others {
        let short = needed.saturating_sub(room());
        if short > 0 {
            // The driver may wait for devices when it releases memory.
            let _leave = graphs::waiting().ok_or(Error::Capturing)?;
            other.shrink_to(other.capacity().saturating_sub(short));
        }
    }
    Ok(room())
}

/// Takes the memory that the contents of tags will need, as `cuvmm_host_prepare` describes.
pub(crate) fn prepare(json: &str) -> Result<(), Error> {
    fork::check()?;
    let names = names(json)?;
    drop(graphs::waiting().ok_or(Error::Capturing)?);
    let _moving = MOVING.lock().unwrap_or_else(PoisonError::into_inner);
    for index in chosen(names.as_deref(), false)? {
        let needed = needed(index, true);
        let reserved = store(index, needed)?.reserve(needed);
        match reserved {
            Err(error) if is_unpinned(&error) => drop(pageable(index, needed)?),
            reserved => reserved.map_err(|cause| refused(index, cause))?,
        }
    }
    Ok(())
}

/// Gives memory of tags without contents back to the system, as `cuvmm_host_release` describes.
/// Returns the bytes.
pub(crate) fn release(json: &str) -> Result<u64, Error> {
    fork::check()?;
    let names = names(json)?;
    let mut stores = Vec::new();
    let state = lock();
    for name in names.iter().flatten() {
        if !state.tags.iter().any(|tag| &tag.name == name) {
            return Err(unknown(&state, name));
        }
    }
    for tag in &state.tags {
        if names.as_ref().is_none_or(|names| names.contains(&tag.name)) {
            stores.extend(tag.store.clone());
        }
    }
    drop(state);
    let _leave = graphs::waiting().ok_or(Error::Capturing)?;
    Ok(stores.iter().map(|store| store.shrink_to(0)).sum())
}

/// Gives back the host memory of tags that have woken, if it is not to be kept.
pub(super) fn give_back_after(woken: &[usize]) {
    let state = lock();
    let tags = woken.iter().map(|&index| &state.tags[index]);
    let stores = tags.filter(|tag| tag.host == Host::Release);
    let stores = stores.filter_map(|tag| tag.store.clone()).collect();
    drop(state);
    give_back(stores);
}

/// Gives the free memory of stores back on a thread of its own, for which nothing waits but the exit
/// of the process. Keeps it if a graph may be captured then.
fn give_back(stores: Vec<HostStore>) {
    static AT_EXIT: Once = Once::new();
    if stores.is_empty() || !exit::watch() {
        return;
    }
    AT_EXIT.call_once(|| exit::at_end(|| giving().drain(..).for_each(|one| drop(one.join()))));
    let give = move || {
        if let Some(_leave) = graphs::waiting() {
            for store in &stores {
                store.shrink_to(0);
            }
        }
    };
    let named = thread::Builder::new().name("cuvmm-host".into());
    let mut giving = giving();
    giving.retain(|one| !one.is_finished());
    giving.extend(named.spawn(give));
}

fn giving() -> std::sync::MutexGuard<'static, Vec<JoinHandle<()>>> {
    GIVING.lock().unwrap_or_else(PoisonError::into_inner)
}
