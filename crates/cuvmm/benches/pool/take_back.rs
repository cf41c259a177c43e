//! Reclaim: memory cached by one tenant is given to another.

use criterion::Criterion;
use cuvmm::{Scrub, Tenant};

use super::rig::{GIB, Rig, repeat};

const BLOCKS: u64 = 16;

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("take_back");
    for (name, scrub) in [
        ("16GiB", Scrub::Never),
        ("16GiB_scrub", Scrub::BetweenTenants),
    ] {
        let Rig { pool, stream } = Rig::with(BLOCKS * GIB, scrub);
        let tenants = ["one", "other"].map(|name| pool.tenant(name).register().unwrap());
        let all = |tenant: &Tenant| {
            let block = |_| tenant.allocate_on(&stream, GIB).unwrap();
            (0..BLOCKS).map(block).collect::<Vec<_>>()
        };
        drop(all(&tenants[0]));
        let mut turn = 0;
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|times| {
                repeat(
                    times,
                    || {
                        turn = 1 - turn;
                        all(&tenants[turn])
                    },
                    drop,
                )
            });
        });
    }
    group.finish();
}
