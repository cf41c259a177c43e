//! The memory that older requests of other processes lack, and what a process must leave to them.

use super::charge::Count;
use super::member::Member;
use super::places::InLine;
use crate::error::{LedgerRefusal, LedgerShortage};

#[derive(Clone, Debug, Default)]
pub(super) struct Unmet {
    /// Granules beyond those that are left.
    pub(super) need: u64,
    /// The most rounds that one of the requests has waited.
    pub(super) rounds: u64,
    /// The newest ticket of another process's request; 0 if there is none.
    pub(super) newest: u64,
    /// The ticket of this process's own oldest request, if the process has several pools; else 0.
    pub(super) own: u64,
    /// The ticket and slot of another process's oldest request.
    pub(super) oldest: Option<(u64, usize)>,
}

impl Unmet {
    /// Sums what older requests of other processes lack. Counts this process's own requests too if
    /// it has several pools.
    pub(super) fn of(member: &Member) -> Self {
        let layout = member.file().layout();
        let own = member.oldest_ticket().unwrap_or(u64::MAX);
        // Before the requests: a request that is charged meanwhile then lacks too little here, never
        // too much.
        let charged = layout
            .charges
            .iter()
            .map(|it| Count::of(it.load()).charged());
        let charged: u64 = charged.sum();
        let mut unmet = Self::default();
        let mut seen = member.seen();
        for (index, slot) in layout.slots.iter().enumerate() {
            let (ticket, is_own) = (layout.tickets[index].load(), index == member.index());
            let is_older = match is_own {
                // One pool's idle memory may be what another pool's request lacks.
                true => member.givers().are_several(),
                false => ticket < own,
            };
            if ticket == 0 || !is_older || !seen.is_waiting(layout, index) {
                continue;
            }
            unmet.need = unmet.need.saturating_add(slot.want.load());
            unmet.rounds = unmet.rounds.max(slot.round.load());
            if is_own {
                unmet.own = ticket;
            } else {
                unmet.newest = unmet.newest.max(ticket);
                let found = (ticket, index);
                unmet.oldest = Some(unmet.oldest.map_or(found, |oldest| oldest.min(found)));
            }
        }
        let left = member.limit_now().saturating_sub(charged);
        unmet.need = unmet.need.saturating_sub(left);
        unmet
    }
}

impl Member {
    /// Returns the refusal if a request at this place must leave idle memory to an older request of
    /// another process instead of using it for a new block of `bytes`. The request's pool was
    /// granted `granted` bytes, and `in_use` returns how many are in use. Refuses nothing while the
    /// older request lacks nothing, while the process stays within its guarantee, or while it has
    /// nothing idle above it: then the block is charged anew, and may [pass](super::passing).
    pub(crate) fn owes(
        &self,
        bytes: u64,
        granted: u64,
        place: Option<InLine>,
        in_use: impl FnOnce() -> u64,
    ) -> Option<LedgerShortage> {
        if !self.is_behind(place) || self.own_process().is_err() || Unmet::of(self).need == 0 {
            return None;
        }
        let account = self.account();
        let guarantee = account.guarantee.saturating_mul(self.granule().bytes());
        let needed = account.needed();
        drop(account);
        let (in_use, others) = (in_use(), needed.saturating_sub(granted));
        let is_within =
            guarantee > 0 && others.saturating_add(in_use).saturating_add(bytes) <= guarantee;
        let idle = granted.saturating_sub(in_use);
        let owed = idle.min(needed.saturating_sub(guarantee));
        let missing = self.granules(bytes);
        (!is_within && owed > 0).then(|| self.shortage(missing, 0, LedgerRefusal::OlderRequest))
    }
}
