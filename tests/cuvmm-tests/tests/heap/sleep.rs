//! Tests I-95. Heaps that sleep: their memory is available to other tenants, every address stays, aliases too,
//! and kept contents return.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common;
use crate::common::captures::{capture, launch_and_destroy};
use crate::common::world::books;
use crate::common::{D0, D1, G, MIB, Rig, pool};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{AccessFlags, DeviceAddress, Driver, Location};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, SleepError};
use cuvmm::{
    Access, Allocation, Contents, Device, Exchange, Heap, HostStore, Pool, Stream, Tenant,
};

fn store(device: &Device, granules: u64) -> HostStore {
    let builder = HostStore::builder(device).pinned(granules * G);
    builder.build().unwrap()
}

fn graphs_of(tenant: &Tenant) -> Heap {
    Heap::builder(tenant).for_graphs(true).build().unwrap()
}

/// Makes a pool of some granules, a tenant, a heap for graphs, and a stream.
fn graphs(rig: &Rig<impl Backing>, granules: u64) -> (Pool, Tenant, Heap, Stream) {
    let (pool, tenant) = common::tenancy(rig, granules);
    let (heap, stream) = (graphs_of(&tenant), Stream::new(&rig.device).unwrap());
    (pool, tenant, heap, stream)
}

/// Fills bytes at an address, and waits for that.
fn fill(rig: &Rig<impl Backing>, stream: &Stream, at: u64, size: u64, byte: u8) {
    rig.kernel(stream, &[], &[(DeviceAddress(at), size, byte)]);
    stream.synchronize().unwrap();
}

/// Checks the first bytes of each granule at an address.
fn shows(rig: &Rig<impl Backing>, at: u64, size: u64, byte: u8) {
    for offset in (0..size).step_by(G as usize) {
        let seen = common::copy(rig, at + offset).expect("nothing is mapped");
        assert!(
            !rig.keeps_bytes() || seen == [byte; 4],
            "{offset}: {seen:?}, not {byte}"
        );
    }
}

/// Checks that nothing is mapped at an address.
fn is_gone(rig: &Rig<impl Backing>, at: u64) {
    assert_eq!(common::copy(rig, at), None);
}

fn is_asleep(error: &BlockError) -> bool {
    matches!(error, BlockError::Memory(MemoryError::HeapAsleep(_)))
}

/// Stitches four granules, each free at another address, and returns those addresses, the stitched
/// allocation, and what lies between.
fn stitched(heap: &Heap, stream: &Stream) -> (Vec<u64>, Allocation, Vec<Allocation>) {
    let mut all: Vec<Allocation> = (0..8)
        .map(|_| heap.allocate(G, 1, stream).unwrap())
        .collect();
    let freed: Vec<Allocation> = [6, 4, 2, 0].map(|index| all.remove(index)).into();
    let old = freed.iter().map(|it| it.address().0).collect();
    drop(freed);
    let joined = heap.allocate(4 * G, 1, stream).unwrap();
    assert_eq!(heap.stats().stitches, 1);
    (old, joined, all)
}

