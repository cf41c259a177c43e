//! The report of a replay: tables for people, and JSON for programs.

use std::fmt::Write as _;

use comfy_table::Table;
use serde::Serialize;

use super::figures::{self, Figures, Loss, PolicyFigures};
use super::paged::Terms;
use super::policy::Policy;
use super::process::Process;
use super::settings::{Nanos, Settings};
use super::tenants::Division;
use cuvmm_command::page::{Page, Unit};
use cuvmm_command::size::iec;
use cuvmm_command::terminal::{self, counted, safe};

/// The workload, the driver and the memory, for the head of the report.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The driver, the device, and the reason for the driver.
    pub(crate) driver: String,
    pub(crate) device: String,
    /// The origin of the requests, in words.
    pub(crate) workload: String,
    /// The mean number of bytes that the requests would hold if none waited.
    pub(crate) demand: Option<f64>,
    /// Set for a generated workload.
    pub(crate) seed: Option<u64>,
    /// Factor of the rate at which the requests arrive.
    pub(crate) load: f64,
    pub(crate) memory: u64,
    pub(crate) granule: u64,
    pub(crate) guarantee: u64,
    pub(crate) settings: Settings,
    /// `false` if the driver has no memory to stamp.
    pub(crate) stamps: bool,
    /// Seconds of the trace in one second, if time is real.
    pub(crate) speed: Option<f64>,
    /// The terms of paged caches, if requests have them.
    pub(crate) paged: Option<Terms>,
}

impl Setup {
    /// Returns the bytes in which requests count their memory: a block of a paged cache, or a granule.
    pub(crate) fn unit(&self) -> u64 {
        self.paged
            .as_ref()
            .map_or(self.granule, |terms| terms.block)
    }

    pub(crate) fn division(&self, policy: Policy, models: usize) -> Division {
        Division {
            policy,
            models,
            limit: self.memory,
            guarantee: self.guarantee,
        }
    }
}

pub(crate) type Results = [(Policy, PolicyFigures)];

fn beside_elastic(results: &Results, policy: Policy) -> Option<(&PolicyFigures, &PolicyFigures)> {
    let of = |wanted| Some(&results.iter().find(|it| it.0 == wanted)?.1);
    of(policy).zip(of(Policy::Elastic))
}

/// Returns the p99 time to first token with a process for each model, divided by that of one
/// process.
fn ledger_ratio(results: &Results) -> Option<f64> {
    let (ledger, elastic) = beside_elastic(results, Policy::Ledger)?;
    figures::p99_ratio(ledger, elastic)
}

/// Summarizes the policies in one line, empty without a pair to compare.
pub(crate) fn headline(results: &Results) -> String {
    let lines = [ledger_line(results), elastic_line(results)];
    let lines = lines
        .into_iter()
        .flatten()
        .map(|line| format!("{P99}: {line}"));
    lines.collect::<Vec<_>>().join("; ")
}

const P99: &str = "p99 time to first token over all requests";

fn ledger_line(results: &Results) -> Option<String> {
    let ratio = ledger_ratio(results)?;
    Some(format!("ledger takes {ratio:.2} times as long as elastic"))
}

fn elastic_line(results: &Results) -> Option<String> {
    let (split, elastic) = beside_elastic(results, Policy::Static)?;
    let gain = figures::p99_ratio(split, elastic)?;
    let (better, times) = if gain >= 1.0 {
        ("better", gain)
    } else {
        ("worse", 1.0 / gain)
    };
    Some(format!("elastic is {times:.2} times {better} than static"))
}

pub(crate) fn text(setup: &Setup, results: &Results, page: Page) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_text(&mut text, setup, results, page);
    page.fold(&text)
}

