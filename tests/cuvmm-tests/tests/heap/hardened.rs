//! Heaps over hardened pools: each allocation is a block with guards, and late uses are found.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common::books::books;
use crate::common::sweep::{sweep, text};
use crate::common::{D0, G, MIB, Rig, copy};
use crate::on_both;
use cuvmm::driver::model::{Backing, Machine};
use cuvmm::driver::{Call, CaptureMode, Driver};
use cuvmm::error::BlockError;
use cuvmm::heap::ALIGNMENT;
use cuvmm::pool::Hardened;
use cuvmm::{Allocation, CallError, Heap, Limit, Pool, Stream};

const FILL: u8 = 0xDF;

fn pool<B: Backing + 'static>(rig: &Rig<B>, granules: u64) -> Pool
where
    Machine<B>: Driver,
{
    let builder = Pool::builder(&rig.device).limit(Limit::Bytes(granules * G));
    builder.hardened(Hardened::new()).build().unwrap()
}

fn write<B: Backing + 'static>(rig: &Rig<B>, stream: &Stream, memory: &Allocation, byte: u8)
where
    Machine<B>: Driver,
{
    let writes = vec![(memory.address(), memory.size(), byte)];
    let queued = rig
        .machine
        .queue_kernel(D0, stream.as_raw(), vec![], writes);
    queued.unwrap();
}

/// Returns the first and the last four bytes of an allocation, on drivers that keep bytes.
fn ends<B: Backing + 'static>(rig: &Rig<B>, memory: &Allocation) -> Option<[[u8; 4]; 2]>
where
    Machine<B>: Driver,
{
    let first = memory.address().0;
    let both = [first, first + memory.size() - 4].map(|at| copy(rig, at).unwrap());
    rig.keeps_bytes().then_some(both)
}

fn is_all(ends: Option<[[u8; 4]; 2]>, byte: u8) -> bool {
    ends.is_none_or(|ends| ends == [[byte; 4]; 2])
}

