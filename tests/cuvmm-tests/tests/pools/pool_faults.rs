//! Fails every driver call of the pool's operations once. A failure changes nothing, and the
//! operation then succeeds.
#![allow(clippy::unit_arg)]

use crate::common;
use crate::common::sweep::{sweep, sweep_closing, sweep_partly, text};
use crate::common::world::{World, books, of_pool, world, world_of};
use crate::common::{G, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call, HandleTypes};
use cuvmm::error::{BlockError, MemoryError};
use cuvmm::{Hardened, Pool, Region};

/// Creates a world with a hardened pool whose 46 granules of addresses are all in use: a block has
/// 18 of them, and two dropped blocks rest on 28. Their 14 granules of memory are in the free list.
/// The memory of the first was filled, that of the second could not be.
fn hardened_world(rig: &Rig<Nothing>) -> World {
    let builder = Pool::builder(&rig.device).hardened(Hardened::new());
    let world = world_of(rig, builder.address_limit(46 * G));
    drop(
        world.tenants[0]
            .allocate_on(&world.streams[0], 8 * G)
            .unwrap(),
    );
    drop(world.tenants[0].try_allocate(14 * G).unwrap());
    let stats = world.pool.stats();
    assert_eq!((stats.addresses, stats.resting_blocks), (46 * G, 2));
    assert_eq!((stats.committed, stats.free), (2 * G, 14 * G));
    world
}

#[test]
fn allocating_cold() {
    let calls = sweep(
        world,
        |_, world| {
            Ok(world
                .blocks
                .push(text(world.tenants[1].try_allocate(7 * G))?))
        },
        of_pool,
    );
    assert_eq!(calls, 10, "one reservation and 3 extents of 3 calls");
}

/// Allocates all remaining memory of the pool, which requires a reclaim.
fn allocate_the_rest(world: &mut World) -> Result<(), String> {
    let stats = world.pool.stats();
    let left = 16 * G - stats.in_use - stats.quarantined;
    Ok(world
        .blocks
        .push(text(world.tenants[1].try_allocate(left))?))
}

#[test]
fn allocating_in_a_hardened_pool() {
    // With enough addresses: as in a plain pool, plus zeroing for memory that could not be filled.
    let calls = sweep_partly(
        |rig| {
            let mut world = hardened_world(rig);
            world.blocks.clear();
            assert_eq!(world.pool.stats().addresses, 46 * G);
            world
        },
        |_, world| {
            let builder = world.tenants[0].block(7 * G);
            let on = builder.home_stream(&world.streams[0]);
            Ok(world.blocks.push(text(on.try_allocate())?))
        },
        |world| {
            let stats = world.pool.stats();
            (stats.in_use, stats.committed, stats.mappings)
        },
    );
    assert!(
        calls >= 8,
        "addresses freed, addresses reserved, extents: {calls}"
    );
    // Only the resting addresses can be released.
    let calls = sweep_partly(
        hardened_world,
        |_, world| allocate_the_rest(world),
        |world| {
            let stats = world.pool.stats();
            (stats.in_use, stats.committed, world.blocks.len())
        },
    );
    assert!(calls >= 8, "{calls}");
    // If nothing rests or is pending, nothing moves.
    let calls = sweep(
        |rig| world_of(rig, Pool::builder(&rig.device).hardened(Hardened::new())),
        |_, world| allocate_the_rest(world),
        of_pool,
    );
    assert_eq!(calls, 10, "one reservation and 3 extents of 3 calls");
    let calls = sweep(
        |rig| world_of(rig, Pool::builder(&rig.device).hardened(Hardened::new())),
        |_, world| text(world.blocks[0].try_grow_to(9 * G)),
        of_pool,
    );
    assert_eq!(calls, 9, "3 extents of 3 calls, and none precommitted");
}

#[test]
fn giving_up_in_a_hardened_pool() {
    // A drop reports no error. The next operation repeats the calls that failed in it.
    for (shrinks, home) in [(false, true), (false, false), (true, true)] {
        let calls = sweep_partly(
            |rig| {
                let mut world = world_of(rig, Pool::builder(&rig.device).hardened(Hardened::new()));
                let mut builder = world.tenants[0].block(7 * G);
                if home {
                    builder = builder.home_stream(&world.streams[1]);
                }
                world.blocks.push(builder.try_allocate().unwrap());
                world
            },
            |rig, world| {
                if world.blocks.len() > 1 {
                    match shrinks {
                        true => world.blocks[1].shrink_to(4 * G).unwrap(),
                        false => world.blocks.truncate(1),
                    }
                }
                let failed = rig.faults.injected() > 0;
                let books = books(&world.pool);
                let kept = if shrinks { 4 * G } else { 0 };
                assert_eq!(books.in_use, 2 * G + kept);
                assert!(failed || books.committed == books.in_use, "{books:?}");
                allocate_the_rest(world)?;
                world.blocks.truncate(1);
                Ok(())
            },
            |world| {
                let stats = world.pool.stats();
                (stats.quarantined, world.blocks.len())
            },
        );
        assert!(calls >= 8, "{calls}");
    }
}

