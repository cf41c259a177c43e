//! Operations on memory gone through in advance: which driver calls they make, how long those
//! take, what is wasted, and which is the first that would fail.
//!
//! A [`Plan`] is steps on named things. [`Plan::check`] finds what cannot be meant, without a
//! driver call. [`Plan::run`] does the steps with the library's own types on whatever driver the
//! devices have, times them by a [`Clock`], and gives everything back. On a stand-in that counts
//! what a GPU's calls would cost, that is an expectation; on the GPU it is the measurement to
//! compare it with.
//!
//! No budget and no tenants here, and no data: a plan moves no bytes.

mod asked;
mod check;
mod clock;
mod report;
mod run;
mod step;
mod stripe;
mod things;

use std::time::Duration;

use crate::device::Device;
use crate::error::PlanError;

pub use clock::{Clock, WallClock};
pub use report::{CallsMade, Ending, Failure, InUse, Peak, Report, StepReport};
pub use step::Step;

/// Steps to be done one after the other.
///
/// The methods named like steps add the usual form of each, on the first device; [`step`](Self::step)
/// adds any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    steps: Vec<Step>,
}

impl Plan {
    /// A plan of no steps.
    #[must_use]
    pub const fn new() -> Self {
        Self { steps: Vec::new() }
    }

    /// The steps, in order.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Adds a step.
    #[must_use]
    pub fn step(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    /// Reserves addresses on the first device.
    #[must_use]
    pub fn reserve(self, name: impl Into<String>, size: u64) -> Self {
        let (name, device) = (name.into(), 0);
        self.step(Step::Reserve { name, size, device })
    }

    /// Creates physical memory on the first device.
    #[must_use]
    pub fn create(self, name: impl Into<String>, size: u64) -> Self {
        let (name, device) = (name.into(), 0);
        self.step(Step::Create { name, size, device })
    }

    /// Maps a physical, for its own device.
    #[must_use]
    pub fn map(self, physical: impl Into<String>, within: impl Into<String>, offset: u64) -> Self {
        self.step(Step::Map {
            physical: physical.into(),
            within: within.into(),
            offset,
            access: Vec::new(),
        })
    }

    /// Commits behind what was asked for.
    #[must_use]
    pub fn commit(self, within: impl Into<String>, size: u64) -> Self {
        self.step(Step::Commit {
            within: within.into(),
            offset: None,
            size,
        })
    }

    /// Grows to so many bytes, `by` at a time.
    #[must_use]
    pub fn grow(self, within: impl Into<String>, to: u64, by: u64) -> Self {
        let within = within.into();
        self.step(Step::Grow { within, to, by })
    }

    /// Stripes over devices, for the first of them.
    #[must_use]
    pub fn stripe(self, name: impl Into<String>, size: u64, unit: u64, devices: &[usize]) -> Self {
        self.step(Step::Stripe {
            name: name.into(),
            size,
            unit,
            devices: devices.to_vec(),
            access: Vec::new(),
        })
    }

    /// Gives back what a name stands for.
    #[must_use]
    pub fn release(self, name: impl Into<String>) -> Self {
        self.step(Step::Release { name: name.into() })
    }

    /// Lets time pass.
    #[must_use]
    pub fn wait(self, time: Duration) -> Self {
        self.step(Step::Wait { time })
    }

    /// Finds what cannot be meant: names that stand for nothing or for something else, sizes of
    /// zero, places that are taken or not there. Makes no driver call. Whether the memory is there
    /// only [`run`](Self::run) tells.
    ///
    /// # Errors
    /// [`PlanError`], which names the step.
    pub fn check(&self, devices: &[Device]) -> Result<(), PlanError> {
        check::check(&self.steps, devices).map(drop)
    }

    /// Does the steps one after the other until one fails, and gives everything back, also then.
    /// Nothing else should use the devices meanwhile if the times are to mean something.
    ///
    /// # Errors
    /// [`PlanError`] before anything is done. A step that fails is part of the report.
    pub fn run(&self, devices: &[Device], clock: &dyn Clock) -> Result<Report, PlanError> {
        let acts = check::check(&self.steps, devices)?;
        Ok(run::run(&acts, devices, clock))
    }
}
