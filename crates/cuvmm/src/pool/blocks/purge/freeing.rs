//! Accounting for memory that blocks give up, and for the leases that delay it. Makes no driver
//! call except the fills of a [hardened](crate::pool::blocks::slots::hardened) pool; the memory is unmapped
//! [later](crate::pool::blocks::purge).

use std::num::NonZeroU64;

use crate::error::{ArgumentError, BlockError};
use crate::extents::Fence;
use crate::own::{CopyFailed, Stream};
use crate::pool::accounts::TenantId;
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{
    BYTES, BlockPlace, FreedBlock, SleepState, Slot, SlotId, Unswept,
};

impl Blocks {
    /// Shrinks blocks, whose slots are in their places, to the given sizes: all of them or none.
    /// A hardened pool overwrites the memory unless the pool is `capturing`.
    pub(super) fn shrink(
        &mut self,
        steps: &[(BlockPlace, u64)],
        capturing: bool,
    ) -> Result<(), BlockError> {
        for (place, size) in steps {
            let slot = self.slots.get(place.slot);
            slot.map_or(Ok(()), Slot::check_awake)?;
            if let Some(block) = slot.and_then(|slot| slot.block.as_ref()) {
                ArgumentError::at_most(BYTES, *size, block.requested)?;
            }
        }
        let (now, fill) = (self.tick(), self.fill().filter(|_| !capturing));
        for &(place, size) in steps {
            let used = self.granule.round_up(size);
            self.with_slot(place.slot, |slot| {
                let before = slot.used();
                slot.give_up(size, used, now);
                let used = slot.used();
                if let Some(byte) = fill.filter(|_| used < before) {
                    let home = slot.home().cloned();
                    slot.overwrite(byte, home.as_ref(), used);
                }
            });
        }
        Ok(())
    }

    /// Frees the blocks that a tenant which was unregistered has in stream caches, and lists its
    /// slots to be purged.
    pub(super) fn drain(&mut self, id: TenantId) {
        let Some(tenancy) = self.slots.of_mut(id) else {
            return;
        };
        // The tenant allocates no more rows, so each slot can go by itself.
        tenancy.rows.forget_all();
        let freed = tenancy.unswept.close();
        let indices: Vec<usize> = tenancy.indices().collect();
        self.free_all(&freed);
        for index in indices {
            self.with_slot(SlotId { tenant: id, index }, |_| ());
        }
        self.has_deferred = true;
    }

    /// Ends a block. A hardened pool overwrites its memory unless the pool is `capturing`.
    pub(super) fn free(&mut self, id: SlotId, capturing: bool) {
        let (now, fill) = (self.tick(), self.fill());
        self.free_at(id, now, fill.filter(|_| !capturing));
    }

    fn free_at(&mut self, id: SlotId, now: u64, fill: Option<u8>) {
        let slept = self.with_slot(id, |slot| {
            if let (Some(block), Some(byte)) = (slot.end_block(), fill) {
                slot.overwrite(byte, block.home.as_ref(), 0);
            }
            slot.touched = now;
            // An operation that is moving the block finds out that it is gone.
            let slept = slot.sleep_state.is_asleep();
            if slept {
                slot.sleep_state = SleepState::Awake;
            }
            slept
        });
        if slept == Some(true) {
            self.update_bypass(id.tenant);
        }
    }

