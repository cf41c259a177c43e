//! Statistics of a pool with many live blocks.

use criterion::Criterion;

use super::rig::{GIB, GRANULE, Rig};

const TENANTS: usize = 100;
const BLOCKS_EACH: usize = 100;

pub(crate) fn bench(criterion: &mut Criterion) {
    let Rig { pool, stream } = Rig::new(32 * GIB);
    let register = |number| pool.tenant(format!("tenant {number}")).register().unwrap();
    let tenants: Vec<_> = (0..TENANTS).map(register).collect();
    let mut blocks = Vec::with_capacity(TENANTS * BLOCKS_EACH);
    for tenant in &tenants {
        for _ in 0..BLOCKS_EACH {
            blocks.push(tenant.allocate_on(&stream, GRANULE).unwrap());
        }
    }
    let mut group = criterion.benchmark_group("stats");
    group.bench_function("10000_blocks", |bencher| bencher.iter(|| pool.stats()));
    group.bench_function("100_blocks_of_one_of_100_tenants", |bencher| {
        bencher.iter(|| tenants[0].stats());
    });
    group.finish();
}
