//! This crate's KV cache against candle-nn's own: tokens per second with identical outputs, and the
//! longest context that fits in a given amount of memory.
//!
//! Each step appends a token to every layer's cache and computes attention over it. There is no
//! other work, so that only the caches differ. Needs a GPU.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use candle_core::{DType, Device, Result, Tensor};
use clap::Parser;
use cuvmm::{Limit, Pool};
use cuvmm_candle::{Gpu, KvCache, Memory, Order, shortage};

/// Measures tokens per second, and the longest context in a given amount of memory.
#[derive(Debug, Parser)]
struct Options {
    /// Layers of the model.
    #[arg(long, default_value_t = 16)]
    layers: usize,
    /// Sequences in a batch.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Heads of keys and values.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Elements of a head.
    #[arg(long, default_value_t = 128)]
    size: usize,
    /// Tokens of the prompt, appended at once.
    #[arg(long, default_value_t = 2048)]
    prompt: usize,
    /// Tokens that are appended one by one after the prompt.
    #[arg(long, default_value_t = 512)]
    steps: usize,
    /// Initial capacity of candle's own cache, and the tokens it grows by.
    #[arg(long, default_value_t = 2048)]
    grow: usize,
    /// The most tokens of this crate's cache.
    #[arg(long, default_value_t = 1 << 18)]
    most: usize,
    /// Use the order `Tokens` in this crate's cache for the longest context.
    #[arg(long)]
    tokens: bool,
    /// The number of rounds; the median is reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// MiB of memory that the caches have for the longest context.
    #[arg(long, default_value_t = 2048)]
    memory: u64,
}

/// Either of the two caches.
trait Cache {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)>;
}

impl Cache for KvCache {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        Self::append(self, k, v)
    }
}

impl Cache for candle_nn::kv_cache::KvCache {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        Self::append(self, k, v)
    }
}

type Make<'a> = &'a dyn Fn() -> Box<dyn Cache>;

impl Options {
    fn random(&self, count: usize, device: &Device) -> Result<Tensor> {
        let shape = (self.batch, self.heads, count, self.size);
        Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(DType::BF16)
    }

