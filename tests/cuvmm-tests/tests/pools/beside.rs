//! The places of freed blocks in a row of adjacent blocks, which new blocks take.
#![allow(clippy::unit_arg)]

use std::time::Duration;

use crate::common::books::books;
use crate::common::sweep::{sweep_of, text};
use crate::common::world::{of_pool, world};
use crate::common::{self, D0, G, busy, shareable};
use crate::on_both;
use cuvmm::driver::{Call, DeviceAddress, HandleTypes};
use cuvmm::error::{ArgumentError, BlockError};
use cuvmm::pool::BlockBuilder;
use cuvmm::{Block, Hardened, Stream, Tenant};

const IN_USE: BlockError = BlockError::PlaceInUse {
    distance: 1,
    occupied: false,
};

fn none<T: std::fmt::Debug>(outcome: Result<T, BlockError>) -> bool {
    matches!(
        outcome,
        Err(BlockError::Argument(ArgumentError::NoSuch { .. }))
    )
}

/// Allocates three rows of two granules in extents of at most two, each filled with its number, and
/// frees the second. Returns the two others and the address of the hole.
fn with_a_hole<'a>(of: BlockBuilder<'a>) -> (Vec<Block>, DeviceAddress) {
    let mut rows = of.try_allocate_adjacent(3).unwrap();
    for (number, row) in (1..).zip(&rows) {
        row.write(0, &[number; 4]).unwrap();
    }
    let hole = rows.remove(1).address();
    (rows, hole)
}

fn of<'a>(tenant: &'a Tenant, stream: &'a Stream) -> BlockBuilder<'a> {
    let of = tenant.block(2 * G).capacity(4 * G).largest_extent(2 * G);
    of.home_stream(stream)
}

