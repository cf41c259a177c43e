//! Memory of blocks that fall asleep, on its way to blocks that wake.
//!
//! Whole physicals are offered and fitted. A fitted physical is mapped at its new addresses while the
//! other block still has it, and changes hands when no more can fail. Its charge passes when the
//! blocks are marked, so that no other tenant gets the memory meanwhile, and goes back if the
//! exchange fails.
//!
//! Keeps I-147.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use super::moving::{Choice, TransitioningBlock};
use crate::error::BlockError;
use crate::extents::{Fence, Placed, Unmapped};
use crate::own::{Access, Physical};
use crate::pool::accounts::{Amount, Budget, TenantId};
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{SleepState, Slot, SlotId};
use crate::pool::core::{Core, Locked};

/// The memory that blocks that fall asleep offer, by the size of the physicals.
#[derive(Debug, Default)]
pub(crate) struct Offers(BTreeMap<u64, Vec<Offer>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Offer {
    slot: SlotId,
    offset: u64,
}

/// A physical of a block that falls asleep, and its place under a block that wakes.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(in crate::pool) from: SlotId,
    /// The offset in the block that falls asleep.
    pub(crate) from_offset: u64,
    /// The offset in the block that wakes.
    pub(crate) offset: u64,
    pub(crate) size: u64,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Unmapped(Physical),
    Placed(Placed),
    /// Not mapped, stuck in the slot of the block that wakes, or lost there to a panic of the driver.
    Gone,
}

/// Blocks that sleep, each with the offers that fit it.
pub(super) struct Fitted(Vec<(SlotId, Vec<Arrival>)>);

impl Fitted {
    fn arrivals(&self) -> impl Iterator<Item = &Arrival> {
        self.0.iter().flat_map(|(_, arrivals)| arrivals)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.arrivals().map(|arrival| arrival.size).sum()
    }

    /// Returns the bytes that each tenant passes on.
    pub(super) fn givers(&self) -> Vec<(TenantId, u64)> {
        let mut givers = BTreeMap::new();
        for arrival in self.arrivals() {
            *givers.entry(arrival.from.tenant).or_insert(0) += arrival.size;
        }
        givers.into_iter().collect()
    }

    pub(super) fn into_iter(self) -> impl Iterator<Item = (SlotId, Vec<Arrival>)> {
        self.0.into_iter()
    }
}

impl Offers {
    /// Takes the largest offer of at most `most` bytes.
    fn take(&mut self, most: u64) -> Option<(u64, Offer)> {
        let (&size, offers) = self.0.range_mut(..=most).next_back()?;
        let offer = offers.pop();
        if offers.is_empty() {
            self.0.remove(&size);
        }
        Some((size, offer?))
    }

    fn copy(&self) -> Self {
        Self(self.0.clone())
    }

    /// Adds the memory of a slot, unless others have it too: blocks that share it, or processes.
    pub(super) fn add(&mut self, slot: &Slot) {
        if slot.bound() > 0 || slot.exported {
            return;
        }
        // The first are taken first.
        for extent in slot.space.extents().rev() {
            if extent.access == Access::ReadWrite {
                let of_size = self.0.entry(extent.size).or_default();
                of_size.push(Offer {
                    slot: slot.id,
                    offset: extent.offset,
                });
            }
        }
    }

    /// Removes what was taken.
    pub(crate) fn remove(&mut self, arrivals: &[Arrival]) {
        let is_taken = |offer: &Offer| {
            let mut arrivals = arrivals.iter();
            arrivals.any(|it| (it.from, it.from_offset) == (offer.slot, offer.offset))
        };
        self.0.retain(|_, offers| {
            offers.retain(|offer| !is_taken(offer));
            !offers.is_empty()
        });
    }
}

impl Blocks {
    /// Chooses for each sleeping block, in turn, the offers that fit its first bytes.
    pub(super) fn fit(&self, id: TenantId, choice: Choice<'_>, offers: &Offers) -> Fitted {
        let mut left = offers.copy();
        let sleepers = self.choose(id, choice, SleepState::is_asleep);
        let sleepers = sleepers.into_iter().filter_map(|id| {
            let slot = self.slots.get(id)?;
            Some((id, self.fit_one(slot, &mut left)))
        });
        Fitted(sleepers.collect())
    }

