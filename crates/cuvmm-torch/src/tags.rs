//! Memory under tags, for `torch.cuda.MemPool`: each tag has a tenant in the pool of each device, and
//! can be put to sleep and woken.
//!
//! The functions are those of an allocator under PyTorch's own, which asks for whole segments and
//! expects a free to wait for the work of the device, as `cudaFree` does. So the blocks have no home
//! stream: what is freed is reused, and what sleeps is unmapped, only when all work of the device is
//! complete.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use cuvmm::{Block, Contents, HostStore, MemoryError, SleepError, Tenant};

use crate::error::Error;
use crate::fork;
use crate::heaps::{self, DeviceHeap};
use crate::live::Entry;

/// The tag of allocations on threads that have entered none.
const NO_TAG: &str = "default";

/// How long sleeping waits for work that may use the memory, and waking for memory.
const LONGEST: Duration = Duration::from_secs(60);

/// The parts of a store of contents in bytes.
const PART: u64 = 2 << 20;

thread_local! {
    /// The tags that this thread has entered.
    static ENTERED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// Their number, which is read at each allocation.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// A tag on one device.
struct Tag {
    device: i32,
    name: String,
    tenant: Tenant,
    of: &'static DeviceHeap,
    is_asleep: bool,
    /// Held for reading while a block is allocated, and for writing while the tag moves: a block that
    /// came to it meanwhile would be awake under a tag that is asleep, or asleep and not known to be.
    still: Arc<RwLock<()>>,
    /// Host memory for the contents, which is kept for the next time.
    store: Option<HostStore>,
}

struct State {
    tags: Vec<Tag>,
    /// By the address: the block, and the index of its tag.
    blocks: Option<HashMap<usize, (Block, usize)>>,
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

/// Makes a tag this thread's.
pub(crate) fn enter(name: &str) {
    let depth = ENTERED.with_borrow_mut(|entered| {
        entered.push(name.to_owned());
        entered.len()
    });
    DEPTH.set(depth);
}

/// Returns to the tag that this thread had before.
pub(crate) fn leave() {
    let depth = ENTERED.with_borrow_mut(|entered| {
        entered.pop();
        entered.len()
    });
    DEPTH.set(depth);
}

/// Returns `true` if this thread has entered a tag.
#[inline]
pub(crate) fn is_entered() -> bool {
    DEPTH.get() > 0
}

/// Allocates a block under this thread's tag. Returns its address; 0 for a size of 0.
pub(crate) fn allocate(size: isize, device: i32) -> Result<usize, Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let size = match u64::try_from(size) {
        Ok(0) => return Ok(0),
        Ok(size) => size,
        Err(_) => return Err(Error::NegativeSize),
    };
    let name = ENTERED.with_borrow(|entered| entered.last().cloned());
    let name = name.unwrap_or_else(|| NO_TAG.to_owned());
    let (index, tenant, still) = tag(device, &name)?;
    let _still = still.read().unwrap_or_else(PoisonError::into_inner);
    if lock().tags[index].is_asleep {
        return Err(Error::Asleep(name));
    }
    let block = tenant.allocate(size)?;
    heaps::of(device)?.figures().made(size);
    let address = usize::try_from(block.address().0).unwrap_or(usize::MAX);
    let mut state = lock();
    let blocks = state.blocks.get_or_insert_default();
    blocks.insert(address, (block, index));
    Ok(address)
}

/// Returns the index of a tag, its tenant and what keeps it from moving. The tag is made if there is
/// none.
fn tag(device: i32, name: &str) -> Result<(usize, Tenant, Arc<RwLock<()>>), Error> {
    let of = heaps::of(device)?;
    let mut state = lock();
    let is = |tag: &Tag| tag.device == device && tag.name == name;
    if let Some(index) = state.tags.iter().position(is) {
        let tag = &state.tags[index];
        return match tag.is_asleep {
            true => Err(Error::Asleep(name.to_owned())),
            false => Ok((index, tag.tenant.clone(), Arc::clone(&tag.still))),
        };
    }
    let tenant = match of.tenant().name() == name {
        true => of.tenant().clone(),
        false => of.pool.tenant(name).register()?,
    };
    let still = Arc::default();
    state.tags.push(Tag {
        device,
        name: name.to_owned(),
        tenant: tenant.clone(),
        of,
        is_asleep: false,
        still: Arc::clone(&still),
        store: None,
    });
    Ok((state.tags.len() - 1, tenant, still))
}

/// Frees the block at an address, awake or asleep.
pub(crate) fn free(address: usize) -> Result<(), Error> {
    if address == 0 || fork::is_child() {
        return Ok(());
    }
    let mut state = lock();
    let block = state.blocks.get_or_insert_default().remove(&address);
    let (block, index) = block.ok_or(Error::NotAllocated)?;
    let of = state.tags[index].of;
    drop(state);
    of.figures().ended(block.size());
    Ok(())
}

/// Returns all blocks of a device, by address.
pub(crate) fn entries(of: &DeviceHeap) -> Vec<Entry> {
    let state = lock();
    let blocks = state.blocks.iter().flatten();
    let ours = blocks.filter(|(_, (_, index))| std::ptr::eq(state.tags[*index].of, of));
    let mut entries: Vec<Entry> = ours
        .map(|(&address, (block, _))| Entry::block(address, block.size()))
        .collect();
    entries.sort_unstable_by_key(|entry| entry.address);
    entries
}

/// Returns the names of tags that are asleep on a device.
pub(crate) fn asleep() -> BTreeSet<String> {
    if fork::is_child() {
        return BTreeSet::new();
    }
    let state = lock();
    let asleep = state.tags.iter().filter(|tag| tag.is_asleep);
    asleep.map(|tag| tag.name.clone()).collect()
}

/// Returns the indices of tags by name, all if there are no names, that are asleep or not.
///
/// # Errors
/// A name that is none, or whose tags are not all as expected.
fn chosen(names: Option<&[String]>, are_asleep: bool) -> Result<Vec<usize>, Error> {
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

/// Reads a JSON list of names, or `null` for all.
fn names(json: &str) -> Result<Option<Vec<String>>, Error> {
    Ok(serde_json::from_str(json)?)
}

/// Puts tags to sleep, given by a JSON list of names, or `null` for all that are awake. Waits for all
/// work of their devices. With `keep` the contents are copied to host memory, else they are lost.
///
/// # Errors
/// JSON that is none, an unknown tag, one that is asleep: nothing has changed. Work that does not
/// end, too little host memory, a refusal of the driver: the tags before that one in the list sleep.
pub(crate) fn sleep(json: &str, keep: bool) -> Result<(), Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let names = names(json)?;
    let _moving = MOVING.lock().unwrap_or_else(PoisonError::into_inner);
    for index in chosen(names.as_deref(), false)? {
        let store = match keep {
            true => Some(store(index)?),
            false => None,
        };
        let contents = store.as_ref().map_or(Contents::Discard, Contents::Keep);
        change(index, true, |tenant| {
            let blocks = tenant.blocks().timeout(LONGEST).release(true);
            blocks.sleep(contents).map(drop)
        })?;
    }
    Ok(())
}

/// Wakes tags, given by a JSON list of names, or `null` for all that are asleep.
///
/// # Errors
/// JSON that is none, an unknown tag, one that is awake: nothing has changed. Too little memory, a
/// refusal of the driver: the tags before that one in the list are awake.
pub(crate) fn wake(json: &str) -> Result<(), Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let names = names(json)?;
    let _moving = MOVING.lock().unwrap_or_else(PoisonError::into_inner);
    for index in chosen(names.as_deref(), true)? {
        change(index, false, |tenant| {
            tenant.blocks().timeout(LONGEST).wake().map(drop)
        })?;
    }
    Ok(())
}

