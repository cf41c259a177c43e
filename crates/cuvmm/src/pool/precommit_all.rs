//! Memory put behind blocks before they need it, by their user's own thread: for a user who grows
//! many blocks at the same moment, and would rather pay for them one after the other.
//!
//! A [mapper](super::precommit) does that unasked, so a cache does not call this where there is one.

use super::block::Block;
use super::commit::Fit;
use super::core::{Core, Locked};
use super::ids::BlockPlace;
use super::slot::Slot;
use super::state::State;
use super::tenant::Tenant;
use crate::error::BlockError;
use crate::growth::Steps;

impl Tenant {
    /// Puts a step of memory behind each of several of the tenant's blocks that have none ahead of
    /// their use: precommitted memory, made of memory that no tenant holds. Stops at the first block for which
    /// there is none, or for which the driver refuses, and returns false. While a capture guard lives
    /// it does nothing and returns true.
    pub(crate) fn precommit<'a>(&self, blocks: impl IntoIterator<Item = &'a Block>) -> bool {
        let mut state = self.core().lock();
        let mut blocks = blocks.into_iter();
        // What can wait makes no driver call while others capture.
        let all = state.capturing > 0 || blocks.all(|block| state.precommits(block.place()));
        Core::let_go(state);
        all
    }

    /// Whether a mapper looks after the pool, and puts memory ahead of blocks that grow.
    pub(crate) fn has_mapper(&self) -> bool {
        self.core().has_mapper()
    }
}

impl Locked<'_> {
    /// Puts a step of memory behind a block, if it may have some ahead of its use and has none.
    /// Whether it has what it may have.
    fn precommits(&mut self, place: &BlockPlace) -> bool {
        let id = place.slot.tenant;
        let Some(step) = self.next_step(place) else {
            return true;
        };
        // Asked first, since the figures of a refusal take a look at everything.
        if self.check_usable(id).is_err() || step > self.budget.available_to(id) {
            return false;
        }
        let outcome =
            self.with_slot_out(place.slot, |state, slot| state.place_precommit(slot, step));
        if let Some(Err(error)) = &outcome {
            tracing::debug!(%error, step, "nothing was committed ahead");
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
        self.furnish(slot, &fit)?;
        slot.space.settle(begun);
        Ok(())
    }
}

impl State {
    /// How much a block that uses all of its memory would grow by; nothing where none may be ahead.
    fn next_step(&self, place: &BlockPlace) -> Option<u64> {
        let granule = self.device.granule();
        let slot = self.slot(place.slot)?;
        let block = slot.block.as_ref()?;
        let bytes = slot.space.bytes();
        let settled =
            slot.sleep_state.is_awake() && !slot.is_busy() && !slot.broken && !slot.is_cut();
        if !settled || block.used < bytes {
            return None;
        }
        let steps = Steps::of_block(granule, block.growth, slot.class.largest);
        steps.extent(bytes, bytes, block.most)
    }
}
