//! Putting blocks to sleep: blocks are chosen and marked, their memory is taken out and put aside,
//! and then given up.
//!
//! Memory put aside is still charged, so that a failure can put it back. When the memory of all
//! blocks has been taken out, it goes to the pool. If sleeping fails and a block's memory cannot be
//! put back, that block sleeps, with its saved contents.
//!
//! No byte is copied here.
//!
//! Keeps I-50, I-51 and I-91.

mod arrivals;
mod exchange;
mod kept;
mod marks;
mod moving;
mod wake;

use std::time::Instant;

use cuvmm_driver::DeviceAddress;

use self::moving::{Chosen, Tally};
use crate::error::{CallError, MemoryError, SleepError};
use crate::own::Stream;
use crate::pool::accounts::TenantId;
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{SleepState, Slot, SlotId};
use crate::pool::core::Locked;
use crate::pool::gate::Gate;
use crate::pool::memory::Memory;
use crate::pool::tenant::Tenant;
use crate::store::Saved;

pub(crate) use arrivals::Offers;
pub(crate) use exchange::settle_exchange;
pub(crate) use moving::{Choice, GivenUp, TransitioningBlock};
pub(crate) use wake::ToWake;

/// A block that falls asleep. Dropping the value before that leaves the block as it was.
#[derive(Debug)]
pub(crate) struct ToSleep {
    moving: Option<TransitioningBlock>,
    /// The memory that the contents are saved in, if they are kept.
    saved: Option<Box<Saved>>,
    /// Memory of the block belongs to others by now: it can only sleep.
    passed: bool,
}

impl Tenant {
    /// Chooses blocks to sleep and marks them, once all work that may use them is complete. Waits
    /// for the work until `until`, and while `wanted` returns `true`.
    pub(crate) fn begin_sleep(
        &self,
        choice: Choice<'_>,
        until: Option<Instant>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<ToSleep>, SleepError> {
        let owner = self.owner();
        let (core, id) = (&owner.core, owner.tenant);
        core.device.own_process()?;
        let chosen = core.until(
            until,
            |state| {
                let mut state = core.await_choice(state, id, choice);
                let (memory, blocks) = state.halves();
                let outcome = blocks.mark_for_sleep(memory, id, choice);
                (state, outcome)
            },
            |error| {
                let waits = matches!(error, SleepError::Leased { .. } | SleepError::Busy { .. });
                waits && wanted()
            },
        )?;
        let to_sleep = chosen.into_iter().map(|chosen| ToSleep {
            moving: Some(TransitioningBlock::of(core, chosen)),
            saved: None,
            passed: false,
        });
        Ok(to_sleep.collect())
    }
}

impl ToSleep {
    pub(crate) fn bytes(&self) -> u64 {
        self.moving.as_ref().map_or(0, |moving| moving.bytes)
    }

    pub(crate) fn address(&self) -> Option<DeviceAddress> {
        self.moving.as_ref().map(TransitioningBlock::address)
    }

    pub(crate) fn keep_in(&mut self, saved: Saved) {
        self.saved = Some(Box::new(saved));
    }

    pub(crate) fn contents(&mut self) -> Option<(&TransitioningBlock, &mut Saved)> {
        self.moving.as_ref().zip(self.saved.as_deref_mut())
    }

    /// Takes the memory out. Its contents are lost if the block sleeps.
    pub(crate) fn withdraw(&self) -> Result<(), SleepError> {
        let withdraw = |moving: &TransitioningBlock| moving.withdraw(false);
        self.moving.as_ref().map_or(Ok(()), withdraw)
    }

    pub(crate) fn sleep(mut self, release: bool) -> GivenUp {
        let Some(moving) = self.moving.take() else {
            return GivenUp::default();
        };
        let mut state = moving.lock();
        let given = state.settle_asleep(moving.place().slot, self.saved.take(), release);
        drop(state);
        moving.lease.core().announce();
        given
    }

    /// Puts the memory back in its place. Returns `false` if that failed: the block then sleeps.
    pub(crate) fn stay(mut self) -> bool {
        self.put_back()
    }

    /// Lets the block sleep whose memory may hold bytes of other blocks: with its contents, if they
    /// are `kept`.
    pub(crate) fn give_up(mut self, kept: bool) {
        self.sleep_now(kept);
    }

