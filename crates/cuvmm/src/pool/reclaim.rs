//! Taking idle memory back: from whom, in which order, and what a guarantee keeps.
//!
//! A taking back is planned before it is begun: if it would not be enough, nothing is taken.
//! Order: the tenant's own idle memory, then that of others, draining tenants first, then lower
//! priority first, then what was used least recently.

use super::budget::TenantId;
use super::state::State;
use crate::error::{AllocateError, CallError};
use crate::region::Piece;

/// One extent to be taken.
#[derive(Clone, Copy, Debug)]
struct Take {
    from: TenantId,
    slot: usize,
    offset: u64,
    size: u64,
}

impl State {
    /// Makes room for `bytes` more charged to a tenant.
    pub(crate) fn make_room(&mut self, id: TenantId, bytes: u64) -> Result<(), AllocateError> {
        let (own, total) = self.budget.missing(id, bytes);
        if total == 0 {
            return Ok(());
        }
        let (takes, gained) = self.plan(id, own, total)?;
        if gained < total {
            let shortage = self.shortage(id, bytes, gained);
            return Err(if self.capturing > 0 && shortage.limbo > 0 {
                AllocateError::Capturing(shortage)
            } else {
                AllocateError::OutOfMemory(shortage)
            });
        }
        self.carry_out(&takes)?;
        Ok(())
    }

    /// Takes back at least one extent from anybody, at most about `bytes`; returns what it got.
    pub(crate) fn take_back_any(&mut self, id: TenantId, bytes: u64) -> Result<u64, CallError> {
        let (takes, _) = self.plan(id, 0, bytes)?;
        self.carry_out(&takes)
    }

    /// Takes back up to `count` extents, for their mappings.
    pub(crate) fn take_back_mappings(&mut self, id: TenantId, count: u64) -> Result<(), CallError> {
        let (mut takes, _) = self.plan(id, 0, u64::MAX)?;
        takes.truncate(usize::try_from(count).unwrap_or(usize::MAX));
        self.carry_out(&takes).map(|_| ())
    }

    /// Takes back everything idle of one tenant whose fence has passed.
    pub(crate) fn take_back_all_of(&mut self, id: TenantId) -> Result<u64, CallError> {
        let mut takes = vec![];
        self.take_from(
            id,
            &self.slots_by_age(&[id]),
            u64::MAX,
            u64::MAX,
            &mut takes,
        )?;
        self.carry_out(&takes)
    }

    /// What to take so that the tenant can be charged `total` bytes more, `own` of which its own
    /// limit asks of itself; and how many of the `total` bytes that would bring.
    fn plan(&mut self, id: TenantId, own: u64, total: u64) -> Result<(Vec<Take>, u64), CallError> {
        let mut takes = vec![];
        let mine = self.slots_by_age(&[id]);
        let got = self.take_from(id, &mine, total.max(own), u64::MAX, &mut takes)?;
        if got < own {
            return Ok((takes, got.min(total.saturating_sub(1))));
        }
        let mut gained = got;
        let mut others: Vec<((bool, i32), TenantId)> = self
            .tenants
            .iter()
            .filter(|&(&other, _)| other != id)
            .map(|(&other, tenancy)| ((tenancy.registered, tenancy.priority), other))
            .collect();
        others.sort_unstable();
        for equals in others.chunk_by(|one, other| one.0 == other.0) {
            let rank: Vec<TenantId> = equals.iter().map(|&(_, other)| other).collect();
            let slots = self.slots_by_age(&rank);
            for chunk in slots.chunk_by(|one, other| one.0 == other.0) {
                if gained >= total {
                    return Ok((takes, gained));
                }
                let Some(&(owner, _)) = chunk.first() else {
                    continue;
                };
                let account = self.budget.account(owner);
                let planned: u64 = takes
                    .iter()
                    .filter(|take| take.from == owner)
                    .map(|take| take.size)
                    .sum();
                let held = account.held.saturating_sub(planned);
                let spare = held.saturating_sub(account.guarantee);
                gained += self.take_from(owner, chunk, total - gained, spare, &mut takes)?;
            }
        }
        Ok((takes, gained))
    }

