//! The command `cuvmm`: look at drivers, check them, replay request traces against an elastic pool,
//! measure it, and plan operations without a GPU.
//!
//! Each command is a room of its own. Here is what they share: one line for each error, exit code
//! 2 for usage and 1 for failure, and logs to standard error as `RUST_LOG` says.

mod bench;
mod conform;
mod costs;
mod drivers;
mod heap;
mod info;
mod plan;
mod replay;
mod share;
mod size;
mod watch;

use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Elastic GPU memory: addresses that never move, physical memory that comes and goes under them
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

/// An option that means nothing here: exit code 2.
#[derive(Debug)]
struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// The error for options that can be read but not used.
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
    // Nobody is left to tell that even this failed.
    let _ = writeln!(io::stderr(), "cuvmm: {line}");
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
            return match drivers::print(&error.render().to_string()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => complain(&error.to_string(), FAILURE),
            };
        }
        Err(error) => return complain(&one_line(&error), USAGE),
    };
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::WARN.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .init();
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
            &format!("{error:#}"),
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
