//! A KV cache that sleeps and wakes: attention gives the same results afterwards, also for forks
//! with shared memory.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::common;
use crate::common::attention::{LAYOUTS, SMALL, Scene, assert_attends, fill, salts};
use crate::common::books::{balanced, figures};
use crate::common::{G, Rig, pool};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{BlockError, KvCacheError, MemoryError, SleepError};
use cuvmm::kv::{Layout, SequenceId};
use cuvmm::sleep::Progress;
use cuvmm::{Contents, HostStore, KvCache, Pool, Stream, Tenant};

fn build(tenant: &Tenant, stream: &Stream, layout: Layout) -> KvCache {
    let builder = KvCache::builder(tenant, stream, SMALL).layout(layout);
    builder.tag("kv").may_fork(true).build().unwrap()
}

fn scene(rig: &Rig<impl Backing>, granules: u64, layout: Layout) -> Scene {
    Scene::new(rig, pool(rig, granules), layout, build)
}

/// Returns committed, shared and asleep bytes.
fn books(pool: &Pool) -> [u64; 3] {
    let stats = figures(pool);
    [stats.committed, stats.shared, stats.asleep]
}

/// Creates a root of 300 tokens, a fork of 290 of them with 20 of its own, and a fork of that.
fn family(cache: &mut KvCache) -> [(SequenceId, Vec<u32>); 3] {
    let root = cache.create(300).unwrap();
    fill(cache, root, 1, 0..300);
    let fork = cache.fork(root, 290).unwrap();
    cache.append(&[(fork, 20)]).unwrap();
    fill(cache, fork, 2, 290..310);
    let last = cache.fork(fork, 305).unwrap();
    [
        (root, salts(&[(1, 300)])),
        (fork, salts(&[(1, 290), (2, 20)])),
        (last, salts(&[(1, 290), (2, 15)])),
    ]
}

on_both! {
    fn attention_reads_the_same_after_a_sleep(rig) {
        for layout in LAYOUTS {
            let pool = pool(rig, 240);
            let [tenant, other] = common::tenants(&pool);
            let stream = Stream::new(&rig.device).unwrap();
            let store = HostStore::builder(&rig.device).pinned(240 * G).build().unwrap();
            let mut cache = build(&tenant, &stream, layout);
            let mut family = family(&mut cache);
            let addresses = |cache: &KvCache| -> Vec<_> {
                cache.views().map(|view| view.key(1).unwrap().address()).collect()
            };
            let before = addresses(&cache);
            assert!(books(&pool)[1] > 0, "the sequences share memory");
            let patient = tenant.blocks().tag("kv");
            let slept = patient.sleep(Contents::Keep(&store)).unwrap();
            assert_eq!(books(&pool)[..2], [0, 0]);
            assert_eq!(pool.stats().mappings, 0);
            assert!(slept.given < slept.kept, "shared memory was mapped once");
            // Another tenant overwrites all of the memory.
            let theirs = other.allocate_on(&stream, 240 * G).unwrap();
            theirs.write(0, &vec![0xFF; (40 * G) as usize]).unwrap();
            drop(theirs);
            stream.synchronize().unwrap();
            // Sleeping sequences can neither grow nor fork.
            let grown = cache.append(&[(family[0].0, 200)]);
            assert!(matches!(grown, Err(KvCacheError::Asleep { .. })), "{grown:?}");
            let forked = cache.fork(family[0].0, 10);
            assert!(matches!(
                forked,
                Err(KvCacheError::Block { cause: BlockError::Memory(MemoryError::Asleep { .. }), .. })
            ));
            let woken = patient.wake().unwrap();
            assert_eq!(woken.restored, slept.kept);
            assert_eq!(addresses(&cache), before);
            let [committed, shared, asleep] = books(&pool);
            assert_eq!((shared, asleep), (0, 0), "no memory is shared now");
            assert!(committed >= slept.kept);
            for (id, salts) in &family {
                assert_attends(rig, &cache, *id, salts);
            }
            // They continue as before: truncated in the shared part, and grown.
            let (fork, salts) = &mut family[1];
            cache.truncate(*fork, 100).unwrap();
            cache.append(&[(*fork, 50)]).unwrap();
            fill(&mut cache, *fork, 9, 100..150);
            salts.truncate(100);
            salts.extend([9; 50]);
            let again = cache.fork(*fork, 150).unwrap();
            assert_attends(rig, &cache, again, salts);
            for (id, salts) in &family {
                assert_attends(rig, &cache, *id, salts);
            }
            drop(cache);
            tenant.blocks().sleep(Contents::Discard).unwrap();
            drop(other);
            assert_eq!(books(&pool), [0; 3]);
        }
    }

    fn forks_that_were_not_to_sleep_after_all_share_as_before(rig) {
        let store = HostStore::builder(&rig.device).pinned(240 * G).build().unwrap();
        let Scene { pool, tenant, mut cache, .. } = scene(rig, 240, Layout::TokenMajor);
        let family = family(&mut cache);
        let before = (books(&pool), rig.machine.snapshot());
        let calls = AtomicU64::new(0);
        for stop in 1..6 {
            let watch = |_: &Progress| {
                calls.fetch_add(1, Ordering::Relaxed) + 1 < stop
            };
            let watched = tenant.blocks().on_progress(&watch);
            for contents in [Contents::Discard, Contents::Keep(&store)] {
                calls.store(0, Ordering::Relaxed);
                match watched.sleep(contents) {
                    Err(SleepError::Cancelled) => {}
                    other => {
                        assert!(stop > 3, "{other:?}");
                        other.unwrap();
                        return;
                    }
                }
                assert_eq!((books(&pool), rig.machine.snapshot()), before);
                for (id, salts) in &family {
                    assert_attends(rig, &cache, *id, salts);
                }
            }
        }
    }
}

