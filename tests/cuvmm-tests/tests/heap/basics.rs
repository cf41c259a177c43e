//! Heaps: allocations of any size in stream order over a tenant's memory.

use std::sync::{Arc, Mutex};

use crate::common::books::figures;
use crate::common::captures::{capture, launch_and_destroy};
use crate::common::{self, D0, G, MIB, Rig, pool};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, Driver};
use cuvmm::error::{ArgumentError, BlockError};
use cuvmm::heap::{ALIGNMENT, Preset};
use cuvmm::{Allocation, CallError, Heap, Limit, Pool, Stream};

/// Queues a kernel that writes to all of an allocation.
fn write(rig: &Rig<impl Backing>, stream: &Stream, memory: &Allocation, byte: u8) {
    rig.kernel(stream, &[], &[(memory.address(), memory.size(), byte)]);
}

struct Panics;

impl Drop for Panics {
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

/// Returns the bytes at the start, in each granule and at the end of an allocation.
fn bytes(rig: &Rig<impl Backing>, memory: &Allocation) -> Vec<u8> {
    let at = |offset: u64| {
        let mut byte = [0];
        let address = cuvmm::driver::DeviceAddress(memory.address().0 + offset);
        // SAFETY: the allocation is alive.
        #[allow(unsafe_code)]
        unsafe { rig.machine.copy_to_host(D0, &mut byte, address) }.unwrap();
        byte[0]
    };
    let last = memory.size() - 1;
    (0..memory.size())
        .step_by(G as usize / 2)
        .chain([last])
        .map(at)
        .collect()
}

fn is_all(seen: &[u8], byte: u8) -> bool {
    seen.iter().all(|&it| it == byte)
}

/// The owner of a stream, which takes a capture guard when it is dropped, and reports that.
struct TakesGuard(Pool, std::sync::mpsc::Sender<()>);

impl Drop for TakesGuard {
    fn drop(&mut self) {
        drop(self.0.capture_guard());
        let _ = self.1.send(());
    }
}

on_both! {
    fn freed_memory_is_reused_on_its_stream_without_a_driver_call(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        for size in [1, 512, 513, MIB, MIB + 1, 5 * MIB + 77] {
            let first = heap.allocate(size, 1, &stream).unwrap();
            assert_eq!(first.size(), size);
            assert!(first.address().0.is_multiple_of(ALIGNMENT));
            write(rig, &stream, &first, 3);
            let address = first.address();
            let calls = rig.device.calls().total();
            drop(first);
            let second = heap.allocate(size, 1, &stream).unwrap();
            assert_eq!(second.address(), address, "{size}");
            assert_eq!(rig.device.calls().total(), calls, "{size}");
        }
        let stats = heap.stats();
        assert_eq!((stats.live, stats.allocations), (0, 0));
        assert_eq!(stats.held, figures(&pool).committed);
    }

    fn what_a_stream_freed_last_serves_other_sizes_and_streams(rig) {
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).build().unwrap();
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        drop(heap.allocate(4 * G, 1, &one).unwrap());
        let calls = rig.device.calls().total();
        let halves = [2 * G, 2 * G].map(|size| heap.allocate(size, 1, &one).unwrap());
        assert_eq!(rig.device.calls().total(), calls);
        drop(halves);
        let whole = heap.allocate(4 * G, 1, &two).unwrap();
        let stats = heap.stats();
        assert_eq!((stats.live, stats.held, stats.free), (4 * G, 4 * G, 0));
        drop(whole);
        let stats = heap.stats();
        assert_eq!((stats.live, stats.free, stats.largest_run), (0, 4 * G, 4 * G));
        assert_eq!((stats.peak_live, stats.allocations), (4 * G, 0));
    }

    fn sizes_that_are_rounded_alike_are_counted_as_requested(rig) {
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        for size in [1000, 1024, 999, 1024] {
            let memory = heap.allocate(size, 1, &stream).unwrap();
            assert_eq!((memory.size(), heap.stats().live), (size, size));
            assert_eq!(tenant.stats().in_use, size);
        }
        assert_eq!(heap.stats().peak_live, 1024);
    }

