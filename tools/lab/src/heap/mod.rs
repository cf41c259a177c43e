//! `cuvmm heap`: runs a trace of allocations on a heap, and shows the memory that it held.
//!
//! From the bottom up: `trace` reads lines, `pickle` and `snapshot` files of PyTorch's recorder,
//! `file` any of these; `churn` makes a trace by a law. `run` plays it on the library's heap, with
//! work in flight by `ahead`, and `torch` on models of PyTorch's allocators. `figures` shows the
//! results.

mod ahead;
mod churn;
mod figures;
mod file;
mod pickle;
mod run;
mod snapshot;
mod torch;
mod trace;

use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;

use cuvmm::driver::model::Costs;
use cuvmm::heap::Preset;

use self::churn::Law;
use self::figures::{Figures, Terms};
use self::run::Options;
use self::torch::{Kind, Modelled};
use self::trace::Trace;
use cuvmm_command::command::{usage, word};
use cuvmm_command::costs;
use cuvmm_command::drivers::{Choice, StandIn};
use cuvmm_command::size::size;
use cuvmm_command::terminal::{json, print, tell};

/// Run a trace of allocations on a heap: memory held over memory live, mappings, driver time
///
/// The trace is a snapshot of PyTorch's recorder (`torch.cuda.memory._dump_snapshot`, or
/// `torch.cuda.memory._snapshot` as JSON), or has a line for each operation: `a ID BYTES STREAM`
/// allocates, `f ID` frees. It may be compressed with gzip. On the model each driver call takes as long
/// as it was measured to on a GPU. Beside the heap stand models of PyTorch's native allocator and of its
/// expandable segments, which never run on a driver. Exit code 1 when an allocation of the heap fails.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm heap
  cuvmm heap --churn growing --seed 7 --smallest-limit
  cuvmm heap snapshot.pickle --limit 20GiB
  cuvmm heap snapshot.pickle --preset fast --json")]
pub struct Args {
    /// The trace [default: one that is made, by `--churn uniform`]
    #[arg(conflicts_with_all = ["churn", "seed"])]
    file: Option<PathBuf>,

    /// The device of a snapshot with several
    #[arg(long, value_name = "NUMBER", conflicts_with = "churn")]
    device: Option<usize>,

    /// A trace that is made by a law instead
    #[arg(
        long,
        value_enum,
        value_name = "LAW",
        num_args = 0..=1,
        default_value_t,
        default_missing_value = "uniform"
    )]
    churn: Law,

    /// The seed of the law
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    seed: u64,

    /// How memory is weighed against time
    #[arg(long, value_enum, default_value_t = Weight::Tight)]
    preset: Weight,

    /// Never map memory at two addresses
    #[arg(long)]
    no_aliases: bool,

    /// The most memory that the heap may hold, rounded down to whole granules [default: all of the
    /// device]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    limit: Option<u64>,

    /// Also find the smallest limit with which every allocation succeeds
    #[arg(long)]
    smallest_limit: bool,

    /// Let each allocation be used by work that is complete only after every N operations
    /// [default: no work is queued]
    #[arg(long, value_name = "N")]
    ahead: Option<NonZero<u64>>,

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

impl Args {
    /// Runs the trace and prints the figures.
    ///
    /// # Errors
    /// The trace or the options cannot be used, or the driver cannot be opened.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let trace = match &self.file {
            Some(file) => file::read(file, self.device)?,
            None if self.device.is_some() => {
                return Err(usage("--device chooses from a snapshot: name its file"));
            }
            None => self.churn.trace(self.seed),
        };
        if self.ahead.is_some() && self.driver != Choice::Model {
            return Err(usage("--ahead is for the model"));
        }
        let costs = costs::chosen(self.costs.as_deref(), self.gpu.as_deref())?;
        let outcome = self.play(&trace, &costs, self.limit)?;
        let stats = &outcome.stats;
        let peaks = (stats.peak_live, stats.peak_held);
        let smallest = self.smallest(peaks, outcome.failed, outcome.granule, |limit| {
            Ok(self.play(&trace, &costs, Some(limit))?.failed)
        })?;
        let modelled = [
            self.model(Kind::Native, &trace, &costs, &outcome)?,
            self.model(Kind::Expandable, &trace, &costs, &outcome)?,
        ];
        let figures = Figures::new(self.terms(), &outcome, smallest, modelled);
        let text = match self.json {
            true => json(&figures)?,
            false => figures.text(),
        };
        print(&text)?;
        if self.smallest_limit && outcome.failed > 0 {
            tell("no smallest limit: allocations failed with the memory that the heap may hold");
        }
        Ok(match outcome.failed {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        })
    }

    fn terms(&self) -> Terms {
        let is_made = self.file.is_none();
        Terms {
            law: is_made.then(|| word(&self.churn)),
            seed: is_made.then_some(self.seed),
            preset: word(&self.preset),
            limit_bytes: self.limit,
        }
    }

    /// Plays a trace on a heap on a fresh driver.
    fn play(
        &self,
        trace: &Trace,
        costs: &Costs,
        limit: Option<u64>,
    ) -> anyhow::Result<run::Outcome> {
        let capacity = match (self.memory, self.driver) {
            (None, Choice::Model) => costs::memory(costs)?,
            (memory, _) => memory,
        };
        let stand_in = StandIn {
            capacity,
            costs: Some(costs.clone()),
            ..StandIn::default()
        };
        let options = Options {
            preset: self.preset.preset(),
            aliases: !self.no_aliases,
            limit,
            ahead: self.ahead,
        };
        run::play(&self.driver.open_as(&stand_in)?, trace, options)
    }

    /// Plays a trace on a modelled allocator, on a device like the heap's.
    fn model(
        &self,
        kind: Kind,
        trace: &Trace,
        costs: &Costs,
        heap: &run::Outcome,
    ) -> anyhow::Result<Modelled> {
        let play = |limit: u64| torch::play(kind, trace, costs, (limit, heap.memory));
        let mut modelled = play(self.limit.unwrap_or(heap.memory));
        let peaks = (modelled.peak_live_bytes, modelled.peak_held_bytes);
        modelled.smallest_limit_bytes =
            self.smallest(peaks, modelled.failed, heap.granule, |limit| {
                Ok(play(limit).failed)
            })?;
        Ok(modelled)
    }

    /// Returns the smallest limit, if requested and if no allocation failed without it.
    fn smallest(
        &self,
        peaks: (u64, u64),
        failed: u64,
        granule: u64,
        play: impl Fn(u64) -> anyhow::Result<u64>,
    ) -> anyhow::Result<Option<u64>> {
        match self.smallest_limit && failed == 0 {
            true => run::smallest_limit(peaks, granule, play).map(Some),
            false => Ok(None),
        }
    }
}
