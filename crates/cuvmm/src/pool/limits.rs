//! Limits, guarantees and priorities that change while the pool runs.
//!
//! A limit that is lowered holds at once for whatever is charged next. What is held beyond it is
//! taken back: what is idle by the call itself, the rest [as it comes
//! free](Locked::keep_to_limits). No block loses memory that it uses.

use super::budget::TenantId;
use super::core::{Core, Locked};
use super::reclaim::Plan;
use super::state::State;
use super::tenancy::Give;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, PoolError};
use crate::region::Urgency;

/// What an error calls a guarantee that the tenant's own limit does not allow.
const GUARANTEE: &str = "bytes of a guarantee, which the tenant's own limit bounds";

/// How much physical memory a pool may hold. What it has released counts no more, even if a process
/// that imported it still has it, which only the driver knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// At most this number of bytes, rounded down to whole granules.
    Bytes(u64),
    /// As much as there is, as long as this number of bytes stays free on the device. Asked of the driver
    /// before each creation (`cuMemGetInfo`, about 3 us), since others allocate too. What the pool
    /// holds idle is not given back when other programs leave less free.
    LeaveFree(u64),
}

/// What came of a new limit. Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitChange {
    /// The limit, in whole granules for a pool.
    pub limit: u64,
    /// What was taken back at once.
    pub taken_back: u64,
    /// What is held beyond the limit still: in use, leased, guaranteed to a tenant, in one extent
    /// with memory in use, out of use after a failure of the driver, or waiting for work.
    pub excess: u64,
}

impl Limit {
    /// The limit in bytes, in whole granules, and how much it leaves free.
    pub(super) fn of(self, device: &Device) -> Result<(u64, u64), PoolError> {
        let (granule, total) = (device.granule(), device.total_memory());
        let (limit, leave_free) = match self {
            Self::Bytes(limit) => (limit, 0),
            Self::LeaveFree(bytes) => (total.saturating_sub(bytes), bytes),
        };
        let what = "bytes of a pool's limit";
        ArgumentError::at_most(what, limit, total)?;
        ArgumentError::at_least(what, limit, granule.bytes())?;
        Ok((granule.round_down(limit), leave_free))
    }
}

impl Core {
    pub(super) fn set_limit(&self, limit: Limit) -> Result<LimitChange, PoolError> {
        self.device.own_process()?;
        self.device.usable()?;
        let (bytes, leave_free) = limit.of(&self.device)?;
        let mut state = self.lock();
        let guaranteed = state.budget.guaranteed();
        if bytes < guaranteed {
            let limit = bytes;
            return Err(PoolError::BelowGuarantees { limit, guaranteed });
        }
        let free_target = state.precommit.as_ref().map_or(0, |it| it.free_target);
        ArgumentError::at_least(
            "bytes of a limit, of which some are kept ready",
            bytes,
            free_target,
        )?;
        let before = state.budget.given_back();
        state.policy.leave_free = leave_free;
        state.budget.set_limit(bytes);
        let outcome = state.after_limit();
        self.changed(state);
        outcome?;
        // The end of the operation may have taken back more.
        Ok(self.look(|state| LimitChange {
            limit: bytes,
            taken_back: state.budget.given_back() - before,
            excess: state.budget.excess(),
        }))
    }

    pub(super) fn set_tenant_limit(
        &self,
        id: TenantId,
        limit: u64,
    ) -> Result<LimitChange, PoolError> {
        let mut state = self.lock();
        state.check_registered(id)?;
        let account = state.budget.account(id);
        ArgumentError::at_most(GUARANTEE, account.guarantee, limit)?;
        state.budget.set_tenant_limit(id, limit);
        let outcome = state.after_limit();
        self.changed(state);
        outcome?;
        let held = self.look(|state| state.budget.account(id).held);
        Ok(LimitChange {
            limit,
            taken_back: account.held.saturating_sub(held),
            excess: held.saturating_sub(limit),
        })
    }