    fn fit_one(&self, slot: &Slot, left: &mut Offers) -> Vec<Arrival> {
        let used = slot.block.as_ref().map_or(0, |block| block.used);
        let (mut at, mut arrivals) = (0, Vec::new());
        // Memory that a failed roll-back left in the slot.
        let is_free = slot.space.bytes() == 0 && slot.space.stuck_count() == 0;
        while at < used && is_free {
            let granule = self.granule;
            let most = granule.extent_within(used - at, slot.class.sizes.at(at));
            let Some((size, offer)) = left.take(most) else {
                break;
            };
            let giver = self.slots.get(offer.slot);
            // A slot that is out, to be looked at, gives nothing.
            let Some(physical) = giver.and_then(|it| it.space.physical_at(offer.offset)) else {
                continue;
            };
            arrivals.push(Arrival {
                from: offer.slot,
                from_offset: offer.offset,
                offset: at,
                size,
                memory: Memory::Unmapped(physical),
            });
            at += size;
        }
        arrivals
    }

    /// Notes that bytes of a slot are charged to another block.
    pub(super) fn note_passed(&mut self, from: SlotId, bytes: u64) {
        self.with_slot(from, |slot| {
            if let SleepState::Moving { passed, .. } = &mut slot.sleep_state {
                *passed += bytes;
            }
        });
    }

    /// Takes memory from the block that it comes from.
    pub(super) fn leave_behind(&mut self, budget: &mut Budget, arrival: &Arrival) {
        self.with_slot(arrival.from, |slot| {
            if let SleepState::Moving { aside, passed, .. } = &mut slot.sleep_state {
                *passed -= arrival.size;
                aside.forget(arrival.from_offset);
                let tenant = slot.id.tenant;
                budget.give_up(tenant, Amount::mappings(1));
            }
        });
    }

    /// Returns the charge for memory to the block that it comes from, also if a panic has lost a slot of
    /// the two. A slot counts what it is owed, also one that is lost, and it is owed the memory until
    /// that arrives: no figure goes below zero.
    fn pass_back(&mut self, budget: &mut Budget, id: SlotId, (from, size): (SlotId, u64)) {
        self.slots.recount_lost(id, |bytes| bytes - size);
        self.slots.recount_lost(from, |bytes| bytes + size);
        self.with_slot(id, |slot| {
            if let SleepState::Moving { owed, .. } = &mut slot.sleep_state {
                *owed -= size;
            }
        });
        self.with_slot(from, |slot| {
            if let SleepState::Moving { passed, .. } = &mut slot.sleep_state {
                *passed -= size;
            }
        });
        budget.pass_on(&[(id.tenant, size)], from.tenant);
    }

    /// Adds mapped memory to the block that gets it.
    pub(super) fn arrive(&mut self, id: SlotId, arrival: Arrival) {
        self.with_slot(id, |slot| {
            if let Memory::Placed(placed) = arrival.memory {
                slot.space.adopt(placed);
            }
            if let SleepState::Moving { owed, .. } = &mut slot.sleep_state {
                *owed -= arrival.size;
            }
        });
    }
}

impl TransitioningBlock {
    /// Undoes the arrival of memory at the addresses of a block that wakes: it is unmapped there,
    /// unless `running` may use it, and its charge goes back.
    pub(super) fn return_arrivals(&self, mut arrivals: Vec<Arrival>, running: &Fence) {
        if arrivals.is_empty() {
            return;
        }
        let id = self.place().slot;
        let charges = arrivals.iter().map(|arrival| (arrival.from, arrival.size));
        let _passed = Passed(self.lease.core(), id, charges.collect());
        self.lock().with_slot_out(id, |state, slot| {
            for arrival in arrivals.iter_mut().rev() {
                state.unmap_arrival(slot, arrival, running);
            }
        });
    }
}

