//! The order in which requests of several processes are served. The processes are in one here, each
//! with a slot of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::executor::Task;
use crate::common::{D0, G, mapped_pool};
use crate::on_both;
use cuvmm::error::{BlockError, LedgerRefusal};
use cuvmm::paged::LayerGroup;
use cuvmm::{Device, Heap, Ledger, Limit, Mapper, PagedKv, Pool, Stream, Tenant};

/// Longer than any of these tests waits.
const LONG: Duration = Duration::from_secs(60);

/// A process: its part of a ledger of 100 granules, and a pool with one tenant.
struct Process {
    ledger: Ledger,
    tenant: Tenant,
    pool: Pool,
}

impl Process {
    fn join(device: &Device, dir: &tempfile::TempDir, name: &str, guarantee: u64) -> Self {
        Self::with(device, dir, name, guarantee, None)
    }

    fn with(
        device: &Device,
        dir: &tempfile::TempDir,
        name: &str,
        guarantee: u64,
        mapper: Option<&Mapper>,
    ) -> Self {
        let ledger = Ledger::builder(device, dir.path()).limit(100 * G);
        let ledger = ledger.guarantee(guarantee * G).name(name).open().unwrap();
        let mut pool = Pool::builder(device).limit(Limit::Bytes(100 * G));
        if let Some(mapper) = mapper {
            pool = pool.mapper(mapper);
        }
        let pool = pool.ledger(&ledger).build().unwrap();
        let tenant = pool.tenant(name).register().unwrap();
        Self {
            ledger,
            tenant,
            pool,
        }
    }

    fn waits(&self) -> bool {
        let stats = self.ledger.stats();
        let mut mine = stats.processes.iter();
        mine.any(|it| it.slot == self.ledger.slot() && it.waits_for.is_some())
    }

    /// The reason for which a new block is refused.
    fn refusal(&self, granules: u64) -> Option<LedgerRefusal> {
        reason(&self.tenant.try_allocate(granules * G).err()?)
    }
}

fn until(mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LONG, "this never happened");
        thread::sleep(Duration::from_millis(1));
    }
}

fn reason(error: &BlockError) -> Option<LedgerRefusal> {
    Some(error.shortage()?.ledger?.reason)
}

