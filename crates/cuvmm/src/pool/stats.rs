//! Statistics of pools and tenants, from the counters that enforce the limits. Reading them makes
//! no driver call.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::accounts::TenantId;
use super::blocks::slots::{Figures, Freed};
use super::holders::HolderFigures;
use super::state::State;
use crate::calls::CallCounts;
use crate::display::{Bytes, Count, Table};

/// A pool's statistics, in bytes.
///
/// `committed = in_use + padding + precommitted + cached + pending_free + leased + shared`. The
/// driver gave the pool `committed + free + quarantined`.
#[doc(alias = "GlobalMemoryStats")]
#[derive(Clone, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct PoolStats {
    /// The hard limit.
    pub limit: u64,
    /// Memory charged to tenants.
    pub committed: u64,
    /// The highest value that `committed` ever had.
    pub peak: u64,
    /// The sizes of all blocks, as requested.
    pub in_use: u64,
    /// Bytes of blocks beyond their sizes, since memory comes in whole granules.
    pub padding: u64,
    /// Memory mapped ahead of the growth of blocks and never used. It is given up before a request
    /// is refused.
    #[doc(alias = "margin")]
    pub precommitted: u64,
    /// Idle memory, mapped, whose fence is complete.
    #[doc(alias = "warm")]
    #[doc(alias = "idle")]
    pub cached: u64,
    /// Idle memory, mapped, whose fence is not known to be complete. The home stream can reuse the
    /// memory at once; for other requests the fence is polled.
    #[doc(alias = "limbo")]
    pub pending_free: u64,
    /// Freed memory that a lease keeps.
    pub leased: u64,
    /// Memory in use under the first bytes of several blocks, which [forks](super::Block::fork)
    /// have in common, counted once. The figures before do not include it.
    pub shared: u64,
    /// Unmapped memory from the driver that no tenant holds, including memory on its way back to
    /// the driver.
    pub free: u64,
    /// Memory that could not be released, which the pool does not use. Where the driver has refused
    /// a release, the pool asks again before a request is refused, in [`trim`](super::Pool::trim),
    /// at the end of a sleep that [releases](crate::sleep::Blocks::release) memory, and when a
    /// limit is lowered or a guarantee granted. Memory that work may still use is released when the
    /// pool is closed.
    pub quarantined: u64,
    /// Idle memory in one extent with memory in use, which no other tenant can have.
    pub stranded: u64,
    /// The part of `committed` that was exported, in use or not: memory of
    /// [blocks](super::Block::export), and of [regions](crate::region) in a tenant. It is released
    /// when it is given up and its fence is complete. It counts in no figure then, although the
    /// driver keeps it while a process that imported it does.
    pub exported: u64,
    /// Memory that sleeping blocks and heaps gave up and get back when they [wake](super::Tenant::blocks). It
    /// is charged to no tenant.
    pub asleep: u64,
    /// Mapped extents.
    pub mappings: u64,
    /// The limit of mapped extents.
    pub mapping_limit: u64,
    /// Reserved addresses. They include guards, resting addresses, and the addresses of freed
    /// blocks that were allocated [side by side](super::BlockBuilder::allocate_adjacent) with live
    /// blocks.
    pub addresses: u64,
    /// The limit of reserved addresses.
    pub address_limit: u64,
    /// Freed blocks whose addresses rest, in a hardened pool.
    pub resting_blocks: u64,
    /// Addresses that rest: reserved, with nothing mapped, and of no tenant.
    pub resting_addresses: u64,
    /// Allocations and growths refused because memory, mappings or addresses were short.
    pub refusals: u64,
    /// Driver calls by kind, through the device handle that the pool was built on.
    pub calls: CallCounts,
    /// The tenants, in the order of their registration, including draining tenants.
    pub tenants: Vec<TenantStats>,
}

impl PoolStats {
    /// Returns the share of committed memory that is idle and that no other tenant can use:
    /// `stranded / committed`, or 0 for a pool without committed memory.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.committed == 0 {
            0.0
        } else {
            self.stranded as f64 / self.committed as f64
        }
    }
}

