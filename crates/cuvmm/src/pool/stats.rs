//! The pool's figures, from the counters that enforce them. Asking makes no driver call.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::budget::TenantId;
use super::slot::Figures;
use super::slot::Freed;
use super::state::State;
use super::tenancy::Tenancy;
use crate::calls::CallCounts;

/// A pool's figures. Sizes in bytes.
///
/// `committed = in_use + padding + precommitted + cached + pending_free + leased + shared`; what the driver gave is
/// `committed + free + quarantined`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolStats {
    /// The hard limit.
    pub limit: u64,
    /// Charged to tenants.
    pub committed: u64,
    /// The most that was ever committed.
    pub peak: u64,
    /// What blocks were asked to have.
    pub in_use: u64,
    /// What blocks have beyond that because memory comes in granules.
    pub padding: u64,
    /// Put ahead of the growth of blocks and never used; given up before anybody is refused.
    #[doc(alias = "margin")]
    pub precommitted: u64,
    /// Idle and mapped; its fence has passed.
    #[doc(alias = "warm")]
    #[doc(alias = "idle")]
    pub cached: u64,
    /// Idle and mapped; whether its fence has passed is not known, and is asked when somebody
    /// wants the memory. The home stream has it at once.
    #[doc(alias = "limbo")]
    pub pending_free: u64,
    /// Freed, but kept by a lease.
    pub leased: u64,
    /// In use under the first bytes of several blocks, counted once: what
    /// [forks](super::Block::fork) have in common. In none of the figures above.
    pub shared: u64,
    /// Obtained from the driver, unmapped, held by nobody; on its way back to the driver too.
    pub free: u64,
    /// Out of use because it could not be given back; tried again when the pool is closed.
    pub quarantined: u64,
    /// Idle, but in one extent with memory in use, so that nobody else can have it.
    pub stranded: u64,
    /// Of what is committed: what was [exported](super::Block::export), in use or not. It is
    /// released when it is given up and has passed, and counts nowhere then, though the driver
    /// keeps it for as long as whoever imported it does.
    pub exported: u64,
    /// What blocks that [sleep](super::Tenant::blocks) have when they are awake: charged to nobody.
    pub asleep: u64,
    /// Extents mapped.
    pub mappings: u64,
    /// The limit in mappings.
    pub mapping_limit: u64,
    /// Addresses reserved, guards and those that rest included, and those of a block that is gone
    /// while one that was allocated [side by side](super::BlockBuilder::allocate_adjacent) with it
    /// keeps them.
    pub addresses: u64,
    /// The limit in addresses.
    pub address_limit: u64,
    /// Blocks that are gone and whose addresses rest, in a hardened pool.
    pub resting_blocks: u64,
    /// Addresses that rest: reserved, with nothing mapped, and no tenant's.
    pub resting_addresses: u64,
    /// Allocations and growths that were refused because something was short.
    pub refusals: u64,
    /// Driver calls by kind, made through the device handle that the pool was built on.
    pub calls: CallCounts,
    /// The tenants, in the order of their registration; draining ones too.
    pub tenants: Vec<TenantStats>,
}

impl PoolStats {
    /// The share of committed memory that is idle and yet of no use to anybody else:
    /// `stranded / committed`. 0 for a pool that is empty or full.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.committed == 0 {
            0.0
        } else {
            self.stranded as f64 / self.committed as f64
        }
    }
}

/// A tenant's figures. Sizes in bytes; see [`PoolStats`] for what each means.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantStats {
    /// Its name.
    pub name: String,
    /// Whether it is unregistered and waits for its last block and lease.
    pub draining: bool,
    /// What it can always have.
    pub guarantee: u64,
    /// What it is never charged beyond.
    pub limit: u64,
    /// Its priority.
    pub priority: i32,
    /// Charged to it.
    pub committed: u64,
    /// The most that was ever charged to it.
    pub peak: u64,
    /// What its blocks were asked to have.
    pub in_use: u64,
    /// What its blocks have beyond that because memory comes in granules.
    pub padding: u64,
    /// Put ahead of the growth of blocks and never used; given up before anybody is refused.
    #[doc(alias = "margin")]
    pub precommitted: u64,
    /// Idle, fence passed.
    #[doc(alias = "warm")]
    #[doc(alias = "idle")]
    pub cached: u64,
    /// Idle, fence not known to have passed.
    #[doc(alias = "limbo")]
    pub pending_free: u64,
    /// Freed, but kept by a lease.
    pub leased: u64,
    /// In use under several blocks, counted once.
    pub shared: u64,
    /// Idle, but in one extent with memory in use.
    pub stranded: u64,
    /// Of what is committed: what was exported.
    pub exported: u64,
    /// What blocks that sleep have when they are awake.
    pub asleep: u64,
    /// Extents mapped.
    pub mappings: u64,
    /// Addresses reserved, guards included.
    pub addresses: u64,
    /// Blocks that live.
    pub blocks: u64,
    /// Leases that live.
    pub leases: u64,
    /// Allocations and growths that were refused because something was short.
    pub refusals: u64,
    /// Bytes in use by tag; blocks without a tag are left out, and what several have in common.
    pub tags: BTreeMap<String, u64>,
}

