//! Forked sequences: what they contain, which memory they share, and what happens to it when one of
//! them is freed, truncated or grows.
#![allow(clippy::unit_arg)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::attention::{LAYOUTS, SMALL, Scene, assert_attends, fill, salts};
use crate::common::books::figures;
use crate::common::sweep::{sweep, sweep_of, sweep_partly, text};
use crate::common::{D0, G, Rig, mapped_pool, pool, until};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, DeviceAddress};
use cuvmm::error::{ArgumentError, BlockError, KvCacheError};
use cuvmm::kv::{Layout, Part, SequenceId, Shape};
use cuvmm::{Block, Hardened, KvCache, Limit, Mapper, Pool, Stream, Tenant};

fn build(tenant: &Tenant, stream: &Stream, layout: Layout) -> KvCache {
    let builder = KvCache::builder(tenant, stream, SMALL).layout(layout);
    builder.may_fork(true).build().unwrap()
}

fn scene(rig: &Rig<impl Backing>, granules: u64, layout: Layout) -> Scene {
    Scene::new(rig, pool(rig, granules), layout, build)
}

/// Returns committed, in-use, shared, idle and free bytes, mappings, and addresses.
fn books(pool: &Pool) -> [u64; 7] {
    let stats = figures(pool);
    let idle = stats.cached + stats.pending_free + stats.leased;
    [
        stats.committed,
        stats.in_use,
        stats.shared,
        idle,
        stats.free,
        stats.mappings,
        stats.addresses,
    ]
}

/// Checks a cache's figures against the driver's, with nothing idle and an empty free list.
fn assert_held(rig: &Rig<impl Backing>, cache: &KvCache, held: u64) {
    assert_eq!(rig.machine.live().physical_bytes, held);
    assert_eq!((cache.stats().held, cache.stats().idle), (held, 0));
}

fn address(cache: &KvCache, id: SequenceId) -> DeviceAddress {
    cache.view(id).unwrap().key(0).unwrap().address()
}

/// Queues a kernel, and holds it back, that will read `tokens` tokens of a sequence.
fn reads_late(rig: &Rig<impl Backing>, on: &Stream, cache: &KvCache, id: SequenceId, tokens: u64) {
    rig.held_kernel(on, &[(address(cache, id), tokens << 17)], &[]);
}

fn append_refused(outcome: Result<(), KvCacheError>) -> BlockError {
    match outcome.unwrap_err() {
        KvCacheError::Block {
            cause: BlockError::Refused { cause, .. },
            ..
        } => *cause,
        other => panic!("{other}"),
    }
}

