//! The command `cuvmm-bench`, for developing and porting cuvmm: measures the library beside the
//! driver's own calls, compares two builds, and checks a driver against the conformance suite.
//!
//! Each command is a module. Options, output and the choice of a driver come from `cuvmm_command`.

mod bench;
mod compare;
mod conform;
mod heap;
mod stated;

use std::process::ExitCode;

use clap::Parser;
use cuvmm_command::command;

/// Measure cuvmm beside the driver's own calls, and check drivers
///
/// For those who develop cuvmm or port it. Exit codes: 0 for success, 1 for a failure, 2 for options
/// that are wrong and for files named on the command line that cannot be read, cannot be written, or
/// hold something else.
#[derive(Debug, Parser)]
#[command(name = "cuvmm-bench", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Run(bench::Args),
    Compare(compare::Args),
    Conform(conform::Args),
    #[command(hide = true)]
    Reader(bench::Reader),
}

fn main() -> ExitCode {
    command::run("cuvmm-bench", |cli: Cli| match cli.command {
        Command::Run(args) => args.run(),
        Command::Compare(args) => args.run(),
        Command::Conform(args) => args.run(),
        Command::Reader(reader) => reader.run(),
    })
}