    fn sleep_now(&mut self, kept: bool) {
        let Some(moving) = self.moving.take() else {
            return;
        };
        let reading = self.saved.as_deref_mut().map_or(&[][..], Saved::unfinished);
        let mut state = moving.lock();
        state.blocks.is_read_on(moving.place().slot, reading);
        let saved = self.saved.take().filter(|_| kept);
        state.give_up_all(moving.place().slot, saved);
        drop(state);
        moving.lease.core().announce();
    }

    fn put_back(&mut self) -> bool {
        if self.passed {
            self.sleep_now(true);
            return false;
        }
        let Some(moving) = self.moving.take() else {
            return true;
        };
        let reading = self.saved.as_deref_mut().map_or(&[][..], Saved::unfinished);
        let mut state = moving.lock();
        state.blocks.is_read_on(moving.place().slot, reading);
        state.restore(moving.place().slot, self.saved.take())
    }
}

impl TransitioningBlock {
    /// Takes the memory out, of which a copy was made.
    pub(crate) fn withdraw_copied(&self) -> Result<(), SleepError> {
        self.withdraw(true)
    }

    fn withdraw(&self, copied: bool) -> Result<(), SleepError> {
        self.lock().withdraw_all(self.place().slot, copied)
    }
}

impl Drop for ToSleep {
    fn drop(&mut self) {
        self.put_back();
    }
}

impl Blocks {
    /// Marks the chosen blocks of a tenant that are awake as moving, if nothing prevents it.
    fn mark_for_sleep(
        &mut self,
        memory: &mut Memory,
        id: TenantId,
        choice: Choice<'_>,
    ) -> Result<Vec<Chosen>, SleepError> {
        if memory.gate.is_capturing() {
            return Err(MemoryError::Capturing.into());
        }
        memory.device.usable()?;
        // A stream cache hands blocks on unchanged, so it may contain no sleeping block.
        if let Some(tenancy) = self.slots.of(id) {
            tenancy.unswept.bypass(true);
            let freed = tenancy.unswept.sweep_each();
            self.free_all(&freed);
        }
        let outcome = self.mark_all_for_sleep(&mut memory.gate, id, choice);
        self.update_bypass(id);
        outcome
    }

    fn mark_all_for_sleep(
        &mut self,
        gate: &mut Gate,
        id: TenantId,
        choice: Choice<'_>,
    ) -> Result<Vec<Chosen>, SleepError> {
        let chosen = self.choose(id, choice, |sleep_state| !sleep_state.is_asleep());
        let (mut leased, mut exported) = (Tally::default(), Tally::default());
        let mut busy = self.busy(id, choice, true);
        let Some(tenancy) = self.slots.of_mut(id) else {
            return Ok(Vec::new());
        };
        // All fences are stamped before the first is polled: one event then covers them all.
        for id in &chosen {
            let slot = tenancy.slot_mut(id.index);
            if let Some(slot) = slot.filter(|slot| slot.sleep_state.is_awake()) {
                slot.fence_work();
            }
        }
        for id in &chosen {
            let Some(slot) = tenancy.slot_mut(id.index) else {
                continue;
            };
            if !slot.sleep_state.is_awake() {
                busy.add(slot);
            } else if slot.exported && slot.space.exported().next().is_some() {
                // The end of its leases, such as that of an offer, would not let it sleep.
                exported.add(slot);
            } else if slot.leases > 0 {
                leased.add(slot);
            } else if slot.is_busy() || slot.pinned || !gate.poll(&mut slot.fence)? {
                busy.add(slot);
            }
        }
        exported.none_or(|blocks, bytes| SleepError::Exported { blocks, bytes })?;
        leased.none_or(|blocks, bytes| SleepError::Leased { blocks, bytes })?;
        busy.none_or(|blocks, bytes| SleepError::Busy { blocks, bytes })?;
        let marked = chosen
            .into_iter()
            .filter_map(|id| self.mark(id, SleepState::moving(0)));
        Ok(marked.collect())
    }

