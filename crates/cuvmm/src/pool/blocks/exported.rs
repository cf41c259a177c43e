//! Memory of blocks exported to other processes: handed out under a lease, and never reused.
//!
//! An importer can write to the memory without end. So exported memory serves its block and no
//! other: it goes to no stream cache, to no free list and under no other block, and a compaction
//! does not move it. When the block is gone, its slot is [purged](super::purge), and the exported
//! memory is released.
//!
//! The mark is the physical's own ([`Physical::is_exported`]).
//! [`Memory::keep`](crate::pool::memory::Memory::keep) obeys it when memory
//! becomes free. The slot is marked as well, before a handle is made, so that the extents of slots
//! without exports need not be searched.
//! The pool does not know which process has imported memory, nor when it lets go of it.

#[cfg(target_os = "linux")]
use std::sync::Arc;

#[cfg(target_os = "linux")]
use cuvmm_driver::DeviceAddress;
use cuvmm_driver::{Exported, HandleTypes};

use super::Blocks;
use super::block::Block;
use super::lease::Lease;
use super::slots::BlockPlace;
use super::uses::Use;
use crate::device::Device;
use crate::error::{CallError, MemoryError, ShareError};
use crate::extents::Extent;
#[cfg(target_os = "linux")]
use crate::ledger::OpenOffer;
use crate::own::{Access, Physical, Stream, one_type};
use crate::pool::core::Core;

/// Handles of the memory under a block for other processes to import, and a [`Lease`] that keeps
/// that memory under the block's addresses.
///
/// While this value lives, or the lease from [`into_parts`](Self::into_parts), all memory under the
/// block stays in place, even if the block is dropped: the block shows the memory that importers
/// have. Without either, the memory stays while the block uses it.
#[derive(Debug)]
#[must_use = "the block's memory stays where it is while this lives"]
pub struct ExportedBlock {
    handles: Vec<(Extent, Exported)>,
    lease: Lease,
}

impl ExportedBlock {
    /// Returns the extents in order with a handle for each, to be imported with the extent's size.
    /// The last extent may reach beyond the block's end, and hold data that the tenant left there.
    #[must_use]
    pub fn handles(&self) -> &[(Extent, Exported)] {
        &self.handles
    }

    /// Returns the lease that keeps the memory under the block.
    #[must_use]
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Returns the handles and the lease separately.
    #[must_use]
    pub fn into_parts(self) -> (Vec<(Extent, Exported)>, Lease) {
        (self.handles, self.lease)
    }
}

/// The memory under a block, and the lease that keeps it there. The physicals must be dropped
/// before the lease: memory still held here when its block is gone cannot be given back.
pub(crate) struct BlockParts {
    list: Vec<(Extent, Physical)>,
    lease: Lease,
}

pub(crate) struct Promised {
    pub(crate) list: Vec<(Extent, Physical)>,
    pub(crate) lease: Lease,
    /// The number of the pool's ledger, and the name of the block in it.
    pub(crate) counted: Option<(u64, u64)>,
}

impl BlockParts {
    /// Makes a new handle for each extent: all of them or none.
    fn export(&self, handle_type: HandleTypes) -> Result<Vec<(Extent, Exported)>, MemoryError> {
        let physicals: Vec<&Physical> = self.list.iter().map(|(_, physical)| physical).collect();
        let handles = Physical::export_all(&physicals, handle_type)?;
        let mut state = self.lease.core().lock_with(self.lease.place().slot);
        state.blocks.note_export(self.lease.place());
        drop(state);
        let extents = self.list.iter().map(|(extent, _)| *extent);
        Ok(extents.zip(handles).collect())
    }

    /// Marks the memory as exported, and counts it as one block of the pool's ledger, if any. The
    /// parts must be dropped in order.
    pub(crate) fn promise(self) -> Result<Promised, ShareError> {
        let core = self.lease.core();
        let mut state = core.lock_with(self.lease.place().slot);
        let counted = core.count_export(&self.list)?;
        for (_, physical) in &self.list {
            physical.mark_exported();
        }
        state.blocks.note_export(self.lease.place());
        drop(state);
        Ok(Promised {
            list: self.list,
            lease: self.lease,
            counted,
        })
    }
}