    fn attention(&self, query: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Tensor> {
        let scores = (query.matmul(&keys.t()?)? / (self.size as f64).sqrt())?;
        candle_nn::ops::softmax_last_dim(&scores)?.matmul(values)
    }

    /// Returns the seconds for the single tokens, and the last layer's output of each step.
    fn decode(
        &self,
        device: &Device,
        inputs: &Inputs,
        make: Make<'_>,
    ) -> Result<(f64, Vec<Tensor>)> {
        let mut caches: Vec<Box<dyn Cache>> = (0..self.layers).map(|_| make()).collect();
        for cache in &mut caches {
            cache.append(&inputs.prompt, &inputs.prompt)?;
        }
        device.synchronize()?;
        let mut outputs = Vec::with_capacity(self.steps);
        let begun = Instant::now();
        for step in 0..self.steps {
            let mut hidden = inputs.token(step).clone();
            for cache in &mut caches {
                let (keys, values) = cache.append(&hidden, inputs.token(step + 1))?;
                hidden = self.attention(&hidden, &keys, &values)?;
            }
            outputs.push(hidden);
        }
        device.synchronize()?;
        Ok((begun.elapsed().as_secs_f64(), outputs))
    }

    /// Returns the number of tokens that fit in the available memory, and the error that ended it.
    fn longest(&self, device: &Device, make: Make<'_>) -> Result<(usize, candle_core::Error)> {
        let piece = self.random(256, device)?;
        let mut caches: Vec<Box<dyn Cache>> = (0..self.layers).map(|_| make()).collect();
        let mut tokens = 0;
        loop {
            for cache in &mut caches {
                if let Err(error) = cache.append(&piece, &piece) {
                    return Ok((tokens, error));
                }
            }
            tokens += 256;
            // Makes memory that candle has freed available again.
            device.synchronize()?;
        }
    }
}

/// The inputs, made before the measurement.
struct Inputs {
    prompt: Tensor,
    tokens: Vec<Tensor>,
}

impl Inputs {
    fn token(&self, step: usize) -> &Tensor {
        &self.tokens[step % self.tokens.len()]
    }
}

fn same(ours: &[Tensor], theirs: &[Tensor]) -> anyhow::Result<()> {
    let bits = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    for (step, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let same = bits(ours)?
            .iter()
            .map(|x| x.to_bits())
            .eq(bits(theirs)?.iter().map(|x| x.to_bits()));
        ensure!(same, "outputs differ at step {step}");
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Returns the message of an error, without a backtrace.
fn first_line(error: &candle_core::Error) -> String {
    error
        .to_string()
        .lines()
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let gpu = Gpu::open(0)?;
    let device = gpu.candle();
    println!("{options:?}");

    let inputs = Inputs {
        prompt: options.random(options.prompt, device)?,
        tokens: (0..16)
            .map(|_| options.random(1, device))
            .collect::<Result<_>>()?,
    };
    speed(&options, &gpu, &inputs)?;
    drop(inputs);
    context(&options, &gpu)
}

fn speed(options: &Options, gpu: &Gpu, inputs: &Inputs) -> anyhow::Result<()> {
    let pool = Pool::builder(gpu.device())
        .limit(Limit::LeaveFree(4 << 30))
        .build()?;
    let memory = Memory::new(gpu, &pool.tenant("model").register()?);
    let ours: Make<'_> = &|| Box::new(KvCache::new(&memory, 2, options.most));
    let theirs: Make<'_> = &|| Box::new(candle_nn::kv_cache::KvCache::new(2, options.grow));
    let (mut our_times, mut their_times) = (Vec::new(), Vec::new());
    // The first round lets the libraries load what they need.
    for round in 0..=options.rounds {
        let (our_time, our_outputs) = options.decode(gpu.candle(), inputs, ours)?;
        let (their_time, their_outputs) = options.decode(gpu.candle(), inputs, theirs)?;
        same(&our_outputs, &their_outputs)?;
        if round > 0 {
            our_times.push(our_time);
            their_times.push(their_time);
        }
    }
    let tokens = (options.steps * options.batch) as f64;
    let (our_time, their_time) = (median(our_times), median(their_times));
    println!(
        "tokens per second: {:.0} with this cache, {:.0} with candle's own: {:.3} times, same outputs",
        tokens / our_time,
        tokens / their_time,
        their_time / our_time
    );
    Ok(())
}

fn context(options: &Options, gpu: &Gpu) -> anyhow::Result<()> {
    let device = gpu.candle();
    device.synchronize()?;
    // A ballast takes all memory except that for the caches.
    let free = gpu.device().memory_info()?.free;
    let memory = options.memory << 20;
    let ballast = free
        .checked_sub(memory)
        .context("there is less memory than that")?;
    let ballast = Tensor::zeros(ballast as usize, DType::U8, device)?;
    device.synchronize()?;
    println!("{} MiB are free", gpu.device().memory_info()?.free >> 20);

    let theirs: Make<'_> = &|| Box::new(candle_nn::kv_cache::KvCache::new(2, options.grow));
    let (their_tokens, error) = options.longest(device, theirs)?;
    println!(
        "candle's own cache: {their_tokens} tokens, then {}",
        first_line(&error)
    );
    device.synchronize()?;

    // Leaves free the memory that candle needs in addition.
    let pool = Pool::builder(gpu.device())
        .limit(Limit::LeaveFree(32 << 20))
        .build()?;
    let memory = Memory::new(gpu, &pool.tenant("model").register()?);
    let order = if options.tokens {
        Order::Tokens
    } else {
        Order::Heads
    };
    let ours: Make<'_> = &|| Box::new(KvCache::new(&memory, 2, options.most).with_order(order));
    let (our_tokens, error) = options.longest(device, ours)?;
    ensure!(shortage(&error).is_some(), "{error}");
    println!(
        "this cache: {our_tokens} tokens, then {}",
        first_line(&error)
    );
    println!(
        "{:.2} times the context",
        our_tokens as f64 / their_tokens as f64
    );
    drop(ballast);
    Ok(())
}
