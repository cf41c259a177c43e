//! Hardened pools: guards, memory that is filled and unmapped when it is freed, and addresses that
//! rest. All guarantees of plain pools hold too.

use std::time::Duration;

use crate::common;
use crate::common::{D0, G, Rig, captures, copy, until};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, DeviceAddress};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, PoolError};
use cuvmm::pool::{Hardened, PoolBuilder};
use cuvmm::{Block, CallError, Heap, Mapper, Pool, PoolStats, Scrub, Stream};

const FILL: u8 = 0xDF;

fn builder(rig: &Rig<impl Backing>, granules: u64) -> PoolBuilder<'_> {
    common::limited(rig, granules).hardened(Hardened::new())
}

fn pool(rig: &Rig<impl Backing>, granules: u64) -> Pool {
    builder(rig, granules).build().unwrap()
}

/// Queues a kernel that writes a byte to the first granule at an address.
fn kernel(rig: &Rig<impl Backing>, stream: &Stream, at: DeviceAddress, byte: u8) {
    rig.kernel(stream, &[], &[(at, G, byte)]);
}

/// Returns the figures, after checking that they add up and match the driver's. Resting addresses
/// belong to no tenant.
fn books(rig: &Rig<impl Backing>, pool: &Pool) -> PoolStats {
    let stats = common::books::books(rig, pool);
    let tenants: u64 = stats.tenants.iter().map(|tenant| tenant.addresses).sum();
    assert_eq!(stats.addresses, tenants + stats.resting_addresses);
    stats
}

fn write(block: &Block, byte: u8) {
    for granule in 0..block.size() / G {
        block.write(granule * G, &[byte; 64]).unwrap();
        block.write(granule * G + G - 64, &[byte; 64]).unwrap();
    }
}

/// Fails unless the block holds the byte everywhere, on drivers that keep bytes.
fn holds(rig: &Rig<impl Backing>, block: &Block, byte: u8) {
    for granule in 0..block.size() / G {
        for offset in [0, G / 2, G - 64] {
            let mut seen = [!byte; 64];
            block.read(granule * G + offset, &mut seen).unwrap();
            if rig.keeps_bytes() {
                assert_eq!(seen, [byte; 64], "granule {granule}");
            }
        }
    }
}

