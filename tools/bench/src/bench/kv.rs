//! Decode steps of a KV cache: one more token for each of many sequences.

use std::time::{Duration, Instant};

use cuvmm::kv::{Layout, SequenceId, Shape};
use cuvmm::{KvCache, Limit, Pool, Stream};

use super::commit::{A_PAGE, GIB, MIB, pages};
use super::mapper::Mapped;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use cuvmm_command::watch::wall;

/// The shape of a model like Llama 3 8B: 128 KiB per token.
pub(super) const SHAPE: Shape = Shape {
    layers: 32,
    kv_heads: 8,
    head_size: 128,
    element_bytes: 2,
    max_tokens: 8192,
    max_sequences: 256,
};

/// Rows of decode steps: name, layout, and bytes that each sequence holds in the end.
pub(super) const STEPS: [(&str, Layout, u64); 2] = [
    ("kv_decode_step_token_major", Layout::TokenMajor, 208 * MIB),
    ("kv_decode_step_layer_major", Layout::LayerMajor, 384 * MIB),
];

pub(super) const CREATE: &str = "kv_create_after_free";

const A_SECOND: u32 = 100;

/// Warm-up steps that are not counted: the mapper has to observe that the sequences grow.
const BEFORE: usize = 32;

/// Returns a prompt length of 400 to 911 tokens that varies by index.
fn prompt(index: u64) -> u64 {
    400 + index.wrapping_mul(0x9E37_79B9_7F4A_7C15) % 512
}

/// Measures a decode step that appends a token to each of 256 sequences, 100 steps per second,
/// until each has entered its second granule of 1,024 tokens. The thread spins between steps, in
/// place of a program's other work.
pub(super) fn step(
    stage: &Stage,
    report: &mut Report,
    (name, layout, each): (&str, Layout, u64),
) -> anyhow::Result<()> {
    let count = stage.times(256, 16) as u64;
    let steps = stage.times(600, 100);
    let size = count * each;
    stage.room(size + GIB)?;
    let mapped = Mapped::start(&stage.device, size)?;
    let tenant = mapped.pool.tenant("tenant").register()?;
    let stream = Stream::new(&stage.device)?;
    let builder = KvCache::builder(&tenant, &stream, SHAPE).layout(layout);
    let mut cache = builder.build()?;
    let sequences = (0..count).map(|index| cache.create(prompt(index)));
    let batch = sequences
        .map(|id| Ok((id?, 1)))
        .collect::<anyhow::Result<Vec<(SequenceId, u64)>>>()?;
    let pause = Duration::from_secs(1) / A_SECOND;
    let mut ours = Samples::with_room(steps);
    let mut calls = 0;
    let mut next = Instant::now();
    for step in 0..BEFORE + steps {
        if step == BEFORE {
            calls = mapped.calls_of_others();
        }
        next += pause;
        while Instant::now() < next {
            std::hint::spin_loop();
        }
        let (took, ()) = wall(|| cache.append(&batch))?;
        if step >= BEFORE {
            ours.add(took);
        }
    }
    let calls = mapped.calls_of_others() - calls;
    let stats = cache.stats();
    drop(cache);
    drop(tenant);
    mapped.stop();
    let row = Row::new(name, &ours, A_PAGE, &pages(stage)?)
        .count("sequences", count as f64)
        .count("driver_calls_on_this_thread", calls as f64)
        .count("held_by_live", stats.held as f64 / stats.live as f64);
    report.add(row.note(stage.watch.note_on_baseline()));
    Ok(())
}

/// Measures creating and freeing a sequence of about 800 tokens after one of 911 was freed.
///
/// # Errors
/// A sequence cannot be created.
pub(super) fn create(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * GIB)?;
    let device = stage.device.with_own_counters();
    let pool = Pool::builder(&device).limit(Limit::Bytes(GIB)).build()?;
    let tenant = pool.tenant("tenant").register()?;
    let stream = Stream::new(&stage.device)?;
    let mut cache = KvCache::builder(&tenant, &stream, SHAPE).build()?;
    let long = cache.create(911)?;
    cache.free(long)?;
    let rounds = stage.times(1000, 20);
    let mut ours = Samples::with_room(rounds);
    let before = pool.calls().total();
    for round in 0..rounds as u64 {
        // The length varies, because a repeated length would come from the stream cache.
        let (took, ()) = wall(|| {
            let id = cache.create(800 + 16 * (round % 4))?;
            cache.free(id)
        })?;
        ours.add(took);
    }
    let calls = pool.calls().total() - before;
    let row = Row::new(CREATE, &ours, A_PAGE, &pages(stage)?).count("driver_calls", calls as f64);
    report.add(row.note(stage.watch.note_on_baseline()));
    Ok(())
}
