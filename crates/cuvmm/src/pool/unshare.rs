//! Making a block's memory its own from some byte on, so that it can be written there: what it
//! shows of [shared memory](super::shared) behind that is unmapped, and the extent that the byte lies in
//! gives way to memory of its own with the same bytes before it, or is opened if nobody else shows
//! it any more.
//!
//! Addresses stay, so that work which may use them has to have passed first. The copy comes from
//! where another block shows the extent, behind what the home stream has queued.

use std::cell::Cell;
use std::time::Instant;

use super::block::{Block, after};
use super::budget::TenantId;
use super::commit::{Unfinished, is_capturing};
use super::core::{Attempt, Core, Locked};
use super::relief::Demand;
use super::slot::{Slot, SlotId};
use super::state::State;
use super::tenant::Tenant;
use crate::error::{AllocateError, CallError, CommitError, GrowAllError};
use crate::own::Access;
use crate::region::{Extent, Fence, Unmapped, Unused};

/// A block, and from where on its memory is to be its own.
#[derive(Clone, Copy, Debug)]
struct Step {
    place: SlotId,
    from: u64,
}

/// What became of a shared extent that was to be a slot's own.
enum Owned {
    Copied,
    /// A stream may still be copying, and could not be waited for.
    Copying(Fence, AllocateError),
}

/// A block whose memory could not be made its own.
#[derive(Debug)]
pub(super) struct Refused {
    /// Which of those that were asked for.
    pub(super) index: usize,
    pub(super) cause: AllocateError,
}

/// Why a block's memory could not be made its own.
enum Blocked {
    Refused(AllocateError),
    /// The mapper or another operation is at its slot, or at all others that show what it shows: one
    /// of those is copied from.
    Out,
}

impl<E: Into<AllocateError>> From<E> for Blocked {
    fn from(cause: E) -> Self {
        Self::Refused(cause.into())
    }
}

/// How far one call has come.
#[derive(Debug, Default)]
struct Progress {
    /// The fences cover the work that was queued when it began.
    fenced: Cell<bool>,
    /// The block that was refused.
    refused: Cell<usize>,
}

impl Tenant {
    /// Makes the memory of several of the tenant's blocks their own, from the byte on that is given
    /// with each. Asks pressure hooks, and waits as long as the most patient of the blocks may. What
    /// was made private stays so when another one is refused: every block shows the same bytes.
    pub(crate) fn unshare(&self, blocks: &[(&Block, u64)]) -> Result<(), GrowAllError> {
        let steps = steps(blocks);
        let patience = blocks.iter().filter_map(|(block, _)| block.patience());
        let until = patience.max().map(after);
        let made = self.core().unshare(self.id(), &steps, until);
        made.map_err(|refused| refused.of(&steps))
    }

    /// The same if that needs no waiting.
    pub(crate) fn try_unshare(&self, blocks: &[(&Block, u64)]) -> Result<(), GrowAllError> {
        let steps = steps(blocks);
        let made = self.core().try_unshare(self.id(), &steps);
        made.map_err(|refused| refused.of(&steps))
    }
}

fn steps(blocks: &[(&Block, u64)]) -> Vec<Step> {
    let step = |&(block, from): &(&Block, u64)| Step {
        place: *block.place(),
        from,
    };
    blocks.iter().map(step).collect()
}

impl Refused {
    fn of(self, steps: &[Step]) -> GrowAllError {
        let Self { index, cause } = self;
        let size = steps.get(index).map_or(0, |step| step.from);
        GrowAllError::Refused { index, size, cause }
    }
}

