//! Heaps whose memory other devices have access to.

use crate::common;
use crate::common::sweep::{sweep, text};
use crate::common::{D1, G, Rig};
use crate::on_both;
use cuvmm::driver::model::{Backing, ModelDriver, Nothing};
use cuvmm::driver::{AccessFlags, Call, DeviceAddress, Driver, Location};
use cuvmm::error::{ArgumentError, BlockError, MemoryError};
use cuvmm::{Access, Allocation, CallError, Device, Heap, Pool, Stream};

/// Returns the access of device 1 to each granule of an allocation that begins in its own.
fn access(rig: &Rig<impl Backing>, memory: &Allocation) -> Vec<AccessFlags> {
    let one = Location::device(D1);
    let at = |offset| DeviceAddress(memory.address().0 + offset);
    let offsets = (0..memory.size()).step_by(G as usize);
    offsets
        .map(|offset| rig.machine.get_access(at(offset), one).unwrap())
        .collect()
}

/// Queues a kernel of device 1 that writes to all of an allocation.
fn write_from_peer(rig: &Rig<impl Backing>, by: &Stream, memory: &Allocation, byte: u8) {
    let writes = vec![(memory.address(), memory.size(), byte)];
    let queued = rig.machine.queue_kernel(D1, by.as_raw(), vec![], writes);
    queued.unwrap();
}

fn first_byte(rig: &Rig<impl Backing>, memory: &Allocation) -> u8 {
    let seen = common::copy(rig, memory.address().0);
    seen.unwrap()[0]
}

/// Leaves free memory in four places that only a stitch can join.
fn in_pieces(heap: &Heap, stream: &Stream) -> Vec<Allocation> {
    let allocate = |size| heap.allocate(size, 1, stream).unwrap();
    let mut all: Vec<Allocation> = (0..8).map(|_| allocate(G)).collect();
    for index in [6, 4, 2, 0] {
        drop(all.remove(index));
    }
    assert_eq!((heap.stats().free, heap.stats().largest_run), (4 * G, G));
    all
}

on_both! {
    fn each_mapping_gives_the_other_device_access_in_one_call(rig) {
        let second = rig.second();
        let (_pool, tenant) = common::tenancy(rig, 8);
        let heap = Heap::builder(&tenant).open_to(&second, Access::ReadWrite).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let kept = in_pieces(&heap, &stream);
        for memory in &kept {
            assert_eq!(access(rig, memory), [AccessFlags::READ_WRITE]);
        }
        let stitched = heap.allocate(4 * G, 1, &stream).unwrap();
        assert_eq!(heap.stats().stitches, 1);
        assert_eq!(access(rig, &stitched), [AccessFlags::READ_WRITE; 4]);
        let calls = rig.device.calls();
        assert_eq!(calls.count(Call::MemSetAccess), calls.count(Call::MemMap));
        assert_eq!(calls.count(Call::MemMap), heap.stats().mapped);
        // And none in memory of the same pool that is not the heap's.
        drop((kept, stitched));
        heap.trim().unwrap();
        let other = Heap::builder(&tenant).build().unwrap();
        let memory = other.allocate(2 * G, G, &stream).unwrap();
        assert_eq!(access(rig, &memory), [AccessFlags::NONE; 2]);
    }

    fn access_may_be_to_read_alone(rig) {
        let second = rig.second();
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).open_to(&second, Access::Read).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let memory = heap.allocate(2 * G, G, &stream).unwrap();
        assert_eq!(access(rig, &memory), [AccessFlags::READ; 2]);
    }

    fn work_of_the_other_device_is_waited_for(rig) {
        let second = rig.second();
        let (_pool, tenant) = common::tenancy(rig, 4);
        let builder = Heap::builder(&tenant).open_to(&second, Access::ReadWrite);
        let heap = builder.stream_waits(false).build().unwrap();
        let (home, peer) = (Stream::new(&rig.device).unwrap(), Stream::new(&second).unwrap());
        let memory = heap.allocate(4 * G, 1, &home).unwrap();
        memory.record_use(&peer).unwrap();
        rig.machine.hold(D1, peer.as_raw());
        write_from_peer(rig, &peer, &memory, 7);
        drop(memory);
        assert!(heap.allocate(4 * G, 1, &home).unwrap_err().is_out_of_memory());
        assert_eq!((heap.trim().unwrap(), tenant.stats().pending_free), (0, 4 * G));
        rig.machine.release_stream(D1, peer.as_raw());
        let memory = heap.allocate(4 * G, 1, &home).unwrap();
        rig.shows(first_byte(rig, &memory), 7);
        drop(memory);
        assert_eq!(heap.trim().unwrap(), 4 * G);
    }

    fn a_stream_waits_for_the_other_device_on_the_gpu(rig) {
        let second = rig.second();
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).open_to(&second, Access::ReadWrite).build().unwrap();
        let (home, peer) = (Stream::new(&rig.device).unwrap(), Stream::new(&second).unwrap());
        let memory = heap.allocate(4 * G, 1, &home).unwrap();
        memory.record_use(&peer).unwrap();
        rig.machine.hold(D1, peer.as_raw());
        write_from_peer(rig, &peer, &memory, 7);
        drop(memory);
        let next = heap.allocate(4 * G, 1, &home).unwrap();
        assert_eq!(heap.stats().stream_waits, 1);
        rig.kernel(&home, &[], &[(next.address(), next.size(), 8)]);
        rig.machine.release_stream(D1, peer.as_raw());
        home.synchronize().unwrap();
        rig.shows(first_byte(rig, &next), 8);
    }

    fn a_heap_that_ends_waits_for_the_other_device(rig) {
        let second = rig.second();
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).open_to(&second, Access::ReadWrite).build().unwrap();
        let (home, peer) = (Stream::new(&rig.device).unwrap(), Stream::new(&second).unwrap());
        let memory = heap.allocate(4 * G, 1, &home).unwrap();
        memory.record_use(&peer).unwrap();
        rig.machine.hold(D1, peer.as_raw());
        write_from_peer(rig, &peer, &memory, 7);
        drop((memory, heap));
        assert!(tenant.try_allocate(G).is_err(), "the memory is still mapped");
        rig.machine.release_stream(D1, peer.as_raw());
        drop(tenant.try_allocate(4 * G).unwrap());
    }

    fn devices_that_cannot_be_named_change_nothing(rig) {
        let (second, stranger) = (rig.second(), common::model());
        let (pool, tenant) = common::tenancy(rig, 4);
        let before = rig.machine.snapshot();
        let calls = rig.device.calls().total();
        let refused = |devices: &[&Device], access| {
            let builder = Heap::builder(&tenant);
            let builder = devices.iter().fold(builder, |it, device| it.open_to(device, access));
            match builder.build().unwrap_err() {
                BlockError::Memory(MemoryError::Argument(error)) | BlockError::Argument(error) => error,
                other => panic!("{other}"),
            }
        };
        let has = |device: &Device| ArgumentError::HasAccess(device.location());
        assert_eq!(refused(&[&rig.device], Access::ReadWrite), has(&rig.device));
        assert_eq!(refused(&[&second, &second.clone()], Access::Read), has(&second));
        assert_eq!(
            refused(&[&second, &stranger.device], Access::ReadWrite),
            ArgumentError::WrongDriver("the device")
        );
        assert!(matches!(refused(&[&second], Access::None), ArgumentError::Zero { .. }));
        assert_eq!(pool.stats().addresses, 0);
        assert_eq!(rig.machine.snapshot(), before);
        // Some of them were asked about.
        let asked = rig.device.calls().count(Call::DeviceCanAccessPeer);
        assert_eq!(rig.device.calls().total() - calls, asked);
        let error = has(&second).to_string();
        assert!(error.contains("has access already"), "{error}");
    }

    fn a_device_without_access_cannot_be_recorded(rig) {
        let second = rig.second();
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).build().unwrap();
        let (home, peer) = (Stream::new(&rig.device).unwrap(), Stream::new(&second).unwrap());
        let memory = heap.allocate(G, 1, &home).unwrap();
        assert_eq!(memory.record_use(&peer), Err(CallError::WrongDriver));
        let open = Heap::builder(&tenant).open_to(&second, Access::ReadWrite).build().unwrap();
        // An allocation belongs to a stream of the heap's own device.
        let refused = open.allocate(G, 1, &peer).unwrap_err();
        assert!(matches!(refused, BlockError::Argument(ArgumentError::WrongDevice { .. })));
    }
}

