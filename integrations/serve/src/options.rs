//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use candle_core::DType;
use candle_transformers::models::llama::{Config, LlamaConfig};
use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};

use super::cache::STEP;
use super::cache_memory::Spec;
use super::system::SystemPrompt;
use super::trace::{self, Drawn, Request, Row, Turns};
use super::weights::{Source, small};

/// Tokens of each prompt in the comparison of the caches, and the number of steps: candle's own
/// cache grows once.
pub(crate) const PROMPT: usize = STEP - 64;
pub(crate) const STEPS: usize = 128;

/// Several models on one GPU under one limit, without a network.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// Where the memory of caches and weights comes from.
    #[arg(long, value_enum, default_value_t = Mode::Elastic, conflicts_with = "compare")]
    pub(crate) mode: Mode,
    /// Measure both caches, and all modes with the same requests.
    #[arg(long)]
    pub(crate) compare: bool,
    /// Answer this one prompt, one token per byte, with the first model.
    #[arg(long, conflicts_with = "compare")]
    pub(crate) prompt: Option<String>,
    /// Tokens of the answer to `--prompt`.
    #[arg(long, default_value_t = 64, value_parser = one_or_more())]
    pub(crate) answer: usize,

    /// The number of models that share the GPU.
    #[arg(long, default_value_t = 2, value_parser = one_or_more())]
    pub(crate) models: usize,
    /// The `config.json` of a Llama model; the default is a small one of 110 million weights.
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Safetensors files for all models; by default weights are drawn from the seed.
    #[arg(long, num_args = 1..)]
    pub(crate) weights: Vec<PathBuf>,
    /// The seed for weights, prompts and requests.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// The type of weights and caches.
    #[arg(long, value_enum, default_value_t = Type::Bf16)]
    pub(crate) dtype: Type,
    /// Tokens with which all prompts of a model begin: computed once, and forked for each sequence.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub(crate) system_prompt: usize,
    /// Compute the system prompt for each sequence separately.
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
    /// The most sequences of a model that run at a time.
    #[arg(long, default_value_t = 24, value_parser = one_or_more())]
    pub(crate) slots: usize,

    /// The limit of all models together, in MiB; the default is computed from `--share`.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(..=1 << 40))]
    limit: Option<u64>,
    /// Without `--limit`: the number of short sequences that fit in a model's equal share, in
    /// addition to its weights and its system prompt.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(..=1 << 20))]
    share: u64,
    /// The most that candle's own tensors between the layers may take, in MiB, in addition to the
    /// limit of the models; 0 leaves them outside of any limit, as in the mode `candle`.
    #[arg(long, value_name = "MIB", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(..=1 << 20))]
    pub(crate) intermediates: u64,
    /// The treatment of a sleeping model's weights, and of its system prompt's caches, in the mode
    /// `elastic`.
    #[arg(long, value_enum, default_value_t = Sleep::Keep)]
    pub(crate) sleep: Sleep,

    /// A trace of requests in CSV: one for all models, or one for each.
    #[arg(long)]
    trace: Vec<PathBuf>,
    /// How much faster than in the trace requests come; with `--compare` the default results from
    /// `--load`.
    #[arg(long)]
    speed: Option<f64>,
    /// With `--compare` and `--trace`: the requested tokens per second, as a fraction of the
    /// measured rate.
    #[arg(long, default_value_t = 0.7)]
    load: f64,
    /// The factor by which the lengths in the trace are multiplied.
    #[arg(long, default_value_t = 1.)]
    lengths: f64,
    /// The seconds of a model's turn, during which it receives requests.
    #[arg(long, default_value_t = 2.)]
    window: f64,
    /// The total number of turns.
    #[arg(long, default_value_t = 6, value_parser = one_or_more())]
    windows: usize,
    /// Requests in a turn, if there is no trace.
    #[arg(long, default_value_t = 12, value_parser = one_or_more())]
    burst: usize,

    /// Sequences that run together in the comparison of the caches.
    #[arg(long, default_value_t = 16, value_parser = one_or_more())]
    pub(crate) batch: usize,
    /// The number of rounds of that comparison; the median is reported.
    #[arg(long, default_value_t = 3, value_parser = one_or_more())]
    pub(crate) rounds: usize,
}

/// The source of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// Tenants of one pool: memory moves to the tenant that needs it, and idle models sleep.
    Elastic,
    /// Tenants of one pool, each with an equal share.
    Static,
    /// candle's own memory and cache, counted against the same limit.
    Candle,
}

/// The treatment of a sleeping model's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sleep {
    /// Kept in pinned host memory.
    Keep,
    /// Dropped, and drawn, read or computed again.
    Discard,
    /// No model sleeps.
    Never,
}

/// The type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Type {
    Bf16,
    F16,
    F32,
}

/// Parses a count of at least one, bounded so that sums cannot overflow.
fn one_or_more() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 20)
}

const SHORT: usize = 1024;

const APART: u64 = 1000;

impl Options {
    pub(crate) fn config(&self) -> anyhow::Result<Config> {
        let Some(path) = &self.config else {
            return Ok(small());
        };
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let config = serde_json::from_reader(std::io::BufReader::new(file));
        let config = config.with_context(|| path.display().to_string())?;
        let config = LlamaConfig::into_config(config, false);
        check_config(&config).with_context(|| path.display().to_string())?;
        Ok(config)
    }

    /// Returns these options with the system prompt computed for each sequence.
    pub(crate) fn without_prefix_cache(&self) -> Self {
        Self {
            no_prefix_cache: true,
            ..self.clone()
        }
    }

