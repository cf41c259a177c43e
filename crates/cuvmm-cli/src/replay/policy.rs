//! How the memory is divided: evenly for good, or shared.

use std::fmt;

/// One way to divide the memory among the models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Each model has an even share of its own.
    Static,
    /// One pool for all: each model is sure of its guarantee and may use what others leave.
    Elastic,
}

impl Policy {
    /// The word of the command line and of the output.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Elastic => "elastic",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
