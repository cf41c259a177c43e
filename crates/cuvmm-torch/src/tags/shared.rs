//! Tags whose memory other processes may get: their room under the limit, and offers of their blocks.

use std::collections::BTreeMap;

use cuvmm::Block;

use super::{NO_TAG, State, Tag, lock, note_tags_of_graphs};
use crate::edge::complain;
use crate::error::Error;
use crate::heaps::DeviceHeap;
use crate::limits::{self, Promise};
use crate::{fork, graphs, shareable};

/// Makes the memory of a tag shareable, for good.
///
/// # Errors
/// The tag has memory that is not shareable, or had some.
pub(crate) fn make_shareable(name: &str) -> Result<(), Error> {
    fork::check()?;
    if name.is_empty() || name == NO_TAG {
        return Err(Error::HasOther(name.to_owned()));
    }
    note_tags_of_graphs();
    let state = lock();
    let other = |tag: &Tag| tag.name == name && !tag.is_shareable;
    if state.tags.iter().any(other) {
        return Err(Error::HasOther(name.to_owned()));
    }
    shareable::add(name);
    Ok(())
}

/// Calls a function with the block that has some memory, whose tag is shareable and awake. Returns
/// `None` if no tag has the memory.
///
/// # Errors
/// The tag is not shareable or asleep, or the memory is not in one allocation.
pub(crate) fn with_block<T>(
    address: usize,
    size: u64,
    act: impl FnOnce(&Block) -> Result<T, Error>,
) -> Result<Option<T>, Error> {
    let state = lock();
    state.block_of(address, size)?.map(act).transpose()
}

/// Calls a function with the block of each of several pieces of memory, as [`with_block`] does, or
/// `None` for memory that no tag has.
pub(crate) fn with_blocks<T>(
    memory: &[(u64, u64)],
    act: impl FnOnce(&[Option<&Block>]) -> Result<T, Error>,
) -> Result<T, Error> {
    let state = lock();
    let block_of = |&(address, size)| {
        let address = usize::try_from(address).unwrap_or(usize::MAX);
        state.block_of(address, size)
    };
    let blocks = memory.iter().map(block_of);
    act(&blocks.collect::<Result<Vec<_>, _>>()?)
}

impl State {
    /// Returns the block that has some memory, whose tag is shareable and awake.
    fn block_of(&self, address: usize, size: u64) -> Result<Option<&Block>, Error> {
        let Some(blocks) = &self.blocks else {
            return Ok(None);
        };
        let Some((block, _, tag)) = blocks.holding(address) else {
            return Ok(None);
        };
        let tag = &self.tags[tag];
        if !tag.is_shareable {
            return Err(Error::NotShareable(tag.name.clone()));
        }
        if tag.is_asleep {
            return Err(Error::Asleep(tag.name.clone()));
        }
        match blocks.tag_of(address, size) {
            Some(_) => Ok(Some(block)),
            None => Err(Error::NotInPool),
        }
    }
}

/// Makes room for the memory of shareable tags that wake. Kept until the memory is charged.
pub(super) fn rooms(chosen: &[usize]) -> Result<Vec<Promise<'static>>, Error> {
    let mut wanted: BTreeMap<i32, (&'static DeviceHeap, u64)> = BTreeMap::new();
    let state = lock();
    for tag in chosen.iter().map(|&index| &state.tags[index]) {
        if tag.is_shareable {
            wanted.entry(tag.device).or_insert((tag.of, 0)).1 += tag.tenant.stats().asleep;
        }
    }
    drop(state);
    let rooms = wanted.into_values();
    rooms.map(|(of, bytes)| room(of, bytes)).collect()
}

/// Makes room for shareable memory. Waits for the work of the device if that may free some.
pub(super) fn room(of: &DeviceHeap, bytes: u64) -> Result<Promise<'_>, Error> {
    let error = match limits::make_room(of, bytes, false) {
        Err(error) if error.is_out_of_memory() && of.waits() => error,
        outcome => return outcome,
    };
    let leave = graphs::waiting().ok_or(error)?;
    of.synchronize()?;
    drop(leave);
    limits::make_room(of, bytes, true)
}

/// Gives the heaps the room of shareable tags that fell asleep.
pub(super) fn settle(chosen: &[usize]) {
    let state = lock();
    let tags = chosen.iter().map(|&index| &state.tags[index]);
    let shareable = tags.filter(|tag| tag.is_shareable);
    let mut devices: Vec<(i32, &'static DeviceHeap)> =
        shareable.map(|tag| (tag.device, tag.of)).collect();
    drop(state);
    devices.dedup_by_key(|(device, _)| *device);
    for (device, of) in devices {
        // A heap that is short of memory tries again.
        if let Err(error) = limits::settle(of) {
            complain(&error, &format!("limit of device {device}: {error}"));
        }
    }
}

/// Refuses sleep for tags with memory that was offered: it is another process's as well.
pub(super) fn refuse_sent(chosen: &[usize]) -> Result<(), Error> {
    let sent = || {
        let state = lock();
        let mut tags = chosen.iter().map(|&index| &state.tags[index]);
        let sent = tags.find(|tag| tag.is_shareable && tag.tenant.stats().exported > 0);
        sent.map(|tag| (tag.name.clone(), tag.of))
    };
    let Some((_, of)) = sent() else {
        return Ok(());
    };
    // What was freed is given back when its work is complete.
    let leave = graphs::waiting().ok_or(Error::Capturing)?;
    of.synchronize()?;
    drop(leave);
    of.trim()?;
    match sent() {
        Some((name, _)) => Err(Error::WasSent(name)),
        None => Ok(()),
    }
}

/// Refuses an exchange of shareable tags.
pub(super) fn refuse(chosen: &[usize]) -> Result<(), Error> {
    let state = lock();
    let mut tags = chosen.iter().map(|&index| &state.tags[index]);
    match tags.find(|tag| tag.is_shareable) {
        Some(tag) => Err(Error::ExchangeOfShareable(tag.name.clone())),
        None => Ok(()),
    }
}