/// Charges that were passed on to a slot, by the slots that they come from. The drop of this value passes
/// them back, also after a panic of the driver.
struct Passed<'a>(&'a Core, SlotId, Vec<(SlotId, u64)>);

impl Drop for Passed<'_> {
    fn drop(&mut self) {
        let Self(core, id, charges) = self;
        let givers = charges.iter().map(|&(from, _)| (from, 0));
        let all: Vec<(SlotId, u64)> = givers.chain([(*id, 0)]).collect();
        let mut state = core.await_slots(core.lock(), all.into_iter());
        let (memory, blocks) = state.halves();
        for &charge in charges.iter() {
            blocks.pass_back(&mut memory.budget, *id, charge);
        }
    }
}

impl Locked<'_> {
    /// Maps arriving memory at its new addresses. Returns the refusal, or the driver's panic.
    pub(super) fn map_arrivals(
        &mut self,
        slot: &mut Slot,
        arrivals: &mut [Arrival],
    ) -> Result<(), thread::Result<Result<(), BlockError>>> {
        let id = slot.id.tenant;
        self.make_mapping_room(id, arrivals.len() as u64, true)
            .map_err(|error| Ok(Err(error)))?;
        let target = slot.space.target();
        for arrival in arrivals {
            let Memory::Unmapped(physical) = &arrival.memory else {
                continue;
            };
            let unmapped = Unmapped {
                fresh: false,
                ..Unmapped::fresh(physical.clone())
            };
            let charge = self.memory.budget.charge(Some(id), Amount::mappings(1));
            let before = slot.space.stuck_count();
            let place = || target.place(arrival.offset, unmapped);
            let placed = self.unlocked(|| catch_unwind(AssertUnwindSafe(place)));
            // They are of memory that another holder has.
            let stuck = slot.space.stuck_count() - before;
            slot.broken |= stuck > 0;
            self.memory.budget.quarantine(0, stuck);
            let failed = match placed {
                Ok(Ok(placed)) => {
                    self.memory.budget.keep(charge);
                    arrival.memory = Memory::Placed(placed);
                    continue;
                }
                Ok(Err(failed)) => Ok(Err(self.not_placed(id, arrival.size, failed.error))),
                Err(panic) => {
                    arrival.memory = Memory::Gone;
                    Err(panic)
                }
            };
            self.memory.budget.refund(charge);
            return Err(failed);
        }
        Ok(())
    }

    /// Places `bytes` of the memory that a waking block was charged for. They may hold data of any
    /// tenant.
    pub(super) fn place_owed(
        &mut self,
        slot: &mut Slot,
        begun: u64,
        bytes: u64,
    ) -> Result<(), BlockError> {
        slot.check_free(begun, bytes)?;
        self.place(slot, begun, bytes, true)?;
        if let SleepState::Moving { owed, .. } = &mut slot.sleep_state {
            *owed = owed.saturating_sub(bytes);
        }
        Ok(())
    }

    /// Unmaps memory that arrived at a slot's addresses. What `running` may use, or the driver does
    /// not unmap, stays mapped for good, and is not reused once its other block has given it up.
    fn unmap_arrival(&mut self, slot: &mut Slot, arrival: &mut Arrival, running: &Fence) {
        let memory = std::mem::replace(&mut arrival.memory, Memory::Gone);
        let Memory::Placed(placed) = memory else {
            return;
        };
        let unmapped = self.unlocked(|| {
            let unmapped = placed.unmap_after(running);
            unmapped.or_else(|(placed, error)| {
                log!(warn, %error, "a roll-back is tried again");
                placed.unmap_after(running)
            })
        });
        let tenant = slot.id.tenant;
        self.memory.budget.give_up(tenant, Amount::mappings(1));
        if let Err((placed, error)) = unmapped {
            log!(error, %error, "a roll-back could not unmap: quarantined");
            // What is dropped is stuck.
            drop(placed);
            slot.broken = true;
            self.memory.budget.quarantine(0, 1);
        }
    }
}
