//! Errors of plans.

use super::{ArgumentError, MemoryError};

/// An error in a plan. No driver call was made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{problem}", at(.step), named(.name))]
#[non_exhaustive]
pub struct PlanError {
    /// The number of the invalid step, counted from 1; `None` if the error is not in one step.
    pub step: Option<usize>,
    /// The name concerned, if the error concerns a name.
    pub name: Option<String>,
    /// The error.
    pub problem: PlanProblem,
}

/// The kinds of errors in a step of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum PlanProblem {
    /// A size, an offset or a device cannot be used.
    Argument(#[from] ArgumentError),
    /// The state at that point does not allow the step: memory is mapped there already, or not yet.
    Memory(MemoryError),
    /// The name is not defined at that point.
    #[error("the name is not defined here")]
    UnknownName,
    /// The name is in use already.
    #[error("the name is in use already")]
    NameTaken,
    /// The name belongs to an object of another kind than the step needs.
    #[error("it is {is}, but the step needs {needed}")]
    WrongKind {
        /// The kind of the object.
        is: &'static str,
        /// The required kind.
        needed: &'static str,
    },
    /// A physical that is still mapped was to be released.
    #[error("it is still mapped: unmap it first")]
    StillMapped,
}

impl PlanError {
    /// An error in a step, and in a name that it uses.
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
