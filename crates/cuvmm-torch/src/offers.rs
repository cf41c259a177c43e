//! Blocks of shareable tags that are offered to other processes.
//!
//! An offer keeps its block's memory in place, also if the block is freed. All offers of a block
//! meanwhile are one, so that a process that gets several maps it once, and a ledger counts it once.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm::Offer;
use cuvmm::driver::Exported;
use serde_json::json;

use crate::error::Error;
use crate::tags::shared::with_block;
use crate::{attachments, fork, graphs, heaps};

struct Offered {
    offer: Arc<Offer>,
    device: i32,
    /// The block's address in this process.
    address: u64,
    /// The number of times that it was begun and not ended.
    uses: usize,
}

struct State {
    offers: BTreeMap<u64, Offered>,
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

/// Begins an offer of the block that has some memory, for reading and writing. Returns its number,
/// or `None` if the memory is no tag's. Waits for all work of the device first.
///
/// # Errors
/// A graph is captured, the memory came from another process, or its tag is not shareable or asleep.
pub(crate) fn begin(address: usize, size: u64) -> Result<Option<u64>, Error> {
    fork::check()?;
    if attachments::is_given(address as u64) {
        return Err(Error::FromElsewhere);
    }
    let Some(device) = with_block(address, size, |block| Ok(block.device().ordinal().0))? else {
        return Ok(None);
    };
    let leave = graphs::waiting().ok_or(Error::Capturing)?;
    heaps::of(device)?.synchronize()?;
    drop(leave);
    let mut state = lock();
    with_block(address, size, |block| {
        let address = block.address().0;
        let known = state
            .offers
            .iter_mut()
            .find(|(_, it)| it.address == address);
        if let Some((&number, offered)) = known {
            offered.uses += 1;
            return Ok(number);
        }
        let offer = Arc::new(Offer::block(block)?.read_write());
        state.last += 1;
        let number = state.last;
        let uses = 1;
        state.offers.insert(
            number,
            Offered {
                offer,
                device,
                address,
                uses,
            },
        );
        Ok(number)
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
