//! Figures of tags, and the list of all allocations under them.

use cuvmm::HostStore;
use serde::Serialize;

use super::members::bytes_of_heaps;
use super::{lock, note_tags_of_graphs};
use crate::blocks::Blocks;
use crate::heaps::DeviceHeap;
use crate::paged::caches;
use crate::table::{Entry, Table};

/// The allocations under tags of a device, by address.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    pub(crate) awake: Vec<Entry>,
    pub(crate) asleep: Vec<Entry>,
}

/// Calls a function with all allocations under tags of a device. Meanwhile none of them ends or
/// falls asleep, and no allocation of the device's heaps ends.
pub(crate) fn with_entries<T>(of: &DeviceHeap, look: impl FnOnce(Entries, &mut Table) -> T) -> T {
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
    look(entries, &mut of.table())
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
