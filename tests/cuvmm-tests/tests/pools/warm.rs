//! Memory that is available without a driver call: stream caches, precommitted memory, and the
//! effect of a later guarantee on cached memory.

use crate::common::{self, D0, G, pool};
use crate::on_both;
use cuvmm::driver::Call;
use cuvmm::error::BlockError;
use cuvmm::{Growth, Limit, Pool, Stream};

on_both! {
    // I-3
    fn idle_memory_that_was_promised_to_another_is_not_revived(rig) {
        let pool = pool(rig, 24);
        let stream = Stream::new(&rig.device).unwrap();
        let early = pool.tenant("early").register().unwrap();
        // Cached but not in a stream cache, because another stream used it.
        let block = early.allocate_on(&stream, 20 * G).unwrap();
        let other = Stream::new(&rig.device).unwrap();
        block.record_use(&other).unwrap();
        drop(block);
        let late = pool.tenant("late").guarantee(12 * G).register().unwrap();
        // The tenant is charged 20 granules and has all of them mapped, but may use only 12.
        let refused = early.block(20 * G).home_stream(&stream).try_allocate();
        assert!(matches!(refused, Err(BlockError::OutOfMemory(_))), "{refused:?}");
        let small = early.block(12 * G).capacity(20 * G).home_stream(&stream);
        let mut small = small.try_allocate().unwrap();
        assert!(small.try_grow_to(13 * G).is_err());
        let promised = late.try_allocate(12 * G).unwrap();
        assert!(small.try_grow_to(13 * G).is_err());
        drop((small, promised));
    }

    fn what_lies_on_a_shelf_is_seen_and_can_be_had_by_others(rig) {
        let (_pool, [a, b], stream) = common::pair(rig, 8);
        drop(a.allocate_on(&stream, 8 * G).unwrap());
        let stats = a.stats();
        assert_eq!((stats.in_use, stats.blocks, stats.cached + stats.pending_free), (0, 0, 8 * G));
        // No longer in the stream cache, but still allocated without a driver call.
        rig.faults.forget();
        let again = a.allocate_on(&stream, 8 * G).unwrap();
        assert_eq!(rig.faults.total(), 0);
        drop(again);
        let taken = b.try_allocate(5 * G).unwrap();
        assert_eq!(b.stats().in_use, 5 * G);
        drop(taken);
    }

    fn a_shelf_is_for_one_shape_and_for_nobody_who_may_still_use_it(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 32);
        let first = tenant.block(2 * G).home_stream(&stream).tag("one").try_allocate().unwrap();
        let address = first.address();
        drop(first);
        // The same size with another tag: the statistics must not say "one".
        let second = tenant.block(2 * G).home_stream(&stream).tag("two").try_allocate().unwrap();
        assert_eq!(tenant.stats().tags.keys().collect::<Vec<_>>(), ["two"]);
        let lease = second.lease();
        let leased_at = second.address();
        drop(second);
        let third = tenant.allocate_on(&stream, 2 * G).unwrap();
        assert_ne!(third.address(), leased_at, "leased memory is not reused");
        drop(lease);
        drop(third);
        // The zeros must not be skipped: the previous block's data must not be visible.
        let block = tenant.allocate_on(&stream, 2 * G).unwrap();
        block.write(0, b"secret").unwrap();
        drop(block);
        let zeroed = tenant.block(2 * G).home_stream(&stream).zeroed(true).try_allocate().unwrap();
        let mut bytes = [1; 6];
        zeroed.read(0, &mut bytes).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(bytes, [0; 6]);
        }
        let _ = address;
    }

    fn a_shelf_ends_with_its_tenant(rig) {
        let (pool, tenant, stream) = common::scene(rig, 8);
        let late = tenant.allocate_on(&stream, G).unwrap();
        drop(tenant.allocate_on(&stream, 7 * G).unwrap());
        tenant.unregister();
        assert_eq!(pool.stats().committed, G);
        drop(late);
        assert_eq!((pool.stats().committed, pool.stats().tenants.len()), (0, 0));
        assert_eq!(rig.machine.live().reservations, 0);
    }

    // I-82
    fn growth_goes_in_steps_of_an_eighth(rig) {
        let (pool, tenant, stream) = common::scene(rig, 512);
        let before = pool.calls();
        let mut block = tenant.block(G).capacity(512 * G).home_stream(&stream).try_allocate().unwrap();
        for granules in 2..=512 {
            block.try_grow_to(granules * G).unwrap();
            let stats = tenant.stats();
            assert_eq!(stats.in_use, granules * G);
            assert!(stats.precommitted <= granules * G / 8, "{granules}: {}", stats.precommitted / G);
            assert_eq!(stats.committed, stats.in_use + stats.precommitted);
        }
        // Eight extents per doubling, and one per granule at first.
        let made = pool.calls().since(&before).count(Call::MemCreate);
        assert!(made <= 16 + 8 * 5, "{made} extents");
        assert_eq!(tenant.stats().precommitted, 0, "none is precommitted beyond its capacity");
        drop(block);
        pool.trim(0).unwrap();
        let exact = common::limited(rig, 64).growth(Growth::Exact);
        let (exact, tenant) = common::with_tenant(exact.build().unwrap());
        let mut block = tenant.block(32 * G).capacity(64 * G).try_allocate().unwrap();
        block.try_grow_to(33 * G).unwrap();
        assert_eq!(exact.stats().committed, 33 * G);
    }

    fn margin_is_given_up_before_anybody_is_refused(rig) {
        let (pool, [a, b], stream) = common::pair(rig, 40);
        let mut grown = a.block(32 * G).capacity(64 * G).home_stream(&stream).try_allocate().unwrap();
        grown.try_grow_to(33 * G).unwrap();
        assert_eq!((a.stats().precommitted, pool.stats().committed), (3 * G, 36 * G));
        // Free memory is used first, then precommitted memory in whole extents.
        let first = b.try_allocate(4 * G).unwrap();
        assert_eq!(a.stats().precommitted, 3 * G);
        assert!(matches!(b.try_allocate(G), Err(BlockError::OutOfMemory(_))), "an extent of 4 is in use");
        grown.try_grow_to(36 * G).unwrap();
        assert!(matches!(grown.try_grow_to(37 * G), Err(BlockError::OutOfMemory(_))));
        drop(first);
        grown.try_grow_to(37 * G).unwrap();
        assert_eq!(a.stats().precommitted, 0, "precommitting does not reclaim b's idle memory");
    }

    fn margin_is_given_up_once(rig) {
        let pool = pool(rig, 8);
        let [one, other] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let theirs = [(); 2].map(|()| other.allocate(G).unwrap());
        let block = || one.block(3 * G).capacity(8 * G).home_stream(&stream).allocate().unwrap();
        let (mut first, mut second) = (block(), block());
        let [idle, used] = theirs;
        drop(idle);
        // The first block's memory is being zeroed when the second is refused, and stays.
        let refused = one.try_grow_all(&mut [(&mut first, 4 * G), (&mut second, 4 * G)]);
        assert!(refused.is_err());
        assert_eq!((pool.stats().committed, pool.stats().precommitted), (8 * G, G));
        // The tenant's own limit lacks one granule, the pool's two, and one is available.
        let refused = second.try_grow_to(5 * G);
        let Err(BlockError::OutOfMemory(shortage)) = refused else { panic!("{refused:?}") };
        assert_eq!((shortage.wanted, shortage.available), (2 * G, G));
        assert_eq!(pool.stats().precommitted, G);
        second.try_grow_to(4 * G).unwrap();
        assert_eq!((pool.stats().committed, pool.stats().precommitted), (8 * G, 0));
        drop(used);
    }

    fn margin_never_eats_into_a_guarantee(rig) {
        let (pool, a) = common::tenancy(rig, 40);
        let b = pool.tenant("b").guarantee(6 * G).register().unwrap();
        let mut grown = a.block(32 * G).capacity(64 * G).try_allocate().unwrap();
        grown.try_grow_to(33 * G).unwrap();
        assert_eq!(a.stats().precommitted, 0, "34 granules are left for it, a step needs 4");
        drop(b.try_allocate(6 * G).unwrap());
    }

    fn margin_that_is_being_scrubbed_is_not_unmapped(rig) {
        let pool = pool(rig, 40);
        let [a, b, c] = ["a", "b", "c"].map(|name| pool.tenant(name).register().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let grown = a.block(32 * G).capacity(35 * G).home_stream(&stream);
        let mut grown = grown.try_allocate().unwrap();
        let to_scrub = b.allocate_on(&stream, 3 * G).unwrap();
        to_scrub.write(0, b"b's").unwrap();
        drop(to_scrub);
        b.unregister();
        assert_eq!(pool.stats().free, 3 * G);
        rig.machine.hold(D0, stream.as_raw());
        // Two extents of b, of two granules and of one, both scrubbed behind the held stream.
        grown.try_grow_to(33 * G).unwrap();
        assert_eq!((a.stats().precommitted, pool.stats().free), (2 * G, 0));
        assert!(matches!(c.try_allocate(6 * G), Err(BlockError::OutOfMemory(_))));
        assert_eq!(a.stats().precommitted, 2 * G);
        rig.machine.release_all_streams(D0);
        let taken = c.try_allocate(6 * G).unwrap();
        assert_eq!(a.stats().precommitted, G, "the last extent was released");
        assert!(rig.device.lost().is_none());
        drop(taken);
    }

    fn a_zeroed_block_finds_zeros_in_its_margin(rig) {
        let (_pool, [a, b], stream) = common::pair(rig, 64);
        let to_scrub = b.allocate_on(&stream, 64 * G).unwrap();
        for granule in 0..64 {
            to_scrub.write(granule * G, b"soiled").unwrap();
        }
        drop(to_scrub);
        let block = a.block(8 * G).capacity(32 * G).home_stream(&stream).zeroed(true);
        let mut block = block.try_allocate().unwrap();
        drop(b);
        for granules in 9..=32 {
            block.try_grow_to(granules * G).unwrap();
            let mut bytes = [1; 6];
            block.read((granules - 1) * G, &mut bytes).unwrap();
            if rig.keeps_bytes() {
                assert_eq!(bytes, [0; 6], "granule {granules}");
            }
            block.write((granules - 1) * G, b"mine").unwrap();
        }
        // Given up and grown again: zeroed again.
        block.shrink_to(9 * G).unwrap();
        block.try_grow_to(20 * G).unwrap();
        let mut bytes = [1; 6];
        block.read(15 * G, &mut bytes).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(bytes, [0; 6]);
        }
    }

    fn what_is_given_up_comes_back_in_the_unit_that_was_promised(rig) {
        for unit in [1, 2, 8] {
            let limit = Limit::Bytes(128 * G);
            let pool = Pool::builder(&rig.device).limit(limit).largest_extent(unit * G);
            let (pool, a) = common::with_tenant(pool.build().unwrap());
            let mut block = a.block(60 * G).capacity(128 * G).try_allocate().unwrap();
            block.try_grow_to(100 * G).unwrap();
            for size in [77, 33, 5] {
                block.shrink_to(size * G).unwrap();
                assert!(a.stats().stranded < unit * G, "{size}: {}", a.stats().stranded / G);
                assert!(block.extents().iter().all(|extent| extent.size <= unit * G));
            }
            pool.trim(0).unwrap();
            assert!(pool.stats().committed < (5 + unit) * G);
        }
    }

    // I-83
    fn a_block_that_takes_idle_memory_over_strands_an_eighth_at_most(rig) {
        let (pool, tenant, stream) = common::scene(rig, 256);
        for size in [1, 3, 5, 8, 17, 31, 48, 63, 64] {
            // One extent of 64 granules, then a smaller block of the same class.
            drop(tenant.block(64 * G).home_stream(&stream).try_allocate().unwrap());
            let block = tenant.block(size * G).capacity(64 * G).home_stream(&stream);
            let block = block.try_allocate().unwrap();
            let stats = tenant.stats();
            assert!(stats.stranded <= (size * G / 8).max(G), "{size}: {}", stats.stranded / G);
            drop(block);
            pool.trim(0).unwrap();
        }
    }
}