/// Creates a tenant with a family of forks, and the store for their contents.
fn world(rig: &Rig<cuvmm::driver::model::Nothing>) -> (KvCache, HostStore, Pool, Tenant) {
    let Scene {
        pool,
        tenant,
        stream,
        mut cache,
    } = scene(rig, 240, Layout::TokenMajor);
    let store = HostStore::builder(&rig.device)
        .pinned(32 * G)
        .build()
        .unwrap();
    let root = cache.create(120).unwrap();
    let fork = cache.fork(root, 100).unwrap();
    cache.fork(fork, 70).unwrap();
    stream.synchronize().unwrap();
    (cache, store, pool, tenant)
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn every_driver_call_of_forks_falling_asleep_failed_once() {
    for keep in [false, true] {
        let calls = common::sweep::sweep(
            world,
            |_, (_, store, _, tenant)| {
                let contents = match keep {
                    true => Contents::Keep(store),
                    false => Contents::Discard,
                };
                let slept = common::sweep::text(tenant.blocks().sleep(contents))?;
                assert_eq!(slept.blocks, 3);
                Ok(())
            },
            |(cache, store, pool, _)| (books(pool), store.free(), cache.tokens()),
        );
        assert!(calls >= 9, "{calls}");
    }
}

// I-51
/// The roll-back fails too: at each mapping in turn, in both attempts.
#[test]
fn a_family_of_which_some_stay_asleep_wakes_whole() {
    let mut stayed = 0;
    for nth in 1..9 {
        let rig = common::clean(common::model());
        let (_cache, store, pool, tenant) = world(&rig);
        rig.faults.forget();
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(Fault::nth(6, code).of(Call::MemUnmap));
        for nth in [nth, nth + 1] {
            rig.faults.arm(Fault::nth(nth, code).of(Call::MemMap));
        }
        let outcome = tenant.blocks().sleep(Contents::Keep(&store));
        rig.faults.disarm();
        match outcome {
            Err(SleepError::Stayed { blocks, .. }) => {
                stayed += 1;
                assert_eq!(blocks, 1);
            }
            Err(SleepError::Memory(MemoryError::Call(_))) => {}
            other => panic!("{other:?}"),
        }
        balanced(&rig, &pool);
        match tenant.blocks().wake() {
            Ok(_) => {}
            Err(SleepError::Block { .. }) => panic!("{nth}: there is enough memory"),
            Err(error) => panic!("{nth}: {error}"),
        }
        assert_eq!(books(&pool)[2], 0);
    }
    assert!(stayed > 2, "{stayed}");
}

/// Creates a sequence whose first ranges are awake, while a later one stayed asleep after a failed
/// sleep.
fn half_asleep(rig: &Rig<impl Backing>) -> (Scene, HostStore, SequenceId) {
    let mut scene = scene(rig, 64, Layout::LayerMajor);
    let store = HostStore::builder(&rig.device)
        .pinned(64 * G)
        .build()
        .unwrap();
    let id = scene.cache.create(300).unwrap();
    fill(&mut scene.cache, id, 1, 0..300);
    scene.stream.synchronize().unwrap();
    rig.faults.forget();
    // Two extents per range: three ranges are taken out, and the second of them cannot be put back,
    // in both attempts.
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    rig.faults.arm(Fault::nth(7, code).of(Call::MemUnmap));
    for nth in [3, 4] {
        rig.faults.arm(Fault::nth(nth, code).of(Call::MemMap));
    }
    let outcome = scene.tenant.blocks().sleep(Contents::Keep(&store));
    rig.faults.disarm();
    assert!(
        matches!(outcome, Err(SleepError::Stayed { blocks: 1, .. })),
        "{outcome:?}"
    );
    (scene, store, id)
}

on_both! {
    fn a_sequence_that_is_half_asleep_is_changed_as_a_whole_or_not_at_all(rig) {
        let (scene, store, id) = half_asleep(rig);
        let Scene { pool, tenant, mut cache, stream } = scene;
        let before = (books(&pool), cache.stats(), rig.machine.snapshot());
        let cut = cache.truncate(id, 100);
        assert!(matches!(
            cut,
            Err(KvCacheError::Block { sequence, cause: BlockError::Memory(MemoryError::Asleep { .. }) })
                if sequence == id.number()
        ), "{cut:?}");
        let grown = cache.append(&[(id, 90)]);
        assert!(matches!(grown, Err(KvCacheError::Asleep { .. })), "{grown:?}");
        let forked = cache.fork(id, 200);
        assert!(matches!(
            forked,
            Err(KvCacheError::Block { cause: BlockError::Memory(MemoryError::Asleep { .. }), .. })
        ), "{forked:?}");
        let after = (books(&pool), cache.stats(), rig.machine.snapshot());
        assert_eq!(after, before);
        tenant.blocks().wake().unwrap();
        // All memory that the view covers is mapped and can be written.
        assert_attends(rig, &cache, id, &[1; 300]);
        fill(&mut cache, id, 2, 299..300);
        cache.truncate(id, 100).unwrap();
        cache.append(&[(id, 90)]).unwrap();
        fill(&mut cache, id, 3, 100..190);
        assert_attends(rig, &cache, id, &salts(&[(1, 100), (3, 90)]));
        drop((cache, tenant, stream, store));
        assert_eq!(books(&pool), [0; 3]);
    }

    fn a_sequence_that_is_half_asleep_can_be_freed(rig) {
        let (scene, store, id) = half_asleep(rig);
        let Scene { pool, tenant, mut cache, stream } = scene;
        cache.free(id).unwrap();
        assert_eq!((cache.len(), cache.tokens(), books(&pool)[2]), (0, 0, 0));
        let next = cache.create(300).unwrap();
        fill(&mut cache, next, 4, 0..300);
        assert_attends(rig, &cache, next, &[4; 300]);
        drop((cache, tenant, stream, store));
        balanced(rig, &pool);
    }
}