    /// Notes copies out of a moving block that may still be running.
    fn is_read_on(&mut self, id: SlotId, streams: &[Stream]) {
        let Some(slot) = self.slots.get_mut(id) else {
            return;
        };
        for stream in streams {
            slot.is_read_on(stream);
        }
    }
}

impl Locked<'_> {
    fn withdraw_all(&mut self, id: SlotId, copied: bool) -> Result<(), SleepError> {
        let outcome = self.with_slot_out(id, |state, slot| {
            state.check_unused(slot, copied)?;
            state.unlocked(|| slot.empty())
        });
        outcome.unwrap_or(Ok(()))
    }

    /// Checks that no lease lives that was taken since the block was marked, and that no work
    /// queued under such a lease may use the memory. If a copy of it was made, checks that no such
    /// lease was taken: what its holder has written may not be in the copy.
    fn check_unused(&mut self, slot: &mut Slot, copied: bool) -> Result<(), SleepError> {
        let mut tally = Tally::default();
        tally.add(slot);
        let Tally { blocks, bytes } = tally;
        // The operation that moves the block has one lease.
        if slot.leases > 1 || (copied && slot.sleep_state.was_leased()) {
            return Err(SleepError::Leased { blocks, bytes });
        }
        match self.memory.gate.poll(&mut slot.fence)? {
            true => Ok(()),
            false => Err(SleepError::Busy { blocks, bytes }),
        }
    }

    fn settle_asleep(&mut self, id: SlotId, saved: Option<Box<Saved>>, release: bool) -> GivenUp {
        let free_list = self.memory.supply.free();
        let given = self.with_slot_out(id, |state, slot| {
            let SleepState::Moving { aside, .. } = &mut slot.sleep_state else {
                return 0;
            };
            let mut aside = std::mem::take(aside);
            aside.settle();
            let given = state.abandon(slot, aside);
            slot.set_asleep(saved);
            given
        });
        self.blocks.update_bypass(id.tenant);
        self.gave_up(given.unwrap_or(0), free_list, release)
    }

    /// Lets a block that falls asleep sleep, and gives up all its memory.
    fn give_up_all(&mut self, id: SlotId, saved: Option<Box<Saved>>) {
        self.with_slot_out(id, |state, slot| {
            let fence = slot.fence.clone();
            state.uncommit(slot, 0, &fence);
            if let SleepState::Moving { aside, .. } = &mut slot.sleep_state {
                let mut aside = std::mem::take(aside);
                aside.settle();
                state.abandon(slot, aside);
            }
            slot.set_asleep(saved);
        });
        self.blocks.update_bypass(id.tenant);
    }

    /// Puts the memory back. If that fails the block sleeps, with its saved contents.
    fn restore(&mut self, id: SlotId, saved: Option<Box<Saved>>) -> bool {
        let stays = self.with_slot_out(id, |state, slot| {
            let SleepState::Moving { aside, .. } = &mut slot.sleep_state else {
                return true;
            };
            let aside = std::mem::take(aside);
            // The part that was put back is of no use without the rest.
            let restored = state.unlocked(|| {
                let put_back = slot.space.put_back(aside);
                put_back.map_err(|lost| lost.with_all_of(&mut slot.space, &slot.fence))
            });
            let Err(lost) = restored else {
                slot.sleep_state = SleepState::Awake;
                return true;
            };
            let error = state.lose(slot, lost);
            log!(error, %error, "a block that should have stayed awake sleeps");
            slot.set_asleep(saved);
            false
        });
        self.blocks.update_bypass(id.tenant);
        stays.unwrap_or(true)
    }
}

impl Slot {
    fn empty(&mut self) -> Result<(), SleepError> {
        if let SleepState::Moving { aside, .. } = &mut self.sleep_state {
            let offsets = self.space.extents().rev().map(|extent| extent.offset);
            let offsets: Vec<u64> = offsets.collect();
            let completed = self.fence.completed(&mut self.space);
            completed
                .ok_or(CallError::InUse)?
                .take_out(offsets, aside)?;
        }
        Ok(())
    }

    fn set_asleep(&mut self, saved: Option<Box<Saved>>) {
        // The memory that the block wakes to is its own.
        self.lent = 0;
        // The block may have been dropped meanwhile.
        self.sleep_state = match self.block {
            Some(_) => SleepState::Asleep { saved },
            None => SleepState::Awake,
        };
    }
}
