//! A driver that panics in a call of an allocation, a growth or a fork.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common;
use crate::common::panics::panics_at;
use crate::common::{D0, G, Rig};
use cuvmm::driver::Call;
use cuvmm::driver::host::HostMemory;
use cuvmm::pool::Hardened;
use cuvmm::{Block, Stream, Tenant};

type Made = Vec<Block>;

fn block(tenant: &Tenant, granules: u64) -> Block {
    let builder = tenant.block(granules * G).capacity(16 * G);
    builder.try_allocate().unwrap()
}

/// Lets the driver panic once in each call that `run` makes after `prepare`. In debug builds a call
/// under the lock of a pool ends the process.
fn each_call(prepare: impl Fn(&Tenant) -> Made, run: impl Fn(&Tenant, &mut Made)) {
    for nth in 1..80 {
        let rig = common::host();
        let (_pool, tenant) = common::tenancy(&rig, 64);
        let mut blocks = prepare(&tenant);
        let (outcome, panicked) = panics_at(&rig, nth, |_| true, || run(&tenant, &mut blocks));
        assert_eq!(outcome.is_none(), panicked, "{nth}");
        let new = block(&tenant, 4);
        new.write(0, &[7; 100]).unwrap();
        drop((new, blocks));
        let hazards = rig.machine.take_hazards();
        assert!(hazards.is_empty(), "{nth}: {}", hazards[0]);
        if !panicked {
            return;
        }
    }
    panic!("the operation never ends");
}

#[test]
fn a_panic_in_an_allocation_makes_no_call_under_the_lock() {
    let none = |_: &Tenant| Vec::new();
    each_call(none, |tenant, made| made.push(block(tenant, 6)));
    each_call(none, |tenant, made| {
        let builder = tenant.block(3 * G).capacity(4 * G);
        made.extend(builder.try_allocate_adjacent(3).unwrap());
    });
}

#[test]
fn a_panic_in_a_growth_makes_no_call_under_the_lock() {
    let two = |tenant: &Tenant| vec![block(tenant, 2), block(tenant, 1)];
    each_call(two, |tenant, made| {
        let mut steps: Vec<_> = made.iter_mut().map(|block| (block, 9 * G)).collect();
        tenant.try_grow_all(&mut steps).unwrap();
    });
}

#[test]
fn a_panic_in_a_fork_makes_no_call_under_the_lock() {
    let one = |tenant: &Tenant| vec![block(tenant, 5)];
    each_call(one, |_, made| {
        let fork = made[0].try_fork(4 * G + 7, 6 * G).unwrap();
        made.push(fork);
    });
}

/// Lets the driver panic in all calls of some kinds that this thread makes in `run`.
fn panics_in_all(rig: &Rig<HostMemory>, kinds: &'static [Call], run: impl FnOnce()) {
    let here = std::thread::current().id();
    rig.faults.watch(Some(Arc::new(move |call| {
        let counts = std::thread::current().id() == here && !std::thread::panicking();
        assert!(!(counts && kinds.contains(&call)), "on purpose");
    })));
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    rig.faults.watch(None);
}

// I-110
#[test]
fn memory_whose_release_panicked_is_quarantined_and_the_rest_released() {
    let rig = common::host();
    let (pool, tenant) = common::tenancy(&rig, 16);
    let blocks = [1, 2, 4].map(|granules| block(&tenant, granules));
    drop(blocks);
    panics_in_all(&rig, &[Call::MemRelease], || assert!(pool.trim(0).is_ok()));
    let stats = pool.stats();
    let left = stats.quarantined;
    assert!(
        left > 0 && stats.committed + stats.free + left == 7 * G,
        "{stats:?}"
    );
    pool.trim(0).unwrap();
    let stats = pool.stats();
    assert_eq!(
        (stats.committed, stats.free, stats.quarantined),
        (0, 0, left)
    );
    let rest = 16 * G - left;
    assert_eq!(tenant.try_allocate(rest).unwrap().size(), rest);
}

#[test]
fn a_slot_whose_poll_panicked_is_purged_later() {
    let rig = common::host();
    let pool = common::limited(&rig, 16);
    let (pool, tenant) = common::with_tenant(pool.hardened(Hardened::new()).build().unwrap());
    let home = Stream::new(&rig.device).unwrap();
    let freed = tenant.allocate_on(&home, 2 * G).unwrap();
    rig.held_kernel(&home, &[], &[(freed.address(), G, 1)]);
    drop(freed);
    rig.machine.release_stream(D0, home.as_raw());
    let other = Stream::new(&rig.device).unwrap();
    let allocate = || tenant.allocate_on(&other, G).unwrap();
    let polls = &[Call::EventQuery, Call::StreamQuery];
    panics_in_all(&rig, polls, || drop(allocate()));
    drop(allocate());
    other.synchronize().unwrap();
    pool.trim(0).unwrap();
    assert_eq!(pool.stats().committed, 0);
}