/// Shows the pool's totals, a row for each tenant, and the calls and limits in numbers. The column
/// "in use" is the sum of [`in_use`](TenantStats::in_use) and [`shared`](TenantStats::shared).
impl fmt::Display for PoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        heading(f, [self.committed, self.stranded, self.limit, self.peak])?;
        let (free, quarantined) = (Bytes(self.free), Bytes(self.quarantined));
        writeln!(
            f,
            "{free} free, {quarantined} quarantined, {} asleep",
            Bytes(self.asleep)
        )?;
        rows(f, &self.tenants)?;
        let (mappings, mapping_limit) = (self.mappings, self.mapping_limit);
        let (addresses, address_limit) = (Bytes(self.addresses), Bytes(self.address_limit));
        write!(
            f,
            "{mappings} of {mapping_limit} mappings, {addresses} of {address_limit} of "
        )?;
        write!(
            f,
            "addresses, {}, {}",
            Count(self.refusals, "refusal"),
            Count(self.calls.total(), "driver call")
        )
    }
}

/// Shows the line about what is committed, from the bytes that are, those of them that are stranded,
/// the limit and the peak.
fn heading(f: &mut fmt::Formatter<'_>, figures: [u64; 4]) -> fmt::Result {
    let [committed, stranded, limit, peak] = figures.map(Bytes);
    writeln!(
        f,
        "{committed} committed ({stranded} stranded) of {limit}, at most {peak} so far"
    )
}

/// Shows a table with a row for each tenant.
fn rows(f: &mut fmt::Formatter<'_>, tenants: &[TenantStats]) -> fmt::Result {
    let mut table = Table::new([
        "tenant",
        "in use",
        "padding",
        "precommitted",
        "cached",
        "pending free",
        "leased",
        "guarantee",
        "limit",
    ]);
    for tenant in tenants {
        let name = match tenant.draining {
            true => format!("{} (draining)", tenant.name),
            false => tenant.name.clone(),
        };
        let size = |bytes| Bytes(bytes).to_string();
        table.row([
            name,
            size(tenant.in_use + tenant.shared),
            size(tenant.padding),
            size(tenant.precommitted),
            size(tenant.cached),
            size(tenant.pending_free),
            size(tenant.leased),
            size(tenant.guarantee),
            size(tenant.limit),
        ]);
    }
    writeln!(f, "{table}")
}

/// A tenant's statistics, in bytes; [`PoolStats`] explains the figures.
#[doc(alias = "MemoryStats")]
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct TenantStats {
    /// The tenant's name.
    pub name: String,
    /// `true` if the tenant is unregistered and waits for its last block and lease to end.
    pub draining: bool,
    /// The bytes that the tenant can always have.
    pub guarantee: u64,
    /// The bytes that the tenant is never charged beyond.
    pub limit: u64,
    /// The priority.
    pub priority: i32,
    /// Memory charged to the tenant.
    pub committed: u64,
    /// The highest value that `committed` ever had.
    pub peak: u64,
    /// The sizes of all blocks, as requested.
    pub in_use: u64,
    /// Bytes of blocks beyond their sizes, since memory comes in whole granules.
    pub padding: u64,
    /// Memory mapped ahead of the growth of blocks and never used.
    #[doc(alias = "margin")]
    pub precommitted: u64,
    /// Idle memory whose fence is complete.
    #[doc(alias = "warm")]
    #[doc(alias = "idle")]
    pub cached: u64,
    /// Idle memory whose fence is not known to be complete.
    #[doc(alias = "limbo")]
    pub pending_free: u64,
    /// Freed memory that a lease keeps.
    pub leased: u64,
    /// Memory in use under several blocks, counted once.
    pub shared: u64,
    /// Idle memory in one extent with memory in use.
    pub stranded: u64,
    /// The part of `committed` that was exported.
    pub exported: u64,
    /// Memory that sleeping blocks and heaps gave up and get back when they wake.
    pub asleep: u64,
    /// Mapped extents.
    pub mappings: u64,
    /// Reserved addresses, including guards.
    pub addresses: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Live leases.
    pub leases: u64,
    /// Allocations and growths refused because memory, mappings or addresses were short.
    pub refusals: u64,
    /// Bytes in use by tag, without blocks that have no tag and without shared memory.
    pub tags: BTreeMap<String, u64>,
}