/// Creates a world whose memory may be exported, in extents of a granule. The first block has 2 of
/// them.
fn sharing_world(rig: &Rig<Nothing>) -> World {
    let builder = Pool::builder(&rig.device).shareable(HandleTypes::POSIX_FD);
    world_of(rig, builder.largest_extent(G))
}

#[test]
fn exporting() {
    let calls = sweep(
        sharing_world,
        |_, world| {
            let exported = text(world.blocks[0].export(HandleTypes::POSIX_FD))?;
            assert_eq!(exported.handles().len(), 2);
            assert_eq!(world.pool.stats().exported, 2 * G);
            Ok(())
        },
        |world| {
            let stats = world.pool.stats();
            (books(&world.pool), stats.exported, stats.tenants[0].leases)
        },
    );
    assert_eq!(calls, 2);
    let calls = sweep(
        |rig| {
            let types = HandleTypes::POSIX_FD;
            let builder = Region::builder(&rig.device, 4 * G).largest_extent(G);

            common::committed(builder.shareable(types), 3 * G)
        },
        |_, region| text(region.export(0..3 * G, HandleTypes::POSIX_FD)).map(drop),
        Region::exported,
    );
    assert_eq!(calls, 3);
}

#[test]
fn giving_up_what_was_exported() {
    // A drop reports no error. The next operation repeats the calls that failed in it. A failure to
    // take memory from the end of a live block fails the request that needs it.
    for (shrinks, home) in [(false, true), (false, false), (true, true)] {
        let calls = sweep_partly(
            |rig| {
                let mut world = sharing_world(rig);
                let mut builder = world.tenants[0].block(7 * G);
                if home {
                    builder = builder.home_stream(&world.streams[1]);
                }
                let mut block = builder.try_allocate().unwrap();
                drop(block.export(HandleTypes::POSIX_FD).unwrap());
                if shrinks {
                    block.shrink_to(4 * G).unwrap();
                }
                world.blocks.push(block);
                world
            },
            move |rig, world| {
                if !shrinks {
                    world.blocks.truncate(1);
                }
                let stats = world.pool.stats();
                let failed = rig.faults.injected() > 0;
                assert!(shrinks || failed || stats.exported == 0, "{stats:#?}");
                // All remaining memory, none of which is available before it is released.
                let room = 16 * G - stats.in_use - stats.quarantined;
                let block = text(world.tenants[1].try_allocate(room));
                let stats = world.pool.stats();
                assert_eq!(stats.committed + stats.free + stats.quarantined, {
                    let live = rig.machine.live();
                    assert_eq!(live.exported_only, 0, "the handles are closed");
                    live.physical_bytes
                });
                drop(block?);
                assert_eq!(stats.exported, if shrinks { 4 * G } else { 0 });
                world.blocks.truncate(1);
                Ok(())
            },
            |world| world.blocks[0].size(),
        );
        assert!(calls >= 20, "{calls}");
    }
}

#[test]
fn growing() {
    let calls = sweep(
        world,
        |_, world| text(world.blocks[0].try_grow_to(9 * G)),
        of_pool,
    );
    assert_eq!(calls, 9);
}

/// Creates a world with a block of 32 granules that may grow to 35, and three granules in the free
/// list that another tenant wrote to.
fn world_of_margins(rig: &Rig<Nothing>) -> World {
    let mut world = world(rig);
    world.blocks.clear();
    world.tenants.clear();
    world.pool = common::pool(rig, 40);
    world.tenants = ["a", "b"]
        .map(|name| world.pool.tenant(name).register().unwrap())
        .into();
    let grown = world.tenants[0].block(32 * G).capacity(35 * G);
    let grown = grown.home_stream(&world.streams[0]).try_allocate().unwrap();
    world.blocks.push(grown);
    let gone = world.pool.tenant("gone").register().unwrap();
    let to_scrub = gone.allocate_on(&world.streams[1], 3 * G).unwrap();
    to_scrub.write(0, b"soiled").unwrap();
    drop(to_scrub);
    gone.unregister();
    world
}

#[test]
fn growing_with_margin() {
    let calls = sweep(
        world_of_margins,
        |_, world| {
            text(world.blocks[0].try_grow_to(33 * G))?;
            // Growth that runs out of memory with precommitted memory succeeds without it.
            assert!(world.pool.stats().precommitted <= 2 * G);
            Ok(())
        },
        of_pool,
    );
    assert!(calls >= 6, "two extents and a scrub: {calls}");
}

#[test]
fn taking_margin_back() {
    let calls = sweep_partly(
        |rig| {
            let mut world = world_of_margins(rig);
            world.blocks[0].try_grow_to(33 * G).unwrap();
            assert_eq!(world.pool.stats().precommitted, 2 * G);
            world
        },
        |_, world| {
            // A granule that the driver did not take back is quarantined.
            let left = 6 * G - world.pool.stats().quarantined;
            let block = text(world.tenants[1].try_allocate(left))?;
            assert_eq!(world.pool.stats().precommitted, G);
            Ok(world.blocks.push(block))
        },
        |world| {
            let stats = world.pool.stats();
            (stats.in_use, stats.quarantined, world.blocks.len())
        },
    );
    assert!(calls >= 8, "{calls}");
}

