//! Several blocks in one call and under one lock: all of them, or everything is as before.

use super::block::Block;
use super::core::Core;
use super::ids::BlockPlace;
use super::tenant::Tenant;
use super::unshare;
use super::wait::Wait;
use crate::error::BlockError;

/// A block to grow or shrink, and to how many bytes.
type Step = (BlockPlace, u64);

impl Tenant {
    /// Grows several of the tenant's blocks in place, to the size given with each, in one call: all
    /// of them or none. Asks pressure hooks, and waits as long as the most patient of the blocks
    /// may.
    ///
    /// Where every block has memory ahead of its use this makes no driver call, and takes a tenth
    /// of a microsecond a block.
    ///
    /// # Errors
    /// [`BlockError`] says which block could not grow, with the figures. Every block is as before
    /// then. Memory that was another tenant's and is just being zeroed stays with its block as
    /// precommitted memory until that has passed, and a block that has shrunk into what it
    /// [shares](Block::fork) may have memory of its own there by then, with the same bytes.
    pub fn grow_all(&self, blocks: &mut [(&mut Block, u64)]) -> Result<(), BlockError> {
        self.grow_blocks(blocks, |blocks| {
            Wait::of_any(blocks.iter().map(|(block, _)| block.patience()))
        })
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::grow_all`].
    pub fn try_grow_all(&self, blocks: &mut [(&mut Block, u64)]) -> Result<(), BlockError> {
        self.grow_blocks(blocks, |_| Wait::Never)
    }

    /// The first of some groups of the tenant's blocks in which one sleeps or is being moved.
    pub(crate) fn first_asleep<'a>(
        &self,
        groups: impl IntoIterator<Item = &'a [Block]>,
    ) -> Option<usize> {
        let state = self.core().lock();
        let asleep = |blocks: &[Block]| blocks.iter().any(|block| state.is_asleep(block.place()));
        groups.into_iter().position(asleep)
    }

    /// Gives up the ends of several of the tenant's blocks, down to the size given with each, under
    /// one lock: all of them or none.
    pub(crate) fn shrink_all(&self, blocks: &mut [(&mut Block, u64)]) -> Result<(), BlockError> {
        self.core().shrink(&steps(blocks))?;
        note(blocks);
        Ok(())
    }

    /// Tells the mapper, if there is one, that blocks are about to outgrow what they have.
    pub(crate) fn foresee<'a>(&self, blocks: impl IntoIterator<Item = &'a Block>) {
        let mut state = self.core().lock();
        for block in blocks {
            state.ask_precommit(block.place().slot);
        }
        Core::let_go(state);
    }

    fn grow_blocks(
        &self,
        blocks: &mut [(&mut Block, u64)],
        wait: impl FnOnce(&[(&mut Block, u64)]) -> Wait,
    ) -> Result<(), BlockError> {
        let strange = |(block, _): &(&mut Block, u64)| !self.has(block);
        if let Some(index) = blocks.iter().position(strange) {
            return Err(BlockError::NotOurs { index });
        }
        let steps = steps(blocks);
        let core = self.core();
        let mut state = core.lock();
        let grown = state.grow_all_within(self.id(), &steps);
        Core::let_go(state);
        if !grown {
            let grown = core.grow_all(self.id(), &steps, wait(blocks));
            let size = |index| steps.get(index).map(|&(_, size)| size);
            grown.map_err(|refused| refused.with_size(size))?;
        }
        note(blocks);
        Ok(())
    }
}

fn steps(blocks: &[(&mut Block, u64)]) -> Vec<Step> {
    let step = |(block, size): &(&mut Block, u64)| (*block.place(), *size);
    blocks.iter().map(step).collect()
}

fn note(blocks: &mut [(&mut Block, u64)]) {
    for (block, size) in blocks {
        block.has_size(*size);
    }
}

impl Tenant {
    /// Makes the memory of several of the tenant's blocks their own, from the byte on that is given
    /// with each. Asks pressure hooks, and waits as long as the most patient of the blocks may. What
    /// was made private stays so when another one is refused: every block shows the same bytes.
    pub(crate) fn unshare(&self, blocks: &[(&Block, u64)]) -> Result<(), BlockError> {
        let wait = Wait::of_any(blocks.iter().map(|(block, _)| block.patience()));
        self.unshare_blocks(blocks, wait)
    }

    /// The same if that needs no waiting.
    pub(crate) fn try_unshare(&self, blocks: &[(&Block, u64)]) -> Result<(), BlockError> {
        self.unshare_blocks(blocks, Wait::Never)
    }

    fn unshare_blocks(&self, blocks: &[(&Block, u64)], wait: Wait) -> Result<(), BlockError> {
        let step = |&(block, from): &(&Block, u64)| unshare::Step {
            slot: block.place().slot,
            from,
        };
        let steps: Vec<unshare::Step> = blocks.iter().map(step).collect();
        let made = self.core().unshare(self.id(), &steps, wait);
        let size = |index| steps.get(index).map(|step: &unshare::Step| step.from);
        made.map_err(|refused| refused.with_size(size))
    }
}
