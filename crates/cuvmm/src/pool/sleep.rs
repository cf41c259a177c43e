//! Putting blocks to sleep: chosen and marked, taken out and put aside, given up.
//!
//! What was put aside is charged still, so that a failure can put back what was there; when all
//! blocks' memory has been taken out it is the pool's. Where the memory cannot be put back either, the
//! block sleeps, with what was kept of it.
//!
//! No byte is copied here.

use std::time::Instant;

use super::budget::TenantId;
use super::locked::Locked;
use super::moving::{Choice, Chosen, MovingBlock, Tally};
use super::sleep_state::{Aside, SleepState};
use super::slot::{Slot, SlotId};
use super::state::State;
use super::tenant::Tenant;
use crate::error::{CallError, SleepError};
use crate::own::Stream;
use crate::region::{Fence, Unmapped, Unused};
use crate::store::Saved;

/// A block that is being put to sleep. Dropped before that is done, it is as it was.
#[derive(Debug)]
pub(crate) struct ToSleep {
    moving: Option<MovingBlock>,
    /// Room for its contents.
    saved: Option<Box<Saved>>,
}

impl Tenant {
    /// Chooses the blocks that are to sleep, all behind the work that may use them.
    pub(crate) fn begin_sleep(
        &self,
        choice: Choice<'_>,
        until: Option<Instant>,
    ) -> Result<Vec<ToSleep>, SleepError> {
        let owner = self.owner();
        let (core, id) = (&owner.core, owner.tenant);
        core.device.own_process()?;
        let chosen = core.until(
            until,
            |state| {
                let mut state = core.await_choice(state, id, choice);
                let outcome = state.mark_for_sleep(id, choice);
                (state, outcome)
            },
            |error| matches!(error, SleepError::Leased { .. } | SleepError::Busy { .. }),
        )?;
        let to_sleep = chosen.into_iter().map(|chosen| ToSleep {
            moving: Some(MovingBlock::of(core, chosen)),
            saved: None,
        });
        Ok(to_sleep.collect())
    }
}

impl ToSleep {
    /// The block's size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.moving.as_ref().map_or(0, |moving| moving.bytes)
    }

    /// Has its contents kept.
    pub(crate) fn keep_in(&mut self, saved: Saved) {
        self.saved = Some(Box::new(saved));
    }

    /// Where it lies and the room for its contents, to be copied there.
    pub(crate) fn contents(&mut self) -> Option<(&MovingBlock, &mut Saved)> {
        self.moving.as_ref().zip(self.saved.as_deref_mut())
    }

    /// Takes its memory out and puts it aside.
    pub(crate) fn withdraw(&self) -> Result<(), SleepError> {
        self.moving.as_ref().map_or(Ok(()), MovingBlock::withdraw)
    }

    /// Gives up what was put aside; returns the bytes.
    pub(crate) fn sleep(mut self, release: bool) -> u64 {
        let Some(moving) = self.moving.take() else {
            return 0;
        };
        let mut state = moving.lock();
        let given = state.settle_asleep(moving.lease.place(), self.saved.take(), release);
        drop(state);
        moving.lease.core().announce();
        given
    }

    /// Puts what was put aside back where it was. False if that failed: then it sleeps.
    pub(crate) fn stay(mut self) -> bool {
        self.put_back()
    }

    fn put_back(&mut self) -> bool {
        let Some(moving) = self.moving.take() else {
            return true;
        };
        let reading = self.saved.as_deref_mut().map_or(&[][..], Saved::unfinished);
        let mut state = moving.lock();
        state.is_read_on(moving.lease.place(), reading);
        state.restore(moving.lease.place(), self.saved.take())
    }
}

impl MovingBlock {
    /// Takes the memory of a block that falls asleep out and puts it aside.
    pub(crate) fn withdraw(&self) -> Result<(), SleepError> {
        self.lock().withdraw_all(self.lease.place())
    }
}

impl Drop for ToSleep {
    fn drop(&mut self) {
        self.put_back();
    }
}

