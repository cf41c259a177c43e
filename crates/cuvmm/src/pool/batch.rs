//! Several blocks in one call and under one lock: all of them, or everything is as before.
//!
//! What each took is kept apart until all have succeeded, so that it can be told what to give back.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use super::allocate::Allocated;
use super::block::{Block, after};
use super::budget::TenantId;
use super::commit::Furnished;
use super::core::{Attempt, Core, Locked, Wanted};
use super::grow::gone;
use super::relief::Demand;
use super::slot::{Slot, SlotId};
use super::state::State;
use super::tenant::Tenant;
use super::unshare::Refused;
use crate::error::{AllocateError, CallError, GrowAllError, ShrinkError};
use crate::own::Stream;
use crate::region::{Fence, Unused};

/// A block to grow or shrink, and to how many bytes.
type Step = (SlotId, u64);

/// A block that has grown, and what it was before.
#[derive(Debug)]
struct Grown {
    place: SlotId,
    requested: u64,
    ever: u64,
    used: u64,
    reach: u64,
    touched: u64,
    /// Whether somebody with a lease may have been told what it was given.
    leased: bool,
    /// Nothing if it grew into memory that was there.
    given: Option<Furnished>,
}

/// How several blocks of a kind lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// Wherever there is a place for each.
    Anywhere,
    /// Side by side.
    Adjacent,
}

