//! Statistics and the slowest append of a layer-major cache of 256 sequences with 64 ranges each.

use std::time::{Duration, Instant};

use criterion::Criterion;
use cuvmm::KvCache;
use cuvmm::kv::{Layout, SequenceId, Shape};

use super::rig::{GIB, Rig};

/// The cache's shape. 512 tokens fill a granule.
const SHAPE: Shape = Shape {
    layers: 32,
    kv_heads: 8,
    head_size: 256,
    element_bytes: 2,
    max_tokens: 8192,
    max_sequences: 256,
};

fn cache(rig: &Rig) -> (KvCache, Vec<(SequenceId, u64)>) {
    let tenant = rig.pool.tenant("tenant").register().unwrap();
    let builder = KvCache::builder(&tenant, &rig.stream, SHAPE).layout(Layout::LayerMajor);
    let mut cache = builder.tag("kv").build().unwrap();
    let begin = |_| (cache.create(1).unwrap(), 1);
    let step = (0..SHAPE.max_sequences).map(begin).collect();
    (cache, step)
}

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("kv");
    group.sample_size(10);
    let rig = Rig::new(72 * GIB);
    let (cache_, _step) = cache(&rig);
    group.bench_function("stats", |bencher| bencher.iter(|| cache_.stats()));
    group.bench_function("admission", |bencher| {
        bencher.iter(|| cache_.admission().unwrap());
    });
    drop(cache_);
    group.bench_function("slowest_step_of_a_granule", |bencher| {
        bencher.iter_custom(|times| {
            let mut slowest = Duration::ZERO;
            for _ in 0..times {
                let rig = Rig::new(72 * GIB);
                let (mut cache, step) = cache(&rig);
                let steps = (0..cache.tokens_per_granule()).map(|_| {
                    let begun = Instant::now();
                    cache.append(&step).unwrap();
                    begun.elapsed()
                });
                slowest += steps.max().unwrap_or_default();
            }
            slowest
        });
    });
    group.finish();
}
