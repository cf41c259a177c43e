//! Reclaim: which tenants idle memory is taken from, in which order, and how guarantees protect it.
//!
//! A plan comes first: if it would not bring enough, nothing is taken. The order is: the tenant's
//! own idle memory, then that of other tenants, then precommitted memory, the tenant's own first.
//! Among other tenants, draining tenants give first, then lower priorities, then the least recently
//! used memory. Whole extents move, so that many bytes cost few driver calls. Memory of heaps
//! ([holders](super::holders::holder)) comes after the slots of tenants of the same rank.
//!
//! Keeps I-3, I-4, I-31 and I-90.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::accounts::{Amount, Budget, Charge, TenantId, Terms};
use super::blocks::slots::{Aged, Give, Slot, SlotId, Slots};
use super::core::Locked;
use super::holders::HolderId;
use super::state::State;
use crate::device::Device;
use crate::error::{BlockError, CallError, LedgerShortage};
use crate::extents::Round;
use crate::wanted::{GRANT, Purpose};

#[derive(Clone, Copy, Debug)]
struct Take {
    slot: SlotId,
    offset: u64,
    size: u64,
}

#[derive(Debug)]
pub(super) struct Plan {
    round: Round,
    takes: Vec<Take>,
    holders: Vec<(HolderId, u64)>,
    /// Bytes that count for the tenant that needs them.
    gained: u64,
    /// Bytes taken from each owner.
    taken: BTreeMap<TenantId, u64>,
    /// The offset from which a slot is already taken from. A tenant's precommitted memory is
    /// visited again if more is needed than the tenant's own limit requires.
    from: BTreeMap<SlotId, u64>,
}

impl Plan {
    fn begin(device: &Device) -> Self {
        Self {
            round: Round::begin(device),
            takes: Vec::new(),
            holders: Vec::new(),
            gained: 0,
            taken: BTreeMap::new(),
            from: BTreeMap::new(),
        }
    }

    pub(super) const fn gained(&self) -> u64 {
        self.gained
    }

    /// Returns the bytes above a tenant's guarantee after a plan.
    pub(super) fn spare_of(&self, budget: &Budget, id: TenantId) -> u64 {
        let account = budget.account(id);
        let planned = self.taken.get(&id).copied().unwrap_or(0);
        let left = account.held.saturating_sub(planned);
        left.saturating_sub(account.guarantee)
    }

    pub(super) fn takes_from(&self, slots: &BTreeSet<SlotId>) -> u64 {
        let of_them = |take: &&Take| slots.contains(&take.slot);
        let takes = self.takes.iter().filter(of_them);
        takes.map(|take| take.size).sum()
    }
}

