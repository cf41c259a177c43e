//! Nothing is unmapped under running work: neither by a drop whose synchronization fails, nor
//! because of a fence that was polled while a lease lived. A kernel that lost its memory would lose
//! the context of the whole process, so the test has a process of its own.
//!
//! `unsafe` is used to begin captures as another library would.
#![allow(unsafe_code)]

use std::time::Duration;

use crate::gpu;
use crate::gpu::{D0, Stage};
use cuvmm::driver::CaptureMode;
use cuvmm::{DeviceVec, Region};

/// Drops a region while a kernel that writes to it is pending, and while another library captures,
/// so that the device cannot be synchronized.
fn drop_under_a_foreign_capture(stage: &Stage) {
    let size = 16 * stage.g();
    let mut region = Region::reserve(&stage.device, size).unwrap();
    region.commit(0..size).unwrap();
    let [stream, theirs] = stage.streams();
    let gate = stage.work().gate(&stream);
    let stamp = stage.stamp();
    let work = stage.work();
    work.fill(&stream, region.address(), size, stamp, Duration::ZERO);
    let driver = stage.driver();
    // SAFETY: the stream is alive.
    unsafe { driver.capture_begin(D0, theirs.as_raw(), CaptureMode::RELAXED) }.unwrap();
    drop(region);
    // SAFETY: the stream is alive, and the graph is destroyed once.
    unsafe {
        if let Ok(graph) = driver.capture_end(D0, theirs.as_raw()) {
            driver.graph_destroy(D0, graph).unwrap();
        }
    }
    gate.open();
    stream.synchronize().expect("the kernel found its memory");
    assert_eq!(stage.device.drop_failures(), 1);
}

/// Drops a vector while work of its home stream is pending and that stream captures, and another one
/// too: neither capture is broken, and the vector stays mapped.
fn drop_while_the_home_stream_captures(stage: &Stage) {
    let words = usize::try_from(stage.g()).unwrap();
    let [home, theirs] = stage.streams();
    let mut vec = DeviceVec::<u32>::new(&stage.device, &home, words).unwrap();
    vec.resize(words, 1).unwrap();
    let (gate, failures) = (stage.work().gate(&home), stage.device.drop_failures());
    let (work, stamp) = (stage.work(), stage.stamp());
    work.fill(&home, vec.address(), 4 * stage.g(), stamp, Duration::ZERO);
    let driver = stage.driver();
    for stream in [&home, &theirs] {
        // SAFETY: the stream is alive.
        unsafe { driver.capture_begin(D0, stream.as_raw(), CaptureMode::GLOBAL) }.unwrap();
    }
    drop(vec);
    for stream in [&theirs, &home] {
        // SAFETY: the stream is alive, and the graph is destroyed once.
        unsafe {
            let graph = driver.capture_end(D0, stream.as_raw());
            let graph = graph.expect("the capture was not broken");
            driver.graph_destroy(D0, graph).unwrap();
        }
    }
    gate.open();
    home.synchronize().expect("the kernel found its memory");
    assert_eq!(stage.device.drop_failures(), failures + 1);
}

/// Reads memory that a fork's sibling gave up, through a lease that ends before the read has run,
/// after the fence was polled while the lease lived.
fn read_behind_an_early_answer(stage: &Stage) {
    let g = stage.g();
    let pool = stage.pool(64);
    let tenant = pool.tenant("a").register().unwrap();
    let home = stage.stream();
    // An extent of eight granules, and one of four, which is given up.
    let builder = tenant.block(12 * g).capacity(32 * g).home_stream(&home);
    let mut block = builder.allocate().unwrap();
    let stamp = stage.stamp();
    stage.fill(&home, &block, stamp);
    home.synchronize().unwrap();
    let fork = block.fork(12 * g, 12 * g).unwrap();
    let lease = block.lease();
    block.shrink_to(8 * g).unwrap();
    block.try_grow_to(12 * g).unwrap_err();
    let gate = stage.work().gate(&home);
    let tail = lease.address().checked_add(8 * g).unwrap();
    stage.work().check(&home, tail, 4 * g, stamp);
    drop(lease);
    let early = block.try_grow_to(12 * g);
    assert!(early.is_err(), "the tail is being read");
    gate.open();
    home.synchronize().expect("the kernel found its memory");
    gpu::eventually(|| block.try_grow_to(12 * g));
    drop((fork, block, tenant));
    stage.settle();
    pool.close().unwrap();
}

#[test]
fn a_drop_on_host() {
    let stage = Stage::on_host();
    drop_under_a_foreign_capture(&stage);
    drop_while_the_home_stream_captures(&stage);
    assert!(stage.device.lost().is_none());
}

#[test]
fn a_lease_on_host() {
    read_behind_an_early_answer(&Stage::on_host());
}

#[test]
fn a_lease_on_gpu() {
    if let Some(stage) = Stage::on_gpu("a_lease_on_gpu") {
        read_behind_an_early_answer(&stage);
        assert!(stage.device.lost().is_none());
    }
}

#[test]
fn a_drop_on_gpu() {
    if let Some(stage) = Stage::on_gpu("a_drop_on_gpu") {
        stage.leave_to_a_process_of_its_own("proof::in_a_process_of_its_own");
    }
}

#[test]
#[ignore = "leaks memory, and loses the context if it fails: `a_drop_on_gpu` runs it"]
fn in_a_process_of_its_own() {
    let Some(stage) = Stage::on_gpu("a_drop_on_gpu") else {
        return;
    };
    drop_under_a_foreign_capture(&stage);
    drop_while_the_home_stream_captures(&stage);
    assert!(stage.device.lost().is_none());
    gpu::say_ended();
}
