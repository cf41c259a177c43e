//! Limits, guarantees and priorities that change while the pool runs.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common;
use crate::common::{D0, G, busy, nth_of, pool};
use crate::on_both;
use cuvmm::driver::{CUresult, Call, DriverKind};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, PoolError};
use cuvmm::{Block, Limit, Mapper, Pool, Stream};

fn bytes(granules: u64) -> Limit {
    Limit::Bytes(granules * G)
}

/// The subject of the error for a guarantee above the tenant's own limit.
const GUARANTEE: &str = "bytes of a tenant's guarantee, which is at most its limit";

on_both! {
    // I-6
    fn a_lowered_limit_gives_back_what_is_idle_and_keeps_to_itself_as_memory_comes_free(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let kept = tenant.try_allocate(6 * G).unwrap();
        let freed = tenant.try_allocate(4 * G).unwrap();
        let idle = tenant.try_allocate(5 * G).unwrap();
        drop(idle);
        let change = pool.set_limit(bytes(8)).unwrap();
        assert_eq!((change.limit, change.taken_back, change.excess), (8 * G, 5 * G, 2 * G));
        let stats = pool.stats();
        assert_eq!((stats.limit, stats.committed, stats.free), (8 * G, 10 * G, 0));
        let refused = tenant.try_allocate(G).unwrap_err();
        let BlockError::OutOfMemory(shortage) = refused else {
            panic!("{refused}");
        };
        assert_eq!((shortage.limit, shortage.tenant_limit, shortage.available), (8 * G, 8 * G, 0));
        drop(freed);
        let stats = pool.stats();
        assert_eq!((stats.committed, stats.cached, stats.free), (6 * G, 0, 0));
        assert_eq!(rig.machine.live().physical_bytes, 6 * G);
        let rest = tenant.try_allocate(2 * G).unwrap();
        assert!(tenant.try_allocate(G).is_err());
        // Blocks freed below the limit stay cached.
        drop(rest);
        assert_eq!(pool.stats().committed, 8 * G);
        drop(kept);
        let change = pool.set_limit(bytes(16)).unwrap();
        assert_eq!((change.taken_back, change.excess), (0, 0));
        let all = tenant.try_allocate(16 * G).unwrap();
        drop(all);
    }

    fn what_waits_for_its_work_goes_when_that_has_passed(rig) {
        let (pool, tenant, stream) = common::scene(rig, 8);
        let block = tenant.allocate_on(&stream, 4 * G).unwrap();
        let other = tenant.try_allocate(2 * G).unwrap();
        busy(rig, &stream, &block, 7);
        drop(block);
        let change = pool.set_limit(bytes(3)).unwrap();
        assert_eq!((change.taken_back, change.excess), (0, 3 * G));
        rig.machine.release_stream(D0, stream.as_raw());
        assert_eq!(pool.stats().committed, 6 * G, "no operation has trimmed the pool");
        drop(other);
        let stats = pool.stats();
        assert!(stats.committed + stats.free <= 3 * G, "{stats:#?}");
        assert_eq!(rig.machine.live().physical_bytes, stats.committed + stats.free);
    }

    fn blocks_in_stream_caches_are_given_back_too(rig) {
        let (pool, tenant, stream) = common::scene(rig, 8);
        let before = tenant.allocate_on(&stream, 2 * G).unwrap();
        let after = tenant.allocate_on(&stream, 2 * G).unwrap();
        drop(before);
        let change = pool.set_limit(bytes(1)).unwrap();
        assert_eq!((change.taken_back, change.excess), (2 * G, G));
        drop(after);
        assert_eq!(pool.stats().committed, 0);
        // Below the limit the stream caches are used again.
        pool.set_limit(bytes(8)).unwrap();
        drop(tenant.allocate_on(&stream, 2 * G).unwrap());
        rig.faults.forget();
        drop(tenant.allocate_on(&stream, 2 * G).unwrap());
        assert_eq!(rig.faults.total(), 0);
    }

    fn limits_of_a_pool_that_cannot_be_change_nothing(rig) {
        let pool = pool(rig, 8);
        let a = pool.tenant("a").guarantee(3 * G).register().unwrap();
        let _b = pool.tenant("b").guarantee(2 * G).register().unwrap();
        let total = rig.device.total_memory();
        let what = match rig.device.driver().kind() {
            DriverKind::Host => "bytes of a pool's limit on the host driver, whose memory `HostOptions::capacity` sets",
            _ => "bytes of a pool's limit",
        };
        let small = |value| ArgumentError::TooSmall { what: "bytes of a pool's limit", value, least: G }.into();
        for (limit, error) in [
            (Limit::Bytes(G - 1), small(G - 1)),
            (Limit::Bytes(0), small(0)),
            (Limit::LeaveFree(total), small(0)),
            (Limit::Bytes(total + 1), ArgumentError::TooLarge { what, value: total + 1, most: total }.into()),
            (
                Limit::Bytes(5 * G - 1),
                PoolError::BelowGuarantees { limit: 4 * G, guaranteed: 5 * G },
            ),
        ] {
            assert_eq!(pool.set_limit(limit).unwrap_err(), error);
            assert_eq!(pool.stats().limit, 8 * G);
        }
        assert_eq!(pool.set_limit(Limit::Bytes(5 * G + 1)).unwrap().limit, 5 * G);
        a.set_guarantee(0).unwrap();
        assert_eq!(pool.set_limit(bytes(2)).unwrap().limit, 2 * G);
        let built = Pool::builder(&rig.device).limit(Limit::Bytes(1)).build();
        assert!(matches!(built, Err(PoolError::Argument(ArgumentError::TooSmall { value: 1, .. }))));
    }

    fn a_limit_is_not_set_below_what_the_mapper_keeps_ready(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let builder = Pool::builder(&rig.device).limit(bytes(8)).mapper(&mapper);
        let pool = builder.free_target(4 * G).build().unwrap();
        let refused = pool.set_limit(bytes(3)).unwrap_err();
        let what = "bytes of a limit, of which some are kept ready";
        let figures = ArgumentError::TooSmall { what, value: 3 * G, least: 4 * G };
        assert_eq!(refused, figures.into());
        pool.set_limit(bytes(4)).unwrap();
        pool.close().unwrap();
        mapper.stop();
    }

    fn a_tenants_guarantee_grows_as_far_as_others_leave_it(rig) {
        let pool = pool(rig, 10);
        let a = pool.tenant("a").guarantee(2 * G).limit(7 * G).register().unwrap();
        let b = pool.tenant("b").guarantee(2 * G).register().unwrap();
        let used = b.try_allocate(4 * G).unwrap();
        drop(b.try_allocate(2 * G).unwrap());
        let refused = a.set_guarantee(7 * G).unwrap_err();
        let figures = PoolError::GuaranteeTooLarge {
            guarantee: 7 * G,
            left: 6 * G,
            limit: 10 * G,
            memory_set_by: None,
        };
        assert_eq!(refused, figures);
        let refused = a.set_guarantee(8 * G).unwrap_err();
        let figures = ArgumentError::TooLarge { what: GUARANTEE, value: 8 * G, most: 7 * G };
        assert_eq!(refused, figures.into());
        assert_eq!(a.stats().guarantee, 2 * G);
        a.set_guarantee(6 * G).unwrap();
        // Idle memory of B is reclaimed.
        let mine = a.try_allocate(6 * G).unwrap();
        assert!(b.try_allocate(G).is_err());
        drop(mine);
        // Lowering a guarantee always succeeds, even when raising it would not.
        a.set_guarantee(0).unwrap();
        assert!(b.set_guarantee(10 * G).is_ok());
        drop(used);
    }

    fn a_tenants_limit_is_kept_to_as_its_memory_comes_free(rig) {
        let pool = pool(rig, 16);
        let a = pool.tenant("a").guarantee(2 * G).register().unwrap();
        let b = pool.tenant("b").register().unwrap();
        let used = a.try_allocate(5 * G).unwrap();
        let freed = a.try_allocate(2 * G).unwrap();
        drop(a.try_allocate(3 * G).unwrap());
        let others = b.try_allocate(2 * G).unwrap();
        drop(b.try_allocate(2 * G).unwrap());
        let refused = a.set_limit(G).unwrap_err();
        let what = "bytes of a tenant's limit, which is at least its guarantee";
        let figures = ArgumentError::TooSmall { what, value: G, least: 2 * G };
        assert_eq!(refused, figures.into());
        let change = a.set_limit(4 * G).unwrap();
        assert_eq!((change.limit, change.taken_back, change.excess), (4 * G, 3 * G, 3 * G));
        let stats = pool.stats();
        assert_eq!((stats.tenants[0].limit, stats.tenants[0].committed), (4 * G, 7 * G));
        assert_eq!(stats.tenants[1].pending_free, 2 * G, "B's hook is not called");
        assert_eq!(stats.free, 3 * G, "the pool keeps the memory");
        drop(freed);
        assert_eq!(a.stats().committed, 5 * G);
        assert!(a.try_allocate(G).is_err());
        drop(used);
        assert_eq!(a.stats().committed, 4 * G, "an extent of one granule more was reclaimed");
        let fits = a.try_allocate(4 * G).unwrap();
        assert!(a.try_allocate(G).is_err());
        a.set_limit(u64::MAX).unwrap();
        assert_eq!(a.stats().limit, 16 * G);
        let more = a.try_allocate(10 * G).unwrap();
        drop((fits, more, others));
    }

    fn beyond_its_own_limit_a_tenant_does_not_use_its_idle_memory_again(rig) {
        let builder = Pool::builder(&rig.device).limit(bytes(16)).largest_extent(G);
        let (_pool, a) = common::with_tenant(builder.build().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let block = a.allocate_on(&stream, 6 * G).unwrap();
        busy(rig, &stream, &block, 7);
        drop(block);
        assert_eq!(a.set_limit(2 * G).unwrap().excess, 4 * G, "its work is pending");
        assert!(a.block(6 * G).home_stream(&stream).try_allocate().is_err());
        let small = a.block(2 * G).capacity(6 * G).home_stream(&stream);
        drop(small.try_allocate().unwrap());
        rig.machine.release_stream(D0, stream.as_raw());
        a.set_limit(8 * G).unwrap();
        let mut block = a.block(6 * G).home_stream(&stream).try_allocate().unwrap();
        block.shrink_to(G).unwrap();
        busy(rig, &stream, &block, 7);
        block.shrink_to(G).unwrap();
        a.set_limit(2 * G).unwrap();
        assert!(block.try_grow_to(6 * G).is_err());
        block.try_grow_to(2 * G).unwrap();
        rig.machine.release_stream(D0, stream.as_raw());
        drop(block);
    }

    fn hooks_are_asked_for_what_is_held_beyond_a_limit_too(rig) {
        let pool = pool(rig, 8);
        let blocks = Arc::new(Mutex::new(Vec::<Block>::new()));
        let asked = Arc::new(Mutex::new(vec![]));
        let (gives, hears) = (Arc::clone(&blocks), Arc::clone(&asked));
        let builder = pool.tenant("a").on_shortage(move |pressure| {
            hears.lock().unwrap().push(pressure.bytes / G);
            let mut blocks = gives.lock().unwrap();
            let left = blocks.len() - (pressure.bytes / G) as usize;
            blocks.truncate(left);
        });
        let a = builder.register().unwrap();
        blocks.lock().unwrap().extend((0..6).map(|_| a.try_allocate(G).unwrap()));
        a.set_limit(4 * G).unwrap();
        let block = a.allocate(G).unwrap();
        pool.set_limit(bytes(2)).unwrap();
        let other = a.allocate(G).unwrap();
        assert_eq!(*asked.lock().unwrap(), [3, 3]);
        blocks.lock().unwrap().clear();
        drop((block, other));
    }

    fn a_request_that_is_refused_gives_back_what_has_come_free(rig) {
        let (pool, [a, b], stream) = common::pair(rig, 8);
        let block = a.allocate_on(&stream, 4 * G).unwrap();
        let kept = b.try_allocate(2 * G).unwrap();
        busy(rig, &stream, &block, 7);
        drop(block);
        assert_eq!(pool.set_limit(bytes(2)).unwrap().excess, 4 * G);
        rig.machine.release_stream(D0, stream.as_raw());
        assert!(b.try_allocate(4 * G).is_err());
        assert_eq!(rig.machine.live().physical_bytes, 2 * G);
        drop(kept);
    }

    fn beyond_a_limit_nothing_is_woken_at_once_and_headroom_says_what_there_is(rig) {
        let pool = pool(rig, 12);
        let a = pool.tenant("a").guarantee(4 * G).register().unwrap();
        let b = pool.tenant("b").register().unwrap();
        let used = b.try_allocate(8 * G).unwrap();
        pool.set_limit(bytes(8)).unwrap();
        let headroom = a.headroom().unwrap();
        assert_eq!((headroom.now, headroom.at_worst), (0, 0));
        assert!(a.try_allocate(G).is_err());
        let woken = b.blocks().wake().unwrap();
        assert_eq!(woken.blocks, 0);
        drop(used);
        assert_eq!(a.headroom().unwrap().at_worst, 4 * G);
    }

    fn a_limit_of_its_own_follows_the_pools(rig) {
        let (pool, a) = common::tenancy(rig, 8);
        assert_eq!(a.stats().limit, 8 * G);
        pool.set_limit(bytes(12)).unwrap();
        assert_eq!(a.stats().limit, 12 * G);
        let block = a.try_allocate(12 * G).unwrap();
        drop(block);
    }

    fn who_gives_first_changes_with_the_priority(rig) {
        let pool = pool(rig, 8);
        let low = pool.tenant("low").priority(-1).register().unwrap();
        let high = pool.tenant("high").priority(1).register().unwrap();
        let taker = pool.tenant("taker").register().unwrap();
        drop(low.try_allocate(4 * G).unwrap());
        drop(high.try_allocate(4 * G).unwrap());
        low.set_priority(2).unwrap();
        assert_eq!(low.stats().priority, 2);
        let taken = taker.try_allocate(4 * G).unwrap();
        assert_eq!((low.stats().committed, high.stats().committed), (4 * G, 0));
        drop(taken);
    }

    fn tenants_are_found_by_name(rig) {
        let pool = pool(rig, 8);
        assert!(pool.tenants().is_empty() && pool.find_tenant("a").is_none());
        let [a, b] = common::tenants(&pool);
        let names: Vec<_> = pool.tenants().iter().map(|it| it.name().to_owned()).collect();
        assert_eq!(names, ["a", "b"]);
        let found = pool.find_tenant("b").unwrap();
        let block = found.try_allocate(2 * G).unwrap();
        assert_eq!(b.stats().in_use, 2 * G);
        // The handle is a clone: the tenant lives as long as it.
        drop(b);
        assert!(pool.find_tenant("b").is_some());
        drop(found);
        assert!(pool.find_tenant("b").is_none(), "its block is draining");
        let again = pool.tenant("b").register().unwrap();
        assert_eq!(pool.find_tenant("b").unwrap().stats().in_use, 0);
        a.clone().unregister();
        assert!(pool.find_tenant("a").is_none());
        let gone = PoolError::Unregistered("a".to_owned());
        // A has no memory left, so the pool has forgotten it.
        assert!(matches!(a.set_limit(G), Err(PoolError::Unregistered { .. })));
        assert!(matches!(a.set_guarantee(G), Err(PoolError::Unregistered { .. })));
        assert!(matches!(a.set_priority(1), Err(PoolError::Unregistered { .. })));
        assert_eq!(gone.to_string(), "tenant \"a\" has been unregistered");
        drop((block, again));
    }

    fn one_who_waits_has_what_a_raised_limit_gives(rig) {
        let (pool, tenant) = common::tenancy(rig, 4);
        let kept = tenant.try_allocate(4 * G).unwrap();
        let wait = Duration::from_secs(600);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| tenant.block(2 * G).timeout(wait).allocate());
            // The thread usually waits by then. The outcome is the same otherwise.
            std::thread::sleep(Duration::from_millis(20));
            pool.set_limit(bytes(6)).unwrap();
            waiting.join().unwrap().unwrap();
        });
        drop(kept);
    }

    fn a_driver_that_fails_leaves_the_new_limit_and_the_memory_where_it_is(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        drop(tenant.try_allocate(4 * G).unwrap());
        rig.faults.arm(nth_of(1, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemUnmap]));
        assert!(matches!(pool.set_limit(bytes(2)), Err(PoolError::Memory(MemoryError::Call(_)))));
        let stats = pool.stats();
        assert_eq!(stats.limit, 2 * G);
        assert_eq!(stats.committed + stats.free, rig.machine.live().physical_bytes);
        // The next operation retries it.
        drop(tenant.try_allocate(G).unwrap());
        let stats = pool.stats();
        assert!(stats.committed + stats.free <= 2 * G, "{stats:#?}");
    }

    fn guarantees_that_do_not_fit_are_refused_when_registering(rig) {
        let pool = pool(rig, 4);
        let too_much = pool.tenant("a").guarantee(5 * G).register();
        assert!(matches!(
            too_much,
            Err(PoolError::GuaranteeTooLarge { left, .. }) if left == 4 * G
        ));
        assert!(pool.tenants().is_empty());
    }
}

#[test]
fn the_mapper_keeps_to_a_lowered_limit_where_no_operation_comes_by() {
    let rig = common::host();
    let (mapper, pool, tenant) = common::mapped(&rig, 8);
    let stream = Stream::new(&rig.device).unwrap();
    let block = tenant.allocate_on(&stream, 4 * G).unwrap();
    busy(&rig, &stream, &block, 7);
    drop(block);
    let change = pool.set_limit(bytes(1)).unwrap();
    assert_eq!((change.taken_back, change.excess), (0, 3 * G));
    rig.machine.release_stream(D0, stream.as_raw());
    common::until(&pool, "the limit to be met", || {
        let stats = pool.stats();
        stats.committed + stats.free <= G
    });
    assert!(rig.machine.live().physical_bytes <= G);
    drop((stream, tenant));
    pool.close().unwrap();
    mapper.stop();
}
