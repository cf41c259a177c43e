//! Memory that a tenant can still get, and memory that its blocks hold now, for admission
//! decisions.

use std::collections::BTreeMap;

use cuvmm_driver::PhysicalHandle;

use super::Block;
use super::slots::{Slot, Tenancy};
use crate::error::CallError;
use crate::ledger::Member;
use crate::pool::tenant::Tenant;

/// The number of slots added up before the lock is released.
const SLOTS_AT_ONCE: usize = 256;

/// The bytes that a tenant can use beyond its current use, within the pool's limits.
///
/// Idle memory counts if its fence is complete and it comes in whole extents. Memory behind a
/// block's end, in one extent with the block's bytes, does not count: only that block can grow into
/// it. When other processes use the device too, the driver may have less memory than the figures
/// say.
#[doc(alias = "Room")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Headroom {
    /// Bytes that the tenant can get without taking memory from another tenant: memory that no
    /// tenant holds, and its own idle and precommitted memory.
    pub now: u64,
    /// Bytes that the tenant can get when all other tenants take as much as they may: its guarantee
    /// less its memory in use. They become available when the work that idle memory waits for is
    /// complete.
    pub at_worst: u64,
    /// Bytes that the tenant can get when the idle and precommitted memory of other tenants above
    /// their guarantees is reclaimed too.
    pub taking_back: u64,
}

/// The memory under a block, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Memory in use, in whole granules, without shared memory.
    pub(crate) used: u64,
    /// Memory that only this block can use until memory is short.
    pub(crate) held: u64,
    /// The part of `held` that was precommitted.
    pub(crate) precommitted: u64,
    /// The offset up to which the block may be written within its memory. Memory behind the block's
    /// end in the same extent counts, since no other block can use it; shared memory does not,
    /// since it must be replaced.
    pub(crate) writable: u64,
}

/// Memory that several blocks have in common, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Common {
    /// Shared memory, each extent once.
    pub(crate) held: u64,
    /// Bytes counted more than once.
    pub(crate) repeated: u64,
}

#[derive(Default)]
struct Uses {
    size: u64,
    sum: u64,
    most: u64,
}

impl Tenant {
    /// Returns how much more memory the tenant's blocks can have now. The only driver calls poll
    /// fences (`cuEventRecord`, `cuEventQuery`, `cuStreamQuery`) and unmap memory that [forked
    /// sequences](crate::KvCache::fork) have given up (`cuMemUnmap`).
    ///
    /// # Errors
    /// [`CallError`] in a forked child.
    #[doc(alias = "room")]
    pub fn headroom(&self) -> Result<Headroom, CallError> {
        let owner = self.owner();
        owner.core.device.own_process()?;
        let (mut state, id) = (owner.core.lock(), owner.tenant);
        let (own, others) = state.reach(id);
        let (own, others) = (own.gained(), others.gained());
        // A limit lowered below memory in use may leave less than the guarantee.
        let guarantee = state.memory.budget.account(id).guarantee;
        let guarantee = guarantee.min(state.guaranteeable(Some(id), false));
        let left = state.left_in_ledger(Member::left);
        let budget = &state.memory.budget;
        Ok(Headroom {
            now: budget.available_after(id, own, 0, left),
            at_worst: guarantee.saturating_sub(state.kept_by(id)),
            taking_back: budget.available_after(id, own, others, left),
        })
    }

    /// Returns the bytes that [`stats`](Self::stats) shows as cached, pending free and leased.
    /// Releases the lock between parts.
    pub(crate) fn idle(&self) -> u64 {
        let (core, id) = (self.core(), self.id());
        let mut state = core.lock();
        state.blocks.sweep(id);
        let tenancy = state.blocks.slots.of(id);
        let mut idle = tenancy.map_or(0, Tenancy::shared_pending_free);
        for first in (0..).step_by(SLOTS_AT_ONCE) {
            let tenancy = state.blocks.slots.of(id);
            let Some(part) = tenancy.and_then(|it| it.idle_in(first, SLOTS_AT_ONCE)) else {
                break;
            };
            idle += part;
            drop(state);
            state = core.lock();
        }
        idle
    }

    /// Returns the bytes that the tenant can get when other tenants give what they have idle above
    /// their guarantees, and other processes of the ledger what they last found idle above theirs. The
    /// driver calls are those of [`headroom`](Self::headroom).
    pub(crate) fn room_in_ledger(&self) -> Result<u64, CallError> {
        let (core, id) = (self.core(), self.id());
        core.device.own_process()?;
        let mut state = core.lock();
        let (own, others) = state.reach(id);
        let left = state.left_in_ledger(Member::left_with_idle);
        let budget = &state.memory.budget;
        Ok(budget.available_after(id, own.gained(), others.gained(), left))
    }

    /// Visits the memory under groups of this tenant's blocks, each with the number of bytes of
    /// each block to count. Calls `see` for each block with the index of its group, and returns the
    /// memory that all blocks have in common. Releases the lock between groups.
    pub(crate) fn for_each_slot<'a>(
        &self,
        groups: impl IntoIterator<Item = (&'a [Block], u64)>,
        mut see: impl FnMut(usize, Footprint),
    ) -> Common {
        let mut shared: BTreeMap<PhysicalHandle, Uses> = BTreeMap::new();
        for (group, (blocks, bytes)) in groups.into_iter().enumerate() {
            let owner = self.owner();
            let mut state = owner.core.lock();
            if state.others_in_flight() {
                let places = blocks.iter().map(|block| (block.place().slot, 0));
                state = owner.core.await_slots(state, places);
            }
            let tenancy = state.blocks.slots.of(owner.tenant);
            for block in blocks {
                let slot = tenancy.and_then(|tenancy| tenancy.slot(block.place().slot.index));
                let Some(slot) = slot else {
                    see(group, Footprint::default());
                    continue;
                };
                see(group, slot.footprint(bytes));
                // Most blocks share nothing: their extents are not looked at.
                if slot.shared == 0 {
                    continue;
                }
                for (extent, physical) in slot.shared_parts() {
                    let here = bytes.saturating_sub(extent.offset).min(extent.size);
                    let uses = shared.entry(physical.as_raw()).or_default();
                    uses.size = extent.size;
                    uses.sum += here;
                    uses.most = uses.most.max(here);
                }
            }
        }
        shared.values().fold(Common::default(), |all, uses| Common {
            held: all.held + uses.size,
            repeated: all.repeated + uses.sum - uses.most,
        })
    }
}

impl Slot {
    #[inline]
    fn footprint(&self, bytes: u64) -> Footprint {
        let (shared, taken) = (self.shared, self.taken());
        let (kept, precommitted) = (taken + self.stranded_by(taken), self.precommitted());
        // Stranded memory may be precommitted.
        let reach = (self.charged().saturating_sub(precommitted))
            .max(taken)
            .min(kept);
        let replaced = (shared > bytes).then(|| self.space.bounds_around(bytes));
        Footprint {
            used: taken - shared,
            held: reach - shared + precommitted,
            precommitted,
            writable: replaced.flatten().map_or(kept, |extent| extent.start),
        }
    }
}
