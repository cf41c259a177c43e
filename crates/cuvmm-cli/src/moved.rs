//! The commands that are part of `cuvmm-bench` now.

use std::ffi::OsString;

use cuvmm_cli::command::usage;

/// A command of `cuvmm-bench`
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Its arguments, which are not read
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _arguments: Vec<OsString>,
}

/// Makes the error that names the new command.
pub(crate) fn to(old: &str, new: &str) -> anyhow::Error {
    usage(format!(
        "`cuvmm {old}` is now `cuvmm-bench {new}`, in a program for those who develop cuvmm or port \
         it: from a clone, `cargo run --release -p cuvmm-bench -- {new}`"
    ))
}