impl State {
    /// Marks the chosen blocks of a tenant that are awake as moving, if nothing is in the way.
    fn mark_for_sleep(
        &mut self,
        id: TenantId,
        choice: Choice<'_>,
    ) -> Result<Vec<Chosen>, SleepError> {
        if self.capturing > 0 {
            return Err(SleepError::Capturing);
        }
        self.check_alive()?;
        // A block in a stream cache is handed on as it is: none must come there while it sleeps.
        if let Some(tenancy) = self.tenants.get(&id) {
            tenancy.unswept.bypass(true);
            let freed = tenancy.unswept.sweep_each();
            self.free_all(&freed);
        }
        let outcome = self.mark_all_for_sleep(id, choice);
        self.update_bypass(id);
        outcome
    }

    fn mark_all_for_sleep(
        &mut self,
        id: TenantId,
        choice: Choice<'_>,
    ) -> Result<Vec<Chosen>, SleepError> {
        let chosen = self.choose(id, choice, |sleep_state| {
            !matches!(sleep_state, SleepState::Asleep { .. })
        });
        let (mut leased, mut exported) = (Tally::default(), Tally::default());
        let mut busy = self.busy(id, choice, true);
        let needs = &mut self.needs_synchronise;
        let Some(tenancy) = self.tenants.get_mut(&id) else {
            return Ok(Vec::new());
        };
        for &index in &chosen {
            let Some(slot) = tenancy.slot_mut(index) else {
                continue;
            };
            if !slot.sleep_state.is_awake() {
                busy.add(slot);
            } else if slot.leases > 0 {
                leased.add(slot);
            } else if slot.exported {
                exported.add(slot);
            } else if slot.is_busy() || slot.pinned || !Self::is_complete_now(needs, slot)? {
                busy.add(slot);
            }
        }
        if let Tally { blocks: 1.., .. } = exported {
            let Tally { blocks, bytes } = exported;
            return Err(SleepError::Exported { blocks, bytes });
        }
        if let Tally { blocks: 1.., .. } = leased {
            let Tally { blocks, bytes } = leased;
            return Err(SleepError::Leased { blocks, bytes });
        }
        if let Tally { blocks: 1.., .. } = busy {
            let Tally { blocks, bytes } = busy;
            return Err(SleepError::Busy { blocks, bytes });
        }
        let marked = chosen.into_iter().filter_map(|index| {
            let aside = Vec::new();
            let (owed, filling) = (0, Fence::complete());
            let moving = SleepState::Moving {
                aside,
                owed,
                filling,
            };
            self.mark(id, index, moving)
        });
        Ok(marked.collect())
    }

    /// Whether what was queued on a block that is in use has passed.
    fn is_complete_now(needs: &mut bool, slot: &mut Slot) -> Result<bool, CallError> {
        if let Some(block) = &slot.block {
            let fence = block.fence(&slot.space);
            slot.fence.merge(fence);
        }
        Self::poll(0, needs, &mut slot.fence)
    }

    /// Notes copies out of a moving block that may still be running.
    fn is_read_on(&mut self, place: &SlotId, streams: &[Stream]) {
        let Some(slot) = self.slot_mut(place.tenant, place.slot) else {
            return;
        };
        for stream in streams {
            slot.is_read_on(stream);
        }
    }
}