impl TenantStats {
    fn add(&mut self, figures: &Figures, tag: Option<&Arc<str>>) {
        self.in_use += figures.in_use;
        self.padding += figures.padding;
        self.precommitted += figures.precommitted;
        match figures.freed {
            Freed::Cached => self.cached += figures.idle,
            Freed::PendingFree => self.pending_free += figures.idle,
            Freed::Leased => self.leased += figures.idle,
        }
        self.stranded += figures.stranded;
        self.exported += figures.exported;
        self.asleep += figures.asleep;
        self.leases += figures.leases;
        self.blocks += figures.blocks;
        if let Some(tag) = tag {
            match self.tags.get_mut(&**tag) {
                Some(bytes) => *bytes += figures.in_use,
                None => drop(self.tags.insert(tag.to_string(), figures.in_use)),
            }
        }
    }
}

impl State {
    pub(crate) fn tenant_stats(&mut self, id: TenantId) -> TenantStats {
        self.sweep(id);
        self.tenants
            .get(&id)
            .map(|tenancy| self.stats_of(id, tenancy))
            .unwrap_or_default()
    }

    fn stats_of(&self, id: TenantId, tenancy: &Tenancy) -> TenantStats {
        let account = self.budget.account(id);
        let mut stats = TenantStats {
            name: tenancy.name.clone(),
            draining: !tenancy.registered,
            guarantee: account.guarantee,
            limit: self.budget.limit_of(id),
            priority: tenancy.priority,
            committed: account.held,
            peak: account.peak,
            mappings: account.mappings,
            addresses: account.addresses,
            refusals: tenancy.refusals,
            ..TenantStats::default()
        };
        let figures = tenancy.figures();
        figures.for_each(|(figures, tag)| stats.add(&figures, tag));
        stats.shared = tenancy.shared_in_use();
        stats.pending_free += tenancy.shared_pending_free();
        stats
    }

    /// Bytes from the driver that nobody holds. An operation in flight may have taken some of them
    /// from the free list, or be charged for what it is about to take, and so may a block that wakes.
    const fn free(&self) -> u64 {
        let taken = self.budget.held() + self.budget.quarantined();
        self.budget.obtained().saturating_sub(taken)
    }

    pub(crate) fn stats(&mut self) -> PoolStats {
        self.sweep_all();
        let tenants: Vec<TenantStats> = self
            .tenants
            .iter()
            .map(|(&id, tenancy)| self.stats_of(id, tenancy))
            .collect();
        let sum = |of: fn(&TenantStats) -> u64| tenants.iter().map(of).sum();
        let limits = self.budget.limits();
        let (resting_blocks, resting_addresses) = self.resting();
        PoolStats {
            limit: limits.bytes,
            committed: self.budget.held(),
            peak: self.budget.peak(),
            in_use: sum(|tenant| tenant.in_use),
            padding: sum(|tenant| tenant.padding),
            precommitted: sum(|tenant| tenant.precommitted),
            cached: sum(|tenant| tenant.cached),
            pending_free: sum(|tenant| tenant.pending_free),
            leased: sum(|tenant| tenant.leased),
            shared: sum(|tenant| tenant.shared),
            free: self.free(),
            quarantined: self.budget.quarantined(),
            stranded: sum(|tenant| tenant.stranded),
            exported: sum(|tenant| tenant.exported),
            asleep: sum(|tenant| tenant.asleep),
            mappings: self.budget.mappings(),
            mapping_limit: limits.mappings,
            addresses: self.budget.addresses(),
            address_limit: limits.addresses,
            resting_blocks,
            resting_addresses,
            refusals: self.refusals,
            calls: self.device.calls(),
            tenants,
        }
    }
}
