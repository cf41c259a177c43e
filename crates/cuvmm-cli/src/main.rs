//! The command `cuvmm`: look at drivers, check them, replay request traces against an elastic pool,
//! measure it, and plan operations without a GPU.
//!
//! Each command is a room of its own. Here is what they share: one line for each error, and exit code
//! 2 for wrong usage or 1 for failure. Wrong usage is also a file that the command line names and that
//! cannot be read, or is not what it is named as.

mod bench;
mod conform;
mod costs;
mod drivers;
mod files;
mod heap;
mod info;
mod plan;
mod replay;
mod share;
mod size;
mod terminal;
mod watch;

use std::fmt;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

/// Elastic GPU memory: addresses that never move, physical memory that comes and goes under them
///
/// Exit codes: 0 for success, 1 for what failed, 2 for a command line that cannot be meant: options, and
/// files named there that cannot be read, cannot be written, or hold something else.
#[derive(Debug, Parser)]
#[command(name = "cuvmm", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Info(info::Args),
    Conform(conform::Args),
    Replay(replay::Args),
    Bench(bench::Args),
    Nccl(bench::nccl::Args),
    Plan(plan::Args),
    Share(share::Args),
    #[command(hide = true)]
    BenchReader(bench::Reader),
}

/// Options or files that cannot be meant here: exit code 2.
#[derive(Debug)]
struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// The error for options that can be read but not used, and for files that cannot.
fn usage(what: String) -> anyhow::Error {
    Usage(what).into()
}

const FAILURE: u8 = 1;
const USAGE: u8 = 2;

/// One line on standard error.
fn complain(what: &str, code: u8) -> ExitCode {
    let line = what
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    terminal::tell(&format!("cuvmm: {line}"));
    ExitCode::from(code)
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            ) =>
        {
            return match terminal::print(&error.render().to_string()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => complain(&error.to_string(), FAILURE),
            };
        }
        Err(error) => return complain(&one_line(&error), USAGE),
    };
    terminal::log();
    let outcome = match cli.command {
        Command::Info(args) => args.run(),
        Command::Conform(args) => args.run(),
        Command::Replay(args) => args.run(),
        Command::Bench(args) => args.run(),
        Command::Nccl(args) => args.run(),
        Command::Plan(args) => args.run(),
        Command::Share(args) => args.run(),
        Command::BenchReader(reader) => reader.run(),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => complain(
            &terminal::chain(&error),
            if error.is::<Usage>() { USAGE } else { FAILURE },
        ),
    }
}

/// What is wrong, without the usage that clap prints after it.
fn one_line(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "which command? `cuvmm --help` lists them".to_owned();
    }
    let text = error.render().to_string();
    let what = text.split("\n\n").next().unwrap_or_default();
    what.strip_prefix("error: ").unwrap_or(what).to_owned()
}
