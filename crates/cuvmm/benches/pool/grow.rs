//! Growth in place, in steps of a granule.

use criterion::{BatchSize, Criterion, Throughput};

use super::rig::{GIB, GRANULE, Rig, repeat};

const MOST: u64 = 8 * GIB;
const STEPS: u64 = MOST / GRANULE;

/// Steps into precommitted memory that are measured together: half of the memory that is
/// precommitted behind a block of 1 GiB.
const WITHIN: u64 = 32;

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("grow");
    let Rig { pool, stream } = Rig::new(2 * MOST);
    let tenant = pool.tenant("tenant").register().unwrap();
    let begin = |size| {
        tenant
            .block(size)
            .capacity(MOST)
            .home_stream(&stream)
            .try_allocate()
    };

    group.throughput(Throughput::Elements(WITHIN));
    group.bench_function("within_margin", |bencher| {
        bencher.iter_batched(
            || {
                let mut block = begin(GIB).unwrap();
                block.try_grow_to(GIB + GRANULE).unwrap();
                block
            },
            |mut block| {
                for _ in 0..WITHIN {
                    block.try_grow_to(block.size() + GRANULE).unwrap();
                }
                block
            },
            BatchSize::PerIteration,
        );
    });
    group.throughput(Throughput::Elements(STEPS));
    for (name, keep) in [("to_8GiB_cold", 0), ("to_8GiB_warm", u64::MAX)] {
        group.sample_size(20).bench_function(name, |bencher| {
            bencher.iter_custom(|times| {
                pool.trim(0).unwrap();
                repeat(
                    times,
                    || {
                        let mut block = begin(GRANULE).unwrap();
                        for step in 2..=STEPS {
                            block.try_grow_to(step * GRANULE).unwrap();
                        }
                        block
                    },
                    |block| {
                        drop(block);
                        pool.trim(keep).unwrap();
                    },
                )
            });
        });
    }
    group.finish();
}