impl Core {
    /// Makes memory its own that blocks of a tenant, which are to have so many bytes each, would else
    /// grow over and not be able to write.
    /// Lets the lock go only if there are any.
    pub(super) fn unshare_cuts<'a>(
        &'a self,
        state: Locked<'a>,
        tenant: TenantId,
        wanted: &[(SlotId, u64)],
        until: Option<Instant>,
    ) -> Result<Locked<'a>, Refused> {
        self.unshare_wanted(state, wanted, |cut| self.unshare(tenant, cut, until))
    }

    /// The same if that needs no waiting.
    pub(super) fn try_unshare_cuts<'a>(
        &'a self,
        state: Locked<'a>,
        tenant: TenantId,
        wanted: &[(SlotId, u64)],
    ) -> Result<Locked<'a>, Refused> {
        self.unshare_wanted(state, wanted, |cut| self.try_unshare(tenant, cut))
    }

    fn unshare_wanted<'a>(
        &'a self,
        state: Locked<'a>,
        wanted: &[(SlotId, u64)],
        make: impl FnOnce(&[Step]) -> Result<(), Refused>,
    ) -> Result<Locked<'a>, Refused> {
        let (mut indices, mut cut) = (Vec::new(), Vec::new());
        for (index, (place, size)) in wanted.iter().enumerate() {
            let step = state.cut_in(place, *size);
            if let Some(step) = step.map_err(|cause| Refused { index, cause })? {
                indices.push(index);
                cut.push(step);
            }
        }
        if cut.is_empty() {
            return Ok(state);
        }
        Self::let_go(state);
        make(&cut).map_err(|Refused { index, cause }| Refused {
            index: indices.get(index).copied().unwrap_or_default(),
            cause,
        })?;
        Ok(self.lock())
    }

    fn unshare(
        &self,
        tenant: TenantId,
        steps: &[Step],
        until: Option<Instant>,
    ) -> Result<(), Refused> {
        let progress = Progress::default();
        let bytes = self.replaced(steps);
        let outcome = self.insist(tenant, bytes, until, |state| {
            self.attempt_to_unshare(state, steps, &progress)
        });
        outcome.map_err(|cause| progress.refused(cause))
    }

    fn try_unshare(&self, tenant: TenantId, steps: &[Step]) -> Result<(), Refused> {
        let progress = Progress::default();
        let bytes = self.replaced(steps);
        let attempt = |state| self.attempt_to_unshare(state, steps, &progress);
        let (mut state, outcome) = self.beside_others(self.lock(), &attempt);
        let outcome = outcome.map_err(|error| state.refuse(tenant, Demand::Bytes(bytes), error));
        Self::let_go(state);
        outcome.map_err(|cause| progress.refused(cause))
    }

    /// How much memory of their own blocks get instead of what they share.
    fn replaced(&self, steps: &[Step]) -> u64 {
        let places = steps.iter().map(|step| (step.place, 0));
        let state = self.await_slots(self.lock(), places);
        steps.iter().map(|step| state.replaced(step)).sum()
    }

    fn attempt_to_unshare<'a>(
        &'a self,
        mut state: Locked<'a>,
        steps: &[Step],
        progress: &Progress,
    ) -> Attempt<'a, ()> {
        loop {
            // Whoever is alone by now needs nothing.
            state.part_all();
            // The mapper may be placing something behind what is to go.
            let wanted = steps.iter().map(|step| (step.place, u64::MAX));
            state = self.await_slots(state, wanted);
            let outcome = match state.unshare(steps, progress) {
                Ok(()) => Ok(()),
                Err(Blocked::Refused(cause)) => Err(cause),
                Err(Blocked::Out) => {
                    state = state.wait(&self.settled, None);
                    continue;
                }
            };
            state.look_behind();
            return (state, outcome);
        }
    }
}

impl Progress {
    fn refused(&self, cause: AllocateError) -> Refused {
        let index = self.refused.get();
        Refused { index, cause }
    }
}

impl Locked<'_> {
    fn unshare(&mut self, steps: &[Step], progress: &Progress) -> Result<(), Blocked> {
        if !progress.fenced.replace(true) {
            steps.iter().for_each(|step| self.fence(step));
        }
        for (index, step) in steps.iter().enumerate() {
            progress.refused.set(index);
            self.check_unused(step)?;
        }
        for (index, step) in steps.iter().enumerate() {
            progress.refused.set(index);
            // The lock was let go for an earlier one.
            let (id, slot) = (step.place.tenant, step.place.slot);
            if self.is_out(id, slot) || self.waits_for_mapper(id, slot, u64::MAX) {
                return Err(Blocked::Out);
            }
            // What was copied for an earlier one may read what this one shows.
            self.check_unused(step)?;
            self.unshare_slot(step)?;
        }
        Ok(())
    }
}

impl State {
    /// From where on a block that can grow to so many bytes has to get memory of its own before.
    /// One that is just falling asleep does not grow: it may stay awake, and show the same as before.
    fn cut_in(&self, place: &SlotId, size: u64) -> Result<Option<Step>, AllocateError> {
        let slot = self.slot(place.tenant, place.slot);
        let Some((slot, block)) = slot.and_then(|slot| Some((slot, slot.block.as_ref()?))) else {
            return Ok(None);
        };
        let from = block.requested;
        if !slot.is_cut() || size <= from || size > place.capacity {
            return Ok(None);
        }
        match slot.sleep_state.is_awake() {
            true => Ok(Some(Step {
                place: *place,
                from,
            })),
            false => Err(AllocateError::Asleep { size: from }),
        }
    }