fn write_text(text: &mut String, setup: &Setup, results: &Results, page: Page) -> std::fmt::Result {
    writeln!(
        text,
        "{} on {}, {}",
        safe(&setup.workload),
        safe(&setup.driver),
        safe(&setup.device)
    )?;
    writeln!(
        text,
        "{} of memory, {} guaranteed to each model under elastic, {} a token",
        iec(setup.memory),
        iec(setup.guarantee),
        iec(setup.settings.kv_bytes_per_token),
    )?;
    if let Some(terms) = &setup.paged {
        writeln!(text, "{terms}")?;
    }
    if let Some(speed) = setup.speed {
        writeln!(
            text,
            "in real time, the trace {speed} times as fast; under ledger a process for each \
             model, in one ledger, else one for all"
        )?;
    }
    if let Some(demand) = setup.demand.filter(|&demand| demand > setup.memory as f64) {
        writeln!(
            text,
            "warning: demand exceeds memory all the time: if none waited, the requests would hold {} \
             in the mean, and there are {}. Queues grow until the last request has arrived, and times \
             to first token show the length of the trace. Use more --memory or fewer requests.",
            iec(demand.round() as u64),
            iec(setup.memory)
        )?;
    }
    writeln!(text, "\nRequests (TTFT: time to first token; times in ms)")?;
    writeln!(text, "{}", requests_table(results, page))?;
    writeln!(text, "\nMemory")?;
    writeln!(text, "{}", memory_table(results, page))?;
    if setup.paged.is_some() {
        writeln!(
            text,
            "\nPaged caches (live: blocks of running requests, and kept ones)"
        )?;
        writeln!(text, "{}", paged_table(results, page))?;
    }
    if let Some(speed) = setup.speed {
        writeln!(text, "\nProcesses (real time in ms)")?;
        writeln!(text, "{}", process_table(results, page))?;
        if let Some((late_ms, policy)) = too_late(results, speed) {
            writeln!(
                text,
                "warning: under {policy} events were up to {late_ms:.1} ms late, {:.0} ms of the trace: \
                 this machine does not keep the pace, which makes times to first token longer. Use a \
                 lower --speed.",
                late_ms * speed
            )?;
        }
        let members: Vec<_> = members(results).collect();
        if !members.is_empty() {
            writeln!(
                text,
                "\nTime of the processes in the ledger (real time in ms{})",
                if page.is_verbose() {
                    ""
                } else {
                    "; --verbose has rows of zeros too"
                }
            )?;
            writeln!(text, "{}", grants_table(&members, page))?;
        }
    }
    for (policy, figures) in results {
        if let Some(expected) = &figures.expected {
            let ratio = expected
                .ratio
                .map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            writeln!(
                text,
                "{policy}: {:.1} ms of driver time expected for {}, measured by expected {ratio} ({})",
                expected.driver_time_ms,
                counted(expected.driver_calls, "call"),
                safe(&expected.costs)
            )?;
        }
    }
    if !setup.stamps {
        writeln!(
            text,
            "No stamps: this driver has no memory behind its addresses."
        )?;
    }
    for line in [ledger_line(results), elastic_line(results)]
        .iter()
        .flatten()
    {
        writeln!(text, "\n{P99}: {line}.")?;
    }
    let Some((split, elastic)) = beside_elastic(results, Policy::Static) else {
        return Ok(());
    };
    let losses = figures::losses(split, elastic);
    if losses.is_empty() {
        writeln!(text, "No model loses under elastic.")?;
    }
    for loss in losses {
        writeln!(
            text,
            "{} loses under elastic: {}.",
            safe(&loss.model),
            loss.how
        )?;
    }
    Ok(())
}

/// Returns a row for each policy and model, the total last.
fn rows(results: &Results) -> impl Iterator<Item = (Policy, &str, &Figures)> {
    results.iter().flat_map(|(policy, figures)| {
        let models = figures
            .models
            .iter()
            .map(|(name, figures)| (*policy, name.as_str(), figures));
        models.chain([(*policy, "all", &figures.all)])
    })
}

/// Times are in milliseconds in all columns.
fn requests_table(results: &Results, page: Page) -> Table {
    let mut head = vec![
        "policy",
        "model",
        "requests",
        "done",
        "rejected",
        "preempted",
        "TTFT p50",
        "p99",
        "wait mean",
        "max",
    ];
    if page.is_verbose() {
        head.extend(["TTFT p95", "max", "tokens/s"]);
    }
    let mut table = page.table(&head, |column| column >= 2);
    for (policy, model, figures) in rows(results) {
        let percentile = |pick: fn(figures::FirstToken) -> Nanos| {
            let first_token = figures.first_token;
            first_token.map_or("-".to_owned(), |ttft| time(pick(ttft)))
        };
        let mut cells = vec![
            policy.to_string(),
            safe(model).into_owned(),
            figures.requests.to_string(),
            figures.completed.to_string(),
            figures.rejected.to_string(),
            figures.preempted.to_string(),
            percentile(|ttft| ttft.p50),
            percentile(|ttft| ttft.p99),
            time(figures.waited_mean),
            time(figures.waited_max),
        ];
        if page.is_verbose() {
            cells.extend([percentile(|ttft| ttft.p95), percentile(|ttft| ttft.max)]);
            cells.push(format!("{:.1}", figures.tokens_per_second));
        }
        table.add_row(cells);
    }
    table
}

