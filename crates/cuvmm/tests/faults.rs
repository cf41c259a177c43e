//! Every driver call of every operation, failed once: nothing has changed afterwards, and the
//! operation then succeeds. And where the roll-back fails too, exactly that is quarantined.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unit_arg
)]

mod common;

use std::fmt::Debug;

use common::books::figures;
use common::sweep::{sweep, text};
use common::{G, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call, HandleTypes};
use cuvmm::error::{AllocateError, SleepError};
use cuvmm::pool::PoolBuilder;
use cuvmm::unified::{Advice, Policy, Residence};
use cuvmm::{
    Access, Block, Contents, Event, Hardened, HostStore, Limit, Mapping, Physical, Pool, Region,
    Reservation, Right, Stream, Tenant, UnifiedBuffer,
};

/// The figures of a pool that an operation which failed may not change.
#[derive(Debug, PartialEq)]
struct Books {
    committed: u64,
    in_use: u64,
    idle: u64,
    margin: u64,
    free: u64,
    quarantined: u64,
    mappings: u64,
    addresses: u64,
    tenants: Vec<(u64, u64, u64, u64)>,
}

fn books(pool: &Pool) -> Books {
    let stats = figures(pool);
    Books {
        committed: stats.committed,
        in_use: stats.in_use,
        idle: stats.warm + stats.limbo,
        margin: stats.margin,
        free: stats.free,
        quarantined: stats.quarantined,
        mappings: stats.mappings,
        addresses: stats.addresses,
        tenants: stats
            .tenants
            .iter()
            .map(|tenant| {
                (
                    tenant.committed,
                    tenant.in_use,
                    tenant.blocks,
                    tenant.mappings,
                )
            })
            .collect(),
    }
}

#[test]
fn owners() {
    let calls = sweep(
        |_| Vec::<Reservation>::new(),
        |rig, made| Ok(made.push(text(Reservation::new(&rig.device, G))?)),
        |_| (),
        true,
    );
    assert_eq!(calls, 1);
    let calls = sweep(
        |_| Vec::<Physical>::new(),
        |rig, made| Ok(made.push(text(Physical::new(&rig.device, G))?)),
        |_| (),
        true,
    );
    assert_eq!(calls, 1);
    type Placed = (Reservation, Physical, Option<Mapping>);
    let place = |rig: &Rig<Nothing>| -> Placed {
        let reservation = Reservation::new(&rig.device, 2 * G).unwrap();
        (reservation, Physical::new(&rig.device, G).unwrap(), None)
    };
    let calls = sweep(
        place,
        |_, (reservation, physical, mapping)| {
            Ok(*mapping = Some(text(reservation.map(G, physical))?))
        },
        |world| world.0.mapped_bytes(),
        true,
    );
    assert_eq!(calls, 1);
    let mapped = move |rig: &Rig<Nothing>| {
        let (reservation, physical, _) = place(rig);
        let mapping = reservation.map(0, &physical).unwrap();
        (mapping, reservation, physical)
    };
    let calls = sweep(
        mapped,
        |rig, (mapping, ..)| text(mapping.set_access(&[Access::device(&rig.device, Right::Read)])),
        |_| (),
        true,
    );
    assert_eq!(calls, 1);
    let calls = sweep(
        mapped,
        |rig, (mapping, reservation, _)| {
            text(mapping.access_of(&rig.device))?;
            text(reservation.physical_at(0))?
                .props()
                .map(|_| ())
                .map_err(|e| e.to_string())
        },
        |_| (),
        true,
    );
    assert!(calls >= 3, "{calls}");
    let calls = sweep(
        |_| Vec::new(),
        |rig, made| {
            let stream = text(Stream::new(&rig.device))?;
            let event = text(Event::new(&rig.device))?;
            text(event.record(&stream))?;
            text(stream.wait(&event))?;
            text(event.synchronize())?;
            Ok(made.push((stream, event)))
        },
        |_| (),
        true,
    );
    assert!(calls >= 5, "{calls}");
}

