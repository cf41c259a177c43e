//! Allocations under tags. Each is a block of the tag's tenant, or a part of one, and has no home
//! stream.

use std::sync::PoisonError;

use cuvmm::Block;

use super::{KEPT, NO_TAG, PLAIN, WRITTEN, host, lock, shared, tag};
use crate::blocks::block_for;
use crate::entered::{self, OfGraphs};
use crate::error::Error;
use crate::heaps;
use crate::history::Seen;
use crate::live;
use crate::{fork, shareable};

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
        true => tag.of.table().figures.ended_asleep(removed.size),
        false => tag.of.table().figures.ended(removed.size),
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
