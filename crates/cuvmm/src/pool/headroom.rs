//! How much more a tenant can have, and what its blocks hold now: for whoever decides what to begin.

use std::collections::BTreeMap;

use cuvmm_driver::PhysicalHandle;

use super::block::Block;
use super::budget::TenantId;
use super::core::Locked;
use super::slot::Slot;
use super::tenant::Tenant;
use crate::error::CallError;

/// How many bytes more a tenant can have in use, as far as the pool's limits say.
///
/// Idle memory counts as far as its fences have passed and it comes in whole extents. What lies
/// behind the bytes of a block in one extent with them does not: it is that block's to grow into.
/// That the driver has so much when other processes use the device too, nobody can promise.
#[doc(alias = "Room")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Headroom {
    /// Without taking anything from another tenant: what nobody has, and what the tenant itself has
    /// idle or as precommitted memory.
    pub now: u64,
    /// When everybody else takes what they may: what the guarantee leaves beside memory in use. It
    /// can be had once the work has passed that idle memory waits for.
    pub at_worst: u64,
    /// With what other tenants have idle or as precommitted memory above their guarantees.
    pub taking_back: u64,
}

/// What lies under a block. Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// What it uses, in whole granules, without what it shares with others.
    pub(crate) used: u64,
    /// All that is there for it and for nobody else before somebody is short of memory.
    pub(crate) held: u64,
    /// Of that, what was put ahead of its growth.
    pub(crate) precommitted: u64,
    /// Up to where it may be written in what it has. What lies behind it in one extent is nobody
    /// else's in any case; what it shares would have to be replaced.
    pub(crate) writable: u64,
}

/// What several blocks have in common. Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Common {
    /// Memory that is shared, counted once.
    pub(crate) held: u64,
    /// What the blocks' own bytes come to more than once.
    pub(crate) repeated: u64,
}

/// How many bytes of an extent blocks have.
#[derive(Default)]
struct Uses {
    size: u64,
    sum: u64,
    most: u64,
}

impl Tenant {
    /// How much more memory its blocks could have now. Makes no driver call but those that ask
    /// whether work has passed (`cuEventRecord`, `cuEventQuery`, `cuStreamQuery`), and those that
    /// unmap what [forked sequences](crate::KvCache::fork) have given up.
    ///
    /// # Errors
    /// [`CallError`] from the driver.
    #[doc(alias = "room")]
    pub fn headroom(&self) -> Result<Headroom, CallError> {
        let owner = self.owner();
        owner.core.device.own_process()?;
        Ok(owner.core.lock().headroom(owner.tenant))
    }

    /// Looks at what lies under groups of this tenant's blocks. With each group comes how many bytes of
    /// each of its blocks count. `see` is called for each block with the number of its group, and what
    /// all blocks have in common is returned. The lock is let go between groups.
    pub(crate) fn look_under<'a>(
        &self,
        groups: impl IntoIterator<Item = (&'a [Block], u64)>,
        mut see: impl FnMut(usize, Footprint),
    ) -> Common {
        let mut shared: BTreeMap<PhysicalHandle, Uses> = BTreeMap::new();
        for (group, (blocks, bytes)) in groups.into_iter().enumerate() {
            let owner = self.owner();
            let mut state = owner.core.lock();
            if state.has_company() {
                let places = blocks.iter().map(|block| (block.place().slot, 0));
                state = owner.core.await_slots(state, places);
            }
            let tenancy = state.tenants.get(&owner.tenant);
            for block in blocks {
                let slot = tenancy.and_then(|tenancy| tenancy.slot(block.place().slot.index));
                let Some(slot) = slot else {
                    see(group, Footprint::default());
                    continue;
                };
                see(group, slot.footprint(bytes));
                // Most share nothing, and are not asked for parts.
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
    fn footprint(&self, bytes: u64) -> Footprint {
        let (shared, taken) = (self.shared, self.taken());
        let (kept, precommitted) = (taken + self.stranded(), self.precommitted());
        // What is stranded may be precommitted.
        let reach = (taken + self.idle()).min(kept);
        let replaced = (shared > bytes).then(|| self.space.bounds_around(bytes));
        Footprint {
            used: taken - shared,
            held: reach - shared + precommitted,
            precommitted,
            writable: replaced.flatten().map_or(kept, |extent| extent.start),
        }
    }
}

impl Locked<'_> {
    fn headroom(&mut self, id: TenantId) -> Headroom {
        let (own, others) = self.reach(id);
        let (own, others) = (own.gained(), others.gained());
        // A limit that was lowered under memory in use may leave less than the guarantee.
        let guarantee = self.budget.account(id).guarantee;
        let guarantee = guarantee.min(self.guaranteeable(Some(id)));
        Headroom {
            now: self.budget.available_after(id, own, 0),
            at_worst: guarantee.saturating_sub(self.kept_by(id)),
            taking_back: self.budget.available_after(id, own, others),
        }
    }
}
