//! The type of a case.

use cuvmm_driver::DriverError;

use crate::{Answered, Bench};

/// The way in which a case must be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Manner {
    /// In this process, with the other cases.
    Here,
    /// In a separate process: the case may end the process or lose its context, or its answer
    /// depends on what the process did before.
    Isolated,
}

/// A requirement of a case that not every driver meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// Memory that keeps its contents, which the model does not have.
    Memory,
    /// A kernel that accesses memory or runs for a while.
    Kernels,
    /// A kernel that compares what it reads.
    ComparingKernels,
    /// A kernel that starts before the kernel ahead of it has ended.
    ProgrammaticLaunch,
    /// Two devices that can access each other's memory.
    TwoDevices,
}

/// A step on a bench without an answer.
type Act = fn(&mut Bench) -> Result<(), DriverError>;

/// One test of a driver's behavior, with a textual answer.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    name: &'static str,
    rule: &'static str,
    about: &'static str,
    manner: Manner,
    slow: bool,
    needs: &'static [Need],
    pub(crate) warm: Option<Act>,
    pub(crate) ask: fn(&mut Bench) -> Answered,
}

impl Case {
    /// Creates a case that runs anywhere. [`Rule::cases`] gives it a rule.
    pub(crate) const fn new(
        name: &'static str,
        about: &'static str,
        ask: fn(&mut Bench) -> Answered,
    ) -> Self {
        Self {
            name,
            rule: "",
            about,
            manner: Manner::Here,
            slow: false,
            needs: &[],
            warm: None,
            ask,
        }
    }

    pub(crate) const fn isolated(mut self) -> Self {
        self.manner = Manner::Isolated;
        self
    }

    pub(crate) const fn slow(mut self) -> Self {
        self.slow = true;
        self
    }

    /// Makes the case skipped where one of the needs is not met.
    pub(crate) const fn needing(mut self, needs: &'static [Need]) -> Self {
        self.needs = needs;
        self
    }

    /// Adds a step that runs before the case, and before memory is counted.
    ///
    /// Memory that a driver allocates for itself at the first such step, and keeps, is then not
    /// counted as a leak of the case.
    pub(crate) const fn warmed_by(mut self, warm: Act) -> Self {
        self.warm = Some(warm);
        self
    }

    /// Returns the name in recordings: `map.past_end`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the rule of `docs/semantics.md` that the case belongs to.
    #[must_use]
    pub const fn rule(&self) -> &'static str {
        self.rule
    }

    /// Returns one sentence that describes the case.
    #[must_use]
    pub const fn about(&self) -> &'static str {
        self.about
    }

    /// Returns the way in which the case must be run.
    #[must_use]
    pub const fn manner(&self) -> Manner {
        self.manner
    }

    /// Returns `true` if the case takes many seconds, and so runs only with the slow cases.
    #[must_use]
    pub const fn is_slow(&self) -> bool {
        self.slow
    }

    /// Returns the requirements of the case.
    #[must_use]
    pub const fn needs(&self) -> &'static [Need] {
        self.needs
    }
}

/// A rule of `docs/semantics.md`, and what all of its cases have in common.
pub(crate) struct Rule {
    name: &'static str,
    isolated: bool,
    needs: &'static [Need],
}

impl Rule {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self {
            name,
            isolated: false,
            needs: &[],
        }
    }

    pub(crate) const fn isolated(mut self) -> Self {
        self.isolated = true;
        self
    }

    /// Makes each case skipped where one of the needs is not met.
    pub(crate) const fn needing(mut self, needs: &'static [Need]) -> Self {
        self.needs = needs;
        self
    }

    pub(crate) const fn cases<const N: usize>(&self, mut cases: [Case; N]) -> [Case; N] {
        let mut index = 0;
        while index < N {
            let case = &mut cases[index];
            case.rule = self.name;
            if self.isolated {
                case.manner = Manner::Isolated;
            }
            if !self.needs.is_empty() {
                case.needs = self.needs;
            }
            index += 1;
        }
        cases
    }
}