impl Locked<'_> {
    /// Makes room in the budget for charging a tenant `bytes` more, before the lock is released.
    pub(super) fn reclaim_for(
        &mut self,
        id: TenantId,
        bytes: u64,
        purpose: Purpose,
    ) -> Result<(), BlockError> {
        // Nothing is missing for zero bytes, even beyond a lowered limit.
        while bytes > 0 && self.memory.budget.missing(id, bytes).1 > 0 {
            // Bytes that the tenant's own limit refuses have to come from the tenant, not from the
            // ledger.
            let (own, _) = self.memory.budget.missing(id, bytes);
            let refused = self.grant_for(id, bytes.saturating_sub(own), purpose);
            // May release the lock; the missing memory may become free meanwhile.
            self.gather_idle();
            let (own, total) = self.memory.budget.missing(id, bytes);
            if total == 0 {
                break;
            }
            let plan = self.plan(id, own, total);
            if let Some(refused) = refused
                && plan.gained < total
            {
                // The ledger's remaining bytes and the reclaimable bytes may together be enough.
                let lacking = total - plan.gained;
                if own <= plan.gained && self.grant(lacking, 0, purpose).is_none() {
                    continue;
                }
                self.return_unneeded(0);
                return Err(self.short_of(id, bytes, plan.gained, Some(refused)));
            }
            // Another tenant may be charged for the reclaimed memory first, hence the loop.
            let carried = self.carry_out_if_enough(id, bytes, total, &plan);
            if carried.is_err() {
                self.return_unneeded(GRANT);
            }
            carried?;
        }
        Ok(())
    }

    /// Charges a tenant `bytes`, and makes room in the budget for them. One attempt: waits for no
    /// memory and calls no hook. May release the lock.
    pub(super) fn obtain(
        &mut self,
        id: TenantId,
        bytes: u64,
        purpose: Purpose,
    ) -> Result<Charge, BlockError> {
        self.reclaim_for(id, bytes, purpose)?;
        Ok(self.memory.budget.charge(Some(id), Amount::bytes(bytes)))
    }

    /// Ensures that a tenant may use `bytes` of its own idle memory again. The bytes are charged,
    /// but they may have been promised to another tenant meanwhile: then other tenants give first.
    pub(super) fn permit_reuse(&mut self, slot: SlotId, bytes: u64) -> Result<(), BlockError> {
        let id = slot.tenant;
        let beyond = self.memory.terms.get(id).is_some_and(Terms::is_beyond);
        if bytes > 0 && beyond {
            let limit = self.memory.budget.account(id).limit;
            if self.kept_by(id).saturating_add(bytes) > limit {
                return Err(self.out_of_memory(id, bytes));
            }
        }
        let purpose = match self.blocks.slots.get(slot) {
            Some(slot) => slot.purpose(),
            None => Purpose::New,
        };
        while bytes > 0 && self.memory.budget.is_overdrawn() {
            let refused = self.grant_for(TenantId::NONE, 0, purpose);
            if refused.is_none() && !self.memory.budget.is_overdrawn() {
                break;
            }
            self.gather_idle();
            let kept = self.kept_by(id) + bytes;
            let total = self.memory.budget.overdrawn_by(id, kept);
            if total == 0 {
                break;
            }
            let plan = self.plan_all_others(id, total);
            if let Some(refused) = refused
                && plan.gained < total
            {
                // As for new memory.
                if self.grant(total - plan.gained, 0, purpose).is_none() {
                    continue;
                }
                return Err(self.short_of(id, bytes, plan.gained, Some(refused)));
            }
            self.carry_out_if_enough(id, bytes, total, &plan)?;
        }
        // From here on the bytes are promised to no other tenant.
        if let Some(tenancy) = self.blocks.slots.of_mut(id) {
            tenancy.note_revived(slot.index, bytes);
        }
        Ok(())
    }

    fn carry_out_if_enough(
        &mut self,
        id: TenantId,
        bytes: u64,
        total: u64,
        plan: &Plan,
    ) -> Result<(), BlockError> {
        let mut reclaimable = plan.gained;
        if plan.gained >= total {
            let before = self.memory.budget.quarantined();
            self.carry_out(plan)?;
            // Exported memory goes to the driver, which may refuse it.
            let lost = self.memory.budget.quarantined().saturating_sub(before);
            if plan.gained.saturating_sub(lost) >= total {
                return Ok(());
            }
            reclaimable = 0;
        }
        Err(self.short_of(id, bytes, reclaimable, None))
    }

    pub(super) fn short_of(
        &self,
        id: TenantId,
        bytes: u64,
        reclaimable: u64,
        ledger: Option<LedgerShortage>,
    ) -> BlockError {
        let mut shortage = self.shortage(id, bytes, reclaimable);
        shortage.ledger = ledger;
        if self.memory.gate.is_capturing() && shortage.pending_free > 0 {
            BlockError::Capturing(shortage)
        } else {
            BlockError::OutOfMemory(shortage)
        }
    }

    /// Reclaims at least one extent from any tenant, and at most about `bytes`. Returns the bytes.
    pub(super) fn take_back_any(&mut self, id: TenantId, bytes: u64) -> Result<u64, CallError> {
        self.gather_idle();
        let plan = self.plan(id, 0, bytes);
        self.carry_out(&plan)
    }

    /// Reclaims up to `count` extents, for their mappings.
    pub(super) fn take_back_mappings(&mut self, id: TenantId, count: u64) -> Result<(), CallError> {
        self.gather_idle();
        let mut plan = self.plan(id, 0, u64::MAX);
        plan.takes
            .truncate(usize::try_from(count).unwrap_or(usize::MAX));
        if plan.takes.len() as u64 >= count {
            plan.holders.clear();
        }
        // Memory pools of the driver have no mappings to give.
        let maps = |&(id, _): &(HolderId, u64)| {
            let held = self.memory.holders.get(id);
            held.is_some_and(|held| !held.holder().is_of_driver())
        };
        plan.holders.retain(maps);
        self.carry_out(&plan).map(|_| ())
    }

    /// Reclaims `bytes` of a tenant's own memory, or what there is. Returns the bytes, and why it
    /// ended early.
    pub(super) fn take_back_own(
        &mut self,
        id: TenantId,
        bytes: u64,
    ) -> (u64, Result<(), CallError>) {
        let plan = self.plan_own(&[id], bytes);
        self.carry_out_counted(&plan)
    }

    /// Collects idle memory from stream caches and shared memory, reads the driver's memory pools,
    /// and retries refused releases. May release the lock.
    pub(super) fn gather_idle(&mut self) {
        self.retry_releases(1);
        self.refresh_driver_memory();
        self.blocks.sweep_all();
        self.part_all();
    }

    /// Plans all that a tenant could reclaim from itself, and from other tenants.
    pub(super) fn reach(&mut self, id: TenantId) -> (Plan, Plan) {
        self.gather_idle();
        (
            self.plan_own(&[id], u64::MAX),
            self.plan_all_others(id, u64::MAX),
        )
    }

    /// Unmaps the planned extents and [keeps](State::keep) their memory; returns the bytes.
    /// Releases the lock for each slot: extents in use again by then are left alone.
    fn carry_out(&mut self, plan: &Plan) -> Result<u64, CallError> {
        let (got, outcome) = self.carry_out_counted(plan);
        outcome.map(|()| got)
    }

    /// Carries a plan out, and returns the bytes that it got by its end or its first failure.
    fn carry_out_counted(&mut self, plan: &Plan) -> (u64, Result<(), CallError>) {
        let mut got = 0;
        let mut outcome = Ok(());
        // The extents of a slot are adjacent in the plan.
        for takes in plan.takes.chunk_by(|one, other| one.slot == other.slot) {
            let Some(&Take { slot, .. }) = takes.first() else {
                continue;
            };
            let offsets: Vec<u64> = takes.iter().map(|take| take.offset).collect();
            let (bytes, taken) = self.take_from(slot, &offsets);
            got += bytes;
            outcome = taken;
            if outcome.is_err() {
                break;
            }
        }
        if outcome.is_ok() {
            for &(holder, bytes) in &plan.holders {
                match self.take_from_holder(holder, bytes) {
                    Ok(bytes) => got += bytes,
                    Err(error) => {
                        outcome = Err(error);
                        break;
                    }
                }
            }
        }
        self.release_marked();
        (got, outcome)
    }

    /// Takes those of a slot's planned extents that can be reclaimed.
    fn take_from(&mut self, id: SlotId, at: &[u64]) -> (u64, Result<(), CallError>) {
        let gives = |slot: &Slot| slot.is_unused() && slot.has_spare();
        if !self.blocks.slots.get(id).is_some_and(gives) {
            return (0, Ok(()));
        }
        let taken = self.with_slot_out(id, |state, slot| {
            // Last first and without a hole: the mapper may have placed more memory behind the
            // planned extents, and the slot may have been used and freed again.
            let spare = slot.spare().map(|extent| extent.offset);
            let at = spare.zip(at).take_while(|(spare, at)| spare == *at);
            let at = at.map(|(spare, _)| spare).collect();
            state.take_extents(slot, at)
        });
        taken.unwrap_or((0, Ok(())))
    }

    /// Gives up the addresses of a tenant's empty, unused slots until `wanted` bytes may be
    /// reserved.
    fn drop_empty_slots(&mut self, id: TenantId, wanted: u64) {
        let Some(tenancy) = self.blocks.slots.of(id) else {
            return;
        };
        for together in tenancy.bare() {
            if self.memory.budget.addresses_left() >= wanted {
                break;
            }
            // The lock is released between slots.
            let slot_id = |index| SlotId { tenant: id, index };
            let bare = |slots: &Slots, index| slots.get(slot_id(index)).is_some_and(Slot::is_bare);
            let all = &self.blocks.slots;
            if !together.iter().all(|&index| bare(all, index)) {
                continue;
            }
            for index in together {
                let slots = &mut self.blocks.slots;
                if bare(slots, index)
                    && let Some(slot) = slots.take(slot_id(index))
                {
                    self.put_away(slot);
                }
            }
        }
    }

    /// Makes room for `bytes` of addresses, or fails.
    pub(super) fn make_address_room(&mut self, bytes: u64) -> Result<(), BlockError> {
        if self.memory.budget.addresses_left() < bytes {
            self.purge_all();
            for id in self.blocks.slots.tenants() {
                self.drop_empty_slots(id, bytes);
            }
            self.return_resting_for(bytes);
            self.empty_heaps_for(bytes);
        }
        self.memory.check_addresses(bytes)
    }
}

