//! What blocks give up, and the leases that put it off: booked here, without a driver call but the
//! fills of a [hardened](super::hardened) pool, and looked after [later](super::purge).

use super::budget::TenantId;
use super::ids::BYTES;
use super::ids::SlotId;
use super::sleep_state::SleepState;
use super::slot::Slot;
use super::state::State;
use super::tenancy::FreedBlock;
use crate::error::{ArgumentError, BlockError, CallError, MemoryError};
use crate::own::Stream;
use crate::region::Fence;

impl State {
    /// Why a block cannot shrink to a size, if it cannot.
    pub(super) fn may_shrink(&self, id: SlotId, wanted: u64) -> Result<(), BlockError> {
        ArgumentError::not_zero(BYTES, wanted)?;
        let Some(slot) = self.slot(id) else {
            return Ok(());
        };
        if !slot.sleep_state.is_awake() {
            let size = slot.block.as_ref().map_or(0, |block| block.requested);
            return Err(MemoryError::Asleep { size }.into());
        }
        match &slot.block {
            Some(block) => Ok(ArgumentError::at_most(BYTES, wanted, block.requested)?),
            None => Ok(()),
        }
    }

    /// Shrinks a block that can shrink.
    pub(super) fn shrink_one(&mut self, id: SlotId, size: u64, now: u64) {
        let granule = self.device.granule();
        self.with_slot(id, |state, slot| {
            let before = slot.used();
            Self::give_up(slot, size, granule.round_up(size), now);
            let used = slot.used();
            if used < before && state.hardening.is_some() {
                let home = slot.home().cloned();
                state.overwrite(slot, home.as_ref(), used);
            }
        });
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

    pub(super) fn free_at(&mut self, id: SlotId, now: u64) {
        let slept = self.with_slot(id, |state, slot| {
            if let Some(block) = slot.vacate() {
                state.queue.abandon_growth(id);
                state.overwrite(slot, block.home.as_ref(), 0);
            }
            slot.touched = now;
            // An operation that is moving the block finds out that it is gone.
            let slept = matches!(slot.sleep_state, SleepState::Asleep { .. });
            if slept {
                slot.sleep_state = SleepState::Awake;
            }
            slept
        });
        if slept == Some(true) {
            self.update_bypass(id.tenant);
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
        let freed: Vec<FreedBlock> = tenants
            .flat_map(|tenancy| tenancy.unswept.sweep())
            .collect();
        self.free_all(&freed);
    }

    /// The same for one who has just said that it waits: nothing comes in a stream cache after this that
    /// it is not told of.
    pub(crate) fn sweep_each(&mut self) {
        let tenants = self.tenants.values();
        let freed: Vec<FreedBlock> = tenants
            .flat_map(|tenancy| tenancy.unswept.sweep_each())
            .collect();
        self.free_all(&freed);
    }

    /// Frees blocks for good. Those whose slots are out are freed when an operation ends.
    pub(super) fn free_all(&mut self, freed: &[FreedBlock]) {
        for freed in freed {
            match self.is_out(freed.slot) {
                true => {
                    self.to_free.push(*freed);
                    self.has_behind = true;
                }
                false => self.free_at(freed.slot, freed.at),
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

    pub(crate) fn take_lease(&mut self, id: SlotId) {
        self.with_slot(id, |_, slot| slot.leases += 1);
    }

    /// Ends a lease; whether memory may have come free by it.
    pub(super) fn end_lease_at(&mut self, id: SlotId) -> bool {
        let given = self.with_slot(id, |state, slot| {
            slot.end_lease();
            if slot.leases == 0 && slot.exported {
                // It was only meant to be, or the driver refused.
                slot.exported = slot.space.exported().next().is_some();
            }
            if slot.block.is_none() {
                slot.touched = state.tick();
            }
            slot.leases == 0 && (slot.block.is_none() || slot.space.bytes() > slot.used())
        });
        given == Some(true)
    }

    /// Notes that a stream uses the block, or used it while a lease kept it.
    pub(crate) fn record_use(&mut self, id: SlotId, stream: &Stream) -> Result<(), CallError> {
        self.device.own_process()?;
        if !stream.device().same_driver(&self.device) {
            return Err(CallError::WrongDriver);
        }
        let capturing = self.capturing > 0;
        if let Some(slot) = self.slot_mut(id) {
            slot.record_use(stream, capturing);
        }
        Ok(())
    }

    /// Notes that work on streams nobody can name uses the block, or used it while a lease kept it.
    pub(crate) fn record_use_anywhere(&mut self, id: SlotId) {
        if let Some(slot) = self.slot_mut(id) {
            slot.record_use_anywhere();
        }
    }

    /// The streams whose work may use the memory of a block, or of one that a lease kept; nothing
    /// where that may be any.
    pub(crate) fn streams(&self, id: SlotId) -> Option<Vec<Stream>> {
        let slot = self.slot(id)?;
        slot.block.as_ref()?.streams()
    }

    /// Bytes that a tenant, new or not, can be guaranteed.
    pub(crate) fn guaranteeable(&mut self, tenant: Option<TenantId>) -> u64 {
        self.sweep_all();
        self.budget.guaranteeable(tenant, |id| self.kept_by(id))
    }

    /// What memory that is given up is filled with.
    pub(crate) fn fill(&self) -> Option<u8> {
        self.hardening.as_ref()?.fill
    }

    /// Overwrites what lies behind the first `from` bytes of a slot, which a block has just given
    /// up, behind the work of its home stream. Not what others show too, nor if another stream or a
    /// lease may still use it, nor if it was exported, since whoever imported it may still read it,
    /// nor while the stream captures: the fill would become part of the graph.
    pub(crate) fn overwrite(&self, slot: &mut Slot, home: Option<&Stream>, from: u64) {
        let (Some(byte), Some(home)) = (self.fill(), home) else {
            return;
        };
        let (from, to) = (from.max(slot.bound()), slot.space.bytes());
        let alone = slot.leases == 0 && !slot.exported && slot.fence.precedes(home);
        if from >= to || !alone || self.capturing > 0 || home.is_capturing().unwrap_or(true) {
            return;
        }
        match slot.space.fill(home, from, byte, to - from) {
            Ok(()) => {
                // The fence was made before the fill was queued.
                slot.fence.merge(Fence::stream(home.clone()));
                slot.space.blank(from);
            }
            Err(error) => tracing::debug!(%error, "what a block gave up was not overwritten"),
        }
        // If the block grows over it again, that is noted anew.
        if let Some(block) = &mut slot.block {
            block.noted = block.noted.min(from);
        }
    }
}
