//! The options of `cuvmm replay`, and their consequences.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use cuvmm::driver::model::Costs;

use super::paged;
use super::policy::Policy;
use super::settings::Settings;
use super::workload::{self, Workload};
use cuvmm_command::command::usage;
use cuvmm_command::costs;
use cuvmm_command::drivers::Choice;
use cuvmm_command::duration::duration;
use cuvmm_command::size::{iec, size};
use cuvmm_command::terminal::counted;

/// The memory of a driver without a GPU beyond the replay's.
const SLACK: u64 = 256 << 20;

/// Replay a request trace: several models share one GPU's memory.
///
/// Reads one trace per model (the CSV of the Azure LLM inference traces) and plays it in virtual
/// time over real memory operations, once with the memory split evenly and once shared. Without a
/// trace, two bursty services are generated.
///
/// With --processes it is played once more with a process for each model, all under one ledger.
/// Time is real then for all policies: the trace is played --speed times as fast, and all that
/// memory takes is in the times to first token.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm replay
  cuvmm replay --memory 16GiB --chart replay.svg
  cuvmm replay --model chat=chat.csv --model code=code.csv --policy both
  cuvmm replay --processes --speed 20 --policy elastic
  cuvmm replay --layout paged --keep-prefixes
  cuvmm replay --driver model --gpu nvidia-h200")]
pub struct Args {
    /// A model and its trace; once for each model
    #[arg(long = "model", value_name = "NAME=FILE", value_parser = model)]
    pub(super) models: Vec<(String, PathBuf)>,

    /// Memory for all models together, rounded down to whole granules
    #[arg(long, value_name = "SIZE", default_value = "8GiB", value_parser = size)]
    pub(super) memory: u64,

    /// How the memory is divided
    #[arg(long, value_enum, default_value_t = Policies::Both)]
    pub(super) policy: Policies,

    /// The guarantee of each model under elastic [default: a quarter of the memory, or an
    /// even share where that is less]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) guarantee: Option<u64>,

    /// Play in real time, and once more with a process for each model, all under one ledger
    #[arg(long, conflicts_with = "expect")]
    pub(super) processes: bool,

    /// Seconds of the trace in one second, from 0.001 to 1000 [default: 20]
    #[arg(long, value_name = "FACTOR", requires = "processes", value_parser = factor)]
    pub(super) speed: Option<f64>,

    /// The directory of the ledger [default: a private one, removed at the end]
    #[arg(long, value_name = "DIRECTORY", requires = "processes")]
    pub(super) ledger: Option<PathBuf>,

    /// Seconds after which a process that says nothing is given up
    #[arg(long, hide = true, default_value = "30s", value_parser = duration, requires = "processes")]
    pub(super) patience: Duration,

    /// Requests arrive this many times as fast as in the trace, from 0.001 to 1000
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = factor)]
    pub(super) load: f64,

    /// Which driver answers; nothing is stamped on the model, which has no memory
    #[arg(long, value_enum, default_value_t)]
    pub(super) driver: Choice,

    /// Which device of the driver
    #[arg(long, value_name = "ORDINAL", default_value_t = 0)]
    pub(super) device: u32,

    /// KV cache of one token, for every model
    #[arg(long, value_name = "SIZE", default_value = "131072", value_parser = size)]
    pub(super) kv_bytes_per_token: u64,

    #[command(flatten)]
    pub(super) caches: paged::Options,

    /// Tokens a second that a request's context is read at, from 1 to 1000000
    #[arg(long, value_name = "TOKENS", default_value = "8000", value_parser = rate)]
    pub(super) prefill: f64,

    /// Tokens a second that a request generates, from 1 to 1000000
    #[arg(long, value_name = "TOKENS", default_value = "40", value_parser = rate)]
    pub(super) decode: f64,

    /// Seed of the generated workload
    #[arg(long, default_value_t = 0, conflicts_with = "models")]
    pub(super) seed: u64,

    /// Draw memory by model over time
    #[arg(long, value_name = "FILE.svg")]
    pub(super) chart: Option<PathBuf>,

    /// Play it on the model too, and show what the driver's calls were expected to take beside
    /// what they took
    #[arg(long)]
    pub(super) expect: bool,

    /// A table of the cost of calls on the model that `cuvmm-bench run --save-costs` wrote
    #[arg(long, value_name = "FILE", conflicts_with = "gpu")]
    pub(super) costs: Option<PathBuf>,

    /// A GPU whose table of costs comes with the command [default: nvidia-h200]
    #[arg(long, value_name = "NAME")]
    pub(super) gpu: Option<String>,

    /// Print JSON instead of tables
    #[arg(long)]
    pub(super) json: bool,

    /// Print all columns, in lines of any length
    #[arg(short, long)]
    pub(super) verbose: bool,
}