on_both! {
    fn an_allocation_ends_at_a_guard_and_shares_no_granule(rig) {
        let pool = pool(rig, 64);
        let tenant = pool.tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let shapes = [(1, 1), (512, 512), (513, 1), (100, 4096), (MIB, G), (3 * G, 1), (5 * G + 4, G)];
        let live = shapes.map(|(size, alignment)| {
            let memory = heap.allocate(size, alignment, &stream).unwrap();
            assert_eq!(memory.size(), size);
            assert!(memory.address().0.is_multiple_of(alignment.max(ALIGNMENT)));
            memory
        });
        for (memory, (size, alignment)) in live.iter().zip(shapes) {
            let first = memory.address().0;
            let end = first + size.next_multiple_of(alignment.max(ALIGNMENT));
            assert!(copy(rig, first).is_some() && copy(rig, end - 4).is_some());
            assert_eq!(copy(rig, end), None, "{size}");
            assert_eq!(copy(rig, end + G - 4), None, "the guard has a granule");
            let block = first / G * G;
            assert!(copy(rig, block).is_some());
            assert_eq!(copy(rig, block - 4), None);
            assert_eq!(copy(rig, block - G), None);
        }
        let stats = heap.stats();
        assert_eq!((stats.allocations, stats.windows, stats.held), (7, 7, 14 * G));
        assert_eq!(stats.live, shapes.iter().map(|(size, _)| size).sum::<u64>());
        assert_eq!((stats.mappings, stats.stitches), (stats.extents, 0));
        assert_eq!(tenant.stats().in_use, 14 * G);
        assert_eq!(books(rig, &pool).mappings, stats.mappings);
        drop(live);
        let stats = heap.stats();
        assert_eq!((stats.allocations, stats.windows, stats.held), (0, 0, 0));
        assert_eq!((stats.live, stats.extents, stats.mappings), (0, 0, 0));
        assert_eq!((stats.peak_held, heap.trim().unwrap()), (14 * G, 0));
        assert_eq!(books(rig, &pool).mappings, 0);
    }

    fn a_late_use_finds_the_pattern_and_then_nothing(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let memory = heap.allocate(2 * G, 1, &stream).unwrap();
        let late = memory.address();
        rig.machine.hold(D0, stream.as_raw());
        write(rig, &stream, &memory, 7);
        drop(memory);
        assert_eq!((heap.stats().held, tenant.stats().pending_free), (0, 2 * G));
        let next = heap.allocate(2 * G, 1, &stream).unwrap();
        assert_ne!(next.address(), late);
        rig.machine.release_stream(D0, stream.as_raw());
        if rig.keeps_bytes() {
            let mut seen = [0; 4];
            rig.machine.peek(D0, late, &mut seen).unwrap();
            assert_eq!(seen, [FILL; 4]);
        }
        drop(next);
        assert_eq!(copy(rig, late.0), None);
        assert_eq!(books(rig, &pool).committed, 0);
        assert_eq!(pool.stats().resting_blocks, 2);
    }

    fn a_kernel_that_uses_freed_memory_loses_the_context_and_changes_nothing(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let memory = heap.allocate(MIB, 1, &stream).unwrap();
        let late = memory.address();
        drop(memory);
        let next = heap.allocate(MIB, 1, &stream).unwrap();
        write(rig, &stream, &next, 5);
        rig.machine.hold(D0, stream.as_raw());
        let writes = vec![(late, 8, 9)];
        rig.machine.queue_kernel(D0, stream.as_raw(), vec![], writes).unwrap();
        rig.machine.release_all_streams(D0);
        assert!(stream.synchronize().is_err() && rig.device.lost().is_some());
        let mut seen = [0; 4];
        rig.machine.peek(D0, next.address(), &mut seen).unwrap();
        assert!(!rig.keeps_bytes() || seen == [5; 4]);
        drop((next, heap, tenant, stream));
        pool.close().unwrap();
    }

    fn a_recorded_use_is_waited_for(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let (home, other) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let memory = heap.allocate(G, 1, &home).unwrap();
        memory.record_use(&other).unwrap();
        rig.machine.hold(D0, other.as_raw());
        write(rig, &other, &memory, 3);
        drop(memory);
        drop(heap.allocate(G, 1, &home).unwrap());
        assert_eq!(tenant.stats().pending_free, G);
        rig.machine.release_stream(D0, other.as_raw());
        drop(heap.allocate(G, 1, &home).unwrap());
        assert_eq!(tenant.stats().pending_free, 0);
        let second = rig.second();
        let theirs = Stream::new(&second).unwrap();
        let memory = heap.allocate(G, 1, &home).unwrap();
        assert_eq!(memory.record_use(&theirs), Err(CallError::WrongDriver));
    }

    fn too_little_memory_waits_for_the_work_of_the_stream(rig) {
        let pool = pool(rig, 4);
        let tenant = pool.tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let (home, other) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        for round in 1..4 {
            let memory = heap.allocate(4 * G, 1, &home).unwrap();
            rig.machine.hold_until_awaited(D0, home.as_raw());
            write(rig, &home, &memory, round);
        }
        rig.machine.release_all_streams(D0);
        // Not for the work of another stream.
        let memory = heap.allocate(4 * G, 1, &other).unwrap();
        rig.machine.hold(D0, other.as_raw());
        write(rig, &other, &memory, 9);
        drop(memory);
        let refused = heap.allocate(G, 1, &home).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        assert_eq!((heap.stats().allocations, heap.stats().live), (0, 0));
        rig.machine.release_all_streams(D0);
        drop(heap.allocate(4 * G, 1, &home).unwrap());
    }

    fn a_heap_for_graphs_keeps_its_memory_until_these_end(rig) {
        let pool = pool(rig, 8);
        let tenant = pool.tenant("a").register().unwrap();
        let graphs = Heap::builder(&tenant).for_graphs(true).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let machine = &rig.machine;
        // SAFETY: the stream is alive, and the graph is destroyed once.
        #[allow(unsafe_code)]
        let (graph, first, second) = unsafe {
            machine.capture_begin(D0, stream.as_raw(), CaptureMode::GLOBAL).unwrap();
            let first = graphs.allocate(2 * G, 1, &stream).unwrap();
            write(rig, &stream, &first, 1);
            let at = first.address();
            drop(first);
            let second = graphs.allocate(2 * G, 1, &stream).unwrap();
            assert_ne!(second.address(), at, "nothing is reused");
            write(rig, &stream, &second, 2);
            let graph = machine.capture_end(D0, stream.as_raw()).unwrap();
            let ready = machine.graph_instantiate(D0, graph).unwrap();
            machine.graph_destroy(D0, graph).unwrap();
            (ready, at, second)
        };
        for _ in 0..3 {
            // SAFETY: the graph and the stream are alive.
            #[allow(unsafe_code)]
            unsafe { machine.graph_launch(D0, graph, stream.as_raw()) }.unwrap();
            stream.synchronize().unwrap();
        }
        if rig.keeps_bytes() {
            assert_eq!(copy(rig, first.0), Some([1; 4]));
            assert!(is_all(ends(rig, &second), 2));
        }
        drop(second);
        assert_eq!((graphs.stats().held, graphs.stats().live), (4 * G, 0));
        assert_eq!(tenant.stats().in_use, 4 * G);
        // SAFETY: the graph was not destroyed before.
        #[allow(unsafe_code)]
        unsafe { machine.graph_exec_destroy(D0, graph) }.unwrap();
        let live = graphs.allocate(G, 1, &stream).unwrap();
        graphs.end_graphs();
        assert_eq!((copy(rig, first.0), tenant.stats().in_use), (None, G));
        assert_eq!((graphs.stats().held, graphs.stats().live), (G, G));
        drop(live);
        assert_eq!((graphs.stats().held, tenant.stats().in_use), (0, 0));
    }

    fn a_capture_waits_for_nothing(rig) {
        let pool = pool(rig, 4);
        let tenant = pool.tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let guard = pool.capture_guard();
        let memory = heap.allocate(4 * G, 1, &stream).unwrap();
        drop(memory);
        let waits = rig.device.calls().count(Call::StreamSynchronize);
        assert!(heap.allocate(G, 1, &stream).unwrap_err().is_out_of_memory());
        assert_eq!(rig.device.calls().count(Call::StreamSynchronize), waits);
        drop(guard);
        drop(heap.allocate(4 * G, 1, &stream).unwrap());
    }

    fn another_tenants_bytes_are_not_shown(rig) {
        let pool = pool(rig, 4);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [of_a, of_b] = [&a, &b].map(|tenant| Heap::builder(tenant).build().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let memory = of_a.allocate(4 * G, 1, &stream).unwrap();
        write(rig, &stream, &memory, 7);
        drop(memory);
        let memory = of_b.allocate(4 * G, 1, &stream).unwrap();
        stream.synchronize().unwrap();
        assert!(is_all(ends(rig, &memory), 0));
        write(rig, &stream, &memory, 8);
        drop(memory);
        // A tenant's own bytes are not shown either.
        let memory = of_b.allocate(4 * G, 1, &stream).unwrap();
        stream.synchronize().unwrap();
        assert!(is_all(ends(rig, &memory), FILL));
    }

    fn allocations_outlive_the_heap_and_the_tenant(rig) {
        let pool = pool(rig, 4);
        let tenant = pool.tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let memory = heap.allocate(G, 1, &stream).unwrap();
        tenant.clone().unregister();
        assert!(matches!(heap.allocate(G, 1, &stream), Err(BlockError::Unregistered { .. })));
        assert!(matches!(Heap::builder(&tenant).build(), Err(BlockError::Unregistered { .. })));
        drop((heap, tenant));
        assert!(copy(rig, memory.address().0).is_some());
        drop(memory);
        assert_eq!(pool.stats().committed, 0);
    }

    fn threads_share_a_heap(rig) {
        let pool = pool(rig, 64);
        let tenant = pool.tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (heap, rig) = (heap.clone(), &rig);
                scope.spawn(move || {
                    let stream = Stream::new(&rig.device).unwrap();
                    let mut live = Vec::new();
                    for round in 0..40u64 {
                        let size = 1 + (round * 7 + thread) % 3 * G;
                        live.push(heap.allocate(size, 1, &stream).unwrap());
                        if live.len() > 3 {
                            drop(live.remove(round as usize % 3));
                        }
                    }
                });
            }
        });
        let stats = heap.stats();
        assert_eq!((stats.live, stats.held, stats.allocations), (0, 0, 0));
        pool.trim(u64::MAX).unwrap();
        assert_eq!(books(rig, &pool).mappings, 0);
    }
}

#[test]
fn failed_calls_change_nothing() {
    let calls = sweep(
        |rig| {
            let pool = pool(rig, 8);
            let tenant = pool.tenant("a").register().unwrap();
            let heap = Heap::builder(&tenant).build().unwrap();
            let stream = Stream::new(&rig.device).unwrap();
            (Vec::new(), heap, tenant, stream, pool)
        },
        |_, (live, heap, _, stream, _)| {
            live.push(text(heap.allocate(3 * G, 1, stream))?);
            Ok(())
        },
        |(live, heap, tenant, _, _)| (live.len(), heap.stats(), tenant.stats().in_use),
        true,
    );
    assert!(calls >= 5, "{calls}");
}
