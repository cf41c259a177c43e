//! Growth in place: into memory that is there, or by steps ahead of the block's use.

use std::cell::Cell;
use std::ops::Range;

use super::Blocks;
use super::ahead::Precommit;
use super::change::Change;
use super::commit::{Fit, PlacedMemory};
use super::sharing::Refused;
use super::slots::{BYTES, BlockPlace, Slot, Tenancy};
use crate::error::{ArgumentError, BlockError, CallError};
use crate::growth::Steps;
use crate::own::Stream;
use crate::pool::accounts::TenantId;
use crate::pool::core::{Core, Locked};
use crate::pool::line::{Attempt, Demand, Wait};
use crate::pool::memory::Memory;
use crate::pool::state::gone;
use crate::wanted::Purpose;

impl Slot {
    /// Returns `true` if the block can grow to `size` bytes, `used` in whole granules, without a
    /// fence, zeros or more memory.
    pub(super) fn fits_now(&self, capacity: u64, size: u64, used: u64) -> bool {
        let Some(block) = &self.block else {
            return false;
        };
        let grows = block.requested <= size && size <= capacity && used <= self.space.bytes();
        // Zeros are owed only over memory that was used before.
        let owed = block.used < block.reach && used > block.used;
        self.sleep_state.is_awake()
            && grows
            && !self.is_truncated()
            && !(block.zeroed && (owed || !block.stale(size).is_empty()))
    }

    /// Grows the block within its memory, after [`fits_now`](Self::fits_now) has returned `true`.
    fn grow_within(&mut self, size: u64, used: u64, precommit: Option<&mut Precommit>) {
        let (id, bytes) = (self.id, self.space.bytes());
        let Some(block) = &mut self.block else {
            return;
        };
        block.requested = size;
        block.ever = block.ever.max(size);
        block.used = block.used.max(used);
        if let Some(precommit) = precommit {
            precommit.look_at(id, block, bytes);
        }
    }
}

/// A block, and its new size in bytes.
type Step = (BlockPlace, u64);

impl Blocks {
    /// Grows a block into memory that is there, without a fence, zeros or a charge. Otherwise
    /// changes nothing and returns `false`; the full growth then finds the reason.
    pub(in crate::pool) fn grow_within(
        &mut self,
        memory: &Memory,
        place: &BlockPlace,
        size: u64,
    ) -> bool {
        let granule = self.granule;
        let (Some((tenancy, precommit)), Some(used)) = (
            self.growing(memory, place.slot.tenant),
            granule.round_up(size),
        ) else {
            return false;
        };
        match tenancy.slot_mut(place.slot.index) {
            Some(slot) if slot.fits_now(place.capacity, size, used) => {
                slot.grow_within(size, used, precommit);
                true
            }
            _ => false,
        }
    }

    /// Grows several blocks of a tenant within their memory: all of them or none. Checks all blocks
    /// before it changes any, so that nothing must be undone. Does little with each block, so that
    /// the memory accesses of several blocks overlap.
    pub(super) fn grow_all_within(
        &mut self,
        memory: &Memory,
        id: TenantId,
        steps: &[(BlockPlace, u64)],
    ) -> bool {
        let granule = self.granule;
        let Some((tenancy, mut precommit)) = self.growing(memory, id) else {
            return false;
        };
        let fits = |(place, size): &(BlockPlace, u64)| {
            let slot = tenancy.slot(place.slot.index).zip(granule.round_up(*size));
            slot.is_some_and(|(slot, used)| slot.fits_now(place.capacity, *size, used))
        };
        if !steps.iter().all(fits) {
            return false;
        }
        for (place, size) in steps {
            let slot = tenancy
                .slot_mut(place.slot.index)
                .zip(granule.round_up(*size));
            if let Some((slot, used)) = slot {
                slot.grow_within(*size, used, precommit.as_deref_mut());
            }
        }
        true
    }

    /// Returns the tenant if its blocks may grow within their memory now.
    fn growing(
        &mut self,
        memory: &Memory,
        id: TenantId,
    ) -> Option<(&mut Tenancy, Option<&mut Precommit>)> {
        if !memory.lets_grow() {
            return None;
        }
        let tenancy = self.slots.of_mut(id)?;
        let may = tenancy.standing.may_grow;
        may.then_some((tenancy, self.precommit.as_mut()))
    }
}