fn memory_table(results: &Results, page: Page) -> Table {
    let unit = Unit::of_bytes(rows(results).map(|(_, _, figures)| figures.memory_peak));
    let (mean, peak) = (unit.head("mean"), unit.head("peak"));
    let mut head = vec!["policy", "model", &mean, &peak, "driver calls", "ms"];
    head.extend(["stamps", "wrong"]);
    let mut table = page.table(&head, |column| column >= 2);
    for (policy, model, figures) in rows(results) {
        table.add_row([
            policy.to_string(),
            safe(model).into_owned(),
            unit.figure(figures.memory_mean),
            unit.figure(figures.memory_peak as f64),
            figures.cost.calls.to_string(),
            format!("{:.1}", figures.cost.time.as_secs_f64() * 1e3),
            figures.cost.verified.stamps.to_string(),
            figures.cost.verified.wrong.to_string(),
        ]);
    }
    table
}

fn paged_table(results: &Results, page: Page) -> Table {
    let of = rows(results).filter_map(|(policy, model, figures)| {
        let paged = figures.paged?;
        Some((policy, model, figures.tokens_per_second, paged))
    });
    let of: Vec<_> = of.collect();
    let unit = Unit::of_bytes(of.iter().map(|(.., paged)| paged.held_peak));
    let [held, peak, kept] = ["held", "peak", "kept"].map(|what| unit.head(what));
    let head = ["policy", "model", "tokens/s", &held, &peak, &kept];
    let head = [&head[..], &["held/live", "evicted"]].concat();
    let mut table = page.table(&head, |column| column >= 2);
    for (policy, model, rate, paged) in of {
        let ratio = paged.held_by_live;
        table.add_row([
            policy.to_string(),
            safe(model).into_owned(),
            format!("{rate:.1}"),
            unit.figure(paged.held_mean),
            unit.figure(paged.held_peak as f64),
            unit.figure(paged.kept_mean),
            ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
            paged.evicted.to_string(),
        ]);
    }
    table
}

fn process_table(results: &Results, page: Page) -> Table {
    let head = [
        "policy",
        "models",
        "pid",
        "waits",
        "growth refused",
        "behind older",
        "stalled",
        "late at most",
    ];
    let mut table = page.table(&head, |column| column >= 2);
    let all = results.iter().flat_map(|(policy, figures)| {
        let processes = figures.processes.iter();
        processes.map(move |process| (policy, process))
    });
    for (policy, process) in all {
        let stalled = process.ledger_stalled_ms;
        table.add_row([
            policy.to_string(),
            safe(&process.models.join(", ")).into_owned(),
            process.pid.to_string(),
            process.waits.to_string(),
            process.growth_refused.to_string(),
            process.growth_refused_behind.to_string(),
            stalled.map_or("-".to_owned(), |time| format!("{time:.1}")),
            format!("{:.1}", process.late_max_ms),
        ]);
    }
    table
}

/// Returns the greatest lateness of an event, in real time, and its policy, if under any policy it
/// is more than a quarter of the median time to first token.
fn too_late(results: &Results, speed: f64) -> Option<(f64, Policy)> {
    let late_ms = |figures: &PolicyFigures| {
        let processes = figures.processes.iter().map(|process| process.late_max_ms);
        processes.fold(0.0, f64::max)
    };
    let is_late = results.iter().any(|(_, figures)| {
        let first_token = figures.all.first_token;
        first_token.is_some_and(|ttft| late_ms(figures) * speed * 4e6 > ttft.p50 as f64)
    });
    let all = results.iter().map(|(policy, of)| (late_ms(of), *policy));
    all.max_by(|one, other| one.0.total_cmp(&other.0))
        .filter(|_| is_late)
}

fn members(results: &Results) -> impl Iterator<Item = &Process> {
    let all = results.iter().flat_map(|(_, figures)| &figures.processes);
    all.filter(|process| process.ledger_stalled_ms.is_some())
}

/// A row of the table of grants: name, count, bytes, and milliseconds.
type Grant<'a> = (&'a str, Option<u64>, Option<u64>, Option<f64>);

