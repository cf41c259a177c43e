//! Expected and measured figures of a plan, as data.

use std::time::Duration;

use serde::Serialize;

use super::file::File;
use super::held::{Held, Peak};
use super::run::{Calls, Report, Took};

/// The figures of a plan. Times are in microseconds; all other figures are bytes or counts. The
/// keys are a stable interface; further keys may be added.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    #[serde(flatten)]
    pub(super) whose: Whose,
    /// The steps that were begun, in order.
    pub(super) steps: Vec<Row>,
    pub(super) failure: Option<Failed>,
    /// The step that was expected to fail, if any. `None` if the plan was not executed.
    pub(super) expected_failure: Option<Failed>,
    pub(super) total: Total,
    pub(super) peak: Peak,
    /// The release of everything at the end.
    pub(super) ending: Total,
}

#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) step: usize,
    pub(super) does: String,
    #[serde(flatten)]
    pub(super) took: Total,
    #[serde(flatten)]
    pub(super) held: Held,
}

#[derive(Debug, Serialize)]
pub(super) struct Total {
    pub(super) driver_calls: u64,
    pub(super) calls: Calls,
    /// `None` if the step was not expected to begin.
    pub(super) expected_us: Option<f64>,
    /// The expected time with every call at the low end of its range in the table. `None` if the
    /// table has no ranges.
    pub(super) expected_low_us: Option<f64>,
    /// The expected time with every call at the high end of its range, else `None`.
    pub(super) expected_high_us: Option<f64>,
    /// `None` on the model driver.
    pub(super) measured_us: Option<f64>,
    pub(super) ratio: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Failed {
    pub(super) step: usize,
    pub(super) does: String,
    pub(super) error: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Whose {
    /// The driver that the plan ran on: `model`, unless the plan was executed.
    pub(super) driver: &'static str,
    pub(super) device: String,
    pub(super) devices: usize,
    pub(super) device_memory: u64,
    pub(super) costs: String,
}

pub(super) struct Expected {
    report: Report,
    /// The least and the greatest time of each step and, last, of releasing everything. `None` for
    /// a table without ranges.
    range: Option<Vec<(Duration, Duration)>>,
}

impl Expected {
    pub(super) fn new(report: Report) -> Self {
        let range = None;
        Self { report, range }
    }

    /// Extends the time ranges by a report that was made with one end of the table's ranges.
    pub(super) fn widen(&mut self, end: &Report) {
        let usual = times(&self.report).map(|time| (time, time));
        let range = self.range.get_or_insert_with(|| usual.collect());
        for ((least, most), time) in range.iter_mut().zip(times(end)) {
            (*least, *most) = (time.min(*least), time.max(*most));
        }
    }

    /// Returns the expected times of the steps that begin and, last, of the ending.
    fn times(&self) -> Vec<Times> {
        let times = times(&self.report).enumerate();
        let times = times.map(|(index, time)| Times {
            usual: Some(micros(time)),
            range: self.range.as_ref().and_then(|range| {
                let &(least, most) = range.get(index)?;
                Some((micros(least), micros(most)))
            }),
        });
        times.collect()
    }
}

/// Returns the measured times of the begun steps and, last, of the ending.
fn times(report: &Report) -> impl Iterator<Item = Duration> {
    let steps = report.steps.iter().map(|(took, _)| took);
    let all = steps.chain(std::iter::once(&report.ending));
    all.map(|took| took.time)
}

/// In microseconds.
#[derive(Clone, Copy, Default)]
struct Times {
    usual: Option<f64>,
    range: Option<(f64, f64)>,
}

impl Figures {
    /// Combines the expected figures with the measured figures of an executed plan.
    pub(super) fn new(
        whose: Whose,
        file: &File,
        expected: &Expected,
        measured: Option<&Report>,
    ) -> Self {
        let done = measured.unwrap_or(&expected.report);
        let mut wanted = expected.times();
        let ending = wanted.pop().unwrap_or_default();
        let times = wanted.into_iter().map(Some).chain(std::iter::repeat(None));
        let mut calls = Calls::new();
        let rows: Vec<Row> = (1..)
            .zip(done.steps.iter().zip(times))
            .map(|(step, ((took, held), wanted))| {
                for (&call, count) in &took.calls {
                    *calls.entry(call).or_default() += count;
                }
                Row {
                    step,
                    does: file.does(step),
                    took: Total::of(took, wanted.unwrap_or_default(), measured.is_some()),
                    held: *held,
                }
            })
            .collect();
        let sum = |pick: fn(&Total) -> Option<f64>| {
            let known: Vec<f64> = rows.iter().filter_map(|row| pick(&row.took)).collect();
            // A total must cover the same steps on both sides, or there is none.
            (known.len() == rows.len()).then(|| known.iter().sum())
        };
        let total = Times {
            usual: sum(|took| took.expected_us),
            range: expected.range.as_ref().and_then(|_| {
                let low = sum(|took| took.expected_low_us);
                low.zip(sum(|took| took.expected_high_us))
            }),
        };
        let measured_us = sum(|took| took.measured_us);
        Self {
            whose,
            total: Total::new(calls, total, measured_us),
            steps: rows,
            failure: failed(file, done),
            expected_failure: measured.and_then(|_| failed(file, &expected.report)),
            peak: done.peak,
            ending: Total::of(&done.ending, ending, measured.is_some()),
        }
    }
}

impl Total {
    fn of(took: &Took, expected: Times, measured: bool) -> Self {
        let measured_us = measured.then(|| micros(took.time));
        Self::new(took.calls.clone(), expected, measured_us)
    }

    fn new(calls: Calls, expected: Times, measured_us: Option<f64>) -> Self {
        let ratio = match (measured_us, expected.usual) {
            (Some(measured), Some(expected)) if expected > 0.0 => Some(measured / expected),
            _ => None,
        };
        Self {
            driver_calls: calls.values().sum(),
            calls,
            expected_us: expected.usual,
            expected_low_us: expected.range.map(|range| range.0),
            expected_high_us: expected.range.map(|range| range.1),
            measured_us,
            ratio,
        }
    }
}

fn failed(file: &File, report: &Report) -> Option<Failed> {
    let step = report.steps.len();
    report.failure.as_ref().map(|error| Failed {
        step,
        does: file.does(step),
        error: error.to_string(),
    })
}

/// Converts a time to microseconds, exact to the nanosecond.
fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
