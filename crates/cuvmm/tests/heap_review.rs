//! Faults that a review of the heap and of sleep has found.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{D0, G, MIB, busy, model, pool};
use cuvmm::error::SleepError;
use cuvmm::sleep::Progress;
use cuvmm::{Block, Contents, Heap, Stream};

#[test]
fn a_small_request_is_served_where_less_than_a_usual_chunk_is_left() {
    let rig = model();
    let pool = pool(&rig, 80);
    let tenant = pool.tenant("a").register().unwrap();
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

/// Puts two blocks to sleep. While that runs, a lease is taken on the second one, work is queued, and
/// the lease ends.
fn lease_meanwhile(
    act: impl Fn(&common::Rig<cuvmm::driver::model::Nothing>, &Stream, &Block) + Sync,
) {
    let rig = model();
    let pool = pool(&rig, 16);
    let tenant = pool.tenant("model").register().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let blocks = [G, 2 * G].map(|size| tenant.allocate_on(&stream, size).unwrap());
    let watch = |progress: &Progress| {
        if progress.done < progress.total {
            assert_eq!(progress.done, G, "the second block is still mapped");
            act(&rig, &stream, &blocks[1]);
        }
        true
    };
    let slept = tenant.blocks().on_progress(&watch).sleep(Contents::Discard);
    let hazards = rig.machine.take_hazards();
    assert!(
        hazards.is_empty(),
        "unmapped under queued work: {}",
        hazards[0]
    );
    let busy = matches!(
        slept,
        Err(SleepError::Busy { .. } | SleepError::Leased { .. })
    );
    assert!(busy, "{slept:?}");
    assert!(blocks.iter().all(|block| !block.is_asleep()));
    rig.machine.release_stream(D0, stream.as_raw());
}

#[test]
fn work_that_was_queued_under_a_lease_while_blocks_fall_asleep_is_not_cut_off() {
    lease_meanwhile(|rig, stream, block| {
        let lease = block.lease();
        busy(rig, stream, block, 7);
        drop(lease);
    });
}

#[test]
fn work_of_another_stream_that_a_lease_recorded_is_not_cut_off() {
    lease_meanwhile(|rig, _, block| {
        let lease = block.lease();
        let other = Stream::new(&rig.device).unwrap();
        busy(rig, &other, block, 7);
        lease.record_use(&other).unwrap();
        drop(lease);
    });
}

#[test]
fn a_hook_that_panics_takes_nothing_from_the_heap_whose_request_it_serves() {
    let rig = model();
    let pool = pool(&rig, 16);
    let tenant = pool.tenant("a").register().unwrap();
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
