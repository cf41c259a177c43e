//! Memory that moves under its addresses: kernels write and check it before and after it moves,
//! where it is mapped twice, where it is shared, and where there is none.
//!
//! `unsafe` is used to read host memory that a kernel wrote, once the kernel has ended, and to queue a
//! fill of another device.
#![allow(unsafe_code)]

use std::io::Write as _;
use std::time::Duration;

use crate::gpu;
use crate::gpu::{Stage, eventually};
use crate::on_each;
use cuvmm::driver::{DeviceAddress, DeviceAttribute, Location};
use cuvmm::{
    Access, CowBuffer, Device, DeviceVec, Event, HostExtents, Layout, Place, Region, RingBuffer,
    SparseArray, Stream,
};

/// Delay of kernels, so that an access that does not wait for them is too early.
const LATE: Duration = Duration::from_millis(20);

fn at(base: DeviceAddress, offset: u64) -> DeviceAddress {
    DeviceAddress(base.0 + offset)
}

fn nearest_node(stage: &Stage) -> i32 {
    let attribute = DeviceAttribute::HOST_NUMA_ID;
    let node = stage.driver().device_attribute(gpu::D0, attribute);
    node.unwrap().max(0)
}

fn host_memory(stage: &Stage) -> Place {
    Place::HostNuma(nearest_node(stage))
}

/// Opens the second device, or prints a message if there is none. `CUVMM_REQUIRE_GPUS=2` turns a
/// missing device into a failure.
fn second(stage: &Stage, test: &str) -> Option<Device> {
    if let Ok(device) = Device::open(stage.driver().clone(), 1) {
        return Some(device);
    }
    let required = std::env::var("CUVMM_REQUIRE_GPUS").is_ok_and(|count| count != "1");
    assert!(!required, "there is only one device");
    let said = writeln!(
        std::io::stderr(),
        "\n*** {test} DID NOT RUN: it needs two devices ***"
    );
    drop(said);
    None
}

