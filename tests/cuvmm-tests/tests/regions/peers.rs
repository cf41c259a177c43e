//! Memory that a second device has access to: all that waits for the work on it waits for the work
//! of both devices.

use std::sync::Arc;

use crate::common;
use crate::common::{D1, G, Rig, shareable, shareable_region};
use crate::on_both;
use cuvmm::dlpack::{Consumer, Tensor};
use cuvmm::driver::model::Backing;
use cuvmm::error::{ArgumentError, ContainerError};
use cuvmm::share::{Manifest, Publisher};
use cuvmm::{Access, CowBuffer, Device, DeviceVec, Region, Stream};

/// Queues a kernel of the second device that writes to memory, and holds it back until a thread waits
/// for it.
fn write_until_awaited(rig: &Rig<impl Backing>, by: &Stream, at: u64, size: u64) {
    write(rig, by, at, size);
    rig.machine.hold_until_awaited(D1, by.as_raw());
}

/// Queues a kernel of the second device that writes to memory, and holds it back.
fn write(rig: &Rig<impl Backing>, by: &Stream, at: u64, size: u64) {
    rig.machine.hold(D1, by.as_raw());
    let writes = vec![(cuvmm::driver::DeviceAddress(at), size, 7)];
    let queued = rig.machine.queue_kernel(D1, by.as_raw(), vec![], writes);
    queued.unwrap();
}

/// Creates a vector of two extents, the second without elements, that a device has access to.
fn vector(rig: &Rig<impl Backing>, second: &Device) -> DeviceVec<u8> {
    let home = Stream::new(&rig.device).unwrap();
    let builder = Region::builder(&rig.device, 4 * G).largest_extent(G);
    let mut region = builder.reserve().unwrap();
    region.grant(second, Access::ReadWrite).unwrap();
    let mut vec = DeviceVec::from_region(region, &home).unwrap();
    vec.resize(2 * G as usize, 1).unwrap();
    vec.truncate(G as usize);
    vec
}

on_both! {
    fn publishing_waits_for_every_device_with_access(rig) {
        let second = rig.second();
        let by = Stream::new(&second).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let publisher = Publisher::bind(folder.path().join("socket")).unwrap();
        let (_pool, tenant) = common::with_tenant(shareable(rig, 8).open_to(&second, Access::ReadWrite).build().unwrap());
        let block = tenant.try_allocate(2 * G).unwrap();
        write_until_awaited(rig, &by, block.address().0, 2 * G);
        publisher.publish("block", Manifest::default(), block).unwrap();
        assert!(by.is_done().unwrap());
        let mut region = shareable_region(rig, 2);
        region.grant(&second, Access::ReadWrite).unwrap();
        write_until_awaited(rig, &by, region.address().0, 2 * G);
        publisher.publish("region", Manifest::default(), region).unwrap();
        assert!(by.is_done().unwrap());
    }

    fn a_vector_that_shrinks_waits_for_recorded_streams_of_a_peer(rig) {
        let second = rig.second();
        let (by, other) = (Stream::new(&second).unwrap(), Stream::new(&second).unwrap());
        let mut vec = vector(rig, &second);
        vec.record_use(&by).unwrap();
        assert_eq!(vec.streams().unwrap(), [vec.home_stream().clone(), by.clone()]);
        // Its handle may be that of a stream of the other device.
        vec.record_use(&Stream::legacy(&second)).unwrap();
        vec.record_use(&Stream::legacy(&rig.device)).unwrap();
        assert_eq!(vec.streams().unwrap().len(), 4);
        rig.machine.hold(D1, other.as_raw());
        rig.machine.queue_kernel(D1, other.as_raw(), vec![], vec![]).unwrap();
        write(rig, &by, vec.address().0 + G, G);
        assert_eq!(vec.shrink_to_fit().unwrap(), 0);
        rig.machine.release_stream(D1, by.as_raw());
        while vec.shrink_to_fit().unwrap() == 0 {}
        assert_eq!(vec.held(), G);
        rig.machine.release_all_streams(D1);
    }

    fn a_vector_that_shrinks_waits_for_a_peer_whose_streams_it_does_not_know(rig) {
        let second = rig.second();
        let by = Stream::new(&second).unwrap();
        let mut vec = vector(rig, &second);
        assert!(vec.streams().is_none());
        write(rig, &by, vec.address().0 + G, G);
        assert_eq!(vec.shrink_to_fit().unwrap(), 0);
        rig.machine.release_stream(D1, by.as_raw());
        while vec.shrink_to_fit().unwrap() == 0 {}
        assert_eq!(vec.held(), G);
        write_until_awaited(rig, &by, vec.address().0, G);
        drop(vec);
        assert!(by.is_done().unwrap());
    }

    fn a_copy_on_write_buffer_waits_for_a_peer_whose_streams_it_does_not_know(rig) {
        let (second, home) = (rig.second(), Stream::new(&rig.device).unwrap());
        let by = Stream::new(&second).unwrap();
        let mut region = Region::reserve(&rig.device, G).unwrap();
        region.grant(&second, Access::ReadWrite).unwrap();
        let mut now = CowBuffer::<u8>::from_region(region, &home, 16).unwrap();
        for make_mut in [true, false] {
            write_until_awaited(rig, &by, now.address().0, G);
            let _then = now.snapshot().unwrap();
            assert!(by.is_done().unwrap());
            rig.machine.hold(D1, by.as_raw());
            rig.machine.queue_kernel(D1, by.as_raw(), vec![(now.address(), G)], vec![]).unwrap();
            rig.machine.hold_until_awaited(D1, by.as_raw());
            match make_mut {
                true => drop(now.make_mut(0..1).unwrap()),
                false => now.write(0, &[1]).unwrap(),
            }
            assert!(by.is_done().unwrap());
        }
    }

    fn a_stream_of_a_device_without_access_is_refused(rig) {
        let second = rig.second();
        let (home, by) = (Stream::new(&rig.device).unwrap(), Stream::new(&second).unwrap());
        let mut vec = DeviceVec::<u8>::new(&rig.device, &home, 16).unwrap();
        let refused = vec.record_use(&by);
        assert!(matches!(
            refused,
            Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))
        ));
        let elsewhere = Stream::new(&common::model().device).unwrap();
        assert!(vec.record_use(&elsewhere).is_err());
        assert_eq!(vec.streams().unwrap(), [home]);
    }

    fn a_tensor_is_exported_behind_every_device_with_access(rig) {
        if !rig.keeps_bytes() {
            return;
        }
        let second = rig.second();
        let (by, reader) = (Stream::new(&second).unwrap(), Stream::new(&rig.device).unwrap());
        let tensor = Tensor::of::<u8>(&[8]);
        for consumer in [Consumer::Synchronized, Consumer::Stream(reader.clone()), Consumer::PerThread] {
            let mut region = Region::reserve(&rig.device, G).unwrap();
            region.grant(&second, Access::ReadWrite).unwrap();
            region.commit(0..G).unwrap();
            write_until_awaited(rig, &by, region.address().0, G);
            drop(tensor.export(region, &consumer).unwrap());
            assert!(by.is_done().unwrap());
            let vec = Arc::new(vector(rig, &second));
            write_until_awaited(rig, &by, vec.address().0, G);
            drop(tensor.export(Arc::clone(&vec), &consumer).unwrap());
            assert!(by.is_done().unwrap());
        }
    }
}
