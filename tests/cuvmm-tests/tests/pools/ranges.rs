//! Ranges of addresses: blocks of zero bytes, which are charged for no memory before they grow, and
//! again after they have shrunk to nothing.
#![allow(clippy::unit_arg)]

use std::time::Duration;

use crate::common::books::books;
use crate::common::sweep::{sweep, text};
use crate::common::world::{of_pool, world};
use crate::common::{self, D0, G, GIB, busy, pool, shareable};
use crate::on_both;
use cuvmm::driver::{Call, HandleTypes};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, ShareError};
use cuvmm::{Access, Block, Contents, Hardened, HostStore, Limit, Offer, Stream};

fn is_zero<T>(outcome: Result<T, BlockError>) -> bool {
    matches!(
        outcome,
        Err(BlockError::Argument(ArgumentError::Zero(
            "bytes of a block"
        )))
    )
}

/// Returns the first four bytes of a block, or the byte that they are to be where nothing is kept.
fn first(block: &Block, kept: bool, byte: u8) -> [u8; 4] {
    let mut bytes = [0; 4];
    block.read(0, &mut bytes).unwrap();
    if kept { bytes } else { [byte; 4] }
}

on_both! {
    fn a_range_costs_addresses_and_grows(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        rig.faults.forget();
        // More addresses than the device has memory.
        let mut range = tenant.block(0).capacity(64 * GIB).try_allocate().unwrap();
        let calls = (rig.faults.count(Call::MemAddressReserve), rig.faults.total());
        assert_eq!(calls, (1, 1));
        assert_eq!((range.size(), range.capacity()), (0, 64 * GIB));
        let stats = books(rig, &pool);
        assert_eq!((stats.committed, stats.mappings, stats.addresses), (0, 0, 64 * GIB));
        assert_eq!((tenant.stats().blocks, tenant.stats().addresses), (1, 64 * GIB));
        assert!(range.extents().is_empty());
        // No bytes are no bytes to copy.
        range.write(0, &[]).unwrap();
        assert!(matches!(
            range.write(0, &[1]),
            Err(MemoryError::Argument(ArgumentError::OutOfRange { .. }))
        ));
        range.try_grow_to(0).unwrap();
        assert_eq!(books(rig, &pool).committed, 0);
        let address = range.address();
        range.try_grow_to(3 * G).unwrap();
        range.write(0, &[7; 4]).unwrap();
        assert_eq!(first(&range, rig.keeps_bytes(), 7), [7; 4]);
        assert_eq!((range.address(), tenant.stats().in_use), (address, 3 * G));
        range.shrink_to(0).unwrap();
        assert_eq!((range.size(), tenant.stats().in_use), (0, 0));
        pool.trim(0).unwrap();
        assert_eq!(books(rig, &pool).committed, 0);
        range.try_grow_to(8 * G).unwrap();
        assert_eq!((range.address(), books(rig, &pool).in_use), (address, 8 * G));
    }

    fn zero_bytes_without_capacity_are_an_error(rig) {
        let (pool, tenant, stream) = common::scene(rig, 8);
        rig.faults.forget();
        assert!(is_zero(tenant.try_allocate(0)));
        assert!(is_zero(tenant.allocate_on(&stream, 0)));
        assert!(is_zero(tenant.block(0).capacity(0).timeout(Duration::MAX).allocate()));
        assert!(is_zero(tenant.block(0).try_allocate_many(2)));
        assert!(is_zero(tenant.block(0).try_allocate_adjacent(2)));
        let above = tenant.block(1).capacity(0).try_allocate();
        assert!(matches!(above, Err(BlockError::Argument(ArgumentError::TooLarge { most: 0, .. }))));
        assert_eq!((rig.faults.total(), pool.stats().addresses), (0, 0));
    }

    // I-90
    fn a_full_pool_and_one_beyond_its_limit_have_ranges(rig) {
        let pool = pool(rig, 8);
        let asked = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let counts = std::sync::Arc::clone(&asked);
        let hook = move |_: &cuvmm::pool::Pressure| {
            counts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        };
        let full = pool.tenant("full").on_pressure(hook).register().unwrap();
        let tenant = pool.tenant("a").limit(G).register().unwrap();
        let held = full.try_allocate(8 * G).unwrap();
        let of = || tenant.block(0).capacity(GIB);
        let (one, waited) = (of().try_allocate().unwrap(), of().timeout(Duration::MAX).allocate());
        let (many, row) = (of().try_allocate_many(3).unwrap(), of().allocate_adjacent(3).unwrap());
        pool.set_limit(Limit::Bytes(4 * G)).unwrap();
        assert!(pool.stats().committed > pool.stats().limit);
        let beyond = of().try_allocate().unwrap();
        assert_eq!(tenant.stats().blocks, 9);
        assert_eq!((tenant.stats().committed, asked.load(std::sync::atomic::Ordering::Relaxed)), (0, 0));
        assert_eq!((pool.stats().refusals, books(rig, &pool).addresses), (0, 8 * G + 9 * GIB));
        drop((one, waited, many, row, beyond, held));
    }

    fn more_ranges_than_the_device_has_granules_are_refused(rig) {
        let (_pool, tenant) = common::tenancy(rig, 8);
        let most = rig.device.total_memory() / G;
        rig.faults.forget();
        for count in [most as usize + 1, usize::MAX] {
            let of = || tenant.block(0).capacity(1);
            for refused in [of().try_allocate_many(count), of().try_allocate_adjacent(count)] {
                assert!(matches!(
                    refused,
                    Err(BlockError::Argument(ArgumentError::TooLarge { what: "blocks", .. }))
                ));
            }
        }
        assert_eq!(rig.faults.total(), 0);
        // The limit of addresses counts ranges too.
        let narrow = common::limited(rig, 8).address_limit(8 * G);
        let (_narrow, tenant) = common::with_tenant(narrow.build().unwrap());
        let range = tenant.block(0).capacity(8 * G).try_allocate().unwrap();
        let refused = tenant.block(0).capacity(1).try_allocate();
        assert!(matches!(refused, Err(BlockError::OutOfAddresses { .. })));
        drop(range);
        tenant.block(0).capacity(1).try_allocate().unwrap();
    }

    fn a_dropped_range_is_cached_with_its_addresses(rig) {
        let (pool, tenant, stream) = common::scene(rig, 8);
        for home in [None, Some(&stream)] {
            let of = || {
                let of = tenant.block(0).capacity(GIB);
                match home {
                    Some(home) => of.home_stream(home),
                    None => of,
                }
            };
            let range = of().try_allocate().unwrap();
            let address = range.address();
            drop(range);
            rig.faults.forget();
            let again = of().try_allocate().unwrap();
            assert_eq!((again.address(), rig.faults.count(Call::MemAddressReserve)), (address, 0));
            assert!(home.is_none() || rig.faults.total() == 0);
        }
        assert_eq!(books(rig, &pool).addresses, GIB);
    }

    fn a_range_over_idle_memory_uses_none_of_it(rig) {
        let pool = pool(rig, 8);
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let of = |size| tenant.block(size).capacity(8 * G).home_stream(&stream);
        let block = of(8 * G).try_allocate().unwrap();
        let address = block.address();
        busy(rig, &stream, &block, 9);
        drop(block);
        // In its own order the stream has the slot already.
        let mut range = of(0).try_allocate().unwrap();
        assert_eq!(range.address(), address);
        assert_eq!((tenant.stats().in_use, tenant.stats().pending_free), (0, 8 * G));
        assert!(other.try_allocate(G).is_err(), "the kernel still writes");
        rig.machine.release_all_streams(D0);
        let theirs = other.try_allocate(8 * G).unwrap();
        assert_eq!(theirs.size(), 8 * G);
        assert!(range.try_grow_to(G).is_err());
        drop(theirs);
        range.try_grow_to(G).unwrap();
        // What the other tenant left is not shown.
        assert_eq!(first(&range, rig.keeps_bytes(), 0), [0; 4]);
    }

    fn what_a_zeroed_range_gave_up_comes_back_as_zeros(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 8);
        let of = tenant.block(0).capacity(4 * G).zeroed(true).home_stream(&stream);
        let mut range = of.try_allocate().unwrap();
        for size in [5, G + 5] {
            range.try_grow_to(size).unwrap();
            assert_eq!(first(&range, rig.keeps_bytes(), 0), [0; 4]);
            range.write(0, &[7; 4]).unwrap();
            range.shrink_to(0).unwrap();
        }
        range.try_grow_to(2 * G).unwrap();
        assert_eq!(first(&range, rig.keeps_bytes(), 0), [0; 4]);
    }

    fn a_range_is_leased_and_goes_no_way_out(rig) {
        let (pool, tenant) = common::with_tenant(shareable(rig, 8).build().unwrap());
        let mut range = tenant.block(0).capacity(4 * G).try_allocate().unwrap();
        let lease = range.lease_for(Access::ReadWrite).unwrap();
        range.check_for(Access::ReadWrite).unwrap();
        assert!(lease.extents().is_empty());
        assert_eq!(range.register().unwrap().size(), 0);
        let nothing = MemoryError::from(ArgumentError::Zero("bytes to be exported"));
        assert_eq!(range.export(HandleTypes::POSIX_FD).unwrap_err(), nothing);
        let offered = Offer::block(&range).unwrap_err();
        assert!(matches!(offered, ShareError::Argument(ArgumentError::Zero(_))), "{offered}");
        assert!(range.fork(1, 1).is_err() && range.fork(0, 0).is_err());
        assert_eq!(range.read_only(), 0);
        // What a lease has seen stays, and a refused export keeps nothing back.
        range.try_grow_to(G).unwrap();
        drop(lease);
        range.shrink_to(0).unwrap();
        pool.trim(0).unwrap();
        assert_eq!((books(rig, &pool).committed, pool.stats().exported), (0, 0));
    }

    fn a_shrunk_range_under_a_lease_keeps_its_memory(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        let mut range = tenant.block(4 * G).capacity(8 * G).try_allocate().unwrap();
        let lease = range.lease();
        range.shrink_to(0).unwrap();
        pool.trim(0).unwrap();
        assert_eq!((tenant.stats().leased, tenant.stats().in_use), (4 * G, 0));
        assert!(tenant.try_allocate(5 * G).is_err());
        drop(lease);
        tenant.try_allocate(8 * G).unwrap();
    }

    fn ranges_sleep_and_wake_with_others(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let store = HostStore::builder(&rig.device).pinned(8 * G).build().unwrap();
        for contents in [Contents::Discard, Contents::Keep(&store)] {
            let mut range = tenant.block(0).capacity(GIB).try_allocate().unwrap();
            let mut shrunk = tenant.block(2 * G).capacity(4 * G).try_allocate().unwrap();
            shrunk.shrink_to(0).unwrap();
            let block = tenant.try_allocate(G).unwrap();
            block.write(0, &[3; 4]).unwrap();
            let addresses = [&range, &shrunk, &block].map(Block::address);
            let slept = tenant.blocks().sleep(contents).unwrap();
            assert_eq!((slept.blocks, tenant.stats().committed), (3, 0), "{contents:?}");
            assert!(range.is_asleep() && shrunk.is_asleep());
            assert!(matches!(
                range.try_grow_to(G),
                Err(BlockError::Memory(MemoryError::Asleep(0)))
            ));
            assert_eq!(books(rig, &pool).asleep, G);
            let woken = tenant.blocks().wake().unwrap();
            assert_eq!((woken.blocks, woken.mapped), (3, G));
            assert_eq!([&range, &shrunk, &block].map(Block::address), addresses);
            assert_eq!(books(rig, &pool).committed, G);
            range.try_grow_to(G).unwrap();
            shrunk.try_grow_to(G).unwrap();
            assert_eq!(tenant.stats().in_use, 3 * G);
            drop((range, shrunk, block));
            pool.trim(0).unwrap();
        }
        // A tenant of ranges alone.
        let range = tenant.block(0).capacity(GIB).try_allocate().unwrap();
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        assert!(range.is_asleep());
        drop(range);
        assert_eq!(tenant.stats().blocks, 0);
    }

    fn a_compaction_takes_all_that_a_range_gave_up(rig) {
        let (_pool, tenant) = common::tenancy(rig, 16);
        let mut range = tenant.block(5 * G).capacity(GIB).try_allocate().unwrap();
        range.shrink_to(0).unwrap();
        let done = tenant.compact(|_| true).unwrap();
        assert_eq!((done.given_back, done.copied), (5 * G, 0));
        assert_eq!((tenant.stats().committed, tenant.stats().blocks), (0, 1));
        range.try_grow_to(G).unwrap();
    }

    fn a_fork_that_shrank_to_nothing_grows_over_memory_of_its_own(rig) {
        let (pool, tenant, stream) = common::scene(rig, 16);
        let block = tenant.block(2 * G).capacity(4 * G).largest_extent(G).home_stream(&stream);
        let block = block.try_allocate().unwrap();
        block.write(0, &[5; 4]).unwrap();
        let mut fork = block.try_fork(2 * G, 2 * G).unwrap();
        fork.shrink_to(0).unwrap();
        fork.try_grow_to(G).unwrap();
        assert_eq!(fork.read_only(), 0);
        fork.write(0, &[6; 4]).unwrap();
        assert_eq!(first(&block, rig.keeps_bytes(), 5), [5; 4]);
        drop(block);
        fork.shrink_to(0).unwrap();
        pool.trim(0).unwrap();
        assert_eq!(books(rig, &pool).committed, 0);
    }

    fn hardened_ranges_rest_and_those_of_an_unregistered_tenant_go(rig) {
        let hardened = common::limited(rig, 8).hardened(Hardened::new());
        let (hardened, tenant) = common::with_tenant(hardened.build().unwrap());
        let mut range = tenant.block(0).capacity(4 * G).try_allocate().unwrap();
        let address = range.address();
        range.try_grow_to(G).unwrap();
        range.shrink_to(0).unwrap();
        range.try_grow_to(2 * G).unwrap();
        assert_eq!(first(&range, rig.keeps_bytes(), 0), [0; 4], "not what it was filled with");
        range.shrink_to(0).unwrap();
        drop(range);
        let next = tenant.block(0).capacity(4 * G).try_allocate().unwrap();
        assert_ne!(next.address(), address);
        assert_eq!(hardened.stats().resting_addresses, 6 * G);
        drop(next);
        let (pool, tenant) = common::tenancy(rig, 8);
        let range = tenant.block(0).capacity(GIB).try_allocate().unwrap();
        tenant.unregister();
        drop(range);
        assert_eq!((pool.stats().addresses, pool.stats().tenants.len()), (0, 0));
    }
}

#[test]
fn every_call_of_a_range_and_its_growth_fails_once() {
    let calls = sweep(
        world,
        |_, world| {
            let of = world.tenants[0].block(0).capacity(64 * GIB);
            let range = text(of.home_stream(&world.streams[0]).try_allocate())?;
            Ok(world.blocks.push(range))
        },
        of_pool,
    );
    assert_eq!(calls, 1);
    let calls = sweep(
        |rig| {
            let mut world = world(rig);
            let of = world.tenants[0].block(0).capacity(GIB);
            let row = of.home_stream(&world.streams[0]).try_allocate_adjacent(2);
            world.blocks.extend(row.unwrap());
            world
        },
        |_, world| {
            let tenant = world.tenants[0].clone();
            let mut steps: Vec<_> = world
                .blocks
                .iter_mut()
                .skip(1)
                .map(|it| (it, 2 * G))
                .collect();
            text(tenant.try_grow_all(&mut steps))
        },
        of_pool,
    );
    assert_eq!(calls, 6, "three calls for each block");
}
