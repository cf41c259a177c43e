//! `cuvmm top`: what each process and tenant has of each GPU.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use bytesize::ByteSize;
use cuvmm::LedgerView;
use cuvmm::ledger::{LedgerStats, ProcessReport, ProcessState, ProcessStats, TenantReport};
use serde::Serialize;

use super::find::Where;
use cuvmm_cli::page::{Page, Unit};
use cuvmm_cli::terminal::{clear, json, print, safe, shown};

/// How long a process may take to tell its tenants' figures.
const PATIENCE: Duration = Duration::from_millis(500);

/// Show what each process and tenant has of each GPU
///
/// Reads the ledgers of this user's processes and asks each process for the figures of its tenants.
/// A process is charged for what its pools have, what its guarantee keeps for it, and a little that
/// it has ready. Shows the figures every second until it is interrupted, or once if standard output
/// is no terminal.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm top
  cuvmm top --once
  cuvmm top --json --ledger /run/cuvmm")]
pub(crate) struct Args {
    #[command(flatten)]
    at: Where,

    /// Show the figures once
    #[arg(long)]
    once: bool,

    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    interval: u32,

    /// Print one JSON object, once; sizes are in bytes
    #[arg(long)]
    json: bool,
}

/// A ledger and its processes, as they were at one time.
#[derive(Debug, Serialize)]
struct Shown {
    path: String,
    /// `false` if the file was removed or replaced since it was opened.
    in_place: bool,
    limit: u64,
    charged: u64,
    processes: Vec<Process>,
}

#[derive(Debug, Serialize)]
struct Process {
    #[serde(flatten)]
    stats: ProcessStats,
    /// The figures of its pools and tenants, if it answered.
    report: Option<ProcessReport>,
    /// The reason why it did not.
    no_report: Option<String>,
}

impl Args {
    /// Runs the command.
    ///
    /// # Errors
    /// A ledger that cannot be read.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let look = || -> anyhow::Result<Vec<Shown>> {
            Ok(self.at.open()?.iter().map(shown_ledger).collect())
        };
        if self.json {
            print(&json(&serde_json::json!({ "ledgers": look()? }))?)?;
            return Ok(ExitCode::SUCCESS);
        }
        if self.once || !std::io::stdout().is_terminal() {
            print(&text(&look()?))?;
            return Ok(ExitCode::SUCCESS);
        }
        // A view has to stay open to notice processes that do not answer.
        let mut views = self.at.open()?;
        loop {
            if views.is_empty() || views.iter().any(|view| !view.is_in_place()) {
                views = self.at.open()?;
            }
            let shown: Vec<Shown> = views.iter().map(shown_ledger).collect();
            clear()?;
            print(&text(&shown))?;
            std::thread::sleep(Duration::from_secs(self.interval.into()));
        }
    }
}

fn shown_ledger(view: &LedgerView) -> Shown {
    let LedgerStats {
        limit,
        charged,
        processes,
        ..
    } = view.stats();
    let processes = processes.into_iter().map(|stats| {
        let report = match stats.state {
            ProcessState::Running => {
                let asked = view.control(stats.slot).timeout(PATIENCE).report();
                asked.map_err(|error| error.to_string())
            }
            state => Err(format!("the process is {state}")),
        };
        let (report, no_report) = match report {
            Ok(report) => (Some(report), None),
            Err(reason) => (None, Some(reason)),
        };
        Process {
            stats,
            report,
            no_report,
        }
    });
    Shown {
        path: view.path().display().to_string(),
        in_place: view.is_in_place(),
        limit,
        charged,
        processes: processes.collect(),
    }
}

const HEAD: [&str; 10] = [
    "process",
    "pid",
    "charged",
    "in use",
    "idle",
    "asleep",
    "guarantee",
    "limit",
    "waits for",
    "state",
];

fn text(ledgers: &[Shown]) -> String {
    if ledgers.is_empty() {
        return "no process uses a ledger\n".to_owned();
    }
    let page = Page::Narrow;
    let mut text = String::new();
    for ledger in ledgers {
        let size = |bytes| ByteSize(bytes).display().iec();
        let unit = Unit::of_bytes([ledger.limit]);
        text += &format!("{}\n", shown(ledger.path.as_ref()));
        text += &format!(
            "{} of {} charged; figures in {}\n",
            size(ledger.charged),
            size(ledger.limit),
            unit.name
        );
        let mut rows = page.table(&HEAD, |column| (1..=8).contains(&column));
        for process in &ledger.processes {
            rows.add_row(process_row(process, unit));
            let pools = process.report.iter().flat_map(|report| &report.pools);
            for tenant in pools.flat_map(|pool| &pool.tenants) {
                rows.add_row(tenant_row(tenant, unit));
            }
        }
        if rows.row_count() > 0 {
            text += &format!("{rows}\n");
        }
        if !ledger.in_place {
            text += "the file was removed or replaced\n";
        }
        for process in &ledger.processes {
            if let Some(reason) = &process.no_report {
                let name = safe(&process.stats.name);
                text += &format!("{name} shows no tenants: {}\n", safe(reason));
            }
        }
    }
    page.fold(&text)
}

fn process_row(process: &Process, unit: Unit) -> Vec<String> {
    let stats = &process.stats;
    let figure = |bytes: u64| unit.figure(bytes as f64);
    let pools = process.report.iter().flat_map(|report| &report.pools);
    let tenants: Vec<&TenantReport> = pools.flat_map(|pool| &pool.tenants).collect();
    let sum = |of: fn(&TenantReport) -> u64| match process.report {
        Some(_) => figure(tenants.iter().map(|&tenant| of(tenant)).sum()),
        None => "?".to_owned(),
    };
    vec![
        safe(&stats.name).into_owned(),
        stats.pid.to_string(),
        figure(stats.charged),
        sum(|tenant| tenant.in_use),
        figure(stats.idle),
        sum(|tenant| tenant.asleep),
        figure(stats.guarantee),
        figure(stats.limit),
        stats.waits_for.map(figure).unwrap_or_default(),
        stats.state.to_string(),
    ]
}

fn tenant_row(tenant: &TenantReport, unit: Unit) -> Vec<String> {
    let figure = |bytes: u64| unit.figure(bytes as f64);
    let idle = tenant.cached + tenant.pending_free + tenant.precommitted;
    vec![
        format!("  /{}", safe(&tenant.name)),
        String::new(),
        figure(tenant.committed),
        figure(tenant.in_use),
        figure(idle),
        figure(tenant.asleep),
        figure(tenant.guarantee),
        figure(tenant.limit),
        String::new(),
        if tenant.draining { "draining" } else { "" }.to_owned(),
    ]
}
