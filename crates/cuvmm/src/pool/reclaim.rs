//! Reclaim: which tenants idle memory is taken from, in which order, and how guarantees protect it.
//!
//! A plan comes first: if it would not bring enough, nothing is taken. The order is: the tenant's
//! own idle memory, then that of other tenants, then precommitted memory, the tenant's own first.
//! Among other tenants, draining tenants give first, then lower priorities, then the least recently
//! used memory. Whole extents move, so that many bytes cost few driver calls. Memory of heaps
//! ([holders](super::holders::holder)) comes after the slots of tenants of the same rank.
//!
//! Keeps I-3, I-4, I-31, I-90 and I-123.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::accounts::{Amount, Budget, Charge, TenantId};
use super::blocks::slots::{Aged, Give, SlotId};
use super::core::Locked;
use super::holders::HolderId;
use super::state::State;
use crate::device::Device;
use crate::error::{BlockError, CallError, LedgerShortage};
use crate::extents::{Fence, Round};
use crate::wanted::Purpose;

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
        match bytes {
            0 => Ok(()),
            _ => self.make_room(id, bytes, purpose, false),
        }
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
    /// but they may have been promised to another tenant meanwhile: then a ledger is asked for as
    /// many for the `purpose`, and other tenants give first.
    pub(super) fn permit_reuse(
        &mut self,
        slot: SlotId,
        bytes: u64,
        purpose: Purpose,
    ) -> Result<(), BlockError> {
        let id = slot.tenant;
        if bytes > 0 && self.memory.lowered && self.memory.budget.account(id).beyond {
            let limit = self.memory.budget.account(id).limit;
            if self.kept_by(id).saturating_add(bytes) > limit {
                return Err(self.out_of_memory(id, bytes));
            }
        }
        if bytes > 0 && self.memory.budget.totals().overdrawn {
            self.make_room(id, bytes, purpose, true)?;
        }
        // From here on the bytes are promised to no other tenant.
        self.blocks.slots.note_revived(slot, bytes);
        Ok(())
    }

    /// Returns the bytes that must be reclaimed before a tenant can be charged `bytes` more, or, with
    /// `reuses`, may use as many again that it is charged for: from the tenant itself, and in all.
    fn missing(&self, id: TenantId, bytes: u64, reuses: bool) -> (u64, u64) {
        let budget = &self.memory.budget;
        match reuses {
            false => budget.missing(id, bytes),
            true if budget.totals().overdrawn => {
                (0, budget.overdrawn_by(id, self.kept_by(id) + bytes))
            }
            true => (0, 0),
        }
    }

    /// Gets grants of the ledger, and reclaims memory, until no bytes are [missing](Self::missing).
    fn make_room(
        &mut self,
        id: TenantId,
        bytes: u64,
        purpose: Purpose,
        reuses: bool,
    ) -> Result<(), BlockError> {
        while self.missing(id, bytes, reuses).1 > 0 {
            let refused = match reuses {
                // Bytes that the tenant's own limit refuses have to come from the tenant, not from
                // the ledger.
                false => {
                    let (own, _) = self.memory.budget.missing(id, bytes);
                    self.grant_for(id, bytes.saturating_sub(own), purpose)
                }
                true => self.grant_for(TenantId::NONE, 0, purpose),
            };
            // May release the lock; the missing memory may become free meanwhile.
            self.collect_idle();
            let (own, total) = self.missing(id, bytes, reuses);
            if total == 0 {
                break;
            }
            let plan = match reuses {
                false => self.plan(id, own, total),
                true => self.plan_all_others(id, total),
            };
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
                self.return_unneeded(self.piece());
            }
            carried?;
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
            let before = self.memory.budget.totals().quarantined;
            self.carry_out(plan)?;
            // Exported memory goes to the driver, which may refuse it.
            let lost = self
                .memory
                .budget
                .totals()
                .quarantined
                .saturating_sub(before);
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
        shortage.memory_set_by.take_if(|_| ledger.is_some());
        if self.memory.gate.is_capturing() && shortage.pending_free > 0 {
            BlockError::Capturing(shortage)
        } else {
            BlockError::OutOfMemory(shortage)
        }
    }

    /// Reclaims at least one extent from any tenant, and at most about `bytes`. Returns the bytes.
    pub(super) fn take_back_any(&mut self, id: TenantId, bytes: u64) -> Result<u64, CallError> {
        self.collect_idle();
        let plan = self.plan(id, 0, bytes);
        self.carry_out(&plan)
    }

    /// Reclaims up to `count` extents, for their mappings.
    pub(super) fn take_back_mappings(&mut self, id: TenantId, count: u64) -> Result<(), CallError> {
        self.collect_idle();
        let mut plan = self.plan(id, 0, u64::MAX);
        plan.takes
            .truncate(usize::try_from(count).unwrap_or(usize::MAX));
        if plan.takes.len() as u64 >= count {
            plan.holders.clear();
        }
        let holders = &self.memory.holders;
        plan.holders.retain(|&(id, _)| holders.has_mappings(id));
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

    /// Collects idle memory: retries refused releases, reads the driver's memory pools, empties
    /// stream caches, and unmaps shared memory that has one user left. May release the lock.
    pub(super) fn collect_idle(&mut self) {
        self.retry_releases(1);
        self.refresh_driver_memory();
        self.blocks.sweep_all();
        self.part_all();
    }

    /// Plans all that a tenant could reclaim from itself, and from other tenants.
    pub(super) fn reach(&mut self, id: TenantId) -> (Plan, Plan) {
        self.collect_idle();
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
        let mut carry_out = || {
            // The extents of a slot are adjacent in the plan.
            for takes in plan.takes.chunk_by(|one, other| one.slot == other.slot) {
                let &[Take { slot, .. }, ..] = takes else {
                    continue;
                };
                let offsets: Vec<u64> = takes.iter().map(|take| take.offset).collect();
                let (bytes, taken) = self.reclaim_extents(slot, &offsets);
                got += bytes;
                taken?;
            }
            for &(holder, bytes) in &plan.holders {
                got += self.take_from_holder(holder, bytes)?;
            }
            Ok(())
        };
        let outcome = carry_out();
        self.release_marked();
        (got, outcome)
    }

    /// Makes room for `bytes` of addresses, or fails.
    pub(super) fn make_address_room(&mut self, bytes: u64) -> Result<(), BlockError> {
        if self.memory.budget.totals().left.addresses < bytes {
            self.give_addresses(bytes);
            let lack = |state: &State, id| {
                let left = state.memory.budget.totals().left.addresses;
                left < bytes && state.memory.holders.has_mappings(id)
            };
            if let Err(error) = self.empty_holders(lack) {
                log!(warn, %error, "memory of a heap stays, and the addresses that it is mapped at");
            }
        }
        self.memory.check_addresses(bytes)
    }
}

