//! Exchange: blocks that fall asleep [pass memory](super::arrivals) on to blocks that wake.
//!
//! No byte is copied here.
//!
//! Keeps I-93.

use std::panic::resume_unwind;
use std::thread;

use super::arrivals::{Arrival, Offers};
use super::{ToSleep, ToWake};
use crate::error::{BlockError, CallError, SleepError};
use crate::extents::{LastWriter, TakenOut};
use crate::own::Stream;
use crate::pool::blocks::slots::{SleepState, Slot, SlotId};
use crate::store::{HostStore, Saved};

impl ToSleep {
    /// Offers the memory of the block for an exchange.
    pub(crate) fn offer_to(&self, offers: &mut Offers) {
        let Some(moving) = &self.moving else {
            return;
        };
        let id = moving.place().slot;
        let state = moving.lock();
        let slot = state.blocks.slots.get(id);
        slot.into_iter().for_each(|slot| offers.add(slot));
    }

    /// Returns `true` if the memory comes from this block.
    pub(crate) fn gives(&self, arrival: &Arrival) -> bool {
        let moving = self.moving.as_ref();
        moving.is_some_and(|moving| moving.place().slot == arrival.from)
    }

    /// Unmaps memory of the block, of which others may have mappings: the extents at these offsets,
    /// or all that are left. If a copy was made, the block must not have been leased since.
    pub(crate) fn withdraw_at(
        &self,
        offsets: Option<Vec<u64>>,
        copied: bool,
    ) -> Result<(), SleepError> {
        let Some(moving) = &self.moving else {
            return Ok(());
        };
        let mut state = moving.lock();
        let outcome: Option<Result<_, SleepError>> =
            state.with_slot_out(moving.place().slot, |state, slot| {
                state.check_unused(slot, copied)?;
                let passes = offsets.is_some();
                let all = || slot.space.extents().rev().map(|extent| extent.offset);
                let offsets = offsets.unwrap_or_else(|| all().collect());
                Ok(state.unlocked(|| take_out(slot, offsets, passes)))
            });
        drop(state);
        match outcome.transpose()?.unwrap_or(Ok(Ok(()))) {
            Ok(taken) => Ok(taken?),
            // By now the slot is in its place.
            Err(panic) => resume_unwind(panic),
        }
    }
}

/// Takes memory out of a slot. What `passes` on may have bytes of any block when it comes back.
fn take_out(
    slot: &mut Slot,
    offsets: Vec<u64>,
    passes: bool,
) -> thread::Result<Result<(), CallError>> {
    let SleepState::Moving { aside, .. } = &mut slot.sleep_state else {
        return Ok(Ok(()));
    };
    let mut taken = TakenOut::default();
    let outcome = match slot.fence.completed(&mut slot.space) {
        Some(mut completed) => completed.try_take_out(offsets, &mut taken),
        None => Ok(Err(CallError::InUse)),
    };
    if passes {
        taken.note_writer(LastWriter::SEVERAL);
    }
    aside.append(taken);
    outcome
}

impl ToWake {
    pub(crate) fn arrivals(&self) -> &[Arrival] {
        &self.arrivals
    }

    /// Returns the bytes of the memory that the block gets from others: its first ones.
    pub(crate) fn arriving(&self) -> u64 {
        self.arrivals.iter().map(|arrival| arrival.size).sum()
    }

    /// Notes copies that may still use the memory.
    pub(crate) fn is_used_on(&mut self, streams: &[Stream]) {
        self.running.extend_from_slice(streams);
    }

    /// Gives a block without kept contents empty ones, so that copies can be noted there.
    pub(crate) fn keep_nothing_in(&mut self, store: &HostStore) {
        self.saved
            .get_or_insert_with(|| Box::new(Saved::nothing(store)));
    }

    /// Maps the memory that comes from other blocks, and places all that is lacking behind it.
    pub(crate) fn place_all(&mut self) -> Result<(), BlockError> {
        let Some(moving) = &self.moving else {
            return Ok(());
        };
        let id = moving.place().slot;
        let arrivals = &mut self.arrivals;
        let mut state = moving.lock();
        let placed = state.with_slot_out(id, |state, slot| {
            if let Err(outcome) = state.map_arrivals(slot, arrivals) {
                return outcome;
            }
            let begun = arrivals.iter().map(|arrival| arrival.size).sum();
            let placed = match moving.used().saturating_sub(begun) {
                0 => Ok(()),
                bytes => state.place_owed(slot, begun, bytes),
            };
            if placed.is_ok() {
                // The exchange overwrites or clears it.
                let by = LastWriter::SEVERAL;
                slot.space.note_writer(begun, moving.used(), by);
            }
            Ok(placed)
        });
        drop(state);
        // By now the slot is in its place.
        placed
            .unwrap_or(Ok(Ok(())))
            .unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Ends the exchange for the memory that passes: it belongs to the blocks that wake.
pub(crate) fn settle_exchange(to_sleep: &mut [ToSleep], to_wake: &mut [ToWake]) {
    let moving = |one: &'_ ToWake| one.moving.as_ref().map(|moving| moving.place().slot);
    let Some(first) = to_wake.iter().find_map(|one| one.moving.as_ref()) else {
        return;
    };
    let core = first.lease.core().clone();
    let sleeping = to_sleep.iter().filter_map(|one| one.moving.as_ref());
    let sleeping = sleeping.map(|moving| moving.place().slot);
    let all: Vec<SlotId> = to_wake.iter().filter_map(moving).chain(sleeping).collect();
    let mut state = core.await_slots(core.lock(), all.into_iter().map(|id| (id, 0)));
    let (memory, blocks) = state.halves();
    to_sleep.iter_mut().for_each(|one| one.passed = true);
    for one in to_wake {
        let Some(id) = moving(one) else {
            continue;
        };
        for arrival in std::mem::take(&mut one.arrivals) {
            blocks.leave_behind(&mut memory.budget, &arrival);
            blocks.arrive(id, arrival);
        }
    }
}
