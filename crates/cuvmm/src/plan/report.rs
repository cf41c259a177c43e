//! What a plan took, step by step.

use std::collections::BTreeMap;
use std::time::Duration;

use cuvmm_driver::Call;

use crate::error::Error;
use crate::own::CloseRefusal;

/// What is held at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct InUse {
    /// Bytes of memory that steps asked for.
    pub asked: u64,
    /// Bytes beside them because memory comes in whole granules.
    pub padding: u64,
    /// Bytes committed ahead of growth.
    #[doc(alias = "margin")]
    pub precommitted: u64,
    /// Bytes that were withdrawn and stay because the rest of their extent is in use.
    pub kept: u64,
    /// Mappings.
    pub mappings: u64,
    /// Bytes of addresses.
    pub addresses: u64,
}

impl InUse {
    /// Bytes of physical memory.
    #[must_use]
    pub const fn memory(&self) -> u64 {
        self.asked + self.padding + self.precommitted + self.kept
    }

    /// The sum once a part of it has changed from `before` to `after`.
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

/// The most of each that was held at the end of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peak {
    /// Bytes of physical memory.
    pub memory: u64,
    /// Bytes of it that nobody had asked for.
    pub waste: u64,
    /// Mappings.
    pub mappings: u64,
    /// Bytes of addresses.
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

/// Driver calls by kind, failed ones included.
pub type CallsMade = BTreeMap<Call, u64>;

/// What one step took.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// Which step, from 1.
    pub step: usize,
    /// The driver calls it made.
    pub calls: CallsMade,
    /// The time it took, by the clock of the run.
    pub time: Duration,
    /// What is held after it.
    pub in_use: InUse,
}

/// The step that failed.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// What it had done by then. Growth stops where there is no more; all else has changed
    /// nothing.
    pub reached: StepReport,
    /// Why.
    pub error: Error,
}

/// Giving everything back at the end.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Ending {
    /// The driver calls it made.
    pub calls: CallsMade,
    /// The time it took.
    pub time: Duration,
    /// Why something could not be given back; the device's
    /// [drop failures](crate::Device::drop_failures) count what is left.
    pub refusal: Option<CloseRefusal>,
}

/// What a plan took.
#[derive(Debug)]
#[non_exhaustive]
pub struct Report {
    /// The steps that were done, in order.
    pub steps: Vec<StepReport>,
    /// The step that failed, if one did: none behind it was tried.
    pub failure: Option<Failure>,
    /// The most that was held.
    pub peak: Peak,
    /// The end, which is not counted into the totals.
    pub ending: Ending,
}

impl Report {
    /// Whether every step was done.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.failure.is_none()
    }

    /// The time of all steps, waits left out. A step that failed counts with what it took.
    #[must_use]
    pub fn time(&self) -> Duration {
        self.begun().map(|step| step.time).sum()
    }

    /// The driver calls of all steps.
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