#[test]
fn a_device_that_cannot_reach_the_memory_is_refused() {
    let rig = common::rig(ModelDriver::new(common::model_options().unreachable(1, 0)));
    let second = rig.second();
    let (pool, tenant) = common::tenancy(&rig, 4);
    let builder = Heap::builder(&tenant).open_to(&second, Access::ReadWrite);
    let refused = builder.build().unwrap_err();
    let expected = MemoryError::Unreachable {
        device: second.location(),
        place: rig.device.location(),
    };
    assert!(
        matches!(&refused, BlockError::Memory(error) if *error == expected),
        "{refused}"
    );
    assert_eq!(pool.stats().addresses, 0);
}

#[test]
fn failed_calls_change_nothing() {
    struct World {
        live: Vec<Allocation>,
        heap: Option<Heap>,
        tenant: cuvmm::Tenant,
        stream: Stream,
        second: Device,
        pool: Pool,
    }
    let world = |rig: &Rig<Nothing>| {
        let second = rig.second();
        let pool = common::limited(rig, 8);
        let (pool, tenant, stream) = common::with_stream(rig, pool.build().unwrap());
        World {
            live: vec![],
            heap: None,
            tenant,
            stream,
            second,
            pool,
        }
    };
    let build = |world: &mut World| {
        let builder = Heap::builder(&world.tenant).open_to(&world.second, Access::ReadWrite);
        world.heap = Some(text(builder.build())?);
        Ok(())
    };
    let picture = |world: &World| {
        let stats = world.heap.as_ref().map(Heap::stats);
        (stats, world.pool.stats().committed)
    };
    let calls = sweep(world, |_, world| build(world), picture);
    assert_eq!(calls, 1, "the question");
    let allocate = |world: &mut World, size| {
        let heap = world.heap.as_ref().unwrap();
        world
            .live
            .push(text(heap.allocate(size, 1, &world.stream))?);
        Ok(())
    };
    let calls = sweep(
        |rig| {
            let mut world = world(rig);
            build(&mut world).unwrap();
            world
        },
        |_, world| allocate(world, 3 * G),
        |world| (world.live.len(), world.pool.stats().committed),
    );
    assert!(calls >= 3, "{calls}");
    let calls = sweep(
        |rig| {
            let mut world = world(rig);
            build(&mut world).unwrap();
            world.live = in_pieces(world.heap.as_ref().unwrap(), &world.stream);
            world
        },
        |_, world| allocate(world, 4 * G),
        |world| (world.live.len(), world.pool.stats().committed),
    );
    assert!(calls >= 6, "{calls}");
}
