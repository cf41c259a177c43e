//! Blocks of shareable tags, and allocations of shareable heaps, that are offered to other processes.
//!
//! An offer keeps its memory in place, also if the block or the allocation is freed. All offers of a
//! block meanwhile are one, so that a process that gets several maps it once, and a ledger counts it
//! once.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm::driver::Exported;
use cuvmm::share::Offered;
use cuvmm::{Allocation, Offer};
use serde_json::json;

use crate::error::Error;
use crate::tags::shared::{with_block, with_blocks};
use crate::{attachments, fork, graphs, heaps, live};

struct Begun {
    offer: Arc<Offer>,
    device: i32,
    /// The address of the block or the allocation.
    key: u64,
    /// The address of the offer's first byte in this process.
    address: u64,
    /// The number of times that it was begun and not ended.
    uses: usize,
}

struct State {
    offers: BTreeMap<u64, Begun>,
    /// The number of the last offer. None is used twice.
    last: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    offers: BTreeMap::new(),
    last: 0,
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins an offer of the block or the allocation that has some memory, for reading and writing.
/// Returns its number, or `None` if the memory is no tag's and no shareable heap's. Waits for all work
/// of the device first.
///
/// # Errors
/// A graph is captured, the memory came from another process, or its tag is not shareable or asleep.
pub(crate) fn begin(address: usize, size: u64) -> Result<Option<u64>, Error> {
    fork::check()?;
    if attachments::is_given(address as u64) {
        return Err(Error::FromElsewhere);
    }
    let device = with_block(address, size, |block| Ok(block.device().ordinal().0))?;
    let allocation = match device {
        Some(_) => None,
        None => live::share(address as u64, size),
    };
    let of_heap = allocation.as_ref().map(|&(_, device)| device);
    let Some(device) = device.or(of_heap) else {
        return Ok(None);
    };
    let leave = graphs::waiting().ok_or(Error::Capturing)?;
    heaps::of(device)?.synchronize()?;
    drop(leave);
    if let Some((allocation, _)) = allocation {
        return lock().begin_heap(&allocation, device).map(Some);
    }
    let mut state = lock();
    with_block(address, size, |block| {
        let address = block.address().0;
        state.begin(device, address, || Ok((address, Offer::block(block)?)))
    })
}

impl State {
    fn begin_heap(&mut self, allocation: &Arc<Allocation>, device: i32) -> Result<u64, Error> {
        let key = allocation.address();
        self.begin(device, key.0, || {
            let offer = Offer::several(&[Offered::Allocation(allocation)])?;
            // The offer begins with the extent in which the allocation does.
            let before = offer.offset_of(key, 1).unwrap_or_default();
            Ok((key.0 - before, offer))
        })
    }

    /// Counts an offer of the block or the allocation at an address once more. Makes it if there is
    /// none, with the address of its first byte.
    fn begin(
        &mut self,
        device: i32,
        key: u64,
        make: impl FnOnce() -> Result<(u64, Offer), Error>,
    ) -> Result<u64, Error> {
        let known = self.offers.iter_mut().find(|(_, it)| it.key == key);
        if let Some((&number, begun)) = known {
            begun.uses += 1;
            return Ok(number);
        }
        let (address, offer) = make()?;
        self.last += 1;
        let begun = Begun {
            offer: Arc::new(offer.read_write()),
            device,
            key,
            address,
            uses: 1,
        };
        self.offers.insert(self.last, begun);
        Ok(self.last)
    }
}

/// Offers the blocks and the allocations that have some memory, for reading, each of them once.
///
/// # Errors
/// Some of it came from another process, its tag is not shareable or asleep, or neither a shareable
/// tag nor a shareable heap has it.
pub(crate) fn several(memory: &[(u64, u64)]) -> Result<Offer, Error> {
    let from_elsewhere = |&(address, _): &(u64, u64)| attachments::has(address);
    if memory.iter().any(from_elsewhere) {
        return Err(Error::FromElsewhere);
    }
    with_blocks(memory, |blocks| {
        let mut chosen = BTreeMap::new();
        let mut allocations = BTreeMap::new();
        for (&(address, size), block) in memory.iter().zip(blocks) {
            if let Some(block) = block {
                chosen.insert(block.address(), *block);
                continue;
            }
            let (allocation, _) = live::share(address, size).ok_or(Error::NotInPlace(address))?;
            allocations.insert(allocation.address(), allocation);
        }
        let blocks = chosen.into_values().map(Offered::Block);
        let all: Vec<Offered<'_>> = blocks
            .chain(allocations.values().map(Offered::Allocation))
            .collect();
        Ok(Offer::several(&all)?)
    })
}

/// Describes an offer as JSON: device, address and size of the block, the number of its handles, and
/// the description for the process that gets it, in hexadecimal digits.
pub(crate) fn describe(number: u64) -> Result<Vec<u8>, Error> {
    fork::check()?;
    let state = lock();
    let offered = state.offers.get(&number).ok_or(Error::NotOffered(number))?;
    let description = offered.offer.description();
    let digits = description.to_bytes().into_iter();
    let described = json!({
        "device": offered.device,
        "address": offered.address,
        "size": description.size(),
        "handles": description.extents().len(),
        "description": digits.map(|byte| format!("{byte:02x}")).collect::<String>(),
    });
    Ok(serde_json::to_vec(&described)?)
}

/// Makes a descriptor for each extent of an offer.
pub(crate) fn handles(number: u64) -> Result<Vec<OwnedFd>, Error> {
    fork::check()?;
    let state = lock();
    let offered = state.offers.get(&number).ok_or(Error::NotOffered(number))?;
    let offer = Arc::clone(&offered.offer);
    drop(state);
    let (_, handles) = offer.parcel()?.into_parts();
    let descriptors = handles.into_iter().filter_map(|handle| match handle {
        Exported::Fd(descriptor) => Some(descriptor),
        _ => None,
    });
    Ok(descriptors.collect())
}

/// Ends an offer once. The block's memory is kept until it was ended as many times as begun.
pub(crate) fn end(number: u64) {
    if fork::is_child() {
        return;
    }
    let mut state = lock();
    let Some(offered) = state.offers.get_mut(&number) else {
        return;
    };
    offered.uses -= 1;
    let ended = match offered.uses {
        0 => state.offers.remove(&number),
        _ => None,
    };
    drop(state);
    drop(ended);
}
