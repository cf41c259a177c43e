//! The commands of the laboratory in a program that was built without it.

use std::ffi::OsString;
use std::process::ExitCode;

use cuvmm_command::command::usage;

/// A command that is not in this program
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Its options
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _options: Vec<OsString>,
}

impl Args {
    /// # Errors
    /// Always.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let text = "replay, heap and picture are not in this program: build it with its default feature `lab`";
        Err(usage(text))
    }
}