#[test]
fn regions() {
    let region = |rig: &Rig<Nothing>| {
        let mut region = Region::reserve(&rig.device, 64 * G).unwrap();
        region.commit(2 * G..4 * G).unwrap();
        region
    };
    let calls = sweep(
        region,
        |_, region| text(region.commit(0..13 * G)),
        |region| {
            (
                region.committed(),
                region.held(),
                region.limbo(),
                region.quarantined(),
            )
        },
        true,
    );
    assert_eq!(calls, 9, "3 extents of 3 calls");
    // Giving back: each extent that went stays gone, each that did not stays whole.
    let calls = sweep(
        |rig| {
            let mut region = region(rig);
            region.commit(0..8 * G).unwrap();
            region.decommit(0..8 * G).unwrap();
            region
        },
        |_, region| {
            text(region.reclaim())?;
            assert_eq!(region.held(), 0);
            Ok(())
        },
        |_| (),
        false,
    );
    assert!(calls >= 6, "{calls}");
    let calls = sweep(
        |rig| (vec![region(rig)], ()),
        |_, (regions, ())| {
            let Some(region) = regions.pop() else {
                return Ok(());
            };
            region.close().map_err(|failed| {
                let error = failed.to_string();
                regions.push(failed.owner);
                error
            })
        },
        |_| (),
        false,
    );
    assert!(calls >= 2, "{calls}");
}

#[test]
fn registrations() {
    let world = |rig: &Rig<Nothing>| {
        let mut region = Region::builder(&rig.device, 8 * G)
            .largest_extent(2 * G)
            .reserve()
            .unwrap();
        region.commit(0..4 * G).unwrap();
        let registration = region.register(0..4 * G).unwrap();
        (region, registration)
    };
    let calls = sweep(
        world,
        |_, (_, registration)| text(registration.dma_buf(0..4 * G)).map(drop),
        |(region, registration)| (region.registrations(), registration.is_exported()),
        true,
    );
    assert_eq!(calls, 1);
    // What a region left: each extent that went stays gone, each that did not is there still.
    let calls = sweep(
        |rig| {
            let (region, registration) = world(rig);
            drop(region);
            vec![registration]
        },
        |_, registrations| {
            let Some(registration) = registrations.pop() else {
                return Ok(());
            };
            registration.close().map_err(|failed| {
                let error = failed.to_string();
                registrations.push(failed.owner);
                error
            })
        },
        |_| (),
        false,
    );
    assert!(calls >= 3, "{calls}");
    let calls = sweep(
        |_| (),
        |rig, ()| {
            let builder = text(Physical::builder(&rig.device, G).for_nccl())?;
            text(builder.create()).map(drop)
        },
        |_| (),
        true,
    );
    assert!(calls >= 4, "{calls}");
}

type Shared = (UnifiedBuffer<u32>, [Stream; 2]);

