//! The command `cuvmm`. Each command is a module. `replay` and `heap` are the crate `cuvmm-lab`;
//! the crate `cuvmm-command` is shared with `cuvmm-bench`.

mod fake;
mod generated;
mod info;
mod ledger;
mod plan;
mod share;
#[cfg(not(feature = "lab"))]
mod without_lab;

use std::process::ExitCode;

use clap::Parser;
use cuvmm_command::command;

/// Elastic GPU memory: addresses that never move, physical memory that comes and goes under them
///
/// Exit codes: 0 for success, 1 for a failure, 2 for options that are wrong and for files named on the
/// command line that cannot be read, cannot be written, or hold something else.
#[derive(Debug, Parser)]
#[command(name = "cuvmm", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Info(info::Args),
    #[cfg(feature = "lab")]
    Replay(cuvmm_lab::replay::Args),
    #[cfg(feature = "lab")]
    #[command(hide = true)]
    ReplayOne(cuvmm_lab::replay::One),
    #[cfg(not(feature = "lab"))]
    #[command(hide = true)]
    Replay(without_lab::Args),
    Plan(plan::Args),
    #[cfg(feature = "lab")]
    Heap(cuvmm_lab::heap::Args),
    #[cfg(not(feature = "lab"))]
    #[command(hide = true)]
    Heap(without_lab::Args),
    Share(share::Args),
    Fake(fake::Args),
    Demo(ledger::demo::Args),
    #[command(hide = true)]
    DemoService(ledger::demo::Service),
    Top(ledger::top::Args),
    Ctl(ledger::ctl::Args),
    Metrics(ledger::metrics::Args),
    Completions(generated::Completions),
    #[command(hide = true)]
    Man(generated::Man),
}

fn main() -> ExitCode {
    command::run("cuvmm", |cli: Cli| match cli.command {
        Command::Info(args) => args.run(),
        Command::Replay(args) => args.run(),
        #[cfg(feature = "lab")]
        Command::ReplayOne(one) => one.run(),
        Command::Plan(args) => args.run(),
        Command::Heap(args) => args.run(),
        Command::Share(args) => args.run(),
        Command::Fake(args) => args.run(),
        Command::Demo(args) => args.run(),
        Command::DemoService(service) => service.run(),
        Command::Top(args) => args.run(),
        Command::Ctl(args) => args.run(),
        Command::Metrics(args) => args.run(),
        Command::Completions(args) => args.run(),
        Command::Man(args) => args.run(),
    })
}