    /// How much memory of its own a block gets instead of what it shares.
    fn replaced(&self, step: &Step) -> u64 {
        let slot = self.slot(step.place.tenant, step.place.slot);
        slot.filter(|slot| slot.shared > step.from)
            .and_then(|slot| {
                Some(
                    slot.used()
                        .saturating_sub(slot.space.extent_around(step.from)?.offset),
                )
            })
            .unwrap_or(0)
    }

    /// Has the work that is queued by now pass before other memory is put under a block.
    fn fence(&mut self, step: &Step) {
        let slot = self.slot_mut(step.place.tenant, step.place.slot);
        if let Some(slot) = slot.filter(|slot| slot.bound() > step.from)
            && let Some(block) = &slot.block
        {
            let fence = block.fence(&slot.space);
            slot.fence.merge(fence);
        }
    }

    /// Whether it has, and no lease keeps the memory where it is.
    fn check_unused(&mut self, step: &Step) -> Result<(), AllocateError> {
        let (id, index) = (step.place.tenant, step.place.slot);
        let (capturing, needs) = (self.capturing, &mut self.needs_synchronise);
        let tenancy = self.tenants.get_mut(&id);
        let slot = tenancy.and_then(|tenancy| tenancy.slot_mut(index));
        let Some(slot) = slot.filter(|slot| slot.bound() > step.from) else {
            return Ok(());
        };
        let passed = Self::poll(capturing, needs, &mut slot.fence)? && slot.leases == 0;
        if passed {
            return Ok(());
        }
        let bytes = slot.bound() - step.from;
        if capturing > 0 {
            return Err(AllocateError::Capturing(self.shortage(id, bytes, 0)));
        }
        let others = self
            .slot(id, index)
            .map_or(0, |slot| self.count_others(id, slot, step.from));
        Err(AllocateError::SharedInUse {
            offset: step.from,
            bytes,
            others,
        })
    }
}