on_both! {
    fn every_window_comes_back_with_its_contents(rig) {
        let pool = pool(rig, 16);
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let (heap, stream) = (graphs_of(&tenant), Stream::new(&rig.device).unwrap());
        let (old, joined, kept) = stitched(&heap, &stream);
        for (number, memory) in (1..).zip(&kept) {
            fill(rig, &stream, memory.address().0, G, number);
        }
        for (number, offset) in (11..).zip((0..4 * G).step_by(G as usize)) {
            fill(rig, &stream, joined.address().0 + offset, G, number);
        }
        // Through the addresses before: the bytes are the same.
        let aliases: Vec<_> = old.iter().map(|&at| (at, common::copy(rig, at))).collect();
        let before = (heap.stats(), books(&pool));
        let store = store(&rig.device, 16);
        let slept = heap.alone().sleep(Contents::Keep(&store)).unwrap();
        let held = before.0.held;
        assert_eq!((slept.heaps, slept.blocks, slept.given, slept.kept), (1, 0, held, held));
        assert_eq!((slept.awake, heap.is_asleep()), (0, true));
        let asleep = heap.stats();
        assert_eq!((asleep.held, asleep.free, asleep.mappings, asleep.asleep), (0, 0, 0, held));
        assert_eq!((asleep.live, asleep.extents), (before.0.live, before.0.extents));
        let stats = books(&pool);
        assert_eq!((stats.committed, stats.mappings, stats.free), (0, 0, held));
        assert_eq!((tenant.stats().asleep, pool.stats().asleep), (held, held));
        aliases.iter().for_each(|&(at, _)| is_gone(rig, at));
        is_gone(rig, joined.address().0);
        // Sleeping twice has no further effect.
        assert_eq!(heap.alone().sleep(Contents::Discard).unwrap(), Default::default());
        let theirs = other.block(16 * G).home_stream(&stream).allocate().unwrap();
        fill(rig, &stream, theirs.address().0, 16 * G, 99);
        drop(theirs);
        let woken = heap.alone().wake().unwrap();
        assert_eq!((woken.heaps, woken.blocks, woken.mapped, woken.restored), (1, 0, held, held));
        let mut after = heap.stats();
        assert_eq!(after.mapped, before.0.mapped + before.0.mappings);
        after.mapped = before.0.mapped;
        assert_eq!((after, heap.is_asleep()), (before.0, false));
        assert_eq!(books(&pool).mappings, before.1.mappings);
        for (number, memory) in (1..).zip(&kept) {
            shows(rig, memory.address().0, G, number);
        }
        for &(at, seen) in &aliases {
            assert_eq!(common::copy(rig, at), seen, "an alias shows other memory");
        }
        // The aliases are of one memory still.
        fill(rig, &stream, joined.address().0, 4 * G, 77);
        old.iter().for_each(|&at| shows(rig, at, G, 77));
        assert_eq!((heap.alone().wake().unwrap().heaps, store.free()), (0, 16 * G));
    }

    fn a_graph_is_launched_again_after_its_memory_slept(rig) {
        let (pool, _tenant, heap, stream) = graphs(rig, 16);
        let mut addresses = Vec::new();
        let graph = capture(rig, &stream, || {
            for byte in 1..5 {
                let memory = heap.allocate(2 * G, 1, &stream).unwrap();
                rig.kernel(&stream, &[], &[(memory.address(), 2 * G, byte)]);
                addresses.push(memory.address().0);
            }
        });
        // All four are free, and the graph has the memory of the last.
        let store = store(&rig.device, 16);
        for contents in [Contents::Keep(&store), Contents::Discard] {
            let held = heap.stats().held;
            assert_eq!(heap.alone().release(true).sleep(contents).unwrap().given, held);
            assert_eq!((pool.stats().committed, pool.stats().free), (0, 0));
            addresses.iter().for_each(|&at| is_gone(rig, at));
            let theirs = pool.tenant("b").register().unwrap();
            let theirs = theirs.block(16 * G).home_stream(&stream).allocate().unwrap();
            fill(rig, &stream, theirs.address().0, 16 * G, 99);
            drop(theirs);
            stream.synchronize().unwrap();
            assert_eq!(heap.alone().wake().unwrap().mapped, held);
        }
        launch_and_destroy(rig, &stream, graph);
        assert!(rig.device.lost().is_none());
        shows(rig, *addresses.last().unwrap(), 2 * G, 4);
        // Requests of a capture find the same memory.
        let again = heap.allocate(2 * G, 1, &stream).unwrap();
        assert_eq!(again.address().0, addresses[0]);
    }

    fn discarded_memory_shows_nothing_of_another_tenant(rig) {
        let pool = pool(rig, 8);
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let (heap, stream) = (graphs_of(&tenant), Stream::new(&rig.device).unwrap());
        let memory = heap.allocate(8 * G, 1, &stream).unwrap();
        fill(rig, &stream, memory.address().0, 8 * G, 5);
        heap.alone().sleep(Contents::Discard).unwrap();
        let theirs = other.block(4 * G).home_stream(&stream).allocate().unwrap();
        fill(rig, &stream, theirs.address().0, 4 * G, 99);
        drop(theirs);
        heap.alone().wake().unwrap();
        for offset in (0..8 * G).step_by(G as usize) {
            let seen = common::copy(rig, memory.address().0 + offset).unwrap();
            assert!(!rig.keeps_bytes() || [[0; 4], [5; 4]].contains(&seen), "{seen:?}");
        }
    }

    fn a_sleeping_heap_refuses_requests_and_frees_what_ends(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let (heap, stream) = (Heap::builder(&tenant).build().unwrap(), Stream::new(&rig.device).unwrap());
        let mut live: Vec<Allocation> = [4 * G, 4 * G, 100, 3 * MIB]
            .map(|size| heap.allocate(size, 1, &stream).unwrap())
            .into();
        // In the stream's cache, and wholly free.
        let (cached, free) = (heap.allocate(100, 1, &stream).unwrap(), live.remove(1));
        drop((cached, free));
        fill(rig, &stream, live[0].address().0, 4 * G, 6);
        let store = store(&rig.device, 16);
        let slept = heap.alone().sleep(Contents::Keep(&store)).unwrap();
        assert!(slept.kept < slept.given, "{slept:?}: what was free is not copied");
        for size in [100, 4 * G] {
            let refused = heap.allocate(size, 1, &stream).unwrap_err();
            assert!(is_asleep(&refused), "{refused}");
            let refused = heap.allocate_timeout(size, 1, &stream, Duration::from_secs(60));
            assert!(is_asleep(&refused.unwrap_err()));
        }
        assert_eq!((heap.trim().unwrap(), pool.trim(0).unwrap()), (0, slept.given));
        let (last, small) = (live.remove(2), live.remove(1));
        last.record_use(&Stream::new(&rig.device).unwrap()).unwrap();
        drop((last, small));
        assert_eq!((heap.stats().allocations, heap.stats().live), (1, 4 * G));
        let woken = heap.alone().wake().unwrap();
        assert_eq!(woken.mapped, slept.kept, "extents that were free stay away");
        shows(rig, live[0].address().0, 4 * G, 6);
        heap.refresh();
        let stats = heap.stats();
        assert_eq!((stats.free, stats.pending_free), (stats.held - 4 * G, 0));
        // What ended while the heap slept serves again, and can be given up.
        drop(heap.allocate(100, 1, &stream).unwrap());
        stream.synchronize().unwrap();
        assert_eq!(heap.trim().unwrap(), stats.held - 4 * G);
    }

    fn no_memory_is_unmapped_under_work(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let plain = Heap::builder(&tenant).build().unwrap();
        let graphs = graphs_of(&tenant);
        let streams = [(); 3].map(|()| Stream::new(&rig.device).unwrap());
        let [home, user, foreign] = &streams;
        for (heap, stream, is_busy) in [
            (&plain, home, true),
            (&plain, user, true),
            (&plain, foreign, false),
            (&graphs, home, true),
            (&graphs, user, true),
            // As a launch of a graph would be, which no heap knows of.
            (&graphs, foreign, true),
        ] {
            let memory = heap.allocate(2 * G, 1, home).unwrap();
            memory.record_use(user).unwrap();
            rig.machine.hold(D0, stream.as_raw());
            let writes = match is_busy {
                true => vec![(memory.address(), 2 * G, 9)],
                false => vec![],
            };
            rig.kernel(stream, &[], &writes);
            let before = (heap.stats(), books(&pool));
            let slept = heap.alone().sleep(Contents::Discard);
            assert_eq!(matches!(slept, Err(SleepError::HeapBusy { .. })), is_busy, "{slept:?}");
            if !is_busy {
                heap.alone().wake().unwrap();
            } else {
                assert_eq!((heap.stats(), books(&pool)), before);
                assert!(!heap.is_asleep());
            }
            rig.machine.release_stream(D0, stream.as_raw());
            stream.synchronize().unwrap();
            drop(memory);
        }
    }

    fn other_devices_have_access_again(rig) {
        let second = rig.second();
        let (_pool, tenant) = common::tenancy(rig, 16);
        let heap = Heap::builder(&tenant).open_to(&second, Access::Read).for_graphs(true);
        let (heap, stream) = (heap.build().unwrap(), Stream::new(&rig.device).unwrap());
        let (old, joined, kept) = stitched(&heap, &stream);
        // Work of the other device counts.
        let peer = Stream::new(&second).unwrap();
        rig.machine.hold(D1, peer.as_raw());
        let reads = vec![(joined.address(), G)];
        rig.machine.queue_kernel(D1, peer.as_raw(), reads, vec![]).unwrap();
        let slept = heap.alone().sleep(Contents::Discard);
        assert!(matches!(slept, Err(SleepError::HeapBusy { .. })), "{slept:?}");
        rig.machine.release_stream(D1, peer.as_raw());
        peer.synchronize().unwrap();
        heap.alone().sleep(Contents::Discard).unwrap();
        heap.alone().wake().unwrap();
        let access = |at| rig.machine.get_access(DeviceAddress(at), Location::device(D1)).unwrap();
        let all = old.into_iter().chain(kept.iter().map(|it| it.address().0));
        for at in all.chain([joined.address().0]) {
            assert_eq!(access(at), AccessFlags::READ);
        }
    }

    fn a_heap_sleeps_and_wakes_with_blocks_or_not_at_all(rig) {
        let pool = pool(rig, 16);
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let (heap, stream) = (graphs_of(&tenant), Stream::new(&rig.device).unwrap());
        let memory = heap.allocate(6 * G, 1, &stream).unwrap();
        let block = tenant.block(2 * G).tag("decode").home_stream(&stream).allocate().unwrap();
        let awake = tenant.block(G).tag("other").home_stream(&stream).allocate().unwrap();
        fill(rig, &stream, memory.address().0, 6 * G, 1);
        fill(rig, &stream, block.address().0, 2 * G, 2);
        let all = || tenant.blocks().tag("decode").heap(&heap);
        // Too little host memory for both.
        let few = store(&rig.device, 7);
        let full = all().sleep(Contents::Keep(&few)).unwrap_err();
        assert!(matches!(full, SleepError::StoreFull { wanted, .. } if wanted == 8 * G), "{full}");
        assert!(!heap.is_asleep() && !block.is_asleep());
        // Without the heap, it stays awake and is named.
        let slept = tenant.blocks().tag("decode").sleep(Contents::Discard).unwrap();
        assert_eq!((slept.blocks, slept.heaps, slept.awake), (1, 0, 6 * G));
        tenant.blocks().wake().unwrap();
        fill(rig, &stream, block.address().0, 2 * G, 2);
        let store = store(&rig.device, 8);
        let slept = all().heap(&heap).sleep(Contents::Keep(&store)).unwrap();
        assert_eq!((slept.blocks, slept.heaps, slept.kept, slept.awake), (1, 1, 8 * G, 0));
        assert!(heap.is_asleep() && block.is_asleep() && !awake.is_asleep());
        // Enough for the heap or for the block.
        let theirs = other.block(8 * G).home_stream(&stream).allocate().unwrap();
        let mut before = books(&pool);
        let short = all().wake().unwrap_err();
        assert!(matches!(&short, SleepError::Block { cause, .. } if cause.is_out_of_memory()), "{short}");
        // Memory that no tenant held may have gone back to the driver.
        before.free = pool.stats().free;
        assert_eq!((books(&pool), store.free()), (before, 0));
        assert!(heap.is_asleep() && block.is_asleep());
        drop(theirs);
        let woken = all().wake().unwrap();
        assert_eq!((woken.blocks, woken.heaps, woken.mapped), (1, 1, 8 * G));
        shows(rig, memory.address().0, 6 * G, 1);
        shows(rig, block.address().0, 2 * G, 2);
        all().sleep(Contents::Keep(&store)).unwrap();
        let woken = Exchange::new().wake(all()).run().unwrap().woken;
        assert_eq!((woken.blocks, woken.heaps, woken.mapped), (1, 1, 8 * G));
    }

    fn a_sleeping_heap_leaves_its_tenant_the_guarantee(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("a").guarantee(8 * G).register().unwrap();
        let other = pool.tenant("b").register().unwrap();
        let (heap, stream) = (graphs_of(&tenant), Stream::new(&rig.device).unwrap());
        drop(heap.allocate(8 * G, 1, &stream).unwrap());
        heap.alone().sleep(Contents::Discard).unwrap();
        assert!(other.try_allocate(9 * G).unwrap_err().is_out_of_memory());
        let theirs = other.try_allocate(8 * G).unwrap();
        heap.alone().wake().unwrap();
        drop(theirs);
        // Waking reclaims what other tenants keep cached.
        heap.alone().sleep(Contents::Discard).unwrap();
        let plain = other.block(8 * G).home_stream(&stream).allocate().unwrap();
        drop(plain);
        stream.synchronize().unwrap();
        heap.alone().wake().unwrap();
    }

    fn waking_calls_hooks_and_waits_for_memory(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        let given: Arc<Mutex<Vec<cuvmm::Block>>> = Arc::default();
        let hook = Arc::clone(&given);
        let other = pool.tenant("b").on_pressure(move |_| drop(hook.lock().unwrap().pop()));
        let other = other.register().unwrap();
        let (heap, stream) = (graphs_of(&tenant), Stream::new(&rig.device).unwrap());
        drop(heap.allocate(8 * G, 1, &stream).unwrap());
        heap.alone().sleep(Contents::Discard).unwrap();
        let block = other.block(4 * G).home_stream(&stream).allocate().unwrap();
        given.lock().unwrap().push(block);
        heap.alone().wake().unwrap();
        assert!(given.lock().unwrap().is_empty());
        heap.alone().sleep(Contents::Discard).unwrap();
        let block = tenant.block(4 * G).home_stream(&stream).allocate().unwrap();
        std::thread::scope(|scope| {
            let waking = scope.spawn(|| heap.alone().timeout(Duration::from_secs(600)).wake());
            drop(block);
            assert_eq!(waking.join().unwrap().unwrap().heaps, 1);
        });
    }

    fn a_heap_that_gets_memory_does_not_sleep(rig) {
        let pool = pool(rig, 4);
        let seen: Arc<Mutex<Vec<Result<u64, SleepError>>>> = Arc::default();
        let of_hook: Arc<Mutex<Option<Heap>>> = Arc::default();
        let (hook, noted) = (Arc::clone(&of_hook), Arc::clone(&seen));
        let tenant = pool.tenant("a").register().unwrap();
        let other = pool.tenant("b").on_pressure(move |_| {
            if let Some(heap) = &*hook.lock().unwrap() {
                let slept = heap.alone().sleep(Contents::Discard);
                noted.lock().unwrap().push(slept.map(|slept| slept.given));
            }
        });
        let other = other.register().unwrap();
        let (heap, stream) = (graphs_of(&tenant), Stream::new(&rig.device).unwrap());
        let block = other.allocate(2 * G).unwrap();
        let kept = heap.allocate(2 * G, 1, &stream).unwrap();
        *of_hook.lock().unwrap() = Some(heap.clone());
        drop(heap.allocate(2 * G, 1, &stream).unwrap_err());
        drop(of_hook.lock().unwrap().take());
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        let is_busy = |it: &Result<u64, SleepError>| matches!(it, Err(SleepError::HeapBusy { .. }));
        assert!(!seen.is_empty() && seen.iter().all(is_busy), "{seen:?}");
        drop((kept, block));
    }

    fn allocations_of_other_threads_while_a_heap_sleeps_and_wakes(rig) {
        let (_pool, tenant) = common::tenancy(rig, 64);
        let (heap, store) = (Heap::builder(&tenant).build().unwrap(), store(&rig.device, 64));
        std::thread::scope(|scope| {
            for number in 0..3_u64 {
                let heap = &heap;
                let stream = Stream::new(&rig.device).unwrap();
                scope.spawn(move || {
                    let mut live = Vec::new();
                    for turn in 0..300 {
                        match heap.allocate((turn * 7 + number) % 5 * MIB + 100, 1, &stream) {
                            Ok(memory) => live.push(memory),
                            Err(refused) => assert!(is_asleep(&refused), "{refused}"),
                        }
                        live.truncate((turn % 4) as usize);
                    }
                });
            }
            for _ in 0..60 {
                let slept = heap.alone().sleep(Contents::Keep(&store));
                let busy = matches!(slept, Err(SleepError::HeapBusy { .. }));
                assert!(busy || slept.is_ok(), "{slept:?}");
                heap.alone().wake().unwrap();
            }
        });
        let stats = heap.stats();
        assert_eq!((stats.allocations, stats.live, stats.asleep), (0, 0, 0));
        heap.trim().unwrap();
        assert_eq!((heap.stats().held, tenant.stats().committed), (0, 0));
        assert_eq!(store.free(), store.capacity());
    }

    fn a_heap_of_another_tenant_or_a_store_of_another_device_is_refused(rig) {
        let second = rig.second();
        let pool = pool(rig, 8);
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let heap = graphs_of(&tenant);
        let wrong = |error: SleepError| match error {
            SleepError::Argument(error) => error,
            other => panic!("{other}"),
        };
        let expected = ArgumentError::WrongTenant("the heap");
        let blocks = other.blocks().heap(&heap);
        assert_eq!(wrong(blocks.sleep(Contents::Discard).unwrap_err()), expected);
        assert_eq!(wrong(blocks.wake().unwrap_err()), expected);
        let elsewhere = store(&second, 1);
        let error = heap.alone().sleep(Contents::Keep(&elsewhere)).unwrap_err();
        assert_eq!(wrong(error), ArgumentError::WrongDevice("the store"));
        // A heap without memory sleeps too.
        let slept = heap.alone().sleep(Contents::Discard).unwrap();
        assert_eq!((slept.heaps, slept.given), (1, 0));
        assert_eq!(heap.alone().wake().unwrap().heaps, 1);
    }

}
