//! Adjacent blocks: the rows of one tensor, each of which grows in place.
#![allow(clippy::unit_arg)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common;
use crate::common::books::books;
use crate::common::sweep::{sweep, sweep_partly, text};
use crate::common::{D0, G, Rig, busy, copy, nth_of, pool, shareable};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Backing, Nothing};
use cuvmm::driver::{CUresult, Call, DeviceAddress, HandleTypes};
use cuvmm::error::{ArgumentError, BlockError, MemoryError};
use cuvmm::pool::BlockBuilder;
use cuvmm::{Block, Contents, Growth, Hardened, HostStore, Pool, Stream, Tenant};

/// Returns the distance from each block to the next, which must be the same for all.
fn stride(blocks: &[Block]) -> u64 {
    let distances: Vec<u64> = blocks
        .windows(2)
        .map(|two| two[1].address().0 - two[0].address().0)
        .collect();
    assert!(distances.iter().all(|distance| *distance == distances[0]));
    distances[0]
}

fn addresses(blocks: &[Block]) -> Vec<DeviceAddress> {
    blocks.iter().map(Block::address).collect()
}

/// Returns a byte that identifies a granule of a block.
fn byte(row: usize, granule: u64) -> u8 {
    1 + row as u8 * 32 + granule as u8
}

fn write(row: usize, block: &Block) {
    for granule in 0..block.size() / G {
        for offset in [0, G - 64] {
            let at = granule * G + offset;
            block.write(at, &[byte(row, granule); 64]).unwrap();
        }
    }
}

fn holds(rig: &Rig<impl Backing>, row: usize, block: &Block) {
    for granule in 0..block.size() / G {
        for offset in [0, G - 64] {
            let mut seen = [0; 64];
            block.read(granule * G + offset, &mut seen).unwrap();
            if rig.keeps_bytes() {
                assert_eq!(
                    seen,
                    [byte(row, granule); 64],
                    "row {row}, granule {granule}"
                );
            }
        }
    }
}

fn grow(tenant: &Tenant, blocks: &mut [Block], granules: u64) {
    let mut pairs: Vec<_> = blocks
        .iter_mut()
        .map(|block| (block, granules * G))
        .collect();
    tenant.try_grow_all(&mut pairs).unwrap();
}

