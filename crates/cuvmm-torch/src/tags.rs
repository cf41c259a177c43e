//! Memory under tags, for `torch.cuda.MemPool`: each tag has a tenant in each device's pool, and
//! can sleep and wake.
//!
//! The functions serve PyTorch's own allocator, which asks for whole segments and expects a free to
//! wait for the work of the device, as `cudaFree` does. So the blocks have no home stream: freed
//! memory is reused, and sleeping memory unmapped, only when all work of the device is complete.

pub(crate) mod allocations;
pub(crate) mod exchange;
pub(crate) mod figures;
pub(crate) mod host;
pub(crate) mod kept;
mod members;
mod moving;
pub(crate) mod paged;
pub(crate) mod shared;
pub(crate) mod sleep;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use cuvmm::{HostStore, SleepError, Tenant};

use crate::blocks::Blocks;
use crate::error::Error;
use crate::heaps::{self, DeviceHeap};
use crate::history::{self, Seen};
use crate::{fork, graphs, shareable};

use self::host::Host;

/// The tag of allocations on threads without a tag.
const NO_TAG: &str = "default";

/// The library's tags of blocks: of other memory than that of graphs, and of graphs whose contents
/// are kept and are not.
const PLAIN: &str = "memory";
const KEPT: &str = "graphs";
const WRITTEN: &str = "graphs that write first";

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

struct State {
    tags: Vec<Tag>,
    /// The blocks, with indices into `tags`.
    blocks: Option<Blocks>,
}

static STATE: Mutex<State> = Mutex::new(State {
    tags: Vec::new(),
    blocks: None,
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
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
        let figures = &mut self.of.table().figures;
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
        let figures = &mut tag.of.table().figures;
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
            return Err(unknown(&state, name));
        }
    }
    Ok(chosen)
}

fn unknown(state: &State, name: &str) -> Error {
    let known: BTreeSet<_> = state
        .tags
        .iter()
        .map(|tag| format!("{:?}", tag.name))
        .collect();
    let known: Vec<_> = known.into_iter().collect();
    Error::UnknownTag {
        tag: name.to_owned(),
        known: match known.is_empty() {
            true => "there is none".to_owned(),
            false => format!("there are {}", known.join(", ")),
        },
    }
}

fn names(json: &str) -> Result<Option<Vec<String>>, Error> {
    Ok(serde_json::from_str(json)?)
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
