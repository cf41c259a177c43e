//! `cuvmm metrics`: the figures of `cuvmm top` as OpenMetrics text.

mod connection;
mod listen;
mod serve;

use std::process::ExitCode;

use cuvmm::ledger::open_metrics;

use self::listen::Listener;
use super::find::Where;
use cuvmm_command::terminal::{print, safe, tell};

/// Print the figures of all processes and tenants as OpenMetrics text
///
/// Prometheus reads this format. Metric names begin with `cuvmm_`; the documentation of
/// `cuvmm::ledger::open_metrics` explains them. With `--listen` it answers GET /metrics until it is
/// interrupted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm metrics
  cuvmm metrics --listen 127.0.0.1:9470
  cuvmm metrics --listen unix:/run/cuvmm/metrics.sock")]
pub(crate) struct Args {
    #[command(flatten)]
    at: Where,

    /// Serve the text at a loopback address or, after `unix:`, at a Unix socket of this user
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
}

impl Args {
    /// # Errors
    /// A ledger cannot be read, or the address cannot be listened at, now or later.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let Some(address) = &self.listen else {
            print(&open_metrics(&self.at.open()?))?;
            return Ok(ExitCode::SUCCESS);
        };
        let listener = Listener::open(address)?;
        tell(&format!("serving figures at {}", safe(&listener.shown())));
        match serve::serve(&listener, &self.at)? {}
    }
}
