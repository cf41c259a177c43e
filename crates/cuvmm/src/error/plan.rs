//! Errors of plans.

use super::{ArgumentError, MemoryError};

/// What is wrong with a plan. No driver call was made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{problem}", at(.step), named(.name))]
#[non_exhaustive]
pub struct PlanError {
    /// The step that is wrong, counted from 1; nothing where it is not one step.
    pub step: Option<usize>,
    /// What the step names, where that is what is wrong.
    pub name: Option<String>,
    /// What is wrong.
    pub problem: PlanProblem,
}

/// What is wrong with a step of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanProblem {
    /// A size, an offset or a device cannot be meant.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// What is there does not allow the step: something is mapped there already, or not yet.
    #[error(transparent)]
    Memory(MemoryError),
    /// Nothing has this name at that point.
    #[error("nothing has this name here")]
    UnknownName,
    /// Something has this name already.
    #[error("something else has this name already")]
    NameTaken,
    /// What is named is of another kind than the step needs.
    #[error("it is {is}, and here must be {needed}")]
    WrongKind {
        /// What it is.
        is: &'static str,
        /// What it must be.
        needed: &'static str,
    },
    /// A physical is to be released that is mapped.
    #[error("it is still mapped")]
    StillMapped,
}

impl PlanError {
    /// What is wrong with a step, and with what it names.
    pub(crate) fn new(step: usize, name: Option<&str>, problem: impl Into<PlanProblem>) -> Self {
        Self {
            step: Some(step),
            name: name.map(str::to_owned),
            problem: problem.into(),
        }
    }
}

fn at(step: &Option<usize>) -> String {
    step.map(|step| format!("step {step}: "))
        .unwrap_or_default()
}

fn named(name: &Option<String>) -> String {
    let name = name.as_ref();
    name.map(|name| format!("{name:?}: ")).unwrap_or_default()
}
