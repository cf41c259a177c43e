//! Plans: programs of memory operations that are tried before they are run for real.
//!
//! A [`Plan`] is a list of steps on named memory. [`Plan::check`] finds invalid steps without a
//! driver call. [`Plan::run`] carries out the steps with this library's types on the driver of the
//! given devices, times them by a [`Clock`], and releases everything. The [`Report`] says which
//! driver calls each step made, how long it took, how much memory was wasted, and which step failed
//! first. On a model driver, which counts what a GPU's calls would cost, the report is a
//! prediction; on a GPU it is a measurement to compare with.
//!
//! Plans have no budget and no tenants, and copy no data.

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

/// A list of steps that are carried out one after another.
///
/// The methods that are named like steps add the usual form of each, on the first device;
/// [`step`](Self::step) adds any step.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use cuvmm::driver::Call;
/// use cuvmm::driver::model::ModelDriver;
/// use cuvmm::plan::WallClock;
/// use cuvmm::{Device, Plan};
///
/// let plan = Plan::new()
///     .reserve("buffer", 64 << 30)
///     .grow("buffer", 1 << 30, 2 << 20) // to 1 GiB, requested by 2 MiB at a time
///     .release("buffer");
/// let devices = [Device::open(Arc::new(ModelDriver::default()), 0)?];
/// plan.check(&devices)?;
/// let report = plan.run(&devices, &WallClock::new())?;
/// assert!(report.is_done());
/// println!("{:?} calls of cuMemCreate", report.calls().get(&Call::MemCreate));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    steps: Vec<Step>,
}

impl Plan {
    /// Creates a plan without steps.
    #[must_use]
    pub const fn new() -> Self {
        Self { steps: Vec::new() }
    }

    /// Returns the steps in order.
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

    /// Adds a step that reserves addresses on the first device.
    #[must_use]
    pub fn reserve(self, name: impl Into<String>, size: u64) -> Self {
        let (name, device) = (name.into(), 0);
        self.step(Step::Reserve { name, size, device })
    }

    /// Adds a step that creates physical memory on the first device.
    #[must_use]
    pub fn create(self, name: impl Into<String>, size: u64) -> Self {
        let (name, device) = (name.into(), 0);
        self.step(Step::Create { name, size, device })
    }

    /// Adds a step that maps a physical, with access for its own device.
    #[must_use]
    pub fn map(self, physical: impl Into<String>, within: impl Into<String>, offset: u64) -> Self {
        self.step(Step::Map {
            physical: physical.into(),
            within: within.into(),
            offset,
            access: Vec::new(),
        })
    }

    /// Adds a step that commits memory after everything requested so far.
    #[must_use]
    pub fn commit(self, within: impl Into<String>, size: u64) -> Self {
        self.step(Step::Commit {
            within: within.into(),
            offset: None,
            size,
        })
    }

    /// Adds a step that grows to `to` bytes, requested `by` bytes at a time.
    #[must_use]
    pub fn grow(self, within: impl Into<String>, to: u64, by: u64) -> Self {
        let within = within.into();
        self.step(Step::Grow { within, to, by })
    }

    /// Adds a step that stripes memory over devices, with access for the first of them.
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

    /// Adds a step that releases the memory or addresses of a name.
    #[must_use]
    pub fn release(self, name: impl Into<String>) -> Self {
        self.step(Step::Release { name: name.into() })
    }

    /// Adds a step that lets time pass.
    #[must_use]
    pub fn wait(self, time: Duration) -> Self {
        self.step(Step::Wait { time })
    }

    /// Checks the plan: finds names that are unknown or of the wrong kind, sizes of zero, and
    /// ranges that are occupied or do not exist. Makes no driver call. Only [`run`](Self::run)
    /// shows if there is enough memory.
    ///
    /// # Errors
    /// [`PlanError`], which names the step.
    pub fn check(&self, devices: &[Device]) -> Result<(), PlanError> {
        check::check(&self.steps, devices).map(drop)
    }

    /// Carries out the steps one after another until one fails, and then releases everything. For
    /// meaningful times, nothing else should use the devices meanwhile.
    ///
    /// # Errors
    /// [`PlanError`] if the plan is invalid; nothing was done then. A step that fails is part of
    /// the report.
    pub fn run(&self, devices: &[Device], clock: &dyn Clock) -> Result<Report, PlanError> {
        let acts = check::check(&self.steps, devices)?;
        Ok(run::run(&acts, devices, clock))
    }
}