on_both! {
    fn blocks_grow_past_an_older_request_of_another_process_and_new_ones_wait(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = Process::join(&rig.device, &dir, "a", 0);
        let b = Process::join(&rig.device, &dir, "b", 0);
        let mut held = a.tenant.block(60 * G).capacity(70 * G).try_allocate().unwrap();
        let small = a.tenant.try_allocate(5 * G).unwrap();
        drop(a.tenant.try_allocate(10 * G).unwrap());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| b.tenant.block(97 * G).timeout(LONG).allocate().unwrap());
            // The memory that was idle is given back for the other process, and its grant too: a block
            // grows in larger steps while the pool has one.
            let given = || a.pool.stats().committed == 65 * G && a.ledger.stats().charged == 65 * G;
            until(|| b.waits() && given());
            held.try_grow_to(62 * G).unwrap();
            assert_eq!(a.refusal(5), Some(LedgerRefusal::OlderRequest));
            // Nor is memory reused that has just been freed.
            drop(small);
            assert_eq!(a.refusal(5), Some(LedgerRefusal::OlderRequest));
            until(|| a.pool.stats().committed == 62 * G);
            let more = held.try_grow_to(68 * G);
            assert!(more.is_ok(), "{more:?}");
            drop(held);
            let got = waiting.join().unwrap();
            let next = a.tenant.block(3 * G).timeout(LONG).allocate().unwrap();
            drop((got, next));
        });
        assert!(rig.machine.live().physical_bytes <= 100 * G);
    }

    // I-123
    fn a_block_grows_over_its_own_memory_past_an_older_request_of_another_process(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = Process::join(&rig.device, &dir, "a", 0);
        let b = Process::join(&rig.device, &dir, "b", 0);
        let stream = Stream::new(&rig.device).unwrap();
        let mut held = a.tenant.allocate_on(&stream, 20 * G).unwrap();
        // The work keeps the memory behind the block's end from being given back.
        rig.held_kernel(&stream, &[], &[]);
        held.shrink_to(16 * G).unwrap();
        // All of the grant is promised, and the memory behind the block's end with it.
        let granted = a.ledger.stats().charged;
        let late = a.pool.tenant("late").guarantee(granted - 16 * G).register().unwrap();
        assert_eq!(a.ledger.stats().charged, granted);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| b.tenant.block(98 * G).timeout(LONG).allocate());
            until(|| b.waits());
            let refused = a.refusal(4);
            let grown = held.try_grow_to(20 * G);
            let charged = a.ledger.stats().charged;
            rig.machine.release_stream(D0, stream.as_raw());
            drop((late, held));
            drop(waiting.join().unwrap().unwrap());
            assert_eq!(refused, Some(LedgerRefusal::OlderRequest));
            assert_eq!((grown, charged), (Ok(()), granted + 4 * G));
        });
    }

    fn small_blocks_pass_a_large_request_that_waits_for_older_memory(rig) {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| Process::join(&rig.device, &dir, name, 0));
        let held = a.tenant.try_allocate(60 * G).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| b.tenant.block(90 * G).timeout(LONG).allocate().unwrap());
            until(|| b.waits());
            let small = c.tenant.try_allocate(G).unwrap();
            assert_eq!(c.refusal(12), Some(LedgerRefusal::OlderRequest));
            assert_eq!(a.refusal(10), Some(LedgerRefusal::OlderRequest));
            drop(held);
            let got = waiting.join().unwrap();
            drop((got, small));
        });
    }

    fn a_request_for_blocks_of_a_cache_keeps_its_place_while_another_process_tries(rig) {
        let dir = tempfile::tempdir().unwrap();
        let mapper = Mapper::start(&rig.device).unwrap();
        let a = Process::join(&rig.device, &dir, "a", 0);
        let b = Process::with(&rig.device, &dir, "b", 0, Some(&mapper));
        let c = Process::join(&rig.device, &dir, "c", 0);
        let home = Stream::new(&rig.device).unwrap();
        let [first, second] = [&b, &c].map(|process| {
            let group = LayerGroup::new(1, 1).part(1, G as u32, 1);
            let kv = PagedKv::builder(&process.tenant, &home, 128).group(group);
            kv.extent(G).timeout(LONG).build().unwrap()
        });
        let numbers: Vec<u32> = (0..90).collect();
        let mut held: Vec<_> = (0..9).map(|_| a.tenant.try_allocate(10 * G).unwrap()).collect();
        // A tenth of the memory is left.
        let waiting = Task::waiting(first.back_async(&numbers));
        until(|| b.waits());
        let tries = || {
            let refused = second.try_back(&numbers[..15]).unwrap_err();
            assert!(refused.is_shortage(), "{refused}");
        };
        // All that comes free is for the older request, until it has what it needs.
        for _ in 0..8 {
            tries();
            held.pop();
            tries();
        }
        while !waiting.is_woken(Duration::ZERO) {
            tries();
        }
        waiting.finish().unwrap();
        assert_eq!((first.stats().unwrap().in_use, second.stats().unwrap().in_use), (90, 0));
        // Then the other process has its turn.
        first.release(&numbers).unwrap();
        second.back(&numbers[..15]).unwrap();
        drop((first, second, held));
    }

    fn a_process_reuses_its_memory_within_its_guarantee(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = Process::join(&rig.device, &dir, "a", 30);
        let b = Process::join(&rig.device, &dir, "b", 0);
        let held = a.tenant.try_allocate(20 * G).unwrap();
        let small = a.tenant.try_allocate(5 * G).unwrap();
        let above = a.tenant.try_allocate(40 * G).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| b.tenant.block(70 * G).timeout(LONG).allocate().unwrap());
            until(|| b.waits());
            assert_eq!(a.refusal(5), Some(LedgerRefusal::OlderRequest));
            drop(above);
            let got = waiting.join().unwrap();
            assert_eq!(a.tenant.try_allocate(5 * G).map(drop), Ok(()));
            let again = scope.spawn(|| b.tenant.block(10 * G).timeout(LONG).allocate());
            until(|| b.waits());
            drop(small);
            let small = a.tenant.try_allocate(10 * G).unwrap();
            assert!(a.refusal(5).is_some());
            drop((small, held, got));
            drop(again.join().unwrap().unwrap());
        });
    }

    fn what_a_tenants_guarantee_keeps_is_not_in_use(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = Process::join(&rig.device, &dir, "a", 40);
        let b = Process::join(&rig.device, &dir, "b", 0);
        let kept = a.pool.tenant("kept").guarantee(30 * G).register().unwrap();
        let held = b.tenant.try_allocate(50 * G).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| b.tenant.block(20 * G).timeout(LONG).allocate());
            until(|| b.waits());
            // The ledger's thread has noticed the request.
            thread::sleep(Duration::from_millis(20));
            let within = kept.try_allocate(30 * G).map(drop);
            drop(held);
            drop(waiting.join().unwrap());
            assert_eq!(within, Ok(()));
        });
    }

    fn a_heap_joins_its_own_memory_while_another_process_waits(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = Process::join(&rig.device, &dir, "a", 0);
        let b = Process::join(&rig.device, &dir, "b", 0);
        let tenant = a.pool.tenant("heap").limit(40 * G).register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let whole = [(); 10].map(|()| heap.allocate(4 * G, 1, &stream).unwrap());
        drop(whole);
        let mut parts = [(); 20].map(|()| Some(heap.allocate(2 * G, 1, &stream).unwrap()));
        parts.sort_by_key(|it| it.as_ref().map(|it| it.address().0));
        // Half of each extent stays in use.
        for (index, part) in parts.iter_mut().enumerate() {
            if matches!(index % 4, 0 | 3) {
                drop(part.take());
            }
        }
        let held = b.tenant.try_allocate(30 * G).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| b.tenant.block(66 * G).timeout(LONG).allocate());
            until(|| b.waits());
            thread::sleep(Duration::from_millis(20));
            let joined = heap.allocate(4 * G, 1, &stream).map(drop);
            drop((parts, heap, held));
            drop(waiting.join().unwrap().unwrap());
            assert_eq!(joined, Ok(()));
        });
    }

    fn each_future_has_its_own_place_among_the_requests_of_all_processes(rig) {
        let dir = tempfile::tempdir().unwrap();
        let mapper = Mapper::start(&rig.device).unwrap();
        let a = Process::with(&rig.device, &dir, "a", 0, Some(&mapper));
        let b = Process::join(&rig.device, &dir, "b", 0);
        let c = Process::join(&rig.device, &dir, "c", 0);
        let (one, other) = (
            c.tenant.try_allocate(50 * G).unwrap(),
            c.tenant.try_allocate(50 * G).unwrap(),
        );
        let mut first = Task::new(a.tenant.allocate_async(50 * G));
        assert!(first.poll().is_pending());
        until(|| a.waits());
        thread::scope(|scope| {
            let between = scope.spawn(|| b.tenant.block(50 * G).timeout(LONG).allocate().unwrap());
            until(|| b.waits());
            let mut last = Task::new(a.tenant.allocate_async(50 * G));
            assert!(last.poll().is_pending());
            drop(one);
            let first = first.finish().unwrap();
            drop(other);
            let between = between.join().unwrap();
            assert!(last.poll().is_pending());
            drop(first);
            let last = last.finish().unwrap();
            drop((between, last));
        });
    }

    // I-143
    fn a_future_counts_while_a_hook_keeps_the_mappers_thread_and_no_longer_than_it_lives(rig) {
        let dir = tempfile::tempdir().unwrap();
        let mapper = Mapper::start(&rig.device).unwrap();
        let a = Process::join(&rig.device, &dir, "a", 0);
        let b = Process::with(&rig.device, &dir, "b", 0, Some(&mapper));
        let c = Process::join(&rig.device, &dir, "c", 0);
        let ((enters, entered), (end, ends)) = (mpsc::channel(), mpsc::channel::<()>());
        let (blocks, ends) = (Arc::new(AtomicBool::new(false)), Mutex::new(ends));
        let blocked = Arc::clone(&blocks);
        let slow = b.pool.tenant("slow").on_pressure(move |_| {
            if blocked.load(Ordering::SeqCst) {
                let _ = enters.send(());
                let _ = ends.lock().unwrap().recv();
            }
        });
        let slow = slow.register().unwrap();
        let kept = slow.try_allocate(10 * G).unwrap();
        let held = a.tenant.try_allocate(60 * G).unwrap();
        let large = Task::waiting(b.tenant.allocate_async(85 * G));
        until(|| b.waits());
        blocks.store(true, Ordering::SeqCst);
        let small = Task::waiting(b.tenant.allocate_async(84 * G));
        entered.recv().unwrap();
        let stalled = || {
            let stats = b.ledger.stats();
            let mut mine = stats.processes.iter().filter(|it| it.slot == b.ledger.slot());
            mine.next().unwrap().stalled
        };
        // Without signs of life it would count for 100 ms more.
        let before = stalled();
        until(|| stalled() > before + Duration::from_millis(300));
        assert_eq!(c.refusal(10), Some(LedgerRefusal::OlderRequest));
        // The futures end, and the hook does not.
        drop((large, small));
        assert!(!b.waits());
        let passed = c.tenant.try_allocate(10 * G).map(drop);
        drop(end);
        assert_eq!(passed, Ok(()));
        drop((kept, held, slow));
    }

    fn a_future_that_was_granted_counts_no_more_while_a_hook_keeps_the_mappers_thread(rig) {
        let dir = tempfile::tempdir().unwrap();
        let mapper = Mapper::start(&rig.device).unwrap();
        let a = Process::join(&rig.device, &dir, "a", 0);
        let b = Process::with(&rig.device, &dir, "b", 0, Some(&mapper));
        let other = mapped_pool(rig, 4, &mapper);
        let ((enters, entered), (end, ends)) = (mpsc::channel(), mpsc::channel::<()>());
        let (blocks, ends) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(ends)));
        let slow = |pool: &Pool| {
            let (blocked, enters, ends) = (Arc::clone(&blocks), enters.clone(), Arc::clone(&ends));
            let slow = pool.tenant("slow").on_pressure(move |_| {
                if blocked.load(Ordering::SeqCst) {
                    let _ = enters.send(());
                    let _ = ends.lock().unwrap().recv();
                }
            });
            slow.register().unwrap()
        };
        let tenants = [slow(&b.pool), slow(&other)];
        let kept = [tenants[0].try_allocate(10 * G).unwrap(), tenants[1].try_allocate(G).unwrap()];
        let late = [&b.pool, &other].map(|pool| pool.tenant("late").register().unwrap());
        let held = a.tenant.try_allocate(60 * G).unwrap();
        let first = Task::waiting(b.tenant.allocate_async(70 * G));
        until(|| b.waits());
        blocks.store(true, Ordering::SeqCst);
        // A hook of the other pool keeps the mapper, until there is memory and a last request.
        let kept_up = Task::waiting(late[1].allocate_async(4 * G));
        entered.recv().unwrap();
        drop(held);
        a.pool.trim(0).unwrap();
        let last = Task::waiting(late[0].allocate_async(96 * G));
        end.send(()).unwrap();
        // The first is granted before the hook is called for the last, which is not shown yet.
        entered.recv().unwrap();
        let seen = (first.wakings(), b.waits());
        drop(end);
        assert_eq!(seen, (1, false));
        drop((first, kept_up, last, kept, tenants, late));
    }

    fn a_thread_keeps_its_place_while_something_else_is_short(rig) {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| Process::join(&rig.device, &dir, name, 0));
        let held = [(); 2].map(|()| c.tenant.try_allocate(30 * G).unwrap());
        let (got, gets) = mpsc::channel();
        thread::scope(|scope| {
            let waits = |process: &'_ Process, name| {
                let (tenant, got) = (process.tenant.clone(), got.clone());
                scope.spawn(move || {
                    let block = tenant.block(60 * G).timeout(LONG).allocate().unwrap();
                    got.send((name, block)).unwrap();
                });
                until(|| process.waits());
            };
            waits(&a, "a");
            waits(&b, "b");
            // For a moment the first process may not have as much.
            a.ledger.set_process_limit(10 * G).unwrap();
            until(|| !a.waits());
            a.ledger.set_process_limit(100 * G).unwrap();
            until(|| a.waits());
            let [one, other] = held;
            drop(one);
            let (first, block) = gets.recv().unwrap();
            drop((other, block));
            let (second, block) = gets.recv().unwrap();
            assert_eq!([first, second], ["a", "b"]);
            drop(block);
        });
    }
}
