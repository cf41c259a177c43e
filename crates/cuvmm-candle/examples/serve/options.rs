//! What the command line says.

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

/// Tokens of each prompt where the two caches are compared, and steps: candle's own grows once.
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
    /// Answer this one prompt, a token a byte, with the first model.
    #[arg(long, conflicts_with = "compare")]
    pub(crate) prompt: Option<String>,
    /// Tokens of the answer to `--prompt`.
    #[arg(long, default_value_t = 64, value_parser = one_or_more())]
    pub(crate) answer: usize,

    /// How many models share the GPU.
    #[arg(long, default_value_t = 2, value_parser = one_or_more())]
    pub(crate) models: usize,
    /// The `config.json` of a Llama; by default a small one of 110 million weights.
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Files of safetensors, for all models; by default weights are drawn from the seed.
    #[arg(long, num_args = 1..)]
    pub(crate) weights: Vec<PathBuf>,
    /// What weights, prompts and requests are drawn from.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// The type of weights and caches.
    #[arg(long, value_enum, default_value_t = Type::Bf16)]
    pub(crate) dtype: Type,
    /// Tokens with which all prompts of a model begin: read once, and forked for each sequence.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub(crate) system_prompt: usize,
    /// Has each sequence read the system prompt by itself.
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
    /// Sequences of a model that run at a time at most.
    #[arg(long, default_value_t = 24, value_parser = one_or_more())]
    pub(crate) slots: usize,

    /// MiB that all models may have together; by default what `--share` makes of it.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(..=1 << 40))]
    limit: Option<u64>,
    /// Without `--limit`: how many short sequences a model's equal share has room for beside its weights
    /// and its system prompt.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(..=1 << 20))]
    share: u64,
    /// What becomes of the weights of a model that sleeps, and of its system prompt's caches, in the mode
    /// `elastic`.
    #[arg(long, value_enum, default_value_t = Sleep::Keep)]
    pub(crate) sleep: Sleep,

    /// A trace of requests, CSV: one for all models, or one for each.
    #[arg(long)]
    trace: Vec<PathBuf>,
    /// How much faster than in the trace they come; with `--compare` by default as many as
    /// make up `--load`.
    #[arg(long)]
    speed: Option<f64>,
    /// With `--compare` and `--trace`: the tokens asked for in a second, as a part of those that can be
    /// had.
    #[arg(long, default_value_t = 0.7)]
    load: f64,
    /// By what the lengths in the trace are multiplied.
    #[arg(long, default_value_t = 1.)]
    lengths: f64,
    /// Seconds for which each model is asked in turn.
    #[arg(long, default_value_t = 2.)]
    window: f64,
    /// How many turns there are in all.
    #[arg(long, default_value_t = 6, value_parser = one_or_more())]
    windows: usize,
    /// Requests in a turn, where there is no trace.
    #[arg(long, default_value_t = 12, value_parser = one_or_more())]
    burst: usize,

    /// Sequences that run together where the two caches are compared.
    #[arg(long, default_value_t = 16, value_parser = one_or_more())]
    pub(crate) batch: usize,
    /// How often that is measured; the median counts.
    #[arg(long, default_value_t = 3, value_parser = one_or_more())]
    pub(crate) rounds: usize,
}

/// Where memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// Tenants of one pool: whoever needs memory has it, and who is idle sleeps.
    Elastic,
    /// Tenants of one pool, each with an equal share.
    Static,
    /// candle's own memory and cache, counted against the same limit.
    Candle,
}

/// What becomes of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sleep {
    /// Kept in pinned host memory.
    Keep,
    /// Drawn, read or computed anew.
    Discard,
    /// Nobody sleeps.
    Never,
}

/// The type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Type {
    Bf16,
    F16,
    F32,
}

/// What there has to be one of, and of which there are not so many that they could not be counted.
fn one_or_more() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 20)
}

/// Tokens of a short sequence.
const SHORT: usize = 1024;

/// A model of its own for each seed, a thousand apart.
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

    /// The same, and each sequence reads the system prompt.
    pub(crate) fn without_prefix_cache(&self) -> Self {
        Self {
            no_prefix_cache: true,
            ..self.clone()
        }
    }

    /// Whether all that is said can be done, as far as that is known without a GPU.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        self.specs()?;
        let longest = self.config()?.max_position_embeddings;
        ensure!(
            !self.compare || longest >= PROMPT + STEPS,
            "--compare wants sequences of {} tokens, and {longest} are the most that there may be",
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

    /// The models.
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

    /// What all models may have together, in bytes, where memory comes in granules of so many.
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

    /// What is asked. If nobody says how fast, so many tokens a second are a load of one.
    pub(crate) fn requests(
        &self,
        config: &Config,
        full: Option<f64>,
    ) -> anyhow::Result<Vec<Request>> {
        let window = Duration::try_from_secs_f64(self.window)
            .with_context(|| format!("--window {}", self.window))?;
        let all = window.checked_mul(self.windows as u32);
        all.context("so many turns of so many seconds never end")?;
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

/// Whether a decoder can be made so.
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
    // Positions turn pairs of elements.
    ensure!(
        hidden.is_multiple_of(heads) && (hidden / heads).is_multiple_of(2),
        "hidden_size, {hidden}, is no even number for each of num_attention_heads, {heads}"
    );
    Ok(())
}

/// Tokens of answers in a second, on the average of the models' traces.
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
