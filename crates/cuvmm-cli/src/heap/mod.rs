//! `cuvmm heap`: runs a trace of allocations on a heap, and shows what it held for them.
//!
//! From the bottom up: `trace` reads a file, `churn` makes a trace by a law, `run` plays it. The
//! heap is the library's.

mod churn;
mod run;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;

use bytesize::ByteSize;
use cuvmm::heap::Preset;
use serde::Serialize;

use self::churn::Law;
use self::run::{Options, Outcome};
use self::trace::Trace;
use cuvmm_cli::command::usage;
use cuvmm_cli::costs;
use cuvmm_cli::drivers::{Choice, StandIn};
use cuvmm_cli::size::size;
use cuvmm_cli::terminal::{json, print};

/// Run a trace of allocations on a heap: memory held over memory live, mappings, driver time
///
/// The trace has a line for each operation: `a ID BYTES STREAM` allocates, `f ID` frees. It may be
/// compressed with gzip. On the model each driver call takes as long as it was measured to on a GPU.
/// Exit code 1 when an allocation fails.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm heap torch-llama.gz
  cuvmm heap torch-llama.gz --preset fast --json
  cuvmm heap --churn uniform --seed 7 --smallest-limit")]
pub(crate) struct Args {
    /// The trace
    #[arg(required_unless_present = "churn", conflicts_with = "churn")]
    file: Option<PathBuf>,

    /// A trace that is made by a law instead
    #[arg(long, value_enum, value_name = "LAW")]
    churn: Option<Law>,

    /// The seed of the law
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    seed: u64,

    /// How memory is weighed against time
    #[arg(long, value_enum, default_value_t = Weight::Tight)]
    preset: Weight,

    /// Never map memory at two addresses
    #[arg(long)]
    no_aliases: bool,

    /// The most memory that the heap may hold [default: all of the device]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    limit: Option<u64>,

    /// Also find the smallest limit with which every allocation succeeds
    #[arg(long)]
    smallest_limit: bool,

    /// Where to run it
    #[arg(long, value_enum, default_value_t = Choice::Model)]
    driver: Choice,

    /// A table of the cost of calls that `cuvmm-bench run --save-costs` wrote
    #[arg(long, value_name = "FILE", conflicts_with = "gpu")]
    costs: Option<PathBuf>,

    /// A GPU whose table of costs comes with the command [default: nvidia-h200]
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,

    /// Memory of the device if it is no GPU [default: as the table of costs says]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Weight {
    /// Little more than what is live
    Tight,
    /// Few mappings
    Fast,
}

impl Weight {
    const fn preset(self) -> Preset {
        match self {
            Self::Tight => Preset::Tight,
            Self::Fast => Preset::Fast,
        }
    }
}

/// The figures of a run. The keys are a stable interface; further keys may be added.
#[derive(Debug, Serialize)]
struct Figures {
    driver: &'static str,
    operations: u64,
    peak_live_bytes: u64,
    peak_held_bytes: u64,
    /// Peak held over peak live.
    ratio: f64,
    mappings: u64,
    stitches: u64,
    stream_waits: u64,
    driver_calls: u64,
    /// `None` where the driver's time is not modelled.
    driver_us_per_operation: Option<f64>,
    /// The time of the whole run. `None` on the model.
    us_per_operation: Option<f64>,
    /// Allocations that failed.
    failed: u64,
    smallest_limit_bytes: Option<u64>,
}

impl Args {
    /// Runs the trace and prints the figures.
    ///
    /// # Errors
    /// A trace or options that cannot be used, and a driver that cannot be opened.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let trace = match (&self.file, self.churn) {
            (Some(file), _) => trace::read(file)?,
            (None, Some(law)) => law.trace(self.seed),
            (None, None) => return Err(usage("a trace or --churn is needed")),
        };
        let options = Options {
            preset: self.preset.preset(),
            aliases: !self.no_aliases,
            limit: self.limit,
        };
        let outcome = self.play(&trace, options)?;
        let mut smallest = None;
        if self.smallest_limit {
            smallest = run::smallest_limit(&outcome, |limit| {
                let limit = Some(limit);
                Ok(self.play(&trace, Options { limit, ..options })?.failed)
            })?;
        }
        let figures = Figures::new(&outcome, smallest);
        let text = match self.json {
            true => json(&figures)?,
            false => figures.text(),
        };
        print(&text)?;
        Ok(match outcome.failed {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        })
    }

    /// Plays a trace on a fresh driver.
    fn play(&self, trace: &Trace, options: Options) -> anyhow::Result<Outcome> {
        let costs = costs::chosen(self.costs.as_deref(), self.gpu.as_deref())?;
        let stand_in = StandIn {
            capacity: self.memory,
            costs: Some(costs),
            ..StandIn::default()
        };
        run::play(&self.driver.open_as(&stand_in)?, trace, options)
    }
}

impl Figures {
    fn new(outcome: &Outcome, smallest_limit_bytes: Option<u64>) -> Self {
        let stats = &outcome.stats;
        let operations = outcome.operations;
        let per_operation =
            |time: std::time::Duration| time.as_secs_f64() * 1e6 / operations.max(1) as f64;
        Self {
            driver: outcome.driver,
            operations,
            peak_live_bytes: stats.peak_live,
            peak_held_bytes: stats.peak_held,
            ratio: stats.peak_held as f64 / stats.peak_live.max(1) as f64,
            mappings: stats.mapped,
            stitches: stats.stitches,
            stream_waits: stats.stream_waits,
            driver_calls: outcome.driver_calls,
            driver_us_per_operation: outcome.driver_time.map(per_operation),
            us_per_operation: outcome.time.map(per_operation),
            failed: outcome.failed,
            smallest_limit_bytes,
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let size = |bytes: u64| ByteSize::b(bytes).display().iec().to_string();
        let mut row = |name: &str, value: String| text += &format!("{name:<16}{value}\n");
        row("operations", self.operations.to_string());
        row("peak live", size(self.peak_live_bytes));
        row("peak held", size(self.peak_held_bytes));
        row("held over live", format!("{:.3}", self.ratio));
        row("mappings", self.mappings.to_string());
        row("stitches", self.stitches.to_string());
        if let Some(time) = self.driver_us_per_operation {
            row("driver time", format!("{time:.2} us an operation"));
        }
        if let Some(time) = self.us_per_operation {
            row("time", format!("{time:.2} us an operation"));
        }
        row("failed", self.failed.to_string());
        if let Some(limit) = self.smallest_limit_bytes {
            let over = limit as f64 / self.peak_live_bytes.max(1) as f64;
            row(
                "smallest limit",
                format!("{}, {over:.3} of live", size(limit)),
            );
        }
        text
    }
}