#[cfg(target_os = "linux")]
impl BlockParts {
    /// Returns each physical with its address.
    pub(crate) fn physicals(&self) -> impl Iterator<Item = (DeviceAddress, &Physical)> {
        let first = self.lease.address();
        let at = move |offset| DeviceAddress(first.0 + offset);
        let list = self.list.iter();
        list.map(move |(extent, physical)| (at(extent.offset), physical))
    }

    /// Marks the memory as exported, which an offer counts. The list must be dropped before the lease.
    pub(crate) fn offered(self) -> Lease {
        let mut state = self.lease.core().lock_with(self.lease.place().slot);
        for (_, physical) in &self.list {
            physical.mark_exported();
        }
        state.blocks.note_export(self.lease.place());
        drop(state);
        self.lease
    }
}

/// A pool whose memory is offered.
#[cfg(target_os = "linux")]
pub(crate) struct OfferingPool(Arc<Core>);

#[cfg(target_os = "linux")]
impl OfferingPool {
    pub(in crate::pool) fn new(core: &Arc<Core>) -> Self {
        Self(Arc::clone(core))
    }

    /// Returns `true` if both pools are charged to one account in a ledger, or both in none.
    pub(crate) fn has_account_of(&self, other: &Self) -> bool {
        let account = |it: &Self| it.0.ledger.get().map(|it| Arc::as_ptr(&it.member));
        account(self) == account(other)
    }

    /// Counts physicals of pools of this ledger as one offer, if there is a ledger.
    pub(crate) fn count<'a>(
        &self,
        physicals: impl Iterator<Item = &'a Physical> + Clone,
    ) -> Result<Option<OpenOffer>, ShareError> {
        self.0.count_offer(physicals)
    }

    /// Refuses memory that was not created for export as this type.
    pub(crate) fn check_shareable(&self, handle_type: HandleTypes) -> Result<(), MemoryError> {
        self.0.check_shareable(handle_type)
    }
}

impl Core {
    /// Counts a block's exported memory as one block of the ledger, if any. Returns the ledger's
    /// number and the block's name.
    fn count_export(&self, list: &[(Extent, Physical)]) -> Result<Option<(u64, u64)>, ShareError> {
        let Some(joined) = self.ledger.get() else {
            return Ok(None);
        };
        let member = &joined.member;
        let marks = list.iter().map(|(_, physical)| physical.export_mark());
        // The block of memory that was released in part is closed, and a new one counts all the rest.
        let mut names = marks.clone().filter_map(|mark| mark.counted_as());
        let known = names.find(|&block| member.is_open(block));
        let is_new = |(_, it): &&(Extent, Physical)| {
            known.is_none() || it.export_mark().counted_as() != known
        };
        let new = list.iter().filter(is_new);
        let bytes = new.map(|(_, physical)| physical.size()).sum();
        let block = member.export(known, bytes);
        let block = block.ok_or(ShareError::TooManyExports)?;
        marks.for_each(|mark| mark.count_as(block, |known| member.has_entry(known)));
        Ok(Some((joined.member.ledger_number(), block)))
    }

    fn check_shareable(&self, handle_type: HandleTypes) -> Result<(), MemoryError> {
        let shareable = self.look(|state| state.memory.policy.props.handle_types);
        match shareable.contains(handle_type) {
            true => Ok(()),
            false => Err(MemoryError::NotShareable {
                what: "the memory",
                handle_type,
                shareable,
            }),
        }
    }
}

#[cfg(target_os = "linux")]
impl Core {
    /// Counts physicals as one offer in the ledger, if any.
    fn count_offer<'a>(
        &self,
        physicals: impl Iterator<Item = &'a Physical> + Clone,
    ) -> Result<Option<OpenOffer>, ShareError> {
        let Some(joined) = self.ledger.get() else {
            return Ok(None);
        };
        let bytes = physicals.clone().map(Physical::size).sum();
        let mut names = physicals.clone().map(|it| it.export_mark().names());
        let mut common = names.next().unwrap_or_default();
        names.for_each(|names| common.retain(|name| names.contains(name)));
        let offer = joined.member.open_offer(&common, bytes);
        let offer = offer.ok_or(ShareError::TooManyExports)?;
        let (_, name) = offer.name();
        for physical in physicals {
            let mark = physical.export_mark();
            mark.add_name(name, |known| joined.member.has_entry(known));
        }
        Ok(Some(offer))
    }
}

