//! The command `cuvmm`. Each command is a module. `replay`, `heap` and `picture` are the crate `cuvmm-lab`;
//! the crate `cuvmm-command` is shared with `cuvmm-bench`. Commands for several processes are for Linux.

#[cfg(target_os = "linux")]
mod fake;
mod generated;
mod info;
#[cfg(target_os = "linux")]
mod ledger;
mod plan;
#[cfg(target_os = "linux")]
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
    #[cfg(all(feature = "lab", target_os = "linux"))]
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
    #[cfg(target_os = "linux")]
    Share(share::Args),
    #[cfg(target_os = "linux")]
    Fake(fake::Args),
    #[cfg(target_os = "linux")]
    Demo(ledger::demo::Args),
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    DemoService(ledger::demo::Service),
    #[cfg(target_os = "linux")]
    Top(ledger::top::Args),
    #[cfg(target_os = "linux")]
    Ctl(ledger::ctl::Args),
    #[cfg(target_os = "linux")]
    Metrics(ledger::metrics::Args),
    #[cfg(target_os = "linux")]
    Record(ledger::record::Args),
    #[cfg(feature = "lab")]
    Picture(cuvmm_lab::picture::Args),
    #[cfg(not(feature = "lab"))]
    #[command(hide = true)]
    Picture(without_lab::Args),
    Completions(generated::Completions),
    #[command(hide = true)]
    Man(generated::Man),
}

fn main() -> ExitCode {
    command::run("cuvmm", |cli: Cli| match cli.command {
        Command::Info(args) => args.run(),
        Command::Replay(args) => args.run(),
        #[cfg(all(feature = "lab", target_os = "linux"))]
        Command::ReplayOne(one) => one.run(),
        Command::Plan(args) => args.run(),
        Command::Heap(args) => args.run(),
        #[cfg(target_os = "linux")]
        Command::Share(args) => args.run(),
        #[cfg(target_os = "linux")]
        Command::Fake(args) => args.run(),
        #[cfg(target_os = "linux")]
        Command::Demo(args) => args.run(),
        #[cfg(target_os = "linux")]
        Command::DemoService(service) => service.run(),
        #[cfg(target_os = "linux")]
        Command::Top(args) => args.run(),
        #[cfg(target_os = "linux")]
        Command::Ctl(args) => args.run(),
        #[cfg(target_os = "linux")]
        Command::Metrics(args) => args.run(),
        #[cfg(target_os = "linux")]
        Command::Record(args) => args.run(),
        Command::Picture(args) => args.run(),
        Command::Completions(args) => args.run(),
        Command::Man(args) => args.run(),
    })
}
