//! Random programs of a paged cache beside another tenant, which also sleeps and wakes: bytes, counts
//! and figures after each step, against a model that knows which blocks are in use.

use std::collections::{BTreeMap, BTreeSet};
use std::task::Poll;

use crate::common::books::{books, figures};
use crate::common::executor::Task;
use crate::common::{self, D0, G, Rig, cases, host, limited, manner, model, only_counted_left};
use crate::scene::{LAYOUTS, builder, extents_under, stamp, stamps};
use crate::sleep::{is_asleep, is_busy, store};
use cuvmm::driver::CUresult;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Backing, Manner};
use cuvmm::error::{BlockError, PagedKvError, SleepError};
use cuvmm::paged::{BackFuture, Evictions, Layout, Step};
use cuvmm::sleep::{PreparedSleep, PreparedWake};
use cuvmm::{Block, Contents, HostStore, Mapper, PagedKv, Pool, Stream, Tenant};

const BLOCKS: u32 = 24;
const PINNED: u32 = 23;

/// The model: the blocks in use, and their bytes.
#[derive(Default)]
struct Known {
    /// The byte that each block in use was written with.
    used: BTreeMap<u32, u8>,
    /// The byte that each block was written with last.
    last: BTreeMap<u32, u8>,
    /// By the number of a step, the blocks released in it.
    steps: BTreeMap<u64, Vec<u32>>,
    reserved: u32,
}

impl Known {
    fn backed(&self) -> BTreeSet<u32> {
        let leaving = self.steps.values().flatten();
        self.used
            .keys()
            .chain(leaving)
            .copied()
            .chain([PINNED])
            .collect()
    }
}

/// The sleep of the cache, or a move of it that is prepared.
enum Rest {
    Awake,
    FallsAsleep(PreparedSleep),
    Asleep,
    Wakes(PreparedWake),
}

struct World<'a, B: Backing> {
    rig: &'a Rig<B>,
    kv: &'a PagedKv,
    /// The home stream and a recorded one.
    streams: &'a [Stream; 2],
    /// The stream of the engine's kernels.
    on: usize,
    other: &'a Tenant,
    store: &'a HostStore,
    rest: Rest,
    /// The contents of the last sleep were kept.
    keeps: bool,
    /// Work of the streams may be held.
    held: bool,
    blocks: Vec<Block>,
    steps: Vec<(u64, Step<'a>)>,
    begun: u64,
    /// A request that waits, or has memory that it has not taken.
    standing: Option<(Vec<u32>, Task<BackFuture>)>,
    known: Known,
    random: fastrand::Rng,
    /// A mapper maps memory ahead of use meanwhile, and serves requests.
    mapped: bool,
}

impl<'a, B: Backing> World<'a, B> {
    fn numbers(&mut self) -> Vec<u32> {
        let count = self.random.usize(1..6);
        (0..count).map(|_| self.random.u32(0..PINNED)).collect()
    }

    fn back(&mut self) {
        let numbers = self.numbers();
        let waits = self.random.bool();
        let fails = self.fails();
        let (kv, reserved) = (self.kv, self.kv.stats().unwrap().reserved);
        let backed = self.faulty(fails, || match waits {
            // Without a timeout and hooks.
            true => kv.back(&numbers),
            false => kv.try_back(&numbers),
        });
        self.was_backed(&numbers, reserved, backed);
    }

    /// Makes a request, or polls the one that stands, or drops it.
    fn request(&mut self) {
        let (numbers, mut request) = match self.standing.take() {
            Some(_) if self.random.u8(0..4) == 0 => return,
            Some(standing) => standing,
            None => {
                let numbers = self.numbers();
                let request = self.kv.back_async(&numbers);
                (numbers, Task::new(request))
            }
        };
        let reserved = self.kv.stats().unwrap().reserved;
        match request.poll() {
            Poll::Pending => self.standing = Some((numbers, request)),
            Poll::Ready(Err(error)) if is_asleep(&error) => {}
            Poll::Ready(Err(PagedKvError::Back { cause, .. })) if !self.mapped => {
                assert_eq!(cause, BlockError::NoMapper);
            }
            Poll::Ready(backed) => self.was_backed(&numbers, reserved, (backed, false)),
        }
    }