impl Locked<'_> {
    /// Grows the block of a slot that is out, so that new memory can be told from old.
    fn grow_slot(
        &mut self,
        slot: &mut Slot,
        capacity: u64,
        size: u64,
    ) -> Result<PlacedMemory, BlockError> {
        ArgumentError::at_most(BYTES, size, capacity)?;
        let used = self.memory.device.granule().whole(BYTES, size)?;
        let Some(block) = &slot.block else {
            return Err(gone());
        };
        slot.check_awake()?;
        ArgumentError::at_least(BYTES, size, block.requested)?;
        let stale = block.stale(size);
        if block.zeroed && !stale.is_empty() {
            self.memory.check_usable(slot.id.tenant)?;
            self.blank(slot, stale)?;
        }
        self.grow_clean(slot, size, used)
    }

    /// Grows a block that has no old bytes to hide within its granules.
    fn grow_clean(
        &mut self,
        slot: &mut Slot,
        size: u64,
        used: u64,
    ) -> Result<PlacedMemory, BlockError> {
        let bytes = slot.space.bytes();
        let Some(block) = &mut slot.block else {
            return Err(gone());
        };
        if used <= block.used {
            block.requested = size;
            block.ever = block.ever.max(size);
            return Ok(PlacedMemory {
                begun: bytes,
                filled: false,
            });
        }
        let revived = used.min(bytes).saturating_sub(block.used);
        self.memory.check_usable(slot.id.tenant)?;
        self.permit_reuse(slot.id, revived, slot.purpose())?;
        let given = self.extend(slot, used)?;
        slot.touched = self.blocks.tick();
        if let Some(block) = &mut slot.block {
            block.requested = size;
            block.ever = block.ever.max(size);
            block.used = used;
        }
        slot.note_writer();
        Ok(given)
    }

    /// Zeroes old bytes that a block would show, behind the work that may still write there.
    fn blank(&mut self, slot: &mut Slot, stale: Range<u64>) -> Result<(), BlockError> {
        let home = slot.home().cloned();
        let bytes = stale.end - stale.start;
        self.settle_before(slot, home.as_ref(), bytes)?;
        let zeroed = self.zero(slot, stale.start, bytes, home.as_ref());
        zeroed.map_err(|unfinished| {
            // The memory is in use, and is not unmapped.
            slot.fence.merge(unfinished.running);
            unfinished.error
        })
    }

    /// Gets memory under the first `to` bytes of a block's slot, which is out, and precommitted
    /// memory behind them if there is enough.
    fn extend(&mut self, slot: &mut Slot, to: u64) -> Result<PlacedMemory, BlockError> {
        let Some(block) = &slot.block else {
            return Err(gone());
        };
        let steps = Steps::of_block(self.memory.device.granule(), block.growth, slot.class.sizes);
        let (from, reach) = (block.used, block.reach.max(block.used));
        let (zeroed, most, home) = (block.zeroed, block.most, block.home.clone());
        // Queued work may still write to memory that was just given up: the zeros must come after
        // it. Up to `reach` memory may have been written.
        if zeroed && from < reach {
            self.settle_before(slot, home.as_ref(), to - from)?;
        }
        let begun = slot.space.bytes();
        let end = match begun >= to {
            true => begun,
            false => self.end_of(slot.id.tenant, begun, to, steps.end(to, begun, to, most)),
        };
        let fit = Fit {
            zeros: zeroed.then_some((from, to.min(reach))),
            ..Fit::new(to, home.as_ref(), zeroed)
        };
        match self.place_memory(slot, &Fit { end, ..fit }, None) {
            // Without precommitted memory there may be enough.
            Err(error) if end > to && error.is_shortage() => self.place_memory(slot, &fit, None),
            outcome => outcome,
        }
    }

    /// Returns the offset at which the memory of a block, `begun` bytes now, is to end: as `wished`
    /// if the tenant can be charged for that, or at `to`.
    fn end_of(&mut self, id: TenantId, begun: u64, to: u64, wished: u64) -> u64 {
        if wished > to {
            self.grant_for(id, wished - begun, Purpose::New);
        }
        if wished > to && wished - begun <= self.memory.budget.available_to(id) {
            wished
        } else {
            to
        }
    }

    /// Ensures that the work covered by a slot's fence comes before the next work: on the home
    /// stream by events, otherwise only if the fence is complete.
    fn settle_before(
        &mut self,
        slot: &mut Slot,
        home: Option<&Stream>,
        bytes: u64,
    ) -> Result<(), BlockError> {
        let id = slot.id.tenant;
        match self.memory.gate.comes_before(&mut slot.fence, home)? {
            true => Ok(()),
            false if self.memory.gate.is_capturing() => Err(self.captured(id, bytes)),
            false => Err(self.out_of_memory(id, bytes)),
        }
    }
}

