//! What a case answers: a small stable text.

use std::fmt::{self, Display};

use cuvmm_driver::DriverError;

/// The text of an answer: `CUDA_SUCCESS`, or `CUDA_SUCCESS, honoured 0`.
///
/// It may hold result codes and values that are the same each time, but no address, time or size
/// of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer(String);

/// What a case function returns; an error is a step on the way to the question that failed, which
/// becomes an answer of its own kind.
pub(crate) type Answered = Result<Answer, DriverError>;

impl Answer {
    /// The code of a call.
    #[must_use]
    pub(crate) fn code<T>(outcome: &Result<T, DriverError>) -> Self {
        Self(code(outcome))
    }

    /// The code of a call among several.
    #[must_use]
    pub(crate) fn named<T>(name: &str, outcome: &Result<T, DriverError>) -> Self {
        Self(format!("{name} {}", code(outcome)))
    }

    /// A value.
    #[must_use]
    pub(crate) fn value(value: impl Display) -> Self {
        Self(value.to_string())
    }

    /// A step before the question failed.
    #[must_use]
    pub(crate) fn setup_failed(error: DriverError) -> Self {
        Self(format!("set-up failed: {error}"))
    }

    /// The answer with a named value added.
    #[must_use]
    pub(crate) fn with(mut self, name: &str, value: impl Display) -> Self {
        self.0.push_str(&format!(", {name} {value}"));
        self
    }

    /// The answer with the code of another call added.
    #[must_use]
    pub(crate) fn then<T>(self, name: &str, outcome: &Result<T, DriverError>) -> Self {
        let code = code(outcome);
        self.with(name, code)
    }

    /// The text.
    #[must_use]
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The text, owned.
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

/// The name of an outcome's result code.
pub(crate) fn code<T>(outcome: &Result<T, DriverError>) -> String {
    match outcome {
        Ok(_) => "CUDA_SUCCESS".to_owned(),
        Err(DriverError::Code { code, .. }) => code.to_string(),
        Err(error) => error.to_string(),
    }
}

/// `1` for yes and `0` for no, as the recordings write it.
pub(crate) fn bit(yes: bool) -> u8 {
    u8::from(yes)
}
