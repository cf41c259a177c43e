//! Sample figures of processes for tests.
//!
//! Only the library can construct its structs, so one process joins a ledger of the host driver,
//! and its figures are changed.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::ledger::{
    HolderStats, PoolReport, ProcessReport, ProcessState, StallAverages, TenantReport, WaitStats,
};
use cuvmm::{Device, Ledger};

use super::look::{Process, Shown};

pub(super) const MIB: u64 = 1 << 20;

/// Returns a running process without memory and without tenants.
pub(super) fn process(slot: usize, name: &str) -> Process {
    let directory = tempfile::tempdir().unwrap();
    let device = Device::open(Arc::new(HostDriver::new(HostOptions::new())), 0).unwrap();
    let ledger = Ledger::builder(&device, directory.path());
    let ledger = ledger.limit(1 << 30).open().unwrap();
    let mut stats = ledger.stats().processes.remove(0);
    stats.slot = slot;
    stats.pid = 1000 + u32::try_from(slot).unwrap();
    stats.name = name.to_owned();
    stats.state = ProcessState::Running;
    (stats.charged, stats.obtained, stats.idle) = (0, 0, 0);
    (stats.guarantee, stats.limit) = (0, 1 << 30);
    stats.priority = 0;
    (stats.waits_for, stats.waits) = (None, None);
    (stats.stalled, stats.stalled_full) = (Duration::ZERO, Duration::ZERO);
    Process {
        stats,
        report: Some(ProcessReport::default()),
        no_report: None,
    }
}

pub(super) fn with_tenant(mut process: Process, name: &str, in_use: u64) -> Process {
    let mut tenant = TenantReport::default();
    tenant.name = name.to_owned();
    (tenant.in_use, tenant.committed) = (in_use, in_use);
    tenant.limit = 1 << 30;
    let report = process.report.as_mut().unwrap();
    if report.pools.is_empty() {
        report.pools.push(PoolReport::default());
    }
    report.pools[0].tenants.push(tenant);
    process
}

/// Returns a ledger of 1 GiB with these processes.
pub(super) fn ledger(path: &str, processes: Vec<Process>) -> Shown {
    Shown {
        path: path.to_owned(),
        in_place: true,
        limit: 1 << 30,
        charged: processes.iter().map(|it| it.stats.charged).sum(),
        foreign: 0,
        usable: 1 << 30,
        stalled: Duration::ZERO,
        stalled_full: Duration::ZERO,
        stalled_average: StallAverages::default(),
        stalled_full_average: StallAverages::default(),
        exports: Vec::new(),
        processes,
    }
}

/// Makes a process wait for memory behind the processes in the slots `behind`. A holder is a slot,
/// its memory above the guarantee, and the idle part of that memory.
pub(super) fn waiting(
    process: &mut Process,
    lacks: u64,
    behind: &[usize],
    holders: &[(usize, u64, u64)],
) {
    let holders = holders.iter().map(|&(slot, above, idle)| {
        let mut holder = HolderStats::default();
        (holder.slot, holder.above, holder.idle) = (slot, above, idle);
        holder
    });
    let mut waits = WaitStats::default();
    (waits.lacks, waits.waited) = (lacks, Duration::from_millis(1_300));
    (waits.behind, waits.holders) = (behind.to_vec(), holders.collect());
    process.stats.waits_for = Some(lacks);
    process.stats.waits = Some(waits);
}
