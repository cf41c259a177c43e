//! `cuvmm top`: the memory of each process and tenant on each GPU.
//!
//! `look` gathers the figures and `plain` prints them as text. On a terminal `live` shows them:
//! `worker` has the threads that look and send requests, `state` the displayed state, `history` the
//! last minutes, `keys` the effect of keys, `columns`, `waits`, `detail` and `draw` the picture,
//! and `screen` the terminal.

mod columns;
mod detail;
mod draw;
mod history;
mod keys;
mod live;
mod look;
mod plain;
#[cfg(test)]
mod sample;
mod screen;
mod state;
mod waits;
mod worker;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use signal_hook::low_level::emulate_default_handler;

use super::find::Where;
use cuvmm_command::duration::duration;
use cuvmm_command::terminal::{json, print};

/// Show what each process and tenant has of each GPU
///
/// Reads the ledgers of this user's processes and asks each process for the figures of its tenants.
/// A process is charged for what its pools have, what its guarantee keeps for it, and a little that
/// it has ready. On a terminal it shows the figures every second until `q` is pressed; `?` lists the
/// keys, which also trim processes, put them to sleep and wake them. If standard output is no
/// terminal, it prints the figures once.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm top
  cuvmm top --once
  cuvmm top --json --ledger /run/cuvmm")]
pub(crate) struct Args {
    #[command(flatten)]
    at: Where,

    /// Print the figures once, as text
    #[arg(long)]
    once: bool,

    /// The time between two looks, in seconds or such as 500ms
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,

    /// Print one JSON object, once; sizes are in bytes
    #[arg(long)]
    json: bool,
}

impl Args {
    /// # Errors
    /// A ledger cannot be read, or the terminal cannot be used.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        if self.json {
            let ledgers = look::look(&self.at.open()?);
            print(&json(&serde_json::json!({ "ledgers": ledgers }))?)?;
            return Ok(ExitCode::SUCCESS);
        }
        if self.once || !std::io::stdout().is_terminal() {
            once(&self.at)?;
            return Ok(ExitCode::SUCCESS);
        }
        live(&self.at, self.interval, || Ok(()))
    }
}

const SHORTEST: Duration = Duration::from_millis(100);

fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        time if time < SHORTEST => Err("an interval is at least 100ms".to_owned()),
        time => Ok(time),
    }
}

/// Prints the figures once, as text.
///
/// # Errors
/// A ledger cannot be read.
pub(super) fn once(at: &Where) -> anyhow::Result<()> {
    print(&plain::text(&look::look(&at.open()?), &at.shown()))
}

/// Shows the figures on the terminal until a key or a signal ends the picture, then calls `after`.
/// A signal has its default effect after that.
///
/// # Errors
/// A ledger cannot be read, the terminal cannot be used, or `after` fails.
pub(super) fn live(
    at: &Where,
    interval: Duration,
    after: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let signal = live::run(at, interval)?;
    after()?;
    if let Some(signal) = signal {
        emulate_default_handler(signal)?;
    }
    Ok(ExitCode::SUCCESS)
}