fn shared(rig: &Rig<Nothing>) -> Shared {
    let [home, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
    let buffer = UnifiedBuffer::zeroed(&rig.device, &home, 5000).unwrap();
    (buffer, [home, other])
}

/// What the driver says of both halves of a shared buffer.
fn advice((buffer, _): &Shared) -> [(bool, Option<String>, Vec<String>); 2] {
    [0..2048, 2048..5000].map(|half| {
        let text = |place: cuvmm::driver::Location| place.to_string();
        let users = buffer.accessed_by(half.clone()).unwrap();
        (
            buffer.is_read_mostly(half.clone()).unwrap(),
            buffer.preferred_location(half).unwrap().map(text),
            users.into_iter().map(text).collect(),
        )
    })
}

#[test]
fn unified_buffers() {
    let calls = sweep(
        |rig| (Stream::new(&rig.device).unwrap(), vec![]),
        |rig, (home, made)| {
            let zeroed = UnifiedBuffer::<u32>::zeroed(&rig.device, home, 5000);
            made.push(text(zeroed)?);
            let copied = UnifiedBuffer::from_slice(&rig.device, home, &[1, 2, 3]);
            Ok(made.push(text(copied)?))
        },
        |_| (),
        false,
    );
    assert!(calls > 20, "{calls}");
    let calls = sweep(
        shared,
        |_, (buffer, [home, other])| {
            drop(text(buffer.device_mut(other))?);
            drop(text(buffer.device_read(home))?);
            drop(text(buffer.device_mut(home))?);
            assert_eq!(text(buffer.host())?.len(), 5000);
            drop(text(buffer.device_read(other))?);
            text(buffer.prefetch(.., Residence::Host, home))?;
            text(buffer.host_mut())?[0] = 1;
            text(buffer.fill(.., 0x0102_0304))?;
            text(buffer.write(1, &[1]))?;
            text(buffer.get(0)).map(drop)
        },
        advice,
        true,
    );
    assert!(calls > 50, "{calls}");
    let calls = sweep(
        |rig| {
            let shared = shared(rig);
            let there = Residence::HostNuma(0);
            let second = Advice::PreferredLocation(there);
            shared.0.set_policy(.., Policy::HostFirst).unwrap();
            shared.0.advise(2048.., second).unwrap();
            shared.0.advise(2048.., Advice::ReadMostly).unwrap();
            shared
        },
        |_, (buffer, _)| text(buffer.set_policy(.., Policy::DeviceFirst)),
        advice,
        true,
    );
    assert!(calls >= 7, "{calls}");
    let calls = sweep(
        |rig| {
            let (mut buffer, [home, other]) = shared(rig);
            drop(buffer.device_mut(&other).unwrap());
            drop(buffer.device_read(&home).unwrap());
            (vec![buffer], [home, other])
        },
        |_, (buffers, _)| {
            let Some(buffer) = buffers.pop() else {
                return Ok(());
            };
            buffer.close().map_err(|failed| {
                let error = failed.to_string();
                buffers.push(failed.owner);
                error
            })
        },
        |_| (),
        true,
    );
    assert!(calls >= 7, "{calls}");
}

struct World {
    // In the order in which they are dropped.
    blocks: Vec<Block>,
    tenants: Vec<Tenant>,
    streams: Vec<Stream>,
    pool: Pool,
}

/// Two tenants and two streams on a pool of 16 granules; the first tenant has a block of 2.
fn world(rig: &Rig<Nothing>) -> World {
    world_of(rig, Pool::builder(&rig.device))
}

/// The same in a hardened pool with room for 46 granules of addresses, all of which are taken: the
/// block has 18, and two blocks that are gone rest on 28, whose 16 granules are in stock. The first
/// was filled, the second could not be.
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

fn world_of(rig: &Rig<Nothing>, builder: PoolBuilder<'_>) -> World {
    let pool = builder.limit(Limit::Bytes(16 * G)).build().unwrap();
    let tenants: Vec<Tenant> = ["a", "b"]
        .iter()
        .map(|name| pool.tenant(*name).register().unwrap())
        .collect();
    let streams = vec![
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    ];
    let block = tenants[0]
        .block(2 * G)
        .capacity(12 * G)
        .home_stream(&streams[0]);
    World {
        blocks: vec![block.try_allocate().unwrap()],
        tenants,
        streams,
        pool,
    }
}

fn of_pool(world: &World) -> Books {
    books(&world.pool)
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
        true,
    );
    assert_eq!(calls, 10, "one reservation and 3 extents of 3 calls");
}

/// All of the pool's memory, which somebody must have given back.
fn allocate_the_rest(world: &mut World) -> Result<(), String> {
    let stats = world.pool.stats();
    let left = 16 * G - stats.in_use - stats.quarantined;
    Ok(world
        .blocks
        .push(text(world.tenants[1].try_allocate(left))?))
}

#[test]
fn allocating_in_a_hardened_pool() {
    // Where there are addresses: as in a plain pool, and zeros for what could not be filled.
    let calls = sweep(
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
        false,
    );
    assert!(calls >= 8, "addresses back, addresses, extents: {calls}");
    // Where only what rests can make way.
    let calls = sweep(
        hardened_world,
        |_, world| allocate_the_rest(world),
        |world| {
            let stats = world.pool.stats();
            (stats.in_use, stats.committed, world.blocks.len())
        },
        false,
    );
    assert!(calls >= 8, "{calls}");
    // Nothing rests, nothing waits: then nothing has moved.
    let calls = sweep(
        |rig| world_of(rig, Pool::builder(&rig.device).hardened(Hardened::new())),
        |_, world| allocate_the_rest(world),
        of_pool,
        true,
    );
    assert_eq!(calls, 10, "one reservation and 3 extents of 3 calls");
    let calls = sweep(
        |rig| world_of(rig, Pool::builder(&rig.device).hardened(Hardened::new())),
        |_, world| text(world.blocks[0].try_grow_to(9 * G)),
        of_pool,
        true,
    );
    assert_eq!(calls, 9, "3 extents of 3 calls, and none ahead");
}