/// Which policies are played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Policies {
    /// An even share of its own for each model
    Static,
    /// One pool, with a guarantee for each model
    Elastic,
    /// One after the other
    Both,
}

impl Args {
    /// Returns the policies in the order of playing: first the policy with a ledger, which other
    /// programs may have with other terms.
    pub(super) fn policies(&self) -> impl Iterator<Item = Policy> {
        let split = (self.policy != Policies::Elastic).then_some(Policy::Static);
        let elastic = (self.policy != Policies::Static).then_some(Policy::Elastic);
        let ledger = self.processes.then_some(Policy::Ledger);
        [ledger, split, elastic].into_iter().flatten()
    }

    pub(super) fn workload(&self) -> anyhow::Result<Workload> {
        let mut names: Vec<_> = self.models.iter().map(|(name, _)| name).collect();
        names.sort();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(usage(format!("--model: {:?} is given twice", twice[0])));
        }
        let workload = if self.models.is_empty() {
            workload::generated(self.seed)
        } else {
            workload::from_traces(&self.models)
        };
        Ok(workload?.faster(self.load))
    }

    /// Describes the origin of the requests, for the head of the report.
    pub(super) fn described(&self, workload: &Workload) -> String {
        let requests = counted(workload.requests.len() as u64, "request");
        let models = workload.models.join(", ");
        let mut said = format!("{requests} to {models}");
        if self.models.is_empty() {
            said += &format!(", generated from seed {}", self.seed);
        }
        if self.load != 1.0 {
            said += &format!(", arriving {} times as fast", self.load);
        }
        said
    }

    /// Returns the table of costs for the model.
    ///
    /// # Errors
    /// Options contradict each other, or the table cannot be read.
    pub(super) fn cost_table(&self) -> anyhow::Result<Costs> {
        let model = self.driver == Choice::Model;
        if self.expect && model {
            return Err(usage(
                "--expect: on the model the driver time is the expected one".to_owned(),
            ));
        }
        if !(self.expect || model) && (self.costs.is_some() || self.gpu.is_some()) {
            return Err(usage(
                "--costs and --gpu: only for --driver model or with --expect".to_owned(),
            ));
        }
        costs::chosen(self.costs.as_deref(), self.gpu.as_deref())
    }

    /// Returns the memory in bytes of a driver without a GPU: no pool leaves anything free.
    pub(super) fn capacity(&self) -> u64 {
        self.memory.saturating_add(SLACK)
    }

    pub(super) fn settings(&self) -> Settings {
        Settings {
            kv_bytes_per_token: self.kv_bytes_per_token,
            prefill_rate: self.prefill,
            decode_rate: self.decode,
        }
    }

    /// Returns the memory in whole granules, at least one for each model's share.
    pub(super) fn memory_limit(&self, granule: u64, models: usize) -> anyhow::Result<u64> {
        let limit = self.memory / granule * granule;
        if limit / granule < models as u64 {
            let (memory, granule) = (iec(self.memory), iec(granule));
            let models = counted(models as u64, "model");
            return Err(usage(format!(
                "--memory: {memory} is less than a granule of {granule} for each of {models}"
            )));
        }
        Ok(limit)
    }

    pub(super) fn guarantee(
        &self,
        memory: u64,
        granule: u64,
        models: usize,
    ) -> anyhow::Result<u64> {
        let share = memory / models.max(1) as u64;
        let guarantee = self.guarantee.unwrap_or_else(|| (memory / 4).min(share));
        if guarantee > share {
            let (guarantee, memory) = (iec(guarantee), iec(memory));
            let models = counted(models as u64, "model");
            return Err(usage(format!(
                "--guarantee: {guarantee} for each of {models} is more than the memory, {memory}"
            )));
        }
        Ok(guarantee / granule * granule)
    }
}

fn model(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, file)) if !name.is_empty() && !file.is_empty() => {
            Ok((name.to_owned(), file.into()))
        }
        _ => Err("a model is NAME=FILE".to_owned()),
    }
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(factor) if (0.001..=1e3).contains(&factor) => Ok(factor),
        _ => Err("a factor is a number from 0.001 to 1000, such as 5".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (1.0..=1e6).contains(&rate) => Ok(rate),
        _ => Err("a rate is a number from 1 to 1000000, such as 40".to_owned()),
    }
}
