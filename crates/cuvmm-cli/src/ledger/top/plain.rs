//! The figures as plain text, for one look and for output that is no terminal.

use cuvmm::ledger::TenantReport;

use super::columns::percent;
use super::detail::{exports, foreign, stalls};
use super::look::{Process, Shown};
use super::waits::waits;
use cuvmm_command::page::{Page, Unit};
use cuvmm_command::size::iec as size;
use cuvmm_command::terminal::{safe, shown};

/// The columns by importance: a narrow terminal omits the last ones.
const HEAD: [&str; 10] = [
    "process",
    "state",
    "charged",
    "in use",
    "idle",
    "stalled%",
    "limit",
    "pid",
    "guarantee",
    "asleep",
];

pub(super) fn text(ledgers: &[Shown], path: &str) -> String {
    if ledgers.is_empty() {
        return format!("there is no ledger in {path}\n");
    }
    let page = Page::Narrow;
    let mut text = String::new();
    for ledger in ledgers {
        let unit = Unit::of_bytes([ledger.limit]);
        text += &format!("{}\n", shown(ledger.path.as_ref()));
        text += &format!(
            "{} of {} charged; figures in {}\n",
            size(ledger.charged),
            size(ledger.limit),
            unit.name
        );
        let about = std::iter::once(stalls(ledger)).chain(foreign(ledger));
        about.for_each(|line| text += &format!("{line}\n"));
        let mut rows = page.table(&HEAD, |column| column >= 2);
        for process in &ledger.processes {
            rows.add_row(process_row(process, unit));
            for (_, tenant) in process.tenants() {
                rows.add_row(tenant_row(tenant, unit));
            }
        }
        if rows.row_count() > 0 {
            text += &format!("{rows}\n");
        }
        for process in &ledger.processes {
            if let Some(why) = waits(ledger, process) {
                text += &format!("{} {why}\n", safe(&process.stats.name));
            }
        }
        for line in exports(ledger) {
            text += &format!("{line}\n");
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
    let sum = |of: fn(&TenantReport) -> u64| match process.sum(of) {
        Some(bytes) => figure(bytes),
        None => "?".to_owned(),
    };
    let stalled = [stats.stalled_average, stats.stalled_full_average];
    let stalled = stalled.map(|it| percent(it.avg10)).join("/");
    vec![
        safe(&stats.name).into_owned(),
        stats.state.to_string(),
        figure(stats.charged),
        sum(|tenant| tenant.in_use),
        figure(stats.idle),
        stalled,
        figure(stats.limit),
        stats.pid.to_string(),
        figure(stats.guarantee),
        sum(|tenant| tenant.asleep),
    ]
}

fn tenant_row(tenant: &TenantReport, unit: Unit) -> Vec<String> {
    let figure = |bytes: u64| unit.figure(bytes as f64);
    let idle = tenant.cached + tenant.pending_free + tenant.precommitted;
    vec![
        format!("  /{}", safe(&tenant.name)),
        if tenant.draining { "draining" } else { "" }.to_owned(),
        figure(tenant.committed),
        figure(tenant.in_use),
        figure(idle),
        String::new(),
        figure(tenant.limit),
        String::new(),
        figure(tenant.guarantee),
        figure(tenant.asleep),
    ]
}
