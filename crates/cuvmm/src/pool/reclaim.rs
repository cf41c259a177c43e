//! Taking idle memory back: from whom, in which order, and what a guarantee keeps.
//!
//! A taking back is planned before it is begun: if it would not be enough, nothing is taken.
//! Order: the tenant's own idle memory, then that of others, then precommitted memory, the tenant's own first.
//! Among others draining tenants give first, then lower priorities, then what was used least
//! recently. Whole extents move, so that many bytes cost few driver calls.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::budget::TenantId;
use super::locked::Locked;
use super::slot::Slot;
use super::state::State;
use super::tenancy::{Aged, Give};
use crate::error::{AllocateError, CallError};
use crate::region::{Round, Unmapped, Unused};

/// One extent to be taken.
#[derive(Clone, Copy, Debug)]
struct Take {
    from: TenantId,
    slot: usize,
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
    from: BTreeMap<(TenantId, usize), u64>,
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

    /// Bytes that it takes from some of a tenant's slots.
    pub(super) fn takes_from(&self, id: TenantId, slots: &BTreeSet<usize>) -> u64 {
        let of_them = |take: &&Take| take.from == id && slots.contains(&take.slot);
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
            self.sweep_all();
            self.part_all();
            let (own, total) = self.budget.missing(id, bytes);
            if total == 0 {
                break;
            }
            let plan = self.plan_swept(id, own, total)?;
            // Somebody else may be charged for what is taken back first.
            self.carry_out_if_enough(id, bytes, total, &plan)?;
        }
        Ok(())
    }

    /// Makes sure that a tenant may use `bytes` of its own idle memory again. They are charged to
    /// it, but may have been promised to another since: then others give first.
    pub(crate) fn permit_reuse(
        &mut self,
        (id, index): (TenantId, usize),
        bytes: u64,
    ) -> Result<(), AllocateError> {
        while bytes > 0 && self.budget.is_overdrawn() {
            self.sweep_all();
            self.part_all();
            let kept = self.kept_by(id) + bytes;
            let total = self.budget.overdrawn_by(id, kept);
            if total == 0 {
                break;
            }
            let mut plan = Plan::begin(self);
            for give in [Give::Cached, Give::Precommitted] {
                self.plan_others(id, give, total, &mut plan)?;
            }
            self.carry_out_if_enough(id, bytes, total, &plan)?;
        }
        // From here on nobody is promised them.
        if let Some(tenancy) = self.tenants.get_mut(&id) {
            tenancy.note_revived(index, bytes);
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
        let plan = self.plan(id, 0, bytes)?;
        self.carry_out(&plan)
    }

    /// Takes back up to `count` extents, for their mappings.
    pub(crate) fn take_back_mappings(&mut self, id: TenantId, count: u64) -> Result<(), CallError> {
        let mut plan = self.plan(id, 0, u64::MAX)?;
        plan.takes
            .truncate(usize::try_from(count).unwrap_or(usize::MAX));
        self.carry_out(&plan).map(|_| ())
    }

    /// Takes back everything idle of one tenant whose fence has passed.
    pub(crate) fn take_back_all_of(&mut self, id: TenantId) -> Result<u64, CallError> {
        let mut plan = Plan::begin(self);
        for give in [Give::Cached, Give::Precommitted] {
            self.plan_from(&[id], give, u64::MAX, false, &mut plan)?;
        }
        self.carry_out(&plan)
    }

    /// What to take so that the tenant can be charged `total` bytes more, `own` of which its own
    /// limit asks of itself. If there is not so much of its own, the plan gains less than `total`.
    fn plan(&mut self, id: TenantId, own: u64, total: u64) -> Result<Plan, CallError> {
        self.sweep_all();
        self.part_all();
        self.plan_swept(id, own, total)
    }

    /// The same when the stream caches have been swept, without letting the lock go.
    fn plan_swept(&mut self, id: TenantId, own: u64, total: u64) -> Result<Plan, CallError> {
        let mut plan = Plan::begin(self);
        self.plan_from(&[id], Give::Cached, total.max(own), false, &mut plan)?;
        if plan.gained < own {
            self.plan_from(&[id], Give::Precommitted, own, false, &mut plan)?;
        }
        if plan.gained < own {
            plan.gained = plan.gained.min(total.saturating_sub(1));
            return Ok(plan);
        }
        self.plan_others(id, Give::Cached, total, &mut plan)?;
        self.plan_from(&[id], Give::Precommitted, total, false, &mut plan)?;
        self.plan_others(id, Give::Precommitted, total, &mut plan)?;
        Ok(plan)
    }

    /// Plans to take from all others, rank by rank, until the plan gains `total`.
    pub(super) fn plan_others(
        &mut self,
        id: TenantId,
        give: Give,
        total: u64,
        plan: &mut Plan,
    ) -> Result<(), CallError> {
        if plan.gained >= total {
            return Ok(());
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
            self.plan_from(&rank, give, total, true, plan)?;
        }
        Ok(())
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
    ) -> Result<(), CallError> {
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
            self.plan_slot(id, aged.1, total, spare, plan)?;
            let next = self
                .tenants
                .get(&id)
                .and_then(|tenancy| tenancy.next_giving(give, Some(aged)));
            oldest.extend(next.map(|aged| Reverse((aged, id))));
        }
        Ok(())
    }

    /// Plans to take extents from one slot, last first, as long as that brings something.
    fn plan_slot(
        &mut self,
        id: TenantId,
        index: usize,
        total: u64,
        mut spare: u64,
        plan: &mut Plan,
    ) -> Result<(), CallError> {
        let state: &mut State = self;
        let (capturing, needs) = (state.capturing, &mut state.needs_synchronise);
        let Some(slot) = state
            .tenants
            .get_mut(&id)
            .and_then(|tenancy| tenancy.slot_mut(index))
        else {
            return Ok(());
        };
        // A block that grew into its precommitted memory may be listed still.
        if !slot.has_spare() || !State::poll_in(capturing, needs, &mut slot.fence, &plan.round) {
            return Ok(());
        }
        let planned = plan.from.get(&(id, index)).copied().unwrap_or(u64::MAX);
        let left = slot.spare().skip_while(|extent| extent.offset >= planned);
        for extent in left {
            if plan.gained >= total || spare == 0 {
                break;
            }
            plan.from.insert((id, index), extent.offset);
            plan.takes.push(Take {
                from: id,
                slot: index,
                offset: extent.offset,
                size: extent.size,
            });
            let gain = extent.size.min(spare);
            plan.gained = plan.gained.saturating_add(gain);
            spare -= gain;
            *plan.taken.entry(id).or_default() += extent.size;
        }
        Ok(())
    }

    /// Unmaps what was planned and keeps it in the free list where it may be kept; returns the bytes.
    /// The lock is let go for each slot: what is in use again by then is left where it is.
    fn carry_out(&mut self, plan: &Plan) -> Result<u64, CallError> {
        let mut got = 0;
        let mut outcome = Ok(());
        // Extents of a slot lie side by side in the plan.
        for takes in plan
            .takes
            .chunk_by(|one, other| (one.from, one.slot) == (other.from, other.slot))
        {
            let Some(&Take { from, slot, .. }) = takes.first() else {
                continue;
            };
            let offsets: Vec<u64> = takes.iter().map(|take| take.offset).collect();
            match self.take_from(from, slot, &offsets) {
                Ok(bytes) => got += bytes,
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        self.release_marked();
        for &owner in plan.taken.keys() {
            self.drop_empty_slots_if_draining(owner);
        }
        outcome.map(|()| got)
    }

    /// Takes extents from a slot, as far as they can be taken back.
    fn take_from(&mut self, id: TenantId, index: usize, at: &[u64]) -> Result<u64, CallError> {
        let proof = |slot: &Slot| slot.proof().filter(|_| slot.has_spare());
        let Some(proof) = self.slot(id, index).and_then(proof) else {
            return Ok(0);
        };
        let Some(mut slot) = self.take_out(id, index) else {
            return Ok(0);
        };
        // Last first, without a hole: the mapper may have placed more behind what was planned, and the
        // slot may have been used and freed again.
        let spare = slot.spare().map(|extent| extent.offset);
        let at = spare.zip(at).take_while(|(spare, at)| spare == *at);
        let at = at.map(|(spare, _)| spare).collect();
        let taken = self.take_extents((id, index), &mut slot, at, proof);
        self.put_slot(id, index, slot);
        taken
    }

    /// Unmaps extents of a slot that is out, last first, and keeps them where they may be kept;
    /// returns the bytes.
    fn take_extents(
        &mut self,
        (id, index): (TenantId, usize),
        slot: &mut Slot,
        at: Vec<u64>,
        proof: Unused,
    ) -> Result<u64, CallError> {
        let mut unmapped = Vec::with_capacity(at.len());
        let mut withdraw = |offset| {
            unmapped.extend(slot.space.withdraw(offset, proof)?);
            Ok(())
        };
        let outcome = self.unlocked(|| at.into_iter().try_for_each(&mut withdraw));
        let mut bytes = 0;
        for unmapped in unmapped {
            bytes += unmapped.size();
            self.taken(id, unmapped);
        }
        slot.receded();
        self.renew((id, index), slot);
        outcome.map(|()| bytes)
    }

    /// Books an extent that was withdrawn from a tenant, and keeps it where it may be kept.
    pub(crate) fn taken(&mut self, from: TenantId, unmapped: Unmapped) {
        self.budget.refund(from, unmapped.size());
        self.budget.refund_mappings(from, 1);
        self.keep(unmapped);
    }

    /// Takes everything that can be taken from a slot that is out.
    pub(crate) fn take_spare(
        &mut self,
        (id, index): (TenantId, usize),
        slot: &mut Slot,
        proof: Unused,
    ) -> Result<(), CallError> {
        let at: Vec<u64> = slot.spare().map(|extent| extent.offset).collect();
        if at.is_empty() {
            return Ok(());
        }
        self.take_extents((id, index), slot, at, proof).map(drop)
    }

    /// Gives up the addresses of a draining tenant's empty slots, and forgets it with the last.
    pub(crate) fn drop_empty_slots_if_draining(&mut self, id: TenantId) {
        if self
            .tenants
            .get(&id)
            .is_some_and(|tenancy| !tenancy.registered)
        {
            self.drop_empty_slots(id, u64::MAX);
            self.forget_if_drained(id);
        }
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
            let bare = |&index: &usize| self.slot(id, index).is_some_and(Slot::is_bare);
            if !together.iter().all(bare) {
                continue;
            }
            for index in together {
                let bare = self.slot(id, index).is_some_and(Slot::is_bare);
                if bare && let Some(slot) = self.take_slot(id, index) {
                    self.put_away(id, index, slot);
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