impl Block {
    /// Exports the memory under the block: makes one handle for each extent
    /// (`cuMemExportToShareableHandle`) for another process to import with [`Physical::import`] and
    /// the extent's size. The pool must have been built
    /// [`shareable`](crate::pool::PoolBuilder::shareable) for the handle type.
    ///
    /// A process that has a handle can write to the memory without end, so the memory is never
    /// reused. When the block is gone and the work that may use it is complete, the memory is
    /// unmapped and released: by the drop itself, by later operations, or by the mapper's thread if
    /// any. It is not overwritten, neither by a scrub nor in a hardened pool. The driver gets the
    /// memory back when no importer has it any more;
    /// [`PoolStats::exported`](crate::pool::PoolStats::exported) counts it until it is released.
    ///
    /// The block can be used, grown and shrunk as before. If it grows again over memory that it
    /// gave up by shrinking, it gets the same memory, with the bytes that importers wrote there, or
    /// zeros if the block is [zeroed](crate::pool::BlockBuilder::zeroed). New memory that the block grows
    /// by is exported by another call.
    ///
    /// # Errors
    /// [`MemoryError`] when the pool's memory is not shareable as this type, the block has zero
    /// bytes, sleeps or
    /// shares memory with [forks](Self::fork), or the driver refuses. Nothing is exported then.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self, handle_type: HandleTypes) -> Result<ExportedBlock, MemoryError> {
        one_type(handle_type)?;

        self.device().own_process()?;
        self.core().check_shareable(handle_type)?;
        let parts = self.parts()?;
        let handles = parts.export(handle_type)?;
        let lease = parts.lease;
        Ok(ExportedBlock { handles, lease })
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn offering_pool(&self) -> OfferingPool {
        OfferingPool::new(self.core())
    }

    /// Returns the memory under the block, which counts as exported from here on. If nothing was
    /// exported when the last lease ends, the block is as before.
    pub(crate) fn parts(&self) -> Result<BlockParts, MemoryError> {
        let lease = self.admit(Use::Export, 0..self.size())?;
        let state = self.core().lock_with(self.place().slot);
        let list = state.blocks.parts(self.place());
        drop(state);
        Ok(BlockParts { list, lease })
    }

    /// Checks that no lease allows writing to the block, and that waiting for its devices would
    /// break no known capture.
    pub(crate) fn may_be_sealed(&self) -> Result<(), ShareError> {
        let state = self.core().lock_with(self.place().slot);
        state.blocks.check_unlent(self.place(), 0)?;
        drop(state);
        Ok(self.check_none_captured()?)
    }

    fn check_none_captured(&self) -> Result<(), CallError> {
        let streams = self.streams().unwrap_or_default();
        Stream::check_none_captured(self.core().users(), &streams)
    }

    /// Waits for the devices that have access to the block, and makes its extents read-only for
    /// every device, for good: the extents were exported and serve no other block. The only lease
    /// is that of the block's [parts](Self::parts) in the offer.
    pub(crate) fn seal(&mut self) -> Result<(), ShareError> {
        let core = self.core();
        self.check_none_captured()?;
        Device::settle_all(core.users())?;
        let mut state = core.lock_with(self.place().slot);
        state.blocks.check_unlent(self.place(), 1)?;
        let sealed = state.with_slot_out(self.place().slot, |state, slot| {
            state.unlocked(|| slot.space.cap_all(Access::Read))
        });
        Ok(sealed.unwrap_or(Ok(()))?)
    }
}

impl Blocks {
    fn parts(&self, place: &BlockPlace) -> Vec<(Extent, Physical)> {
        let Some(slot) = self.slots.get(place.slot) else {
            return Vec::new();
        };
        let used = slot.space.parts_in(0, slot.used());
        used.map(|(extent, physical)| (extent, physical.clone()))
            .collect()
    }
}
