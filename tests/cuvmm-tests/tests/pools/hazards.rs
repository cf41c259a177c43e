//! The fixture fails a test in which memory is taken away while queued work names it.
#![allow(unsafe_code)]

use crate::common::*;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{AccessDesc, AccessFlags, Driver, Location};

/// Revokes access to a block while a kernel that writes to it is pending, and grants it again
/// before the kernel runs.
fn close_under_work(rig: &Rig<Nothing>) {
    let (_pool, tenant, stream) = scene(rig, 4);
    let block = tenant.allocate(G).unwrap();
    busy(rig, &stream, &block, 7);
    for flags in [AccessFlags::NONE, AccessFlags::READ_WRITE] {
        let access = AccessDesc {
            location: Location::device(D0),
            flags,
        };
        // SAFETY: the model has no memory.
        unsafe { rig.machine.set_access(block.address(), G, &[access]) }.unwrap();
    }
    rig.machine.release_stream(D0, stream.as_raw());
}

#[test]
#[should_panic(expected = "memory was taken away under queued work 1 times")]
fn a_test_that_takes_memory_from_queued_work_fails() {
    let rig = model();
    close_under_work(&rig);
}

#[test]
fn a_test_that_does_so_on_purpose_takes_the_hazards() {
    let rig = clean(model());
    close_under_work(&rig);
    assert_eq!(rig.machine.take_hazards().len(), 1);
}
