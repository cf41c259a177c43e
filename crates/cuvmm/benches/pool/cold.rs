//! Allocation from an empty pool.

use criterion::Criterion;

use super::rig::{GIB, MIB, Rig, repeat};

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("commit_cold");
    let Rig { pool, stream } = Rig::new(16 * GIB);
    let tenant = pool.tenant("tenant").register().unwrap();
    for (name, size) in [("2MiB", 2 * MIB), ("1GiB", GIB), ("8GiB", 8 * GIB)] {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|times| {
                pool.trim(0).unwrap();
                repeat(
                    times,
                    || tenant.block(size).home_stream(&stream).try_allocate(),
                    |block| {
                        drop(block.unwrap());
                        pool.trim(0).unwrap();
                    },
                )
            });
        });
    }
    group.finish();
}
