//! Heaps beside other threads and tenants, and requests that no heap can serve.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::executor::Task;
use crate::common::{D0, G, MIB, Rig, model, pool};
use cuvmm::driver::Call;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{ModelDriver, Nothing};
use cuvmm::error::BlockError;
use cuvmm::{Allocation, Heap, Limit, Pool, Stream};

/// Longer than any of these tests waits.
const LONG: Duration = Duration::from_secs(60);

fn write(rig: &Rig<Nothing>, stream: &Stream, memory: &Allocation) {
    rig.kernel(stream, &[], &[(memory.address(), memory.size(), 1)]);
}

#[test]
fn sizes_beyond_the_addresses_are_refused_at_once() {
    let rig = model();
    let (_pool, tenant) = common::tenancy(&rig, 8);
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let kept = heap.allocate(4096, 1, &stream).unwrap();
    for size in [
        1 << 40,
        1 << 50,
        1 << 63,
        u64::MAX - 8 * MIB,
        u64::MAX - 1023,
    ] {
        let refused = heap.allocate(size, 1, &stream).unwrap_err();
        assert!(
            matches!(&refused, BlockError::OutOfMemory(it) if it.wanted >= size && it.limit == 8 * G),
            "{refused}"
        );
        assert!(refused.is_out_of_memory());
    }
    assert!(heap.allocate(u64::MAX, 1, &stream).is_err());
    let stats = heap.stats();
    assert_eq!(
        (stats.live, stats.peak_live, stats.allocations),
        (4096, 4096, 1)
    );
    drop(kept);
}

#[test]
fn what_is_refused_counts_as_live_at_no_time() {
    let rig = model();
    let (_pool, tenant) = common::tenancy(&rig, 8);
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    drop(heap.allocate(2 * G, 1, &stream).unwrap());
    heap.allocate(9 * G, 1, &stream).unwrap_err();
    assert_eq!(heap.stats().peak_live, 2 * G);
}

#[test]
fn small_requests_fit_in_their_chunk_whatever_the_granule() {
    for granule in [64 << 10, 512 << 10] {
        let options = common::model_options().granularity(granule);
        let rig = common::rig(ModelDriver::new(options));
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(64 * MIB));
        let (_pool, tenant) = common::with_tenant(pool.build().unwrap());
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let one = heap.allocate(MIB, 1, &stream).unwrap();
        let two = heap.allocate(MIB, 1, &stream).unwrap();
        assert!(one.address().0.abs_diff(two.address().0) >= MIB);
        assert!(heap.stats().held >= 2 * MIB);
    }
}

// I-75
#[test]
fn a_pool_takes_no_extent_whose_mapping_is_being_unmapped() {
    let rig = model();
    let pool = pool(&rig, 16);
    let a = pool.tenant("a").limit(8 * G).register().unwrap();
    let b = pool.tenant("b").register().unwrap();
    let heap = Heap::builder(&a).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let allocate = |size| heap.allocate(size, 1, &stream).unwrap();
    // Many windows of the same extents, so that old mappings are not searched any more.
    for turn in 0..40 {
        let [p, q, r, s] = [(); 4].map(|()| allocate(2 * G));
        drop((p, r));
        let over = heap.allocate(4 * G, 1, &stream);
        drop((q, s, over));
        drop(allocate((5 + turn % 3) * G));
    }
    let slow = Fault::delay_nth(1, Duration::from_millis(200));
    rig.faults.arm(slow.of(Call::MemUnmap));
    thread::scope(|scope| {
        let trims = scope.spawn(|| heap.trim());
        thread::sleep(Duration::from_millis(50));
        drop(b.try_allocate(14 * G));
        trims.join().unwrap().unwrap();
    });
    assert_eq!(pool.stats().quarantined, 0);
    drop(b.try_allocate(14 * G).unwrap());
}

#[test]
fn a_future_hears_that_a_heaps_work_is_complete() {
    let rig = model();
    let (_mapper, pool, tenant) = common::mapped(&rig, 8);
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let memory = heap.allocate(8 * G, 1, &stream).unwrap();
    rig.machine.hold(D0, stream.as_raw());
    write(&rig, &stream, &memory);
    drop(memory);
    let mut freed = Task::new(pool.freed());
    assert!(freed.poll().is_pending());
    rig.machine.release_stream(D0, stream.as_raw());
    let begun = Instant::now();
    while freed.poll().is_pending() {
        assert!(begun.elapsed() < LONG, "the future was not told");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_guarantee_is_given_over_memory_whose_work_is_complete() {
    let rig = model();
    let (pool, a) = common::tenancy(&rig, 8);
    let b = pool.tenant("b").register().unwrap();
    let heap = Heap::builder(&a).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    drop(heap.allocate(8 * G, 1, &stream).unwrap());
    b.set_guarantee(8 * G).unwrap();
}

#[test]
fn threads_take_from_one_heap_that_ends() {
    let rig = model();
    let (pool, tenant) = common::tenancy(&rig, 64);
    let slow = Fault::delay_all(Duration::from_micros(30));
    rig.faults.arm(slow.of(Call::MemUnmap));
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let trim = || {
            while !ended.load(Ordering::Relaxed) {
                pool.trim(0).unwrap();
            }
        };
        let trims = [(); 3].map(|()| scope.spawn(trim));
        for _ in 0..100 {
            let heap = Heap::builder(&tenant).build().unwrap();
            let stream = Stream::new(&rig.device).unwrap();
            let parts = [(); 4].map(|()| heap.allocate(2 * G, 1, &stream));
            drop(heap);
            drop(parts);
        }
        ended.store(true, Ordering::Relaxed);
        trims.into_iter().for_each(|it| it.join().unwrap());
    });
    assert_eq!(pool.stats().quarantined, 0);
}
