//! Limits, guarantees and priorities that [change](super#limits-that-change) while the pool runs.
//!
//! Memory beyond a lowered limit is reclaimed: idle memory by the call itself, the rest [when it
//! becomes free](Locked::keep_to_limits). No block loses memory that it uses.
//!
//! Keeps I-6.

use super::budget::{Account, TenantId};
use crate::device::Device;
use crate::driver::limit_name;
use crate::error::{ArgumentError, CallError, PoolError};
use crate::pool::core::{Core, Locked};
use crate::pool::line::PressureHook;
use crate::pool::memory::Memory;
use crate::wanted::Change;

/// The names of a tenant's guarantee and limit in errors.
const GUARANTEE: &str = "bytes of a tenant's guarantee, which is at most its limit";
const TENANT_LIMIT: &str = "bytes of a tenant's limit, which is at least its guarantee";

/// The physical memory that a pool may hold. Released memory does not count, even while another
/// process that imported it still has it, which only the driver knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Limit {
    /// At most this number of bytes, rounded down to whole granules: at least a granule, at most
    /// the device's memory.
    Bytes(u64),
    /// All memory of the device except this number of bytes, which stay free. The pool queries the
    /// driver before it creates memory (`cuMemGetInfo`, about 3 us), since other programs allocate too:
    /// once for all that an operation creates, such as many extents of a heap or a region.
    /// Idle memory of the pool is not given back when other programs leave less free.
    LeaveFree(u64),
}

/// The result of a new limit, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct LimitChange {
    /// The limit; a pool's is in whole granules.
    pub limit: u64,
    /// Memory reclaimed by the call.
    pub taken_back: u64,
    /// Memory still held beyond the limit: in use, leased, guaranteed to a tenant, in one extent
    /// with memory in use, quarantined after a failure of the driver, or pending free.
    pub excess: u64,
}

impl Limit {
    pub(in crate::pool) fn of(self, device: &Device) -> Result<(u64, u64), PoolError> {
        let (granule, total) = (device.granule(), device.total_memory());
        let (limit, leave_free) = match self {
            Self::Bytes(limit) => (limit, 0),
            Self::LeaveFree(bytes) => (total.saturating_sub(bytes), bytes),
        };
        ArgumentError::at_most(limit_name(device.driver().kind()), limit, total)?;
        ArgumentError::at_least("bytes of a pool's limit", limit, granule.bytes())?;
        Ok((granule.round_down(limit), leave_free))
    }
}

impl Core {
    pub(in crate::pool) fn set_limit(&self, limit: Limit) -> Result<LimitChange, PoolError> {
        self.device.own_process()?;
        self.device.usable()?;
        let (bytes, leave_free) = limit.of(&self.device)?;
        let mut state = self.lock();
        let guaranteed = state.memory.budget.guaranteed();
        if bytes < guaranteed {
            let limit = bytes;
            return Err(PoolError::BelowGuarantees { limit, guaranteed });
        }
        let free_target = state.blocks.free_target();
        ArgumentError::at_least(
            "bytes of a limit, of which some are kept ready",
            bytes,
            free_target,
        )?;
        let before = state.memory.budget.totals().given_back;
        state.memory.policy.leave_free = leave_free;
        state.memory.budget.set_limit(bytes);
        let outcome = state.after_limit();
        self.changed(state);
        outcome?;
        // The end of the operation may have reclaimed more.
        Ok(self.look(|state| LimitChange {
            limit: bytes,
            taken_back: state.memory.budget.totals().given_back - before,
            excess: state.memory.budget.totals().excess,
        }))
    }

    /// Changes a tenant's limit, guarantee or priority. Returns its limit, the bytes that the call
    /// reclaimed, and those that the tenant holds beyond the limit.
    pub(in crate::pool) fn change_terms(
        &self,
        id: TenantId,
        change: Change,
    ) -> Result<LimitChange, PoolError> {
        let mut state = self.lock();
        state.memory.check_registered(id)?;
        let account = state.memory.budget.account(id);
        let (guarantee, limit, before) = (account.guarantee, account.limit, account.held);
        let mut outcome = Ok(());
        match change {
            Change::Limit(bytes) => {
                ArgumentError::at_least(TENANT_LIMIT, bytes, guarantee)?;
                state.memory.budget.change(id, |it| it.limit = bytes);
                outcome = state.after_limit();
            }
            Change::Guarantee(bytes) => {
                if bytes > guarantee {
                    state.make_guaranteeable(Some(id), bytes, limit)?;
                }
                state.memory.budget.change(id, |it| it.guarantee = bytes);
            }
            Change::Priority(priority) => {
                state.memory.budget.change(id, |it| it.priority = priority);
            }
        }
        self.changed(state);
        outcome?;
        Ok(self.look(|state| {
            let account = state.memory.budget.account(id);
            LimitChange {
                limit: account.limit,
                taken_back: before.saturating_sub(account.held),
                excess: state.memory.budget.excess_of(id),
            }
        }))
    }

