//! Requests that wait for memory of other processes, as a [ledger](crate::ledger) shows them.

use std::sync::PoisonError;
use std::time::Instant;

use super::relief::Demand;
use crate::error::BlockError;
use crate::ledger::{InLine, Waiting};
use crate::pool::accounts::{Joined, TenantId};
use crate::pool::core::{Core, Locked};
use crate::wanted::Lacking;

impl Core {
    /// Shows other processes until `until` the memory that a request lacks since the ledger refused
    /// it, at its `place` in their line if it has one; `None` ends its wait.
    pub(super) fn show_in_ledger(
        &self,
        (waiting, place): (&mut Option<Waiting>, Option<InLine>),
        lacking: Option<Lacking>,
        until: Instant,
    ) {
        let (Some(joined), Some(lacking)) = (self.ledger.get(), lacking) else {
            *waiting = None;
            return;
        };
        let place = place.unwrap_or_else(|| joined.member.line_up());
        joined.wait(waiting, place, lacking, Some(until));
    }

    /// Shows other processes the memory that the queue of futures lacks, at the place of its oldest
    /// request. Called under the pool's lock, so that what is shown is what the queue found last.
    pub(super) fn queue_in_ledger(&self, lacking: Option<(InLine, Lacking)>) {
        let Some(joined) = self.ledger.get() else {
            return;
        };
        let mut queued = joined.queued.lock().unwrap_or_else(PoisonError::into_inner);
        match lacking {
            Some((place, lacking)) => joined.wait(&mut queued, place, lacking, None),
            None => *queued = None,
        }
    }
}

impl Joined {
    fn wait(
        &self,
        waiting: &mut Option<Waiting>,
        place: InLine,
        lacking: Lacking,
        until: Option<Instant>,
    ) {
        match waiting.as_mut().filter(|it| it.place() == place) {
            Some(waiting) => waiting.renew(lacking.bytes),
            None => *waiting = Some(self.member.wait(place, lacking.bytes, until)),
        }
        let attached = self.attached.lock();
        let pool = *attached.unwrap_or_else(PoisonError::into_inner);
        if let (Some(waiting), Some(pool)) = (waiting, pool) {
            waiting.note(pool, lacking);
        }
    }
}

impl Locked<'_> {
    /// Returns the memory that the ledger refused a request, if other processes can help.
    pub(super) fn lacking_in_ledger(
        &mut self,
        id: TenantId,
        demand: Demand<'_>,
        error: &BlockError,
    ) -> Option<Lacking> {
        let refused = error.shortage()?.ledger?;
        if !refused.reason.is_of_others() {
            return None;
        }
        let (wanted, available) = self.wanted_and_available(id, demand, error);
        // Memory that the ledger leaves is no other process's to give.
        let uses = |&id: &TenantId| {
            let mut holders = self.memory.holders.figures_of(id);
            self.blocks.use_memory(id) || holders.any(|(_, it)| it.in_use > 0)
        };
        let users = self.memory.budget.ids().filter(uses);
        Some(Lacking {
            bytes: wanted.saturating_sub(available.saturating_sub(refused.left)),
            tenants: vec![id.0],
            users: users.map(|id| id.0).collect(),
        })
    }
}
