//! The machine's means of finding faults of a program: the list of live objects, late work, and reads
//! of bytes that were never written.
//!
//! `unsafe` is allowed here to make the calls of the trait. The machine refuses or records what a GPU
//! would not survive.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use cuvmm_driver::{
    AccessDesc, AccessFlags, Call, DeviceAddress, Driver, EventFlags, Location, Ordinal,
    PhysicalProps, StreamFlags,
};
use cuvmm_model::host::{HostDriver, HostOptions};
use cuvmm_model::model::{ModelDriver, ObjectKind};

const DEVICE: Ordinal = Ordinal(0);
const GRANULE: u64 = 2 << 20;

#[test]
fn every_live_object_is_listed_once() {
    let driver = ModelDriver::default();
    assert_eq!(driver.objects(), []);
    let base = driver.reserve(GRANULE, 0, DeviceAddress::NULL, 0).unwrap();
    let handle = driver
        .create(GRANULE, &PhysicalProps::device(DEVICE), 0)
        .unwrap();
    let memory = driver.alloc(DEVICE, 64).unwrap();
    let stream = driver.stream_create(DEVICE, StreamFlags::empty()).unwrap();
    // SAFETY: all handles come from this driver, and no work is queued.
    unsafe {
        driver.map(base, GRANULE, 0, handle, 0).unwrap();
        assert_eq!(driver.retain(base).unwrap(), handle);
    }
    let found: Vec<_> = driver
        .objects()
        .iter()
        .map(|object| (object.kind, object.value, object.size, object.references))
        .collect();
    assert_eq!(
        found,
        [
            (ObjectKind::Reservation, base.0, GRANULE, 1),
            (ObjectKind::Physical, handle.0, GRANULE, 2),
            (ObjectKind::Mapping, base.0, GRANULE, 1),
            (ObjectKind::Allocation, memory.0, 64, 1),
            (ObjectKind::Stream, stream.0, 0, 1),
        ]
    );
    // SAFETY: all handles come from this driver, and no work is queued.
    unsafe {
        driver.release(handle).unwrap();
        driver.release(handle).unwrap();
        driver.free(DEVICE, memory).unwrap();
        driver.stream_destroy(DEVICE, stream).unwrap();
    }
    let kinds: Vec<_> = driver.objects().iter().map(|object| object.kind).collect();
    assert_eq!(kinds, [ObjectKind::Reservation, ObjectKind::Mapping]);
}

fn late() -> HostDriver {
    HostDriver::new(HostOptions::new().late(true))
}

#[test]
fn work_runs_when_it_is_awaited() {
    let driver = late();
    let memory = driver.alloc(DEVICE, 64).unwrap();
    let stream = driver.stream_create(DEVICE, StreamFlags::NON_BLOCKING);
    let stream = stream.unwrap();
    let mut seen = [1; 4];
    // SAFETY: the memory is used by these calls alone, and is freed when its work is done.
    unsafe {
        driver.fill_async(DEVICE, memory, 7, 64, stream).unwrap();
        assert_eq!(driver.live().queued, 1);
        driver.stream_synchronize(DEVICE, stream).unwrap();
        assert_eq!(driver.live().queued, 0);
        driver.copy_to_host(DEVICE, &mut seen, memory).unwrap();
        driver.free(DEVICE, memory).unwrap();
    }
    assert_eq!(seen, [7; 4]);
    assert_eq!(driver.hazards(), 0);
}

#[test]
fn a_second_query_runs_it() {
    let driver = late();
    let stream = driver.stream_create(DEVICE, StreamFlags::empty()).unwrap();
    let event = driver.event_create(DEVICE, EventFlags::empty()).unwrap();
    // SAFETY: the stream and the event come from this driver and live.
    let answers = unsafe {
        driver.event_record(DEVICE, event, stream).unwrap();
        [
            driver.event_query(DEVICE, event).unwrap(),
            driver.stream_query(DEVICE, stream).unwrap(),
            driver.event_query(DEVICE, event).unwrap(),
            driver.stream_query(DEVICE, stream).unwrap(),
        ]
    };
    assert_eq!(answers, [false, false, true, true]);
}