impl Locked<'_> {
    /// Takes all memory out of a moving block's slot, last first.
    fn withdraw_all(&mut self, place: &SlotId) -> Result<(), SleepError> {
        let Some(mut slot) = self.take_out(place.tenant, place.slot) else {
            return Ok(());
        };
        let outcome = self.unlocked(|| Self::empty_slot(&mut slot));
        self.put_slot(place.tenant, place.slot, slot);
        outcome
    }

    fn empty_slot(slot: &mut Slot) -> Result<(), SleepError> {
        // One lease is that of whoever moves it.
        if slot.leases > 1 {
            let mut leased = Tally::default();
            leased.add(slot);
            let Tally { blocks, bytes } = leased;
            return Err(SleepError::Leased { blocks, bytes });
        }
        let offsets: Vec<u64> = slot.space.extents().rev().map(|it| it.offset).collect();
        for offset in offsets {
            let most = slot.space.most_at(offset);
            let unmapped = slot.space.withdraw(offset, Unused::promised())?;
            if let (Some(unmapped), SleepState::Moving { aside, .. }) =
                (unmapped, &mut slot.sleep_state)
            {
                aside.push(Aside {
                    offset,
                    unmapped,
                    most,
                });
            }
        }
        Ok(())
    }

    /// Gives up what was put aside of a moving block; returns the bytes.
    fn settle_asleep(&mut self, place: &SlotId, saved: Option<Box<Saved>>, release: bool) -> u64 {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return 0;
        };
        let SleepState::Moving { aside, .. } = std::mem::take(&mut slot.sleep_state) else {
            self.put_slot(id, index, slot);
            return 0;
        };
        let held = self.budget.account(id).held;
        let free_list = self.free_list.bytes();
        for Aside {
            offset, unmapped, ..
        } in aside
        {
            self.abandon(id, (index, &mut slot), offset, unmapped);
        }
        let given = held - self.budget.account(id).held;
        // What it wakes to is its own.
        slot.lent = 0;
        // The block may have been dropped meanwhile.
        if slot.block.is_some() {
            slot.sleep_state = SleepState::Asleep { saved };
        }
        slot.receded();
        self.put_slot(id, index, slot);
        self.update_bypass(id);
        if release {
            self.release_growth(free_list);
        }
        given
    }

    /// Puts what was put aside back. If that fails the block sleeps, with what was saved of it.
    fn restore(&mut self, place: &SlotId, saved: Option<Box<Saved>>) -> bool {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_out(id, index) else {
            return true;
        };
        let SleepState::Moving { aside, .. } = std::mem::take(&mut slot.sleep_state) else {
            self.put_slot(id, index, slot);
            return true;
        };
        let mut aside = aside.into_iter().rev();
        let failed = aside.by_ref().find_map(|aside| {
            let Aside {
                offset,
                unmapped,
                most,
            } = aside;
            let handle = unmapped.physical.as_raw();
            let back = vec![unmapped];
            let placed = self.unlocked(|| slot.space.place_back(offset, back, most));
            Some((offset, handle, placed.err()?))
        });
        let stays = failed.is_some();
        if let Some((offset, handle, failed)) = failed {
            tracing::error!(error = %failed.error, "a block that was to stay awake sleeps");
            let lost = failed.stuck;
            let rest = aside.map(|aside| (aside.offset, aside.unmapped));
            let rest: Vec<(u64, Unmapped)> = rest.collect();
            let failed = failed
                .physicals
                .into_iter()
                .map(|unmapped| (offset, unmapped));
            // Last first: up to where it shares tells which of them others show too.
            for (offset, unmapped) in rest.into_iter().rev().chain(failed) {
                self.abandon(id, (index, &mut slot), offset, unmapped);
            }
            if lost > 0 && offset < slot.shared {
                self.stuck(id, index, &mut slot, offset, (handle, lost));
            } else if lost > 0 {
                self.budget.refund(id, lost);
                self.budget.refund_mappings(id, 1);
                self.set_aside(&mut slot, lost, 1);
            }
            self.take_all_out(id, (index, &mut slot));
            slot.lent = 0;
            if slot.block.is_some() {
                slot.sleep_state = SleepState::Asleep { saved };
            }
        }
        self.put_slot(id, index, slot);
        self.update_bypass(id);
        !stays
    }

    /// Books a physical that a moving block had at an offset, and keeps it.
    fn abandon(
        &mut self,
        id: TenantId,
        (index, slot): (usize, &mut Slot),
        offset: u64,
        unmapped: Unmapped,
    ) {
        if offset < slot.shared {
            self.parted(id, index, slot, offset, unmapped);
        } else {
            self.taken(id, unmapped);
        }
    }

    /// Takes what is left of a moving block's memory out, for good.
    fn take_all_out(&mut self, id: TenantId, (index, slot): (usize, &mut Slot)) {
        let (shared, mut own) = (slot.shared, (0, 0));
        for extent in slot
            .space
            .extents()
            .filter(|extent| extent.offset >= shared)
        {
            own = (own.0 + extent.size, own.1 + 1);
        }
        let proof = slot.fence.proof();
        self.uncommit(slot, shared, proof);
        self.budget.refund(id, own.0);
        self.budget.refund_mappings(id, own.1);
        self.leave_shared(id, index, slot, proof);
        slot.receded();
    }
}
