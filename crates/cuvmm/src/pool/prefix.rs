//! Few large extents under the first bytes of blocks that are to be forked.
//!
//! A fork maps each extent of the prefix again, about 25 us each however large it is. Of a block that
//! grew by small extents one copy makes large ones, which each fork then maps. The price is paid where a
//! fork is cut: an extent is mapped whole or not at all, so what lies before the cut in its extent is
//! copied.

use std::cell::Cell;
use std::time::Instant;

use super::block::Block;
use super::compact::Moved;
use super::core::{Core, Locked};
use super::ids::{BYTES, BlockPlace, SlotId};
use super::slot::Slot;
use super::state::{State, gone};
use super::tenant::Tenant;
use super::wait::{Attempt, after};
use crate::error::{ArgumentError, BlockError, CallError, MemoryError};

impl Tenant {
    /// Makes few large extents of the whole extents in the first `bytes` bytes of several of the
    /// tenant's blocks, at the same addresses, so that each fork of that prefix has few to map. Returns
    /// the bytes copied: none where fewer extents are not to be had.
    ///
    /// Bytes are copied on the device (`cuMemcpyDtoDAsync`, waited for) to extents of at most the
    /// pool's [largest](super::PoolBuilder::largest_extent), one after the other; the old ones are the
    /// pool's then. It needs room within the limit for one at a time, and takes none back from others:
    /// where memory is short it fails. What is [shared](super::TenantStats::shared) already stays as it
    /// is, so that this comes before the first fork.
    ///
    /// Waits as long as the most patient of the blocks may for the work that is queued on them when it
    /// is called. Work that is launched meanwhile must keep off them.
    ///
    /// A fork that is truncated into a large extent, and grows again, copies what lies before the cut in
    /// that extent. Memory of a block that has larger extents than it was [built
    /// with](super::BlockBuilder::largest_extent) is not kept for another block, but unmapped when it
    /// is freed.
    ///
    /// # Errors
    /// [`BlockError`]: work has not passed ([`MemoryError::InUse`]), a lease lives or the block has lost
    /// memory ([`CallError::InUse`], without waiting), memory is short, with the figures, a block sleeps,
    /// was exported or is another tenant's, a capture is running, or the driver refuses. What was done
    /// until then stays; every block has its bytes unless it is [`Lost`](BlockError::Lost).
    #[doc(alias = "cuMemMap")]
    pub fn compact_prefix(&self, blocks: &[&Block], bytes: u64) -> Result<u64, BlockError> {
        match blocks.iter().position(|block| !self.has(block)) {
            Some(index) => Err(BlockError::NotOurs { index }),
            None => compact_prefix(blocks, bytes),
        }
    }
}

impl Block {
    /// Makes few large extents of those under its first `bytes` bytes, so that each
    /// [fork](Self::fork) of them has few to map. See [`Tenant::compact_prefix`].
    ///
    /// # Errors
    /// As [`Tenant::compact_prefix`].
    pub fn compact_prefix(&self, bytes: u64) -> Result<u64, BlockError> {
        compact_prefix(&[self], bytes)
    }
}

/// Makes few large extents of those under the first bytes of blocks of one tenant.
fn compact_prefix(blocks: &[&Block], bytes: u64) -> Result<u64, BlockError> {
    for block in blocks {
        ArgumentError::at_most(BYTES, bytes, block.size())?;
    }
    let Some(first) = blocks.first() else {
        return Ok(0);
    };
    blocks.iter().for_each(|block| block.goes_in_no_cache());
    let places: Vec<BlockPlace> = blocks.iter().map(|block| *block.place()).collect();
    let timeout = blocks.iter().filter_map(|block| block.patience()).max();
    let core = first.core();
    core.compact_prefix(&places, bytes, timeout.map(after))
}

/// How far one call has come.
#[derive(Debug, Default)]
struct Progress {
    /// The fences cover the work that was queued when it began.
    fenced: Cell<bool>,
    /// Bytes copied so far.
    copied: Cell<u64>,
}

impl Core {
    fn compact_prefix(
        &self,
        blocks: &[BlockPlace],
        bytes: u64,
        deadline: Option<Instant>,
    ) -> Result<u64, BlockError> {
        self.device.own_process()?;
        let progress = Progress::default();
        let in_use =
            |error: &BlockError| matches!(error, BlockError::Memory(MemoryError::InUse { .. }));
        let compacted = self.until(
            deadline,
            |state| self.attempt_to_compact(state, blocks, bytes, &progress),
            in_use,
        );
        self.announce();
        compacted.map(|()| progress.copied.get())
    }

    fn attempt_to_compact<'a>(
        &'a self,
        mut state: Locked<'a>,
        blocks: &[BlockPlace],
        bytes: u64,
        progress: &Progress,
    ) -> Attempt<'a, ()> {
        if !progress.fenced.replace(true) {
            state = self.await_slots(state, blocks.iter().map(|block| (block.slot, 0)));
            for block in blocks {
                state
                    .slot_mut(block.slot)
                    .into_iter()
                    .for_each(Slot::fence_work);
            }
        }
        for block in blocks {
            let mut from = 0;
            loop {
                // The mapper may be placing something behind the block.
                state = self.await_slot(state, block.slot);
                match state.compact_next(block.slot, from, bytes, progress) {
                    Ok(Some(end)) => from = end,
                    Ok(None) => break,
                    Err(error) => return (state, Err(error)),
                }
            }
        }
        (state, Ok(()))
    }
}

impl Locked<'_> {
    /// Makes large extents of the next ones in a range of a slot; returns where they end.
    fn compact_next(
        &mut self,
        id: SlotId,
        from: u64,
        to: u64,
        progress: &Progress,
    ) -> Result<Option<u64>, BlockError> {
        self.may_compact()?;
        let state: &State = self;
        let slot = state.slot(id).ok_or_else(gone)?;
        if !slot.sleep_state.is_awake() {
            let size = slot.requested();
            return Err(MemoryError::Asleep { size }.into());
        }
        let Some(mut run) = state.run_of(slot, from..to, state.policy.largest_extent) else {
            return Ok(None);
        };
        if slot.leases > 0 || slot.broken {
            return Err(CallError::InUse.into());
        }
        run.fenced = true;
        let moved = self.with_slot_out(id, |state, slot| state.move_run(slot, &run));
        match moved.ok_or_else(gone)?? {
            Moved::Copied(bytes) => {
                progress.copied.set(progress.copied.get() + bytes);
                // They are wanted as large ones for the next.
                self.release_small_free();
                Ok(Some(run.end()))
            }
            Moved::InUse => {
                let device = self.device.location();
                Err(MemoryError::InUse { device }.into())
            }
            Moved::NoRoom(error) => Err(error),
            Moved::Exported => {
                let (offset, size) = (run.offset, run.size);
                Err(MemoryError::Exported { offset, size }.into())
            }
        }
    }
}
