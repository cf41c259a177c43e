//! Requests of a heap for which memory is short.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::{self, G, MIB, model};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call};
use cuvmm::{Heap, Stream};

#[test]
fn a_small_request_is_served_where_less_than_a_usual_chunk_is_left() {
    let rig = model();
    let (_pool, tenant) = common::tenancy(&rig, 80);
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let allocate = |size| heap.allocate(size, 1, &stream);
    // With 128 MiB of small allocations a chunk has two granules.
    let small: Vec<_> = (0..140).map(|_| allocate(MIB).unwrap()).collect();
    let held = heap.stats().held;
    let large = allocate(79 * G - held).unwrap();
    assert_eq!((heap.stats().held, heap.stats().free), (79 * G, 0));
    let one = allocate(512);
    assert!(one.is_ok(), "a granule is left: {}", one.unwrap_err());
    drop((small, large, one));
}

#[test]
fn a_hook_that_panics_takes_nothing_from_the_heap_whose_request_it_serves() {
    let rig = model();
    let (pool, tenant) = common::tenancy(&rig, 16);
    let other = pool.tenant("b").on_pressure(|_| panic!("on purpose"));
    let other = other.register().unwrap();
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    drop(heap.allocate(4 * G, 1, &stream).unwrap());
    let theirs = other.allocate(12 * G).unwrap();
    let before = (heap.stats(), tenant.stats().in_use);
    let request = || drop(heap.allocate(6 * G, 1, &stream));
    assert!(
        catch_unwind(AssertUnwindSafe(request)).is_err(),
        "the hook was called"
    );
    let after = (heap.stats(), tenant.stats().in_use);
    let given = heap.trim().unwrap();
    assert_eq!(
        (after.0.free, after.1, given),
        (before.0.free, before.1, 4 * G)
    );
    drop(theirs);
}

/// The driver answers so while a stream captures that the legacy stream waits for.
#[test]
fn the_legacy_stream_takes_part_in_a_capture() {
    let rig = model();
    let (_pool, tenant) = common::tenancy(&rig, 16);
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::legacy(&rig.device);
    let code = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    rig.faults.arm(Fault::all(code).of(Call::StreamIsCapturing));
    let allocation = heap.allocate(4 * G, 1, &stream);
    rig.faults.disarm();
    assert!(rig.faults.injected() > 0);
    assert_eq!(allocation.unwrap().size(), 4 * G);
}
