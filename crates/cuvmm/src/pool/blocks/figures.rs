//! Figures of all blocks that the rest of the pool asks for.

use std::sync::Arc;

use super::Blocks;
use super::slots::{Figures, Freed, PurgeQueue, SlotId, Tenancy};
use crate::pool::accounts::TenantId;

/// The bytes of a pool's blocks that are idle and cannot be had, by the reason.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::pool) struct IdleFigures {
    pub(in crate::pool) pending_free: u64,
    /// The bytes that wait for work, those too that stay stranded.
    pub(in crate::pool) waiting: u64,
    pub(in crate::pool) leased: u64,
    pub(in crate::pool) stranded: u64,
}

impl Blocks {
    /// Returns the bytes of a tenant's blocks that cannot be reclaimed, however long a request waits
    /// for the GPU.
    pub(in crate::pool) fn kept_by(&self, id: TenantId) -> u64 {
        self.slots.of(id).map_or(0, Tenancy::kept)
    }

    /// Returns the bytes that a block uses, and those that its slot has.
    pub(in crate::pool) fn used_and_held(&self, id: SlotId) -> (u64, u64) {
        let slot = self.slots.get(id);
        slot.map_or((0, 0), |slot| (slot.used(), slot.space.bytes()))
    }

    /// Returns `true` if a block may wait where other requests need not: for its own work, if it must
    /// read as zero where it grows, or for memory in the place of shared memory that it has shrunk into.
    pub(in crate::pool) fn may_wait_alone(&self, id: SlotId) -> bool {
        self.slots.get(id).is_some_and(|slot| {
            let block = slot.block.as_ref();
            slot.is_truncated() || block.is_some_and(|block| block.zeroed)
        })
    }

    /// Returns `true` if no block could give memory to a request, now or once it is purged or moved.
    pub(in crate::pool) fn can_give_nothing(&self) -> bool {
        self.queues.is_empty(PurgeQueue::Registered)
            && !self.slots.has_movable()
            && !self.slots.iter().any(|(_, tenancy)| tenancy.may_give())
    }

    /// Returns the figures of a tenant's slots, with their blocks' tags.
    pub(in crate::pool) fn figures_of(
        &self,
        id: TenantId,
    ) -> impl Iterator<Item = (Figures, Option<&Arc<str>>)> {
        self.slots.of(id).into_iter().flat_map(Tenancy::figures)
    }

    /// Returns a tenant's bytes of shared memory in use, and those that wait to be unmapped.
    pub(in crate::pool) fn shared_of(&self, id: TenantId) -> (u64, u64) {
        let of = |it: &Tenancy| (it.shared_in_use(), it.shared_pending_free());
        self.slots.of(id).map_or((0, 0), of)
    }

    /// Returns `true` if blocks of a tenant use memory.
    pub(in crate::pool) fn use_memory(&self, id: TenantId) -> bool {
        self.slots.of(id).is_some_and(Tenancy::uses_memory)
    }

    pub(in crate::pool) fn idle_figures(&self) -> IdleFigures {
        let mut all = IdleFigures::default();
        for (_, tenancy) in self.slots.iter() {
            for (figures, _) in tenancy.figures() {
                // Stranded memory does not become free with its fence.
                let idle = figures.idle + figures.precommitted;
                let gives = idle.saturating_sub(figures.stranded);
                match figures.freed {
                    Freed::Cached => {}
                    Freed::PendingFree => {
                        all.pending_free += gives;
                        all.waiting += figures.idle;
                    }
                    Freed::Leased => all.leased += gives,
                }
                all.stranded += figures.stranded;
            }
            let shared = tenancy.shared_pending_free();
            all.pending_free += shared;
            all.waiting += shared;
        }
        all
    }
}