    fn more_frees_than_a_stream_cache_holds_are_all_free(rig) {
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let many = || -> Vec<Allocation> {
            (0..200).map(|_| heap.allocate(4096, 1, &stream).unwrap()).collect()
        };
        let addresses = |all: &[Allocation]| {
            let mut all: Vec<u64> = all.iter().map(|it| it.address().0).collect();
            all.sort_unstable();
            all
        };
        let first = many();
        let seen = addresses(&first);
        drop(first);
        let stats = heap.stats();
        assert_eq!((stats.live, stats.free), (0, stats.held));
        let second = many();
        assert_eq!(addresses(&second), seen);
        assert_eq!(heap.stats().live, 200 * 4096);
    }

    fn a_stream_ends_when_what_it_freed_is_given_up(rig) {
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).build().unwrap();
        let (owner, kept) = (Stream::new(&rig.device).unwrap(), Arc::new(()));
        let wrapped = || {
            let keep_alive = Arc::clone(&kept);
            // SAFETY: the owner outlives the wrapper.
            #[allow(unsafe_code)]
            unsafe { Stream::from_raw(&rig.device, owner.as_raw(), keep_alive) }.unwrap()
        };
        drop(heap.allocate(G, 1, &wrapped()).unwrap());
        assert_eq!(Arc::strong_count(&kept), 2);
        assert_eq!(heap.trim().unwrap(), G);
        assert_eq!(Arc::strong_count(&kept), 1);
        // The next stream has the same handle.
        let memory = heap.allocate(G, 1, &wrapped()).unwrap();
        assert_eq!(heap.stats().live, memory.size());
    }

    fn alignments_are_kept(rig) {
        let (_pool, tenant) = common::tenancy(rig, 16);
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let mut kept = vec![];
        for alignment in [1, 512, 4096, 1 << 16, 1 << 20, G] {
            for size in [700, MIB + 300] {
                let memory = heap.allocate(size, alignment, &stream).unwrap();
                assert!(memory.address().0.is_multiple_of(alignment), "{alignment}");
                kept.push(memory);
            }
        }
    }

    fn free_ends_and_extents_between_them_are_stitched(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("a").limit(8 * G).register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        // Four extents of two granules, of which the first and the last are half in use.
        let allocate = |size| heap.allocate(size, 1, &stream).unwrap();
        let whole: Vec<Allocation> = (0..4).map(|_| allocate(2 * G)).collect();
        let Ok([a, b, c, d]) = <[Allocation; 4]>::try_from(whole) else {
            panic!("four");
        };
        drop((a, d));
        let halves: Vec<Allocation> = (0..4).map(|_| allocate(G)).collect();
        let Ok([a, end, start, right]) = <[Allocation; 4]>::try_from(halves) else {
            panic!("four");
        };
        drop((b, c, end, start));
        for memory in [&a, &right] {
            write(rig, &stream, memory, 7);
        }
        assert_eq!(heap.stats().live, 2 * G);
        assert_eq!(heap.stats().held, 8 * G);
        // A free end, two extents and a free start.
        let all = allocate(6 * G);
        let stats = heap.stats();
        assert_eq!((stats.live, stats.held, stats.free), (8 * G, 8 * G, 0));
        assert_eq!((stats.stitches, stats.extents), (1, 4));
        assert!(stats.mappings > stats.extents);
        write(rig, &stream, &all, 9);
        if rig.keeps_bytes() {
            assert!(is_all(&bytes(rig, &a), 7) && is_all(&bytes(rig, &right), 7));
            assert!(is_all(&bytes(rig, &all), 9));
        }
        assert!(matches!(heap.allocate(MIB + 1, 1, &stream), Err(BlockError::OutOfMemory(_))));
        // The parts are free through the old mappings and through the new ones.
        drop(all);
        let again = allocate(6 * G);
        drop(again);
        let halves = [allocate(3 * G), allocate(3 * G)];
        assert_eq!(heap.stats().held, 8 * G);
        drop((a, right, halves));
        assert_eq!(heap.trim().unwrap(), 8 * G);
        assert_eq!((heap.stats().held, heap.stats().mappings), (0, 0));
        assert_eq!(pool.stats().committed, 0);
    }

    fn without_aliases_each_extent_has_one_mapping(rig) {
        let (_pool, tenant) = common::tenancy(rig, 32);
        let heap = Heap::builder(&tenant).aliases(false).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let allocate = |size| heap.allocate(size, 1, &stream).unwrap();
        let four: Vec<Allocation> = (0..4).map(|_| allocate(2 * G)).collect();
        drop(four);
        let kept = allocate(G);
        let large = allocate(9 * G);
        drop((large, kept));
        let stats = heap.stats();
        assert_eq!((stats.mappings, stats.stitches), (stats.extents, 0));
    }

    fn memory_of_another_stream_is_used_when_its_work_is_complete(rig) {
        let (pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).stream_waits(false).build().unwrap();
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let memory = heap.allocate(4 * G, 1, &one).unwrap();
        rig.machine.hold(D0, one.as_raw());
        write(rig, &one, &memory, 1);
        drop(memory);
        assert_eq!(pool.stats().pending_free, 4 * G);
        assert!(heap.allocate(4 * G, 1, &two).unwrap_err().is_out_of_memory());
        // The work of its own stream need not be complete.
        let again = heap.allocate(4 * G, 1, &one).unwrap();
        write(rig, &one, &again, 2);
        drop(again);
        rig.machine.release_stream(D0, one.as_raw());
        let other = heap.allocate(4 * G, 1, &two).unwrap();
        write(rig, &two, &other, 3);
        if rig.keeps_bytes() {
            assert!(is_all(&bytes(rig, &other), 3));
        }
    }

    fn a_stream_waits_for_another_rather_than_growing_the_heap(rig) {
        let (_pool, tenant) = common::tenancy(rig, 16);
        let heap = Heap::builder(&tenant).build().unwrap();
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let memory = heap.allocate(4 * G, 1, &one).unwrap();
        rig.machine.hold(D0, one.as_raw());
        write(rig, &one, &memory, 1);
        drop(memory);
        let other = heap.allocate(4 * G, 1, &two).unwrap();
        write(rig, &two, &other, 2);
        let stats = heap.stats();
        assert_eq!((stats.held, stats.stream_waits), (4 * G, 1));
        // The second stream's kernel runs behind the first stream's.
        rig.machine.release_stream(D0, one.as_raw());
        rig.machine.release_stream(D0, two.as_raw());
        if rig.keeps_bytes() {
            assert!(is_all(&bytes(rig, &other), 2));
        }
    }

    fn small_memory_of_another_stream_is_waited_for_too(rig) {
        let (_pool, tenant) = common::tenancy(rig, 1);
        let heap = Heap::builder(&tenant).build().unwrap();
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let both = [heap.allocate(MIB, 1, &one).unwrap(), heap.allocate(MIB, 1, &one).unwrap()];
        rig.machine.hold(D0, one.as_raw());
        let [first, second] = both;
        write(rig, &one, &first, 1);
        drop(first);
        let other = heap.allocate(MIB, 1, &two).unwrap();
        write(rig, &two, &other, 2);
        write(rig, &one, &second, 3);
        assert_eq!(heap.stats().stream_waits, 1);
        rig.machine.release_all_streams(D0);
        if rig.keeps_bytes() {
            assert!(is_all(&bytes(rig, &other), 2) && is_all(&bytes(rig, &second), 3));
        }
    }

    fn a_recorded_use_is_waited_for(rig) {
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).stream_waits(false).build().unwrap();
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let memory = heap.allocate(4 * G, 1, &one).unwrap();
        memory.record_use(&two).unwrap();
        memory.record_use(&two).unwrap();
        rig.machine.hold(D0, two.as_raw());
        write(rig, &two, &memory, 1);
        drop(memory);
        assert!(heap.allocate(4 * G, 1, &one).is_err(), "the other stream uses it");
        // The work of the home stream is complete.
        drop(heap.allocate(4 * G, 1, &two).unwrap());
        assert_eq!(heap.trim().unwrap(), 0);
        rig.machine.release_stream(D0, two.as_raw());
        drop(heap.allocate(4 * G, 1, &one).unwrap());
        assert_eq!(heap.trim().unwrap(), 4 * G);
    }

    fn another_tenant_gets_what_is_free_and_complete_and_reads_none_of_its_bytes(rig) {
        let (pool, a) = common::tenancy(rig, 8);
        let b = pool.tenant("b").register().unwrap();
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let memory = heap.allocate(4 * G, 1, &stream).unwrap();
        let kept = heap.allocate(4 * G, 1, &stream).unwrap();
        rig.machine.hold(D0, stream.as_raw());
        write(rig, &stream, &memory, 5);
        write(rig, &stream, &kept, 6);
        drop(memory);
        assert!(b.try_allocate(G).unwrap_err().is_out_of_memory(), "work is running");
        rig.machine.release_stream(D0, stream.as_raw());
        let block = b.try_allocate(4 * G).unwrap();
        let mut seen = [1; 4];
        block.read(3 * G, &mut seen).unwrap();
        assert_eq!(seen, [0; 4]);
        assert_eq!(heap.stats().held, 4 * G);
        assert!(heap.allocate(2 * MIB, 1, &stream).is_err(), "the tenant can get no more");
        if rig.keeps_bytes() {
            assert!(is_all(&bytes(rig, &kept), 6));
            drop(kept);
            heap.trim().unwrap();
            block.write(0, &[8; 64]).unwrap();
            drop(block);
            // And in the other direction.
            let other = heap.allocate(8 * G, 1, &stream).unwrap();
            stream.synchronize().unwrap();
            assert!(bytes(rig, &other).iter().all(|&byte| byte != 8));
        }
    }

    fn what_is_guaranteed_stays_with_the_heap(rig) {
        let pool = pool(rig, 8);
        let a = pool.tenant("a").guarantee(6 * G).register().unwrap();
        let b = pool.tenant("b").register().unwrap();
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let parts: Vec<_> = (0..8).map(|_| heap.allocate(G, G, &stream).unwrap()).collect();
        drop(parts);
        assert!(b.try_allocate(3 * G).is_err());
        drop(b.try_allocate(2 * G).unwrap());
        assert_eq!(heap.stats().held, 6 * G);
        // A guarantee is given over free memory of a heap once the heap has given it up.
        a.set_guarantee(0).unwrap();
        b.set_guarantee(8 * G).unwrap();
        assert_eq!(heap.stats().held, 0);
        assert!(heap.allocate(G, 1, &stream).is_err());
    }

    fn a_waiting_request_gets_what_a_heap_frees(rig) {
        let (pool, a) = common::tenancy(rig, 4);
        let b = pool.tenant("b").register().unwrap();
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let memory = heap.allocate(4 * G, 1, &stream).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let timeout = std::time::Duration::from_secs(60);
                b.block(4 * G).timeout(timeout).allocate().unwrap()
            });
            std::thread::yield_now();
            drop(memory);
            drop(waiting.join().unwrap());
        });
    }

    fn a_lowered_limit_takes_what_is_freed(rig) {
        let (pool, a) = common::tenancy(rig, 8);
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let parts: Vec<_> = (0..4).map(|_| heap.allocate(2 * G, G, &stream).unwrap()).collect();
        assert_eq!(a.set_limit(2 * G).unwrap().excess, 6 * G);
        drop(parts);
        assert_eq!((heap.stats().held, a.stats().committed), (2 * G, 2 * G));
        pool.set_limit(Limit::Bytes(G)).unwrap();
        assert_eq!(heap.stats().held, 0);
    }

    fn an_unregistered_tenant_gets_no_more(rig) {
        let (pool, a) = common::tenancy(rig, 8);
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let kept = heap.allocate(2 * G, 1, &stream).unwrap();
        drop(heap.allocate(3 * G, 1, &stream).unwrap());
        a.unregister();
        assert_eq!(heap.stats().held, 2 * G);
        let refused = heap.allocate(MIB, 1, &stream).unwrap_err();
        assert!(matches!(refused, BlockError::Unregistered { .. }));
        assert!(Heap::builder(heap.tenant()).build().is_err());
        drop(kept);
        assert_eq!(heap.stats().held, 0);
        assert_eq!(pool.stats().tenants.len(), 1, "the heap lives");
        drop(heap);
        assert_eq!((pool.stats().tenants.len(), pool.stats().addresses), (0, 0));
    }

    fn a_tenant_that_is_unregistered_while_its_heap_gets_addresses_gets_no_memory(rig) {
        let (pool, a) = common::tenancy(rig, 8);
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let ends = Mutex::new(Some(a.clone()));
        rig.faults.watch(Some(Arc::new(move |call| {
            if call == Call::MemAddressReserve
                && let Some(tenant) = ends.lock().unwrap().take()
            {
                tenant.unregister();
            }
        })));
        let refused = heap.allocate(G, 1, &stream).unwrap_err();
        rig.faults.watch(None);
        assert!(matches!(refused, BlockError::Unregistered { .. }), "{refused}");
        assert_eq!(pool.stats().addresses, 0);
        drop(heap);
        assert_eq!((pool.stats().tenants.len(), pool.stats().addresses), (0, 0));
        drop(a);
        pool.close().unwrap();
    }

    fn allocations_outlive_the_heap_and_the_tenant(rig) {
        let (pool, a) = common::tenancy(rig, 8);
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let memory = heap.allocate(2 * G, 1, &stream).unwrap();
        drop((heap, a));
        rig.machine.hold(D0, stream.as_raw());
        write(rig, &stream, &memory, 4);
        assert_eq!(pool.stats().in_use, 2 * G);
        drop(memory);
        // The work is running: nothing is unmapped.
        assert_eq!((pool.stats().committed, rig.machine.live().mappings), (2 * G, 1));
        rig.machine.release_stream(D0, stream.as_raw());
        pool.trim(0).unwrap();
        assert_eq!((pool.stats().committed, rig.machine.live().mappings), (0, 0));
        assert_eq!(pool.stats().addresses, 0);
    }

    fn the_end_of_the_pool_waits_for_what_a_heap_left(rig) {
        let (pool, a) = common::tenancy(rig, 8);
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let memory = heap.allocate(2 * G, 1, &stream).unwrap();
        rig.machine.hold_until_awaited(D0, stream.as_raw());
        write(rig, &stream, &memory, 4);
        drop((memory, heap, a));
        assert_eq!(rig.machine.live().mappings, 1);
        pool.close().unwrap();
        assert_eq!(rig.machine.live().mappings, 0);
    }

    fn two_heaps_of_one_tenant_do_not_mix(rig) {
        let (_pool, a) = common::tenancy(rig, 8);
        let heaps = [Heap::builder(&a).build().unwrap(), Heap::builder(&a).build().unwrap()];
        let stream = Stream::new(&rig.device).unwrap();
        let kept = heaps[0].allocate(4 * G, 1, &stream).unwrap();
        drop(heaps[1].allocate(4 * G, 1, &stream).unwrap());
        assert_eq!(a.stats().committed, 8 * G);
        // The second heap's free memory is reclaimed for the first.
        let more = heaps[0].allocate(2 * G, 1, &stream).unwrap();
        assert_eq!((heaps[0].stats().held, heaps[1].stats().held), (6 * G, 0));
        drop((kept, more));
    }

    fn statistics_add_up(rig) {
        let (pool, a) = common::tenancy(rig, 16);
        let heap = Heap::builder(&a).preset(Preset::Fast).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let odd = heap.allocate(3 * MIB + 1, 1, &stream).unwrap();
        let small = heap.allocate(100, 1, &stream).unwrap();
        let seen = figures(&pool);
        assert_eq!(seen.in_use, odd.size() + small.size());
        assert_eq!(seen.padding, 511 + 412);
        assert_eq!(seen.cached + seen.pending_free, heap.stats().free);
        assert_eq!(seen.committed, heap.stats().held);
        assert!(seen.stranded > 0);
        drop((odd, small));
        let seen = figures(&pool);
        assert_eq!((seen.in_use, seen.padding), (0, 0));
        assert_eq!((seen.mappings, seen.committed), (heap.stats().mappings, heap.stats().held));
        assert_eq!(heap.stats().peak_live, 3 * MIB + 101);
        assert!(a.headroom().unwrap().now >= 15 * G);
    }

    fn a_capture_gets_what_needs_no_other_stream(rig) {
        let (_pool, a) = common::tenancy(rig, 8);
        let heap = Heap::builder(&a).build().unwrap();
        let (stream, other) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        drop(heap.allocate(2 * G, 1, &stream).unwrap());
        drop(heap.allocate(4 * G, 1, &other).unwrap());
        let graph = capture(rig, &stream, || {
            let kept = heap.allocate(2 * G, 1, &stream).unwrap();
            let new = heap.allocate(4 * G, 1, &stream).unwrap();
            // The rest is free behind the other stream.
            let refused = heap.allocate(4 * G, 1, &stream).unwrap_err();
            assert!(refused.is_out_of_memory(), "{refused}");
            drop((kept, new));
        });
        launch_and_destroy(rig, &stream, graph);
        drop(heap.allocate(8 * G, 1, &stream).unwrap());
    }

    fn a_capture_gets_no_memory_that_must_be_zeroed(rig) {
        let pool = pool(rig, 4);
        let (a, b) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let heap = Heap::builder(&a).for_graphs(true).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let theirs = b.block(4 * G).home_stream(&stream).allocate().unwrap();
        theirs.free().unwrap();
        stream.synchronize().unwrap();
        b.unregister();
        pool.trim(4 * G).unwrap();
        let graph = capture(rig, &stream, || {
            let before = heap.stats();
            let refused = heap.allocate(4 * G, 1, &stream).unwrap_err();
            assert!(matches!(refused, BlockError::Capturing(_)), "{refused}");
            assert_eq!(heap.stats(), before);
        });
        launch_and_destroy(rig, &stream, graph);
        drop(heap.allocate(4 * G, 1, &stream).unwrap());
    }

    fn a_heap_for_graphs_keeps_its_memory_until_it_ends(rig) {
        let pool = pool(rig, 8);
        let (a, b) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let heap = Heap::builder(&a).for_graphs(true).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let graph = capture(rig, &stream, || {
            let first = heap.allocate(2 * G, 1, &stream).unwrap();
            write(rig, &stream, &first, 3);
            let address = first.address();
            drop(first);
            // Later in the graph.
            let second = heap.allocate(2 * G, 1, &stream).unwrap();
            assert_eq!(second.address(), address);
            write(rig, &stream, &second, 4);
            drop(second);
            drop(heap.allocate(4 * G, 1, &stream).unwrap());
        });
        let held = heap.stats().held;
        assert!(held >= 4 * G, "{held}");
        assert_eq!(heap.trim().unwrap(), 0);
        assert_eq!((a.stats().in_use, a.stats().committed), (held, held));
        let refused = b.try_allocate(8 * G).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        launch_and_destroy(rig, &stream, graph);
        assert!(rig.device.lost().is_none());
        drop(heap);
        drop(b.try_allocate(8 * G).unwrap());
        drop((a, b));
        pool.close().unwrap();
    }

    fn a_heap_whose_graphs_have_ended_gives_up_what_is_free(rig) {
        let (pool, a) = common::tenancy(rig, 32);
        let heap = Heap::builder(&a).for_graphs(true).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let mut kept = None;
        let graph = capture(rig, &stream, || {
            let parts: Vec<_> = (0..5).map(|_| heap.allocate(3 * G, 1, &stream).unwrap()).collect();
            drop(parts);
            // Of memory in several places.
            drop(heap.allocate(10 * G, 1, &stream).unwrap());
            kept = Some(heap.allocate(512, 1, &stream).unwrap());
        });
        launch_and_destroy(rig, &stream, graph);
        let held = heap.stats().held;
        assert_eq!((heap.trim().unwrap(), a.stats().in_use), (0, held));
        heap.end_graphs();
        drop(heap);
        pool.trim(0).unwrap();
        let stats = a.stats();
        assert!(stats.committed <= 4 * G, "{} of {held} stay", stats.committed);
        assert_eq!(stats.in_use, 512);
        drop(kept);
        pool.trim(0).unwrap();
        assert_eq!((a.stats().committed, pool.stats().addresses), (0, 0));
    }

    fn the_peak_is_never_below_what_is_live(rig) {
        let (_pool, tenant) = common::tenancy(rig, 64);
        let heap = Heap::builder(&tenant).build().unwrap();
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        drop(heap.allocate(8 * G, 1, &two).unwrap());
        drop(heap.allocate(4 * G, 1, &one).unwrap());
        let runs = [3 * G, 5 * G].map(|size| heap.allocate(size, 1, &two).unwrap());
        let cached = heap.allocate(4 * G, 1, &one).unwrap();
        let stats = heap.stats();
        assert_eq!((stats.live, stats.peak_live), (12 * G, 12 * G));
        drop((runs, cached));
    }

    fn a_stream_whose_owner_takes_a_capture_guard_when_a_heap_drops_it(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        let heap = Heap::builder(&tenant).build().unwrap();
        let (own, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let (said, heard) = std::sync::mpsc::channel();
        let owner = Arc::new(TakesGuard(pool.clone(), said));
        // SAFETY: `own` outlives it.
        #[allow(unsafe_code)]
        let one = unsafe { Stream::from_raw(&rig.device, own.as_raw(), owner) }.unwrap();
        drop(heap.allocate(4 * G, 1, &one).unwrap());
        one.synchronize().unwrap();
        drop(one);
        let others = [2 * G, 4 * G].map(|size| heap.allocate(size, 1, &two).unwrap());
        assert_eq!(heard.try_recv(), Ok(()));
        drop((others, own));
    }

    fn owners_of_streams_that_panic_when_a_heap_drops_them_cost_no_memory(rig) {
        let (_pool, tenant) = common::tenancy(rig, 64);
        let heap = Heap::builder(&tenant).build().unwrap();
        let own: Vec<Stream> = (0..3).map(|_| Stream::new(&rig.device).unwrap()).collect();
        for own in &own[..2] {
            // SAFETY: `own` outlives it.
            #[allow(unsafe_code)]
            let one = unsafe { Stream::from_raw(&rig.device, own.as_raw(), Arc::new(Panics)) }.unwrap();
            drop(heap.allocate(4 * G, 1, &one).unwrap());
            one.synchronize().unwrap();
        }
        // The heap lets go of both in one of these requests.
        drop([2 * G, 4 * G, 8 * G].map(|size| heap.allocate(size, 1, &own[2]).unwrap()));
        heap.trim().unwrap();
        assert_eq!(heap.stats().held, 0);
    }

    fn a_small_request_gets_new_memory_before_it_waits_for_another_stream(rig) {
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(1024 * MIB));
        let tenant = pool.build().unwrap().tenant("a").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let [one, two] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        // Of which one per cent more may be held.
        let _weights = heap.allocate(512 * MIB, 1, &one).unwrap();
        let small = || heap.allocate(G / 32, 1, &one).unwrap();
        let mut chunk: Vec<Allocation> = (0..32).map(|_| small()).collect();
        rig.machine.hold(D0, one.as_raw());
        write(rig, &one, &chunk[0], 1);
        // Half of the chunk waits for the first stream.
        let mut index = 0;
        chunk.retain(|_| {
            index += 1;
            index % 2 == 0
        });
        let held = heap.stats().held;
        let other = heap.allocate(G / 32, 1, &two).unwrap();
        assert_eq!(heap.stats().stream_waits, 0);
        assert_eq!(heap.stats().held, held + G);
        rig.machine.release_all_streams(D0);
        drop((chunk, other));
    }

    fn mappings_that_run_out_are_freed_by_unmapping_what_is_idle(rig) {
        let pool = common::limited(rig, 8).mapping_limit(16);
        let (pool, a) = common::with_tenant(pool.build().unwrap());
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        for turn in 0..20 {
            let sizes = match turn % 2 {
                0 => [3 * G, 3 * G, 2 * G],
                _ => [2 * G, 2 * G, 4 * G],
            };
            let all = sizes.map(|size| heap.allocate(size, 1, &stream));
            assert!(all.iter().all(Result::is_ok), "{turn}: {all:?}");
            assert!(figures(&pool).mappings <= 16);
        }
    }

    fn a_capture_guard_leaves_what_needs_no_poll(rig) {
        let (pool, a) = common::tenancy(rig, 8);
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        drop(heap.allocate(2 * G, 1, &stream).unwrap());
        let guard = pool.capture_guard();
        let calls = rig.device.calls().total();
        let kept = heap.allocate(2 * G, 1, &stream).unwrap();
        drop(kept);
        assert_eq!(rig.device.calls().total(), calls);
        // New memory needs no poll.
        drop(heap.allocate(4 * G, 1, &stream).unwrap());
        let refused = heap.allocate(9 * G, 1, &stream).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        assert_eq!(heap.trim().unwrap(), 0, "nothing is polled");
        drop(guard);
        assert_eq!(heap.trim().unwrap(), 4 * G);
    }

    fn wrong_arguments_change_nothing(rig) {
        let (_pool, a) = common::tenancy(rig, 8);
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let argument = |outcome: Result<Allocation, BlockError>| match outcome.unwrap_err() {
            BlockError::Argument(error) => error,
            other => panic!("{other}"),
        };
        let zero = argument(heap.allocate(0, 1, &stream));
        assert!(matches!(zero, ArgumentError::Zero { .. }));
        for alignment in [0, 3, 768] {
            let odd = argument(heap.allocate(1, alignment, &stream));
            assert!(matches!(odd, ArgumentError::NotPowerOfTwo { .. }));
        }
        assert!(matches!(argument(heap.allocate(1, 2 * G, &stream)), ArgumentError::TooLarge { .. }));
        let huge = argument(heap.allocate(u64::MAX, 1, &stream));
        assert!(matches!(huge, ArgumentError::Overflow { .. }));
        assert!(heap.allocate(1 << 50, 1, &stream).is_err());
        let second = rig.second();
        let theirs = Stream::new(&second).unwrap();
        let wrong = argument(heap.allocate(1, 1, &theirs));
        assert!(matches!(wrong, ArgumentError::WrongDevice { .. }));
        let memory = heap.allocate(1, 1, &stream).unwrap();
        assert!(matches!(memory.record_use(&theirs), Err(CallError::WrongDriver)));
        drop(memory);
        let tiny = Heap::builder(&a).addresses(G).build().unwrap_err();
        assert!(matches!(tiny, BlockError::Argument(ArgumentError::TooSmall { .. })));
        drop((second, theirs));
    }

    fn addresses_that_run_out_are_freed_by_unmapping_what_is_idle(rig) {
        let (_pool, a) = common::tenancy(rig, 8);
        // Enough for two windows of all memory.
        let heap = Heap::builder(&a).addresses(24 * G).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        for turn in 0..20 {
            let sizes = match turn % 2 {
                0 => [3 * G, 3 * G, 2 * G],
                _ => [2 * G, 2 * G, 4 * G],
            };
            let all = sizes.map(|size| heap.allocate(size, 1, &stream));
            assert!(all.iter().all(Result::is_ok), "{turn}: {all:?}");
            rig.machine.release_all_streams(D0);
        }
        assert!(heap.stats().held <= 8 * G);
    }

    fn a_lost_context_refuses_and_returns_everything(rig) {
        let (_pool, a) = common::tenancy(rig, 8);
        let heap = Heap::builder(&a).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let kept = heap.allocate(2 * G, 1, &stream).unwrap();
        drop(heap.allocate(3 * G, 1, &stream).unwrap());
        let fault = Fault::nth(1, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS).of(Call::StreamSynchronize);
        rig.faults.arm(fault);
        stream.synchronize().unwrap_err();
        rig.faults.disarm();
        assert!(rig.device.lost().is_some());
        assert!(heap.allocate(MIB, 1, &stream).is_err());
        drop((kept, heap, a));
    }
}