on_both! {
    fn forks_read_the_prefix_and_grow_apart(rig) {
        for layout in LAYOUTS {
            let Scene { mut cache, .. } = scene(rig, 160, layout);
            let root = cache.create(300).unwrap();
            fill(&mut cache, root, 1, 0..300);
            let at = address(&cache, root);
            let end = cache.fork(root, 300).unwrap();
            let middle = cache.fork(root, 270).unwrap();
            let short = cache.fork(middle, 3).unwrap();
            assert_eq!(cache.tokens(), 300 + 300 + 270 + 3);
            cache.append(&[(root, 20), (end, 30), (middle, 50), (short, 40)]).unwrap();
            fill(&mut cache, root, 2, 300..320);
            fill(&mut cache, end, 3, 300..330);
            fill(&mut cache, middle, 4, 270..320);
            fill(&mut cache, short, 5, 3..43);
            let grandchild = cache.fork(middle, 310).unwrap();
            cache.append(&[(grandchild, 5)]).unwrap();
            fill(&mut cache, grandchild, 6, 310..315);
            let check = |cache: &KvCache, id, parts: &[(u32, usize)]| {
                assert_attends(rig, cache, id, &salts(parts));
            };
            check(&cache, root, &[(1, 300), (2, 20)]);
            check(&cache, end, &[(1, 300), (3, 30)]);
            check(&cache, middle, &[(1, 270), (4, 50)]);
            check(&cache, short, &[(1, 3), (5, 40)]);
            check(&cache, grandchild, &[(1, 270), (4, 40), (6, 5)]);
            assert_eq!(address(&cache, root), at);
            // Sequences can be freed in any order.
            cache.free(root).unwrap();
            check(&cache, end, &[(1, 300), (3, 30)]);
            cache.free(middle).unwrap();
            let other = cache.create(200).unwrap();
            fill(&mut cache, other, 7, 0..200);
            check(&cache, end, &[(1, 300), (3, 30)]);
            check(&cache, grandchild, &[(1, 270), (4, 40), (6, 5)]);
            check(&cache, short, &[(1, 3), (5, 40)]);
            cache.free(end).unwrap();
            check(&cache, grandchild, &[(1, 270), (4, 40), (6, 5)]);
            assert_eq!(cache.stats().shared, 0, "no other sequence shares it");
        }
    }

    // I-7
    fn a_prefix_is_held_once(rig) {
        let Scene { pool, tenant, mut cache, .. } = scene(rig, 160, Layout::TokenMajor);
        // 25 granules: six extents of 4 and one of 1.
        let root = cache.create(400).unwrap();
        assert_held(rig, &cache, 25 * G);
        // Five whole extents, and 5 of the 16 tokens of a granule.
        let forks: Vec<_> = (0..5).map(|_| cache.fork(root, 325).unwrap()).collect();
        assert_held(rig, &cache, (25 + 5) * G);
        let stats = cache.stats();
        assert_eq!((stats.shared, stats.tokens), (20 * G, 400 + 5 * 325));
        assert_eq!(stats.live, (400 + 5 * 5) << 17, "tokens that are stored once");
        assert_eq!(stats.padding, (5 * 11) << 17);
        let tenants = tenant.stats();
        assert_eq!((tenants.shared, tenants.in_use), (20 * G, 10 * G));
        assert_eq!((tenants.committed, tenants.mappings), (30 * G, 7 + 5 * 6));
        assert_eq!(rig.machine.live().mappings, 37);
        assert_eq!(pool.stats().shared, 20 * G);
        // Truncated in its own part, then in the shared part.
        cache.truncate(forks[0], 322).unwrap();
        assert_eq!(cache.stats().live, (400 + 4 * 5 + 2) << 17);
        cache.truncate(forks[0], 100).unwrap();
        let stats = cache.stats();
        assert_eq!((stats.live, stats.shared), ((400 + 4 * 5) << 17, 20 * G));
        // The fork keeps only two extents, and the memory that it had alone is in the free list.
        assert_eq!((stats.held, pool.stats().free), (29 * G, G));
        assert_eq!(pool.stats().mappings, 37 - 4);
        for id in forks {
            cache.free(id).unwrap();
        }
        let stats = cache.stats();
        assert_eq!((stats.shared, stats.held, stats.live), (0, 25 * G, 400 << 17));
        assert_eq!(pool.stats().mappings, 7);
        assert_eq!(pool.trim(0).unwrap(), 5 * G);
        assert_held(rig, &cache, 25 * G);
    }

    fn what_was_shared_is_warm_when_one_is_left(rig) {
        let Scene { mut cache, .. } = scene(rig, 64, Layout::TokenMajor);
        let root = cache.create(400).unwrap();
        let fork = cache.fork(root, 400).unwrap();
        cache.free(fork).unwrap();
        cache.free(root).unwrap();
        rig.faults.forget();
        let next = cache.create(390).unwrap();
        assert_eq!(rig.faults.total(), 0, "{:?}", rig.faults.calls());
        fill(&mut cache, next, 3, 0..390);
        assert_attends(rig, &cache, next, &[3; 390]);
        // A fork that is left alone may not write to memory that it shared, and the memory is not
        // reused.
        let fork = cache.fork(next, 200).unwrap();
        cache.free(next).unwrap();
        cache.free(fork).unwrap();
        let next = cache.create(200).unwrap();
        fill(&mut cache, next, 4, 0..200);
        assert_attends(rig, &cache, next, &[4; 200]);
    }

    fn a_fork_may_only_read_what_it_shares(rig) {
        let Scene { mut cache, .. } = scene(rig, 64, Layout::TokenMajor);
        let root = cache.create(100).unwrap();
        let fork = cache.fork(root, 90).unwrap();
        let access_at = |at: DeviceAddress| {
            let mappings = rig.machine.snapshot().mappings;
            let found = mappings.iter().find(|found| found.address == at).unwrap();
            format!("{:?}", found.access[0].flags)
        };
        let own = DeviceAddress(address(&cache, fork).0 + 4 * G);
        assert_eq!(access_at(address(&cache, root)), access_at(own));
        assert_ne!(access_at(address(&cache, fork)), access_at(own));
        let row = vec![0; 16 << 10];
        for (id, fixed) in [(root, 90), (fork, 90)] {
            let refused = cache.write_rows(id, 0, Part::Key, 89, &row).unwrap_err();
            assert!(matches!(
                refused, KvCacheError::Fixed { first: 89, fixed: limit, .. } if limit == fixed
            ), "{refused}");
        }
        cache.write_rows(root, 0, Part::Key, 90, &row).unwrap();
        // Once truncated and grown again, the tokens may be written again.
        cache.truncate(fork, 7).unwrap();
        cache.append(&[(fork, 2)]).unwrap();
        assert!(cache.write_rows(fork, 0, Part::Key, 6, &row).is_err());
        cache.write_rows(fork, 0, Part::Key, 7, &row).unwrap();
        assert_eq!(access_at(address(&cache, fork)), access_at(address(&cache, root)));
        assert!(cache.write_rows(root, 0, Part::Key, 7, &row).is_err());
    }

    fn who_is_cut_in_the_prefix_gets_memory_of_its_own(rig) {
        for layout in LAYOUTS {
            let Scene { pool, mut cache, .. } = scene(rig, 160, layout);
            let root = cache.create(390).unwrap();
            fill(&mut cache, root, 1, 0..390);
            let one = cache.fork(root, 390).unwrap();
            let two = cache.fork(root, 390).unwrap();
            // In the middle of a granule, at the end of an extent, and in the source of the forks.
            for (id, cut) in [(one, 77), (two, 256), (root, 128)] {
                let at = address(&cache, id);
                cache.truncate(id, cut).unwrap();
                cache.truncate(id, cut - 1).unwrap();
                cache.append(&[(id, 1)]).unwrap();
                fill(&mut cache, id, 8, cut - 1..cut);
                cache.append(&[(id, 12)]).unwrap();
                fill(&mut cache, id, 9, cut..cut + 12);
                let cut = cut as usize;
                assert_attends(rig, &cache, id, &salts(&[(1, cut - 1), (8, 1), (9, 12)]));
                assert_eq!(address(&cache, id), at);
                if id == one {
                    assert_attends(rig, &cache, root, &[1; 390]);
                }
                if id != root {
                    continue;
                }
                assert_attends(rig, &cache, one, &salts(&[(1, 76), (8, 1), (9, 12)]));
                assert_attends(rig, &cache, two, &salts(&[(1, 255), (8, 1), (9, 12)]));
            }
            figures(&pool);
        }
    }

    fn memory_of_its_own_waits_for_readers(rig) {
        let (pool, tenant, stream) = common::scene(rig, 64);
        let builder = KvCache::builder(&tenant, &stream, SMALL).may_fork(true);
        let mut cache = builder.timeout(Duration::from_secs(20)).build().unwrap();
        let root = cache.create(120).unwrap();
        fill(&mut cache, root, 1, 0..120);
        let fork = cache.fork(root, 120).unwrap();
        // Pending work on another stream still reads it.
        let other = Stream::new(&rig.device).unwrap();
        cache.record_use(fork, &other).unwrap();
        reads_late(rig, &other, &cache, fork, 120);
        cache.truncate(fork, 60).unwrap();
        let before = books(&pool);
        let begun = Instant::now();
        let refused = append_refused(cache.try_append(&[(fork, 1), (root, 1)]));
        assert!(begun.elapsed() < Duration::from_secs(10), "the call does not wait");
        assert!(matches!(
            refused,
            BlockError::SharedInUse { offset, others: 1, .. } if offset == 60 << 17
        ), "{refused}");
        assert!(refused.is_shortage());
        assert_eq!(books(&pool), before);
        assert_eq!(cache.tokens(), 180);
        let passed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                passed.store(true, Ordering::SeqCst);
                rig.machine.release_all_streams(D0);
            });
            cache.append(&[(fork, 1), (root, 1)]).unwrap();
            assert!(passed.load(Ordering::SeqCst), "the call waits for the work");
        });
        fill(&mut cache, fork, 2, 60..61);
        fill(&mut cache, root, 3, 120..121);
        assert_attends(rig, &cache, fork, &salts(&[(1, 60), (2, 1)]));
        assert_attends(rig, &cache, root, &salts(&[(1, 120), (3, 1)]));
    }

    fn an_append_unmaps_nothing_under_work_that_a_pressure_hook_queues(rig) {
        let Scene { pool, stream, mut cache, .. } = scene(rig, 20, Layout::TokenMajor);
        let root = cache.create(120).unwrap();
        fill(&mut cache, root, 1, 0..120);
        let fork = cache.fork(root, 120).unwrap();
        cache.truncate(fork, 60).unwrap();
        let theirs: Arc<Mutex<Option<Block>>> = Arc::default();
        let (held, machine) = (Arc::clone(&theirs), Arc::clone(&rig.machine));
        let (raw, reads) = (stream.as_raw(), vec![(address(&cache, fork), 60 << 17)]);
        let hook = move |_: &cuvmm::pool::Pressure| {
            drop(held.lock().unwrap().take());
            machine.hold(D0, raw);
            machine.queue_kernel(D0, raw, reads.clone(), vec![]).unwrap();
        };
        let giver = pool.tenant("giver").on_pressure(hook).register().unwrap();
        pool.trim(0).unwrap();
        let all = 20 * G - pool.stats().committed;
        let other = Stream::new(&rig.device).unwrap();
        *theirs.lock().unwrap() = Some(giver.allocate_on(&other, all).unwrap());
        let refused = append_refused(cache.append(&[(fork, 1)]));
        assert!(matches!(refused, BlockError::SharedInUse { others: 1, .. }), "{refused}");
        assert_eq!(cache.tokens(), 180);
        rig.machine.release_all_streams(D0);
        cache.append(&[(fork, 1)]).unwrap();
        fill(&mut cache, fork, 2, 60..61);
        assert_attends(rig, &cache, fork, &salts(&[(1, 60), (2, 1)]));
        assert_attends(rig, &cache, root, &[1; 120]);
    }

    fn memory_stays_until_all_who_show_it_have_passed(rig) {
        let Scene { pool, mut cache, .. } = scene(rig, 16, Layout::TokenMajor);
        let root = cache.create(120).unwrap();
        let fork = cache.fork(root, 120).unwrap();
        let other = Stream::new(&rig.device).unwrap();
        cache.record_use(fork, &other).unwrap();
        reads_late(rig, &other, &cache, fork, 120);
        cache.free(fork).unwrap();
        cache.free(root).unwrap();
        let needy = pool.tenant("b").register().unwrap();
        let refused = needy.try_allocate(16 * G).unwrap_err();
        assert!(matches!(&refused, BlockError::OutOfMemory(_)), "{refused}");
        assert!(
            needy.try_allocate(9 * G).is_err(),
            "the cache holds at least 8 and a half granules"
        );
        rig.machine.release_all_streams(D0);
        // Nothing has purged it yet. A request that is short of memory does.
        drop(needy.try_allocate(16 * G).unwrap());
        assert_eq!(cache.tokens(), 0);
    }

    fn others_take_what_forks_left(rig) {
        let pool = pool(rig, 40);
        let tenant = pool.tenant("a").guarantee(4 * G).register().unwrap();
        let other = pool.tenant("b").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let mut cache = build(&tenant, &stream, Layout::TokenMajor);
        let root = cache.create(400).unwrap();
        let forks = [400, 300, 200].map(|at| cache.fork(root, at).unwrap());
        let theirs = other.allocate_on(&stream, 10 * G).unwrap();
        assert!(other.try_allocate(8 * G).is_err());
        let fits = cache.admission().unwrap();
        for id in forks {
            cache.truncate(id, 1).unwrap();
        }
        cache.truncate(root, 64).unwrap();
        let after = cache.admission().unwrap();
        assert!(after.now.bytes > fits.now.bytes + 20 * G, "{fits:?} {after:?}");
        // 40 - 10, and what the four sequences hold.
        assert_eq!(after.now.bytes, 30 * G - cache.stats().held);
        let more = other.try_allocate(after.taking_back.bytes - 4 * G + cache.stats().held).unwrap();
        drop((theirs, more));
        let one = cache.try_create(cache.admission().unwrap().taking_back.sequence).unwrap();
        cache.free(one).unwrap();
        drop(cache);
        drop(tenant);
        drop(other.try_allocate(40 * G).unwrap());
        pool.close().unwrap_err();
    }

    fn admission_counts_what_must_be_replaced(rig) {
        let Scene { pool, mut cache, .. } = scene(rig, 24, Layout::TokenMajor);
        let root = cache.create(200).unwrap();
        let fork = cache.fork(root, 200).unwrap();
        assert_eq!(cache.stats().held, 14 * G);
        cache.truncate(fork, 120).unwrap();
        let fits = cache.admission().unwrap().now;
        // The fork writes behind the first extent in memory of its own: 7 granules, and 3 of the
        // other sequence.
        assert_eq!((fits.bytes, fits.each), (11 * G, 56));
        assert!(cache.try_append(&[root, fork].map(|id| (id, 57))).is_err());
        cache.try_append(&[root, fork].map(|id| (id, 56))).unwrap();
        assert_eq!(cache.admission().unwrap().now.bytes, G);
        let theirs = pool.tenant("b").register().unwrap();
        let left = cache.admission().unwrap().now.bytes;
        drop(theirs.try_allocate(left).unwrap());
    }

    fn what_cannot_be_forked(rig) {
        let (pool, tenant, stream) = common::scene(rig, 24);
        let mut plain = KvCache::builder(&tenant, &stream, SMALL).build().unwrap();
        let id = plain.create(20).unwrap();
        assert!(matches!(plain.fork(id, 20), Err(KvCacheError::MayNotFork)));
        plain.free(id).unwrap();
        let mut cache = build(&tenant, &stream, Layout::TokenMajor);
        let root = cache.create(200).unwrap();
        assert!(matches!(plain.fork(root, 20), Err(KvCacheError::NoSuchSequence { .. })));
        assert!(matches!(cache.fork(root, 0), Err(KvCacheError::Argument(ArgumentError::Zero("tokens of a sequence")))));
        let beyond = cache.fork(root, 201).unwrap_err();
        let (sequence, tokens, held) = (root.number(), 201, 200);
        assert_eq!(beyond, KvCacheError::BeyondEnd { sequence, tokens, held });
        let text = format!("sequence #{sequence} has 200 tokens, fewer than 201");
        assert_eq!((beyond.to_string(), cache.try_fork(root, 201)), (text, Err(beyond)));
        let theirs = tenant.allocate_on(&stream, 11 * G).unwrap();
        let before = (books(&pool), cache.stats());
        match cache.try_fork(root, 190).unwrap_err() {
            KvCacheError::Block {
                sequence,
                cause: BlockError::OutOfMemory(shortage),
            } if sequence == root.number() => assert!(shortage.wanted > 0 && shortage.available < shortage.wanted),
            other => panic!("{other}"),
        }
        assert_eq!((books(&pool), cache.stats()), before);
        // A fork at an extent boundary takes no memory.
        let fork = cache.try_fork(root, 192).unwrap();
        drop(theirs);
        cache.free(fork).unwrap();
        for _ in 1..SMALL.max_sequences {
            cache.fork(root, 3).unwrap();
        }
        assert!(matches!(
            cache.fork(root, 3),
            Err(KvCacheError::Argument(ArgumentError::TooLarge { what: "sequences", value: 7, most: 6 }))
        ));
        // A copy would become part of a graph.
        let mut cache = build(&tenant, &stream, Layout::TokenMajor);
        let root = cache.create(36).unwrap();
        let guard = pool.capture_guard();
        let refused = cache.try_fork(root, 35).unwrap_err();
        assert!(matches!(
            refused, KvCacheError::Block { cause: BlockError::Capturing(_), .. }
        ), "{refused}");
        cache.try_fork(root, 32).unwrap();
        drop(guard);
        tenant.unregister();
        assert!(matches!(
            cache.fork(root, 32),
            Err(KvCacheError::Block { cause: BlockError::Unregistered { .. }, .. })
        ));
    }

    fn compaction_leaves_what_is_shared(rig) {
        let Scene { pool, mut cache, .. } = scene(rig, 64, Layout::TokenMajor);
        // Granule by granule.
        let root = cache.create(16).unwrap();
        for _ in 0..8 {
            cache.append(&[(root, 16)]).unwrap();
        }
        fill(&mut cache, root, 1, 0..144);
        let fork = cache.fork(root, 64).unwrap();
        cache.append(&[(fork, 40)]).unwrap();
        fill(&mut cache, fork, 2, 64..104);
        let before = cache.stats();
        assert_eq!(before.shared, 4 * G);
        rig.device.synchronize().unwrap();
        let done = pool.compact(|_| true).unwrap();
        assert_eq!(done.copied, 4 * G, "{done:?}");
        assert_eq!(cache.stats().shared, 4 * G);
        assert_attends(rig, &cache, root, &[1; 144]);
        assert_attends(rig, &cache, fork, &salts(&[(1, 64), (2, 40)]));
        cache.free(fork).unwrap();
        let done = pool.compact(|_| true).unwrap();
        assert_eq!(done.copied, 4 * G, "{done:?}");
        assert_attends(rig, &cache, root, &[1; 144]);
    }

    fn a_hardened_pool_fills_nothing_that_is_shared(rig) {
        let limit = Limit::Bytes(64 * G);
        let pool = Pool::builder(&rig.device).limit(limit).hardened(Hardened::new());
        let pool = pool.build().unwrap();
        let Scene { pool, mut cache, .. } = Scene::new(rig, pool, Layout::TokenMajor, build);
        let root = cache.create(200).unwrap();
        fill(&mut cache, root, 1, 0..200);
        let one = cache.fork(root, 200).unwrap();
        let two = cache.fork(root, 150).unwrap();
        cache.truncate(root, 20).unwrap();
        cache.append(&[(root, 3)]).unwrap();
        fill(&mut cache, root, 2, 20..23);
        assert_attends(rig, &cache, one, &[1; 200]);
        assert_attends(rig, &cache, two, &[1; 150]);
        cache.free(root).unwrap();
        cache.free(one).unwrap();
        assert_attends(rig, &cache, two, &[1; 150]);
        cache.free(two).unwrap();
        pool.trim(0).unwrap();
        let stats = pool.stats();
        assert_eq!((stats.committed, stats.free, stats.mappings), (0, 0, 0), "{stats:#?}");
    }

    fn with_a_mapper_nobody_makes_driver_calls_for_what_forks_left(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 64, &mapper);
        let Scene { pool, tenant, stream, mut cache } = Scene::new(rig, pool, Layout::TokenMajor, build);
        let root = cache.create(200).unwrap();
        let forks = [200, 190, 100].map(|at| cache.fork(root, at).unwrap());
        reads_late(rig, &stream, &cache, forks[1], 190);
        for id in forks {
            cache.free(id).unwrap();
        }
        assert!(pool.stats().mappings > 4);
        rig.machine.release_all_streams(D0);
        until(&pool, "unmapped", || pool.stats().shared == 0);
        // The mapper may still be finishing its last step.
        let _ = common::calls_without_mapper(&rig.device, &pool);
        let stats = cache.stats();
        assert_eq!(stats.held - stats.precommitted, 13 * G);
        drop(cache);
        drop(tenant);
        pool.close().unwrap();
    }

    fn a_tenant_ends_with_its_last_fork(rig) {
        let Scene { pool, tenant, mut cache, .. } = scene(rig, 64, Layout::LayerMajor);
        let root = cache.create(270).unwrap();
        let fork = cache.fork(root, 260).unwrap();
        drop(tenant.clone());
        tenant.unregister();
        cache.free(root).unwrap();
        assert_eq!(pool.stats().tenants[0].blocks, 8);
        cache.free(fork).unwrap();
        drop(cache);
        // The next operation purges what has completed.
        pool.trim(0).unwrap();
        let stats = pool.stats();
        assert_eq!((stats.tenants.len(), stats.committed), (0, 0), "{stats:#?}");
        pool.close().unwrap();
    }
}

