//! Figures of ledgers in the text format of OpenMetrics, which Prometheus reads.

use std::fmt;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::control::{Control, ProcessReport, TenantReport};
use super::stats::{LedgerStats, LedgerView, ProcessState, ProcessStats};
use crate::error::ControlError;

/// How long a process may take to send its tenants' figures.
const PATIENCE: Duration = Duration::from_millis(500);

/// Returns the figures of ledgers, their processes and tenants as OpenMetrics text (content type
/// `application/openmetrics-text; version=1.0.0; charset=utf-8`), for a server's own endpoint.
///
/// Asks all processes at one time for the figures of their tenants; a process that does not answer
/// within half a second has none. Keep the views between calls: a view knows after three seconds which
/// processes are stopped, and these are not asked. Sizes are in bytes. Labels are `device`, the GPU's
/// UUID; `process`, `pid` and `slot` of a process; `pool`, a number from 0, `tenant`, and `state` of a
/// tenant: `registered`, or `draining` while an unregistered tenant waits for its last block and lease
/// to end. Tenants of one pool with one name and state are counted together. The metrics:
///
/// | metric | type | |
/// |---|---|---|
/// | `cuvmm_ledger_limit_bytes` | gauge | the most that all processes together may be charged |
/// | `cuvmm_ledger_charged_bytes` | gauge | memory charged to processes |
/// | `cuvmm_ledger_foreign_bytes` | gauge | memory of the device that no pool of the ledger has |
/// | `cuvmm_ledger_usable_bytes` | gauge | the limit, or what foreign memory leaves if that is less |
/// | `cuvmm_ledger_stalled_seconds_total` | counter | how long at least one process has waited ("some") |
/// | `cuvmm_ledger_stalled_full_seconds_total` | counter | how long all processes with memory were stalled in full |
/// | `cuvmm_process_charged_bytes` | gauge | memory charged to the process |
/// | `cuvmm_process_obtained_bytes` | gauge | memory that its pools have from the driver |
/// | `cuvmm_process_idle_bytes` | gauge | memory that it could give back, as it last found |
/// | `cuvmm_process_guarantee_bytes` | gauge | memory that always stays charged to it |
/// | `cuvmm_process_limit_bytes` | gauge | the most that it may be charged: its own limit, or the ledger's if that is less |
/// | `cuvmm_process_waiting_bytes` | gauge | the bytes that its requests wait for |
/// | `cuvmm_process_stalled_seconds_total` | counter | how long at least one of its requests has waited ("some") |
/// | `cuvmm_process_stalled_full_seconds_total` | counter | the part of it in which all tenants with memory in use waited ("full") |
/// | `cuvmm_process_waited_seconds` | gauge | how long its oldest waiting request has waited |
/// | `cuvmm_process_answering` | gauge | 1 if it runs, 0 if it is dead, shows no sign of life or did not answer |
/// | `cuvmm_tenant_committed_bytes` | gauge | memory charged to the tenant |
/// | `cuvmm_tenant_in_use_bytes` | gauge | memory in use, shared memory included |
/// | `cuvmm_tenant_cached_bytes` | gauge | idle memory whose work is complete |
/// | `cuvmm_tenant_pending_free_bytes` | gauge | idle memory whose work is not known to be complete |
/// | `cuvmm_tenant_precommitted_bytes` | gauge | memory mapped ahead of growth |
/// | `cuvmm_tenant_asleep_bytes` | gauge | memory that sleeping blocks and heaps have when they are awake |
/// | `cuvmm_tenant_guarantee_bytes` | gauge | the guarantee |
/// | `cuvmm_tenant_limit_bytes` | gauge | the least of its own limit, its pool's and its process's |
/// | `cuvmm_tenant_refusals_total` | counter | requests that were refused |
///
/// The share of the time in which requests waited is a rate, such as
/// `rate(cuvmm_process_stalled_seconds_total[1m])`. [Stall times](super#stall-times) explains "some"
/// and "full".
///
/// # OpenTelemetry's names
///
/// OpenTelemetry's semantic conventions have names for a GPU's memory. A ledger knows none of these
/// figures, so there are no metrics under their names. Another exporter, which asks the driver, has
/// them; its GPU UUID without `GPU-` is the label `device` here.
///
/// | name | its meaning | nearest figure here, and the difference |
/// |---|---|---|
/// | `hw.gpu.memory.limit` | the size of the GPU's memory | `cuvmm_ledger_limit_bytes`: the budget that the programs agreed on |
/// | `hw.gpu.memory.usage` | memory used on the GPU | the sum of `cuvmm_process_obtained_bytes`: memory of pools, without contexts, other libraries and other programs |
/// | `hw.gpu.memory.utilization` | usage by limit | `cuvmm_ledger_charged_bytes` by `cuvmm_ledger_limit_bytes`: the share of the budget that is taken, guarantees that are not in use included |
///
/// # Examples
/// ```rust
/// # use cuvmm::{Device, Ledger, LedgerView, driver::auto};
/// # let directory = tempfile::tempdir()?;
/// # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
/// # let ledger = Ledger::builder(&device, directory.path()).limit(1 << 30).name("engine").open()?;
/// let text = cuvmm::ledger::open_metrics(&[LedgerView::open(ledger.path())?]);
/// assert!(text.contains("process=\"engine\""));
/// assert!(text.ends_with("# EOF\n"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn open_metrics(ledgers: &[LedgerView]) -> String {
    let mut registry = Registry::with_prefix("cuvmm");
    registry.register_collector(Box::new(Snapshot::of(ledgers)));
    let mut text = String::new();
    if prometheus_client::encoding::text::encode(&mut text, &registry).is_err() {
        log!(error, "figures of ledgers could not be written");
    }
    text
}

