//! Waking blocks: they are charged for and marked, then given their memory extent by extent, and
//! awake when all of them have it.
//!
//! Memory is obtained as for an allocation. A failure takes all memory out again.
//!
//! No byte is copied here.
//!
//! Keeps I-52.

use super::arrivals::{Arrival, Fitted, Offers};
use super::moving::{Choice, Chosen, TransitioningBlock};
use crate::error::{BlockError, MemoryError, SleepError};
use crate::extents::{Fence, LastWriter, wait_for};
use crate::own::Stream;
use crate::pool::accounts::{Amount, Missing, TenantId};
use crate::pool::blocks::slots::{SleepState, Slot, SlotId};
use crate::pool::blocks::{Blocks, Fit};
use crate::pool::core::Locked;
use crate::pool::holders::{Lending, Lent};
use crate::pool::line::Wait;
use crate::pool::supply::Room;
use crate::pool::tenant::Tenant;
use crate::store::{HostStore, Saved};
use crate::wanted::Purpose;

/// A block that wakes. If this value is dropped before that, the block sleeps on, with the contents
/// that were kept.
#[derive(Debug)]
pub(crate) struct ToWake {
    pub(super) moving: Option<TransitioningBlock>,
    pub(super) saved: Option<Box<Saved>>,
    /// Memory of blocks that fall asleep, which this block gets.
    pub(super) arrivals: Vec<Arrival>,
    /// The streams of copies that may still use that memory.
    pub(super) running: Vec<Stream>,
    zeroed: bool,
    home: Option<Stream>,
    /// `true` if work that zeroes some of the memory is queued on the home stream.
    filled: bool,
}

