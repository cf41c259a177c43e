//! Blocks that fall asleep while others wake in their memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common;
use crate::common::books::books;
use crate::common::{D0, G, Rig};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::error::{ArgumentError, SleepError};
use cuvmm::sleep::{Exchanged, Progress};
use cuvmm::{Block, Contents, Device, Exchange, Heap, HostStore, Pool, Stream, Tenant};

pub(crate) fn store(device: &Device, granules: u64) -> HostStore {
    let builder = HostStore::builder(device).pinned(granules * G);
    builder.build().unwrap()
}

pub(crate) fn pattern(size: u64, seed: u8) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size as usize + 997);
    for part in 0..size.div_ceil(997) {
        let byte = part.wrapping_mul(31) as u8 ^ seed;
        bytes.resize(bytes.len() + 997, byte);
    }
    bytes.truncate(size as usize);
    bytes
}

/// Two tenants of one pool: the blocks of `awake` have contents, those of `asleep` sleep with theirs
/// in the store.
pub(crate) struct World {
    pub(crate) pool: Pool,
    pub(crate) awake: Tenant,
    pub(crate) asleep: Tenant,
    pub(crate) old: Vec<Block>,
    pub(crate) new: Vec<Block>,
    pub(crate) store: HostStore,
}

impl World {
    /// Makes blocks of these sizes in a pool of `granules` granules.
    pub(crate) fn new(rig: &Rig<impl Backing>, granules: u64, old: &[u64], new: &[u64]) -> Self {
        let pool = common::pool(rig, granules);
        let (awake, asleep) = (
            pool.tenant("awake").register().unwrap(),
            pool.tenant("asleep").register().unwrap(),
        );
        let all = old.iter().chain(new).map(|size| size.div_ceil(G)).sum();
        let store = store(&rig.device, all);
        let make = |tenant: &Tenant, sizes: &[u64], seed: u8| -> Vec<Block> {
            let blocks = sizes.iter().zip(seed..).map(|(&size, seed)| {
                let block = tenant.allocate(size).unwrap();
                block.write(0, &pattern(size, seed)).unwrap();
                block
            });
            blocks.collect()
        };
        let new = make(&asleep, new, 100);
        asleep.blocks().sleep(Contents::Keep(&store)).unwrap();
        let old = make(&awake, old, 1);
        Self {
            pool,
            awake,
            asleep,
            old,
            new,
            store,
        }
    }

    pub(crate) fn exchange(&self) -> Result<Exchanged, SleepError> {
        Exchange::new()
            .sleep(self.awake.blocks(), Contents::Keep(&self.store))
            .wake(self.asleep.blocks())
            .run()
    }

    pub(crate) fn back(&self) -> Result<Exchanged, SleepError> {
        Exchange::new()
            .sleep(self.asleep.blocks(), Contents::Keep(&self.store))
            .wake(self.awake.blocks())
            .run()
    }

    /// Checks that the blocks of one tenant are awake with their contents, and the others asleep.
    pub(crate) fn has(&self, rig: &Rig<impl Backing>, exchanged: bool) {
        let (here, seed, away) = match exchanged {
            false => (&self.old, 1, &self.new),
            true => (&self.new, 100, &self.old),
        };
        assert!(away.iter().all(Block::is_asleep));
        for (block, seed) in here.iter().zip(seed..) {
            shows(rig, block, seed);
        }
    }
}

pub(crate) fn shows(rig: &Rig<impl Backing>, block: &Block, seed: u8) {
    let mut bytes = vec![0; block.size() as usize];
    block.read(0, &mut bytes).unwrap();
    if rig.keeps_bytes() {
        assert!(bytes == pattern(block.size(), seed), "other bytes");
    }
}