on_each! {
    fn memory_moves_between_device_and_host_under_kernels(stage) {
        let g = stage.g();
        let stream = stage.stream();
        let mut region = Region::builder(&stage.device, 8 * g).largest_extent(2 * g).reserve().unwrap();
        region.commit(0..8 * g).unwrap();
        let (first, second) = (stage.stamp(), stage.stamp());
        let base = region.address();
        stage.work().fill(&stream, base, 8 * g, first, LATE);
        let host = host_memory(stage);
        assert_eq!(region.relocate(2 * g..6 * g, &host, &stream).unwrap(), 4 * g);
        for (offset, size) in [(0, 2 * g), (2 * g, 4 * g), (6 * g, 2 * g)] {
            stage.work().check(&stream, at(base, offset), size, first);
        }
        // The device writes to host memory in the middle of the range, and the host reads it there.
        stage.work().fill(&stream, at(base, 3 * g), 2 * g, second, LATE);
        stream.synchronize().unwrap();
        let pointer = region.host_pointer(3 * g..5 * g).unwrap();
        // SAFETY: the range is committed host memory, and the kernel that wrote it has ended.
        let seen = unsafe { std::slice::from_raw_parts(pointer, 2 * g as usize) };
        let pattern = stage.work().pattern(second);
        assert!(seen.chunks_exact(4).all(|word| word == pattern));
        assert_eq!(region.relocate(0..8 * g, &Place::from(&stage.device), &stream).unwrap(), 4 * g);
        stage.work().check(&stream, base, 3 * g, first);
        stage.work().check(&stream, at(base, 3 * g), 2 * g, second);
        stage.work().check(&stream, at(base, 5 * g), 3 * g, first);
        stage.settle();
    }

    fn extents_that_lie_ready_are_moved_to_and_back(stage) {
        let g = stage.g();
        let stream = stage.stream();
        let ready = HostExtents::new(&stage.device, nearest_node(stage), 8 * g);
        ready.prepare(2 * g, 4).unwrap();
        let region = Region::builder(&stage.device, 8 * g).largest_extent(2 * g);
        let mut region = region.host_extents(&ready).reserve().unwrap();
        region.commit(0..8 * g).unwrap();
        let (host, device) = (host_memory(stage), Place::from(&stage.device));
        let base = region.address();
        for _ in 0..3 {
            // Each extent with a stamp of its own.
            let stamps: Vec<u32> = (0..4).map(|_| stage.stamp()).collect();
            for (extent, stamp) in stamps.iter().enumerate() {
                stage.work().fill(&stream, at(base, extent as u64 * 2 * g), 2 * g, *stamp, LATE);
            }
            let check = || for (extent, stamp) in stamps.iter().enumerate() {
                stage.work().check(&stream, at(base, extent as u64 * 2 * g), 2 * g, *stamp);
            };
            assert_eq!(region.relocate(0..8 * g, &host, &stream).unwrap(), 8 * g);
            assert_eq!(ready.ready(), 0);
            // Kernels and copies can access it without access for the host.
            check();
            let mut seen = [0; 4];
            region.read(&stream, 2 * g, &mut seen).unwrap();
            assert_eq!(seen, stage.work().pattern(stamps[1]));
            assert_eq!(region.relocate(0..8 * g, &device, &stream).unwrap(), 8 * g);
            assert_eq!(ready.ready(), 8 * g);
            check();
        }
        stage.settle();
    }

    fn holes_read_as_zero(stage) {
        let g = stage.g();
        let stream = stage.stream();
        let mut region = Region::builder(&stage.device, 64 * g).zero_extent(8 * g).reserve().unwrap();
        region.commit(20 * g..21 * g).unwrap();
        region.back_with_zeros(0..64 * g).unwrap();
        let stamp = stage.stamp();
        let base = region.address();
        stage.work().fill(&stream, at(base, 20 * g), g, stamp, Duration::ZERO);
        stage.work().check(&stream, base, 20 * g, 0);
        stage.work().check(&stream, at(base, 20 * g), g, stamp);
        stage.work().check(&stream, at(base, 21 * g), 43 * g, 0);
        let gate = stage.work().gate(&stream);
        assert!(region.commit_after(3 * g..4 * g, std::slice::from_ref(&stream)).is_err());
        gate.open();
        stream.synchronize().unwrap();
        region.commit_after(3 * g..4 * g, std::slice::from_ref(&stream)).unwrap();
        stage.work().fill(&stream, at(base, 3 * g), g, stamp, Duration::ZERO);
        stage.work().check(&stream, base, 3 * g, 0);
        stage.work().check(&stream, at(base, 3 * g), g, stamp);
        stage.work().check(&stream, at(base, 4 * g), 16 * g, 0);
        stage.settle();
    }

    fn snapshots_keep_what_was_there(stage) {
        let g = stage.g();
        let stream = stage.stream();
        let words = (g / 4) as usize;
        let mut now = CowBuffer::<u32>::with_extents(&stage.device, &stream, 6 * words, g).unwrap();
        let (old, new) = (stage.stamp(), stage.stamp());
        let all = now.make_mut(0..6 * words).unwrap().address();
        stage.work().fill(&stream, all, 6 * g, old, LATE);
        let then = now.snapshot().unwrap();
        let part = now.make_mut(2 * words..4 * words).unwrap().address();
        assert_eq!((part, now.shared()), (at(all, 2 * g), 4 * g));
        stage.work().fill(&stream, part, 2 * g, new, LATE);
        stage.work().check(&stream, all, 2 * g, old);
        stage.work().check(&stream, part, 2 * g, new);
        stage.work().check(&stream, at(all, 4 * g), 2 * g, old);
        stage.work().check(&stream, then.address(), 6 * g, old);
        stage.settle();
    }

    fn a_ring_is_one_run_for_kernels(stage) {
        let stream = stage.stream();
        let mut ring = RingBuffer::<u32>::new(&stage.device, &stream, (3 * stage.g() / 4) as usize).unwrap();
        let capacity = ring.capacity();
        ring.produce(capacity - 100).unwrap();
        ring.consume(capacity - 100).unwrap();
        // From here on everything crosses the end.
        for round in 0..4 {
            let stamp = stage.stamp();
            let bytes = 4 * capacity as u64;
            stage.work().fill(&stream, ring.spare_capacity_mut().address(), bytes, stamp, Duration::ZERO);
            ring.produce(capacity).unwrap();
            stage.work().check(&stream, ring.filled().address(), bytes, stamp);
            stage.settle();
            let mut seen = [0; 200];
            ring.peek(capacity / 2, &mut seen).unwrap();
            let pattern = u32::from_le_bytes(stage.work().pattern(stamp));
            assert_eq!(seen, [pattern; 200]);
            ring.consume(capacity - round).unwrap();
            ring.consume(round).unwrap();
        }
    }

    fn tiles_are_given_up_behind_kernels(stage) {
        let g = stage.g();
        let stream = stage.stream();
        let words = (g / 4) as usize;
        let mut array = SparseArray::<u32>::builder(&stage.device, &stream, 1 << 36)
            .tile_bytes(g)
            .reserve()
            .unwrap();
        let far = (1 << 35) / words * words;
        array.commit(far..far + 4 * words).unwrap();
        let tile = array.view_mut(far..far + 4 * words).unwrap().address();
        let gate = stage.work().gate(&stream);
        stage.work().fill(&stream, tile, 4 * g, stage.stamp(), LATE);
        assert_eq!(array.decommit(far..far + 3 * words).unwrap(), 3);
        assert_eq!(array.stats().pending_free, 3 * g);
        gate.open();
        // Memory committed anew is zero, ordered behind the kernel.
        assert_eq!(array.commit(far..far + words).unwrap(), 1);
        stage.work().check(&stream, tile, g, 0);
        stage.settle();
        array.purge().unwrap();
        assert_eq!(array.stats().held, 2 * g);
    }

    fn stripes_are_written_here_and_read_there(stage) {
        let Some(other) = second(stage, "stripes_are_written_here_and_read_there") else { return };
        let g = stage.g();
        assert!(stage.device.can_reach(&other).unwrap());
        let stream = stage.stream();
        let theirs = Stream::new(&other).unwrap();
        let places = [Place::from(&stage.device), Place::from(&other)];
        let mut region = Region::builder(&stage.device, 16 * g)
            .layout(Layout::round_robin(places, 2 * g))
            .reserve()
            .unwrap();
        region.commit(0..16 * g).unwrap();
        let (here, there) = (Location::device(gpu::D0), other.location());
        let on: Vec<Location> = region.extents().iter().map(|extent| extent.location).collect();
        assert_eq!(on, [here, there, here, there, here, there, here, there]);
        let stamp = stage.stamp();
        stage.work().fill(&stream, region.address(), 16 * g, stamp, Duration::ZERO);
        stage.work().check(&stream, region.address(), 16 * g, stamp);
        stage.settle();
        let mut seen = vec![0; 16 * g as usize];
        assert!(region.read(&theirs, 0, &mut seen).is_err(), "the device has no access");
        region.grant(&other, Access::Read).unwrap();
        region.read(&theirs, 0, &mut seen).unwrap();
        let pattern = stage.work().pattern(stamp);
        assert!(seen.chunks_exact(4).all(|word| word == pattern));
        assert!(region.write(&theirs, 0, &[0; 4]).is_err(), "the device has read access only");
        region.grant(&other, Access::ReadWrite).unwrap();
        let bytes: Vec<u8> = stage.work().pattern(stage.stamp()).repeat(4);
        region.write(&theirs, 2 * g - 8, &bytes).unwrap();
        let mut back = [0; 16];
        region.read(&stream, 2 * g - 8, &mut back).unwrap();
        assert_eq!(back, *bytes);
        // Memory of the other device alone, mapped for this one.
        region.relocate(0..16 * g, &Place::from(&other), &stream).unwrap();
        region.read(&stream, 2 * g - 8, &mut back).unwrap();
        assert_eq!(back, *bytes);
        region.revoke_blocking(&other).unwrap();
        assert!(region.read(&theirs, 0, &mut seen).is_err());
        stage.settle();
    }

    fn a_vector_that_shrinks_waits_for_another_device(stage) {
        let Some(other) = second(stage, "a_vector_that_shrinks_waits_for_another_device") else { return };
        let g = stage.g();
        let (home, theirs) = (stage.stream(), Stream::new(&other).unwrap());
        let builder = Region::builder(&stage.device, 4 * g).largest_extent(g);
        let mut region = builder.reserve().unwrap();
        region.grant(&other, Access::ReadWrite).unwrap();
        let mut vec = DeviceVec::<u8>::from_region(region, &home).unwrap();
        vec.resize(2 * g as usize, 1).unwrap();
        home.synchronize().unwrap();
        vec.record_use(&theirs).unwrap();
        // Work of the other device behind a gate of this one.
        let gate = stage.work().gate(&home);
        let opened = Event::new(&stage.device).unwrap();
        opened.record(&home).unwrap();
        theirs.wait(&opened).unwrap();
        // SAFETY: the memory stays mapped, which is what this test checks.
        unsafe {
            let at = DeviceAddress(vec.address().0 + g);
            stage.driver().fill_async(other.ordinal(), at, 3, g, theirs.as_raw()).unwrap();
        }
        vec.truncate(g as usize);
        assert_eq!(vec.shrink_to_fit().unwrap(), 0);
        gate.open();
        theirs.synchronize().expect("the work found its memory");
        eventually(|| match vec.shrink_to_fit().unwrap() {
            0 => Err("pending"),
            given => Ok(given),
        });
        assert_eq!(vec.held(), g);
        stage.settle();
    }
}
