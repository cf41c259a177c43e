//! Waking blocks: charged and marked first, then furnished bit by bit, and awake when all of them are.
//!
//! Memory comes by the way of an allocation: idle memory is taken back for it, hooks are asked, and
//! if it is not enough nothing has changed. A failure takes all of it out again.
//!
//! No byte is copied here.

use std::time::Instant;

use super::budget::{Amount, TenantId};
use super::commit::Fit;
use super::core::Locked;
use super::ids::SlotId;
use super::moving::{Choice, Chosen, MovingBlock, Tally};
use super::sleep_state::SleepState;
use super::slot::Slot;
use super::state::State;
use super::tenant::Tenant;
use super::wait::Wait;
use crate::error::{BlockError, MemoryError, SleepError};
use crate::own::Stream;
use crate::region::{Fence, LastWriter, wait_for};
use crate::store::{HostStore, Saved};

/// A block that is being woken. Dropped before that is done, it sleeps on, with what was kept of it.
#[derive(Debug)]
pub(crate) struct ToWake {
    moving: Option<MovingBlock>,
    /// What was kept of it.
    saved: Option<Box<Saved>>,
    /// Whether what is placed reads as zero.
    zeroed: bool,
    home: Option<Stream>,
    /// Whether the home stream has been told to zero some of it.
    filled: bool,
}

impl Tenant {
    /// Chooses the blocks that are to wake, and charges for them: waits for the memory until a moment,
    /// and as long as it is `wanted`.
    pub(crate) fn begin_wake(
        &self,
        choice: Choice<'_>,
        until: Option<Instant>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<ToWake>, SleepError> {
        let owner = self.owner();
        let (core, id) = (&owner.core, owner.tenant);
        core.device.own_process()?;
        let state = core.await_choice(core.lock(), id, choice);
        let bytes = state.asleep(id, choice);
        drop(state);
        let wait = until.map_or(Wait::Hooks, Wait::Until);
        let chosen = core.request_while(id, bytes, wait, wanted, |state| {
            let mut state = core.await_choice(state, id, choice);
            let outcome = state.mark_for_wake(id, choice);
            (state, outcome)
        });
        let chosen = chosen.map_err(|cause| SleepError::Block { bytes, cause })??;
        let to_wake = chosen.into_iter().map(|(chosen, mut to_wake)| {
            to_wake.moving = Some(MovingBlock::of(core, chosen));
            to_wake
        });
        Ok(to_wake.collect())
    }
}

impl ToWake {
    /// The block's size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.moving.as_ref().map_or(0, |moving| moving.bytes)
    }

    /// The same in whole granules.
    pub(crate) fn used(&self) -> u64 {
        self.moving.as_ref().map_or(0, |moving| moving.used)
    }

    /// Where something was kept of it.
    pub(crate) fn kept_in(&self) -> Option<HostStore> {
        self.saved.as_deref().map(Saved::store)
    }

    /// How many bytes were kept of it.
    pub(crate) fn kept(&self) -> u64 {
        self.saved.as_deref().map_or(0, Saved::bytes)
    }

    /// Where it lies and what was kept of it, to be copied there.
    pub(crate) fn contents(&mut self) -> Option<(&MovingBlock, &mut Saved)> {
        self.moving.as_ref().zip(self.saved.as_deref_mut())
    }

    /// Places all that it lacks where nothing was kept.
    pub(crate) fn furnish(&mut self) -> Result<(), BlockError> {
        let (zeroed, home) = (self.zeroed, self.home.clone());
        let Some(moving) = &self.moving else {
            return Ok(());
        };
        let mut state = moving.lock();
        let step = (moving.used, u64::MAX);
        let (_, filled) = state.furnish_next(moving.place().slot, step, home.as_ref(), zeroed)?;
        self.filled |= filled;
        Ok(())
    }