on_both! {
    fn more_rows_than_the_limit_allows_take_neither_addresses_nor_slots(rig) {
        let pool = pool(rig, 64);
        let capped = pool.tenant("capped").limit(8 * G).register().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let other = tenant.allocate(40 * G).unwrap();
        rig.faults.forget();
        let refused = |tenant: &Tenant, count: usize| {
            let of = || tenant.block(G).capacity(2 * G);
            let adjacent = of().try_allocate_adjacent(count).unwrap_err();
            assert!(matches!(adjacent, BlockError::OutOfMemory(_)), "{adjacent}");
            let many = of().try_allocate_many(count).unwrap_err();
            assert!(matches!(many, BlockError::OutOfMemory(_)), "{many}");
            // No waiting can help.
            let waited = of().timeout(Duration::from_secs(3600)).allocate_adjacent(count);
            assert!(waited.is_err());
        };
        refused(&capped, 9);
        refused(&tenant, 65);
        refused(&tenant, 500);
        assert!(tenant.block(G).try_allocate_adjacent(usize::MAX).is_err());
        assert!(tenant.block(G).try_allocate_many(usize::MAX).is_err());
        assert_eq!(rig.faults.total(), 0);
        // Without memory no addresses are reserved either.
        assert!(tenant.block(G).try_allocate_adjacent(25).is_err());
        assert_eq!(rig.faults.count(Call::MemAddressReserve), 0);
        drop(other);
        assert_eq!(capped.block(G).try_allocate_adjacent(8).unwrap().len(), 8);
    }

    fn forks_lie_side_by_side_also_when_others_of_the_row_have_gone(rig) {
        for hardened in [false, true] {
            let mut builder = common::limited(rig, 64);
            if hardened {
                builder = builder.hardened(Hardened::new());
            }
            let (pool, tenant) = common::with_tenant(builder.build().unwrap());
            let stream = Stream::new(&rig.device).unwrap();
            // Heads of 96 elements of two bytes.
            let block = tenant.block(2 * G).capacity(3 * G).largest_extent(G);
            let block = block.stride_multiple(192).home_stream(&stream);
            let mut rows = block.allocate_adjacent(5).unwrap();
            rows.iter().enumerate().for_each(|(row, block)| write(row, block));
            let distance = stride(&rows);
            let fork = |rows: &[Block]| {
                let rows: Vec<&Block> = rows.iter().collect();
                tenant.fork_all(&rows, G, 2 * G).unwrap()
            };
            assert_eq!(stride(&fork(&rows)), distance);
            // Slots with shared memory are not reused: their addresses are released.
            drop(rows.remove(0));
            pool.trim(64 * G).unwrap();
            let forks = fork(&rows);
            assert_eq!((stride(&forks), stride(&fork(&forks))), (distance, distance));
            assert_eq!(stride(&fork(&rows[1..3])), distance);
            // A block that is not adjacent becomes a row of its own.
            drop(rows.remove(1));
            let forks = fork(&rows);
            assert_eq!(stride(&forks[1..]), distance);
            for (row, block) in [0, 2, 3].into_iter().zip(&forks) {
                let mut seen = [0; 64];
                block.read(0, &mut seen).unwrap();
                assert!(!rig.keeps_bytes() || seen == [byte(row + 1, 0); 64]);
            }
        }
    }

    fn rows_lie_at_equal_distances_and_grow_in_place(rig) {
        let (pool, tenant, stream) = common::scene(rig, 64);
        let of = tenant.block(2 * G).capacity(6 * G).home_stream(&stream);
        rig.faults.forget();
        let mut blocks = of.try_allocate_adjacent(4).unwrap();
        let made = rig.faults.calls();
        let reserved = made.iter().filter(|call| **call == Call::MemAddressReserve);
        assert_eq!(reserved.count(), 1);
        assert_eq!((stride(&blocks), books(rig, &pool).addresses), (8 * G, 32 * G));
        let before = addresses(&blocks);
        for granules in 2..=6 {
            grow(&tenant, &mut blocks, granules);
            blocks.iter().enumerate().for_each(|(row, block)| write(row, block));
            blocks.iter().enumerate().for_each(|(row, block)| holds(rig, row, block));
        }
        assert_eq!(addresses(&blocks), before);
        for block in &blocks {
            let end = block.address().0 + 8 * G;
            for extent in block.extents() {
                assert_eq!(extent.address.0, block.address().0 + extent.offset);
                assert!(
                    extent.address.0 + extent.size <= end,
                    "within the addresses of its neighbor"
                );
            }
        }
        // Within its capacity a block grows, shrinks and is freed independently of its neighbors.
        let refused = blocks[1].try_grow_to(7 * G);
        assert!(matches!(refused, Err(BlockError::Argument(ArgumentError::TooLarge { .. }))), "{refused:?}");
        blocks[1].shrink_to(G).unwrap();
        pool.trim(0).unwrap();
        blocks.remove(2);
        pool.trim(0).unwrap();
        for row in [(0, 0), (1, 1), (3, 2)] {
            holds(rig, row.0, &blocks[row.1]);
        }
        assert_eq!(books(rig, &pool).addresses, 32 * G);
        assert!(tenant.block(G).try_allocate_adjacent(0).unwrap().is_empty());
        drop(blocks);
    }

    fn the_driver_has_the_addresses_when_the_last_has_gone(rig) {
        let builder = common::limited(rig, 64);
        let (pool, tenant) = common::with_tenant(builder.address_limit(32 * G).build().unwrap());
        let refused = tenant.block(8 * G).try_allocate_adjacent(5);
        assert!(matches!(
            refused,
            Err(BlockError::OutOfAddresses { wanted, held: 0, limit })
                if (wanted, limit) == (40 * G, 32 * G)
        ), "{refused:?}");
        let mut blocks = tenant.block(8 * G).try_allocate_adjacent(4).unwrap();
        let last = blocks.pop().unwrap();
        drop(blocks);
        rig.device.synchronize().unwrap();
        pool.trim(0).unwrap();
        let wide = || tenant.block(G).capacity(16 * G).try_allocate();
        assert!(matches!(wide(), Err(BlockError::OutOfAddresses { .. })));
        // Nothing was given up for it: the three slots are still reusable.
        let again = tenant.block(8 * G).try_allocate_adjacent(3).unwrap();
        assert_eq!(again[2].address().0 + 8 * G, last.address().0);
        drop(again);
        drop(last);
        rig.device.synchronize().unwrap();
        pool.trim(0).unwrap();
        let block = wide().unwrap();
        assert_eq!((books(rig, &pool).addresses, tenant.stats().addresses), (16 * G, 16 * G));
        drop(block);
    }

    fn what_has_come_free_serves_again_with_its_memory(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 64);
        let of = |granules: u64| tenant.block(granules * G).capacity(8 * G).home_stream(&stream);
        let rows = of(4).try_allocate_adjacent(4).unwrap();
        let first = addresses(&rows);
        drop(rows);
        rig.faults.forget();
        let rows = of(4).allocate_adjacent(4).unwrap();
        assert_eq!((addresses(&rows), rig.faults.total()), (first.clone(), 0));
        // While one of its slots is in use, the row serves smaller requests.
        let mut rows = rows;
        let kept = rows.remove(0);
        drop(rows);
        rig.faults.forget();
        let fewer = of(4).try_allocate_adjacent(3).unwrap();
        assert_eq!((addresses(&fewer), rig.faults.total()), (first[1..].to_vec(), 0));
        drop(fewer);
        // A single block may use one of the slots. A full row is then found elsewhere.
        let single = of(4).try_allocate().unwrap();
        assert!(first[1..].contains(&single.address()));
        let other = of(4).try_allocate_adjacent(3).unwrap();
        assert!(addresses(&other).iter().all(|address| !first.contains(address)));
        drop((kept, single, other));
        // Of two rows, the one that lacks least memory is chosen.
        let small = of(4).try_allocate_adjacent(4).unwrap();
        assert_eq!(addresses(&small), first, "four complete slots");
        let stats = tenant.stats();
        assert_eq!((stats.blocks, stats.addresses), (4, 7 * 8 * G));
        drop(small);
        // A different capacity class uses a different row.
        let large = of(4).largest_extent(2 * G).try_allocate_adjacent(4).unwrap();
        assert!(addresses(&large).iter().all(|address| !first.contains(address)));
        drop(large);
    }

    fn rows_lie_a_multiple_of_their_elements_apart(rig) {
        for guard in [0, G] {
            let builder = common::limited(rig, 64);
            let builder = match guard {
                0 => builder,
                guard => builder.hardened(Hardened::new().guard(guard).rest_blocks(0)),
            };
            let (pool, tenant) = common::with_tenant(builder.build().unwrap());
            let stream = Stream::new(&rig.device).unwrap();
            // Heads of 96, 80 and 112 elements of two bytes, and sizes that are no odd multiple.
            for (element, capacity, apart) in
                [(192, 5, 6), (160, 5, 5), (224, 2, 7), (G, 5, 8), (3 * G, 7, 12)]
            {
                let of = |granules: u64| {
                    let block = tenant.block(granules * G).capacity(capacity * G);
                    block.stride_multiple(element).home_stream(&stream)
                };
                let mut rows = of(1).allocate_adjacent(3).unwrap();
                let distance = stride(&rows);
                assert_eq!(distance % element, 0);
                if guard == 0 {
                    assert_eq!(distance, apart * G);
                }
                let mut grown: Vec<_> = rows.iter_mut().map(|row| (row, 2 * G)).collect();
                tenant.try_grow_all(&mut grown).unwrap();
                rows.iter().enumerate().for_each(|(row, block)| write(row, block));
                rows.iter().enumerate().for_each(|(row, block)| holds(rig, row, block));
                let forks: Vec<&Block> = rows.iter().collect();
                let forks = tenant.fork_all(&forks, 2 * G, 2 * G).unwrap();
                assert_eq!(stride(&forks), distance);
                let first = rows[0].address();
                drop((forks, rows));
                if guard == 0 {
                    // The row is reused for the same stride.
                    pool.trim(64 * G).unwrap();
                    assert_eq!(of(2).allocate_adjacent(3).unwrap()[0].address(), first);
                    let refused = of(capacity + 1).try_allocate_adjacent(2);
                    assert!(matches!(refused, Err(BlockError::Argument(ArgumentError::TooLarge { .. }))));
                }
            }
            let before = books(rig, &pool);
            let wide = |element| tenant.block(G).stride_multiple(element);
            let refused = wide(0).try_allocate_adjacent(2);
            assert!(matches!(refused, Err(BlockError::Argument(ArgumentError::Zero { .. }))), "{refused:?}");
            let refused = wide(u64::MAX).try_allocate_adjacent(2);
            assert!(matches!(refused, Err(BlockError::Argument(ArgumentError::Overflow { .. }))), "{refused:?}");
            // A prime number of granules exceeds the available addresses, but only if a stride
            // requires it.
            let refused = wide((1 << 40) + 15).try_allocate_adjacent(2);
            assert!(refused.is_err());
            assert_eq!(books(rig, &pool).committed, before.committed);
            wide((1 << 40) + 15).try_allocate().unwrap();
        }
    }

    fn of_several_rows_the_best_serves(rig) {
        // For each row: granules per block, number of blocks, and whether pending work comes first.
        // Then which of the two rows serves a request for two blocks of three granules.
        for (rows, best) in [
            ([(2, 2, false), (6, 2, false)], Some(1)), // too little memory is worse than too much
            ([(6, 2, false), (4, 2, false)], Some(1)), // the smallest excess wins
            ([(1, 2, false), (2, 2, false)], Some(1)), // the smallest lack wins
            ([(3, 2, true), (4, 2, false)], Some(1)),  // a pending fence is worse than too much memory
            ([(2, 2, false), (3, 2, true)], Some(1)),  // a pending fence is better than too little memory
            ([(3, 4, false), (3, 2, false)], Some(1)), // a long row stays whole
            ([(3, 2, false), (3, 4, false)], Some(0)),
            ([(3, 1, false), (3, 1, false)], None),    // parts of two rows are no row
        ] {
            let (pool, tenant) = common::tenancy(rig, 64);
            let [stream, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
            let of = |granules: u64| {
                let block = tenant.block(granules * G).capacity(8 * G);
                block.largest_extent(G).home_stream(&stream)
            };
            let made = rows.map(|(granules, count, late)| {
                let row = of(granules).try_allocate_adjacent(count).unwrap();
                if late {
                    row.iter().for_each(|block| block.record_use(&other).unwrap());
                }
                row
            });
            let places = made.each_ref().map(|row| addresses(row));
            drop(made);
            let two = of(3).try_allocate_adjacent(2).unwrap();
            let found = places.iter().position(|place| place.contains(&two[0].address()));
            assert_eq!(found, best, "{rows:?}");
            books(rig, &pool);
        }
    }

    fn memory_that_would_be_stranded_serves_no_row(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 64);
        let of = |granules: u64| tenant.block(granules * G).capacity(8 * G).home_stream(&stream);
        let rows = of(8).try_allocate_adjacent(2).unwrap();
        let first = addresses(&rows);
        drop(rows);
        // Each slot holds an extent of eight granules.
        let small = of(2).try_allocate_adjacent(2).unwrap();
        assert!(addresses(&small).iter().all(|address| !first.contains(address)));
        assert_eq!(tenant.stats().stranded, 0);
        let large = of(7).try_allocate_adjacent(2).unwrap();
        assert_eq!((addresses(&large), tenant.stats().stranded), (first, 2 * G));
    }

    fn what_others_were_promised_or_still_have_serves_no_row(rig) {
        let promising = pool(rig, 24);
        let stream = Stream::new(&rig.device).unwrap();
        let early = promising.tenant("early").register().unwrap();
        let of = |granules: u64| early.block(granules * G).capacity(16 * G).home_stream(&stream);
        drop(of(10).try_allocate_adjacent(2).unwrap());
        // The memory is cached and charged to the tenant, but only 12 granules are left for it.
        let late = promising.tenant("late").guarantee(12 * G).register().unwrap();
        let refused = of(10).try_allocate_adjacent(2);
        assert!(matches!(refused, Err(BlockError::OutOfMemory(_))), "{refused:?}");
        let rows = of(6).try_allocate_adjacent(2).unwrap();
        drop((late.try_allocate(12 * G).unwrap(), rows));
        drop((early, late));
        promising.close().unwrap();
        // A peer can write to exported memory, whichever block has its addresses.
        let (_pool, tenant) = common::with_tenant(shareable(rig, 64).build().unwrap());
        let of = || tenant.block(2 * G).home_stream(&stream);
        let rows = of().try_allocate_adjacent(3).unwrap();
        let row = addresses(&rows);
        drop(rows[1].export(HandleTypes::POSIX_FD).unwrap());
        busy(rig, &stream, &rows[1], 9);
        drop(rows);
        let next = of().try_allocate_adjacent(3).unwrap();
        assert!(addresses(&next).iter().all(|address| !row.contains(address)));
        rig.machine.release_all_streams(D0);
    }

    fn a_single_block_leaves_rows_whole_if_it_can(rig) {
        let (pool, tenant, stream) = common::scene(rig, 64);
        let of = || tenant.block(2 * G).home_stream(&stream);
        let rows = of().try_allocate_adjacent(2).unwrap();
        let single = of().try_allocate().unwrap();
        let (row, alone) = (addresses(&rows), single.address());
        // Bypass the stream cache.
        rows.iter().chain([&single]).for_each(Block::record_use_anywhere);
        drop((rows, single));
        rig.device.synchronize().unwrap();
        pool.trim(6 * G).unwrap();
        assert_eq!(of().try_allocate().unwrap().address(), alone);
        let single = of().try_allocate().unwrap();
        assert_eq!(single.address(), alone);
        assert_eq!(addresses(&of().try_allocate_adjacent(2).unwrap()), row);
        drop(single);
    }

    fn all_of_them_or_none(rig) {
        let (pool, tenant, stream) = common::scene(rig, 16);
        let of = |granules: u64| tenant.block(granules * G).capacity(8 * G).home_stream(&stream);
        let refused = of(6).try_allocate_adjacent(3);
        let Err(BlockError::OutOfMemory(short)) = refused else { panic!("{refused:?}") };
        assert_eq!((short.wanted, short.limit), (18 * G, 16 * G));
        let stats = books(rig, &pool);
        assert_eq!((stats.committed, stats.addresses, stats.refusals), (0, 0, 1));
        let rows = of(4).try_allocate_adjacent(3).unwrap();
        let first = addresses(&rows);
        drop(rows);
        let before = books(rig, &pool);
        assert!(of(6).try_allocate_adjacent(3).is_err());
        let after = books(rig, &pool);
        assert_eq!((after.committed, after.addresses), (before.committed, before.addresses));
        let rows = of(5).try_allocate_adjacent(3).unwrap();
        assert_eq!(addresses(&rows), first, "one block's idle memory does not strand another's");
        assert!(of(9).try_allocate_adjacent(2).is_err());
        let huge = tenant.block(G).capacity(u64::MAX / 4).try_allocate_adjacent(usize::MAX);
        let what = "blocks";
        assert!(matches!(
            huge,
            Err(BlockError::Argument(ArgumentError::TooLarge { what: it, .. })) if it == what
        ));
        drop(rows);
    }

    fn a_waiting_allocation_asks_the_others(rig) {
        let pool = pool(rig, 16);
        let stream = Stream::new(&rig.device).unwrap();
        let held = Arc::new(Mutex::new(None::<Vec<Block>>));
        let gives = held.clone();
        let other = pool.tenant("b").on_pressure(move |_| drop(gives.lock().unwrap().take()))
            .register().unwrap();
        let rows = other.block(4 * G).home_stream(&stream).try_allocate_adjacent(3).unwrap();
        *held.lock().unwrap() = Some(rows);
        let tenant = pool.tenant("a").register().unwrap();
        let of = tenant.block(5 * G).home_stream(&stream);
        assert!(of.clone().try_allocate_adjacent(3).is_err());
        let rows = of.zeroed(true).allocate_adjacent(3).unwrap();
        let mut seen = [1; 64];
        rows[2].read(5 * G - 64, &mut seen).unwrap();
        assert!(!rig.keeps_bytes() || seen == [0; 64]);
        assert_eq!(other.stats().committed, 0);
        drop(rows);
    }

    fn who_may_wait_waits_for_room_for_all(rig) {
        let pool = pool(rig, 16);
        let stream = Stream::new(&rig.device).unwrap();
        let other = pool.tenant("b").register().unwrap();
        let theirs = other.allocate_on(&stream, 12 * G).unwrap();
        busy(rig, &stream, &theirs, 9);
        drop(theirs);
        let tenant = pool.tenant("a").register().unwrap();
        let of = tenant.block(5 * G).timeout(Duration::from_secs(60));
        assert!(of.clone().try_allocate_adjacent(3).is_err());
        let waiting = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                rig.machine.release_all_streams(D0);
            });
            of.allocate_adjacent(3)
        });
        assert_eq!(stride(&waiting.unwrap()), 8 * G);
    }

    fn memory_that_is_being_zeroed_is_not_pulled_away_by_a_refusal(rig) {
        let pool = pool(rig, 16);
        let streams = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        let secret = pool.tenant("secret").register().unwrap();
        let block = secret.allocate_on(&streams[0], 12 * G).unwrap();
        write(0, &block);
        drop(block);
        pool.trim(16 * G).unwrap();
        secret.unregister();
        let tenant = pool.tenant("a").register().unwrap();
        rig.machine.hold(D0, streams[1].as_raw());
        let of = |granules: u64| tenant.block(granules * G).home_stream(&streams[1]);
        // The second block gets part of its memory, and then the driver refuses.
        rig.faults.arm(nth_of(3, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemCreate]));
        assert!(of(7).try_allocate_adjacent(2).is_err());
        rig.faults.disarm();
        let stats = books(rig, &pool);
        assert_eq!((stats.in_use, stats.tenants[0].blocks), (0, 0));
        // The addresses stay with memory that is being zeroed.
        assert_eq!((stats.pending_free > 0, stats.addresses), (true, 16 * G));
        rig.machine.release_all_streams(D0);
        let rows = of(7).try_allocate_adjacent(2).unwrap();
        let mut seen = [1; 64];
        for at in [0, G, 4 * G - 64, 7 * G - 64] {
            rows[0].read(at, &mut seen).unwrap();
            assert!(!rig.keeps_bytes() || seen == [0; 64], "{at}");
        }
        drop(rows);
    }

    fn each_has_guards_of_its_own_in_a_hardened_pool(rig) {
        let hardened = Hardened::new().guard(G).rest_blocks(2);
        let builder = common::limited(rig, 16);
        let (pool, tenant) = common::with_tenant(builder.hardened(hardened).build().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let of = || tenant.block(2 * G).home_stream(&stream);
        let mut rows = of().try_allocate_adjacent(3).unwrap();
        assert_eq!((stride(&rows), books(rig, &pool).addresses), (4 * G, 12 * G));
        rows.iter().enumerate().for_each(|(row, block)| write(row, block));
        let first = rows.remove(0);
        let (gone, next) = (first.address(), rows[0].address());
        let reads = |at: u64| copy(rig, at).is_some();
        assert!(reads(next.0) && !reads(next.0 - 4) && !reads(gone.0 + 2 * G));
        drop(first);
        pool.trim(0).unwrap();
        // The slot rests and is not reused, and its neighbors are unchanged.
        assert!(!reads(gone.0));
        let stats = books(rig, &pool);
        assert_eq!((stats.resting_blocks, stats.resting_addresses), (1, 4 * G));
        let fresh = of().try_allocate().unwrap();
        assert!(!(gone..next).contains(&fresh.address()));
        rows.iter().enumerate().for_each(|(row, block)| holds(rig, row + 1, block));
        drop(rows);
        drop(fresh);
        pool.trim(0).unwrap();
        // Two of the slots rest longest, and are released with their neighbor.
        let stats = books(rig, &pool);
        assert_eq!((stats.resting_blocks, tenant.stats().addresses), (2, 0));
        for _ in 0..2 {
            drop(of().try_allocate().unwrap());
            pool.trim(0).unwrap();
        }
        assert_eq!(
            books(rig, &pool).addresses, 8 * G,
            "the addresses of the two blocks freed last"
        );
    }

    fn what_was_exported_goes_and_its_place_stays(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 64).build().unwrap());
        let of = || tenant.block(2 * G).home_stream(&stream);
        let mut rows = of().try_allocate_adjacent(3).unwrap();
        let row = addresses(&rows);
        let middle = rows.remove(1);
        drop(middle.export(HandleTypes::POSIX_FD).unwrap());
        drop(middle);
        rig.device.synchronize().unwrap();
        pool.trim(64 * G).unwrap();
        let stats = books(rig, &pool);
        assert_eq!((stats.exported, stats.committed, stats.addresses), (0, 4 * G, 6 * G));
        assert_eq!(tenant.stats().addresses, 6 * G);
        // The slots are a row as before.
        drop(rows);
        let again = of().try_allocate_adjacent(3).unwrap();
        assert_eq!(addresses(&again), row);
        drop((again, tenant));
        rig.device.synchronize().unwrap();
        assert_eq!(books(rig, &pool).addresses, 0);
    }

    fn rows_sleep_and_wake_where_they_lie(rig) {
        let (pool, tenant, stream) = common::scene(rig, 64);
        let rows = tenant.block(2 * G).capacity(6 * G).home_stream(&stream).tag("cache");
        let mut rows = rows.try_allocate_adjacent(3).unwrap();
        let single = tenant.block(2 * G).tag("state").try_allocate().unwrap();
        rows.iter().enumerate().for_each(|(row, block)| write(row, block));
        let before = addresses(&rows);
        let store = HostStore::builder(&rig.device).pinned(6 * G).build().unwrap();
        let cache = tenant.blocks().tag("cache");
        assert_eq!(cache.sleep(Contents::Keep(&store)).unwrap().given, 6 * G);
        let asleep = books(rig, &pool);
        assert_eq!((asleep.committed, asleep.addresses), (2 * G, 26 * G));
        // No block gets their addresses or memory between them, and none of them grows.
        let others = of(&tenant, &stream, 3).try_allocate_adjacent(2).unwrap();
        assert!(addresses(&others).iter().all(|address| !(before[0]..=before[2]).contains(address)));
        drop(others);
        let [one, two, three] = &mut rows[..] else { panic!("three rows") };
        let refused = tenant.try_grow_all(&mut [(one, 3 * G), (two, 3 * G), (three, 3 * G)]);
        assert!(matches!(
            refused,
            Err(BlockError::Refused { index: 0, size, ref cause })
                if size == 3 * G && matches!(**cause, BlockError::Memory(MemoryError::Asleep { .. }))
        ), "{refused:?}");
        assert_eq!(cache.wake().unwrap().restored, 6 * G);
        assert_eq!((addresses(&rows), stride(&rows)), (before, 8 * G));
        rows.iter().enumerate().for_each(|(row, block)| holds(rig, row, block));
        grow(&tenant, &mut rows, 4);
        rows.iter().enumerate().for_each(|(row, block)| write(row, block));
        rows.iter().enumerate().for_each(|(row, block)| holds(rig, row, block));
        drop((rows, single));
    }

    fn a_compaction_stays_within_each(rig) {
        let builder = common::limited(rig, 64);
        let (pool, tenant) = common::with_tenant(builder.growth(Growth::Exact).build().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let of = tenant.block(G).capacity(8 * G).home_stream(&stream);
        let mut rows = of.try_allocate_adjacent(3).unwrap();
        for granules in 2..=8 {
            grow(&tenant, &mut rows, granules);
        }
        rows.iter().enumerate().for_each(|(row, block)| write(row, block));
        let before = addresses(&rows);
        assert_eq!(books(rig, &pool).mappings, 24);
        pool.compact(|_| true).unwrap();
        assert_eq!((books(rig, &pool).mappings, addresses(&rows)), (3, before));
        rows.iter().enumerate().for_each(|(row, block)| holds(rig, row, block));
        drop(rows);
    }

    fn a_mapper_places_ahead_of_each(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 256);
        let stream = Stream::new(&rig.device).unwrap();
        let of = tenant.block(2 * G).capacity(32 * G).home_stream(&stream);
        let mut rows = of.growth(Growth::Part(64)).try_allocate_adjacent(4).unwrap();
        for granules in 3..24 {
            grow(&tenant, &mut rows, granules);
            rows.iter().enumerate().for_each(|(row, block)| write(row, block));
            rows.iter().enumerate().for_each(|(row, block)| holds(rig, row, block));
        }
        drop(rows);
        drop(tenant);
        pool.close().unwrap();
    }

    fn a_tenant_that_leaves_gives_its_places_up_one_by_one(rig) {
        let pool = pool(rig, 64);
        let stream = Stream::new(&rig.device).unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let mut rows = tenant.block(2 * G).home_stream(&stream).try_allocate_adjacent(3).unwrap();
        drop(rows.remove(1));
        tenant.unregister();
        rig.device.synchronize().unwrap();
        let stats = books(rig, &pool);
        assert_eq!((stats.addresses, stats.committed), (6 * G, 4 * G));
        assert_eq!(stats.tenants[0].addresses, 4 * G);
        drop(rows);
        rig.device.synchronize().unwrap();
        // The next operation purges what has completed.
        let next = pool.tenant("b").register().unwrap();
        drop(next.block(62 * G).home_stream(&stream).try_allocate().unwrap());
        let stats = books(rig, &pool);
        assert_eq!((stats.tenants.len(), stats.addresses), (1, 64 * G));
    }
}

