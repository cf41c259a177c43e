//! Taking idle memory back: from whom, in which order, and what a guarantee keeps.
//!
//! A taking back is planned before it is begun: if it would not be enough, nothing is taken.
//! Order: the tenant's own idle memory, then that of others, then precommitted memory, the tenant's own first.
//! Among others draining tenants give first, then lower priorities, then what was used least
//! recently. Whole extents move, so that many bytes cost few driver calls.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::budget::TenantId;
use super::core::Locked;
use super::ids::SlotId;
use super::slot::Slot;
use super::state::State;
use super::tenancy::{Aged, Give};
use crate::error::{AllocateError, CallError};
use crate::region::Round;

/// One extent to be taken.
#[derive(Clone, Copy, Debug)]
struct Take {
    slot: SlotId,
    offset: u64,
    size: u64,
}

/// Extents to be taken, and what that brings.
#[derive(Debug)]
pub(super) struct Plan {
    /// In which fences are asked.
    round: Round,
    takes: Vec<Take>,
    /// Bytes that count for whoever wants them.
    gained: u64,
    /// Bytes taken, by owner.
    taken: BTreeMap<TenantId, u64>,
    /// From where on slots are taken from already: a tenant's precommitted memory is looked at again if more than
    /// its own limit asks for is wanted.
    from: BTreeMap<SlotId, u64>,
}

impl Plan {
    pub(super) fn begin(state: &State) -> Self {
        Self {
            round: Round::begin(&state.device),
            takes: Vec::new(),
            gained: 0,
            taken: BTreeMap::new(),
            from: BTreeMap::new(),
        }
    }

    /// Bytes that it brings.
    pub(super) const fn gained(&self) -> u64 {
        self.gained
    }

    /// Bytes that it takes from some slots.
    pub(super) fn takes_from(&self, slots: &BTreeSet<SlotId>) -> u64 {
        let of_them = |take: &&Take| slots.contains(&take.slot);
        let takes = self.takes.iter().filter(of_them);
        takes.map(|take| take.size).sum()
    }
}

