//! Comparisons: cuvmm-candle's cache with candle's own, and an elastic pool with equal shares.

use std::time::Instant;

use anyhow::ensure;
use cuvmm::{Limit, Pool};
use cuvmm_candle::{Gpu, Memory};

use super::batch::Next;
use super::cache::{self, Cache, Caches};
use super::cache_memory::Plain;
use super::decoder::{Decoder, bits};
use super::figures::{self, median};
use super::forks;
use super::model::{Model, names};
use super::modes::{self, Split};
use super::options::{Mode, Options, PROMPT, STEPS};
use super::server::{Served, Server, drawn, likeliest};

pub(crate) fn run(gpu: &Gpu, options: &Options) -> anyhow::Result<()> {
    let full = caches(gpu, options)?;
    println!();
    servers(gpu, options, full)
}

/// Compares tokens per second of both caches with the same decoder and batch. Returns the median
/// with cuvmm-candle's cache.
fn caches(gpu: &Gpu, options: &Options) -> anyhow::Result<f64> {
    let specs = options.specs()?;
    let spec = &specs[0];
    let budget = cache::Budget::new(u64::MAX);
    let weights = Plain::new(gpu.candle(), &budget, spec)?;
    let decoder = Decoder::load(&weights.var_builder(), &spec.config, options.batch)?;
    let granule = gpu.device().granularity();
    let most = spec.sequence(PROMPT + STEPS, granule) * options.batch as u64;
    let pool = Pool::builder(gpu.device())
        .limit(Limit::Bytes(most))
        .build()?;
    let memory = Memory::new(gpu, &pool.tenant("caches").register()?);

    let longest = spec.config.max_position_embeddings;
    let ours: &dyn Fn() -> Box<dyn Cache> = &|| cache::elastic(&memory, longest);
    let theirs: &dyn Fn() -> Box<dyn Cache> = &cache::candle;
    let (mut our_rates, mut their_rates) = (Vec::new(), Vec::new());
    // In the first round the libraries load what they need.
    for round in 0..=options.rounds {
        // The first run warms up clocks and caches for the second, so they alternate.
        let (our_run, their_run) = if round % 2 == 0 {
            let our_run = generate(gpu, &decoder, options, ours)?;
            (our_run, generate(gpu, &decoder, options, theirs)?)
        } else {
            let their_run = generate(gpu, &decoder, options, theirs)?;
            (generate(gpu, &decoder, options, ours)?, their_run)
        };
        ensure!(our_run.tokens == their_run.tokens, "tokens differ");
        ensure!(our_run.last == their_run.last, "logits differ");
        if round > 0 {
            our_rates.push(our_run.rate);
            their_rates.push(their_run.rate);
        }
    }
    let (ours, theirs) = (median(our_rates)?, median(their_rates)?);
    println!(
        "{} sequences of {PROMPT} + {STEPS} tokens: {ours:.0} tokens/s with our cache, \
         {theirs:.0} with candle's own, {:.3} times; same tokens and logits",
        options.batch,
        ours / theirs,
    );
    println!("the longest context in a given memory: see the example `compare`");
    if options.system_prompt > 0 {
        forks::run(gpu, options, spec, &decoder)?;
    }
    Ok(ours)
}

struct Run {
    tokens: Vec<Vec<u32>>,
    /// The logits of the last step, bit for bit.
    last: Vec<u32>,
    /// Tokens per second, without the prompts.
    rate: f64,
}

