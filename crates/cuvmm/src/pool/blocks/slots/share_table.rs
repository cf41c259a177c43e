//! The share table of a tenant: which of its slots map which extents in common. Slots begin and end
//! sharing by the operations of [`shared`](crate::pool::blocks::sharing::shared).
//!
//! Keeps I-7.

use std::collections::BTreeMap;

use cuvmm_driver::PhysicalHandle;

use super::slot::Slot;
use crate::own::Physical;

#[derive(Debug)]
pub(in crate::pool) struct ShareTable {
    /// Keyed by handle: while a slot maps an extent, no other physical has its handle.
    entries: BTreeMap<PhysicalHandle, Entry>,
    bytes: u64,
}

/// An extent, at the same offset in all slots that map it.
#[derive(Debug)]
pub(in crate::pool) struct Entry {
    pub(in crate::pool) offset: u64,
    pub(in crate::pool) size: u64,
    pub(in crate::pool) holders: Vec<usize>,
}

/// The slots that map an extent after a slot has unmapped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) enum Sharers {
    None,
    One(usize),
    Several,
}

impl ShareTable {
    pub(super) const fn new() -> Self {
        Self {
            entries: BTreeMap::new(),
            bytes: 0,
        }
    }

    pub(in crate::pool::blocks) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// Notes that `other` maps the physical that `slot` has at `offset`.
    pub(in crate::pool::blocks) fn add(
        &mut self,
        physical: &Physical,
        offset: u64,
        slot: usize,
        other: usize,
    ) {
        let size = physical.size();
        let entry = self.entries.entry(physical.as_raw()).or_insert_with(|| {
            self.bytes += size;
            Entry {
                offset,
                size,
                holders: vec![slot],
            }
        });
        entry.holders.push(other);
    }

    /// Notes that a slot no longer maps an extent. Returns `None` if the extent was not shared.
    pub(in crate::pool::blocks) fn remove(
        &mut self,
        handle: PhysicalHandle,
        slot: usize,
    ) -> Option<Sharers> {
        let entry = self.entries.get_mut(&handle)?;
        entry.holders.retain(|&holder| holder != slot);
        Some(match *entry.holders {
            [] => {
                self.forget(handle);
                Sharers::None
            }
            [other] => Sharers::One(other),
            _ => Sharers::Several,
        })
    }

    /// Ends the sharing of an extent, whose bytes are charged apart from here on.
    pub(in crate::pool::blocks) fn forget(&mut self, handle: PhysicalHandle) {
        if let Some(entry) = self.entries.remove(&handle) {
            self.bytes -= entry.size;
        }
    }

    pub(in crate::pool::blocks) fn others_of(
        &self,
        handle: PhysicalHandle,
        slot: usize,
    ) -> impl Iterator<Item = usize> + '_ {
        let entry = self.entries.get(&handle);
        let holders = entry.into_iter().flat_map(|entry| &entry.holders);
        holders.copied().filter(move |&other| other != slot)
    }

    pub(in crate::pool::blocks) fn others(&self, handle: PhysicalHandle) -> usize {
        let entry = self.entries.get(&handle);
        entry.map_or(0, |entry| entry.holders.len().saturating_sub(1))
    }

    /// From the end of a slot's shared memory, removes the extents that no other slot maps any
    /// more: they are the slot's own.
    pub(in crate::pool::blocks) fn settle(&mut self, slot: &mut Slot) {
        while let Some(last) = slot.shared.checked_sub(1) {
            let mut there = slot.space.parts_in(last, slot.shared);
            let Some((extent, physical)) = there.next() else {
                return;
            };
            let handle = physical.as_raw();
            if self.others_of(handle, slot.id.index).next().is_some() {
                return;
            }
            self.forget(handle);
            let offset = extent.offset;
            drop(there);
            slot.shared = offset;
        }
    }
}