impl Locked<'_> {
    /// Makes room for `bytes` more charged to a tenant, who is charged before the lock is let go
    /// again.
    pub(crate) fn make_room(&mut self, id: TenantId, bytes: u64) -> Result<(), AllocateError> {
        while self.budget.missing(id, bytes).1 > 0 {
            // This may let the lock go, and what is missing may come free.
            self.gather_idle();
            let (own, total) = self.budget.missing(id, bytes);
            if total == 0 {
                break;
            }
            let plan = self.plan(id, own, total);
            // Somebody else may be charged for what is taken back first.
            self.carry_out_if_enough(id, bytes, total, &plan)?;
        }
        Ok(())
    }

    /// Makes sure that a tenant may use `bytes` of its own idle memory again. They are charged to
    /// it, but may have been promised to another since: then others give first.
    pub(crate) fn permit_reuse(&mut self, slot: SlotId, bytes: u64) -> Result<(), AllocateError> {
        let id = slot.tenant;
        while bytes > 0 && self.budget.is_overdrawn() {
            self.gather_idle();
            let kept = self.kept_by(id) + bytes;
            let total = self.budget.overdrawn_by(id, kept);
            if total == 0 {
                break;
            }
            let mut plan = Plan::begin(self);
            for give in [Give::Cached, Give::Precommitted] {
                self.plan_others(id, give, total, &mut plan);
            }
            self.carry_out_if_enough(id, bytes, total, &plan)?;
        }
        // From here on nobody is promised them.
        if let Some(tenancy) = self.tenants.get_mut(&id) {
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
    ) -> Result<(), AllocateError> {
        let mut reclaimable = plan.gained;
        if plan.gained >= total {
            let before = self.budget.quarantined();
            self.carry_out(plan)?;
            // What was exported goes to the driver, which may refuse it.
            let lost = self.budget.quarantined() - before;
            if plan.gained.saturating_sub(lost) >= total {
                return Ok(());
            }
            reclaimable = 0;
        }
        let shortage = self.shortage(id, bytes, reclaimable);
        Err(if self.capturing > 0 && shortage.pending_free > 0 {
            AllocateError::Capturing(shortage)
        } else {
            AllocateError::OutOfMemory(shortage)
        })
    }

    /// Takes back at least one extent from anybody, at most about `bytes`; returns what it got.
    pub(crate) fn take_back_any(&mut self, id: TenantId, bytes: u64) -> Result<u64, CallError> {
        self.gather_idle();
        let plan = self.plan(id, 0, bytes);
        self.carry_out(&plan)
    }

    /// Takes back up to `count` extents, for their mappings.
    pub(crate) fn take_back_mappings(&mut self, id: TenantId, count: u64) -> Result<(), CallError> {
        self.gather_idle();
        let mut plan = self.plan(id, 0, u64::MAX);
        plan.takes
            .truncate(usize::try_from(count).unwrap_or(usize::MAX));
        self.carry_out(&plan).map(|_| ())
    }

    /// Takes back everything idle of one tenant whose fence has passed.
    pub(crate) fn take_back_all_of(&mut self, id: TenantId) -> Result<u64, CallError> {
        let mut plan = Plan::begin(self);
        for give in [Give::Cached, Give::Precommitted] {
            self.plan_from(&[id], give, u64::MAX, false, &mut plan);
        }
        self.carry_out(&plan)
    }

    /// Brings what stream caches and shared memory hide to light. May let the lock go.
    pub(super) fn gather_idle(&mut self) {
        self.sweep_all();
        self.part_all();
    }

    /// What a tenant could take back of its own, and from others.
    pub(super) fn reach(&mut self, id: TenantId) -> (Plan, Plan) {
        self.gather_idle();
        let (mut own, mut others) = (Plan::begin(self), Plan::begin(self));
        for give in [Give::Cached, Give::Precommitted] {
            self.plan_from(&[id], give, u64::MAX, false, &mut own);
            self.plan_others(id, give, u64::MAX, &mut others);
        }
        (own, others)
    }

    /// Unmaps what was planned and keeps it in the free list where it may be kept; returns the bytes.
    /// The lock is let go for each slot: what is in use again by then is left where it is.
    fn carry_out(&mut self, plan: &Plan) -> Result<u64, CallError> {
        let mut got = 0;
        let mut outcome = Ok(());
        // Extents of a slot lie side by side in the plan.
        for takes in plan.takes.chunk_by(|one, other| one.slot == other.slot) {
            let Some(&Take { slot, .. }) = takes.first() else {
                continue;
            };
            let offsets: Vec<u64> = takes.iter().map(|take| take.offset).collect();
            match self.take_from(slot, &offsets) {
                Ok(bytes) => got += bytes,
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        self.release_marked();
        outcome.map(|()| got)
    }

    /// Takes extents from a slot, as far as they can be taken back.
    fn take_from(&mut self, id: SlotId, at: &[u64]) -> Result<u64, CallError> {
        let gives = |slot: &Slot| slot.is_unused() && slot.has_spare();
        if !self.slot(id).is_some_and(gives) {
            return Ok(0);
        }
        let taken = self.with_slot_out(id, |state, slot| {
            // Last first, without a hole: the mapper may have placed more behind what was planned,
            // and the slot may have been used and freed again.
            let spare = slot.spare().map(|extent| extent.offset);
            let at = spare.zip(at).take_while(|(spare, at)| spare == *at);
            let at = at.map(|(spare, _)| spare).collect();
            state.take_extents(slot, at)
        });
        taken.unwrap_or(Ok(0))
    }

    /// Gives up addresses of empty, unused slots of a tenant until `wanted` bytes may be reserved.
    fn drop_empty_slots(&mut self, id: TenantId, wanted: u64) {
        let Some(tenancy) = self.tenants.get(&id) else {
            return;
        };
        for together in tenancy.bare() {
            if self.budget.addresses_left() >= wanted {
                break;
            }
            // The lock is let go between them.
            let slot_id = |index| SlotId { tenant: id, index };
            let bare = |state: &State, index| state.slot(slot_id(index)).is_some_and(Slot::is_bare);
            if !together.iter().all(|&index| bare(self, index)) {
                continue;
            }
            for index in together {
                if bare(self, index)
                    && let Some(slot) = self.take_slot(slot_id(index))
                {
                    self.put_away(slot);
                }
            }
        }
    }

    /// Makes room for `bytes` of addresses.
    pub(crate) fn make_address_room(&mut self, bytes: u64) {
        if self.budget.addresses_left() >= bytes {
            return;
        }
        self.sweep_all();
        self.purge_all();
        let ids: Vec<TenantId> = self.tenants.keys().copied().collect();
        for id in ids {
            self.drop_empty_slots(id, bytes);
        }
        self.return_resting_for(bytes);
    }
}

impl State {
    /// What to take so that the tenant can be charged `total` bytes more, `own` of which its own
    /// limit asks of itself. If there is not so much of its own, the plan gains less than `total`.
    fn plan(&mut self, id: TenantId, own: u64, total: u64) -> Plan {
        let mut plan = Plan::begin(self);
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

    /// Plans to take from all others, rank by rank, until the plan gains `total`.
    pub(super) fn plan_others(&mut self, id: TenantId, give: Give, total: u64, plan: &mut Plan) {
        if plan.gained >= total {
            return;
        }
        let mut others: Vec<((bool, i32), TenantId)> = self
            .tenants
            .iter()
            .filter(|&(&other, tenancy)| other != id && tenancy.next_giving(give, None).is_some())
            .map(|(&other, tenancy)| ((tenancy.registered, tenancy.priority), other))
            .collect();
        others.sort_unstable();
        for equals in others.chunk_by(|one, other| one.0 == other.0) {
            let rank: Vec<TenantId> = equals.iter().map(|&(_, other)| other).collect();
            self.plan_from(&rank, give, total, true, plan);
        }
    }

    /// Plans to take from some tenants, what was used least recently first, until the plan gains
    /// `total`. If the memory is for `others` than its owners, only what they hold above their
    /// guarantees brings anything: an extent that reaches below is taken whole, and what the owner
    /// then lacks of its guarantee stays kept for it by the budget.
    pub(super) fn plan_from(
        &mut self,
        ids: &[TenantId],
        give: Give,
        total: u64,
        others: bool,
        plan: &mut Plan,
    ) {
        let mut oldest: BinaryHeap<Reverse<(Aged, TenantId)>> = BinaryHeap::new();
        for &id in ids {
            let first = self
                .tenants
                .get(&id)
                .and_then(|tenancy| tenancy.next_giving(give, None));
            oldest.extend(first.map(|aged| Reverse((aged, id))));
        }
        while let Some(Reverse((aged, id))) = oldest.pop() {
            if plan.gained >= total {
                break;
            }
            let spare = match others {
                true => self.spare_of(id, plan),
                false => u64::MAX,
            };
            if spare == 0 {
                continue;
            }
            let (tenant, index) = (id, aged.1);
            self.plan_slot(SlotId { tenant, index }, total, spare, plan);
            let next = self
                .tenants
                .get(&id)
                .and_then(|tenancy| tenancy.next_giving(give, Some(aged)));
            oldest.extend(next.map(|aged| Reverse((aged, id))));
        }
    }

    /// Plans to take extents from one slot, last first, as long as that brings something.
    fn plan_slot(&mut self, id: SlotId, total: u64, mut spare: u64, plan: &mut Plan) {
        let (capturing, needs) = (self.capturing, &mut self.needs_synchronise);
        let tenancy = self.tenants.get_mut(&id.tenant);
        let Some(slot) = tenancy.and_then(|tenancy| tenancy.slot_mut(id.index)) else {
            return;
        };
        // A block that grew into its precommitted memory may be listed still.
        if !slot.has_spare() || !Self::poll_in(capturing, needs, &mut slot.fence, &plan.round) {
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

    /// What a tenant holds above its guarantee, once a plan is carried out.
    pub(super) fn spare_of(&self, id: TenantId, plan: &Plan) -> u64 {
        let account = self.budget.account(id);
        let planned = plan.taken.get(&id).copied().unwrap_or(0);
        account
            .held
            .saturating_sub(planned)
            .saturating_sub(account.guarantee)
    }
}