#[test]
fn giving_up_in_a_hardened_pool() {
    // A drop says nothing, and what failed in it is done by whoever comes next.
    for (shrinks, home) in [(false, true), (false, false), (true, true)] {
        let calls = sweep(
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
            false,
        );
        assert!(calls >= 8, "{calls}");
    }
}

/// A world whose memory may be exported, in extents of a granule; the first block has 2 of them.
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
        true,
    );
    assert_eq!(calls, 2);
    let calls = sweep(
        |rig| {
            let types = HandleTypes::POSIX_FD;
            let builder = Region::builder(&rig.device, 4 * G).largest_extent(G);
            let mut region = builder.shareable(types).reserve().unwrap();
            region.commit(0..3 * G).unwrap();
            region
        },
        |_, region| text(region.export(0..3 * G, HandleTypes::POSIX_FD)).map(drop),
        Region::exported,
        true,
    );
    assert_eq!(calls, 3);
}

#[test]
fn giving_up_what_was_exported() {
    // A drop says nothing, and what failed in it is done by whoever comes next. What is taken back
    // from the end of a block that lives fails the one who wants it.
    for (shrinks, home) in [(false, true), (false, false), (true, true)] {
        let calls = sweep(
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
                // All that is left, of which nothing is to be had before it was released.
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
            false,
        );
        assert!(calls >= 20, "{calls}");
    }
}

#[test]
fn copying() {
    let calls = sweep(
        world,
        |_, world| {
            let block = &world.blocks[0];
            text(block.write(G - 4, b"over the granule"))?;
            text(block.read(G - 4, &mut [0; 16]))
        },
        of_pool,
        true,
    );
    assert!(calls >= 4, "{calls}");
    let calls = sweep(
        world,
        |rig, world| {
            text(rig.device.memory_info())?;
            text(rig.device.synchronize())?;
            text(world.streams[0].synchronize())?;
            text(world.streams[0].is_capturing())?;
            text(world.streams[0].is_done()).map(|_| ())
        },
        of_pool,
        true,
    );
    assert_eq!(calls, 5);
}

#[test]
fn growing() {
    let calls = sweep(
        world,
        |_, world| text(world.blocks[0].try_grow_to(9 * G)),
        of_pool,
        true,
    );
    assert_eq!(calls, 9);
}

/// The same with a block of 32 granules that may grow to 35, and three granules in stock that
/// another tenant wrote to.
fn world_of_margins(rig: &Rig<Nothing>) -> World {
    let mut world = world(rig);
    world.blocks.clear();
    world.tenants.clear();
    world.pool = Pool::builder(&rig.device)
        .limit(Limit::Bytes(40 * G))
        .build()
        .unwrap();
    world.tenants = ["a", "b"]
        .map(|name| world.pool.tenant(name).register().unwrap())
        .into();
    let grown = world.tenants[0].block(32 * G).capacity(35 * G);
    let grown = grown.home_stream(&world.streams[0]).try_allocate().unwrap();
    world.blocks.push(grown);
    let gone = world.pool.tenant("gone").register().unwrap();
    let soiled = gone.allocate_on(&world.streams[1], 3 * G).unwrap();
    soiled.write(0, b"soiled").unwrap();
    drop(soiled);
    gone.unregister();
    world
}

#[test]
fn growing_with_margin() {
    let calls = sweep(
        world_of_margins,
        |_, world| {
            text(world.blocks[0].try_grow_to(33 * G))?;
            // Out of memory with the margin is none without.
            assert!(world.pool.stats().margin <= 2 * G);
            Ok(())
        },
        of_pool,
        true,
    );
    assert!(calls >= 6, "two extents and a scrub: {calls}");
}