    /// Checks that the options can be carried out, as far as that is known without a GPU.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        self.specs()?;
        let longest = self.config()?.max_position_embeddings;
        ensure!(
            !self.compare || longest >= PROMPT + STEPS,
            "--compare needs sequences of {} tokens, and the model allows {longest}",
            PROMPT + STEPS,
        );
        for path in &self.weights {
            std::fs::File::open(path).with_context(|| path.display().to_string())?;
        }
        match self.prompt {
            Some(_) => Ok(()),
            None => self.requests(&self.config()?, None).map(drop),
        }
    }

    pub(crate) fn specs(&self) -> anyhow::Result<Vec<Spec>> {
        let config = self.config()?;
        let (system, longest) = (self.system_prompt, config.max_position_embeddings);
        ensure!(
            system.checked_add(2).is_some_and(|least| least <= longest),
            "{system} tokens of system prompt, one of a prompt and one of an answer are more than the \
             {longest} that a sequence may have",
        );
        let source = |model: u64| match self.weights.is_empty() {
            true => Source::Seed(self.seed + APART * model),
            false => Source::Files(self.weights.clone()),
        };
        let spec = |model| Spec {
            config: config.clone(),
            dtype: self.dtype.into(),
            source: source(model),
            system: SystemPrompt::drawn(
                self.seed + APART * model,
                self.system_prompt,
                config.vocab_size as u32,
                !self.no_prefix_cache,
            ),
        };
        Ok((0..self.models as u64).map(spec).collect())
    }

    /// Returns the limit of all models together in bytes. Memory comes in granules of `granule`
    /// bytes.
    pub(crate) fn limit(&self, specs: &[Spec], granule: u64) -> anyhow::Result<u64> {
        if let Some(limit) = self.limit {
            return Ok(limit << 20);
        }
        let mut most = 0;
        for spec in specs {
            let weights = spec.weights()?.next_multiple_of(granule);
            let prefix = spec.sequence(self.system_prompt, granule);
            most = most.max(weights + prefix + self.share * spec.sequence(SHORT, granule));
        }
        Ok(most * specs.len() as u64)
    }

    /// Returns the requests. Unless a speed is given, `full` tokens per second are a load of one.
    pub(crate) fn requests(
        &self,
        config: &Config,
        full: Option<f64>,
    ) -> anyhow::Result<Vec<Request>> {
        let window = Duration::try_from_secs_f64(self.window)
            .with_context(|| format!("--window {}", self.window))?;
        let all = window.checked_mul(self.windows as u32);
        all.context("--windows turns of --window seconds never end")?;
        let (rows, speed) = match self.trace.is_empty() {
            true => {
                let drawn = Drawn {
                    window,
                    windows: self.windows.div_ceil(self.models),
                    burst: self.burst,
                };
                let rows = |model| drawn.rows(self.seed + APART * model);
                (
                    (0..self.models as u64).map(rows).collect(),
                    self.speed.unwrap_or(1.),
                )
            }
            false => {
                let rows = self.rows()?;
                let asked = full.map(|full| self.load * full / (rate(&rows) * self.lengths));
                (rows, self.speed.or(asked).unwrap_or(1.))
            }
        };
        let longest = config.max_position_embeddings;
        let turns = Turns {
            window,
            windows: self.windows,
            speed,
            lengths: self.lengths,
            longest: longest.saturating_sub(self.system_prompt),
        };
        turns.requests(&rows)
    }

    fn rows(&self) -> anyhow::Result<Vec<Vec<Row>>> {
        let read = |path: &PathBuf| {
            let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
            trace::read(file).with_context(|| path.display().to_string())
        };
        let traces = self
            .trace
            .iter()
            .map(read)
            .collect::<anyhow::Result<Vec<_>>>()?;
        Ok(traces.into_iter().cycle().take(self.models).collect())
    }
}

/// Checks that a decoder can be made from a configuration.
fn check_config(config: &Config) -> anyhow::Result<()> {
    let Config {
        hidden_size: hidden,
        num_attention_heads: heads,
        num_key_value_heads: key_heads,
        max_position_embeddings: longest,
        ..
    } = *config;
    for (name, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", config.intermediate_size),
        ("vocab_size", config.vocab_size),
        ("num_hidden_layers", config.num_hidden_layers),
        ("num_attention_heads", heads),
        ("num_key_value_heads", key_heads),
    ] {
        ensure!(value > 0, "{name} is 0");
    }
    ensure!(
        longest >= 2,
        "max_position_embeddings is {longest}: a sequence has two tokens at least"
    );
    ensure!(
        heads.is_multiple_of(key_heads),
        "num_key_value_heads is {key_heads}, of which num_attention_heads, {heads}, is no multiple"
    );
    // The rotary embedding rotates pairs of elements.
    ensure!(
        hidden.is_multiple_of(heads) && (hidden / heads).is_multiple_of(2),
        "hidden_size, {hidden}, is no even number for each of num_attention_heads, {heads}"
    );
    Ok(())
}

/// Returns the tokens of answers per second, averaged over the models' traces.
fn rate(models: &[Vec<Row>]) -> f64 {
    let of = |rows: &Vec<Row>| {
        let tokens: f64 = rows.iter().map(|row| row.generated as f64).sum();
        let span = rows.last().map_or(0., |row| row.at.as_secs_f64());
        tokens / span.max(1.)
    };
    models.iter().map(of).sum::<f64>() / models.len() as f64
}

impl From<Type> for DType {
    fn from(dtype: Type) -> Self {
        match dtype {
            Type::Bf16 => Self::BF16,
            Type::F16 => Self::F16,
            Type::F32 => Self::F32,
        }
    }
}

#[cfg(test)]
mod tests;
