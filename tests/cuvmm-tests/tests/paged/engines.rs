//! Random programs of two processes of one ledger, in each of which two engines have paged caches beside
//! a heap: requests that are polled, dropped and leaked, hooks that evict on other threads, sleep, and
//! failures of the driver. The processes are in one here.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread;

use crate::common::{self, D0, G, Rig, cases, host, only_counted_left};
use crate::scene::{LAYOUTS, builder, stamp, stamps};
use crate::sleep::{is_asleep, store};
use cuvmm::driver::CUresult;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::error::PagedKvError;
use cuvmm::heap::Allocation;
use cuvmm::paged::BackFuture;
use cuvmm::{Block, Contents, Heap, HostStore, Ledger, Mapper, PagedKv, Pool, Stream, Tenant};

const BLOCKS: u32 = 24;
const PINNED: u32 = 23;
/// The granules of both processes together.
const ALL: u64 = 40;

type Known = Arc<Mutex<Use>>;

/// The blocks in use, with the bytes that they were written with, and those of them that hooks may take.
#[derive(Default)]
struct Use {
    used: BTreeMap<u32, u8>,
    kept: BTreeSet<u32>,
}

type Request = (Vec<u32>, std::pin::Pin<Box<BackFuture>>);

struct Engine {
    requests: Vec<Request>,
    kv: Arc<OnceLock<PagedKv>>,
    home: Stream,
    known: Known,
    sleeps: bool,
    /// Requests were leaked, which may have memory.
    leaks: bool,
    tenant: Tenant,
}

struct Process {
    engines: Vec<Engine>,
    heap: Heap,
    buffers: Vec<Allocation>,
    blocks: Vec<Block>,
    beside: Tenant,
    pool: Pool,
}

impl Engine {
    fn kv(&self) -> &PagedKv {
        self.kv.get().unwrap()
    }

    fn known(&self) -> MutexGuard<'_, Use> {
        self.known.lock().unwrap()
    }
}

/// Gives up kept blocks for others, on whichever thread needs memory.
fn evict(kv: &PagedKv, known: &Known, bytes: u64) {
    let mut known = known.lock().unwrap();
    let kept: Vec<u32> = known.kept.iter().copied().collect();
    let chosen = kv.emptiest(bytes, &kept).unwrap();
    if kv.release(&chosen.numbers).is_ok() {
        for number in chosen.numbers {
            known.used.remove(&number);
            known.kept.remove(&number);
        }
    }
}

fn process(rig: &Rig<HostMemory>, mapper: &Mapper, at: &std::path::Path, of: usize) -> Process {
    let ledger = Ledger::builder(&rig.device, at).limit(ALL * G);
    let ledger = ledger
        .name(["one", "two"][of])
        .guarantee(4 * G)
        .open()
        .unwrap();
    let pool = common::limited(rig, ALL);
    let pool = pool.mapper(mapper).ledger(&ledger);
    let pool = pool.build().unwrap();
    let engines = (0..2).map(|index| {
        let (kv, known): (Arc<OnceLock<PagedKv>>, Known) = Default::default();
        let (of_hook, evicts) = (Arc::clone(&kv), Arc::clone(&known));
        let tenant = pool.tenant(["chat", "code"][index]).on_pressure(move |it| {
            if let Some(kv) = of_hook.get() {
                evict(kv, &evicts, it.bytes);
            }
        });
        let tenant = tenant.register().unwrap();
        let home = Stream::new(&rig.device).unwrap();
        let built = builder(&tenant, &home, BLOCKS, LAYOUTS[(of + index) % 3]);
        let built = built.pinned([PINNED]).precommit(2 * index as u32);
        assert!(kv.set(built.build().unwrap()).is_ok());
        Engine {
            requests: Vec::new(),
            kv,
            home,
            known,
            sleeps: false,
            leaks: false,
            tenant,
        }
    });
    let engines = engines.collect();
    let beside = pool.tenant("beside").register().unwrap();
    Process {
        engines,
        heap: Heap::builder(&beside).build().unwrap(),
        buffers: Vec::new(),
        blocks: Vec::new(),
        beside,
        pool,
    }
}

struct World<'a> {
    rig: &'a Rig<HostMemory>,
    processes: Vec<Process>,
    store: HostStore,
    random: fastrand::Rng,
    /// Driver calls fail.
    fails: bool,
}

