//! Allocation and free of blocks that were just freed on the same stream.

use criterion::{Criterion, Throughput};

use super::rig::{GIB, GRANULE, MIB, Rig};

/// Blocks that are alive at once in a batch.
const BATCH: u64 = 64;

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("warm");
    for (name, size) in [("2MiB", 2 * MIB), ("32MiB", 32 * MIB), ("1GiB", GIB)] {
        let Rig { pool, stream } = Rig::new(4 * GIB);
        let tenant = pool.tenant("tenant").register().unwrap();
        group.bench_function(format!("one_shape_{name}"), |bencher| {
            bencher.iter(|| tenant.block(size).home_stream(&stream).try_allocate());
        });
    }
    // The preceding block has another size, so that the stream cache does not hold this one.
    group.bench_function("other_sizes_of_a_class", |bencher| {
        let Rig { pool, stream } = Rig::new(4 * GIB);
        let tenant = pool.tenant("tenant").register().unwrap();
        let mut turn = 0;
        bencher.iter(|| {
            turn = (turn + 1) % (GRANULE / 2);
            tenant
                .block(GRANULE - turn)
                .home_stream(&stream)
                .try_allocate()
        });
    });
    group.throughput(Throughput::Elements(BATCH));
    group.bench_function("one_shape_64_live", |bencher| {
        let Rig { pool, stream } = Rig::new(4 * GIB);
        let tenant = pool.tenant("tenant").register().unwrap();
        let mut blocks = Vec::with_capacity(BATCH as usize);
        bencher.iter(|| {
            for _ in 0..BATCH {
                blocks.push(tenant.allocate_on(&stream, GRANULE).unwrap());
            }
            blocks.clear();
        });
    });
    group.finish();
}