impl Tenant {
    /// Grows several of the tenant's blocks in place, to the size given with each, in one call: all
    /// of them or none. Asks pressure hooks, and waits as long as the most patient of the blocks
    /// may.
    ///
    /// Where every block has memory ahead of its use this makes no driver call, and takes a tenth
    /// of a microsecond a block.
    ///
    /// # Errors
    /// [`GrowAllError`] says which block could not grow, with the figures. Every block is as before
    /// then. Memory that was another tenant's and is just being zeroed stays with its block as
    /// precommitted memory until that has passed, and a block that has shrunk into what it
    /// [shares](Block::fork) may have memory of its own there by then, with the same bytes.
    pub fn grow_all(&self, blocks: &mut [(&mut Block, u64)]) -> Result<(), GrowAllError> {
        let steps = self.steps(blocks)?;
        let until = || {
            let patience = blocks.iter().filter_map(|(block, _)| block.patience());
            patience.max().map(after)
        };
        self.core().grow_all(self.id(), &steps, until)?;
        note(blocks);
        Ok(())
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::grow_all`].
    pub fn try_grow_all(&self, blocks: &mut [(&mut Block, u64)]) -> Result<(), GrowAllError> {
        let steps = self.steps(blocks)?;
        self.core().try_grow_all(self.id(), &steps)?;
        note(blocks);
        Ok(())
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
    pub(crate) fn shrink_all(&self, blocks: &mut [(&mut Block, u64)]) -> Result<(), ShrinkError> {
        let steps: Vec<Step> = blocks
            .iter()
            .map(|(block, size)| (*block.place(), *size))
            .collect();
        self.core().shrink(&steps)?;
        note(blocks);
        Ok(())
    }

    /// Tells the mapper, if there is one, that blocks are about to outgrow what they have.
    pub(crate) fn foresee<'a>(&self, blocks: impl IntoIterator<Item = &'a Block>) {
        let mut state = self.core().lock();
        for block in blocks {
            let place = block.place();
            state.ask_precommit(place.tenant, place.slot);
        }
        Core::let_go(state);
    }

    fn steps(&self, blocks: &[(&mut Block, u64)]) -> Result<Vec<Step>, GrowAllError> {
        let strange = |(block, _): &(&mut Block, u64)| !self.has(block);
        match blocks.iter().position(strange) {
            Some(index) => Err(GrowAllError::NotOurs { index }),
            None => Ok(blocks
                .iter()
                .map(|(block, size)| (*block.place(), *size))
                .collect()),
        }
    }
}

fn note(blocks: &mut [(&mut Block, u64)]) {
    for (block, size) in blocks {
        block.has_size(*size);
    }
}

impl Core {
    fn try_grow_all(&self, tenant: TenantId, steps: &[Step]) -> Result<(), GrowAllError> {
        let mut state = self.lock();
        if state.grow_all_within(tenant, steps) {
            Self::let_go(state);
            return Ok(());
        }
        let forked = |cause: CallError| refused(steps, 0, cause.into());
        self.device.own_process().map_err(forked)?;
        let state = self.await_slots(state, steps.iter().copied());
        let state = self
            .try_unshare_cuts(state, tenant, steps)
            .map_err(|Refused { index, cause }| refused(steps, index, cause))?;
        let failed = Cell::new(0);
        let attempt = |state| self.attempt_to_grow_all(state, steps, &failed);
        let (mut state, outcome) = self.beside_others(state, &attempt);
        let demand = Demand::Growth(steps);
        let outcome = outcome.map_err(|error| state.refuse(tenant, demand, error));
        Self::let_go(state);
        outcome.map_err(|cause| refused(steps, failed.get(), cause))
    }

    fn grow_all(
        &self,
        tenant: TenantId,
        steps: &[Step],
        until: impl FnOnce() -> Option<Instant>,
    ) -> Result<(), GrowAllError> {
        let mut state = self.lock();
        if state.grow_all_within(tenant, steps) {
            Self::let_go(state);
            return Ok(());
        }
        let forked = |cause: CallError| refused(steps, 0, cause.into());
        self.device.own_process().map_err(forked)?;
        let until = until();
        let state = self.await_slots(state, steps.iter().copied());
        let state = self
            .unshare_cuts(state, tenant, steps, until)
            .map_err(|Refused { index, cause }| refused(steps, index, cause))?;
        Self::let_go(state);
        let failed = Cell::new(0);
        self.insist(tenant, Demand::Growth(steps), until, |state| {
            self.attempt_to_grow_all(state, steps, &failed)
        })
        .map_err(|cause| refused(steps, failed.get(), cause))
    }

    /// Grows blocks, first all those that have what they need; `failed` is told which could not.
    fn attempt_to_grow_all<'a>(
        &'a self,
        mut state: Locked<'a>,
        steps: &[Step],
        failed: &Cell<usize>,
    ) -> Attempt<'a, ()> {
        state.purge_some();
        state = self.await_slots(state, steps.iter().copied());
        let mut grown = Vec::with_capacity(steps.len());
        let mut lacking = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            match state.step_within(step) {
                Some(done) => grown.push(done),
                None => lacking.push((index, step)),
            }
        }
        let mut outcome = Ok(());
        for (index, step) in lacking {
            // Another operation may take what lies behind its end meanwhile, and the mapper place more.
            state = self.await_slots(state, std::iter::once(*step));
            match state.step_far(step) {
                Ok(done) => grown.push(done),
                Err(error) => {
                    failed.set(index);
                    outcome = Err(error);
                    break;
                }
            }
        }
        for done in grown.into_iter().rev() {
            state = self.await_slots(state, std::iter::once((done.place, u64::MAX)));
            match &outcome {
                Ok(()) => state.settle_grown(&done),
                Err(_) => state.ungrow(done),
            }
        }
        state.look_behind();
        (state, outcome)
    }

    pub(super) fn try_allocate_many(
        &self,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        count: usize,
        placement: Placement,
    ) -> Result<Vec<SlotId>, AllocateError> {
        let attempt = |state| self.attempt_to_place_many(state, tenant, wanted, (count, placement));
        let (mut state, outcome) = self.beside_others(self.lock(), &attempt);
        let demand = self.demand_of_many(wanted, count);
        let outcome = outcome.map_err(|error| state.refuse(tenant, demand, error));
        Self::let_go(state);
        outcome
    }

    pub(super) fn allocate_many(
        &self,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        count: usize,
        until: Option<Instant>,
        placement: Placement,
    ) -> Result<Vec<SlotId>, AllocateError> {
        let demand = self.demand_of_many(wanted, count);
        self.insist(tenant, demand, until, |state| {
            self.attempt_to_place_many(state, tenant, wanted, (count, placement))
        })
    }

    fn demand_of_many(&self, wanted: &Wanted<'_>, count: usize) -> Demand<'static> {
        let each = self.device.granule().round_up(wanted.size);
        Demand::Bytes(each.unwrap_or(u64::MAX).saturating_mul(count as u64))
    }

    fn attempt_to_place_many<'a>(
        &'a self,
        state: Locked<'a>,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        (count, placement): (usize, Placement),
    ) -> Attempt<'a, Vec<SlotId>> {
        let place = |state: Locked<'a>, wanted| match placement {
            Placement::Anywhere => self.scatter(state, tenant, wanted, count),
            Placement::Adjacent => self.line_up(state, tenant, wanted, count),
        };
        let (mut state, mut outcome) = place(state, wanted);
        if count > 1 && matches!(&outcome, Err(error) if error.is_shortage()) {
            // What is left over behind each of them may be what the last one lacks.
            let snug = Wanted {
                snug: true,
                ..wanted.clone()
            };
            (state, outcome) = place(state, &snug);
        }
        state.look_behind();
        (state, outcome)
    }
}

fn refused(steps: &[Step], index: usize, cause: AllocateError) -> GrowAllError {
    GrowAllError::Refused {
        index,
        size: steps.get(index).map_or(0, |&(_, size)| size),
        cause,
    }
}

impl Core {
    /// Places for `count` blocks, wherever there is one: all of them, or everything is as before.
    pub(super) fn scatter<'a>(
        &'a self,
        mut state: Locked<'a>,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        count: usize,
    ) -> Attempt<'a, Vec<SlotId>> {
        let mut made: Vec<Allocated> = Vec::with_capacity(count);
        let mut outcome = Ok(());
        while outcome.is_ok() && made.len() < count {
            match state.allocate_pinned(tenant, wanted) {
                Ok(allocated) => made.push(allocated),
                Err(error) => outcome = Err(error),
            }
        }
        let places = made.iter().map(|allocated| allocated.place).collect();
        for allocated in made.into_iter().rev() {
            state = self.await_slots(state, std::iter::once((allocated.place, u64::MAX)));
            match &outcome {
                Ok(()) => state.settle(&allocated.place, allocated.moved.given.begun),
                Err(_) => state.unallocate(&allocated, wanted.home),
            }
        }
        (state, outcome.map(|()| places))
    }
}

impl Locked<'_> {
    /// Makes a place for a block that may be taken back again.
    fn allocate_pinned(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<Allocated, AllocateError> {
        let (allocated, mut slot) = self.allocate_slot(id, wanted)?;
        slot.pinned = true;
        self.put_slot(id, allocated.place.slot, slot);
        Ok(allocated)
    }

    /// What a block is now.
    fn before(&self, place: SlotId) -> Option<Grown> {
        let slot = self.slot(place.tenant, place.slot)?;
        let block = slot.block.as_ref()?;
        Some(Grown {
            place,
            requested: block.requested,
            ever: block.ever,
            used: block.used,
            reach: block.reach,
            touched: slot.touched,
            leased: slot.leases > 0,
            given: None,
        })
    }

    /// Grows a block into what is there; nothing if that is not enough.
    fn step_within(&mut self, (place, size): &Step) -> Option<Grown> {
        let before = self.before(*place)?;
        if !self.grow_within(place, *size) {
            return None;
        }
        if let Some(slot) = self.slot_mut(place.tenant, place.slot) {
            slot.pinned = true;
        }
        Some(before)
    }

    /// Grows a block, whose slot is in its place, whatever it takes.
    fn step_far(&mut self, (place, size): &Step) -> Result<Grown, AllocateError> {
        let before = self.before(*place).ok_or_else(gone)?;
        let mut slot = self.take_out(place.tenant, place.slot).ok_or_else(gone)?;
        let given = self.grow_slot(place, &mut slot, *size);
        slot.pinned = given.is_ok();
        self.put_slot(place.tenant, place.slot, slot);
        Ok(Grown {
            given: Some(given?),
            ..before
        })
    }

    /// All blocks have grown.
    fn settle_grown(&mut self, grown: &Grown) {
        let place = &grown.place;
        let bytes = grown.given.map_or(u64::MAX, |given| given.begun);
        self.settle(place, bytes);
        if grown.given.is_some() {
            self.ask_precommit(place.tenant, place.slot);
        }
    }

    /// Makes a block what it was.
    fn ungrow(&mut self, grown: Grown) {
        let (id, index) = (grown.place.tenant, grown.place.slot);
        let Some(mut slot) = self.take_out(id, index) else {
            return;
        };
        slot.pinned = false;
        let mut home = None;
        if let Some(block) = &mut slot.block {
            block.requested = grown.requested;
            block.used = grown.used;
            // What was exported meanwhile may be written to.
            if !slot.exported {
                block.ever = grown.ever;
                block.reach = grown.reach;
            }
            home.clone_from(&block.home);
        }
        if let Some(given) = grown.given {
            slot.touched = grown.touched;
            if given.filled {
                slot.fence.merge(Fence::streams(home.into_iter().collect()));
            } else if !grown.leased {
                // Where a lease may have been asked what is there it stays, as precommitted memory.
                self.give_back_from((id, index), &mut slot, given.begun);
            }
        }
        self.put_slot(id, index, slot);
    }

    /// Makes everything what it was before a block was allocated.
    fn unallocate(&mut self, allocated: &Allocated, home: Option<&Stream>) {
        let (id, index) = (allocated.place.tenant, allocated.place.slot);
        let Some(mut slot) = self.take_out(id, index) else {
            return;
        };
        slot.pinned = false;
        self.move_out((id, index), &mut slot, &allocated.moved, home);
        if allocated.new && !allocated.moved.given.filled {
            return self.drop_slot(id, index, slot);
        }
        self.lay_down(id, index, slot);
    }

    /// Gives back what was put behind `begun` in a slot that is out.
    pub(super) fn give_back_from(&mut self, at: (TenantId, usize), slot: &mut Slot, begun: u64) {
        let (bytes, count) = slot
            .space
            .extents()
            .rev()
            .take_while(|extent| extent.offset >= begun)
            .fold((0, 0), |(bytes, count), extent| {
                (bytes + extent.size, count + 1)
            });
        self.uncommit(slot, begun, Some(Unused::never_used()));
        slot.receded();
        self.refund_for(at, bytes);
        self.budget.refund_mappings(at.0, count);
    }
}

impl State {
    /// An operation has succeeded as a whole, by which a block has what lies behind `begun`.
    pub(super) fn settle(&mut self, place: &SlotId, begun: u64) {
        if let Some(slot) = self.slot_mut(place.tenant, place.slot) {
            slot.space.settle(begun);
            slot.pinned = false;
        }
    }
}

impl Tenant {
    pub(super) fn core(&self) -> &Arc<Core> {
        &self.owner().core
    }

    pub(super) fn id(&self) -> TenantId {
        self.owner().tenant
    }

    /// Whether a block is this tenant's.
    pub(super) fn has(&self, block: &Block) -> bool {
        block.place().tenant == self.id() && block.is_of(self.core())
    }
}