#[test]
fn allocating_warm_behind_another_stream() {
    let calls = sweep(
        |rig| {
            let world = world(rig);
            drop(
                world.tenants[0]
                    .allocate_on(&world.streams[0], 4 * G)
                    .unwrap(),
            );
            world
        },
        |_, world| {
            let builder = world.tenants[0]
                .block(6 * G)
                .capacity(4 * G)
                .capacity(8 * G);
            let on = builder.home_stream(&world.streams[1]).zeroed(true);
            Ok(world.blocks.push(text(on.try_allocate())?))
        },
        of_pool,
    );
    assert!(calls >= 4, "{calls}");
}

#[test]
fn reusing_warm_memory_in_part() {
    for home in [true, false] {
        let calls = sweep(
            |rig| {
                let world = world(rig);
                let small = world.tenants[0].block(3 * G).capacity(8 * G);
                drop(small.home_stream(&world.streams[0]).try_allocate().unwrap());
                world
            },
            |_, world| {
                let mut builder = world.tenants[0].block(7 * G).capacity(8 * G).zeroed(true);
                if home {
                    builder = builder.home_stream(&world.streams[1]);
                }
                Ok(world.blocks.push(text(builder.try_allocate())?))
            },
            of_pool,
        );
        assert!(calls >= 8, "{calls}");
    }
}

#[test]
fn scrubbing_what_another_tenant_left_in_stock() {
    for home in [true, false] {
        let calls = sweep(
            |rig| {
                let world = world(rig);
                let guest = world.pool.tenant("guest").register().unwrap();
                drop(guest.try_allocate(4 * G).unwrap());
                guest.unregister();
                assert_eq!(world.pool.stats().free, 4 * G);
                world
            },
            |_, world| {
                let mut builder = world.tenants[1].block(6 * G);
                if home {
                    builder = builder.home_stream(&world.streams[1]);
                }
                Ok(world.blocks.push(text(builder.try_allocate())?))
            },
            of_pool,
        );
        assert!(calls >= 7, "{calls}");
    }
}

#[test]
fn taking_back_from_another_tenant() {
    for priority in [0, 1] {
        let calls = sweep_partly(
            |rig| {
                let world = world(rig);
                let big = world.tenants[0].block(7 * G).home_stream(&world.streams[0]);
                drop(big.try_allocate().unwrap());
                drop(world.tenants[0].try_allocate(7 * G).unwrap());
                world
            },
            move |_, world| {
                let block = text(world.tenants[1].try_allocate((6 + priority) * G))?;
                let stats = world.pool.stats();
                assert!(stats.committed + stats.free <= 16 * G);
                Ok(world.blocks.push(block))
            },
            |world| {
                let stats = world.pool.stats();
                (stats.in_use, stats.quarantined, world.blocks.len())
            },
        );
        assert!(calls >= 7, "{calls}");
    }
}

#[test]
fn trimming_and_unregistering() {
    let idle = |rig: &Rig<Nothing>| {
        let world = world(rig);
        drop(world.tenants[1].try_allocate(7 * G).unwrap());
        world
    };
    let calls = sweep_partly(
        idle,
        |_, world| {
            text(world.pool.trim(0))?;
            let stats = world.pool.stats();
            // An extent whose unmapping failed stays, and a physical allocation that the driver did
            // not take back is quarantined, not lost.
            assert_eq!(stats.committed + stats.free, 2 * G + stats.pending_free);
            Ok(())
        },
        |_| (),
    );
    assert!(calls >= 6, "{calls}");
    let calls = sweep_partly(
        idle,
        |_, world| {
            if let Some(tenant) = (world.tenants.len() > 1)
                .then(|| world.tenants.pop())
                .flatten()
            {
                tenant.unregister();
            }
            let stats = world.pool.stats();
            assert_eq!(stats.committed + stats.free, 9 * G, "nothing is lost");
            Ok(())
        },
        |_| (),
    );
    assert!(calls >= 3, "{calls}");
}

#[test]
fn closing_a_pool() {
    let calls = sweep_closing(|rig| (world(rig).pool, ()), Pool::close);
    assert!(calls >= 1, "{calls}");
}

#[test]
fn a_driver_that_has_no_more_mappings_is_told_from_one_that_fails() {
    let rig = common::clean(common::rig(cuvmm::driver::model::ModelDriver::new(
        common::model_options().mapping_ceiling(2),
    )));
    let (_pool, tenant) = common::tenancy(&rig, 16);
    let refused = tenant.try_allocate(7 * G).unwrap_err();
    assert!(
        matches!(refused, BlockError::DriverOutOfMemory { .. }),
        "{refused}"
    );
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
    let refused = tenant.try_allocate(G).unwrap_err();
    let mapping = matches!(refused, BlockError::Memory(MemoryError::Range { .. }));
    assert!(mapping, "{refused}");
    rig.faults.disarm();
}