    /// The hint is right while nothing else changes memory, and names the lowest blocks.
    fn back_lowest(&mut self) {
        let count = self.random.u32(0..8);
        let unused = (0..BLOCKS).filter(|it| *it != PINNED && !self.known.used.contains_key(it));
        let lowest: Vec<u32> = unused.take(count as usize).collect();
        let reserved = self.kv.stats().unwrap().reserved;
        let can = self.kv.can_allocate(count).unwrap();
        let backed = match lowest.len() == count as usize {
            true => self.kv.try_back(&lowest),
            false => return assert!(!can),
        };
        // A hostile driver may answer the same question in two ways.
        let is_exact = !self.mapped && manner() != Manner::Hostile;
        assert!(!is_exact || can == backed.is_ok(), "{can}: {backed:?}");
        self.was_backed(&lowest, reserved, (backed, false));
    }

    /// Checks the outcome of a `back` and which of its driver calls failed, and writes to the blocks.
    fn was_backed(
        &mut self,
        numbers: &[u32],
        reserved: u32,
        (backed, failed): (Result<(), PagedKvError>, bool),
    ) {
        let new: BTreeSet<u32> = numbers.iter().copied().collect();
        let new = new
            .into_iter()
            .filter(|it| !self.known.used.contains_key(it));
        let new: Vec<u32> = new.collect();
        if let Err(error) = backed {
            assert!(failed || error.is_out_of_memory(), "{error}");
            assert_eq!(self.kv.stats().unwrap().reserved, reserved);
            return;
        }
        self.known.reserved = self.kv.stats().unwrap().reserved;
        for number in new {
            let byte = self.random.u8(1..200);
            if self.rig.keeps_bytes() {
                self.settle();
                let found = stamps(self.rig, self.kv, number);
                let last = self.known.last.get(&number).copied().unwrap_or(0);
                let own = |byte: &u8| [0, last].contains(byte);
                assert!(
                    found.iter().all(own),
                    "block {number}: {found:?}, not {last}"
                );
            }
            stamp(self.rig, self.stream(), self.kv, number, byte);
            self.known.used.insert(number, byte);
            self.known.last.insert(number, byte);
        }
    }