#[test]
fn work_of_another_stream_runs_first() {
    let driver = late();
    let streams = [0, 1].map(|_| {
        let made = driver.stream_create(DEVICE, StreamFlags::NON_BLOCKING);
        made.unwrap()
    });
    let event = driver.event_create(DEVICE, EventFlags::empty()).unwrap();
    let memory = driver.alloc(DEVICE, 64).unwrap();
    let mut seen = [0; 64];
    // SAFETY: the memory lives until its work is done.
    unsafe {
        driver
            .fill_async(DEVICE, memory, 3, 64, streams[1])
            .unwrap();
        driver.event_record(DEVICE, event, streams[1]).unwrap();
        driver.stream_wait_event(DEVICE, streams[0], event).unwrap();
        driver
            .copy_to_host_async(DEVICE, seen.as_mut_ptr(), memory, 64, streams[0])
            .unwrap();
        driver.stream_synchronize(DEVICE, streams[0]).unwrap();
    }
    assert_eq!(seen, [3; 64]);
}

#[test]
fn memory_taken_before_that_is_a_hazard() {
    let driver = late();
    let size = 2 << 20;
    let base = driver.reserve(size, 0, DeviceAddress::NULL, 0).unwrap();
    let handle = driver
        .create(size, &PhysicalProps::device(DEVICE), 0)
        .unwrap();
    let access = AccessDesc {
        location: Location::device(DEVICE),
        flags: AccessFlags::READ_WRITE,
    };
    // SAFETY: the host driver records what a GPU would not survive.
    unsafe {
        driver.map(base, size, 0, handle, 0).unwrap();
        driver.set_access(base, size, &[access]).unwrap();
        driver.fill(DEVICE, base, 1, 64).unwrap();
        driver.unmap(base, size).unwrap();
    }
    let found = driver.take_hazards();
    let calls: Vec<_> = found.iter().map(|hazard| hazard.call).collect();
    assert_eq!(calls, [Call::MemUnmap]);
}

#[test]
fn bytes_that_were_never_written_are_found_when_they_are_read() {
    let driver = HostDriver::new(HostOptions::new().record_unwritten(true));
    let (one, other) = (driver.alloc(DEVICE, 64), driver.alloc(DEVICE, 64));
    let (one, other) = (one.unwrap(), other.unwrap());
    let at = |base: DeviceAddress, offset| DeviceAddress(base.0 + offset);
    let mut seen = [0; 64];
    // SAFETY: the memory is used by these calls alone.
    unsafe {
        driver.fill(DEVICE, one, 1, 16).unwrap();
        driver.copy_to_device(DEVICE, at(one, 20), &[1; 4]).unwrap();
        driver.copy_to_host(DEVICE, &mut seen[..16], one).unwrap();
        assert_eq!(driver.take_unwritten(), []);
        // A copy on the device reads nothing.
        driver.copy_on_device(DEVICE, other, one, 32).unwrap();
        assert_eq!(driver.take_unwritten(), []);
        driver.copy_to_host(DEVICE, &mut seen[..24], other).unwrap();
    }
    let found = driver.take_unwritten();
    let said: Vec<_> = found
        .iter()
        .map(|read| (read.address, read.size, read.unwritten, read.work))
        .collect();
    assert_eq!(said, [(at(other, 16), 24, 4, "copy to the host")]);
    // SAFETY: no work is queued.
    unsafe { driver.free(DEVICE, one).unwrap() };
    let again = driver.alloc(DEVICE, 64).unwrap();
    // SAFETY: the memory is used by this call alone.
    unsafe { driver.copy_to_host(DEVICE, &mut seen, again).unwrap() };
    assert_eq!(driver.take_unwritten()[0].unwritten, 64);
}