impl Core {
    pub(super) fn grow(
        &self,
        place: &BlockPlace,
        size: u64,
        wait: impl FnOnce() -> Wait,
    ) -> Result<(), BlockError> {
        let mut state = self.lock();
        let (memory, blocks) = state.halves();
        let grown = blocks.grow_within(memory, place, size);
        Self::unlock(state);
        if grown {
            return Ok(());
        }
        let grown = self.grow_all(place.slot.tenant, &[(*place, size)], wait(), None);
        grown.map_err(|refused| refused.cause)
    }

    /// Grows blocks that do not all have the memory for it, and answers a future's request, if
    /// given. A withdrawn request grows nothing.
    pub(in crate::pool) fn grow_all(
        &self,
        tenant: TenantId,
        steps: &[Step],
        wait: Wait,
        request: Option<u64>,
    ) -> Result<(), Refused> {
        let forked = |cause: CallError| Refused {
            index: 0,
            cause: cause.into(),
        };
        self.device.own_process().map_err(forked)?;
        self.unshare_cuts(tenant, steps, wait)?;
        let failed = Cell::new(0);
        let grown = self.request(tenant, Demand::Growth(steps), wait, |state| {
            self.attempt_to_grow(state, steps, &failed, request)
        });
        let index = failed.get();
        grown.map_err(|cause| Refused { index, cause })
    }

    /// Grows blocks, first those that have the memory. Sets `failed` to the index of the block that
    /// could not grow.
    fn attempt_to_grow<'a>(
        &'a self,
        mut state: Locked<'a>,
        steps: &[Step],
        failed: &Cell<usize>,
        request: Option<u64>,
    ) -> Attempt<'a, ()> {
        state.purge_some();
        state = self.await_slots(state, steps.iter().map(|(place, size)| (place.slot, *size)));
        // The block may be gone, and another in its slot. A request is for one block, so the lock
        // is not released before its slot is taken.
        if request.is_some_and(|number| !state.memory.line.has(number)) {
            return (state, Err(gone()));
        }
        let mut changes = Vec::with_capacity(steps.len());
        let mut lacking = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            match state.step_within(step) {
                Some(change) => changes.push(change),
                None => lacking.push((index, step)),
            }
        }
        let mut outcome = Ok(());
        for (index, step) in lacking {
            // Meanwhile another operation may take memory behind the block's end, and the mapper
            // may place more.
            state = self.await_slots(state, std::iter::once((step.0.slot, step.1)));
            match state.step_far(step) {
                Ok(change) => changes.push(change),
                Err(error) => {
                    failed.set(index);
                    outcome = Err(error);
                    break;
                }
            }
        }
        if outcome.is_ok()
            && request.is_some_and(|number| !self.answer(&mut state.memory.line, number, Ok(None)))
        {
            outcome = Err(gone());
        }
        state = self.conclude(state, changes, outcome.is_ok());
        (state, outcome)
    }
}

impl Locked<'_> {
    /// Grows a block into memory that is there, or returns `None` if it is too little.
    fn step_within(&mut self, (place, size): &Step) -> Option<Change> {
        let change = Change::of(self.blocks.slots.get(place.slot)?, *place);
        let (memory, blocks) = self.halves();
        if !blocks.grow_within(memory, place, *size) {
            return None;
        }
        blocks.slots.get_mut(place.slot)?.pinned = true;
        Some(change)
    }

    /// Grows a block, whose slot is in its place, by all available means.
    fn step_far(&mut self, (place, size): &Step) -> Result<Change, BlockError> {
        let grown = self.with_slot_out(place.slot, |state, slot| {
            let mut change = Change::of(slot, *place);
            change.given = Some(state.grow_slot(slot, place.capacity, *size)?);
            slot.pinned = true;
            Ok(change)
        });
        grown.ok_or_else(gone)?
    }
}