on_both! {
    fn a_hole_is_filled_between_its_neighbors(rig) {
        let (pool, tenant, stream) = common::scene(rig, 16);
        let (mut rows, hole) = with_a_hole(of(&tenant, &stream));
        let before = books(rig, &pool);
        rig.faults.forget();
        let again = of(&tenant, &stream).try_allocate_beside(&rows[0], 1).unwrap();
        assert_eq!((again.address(), rig.faults.total()), (hole, 0));
        assert_eq!(books(rig, &pool).addresses, before.addresses);
        drop(again);
        // From the other side, and with memory that went meanwhile.
        pool.trim(0).unwrap();
        assert_eq!(books(rig, &pool).committed, 4 * G);
        let again = of(&tenant, &stream).allocate_beside(&rows[1], -1).unwrap();
        assert_eq!(again.address(), hole);
        again.write(0, &[9; 4]).unwrap();
        rows.insert(1, again);
        // The row is whole: it grows and is freed as one.
        let mut steps: Vec<_> = rows.iter_mut().map(|row| (row, 4 * G)).collect();
        tenant.try_grow_all(&mut steps).unwrap();
        for (row, byte) in rows.iter().zip([1, 9, 3]) {
            let mut bytes = [byte; 4];
            row.read(0, &mut bytes).unwrap();
            assert!(bytes == [byte; 4] || !rig.keeps_bytes());
        }
        let first = rows[0].address();
        drop(rows);
        let rows = of(&tenant, &stream).try_allocate_adjacent(3).unwrap();
        assert_eq!((rows[0].address(), rows[1].address()), (first, hole));
        assert_eq!(books(rig, &pool).addresses, before.addresses);
    }

    fn what_is_no_free_place_is_refused(rig) {
        let (pool, [tenant, other], stream) = common::pair(rig, 64);
        let (rows, _) = with_a_hole(of(&tenant, &stream));
        let single = of(&tenant, &stream).capacity(16 * G).try_allocate().unwrap();
        let at = |distance| of(&tenant, &stream).try_allocate_beside(&rows[0], distance);
        let before = books(rig, &pool);
        rig.faults.forget();
        for distance in [0, 2] {
            let occupied = BlockError::PlaceInUse { distance, occupied: true };
            assert_eq!(at(distance).unwrap_err(), occupied);
            assert!(!occupied.is_shortage() && !occupied.is_out_of_memory());
            // No waiting for a block.
            let waits = of(&tenant, &stream).timeout(Duration::MAX);
            assert_eq!(waits.allocate_beside(&rows[0], distance).unwrap_err(), occupied);
        }
        for distance in [-1, 3, isize::MAX, isize::MIN] {
            assert!(none(at(distance)), "{distance}");
        }
        assert!(none(of(&tenant, &stream).try_allocate_beside(&single, 1)));
        let strange = of(&other, &stream).try_allocate_beside(&rows[0], 1);
        assert_eq!(strange.unwrap_err(), BlockError::WrongTenant { index: 0 });
        let wrong = |of: BlockBuilder<'_>| of.try_allocate_beside(&rows[0], 1).unwrap_err();
        let (small, large) = (of(&tenant, &stream).largest_extent(G), of(&tenant, &stream).largest_extent(4 * G));
        assert!(matches!(wrong(small), BlockError::Argument(ArgumentError::TooSmall { least, .. }) if least == 2 * G));
        assert!(matches!(wrong(large), BlockError::Argument(ArgumentError::TooLarge { most, .. }) if most == 2 * G));
        let wide = of(&tenant, &stream).capacity(5 * G);
        assert!(matches!(wrong(wide), BlockError::Argument(ArgumentError::TooLarge { most, .. }) if most == 4 * G));
        assert!(matches!(
            wrong(tenant.block(0).largest_extent(2 * G)),
            BlockError::Argument(ArgumentError::Zero(_))
        ));
        assert_eq!(rig.faults.total(), 0);
        assert_eq!(books(rig, &pool).in_use, before.in_use);
        // The place is free all the time.
        at(1).unwrap();
        tenant.clone().unregister();
        assert!(matches!(at(1), Err(BlockError::Unregistered(_))));
        drop(rows);
    }

    fn rows_without_places_to_fill(rig) {
        let hardened = common::limited(rig, 16).hardened(Hardened::new());
        let (_hardened, tenant) = common::with_tenant(hardened.build().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let (rows, _) = with_a_hole(of(&tenant, &stream));
        assert!(none(of(&tenant, &stream).try_allocate_beside(&rows[0], 1)));
        drop(rows);
        let (_pool, tenant) = common::tenancy(rig, 4);
        if rig.device.total_memory() / G < 1025 {
            return;
        }
        let ranges = || tenant.block(0).capacity(G);
        let mut long = ranges().try_allocate_adjacent(1025).unwrap();
        drop(long.remove(1));
        assert!(none(ranges().try_allocate_beside(&long[0], 1)));
    }

    fn work_of_the_last_block_comes_first(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let [stream, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        let mut rows = of(&tenant, &stream).try_allocate_adjacent(3).unwrap();
        busy(rig, &stream, &rows[1], 7);
        let hole = rows.remove(1).address();
        // Without a home stream the work must be complete.
        let plain = || tenant.block(2 * G).capacity(4 * G).largest_extent(2 * G);
        assert_eq!(plain().try_allocate_beside(&rows[0], 1).unwrap_err(), IN_USE);
        assert!(IN_USE.is_shortage() && !IN_USE.is_out_of_memory());
        // Neither can a guard's pool order anything.
        let guard = pool.capture_guard();
        let captured = of(&tenant, &other).try_allocate_beside(&rows[0], 1);
        assert!(matches!(captured, Err(BlockError::Capturing(_))), "{captured:?}");
        drop(guard);
        // Another stream is ordered behind it.
        let again = of(&tenant, &other).try_allocate_beside(&rows[0], 1).unwrap();
        assert_eq!(again.address(), hole);
        assert!(rig.faults.count(Call::StreamWaitEvent) > 0);
        drop(again);
        std::thread::scope(|scope| {
            let waits = || plain().timeout(Duration::from_secs(600)).allocate_beside(&rows[0], 1);
            let waiting = scope.spawn(waits);
            rig.machine.release_all_streams(D0);
            assert_eq!(waiting.join().unwrap().unwrap().address(), hole);
        });
    }

    fn a_lease_keeps_the_place(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 16);
        let mut rows = of(&tenant, &stream).try_allocate_adjacent(3).unwrap();
        let lease = rows[1].lease();
        let hole = rows.remove(1).address();
        assert_eq!(of(&tenant, &stream).try_allocate_beside(&rows[0], 1).unwrap_err(), IN_USE);
        drop(lease);
        let again = of(&tenant, &stream).try_allocate_beside(&rows[0], 1).unwrap();
        assert_eq!(again.address(), hole);
    }

    fn too_large_an_extent_is_unmapped_and_nothing_under_work(rig) {
        let (pool, tenant, stream) = common::scene(rig, 32);
        let of = |size| tenant.block(size).capacity(16 * G).home_stream(&stream);
        let mut rows = of(8 * G).try_allocate_adjacent(3).unwrap();
        busy(rig, &stream, &rows[1], 7);
        let hole = rows.remove(1).address();
        // It would strand seven granules.
        assert_eq!(of(G).try_allocate_beside(&rows[0], 1).unwrap_err(), IN_USE);
        rig.machine.release_all_streams(D0);
        let again = of(G).try_allocate_beside(&rows[0], 1).unwrap();
        assert_eq!((again.address(), again.extents().len()), (hole, 1));
        assert_eq!((again.extents()[0].size, tenant.stats().stranded), (G, 0));
        assert_eq!(books(rig, &pool).in_use, 17 * G);
        drop(again);
        // A range uses none of the memory, and waits for the work all the same.
        let range = of(0).try_allocate_beside(&rows[0], 1).unwrap();
        assert_eq!((range.address(), range.size()), (hole, 0));
        pool.trim(0).unwrap();
        assert_eq!(books(rig, &pool).committed, 16 * G);
    }

    fn places_of_exported_and_forked_blocks_serve_again(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 32).build().unwrap());
        let mut rows = of(&tenant, &stream).try_allocate_adjacent(3).unwrap();
        let hole = rows[1].address();
        let (handles, lease) = rows[1].export(HandleTypes::POSIX_FD).unwrap().into_parts();
        drop(rows.remove(1));
        assert_eq!(of(&tenant, &stream).try_allocate_beside(&rows[0], 1).unwrap_err(), IN_USE);
        drop(lease);
        let again = of(&tenant, &stream).try_allocate_beside(&rows[0], 1).unwrap();
        assert_eq!((again.address(), pool.stats().exported), (hole, 0));
        drop(again.export(HandleTypes::POSIX_FD).unwrap());
        drop(handles);
        rows.insert(1, again);
        // The forks are a row too, and the place of a forked block is filled beside its fork.
        let sources: Vec<&Block> = rows.iter().collect();
        let unshared = [sources[0], sources[2]];
        let mut forks = tenant.fork_all(&unshared, 2 * G, 2 * G).unwrap();
        drop(forks.pop());
        drop(forks.pop());
        let plain = of(&tenant, &stream).try_allocate_adjacent(2).unwrap();
        let plain: Vec<&Block> = plain.iter().collect();
        let mut forks = tenant.fork_all(&plain, 2 * G, 2 * G).unwrap();
        let hole = forks.remove(1).address();
        let again = of(&tenant, &stream).try_allocate_beside(&forks[0], 1).unwrap();
        assert_eq!((again.address(), again.read_only()), (hole, 0));
        again.write(0, &[8; 4]).unwrap();
        assert_eq!(books(rig, &pool).shared, 2 * G);
    }
}

#[test]
fn every_call_of_filling_a_hole_fails_once() {
    for (size, undone) in [(2 * G, true), (6 * G, true), (G, false), (2 * G, false)] {
        let calls = sweep_of(
            |rig| {
                let mut world = world(rig);
                let of = world.tenants[0]
                    .block(4 * G)
                    .capacity(8 * G)
                    .largest_extent(4 * G);
                let of = of.home_stream(&world.streams[0]);
                let mut rows = of.try_allocate_adjacent(2).unwrap();
                drop(rows.pop());
                if undone {
                    world.pool.trim(0).unwrap();
                }
                world.blocks.append(&mut rows);
                world
            },
            |_, world| {
                let of = world.tenants[0]
                    .block(size)
                    .capacity(8 * G)
                    .largest_extent(4 * G);
                let of = of.home_stream(&world.streams[1]);
                let again = text(of.try_allocate_beside(&world.blocks[1], 1))?;
                Ok(world.blocks.push(again))
            },
            |world| {
                let books = of_pool(world);
                (books.in_use, books.addresses, books.quarantined)
            },
            // Too large an extent is unmapped first.
            undone,
        );
        assert!(calls >= 3, "{calls}");
    }
}
