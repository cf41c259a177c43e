//! Giving memory up: shrinking, freeing, unregistering, and the leases that put it off. None of it
//! waits, and only unregistering calls the driver, but in a [hardened](super::hardened) pool and
//! for what was [exported](super::exported).

use std::collections::BTreeSet;

use super::budget::TenantId;
use super::locked::Locked;
use super::sleep_state::SleepState;
use super::slot::{Slot, SlotId};
use super::state::State;
use super::tenancy::Freed;
use crate::deferred::defer;
use crate::error::{CallError, ShrinkError};
use crate::own::Stream;
use crate::region::Urgency;

/// How often an operation looks for what draining tenants left before it ends.
const COLLECTS: usize = 3;

impl Locked<'_> {
    /// Shrinks blocks, whose slots are in their places, to the sizes given with them: all of them or
    /// none.
    pub(crate) fn shrink(&mut self, steps: &[(SlotId, u64)]) -> Result<(), ShrinkError> {
        for (place, size) in steps {
            self.may_shrink(place, *size)?;
        }
        let now = self.tick();
        for (place, size) in steps {
            self.shrink_one(place, *size, now);
        }
        self.purge_some();
        Ok(())
    }

    /// Frees a block, whose slot is in its place.
    pub(crate) fn free(&mut self, place: &SlotId) {
        let now = self.tick();
        self.free_at(place, now);
        self.purge_some();
        self.collect_if_draining(place.tenant);
    }

    /// Unregisters a tenant: no more allocations, and what is idle goes back to the pool.
    pub(crate) fn unregister(&mut self, id: TenantId) {
        let Some(tenancy) = self.tenants.get_mut(&id) else {
            return;
        };
        if !std::mem::replace(&mut tenancy.registered, false) {
            return;
        }
        let hook = tenancy.hook.take();
        // Nobody will want them side by side: each goes when it can.
        tenancy.rows.forget_all();
        let freed = tenancy.unswept.close();
        self.free_all(&freed);
        self.budget.drain(id);
        self.collect_if_draining(id);
        if let Some(hook) = hook {
            defer(move || drop(hook));
        }
    }

    /// Does what was put off until slots are in their places: frees blocks whose slots were out, takes
    /// back what draining tenants do not use, and gives to the driver what others may still have.
    pub(super) fn finish_behind(&mut self) {
        self.has_behind = false;
        self.free_late();
        // Other operations may put slots back meanwhile.
        let mut collected = BTreeSet::new();
        for _ in 0..COLLECTS {
            for id in std::mem::take(&mut self.to_collect) {
                self.collect_if_draining(id);
                collected.insert(id);
            }
        }
        self.release_marked();
        // What cannot be unmapped is tried again when another slot is put back, not at once.
        let rest = self.to_collect.difference(&collected).next().is_some();
        self.has_behind = rest || !self.to_release.is_empty();
    }

    /// Takes back what a draining tenant no longer uses, as far as that has passed.
    pub(crate) fn collect_if_draining(&mut self, id: TenantId) {
        if self
            .tenants
            .get(&id)
            .is_none_or(|tenancy| tenancy.registered)
        {
            return;
        }
        if let Err(error) = self.take_back_all_of(id) {
            // It stays charged to the draining tenant and is tried again when wanted.
            tracing::warn!(%error, "idle memory of an unregistered tenant stays mapped for now");
        }
        self.drop_empty_slots_if_draining(id);
        // What still waits for its fence is the mapper's to look after.
        let state: &mut State = self;
        if state.tenants.contains_key(&id)
            && let Some(precommit) = &mut state.precommit
        {
            precommit.call(Urgency::Soon);
        }
    }

    /// Ends a lease on a block, whose slot is in its place; whether memory may have come free by it.
    pub(crate) fn end_lease(&mut self, place: &SlotId) -> bool {
        let given = self.end_lease_at(place);
        self.purge_some();
        self.collect_if_draining(place.tenant);
        given
    }
}

impl State {
    /// Why a block cannot shrink to a size, if it cannot.
    fn may_shrink(&self, place: &SlotId, wanted: u64) -> Result<(), ShrinkError> {
        if wanted == 0 {
            return Err(ShrinkError::ZeroSize);
        }
        let Some(slot) = self.slot(place.tenant, place.slot) else {
            return Ok(());
        };
        if !slot.sleep_state.is_awake() {
            return Err(ShrinkError::Asleep);
        }
        match &slot.block {
            Some(block) if wanted > block.requested => Err(ShrinkError::WouldGrow {
                size: block.requested,
                wanted,
            }),
            _ => Ok(()),
        }
    }

    /// Shrinks a block that can shrink.
    fn shrink_one(&mut self, place: &SlotId, size: u64, now: u64) {
        let granule = self.device.granule();
        let Some(mut slot) = self.take_slot(place.tenant, place.slot) else {
            return;
        };
        let before = slot.used();
        Self::give_up(&mut slot, size, granule.round_up(size), now);
        let used = slot.used();
        if used < before && self.hardening.is_some() {
            let home = slot.block.as_ref().and_then(|block| block.home.clone());
            self.overwrite(&mut slot, home.as_ref(), used);
        }
        self.lay_down(place.tenant, place.slot, slot);
    }

