//! Double failures: a call of an operation fails, and so does its roll-back. Exactly what cannot be
//! undone is quarantined: charged, not reused, and released at the end. What the driver only refused
//! to release is released sooner.
#![allow(clippy::unit_arg)]

use crate::common;
use crate::common::world::{World, books, world};
use crate::common::{G, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::{Limit, Pool, Region, Tenant};

/// Returns faults that fail call k and every call that would undo the calls before it.
fn no_way_back(k: u64) -> [Fault; 2] {
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    [
        Fault::nth(k, code),
        Fault::from(k + 1, code).only(&[Call::MemUnmap, Call::MemRelease, Call::MemAddressFree]),
    ]
}

#[test]
fn what_a_region_cannot_undo_is_quarantined() {
    let mut seen = 0;
    for k in 1..=9 {
        let rig = common::model();
        let mut region = Region::reserve(&rig.device, 16 * G).unwrap();
        region.commit(8 * G..9 * G).unwrap();
        no_way_back(k)
            .into_iter()
            .for_each(|fault| rig.faults.arm(fault));
        region.commit(0..7 * G).unwrap_err();
        rig.faults.disarm();
        // Exactly the additionally mapped memory is quarantined.
        let live = rig.machine.live();
        let mapped: u64 = rig
            .machine
            .snapshot()
            .mappings
            .iter()
            .map(|at| at.size)
            .sum();
        assert_eq!(region.quarantined(), mapped - G, "call {k}");
        assert_eq!(region.committed(), G);
        seen += region.quarantined();
        if region.quarantined() > 0 {
            let refused = region.commit(0..7 * G).unwrap_err();
            assert!(refused.to_string().contains("quarantined"), "{refused}");
        } else {
            region.commit(0..7 * G).unwrap();
        }
        region.commit(9 * G..12 * G).unwrap();
        region.close().unwrap();
        assert_eq!(rig.machine.live().mappings, 0, "call {k}: {live:?}");
    }
    assert!(seen > 0);
}

// I-32
#[test]
fn what_a_pool_cannot_undo_is_quarantined_and_tried_again() {
    for growing in [true, false] {
        let mut seen = 0;
        for k in 1..=10 {
            let rig = common::model();
            let mut world = world(&rig);
            let before = books(&world.pool);
            let live = rig.machine.live();
            no_way_back(k)
                .into_iter()
                .for_each(|fault| rig.faults.arm(fault));
            rig.faults.forget();
            let failed = if growing {
                world.blocks[0].try_grow_to(9 * G).is_err()
            } else {
                world.tenants[1].try_allocate(7 * G).is_err()
            };
            let (injected, calls) = (rig.faults.injected(), rig.faults.calls());
            rig.faults.disarm();
            if injected == 0 {
                assert!(!failed);
                break;
            }
            assert!(failed, "call {k}");
            let after = books(&world.pool);
            let kept = rig.machine.live().physical_bytes - live.physical_bytes;
            assert_eq!(after.quarantined, kept, "call {k} of {calls:?}");
            assert_eq!(after.committed, before.committed);
            assert_eq!((after.in_use, after.idle), (before.in_use, before.idle));
            let mapped = (rig.machine.live().mappings - live.mappings) as u64;
            assert_eq!(after.mappings, before.mappings + mapped, "call {k}");
            seen += kept;
            if growing && mapped > 0 {
                let refused = world.blocks[0].try_grow_to(9 * G).unwrap_err();
                assert!(refused.to_string().contains("quarantined"), "{refused}");
            }
            // The memory is charged to no tenant, and reduces what all tenants can have, until a
            // request lacks it. What is stuck in a mapping stays.
            let left = 16 * G - before.committed - kept;
            drop(world.tenants[1].try_allocate(left).unwrap());
            let mappings = rig.machine.snapshot().mappings.into_iter();
            let used: u64 = mappings.map(|at| at.size).sum();
            let left = 16 * G - (used - left);
            drop(world.tenants[1].try_allocate(left).unwrap());
            assert!(world.tenants[1].try_allocate(left + G).is_err());
            let World {
                mut blocks,
                tenants,
                streams,
                pool,
            } = world;
            blocks.clear();
            drop((tenants, streams));
            pool.close().unwrap();
            let rest = rig.machine.live();
            // A reservation that could not be freed is lost to the process, and counted.
            assert_eq!(
                (rest.mappings, rest.physical_bytes),
                (0, 0),
                "call {k}: {rest:?}"
            );
        }
        assert!(seen > 0);
    }
}

#[test]
fn extents_whose_scrub_fails_and_that_stay_mapped_are_each_quarantined_once() {
    let rig = common::model();
    let world = world(&rig);
    let guest = world.pool.tenant("guest").register().unwrap();
    drop(guest.try_allocate(6 * G).unwrap());
    guest.unregister();
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    rig.faults.arm(Fault::all(code).of(Call::MemsetD8Async));
    rig.faults.arm(Fault::all(code).of(Call::MemUnmap));
    world.tenants[1].try_allocate(6 * G).unwrap_err();
    rig.faults.disarm();
    let after = books(&world.pool);
    assert_eq!((after.quarantined, after.committed), (6 * G, 2 * G));
    assert_eq!(
        after.mappings, 3,
        "the block's mapping, and two that are stuck"
    );
}

/// Returns a pool of 16 granules with 12 quarantined, because the driver released none of them.
fn refused(rig: &Rig<Nothing>) -> (Pool, Tenant) {
    let (pool, tenant) = common::tenancy(rig, 16);
    drop(tenant.try_allocate(12 * G).unwrap());
    let refusal = Fault::all(CUresult::CUDA_ERROR_UNKNOWN);
    rig.faults.arm(refusal.of(Call::MemRelease));
    assert_eq!(pool.trim(0).unwrap(), 0);
    assert_eq!(books(&pool).quarantined, 12 * G);
    (pool, tenant)
}

// I-37
#[test]
fn a_refused_release_is_tried_again_by_what_gives_back_and_by_what_lacks_memory() {
    type Try = fn(&Pool, &Tenant);
    let tries: [(&str, Try); 5] = [
        ("trim", |pool, _| assert_eq!(pool.trim(0).unwrap(), 12 * G)),
        ("a request", |_, tenant| {
            drop(tenant.try_allocate(16 * G).unwrap())
        }),
        ("a limit", |pool, _| {
            let change = pool.set_limit(Limit::Bytes(8 * G)).unwrap();
            assert_eq!((change.taken_back, change.excess), (12 * G, 0));
        }),
        ("a guarantee", |pool, _| {
            drop(pool.tenant("b").guarantee(10 * G).register().unwrap())
        }),
        ("the end", |_, _| ()),
    ];
    for (name, act) in tries {
        let rig = common::clean(common::model());
        let (pool, tenant) = refused(&rig);
        rig.faults.disarm();
        act(&pool, &tenant);
        if name != "the end" {
            assert_eq!(books(&pool).quarantined, 0, "{name}");
        }
        drop(tenant);
        pool.close().unwrap();
    }
}

// I-33
#[test]
fn a_try_ends_with_a_refusal_and_the_next_one_begins_behind_it() {
    let rig = common::model();
    let (pool, _tenant) = refused(&rig);
    rig.faults.forget();
    // Nothing but the retry: the pool holds no more than it is to keep.
    assert_eq!(pool.trim(12 * G).unwrap(), 0);
    assert_eq!(rig.faults.injected(), 1, "the extent of 8 granules");
    rig.faults.disarm();
    let refusal = common::nth_of(2, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemRelease]);
    rig.faults.arm(refusal);
    assert_eq!(pool.trim(12 * G).unwrap(), 4 * G, "the other one");
    assert_eq!(books(&pool).quarantined, 8 * G);
}

#[test]
fn closing_a_pool_says_what_the_driver_does_not_take_back() {
    let rig = common::clean(common::model());
    let (pool, tenant) = refused(&rig);
    drop(tenant);
    let refused = pool.close().unwrap_err();
    assert_eq!(books(&refused.owner).quarantined, 12 * G);
    rig.faults.disarm();
    refused.owner.close().unwrap();
}