/// Shows the tenant's totals, its row of the pool's [table](PoolStats), and what it has in numbers.
impl fmt::Display for TenantStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        heading(f, [self.committed, self.stranded, self.limit, self.peak])?;
        let (exported, asleep) = (Bytes(self.exported), Bytes(self.asleep));
        writeln!(f, "{exported} exported, {asleep} asleep")?;
        rows(f, std::slice::from_ref(self))?;
        let (mappings, addresses) = (Count(self.mappings, "mapping"), Bytes(self.addresses));
        let (blocks, leases) = (Count(self.blocks, "block"), Count(self.leases, "lease"));
        let refusals = Count(self.refusals, "refusal");
        write!(
            f,
            "{mappings}, {addresses} of addresses, {blocks}, {leases}, {refusals}"
        )
    }
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

    fn add_held(&mut self, (bytes, figures): (u64, HolderFigures)) {
        self.in_use += figures.in_use;
        self.padding += figures.padding;
        self.cached += figures.cached();
        self.pending_free += figures.pending_free;
        self.stranded += figures.stranded();
        self.exported += figures.exported;
        self.asleep += figures.asleep;
        // Memory on its way to the heap, or from it.
        self.precommitted += bytes - figures.held;
    }
}

impl State {
    pub(super) fn tenant_stats(&mut self, id: TenantId) -> TenantStats {
        self.blocks.sweep(id);
        self.stats_of(id)
    }

    fn stats_of(&self, id: TenantId) -> TenantStats {
        let account = self.memory.budget.account(id);
        let mut stats = TenantStats {
            draining: account.drains,
            name: account.name.clone(),
            guarantee: account.guarantee,
            limit: self.memory.budget.limit_of(id),
            priority: account.priority,
            committed: account.held,
            peak: account.peak,
            mappings: account.mappings,
            addresses: account.addresses,
            refusals: account.refusals,
            ..TenantStats::default()
        };
        let figures = self.blocks.figures_of(id);
        figures.for_each(|(figures, tag)| stats.add(&figures, tag));
        let holders = self.memory.holders.figures_of(id);
        holders.for_each(|held| stats.add_held(held));
        // Memory on its way counts as if it were behind a block's end.
        stats.precommitted += account.in_flight;
        let (shared, pending_free) = self.blocks.shared_of(id);
        stats.shared = shared;
        stats.pending_free += pending_free;
        stats
    }

    /// Returns the bytes from the driver that no tenant is charged for. An operation in flight, or
    /// a waking block, may already be charged for memory that it is about to take.
    fn free(&self) -> u64 {
        let all = self.memory.budget.totals();
        all.obtained.saturating_sub(all.held + all.quarantined)
    }

    pub(crate) fn stats(&mut self) -> PoolStats {
        self.blocks.sweep_all();
        let tenants = self.memory.budget.ids();
        let tenants: Vec<_> = tenants.map(|id| self.stats_of(id)).collect();
        let sum = |of: fn(&TenantStats) -> u64| tenants.iter().map(of).sum();
        let all = self.memory.budget.totals();
        let (resting_blocks, resting_addresses) = self.blocks.resting();
        PoolStats {
            limit: all.limits.bytes,
            committed: all.held,
            peak: all.peak,
            in_use: sum(|tenant| tenant.in_use),
            padding: sum(|tenant| tenant.padding),
            precommitted: sum(|tenant| tenant.precommitted),
            cached: sum(|tenant| tenant.cached),
            pending_free: sum(|tenant| tenant.pending_free),
            leased: sum(|tenant| tenant.leased),
            shared: sum(|tenant| tenant.shared),
            free: self.free(),
            quarantined: all.quarantined,
            stranded: sum(|tenant| tenant.stranded),
            exported: sum(|tenant| tenant.exported),
            asleep: sum(|tenant| tenant.asleep),
            mappings: all.mappings,
            mapping_limit: all.limits.mappings,
            addresses: all.addresses,
            address_limit: all.limits.addresses,
            resting_blocks,
            resting_addresses,
            refusals: self.memory.refusals,
            calls: self.memory.device.calls(),
            tenants,
        }
    }
}