impl State {
    /// Polls the fences of all idle memory.
    pub(super) fn poll_idle(&mut self) {
        let ids: Vec<TenantId> = self.memory.budget.ids().collect();
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
        // Both have the same tenants.
        let tenants = self
            .blocks
            .slots
            .givers(give)
            .zip(self.memory.budget.accounts());
        let mut others: Vec<((bool, i32), TenantId)> = tenants
            .filter(|&((other, gives), _)| {
                let holds = || give == Give::Cached && self.memory.holders.has(other);
                other != id && (gives || holds())
            })
            .map(|((other, _), (_, account))| (account.rank(), other))
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
        let polls = !self.memory.gate.is_capturing();
        let mut holders = self.memory.holders.reclaimable(id, others, polls);
        while plan.gained < total
            && let Some((holder, sizes)) = holders.next()
        {
            let mut bytes = 0;
            for size in sizes {
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
                plan.holders.push((holder, bytes));
            }
        }
    }

    /// Plans to take extents from one slot, the last first, while they count.
    fn plan_slot(&mut self, id: SlotId, total: u64, mut spare: u64, plan: &mut Plan) {
        let (memory, blocks) = self.halves();
        let planned = plan.from.get(&id).copied().unwrap_or(u64::MAX);
        let is_complete = |fence: &mut Fence| memory.gate.poll_in(fence, &plan.round);
        let left = blocks.reclaimable(id, is_complete);
        for extent in left.skip_while(|extent| extent.offset >= planned) {
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
mod tests;
