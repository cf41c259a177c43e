//! Pools, tenants and blocks: allocation, reclaim, and the errors when memory is short.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{D0, G, GIB, pool};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call, Driver};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, PoolError};
use cuvmm::pool::Scrub;
use cuvmm::{Block, CallError, Event, Limit, Pool, Stream};

fn read(block: &Block, offset: u64) -> [u8; 8] {
    let mut bytes = [0; 8];
    block.read(offset, &mut bytes).unwrap();
    bytes
}

on_both! {
    fn the_books_balance(rig) {
        let (pool, tenant) = common::tenancy(rig, 32);
        let block = tenant.block(5 * G - 7).capacity(9 * G).tag("weights").try_allocate().unwrap();
        let stats = pool.stats();
        assert_eq!((stats.committed, stats.in_use, stats.padding), (5 * G, 5 * G - 7, 7));
        assert_eq!((stats.mappings, stats.addresses), (2, 16 * G));
        assert_eq!(stats.tenants[0].tags["weights"], 5 * G - 7);
        assert_eq!(rig.machine.live().physical_bytes, 5 * G);
        drop(block);
        let stats = tenant.stats();
        assert_eq!((stats.committed, stats.in_use, stats.padding), (5 * G, 0, 0));
        assert_eq!((stats.cached + stats.pending_free, stats.blocks), (5 * G, 0));
        assert_eq!(pool.stats().peak, 5 * G);
    }

    // I-49
    fn a_home_stream_frees_and_allocates_without_a_driver_call(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 32);
        let block = tenant.allocate_on(&stream, 3 * G).unwrap();
        let address = block.address();
        rig.faults.forget();
        drop(block);
        // The stream is busy all the while: its own order suffices.
        rig.held_kernel(&stream, &[], &[(address, G, 1)]);
        for _ in 0..100 {
            let small = tenant.block(G).capacity(4 * G).home_stream(&stream);
            let mut block = small.try_allocate().unwrap();
            assert_eq!(block.address(), address);
            block.try_grow_to(3 * G).unwrap();
            block.shrink_to(2 * G).unwrap();
        }
        assert_eq!(rig.faults.total(), 0);
        rig.machine.release_all_streams(D0);
    }

    fn a_block_grows_and_shrinks_in_place(rig) {
        let (_pool, tenant) = common::tenancy(rig, 32);
        let mut block = tenant.block(10).capacity(20 * G).try_allocate().unwrap();
        let address = block.address();
        block.write(0, b"first by").unwrap();
        block.try_grow_to(7 * G + 3).unwrap();
        assert_eq!((block.address(), block.size()), (address, 7 * G + 3));
        block.write(7 * G - 5, b"last 8 b").unwrap();
        if rig.keeps_bytes() {
            assert_eq!(&read(&block, 0), b"first by");
            assert_eq!(&read(&block, 7 * G - 5), b"last 8 b");
        }
        assert!(matches!(
            block.read(7 * G, &mut [0; 4]),
            Err(MemoryError::Argument(ArgumentError::OutOfRange { .. }))
        ));
        rig.faults.forget();
        block.shrink_to(G).unwrap();
        block.try_grow_to(7 * G).unwrap();
        assert_eq!(rig.faults.total(), 0, "freed memory is reused while cached");
        if rig.keeps_bytes() {
            let mut bytes = [0; 5];
            block.read(7 * G - 5, &mut bytes).unwrap();
            assert_eq!(&bytes, b"last ");
        }
        assert!(matches!(
            block.try_grow_to(21 * G),
            Err(BlockError::Argument(ArgumentError::TooLarge { most, .. })) if most == 20 * G
        ));
        assert!(matches!(block.try_grow_to(G), Err(BlockError::Argument(ArgumentError::TooSmall { .. }))));
        assert!(matches!(block.shrink_to(8 * G), Err(BlockError::Argument(ArgumentError::TooLarge { .. }))));
        assert_eq!(block.size(), 7 * G);
    }

    // I-2
    fn idle_memory_goes_to_whoever_needs_it_but_not_below_a_guarantee(rig) {
        let pool = pool(rig, 16);
        let a = pool.tenant("a").guarantee(4 * G).register().unwrap();
        let b = pool.tenant("b").guarantee(2 * G).register().unwrap();
        // A may take all but the unused part of B's guarantee.
        assert!(matches!(a.try_allocate(15 * G), Err(BlockError::OutOfMemory(_))));
        drop(a.try_allocate(14 * G).unwrap());
        assert_eq!(a.stats().committed, 14 * G);
        // B may take all but A's guarantee, although A uses nothing.
        let shortage = match b.try_allocate(13 * G) {
            Err(BlockError::OutOfMemory(shortage)) => shortage,
            other => panic!("{other:?}"),
        };
        assert_eq!((shortage.wanted, shortage.limit), (13 * G, 16 * G));
        assert_eq!(shortage.holders, [("a".to_owned(), 14 * G)]);
        assert_eq!(a.stats().committed, 14 * G, "a refused request takes no memory");
        let block = b.try_allocate(12 * G).unwrap();
        assert_eq!(b.stats().committed, 12 * G);
        assert!(pool.stats().committed + pool.stats().free <= 16 * G);
        // A has its guarantee whatever B uses.
        let own = a.try_allocate(4 * G).unwrap();
        assert!(a.try_allocate(G).is_err());
        drop((block, own));
    }

    fn a_tenants_own_limit_holds_and_its_own_idle_memory_is_taken_first(rig) {
        let pool = pool(rig, 64);
        let a = pool.tenant("a").limit(8 * G).register().unwrap();
        let b = pool.tenant("b").register().unwrap();
        drop(b.try_allocate(8 * G).unwrap());
        drop(a.try_allocate(3 * G).unwrap());
        let block = a.try_allocate(8 * G).unwrap();
        assert_eq!((a.stats().committed, b.stats().committed), (8 * G, 8 * G));
        match a.try_allocate(G) {
            Err(BlockError::OutOfMemory(shortage)) => {
                assert_eq!((shortage.tenant_held, shortage.tenant_limit), (8 * G, 8 * G));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(a.stats().refusals, 1);
        drop(block);
    }

    // I-4
    fn lower_priorities_give_first_then_what_was_used_longest_ago(rig) {
        let pool = pool(rig, 12);
        let low = pool.tenant("low").priority(-1).register().unwrap();
        let old = pool.tenant("old").register().unwrap();
        let new = pool.tenant("new").register().unwrap();
        drop(old.try_allocate(4 * G).unwrap());
        drop(new.try_allocate(4 * G).unwrap());
        drop(low.try_allocate(4 * G).unwrap());
        let taker = pool.tenant("taker").register().unwrap();
        let held = || [&low, &old, &new].map(|tenant| tenant.stats().committed / G);
        let first = taker.try_allocate(4 * G).unwrap();
        assert_eq!(held(), [0, 4, 4]);
        let second = taker.try_allocate(4 * G).unwrap();
        assert_eq!(held(), [0, 0, 4]);
        drop((first, second));
    }

    // I-28
    fn memory_that_changes_tenant_is_scrubbed(rig) {
        for (scrub, home) in [(true, false), (true, true), (false, false)] {
            let policy = if scrub { Scrub::BetweenTenants } else { Scrub::Never };
            let pool = common::limited(rig, 4).largest_extent(2 * G).scrub(policy).build().unwrap();
            let giver = pool.tenant("giver").register().unwrap();
            let taker = pool.tenant("taker").register().unwrap();
            let stream = Stream::new(&rig.device).unwrap();
            let block = giver.try_allocate(4 * G).unwrap();
            for granule in 0..4 {
                block.write(granule * G + 100, b"a secret").unwrap();
            }
            drop(block);
            let mut builder = taker.block(4 * G);
            if home {
                builder = builder.home_stream(&stream);
            }
            rig.faults.forget();
            let block = builder.try_allocate().unwrap();
            assert_eq!(rig.faults.count(Call::MemCreate), 0, "the same physical memory was reused");
            for granule in 0..4 {
                let seen = read(&block, granule * G + 100);
                if rig.keeps_bytes() {
                    assert_eq!(seen == [0; 8], scrub, "granule {granule}, home stream {home}");
                }
            }
        }
    }

    fn what_a_block_grows_into_is_scrubbed_and_what_it_holds_is_not(rig) {
        let pool = common::limited(rig, 5)
            .largest_extent(G)
            .build()
            .unwrap();
        let giver = pool.tenant("giver").register().unwrap();
        let taker = pool.tenant("taker").register().unwrap();
        let secret = giver.try_allocate(4 * G).unwrap();
        for granule in 0..4 {
            secret.write(granule * G + 100, b"a secret").unwrap();
        }
        let mut block = taker.block(G).capacity(8 * G).try_allocate().unwrap();
        block.write(100, b"my bytes").unwrap();
        drop(secret);
        block.try_grow_to(4 * G).unwrap();
        rig.shows(&read(&block, 100), b"my bytes");
        for granule in 1..4 {
            assert_eq!(read(&block, granule * G + 100), [0; 8], "granule {granule}");
        }
    }

    fn a_zeroed_block_shows_nothing_of_its_own_tenant_either(rig) {
        let (_pool, tenant) = common::tenancy(rig, 16);
        let block = tenant.block(2 * G).capacity(4 * G).try_allocate().unwrap();
        block.write(G, b"old data").unwrap();
        drop(block);
        let reused = tenant.block(2 * G).capacity(4 * G).try_allocate().unwrap();
        rig.shows(&read(&reused, G), b"old data");
        drop(reused);
        let mut zeroed =
            tenant.block(G).capacity(4 * G).zeroed(true).try_allocate().unwrap();
        zeroed.try_grow_to(2 * G).unwrap();
        assert_eq!(read(&zeroed, G), [0; 8]);
        zeroed.write(G, b"new data").unwrap();
        zeroed.shrink_to(G).unwrap();
        zeroed.try_grow_to(2 * G).unwrap();
        assert_eq!(read(&zeroed, G), [0; 8], "new memory of a block reads as zero, reused or not");
    }

    fn what_a_zeroed_block_gave_up_within_a_granule_comes_back_as_zeros(rig) {
        let (_pool, tenant) = common::tenancy(rig, 16);
        let (home, other) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let mut block = tenant.block(100).capacity(4 * G).zeroed(true).home_stream(&home).try_allocate().unwrap();
        block.write(0, &[7; 100]).unwrap();
        block.shrink_to(40).unwrap();
        rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemsetD8Async));
        assert!(matches!(block.try_grow_to(80), Err(BlockError::Memory(MemoryError::Range { .. }))));
        rig.faults.disarm();
        assert_eq!(block.size(), 40);
        block.try_grow_to(80).unwrap();
        let mut seen = [9; 80];
        block.read(0, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert_eq!((seen[39], &seen[40..]), (7, &[0; 40][..]));
        }
        // The zeros are ordered behind late writes of another stream, and reach into the next
        // granule.
        block.record_use(&other).unwrap();
        rig.machine.hold(common::D0, other.as_raw());
        let late = vec![(block.address(), 80, 5)];
        rig.machine.queue_kernel(common::D0, other.as_raw(), vec![], late).unwrap();
        block.shrink_to(10).unwrap();
        block.try_grow_to(G + 10).unwrap();
        rig.machine.release_all_streams(common::D0);
        let mut seen = vec![9; G as usize + 10];
        block.read(0, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert!(seen[..10].iter().all(|&byte| byte == 5));
            assert_eq!(seen[10..].iter().position(|&byte| byte != 0), None);
        }
        // Without a home stream nothing can be ordered: the growth is refused until that work is
        // complete.
        let mut homeless = tenant.block(100).zeroed(true).try_allocate().unwrap();
        rig.machine.hold(common::D0, other.as_raw());
        rig.machine.queue_kernel(common::D0, other.as_raw(), vec![], vec![]).unwrap();
        homeless.shrink_to(10).unwrap();
        assert!(homeless.try_grow_to(100).is_err());
        rig.machine.release_all_streams(common::D0);
        homeless.try_grow_to(100).unwrap();
        drop((block, homeless));
    }

    // I-9
    fn draining_tenants_are_charged_until_their_last_block_and_lease(rig) {
        let pool = pool(rig, 8);
        let tenant = pool.tenant("a").guarantee(6 * G).register().unwrap();
        drop(tenant.try_allocate(3 * G).unwrap());
        let block = tenant.try_allocate(2 * G).unwrap();
        let lease = block.lease();
        let clone = tenant.clone();
        tenant.unregister();
        assert!(matches!(
            clone.try_allocate(G),
            Err(BlockError::Unregistered(tenant)) if tenant == "a"
        ));
        let stats = pool.stats();
        assert!(stats.tenants[0].draining);
        assert_eq!((stats.committed, stats.free), (2 * G, 3 * G), "idle memory was released");
        assert_eq!(stats.tenants[0].guarantee, 0);
        // Memory of live blocks prevents a guarantee, but the name can be reused.
        assert!(matches!(
            pool.tenant("a").guarantee(8 * G).register(),
            Err(PoolError::GuaranteeTooLarge { left, .. }) if left == 6 * G
        ));
        let again = pool.tenant("a").guarantee(6 * G).register().unwrap();
        drop(block);
        let stats = pool.stats();
        assert_eq!((stats.tenants[0].leased, stats.tenants[0].leases), (2 * G, 1));
        drop(lease);
        assert_eq!(pool.stats().tenants.len(), 1, "the draining tenant is gone");
        assert_eq!(pool.stats().committed, 0);
        drop((again, clone));
    }

    fn a_dropped_tenant_is_unregistered_and_its_blocks_live_on(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        let mut block = tenant.block(G).capacity(2 * G).try_allocate().unwrap();
        drop(tenant);
        assert!(pool.stats().tenants[0].draining);
        block.write(0, b"still ok").unwrap();
        assert!(matches!(block.try_grow_to(2 * G), Err(BlockError::Unregistered { .. })));
        drop(pool);
        block.write(0, b"still ok").unwrap();
    }

    fn a_pressure_hook_gives_memory_back(rig) {
        let pool = pool(rig, 8);
        let held: Arc<Mutex<Vec<Block>>> = Arc::default();
        let giver_held = held.clone();
        let asked = Arc::new(Mutex::new(vec![]));
        let seen = asked.clone();
        let giver = pool.tenant("giver").on_pressure(move |pressure| {
            seen.lock().unwrap().push((pressure.wanted_by.clone(), pressure.bytes));
            giver_held.lock().unwrap().clear();
        }).register().unwrap();
        held.lock().unwrap().push(giver.try_allocate(6 * G).unwrap());
        let taker = pool.tenant("taker").register().unwrap();
        assert!(taker.try_allocate(4 * G).is_err(), "try_allocate calls no hook");
        assert!(asked.lock().unwrap().is_empty());
        let block = taker.allocate(4 * G).unwrap();
        assert_eq!(*asked.lock().unwrap(), [("taker".to_owned(), 2 * G)], "the missing bytes");
        drop(block);
    }

    fn an_allocation_waits_until_its_deadline_and_no_longer(rig) {
        let (_pool, tenant) = common::tenancy(rig, 4);
        let block = tenant.try_allocate(4 * G).unwrap();
        let begun = Instant::now();
        let refused = tenant.block(G).timeout(Duration::from_millis(30)).allocate();
        assert!(matches!(refused, Err(BlockError::OutOfMemory(_))));
        assert_eq!(tenant.stats().refusals, 1, "one refusal, however many attempts were made");
        assert!(begun.elapsed() >= Duration::from_millis(30));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                drop(block);
            });
            let got = tenant.block(2 * G).timeout(Duration::MAX).allocate().unwrap();
            assert_eq!(got.size(), 2 * G);
        });
    }

    fn bad_input_is_refused_and_changes_nothing(rig) {
        let device = &rig.device;
        let total = device.total_memory();
        let build = |limit| Pool::builder(device).limit(limit).build();
        assert!(matches!(
            build(Limit::Bytes(G - 1)),
            Err(PoolError::Argument(ArgumentError::TooSmall { .. }))
        ));
        assert!(matches!(
            build(Limit::LeaveFree(total)),
            Err(PoolError::Argument(ArgumentError::TooSmall { .. }))
        ));
        assert!(matches!(
            build(Limit::Bytes(total + 1)),
            Err(PoolError::Argument(ArgumentError::TooLarge { .. }))
        ));
        let few = |what, value, least| ArgumentError::TooSmall { what, value, least };
        let what = "bytes of an extent";
        let odd = ArgumentError::NotPowerOfTwo { what, value: 3 * G };
        let half = ArgumentError::Misaligned { what, value: G / 2, multiple: G };
        let bad = [
            (Pool::builder(device).mapping_limit(0).build(), ArgumentError::Zero("mappings of a pool")),
            (
                Pool::builder(device).address_limit(G - 1).build(),
                few("bytes of a pool's addresses", G - 1, G),
            ),
            (Pool::builder(device).largest_extent(3 * G).build(), odd),
            (Pool::builder(device).largest_extent(G / 2).build(), half),
        ];
        assert!(Pool::builder(device).build().unwrap().stats().limit < total);
        for (refused, expected) in bad {
            assert_eq!(refused.err(), Some(PoolError::Argument(expected)));
        }
        let pool = pool(rig, 8);
        let tenant = pool.tenant("a").guarantee(5 * G).register().unwrap();
        assert!(matches!(pool.tenant("").register(), Err(PoolError::Argument(ArgumentError::Zero { .. }))));
        assert!(matches!(pool.tenant("a").register(), Err(PoolError::NameTaken { .. })));
        assert!(matches!(
            pool.tenant("b").guarantee(4 * G).register(),
            Err(PoolError::GuaranteeTooLarge { left, .. }) if left == 3 * G
        ));
        assert!(matches!(
            pool.tenant("b").guarantee(2 * G).limit(G).register(),
            Err(PoolError::Argument(ArgumentError::TooLarge { .. }))
        ));
        rig.faults.forget();
        let too_many = |error: Option<BlockError>, count: usize| match error {
            Some(BlockError::Argument(ArgumentError::TooLarge { what: "blocks", value, most })) => {
                assert_eq!(value, count as u64);
                most
            }
            other => panic!("{other:?}"),
        };
        for count in [usize::MAX, usize::MAX / 8, 1 << 40] {
            let many = tenant.block(G).try_allocate_many(count);
            assert_eq!(too_many(many.err(), count), total / G);
            let many = tenant.block(1).timeout(Duration::MAX).allocate_many(count);
            assert!(too_many(many.err(), count) < count as u64);
            assert!(tenant.block(G).try_allocate_adjacent(count).is_err());
            assert!(tenant.block(0).try_allocate_many(count).is_err());
        }
        assert!(matches!(tenant.try_allocate(0), Err(BlockError::Argument(ArgumentError::Zero { .. }))));
        assert!(matches!(
            tenant.try_allocate(u64::MAX),
            Err(BlockError::Argument(ArgumentError::Overflow { .. }))
        ));
        assert!(matches!(
            tenant.block(2 * G).capacity(G).try_allocate(),
            Err(BlockError::Argument(ArgumentError::TooLarge { .. }))
        ));
        assert!(matches!(
            tenant.block(G).capacity(1 << 60).try_allocate(),
            Err(BlockError::OutOfAddresses { .. })
        ));
        assert_eq!((rig.faults.total(), pool.stats().addresses), (0, 0));
    }

    fn mappings_and_addresses_have_limits_too(rig) {
        let pool = common::limited(rig, 64).mapping_limit(3).address_limit(40 * G).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let three = tenant.block(7 * G).capacity(8 * G).try_allocate().unwrap();
        match tenant.try_allocate(G) {
            Err(BlockError::OutOfMappings { wanted, held, limit }) => {
                assert_eq!((wanted, held, limit), (1, 3, 3));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(pool.stats().committed, 7 * G);
        drop(three);
        let one = tenant.try_allocate(16 * G).unwrap();
        assert_eq!(pool.stats().mappings, 3, "idle mappings were released");
        assert!(matches!(
            tenant.block(G).capacity(32 * G).try_allocate(),
            Err(BlockError::OutOfAddresses { .. })
        ));
        drop(one);
    }

    fn trim_gives_the_driver_back_what_nobody_uses(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let block = tenant.try_allocate(2 * G).unwrap();
        drop(tenant.try_allocate(8 * G).unwrap());
        assert_eq!(pool.trim(6 * G).unwrap(), 8 * G, "extents are released as a whole");
        let stats = pool.stats();
        assert_eq!((stats.committed, stats.free), (2 * G, 0));
        assert_eq!(rig.machine.live().physical_bytes, 2 * G);
        assert_eq!(pool.trim(0).unwrap(), 0);
        drop(block);
    }

    fn another_library_taking_the_memory_is_an_ordinary_error(rig) {
        let total = rig.device.total_memory();
        let (pool, tenant) = common::with_tenant(Pool::builder(&rig.device).limit(Limit::Bytes(total)).build().unwrap());
        let other = rig.machine.alloc(D0, total - 6 * G).unwrap();
        drop(tenant.try_allocate(4 * G).unwrap());
        // Only 2 granules are free at the driver, but idle memory can be turned into it.
        let block = tenant.try_allocate(6 * G).unwrap();
        drop(block);
        match tenant.try_allocate(7 * G) {
            Err(BlockError::DriverOutOfMemory { cause, .. }) => {
                let code = cause.driver().and_then(|error| error.code());
                assert_eq!(code, Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
            }
            refused => panic!("{refused:?}"),
        }
        assert_eq!(pool.stats().in_use, 0);
        drop(tenant.try_allocate(6 * G).unwrap());
        drop(tenant);
        pool.close().unwrap();
        // SAFETY: allocated above and not used.
        #[allow(unsafe_code)]
        unsafe { rig.machine.free(D0, other).unwrap(); }
    }

    fn leave_free_counts_what_others_take(rig) {
        let total = rig.device.total_memory();
        let (_pool, tenant) = common::with_tenant(Pool::builder(&rig.device).limit(Limit::LeaveFree(8 * G)).build().unwrap());
        let other = rig.machine.alloc(D0, total - 12 * G).unwrap();
        let block = tenant.try_allocate(4 * G).unwrap();
        assert!(matches!(tenant.try_allocate(G), Err(BlockError::DriverOutOfMemory { .. })));
        drop(block);
        // SAFETY: allocated above and not used.
        #[allow(unsafe_code)]
        unsafe { rig.machine.free(D0, other).unwrap(); }
    }

    fn fragmentation_is_nothing_when_empty_and_when_full(rig) {
        let pool = pool(rig, 8);
        assert_eq!(pool.stats().fragmentation(), 0.0);
        let tenant = pool.tenant("a").register().unwrap();
        let mut block = tenant.try_allocate(8 * G).unwrap();
        assert_eq!(pool.stats().fragmentation(), 0.0);
        block.shrink_to(2 * G).unwrap();
        assert_eq!(pool.stats().stranded, 6 * G, "one extent of 8 granules, 2 of them in use");
        assert_eq!(pool.stats().fragmentation(), 0.75);
        drop(block);
        assert_eq!(pool.stats().fragmentation(), 0.0);
    }
}

#[test]
fn two_pools_on_two_drivers_live_side_by_side() {
    let (one, two) = (common::host(), common::model());
    let (here, there) = (pool(&one, 8), pool(&two, 8));
    let a = here.tenant("a").register().unwrap();
    let b = there.tenant("a").register().unwrap();
    let stream = Stream::new(&two.device).unwrap();
    assert!(matches!(
        a.allocate_on(&stream, G),
        Err(BlockError::Argument(ArgumentError::WrongDevice { .. }))
    ));
    let block = b.allocate_on(&stream, 8 * G).unwrap();
    // A handle of one driver never reaches the other.
    let guest = a.try_allocate(G).unwrap();
    assert_eq!(guest.record_use(&stream), Err(CallError::WrongDriver));
    assert_eq!(
        guest.lease().record_use(&stream),
        Err(CallError::WrongDriver)
    );
    let event = Event::new(&one.device).unwrap();
    assert_eq!(event.record(&stream), Err(CallError::WrongDriver));
    assert_eq!(stream.wait(&event), Err(CallError::WrongDriver));
    drop((guest, event));
    drop(a.try_allocate(8 * G).unwrap());
    drop((block, stream));
}

#[test]
fn the_message_of_a_refusal_says_who_holds_the_memory() {
    let rig = common::model();
    let pool = pool(&rig, 512);
    let a = pool.tenant("chat").guarantee(16 * G).register().unwrap();
    let b = pool.tenant("code").register().unwrap();
    let block = a.try_allocate(400 * G).unwrap();
    let refused = b.try_allocate(GIB).unwrap_err();
    let text = refused.to_string();
    for part in [
        "out of memory",
        "\"code\" needs 1 GiB more",
        "224 MiB available",
        "800 MiB held by \"chat\"",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    drop(block);
}
