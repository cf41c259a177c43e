//! The report of a plan's run, step by step.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use cuvmm_driver::Call;
use serde::Serializer;

use crate::display::{Bytes, Table};
use crate::error::Error;
use crate::own::CloseRefusal;

/// The memory, mappings and addresses that are held at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct InUse {
    /// The bytes of memory that steps requested.
    pub asked: u64,
    /// The bytes in addition to `asked` because memory comes in whole granules.
    pub padding: u64,
    /// The bytes that were committed ahead of growth.
    #[doc(alias = "margin")]
    pub precommitted: u64,
    /// The bytes that were decommitted but are still there, because the rest of their extent is in
    /// use.
    pub kept: u64,
    /// The number of mappings.
    pub mappings: u64,
    /// The bytes of addresses.
    pub addresses: u64,
}

impl InUse {
    /// Returns the bytes of physical memory.
    #[must_use]
    pub const fn memory(&self) -> u64 {
        self.asked + self.padding + self.precommitted + self.kept
    }

    /// Returns the sum after one part of it has changed from `before` to `after`.
    pub(super) const fn changed(self, before: &Self, after: &Self) -> Self {
        Self {
            asked: self.asked - before.asked + after.asked,
            padding: self.padding - before.padding + after.padding,
            precommitted: self.precommitted - before.precommitted + after.precommitted,
            kept: self.kept - before.kept + after.kept,
            mappings: self.mappings - before.mappings + after.mappings,
            addresses: self.addresses - before.addresses + after.addresses,
        }
    }
}

/// The maximum of each figure at the end of any step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Peak {
    /// The bytes of physical memory.
    pub memory: u64,
    /// The bytes of physical memory that no step requested.
    pub waste: u64,
    /// The number of mappings.
    pub mappings: u64,
    /// The bytes of addresses.
    pub addresses: u64,
}

impl Peak {
    pub(super) fn note(&mut self, held: &InUse) {
        self.memory = self.memory.max(held.memory());
        self.waste = self.waste.max(held.memory() - held.asked);
        self.mappings = self.mappings.max(held.mappings);
        self.addresses = self.addresses.max(held.addresses);
    }
}

/// Numbers of driver calls by function, including failed ones.
pub type CallsMade = BTreeMap<Call, u64>;

/// The report of one step.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct StepReport {
    /// The number of the step, from 1.
    pub step: usize,
    /// The driver calls that it made.
    #[serde(serialize_with = "by_name")]
    pub calls: CallsMade,
    /// The time that it took, by the clock of the run.
    #[serde(rename = "time_ns", serialize_with = "nanoseconds")]
    pub time: Duration,
    /// The figures after it.
    pub in_use: InUse,
}

/// A step that failed.
#[derive(Debug, serde::Serialize)]
#[non_exhaustive]
pub struct Failure {
    /// The report of the step up to its failure. A growth keeps what it had committed; any other
    /// step has changed nothing.
    pub reached: StepReport,
    /// The reason.
    #[serde(serialize_with = "as_text")]
    pub error: Error,
}

/// The release of everything at the end.
#[derive(Clone, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct Ending {
    /// The driver calls that it made.
    #[serde(serialize_with = "by_name")]
    pub calls: CallsMade,
    /// The time that it took.
    #[serde(rename = "time_ns", serialize_with = "nanoseconds")]
    pub time: Duration,
    /// The reason why something could not be released. The device's [drop
    /// failures](crate::Device::drop_failures) count what remains.
    #[serde(serialize_with = "as_text_if_any")]
    pub refusal: Option<CloseRefusal>,
}

/// The report of a plan's run.
#[derive(Debug, serde::Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The completed steps, in order.
    pub steps: Vec<StepReport>,
    /// The step that failed, if any. No later step was tried.
    pub failure: Option<Failure>,
    /// The maximum that was held.
    pub peak: Peak,
    /// The release at the end, which the totals do not include.
    pub ending: Ending,
}

impl Report {
    /// Returns `true` if every step was completed.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.failure.is_none()
    }

    /// Returns the time of all steps, including a failed one, without waits.
    #[must_use]
    pub fn time(&self) -> Duration {
        self.begun().map(|step| step.time).sum()
    }

    /// Returns the driver calls of all steps.
    #[must_use]
    pub fn calls(&self) -> CallsMade {
        let mut all = CallsMade::new();
        for (&call, count) in self.begun().flat_map(|step| &step.calls) {
            *all.entry(call).or_default() += count;
        }
        all
    }

    fn begun(&self) -> impl Iterator<Item = &StepReport> {
        let failed = self.failure.as_ref().map(|failure| &failure.reached);
        self.steps.iter().chain(failed)
    }
}

/// Shows a line for each step that was begun, the peak, and the error that ended the run, if one did.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["step", "calls", "time", "memory", "mappings", "addresses"]);
        for step in self.begun() {
            let InUse {
                mappings,
                addresses,
                ..
            } = step.in_use;
            table.row([
                step.step.to_string(),
                step.calls.values().sum::<u64>().to_string(),
                format!("{:.1} us", step.time.as_nanos() as f64 / 1e3),
                Bytes(step.in_use.memory()).to_string(),
                mappings.to_string(),
                Bytes(addresses).to_string(),
            ]);
        }
        writeln!(f, "{table}")?;
        let Peak {
            memory,
            waste,
            mappings,
            addresses,
        } = self.peak;
        let (memory, waste, addresses) = (Bytes(memory), Bytes(waste), Bytes(addresses));
        write!(
            f,
            "at most {memory} of memory ({waste} of it not requested), "
        )?;
        write!(f, "{mappings} mappings, {addresses} of addresses")?;
        match &self.failure {
            Some(failure) => write!(
                f,
                "\nstep {} failed: {}",
                failure.reached.step, failure.error
            ),
            None => Ok(()),
        }
    }
}

fn by_name<S: Serializer>(calls: &CallsMade, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(calls.iter().map(|(call, count)| (call.name(), count)))
}

fn nanoseconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

fn as_text<S: Serializer>(error: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(error)
}

fn as_text_if_any<S: Serializer>(
    refusal: &Option<CloseRefusal>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match refusal {
        Some(refusal) => serializer.collect_str(refusal),
        None => serializer.serialize_none(),
    }
}
