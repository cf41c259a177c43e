//! Answers of cases: short stable texts.

use std::fmt::{self, Display};

use cuvmm_driver::DriverError;

/// The text of an answer: `CUDA_SUCCESS`, or `CUDA_SUCCESS, honoured 0`.
///
/// It may contain result codes and values that are the same in every run, but no address, time or
/// size that depends on the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer(String);

/// The result of a case function. An error is that of a preparing step, before the call in
/// question; it becomes an answer of its own kind.
pub(crate) type Answered = Result<Answer, DriverError>;

impl Answer {
    #[must_use]
    pub(crate) fn code<T>(outcome: &Result<T, DriverError>) -> Self {
        Self(code(outcome))
    }

    /// Creates the answer with the named code of one of several calls.
    #[must_use]
    pub(crate) fn named<T>(name: &str, outcome: &Result<T, DriverError>) -> Self {
        Self(format!("{name} {}", code(outcome)))
    }

    #[must_use]
    pub(crate) fn value(value: impl Display) -> Self {
        Self(value.to_string())
    }

    /// Creates the answer of a case whose preparing step failed.
    #[must_use]
    pub(crate) fn setup_failed(error: DriverError) -> Self {
        Self(format!("set-up failed: {error}"))
    }

    #[must_use]
    pub(crate) fn with(mut self, name: &str, value: impl Display) -> Self {
        self.0.push_str(&format!(", {name} {value}"));
        self
    }

    #[must_use]
    pub(crate) fn then<T>(self, name: &str, outcome: &Result<T, DriverError>) -> Self {
        let code = code(outcome);
        self.with(name, code)
    }

    #[must_use]
    pub(crate) fn into_string(self) -> String {
        self.0
    }
}

impl Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(crate) fn code<T>(outcome: &Result<T, DriverError>) -> String {
    match outcome {
        Ok(_) => "CUDA_SUCCESS".to_owned(),
        Err(DriverError::Code { code, .. }) => code.to_string(),
        Err(error) => error.to_string(),
    }
}

/// Returns `1` for yes and `0` for no, as recordings write it.
pub(crate) fn bit(yes: bool) -> u8 {
    u8::from(yes)
}