#[test]
fn taking_margin_back() {
    let calls = sweep(
        |rig| {
            let mut world = world_of_margins(rig);
            world.blocks[0].try_grow_to(33 * G).unwrap();
            assert_eq!(world.pool.stats().margin, 2 * G);
            world
        },
        |_, world| {
            // A granule that the driver would not take back is out of use.
            let left = 6 * G - world.pool.stats().quarantined;
            let block = text(world.tenants[1].try_allocate(left))?;
            assert_eq!(world.pool.stats().margin, G);
            Ok(world.blocks.push(block))
        },
        |world| {
            let stats = world.pool.stats();
            (stats.in_use, stats.quarantined, world.blocks.len())
        },
        false,
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
        true,
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
            true,
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
            true,
        );
        assert!(calls >= 7, "{calls}");
    }
}

#[test]
fn taking_back_from_another_tenant() {
    for priority in [0, 1] {
        let calls = sweep(
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
            false,
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
    let calls = sweep(
        idle,
        |_, world| {
            text(world.pool.trim(0))?;
            let stats = world.pool.stats();
            // A physical that the driver would not take is quarantined, not lost.
            assert_eq!(stats.committed + stats.free, 2 * G);
            Ok(())
        },
        |_| (),
        false,
    );
    assert!(calls >= 6, "{calls}");
    let calls = sweep(
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
        false,
    );
    assert!(calls >= 3, "{calls}");
}

#[test]
fn closing_a_pool() {
    let calls = sweep(
        |rig| {
            let mut world = world(rig);
            world.blocks.clear();
            world.tenants.clear();
            vec![world.pool]
        },
        |_, pools| {
            let Some(pool) = pools.pop() else {
                return Ok(());
            };
            pool.close().map_err(|failed| {
                let error = failed.to_string();
                pools.push(failed.owner);
                error
            })
        },
        |_| (),
        false,
    );
    assert!(calls >= 1, "{calls}");
}

/// Call k fails, and so does everything that would undo what came before it.
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
        // What is mapped beyond what was is exactly what is quarantined.
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

#[test]
fn what_a_pool_cannot_undo_is_quarantined_and_tried_again_at_the_end() {
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
            // Nobody is charged for it, and everybody has that much less.
            let left = 16 * G - before.committed - kept;
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
            // A reservation that would not be freed is lost to the process, and counted.
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
    assert_eq!(after.mappings, 3, "the block's, and two that are stuck");
}

#[test]
fn a_driver_that_has_no_more_mappings_is_told_from_one_that_fails() {
    let rig = common::rig(cuvmm::driver::model::ModelDriver::new(
        common::model_options().mapping_ceiling(2),
    ));
    let pool = common::pool(&rig, 16);
    let tenant = pool.tenant("a").register().unwrap();
    let refused = tenant.try_allocate(7 * G).unwrap_err();
    assert!(
        matches!(refused, AllocateError::DriverOutOfMemory { .. }),
        "{refused}"
    );
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
    let refused = tenant.try_allocate(G).unwrap_err();
    assert!(matches!(refused, AllocateError::Commit(_)), "{refused}");
    rig.faults.disarm();
    drop((tenant, pool));
    common::nothing_left(rig);
}

/// A tenant with blocks of two tags, and where their contents are kept.
struct Sleepers {
    pool: Pool,
    tenant: Tenant,
    blocks: Vec<Block>,
    store: HostStore,
    stream: Stream,
}

fn sleepers(rig: &Rig<Nothing>) -> Sleepers {
    let pool = common::pool(rig, 64);
    let tenant = pool.tenant("model").register().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let block = |size: u64, zeroed| {
        let block = tenant.block(size).zeroed(zeroed).home_stream(&stream);
        block.allocate().unwrap()
    };
    let blocks = vec![block(3 * G, false), block(5 * G + 1, true), block(G, false)];
    let store = HostStore::builder(&rig.device)
        .pinned(10 * G)
        .build()
        .unwrap();
    Sleepers {
        pool,
        tenant,
        blocks,
        store,
        stream,
    }
}

impl Sleepers {
    fn picture(&self) -> (Books, Vec<bool>, u64) {
        let asleep = self.blocks.iter().map(Block::is_asleep).collect();
        (books(&self.pool), asleep, self.store.free())
    }
}

#[test]
fn falling_asleep_and_waking() {
    let discard = |_: &Rig<Nothing>, world: &mut Sleepers| {
        let slept = text(world.tenant.blocks().sleep(Contents::Discard))?;
        assert_eq!((slept.blocks, slept.given), (3, 10 * G));
        Ok(())
    };
    let keep = |_: &Rig<Nothing>, world: &mut Sleepers| {
        let contents = Contents::Keep(&world.store);
        let slept = text(world.tenant.blocks().sleep(contents))?;
        assert_eq!((slept.blocks, slept.given), (3, 10 * G));
        assert_eq!(world.store.free(), 0);
        Ok(())
    };
    let wake = |_: &Rig<Nothing>, world: &mut Sleepers| {
        let woken = text(world.tenant.blocks().wake())?;
        assert_eq!((woken.blocks, woken.mapped), (3, 10 * G));
        assert_eq!(world.store.free(), 10 * G);
        Ok(())
    };
    let calls = sweep(sleepers, discard, Sleepers::picture, true);
    assert!(calls >= 6, "{calls}: queries, and one unmapping an extent");
    let calls = sweep(sleepers, keep, Sleepers::picture, true);
    assert!(calls >= 17, "{calls}: ten copies besides");
    let after = |fall: fn(&Sleepers) -> Contents<'_>, soil: bool| {
        move |rig: &Rig<Nothing>| {
            let world = sleepers(rig);
            world.tenant.blocks().sleep(fall(&world)).unwrap();
            if soil {
                // Of what is in stock then, some is another tenant's.
                let other = world.pool.tenant("other").register().unwrap();
                other
                    .allocate_on(&world.stream, 4 * G)
                    .unwrap()
                    .write(0, &[1])
                    .unwrap();
                world.stream.synchronize().unwrap();
            }
            world
        }
    };
    for soil in [false, true] {
        let calls = sweep(
            after(|_| Contents::Discard, soil),
            wake,
            Sleepers::picture,
            true,
        );
        assert!(calls >= 8, "{calls}: two calls an extent");
        let kept = after(|world| Contents::Keep(&world.store), soil);
        let calls = sweep(kept, wake, Sleepers::picture, true);
        assert!(calls >= 18, "{calls}: ten copies besides");
    }
}

/// Where the memory cannot be put back either, that block sleeps, and what was to be kept is.
#[test]
fn a_block_that_cannot_stay_awake_sleeps() {
    let rig = common::model();
    let world = sleepers(&rig);
    rig.faults.forget();
    // The last unmapping fails, and then the first mapping of what is put back.
    rig.faults
        .arm(Fault::nth(4, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
    rig.faults
        .arm(Fault::nth(1, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
    let outcome = world.tenant.blocks().sleep(Contents::Keep(&world.store));
    rig.faults.disarm();
    let Err(SleepError::Stayed {
        blocks,
        bytes,
        cause,
    }) = outcome
    else {
        panic!("{outcome:?}");
    };
    assert!(matches!(*cause, SleepError::Call(_)), "{cause:?}");
    let asleep: Vec<&Block> = world
        .blocks
        .iter()
        .filter(|block| block.is_asleep())
        .collect();
    assert_eq!(asleep.len() as u64, blocks);
    assert_eq!(asleep.iter().map(|block| block.size()).sum::<u64>(), bytes);
    assert_eq!(blocks, 1);
    let stats = world.pool.stats();
    assert_eq!(stats.asleep + stats.committed, 10 * G);
    assert_eq!(stats.quarantined, 0);
    books(&world.pool);
    let woken = world.tenant.blocks().wake().unwrap();
    assert_eq!((woken.blocks, woken.restored), (1, bytes));
    assert_eq!(
        (world.pool.stats().committed, world.store.free()),
        (10 * G, 10 * G)
    );
    drop(world);
    common::nothing_left(rig);
}