/// State that a failed call must not change. The sweep also compares the driver's page tables.
struct World {
    pool: Pool,
    cache: KvCache,
    ids: Vec<SequenceId>,
}

fn world(rig: &Rig<cuvmm::driver::model::Nothing>, layout: Layout) -> World {
    let Scene {
        pool, mut cache, ..
    } = scene(rig, 160, layout);
    let ids = vec![cache.create(300).unwrap()];
    World { pool, cache, ids }
}

fn picture(world: &World) -> ([u64; 7], cuvmm::kv::KvCacheStats) {
    (books(&world.pool), world.cache.stats())
}

#[test]
fn every_driver_call_failed_once() {
    for (layout, forking, cutting) in [(Layout::TokenMajor, 14, 5), (Layout::LayerMajor, 50, 40)] {
        let fork = |_: &Rig<_>, world: &mut World| {
            let id = text(world.cache.fork(world.ids[0], 290))?;
            Ok(world.ids.push(id))
        };
        let calls = sweep(|rig| world(rig, layout), fork, picture);
        assert!(calls >= forking, "{layout:?}: {calls}");
        let forked = |rig: &Rig<_>| {
            let mut world = world(rig, layout);
            fork(rig, &mut world).unwrap();
            world
        };
        // A fork of a fork shares the memory that is shared already.
        let calls = sweep(
            forked,
            |_, world| Ok(world.ids.push(text(world.cache.fork(world.ids[1], 280))?)),
            picture,
        );
        assert!(calls >= forking, "{layout:?}: {calls}");
        for who in [0, 1] {
            let cut = |rig: &Rig<_>| {
                let mut world = forked(rig);
                world.cache.truncate(world.ids[who], 70).unwrap();
                // Released memory would change hands during the sweep.
                world.pool.trim(0).unwrap();
                world
            };
            // Token-major, one block is replaced or none; layer-major, each block is replaced on
            // its own.
            let whole = layout == Layout::TokenMajor;
            let calls = sweep_of(
                cut,
                |_, world| text(world.cache.append(&[(world.ids[who], 1)])),
                picture,
                whole,
            );
            assert!(calls >= cutting, "{layout:?}: {calls}");
        }
        let alone = |rig: &Rig<_>| {
            let mut world = forked(rig);
            let root = world.ids.remove(0);
            world.cache.free(root).unwrap();
            world.cache.truncate(world.ids[0], 70).unwrap();
            world.pool.trim(0).unwrap();
            world
        };
        let opened = |_: &Rig<_>, world: &mut World| text(world.cache.append(&[(world.ids[0], 1)]));
        let calls = sweep_of(alone, opened, picture, layout == Layout::TokenMajor);
        assert!(calls >= 1, "{layout:?}: {calls}");
        // Freeing a sequence never fails, whatever the driver returns.
        let calls = sweep_partly(
            forked,
            |_, world| {
                if world.ids.len() > 1 {
                    let fork = world.ids.remove(1);
                    text(world.cache.free(fork))?;
                }
                Ok(())
            },
            |_| (),
        );
        assert!(calls >= 2, "{layout:?}: {calls}");
    }
}

