//! The time and memory of a fork of the system prompt's caches, with either cache.

use std::time::Instant;

use anyhow::ensure;
use cuvmm::{Limit, Pool};
use cuvmm_candle::{Gpu, Memory};

use super::batch::Next;
use super::cache::{self, Budget, Cache, Caches};
use super::cache_memory::Spec;
use super::decoder::{Decoder, bits};
use super::figures::median;
use super::options::Options;

/// A kind of cache: a constructor, and the bytes that all its caches hold.
struct Kind<'a> {
    make: &'a dyn Fn() -> Box<dyn Cache>,
    held: &'a dyn Fn() -> u64,
}

struct Forked {
    ms: f64,
    bytes: u64,
    /// The logits of a step of all forks, bit for bit.
    logits: Vec<u32>,
}

/// Forks a model's system prompt once for each sequence of a batch.
pub(super) fn run(
    gpu: &Gpu,
    options: &Options,
    spec: &Spec,
    decoder: &Decoder,
) -> anyhow::Result<()> {
    let granule = gpu.device().granularity();
    let sequence = spec.sequence(spec.system.tokens.len() + 1, granule);
    let most = sequence * (decoder.slots() as u64 + 1);
    let pool = Pool::builder(gpu.device())
        .limit(Limit::Bytes(most))
        .build()?;
    let memory = Memory::new(gpu, &pool.tenant("forks").register()?);
    let longest = spec.config.max_position_embeddings;
    let ours = Kind {
        make: &|| cache::forking(&memory, longest),
        held: &|| {
            let stats = memory.tenant().stats();
            stats.in_use + stats.padding + stats.shared
        },
    };
    let budget = Budget::new(u64::MAX);
    let theirs = Kind {
        make: &|| cache::counted(&budget, spec.token()),
        held: &|| budget.held(),
    };
    let (mut our_ms, mut their_ms, mut bytes) = (Vec::new(), Vec::new(), (0, 0));
    // In the first round the libraries load what they need.
    for round in 0..=options.rounds {
        let ours = forked(gpu, decoder, spec, &ours)?;
        let theirs = forked(gpu, decoder, spec, &theirs)?;
        ensure!(ours.logits == theirs.logits, "logits of forks differ");
        bytes = (ours.bytes, theirs.bytes);
        if round > 0 {
            our_ms.push(ours.ms);
            their_ms.push(theirs.ms);
        }
    }
    println!(
        "a fork of {} tokens: {:.2} ms and {} MiB with our cache, {:.2} ms and {} MiB where it is a copy; \
         same logits behind it",
        options.system_prompt,
        median(our_ms)?,
        bytes.0 >> 20,
        median(their_ms)?,
        bytes.1 >> 20,
    );
    Ok(())
}

fn forked(gpu: &Gpu, decoder: &Decoder, spec: &Spec, kind: &Kind<'_>) -> anyhow::Result<Forked> {
    let system = &spec.system.tokens;
    let mut prefix: Caches = (0..decoder.layers()).map(|_| (kind.make)()).collect();
    decoder.prompt(system, 0, &mut prefix)?;
    gpu.candle().synchronize()?;
    let count = decoder.slots();
    let (held, begun) = ((kind.held)(), Instant::now());
    let mut forks: Vec<Caches> = Vec::with_capacity(count);
    for _ in 0..count {
        let fork = prefix.iter_mut().map(|cache| cache.fork(system.len()));
        forks.push(fork.collect::<candle_core::Result<_>>()?);
    }
    gpu.candle().synchronize()?;
    let ms = begun.elapsed().as_secs_f64() * 1e3 / count as f64;
    let bytes = (kind.held)().saturating_sub(held) / count as u64;
    let mut next: Vec<Next<'_>> = forks
        .iter_mut()
        .enumerate()
        .map(|(token, caches)| Next {
            token: token as u32,
            position: system.len(),
            caches,
        })
        .collect();
    let logits = bits(&decoder.step(&mut next)?)?;
    Ok(Forked { ms, bytes, logits })
}