    /// The slots of some tenants, least recently used first.
    fn slots_by_age(&self, ids: &[TenantId]) -> Vec<(TenantId, usize)> {
        let mut slots: Vec<(u64, TenantId, usize)> = ids
            .iter()
            .filter_map(|&id| Some((id, self.tenants.get(&id)?)))
            .flat_map(|(id, tenancy)| {
                tenancy
                    .live_slots()
                    .map(move |(index, slot)| (slot.touched, id, index))
            })
            .collect();
        slots.sort_unstable();
        slots
            .into_iter()
            .map(|(_, id, index)| (id, index))
            .collect()
    }

    /// Plans to take extents from slots of one tenant until they bring `wanted` bytes; returns
    /// what they bring. Of what is taken only the first `spare` bytes, those above the owner's
    /// guarantee, bring anything to others: an extent that reaches below is taken whole, and what
    /// the owner then lacks of its guarantee stays kept for it by the budget.
    fn take_from(
        &mut self,
        id: TenantId,
        slots: &[(TenantId, usize)],
        wanted: u64,
        spare: u64,
        takes: &mut Vec<Take>,
    ) -> Result<u64, CallError> {
        let mut got = 0;
        for &(owner, index) in slots {
            if got >= wanted.min(spare) {
                break;
            }
            let (capturing, needs) = (self.capturing, &mut self.needs_synchronise);
            let Some(slot) = self
                .tenants
                .get_mut(&owner)
                .and_then(|tenancy| tenancy.slots.get_mut(index)?.as_mut())
            else {
                continue;
            };
            if owner != id || slot.spare().next().is_none() {
                continue;
            }
            if !Self::poll(capturing, needs, &mut slot.fence)? {
                continue;
            }
            for extent in slot.spare() {
                if got >= wanted.min(spare) {
                    break;
                }
                takes.push(Take {
                    from: owner,
                    slot: index,
                    offset: extent.offset,
                    size: extent.size,
                });
                got += extent.size.min(spare - got);
            }
        }
        Ok(got)
    }

    /// Unmaps what was planned and puts it into stock; returns the bytes.
    fn carry_out(&mut self, takes: &[Take]) -> Result<u64, CallError> {
        let mut got = 0;
        let mut outcome = Ok(());
        for take in takes {
            let Some(slot) = self.slot_mut(take.from, take.slot) else {
                continue;
            };
            match slot.space.withdraw(take.offset) {
                Ok(Some(piece)) => {
                    got += take.size;
                    self.taken(take.from, piece);
                }
                Ok(None) => {}
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        let mut owners: Vec<TenantId> = takes.iter().map(|take| take.from).collect();
        owners.dedup();
        for owner in owners {
            self.drop_empty_slots_if_draining(owner);
        }
        outcome.map(|()| got)
    }

    /// Books an extent that was withdrawn from a tenant into stock.
    pub(crate) fn taken(&mut self, from: TenantId, piece: Piece) {
        self.budget.refund(from, piece.size());
        self.budget.refund_mappings(from, 1);
        self.stock.add(piece);
    }

    /// Gives back the addresses of a draining tenant's empty slots, and forgets it with the last.
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

    /// Gives back addresses of empty, unused slots of a tenant until there are `wanted` bytes.
    pub(crate) fn drop_empty_slots(&mut self, id: TenantId, wanted: u64) -> u64 {
        let empty: Vec<usize> = match self.tenants.get(&id) {
            Some(tenancy) => tenancy
                .live_slots()
                .filter(|(_, slot)| {
                    slot.block.is_none() && slot.leases == 0 && slot.space.bytes() == 0
                })
                .map(|(index, _)| index)
                .collect(),
            None => return 0,
        };
        let mut got = 0;
        for index in empty {
            if got >= wanted {
                break;
            }
            if let Some(slot) = self.take_slot(id, index) {
                got += slot.class;
                self.drop_slot(id, slot);
            }
        }
        got
    }

    /// Makes room for `bytes` of addresses.
    pub(crate) fn make_address_room(&mut self, bytes: u64) {
        let ids: Vec<TenantId> = self.tenants.keys().copied().collect();
        for id in ids {
            let left = self.budget.addresses_left();
            if left >= bytes {
                return;
            }
            self.drop_empty_slots(id, bytes - left);
        }
    }
}