#[test]
fn what_neither_can_be_replaced_nor_put_back_is_lost_and_counted() {
    let rig = common::clean(common::model());
    let World {
        pool,
        mut cache,
        mut ids,
    } = world(&rig, Layout::TokenMajor);
    ids.push(cache.fork(ids[0], 300).unwrap());
    cache.truncate(ids[1], 70).unwrap();
    let (held, mappings) = (pool.stats().committed, pool.stats().mappings);
    rig.faults
        .arm(Fault::from(1, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
    let lost = append_refused(cache.append(&[(ids[1], 1)]));
    assert!(
        matches!(&lost, BlockError::Lost { offset, bytes, .. }
            if (*offset, *bytes) == (8 * G - 4 * G, 4 * G)),
        "{lost}"
    );
    rig.faults.disarm();
    let stats = pool.stats();
    assert_eq!(
        (stats.committed, stats.quarantined),
        (held, 0),
        "{stats:#?}"
    );
    assert_eq!(stats.mappings, mappings - 1);
    assert_eq!(stats.mappings, rig.machine.live().mappings as u64);
    // The other sequence is unchanged.
    cache.append(&[(ids[0], 1)]).unwrap();
    cache.free(ids[1]).unwrap();
    cache.free(ids[0]).unwrap();
    drop(cache);
    pool.close().unwrap();
}

#[test]
fn a_mapping_that_a_roll_back_cannot_undo_is_quarantined() {
    let rig = common::clean(common::model());
    let World {
        pool,
        mut cache,
        ids,
    } = world(&rig, Layout::TokenMajor);
    let before = books(&pool);
    // The second extent cannot be mapped, and the first one cannot be unmapped.
    rig.faults
        .arm(Fault::nth(2, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
    assert!(cache.fork(ids[0], 300).is_err());
    rig.faults.disarm();
    let stats = pool.stats();
    // The other sequence still has the memory: only the mapping and its addresses are unusable.
    assert_eq!(stats.quarantined, 0);
    assert_eq!(stats.mappings, before[5] + 1);
    assert_eq!((stats.committed, stats.shared), (before[0], 0));
    assert!(stats.addresses > before[6]);
    cache.free(ids[0]).unwrap();
    drop(cache);
    pool.close().unwrap();
}

/// A model like Llama 3 8B, with 128 KiB per token.
const LLAMA: Shape = Shape {
    layers: 32,
    kv_heads: 8,
    head_size: 128,
    element_bytes: 2,
    max_tokens: 8192,
    max_sequences: 16,
};

#[test]
fn eight_answers_to_a_prompt() {
    let rig = common::model();
    let (pool, tenant, stream) = common::scene(&rig, 1024);
    let builder = KvCache::builder(&tenant, &stream, LLAMA).may_fork(true);
    // Extents are small enough to be shared, whatever size was requested.
    let mut cache = builder.largest_extent(1 << 30).build().unwrap();
    let prompt = cache.create(4100).unwrap();
    assert_eq!(pool.stats().mappings, 9);
    let before = pool.calls();
    let answers: Vec<_> = (0..8).map(|_| cache.fork(prompt, 4100).unwrap()).collect();
    let calls = pool.calls().since(&before);
    assert_eq!(calls.count(Call::MemMap), 8 * 9);
    assert_eq!(calls.count(Call::MemcpyDtoDAsync), 8);
    let stats = cache.stats();
    assert_eq!(stats.held, (512 << 20) + 9 * G);
    assert_eq!(stats.shared, 512 << 20);
    for _ in 0..100 {
        let step: Vec<_> = answers.iter().map(|&id| (id, 1)).collect();
        cache.append(&step).unwrap();
    }
    cache.free(prompt).unwrap();
    let stats = cache.stats();
    assert_eq!(stats.live, (4096 << 17) + ((8 * 104) << 17));
    assert!(
        stats.held - stats.precommitted <= (512 << 20) + 8 * 8 * G,
        "{stats:?}"
    );
}

#[test]
fn a_fork_copies_less_than_an_eighth_of_a_long_prompt() {
    let rig = common::model();
    let (pool, tenant, stream) = common::scene(&rig, 1024);
    let build = |largest: Option<u64>| {
        let builder = KvCache::builder(&tenant, &stream, LLAMA).may_fork(true);
        let builder = largest.map_or(builder.clone(), |bytes| builder.largest_extent(bytes));
        builder.build().unwrap()
    };
    // Tokens of a prompt, the largest extent that was requested, and extents in granules.
    let cases = [
        (512, None, 8, 4),
        (1_024, None, 8, 8),
        (2_032, None, 18, 8),
        (2_048, None, 8, 16),
        (4_096, None, 8, 32),
        (6_144, None, 12, 32),
        (4_096, Some(4 * G), 64, 4),
    ];
    for (tokens, largest, mappings, each) in cases {
        let mut cache = build(largest);
        let prompt = cache.create(tokens).unwrap();
        assert_eq!(pool.stats().mappings, mappings, "{tokens}");
        // One granule of 16 tokens is missing at the end of the second extent.
        let fork = cache.fork(prompt, 2 * each * 16 - 16).unwrap();
        let stats = cache.stats();
        assert_eq!(stats.shared, each * G, "{tokens}");
        assert_eq!(stats.held, tokens / 16 * G + (each - 1) * G, "{tokens}");
        assert!(each * 16 <= (tokens / 8).max(64), "{tokens}");
        // A fork grows in steps of its own length, not in the prompt's extents.
        cache.append(&[(fork, 17)]).unwrap();
        let held = cache.stats().held;
        assert!(held <= tokens / 16 * G + (each + 1) * G, "{tokens}: {held}");
        drop(cache);
        pool.trim(0).unwrap();
        assert_eq!(pool.stats().mappings, 0);
    }
}