    /// Takes what lies behind the first `size` bytes, `used` in whole granules, from a block.
    fn give_up(slot: &mut Slot, size: u64, used: Option<u64>, now: u64) {
        let Some(block) = &mut slot.block else {
            return;
        };
        let used = used.unwrap_or(block.used);
        // What comes back as zeros is zeroed behind the work that may still write there.
        let blanked = block.zeroed && size < block.requested;
        block.requested = size;
        if used < block.used || blanked {
            block.reach = block.reach.max(block.used);
            block.used = used;
            let fence = block.fence(&slot.space);
            slot.fence.merge(fence);
            slot.keeps_tail |= slot.leases > 0;
            slot.touched = now;
        }
    }

    fn free_at(&mut self, place: &SlotId, now: u64) {
        let Some(mut slot) = self.take_slot(place.tenant, place.slot) else {
            return;
        };
        if let Some(block) = slot.vacate() {
            self.overwrite(&mut slot, block.home.as_ref(), 0);
        }
        // Whoever is moving a block finds out that it is gone.
        let slept = matches!(slot.sleep_state, SleepState::Asleep { .. });
        if slept {
            slot.sleep_state = SleepState::Awake;
        }
        slot.touched = now;
        self.lay_down(place.tenant, place.slot, slot);
        if slept {
            self.update_bypass(place.tenant);
        }
    }

    /// Frees for good what a tenant's blocks left in stream caches; whether there was anything.
    pub(crate) fn sweep(&mut self, id: TenantId) -> bool {
        let freed = match self.tenants.get(&id) {
            Some(tenancy) => tenancy.unswept.sweep(),
            None => return false,
        };
        self.free_all(&freed);
        !freed.is_empty()
    }

    pub(crate) fn sweep_all(&mut self) {
        let tenants = self.tenants.values();
        let freed: Vec<Freed> = tenants
            .flat_map(|tenancy| tenancy.unswept.sweep())
            .collect();
        self.free_all(&freed);
    }

    /// The same for one who has just said that it waits: nothing comes in a stream cache after this that
    /// it is not told of.
    pub(crate) fn sweep_each(&mut self) {
        let tenants = self.tenants.values();
        let freed: Vec<Freed> = tenants
            .flat_map(|tenancy| tenancy.unswept.sweep_each())
            .collect();
        self.free_all(&freed);
    }

    /// Frees blocks for good. Those whose slots are out are freed when an operation ends.
    pub(super) fn free_all(&mut self, freed: &[Freed]) {
        for freed in freed {
            match self.is_out(freed.place.tenant, freed.place.slot) {
                true => {
                    self.to_free.push(*freed);
                    self.has_behind = true;
                }
                false => self.free_at(&freed.place, freed.at),
            }
        }
    }

    /// Frees blocks that were to be freed while their slots were out.
    pub(super) fn free_late(&mut self) {
        if !self.to_free.is_empty() {
            let freed = std::mem::take(&mut self.to_free);
            self.free_all(&freed);
        }
    }

    pub(crate) fn take_lease(&mut self, place: &SlotId) {
        if let Some(mut slot) = self.take_slot(place.tenant, place.slot) {
            slot.leases += 1;
            self.put_slot(place.tenant, place.slot, slot);
        }
    }

    /// Ends a lease; whether memory may have come free by it.
    fn end_lease_at(&mut self, place: &SlotId) -> bool {
        let Some(mut slot) = self.take_slot(place.tenant, place.slot) else {
            return false;
        };
        slot.end_lease();
        let given = slot.leases == 0 && (slot.block.is_none() || slot.space.bytes() > slot.used());
        if slot.leases == 0 && slot.exported {
            // It was only meant to be, or the driver refused.
            slot.exported = slot.space.exported().next().is_some();
        }
        if slot.block.is_none() {
            slot.touched = self.tick();
        }
        self.lay_down(place.tenant, place.slot, slot);
        given
    }

    /// Notes that a stream uses the block, or used it while a lease kept it.
    pub(crate) fn record_use(&mut self, place: &SlotId, stream: &Stream) -> Result<(), CallError> {
        self.device.own_process()?;
        if !stream.device().same_driver(&self.device) {
            return Err(CallError::WrongDriver);
        }
        let capturing = self.capturing > 0;
        if let Some(slot) = self.slot_mut(place.tenant, place.slot) {
            slot.record_use(stream, capturing);
        }
        Ok(())
    }

    /// Notes that work on streams nobody can name uses the block, or used it while a lease kept it.
    pub(crate) fn record_use_anywhere(&mut self, place: &SlotId) {
        if let Some(slot) = self.slot_mut(place.tenant, place.slot) {
            slot.record_use_anywhere();
        }
    }

    /// The streams whose work may use the memory of a block, or of one that a lease kept; nothing
    /// where that may be any.
    pub(crate) fn streams(&self, place: &SlotId) -> Option<Vec<Stream>> {
        let slot = self.slot(place.tenant, place.slot)?;
        slot.block.as_ref()?.streams()
    }
}
