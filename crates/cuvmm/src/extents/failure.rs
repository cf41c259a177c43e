//! The end of calls that the driver refused, or in which it panicked: either is undone first, and goes on
//! then.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::MemoryError;

/// The end of calls that did not succeed: an error, or a panic of the driver.
#[derive(Debug)]
pub(crate) enum Failure {
    Error(MemoryError),
    Panic(Box<dyn Any + Send>),
}

impl Failure {
    /// Makes calls, and catches a panic.
    pub(crate) fn of<T>(calls: impl FnOnce() -> Result<T, MemoryError>) -> Result<T, Self> {
        match catch_unwind(AssertUnwindSafe(calls)) {
            Ok(outcome) => outcome.map_err(Self::Error),
            Err(panic) => Err(Self::Panic(panic)),
        }
    }

    /// Returns the error, or continues the panic.
    pub(crate) fn into_error(self) -> MemoryError {
        match self {
            Self::Error(error) => error,
            Self::Panic(panic) => resume_unwind(panic),
        }
    }
}

impl From<MemoryError> for Failure {
    fn from(error: MemoryError) -> Self {
        Self::Error(error)
    }
}
