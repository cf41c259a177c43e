//! Operations on several blocks in one call. Growing and shrinking change all blocks or none.

use super::block::Block;
use super::sharing;
use super::slots::BlockPlace;
use crate::error::BlockError;
use crate::pool::core::Core;
use crate::pool::line::Wait;
use crate::pool::tenant::Tenant;

/// A block, and its new size in bytes.
type Step = (BlockPlace, u64);

impl Tenant {
    /// Grows several of the tenant's blocks in place, each to the size given with it, in one call:
    /// all of them or none. If memory is short, calls pressure hooks, and waits for at most the
    /// longest timeout of the blocks.
    ///
    /// If every block has enough precommitted memory, the call makes no driver call and takes about
    /// 0.1 us for each block.
    ///
    /// Blocks that had shrunk into memory that they [share](Block::fork) get memory of their own
    /// there under the conditions of [`Block::grow_to`]. The call waits for the copies of earlier
    /// blocks, for at most 20 ms, before it unmaps memory of a later block.
    ///
    /// # Errors
    /// [`BlockError`] names the block that could not grow, with the figures. Every block is then as
    /// before, with two exceptions. Memory of another tenant that is being zeroed stays with its
    /// block as precommitted memory until the zeros are written. A block that had shrunk into
    /// shared memory may have memory of its own there, with the same bytes.
    pub fn grow_all(&self, blocks: &mut [(&mut Block, u64)]) -> Result<(), BlockError> {
        self.grow_blocks(blocks, |blocks| {
            Wait::of_any(blocks.iter().map(|(block, _)| block.patience()))
        })
    }

    /// Grows several of the tenant's blocks in place, all of them or none, if that needs no
    /// waiting. See [`grow_all`](Self::grow_all).
    ///
    /// # Errors
    /// As [`Self::grow_all`].
    pub fn try_grow_all(&self, blocks: &mut [(&mut Block, u64)]) -> Result<(), BlockError> {
        self.grow_blocks(blocks, |_| Wait::Never)
    }

    /// Returns the index of the first group with a block that sleeps or is being moved.
    pub(crate) fn first_asleep<'a>(
        &self,
        groups: impl IntoIterator<Item = &'a [Block]>,
    ) -> Option<usize> {
        let state = self.core().lock();
        let asleep = |blocks: &[Block]| {
            blocks
                .iter()
                .any(|block| state.blocks.slots.sleeps(block.place().slot))
        };
        groups.into_iter().position(asleep)
    }

    /// Shrinks several of the tenant's blocks under one lock, each to the size given with it: all
    /// of them or none.
    pub(crate) fn shrink_all(&self, blocks: &mut [(&mut Block, u64)]) -> Result<(), BlockError> {
        self.core().shrink(&steps(blocks))?;
        note(blocks);
        Ok(())
    }

    /// Notifies the mapper, if any, that blocks are about to outgrow their memory.
    pub(crate) fn notify_growth<'a>(&self, blocks: impl IntoIterator<Item = &'a Block>) {
        let mut state = self.core().lock();
        for block in blocks {
            state.blocks.request_precommit(block.place().slot);
        }
        Core::unlock(state);
    }

    fn grow_blocks(
        &self,
        blocks: &mut [(&mut Block, u64)],
        wait: impl FnOnce(&[(&mut Block, u64)]) -> Wait,
    ) -> Result<(), BlockError> {
        let strange = |(block, _): &(&mut Block, u64)| !self.has(block);
        if let Some(index) = blocks.iter().position(strange) {
            return Err(BlockError::WrongTenant { index });
        }
        let steps = steps(blocks);
        let core = self.core();
        let mut state = core.lock();
        let (memory, all) = state.halves();
        let grown = all.grow_all_within(memory, self.id(), &steps);
        Core::unlock(state);
        if !grown {
            let grown = core.grow_all(self.id(), &steps, wait(blocks), None);
            let size = |index| steps.get(index).map(|&(_, size)| size);
            grown.map_err(|refused| refused.with_size(size))?;
        }
        note(blocks);
        Ok(())
    }
}

fn steps(blocks: &mut [(&mut Block, u64)]) -> Vec<Step> {
    let step = |(block, size): &mut (&mut Block, u64)| {
        block.withdraw_growth();
        (*block.place(), *size)
    };
    blocks.iter_mut().map(step).collect()
}

fn note(blocks: &mut [(&mut Block, u64)]) {
    for (block, size) in blocks {
        block.has_size(*size);
    }
}

impl Tenant {
    /// Gives several of the tenant's blocks memory of their own instead of shared memory, each from
    /// the given offset on. If memory is short, calls pressure hooks, and waits for at most the
    /// longest timeout of the blocks. If a block is refused, blocks before it stay unshared, with
    /// the same bytes.
    pub(crate) fn unshare(&self, blocks: &[(&Block, u64)]) -> Result<(), BlockError> {
        let wait = Wait::of_any(blocks.iter().map(|(block, _)| block.patience()));
        self.unshare_blocks(blocks, wait)
    }

    pub(crate) fn try_unshare(&self, blocks: &[(&Block, u64)]) -> Result<(), BlockError> {
        self.unshare_blocks(blocks, Wait::Never)
    }

    fn unshare_blocks(&self, blocks: &[(&Block, u64)], wait: Wait) -> Result<(), BlockError> {
        let step = |&(block, from): &(&Block, u64)| sharing::Step {
            slot: block.place().slot,
            from,
        };
        let steps: Vec<sharing::Step> = blocks.iter().map(step).collect();
        let made = self.core().unshare(self.id(), &steps, wait);
        let size = |index| steps.get(index).map(|step: &sharing::Step| step.from);
        made.map_err(|refused| refused.with_size(size))
    }
}
