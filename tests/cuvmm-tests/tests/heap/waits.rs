//! Requests of heaps that wait for memory, and the hooks that they call, with nothing of the heap
//! out.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::captures::{capture, launch_and_destroy};
use crate::common::{self, D0, G, pool};
use crate::on_both;
use cuvmm::error::BlockError;
use cuvmm::{Allocation, Block, Contents, Heap, Ledger, Stream, Tenant};

/// Longer than any of these tests waits.
const LONG: Duration = Duration::from_secs(60);

/// Memory that a hook frees.
type Kept<T> = Arc<Mutex<Option<T>>>;

on_both! {
    fn a_request_waits_for_memory_that_is_freed_into_its_heap(rig) {
        let pool = pool(rig, 8);
        let (short, hears) = mpsc::channel();
        let tenant = pool.tenant("a").on_shortage(move |pressure| {
            assert!(pressure.waits);
            short.send(pressure.bytes).unwrap();
        });
        let tenant = tenant.register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let first = heap.allocate(6 * G, 1, &one).unwrap();
        let waited = thread::scope(|scope| {
            let waits = scope.spawn(|| heap.allocate_timeout(5 * G, 1, &two, LONG));
            // The hook was called after a refusal.
            assert_eq!(hears.recv().unwrap(), 3 * G);
            drop(first);
            waits.join().unwrap()
        });
        let waited = waited.unwrap();
        assert_eq!(waited.size(), 5 * G);
        // The heap's own memory, 6 granules. If it was freed while an attempt had planned new memory
        // and was not lent it yet, the pool has reclaimed free extents for that.
        let stats = heap.stats();
        assert_eq!((stats.held, stats.live), (tenant.stats().committed, 5 * G));
        assert_eq!(pool.stats().refusals, 0);
    }

    fn a_request_waits_for_work_of_its_heap(rig) {
        let (_pool, tenant) = common::tenancy(rig, 4);
        let heap = Heap::builder(&tenant).stream_waits(false).build().unwrap();
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let first = heap.allocate(4 * G, 1, &one).unwrap();
        rig.held_kernel(&one, &[], &[(first.address(), 1, 1)]);
        drop(first);
        let refused = heap.allocate_timeout(4 * G, 1, &two, Duration::from_millis(2)).unwrap_err();
        assert_eq!(refused.shortage().unwrap().pending_free, 4 * G);
        let waited = thread::scope(|scope| {
            let waits = scope.spawn(|| heap.allocate_timeout(4 * G, 1, &two, LONG));
            rig.machine.release_all_streams(D0);
            waits.join().unwrap()
        });
        assert_eq!(waited.unwrap().size(), 4 * G);
    }

    fn a_request_that_can_never_be_served_does_not_wait(rig) {
        let pool = pool(rig, 8);
        let tenant = pool.tenant("a").limit(4 * G).register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let refused = heap.allocate_timeout(5 * G, 1, &stream, LONG).unwrap_err();
        assert_eq!(refused.shortage().unwrap().wanted, 5 * G);
        let none = heap.allocate_timeout(0, 1, &stream, LONG);
        assert!(matches!(none, Err(BlockError::Memory(_) | BlockError::Argument(_))), "{none:?}");
    }

    // I-86
    fn a_hook_finds_all_free_memory_in_the_heap(rig) {
        let pool = pool(rig, 8);
        let (heaps, trimmed) = (Kept::<Heap>::default(), Arc::new(AtomicUsize::new(0)));
        let (of_hook, notes) = (Arc::clone(&heaps), Arc::clone(&trimmed));
        let tenant = pool.tenant("a").on_shortage(move |_| {
            let heap = of_hook.lock().unwrap().clone().unwrap();
            notes.fetch_add(heap.trim().unwrap() as usize, Ordering::SeqCst);
        });
        let tenant = tenant.register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        *heaps.lock().unwrap() = Some(heap.clone());
        let stream = Stream::new(&rig.device).unwrap();
        let parts: Vec<Allocation> =
            (0..4).map(|_| heap.allocate(2 * G, 1, &stream).unwrap()).collect();
        // Free ends that the refused plan would have used, and wholly free extents.
        let mut parts = parts.into_iter();
        let (kept, freed) = (parts.next().unwrap(), parts.next());
        drop(freed);
        let others: Vec<Allocation> = parts.collect();
        let refused = heap.allocate(4 * G, 1, &stream).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        assert_eq!(trimmed.load(Ordering::SeqCst) as u64, 2 * G);
        drop((kept, others));
        heaps.lock().unwrap().take();
        assert_eq!(heap.allocate(8 * G, 1, &stream).unwrap().size(), 8 * G);
    }

    fn a_hook_that_puts_blocks_to_sleep_serves_a_heap(rig) {
        let pool = pool(rig, 8);
        let tenants = Kept::<Tenant>::default();
        let of_hook = Arc::clone(&tenants);
        let tenant = pool.tenant("a").on_shortage(move |_| {
            let tenant = of_hook.lock().unwrap().clone().unwrap();
            tenant.blocks().sleep(Contents::Discard).unwrap();
        });
        let tenant = tenant.register().unwrap();
        *tenants.lock().unwrap() = Some(tenant.clone());
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let sleeper: Block = tenant.allocate(6 * G).unwrap();
        stream.synchronize().unwrap();
        let memory = heap.allocate_timeout(8 * G, 1, &stream, LONG).unwrap();
        assert!(sleeper.is_asleep());
        drop((memory, sleeper));
        tenants.lock().unwrap().take();
    }

    fn a_request_on_a_stream_that_captures_does_not_wait(rig) {
        let (_pool, tenant) = common::tenancy(rig, 8);
        let heap = Heap::builder(&tenant).build().unwrap();
        let (stream, other) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let memory = heap.allocate(8 * G, 1, &other).unwrap();
        rig.held_kernel(&other, &[], &[(memory.address(), 1, 1)]);
        drop(memory);
        let graph = capture(rig, &stream, || {
            let begun = Instant::now();
            let refused = heap.allocate_timeout(8 * G, 1, &stream, LONG).unwrap_err();
            assert!(refused.is_out_of_memory() && begun.elapsed() < LONG, "{refused}");
        });
        // The capture was not broken.
        rig.machine.release_all_streams(D0);
        launch_and_destroy(rig, &stream, graph);
    }

    fn a_request_waits_until_a_capture_guard_is_dropped(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        let heap = Heap::builder(&tenant).build().unwrap();
        let (stream, other) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        drop(heap.allocate(8 * G, 1, &other).unwrap());
        let guard = pool.capture_guard();
        let refused = heap.allocate(8 * G, 1, &stream).unwrap_err();
        assert!(matches!(refused, BlockError::Capturing(_)), "{refused}");
        let waited = thread::scope(|scope| {
            let waits = scope.spawn(|| heap.allocate_timeout(8 * G, 1, &stream, LONG));
            drop(guard);
            waits.join().unwrap()
        });
        assert_eq!(waited.unwrap().size(), 8 * G);
    }

    fn a_request_waits_for_memory_of_another_process(rig) {
        let dir = tempfile::tempdir().unwrap();
        let process = |name: &str| {
            let ledger = Ledger::builder(&rig.device, dir.path()).limit(100 * G);
            let ledger = ledger.name(name).open().unwrap();
            let pool = common::limited(rig, 100).ledger(&ledger).build().unwrap();
            (ledger, pool)
        };
        let ((_a, held), (_b, wants)) = (process("a"), process("b"));
        let kept = Kept::<Block>::default();
        let of_hook = Arc::clone(&kept);
        let giver = held.tenant("gives").on_pressure(move |_| {
            let block = of_hook.lock().unwrap().take();
            drop(block);
        });
        let giver = giver.register().unwrap();
        *kept.lock().unwrap() = Some(giver.try_allocate(90 * G).unwrap());
        let tenant = wants.tenant("wants").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let refused = heap.allocate(80 * G, 1, &stream).unwrap_err();
        assert!(refused.shortage().unwrap().ledger.is_some(), "{refused}");
        let memory = heap.allocate_timeout(80 * G, 1, &stream, LONG).unwrap();
        assert!(kept.lock().unwrap().is_none());
        assert_eq!(memory.size(), 80 * G);
    }
}
