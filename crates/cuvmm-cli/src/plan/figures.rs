//! What a plan was expected to take beside what it took, as data.

use std::collections::BTreeMap;
use std::time::Duration;

use cuvmm::plan::{CallsMade, Ending, Report, StepReport};
use serde::Serialize;

use super::file::File;

/// The figures of a plan. Times are in microseconds, all else is in bytes or counts. The keys are a
/// stable interface; others may be added.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// The driver that the plan ran on: `model` unless it was done for real.
    pub(super) driver: &'static str,
    pub(super) device: String,
    pub(super) devices: usize,
    /// Memory of a device.
    pub(super) device_memory: u64,
    /// Where the table of costs was measured.
    pub(super) costs: String,
    /// The steps that were begun, in order.
    pub(super) steps: Vec<Row>,
    /// The step that failed.
    pub(super) failure: Option<Failed>,
    /// The same, as it was expected; where the plan was done for real.
    pub(super) expected_failure: Option<Failed>,
    pub(super) total: Total,
    pub(super) peak: Peak,
    /// Giving everything back.
    pub(super) ending: Total,
}

#[derive(Debug, Serialize)]
pub(super) struct Row {
    /// From 1.
    pub(super) step: usize,
    pub(super) does: String,
    #[serde(flatten)]
    pub(super) took: Total,
    pub(super) asked: u64,
    pub(super) padding: u64,
    pub(super) precommitted: u64,
    pub(super) kept: u64,
    /// Their sum.
    pub(super) memory: u64,
    pub(super) mappings: u64,
    pub(super) addresses: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Total {
    pub(super) driver_calls: u64,
    pub(super) calls: BTreeMap<&'static str, u64>,
    /// Nothing where it was not expected to be begun.
    pub(super) expected_us: Option<f64>,
    /// Nothing on the model.
    pub(super) measured_us: Option<f64>,
    /// Measured by expected.
    pub(super) ratio: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Failed {
    pub(super) step: usize,
    pub(super) does: String,
    pub(super) error: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Peak {
    pub(super) memory: u64,
    /// What of it nobody had asked for, at most.
    pub(super) waste: u64,
    pub(super) mappings: u64,
    pub(super) addresses: u64,
}

/// Whose figures they are.
pub(super) struct Whose {
    pub(super) driver: &'static str,
    pub(super) device: String,
    pub(super) devices: usize,
    pub(super) device_memory: u64,
    pub(super) costs: String,
}

impl Figures {
    /// Puts together what was expected and what was measured, if anything was.
    pub(super) fn new(
        whose: Whose,
        file: &File,
        expected: &Report,
        measured: Option<&Report>,
    ) -> Self {
        let done = measured.unwrap_or(expected);
        let wanted: Vec<_> = begun(expected).collect();
        let rows: Vec<Row> = begun(done)
            .enumerate()
            .map(|(index, step)| {
                let wanted = wanted.get(index).map(|step| step.time);
                row(file, step, wanted, measured.map(|_| step.time))
            })
            .collect();
        let sum = |pick: fn(&Total) -> Option<f64>| {
            let known: Vec<f64> = rows.iter().filter_map(|row| pick(&row.took)).collect();
            // A total is one of the same steps on both sides, or none.
            (known.len() == rows.len()).then(|| known.iter().sum())
        };
        let (expected_us, measured_us) =
            (sum(|took| took.expected_us), sum(|took| took.measured_us));
        let ending = |report: &Report| report.ending.time;
        Self {
            driver: whose.driver,
            device: whose.device,
            devices: whose.devices,
            device_memory: whose.device_memory,
            costs: whose.costs,
            total: Total::of(&done.calls(), expected_us, measured_us),
            steps: rows,
            failure: failed(file, done),
            expected_failure: measured.and_then(|_| failed(file, expected)),
            peak: Peak {
                memory: done.peak.memory,
                waste: done.peak.waste,
                mappings: done.peak.mappings,
                addresses: done.peak.addresses,
            },
            ending: ended(&done.ending, ending(expected), measured.map(ending)),
        }
    }
}

impl Total {
    fn of(calls: &CallsMade, expected_us: Option<f64>, measured_us: Option<f64>) -> Self {
        let ratio = match (measured_us, expected_us) {
            (Some(measured), Some(expected)) if expected > 0.0 => Some(measured / expected),
            _ => None,
        };
        Self {
            driver_calls: calls.values().sum(),
            calls: calls
                .iter()
                .map(|(call, &count)| (call.name(), count))
                .collect(),
            expected_us,
            measured_us,
            ratio,
        }
    }
}

/// The steps that were begun: those that were done, and the one that failed.
fn begun(report: &Report) -> impl Iterator<Item = &StepReport> {
    let failed = report.failure.as_ref().map(|failure| &failure.reached);
    report.steps.iter().chain(failed)
}

fn row(
    file: &File,
    step: &StepReport,
    expected: Option<Duration>,
    measured: Option<Duration>,
) -> Row {
    let held = step.in_use;
    Row {
        step: step.step,
        does: does(file, step.step),
        took: Total::of(&step.calls, expected.map(micros), measured.map(micros)),
        asked: held.asked,
        padding: held.padding,
        precommitted: held.precommitted,
        kept: held.kept,
        memory: held.memory(),
        mappings: held.mappings,
        addresses: held.addresses,
    }
}

fn ended(ending: &Ending, expected: Duration, measured: Option<Duration>) -> Total {
    Total::of(&ending.calls, Some(micros(expected)), measured.map(micros))
}

fn failed(file: &File, report: &Report) -> Option<Failed> {
    report.failure.as_ref().map(|failure| Failed {
        step: failure.reached.step,
        does: does(file, failure.reached.step),
        error: failure.error.to_string(),
    })
}

fn does(file: &File, step: usize) -> String {
    let does = step.checked_sub(1).and_then(|index| file.does.get(index));
    does.cloned().unwrap_or_default()
}

/// To the nanosecond.
fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
