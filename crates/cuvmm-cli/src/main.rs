//! The command `cuvmm`: shows drivers and devices, replays request traces against an elastic pool,
//! tries plans of operations without a GPU, runs traces of allocations on a heap, shares memory between
//! processes, runs programs on a driver without a GPU, and shows and changes what processes have of a
//! GPU.
//!
//! Each command is a module. The library target of this package holds the parts that `cuvmm-bench`
//! uses too.

mod chart;
mod fake;
mod generated;
mod heap;
mod info;
mod ledger;
mod plan;
mod replay;
mod share;
mod signals;
mod stop;
mod subprocess;

use std::process::ExitCode;

use clap::Parser;
use cuvmm_cli::command;

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
    Replay(replay::Args),
    #[command(hide = true)]
    ReplayOne(replay::One),
    Plan(plan::Args),
    Heap(heap::Args),
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
