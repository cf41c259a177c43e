//! Accounting for memory that blocks give up, and for the leases that delay it. Makes no driver
//! call except the fills of a [hardened](crate::pool::blocks::slots::hardened) pool; the memory is unmapped
//! [later](crate::pool::blocks::purge).

use crate::error::{ArgumentError, BlockError, CallError};
use crate::extents::Fence;
use crate::own::{CopyFailed, Stream};
use crate::pool::accounts::TenantId;
use crate::pool::blocks::slots::{BYTES, FreedBlock, SleepState, Slot, SlotId, Tenancy, Unswept};
use crate::pool::state::State;

impl State {
    pub(super) fn may_shrink(&self, id: SlotId, wanted: u64) -> Result<(), BlockError> {
        let Some(slot) = self.blocks.slots.get(id) else {
            return Ok(());
        };
        slot.check_awake()?;
        match &slot.block {
            Some(block) => Ok(ArgumentError::at_most(BYTES, wanted, block.requested)?),
            None => Ok(()),
        }
    }

    pub(super) fn shrink_one(&mut self, id: SlotId, size: u64, now: u64) {
        let granule = self.memory.device.granule();
        self.with_slot(id, |state, slot| {
            let before = slot.used();
            Self::give_up(slot, size, granule.round_up(size), now);
            let used = slot.used();
            if used < before && state.blocks.hardening.is_some() {
                let home = slot.home().cloned();
                state.overwrite(slot, home.as_ref(), used);
            }
        });
    }

