//! Mappings that a heap no longer needs: how many it keeps, and who unmaps them.

use std::time::{Duration, Instant};

use crate::common;
use crate::common::{D0, G, model};
use cuvmm::driver::{Call, CaptureMode, Driver};
use cuvmm::heap::HeapStats;
use cuvmm::{Allocation, Heap, Mapper, Stream};

/// Allocates sizes that rarely fit in what was freed, so that most are stitched. Returns the figures
/// with everything freed.
fn churn(heap: &Heap, stream: &Stream, steps: u64, mut act: impl FnMut(&Allocation)) -> HeapStats {
    let mut live: Vec<Allocation> = Vec::new();
    let mut random = 1_u64;
    for _ in 0..steps {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let size = (1 + (random >> 33) % 24) * G;
        while live.iter().map(Allocation::size).sum::<u64>() + size > 96 * G {
            drop(live.swap_remove((random >> 50) as usize % live.len()));
        }
        let memory = heap.allocate(size, 1, stream).unwrap();
        act(&memory);
        live.push(memory);
        let stats = heap.stats();
        // Those that are searched, those in use, and those that are kept.
        let most = 2 * stats.extents + 2 * 24 * stats.allocations + 2 * (1024 + 4 * stats.extents);
        assert!(stats.mappings <= most, "{stats:?}");
    }
    drop(live);
    heap.stats()
}

#[test]
fn a_heap_without_a_mapper_unmaps_what_it_retired() {
    let rig = common::clean(model());
    let pool = common::limited(&rig, 128);
    let (_pool, tenant) = common::with_tenant(pool.build().unwrap());
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let stats = churn(&heap, &stream, 4000, |_| ());
    assert!(
        stats.mapped > 2000 && stats.mappings < stats.mapped / 2,
        "{stats:?}"
    );
    assert_eq!(heap.trim().unwrap(), stats.held);
    assert_eq!(heap.stats().mappings, 0);
}

#[test]
fn the_mapper_unmaps_what_a_heap_retired() {
    let rig = common::clean(model());
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = common::limited(&rig, 128);
    let (pool, tenant) = common::with_tenant(pool.mapper(&mapper).build().unwrap());
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let unmapped = || rig.device.mapper_calls().count(Call::MemUnmap);
    let patience = Instant::now() + Duration::from_secs(60);
    while unmapped() == 0 && Instant::now() < patience {
        churn(&heap, &stream, 500, |_| ());
    }
    assert!(unmapped() > 0, "the mapper unmaps nothing");
    heap.trim().unwrap();
    assert_eq!((heap.stats().held, heap.stats().mappings), (0, 0));
    drop((stream, heap, tenant));
    pool.close().unwrap();
}

#[test]
fn a_heap_for_graphs_unmaps_nothing_that_its_graph_uses() {
    let rig = common::clean(model());
    let pool = common::limited(&rig, 128);
    let (_pool, tenant) = common::with_tenant(pool.build().unwrap());
    let heap = Heap::builder(&tenant).for_graphs(true).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let (machine, handle) = (&rig.machine, stream.as_raw());
    // SAFETY: the stream is alive, and no graph is used after it was destroyed.
    #[allow(unsafe_code)]
    unsafe {
        let begun = machine.capture_begin(D0, handle, CaptureMode::GLOBAL);
        begun.unwrap();
        let before = churn(&heap, &stream, 200, |memory| {
            let writes = vec![(memory.address(), memory.size(), 1)];
            machine.queue_kernel(D0, handle, vec![], writes).unwrap();
        });
        let graph = machine.capture_end(D0, handle).unwrap();
        let ready = machine.graph_instantiate(D0, graph).unwrap();
        machine.graph_destroy(D0, graph).unwrap();
        stream.synchronize().unwrap();
        assert!(before.mappings > 2 * before.extents, "nothing is retired");
        assert_eq!(heap.trim().unwrap(), 0);
        assert_eq!(heap.stats().mappings, before.mappings);
        machine.graph_launch(D0, ready, handle).unwrap();
        stream.synchronize().unwrap();
        machine.graph_exec_destroy(D0, ready).unwrap();
    }
}
