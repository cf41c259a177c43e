//! Memory of a block that others have too: handed out under a lease, and nobody else's afterwards.
//!
//! Whoever imported memory can write to it for as long as it likes, whatever it was promised. So
//! what was exported serves its block and no other: it goes in no stream cache, into no free list, under no
//! other block, and is not moved by a compaction. Growing over what it shrank from, the block has
//! the same memory again. When it is gone, its slot is [purged](super::purge): unmapped once its
//! fence has passed, and what was exported is released.
//!
//! The mark is the physical's own ([`Physical::is_exported`]), and [`State::keep`] obeys it, where
//! memory comes free. A slot is marked besides, before there is a handle, so that nobody has to
//! look through the extents of slots of which nothing was ever exported.
//!
//! What becomes of a handle is not seen here: the pool does not know who has imported what, nor
//! when it is let go.

use std::fmt;

use cuvmm_driver::{Exported, HandleTypes};

use super::block::Block;
use super::gate::Use;
use super::ids::BlockPlace;
use super::lease::Lease;
use super::state::State;
use crate::error::{MemoryError, ShareError};
use crate::own::{Physical, one_type};
use crate::region::Extent;

/// Handles of the memory under a block, for others to import, and a [`Lease`] that keeps that
/// memory under the block's addresses.
///
/// While it lives, or the lease that is taken [out of it](Self::into_parts), everything under the
/// block stays where it is, even if the block is dropped: what is imported from the handles is what
/// the block shows. Without it the memory stays for as long as the block uses it.
#[must_use = "the block's memory stays where it is while this lives"]
pub struct ExportedBlock {
    handles: Vec<(Extent, Exported)>,
    lease: Lease,
}

impl ExportedBlock {
    /// The extents in order and a handle for each, to be imported with the extent's size. The last
    /// may reach beyond the block's end, where something may lie that the tenant left there.
    #[must_use]
    pub fn handles(&self) -> &[(Extent, Exported)] {
        &self.handles
    }

    /// What keeps the memory under the block.
    #[must_use]
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The same taken apart.
    #[must_use]
    pub fn into_parts(self) -> (Vec<(Extent, Exported)>, Lease) {
        (self.handles, self.lease)
    }
}

impl fmt::Debug for ExportedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportedBlock")
            .field("handles", &self.handles)
            .field("lease", &self.lease)
            .finish()
    }
}

/// The memory under a block, and the lease that keeps it there. The memory is let go first: what
/// somebody still holds when its block has gone cannot be given back.
pub(crate) struct Parts {
    list: Vec<(Extent, Physical)>,
    lease: Lease,
}

impl Parts {
    /// A handle for each extent; each time new ones. All or none.
    pub(crate) fn export(
        &self,
        handle_type: HandleTypes,
    ) -> Result<Vec<(Extent, Exported)>, MemoryError> {
        let physicals: Vec<&Physical> = self.list.iter().map(|(_, physical)| physical).collect();
        let handles = Physical::export_all(&physicals, handle_type)?;
        let mut state = self.lease.core().lock_with(self.lease.place().slot);
        state.note_export(self.lease.place());
        drop(state);
        let extents = self.list.iter().map(|(extent, _)| *extent);
        Ok(extents.zip(handles).collect())
    }

    /// The memory, which counts as exported from here on, and what keeps it in place: that is to be
    /// let go after it.
    pub(crate) fn promise(self) -> (Vec<(Extent, Physical)>, Lease) {
        for (_, physical) in &self.list {
            physical.mark_exported();
        }
        let mut state = self.lease.core().lock_with(self.lease.place().slot);
        state.note_export(self.lease.place());
        drop(state);
        (self.list, self.lease)
    }

    /// Lets the memory go and keeps it in place.
    pub(crate) fn into_lease(self) -> Lease {
        drop(self.list);
        self.lease
    }
}

impl Block {
    /// Handles of the memory under the block, one for each extent
    /// (`cuMemExportToShareableHandle`), for another process to import: [`Physical::import`] with
    /// the extent's size.
    ///
    /// Whoever has a handle can write to the memory for good, so that it is nobody else's from then
    /// on: when the block is gone, and the work that may use it has passed, its memory is unmapped
    /// and released, by the drop itself, by the operations that come after, or by the mapper's
    /// thread if there is one. It is not overwritten, neither by a scrub nor in a hardened pool. The
    /// driver has it back when nobody who imported it has it any more;
    /// [`PoolStats::exported`](super::PoolStats::exported) counts it until it is released.
    ///
    /// The block itself is used as before, and grows and shrinks. What it gives up by shrinking it
    /// has again when it grows, with what the other side wrote there, or zeros if it was to be
    /// [zeroed](super::BlockBuilder::zeroed). What it grows by is exported by exporting it again.
    ///
    /// The pool must have been built [`shareable`](super::PoolBuilder::shareable) for that type.
    ///
    /// # Errors
    /// [`MemoryError`] when the pool's memory is not shareable so, the block sleeps or shares
    /// memory with [forks](Self::fork), or the driver refuses. Nothing is exported then.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self, handle_type: HandleTypes) -> Result<ExportedBlock, MemoryError> {
        one_type(handle_type)?;

        self.device().own_process()?;
        let shareable = self.core().lock().policy.props.handle_types;
        if !shareable.contains(handle_type) {
            return Err(MemoryError::NotShareable {
                handle_type,
                shareable,
            });
        }
        let parts = self.parts()?;
        let handles = parts.export(handle_type)?;
        let lease = parts.into_lease();
        Ok(ExportedBlock { handles, lease })
    }

    /// The memory under the block, about to be exported. From here on it is as good as exported;
    /// if nothing was when the last lease has ended, all is as before.
    pub(crate) fn parts(&self) -> Result<Parts, MemoryError> {
        let lease = self.admit(Use::Export, 0..self.size())?;
        let list = lease
            .core()
            .lock_with(lease.place().slot)
            .parts(lease.place());
        Ok(Parts { list, lease })
    }

    /// Whether nothing but the block itself may write to it.
    pub(crate) fn may_be_sealed(&self) -> Result<(), ShareError> {
        let state = self.core().lock_with(self.place().slot);
        Ok(state.check_unlent(self.place(), 0)?)
    }

    /// Waits for what writes to it, and lets nobody write any more to the extents that it has: for
    /// good, since they were exported, and serve no other block. The offer of its [parts](Self::parts)
    /// holds the only lease.
    pub(crate) fn seal(&mut self) -> Result<(), ShareError> {
        let core = self.core();
        core.device.settle()?;
        core.lock_with(self.place().slot).seal(self.place())
    }
}

impl State {
    /// The extents that a leased block uses, with their memory.
    fn parts(&self, place: &BlockPlace) -> Vec<(Extent, Physical)> {
        let Some(slot) = self.slot(place.slot) else {
            return Vec::new();
        };
        let used = slot.space.parts_in(0, slot.used());
        used.map(|(extent, physical)| (extent, physical.clone()))
            .collect()
    }
}
