//! One look at ledgers, their processes and tenants.

use std::thread;
use std::time::Duration;

use cuvmm::LedgerView;
use cuvmm::ledger::{
    Control, ExportStats, LedgerStats, ProcessReport, ProcessState, ProcessStats, StallAverages,
    TenantReport,
};
use serde::Serialize;

/// How long a process may take to tell its tenants' figures.
const PATIENCE: Duration = Duration::from_millis(500);

/// The most processes that are asked at one time.
const ASKED_AT_ONCE: usize = 16;

/// A ledger and its processes, as they were at one time.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Shown {
    pub(super) path: String,
    /// `false` if the file was removed or replaced since it was opened.
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

/// A process and, if it answered, its tenants.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Process {
    #[serde(flatten)]
    pub(super) stats: ProcessStats,
    /// The figures of its pools and tenants, if it answered.
    pub(super) report: Option<ProcessReport>,
    /// The reason why it did not.
    pub(super) no_report: Option<String>,
}

impl Process {
    /// Returns its tenants, each with the number of its pool.
    pub(super) fn tenants(&self) -> impl Iterator<Item = (usize, &TenantReport)> {
        let pools = self.report.iter().flat_map(|report| &report.pools);
        let pools = pools.enumerate();
        pools.flat_map(|(pool, it)| it.tenants.iter().map(move |tenant| (pool, tenant)))
    }

    /// Returns the most that it can be charged: its own limit, or the ledger's if that is less.
    pub(super) fn limit(&self, ledger: &Shown) -> u64 {
        self.stats.limit.min(ledger.limit)
    }

    /// Returns a tenant of one of its pools with the most that it can be charged as its limit: its own,
    /// its pool's or that of the process, whichever is least.
    pub(super) fn limited(
        &self,
        ledger: &Shown,
        pool: usize,
        tenant: &TenantReport,
    ) -> TenantReport {
        let mut tenant = tenant.clone();
        let pool = self.report.as_ref().and_then(|it| it.pools.get(pool));
        let limits = [Some(self.limit(ledger)), pool.map(|pool| pool.limit)];
        let limits = limits.into_iter().flatten();
        tenant.limit = limits.fold(tenant.limit, u64::min);
        tenant
    }

    /// Returns the sum of a figure of its tenants, if it answered.
    pub(super) fn sum(&self, of: impl Fn(&TenantReport) -> u64) -> Option<u64> {
        self.report.as_ref()?;
        Some(self.tenants().map(|(_, tenant)| of(tenant)).sum())
    }
}

/// Reads the figures of ledgers and asks their processes. Processes that do not answer cost half a
/// second together, not each.
pub(super) fn look(views: &[LedgerView]) -> Vec<Shown> {
    let found: Vec<(&LedgerView, LedgerStats)> =
        views.iter().map(|view| (view, view.stats())).collect();
    let mut asked = found.iter().flat_map(|(view, stats)| {
        let processes = stats.processes.iter();
        processes.map(move |process| (process.state, view.control(process.slot).timeout(PATIENCE)))
    });
    let mut reports = Vec::new();
    loop {
        let some: Vec<_> = asked.by_ref().take(ASKED_AT_ONCE).collect();
        if some.is_empty() {
            break;
        }
        reports.extend(ask_all(&some));
    }
    drop(asked);
    let mut reports = reports.into_iter();
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
            .zip(&mut reports)
            .map(process)
            .collect(),
    });
    shown.collect()
}

fn process((stats, report): (ProcessStats, Result<ProcessReport, String>)) -> Process {
    let (report, no_report) = match report {
        Ok(report) => (Some(report), None),
        Err(reason) => (None, Some(reason)),
    };
    Process {
        stats,
        report,
        no_report,
    }
}

type Answer = Result<ProcessReport, String>;

/// Asks several processes at one time.
fn ask_all(asked: &[(ProcessState, Control)]) -> Vec<Answer> {
    thread::scope(|scope| {
        let threads: Vec<_> = asked
            .iter()
            .map(|it| thread::Builder::new().spawn_scoped(scope, move || ask(it)))
            .collect();
        let answers = threads.into_iter().map(|thread| match thread {
            Ok(thread) => thread
                .join()
                .unwrap_or_else(|_| Err("the request failed".to_owned())),
            Err(error) => Err(error.to_string()),
        });
        answers.collect()
    })
}

fn ask((state, control): &(ProcessState, Control)) -> Answer {
    match state {
        ProcessState::Running => control.report().map_err(|error| error.to_string()),
        state => Err(format!("the process is {state}")),
    }
}
