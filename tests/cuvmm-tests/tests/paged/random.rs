//! Random programs of a paged cache beside another tenant: bytes, counts and figures after each step,
//! against a model that knows which blocks are in use.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};

use crate::common::books::books;
use crate::common::{D0, G, Rig, cases, host, limited, model, nothing_left};
use crate::scene::{LAYOUTS, builder, extents_under, stamp, stamps};
use cuvmm::driver::Driver;
use cuvmm::driver::model::{Backing, Machine};
use cuvmm::paged::{Layout, Step};
use cuvmm::{Block, Mapper, PagedKv, Pool, Stream, Tenant};

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

struct World<'a, B: Backing> {
    rig: &'a Rig<B>,
    kv: &'a PagedKv,
    home: &'a Stream,
    other: &'a Tenant,
    blocks: Vec<Block>,
    steps: Vec<(u64, Step<'a>)>,
    begun: u64,
    known: Known,
    random: fastrand::Rng,
    /// A mapper maps memory ahead of use meanwhile.
    mapped: bool,
}

impl<B: Backing + 'static> World<'_, B>
where
    Machine<B>: Driver,
{
    fn numbers(&mut self) -> Vec<u32> {
        let count = self.random.usize(1..6);
        (0..count).map(|_| self.random.u32(0..PINNED)).collect()
    }

    fn back(&mut self) {
        let numbers = self.numbers();
        let new: BTreeSet<u32> = numbers.iter().copied().collect();
        let new = new
            .into_iter()
            .filter(|it| !self.known.used.contains_key(it));
        let new: Vec<u32> = new.collect();
        let reserved = self.kv.stats().unwrap().reserved;
        if let Err(error) = self.kv.try_back(&numbers) {
            assert!(error.is_out_of_memory(), "{error}");
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
            stamp(self.rig, self.home, self.kv, number, byte);
            self.known.used.insert(number, byte);
            self.known.last.insert(number, byte);
        }
    }

    fn settle(&self) {
        self.rig.machine.release_stream(D0, self.home.as_raw());
        self.home.synchronize().unwrap();
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
            stamp(self.rig, self.home, self.kv, block, byte);
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

    fn step(&mut self) {
        match self.random.u8(0..24) {
            0..8 => self.back(),
            8..13 => self.release(),
            13 | 14 => self.begin_step(),
            15 | 16 => self.end_step(),
            17..20 => self.press(),
            20 => drop(self.kv.purge().unwrap()),
            21 => {
                let count = self.random.u32(0..8);
                match self.kv.reserve(count) {
                    Ok(()) => self.known.reserved = count,
                    Err(error) => {
                        let refused = matches!(error, cuvmm::PagedKvError::Argument(_));
                        assert!(error.is_out_of_memory() || refused, "{error}");
                    }
                }
            }
            22 => {
                let evictable = self.numbers();
                let before = self.kv.stats().unwrap();
                let chosen = self.kv.emptiest(4 * G, &evictable).unwrap();
                if self.steps.is_empty() && self.known.reserved == 0 {
                    self.kv.release(&chosen.numbers).unwrap();
                    self.released(chosen.numbers);
                    let after = self.kv.stats().unwrap();
                    assert_eq!(before.committed - after.committed, chosen.bytes);
                }
            }
            _ => match self.random.bool() {
                true => self.rig.machine.hold(D0, self.home.as_raw()),
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
        let known = extents_under(self.kv, &self.known.backed());
        match self.known.reserved {
            0 => assert_eq!(stats.committed, known),
            _ => assert!(stats.committed >= known),
        }
        if self.mapped {
            assert!(stats.precommitted <= stats.withdrawn);
            return;
        }
        let tenants = books(self.rig, pool).tenants;
        assert_eq!(
            (tenants[0].in_use, tenants[0].committed),
            (stats.committed, stats.held)
        );
    }

    fn check_bytes(&self) {
        self.settle();
        for (&number, &byte) in &self.known.used {
            let found = stamps(self.rig, self.kv, number);
            assert_eq!(found, [byte; 16], "block {number}");
        }
    }
}

fn program<B: Backing + 'static>(rig: &Rig<B>, layout: Layout, seed: u64, mapped: bool)
where
    Machine<B>: Driver,
{
    let mapper = mapped.then(|| Mapper::start(&rig.device).unwrap());
    let pool = limited(rig, 24);
    let pool = match &mapper {
        Some(mapper) => pool.mapper(mapper).build().unwrap(),
        None => pool.build().unwrap(),
    };
    let [a, other] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
    let home = Stream::new(&rig.device).unwrap();
    let kv = builder(&a, &home, BLOCKS, layout)
        .pinned([PINNED])
        .precommit(if mapped { 8 } else { 0 })
        .build()
        .unwrap();
    let mut world = World {
        rig,
        kv: &kv,
        home: &home,
        other: &other,
        blocks: Vec::new(),
        steps: Vec::new(),
        begun: 0,
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
            nothing_left(rig);
        }
    }
}

#[test]
fn programs_on_the_model() {
    for seed in 0..u64::from(cases(20)) {
        for layout in LAYOUTS {
            let rig = model();
            program(&rig, layout, seed, seed % 3 == 2);
            nothing_left(rig);
        }
    }
}
