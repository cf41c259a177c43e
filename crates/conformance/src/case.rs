//! One question to a driver.

use cuvmm_driver::DriverError;

use crate::{Answered, Bench};

/// How a case wants to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Manner {
    /// In this process, with the others.
    Here,
    /// In a process of its own: the question may end the process or lose its context, or its
    /// answer depends on what the process did before.
    Isolated,
}

/// What a case needs that not every driver has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// Memory that holds what was written: the model has none.
    Memory,
    /// A kernel that touches memory or runs for a while.
    Kernels,
    /// Two devices that reach each other's memory.
    TwoDevices,
}

/// Something that is done at a bench and answers nothing.
type Act = fn(&mut Bench) -> Result<(), DriverError>;

/// One question to a driver.
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
    /// A case that runs anywhere.
    pub(crate) const fn new(
        name: &'static str,
        rule: &'static str,
        about: &'static str,
        ask: fn(&mut Bench) -> Answered,
    ) -> Self {
        Self {
            name,
            rule,
            about,
            manner: Manner::Here,
            slow: false,
            needs: &[],
            warm: None,
            ask,
        }
    }

    /// The case, run in a process of its own.
    pub(crate) const fn isolated(mut self) -> Self {
        self.manner = Manner::Isolated;
        self
    }

    /// The case, run only when slow cases are asked for.
    pub(crate) const fn slow(mut self) -> Self {
        self.slow = true;
        self
    }

    /// The case, skipped where one of the needs is not met.
    pub(crate) const fn needing(mut self, needs: &'static [Need]) -> Self {
        self.needs = needs;
        self
    }

    /// The case, asked after something that is done before memory is counted: what a driver takes
    /// for itself at the first such thing, and keeps, is then not laid to the case.
    pub(crate) const fn warmed_by(mut self, warm: Act) -> Self {
        self.warm = Some(warm);
        self
    }

    /// The name, as recordings have it: `map.past_end`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The rule of `docs/semantics.md` that the case belongs to.
    #[must_use]
    pub const fn rule(&self) -> &'static str {
        self.rule
    }

    /// One sentence: what is asked.
    #[must_use]
    pub const fn about(&self) -> &'static str {
        self.about
    }

    /// How the case wants to be run.
    #[must_use]
    pub const fn manner(&self) -> Manner {
        self.manner
    }

    /// Whether the case takes many seconds, and is run only when slow cases are asked for.
    #[must_use]
    pub const fn is_slow(&self) -> bool {
        self.slow
    }

    /// What the case needs.
    #[must_use]
    pub const fn needs(&self) -> &'static [Need] {
        self.needs
    }
}