    pub(in crate::pool) fn sweep(&mut self, id: TenantId) -> bool {
        let freed = match self.slots.of(id) {
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
        let tenancies = self.slots.iter();
        let freed = tenancies.flat_map(|(_, tenancy)| sweep(&*tenancy.unswept));
        let freed: Vec<FreedBlock> = freed.collect();
        self.free_all(&freed);
    }

    /// Frees blocks that left the stream caches. A block whose slot is out is freed when an
    /// operation ends.
    pub(in crate::pool::blocks) fn free_all(&mut self, freed: &[FreedBlock]) {
        for freed in freed {
            match self.slots.is_out(freed.slot) {
                true => {
                    self.to_free.push(*freed);
                    self.has_deferred = true;
                }
                // A hardened pool has nothing in stream caches.
                false => self.free_at(freed.slot, freed.at, None),
            }
        }
    }

    pub(super) fn free_late(&mut self) {
        if !self.to_free.is_empty() {
            let freed = std::mem::take(&mut self.to_free);
            self.free_all(&freed);
        }
    }

    /// Frees the blocks that waited for the slots of an operation that ends, and calls the mapper if
    /// it waited for them.
    pub(in crate::pool) fn end_flight(&mut self, flight: NonZeroU64) {
        self.free_late();
        self.request_growth();
        if std::thread::panicking() {
            // No thread must wait for slots that the operation had taken out.
            self.slots.lose(flight);
        }
    }

    pub(in crate::pool::blocks) fn take_lease(&mut self, id: SlotId) {
        self.with_slot(id, |slot| {
            slot.leases += 1;
            slot.sleep_state.note_lease();
        });
    }

    /// Ends a lease; returns `true` if memory may have become free.
    pub(super) fn end_lease(&mut self, id: SlotId) -> bool {
        let block = self.slots.get(id).map(|slot| slot.block.is_some());
        let now = match block {
            Some(false) => self.tick(),
            _ => 0,
        };
        let given = self.with_slot(id, |slot| {
            slot.end_lease();
            if slot.leases == 0 && slot.exported {
                // The export was only planned, or the driver refused it.
                slot.exported = slot.space.exported().next().is_some();
            }
            if slot.block.is_none() {
                slot.touched = now;
            }
            slot.leases == 0 && (slot.block.is_none() || slot.space.bytes() > slot.used())
        });
        given == Some(true)
    }

    /// Returns the byte with which a hardened pool overwrites memory.
    pub(in crate::pool::blocks) fn fill(&self) -> Option<u8> {
        self.hardening.as_ref()?.fill
    }
}

impl Slot {
    /// Takes the memory behind the first `size` bytes (`used` in whole granules) from a block.
    fn give_up(&mut self, size: u64, used: Option<u64>, now: u64) {
        let Some(block) = &mut self.block else {
            return;
        };
        let used = used.unwrap_or(block.used);
        // Memory that must come back as zeros is zeroed behind the work that may still write there.
        let blanked = block.zeroed && size < block.requested;
        block.requested = size;
        if used < block.used || blanked {
            block.reach = block.reach.max(block.used);
            block.used = used;
            let fence = block.fence(&self.space);
            self.fence.merge(fence);
            self.keeps_tail |= self.leases > 0;
            self.touched = now;
        }
    }

    /// Overwrites the memory behind the first `from` bytes of a slot, which a block has just given
    /// up, behind the work of its home stream. Does nothing if other slots map the memory; if
    /// another stream or a lease may still use it; if it was exported, since importers may read it;
    /// and while the stream captures, since the fill would become part of the graph.
    fn overwrite(&mut self, byte: u8, home: Option<&Stream>, from: u64) {
        let Some(home) = home else {
            return;
        };
        let (from, to) = (from.max(self.bound()), self.space.bytes());
        let alone = self.leases == 0 && !self.exported && self.fence.precedes(home);
        if from >= to || !alone {
            return;
        }
        match home.queue_uncaptured(|| self.space.fill(home, from, byte, to - from)) {
            Ok(()) => {
                // The fence was made before the fill was queued.
                self.fence.merge(Fence::stream(home.clone()));
                self.space.blank(from);
            }
            Err(CopyFailed { error, ended }) => {
                if !ended {
                    self.fence.merge(Fence::stream(home.clone()));
                }
                log!(debug, %error, "freed memory was not overwritten");
            }
        }
        // If the block grows over the memory again, its writer is marked again.
        if let Some(block) = &mut self.block {
            block.noted = block.noted.min(from);
        }
    }
}