    pub(in crate::pool) fn set_hook(
        &self,
        id: TenantId,
        hook: Option<PressureHook>,
    ) -> Result<(), PoolError> {
        let mut state = self.lock();
        state.memory.check_registered(id)?;
        let hooks = (hook.clone(), hook);
        let replace = |account: &mut Account| std::mem::replace(&mut account.hooks, hooks);
        // User code, dropped without the lock.
        let old = state.memory.budget.change(id, replace);
        drop(state);
        drop(old);
        Ok(())
    }

    /// Ends an operation that changed a limit or guarantee. Waiting requests try again: there may
    /// be more for them.
    fn changed(&self, state: Locked<'_>) {
        Self::unlock(state);
        self.announce();
    }
}

impl Memory {
    fn check_registered(&self, id: TenantId) -> Result<(), PoolError> {
        self.device.own_process()?;
        match self.budget.account(id).registered {
            true => Ok(()),
            false => Err(PoolError::Unregistered(
                self.budget.account(id).name.clone(),
            )),
        }
    }
}

impl Locked<'_> {
    /// Checks that a new or registered tenant with the given limit can be given a guarantee.
    fn check_guarantee(
        &mut self,
        tenant: Option<TenantId>,
        guarantee: u64,
        limit: u64,
    ) -> Result<(), PoolError> {
        let pool = self.memory.budget.totals().limits.bytes;
        if limit < pool {
            ArgumentError::at_most(GUARANTEE, guarantee, limit)?;
        }
        let left = self.guaranteeable(tenant, false);
        if guarantee > left {
            return Err(PoolError::GuaranteeTooLarge {
                guarantee,
                left,
                limit: pool,
                memory_set_by: self.memory.memory_set_by(),
            });
        }
        Ok(())
    }

    /// Ensures that a new or registered tenant with the given limit can be given a guarantee. If
    /// heaps hold too much memory, takes their unused memory; makes the ledger grant the bytes that
    /// are lacking. May release the lock.
    pub(in crate::pool) fn make_guaranteeable(
        &mut self,
        tenant: Option<TenantId>,
        guarantee: u64,
        mut limit: u64,
    ) -> Result<(), PoolError> {
        match self.check_guarantee(tenant, guarantee, limit) {
            Err(PoolError::GuaranteeTooLarge { .. }) => {
                self.retry_releases(1);
                self.empty_holders(|_, _| true)?;
                self.check_guarantee(tenant, guarantee, limit)?;
            }
            outcome => outcome?,
        }
        if !self.grant_guarantee(tenant, guarantee)? {
            return Ok(());
        }
        // The lock was released meanwhile.
        if let Some(id) = tenant {
            self.memory.check_registered(id)?;
            limit = self.memory.budget.account(id).limit;
        }
        self.check_guarantee(tenant, guarantee, limit)
    }

    /// Reclaims idle memory after a limit was changed, and notes whether a limit is still exceeded.
    fn after_limit(&mut self) -> Result<(), CallError> {
        self.note_lowered();
        if !self.memory.lowered {
            return Ok(());
        }
        // From here on freed blocks skip the stream caches.
        self.blocks.sweep_each();
        let outcome = self.take_excess();
        self.note_lowered();
        // If no operation does so before, the mapper reclaims pending memory.
        self.blocks.call_mapper();
        outcome
    }

    /// Notes whether a limit is exceeded. While one is, freed blocks skip the stream caches.
    fn note_lowered(&mut self) {
        let memory = &mut self.memory;
        memory.lowered = memory.budget.totals().excess > 0;
        let ids: Vec<TenantId> = memory.budget.ids().collect();
        for &id in &ids {
            let beyond = memory.budget.excess_of(id) > 0;
            memory.budget.change(id, |it| it.beyond = beyond);
            memory.lowered |= beyond;
        }
        ids.into_iter().for_each(|id| self.terms_changed(id));
    }

    /// Reclaims free memory beyond lowered limits, when a request ends and when an operation ends
    /// that put back a slot with memory to give.
    pub(in crate::pool) fn keep_to_limits(&mut self) {
        if !self.memory.lowered || self.memory.device.usable().is_err() {
            return;
        }
        if let Err(error) = self.take_excess() {
            log!(warn, %error, "memory beyond a limit could not be reclaimed for now");
        }
        self.note_lowered();
    }

    fn take_excess(&mut self) -> Result<(), CallError> {
        self.collect_idle();
        for id in self.memory.budget.ids().collect::<Vec<_>>() {
            let excess = self.memory.budget.excess_of(id);
            if excess > 0 {
                self.take_back_own(id, excess).1?;
            }
        }
        if self.memory.budget.totals().excess > 0 {
            let limit = self.memory.budget.totals().limits.bytes;
            self.trim(limit)?;
        }
        Ok(())
    }
}