    /// It has its memory again, which shows what was kept of it.
    pub(crate) fn wake(mut self) {
        if let Some(moving) = self.moving.take() {
            let mut state = moving.lock();
            state.settle_awake(moving.place().slot, self.saved.is_some());
        }
    }
}

impl MovingBlock {
    /// Places the next extent of a block that wakes, to be copied to at once; returns up to where
    /// there is memory.
    pub(crate) fn furnish_next(&self) -> Result<u64, BlockError> {
        let mut state = self.lock();
        let largest = state.largest_under(self.place().slot);
        let step = (self.used, largest);
        let (end, _) = state.furnish_next(self.place().slot, step, None, false)?;
        Ok(end)
    }
}

impl Drop for ToWake {
    fn drop(&mut self) {
        let Some(moving) = self.moving.take() else {
            return;
        };
        // Nothing is unmapped under a fill.
        let home = self.home.take().filter(|_| self.filled);
        let filling = home.filter(|home| wait_for(home).is_err_and(|failed| !failed.ended));
        let copying = self.saved.as_deref_mut().map_or(&[][..], Saved::unfinished);
        let running = Fence::streams(filling.into_iter().chain(copying.iter().cloned()).collect());
        let mut state = moving.lock();
        state.undo_wake(moving.place().slot, self.saved.take(), running);
        drop(state);
        moving.lease.core().announce();
    }
}

impl State {
    /// Bytes that waking the chosen blocks takes.
    fn asleep(&self, id: TenantId, choice: Choice<'_>) -> u64 {
        let sleepers = self.choose(id, choice, |sleep_state| {
            matches!(sleep_state, SleepState::Asleep { .. })
        });
        let slots = sleepers.iter().filter_map(|&slot| self.slot(slot));
        slots
            .filter_map(|slot| Some(slot.block.as_ref()?.used))
            .sum()
    }

    /// The largest extent that may lie under a block.
    fn largest_under(&self, id: SlotId) -> u64 {
        let slot = self.slot(id);
        slot.map_or(self.policy.largest_extent, |slot| slot.class.largest)
    }
}