/// Puts a tag to sleep or wakes it, when allocations under it have ended. It counts as asleep from the
/// start, so no new one begins.
fn change(
    index: usize,
    sleeps: bool,
    act: impl FnOnce(&Tenant) -> Result<(), SleepError>,
) -> Result<(), Error> {
    let mut state = lock();
    let tag = &mut state.tags[index];
    tag.is_asleep = true;
    let (tenant, device, name) = (tag.tenant.clone(), tag.device, tag.name.clone());
    let still = Arc::clone(&tag.still);
    drop(state);
    let _moving = still.write().unwrap_or_else(PoisonError::into_inner);
    let outcome = act(&tenant);
    lock().tags[index].is_asleep = is_asleep_after(sleeps, &outcome);
    outcome.map_err(|cause| Error::Sleep {
        tag: name,
        device,
        cause,
    })
}

/// Returns `true` if a tag is asleep after it was put to sleep or woken with this outcome.
const fn is_asleep_after(sleeps: bool, outcome: &Result<(), SleepError>) -> bool {
    match outcome {
        Ok(()) => sleeps,
        // Some blocks sleep. Waking the tag wakes them, and leaves the others as they are.
        Err(SleepError::Stayed { .. }) => true,
        Err(_) => !sleeps,
    }
}

/// Returns host memory for the contents of a tag, in pinned memory if that can be had.
fn store(index: usize) -> Result<HostStore, Error> {
    let mut state = lock();
    let blocks = state.blocks.get_or_insert_default().values();
    let sizes = blocks.filter(|(_, tag)| *tag == index);
    let bytes = sizes.map(|(block, _)| block.size().next_multiple_of(PART));
    let bytes = bytes.sum::<u64>().max(PART);
    let tag = &mut state.tags[index];
    if let Some(store) = tag.store.take_if(|store| store.free() >= bytes) {
        tag.store = Some(store.clone());
        return Ok(store);
    }
    // The old one is too small, and may be what leaves too little memory.
    tag.store = None;
    let device = tag.of.device.clone();
    drop(state);
    let builder = HostStore::builder(&device);
    let store = builder.pinned(bytes).build();
    let store = store.or_else(|_: MemoryError| builder.ordinary(bytes).build())?;
    lock().tags[index].store = Some(store.clone());
    Ok(store)
}

#[cfg(test)]
mod tests {
    use cuvmm::SleepError;

    use super::is_asleep_after;

    #[test]
    fn a_tag_of_which_some_blocks_stay_asleep_can_be_woken() {
        let stayed = SleepError::Stayed {
            blocks: 1,
            bytes: 2 << 20,
            cause: Box::new(SleepError::Cancelled),
        };
        assert!(is_asleep_after(true, &Err(stayed)));
        assert!(!is_asleep_after(true, &Err(SleepError::Cancelled)));
        assert!(is_asleep_after(false, &Err(SleepError::Cancelled)));
        assert!(is_asleep_after(true, &Ok(())));
        assert!(!is_asleep_after(false, &Ok(())));
    }
}
