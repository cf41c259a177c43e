//! A heap's allocations that make no driver call.

use criterion::{BatchSize, Criterion};
use cuvmm::Heap;

use super::rig::{GIB, Rig};

const MIB: u64 = 1 << 20;

/// An allocation and its free: of the size that was freed last, and of a size that was not.
pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("heap");
    let Rig { pool, stream } = Rig::new(4 * GIB);
    let tenant = pool.tenant("tenant").register().unwrap();
    let heap = Heap::builder(&tenant).build().unwrap();
    let pair = |size| drop(heap.allocate(size, 512, &stream).unwrap());
    for (name, size) in [
        ("pair-512B", 512),
        ("pair-2MiB", 2 * MIB),
        ("pair-64MiB", 64 * MIB),
        ("pair-1GiB", GIB),
    ] {
        pair(size);
        group.bench_function(name, |bencher| bencher.iter(|| pair(size)));
    }
    for (name, size) in [("other-4KiB", 4096), ("other-2MiB", 2 * MIB)] {
        // Each size is freed after the other.
        let mut sizes = [size, size + 512].into_iter().cycle();
        group.bench_function(name, |bencher| {
            let next = || sizes.next().unwrap();
            bencher.iter_batched(next, pair, BatchSize::SmallInput);
        });
    }
    group.finish();
}