impl Locked<'_> {
    /// Charges for the chosen blocks of a tenant that sleep, and marks them as moving.
    fn mark_for_wake(
        &mut self,
        id: TenantId,
        choice: Choice<'_>,
    ) -> Result<Result<Vec<(Chosen, ToWake)>, SleepError>, BlockError> {
        // The lock may be let go while room is made: then everything is asked again.
        let mut total = None;
        loop {
            if self.capturing > 0 {
                return Ok(Err(MemoryError::Capturing.into()));
            }
            self.check_usable(id)?;
            let mut busy = self.busy(id, choice, false);
            let moving = self.choose(id, choice, |sleep_state| {
                matches!(sleep_state, SleepState::Moving { .. })
            });
            for slot in moving.iter().filter_map(|&slot| self.slot(slot)) {
                busy.add(slot);
            }
            if busy.blocks > 0 {
                let Tally { blocks, bytes } = busy;
                return Ok(Err(SleepError::Busy { blocks, bytes }));
            }
            let asleep = self.asleep(id, choice);
            let has_room = total == Some(asleep) && self.budget.missing(id, asleep).1 == 0;
            if asleep == 0 || has_room {
                // Each block owes its part of it.
                self.budget.charge(Some(id), Amount::bytes(asleep)).keep();
                break;
            }
            self.make_room(id, asleep)?;
            total = Some(asleep);
        }
        let sleepers = self.choose(id, choice, |sleep_state| {
            matches!(sleep_state, SleepState::Asleep { .. })
        });
        let marked = sleepers
            .into_iter()
            .filter_map(|slot| self.mark_one_for_wake(slot));
        Ok(Ok(marked.collect()))
    }

    /// Marks a sleeping block that was charged for as moving.
    fn mark_one_for_wake(&mut self, id: SlotId) -> Option<(Chosen, ToWake)> {
        let slot = self.slot_mut(id)?;
        let block = slot.block.as_ref()?;
        let (zeroed, home, owed) = (block.zeroed, block.home.clone(), block.used);
        let saved = match &mut slot.sleep_state {
            SleepState::Asleep { saved } => saved.take(),
            _ => None,
        };
        let chosen = self.mark(id, SleepState::moving(owed))?;
        let to_wake = ToWake {
            moving: None,
            saved,
            zeroed,
            home,
            filled: false,
        };
        Some((chosen, to_wake))
    }

    /// Places what a moving block of `used` bytes lacks, at most one extent of `most` bytes or all;
    /// returns up to where there is memory, and whether the home stream zeroes some of it.
    fn furnish_next(
        &mut self,
        id: SlotId,
        (used, most): (u64, u64),
        home: Option<&Stream>,
        zeroed: bool,
    ) -> Result<(u64, bool), BlockError> {
        let furnished = self.with_slot_out(id, |state, slot| {
            let left = used.saturating_sub(slot.space.bytes());
            let bytes = match most {
                u64::MAX => left,
                most => state.device.granule().extent_within(left, most),
            };
            let filled = state.furnish_moving(slot, bytes, home, zeroed)?;
            Ok((slot.space.bytes(), filled))
        });
        furnished.unwrap_or(Ok((used, false)))
    }

    /// Places bytes that were charged behind those of a moving block's slot, with no other tenant's
    /// data in them.
    fn furnish_moving(
        &mut self,
        slot: &mut Slot,
        bytes: u64,
        home: Option<&Stream>,
        zeroed: bool,
    ) -> Result<bool, BlockError> {
        if bytes == 0 {
            return Ok(false);
        }
        let begun = slot.space.bytes();
        Self::check_free(slot, begun, bytes)?;
        self.place(slot, begun, bytes, true)?;
        if let SleepState::Moving { owed, .. } = &mut slot.sleep_state {
            *owed = owed.saturating_sub(bytes);
        }
        let fit = Fit {
            zeros: None,
            ..Fit::new(begun + bytes, home, zeroed)
        };
        let cleansed = self.cleanse(slot, begun, &fit);
        // What was kept of the block is copied there next, and may not reach another tenant.
        let by = match cleansed {
            Ok(_) => slot.id.tenant.0,
            // It holds what another tenant wrote still.
            Err(_) => LastWriter::SEVERAL,
        };
        slot.space.note_writer(begun, begun + bytes, by);
        cleansed.map_err(|unfinished| {
            // The roll-back takes out what it can.
            if let SleepState::Moving { filling, .. } = &mut slot.sleep_state {
                filling.merge(unfinished.running);
            }
            unfinished.error
        })
    }

    /// A moving block has all its memory.
    fn settle_awake(&mut self, id: SlotId, restored: bool) {
        self.with_slot(id, |state, slot| {
            slot.sleep_state = SleepState::Awake;
            slot.touched = state.tick();
            slot.space.settle(0);
            let bytes = slot.space.bytes();
            if let Some(block) = &mut slot.block {
                block.reach = bytes;
                block.noted = slot.space.note_writer(0, block.used, id.tenant.0);
                if restored && block.zeroed {
                    // What the last granule holds behind what was kept is not zero for certain.
                    block.ever = block.ever.max(block.used);
                }
            }
        });
        self.update_bypass(id.tenant);
    }

    /// A moving block is to sleep on: what it was given and what was charged go back. What a stream
    /// may still be filling or copying to stays where it is, and is quarantined.
    fn undo_wake(&mut self, id: SlotId, saved: Option<Box<Saved>>, mut running: Fence) {
        self.with_slot_out(id, |state, slot| {
            if let SleepState::Moving { filling, .. } = &slot.sleep_state {
                running.merge(filling.clone());
            }
            state.uncommit(slot, 0, &running);
            slot.fence.merge(running);
            let beside = Amount::bytes(slot.sleep_state.beside());
            state.budget.give_up(id.tenant, beside);
            slot.lies_down(saved);
        });
        self.update_bypass(id.tenant);
    }
}
