//! Compaction of the first bytes of blocks that are to be forked into few large extents.
//!
//! A fork maps each extent of the prefix again, about 25 us for an extent of any size. One copy
//! makes large extents of small ones, which each fork then maps. In return, cutting a fork costs
//! more: an extent is mapped whole or not at all, so the bytes before the cut in its extent are
//! copied.

use std::cell::Cell;
use std::time::Instant;

use super::{Moved, Run, may_compact};
use crate::error::{ArgumentError, BlockError, CallError, MemoryError};
use crate::extent_sizes::ExtentSizes;
use crate::pool::blocks::Block;
use crate::pool::blocks::slots::{BYTES, BlockPlace, Slot, SlotId};
use crate::pool::core::{Core, Locked};
use crate::pool::line::{Attempt, after};
use crate::pool::state::gone;
use crate::pool::tenant::Tenant;

impl Tenant {
    /// Replaces the whole extents in the first `bytes` bytes of several of the tenant's blocks by
    /// few large extents at the same addresses, so that forks of that prefix have few extents to
    /// map. Returns the bytes copied: 0 if fewer extents are not possible.
    ///
    /// Bytes are copied on the device (`cuMemcpyDtoDAsync`, waited for) to extents of at most the
    /// pool's [largest](crate::pool::PoolBuilder::largest_extent), in turn; the old extents go back to
    /// the pool. The limit must have space for one new extent at a time. The call reclaims no
    /// memory, and fails if memory is short. Memory that is already
    /// [shared](crate::pool::TenantStats::shared) stays in place, so compact before the first fork.
    ///
    /// Waits for the work queued on the blocks before the call, for at most the longest timeout of
    /// the blocks. Work that is launched meanwhile must not use the blocks.
    ///
    /// A fork that is truncated within a large extent, and then grows, copies the bytes before the
    /// cut in that extent. When a block is freed, memory in extents larger than the block was
    /// [built with](crate::pool::BlockBuilder::largest_extent) is unmapped instead of being kept for
    /// another block.
    ///
    /// # Errors
    /// [`BlockError`] when work is not complete ([`MemoryError::InUse`]); when a lease lives or the
    /// block has lost memory ([`CallError::InUse`], without waiting); when memory is short, with
    /// the figures; when a block sleeps, was exported or is another tenant's; when a capture is
    /// running; and when the driver refuses. Steps before the error stay done. Every block keeps
    /// its bytes unless the error is [`Lost`](BlockError::Lost).
    #[doc(alias = "cuMemMap")]
    pub fn compact_prefix(&self, blocks: &[&Block], bytes: u64) -> Result<u64, BlockError> {
        match blocks.iter().position(|block| !self.has(block)) {
            Some(index) => Err(BlockError::WrongTenant { index }),
            None => compact_prefix(blocks, bytes),
        }
    }
}

impl Block {
    /// Replaces the extents under the block's first `bytes` bytes by few large extents, so that
    /// [forks](Self::fork) have few extents to map. See [`Tenant::compact_prefix`].
    ///
    /// # Errors
    /// As [`Tenant::compact_prefix`].
    pub fn compact_prefix(&self, bytes: u64) -> Result<u64, BlockError> {
        compact_prefix(&[self], bytes)
    }
}

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

#[derive(Debug, Default)]
struct Progress {
    /// `true` if the fences cover the work queued when the call began.
    fenced: Cell<bool>,
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
                let slot = state.blocks.slots.get_mut(block.slot);
                slot.into_iter().for_each(Slot::fence_work);
            }
        }
        for block in blocks {
            let mut from = 0;
            loop {
                // The mapper may be placing memory behind the block.
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
    fn compact_next(
        &mut self,
        id: SlotId,
        from: u64,
        to: u64,
        progress: &Progress,
    ) -> Result<Option<u64>, BlockError> {
        may_compact(&self.memory)?;
        let slot = self.blocks.slots.get(id).ok_or_else(gone)?;
        slot.check_awake()?;
        let sizes = ExtentSizes::up_to(self.memory.policy.largest_extent);
        let Some(mut run) = Run::of(self.memory.device.granule(), slot, from..to, sizes) else {
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
                // The next run needs the memory as large physicals.
                self.release_small_free();
                Ok(Some(run.end()))
            }
            Moved::InUse | Moved::Shared => {
                let device = self.memory.device.location();
                Err(MemoryError::InUse(device).into())
            }
            Moved::NoSpace(error) => Err(error),
            Moved::Exported => Err(MemoryError::Exported(run.offset..run.end()).into()),
        }
    }
}