    /// Takes the memory behind the first `size` bytes (`used` in whole granules) from a block.
    fn give_up(slot: &mut Slot, size: u64, used: Option<u64>, now: u64) {
        let Some(block) = &mut slot.block else {
            return;
        };
        let used = used.unwrap_or(block.used);
        // Memory that must come back as zeros is zeroed behind the work that may still write there.
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

    pub(in crate::pool) fn free_at(&mut self, id: SlotId, now: u64) {
        let slept = self.with_slot(id, |state, slot| {
            if let Some(block) = slot.end_block() {
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

    pub(crate) fn sweep(&mut self, id: TenantId) -> bool {
        let freed = match self.blocks.slots.of(id) {
            Some(tenancy) => tenancy.unswept.sweep(),
            None => return false,
        };
        self.free_all(&freed);
        !freed.is_empty()
    }

    pub(in crate::pool) fn sweep_all(&mut self) {
        self.sweep_by(|unswept| unswept.sweep());
    }

    /// Frees the blocks in all stream caches for a request that has just counted itself as waiting:
    /// every block freed from here on is announced.
    pub(in crate::pool) fn sweep_each(&mut self) {
        self.sweep_by(|unswept| unswept.sweep_each());
    }

    fn sweep_by(&mut self, sweep: fn(&dyn Unswept) -> Vec<FreedBlock>) {
        let tenancies = self.blocks.slots.iter();
        let freed = tenancies.flat_map(|(_, tenancy)| sweep(&*tenancy.unswept));
        let freed: Vec<FreedBlock> = freed.collect();
        self.free_all(&freed);
    }

    /// Frees blocks that left the stream caches. A block whose slot is out is freed when an
    /// operation ends.
    pub(in crate::pool) fn free_all(&mut self, freed: &[FreedBlock]) {
        for freed in freed {
            match self.is_out(freed.slot) {
                true => {
                    self.blocks.to_free.push(*freed);
                    self.memory.has_deferred = true;
                }
                false => self.free_at(freed.slot, freed.at),
            }
        }
    }

    pub(in crate::pool) fn free_late(&mut self) {
        if !self.blocks.to_free.is_empty() {
            let freed = std::mem::take(&mut self.blocks.to_free);
            self.free_all(&freed);
        }
    }

    pub(in crate::pool) fn take_lease(&mut self, id: SlotId) {
        self.with_slot(id, |_, slot| {
            slot.leases += 1;
            slot.sleep_state.note_lease();
        });
    }

    /// Ends a lease; returns `true` if memory may have become free.
    pub(super) fn end_lease_at(&mut self, id: SlotId) -> bool {
        let given = self.with_slot(id, |state, slot| {
            slot.end_lease();
            if slot.leases == 0 && slot.exported {
                // The export was only planned, or the driver refused it.
                slot.exported = slot.space.exported().next().is_some();
            }
            if slot.block.is_none() {
                slot.touched = state.tick();
            }
            slot.leases == 0 && (slot.block.is_none() || slot.space.bytes() > slot.used())
        });
        given == Some(true)
    }

    pub(crate) fn record_use(&mut self, id: SlotId, stream: &Stream) -> Result<(), CallError> {
        self.memory.device.own_process()?;
        stream.check_driver(&self.memory.device)?;
        let capturing = self.is_capturing();
        if let Some(slot) = self.blocks.slots.get_mut(id) {
            slot.record_use(stream, capturing);
        }
        Ok(())
    }

    /// Records that work on unknown streams uses the block, or memory that a lease keeps.
    pub(crate) fn record_use_anywhere(&mut self, id: SlotId) {
        if let Some(slot) = self.blocks.slots.get_mut(id) {
            slot.record_use_anywhere();
        }
    }

    pub(crate) fn streams(&self, id: SlotId) -> Option<Vec<Stream>> {
        let slot = self.blocks.slots.get(id)?;
        slot.block.as_ref()?.streams()
    }

    /// Returns the bytes of a tenant that no guarantee can be given over: those that cannot be
    /// reclaimed, and those of holders, which reuse their memory without asking the pool.
    fn not_promised(&self, id: TenantId) -> u64 {
        let kept = self.blocks.slots.of(id).map_or(0, Tenancy::kept);
        kept + self.memory.holders.bytes_of(id) + self.memory.budget.account(id).in_flight
    }

    pub(in crate::pool) fn guaranteeable(&mut self, tenant: Option<TenantId>) -> u64 {
        self.sweep_all();
        self.memory
            .budget
            .guaranteeable(tenant, false, |id| self.not_promised(id))
    }

    /// Returns the bytes that a tenant, new or registered, can be guaranteed within the ledger's
    /// grant.
    pub(in crate::pool) fn guaranteeable_now(&mut self, tenant: Option<TenantId>) -> u64 {
        self.sweep_all();
        self.memory
            .budget
            .guaranteeable(tenant, true, |id| self.not_promised(id))
    }

    pub(crate) fn fill(&self) -> Option<u8> {
        self.blocks.hardening.as_ref()?.fill
    }

    /// Overwrites the memory behind the first `from` bytes of a slot, which a block has just given
    /// up, behind the work of its home stream. Does nothing if other slots map the memory; if
    /// another stream or a lease may still use it; if it was exported, since importers may read it;
    /// and while the stream captures, since the fill would become part of the graph.
    fn overwrite(&self, slot: &mut Slot, home: Option<&Stream>, from: u64) {
        let (Some(byte), Some(home)) = (self.fill(), home) else {
            return;
        };
        let (from, to) = (from.max(slot.bound()), slot.space.bytes());
        let alone = slot.leases == 0 && !slot.exported && slot.fence.precedes(home);
        if from >= to || !alone || self.is_capturing() {
            return;
        }
        match home.queue_uncaptured(|| slot.space.fill(home, from, byte, to - from)) {
            Ok(()) => {
                // The fence was made before the fill was queued.
                slot.fence.merge(Fence::stream(home.clone()));
                slot.space.blank(from);
            }
            Err(CopyFailed { error, ended }) => {
                if !ended {
                    slot.fence.merge(Fence::stream(home.clone()));
                }
                log!(debug, %error, "freed memory was not overwritten");
            }
        }
        // If the block grows over the memory again, its writer is marked again.
        if let Some(block) = &mut slot.block {
            block.noted = block.noted.min(from);
        }
    }
}
