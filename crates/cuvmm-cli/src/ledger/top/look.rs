//! One look at ledgers, their processes and tenants.

use std::time::Duration;

use cuvmm::LedgerView;
use cuvmm::error::ControlError;
use cuvmm::ledger::{
    Control, ExportStats, LedgerStats, ProcessReport, ProcessState, ProcessStats, StallAverages,
    TenantReport,
};
use serde::Serialize;

/// The timeout for a process's report.
const PATIENCE: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, Serialize)]
pub(super) struct Shown {
    pub(super) path: String,
    /// `false` if the file was removed or replaced after it was opened.
    pub(super) in_place: bool,
    pub(super) limit: u64,
    pub(super) charged: u64,
    pub(super) foreign: u64,
    pub(super) usable: u64,
    pub(super) stalled: Duration,
    pub(super) stalled_full: Duration,
    pub(super) stalled_average: StallAverages,
    pub(super) stalled_full_average: StallAverages,
    pub(super) processes: Vec<Process>,
    pub(super) exports: Vec<ExportStats>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Process {
    #[serde(flatten)]
    pub(super) stats: ProcessStats,
    /// The figures of the process's pools and tenants, if it answered.
    pub(super) report: Option<ProcessReport>,
    pub(super) no_report: Option<String>,
}

impl Process {
    /// Returns the tenants, each with the number of its pool.
    pub(super) fn tenants(&self) -> impl Iterator<Item = (usize, &TenantReport)> {
        let pools = self.report.iter().flat_map(|report| &report.pools);
        let pools = pools.enumerate();
        pools.flat_map(|(pool, it)| it.tenants.iter().map(move |tenant| (pool, tenant)))
    }

    /// Returns the sum of a figure over the tenants, if the process answered.
    pub(super) fn sum(&self, of: impl Fn(&TenantReport) -> u64) -> Option<u64> {
        self.report.as_ref()?;
        Some(self.tenants().map(|(_, tenant)| of(tenant)).sum())
    }
}

/// Reads the figures of ledgers and asks their processes for reports. Processes that do not answer
/// cost half a second together, not each.
pub(super) fn look(views: &[LedgerView]) -> Vec<Shown> {
    let found: Vec<(&LedgerView, LedgerStats)> =
        views.iter().map(|view| (view, view.stats())).collect();
    let asked = found.iter().flat_map(|(view, stats)| {
        let running = stats.processes.iter().filter(|it| runs(it));
        running.map(|process| view.control(process.slot))
    });
    let asked: Vec<Control> = asked.collect();
    let mut reports = Control::reports(&asked, PATIENCE).into_iter();
    let shown = found.into_iter().map(|(view, stats)| Shown {
        path: view.path().display().to_string(),
        in_place: view.is_in_place(),
        limit: stats.limit,
        charged: stats.charged,
        foreign: stats.foreign,
        usable: stats.usable,
        stalled: stats.stalled,
        stalled_full: stats.stalled_full,
        stalled_average: stats.stalled_average,
        stalled_full_average: stats.stalled_full_average,
        exports: stats.exports,
        processes: stats
            .processes
            .into_iter()
            .map(|stats| process(stats, &mut reports))
            .collect(),
    });
    shown.collect()
}

/// Combines a process with its report, which is the next one if the process was asked.
fn process(
    stats: ProcessStats,
    reports: &mut impl Iterator<Item = Result<ProcessReport, ControlError>>,
) -> Process {
    let report = match runs(&stats) {
        true => reports.next(),
        false => None,
    };
    let (report, no_report) = match report {
        Some(Ok(report)) => (Some(report), None),
        Some(Err(error)) => (None, Some(error.to_string())),
        None => (None, Some(format!("the process is {}", stats.state))),
    };
    Process {
        stats,
        report,
        no_report,
    }
}

fn runs(process: &ProcessStats) -> bool {
    process.state == ProcessState::Running
}
