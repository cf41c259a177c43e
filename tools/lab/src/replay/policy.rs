//! Policies for dividing the memory among the models.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Policy {
    /// Each model has a fixed share; all shares are equal.
    Static,
    /// All models share one pool: each has its guarantee, and can use memory that the others do not
    /// use.
    Elastic,
    /// Elastic with a process for each model, and one ledger instead of one pool.
    Ledger,
}

impl Policy {
    /// Returns the name on the command line and in the output.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Elastic => "elastic",
            Self::Ledger => "ledger",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