impl Tenant {
    pub(crate) fn room(&self, bytes: u64) -> Room<'_> {
        self.owner().core.room(bytes)
    }

    /// Chooses blocks to wake, charges for them and marks them, and lends memory to holders that
    /// wake with them: all or nothing. Blocks get what is offered as far as it fits, and its charge
    /// with it. Waits for other memory as `wait` says, while `wanted` returns
    /// `true`.
    pub(crate) fn begin_wake(
        &self,
        choice: Choice<'_>,
        (offers, holders): (&Offers, &[Lending<'_>]),
        wait: Wait,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(Vec<ToWake>, Lent), SleepError> {
        let owner = self.owner();
        let (core, id) = (&owner.core, owner.tenant);
        core.device.own_process()?;
        let state = core.await_choice(core.lock(), id, choice);
        let lent: u64 = holders.iter().map(Lending::bytes).sum();
        let fitted = state.blocks.fit(id, choice, offers);
        let bytes = state.blocks.asleep(id, choice) - fitted.bytes() + lent;
        drop((state, fitted));
        let chosen = core.request_while(id, bytes, wait, wanted, |state| {
            let mut state = core.await_choice(state, id, choice);
            let mark = |state: &mut Locked<'_>| state.mark_for_wake(id, choice, offers);
            let outcome = state.lend_and(holders, mark);
            (state, outcome)
        });
        let (chosen, lent) = chosen.map_err(|cause| SleepError::Block { bytes, cause })??;
        let to_wake = chosen.into_iter().map(|(chosen, mut to_wake)| {
            to_wake.moving = Some(TransitioningBlock::of(core, chosen));
            to_wake
        });
        Ok((to_wake.collect(), lent))
    }
}

impl ToWake {
    pub(crate) fn bytes(&self) -> u64 {
        self.moving.as_ref().map_or(0, |moving| moving.bytes)
    }

    pub(crate) fn used(&self) -> u64 {
        self.moving.as_ref().map_or(0, |moving| moving.used)
    }

    pub(crate) fn kept_in(&self) -> Option<HostStore> {
        self.saved.as_deref().map(Saved::store)
    }

    pub(crate) fn kept(&self) -> u64 {
        self.saved.as_deref().map_or(0, Saved::bytes)
    }

    /// Returns `true` if the saved contents are not all those from the first byte on.
    pub(crate) fn is_kept_in_part(&self) -> bool {
        let saved = self.saved.as_deref();
        saved.is_some_and(|saved| !saved.has_all(saved.bytes()))
    }

    /// Returns the block, its saved contents, and `true` if memory beside them must read as zero.
    pub(crate) fn contents(&mut self) -> Option<(&TransitioningBlock, &mut Saved, bool)> {
        let (moving, saved) = self.moving.as_ref().zip(self.saved.as_deref_mut())?;
        let zeroed = self.zeroed && !saved.has_all(moving.bytes);
        Some((moving, saved, zeroed))
    }

    /// Places all memory that the block lacks, for a block without contents. Uses the waking's
    /// `room`.
    pub(crate) fn place_memory(&mut self, room: &mut Room<'_>) -> Result<(), BlockError> {
        let (zeroed, home) = (self.zeroed, self.home.clone());
        let Some(moving) = &self.moving else {
            return Ok(());
        };
        let mut state = moving.lock();
        state.room.take_from(room);
        let place = moving.place().slot;
        let furnished = state.furnish_next(place, (moving.used, false), home.as_ref(), zeroed);
        room.take_from(&mut state.room);
        self.filled |= furnished?.1;
        Ok(())
    }

    /// Ends the move: the block has its memory and contents again.
    pub(crate) fn wake(mut self) {
        if let Some(moving) = self.moving.take() {
            let restored = self.saved.is_some();
            let place = moving.place().slot;
            moving.lock().blocks.settle_awake(place, restored);
        }
    }
}

impl TransitioningBlock {
    /// Places the next extent, to be copied to at once, and zeroes it if `zeroed`; returns the offset
    /// up to which there is memory.
    pub(crate) fn furnish_next(&self, zeroed: bool) -> Result<u64, BlockError> {
        let mut state = self.lock();
        let place = self.place().slot;
        let (end, _) = state.furnish_next(place, (self.used, true), None, zeroed)?;
        Ok(end)
    }
}

impl Drop for ToWake {
    fn drop(&mut self) {
        let Some(moving) = self.moving.take() else {
            return;
        };
        // Memory is not unmapped under a fill.
        let home = self.home.take().filter(|_| self.filled);
        let filling = home.filter(|home| wait_for(home).is_err_and(|failed| !failed.ended));
        let copying = self.saved.as_deref_mut().map_or(&[][..], Saved::unfinished);
        let copying = copying.iter().chain(&self.running).cloned();
        let running = Fence::streams(filling.into_iter().chain(copying).collect());
        moving.return_arrivals(std::mem::take(&mut self.arrivals), &running);
        let mut state = moving.lock();
        let saved = self.saved.take().filter(|saved| saved.bytes() > 0);
        state.undo_wake(moving.place().slot, saved, running);
        drop(state);
        moving.lease.core().announce();
    }
}

impl Blocks {
    fn asleep(&self, id: TenantId, choice: Choice<'_>) -> u64 {
        let sleepers = self.choose(id, choice, SleepState::is_asleep);
        let used = |&id: &SlotId| Some(self.slots.get(id)?.block.as_ref()?.used);
        sleepers.iter().filter_map(used).sum()
    }

    /// Marks blocks whose charge is there, with the memory that is passed on to them.
    fn mark_fitted(&mut self, fitted: Fitted) -> Vec<(Chosen, ToWake)> {
        let marked = fitted.into_iter().filter_map(|(slot, arrivals)| {
            for arrival in &arrivals {
                self.note_passed(arrival.from, arrival.size);
            }
            let (chosen, mut to_wake) = self.mark_one_for_wake(slot)?;
            to_wake.arrivals = arrivals;
            Some((chosen, to_wake))
        });
        marked.collect()
    }

    fn mark_one_for_wake(&mut self, id: SlotId) -> Option<(Chosen, ToWake)> {
        let slot = self.slots.get_mut(id)?;
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
            arrivals: Vec::new(),
            running: Vec::new(),
            zeroed,
            home,
            filled: false,
        };
        Some((chosen, to_wake))
    }

    fn settle_awake(&mut self, id: SlotId, restored: bool) {
        let now = self.tick();
        self.with_slot(id, |slot| {
            slot.sleep_state = SleepState::Awake;
            slot.touched = now;
            slot.space.settle(0);
            let bytes = slot.space.bytes();
            if let Some(block) = &mut slot.block {
                block.reach = bytes;
                block.noted = slot.space.note_writer(0, block.used, id.tenant.0);
                if restored && block.zeroed {
                    // The bytes of the last granule behind the contents are not known to be zero.
                    block.ever = block.ever.max(block.used);
                }
            }
        });
        self.update_bypass(id.tenant);
    }
}

impl Locked<'_> {
    /// Charges for the chosen blocks of a tenant that sleep, and marks them as moving.
    fn mark_for_wake(
        &mut self,
        id: TenantId,
        choice: Choice<'_>,
        offers: &Offers,
    ) -> Result<Result<Vec<(Chosen, ToWake)>, SleepError>, BlockError> {
        // The lock may be released while room is made: then all is checked again.
        let mut total = None;
        loop {
            if self.memory.gate.is_capturing() {
                return Ok(Err(MemoryError::Capturing.into()));
            }
            self.memory.check_usable(id)?;
            let mut busy = self.blocks.busy(id, choice, false);
            let moving = |state: &SleepState| !state.is_awake() && !state.is_asleep();
            for id in self.blocks.choose(id, choice, moving) {
                self.blocks.slots.get(id).inspect(|slot| busy.add(slot));
            }
            let none = busy.none_or(|blocks, bytes| SleepError::Busy { blocks, bytes });
            if let Err(busy) = none {
                return Ok(Err(busy));
            }
            let asleep = self.blocks.asleep(id, choice);
            let fitted = self.blocks.fit(id, choice, offers);
            let from = fitted.givers();
            let Missing { own, all, beside } = self.memory.budget.missing_beside(&from, id, asleep);
            let fits_now = total == Some(asleep) && all == 0;
            self.leave_to_others(id, beside)?;
            if asleep == 0 || fits_now {
                // Each block owes its part of the charge.
                self.memory.budget.pass_on(&from, id);
                let rest = asleep - fitted.bytes();
                let charge = self.memory.budget.charge(Some(id), Amount::bytes(rest));
                self.memory.budget.keep(charge);
                return Ok(Ok(self.blocks.mark_fitted(fitted)));
            }
            let needed = match own {
                0 => beside,
                _ => asleep,
            };
            self.reclaim_for(id, needed, Purpose::New)?;
            total = Some(asleep);
        }
    }

    /// Places memory that a moving block of `used` bytes lacks, all of it or `one` extent. Returns
    /// the offset up to which there is memory, and `true` if the home stream zeroes some of it.
    fn furnish_next(
        &mut self,
        id: SlotId,
        (used, one): (u64, bool),
        home: Option<&Stream>,
        zeroed: bool,
    ) -> Result<(u64, bool), BlockError> {
        let furnished = self.with_slot_out(id, |state, slot| {
            let begun = slot.space.bytes();
            let granule = state.memory.device.granule();
            let lacking = slot.class.sizes.cover(granule, begun..used);
            let bytes = lacking.take(if one { 1 } else { usize::MAX }).sum();
            let filled = state.furnish_moving(slot, bytes, home, zeroed)?;
            Ok((slot.space.bytes(), filled))
        });
        furnished.unwrap_or(Ok((used, false)))
    }

    /// Places charged bytes behind the memory of a moving block's slot, and removes other tenants'
    /// data from them.
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
        self.place_owed(slot, begun, bytes)?;
        let fit = Fit {
            zeros: None,
            ..Fit::new(begun + bytes, home, zeroed)
        };
        let scrubbed_stale = self.scrub_stale(slot, begun, &fit);
        // The kept contents are copied there next, and must not reach another tenant.
        let by = match scrubbed_stale {
            Ok(_) => slot.id.tenant.0,
            // The memory still holds data that another tenant wrote.
            Err(_) => LastWriter::SEVERAL,
        };
        slot.space.note_writer(begun, begun + bytes, by);
        scrubbed_stale.map_err(|unfinished| {
            // The roll-back takes out the memory that it can.
            if let SleepState::Moving { filling, .. } = &mut slot.sleep_state {
                filling.merge(unfinished.running);
            }
            unfinished.error
        })
    }

    /// Lets a moving block sleep on: its memory and its charge go back. Memory that a stream may
    /// still be filling or copying to stays in place, and is quarantined.
    fn undo_wake(&mut self, id: SlotId, saved: Option<Box<Saved>>, mut running: Fence) {
        self.with_slot_out(id, |state, slot| {
            if let SleepState::Moving { filling, .. } = &slot.sleep_state {
                running.merge(filling.clone());
            }
            state.uncommit(slot, 0, &running);
            slot.fence.merge(running);
            let beside = Amount::bytes(slot.sleep_state.beside());
            state.memory.budget.give_up(id.tenant, beside);
            slot.set_asleep(saved);
        });
        self.blocks.update_bypass(id.tenant);
    }
}
