//! The state of a pool behind its lock, in two halves: memory under a limit, and the blocks that hold
//! some of it. What is here and in `impl State` elsewhere needs both.

use std::fmt;
use std::sync::Arc;

use super::accounts::{Hooks, TenantId};
use super::blocks::Blocks;
use super::blocks::slots::{SlotId, Standing, Unswept};
use super::memory::Memory;
use crate::driver::memory_option;
use crate::error::{BlockError, CallError, PoolError, Shortage};

pub(crate) struct State {
    pub(super) memory: Memory,
    pub(super) blocks: Blocks,
}

impl State {
    pub(crate) const fn new(memory: Memory, blocks: Blocks) -> Self {
        Self { memory, blocks }
    }

    pub(crate) fn register(
        &mut self,
        terms: (String, i32, Hooks),
        unswept: Arc<dyn Unswept>,
        limits: (u64, u64),
    ) -> Result<TenantId, PoolError> {
        let id = self.memory.budget.open(terms, limits)?;
        self.blocks.slots.open(id, unswept);
        self.terms_changed(id);
        Ok(id)
    }

    /// Returns the bytes of a tenant that cannot be reclaimed, however long a request waits for the
    /// GPU.
    pub(super) fn kept_by(&self, id: TenantId) -> u64 {
        let holders = self.memory.holders.figures_of(id);
        let by_holders: u64 = holders
            .map(|(bytes, it)| bytes.saturating_sub(it.idle))
            .sum();
        self.blocks.kept_by(id) + by_holders + self.memory.budget.account(id).in_flight
    }

    /// Returns both halves of the state, for functions of one that need the other.
    pub(super) const fn halves(&mut self) -> (&mut Memory, &mut Blocks) {
        (&mut self.memory, &mut self.blocks)
    }

    /// Returns the bytes that a tenant, new or registered, can be guaranteed; with `now`, within the
    /// ledger's grant. No guarantee can be given over memory that cannot be reclaimed, nor over that
    /// of holders, which reuse their memory without asking the pool.
    pub(super) fn guaranteeable(&mut self, tenant: Option<TenantId>, now: bool) -> u64 {
        self.blocks.sweep_all();
        let Self { memory, blocks } = self;
        memory.budget.guaranteeable(tenant, now, |id| {
            let in_flight = memory.budget.account(id).in_flight;
            let of_holders = memory.holders.figures_of(id).map(|(bytes, _)| bytes);
            blocks.kept_by(id) + of_holders.sum::<u64>() + in_flight
        })
    }

    /// Returns `true` if work is left to do before an operation ends.
    #[inline]
    pub(super) const fn has_deferred(&self) -> bool {
        self.memory.has_deferred || self.blocks.has_deferred
    }

    pub(super) fn is_out(&self, id: SlotId) -> bool {
        // Usually no operation is in flight.
        !self.memory.gate.is_idle() && self.blocks.slots.is_out(id)
    }

    /// Returns what a tenant's terms and lowered limits mean for its blocks.
    pub(super) fn standing_of(&self, id: TenantId) -> Standing {
        let lowered = self.memory.lowered;
        let account = self.memory.budget.account(id);
        let (drains, is_beyond) = (account.drains, account.beyond);
        Standing {
            may_grow: !(drains || is_beyond),
            drains,
            lowered,
            beyond: is_beyond || (lowered && self.memory.budget.totals().excess > 0),
        }
    }

    /// Updates a tenant's blocks and holders for its terms and for lowered limits. Holders report
    /// freed memory while the limit of the pool is exceeded, and when they ended or the tenant
    /// drains.
    pub(super) fn terms_changed(&mut self, id: TenantId) {
        let standing = self.standing_of(id);
        self.blocks.slots.set_standing(id, standing);
        let drains = standing.drains;
        let reports = standing.beyond || drains;
        self.memory.holders.terms_changed(id, reports, drains);
    }

    /// Removes an unregistered tenant without slots.
    pub(super) fn forget_if_drained(&mut self, id: TenantId) {
        if self.blocks.slots.is_empty(id)
            && !self.memory.holders.has(id)
            && self.memory.budget.account(id).drains
        {
            self.blocks.slots.close(id);
            self.memory.budget.close(id);
        }
    }

    pub(super) fn out_of_memory(&self, id: TenantId, wanted: u64) -> BlockError {
        BlockError::OutOfMemory(self.shortage(id, wanted, 0))
    }

    pub(super) fn captured(&self, id: TenantId, wanted: u64) -> BlockError {
        BlockError::Capturing(self.shortage(id, wanted, 0))
    }

    pub(super) fn driver_out_of_memory(
        &self,
        id: TenantId,
        wanted: u64,
        cause: CallError,
    ) -> BlockError {
        let mut shortage = self.shortage(id, wanted, 0);
        shortage.memory_set_by = memory_option(self.memory.device.driver().kind());
        BlockError::DriverOutOfMemory { cause, shortage }
    }

    pub(crate) fn shortage(&self, id: TenantId, wanted: u64, reclaimable: u64) -> Box<Shortage> {
        let blocks = self.blocks.idle_figures();
        self.memory.shortage(id, wanted, reclaimable, blocks)
    }
}

/// Returns the error for a tenant or block that is gone.
pub(super) fn gone() -> BlockError {
    BlockError::Unregistered(String::new())
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("totals", &self.memory.budget.totals())
            .finish_non_exhaustive()
    }
}