    const fn stream(&self) -> &'a Stream {
        &self.streams[self.on]
    }

    fn settle(&mut self) {
        self.held = false;
        for stream in self.streams {
            self.rig.machine.release_stream(D0, stream.as_raw());
            stream.synchronize().unwrap();
        }
    }

    /// The engine goes on with its other stream, whose use it records. It orders their work.
    fn switch(&mut self) {
        self.settle();
        self.on = 1 - self.on;
        self.kv.record_use(self.stream()).unwrap();
    }

    /// Writes a block in use by the host and reads it, or is refused.
    fn copy(&mut self) {
        self.settle();
        let (number, byte) = (self.random.u32(0..BLOCKS), self.random.u8(1..200));
        let length = (self.kv.block_bytes() / 4) as usize;
        let used = self.known.used.contains_key(&number);
        for (layer, part) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let (written, mut read) = (vec![byte; length], vec![0; length]);
            let place = (0, layer, part);
            let outcome = self.kv.write(number, place, &written);
            assert_eq!(outcome.is_ok(), used || number == PINNED, "{outcome:?}");
            assert_eq!(
                self.kv.read(number, place, &mut read).is_ok(),
                outcome.is_ok()
            );
            assert!(outcome.is_err() || !self.rig.keeps_bytes() || read == written);
        }
        if used {
            self.known.used.insert(number, byte);
            self.known.last.insert(number, byte);
        }
    }

    fn reserve(&mut self) {
        let (count, waits, fails) = (self.random.u32(0..8), self.random.bool(), self.fails());
        let kv = self.kv;
        let (reserved, failed) = self.faulty(fails, || match waits {
            true => kv.reserve(count),
            false => kv.try_reserve(count),
        });
        match reserved {
            Ok(()) => self.known.reserved = count,
            Err(error) => {
                let refused = matches!(error, PagedKvError::Argument(_));
                assert!(failed || error.is_out_of_memory() || refused, "{error}");
            }
        }
    }

    fn purge(&mut self) {
        let fails = self.fails();
        let (purged, failed) = self.faulty(fails, || self.kv.purge());
        assert!(failed || purged.is_ok(), "{purged:?}");
    }

    /// Chooses the driver call that fails in an operation, seldom one.
    fn fails(&mut self) -> Option<u64> {
        let fails = !self.mapped && self.random.u8(0..6) == 0;
        fails.then(|| self.random.u64(1..8))
    }

    fn release(&mut self) {
        let numbers = self.numbers();
        let distinct: BTreeSet<u32> = numbers.iter().copied().collect();
        let known = |it: &u32| self.known.used.contains_key(it);
        let right = distinct.iter().all(known);
        assert_eq!(self.kv.release(&numbers).is_ok(), right);
        if !right {
            // A part of them, which is right.
            let in_use: Vec<u32> = distinct.into_iter().filter(known).collect();
            self.kv.release(&in_use).unwrap();
            return self.released(in_use);
        }
        self.released(distinct.into_iter().collect());
    }

    fn released(&mut self, numbers: Vec<u32>) {
        for number in &numbers {
            self.known.used.remove(number);
        }
        if let Some(mut step) = self.known.steps.last_entry() {
            step.get_mut().extend(numbers);
        }
    }

    fn begin_step(&mut self) {
        if self.steps.len() < 3 {
            self.begun += 1;
            self.steps.push((self.begun, self.kv.step()));
            self.known.steps.insert(self.begun, Vec::new());
        }
    }

    fn end_step(&mut self) {
        if self.steps.is_empty() {
            return;
        }
        let at = self.random.usize(0..self.steps.len());
        let (number, step) = self.steps.swap_remove(at);
        // The step's kernels, which use all blocks that it could name.
        let released = self.known.steps.remove(&number).unwrap();
        for &block in &released {
            let byte = self.known.last[&block];
            stamp(self.rig, self.stream(), self.kv, block, byte);
        }
        drop(step);
        if let Some((_, earlier)) = self.known.steps.range_mut(..number).next_back() {
            earlier.extend(released);
        }
    }

    fn press(&mut self) {
        let size = self.random.u64(1..20) * G;
        if let Ok(block) = self.other.try_allocate(size) {
            if self.rig.keeps_bytes() {
                for at in 0..size / G {
                    let mut read = [1];
                    block.read(at * G, &mut read).unwrap();
                    assert!([0, 255].contains(&read[0]), "a byte of the cache");
                    block.write(at * G, &[255]).unwrap();
                }
            }
            if self.random.bool() {
                self.blocks.push(block);
            }
        } else {
            self.blocks.clear();
        }
    }

    /// Lets one driver call fail, if `fails`, while an operation on the cache runs. Returns its
    /// outcome, and `true` if a call failed.
    fn faulty<T, E>(
        &self,
        fails: Option<u64>,
        operate: impl FnOnce() -> Result<T, E>,
    ) -> (Result<T, E>, bool) {
        let faults = &self.rig.faults;
        faults.forget();
        if let Some(nth) = fails {
            faults.arm(Fault::nth(nth, CUresult::CUDA_ERROR_UNKNOWN));
        }
        let outcome = operate();
        let failed = faults.injected() > 0;
        faults.disarm();
        (outcome, failed)
    }

    fn fall_asleep(&mut self) {
        if self.random.u8(0..4) > 0 {
            self.settle();
        }
        let (keeps, releases) = (self.random.bool(), self.random.bool());
        let fails = self.random.bool().then(|| self.random.u64(1..40));
        let contents = match keeps {
            true => Contents::Keep(self.store),
            false => Contents::Discard,
        };
        let alone = self.kv.alone().release(releases);
        let (prepared, failed) = self.faulty(fails, || alone.prepare_sleep(contents));
        match prepared {
            Ok(prepared) => {
                assert!(self.steps.is_empty(), "a step was being prepared");
                self.keeps = keeps;
                self.rest = Rest::FallsAsleep(prepared);
                if self.random.bool() {
                    self.end_move();
                }
            }
            refused => {
                let has_work = self.held || !self.steps.is_empty() || self.standing.is_some();
                let busy = is_busy(&refused) && has_work;
                assert!(busy || failed, "{refused:?}");
            }
        }
    }

    fn begin_wake(&mut self) {
        let fails = self.random.bool().then(|| self.random.u64(1..40));
        let (prepared, failed) = self.faulty(fails, || self.kv.alone().prepare_wake());
        match prepared {
            Ok(prepared) => {
                self.rest = Rest::Wakes(prepared);
                if self.random.bool() {
                    self.end_move();
                }
            }
            Err(SleepError::Block { cause, .. }) if cause.is_shortage() => {}
            Err(error) => assert!(failed, "{error}"),
        }
    }

    /// Finishes a prepared move, or cancels it.
    fn end_move(&mut self) {
        let finishes = self.random.u8(0..3) > 0;
        match std::mem::replace(&mut self.rest, Rest::Awake) {
            Rest::FallsAsleep(prepared) if finishes => {
                let slept = prepared.finish();
                assert_eq!((slept.caches, slept.kept > 0), (1, self.keeps));
                self.rest = Rest::Asleep;
            }
            Rest::FallsAsleep(prepared) => prepared.cancel().unwrap(),
            Rest::Wakes(prepared) if finishes => {
                assert_eq!(prepared.finish().caches, 1);
                self.has_woken();
            }
            Rest::Wakes(prepared) => {
                drop(prepared);
                self.rest = Rest::Asleep;
            }
            rest => self.rest = rest,
        }
    }

    fn has_woken(&mut self) {
        self.rest = Rest::Awake;
        assert_eq!(self.store.free(), self.store.capacity());
        if !self.keeps {
            self.known.used.values_mut().for_each(|byte| *byte = 0);
        }
    }

    /// Checks that the cache refuses what needs its blocks.
    fn refuses(&mut self) {
        let numbers = self.numbers();
        for error in [
            self.kv.back(&numbers).unwrap_err(),
            self.kv.release(&numbers).unwrap_err(),
            self.kv.reserve(0).unwrap_err(),
            self.kv.try_back(&numbers).unwrap_err(),
            self.kv.try_reserve(0).unwrap_err(),
            self.kv.write(PINNED, (0, 0, 0), &[]).unwrap_err(),
            self.kv.read(PINNED, (0, 0, 0), &mut []).unwrap_err(),
        ] {
            assert!(is_asleep(&error), "{error}");
        }
        assert!(!self.kv.can_allocate(1).unwrap());
        let chosen = self.kv.emptiest(4 * G, &numbers).unwrap();
        assert_eq!(chosen, Evictions::default());
    }

    fn step(&mut self) {
        match (self.random.u8(0..24), &self.rest) {
            (0..5, Rest::Awake) => self.awake_step(),
            (0..5, Rest::Asleep) => self.begin_wake(),
            (0..5, _) => self.end_move(),
            (5, Rest::Awake) => self.fall_asleep(),
            (_, Rest::Awake) => self.awake_step(),
            (5..10, _) => self.press(),
            (10..13, _) => self.begin_step(),
            (13..17, _) => self.end_step(),
            (17, _) => self.purge(),
            (18, _) => self.switch(),
            (19, _) => self.request(),
            _ => self.refuses(),
        }
    }

    fn awake_step(&mut self) {
        match self.random.u8(0..31) {
            0..8 => self.back(),
            8..13 => self.release(),
            13 | 14 => self.begin_step(),
            15 | 16 => self.end_step(),
            17..20 => self.press(),
            20 => self.purge(),
            21 => self.reserve(),
            23 => self.switch(),
            24 => self.copy(),
            25 | 26 => self.back_lowest(),
            28..31 => self.request(),
            22 => {
                let evictable = self.numbers();
                let before = self.kv.stats().unwrap();
                let chosen = self.kv.emptiest(4 * G, &evictable).unwrap();
                let exact = self.steps.is_empty() && self.known.reserved == 0;
                if exact && self.standing.is_none() {
                    self.kv.release(&chosen.numbers).unwrap();
                    self.released(chosen.numbers);
                    let after = self.kv.stats().unwrap();
                    assert_eq!(before.committed - after.committed, chosen.bytes);
                }
            }
            _ => match self.random.bool() {
                true => {
                    self.held = true;
                    self.rig.machine.hold(D0, self.stream().as_raw());
                }
                false => self.settle(),
            },
        }
    }

    fn check(&self, pool: &Pool) {
        let stats = self.kv.stats().unwrap();
        let leaving: usize = self.known.steps.values().map(Vec::len).sum();
        assert_eq!(
            (
                stats.in_use as usize,
                stats.leaving as usize,
                stats.reserved
            ),
            (self.known.used.len(), leaving, self.known.reserved)
        );
        for number in 0..BLOCKS {
            let used = self.known.used.contains_key(&number) || number == PINNED;
            assert_eq!(self.kv.is_backed(number).unwrap(), used);
        }
        let known = extents_under(self.kv, &self.known.backed());
        let awake = matches!(self.rest, Rest::Awake);
        assert_eq!(self.kv.is_asleep(), !awake);
        let committed = match awake {
            true => stats.committed,
            false => stats.asleep,
        };
        assert_eq!(committed, stats.committed + stats.asleep);
        match self.known.reserved > 0 || self.standing.is_some() {
            false => assert_eq!(committed, known),
            true => assert!(committed >= known),
        }
        if self.mapped {
            assert!(stats.precommitted <= stats.withdrawn);
            return;
        }
        // The memory of a cache that falls asleep is charged, and not mapped.
        let tenants = match self.rest {
            Rest::FallsAsleep(_) => figures(pool).tenants,
            _ => books(self.rig, pool).tenants,
        };
        let (in_use, asleep) = match self.rest {
            Rest::Awake | Rest::FallsAsleep(_) | Rest::Wakes(_) => (committed, 0),
            Rest::Asleep => (0, committed),
        };
        assert_eq!((tenants[0].in_use, tenants[0].asleep), (in_use, asleep));
        if awake {
            assert_eq!(tenants[0].committed, stats.held);
        }
    }

    fn check_bytes(&mut self) {
        self.settle();
        if !matches!(self.rest, Rest::Awake) {
            return;
        }
        for (&number, &byte) in &self.known.used {
            let found = stamps(self.rig, self.kv, number);
            assert_eq!(found, [byte; 16], "block {number}");
        }
    }
}