impl World<'_> {
    fn numbers(&mut self) -> Vec<u32> {
        let count = self.random.usize(1..6);
        (0..count).map(|_| self.random.u32(0..PINNED)).collect()
    }

    fn may_fail(&self, error: &PagedKvError) {
        let sleeps = is_asleep(error);
        assert!(self.fails || sleeps || error.is_out_of_memory(), "{error}");
    }

    /// Notes blocks that are in use by now, writes to those that are new, and looks at the others.
    fn was_backed(&mut self, (process, engine): (usize, usize), numbers: &[u32]) {
        let engine = &self.processes[process].engines[engine];
        let mut known = engine.known();
        for &number in numbers {
            known.kept.remove(&number);
            assert!(engine.kv().is_backed(number).unwrap());
            if let Entry::Vacant(unused) = known.used.entry(number) {
                let byte = *unused.insert(self.random.u8(1..200));
                stamp(self.rig, &engine.home, engine.kv(), number, byte);
            }
        }
    }

    fn back(&mut self, at: (usize, usize), waits: bool) {
        let numbers = self.numbers();
        // Hooks take none of the engine's own.
        let engine = &self.processes[at.0].engines[at.1];
        engine.known().kept.retain(|it| !numbers.contains(it));
        let backed = match waits {
            true => engine.kv().back(&numbers),
            false => engine.kv().try_back(&numbers),
        };
        match backed {
            Ok(()) => self.was_backed(at, &numbers),
            Err(error) => self.may_fail(&error),
        }
    }

    fn request(&mut self, at: (usize, usize)) {
        let numbers = self.numbers();
        let engine = &mut self.processes[at.0].engines[at.1];
        if engine.requests.len() < 3 && self.random.bool() {
            let future = Box::pin(engine.kv.get().unwrap().back_async(&numbers));
            engine.requests.push((numbers, future));
        }
        if engine.requests.is_empty() {
            return;
        }
        let chosen = self.random.usize(0..engine.requests.len());
        let (numbers, mut request) = engine.requests.swap_remove(chosen);
        let mut context = Context::from_waker(Waker::noop());
        match self.random.u8(0..16) {
            0 | 1 => drop(request),
            2 | 3 => thread::scope(|scope| drop(scope.spawn(|| drop(request)))),
            4 if self.random.u8(0..4) == 0 => {
                engine.leaks = true;
                std::mem::forget(request);
            }
            4..8 => {
                let _ = request.as_mut().poll_answered(&mut context);
                engine.requests.push((numbers, request));
            }
            _ => {
                let kept = engine.known().kept.clone();
                let polled = thread::scope(|scope| {
                    let poll = || {
                        request
                            .as_mut()
                            .poll(&mut Context::from_waker(Waker::noop()))
                    };
                    scope.spawn(poll).join().unwrap()
                });
                match polled {
                    Poll::Pending => engine.requests.push((numbers, request)),
                    Poll::Ready(Ok(())) => {
                        // A hook may have taken kept blocks since the poll.
                        let is_backed = |it: &u32| engine.kv().is_backed(*it).unwrap();
                        let (backed, lost): (Vec<u32>, Vec<u32>) =
                            numbers.into_iter().partition(is_backed);
                        assert!(lost.iter().all(|it| kept.contains(it)));
                        self.was_backed(at, &backed);
                    }
                    Poll::Ready(Err(error)) => self.may_fail(&error),
                }
            }
        }
    }

    fn release_or_keep(&mut self, at: (usize, usize), keeps: bool) {
        let engine = &self.processes[at.0].engines[at.1];
        let mut known = engine.known();
        let running = known.used.keys().filter(|it| !known.kept.contains(it));
        let running: Vec<u32> = running.copied().collect();
        let some: Vec<u32> = running.into_iter().filter(|_| self.random.bool()).collect();
        if keeps {
            return known.kept.extend(some);
        }
        let step = engine.kv().step();
        engine.kv().release(&some).unwrap();
        for number in &some {
            let byte = known.used.remove(number).unwrap();
            stamp(self.rig, &engine.home, engine.kv(), *number, byte);
        }
        drop(step);
    }

    /// Puts a cache to sleep, or wakes it.
    fn sleep(&mut self, at: (usize, usize)) {
        let engine = &mut self.processes[at.0].engines[at.1];
        let alone = engine.kv.get().unwrap().alone();
        let slept = match engine.sleeps {
            true => alone.wake().is_err(),
            false => alone.sleep(Contents::Keep(&self.store)).is_ok(),
        };
        engine.sleeps = engine.kv().is_asleep();
        assert!(self.fails || engine.sleeps == slept);
    }

    /// Allocates in the heap and beside it, or frees.
    fn press(&mut self, of: usize) {
        let process = &mut self.processes[of];
        let size = self.random.u64(1..12) * G;
        if self.random.bool() {
            let home = &process.engines[0].home;
            match process.heap.allocate(size / 3, 1, home) {
                Ok(buffer) => process.buffers.push(buffer),
                Err(_) => process.buffers.clear(),
            }
            return;
        }
        match process.beside.allocate(size) {
            Ok(block) => process.blocks.push(block),
            Err(_) => process.blocks.clear(),
        }
    }

    fn step(&mut self) {
        let at = (self.random.usize(0..2), self.random.usize(0..2));
        if self.fails && self.random.u8(0..4) == 0 {
            let nth = self.random.u64(1..12);
            self.rig
                .faults
                .arm(Fault::nth(nth, CUresult::CUDA_ERROR_UNKNOWN));
        }
        let sleeps = self.processes[at.0].engines[at.1].sleeps;
        match self.random.u8(0..24) {
            0 => self.sleep(at),
            1..4 => self.press(at.0),
            _ if sleeps => self.sleep(at),
            4..8 => self.back(at, true),
            8..12 => self.back(at, false),
            12..17 => self.request(at),
            17..20 => self.release_or_keep(at, false),
            20..22 => self.release_or_keep(at, true),
            22 => {
                let count = self.random.u32(0..5);
                let reserved = self.processes[at.0].engines[at.1].kv().reserve(count);
                let refused = |it: &PagedKvError| !matches!(it, PagedKvError::Argument(_));
                reserved
                    .err()
                    .filter(refused)
                    .iter()
                    .for_each(|it| self.may_fail(it));
            }
            _ => {
                let home = &self.processes[at.0].engines[at.1].home;
                match self.random.bool() {
                    true => self.rig.machine.hold(D0, home.as_raw()),
                    false => self.settle(at),
                }
            }
        }
        self.rig.faults.disarm();
        self.check();
    }

    fn settle(&self, (process, engine): (usize, usize)) {
        self.rig.faults.disarm();
        let home = &self.processes[process].engines[engine].home;
        self.rig.machine.release_stream(D0, home.as_raw());
        home.synchronize().unwrap();
    }

    fn check(&self) {
        for engine in self.processes.iter().flat_map(|it| &it.engines) {
            let known = engine.known();
            let stats = engine.kv().stats().unwrap();
            assert_eq!(stats.in_use as usize, known.used.len());
            assert!(stats.granted <= stats.committed);
            let nothing = engine.requests.is_empty() && !engine.leaks;
            assert!(stats.granted == 0 || !nothing, "{stats:?}");
        }
        assert!(self.rig.machine.live().physical_bytes <= ALL * G);
    }

    /// Checks that each block in use has its bytes.
    fn check_bytes(&self) {
        for at in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            self.settle(at);
            let engine = &self.processes[at.0].engines[at.1];
            if engine.sleeps {
                continue;
            }
            for (&number, &byte) in &engine.known().used {
                let found = stamps(self.rig, engine.kv(), number);
                assert_eq!(found, [byte; 16], "block {number} of {at:?}");
            }
        }
    }
}