impl State {
    /// Polls the fences of all idle memory.
    pub(super) fn poll_idle(&mut self) {
        let ids: Vec<TenantId> = self.memory.terms.ids().collect();
        self.plan_own(&ids, u64::MAX);
    }

    /// Plans to take `total` bytes from tenants, whatever their guarantees: cached memory first.
    fn plan_own(&mut self, ids: &[TenantId], total: u64) -> Plan {
        let mut plan = Plan::begin(&self.memory.device);
        for give in [Give::Cached, Give::Precommitted] {
            self.plan_from(ids, give, total, false, &mut plan);
        }
        plan
    }

    /// Plans to take `total` bytes from tenants other than `id`: cached memory first.
    fn plan_all_others(&mut self, id: TenantId, total: u64) -> Plan {
        let mut plan = Plan::begin(&self.memory.device);
        for give in [Give::Cached, Give::Precommitted] {
            self.plan_others(id, give, total, &mut plan);
        }
        plan
    }

    /// Plans a reclaim that allows charging the tenant `total` bytes more. By the tenant's own
    /// limit, `own` of them must be its own; if it has less, the plan gains less than `total`.
    fn plan(&mut self, id: TenantId, own: u64, total: u64) -> Plan {
        let mut plan = Plan::begin(&self.memory.device);
        self.plan_from(&[id], Give::Cached, total.max(own), false, &mut plan);
        if plan.gained < own {
            self.plan_from(&[id], Give::Precommitted, own, false, &mut plan);
        }
        if plan.gained < own {
            plan.gained = plan.gained.min(total.saturating_sub(1));
            return plan;
        }
        self.plan_others(id, Give::Cached, total, &mut plan);
        self.plan_from(&[id], Give::Precommitted, total, false, &mut plan);
        self.plan_others(id, Give::Precommitted, total, &mut plan);
        plan
    }

    /// Plans to take from all other tenants, rank by rank, until the plan gains `total`.
    fn plan_others(&mut self, id: TenantId, give: Give, total: u64, plan: &mut Plan) {
        if plan.gained >= total {
            return;
        }
        // Both maps have the same tenants.
        let tenants = self.blocks.slots.iter().zip(self.memory.terms.iter());
        let mut others: Vec<((bool, i32), TenantId)> = tenants
            .filter(|&((other, _), _)| other != id)
            .filter(|((other, tenancy), _)| {
                let holds = give == Give::Cached && !self.memory.holders.of(*other).is_empty();
                holds || tenancy.next_giving(give, None).is_some()
            })
            .map(|((other, _), (same, terms))| {
                debug_assert_eq!(other, same, "the maps of tenants differ");
                ((terms.is_registered(), terms.priority()), other)
            })
            .collect();
        others.sort_unstable();
        for equals in others.chunk_by(|one, other| one.0 == other.0) {
            let rank: Vec<TenantId> = equals.iter().map(|&(_, other)| other).collect();
            self.plan_from(&rank, give, total, true, plan);
        }
    }

    /// Plans to take from some tenants, least recently used memory first, until the plan gains
    /// `total`. With `others` the memory is for another tenant, and only memory above the owners'
    /// guarantees counts. An extent that reaches below a guarantee is taken whole, and the budget
    /// keeps the lacking bytes for its owner.
    fn plan_from(
        &mut self,
        ids: &[TenantId],
        give: Give,
        total: u64,
        others: bool,
        plan: &mut Plan,
    ) {
        let mut oldest: BinaryHeap<Reverse<(Aged, TenantId)>> = BinaryHeap::new();
        for &id in ids {
            let next = self.blocks.slots.next_giving(id, give, None);
            oldest.extend(next.map(|aged| Reverse((aged, id))));
        }
        while let Some(Reverse((aged, id))) = oldest.pop() {
            if plan.gained >= total {
                break;
            }
            let spare = match others {
                true => plan.spare_of(&self.memory.budget, id),
                false => u64::MAX,
            };
            if spare == 0 {
                continue;
            }
            let (tenant, index) = (id, aged.1);
            self.plan_slot(SlotId { tenant, index }, total, spare, plan);
            let next = self.blocks.slots.next_giving(id, give, Some(aged));
            oldest.extend(next.map(|aged| Reverse((aged, id))));
        }
        if give == Give::Cached {
            ids.iter()
                .for_each(|&id| self.plan_holders(id, total, others, plan));
        }
    }