on_both! {
    fn running_over_an_end_meets_a_guard(rig) {
        for (guard, granules) in [(1, 1), (G, 1), (2 * G + 1, 3)] {
            let (pool, tenant) = common::with_tenant(builder(rig, 16).hardened(Hardened::new().guard(guard)).build().unwrap());
            let blocks: Vec<Block> = (0..4).map(|_| tenant.try_allocate(2 * G).unwrap()).collect();
            for block in &blocks {
                let (first, end) = (block.address().0, block.address().0 + 2 * G);
                assert!(copy(rig, first).is_some() && copy(rig, end - 4).is_some());
                for step in 0..granules {
                    assert_eq!(copy(rig, first - 4 - step * G), None);
                    assert_eq!(copy(rig, end + step * G), None);
                }
                assert_eq!(copy(rig, end - 2), None, "half inside the guard");
            }
            assert_eq!(books(rig, &pool).addresses, 4 * (2 + 2 * granules) * G);
        }
        let (plain, tenant) = common::with_tenant(builder(rig, 16).hardened(Hardened::new().guard(0)).build().unwrap());
        let block = tenant.try_allocate(3 * G).unwrap();
        assert_eq!(books(rig, &plain).addresses, 4 * G);
        assert_eq!(
            copy(rig, block.address().0 + 3 * G), None,
            "behind the end, within the block's addresses"
        );
    }

    fn a_kernel_behind_the_end_loses_the_context_and_changes_nothing(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, pool(rig, 8));
        let [one, two, three] = [1, 2, 3].map(|byte| {
            let block = tenant.allocate_on(&stream, G).unwrap();
            write(&block, byte);
            block
        });
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, DeviceAddress(two.address().0 + G), 9);
        rig.machine.release_all_streams(D0);
        assert!(stream.synchronize().is_err());
        assert!(rig.device.lost().is_some());
        for (block, byte) in [(&one, 1), (&two, 2), (&three, 3)] {
            let mut seen = [0; 4];
            rig.machine.peek(D0, block.address(), &mut seen).unwrap();
            assert!(!rig.keeps_bytes() || seen == [byte; 4]);
        }
        drop((one, two, three, tenant, stream));
        pool.close().unwrap();
        assert_eq!((rig.machine.live().mappings, rig.machine.live().reservations), (0, 0));
    }

    fn a_late_user_faults_where_it_would_have_changed_the_next_block(rig) {
        for hardened in [false, true] {
            let mut builder = common::limited(rig, 8);
            if hardened {
                builder = builder.hardened(Hardened::new());
            }
            let (pool, tenant) = common::with_tenant(builder.build().unwrap());
            let stream = Stream::new(&rig.device).unwrap();
            // The library does not know of this stream.
            let forgotten = Stream::new(&rig.device).unwrap();
            let block = tenant.allocate_on(&stream, G).unwrap();
            let late = block.address();
            rig.machine.hold(D0, forgotten.as_raw());
            kernel(rig, &forgotten, late, 9);
            drop(block);
            let next = tenant.allocate_on(&stream, G).unwrap();
            write(&next, 5);
            assert_eq!(next.address() == late, !hardened);
            assert_eq!(copy(rig, late.0).is_some(), !hardened);
            let taken = rig.machine.take_hazards().len();
            assert_eq!(taken, usize::from(hardened), "a plain pool does not unmap the memory");
            rig.machine.release_all_streams(D0);
            assert_eq!(rig.device.lost().is_some() || stream.synchronize().is_err(), hardened);
            let mut seen = [0; 4];
            rig.machine.peek(D0, next.address(), &mut seen).unwrap();
            if rig.keeps_bytes() {
                assert_eq!(seen, if hardened { [5; 4] } else { [9; 4] });
            }
            drop((next, tenant, stream, forgotten));
            pool.close().unwrap();
        }
    }

    fn nothing_is_unmapped_before_its_fence_has_passed(rig) {
        let (pool, tenant) = common::with_tenant(pool(rig, 8));
        let [home, other] = [0; 2].map(|_| Stream::new(&rig.device).unwrap());
        // The free waits for the home stream, a recorded stream, the device, or a lease.
        for case in 0..4 {
            let mut builder = tenant.block(2 * G);
            if case != 2 {
                builder = builder.home_stream(&home);
            }
            let block = builder.try_allocate().unwrap();
            let used = if case == 0 { &home } else { &other };
            if case == 1 {
                block.record_use(&other).unwrap();
            }
            let lease = (case == 3).then(|| block.lease());
            if case != 3 {
                rig.machine.hold(D0, used.as_raw());
            }
            kernel(rig, used, block.address(), 7);
            drop(block);
            pool.trim(u64::MAX).unwrap();
            let stats = books(rig, &pool);
            assert_eq!((stats.pending_free + stats.leased, stats.mappings), (2 * G, 1), "{case}");
            // The next operation, or the end of the lease, completes the free.
            rig.machine.release_all_streams(D0);
            drop(lease);
            drop(tenant.allocate_on(&home, G).unwrap());
            pool.trim(u64::MAX).unwrap();
            let stats = books(rig, &pool);
            assert_eq!((stats.committed, stats.mappings), (0, 0), "{case}");
            assert!(rig.device.lost().is_none());
        }
    }

    fn what_has_passed_is_unmapped_by_the_drop_itself(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, pool(rig, 8));
        for home in [true, false] {
            let mut builder = tenant.block(3 * G);
            if home {
                builder = builder.home_stream(&stream);
            }
            let block = builder.try_allocate().unwrap();
            let address = block.address();
            drop(block);
            let stats = books(rig, &pool);
            assert_eq!((stats.mappings, stats.committed, stats.free), (0, 0, 3 * G));
            assert_eq!(copy(rig, address.0), None);
        }
        assert_eq!(pool.stats().resting_blocks, 2);
        assert_eq!(tenant.stats().addresses, 0, "resting addresses belong to no tenant");
        // The physical memory is kept and reused.
        let before = pool.calls();
        drop(tenant.try_allocate(3 * G).unwrap());
        assert_eq!(pool.calls().since(&before).count(Call::MemCreate), 0);
    }

    fn many_that_wait_are_caught_up_with_and_hold_up_no_other(rig) {
        let (pool, tenant) = common::with_tenant(pool(rig, 64));
        let [busy, idle] = [0; 2].map(|_| Stream::new(&rig.device).unwrap());
        rig.machine.hold(D0, busy.as_raw());
        let blocks: Vec<Block> = (0..40).map(|_| tenant.allocate_on(&busy, G).unwrap()).collect();
        kernel(rig, &busy, blocks[0].address(), 1);
        drop(blocks);
        for _ in 0..20 {
            drop(tenant.allocate_on(&idle, G).unwrap());
        }
        assert_eq!(books(rig, &pool).pending_free, 40 * G, "the other blocks are purged");
        rig.machine.release_all_streams(D0);
        // Each operation purges a few, so a few operations purge all.
        for _ in 0..5 {
            drop(tenant.allocate_on(&idle, G).unwrap());
        }
        assert_eq!(books(rig, &pool).committed, 0);
    }

    fn the_mapper_unmaps_what_nobody_comes_back_for(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let (pool, tenant, stream) = common::with_stream(rig, builder(rig, 8).mapper(&mapper).build().unwrap());
        let mut kept = tenant.block(4 * G).home_stream(&stream).try_allocate().unwrap();
        let block = tenant.allocate_on(&stream, G).unwrap();
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, block.address(), 1);
        drop(block);
        kept.shrink_to(2 * G).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(pool.stats().mappings, 2);
        rig.machine.release_all_streams(D0);
        until(&pool, "unmapped", || rig.machine.live().mappings == 1);
        drop((kept, tenant));
        pool.close().unwrap();
    }

    fn what_waited_for_its_work_goes_with_its_tenant(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, pool(rig, 16));
        let blocks = [(); 12].map(|()| tenant.allocate_on(&stream, G).unwrap());
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, blocks[0].address(), 1);
        // They are queued for purging when the tenant is unregistered, and their work is complete
        // by then.
        drop(blocks);
        assert_eq!(pool.stats().pending_free, 12 * G);
        rig.machine.release_all_streams(D0);
        stream.synchronize().unwrap();
        tenant.unregister();
        let stats = books(rig, &pool);
        assert_eq!((stats.tenants.len(), stats.committed), (0, 0));
    }

    fn addresses_rest_until_so_many_others_are_gone(rig) {
        const BLOCKS: usize = 3;
        let hardened = Hardened::new().rest_blocks(BLOCKS as u64);
        let (pool, tenant, stream) = common::with_stream(rig, builder(rig, 8).hardened(hardened).build().unwrap());
        let mut gone: Vec<u64> = vec![];
        for round in 0..12 {
            let block = tenant.allocate_on(&stream, G).unwrap();
            let address = block.address().0;
            let rest = gone.len().saturating_sub(BLOCKS);
            assert!(!gone[rest..].contains(&address), "round {round}: the address still rests");
            for &at in &gone[rest..] {
                assert_eq!(copy(rig, at), None);
            }
            drop(block);
            gone.push(address);
            let stats = books(rig, &pool);
            let resting = gone.len().min(BLOCKS) as u64;
            assert_eq!((stats.resting_blocks, stats.resting_addresses), (resting, resting * 3 * G));
        }
        drop(tenant);
        let live = rig.machine.live();
        assert_eq!(
            live.reservations, BLOCKS,
            "the tenant is gone, the pool has the resting addresses"
        );
        pool.close().unwrap();
        assert_eq!(rig.machine.live().reservations, 0);
    }

    fn rest_is_bounded_in_bytes_too_and_can_be_none(rig) {
        let by_bytes = Hardened::new().rest_addresses(10 * G);
        let none = Hardened::new().rest_blocks(0);
        for (hardened, most) in [(by_bytes, 10 * G), (none, 0)] {
            let (pool, tenant) = common::with_tenant(builder(rig, 8).hardened(hardened).build().unwrap());
            // 3, 4, 6 and 10 granules of addresses.
            for granules in [1, 2, 4, 8, 1, 1, 2] {
                drop(tenant.try_allocate(granules * G).unwrap());
                let stats = books(rig, &pool);
                assert!(stats.resting_addresses <= most, "{stats:#?}");
                let last = (granules + 2) * G;
                assert!(most == 0 || stats.resting_addresses >= last, "the last block rests");
            }
        }
    }

    // I-8
    fn no_allocation_fails_for_what_rests(rig) {
        // Addresses for two blocks of one granule, or one block of four.
        let (pool, tenant, stream) = common::with_stream(rig, builder(rig, 8).address_limit(6 * G).build().unwrap());
        for granules in [1, 1, 1, 4, 1, 3, 2] {
            let block = tenant.allocate_on(&stream, granules * G).unwrap();
            assert!(books(rig, &pool).addresses <= 6 * G);
            drop(block);
        }
        // Addresses that wait for a kernel are released first, if it has completed by now.
        let block = tenant.allocate_on(&stream, 4 * G).unwrap();
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, block.address(), 1);
        drop(block);
        let refused = tenant.try_allocate(G).unwrap_err();
        let BlockError::OutOfAddresses { wanted, held, limit } = refused else {
            panic!("{refused}");
        };
        assert_eq!((wanted, held, limit), (3 * G, 6 * G, 6 * G));
        rig.machine.release_all_streams(D0);
        drop(tenant.try_allocate(G).unwrap());
    }

    fn addresses_of_many_that_wait_are_had_at_once_when_they_are_short(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, builder(rig, 32).address_limit(36 * G).build().unwrap());
        let blocks: Vec<Block> = (0..12).map(|_| tenant.allocate_on(&stream, G).unwrap()).collect();
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, blocks[0].address(), 1);
        drop(blocks);
        rig.machine.release_all_streams(D0);
        assert_eq!(books(rig, &pool).pending_free, 12 * G);
        drop(tenant.block(G).capacity(32 * G).try_allocate().unwrap());
    }

    fn where_the_driver_has_no_addresses_those_that_rest_go_first(rig) {
        let (pool, tenant) = common::with_tenant(pool(rig, 8));
        for _ in 0..4 {
            drop(tenant.try_allocate(G).unwrap());
        }
        let full = Fault::nth(1, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        rig.faults.arm(full.of(Call::MemAddressReserve));
        let block = tenant.try_allocate(G).unwrap();
        rig.faults.disarm();
        assert_eq!(books(rig, &pool).resting_blocks, 3);
        drop(block);
        rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(Call::MemAddressReserve));
        let refused = tenant.try_allocate(G).unwrap_err();
        rig.faults.disarm();
        assert!(matches!(refused, BlockError::Memory(MemoryError::Range { .. })), "{refused}");
        assert_eq!(books(rig, &pool).resting_blocks, 0);
        drop(tenant.try_allocate(G).unwrap());
    }

    fn what_is_freed_is_filled_and_shows_to_its_own_tenant_only(rig) {
        for scrub in [Scrub::BetweenTenants, Scrub::Never] {
            let pool = builder(rig, 4).scrub(scrub).build().unwrap();
            let [a, b] = common::tenants(&pool);
            let stream = Stream::new(&rig.device).unwrap();
            // Writes to all of the pool's memory, so that the next block gets it.
            let soil = |byte| {
                let block = a.allocate_on(&stream, 4 * G).unwrap();
                write(&block, byte);
            };
            soil(1);
            holds(rig, &a.allocate_on(&stream, 4 * G).unwrap(), FILL);
            soil(2);
            holds(rig, &a.block(4 * G).zeroed(true).try_allocate().unwrap(), 0);
            soil(3);
            let theirs = b.allocate_on(&stream, 4 * G).unwrap();
            holds(rig, &theirs, if scrub == Scrub::Never { FILL } else { 0 });
        }
    }

    fn a_late_reader_meets_the_pattern_before_the_fence_has_passed(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, builder(rig, 4).hardened(Hardened::new().fill(Some(0xAB))).build().unwrap());
        let block = tenant.allocate_on(&stream, G).unwrap();
        let address = block.address();
        kernel(rig, &stream, address, 1);
        rig.machine.hold(D0, stream.as_raw());
        drop(block);
        assert_eq!(copy(rig, address.0).unwrap(), if rig.keeps_bytes() { [1; 4] } else { [0; 4] });
        // Only the fill has run, not the event behind it.
        assert!(rig.machine.step(D0, stream.as_raw()));
        assert_eq!(copy(rig, address.0).unwrap(), if rig.keeps_bytes() { [0xAB; 4] } else { [0; 4] });
        rig.machine.release_all_streams(D0);
        pool.trim(u64::MAX).unwrap();
        assert_eq!(copy(rig, address.0), None);
    }

    fn what_cannot_be_filled_in_order_is_zeroed_for_the_next(rig) {
        let (pool, tenant) = common::with_tenant(pool(rig, 4));
        let [home, other] = [0; 2].map(|_| Stream::new(&rig.device).unwrap());
        for case in 0..4 {
            let mut builder = tenant.block(4 * G);
            if case != 0 {
                builder = builder.home_stream(&home);
            }
            let block = builder.try_allocate().unwrap();
            write(&block, 7);
            rig.faults.forget();
            match case {
                0 => drop(block),
                1 => {
                    block.record_use(&other).unwrap();
                    drop(block);
                }
                2 => {
                    let lease = block.lease();
                    drop(block);
                    drop(lease);
                }
                _ => {
                    rig.faults.arm(Fault::nth(1, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemsetD8Async));
                    drop(block);
                    rig.faults.disarm();
                }
            }
            let filled = rig.faults.count(Call::MemsetD8Async);
            assert_eq!(
                filled, u64::from(case == 3),
                "{case}: no fill overtakes another stream's work"
            );
            pool.trim(u64::MAX).unwrap();
            holds(rig, &tenant.allocate_on(&home, 4 * G).unwrap(), 0);
        }
    }

    fn what_is_grown_over_after_its_fill_counts_as_written(rig) {
        let (pool, tenant) = common::with_tenant(builder(rig, 2).largest_extent(G).build().unwrap());
        let [home, other] = [0; 2].map(|_| Stream::new(&rig.device).unwrap());
        let mut block = tenant.allocate_on(&home, 2 * G).unwrap();
        rig.machine.hold(D0, home.as_raw());
        kernel(rig, &home, block.address(), 1);
        // Given up and filled, and taken back before it could be unmapped.
        block.shrink_to(G).unwrap();
        block.try_grow_to(2 * G).unwrap();
        kernel(rig, &home, DeviceAddress(block.address().0 + G), 7);
        block.record_use(&other).unwrap();
        drop(block);
        rig.machine.release_all_streams(D0);
        pool.trim(u64::MAX).unwrap();
        holds(rig, &tenant.allocate_on(&home, 2 * G).unwrap(), 0);
    }

    fn without_a_fill_all_is_as_in_a_plain_pool(rig) {
        let pool = builder(rig, 2).hardened(Hardened::new().fill(None)).build().unwrap();
        let [a, b] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let block = a.allocate_on(&stream, 2 * G).unwrap();
        kernel(rig, &stream, block.address(), 6);
        kernel(rig, &stream, DeviceAddress(block.address().0 + G), 6);
        rig.faults.forget();
        drop(block);
        let again = a.allocate_on(&stream, 2 * G).unwrap();
        assert_eq!(rig.faults.count(Call::MemsetD8Async), 0);
        holds(rig, &again, 6);
        drop(again);
        holds(rig, &b.allocate_on(&stream, 2 * G).unwrap(), 0);
    }

    fn no_fill_of_ours_slips_into_a_graph_and_no_query_breaks_one(rig) {
        for guarded in [false, true] {
            let (pool, tenant) = common::with_tenant(pool(rig, 8));
            let [stream, other] = [0; 2].map(|_| Stream::new(&rig.device).unwrap());
            let block = tenant.allocate_on(&stream, 2 * G).unwrap();
            write(&block, 7);
            let second = tenant.allocate_on(&other, 2 * G).unwrap();
            let guard = guarded.then(|| pool.capture_guard());
            captures::begin(&rig.machine, &stream);
            rig.faults.forget();
            drop((block, second));
            let fresh = tenant.allocate_on(&other, 4 * G).unwrap();
            let filled = rig.faults.count(Call::MemsetD8Async);
            assert_eq!(filled, u64::from(!guarded), "the stream that does not capture");
            captures::end(&rig.machine, &stream);
            drop(guard);
            drop(fresh);
            pool.trim(u64::MAX).unwrap();
            assert_eq!(books(rig, &pool).committed, 0);
            // Memory that could not be filled is in the free list. During captures it is reused
            // unfilled.
            let _guard = pool.capture_guard();
            for _ in 0..4 {
                drop(tenant.allocate_on(&stream, 2 * G).unwrap());
            }
        }
    }

    fn what_a_block_gives_up_is_unmapped_and_can_be_had_again(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, pool(rig, 8));
        let builder = tenant.block(4 * G).capacity(8 * G).home_stream(&stream);
        let mut block = builder.try_allocate().unwrap();
        block.try_grow_to(7 * G).unwrap();
        let stats = books(rig, &pool);
        assert_eq!((stats.precommitted, stats.committed), (0, 7 * G), "growth is exact");
        let address = block.address().0;
        write(&block, 7);
        block.shrink_to(4 * G).unwrap();
        assert_eq!(copy(rig, address + 4 * G), None);
        assert_eq!(books(rig, &pool).committed, 4 * G);
        block.try_grow_to(6 * G).unwrap();
        assert_eq!(block.address().0, address);
        let mut seen = [0; 4];
        for (granule, byte) in [(3, 7), (4, FILL), (5, FILL)] {
            block.read(granule * G, &mut seen).unwrap();
            if rig.keeps_bytes() {
                assert_eq!(seen, [byte; 4], "granule {granule}");
            }
        }
        // Memory stays mapped while a kernel runs, and growth takes it back.
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, DeviceAddress(address + 5 * G), 1);
        block.shrink_to(5 * G).unwrap();
        assert!(copy(rig, address + 5 * G).is_some());
        block.try_grow_to(6 * G).unwrap();
        kernel(rig, &stream, DeviceAddress(address + 5 * G), 2);
        rig.machine.release_all_streams(D0);
        block.read(5 * G, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(seen, [2; 4], "the fill comes before what is queued after growing");
        }
        // Growth also purges what other blocks gave up.
        let other = tenant.allocate_on(&stream, G).unwrap();
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, other.address(), 1);
        drop(other);
        rig.machine.release_all_streams(D0);
        let before = books(rig, &pool);
        assert_eq!(before.pending_free, G);
        block.try_grow_to(7 * G).unwrap();
        let after = books(rig, &pool);
        assert_eq!(
            (after.pending_free, after.mappings), (0, before.mappings),
            "one dropped, one grown"
        );
        block.shrink_to(6 * G).unwrap();
        drop(block);
        // All of the memory was filled again when it was freed.
        holds(rig, &tenant.allocate_on(&stream, 6 * G).unwrap(), FILL);
    }

    fn what_shares_an_extent_with_bytes_in_use_stays_and_is_counted(rig) {
        for (largest, stranded) in [(8 * G, 3 * G), (G, 0)] {
            let (pool, tenant, stream) = common::with_stream(rig, builder(rig, 8).largest_extent(largest).build().unwrap());
            let mut block = tenant.allocate_on(&stream, 8 * G).unwrap();
            write(&block, 7);
            block.shrink_to(5 * G).unwrap();
            assert_eq!(books(rig, &pool).stranded, stranded);
            let behind = copy(rig, block.address().0 + 5 * G);
            assert_eq!(behind.is_some(), stranded > 0);
            if let Some(behind) = behind.filter(|_| rig.keeps_bytes()) {
                assert_eq!(behind, [FILL; 4]);
            }
            let mut seen = [0; 4];
            block.read(5 * G - 4, &mut seen).unwrap();
            assert!(!rig.keeps_bytes() || seen == [7; 4]);
        }
    }

    fn a_guarantee_is_kept_though_nothing_idle_stays(rig) {
        let pool = pool(rig, 8);
        let a = pool.tenant("a").guarantee(6 * G).register().unwrap();
        let b = pool.tenant("b").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        drop(a.allocate_on(&stream, 6 * G).unwrap());
        assert_eq!((a.stats().committed, pool.stats().free), (0, 6 * G));
        let refused = b.try_allocate(3 * G).unwrap_err();
        let BlockError::OutOfMemory(shortage) = refused else {
            panic!("{refused}");
        };
        assert_eq!((shortage.available, shortage.guaranteed_to_others), (2 * G, 6 * G));
        let theirs = b.try_allocate(2 * G).unwrap();
        drop(a.try_allocate(6 * G).unwrap());
        assert_eq!(pool.trim(0).unwrap(), 6 * G);
        drop(theirs);
    }

    fn memory_behind_a_kernel_is_waited_for(rig) {
        let (_pool, tenant, stream) = common::with_stream(rig, pool(rig, 4));
        let block = tenant.allocate_on(&stream, 4 * G).unwrap();
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, block.address(), 1);
        drop(block);
        // In a plain pool it would be reusable on its own stream.
        let refused = tenant.block(4 * G).home_stream(&stream).try_allocate().unwrap_err();
        let BlockError::OutOfMemory(shortage) = refused else {
            panic!("{refused}");
        };
        assert_eq!(shortage.pending_free, 4 * G);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let wanted = tenant.block(4 * G).home_stream(&stream);
                drop(wanted.timeout(Duration::from_secs(20)).allocate().unwrap());
            });
            std::thread::sleep(Duration::from_millis(2));
            rig.machine.release_all_streams(D0);
            waits.join().unwrap();
        });
        // The same before CUDA 12.5, where the device is synchronized.
        let homeless = tenant.try_allocate(4 * G).unwrap();
        let lacking = Fault::all(CUresult::CUDA_ERROR_NOT_SUPPORTED).of(Call::CtxRecordEvent);
        rig.faults.arm(lacking);
        drop(homeless);
        assert!(tenant.try_allocate(4 * G).is_err());
        drop(tenant.block(4 * G).timeout(Duration::from_secs(20)).allocate().unwrap());
        rig.faults.disarm();
    }

    fn an_unmapping_that_fails_is_tried_again(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, pool(rig, 8));
        let block = tenant.allocate_on(&stream, 3 * G).unwrap();
        rig.faults.arm(Fault::nth(2, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
        drop(block);
        rig.faults.disarm();
        let stats = books(rig, &pool);
        assert_eq!((stats.committed, stats.free, stats.resting_blocks), (2 * G, G, 0));
        drop(tenant.allocate_on(&stream, G).unwrap());
        let stats = books(rig, &pool);
        assert_eq!((stats.committed, stats.free, stats.resting_blocks), (0, 3 * G, 2));
    }

    fn addresses_with_something_stuck_in_them_do_not_rest(rig) {
        let (pool, tenant) = common::with_tenant(pool(rig, 8));
        let builder = tenant.block(G).capacity(2 * G);
        let mut block = builder.try_allocate().unwrap();
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(Fault::all(code).of(Call::MemSetAccess));
        rig.faults.arm(Fault::all(code).of(Call::MemUnmap));
        block.try_grow_to(2 * G).unwrap_err();
        rig.faults.disarm();
        drop(block);
        let stats = pool.stats();
        assert_eq!((stats.quarantined, stats.committed, stats.resting_blocks), (G, 0, 0));
        assert_eq!((stats.addresses, stats.mappings), (4 * G, 1), "still reserved");
        for _ in 0..3 {
            drop(tenant.try_allocate(G).unwrap());
        }
        drop(tenant);
        pool.close().unwrap();
    }

    fn tenants_come_and_go(rig) {
        let pool = pool(rig, 8);
        let stream = Stream::new(&rig.device).unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let [one, two] = [0; 2].map(|_| tenant.allocate_on(&stream, 2 * G).unwrap());
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, one.address(), 1);
        drop(one);
        tenant.unregister();
        let lease = two.lease();
        drop(two);
        let stats = books(rig, &pool);
        assert_eq!((stats.tenants.len(), stats.committed), (1, 4 * G));
        rig.machine.release_all_streams(D0);
        drop(lease);
        let stats = books(rig, &pool);
        assert_eq!((stats.tenants.len(), stats.committed, stats.resting_blocks), (0, 0, 2));
        // An allocation that takes memory from the pending frees of another tenant empties that
        // tenant's slots.
        let [a, b] = common::tenants(&pool);
        rig.machine.hold(D0, stream.as_raw());
        for _ in 0..30 {
            drop(a.block(G).home_stream(&stream).try_allocate());
        }
        rig.machine.release_all_streams(D0);
        drop(b.try_allocate(8 * G).unwrap());
        assert_eq!((a.stats().addresses, b.stats().addresses), (0, 0));
        books(rig, &pool);
    }

    fn compaction_works_as_ever(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, builder(rig, 16).address_limit(64 * G).build().unwrap());
        for _ in 0..32 {
            drop(tenant.try_allocate(G).unwrap());
        }
        let mut block = tenant.block(G).capacity(4 * G).home_stream(&stream).try_allocate().unwrap();
        for granules in 2..=4 {
            block.try_grow_to(granules * G).unwrap();
        }
        write(&block, 7);
        // A freed block whose kernel has completed by now.
        let freed = tenant.block(3 * G).home_stream(&stream).try_allocate().unwrap();
        rig.machine.hold(D0, stream.as_raw());
        kernel(rig, &stream, freed.address(), 1);
        drop(freed);
        rig.machine.release_all_streams(D0);
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.copied, done.no_space), (4 * G, 0), "{done:?}");
        let mut seen = [0; 4];
        block.read(3 * G, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(seen, [7; 4]);
        }
        drop(block);
        holds(rig, &tenant.allocate_on(&stream, 4 * G).unwrap(), FILL);
        books(rig, &pool);
    }

    fn a_lost_context_loses_the_pool_and_not_the_program(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, pool(rig, 8));
        let [one, mut two] = [0; 2].map(|_| tenant.allocate_on(&stream, 2 * G).unwrap());
        drop(tenant.allocate_on(&stream, G).unwrap());
        rig.machine.lose_context(D0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert!(stream.synchronize().is_err());
        drop(one);
        two.shrink_to(G).unwrap();
        let refused = tenant.allocate_on(&stream, G).unwrap_err();
        assert!(matches!(refused, BlockError::Memory(MemoryError::Call(CallError::ContextLost(_)))), "{refused}");
        drop((two, tenant, stream));
        pool.close().unwrap();
        let live = rig.machine.live();
        assert_eq!((live.mappings, live.physical_bytes, live.reservations), (0, 0, 0));
    }

    fn a_guard_leaves_room_for_a_block(rig) {
        let build = |guard, addresses| {
            builder(rig, 8).address_limit(addresses).hardened(Hardened::new().guard(guard)).build()
        };
        for (guard, addresses) in [(G, 3 * G - 1), (u64::MAX, u64::MAX), (2 * G, 4 * G)] {
            let refused = build(guard, addresses).unwrap_err();
            let PoolError::Argument(ArgumentError::TooLarge { what, value, .. }) = refused else {
                panic!("{refused}");
            };
            assert_eq!((what, value), ("bytes of a guard", guard));
        }
        let pool = build(G, 3 * G).unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        drop(tenant.try_allocate(G).unwrap());
        let refused = tenant.block(G).capacity(2 * G).try_allocate().unwrap_err();
        assert!(matches!(refused, BlockError::OutOfAddresses { .. }), "{refused}");
    }
}

#[test]
fn a_hardened_pool_has_no_heaps() {
    let rig = common::model();
    let (_pool, tenant) = common::with_tenant(pool(&rig, 8));
    let refused = Heap::builder(&tenant).build().unwrap_err();
    let hardened = BlockError::Argument(ArgumentError::HardenedPool);
    assert_eq!(refused.to_string(), hardened.to_string());
    assert!(tenant.try_allocate(G).is_ok());
}