fn program(seed: u64) {
    let (rig, at) = (host(), tempfile::tempdir().unwrap());
    let mapper = Mapper::start(&rig.device).unwrap();
    let processes = [0, 1].map(|of| process(&rig, &mapper, at.path(), of));
    let mut world = World {
        rig: &rig,
        processes: processes.into(),
        store: store(&rig.device, ALL),
        random: fastrand::Rng::with_seed(seed),
        fails: seed % 3 == 2,
    };
    for turn in 0..150 {
        world.step();
        if turn % 25 == 24 {
            world.check_bytes();
        }
    }
    world.check_bytes();
    let World {
        processes, store, ..
    } = world;
    let leaks = processes
        .iter()
        .flat_map(|it| &it.engines)
        .any(|it| it.leaks);
    let mut pools = Vec::new();
    for process in processes {
        for engine in process.engines {
            drop(engine.requests);
            // The hook has the cache too.
            engine.tenant.set_hook(None).unwrap();
            drop(engine.kv);
        }
        drop((
            process.buffers,
            process.heap,
            process.blocks,
            process.beside,
        ));
        pools.push(process.pool);
    }
    drop((mapper, store));
    for pool in &pools {
        pool.trim(0).unwrap();
        assert_eq!(pool.stats().committed, 0, "seed {seed}");
    }
    drop(pools);
    // A leaked request keeps its pool.
    if !leaks {
        only_counted_left(&rig);
    }
}

// I-122
#[test]
fn programs_of_engines_under_one_ledger() {
    (0..u64::from(cases(12))).for_each(program);
}