struct World {
    pool: Pool,
    tenant: Tenant,
    stream: Stream,
    rows: Vec<Block>,
}

fn world(rig: &Rig<Nothing>, rows: usize) -> World {
    let (pool, tenant, stream) = common::scene(rig, 64);
    let rows = of(&tenant, &stream, 3).try_allocate_adjacent(rows).unwrap();
    World {
        pool,
        tenant,
        stream,
        rows,
    }
}

fn of<'a>(tenant: &'a Tenant, stream: &'a Stream, granules: u64) -> BlockBuilder<'a> {
    let block = tenant.block(granules * G).capacity(8 * G);
    block.home_stream(stream)
}

/// Figures that a failed call must not change.
fn figures(world: &World) -> [u64; 7] {
    let stats = world.pool.stats();
    [
        stats.committed,
        stats.in_use,
        stats.free,
        stats.quarantined,
        stats.mappings,
        stats.addresses,
        world.rows.len() as u64,
    ]
}

fn allocate(world: &mut World, granules: u64) -> Result<(), String> {
    let block = of(&world.tenant, &world.stream, granules);
    Ok(world.rows.extend(text(block.try_allocate_adjacent(3))?))
}

#[test]
fn every_driver_call_failed_once() {
    let fresh = sweep(|rig| world(rig, 0), |_, world| allocate(world, 3), figures);
    assert_eq!(fresh, 19, "one reservation, and six extents of three calls");
    let again = sweep(
        |rig| {
            let mut world = world(rig, 3);
            world.rows.clear();
            world
        },
        |_, world| allocate(world, 4),
        figures,
    );
    assert_eq!(again, 9, "one more extent per block");
    let grown = sweep(
        |rig| world(rig, 3),
        |_, World { tenant, rows, .. }| {
            let mut pairs: Vec<_> = rows.iter_mut().map(|block| (block, 4 * G)).collect();
            text(tenant.try_grow_all(&mut pairs))
        },
        figures,
    );
    assert_eq!(grown, 9);
    let given_back = sweep_partly(
        |rig| {
            let mut world = world(rig, 3);
            world.rows.clear();
            world
        },
        |_, world| {
            text(world.pool.trim(0))?;
            // Requests all addresses that there are, so that the row is released.
            let wide = world.tenant.block(G).capacity(1 << 46);
            Ok(drop(text(wide.try_allocate())?))
        },
        |_| (),
    );
    assert!(given_back > 12, "{given_back}");
}

#[test]
fn what_cannot_be_undone_keeps_the_addresses_of_all() {
    let rig = common::clean(common::model());
    let mut world = world(&rig, 0);
    // The third block's second extent cannot be created, and the first block's extent cannot be
    // unmapped, in both attempts.
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    rig.faults.arm(common::nth_of(6, code, &[Call::MemMap]));
    for nth in [2, 3] {
        rig.faults.arm(Fault::nth(nth, code).of(Call::MemUnmap));
    }
    assert!(allocate(&mut world, 3).is_err());
    rig.faults.disarm();
    let stats = books(&rig, &world.pool);
    assert!(stats.quarantined > 0 && stats.committed == 0, "{stats:#?}");
    assert_eq!((stats.addresses, stats.tenants[0].addresses), (24 * G, 0));
    allocate(&mut world, 3).unwrap();
    assert_eq!(books(&rig, &world.pool).addresses, 48 * G);
}
