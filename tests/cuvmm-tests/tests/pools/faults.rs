//! Fails every driver call of owners, regions, unified buffers and copies once. A failure changes
//! nothing, and the operation then succeeds.
#![allow(clippy::unit_arg)]

use crate::common::sweep::{sweep, sweep_closing, sweep_partly, text};
use crate::common::world::{of_pool, world};
use crate::common::{self, G, Rig};
use cuvmm::driver::model::Nothing;
use cuvmm::unified::{Advice, PageLocation, Policy};
use cuvmm::{
    Access, AccessGrant, Event, Mapping, Physical, Region, Registration, Reservation, Stream,
    UnifiedBuffer,
};

#[test]
fn owners() {
    let calls = sweep(
        |_| Vec::<Reservation>::new(),
        |rig, made| Ok(made.push(text(Reservation::new(&rig.device, G))?)),
        |_| (),
    );
    assert_eq!(calls, 1);
    let calls = sweep(
        |_| Vec::<Physical>::new(),
        |rig, made| Ok(made.push(text(Physical::new(&rig.device, G))?)),
        |_| (),
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
    );
    assert_eq!(calls, 1);
    let mapped = move |rig: &Rig<Nothing>| {
        let (reservation, physical, _) = place(rig);
        let mapping = reservation.map(0, &physical).unwrap();
        (mapping, reservation, physical)
    };
    let calls = sweep(
        mapped,
        |rig, (mapping, ..)| {
            text(mapping.set_access(&[AccessGrant::new(&rig.device, Access::Read)]))
        },
        |_| (),
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
                region.pending_free(),
                region.quarantined(),
            )
        },
    );
    assert_eq!(calls, 9, "3 extents of 3 calls");
    // On release, extents that were unmapped stay unmapped, and the others stay whole.
    let calls = sweep_partly(
        |rig| {
            let mut region = region(rig);
            region.commit(0..8 * G).unwrap();
            region.decommit(0..8 * G).unwrap();
            region
        },
        |_, region| {
            text(region.purge())?;
            assert_eq!(region.held(), 0);
            Ok(())
        },
        |_| (),
    );
    assert!(calls >= 6, "{calls}");
    let calls = sweep_closing(|rig| (region(rig), ()), Region::close);
    assert!(calls >= 2, "{calls}");
}

#[test]
fn registrations() {
    let world = |rig: &Rig<Nothing>| {
        let region = common::committed(
            Region::builder(&rig.device, 8 * G).largest_extent(2 * G),
            4 * G,
        );
        let registration = region.register(0..4 * G).unwrap();
        (region, registration)
    };
    let calls = sweep(
        world,
        |_, (_, registration)| text(registration.dma_buf(0..4 * G)).map(drop),
        |(region, registration)| (region.registrations(), registration.is_exported()),
    );
    assert_eq!(calls, 1);
    // After the region is dropped, extents that were unmapped stay unmapped, and the others are
    // still there.
    let calls = sweep_closing(|rig| (world(rig).1, ()), Registration::close);
    assert!(calls >= 3, "{calls}");
    let calls = sweep(
        // Whose failures are in `regions/rdma.rs`.
        |rig| drop(Physical::probe_rdma(&rig.device)),
        |rig, ()| {
            let builder = text(Physical::builder(&rig.device, G).for_nccl())?;
            text(builder.create()).map(drop)
        },
        |_| (),
    );
    assert!(calls >= 4, "{calls}");
}

type Shared = (UnifiedBuffer<u32>, [Stream; 2]);

fn shared(rig: &Rig<Nothing>) -> Shared {
    let [home, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
    let buffer = UnifiedBuffer::zeroed(&rig.device, &home, 5000).unwrap();
    (buffer, [home, other])
}

/// Returns the driver's advice for both halves of a shared buffer.
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
    let calls = sweep_partly(
        |rig| (Stream::new(&rig.device).unwrap(), vec![]),
        |rig, (home, made)| {
            let zeroed = UnifiedBuffer::<u32>::zeroed(&rig.device, home, 5000);
            made.push(text(zeroed)?);
            let copied = UnifiedBuffer::from_slice(&rig.device, home, &[1, 2, 3]);
            Ok(made.push(text(copied)?))
        },
        |_| (),
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
            text(buffer.prefetch(.., PageLocation::Host, home))?;
            text(buffer.host_mut())?[0] = 1;
            text(buffer.fill(.., 0x0102_0304))?;
            text(buffer.write(1, &[1]))?;
            text(buffer.get(0)).map(drop)
        },
        advice,
    );
    assert!(calls > 50, "{calls}");
    let calls = sweep(
        |rig| {
            let shared = shared(rig);
            let there = PageLocation::HostNuma(0);
            let second = Advice::PreferredLocation(there);
            shared.0.set_policy(.., Policy::HostFirst).unwrap();
            shared.0.advise(2048.., second).unwrap();
            shared.0.advise(2048.., Advice::ReadMostly).unwrap();
            shared
        },
        |_, (buffer, _)| text(buffer.set_policy(.., Policy::DeviceFirst)),
        advice,
    );
    assert!(calls >= 7, "{calls}");
    let used = |rig: &Rig<Nothing>| {
        let (mut buffer, [home, other]) = shared(rig);
        drop(buffer.device_mut(&other).unwrap());
        drop(buffer.device_read(&home).unwrap());
        (buffer, [home, other])
    };
    let calls = sweep_closing(used, UnifiedBuffer::close);
    assert!(calls >= 7, "{calls}");
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
    );
    assert_eq!(calls, 5);
}