    /// Plans to take extents from a tenant's holders, while they count.
    fn plan_holders(&self, id: TenantId, total: u64, others: bool, plan: &mut Plan) {
        for held in self.memory.holders.of(id) {
            let is_planned = plan.holders.iter().any(|&(holder, _)| holder == held.id());
            let for_itself = !others && held.holder().is_growing();
            if is_planned || for_itself || plan.gained >= total {
                continue;
            }
            let mut bytes = 0;
            for size in held.holder().reclaimable(!self.memory.gate.is_capturing()) {
                let spare = match others {
                    true => plan.spare_of(&self.memory.budget, id),
                    false => u64::MAX,
                };
                if plan.gained >= total || spare == 0 {
                    break;
                }
                plan.gained = plan.gained.saturating_add(size.min(spare));
                *plan.taken.entry(id).or_default() += size;
                bytes += size;
            }
            if bytes > 0 {
                plan.holders.push((held.id(), bytes));
            }
        }
    }

    /// Plans to take extents from one slot, the last first, while they count.
    fn plan_slot(&mut self, id: SlotId, total: u64, mut spare: u64, plan: &mut Plan) {
        let Some(slot) = self.blocks.slots.get_mut(id) else {
            return;
        };
        // A block that grew into its precommitted memory may still be listed.
        if !slot.has_spare() || !self.memory.gate.poll_in(&mut slot.fence, &plan.round) {
            return;
        }
        let planned = plan.from.get(&id).copied().unwrap_or(u64::MAX);
        let left = slot.spare().skip_while(|extent| extent.offset >= planned);
        for extent in left {
            if plan.gained >= total || spare == 0 {
                break;
            }
            plan.from.insert(id, extent.offset);
            plan.takes.push(Take {
                slot: id,
                offset: extent.offset,
                size: extent.size,
            });
            let gain = extent.size.min(spare);
            plan.gained = plan.gained.saturating_add(gain);
            spare -= gain;
            *plan.taken.entry(id.tenant).or_default() += extent.size;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::{Call, HandleTypes};

    use super::*;
    use crate::error::Shortage;
    use crate::extents::rig::{G, Rig, rig};
    use crate::own::Stream;
    use crate::pool::{Block, Growth, Hardened, Limit, Pool, PoolBuilder, Tenant};

    fn limited(rig: &Rig, granules: u64) -> PoolBuilder<'_> {
        Pool::builder(&rig.device).limit(Limit::Bytes(granules * G))
    }

    fn pool(rig: &Rig, granules: u64) -> Pool {
        limited(rig, granules).largest_extent(G).build().unwrap()
    }

    fn tenant(pool: &Pool, name: &str, guarantee: u64, priority: i32) -> Tenant {
        let tenant = pool.tenant(name).guarantee(guarantee * G);
        tenant.priority(priority).register().unwrap()
    }

    fn block(tenant: &Tenant, granules: u64) -> Block {
        tenant.try_allocate(granules * G).unwrap()
    }

    fn leave_idle(tenant: &Tenant, sizes: &[u64]) {
        let blocks: Vec<Block> = sizes.iter().map(|&size| block(tenant, size)).collect();
        blocks.into_iter().for_each(drop);
    }

    /// Returns a block of nine granules with six granules of precommitted memory behind it: extents
    /// of four granules, of which three are stranded, of two and of one.
    fn ahead(tenant: &Tenant) -> Block {
        let block = tenant.block(8 * G).capacity(15 * G);
        let mut block = block.growth(Growth::Part(1)).try_allocate().unwrap();
        block.try_grow_to(9 * G).unwrap();
        block
    }

    fn slot_of(block: &Block) -> SlotId {
        block.place().slot
    }

    fn takes(plan: &Plan) -> Vec<(TenantId, usize, u64)> {
        let of = |take: &Take| (take.slot.tenant, take.slot.index, take.offset / G);
        plan.takes.iter().map(of).collect()
    }

    fn held(state: &State, tenant: &Tenant) -> u64 {
        state.memory.budget.account(tenant.id()).held / G
    }

    fn shortage(outcome: Result<(), BlockError>) -> Box<Shortage> {
        match outcome {
            Err(BlockError::OutOfMemory(shortage)) => shortage,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn draining_tenants_give_first_then_lower_priorities_then_what_was_used_least_recently() {
        let rig = rig();
        let pool = pool(&rig, 16);
        let me = tenant(&pool, "me", 0, -1);
        let (high, low) = (tenant(&pool, "high", 0, 1), tenant(&pool, "low", 0, 0));
        let (equal, gone) = (tenant(&pool, "equal", 0, 0), tenant(&pool, "gone", 0, 2));
        let stream = rig.busy_stream();
        let last = gone.allocate_on(&stream, G).unwrap();
        let owners = [&high, &equal, &low, &equal];
        let blocks = owners.map(|owner| block(owner, 1));
        blocks.into_iter().for_each(drop);
        leave_idle(&me, &[1]);
        drop(last);
        let drains = gone.id();
        gone.unregister();
        rig.finish(&stream);
        let mut state = pool.core.lock();
        let mut plan = Plan::begin(&state.memory.device);
        state.plan_others(me.id(), Give::Cached, u64::MAX, &mut plan);
        let (equal, low, high) = (equal.id(), low.id(), high.id());
        let all = [
            (drains, 0, 0),
            (equal, 0, 0),
            (low, 0, 0),
            (equal, 1, 0),
            (high, 0, 0),
        ];
        assert_eq!(takes(&plan), all);
        assert_eq!(plan.gained(), 5 * G);
        let mut plan = Plan::begin(&state.memory.device);
        state.plan_others(me.id(), Give::Cached, 2 * G, &mut plan);
        assert_eq!(takes(&plan), all[..2], "no more than is wanted");
        state.plan_others(me.id(), Give::Cached, 2 * G, &mut plan);
        assert_eq!(takes(&plan), all[..2], "it suffices already");
    }

    #[test]
    fn own_idle_memory_is_taken_before_that_of_others_and_precommitted_memory_last() {
        let rig = rig();
        let pool = limited(&rig, 64).largest_extent(8 * G).build().unwrap();
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        let (mine, theirs) = (block(&me, 1), block(&other, 2));
        let _ahead = (ahead(&me), ahead(&other));
        drop((theirs, mine));
        let mut state = pool.core.lock();
        let (a, b) = (me.id(), other.id());
        let mut planned = |own, total| {
            let plan = state.plan(a, own * G, total * G);
            (takes(&plan), plan.gained() / G)
        };
        let own_first = [
            (a, 0, 0),
            (b, 0, 0),
            (a, 1, 14),
            (a, 1, 12),
            (b, 1, 14),
            (b, 1, 12),
        ];
        assert_eq!(planned(0, 1), (own_first[..1].to_vec(), 1));
        assert_eq!(
            planned(0, 2),
            (own_first[..2].to_vec(), 3),
            "extents move whole"
        );
        assert_eq!(planned(0, 4), (own_first[..3].to_vec(), 4));
        assert_eq!(planned(0, 7), (own_first[..5].to_vec(), 7));
        assert_eq!(planned(0, 99), (own_first.to_vec(), 9));
        // As far as its own limit requires it, a tenant gives its precommitted memory before other
        // tenants give.
        let limited = [
            (a, 0, 0),
            (a, 1, 14),
            (b, 0, 0),
            (a, 1, 12),
            (b, 1, 14),
            (b, 1, 12),
        ];
        assert_eq!(planned(2, 99), (limited.to_vec(), 9));
        assert_eq!(planned(2, 4), (limited[..3].to_vec(), 4));
        assert_eq!(
            planned(1, 3),
            (own_first[..2].to_vec(), 3),
            "its idle memory suffices"
        );
        let all_own = vec![(a, 0, 0), (a, 1, 14), (a, 1, 12)];
        assert_eq!(planned(4, 4), (all_own.clone(), 4));
        assert_eq!(planned(5, 9), (all_own, 4), "others cannot help");
    }

    #[test]
    fn nothing_of_others_counts_below_their_guarantees() {
        let rig = rig();
        let pool = pool(&rig, 16);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 3, 0));
        leave_idle(&other, &[3, 4, 1]);
        let (me, other) = (me.id(), other.id());
        let mut state = pool.core.lock();
        let mut plan = state.plan(me, 0, 16 * G);
        let all = [
            (other, 0, 2),
            (other, 0, 1),
            (other, 0, 0),
            (other, 1, 3),
            (other, 1, 2),
        ];
        assert_eq!((takes(&plan), plan.gained()), (all.to_vec(), 5 * G));
        assert_eq!(plan.spare_of(&state.memory.budget, other), 0);
        let nothing = Plan::begin(&state.memory.device);
        assert_eq!(nothing.spare_of(&state.memory.budget, other), 5 * G);
        // What is above the guarantee is not counted again.
        state.plan_others(me, Give::Cached, u64::MAX, &mut plan);
        assert_eq!(takes(&plan), all);
        // Its owner may have all of it.
        assert_eq!(state.plan(other, 0, 16 * G).gained(), 8 * G);
    }

    #[test]
    fn an_extent_that_reaches_below_a_guarantee_is_taken_whole_and_counts_as_far_as_it_lies_above()
    {
        let rig = rig();
        let pool = limited(&rig, 16).largest_extent(4 * G).build().unwrap();
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 5, 0));
        leave_idle(&other, &[2, 4]);
        let (me, other) = (me.id(), other.id());
        let mut state = pool.core.lock();
        let plan = state.plan(me, 0, 16 * G);
        assert_eq!((takes(&plan), plan.gained()), (vec![(other, 0, 0)], G));
        assert_eq!(
            plan.spare_of(&state.memory.budget, other),
            0,
            "four are left of five"
        );
        let slot = |index| SlotId {
            tenant: other,
            index,
        };
        let from = |slots: &[SlotId]| plan.takes_from(&slots.iter().copied().collect());
        assert_eq!(
            (from(&[slot(0), slot(1)]), from(&[slot(0)])),
            (2 * G, 2 * G)
        );
        assert_eq!((from(&[slot(1)]), from(&[])), (0, 0));
    }

    #[test]
    fn what_work_may_still_use_is_not_planned() {
        let rig = rig();
        let pool = pool(&rig, 16);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        let stream = rig.busy_stream();
        drop(other.allocate_on(&stream, 2 * G).unwrap());
        let mut state = pool.core.lock();
        assert_eq!(state.take_back_any(me.id(), 2 * G).unwrap(), 0);
        assert!(state.plan(me.id(), 0, 2 * G).takes.is_empty());
        rig.finish(&stream);
        assert_eq!(state.plan(me.id(), 0, 2 * G).takes.len(), 2);
        assert_eq!(held(&state, &other), 2);
    }

    #[test]
    fn what_stream_caches_hold_is_taken_back_too() {
        let rig = rig();
        let pool = pool(&rig, 4);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        let stream = Stream::new(&rig.device).unwrap();
        drop(other.allocate_on(&stream, 4 * G).unwrap());
        let mut state = pool.core.lock();
        assert!(state.plan(me.id(), 0, G).takes.is_empty());
        let (own, others) = state.reach(me.id());
        assert_eq!((own.gained(), others.gained()), (0, 4 * G));
        let (own, others) = state.reach(other.id());
        assert_eq!((own.gained(), others.gained()), (4 * G, 0));
        drop(state);
        drop(other.allocate_on(&stream, 4 * G).unwrap());
        let mut state = pool.core.lock();
        state.reclaim_for(me.id(), 3 * G, Purpose::New).unwrap();
        assert_eq!(
            (held(&state, &other), state.memory.supply.free()),
            (1, 3 * G)
        );
    }

    #[test]
    fn where_nothing_is_missing_stream_caches_keep_what_they_have() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        let idle = block(&me, 2);
        let id = slot_of(&idle);
        drop(idle);
        let stream = Stream::new(&rig.device).unwrap();
        let cached = other.allocate_on(&stream, 4 * G).unwrap();
        let in_cache = slot_of(&cached);
        drop(cached);
        let mut state = pool.core.lock();
        let keeps = |state: &State| state.blocks.slots.get(in_cache).unwrap().block.is_some();
        state.reclaim_for(me.id(), 2 * G, Purpose::New).unwrap();
        state.permit_reuse(id, 2 * G).unwrap();
        state.make_address_room(G).unwrap();
        assert!(!state.memory.budget.is_overdrawn() && keeps(&state));
        drop(state);
        let cached = other.allocate_on(&stream, 4 * G).unwrap();
        assert_eq!(slot_of(&cached), in_cache);
        let _late = tenant(&pool, "late", 4, 0);
        drop(cached);
        let mut state = pool.core.lock();
        assert!(state.memory.budget.is_overdrawn() && keeps(&state));
        state.permit_reuse(id, 0).unwrap();
        assert!(keeps(&state), "nothing is to be used again");
    }

    // I-31
    #[test]
    fn a_plan_that_does_not_suffice_takes_nothing() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 1, 0));
        leave_idle(&other, &[3, 2]);
        let mut state = pool.core.lock();
        let refused = shortage(state.reclaim_for(me.id(), 8 * G, Purpose::New));
        assert_eq!((refused.wanted, refused.available), (8 * G, 7 * G));
        assert_eq!((held(&state, &other), state.memory.supply.free()), (5, 0));
        state.reclaim_for(me.id(), 5 * G, Purpose::New).unwrap();
        assert_eq!(
            (held(&state, &other), state.memory.supply.free()),
            (3, 2 * G)
        );
        assert_eq!(state.memory.budget.available_to(me.id()), 5 * G);
        state.reclaim_for(me.id(), 7 * G, Purpose::New).unwrap();
        assert_eq!(
            (held(&state, &other), state.memory.supply.free()),
            (1, 4 * G)
        );
    }

    #[test]
    fn a_tenants_own_limit_asks_for_its_own_memory() {
        let rig = rig();
        let pool = pool(&rig, 16);
        let me = pool.tenant("me").limit(3 * G).register().unwrap();
        let other = tenant(&pool, "other", 0, 0);
        leave_idle(&other, &[8]);
        let _in_use = block(&me, 1);
        leave_idle(&me, &[2]);
        let mut state = pool.core.lock();
        let refused = shortage(state.reclaim_for(me.id(), 3 * G, Purpose::New));
        assert_eq!((refused.tenant_limit, refused.tenant_held), (3 * G, 3 * G));
        assert_eq!((held(&state, &me), held(&state, &other)), (3, 8));
        state.reclaim_for(me.id(), G, Purpose::New).unwrap();
        assert_eq!((held(&state, &me), held(&state, &other)), (2, 8));
        state.reclaim_for(me.id(), 2 * G, Purpose::New).unwrap();
        assert_eq!((held(&state, &me), held(&state, &other)), (1, 8));
    }

    #[test]
    fn a_shortage_during_a_capture_is_the_captures_only_if_memory_waits_for_its_fence() {
        let rig = rig();
        let pool = pool(&rig, 4);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        let in_use = block(&other, 2);
        let guard = pool.capture_guard();
        shortage(pool.core.lock().reclaim_for(me.id(), 3 * G, Purpose::New));
        drop(guard);
        let stream = rig.busy_stream();
        drop(other.allocate_on(&stream, 2 * G).unwrap());
        let refused = shortage(pool.core.lock().reclaim_for(me.id(), G, Purpose::New));
        assert_eq!(refused.pending_free, 2 * G);
        let guard = pool.capture_guard();
        let captured = pool.core.lock().reclaim_for(me.id(), G, Purpose::New);
        assert!(matches!(captured, Err(BlockError::Capturing(_))));
        rig.finish(&stream);
        let captured = pool.core.lock().reclaim_for(me.id(), G, Purpose::New);
        assert!(
            matches!(captured, Err(BlockError::Capturing(_))),
            "no fence is polled"
        );
        drop(guard);
        pool.core
            .lock()
            .reclaim_for(me.id(), 2 * G, Purpose::New)
            .unwrap();
        drop(in_use);
    }

    #[test]
    fn what_is_lost_on_its_way_to_the_driver_makes_no_room() {
        let rig = rig();
        let builder = limited(&rig, 8).largest_extent(G);
        let pool = builder.shareable(HandleTypes::POSIX_FD).build().unwrap();
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        let stream = rig.busy_stream();
        let exported = other.allocate_on(&stream, 2 * G).unwrap();
        drop(exported.export(HandleTypes::POSIX_FD).unwrap());
        drop(exported);
        leave_idle(&other, &[3]);
        rig.finish(&stream);
        rig.fail(Call::MemRelease, 1);
        let mut state = pool.core.lock();
        // The exported memory is the oldest. The driver refuses to release one of its two extents.
        let refused = shortage(state.reclaim_for(me.id(), 5 * G, Purpose::New));
        assert_eq!((refused.quarantined, refused.available), (G, 4 * G));
        assert_eq!(
            (held(&state, &other), state.memory.budget.obtained()),
            (3, 4 * G)
        );
        // The driver is asked again when memory is short, and room is made once it has taken the
        // memory.
        state.reclaim_for(me.id(), 6 * G, Purpose::New).unwrap();
        assert_eq!(
            (held(&state, &other), state.memory.budget.quarantined()),
            (2, 0)
        );
    }

    #[test]
    fn idle_memory_that_was_promised_to_another_is_used_again_once_others_have_given_as_much() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        leave_idle(&me, &[5]);
        leave_idle(&other, &[1]);
        // They hold six of eight granules, and four are promised.
        let late = tenant(&pool, "late", 4, 0);
        assert!(pool.core.lock().memory.budget.is_overdrawn());
        let five = me.try_allocate(5 * G);
        assert!(matches!(five, Err(BlockError::OutOfMemory(_))));
        assert_eq!(
            held(&pool.core.lock(), &other),
            1,
            "a refusal takes nothing"
        );
        let three = me.block(3 * G).capacity(5 * G).try_allocate().unwrap();
        assert_eq!(
            held(&pool.core.lock(), &other),
            1,
            "these were not promised"
        );
        drop(three);
        let four = me.block(4 * G).capacity(5 * G).try_allocate().unwrap();
        assert_eq!(held(&pool.core.lock(), &other), 0);
        assert_eq!(block(&late, 4).size(), 4 * G);
        assert_eq!(held(&pool.core.lock(), &me), 4);
        drop(four);
    }

    #[test]
    fn what_stream_caches_hold_is_given_for_idle_memory_that_was_promised_to_another() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        leave_idle(&me, &[5]);
        let stream = Stream::new(&rig.device).unwrap();
        let cached = other.allocate_on(&stream, G).unwrap();
        let late = tenant(&pool, "late", 3, 0);
        drop(cached);
        let five = block(&me, 5);
        assert_eq!(held(&pool.core.lock(), &other), 0);
        assert_eq!(block(&late, 3).size() + five.size(), 8 * G);
    }

    #[test]
    fn memory_that_is_to_be_used_again_counts_as_kept_meanwhile() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let me = tenant(&pool, "me", 0, 0);
        let idle = block(&me, 5);
        let id = slot_of(&idle);
        drop(idle);
        let mut state = pool.core.lock();
        let slot = state.take_out(id).unwrap();
        assert_eq!(state.kept_by(me.id()), 0);
        state.permit_reuse(id, 3 * G).unwrap();
        assert_eq!(state.kept_by(me.id()), 3 * G);
        state.blocks.put_slot(slot);
        assert_eq!(state.kept_by(me.id()), 0);
    }

    #[test]
    fn taking_back_for_anybody_takes_at_most_about_what_is_asked_for_and_says_how_much() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 1, 0));
        leave_idle(&other, &[1, 3, 1]);
        let mut state = pool.core.lock();
        assert_eq!(state.take_back_any(me.id(), 3 * G - 1).unwrap(), 3 * G);
        assert_eq!(
            (held(&state, &other), state.memory.supply.free()),
            (2, 3 * G)
        );
        assert_eq!(state.take_back_any(me.id(), u64::MAX).unwrap(), G);
        assert_eq!(state.take_back_any(me.id(), u64::MAX).unwrap(), 0);
    }

    #[test]
    fn as_many_mappings_are_taken_back_as_are_asked_for() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        let stream = Stream::new(&rig.device).unwrap();
        let cached = other.allocate_on(&stream, G).unwrap();
        leave_idle(&other, &[4]);
        drop(cached);
        let mut state = pool.core.lock();
        state.take_back_mappings(me.id(), 3).unwrap();
        assert_eq!(
            (held(&state, &other), state.memory.budget.mappings()),
            (2, 2)
        );
        state.take_back_mappings(me.id(), 9).unwrap();
        assert_eq!(
            (held(&state, &other), state.memory.budget.mappings()),
            (0, 0)
        );
    }

    #[test]
    fn all_that_a_tenant_has_idle_is_taken_back_below_its_guarantee_too() {
        let rig = rig();
        let pool = limited(&rig, 64).largest_extent(8 * G).build().unwrap();
        let (me, other) = (tenant(&pool, "me", 30, 0), tenant(&pool, "other", 0, 0));
        leave_idle(&other, &[2]);
        let idle = block(&me, 3);
        let _ahead = ahead(&me);
        drop(idle);
        let mut state = pool.core.lock();
        assert_eq!(state.take_back_own(me.id(), u64::MAX), (6 * G, Ok(())));
        assert_eq!((held(&state, &me), held(&state, &other)), (12, 2));
        assert_eq!(state.take_back_own(me.id(), u64::MAX), (0, Ok(())));
    }

    #[test]
    fn a_refusal_of_the_driver_ends_a_taking_back_and_what_was_taken_is_kept() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        leave_idle(&other, &[1, 2, 1]);
        rig.fail(Call::MemUnmap, 3);
        let mut state = pool.core.lock();
        assert!(state.take_back_any(me.id(), 4 * G).is_err());
        assert_eq!(
            (held(&state, &other), state.memory.supply.free()),
            (2, 2 * G)
        );
        assert_eq!(state.take_back_any(me.id(), 4 * G).unwrap(), 2 * G);
    }

    #[test]
    fn extents_are_taken_last_first_without_a_hole() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let me = tenant(&pool, "me", 0, 0);
        let idle = block(&me, 5);
        let id = slot_of(&idle);
        drop(idle);
        let mut state = pool.core.lock();
        // This polls the fences.
        assert_eq!(state.plan(me.id(), 0, G).gained(), G);
        let mut take = |at: &[u64]| {
            let at: Vec<u64> = at.iter().map(|at| at * G).collect();
            let taken = state.take_from(id, &at).0;
            assert_eq!(
                held(&state, &me),
                state.blocks.slots.get(id).unwrap().space.bytes() / G
            );
            taken / G
        };
        assert_eq!(take(&[3, 2]), 0, "something was placed behind it");
        assert_eq!(
            take(&[4, 2, 1]),
            1,
            "what is missing in between stays, and what lies before it"
        );
        assert_eq!(take(&[]), 0);
        assert_eq!(take(&[3, 2]), 2);
        assert_eq!(take(&[1, 0]), 2);
        assert_eq!(take(&[0]), 0, "nothing is left");
    }

    #[test]
    fn what_is_in_use_again_or_leased_is_left_where_it_is() {
        let rig = rig();
        let pool = pool(&rig, 8);
        let me = tenant(&pool, "me", 0, 0);
        let mut used = block(&me, 4);
        let id = slot_of(&used);
        used.shrink_to(G).unwrap();
        let mut state = pool.core.lock();
        let plan = state.plan(me.id(), 0, 4 * G);
        assert_eq!(
            takes(&plan),
            [(me.id(), 0, 3), (me.id(), 0, 2), (me.id(), 0, 1)]
        );
        drop(state);
        used.try_grow_to(3 * G).unwrap();
        let mut state = pool.core.lock();
        assert_eq!(
            state.carry_out(&plan).unwrap(),
            G,
            "the others are in use again"
        );
        drop(state);
        used.shrink_to(G).unwrap();
        let lease = used.lease();
        let mut state = pool.core.lock();
        let at = [2 * G, G];
        assert_eq!(state.take_from(id, &at), (0, Ok(())));
        drop(state);
        drop(lease);
        // Memory that the block gives up now waits for a stream.
        let stream = rig.busy_stream();
        used.record_use(&stream).unwrap();
        used.try_grow_to(3 * G).unwrap();
        used.shrink_to(G).unwrap();
        let mut state = pool.core.lock();
        assert_eq!(state.take_from(id, &at), (0, Ok(())), "work may use it");
        rig.finish(&stream);
        assert_eq!(state.take_back_any(me.id(), 4 * G).unwrap(), 2 * G);
        let gone = SlotId { index: 9, ..id };
        assert_eq!(state.take_from(gone, &at), (0, Ok(())));
    }

    #[test]
    fn addresses_of_empty_slots_are_given_up_until_there_is_room_and_no_further() {
        let rig = rig();
        let builder = limited(&rig, 16).address_limit(10 * G);
        let pool = builder.build().unwrap();
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        let in_use = block(&me, 2);
        leave_idle(&me, &[2, 2]);
        leave_idle(&other, &[2]);
        let full = block(&other, 1);
        drop(full);
        let mut state = pool.core.lock();
        state.take_back_own(me.id(), u64::MAX).1.unwrap();
        state.take_back_any(me.id(), 2 * G).unwrap();
        assert_eq!((held(&state, &me), held(&state, &other)), (2, 1));
        let reserved = |state: &State| state.memory.budget.addresses() / G;
        assert_eq!(reserved(&state), 9);
        state.make_address_room(G).unwrap();
        assert_eq!(reserved(&state), 9, "there is room");
        state.make_address_room(2 * G).unwrap();
        assert_eq!(reserved(&state), 7, "one is enough");
        state.make_address_room(5 * G).unwrap();
        assert_eq!(reserved(&state), 5);
        let refused = state.make_address_room(10 * G).unwrap_err();
        assert!(matches!(refused, BlockError::OutOfAddresses { held, .. } if held == 3 * G));
        assert_eq!(reserved(&state), 3, "the others have memory");
        assert_eq!(held(&state, &other), 1);
        drop(state);
        drop(in_use);
    }

    #[test]
    fn what_forks_have_given_up_is_taken_back_once_that_has_passed() {
        let rig = rig();
        let pool = pool(&rig, 4);
        let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
        let stream = Stream::new(&rig.device).unwrap();
        let block = other.allocate_on(&stream, 2 * G).unwrap();
        let fork = block.try_fork(2 * G, 2 * G).unwrap();
        rig.queue(&stream);
        drop((block, fork));
        let mut state = pool.core.lock();
        assert!(state.reclaim_for(me.id(), 3 * G, Purpose::New).is_err());
        assert_eq!(held(&state, &other), 2);
        rig.finish(&stream);
        state.reclaim_for(me.id(), 4 * G, Purpose::New).unwrap();
        assert_eq!(
            (held(&state, &other), state.memory.supply.free()),
            (0, 2 * G)
        );
    }

    #[test]
    fn addresses_of_what_draining_tenants_left_are_given_up_once_that_has_passed() {
        let rig = rig();
        let pool = limited(&rig, 4).address_limit(4 * G).build().unwrap();
        let gone = tenant(&pool, "gone", 0, 0);
        let stream = rig.busy_stream();
        drop(gone.allocate_on(&stream, 2 * G).unwrap());
        drop(gone);
        let mut state = pool.core.lock();
        let made = |state: &mut Locked<'_>| {
            let made = state.make_address_room(4 * G).is_ok();
            made && state.memory.budget.addresses() == 0
        };
        assert!(!made(&mut state), "work may use it");
        rig.finish(&stream);
        assert!(made(&mut state));
        assert_eq!(state.memory.supply.free(), 2 * G);
    }

    #[test]
    fn resting_addresses_are_given_up_until_there_is_room() {
        let rig = rig();
        let builder = limited(&rig, 8).address_limit(8 * G);
        let pool = builder.hardened(Hardened::new().guard(0)).build().unwrap();
        let me = tenant(&pool, "me", 0, 0);
        leave_idle(&me, &[2, 2, 1]);
        let mut state = pool.core.lock();
        state.purge_all();
        assert_eq!((held(&state, &me), state.blocks.resting()), (0, (3, 5 * G)));
        state.make_address_room(3 * G).unwrap();
        assert_eq!(state.blocks.resting(), (3, 5 * G), "there is room");
        state.make_address_room(6 * G).unwrap();
        assert_eq!(state.blocks.resting(), (1, G));
    }
}