/// Shows the count and time of waits, grants and driver calls of each process of a ledger. A narrow
/// page has only rows with a figure that is not zero.
fn grants_table(members: &[&Process], page: Page) -> Table {
    let unit = Unit::of_bytes(members.iter().map(|process| process.gave_bytes));
    let memory = unit.head("memory");
    let head = ["models", "what", "times", &memory, "ms"];
    let mut table = page.table(&head, |column| column >= 2);
    let shown = |figure: Option<String>| figure.unwrap_or_default();
    for process in members {
        for row in grants(process) {
            let (what, times, bytes, ms) = row;
            let ms = ms.map(|ms| format!("{ms:.1}"));
            let is_zero =
                times.is_none_or(|it| it == 0) && ms.as_ref().is_none_or(|it| it == "0.0");
            if is_zero && !page.is_verbose() {
                continue;
            }
            table.add_row([
                safe(&process.models.join(", ")).into_owned(),
                what.to_owned(),
                shown(times.map(|times| times.to_string())),
                shown(bytes.map(|bytes| unit.figure(bytes as f64))),
                shown(ms),
            ]);
        }
    }
    table
}

fn grants(process: &Process) -> impl Iterator<Item = Grant<'_>> {
    let it = process;
    let rows = [
        ("requests waited", Some(it.waits), None, Some(it.waited_ms)),
        ("longest wait", None, None, Some(it.waited_max_ms)),
        ("refused by the ledger", None, None, it.ledger_stalled_ms),
        (
            "gave to others",
            Some(it.gave),
            Some(it.gave_bytes),
            Some(it.gave_ms),
        ),
        (
            "growth waited",
            Some(it.growth_waits),
            None,
            Some(it.growth_waited_ms),
        ),
        ("served by that", Some(it.growth_served), None, None),
    ];
    let calls = process.calls.iter();
    let calls = calls.map(|(call, made)| (call.as_str(), Some(made.count), None, Some(made.ms)));
    rows.into_iter().chain(calls)
}

/// Formats virtual time in milliseconds.
fn time(time: Nanos) -> String {
    format!("{:.0}", time as f64 / 1e6)
}

/// The report for programs. The keys under `policies` are a stable interface; other keys may be
/// added.
#[derive(Serialize)]
struct Document<'a> {
    driver: &'a str,
    device: &'a str,
    workload: &'a str,
    seed: Option<u64>,
    load: f64,
    memory_bytes: u64,
    granule_bytes: u64,
    guarantee_bytes: u64,
    mean_demand_bytes: Option<u64>,
    kv_bytes_per_token: u64,
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    stamps: bool,
    /// Only if time was real.
    #[serde(skip_serializing_if = "Option::is_none")]
    speed: Option<f64>,
    /// Only with paged caches.
    #[serde(skip_serializing_if = "Option::is_none")]
    paged: Option<&'a Terms>,
    #[serde(serialize_with = "figures::in_order")]
    policies: &'a Results,
    /// Only if static and elastic were played.
    #[serde(flatten)]
    comparison: Option<Comparison>,
    /// Only with a process for each model.
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_p99_ledger_ratio: Option<f64>,
}

#[derive(Serialize)]
struct Comparison {
    ttft_p99_gain: Option<f64>,
    losers: Vec<Loss>,
}

pub(super) fn json(setup: &Setup, results: &Results) -> anyhow::Result<String> {
    let compared = |(split, elastic)| Comparison {
        ttft_p99_gain: figures::p99_ratio(split, elastic),
        losers: figures::losses(split, elastic),
    };
    let document = Document {
        driver: &setup.driver,
        device: &setup.device,
        workload: &setup.workload,
        seed: setup.seed,
        load: setup.load,
        memory_bytes: setup.memory,
        granule_bytes: setup.granule,
        guarantee_bytes: setup.guarantee,
        mean_demand_bytes: setup.demand.map(|bytes| bytes.round() as u64),
        kv_bytes_per_token: setup.settings.kv_bytes_per_token,
        prefill_tokens_per_second: setup.settings.prefill_rate,
        decode_tokens_per_second: setup.settings.decode_rate,
        stamps: setup.stamps,
        speed: setup.speed,
        paged: setup.paged.as_ref(),
        policies: results,
        comparison: beside_elastic(results, Policy::Static).map(compared),
        ttft_p99_ledger_ratio: ledger_ratio(results),
    };
    Ok(terminal::json(&document)?)
}

#[cfg(test)]
mod tests;