fn program(rig: &Rig<impl Backing>, layout: Layout, seed: u64, mapped: bool) {
    let mapper = mapped.then(|| Mapper::start(&rig.device).unwrap());
    let pool = limited(rig, 24);
    let pool = match &mapper {
        Some(mapper) => pool.mapper(mapper).build().unwrap(),
        None => pool.build().unwrap(),
    };
    let [a, other] = common::tenants(&pool);
    let streams = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
    let store = store(&rig.device, 24);
    let kv = builder(&a, &streams[0], BLOCKS, layout)
        .pinned([PINNED])
        .precommit(if mapped { 8 } else { 0 })
        .build()
        .unwrap();
    let mut world = World {
        rig,
        kv: &kv,
        streams: &streams,
        on: 0,
        other: &other,
        store: &store,
        rest: Rest::Awake,
        keeps: false,
        held: false,
        blocks: Vec::new(),
        steps: Vec::new(),
        begun: 0,
        standing: None,
        known: Known::default(),
        random: fastrand::Rng::with_seed(seed),
        mapped,
    };
    for turn in 0..200 {
        world.step();
        world.check(&pool);
        if turn % 20 == 19 && rig.keeps_bytes() {
            world.check_bytes();
        }
    }
    world.settle();
    drop(world);
    drop(kv);
    drop(mapper);
    pool.trim(0).unwrap();
    assert_eq!(books(rig, &pool).committed, 0, "seed {seed}");
}

// I-98
#[test]
fn programs_on_the_host_driver() {
    for seed in 0..u64::from(cases(8)) {
        for layout in LAYOUTS {
            let rig = host();
            program(&rig, layout, seed, seed % 3 == 2);
            only_counted_left(&rig);
        }
    }
}

#[test]
fn programs_on_the_model() {
    for seed in 0..u64::from(cases(20)) {
        for layout in LAYOUTS {
            let rig = model();
            program(&rig, layout, seed, seed % 3 == 2);
            only_counted_left(&rig);
        }
    }
}