on_both! {
    fn blocks_of_which_only_marked_bytes_were_kept_go_in_turn(rig) {
        let world = World::new(rig, 100, &[8 * G], &[8 * G]);
        // The middle of the block is kept, and its start is not.
        world.asleep.blocks().wake().unwrap();
        world.new[0].set_kept(Some(3 * G..4 * G + 7)).unwrap();
        world.asleep.blocks().sleep(Contents::KeepMarked(&world.store)).unwrap();
        let exchanged = world.exchange().unwrap();
        assert_eq!((exchanged.passed, exchanged.woken.restored), (0, G + 7));
        let mut seen = vec![0; G as usize + 7];
        world.new[0].read(3 * G, &mut seen).unwrap();
        let whole = pattern(8 * G, 100);
        assert!(!rig.keeps_bytes() || seen == whole[3 * G as usize..][..seen.len()]);
        world.new[0].set_kept([]).unwrap();
        world.back().unwrap();
        world.has(rig, false);
        // Marked blocks that fall asleep do it in turn too, and are woken by name.
        world.old[0].set_kept(Some(0..100)).unwrap();
        let marked = Exchange::new().sleep(world.awake.blocks(), Contents::KeepMarked(&world.store));
        let exchanged = marked.wake(world.asleep.blocks()).run().unwrap();
        assert_eq!((exchanged.passed, exchanged.slept.kept), (0, 100));
    }

    // I-93
    fn blocks_of_the_same_sizes_change_places_in_a_full_pool(rig) {
        let sizes = [9 * G, 3 * G, G];
        let world = World::new(rig, 13, &sizes, &sizes);
        for round in 0..3 {
            let exchanged = world.exchange().unwrap();
            assert_eq!(exchanged.passed, 13 * G);
            let slept = exchanged.slept;
            assert_eq!((slept.blocks, slept.given, slept.kept), (3, 13 * G, 13 * G));
            let woken = exchanged.woken;
            assert_eq!((woken.blocks, woken.mapped, woken.restored), (3, 13 * G, 13 * G));
            world.has(rig, true);
            let stats = books(rig, &world.pool);
            assert_eq!((stats.committed, stats.free, stats.quarantined), (13 * G, 0, 0));
            assert_eq!(world.awake.stats().committed, 0, "{round}");
            assert_eq!(world.asleep.stats().committed, 13 * G);
            assert_eq!(world.store.free(), 13 * G);
            assert_eq!(world.back().unwrap().passed, 13 * G);
            world.has(rig, false);
        }
    }

    fn a_smaller_block_leaves_the_rest_to_the_pool(rig) {
        let world = World::new(rig, 16, &[8 * G, 4 * G], &[5 * G + 17]);
        let exchanged = world.exchange().unwrap();
        assert_eq!((exchanged.passed, exchanged.slept.given), (4 * G, 12 * G));
        world.has(rig, true);
        let stats = books(rig, &world.pool);
        assert_eq!((stats.committed, stats.mappings), (6 * G, world.new[0].extents().len() as u64));
        world.back().unwrap();
        world.has(rig, false);
    }

    fn a_larger_block_gets_the_rest_from_the_pool(rig) {
        let world = World::new(rig, 16, &[4 * G], &[7 * G, 2 * G]);
        let exchanged = world.exchange().unwrap();
        assert_eq!((exchanged.passed, exchanged.woken.mapped), (4 * G, 9 * G));
        world.has(rig, true);
        books(rig, &world.pool);
        world.back().unwrap();
        world.has(rig, false);
    }

    fn what_does_not_fit_goes_in_turn(rig) {
        // The extents of the one are too large for the other, and nothing is free beside.
        let world = World::new(rig, 8, &[8 * G], &[2 * G; 4]);
        let more = store(&rig.device, 8);
        world.awake.blocks().release(true).sleep(Contents::Keep(&more)).unwrap();
        world.awake.blocks().wake().unwrap();
        assert_eq!(world.old[0].extents().len(), 1);
        let exchanged = world.exchange().unwrap();
        assert_eq!((exchanged.passed, exchanged.slept.given, exchanged.woken.mapped), (0, 8 * G, 8 * G));
        world.has(rig, true);
        // The other way round the large block is made of small physicals.
        assert_eq!(world.back().unwrap().passed, 8 * G);
        world.has(rig, false);
        books(rig, &world.pool);
    }

    fn what_does_not_fit_at_all_changes_nothing(rig) {
        let world = World::new(rig, 12, &[8 * G], &[8 * G]);
        let other = world.pool.tenant("other").register().unwrap();
        let block = other.allocate(4 * G).unwrap();
        world.asleep.set_limit(6 * G).unwrap();
        let before = (world.pool.stats().committed, world.store.free());
        let refused = world.exchange().unwrap_err();
        assert!(matches!(refused, SleepError::Block { .. }), "{refused:?}");
        world.has(rig, false);
        assert_eq!((world.pool.stats().committed, world.store.free()), before);
        books(rig, &world.pool);
        world.asleep.set_limit(8 * G).unwrap();
        assert_eq!(world.exchange().unwrap().passed, 8 * G);
        world.has(rig, true);
        drop(block);
    }

    fn a_guarantee_of_the_sleeping_tenant_is_kept(rig) {
        let world = World::new(rig, 16, &[8 * G], &[8 * G]);
        world.awake.set_guarantee(8 * G).unwrap();
        assert_eq!(world.exchange().unwrap().passed, 8 * G);
        let other = world.pool.tenant("other").register().unwrap();
        assert!(other.try_allocate(G).is_err(), "it is kept for the sleeping tenant");
        world.awake.blocks().wake().unwrap();
        world.awake.blocks().sleep(Contents::Keep(&world.store)).unwrap();
        // Without room beside the guarantee the blocks that wake have to wait for it.
        world.asleep.blocks().sleep(Contents::Keep(&world.store)).unwrap();
        world.awake.blocks().wake().unwrap();
        world.has(rig, false);
        world.awake.set_guarantee(12 * G).unwrap();
        assert!(world.exchange().is_err());
        world.has(rig, false);
    }

    fn woken_blocks_show_no_bytes_of_those_that_fell_asleep(rig) {
        let world = World::new(rig, 16, &[4 * G; 3], &[3 * G + 5]);
        // Without contents: it reads as zero.
        let bare = world.asleep.allocate(4 * G).unwrap();
        world.asleep.blocks().sleep(Contents::Discard).unwrap();
        assert_eq!(world.exchange().unwrap().passed, 8 * G);
        world.has(rig, true);
        let mut bytes = vec![1; bare.size() as usize];
        bare.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0) || !rig.keeps_bytes());
        let end = world.new[0].address().0 + 3 * G;
        let tails = [end + 5, end + G / 2, end + G - 4].map(|at| common::copy(rig, at).unwrap());
        assert!(tails == [[0; 4]; 3] || !rig.keeps_bytes(), "{tails:?}");
    }

    fn an_exchange_of_blocks_on_one_side_sleeps_or_wakes_them(rig) {
        let world = World::new(rig, 8, &[4 * G], &[4 * G]);
        let woken = Exchange::new().wake(world.asleep.blocks()).run().unwrap();
        assert_eq!((woken.woken.restored, woken.passed), (4 * G, 0));
        for (block, seed) in [(&world.old[0], 1), (&world.new[0], 100)] {
            shows(rig, block, seed);
        }
        let exchange = Exchange::new().sleep(world.awake.blocks(), Contents::Keep(&world.store));
        assert_eq!(exchange.run().unwrap().slept.kept, 4 * G);
        assert_eq!(Exchange::new().run().unwrap(), Exchanged::default());
        // The waking side has no block that sleeps.
        world.asleep.blocks().sleep(Contents::Keep(&world.store)).unwrap();
        world.awake.blocks().wake().unwrap();
        let none = world.asleep.blocks().tag("none");
        let exchange = Exchange::new().sleep(world.awake.blocks(), Contents::Keep(&world.store));
        assert_eq!(exchange.wake(none).run().unwrap().slept.kept, 4 * G);
        world.awake.blocks().wake().unwrap();
        world.has(rig, false);
    }

    fn discarded_contents_go_in_turn(rig) {
        let world = World::new(rig, 8, &[8 * G], &[8 * G]);
        let exchange = Exchange::new()
            .sleep(world.awake.blocks(), Contents::Discard)
            .wake(world.asleep.blocks());
        let exchanged = exchange.run().unwrap();
        assert_eq!((exchanged.passed, exchanged.slept.kept), (0, 0));
        world.has(rig, true);
    }

    fn blocks_of_several_tenants_and_tags_change_places(rig) {
        let world = World::new(rig, 16, &[4 * G], &[6 * G]);
        let (third, more) = (world.pool.tenant("third").register().unwrap(), store(&rig.device, 2));
        let tagged = third.block(2 * G).tag("goes").allocate().unwrap();
        let stays = third.block(2 * G).tag("stays").allocate().unwrap();
        for (block, seed) in [(&tagged, 50), (&stays, 51)] {
            block.write(0, &pattern(2 * G, seed)).unwrap();
        }
        let exchanged = Exchange::new()
            .sleep(world.awake.blocks(), Contents::Keep(&world.store))
            .sleep(third.blocks().tag("goes"), Contents::Keep(&more))
            .wake(world.asleep.blocks())
            .run()
            .unwrap();
        assert_eq!((exchanged.passed, exchanged.slept.blocks), (6 * G, 2));
        world.has(rig, true);
        assert!(tagged.is_asleep() && !stays.is_asleep());
        shows(rig, &stays, 51);
        drop(stays);
        third.blocks().wake().unwrap();
        shows(rig, &tagged, 50);
        books(rig, &world.pool);
    }

    fn a_tenant_exchanges_its_own_blocks(rig) {
        let pool = common::pool(rig, 4);
        let tenant = pool.tenant("model").register().unwrap();
        let store = store(&rig.device, 8);
        let one = tenant.block(4 * G).tag("one").allocate().unwrap();
        one.write(0, &pattern(4 * G, 1)).unwrap();
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        let two = tenant.block(4 * G).tag("two").allocate().unwrap();
        two.write(0, &pattern(4 * G, 2)).unwrap();
        let exchange = Exchange::new().sleep(tenant.blocks().tag("two"), Contents::Keep(&store));
        let exchanged = exchange.wake(tenant.blocks().tag("one")).run().unwrap();
        assert_eq!(exchanged.passed, 4 * G);
        shows(rig, &one, 1);
        assert!(two.is_asleep());
        books(rig, &pool);
    }

    fn forks_keep_their_memory(rig) {
        let world = World::new(rig, 16, &[4 * G], &[4 * G]);
        let fork = world.old[0].fork(4 * G, 4 * G).unwrap();
        let more = store(&rig.device, 8);
        let exchange = Exchange::new().sleep(world.awake.blocks(), Contents::Keep(&more));
        let exchanged = exchange.wake(world.asleep.blocks()).run().unwrap();
        assert_eq!(exchanged.passed, 0, "blocks share it");
        assert!(fork.is_asleep());
        world.has(rig, true);
        world.back().unwrap();
        shows(rig, &fork, 1);
        world.has(rig, false);
    }

    fn what_is_to_sleep_and_to_wake_is_refused_at_once(rig) {
        let world = World::new(rig, 8, &[4 * G], &[4 * G]);
        let forever = Duration::from_secs(600);
        let all = || world.awake.blocks().timeout(forever);
        let heap = Heap::builder(&world.awake).build().unwrap();
        let pairs = [
            (all(), all()),
            (all(), all().tag("weights")),
            (all().tag("weights"), all()),
            (all().tag("weights").tag("cache"), all().tag("other").tag("cache")),
            (heap.alone().timeout(forever), all().tag("weights").heap(&heap)),
        ];
        rig.faults.forget();
        for (falling, waking) in &pairs {
            // With other selections that have nothing in common, at once and in turn.
            for contents in [Contents::Keep(&world.store), Contents::Discard] {
                let exchange = Exchange::new().sleep(all().tag("none"), contents);
                let exchange = exchange.sleep(falling.clone(), contents);
                let exchange = exchange.wake(world.asleep.blocks()).wake(waking.clone());
                let refused = exchange.run();
                assert!(
                    matches!(refused, Err(SleepError::Argument(ArgumentError::SleepsAndWakes))),
                    "{refused:?}"
                );
            }
        }
        assert_eq!(rig.faults.total(), 0, "no driver call");
        world.has(rig, false);
        let apart = Exchange::new()
            .sleep(heap.alone(), Contents::Discard)
            .wake(all().tag("weights"));
        assert_eq!(apart.run().unwrap().slept.heaps, 1);
    }

    fn a_lease_or_queued_work_refuses(rig) {
        let world = World::new(rig, 8, &[4 * G], &[4 * G]);
        let lease = world.old[0].lease();
        assert!(matches!(world.exchange(), Err(SleepError::Leased { blocks: 1, .. })));
        world.has(rig, false);
        drop(lease);
        let stream = Stream::new(&rig.device).unwrap();
        let busy = world.awake.allocate_on(&stream, G).unwrap();
        common::busy(rig, &stream, &busy, 7);
        let exchange = Exchange::new()
            .sleep(world.awake.blocks().timeout(Duration::from_millis(1)), Contents::Keep(&world.store))
            .wake(world.asleep.blocks());
        assert!(matches!(exchange.run(), Err(SleepError::Busy { .. })));
        rig.machine.release_all_streams(D0);
        world.has(rig, false);
        stream.synchronize().unwrap();
        drop(busy);
        let small = store(&rig.device, 1);
        let full = Exchange::new()
            .sleep(world.awake.blocks(), Contents::Keep(&small))
            .wake(world.asleep.blocks());
        assert!(matches!(full.run(), Err(SleepError::StoreFull { .. })));
        let second = rig.second();
        let foreign = store(&second, 4);
        let foreign = Exchange::new().sleep(world.awake.blocks(), Contents::Keep(&foreign));
        let refused = foreign.wake(world.asleep.blocks()).run();
        assert!(matches!(refused, Err(SleepError::Argument(ArgumentError::WrongDevice(_)))));
        world.has(rig, false);
        world.exchange().unwrap();
        world.has(rig, true);
    }

    fn a_lease_that_is_taken_meanwhile_undoes_it(rig) {
        let world = World::new(rig, 40, &[17 * G, G], &[18 * G]);
        let (old, taken) = (&world.old[0], AtomicU64::new(0));
        let watch = |progress: &Progress| {
            if progress.done > 0 && taken.fetch_add(1, Ordering::SeqCst) == 0 {
                drop(old.lease());
            }
            true
        };
        let exchange = Exchange::new()
            .sleep(world.awake.blocks().on_progress(&watch), Contents::Keep(&world.store))
            .wake(world.asleep.blocks());
        assert!(matches!(exchange.run(), Err(SleepError::Leased { .. })));
        world.has(rig, false);
        world.exchange().unwrap();
        world.has(rig, true);
    }

    fn a_cancelled_exchange_restores_all_contents(rig) {
        let world = World::new(rig, 26, &[26 * G], &[24 * G + 1, G]);
        let before = books(rig, &world.pool);
        for most in 0..8 {
            let calls = AtomicU64::new(0);
            let watch = |progress: &Progress| {
                assert!(progress.done <= progress.total);
                let stats = world.pool.stats();
                assert!(stats.committed + stats.free <= 26 * G, "{stats:?}");
                calls.fetch_add(1, Ordering::SeqCst) < most
            };
            let exchange = Exchange::new()
                .sleep(world.awake.blocks(), Contents::Keep(&world.store))
                .wake(world.asleep.blocks().on_progress(&watch));
            match exchange.run() {
                Ok(exchanged) => {
                    assert!(exchanged.passed > 0);
                    world.has(rig, true);
                    world.back().unwrap();
                }
                Err(error) => assert!(matches!(error, SleepError::Cancelled), "{error:?}"),
            }
            world.has(rig, false);
            assert_eq!(books(rig, &world.pool).committed, before.committed);
            assert_eq!(world.store.free(), 26 * G);
        }
        world.exchange().unwrap();
        world.has(rig, true);
    }

    fn a_panic_of_the_observer_restores_all_contents(rig) {
        let world = World::new(rig, 26, &[26 * G], &[26 * G]);
        let watch = |progress: &Progress| {
            assert!(progress.done == 0, "on purpose");
            true
        };
        let exchange = || {
            Exchange::new()
                .sleep(world.awake.blocks().on_progress(&watch), Contents::Keep(&world.store))
                .wake(world.asleep.blocks())
                .run()
        };
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(exchange));
        assert!(panicked.is_err());
        world.has(rig, false);
        books(rig, &world.pool);
        world.exchange().unwrap();
        world.has(rig, true);
    }

    fn blocks_that_are_dropped_meanwhile_are_gone(rig) {
        let World { pool, awake, asleep, old, new, store } = World::new(rig, 26, &[26 * G], &[26 * G]);
        let held = std::sync::Mutex::new(Some((old, new)));
        let watch = |progress: &Progress| {
            if progress.done > 0 {
                drop(held.lock().unwrap().take());
            }
            true
        };
        let exchange = Exchange::new()
            .sleep(awake.blocks().on_progress(&watch), Contents::Keep(&store))
            .wake(asleep.blocks());
        drop(exchange.run());
        pool.trim(0).unwrap();
        let stats = books(rig, &pool);
        assert_eq!((stats.committed, stats.in_use, store.free()), (0, 0, 52 * G));
    }
}