fn generate(
    gpu: &Gpu,
    decoder: &Decoder,
    options: &Options,
    make: &dyn Fn() -> Box<dyn Cache>,
) -> anyhow::Result<Run> {
    let mut random = fastrand::Rng::with_seed(options.seed);
    let words = options.config()?.vocab_size as u32;
    let mut tokens = Vec::new();
    let mut caches: Vec<Caches> = Vec::new();
    for _ in 0..options.batch {
        let mut own: Caches = (0..decoder.layers()).map(|_| make()).collect();
        let mut sequence: Vec<u32> = (0..PROMPT).map(|_| random.u32(..words)).collect();
        sequence.extend(likeliest(&decoder.prompt(&sequence, 0, &mut own)?)?);
        caches.push(own);
        tokens.push(sequence);
    }
    gpu.candle().synchronize()?;
    let begun = Instant::now();
    let mut last = None;
    for step in 0..STEPS {
        let next = tokens.iter().zip(&mut caches);
        let mut next: Vec<Next<'_>> = next
            .map(|(tokens, caches)| Next {
                token: tokens[PROMPT + step],
                position: PROMPT + step,
                caches,
            })
            .collect();
        let logits = decoder.step(&mut next)?;
        for (tokens, token) in tokens.iter_mut().zip(likeliest(&logits)?) {
            tokens.push(token);
        }
        last = Some(logits);
    }
    let rate = (STEPS * options.batch) as f64 / begun.elapsed().as_secs_f64();
    Ok(Run {
        tokens,
        last: last.as_ref().map(bits).transpose()?.unwrap_or_default(),
        rate,
    })
}

/// Runs all modes with the same requests under the same limit.
fn servers(gpu: &Gpu, options: &Options, full: f64) -> anyhow::Result<()> {
    let requests = options.requests(&options.config()?, Some(full))?;
    let mut served = Vec::new();
    let mut modes = vec![
        (Mode::Elastic, "elastic", options.clone()),
        (Mode::Static, "static split", options.clone()),
        (Mode::Candle, "candle's own", options.clone()),
    ];
    if options.system_prompt > 0 && !options.no_prefix_cache {
        let apart = options.without_prefix_cache();
        modes.push((Mode::Elastic, "elastic, nothing shared", apart));
    }
    for (mode, name, options) in modes {
        println!("{name}:");
        let (models, shared) = models(gpu, &options, mode)?;
        let done = Server::serve(&models, shared, drawn(&requests, &models))?;
        done.figures.print_models(&names(&models));
        served.push((name, done));
        drop(models);
        gpu.candle().synchronize()?;
        gpu.sweep();
    }
    let rows: Vec<_> = served
        .iter()
        .map(|(name, done)| (*name, &done.figures))
        .collect();
    println!("{}", figures::table(&rows)?);
    let (_, elastic) = &served[0];
    for (name, other) in &served[1..] {
        ensure!(
            elastic.answers == other.answers,
            "{name} answered something else"
        );
    }
    let p99 = |served: &(&str, Served)| served.1.figures.first_token(99.);
    println!(
        "same answers in all; p99 of the time to the first token, elastic against static split: \
         {:.3} times",
        p99(&served[0])?.as_secs_f64() / p99(&served[1])?.as_secs_f64(),
    );
    Ok(())
}

/// Makes the models of a mode. Also returns `true` if they share their memory.
pub(crate) fn models(
    gpu: &Gpu,
    options: &Options,
    mode: Mode,
) -> anyhow::Result<(Vec<Model>, bool)> {
    let specs = options.specs()?;
    let limit = options.limit(&specs, gpu.device().granularity())?;
    let slots = options.slots;
    let limits = (limit, options.intermediates << 20);
    let elastic = Split::Elastic(options.sleep);
    let models = match mode {
        Mode::Elastic => modes::pooled(gpu, &specs, slots, limits, elastic)?,
        Mode::Static => modes::pooled(gpu, &specs, slots, limits, Split::Shares)?,
        Mode::Candle => modes::plain(gpu.candle(), &specs, slots, limit)?,
    };
    println!(
        "  {} models of {} MiB of weights under {} MiB, {} MiB for a sequence of up to {} tokens",
        models.len(),
        models[0].cache_memory.weights() >> 20,
        limit >> 20,
        models[0].cache_memory.sequence(1) >> 20,
        longest(&models[0]),
    );
    if options.system_prompt > 0 {
        println!(
            "  {} tokens of system prompt, {} MiB",
            options.system_prompt,
            models[0].cache_memory.sequence(options.system_prompt) >> 20,
        );
    }
    Ok((models, mode != Mode::Static))
}

/// Returns the most tokens of a sequence that takes no more memory than one token.
fn longest(model: &Model) -> usize {
    let one = model.cache_memory.sequence(1);
    (1..)
        .take_while(|&tokens| model.cache_memory.sequence(tokens) == one)
        .count()
}