impl Locked<'_> {
    fn unshare_slot(&mut self, step: &Step) -> Result<(), Blocked> {
        let (id, index) = (step.place.tenant, step.place.slot);
        self.check_usable(id)?;
        let Some(mut slot) = self.take_out(id, index) else {
            return Ok(());
        };
        let outcome = self.own_from(id, (index, &mut slot), step.from);
        slot.receded();
        self.lay_down(id, index, slot);
        outcome
    }

    /// Makes the memory of a slot, which is out, its own from some byte on. Its fence has passed.
    fn own_from(
        &mut self,
        id: TenantId,
        (index, slot): (usize, &mut Slot),
        from: u64,
    ) -> Result<(), Blocked> {
        if slot.bound() <= from {
            return Ok(());
        }
        let Some(proof) = slot.proof() else {
            return Err(CallError::InUse.into());
        };
        self.take_spare((id, index), slot, proof)?;
        self.part(id, index, slot, proof)?;
        slot.receded();
        // What is left of it is the extent that the byte lies in.
        let (Some(extent), to) = (slot.space.extent_around(from), slot.used()) else {
            return Ok(());
        };
        if slot.shared <= from {
            return Ok(self.open(slot, extent)?);
        }
        let bytes = to.saturating_sub(extent.offset);
        // The copy would become a part of the graph, and nothing would have been copied. The lock may
        // have been let go since the fence was asked.
        let home = slot.block.as_ref().and_then(|block| block.home.as_ref());
        if self.capturing > 0 || is_capturing(home)? {
            return Err(AllocateError::Capturing(self.shortage(id, bytes, 0)).into());
        }
        self.make_room(id, bytes)?;
        let Some((other, mut source)) = self.take_other(id, (index, slot), extent)? else {
            // It turned out to have it alone.
            if let Some(tenancy) = self.tenants.get_mut(&id) {
                tenancy.share_table.settle(index, slot);
            }
            self.renew((id, index), slot);
            return Ok(self.open(slot, extent)?);
        };
        let owned = self.exchange_for_own(id, (index, slot), (extent, to), &mut source, proof);
        self.put_slot(id, other, source);
        Ok(owned?)
    }

    /// Another slot that shows an extent which a slot shows: one that can be taken out, to be copied
    /// from. Nothing if no other slot does.
    fn take_other(
        &mut self,
        id: TenantId,
        (index, slot): (usize, &Slot),
        extent: Extent,
    ) -> Result<Option<(usize, Box<Slot>)>, Blocked> {
        let handle = slot.space.handle_at(extent.offset);
        let (Some(handle), Some(tenancy)) = (handle, self.tenants.get(&id)) else {
            return Ok(None);
        };
        let others: Vec<usize> = tenancy.share_table.others_of(handle, index).collect();
        for &other in &others {
            if let Some(source) = self.take_out(id, other) {
                return Ok(Some((other, source)));
            }
        }
        if others.is_empty() {
            return Ok(None);
        }
        match others.iter().any(|&other| self.is_out(id, other)) {
            true => Err(Blocked::Out),
            // Lost to a panic.
            false => Err(CallError::InUse.into()),
        }
    }

    /// Puts memory of a slot's own where it shows a shared extent, with the same bytes before `to`.
    fn exchange_for_own(
        &mut self,
        id: TenantId,
        (index, slot): (usize, &mut Slot),
        (extent, to): (Extent, u64),
        source: &mut Slot,
        proof: Unused,
    ) -> Result<(), AllocateError> {
        let bytes = to.saturating_sub(extent.offset);
        let most = slot.space.most_at(extent.offset);
        let withdrawn = self.unlocked(|| slot.space.withdraw(extent.offset, proof));
        let Some(old) = withdrawn? else {
            return Ok(());
        };
        match self.copy_to_own(id, (index, slot), (extent, bytes), source) {
            Ok(Owned::Copied) => {
                self.has_own(id, (index, slot), (extent, to), old);
                slot.lent = slot.lent.min(extent.offset);
                Ok(())
            }
            Ok(Owned::Copying(running, cause)) => {
                self.has_own(id, (index, slot), (extent, to), old);
                // It may not be written before the copy has passed: that is asked when it is wanted
                // again.
                slot.fence.merge(running);
                Err(cause)
            }
            Err(error) => {
                self.put_extent_back(id, (index, slot), extent, (old, most))?;
                Err(error)
            }
        }
    }

    /// A slot has memory of its own, of which it uses what lies before `to`, where it showed a shared
    /// extent.
    fn has_own(
        &mut self,
        id: TenantId,
        (index, slot): (usize, &mut Slot),
        (extent, to): (Extent, u64),
        old: Unmapped,
    ) {
        self.parted(id, index, slot, extent.offset, old);
        slot.space.settle(extent.offset);
        let noted = slot.space.note_writer(extent.offset, to, id.0);
        slot.touched = self.tick();
        if let Some(block) = &mut slot.block {
            block.noted = block.noted.max(noted);
        }
    }

    /// Puts a shared extent back where it was. If even that fails, the block has lost it.
    fn put_extent_back(
        &mut self,
        id: TenantId,
        (index, slot): (usize, &mut Slot),
        extent: Extent,
        (old, most): (Unmapped, Access),
    ) -> Result<(), AllocateError> {
        let handle = old.physical.as_raw();
        let back = vec![old];
        let placed = self.unlocked(|| slot.space.place_back(extent.offset, back, most));
        let Err(failed) = placed else {
            return Ok(());
        };
        for unmapped in failed.physicals {
            self.parted(id, index, slot, extent.offset, unmapped);
        }
        if failed.stuck > 0 {
            self.stuck(id, index, slot, extent.offset, (handle, extent.size));
        }
        slot.broken = true;
        Err(AllocateError::Lost {
            address: slot.space.address(),
            offset: extent.offset,
            bytes: extent.size,
            cause: failed.error,
        })
    }

    /// Opens an extent that a slot has alone.
    fn open(&mut self, slot: &mut Slot, extent: Extent) -> Result<(), AllocateError> {
        let opened = self.unlocked(|| slot.space.cap(extent.offset, Access::ReadWrite));
        opened.map_err(CommitError::Access)?;
        slot.lent = slot.lent.min(extent.offset);
        Ok(())
    }

    /// Places memory of a slot's own where a shared extent was, and copies its first bytes there.
    fn copy_to_own(
        &mut self,
        id: TenantId,
        (index, slot): (usize, &mut Slot),
        (extent, bytes): (Extent, u64),
        source: &mut Slot,
    ) -> Result<Owned, AllocateError> {
        // All of it is overwritten by the copy: there is nothing to scrub.
        let count = self.commit((id, index), slot, extent.offset, bytes, true)?;
        let home = slot.block.as_ref().and_then(|block| block.home.clone());
        let range = (extent.offset, bytes);
        let error = match self.copy_between(source, slot, range, home.as_ref()) {
            Ok(()) => return Ok(Owned::Copied),
            Err(Unfinished { error, running }) if !running.is_complete() => {
                return Ok(Owned::Copying(running, error));
            }
            Err(failed) => failed.error,
        };
        self.uncommit(slot, extent.offset, Some(Unused::never_used()));
        self.refund_for((id, index), bytes);
        self.budget.refund_mappings(id, count);
        Err(error)
    }
}
