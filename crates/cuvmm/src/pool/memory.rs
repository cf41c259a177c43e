//! Physical memory under a limit: what tenants are charged, what is free, which operations are in
//! flight, who waits, and what is lent to holders.

use cuvmm_driver::{HandleTypes, PhysicalProps};

use super::accounts::{Budget, TenantId};
use super::blocks::IdleFigures;
use super::gate::Gate;
use super::holders::Holders;
use super::line::Line;
use super::supply::Supply;
use crate::device::Device;
use crate::driver::memory_option;
use crate::error::{BlockError, CallError, Shortage};
use crate::growth::Growth;
use crate::own::Stream;

#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct Policy {
    pub(crate) props: PhysicalProps,
    pub(crate) largest_extent: u64,
    pub(crate) scrub: Scrub,
    pub(crate) growth: Growth,
    /// Bytes that must stay free on the device after a creation.
    pub(super) leave_free: u64,
}

impl Policy {
    pub(crate) fn new(device: &Device, largest_extent: u64) -> Self {
        Self {
            props: PhysicalProps::device(device.ordinal()),
            largest_extent,
            scrub: Scrub::default(),
            growth: Growth::default(),
            leave_free: 0,
        }
    }

    pub(crate) const fn shareable(&mut self, types: HandleTypes) {
        self.props.handle_types = types;
    }
}

/// When memory is filled with zeros on its way from one tenant to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scrub {
    /// Whenever memory changes tenants, ordered before the new owner's work. The default.
    #[default]
    BetweenTenants,
    /// Never: the pool's tenants trust each other.
    Never,
}

/// The memory of a pool's device that the pool has or may have, without the blocks that hold some of
/// it.
pub(crate) struct Memory {
    pub(crate) device: Device,
    pub(crate) policy: Policy,
    pub(super) budget: Budget,
    pub(crate) supply: Supply,
    pub(super) gate: Gate,
    pub(super) line: Line,
    /// `true` if the pool or a tenant may exceed a lowered limit.
    pub(super) lowered: bool,
    /// `true` if a holder, or memory marked for release, asks for work before an operation ends, this
    /// one or another.
    pub(super) has_deferred: bool,
    pub(super) holders: Holders,
    pub(crate) refusals: u64,
}

impl Memory {
    pub(super) fn new(device: Device, policy: Policy, budget: Budget) -> Self {
        Self {
            device,
            policy,
            budget,
            supply: Supply::default(),
            gate: Gate::default(),
            line: Line::default(),
            lowered: false,
            has_deferred: false,
            holders: Holders::default(),
            refusals: 0,
        }
    }

    pub(crate) fn check_usable(&self, id: TenantId) -> Result<(), BlockError> {
        self.device.usable()?;
        match self.budget.account(id).registered {
            true => Ok(()),
            false => Err(self.unregistered(id)),
        }
    }

    #[cold]
    fn unregistered(&self, id: TenantId) -> BlockError {
        BlockError::Unregistered(self.budget.account(id).name.clone())
    }

    /// Returns `true` if blocks may use memory that they already have without a charge.
    #[inline]
    pub(super) fn lets_grow(&self) -> bool {
        let usable = self.device.lost().is_none() && self.device.forked().is_none();
        usable && !self.budget.totals().overdrawn
    }

    /// Returns `true` if work queued on `home` now would become part of a graph, or might break a
    /// capture.
    pub(super) fn captures(&self, home: Option<&Stream>) -> Result<bool, CallError> {
        Ok(self.gate.is_capturing() || home.map_or(Ok(false), Stream::is_capturing)?)
    }

    pub(super) fn check_addresses(&self, wanted: u64) -> Result<(), BlockError> {
        let held = self.budget.totals().addresses;
        match wanted <= self.budget.totals().left.addresses {
            true => Ok(()),
            false => Err(BlockError::OutOfAddresses {
                wanted,
                held,
                limit: self.budget.totals().limits.addresses,
            }),
        }
    }

    /// Returns the option that sets the device's memory, if that memory is the pool's limit.
    pub(super) fn memory_set_by(&self) -> Option<&'static str> {
        let option = memory_option(self.device.driver().kind());
        let all = self.device.granule().round_down(self.device.total_memory());
        option.filter(|_| self.policy.leave_free > 0 || self.budget.totals().limits.bytes >= all)
    }

    /// Returns the figures of a request that is refused. `idle` are the figures of blocks that are not
    /// in use.
    pub(super) fn shortage(
        &self,
        id: TenantId,
        wanted: u64,
        reclaimable: u64,
        mut idle: IdleFigures,
    ) -> Box<Shortage> {
        let account = self.budget.account(id);
        let mut holders: Vec<(String, u64)> = self
            .budget
            .accounts()
            .filter(|&(other, account)| other != id && account.held > 0)
            .map(|(_, account)| (account.name.clone(), account.held))
            .collect();
        holders.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        idle.pending_free += self.holders.pending();
        let of_holders = self.budget.ids().flat_map(|id| self.holders.figures_of(id));
        idle.stranded += of_holders
            .map(|(_, it)| it.stranded() + it.kept)
            .sum::<u64>();
        let creatable = self
            .budget
            .totals()
            .left
            .bytes
            .min(self.policy.largest_extent);
        let run = self.device.granule().round_down(creatable);
        let limit = self.budget.totals().limits.bytes;
        let is_own = account.limit < limit && self.budget.missing(id, wanted).0 > 0;
        Box::new(Shortage {
            tenant: self.budget.account(id).name.clone(),
            wanted,
            available: self.budget.available_to(id).saturating_add(reclaimable),
            largest_run: run.max(self.supply.largest_free()),
            limit,
            tenant_limit: self.budget.limit_of(id),
            tenant_held: account.held,
            guaranteed_to_others: self.budget.guaranteed_to_others(id),
            pending_free: idle.pending_free,
            leased: idle.leased,
            stranded: idle.stranded,
            quarantined: self.budget.totals().quarantined,
            holders,
            ledger: None,
            // A tenant that has reached its own limit gets nothing from a larger device.
            memory_set_by: self.memory_set_by().filter(|_| !is_own),
        })
    }
}
