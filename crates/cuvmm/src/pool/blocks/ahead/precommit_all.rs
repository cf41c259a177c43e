//! Memory precommitted behind blocks by the user's own thread, for users that grow many blocks at
//! the same moment and prefer to place their memory in advance, one block after the other. A cache
//! with a [mapper](super::precommit) does not need this.

use crate::error::BlockError;
use crate::growth::Steps;
use crate::pool::blocks::slots::{BlockPlace, Slot};
use crate::pool::blocks::{Block, Blocks, Fit};
use crate::pool::core::{Core, Locked};
use crate::pool::tenant::Tenant;
use crate::wanted::Purpose;

impl Tenant {
    /// Precommits a step of memory behind each of the given blocks that has none, out of memory
    /// that no tenant holds. Returns `false` at the first block for which there is no memory or the
    /// driver refuses. While a capture guard lives, does nothing and returns `true`.
    pub(crate) fn precommit<'a>(&self, blocks: impl IntoIterator<Item = &'a Block>) -> bool {
        let mut state = self.core().lock();
        let mut blocks = blocks.into_iter();
        // Work that can wait makes no driver call while a capture runs.
        let all =
            state.memory.gate.is_capturing() || blocks.all(|block| state.precommits(block.place()));
        Core::unlock(state);
        all
    }

    pub(crate) fn has_mapper(&self) -> bool {
        self.core().has_mapper()
    }
}

impl Locked<'_> {
    /// Precommits a step of memory behind a block that has none and may have some. Returns `false`
    /// if there is too little memory or the driver refuses.
    fn precommits(&mut self, place: &BlockPlace) -> bool {
        let id = place.slot.tenant;
        let Some(step) = self.blocks.next_step(place) else {
            return true;
        };
        self.grant_for(id, step, Purpose::New);
        self.precommits_step(place, step)
    }

    /// Precommits a step behind a block, unless the block has changed since the step was chosen: it
    /// may have fallen asleep while the ledger granted the bytes.
    fn precommits_step(&mut self, place: &BlockPlace, step: u64) -> bool {
        let id = place.slot.tenant;
        if self.blocks.next_step(place) != Some(step) {
            return true;
        }
        // Checked first, since a refusal collects the figures of the whole pool.
        if self.memory.check_usable(id).is_err() || step > self.memory.budget.available_to(id) {
            return false;
        }
        let outcome =
            self.with_slot_out(place.slot, |state, slot| state.place_precommit(slot, step));
        if let Some(Err(error)) = &outcome {
            log!(debug, %error, step, "no memory was precommitted");
        }
        !matches!(outcome, Some(Err(_)))
    }

    fn place_precommit(&mut self, slot: &mut Slot, step: u64) -> Result<(), BlockError> {
        let home = slot.home().cloned();
        let zeroed = slot.block.as_ref().is_some_and(|block| block.zeroed);
        let begun = slot.space.bytes();
        let fit = Fit {
            to: begun,
            end: begun + step,
            home: home.as_ref(),
            zeroed,
            zeros: None,
        };
        self.place_memory(slot, &fit, None)?;
        slot.space.settle(begun);
        Ok(())
    }
}

impl Blocks {
    /// Returns the step by which a block that uses all of its memory would grow, or `None` if
    /// nothing may be precommitted for it.
    fn next_step(&self, place: &BlockPlace) -> Option<u64> {
        let slot = self.slots.get(place.slot)?;
        let block = slot.block.as_ref()?;
        let bytes = slot.space.bytes();
        let settled =
            slot.sleep_state.is_awake() && !slot.is_busy() && !slot.broken && !slot.is_truncated();
        if !settled || block.used < bytes {
            return None;
        }
        let steps = Steps::of_block(self.granule, block.growth, slot.class.sizes);
        steps.extent(bytes, bytes, block.most)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::extents::rig::{G, rig};
    use crate::pool::{Limit, Pool};
    use crate::sleep::Contents;

    #[test]
    fn nothing_is_placed_behind_a_block_that_fell_asleep_meanwhile() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(64 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let block = tenant.block(16 * G).capacity(32 * G).try_allocate();
        let block = block.unwrap();
        let step = pool.core.lock().blocks.next_step(block.place()).unwrap();
        tenant.blocks().sleep(Contents::Discard).unwrap();
        assert!(pool.core.lock().precommits_step(block.place(), step));
        assert_eq!(pool.stats().committed, 0);
        tenant.blocks().wake().unwrap();
        assert!(pool.core.lock().precommits_step(block.place(), step));
        assert_eq!(pool.stats().precommitted, step);
    }
}
