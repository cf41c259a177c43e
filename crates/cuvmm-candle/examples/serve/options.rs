//! What the command line says.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use candle_core::DType;
use candle_transformers::models::llama::{Config, LlamaConfig};
use clap::{Parser, ValueEnum};

use super::ground::Spec;
use super::system::SystemPrompt;
use super::trace::{self, Drawn, Request, Row, Turns};
use super::weights::{Source, small};

/// Several models on one GPU under one limit, without a network.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// Where the memory of caches and weights comes from.
    #[arg(long, value_enum, default_value_t = Mode::Elastic)]
    pub(crate) mode: Mode,
    /// Measure both caches, and all modes with the same requests.
    #[arg(long)]
    pub(crate) compare: bool,
    /// Answer this one prompt, a token a byte, with the first model.
    #[arg(long)]
    pub(crate) prompt: Option<String>,
    /// Tokens of the answer to `--prompt`.
    #[arg(long, default_value_t = 64)]
    pub(crate) answer: usize,

    /// How many models share the GPU.
    #[arg(long, default_value_t = 2)]
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
    #[arg(long, default_value_t = 24)]
    pub(crate) slots: usize,

    /// MiB that all models may have together; by default what `--share` makes of it.
    #[arg(long)]
    limit: Option<u64>,
    /// Without `--limit`: how many short sequences a model's equal share has room for beside its weights
    /// and its system prompt.
    #[arg(long, default_value_t = 4)]
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
    #[arg(long, default_value_t = 6)]
    windows: usize,
    /// Requests in a turn, where there is no trace.
    #[arg(long, default_value_t = 12)]
    burst: usize,

    /// Sequences that run together where the two caches are compared.
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,
    /// How often that is measured; the median counts.
    #[arg(long, default_value_t = 3)]
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
        let config: LlamaConfig = serde_json::from_reader(std::io::BufReader::new(file))?;
        Ok(config.into_config(false))
    }

    /// The same, and each sequence reads the system prompt.
    pub(crate) fn without_prefix_cache(&self) -> Self {
        Self {
            no_prefix_cache: true,
            ..self.clone()
        }
    }

    /// The models.
    pub(crate) fn specs(&self) -> anyhow::Result<Vec<Spec>> {
        ensure!(self.models > 0, "there is one model at least");
        let config = self.config()?;
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
        let window = Duration::try_from_secs_f64(self.window)?;
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

/// Tokens of answers in a second, on the average of the models' traces.
fn rate(models: &[Vec<Row>]) -> f64 {
    let of = |rows: &Vec<Row>| {
        let tokens: usize = rows.iter().map(|row| row.generated).sum();
        let span = rows.last().map_or(0., |row| row.at.as_secs_f64());
        tokens as f64 / span.max(1.)
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
mod tests {
    use super::*;

    fn options(line: &[&str]) -> Options {
        Options::parse_from([&["serve"], line].concat())
    }

    #[test]
    fn the_limit_is_shares_of_weights_and_short_sequences() {
        let options = options(&["--share", "3"]);
        let specs = options.specs().unwrap();
        let granule = 2 << 20;
        let weights = specs[0].weights().unwrap().next_multiple_of(granule);
        // 16 granules a sequence: keys and values of 8 layers.
        let expected = 2 * (weights + 3 * 16 * granule);
        assert_eq!(options.limit(&specs, granule).unwrap(), expected);
        // Two granules more, of which the second is not full.
        let system = self::options(&["--share", "3", "--system-prompt", "3072"]);
        let specs = system.specs().unwrap();
        let more = expected + 2 * 2 * 16 * granule;
        assert_eq!(system.limit(&specs, granule).unwrap(), more);
        let fixed = self::options(&["--limit", "300"]);
        assert_eq!(fixed.limit(&specs, granule).unwrap(), 300 << 20);
    }

    #[test]
    fn system_prompts_are_a_models_own_and_leave_room_behind() {
        let line = ["--system-prompt", "8000", "--lengths", "10"];
        let shared = options(&line);
        let specs = shared.specs().unwrap();
        let [one, other] = [&specs[0].system, &specs[1].system];
        assert_eq!((one.tokens.len(), other.tokens.len()), (8000, 8000));
        assert!(one.is_shared() && one.tokens != other.tokens);
        let apart = shared.without_prefix_cache().specs().unwrap();
        assert!(!apart[0].system.is_shared());
        assert_eq!(apart[0].system.tokens, one.tokens);
        assert!(!options(&[]).specs().unwrap()[0].system.is_shared());

        let config = shared.config().unwrap();
        for request in shared.requests(&config, None).unwrap() {
            assert!(request.prompt + request.answer <= 192, "{request:?}");
        }
        let full = options(&["--system-prompt", "8192"]);
        assert!(full.requests(&config, None).is_err());
    }

    #[test]
    fn a_load_is_turned_into_speed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.csv");
        // Ten tokens a second.
        let lines: Vec<String> = (0..=50)
            .map(|second| {
                format!(
                    "2023-11-16 18:15:{second:02}.5,7,{}",
                    if second == 0 { 0 } else { 10 }
                )
            })
            .collect();
        let text = format!(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n{}",
            lines.join("\n")
        );
        std::fs::write(&path, text).unwrap();
        let path = path.display().to_string();
        let line = [
            "--trace",
            &path,
            "--load",
            "0.5",
            "--window",
            "1",
            "--windows",
            "4",
        ];
        let options = options(&line);
        let config = options.config().unwrap();
        // Two models in turn, twice a second each: 40 tokens a second would be all.
        let requests = options.requests(&config, Some(40.)).unwrap();
        let at: Vec<(usize, u128)> = requests
            .iter()
            .map(|request| (request.model, request.arrival.as_millis()))
            .collect();
        let expected = [
            (0, 0),
            (0, 500),
            (1, 1000),
            (1, 1500),
            (0, 2000),
            (0, 2500),
            (1, 3000),
            (1, 3500),
        ];
        assert_eq!(at, expected);
        let slow = options.requests(&config, None).unwrap();
        assert_eq!(slow.len(), 4);
    }
}