#[derive(Debug)]
struct Snapshot(Vec<Found>);

#[derive(Debug)]
struct Found {
    device: String,
    stats: LedgerStats,
    /// For each process of `stats.processes`: `true` if it answers, and its figures if it sent
    /// them.
    answers: Vec<(bool, Option<ProcessReport>)>,
}

type Labels = Vec<(&'static str, String)>;

/// A metric's name without the library's name, its explanation, and its value.
type Metric<T> = (&'static str, &'static str, fn(&T) -> u64);

const LEDGER: &[Metric<LedgerStats>] = &[
    (
        "ledger_limit",
        "The most that all processes together may be charged",
        |it| it.limit,
    ),
    ("ledger_charged", "Memory charged to processes", |it| {
        it.charged
    }),
    (
        "ledger_foreign",
        "Memory of the device that no pool of the ledger has",
        |it| it.foreign,
    ),
    (
        "ledger_usable",
        "The limit, or what foreign memory leaves if that is less",
        |it| it.usable,
    ),
];

/// Like [`Metric`], for a counter of seconds.
type Times<T> = (&'static str, &'static str, fn(&T) -> Duration);

const LEDGER_TIMES: &[Times<LedgerStats>] = &[
    (
        "ledger_stalled",
        "How long at least one process has waited for memory",
        |it| it.stalled,
    ),
    (
        "ledger_stalled_full",
        "How long all processes with memory have been stalled in full",
        |it| it.stalled_full,
    ),
];

const PROCESS_TIMES: &[Times<ProcessStats>] = &[
    (
        "process_stalled",
        "How long at least one request of the process has waited for memory",
        |it| it.stalled,
    ),
    (
        "process_stalled_full",
        "How long all tenants of the process with memory in use have waited",
        |it| it.stalled_full,
    ),
];

const PROCESS: &[Metric<ProcessStats>] = &[
    ("process_charged", "Memory charged to the process", |it| {
        it.charged
    }),
    (
        "process_obtained",
        "Memory that the process's pools have from the driver",
        |it| it.obtained,
    ),
    (
        "process_idle",
        "Memory that the process could give back",
        |it| it.idle,
    ),
    (
        "process_guarantee",
        "Memory that always stays charged to the process",
        |it| it.guarantee,
    ),
    (
        "process_limit",
        "The most that the process may be charged",
        |it| it.limit,
    ),
    (
        "process_waiting",
        "Memory that the process's requests wait for",
        |it| it.waits_for.unwrap_or(0),
    ),
];

const TENANT: &[Metric<TenantReport>] = &[
    ("tenant_committed", "Memory charged to the tenant", |it| {
        it.committed
    }),
    (
        "tenant_in_use",
        "Memory in use, shared memory included",
        |it| it.in_use,
    ),
    (
        "tenant_cached",
        "Idle memory whose work is complete",
        |it| it.cached,
    ),
    (
        "tenant_pending_free",
        "Idle memory whose work is not known to be complete",
        |it| it.pending_free,
    ),
    (
        "tenant_precommitted",
        "Memory mapped ahead of growth",
        |it| it.precommitted,
    ),
    (
        "tenant_asleep",
        "Memory that sleeping blocks and heaps have when they are awake",
        |it| it.asleep,
    ),
    ("tenant_guarantee", "The guarantee of the tenant", |it| {
        it.guarantee
    }),
    (
        "tenant_limit",
        "The most that the tenant may be charged",
        |it| it.limit,
    ),
];

impl Snapshot {
    fn of(ledgers: &[LedgerView]) -> Self {
        let found: Vec<_> = ledgers.iter().map(|view| (view, view.stats())).collect();
        let asked = found.iter().flat_map(|(view, stats)| {
            let running = stats.processes.iter().filter(|it| runs(it));
            running.map(|process| view.control(process.slot))
        });
        let asked: Vec<Control> = asked.collect();
        let mut reports = Control::reports(&asked, PATIENCE).into_iter();
        let found = found.into_iter().map(|(_, stats)| {
            let answers = stats.processes.iter().map(|process| {
                let report = match runs(process) {
                    true => reports.next(),
                    false => None,
                };
                match report {
                    Some(Err(ControlError::TimedOut(_))) | None => (false, None),
                    Some(report) => (true, report.ok()),
                }
            });
            Found {
                device: super::uuid(stats.device),
                answers: answers.collect(),
                stats,
            }
        });
        Self(found.collect())
    }

    fn ledgers(&self) -> impl Iterator<Item = (Labels, &LedgerStats)> {
        let of = |found: &Found| vec![("device", found.device.clone())];
        self.0.iter().map(move |found| (of(found), &found.stats))
    }

    fn processes(&self) -> impl Iterator<Item = (Labels, &ProcessStats)> {
        self.0.iter().flat_map(|found| {
            let processes = found.stats.processes.iter();
            processes.map(|process| (of_process(found, process), process))
        })
    }

    fn answers(
        &self,
    ) -> impl Iterator<Item = (Labels, &ProcessStats, &(bool, Option<ProcessReport>))> {
        self.0.iter().flat_map(|found| {
            let processes = found.stats.processes.iter().zip(&found.answers);
            processes.map(|(process, answer)| (of_process(found, process), process, answer))
        })
    }

    /// Returns the tenants, those with equal labels added together.
    fn tenants(&self) -> Vec<(Labels, TenantReport)> {
        let mut tenants: Vec<(Labels, TenantReport)> = Vec::new();
        for (of_process, process, (_, report)) in self.answers() {
            let pools = report
                .iter()
                .flat_map(|report| report.pools.iter().enumerate());
            let first = tenants.len();
            for (pool, limit, tenant) in pools.flat_map(|(pool, it)| {
                let limit = it.limit.min(process.limit);
                it.tenants.iter().map(move |tenant| (pool, limit, tenant))
            }) {
                let limit = tenant.limit.min(limit);
                let tenant = TenantReport {
                    limit,
                    ..tenant.clone()
                };
                let mut labels = of_process.clone();
                // Two pools may have tenants of one name.
                labels.push(("pool", pool.to_string()));
                labels.push(("tenant", tenant.name.clone()));
                let state = if tenant.draining {
                    "draining"
                } else {
                    "registered"
                };
                labels.push(("state", state.to_owned()));
                let own = tenants.get_mut(first..).unwrap_or_default();
                match own.iter_mut().find(|(known, _)| *known == labels) {
                    Some((_, sum)) => add(sum, &tenant),
                    None => tenants.push((labels, tenant)),
                }
            }
        }
        tenants
    }
}

fn runs(process: &ProcessStats) -> bool {
    process.state == ProcessState::Running
}

fn add(sum: &mut TenantReport, other: &TenantReport) {
    for (sum, other) in [
        (&mut sum.committed, other.committed),
        (&mut sum.in_use, other.in_use),
        (&mut sum.cached, other.cached),
        (&mut sum.pending_free, other.pending_free),
        (&mut sum.precommitted, other.precommitted),
        (&mut sum.asleep, other.asleep),
        (&mut sum.guarantee, other.guarantee),
        (&mut sum.limit, other.limit),
        (&mut sum.refusals, other.refusals),
    ] {
        *sum = sum.saturating_add(other);
    }
}

fn of_process(found: &Found, process: &ProcessStats) -> Labels {
    vec![
        ("device", found.device.clone()),
        ("process", process.name.clone()),
        ("pid", process.pid.to_string()),
        // Another container may have a process of the same number.
        ("slot", process.slot.to_string()),
    ]
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for metric in LEDGER {
            gauges(&mut encoder, metric, self.ledgers())?;
        }
        for metric in PROCESS {
            gauges(&mut encoder, metric, self.processes())?;
        }
        let help =
            "1 if the process runs, 0 if it is dead, shows no sign of life or did not answer";
        let mut family =
            encoder.encode_descriptor("process_answering", help, None, MetricType::Gauge)?;
        for (labels, _, &(answers, _)) in self.answers() {
            ConstGauge::new(i64::from(answers)).encode(family.encode_family(&labels)?)?;
        }
        let help = "How long the oldest waiting request of the process has waited";
        let unit = Some(&Unit::Seconds);
        let mut family =
            encoder.encode_descriptor("process_waited", help, unit, MetricType::Gauge)?;
        for (labels, process) in self.processes() {
            let waited = process.waits.as_ref();
            let waited = waited.map_or(0.0, |waits| waits.waited.as_secs_f64());
            ConstGauge::new(waited).encode(family.encode_family(&labels)?)?;
        }
        for metric in LEDGER_TIMES {
            times(&mut encoder, metric, self.ledgers())?;
        }
        for metric in PROCESS_TIMES {
            times(&mut encoder, metric, self.processes())?;
        }
        let tenants = self.tenants();
        let tenants = || tenants.iter().map(|(labels, it)| (labels.clone(), it));
        for metric in TENANT {
            gauges(&mut encoder, metric, tenants())?;
        }
        let help = "Requests of the tenant that were refused";
        let mut family =
            encoder.encode_descriptor("tenant_refusals", help, None, MetricType::Counter)?;
        for (labels, tenant) in tenants() {
            ConstCounter::new(tenant.refusals).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

fn times<'a, T: 'a>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, value): &Times<T>,
    of: impl Iterator<Item = (Labels, &'a T)>,
) -> Result<(), fmt::Error> {
    let mut family =
        encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Counter)?;
    for (labels, it) in of {
        let seconds = value(it).as_secs_f64();
        ConstCounter::new(seconds).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

/// Writes a metric in bytes.
fn gauges<'a, T: 'a>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, value): &Metric<T>,
    of: impl Iterator<Item = (Labels, &'a T)>,
) -> Result<(), fmt::Error> {
    let mut family =
        encoder.encode_descriptor(name, help, Some(&Unit::Bytes), MetricType::Gauge)?;
    for (labels, it) in of {
        // Beyond 8 EiB no figure is real.
        let bytes = i64::try_from(value(it)).unwrap_or(i64::MAX);
        ConstGauge::new(bytes).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}