    pub(super) fn set_guarantee(&self, id: TenantId, guarantee: u64) -> Result<(), PoolError> {
        let mut state = self.lock();
        state.check_registered(id)?;
        let account = state.budget.account(id);
        if guarantee > account.guarantee {
            state.check_guarantee(Some(id), guarantee, account.limit)?;
        }
        state.budget.set_guarantee(id, guarantee);
        self.changed(state);
        Ok(())
    }

    pub(super) fn set_priority(&self, id: TenantId, priority: i32) -> Result<(), PoolError> {
        let mut state = self.lock();
        state.check_registered(id)?;
        if let Some(tenancy) = state.tenants.get_mut(&id) {
            tenancy.priority = priority;
        }
        Ok(())
    }

    /// A limit or guarantee was changed, which may leave more for requests that wait: they try again.
    fn changed(&self, state: Locked<'_>) {
        Self::let_go(state);
        self.announce();
    }
}

impl State {
    /// Whether a tenant, new or not, whose own limit is given, can be given a guarantee.
    pub(super) fn check_guarantee(
        &mut self,
        tenant: Option<TenantId>,
        guarantee: u64,
        limit: u64,
    ) -> Result<(), PoolError> {
        let pool = self.budget.limits().bytes;
        if limit < pool {
            ArgumentError::at_most(GUARANTEE, guarantee, limit)?;
        }
        let left = self.guaranteeable(tenant);
        if guarantee > left {
            return Err(PoolError::GuaranteeTooLarge {
                guarantee,
                left,
                limit: pool,
            });
        }
        Ok(())
    }

    fn check_registered(&self, id: TenantId) -> Result<(), PoolError> {
        self.device.own_process()?;
        let tenancy = self.tenants.get(&id);
        match tenancy.is_some_and(|tenancy| tenancy.registered) {
            true => Ok(()),
            false => Err(PoolError::Unregistered {
                tenant: tenancy.map_or_else(String::new, |it| it.name.clone()),
            }),
        }
    }

    /// The tenants that hold more than their limits.
    fn beyond(&self) -> Vec<TenantId> {
        let ids = self.tenants.keys().copied();
        ids.filter(|&id| self.budget.excess_of(id) > 0).collect()
    }
}

impl Locked<'_> {
    /// A limit was changed: takes back what can be taken back, and notes whether that was all.
    fn after_limit(&mut self) -> Result<(), CallError> {
        self.note_lowered();
        if !self.lowered {
            return Ok(());
        }
        // Blocks that are freed from here on come to the pool.
        self.sweep_each();
        let outcome = self.take_excess();
        self.note_lowered();
        // What waits for work now is the mapper's to look after, if no operation comes by.
        if let Some(precommit) = &mut self.precommit {
            precommit.call(Urgency::Soon);
        }
        outcome
    }

    /// Notes whether a limit is exceeded. As long as one is, what is freed does not go to stream
    /// caches, but to the pool.
    fn note_lowered(&mut self) {
        let state: &mut State = self;
        state.lowered = state.budget.excess() > 0;
        for (&id, tenancy) in &mut state.tenants {
            tenancy.beyond = state.budget.excess_of(id) > 0;
            state.lowered |= tenancy.beyond;
        }
        let ids = self.tenants.keys();
        ids.for_each(|&id| self.update_bypass(id));
    }

    /// Takes back what is held beyond limits that were lowered, as far as it has come free: when a
    /// request ends, or an operation that put back a slot with something to give.
    pub(super) fn keep_to_limits(&mut self) {
        if !self.lowered || self.device.forked().is_some() || self.device.lost().is_some() {
            return;
        }
        if let Err(error) = self.take_excess() {
            tracing::warn!(%error, "memory beyond a limit stays for now");
        }
        self.note_lowered();
    }

    fn take_excess(&mut self) -> Result<(), CallError> {
        self.gather_idle();
        for id in self.beyond() {
            let mut plan = Plan::begin(self);
            for give in [Give::Cached, Give::Precommitted] {
                let excess = self.budget.excess_of(id);
                self.plan_from(&[id], give, excess, false, &mut plan);
            }
            self.carry_out(&plan)?;
        }
        if self.budget.excess() > 0 {
            let limit = self.budget.limits().bytes;
            self.trim(limit)?;
        }
        Ok(())
    }
}
