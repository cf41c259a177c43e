//! Caches that sleep: their memory is available to other tenants, every address stays, and kept
//! contents return.

use std::collections::BTreeSet;
use std::sync::Mutex;

use crate::common::books::books;
use crate::common::captures::{capture, launch_and_destroy};
use crate::common::world;
use crate::common::{self, D0, G, Rig, pool};
use crate::on_both;
use crate::scene::{LAYOUTS, builder, extents_under, rows, stamp, stamps};
use cuvmm::driver::model::Backing;
use cuvmm::error::{ArgumentError, BlockError, MemoryError, PagedKvError, SleepError};
use cuvmm::paged::{Evictions, Layout};
use cuvmm::sleep::Progress;
use cuvmm::{Contents, Device, Exchange, HostStore, PagedKv, Pool, Stream, Tenant};

pub(crate) fn store(device: &Device, granules: u64) -> HostStore {
    let builder = HostStore::builder(device).pinned(granules * G);
    builder.build().unwrap()
}

fn scene(rig: &Rig<impl Backing>) -> (Pool, Tenant, Tenant, Stream) {
    let pool = pool(rig, 64);
    let [a, b] = common::tenants(&pool);
    (pool, a, b, Stream::new(&rig.device).unwrap())
}

/// Lets a tenant use all memory of a pool that is free, and free it.
fn soil(rig: &Rig<impl Backing>, tenant: &Tenant, stream: &Stream) {
    let size = tenant.headroom().unwrap().taking_back;
    let block = tenant.block(size).home_stream(stream).allocate().unwrap();
    rig.kernel(stream, &[], &[(block.address(), size, 99)]);
    stream.synchronize().unwrap();
}

/// Checks the stamps of a block.
fn shows(rig: &Rig<impl Backing>, kv: &PagedKv, number: u32, byte: u8) {
    let seen = stamps(rig, kv, number);
    assert!(
        !rig.keeps_bytes() || seen == [byte; 16],
        "block {number}: {seen:?}"
    );
}

/// Checks that nothing is mapped at the rows of a block.
fn is_gone(rig: &Rig<impl Backing>, kv: &PagedKv, number: u32) {
    for row in rows(kv, number) {
        assert_eq!(common::copy(rig, row.0), None);
    }
}

pub(crate) fn is_asleep(error: &PagedKvError) -> bool {
    let cause = match error {
        PagedKvError::Memory(cause) => cause,
        PagedKvError::Back {
            cause: BlockError::Memory(cause),
            ..
        } => cause,
        _ => return false,
    };
    matches!(cause, MemoryError::CacheAsleep(_))
}

pub(crate) fn is_busy<T>(outcome: &Result<T, SleepError>) -> bool {
    matches!(outcome, Err(SleepError::CacheBusy { .. }))
}

on_both! {
    fn blocks_come_back_with_their_bytes_at_their_addresses(rig) {
        for layout in LAYOUTS {
            let (pool, a, b, home) = scene(rig);
            let kv = builder(&a, &home, 32, layout).pinned([31]).build().unwrap();
            kv.back(&[0, 1, 2, 9, 20]).unwrap();
            kv.reserve(3).unwrap();
            for (byte, number) in (1..).zip([0, 1, 2, 9, 31]) {
                stamp(rig, &home, &kv, number, byte);
            }
            let writes: Vec<_> = rows(&kv, 1).into_iter().map(|row| (row, 4, 77)).collect();
            let graph = capture(rig, &home, || {
                rig.kernel(&home, &[], &writes.clone());
            });
            // What no block uses is given up, and not copied.
            kv.release(&[20]).unwrap();
            home.synchronize().unwrap();
            let (before, view) = (kv.stats().unwrap(), kv.view(0, 1, 1));
            assert!(before.withdrawn > 0);
            let store = store(&rig.device, 64);
            let slept = kv.alone().sleep(Contents::Keep(&store)).unwrap();
            assert_eq!((slept.caches, slept.heaps, slept.blocks), (1, 0, 0));
            assert_eq!((slept.given, slept.kept), (before.held, before.committed), "{layout:?}");
            assert_eq!((slept.awake, slept.quarantined, kv.is_asleep()), (0, 0, true));
            let asleep = kv.stats().unwrap();
            assert_eq!((asleep.held, asleep.committed, asleep.mappings), (0, 0, 0));
            assert_eq!(asleep.asleep, before.committed);
            assert_eq!((asleep.in_use, asleep.reserved, asleep.pinned), (4, 3, 1));
            let stats = books(rig, &pool);
            assert_eq!((stats.committed, stats.mappings, stats.free), (0, 0, before.held));
            assert_eq!([a.stats().asleep, pool.stats().asleep], [before.committed; 2]);
            for number in [0, 1, 2, 9, 31] {
                is_gone(rig, &kv, number);
            }
            // Sleeping twice has no further effect.
            assert_eq!(kv.alone().sleep(Contents::Discard).unwrap(), Default::default());
            soil(rig, &b, &home);
            let woken = kv.alone().wake().unwrap();
            assert_eq!((woken.caches, woken.heaps, woken.blocks), (1, 0, 0));
            assert_eq!((woken.mapped, woken.restored), (before.committed, before.committed));
            let mut after = kv.stats().unwrap();
            assert_eq!((after.held, after.withdrawn), (before.committed, 0));
            (after.held, after.withdrawn, after.mappings) = (before.held, before.withdrawn, before.mappings);
            assert_eq!((after, kv.view(0, 1, 1)), (before, view));
            assert_eq!(books(rig, &pool).tenants[0].in_use, before.committed);
            for (byte, number) in (1..).zip([0, 1, 2, 9, 31]) {
                shows(rig, &kv, number, byte);
            }
            launch_and_destroy(rig, &home, graph);
            assert!(rig.device.lost().is_none());
            for row in rows(&kv, 1) {
                let seen = common::copy(rig, row.0).unwrap();
                assert!(!rig.keeps_bytes() || seen == [77; 4]);
            }
            assert_eq!((kv.alone().wake().unwrap().caches, store.free()), (0, 64 * G));
            // Blocks that were not in use show nothing of the other tenant.
            kv.back(&[3, 20]).unwrap();
            shows(rig, &kv, 20, 0);
            kv.release(&[0, 1, 2, 9, 3, 20]).unwrap();
            kv.reserve(0).unwrap();
            let used = extents_under(&kv, &BTreeSet::from([31]));
            assert_eq!(kv.stats().unwrap().committed, used);
            drop((kv, a, b));
            pool.close().unwrap();
        }
    }

    fn discarded_blocks_have_zeros(rig) {
        for layout in LAYOUTS {
            let (pool, a, b, home) = scene(rig);
            let kv = builder(&a, &home, 16, layout).build().unwrap();
            let store = store(&rig.device, 32);
            // Nothing of a cache is marked.
            for contents in [Contents::Discard, Contents::KeepMarked(&store)] {
                for soils in [false, true] {
                    kv.back(&[0, 1, 5]).unwrap();
                    for number in [0, 1, 5] {
                        stamp(rig, &home, &kv, number, 5);
                    }
                    home.synchronize().unwrap();
                    let held = kv.stats().unwrap().committed;
                    let slept = kv.alone().release(soils).sleep(contents).unwrap();
                    assert_eq!((slept.given, slept.kept), (held, 0));
                    if soils {
                        assert_eq!((pool.stats().committed, pool.stats().free), (0, 0));
                        soil(rig, &b, &home);
                    }
                    let woken = kv.alone().wake().unwrap();
                    assert_eq!((woken.mapped, woken.restored), (held, 0));
                    for number in [0, 1, 5] {
                        shows(rig, &kv, number, 0);
                    }
                }
            }
        }
    }

    fn a_sleeping_cache_refuses_what_uses_its_blocks(rig) {
        let (_pool, a, _b, home) = scene(rig);
        let kv = builder(&a, &home, 16, Layout::BlockMajor).build().unwrap();
        kv.back(&[0, 1]).unwrap();
        home.synchronize().unwrap();
        let store = store(&rig.device, 8);
        let refused = |is_moving: bool| {
            let before = kv.stats().unwrap();
            for error in [
                kv.back(&[2]).unwrap_err(),
                kv.back(&[0]).unwrap_err(),
                kv.try_back(&[2]).unwrap_err(),
                kv.release(&[0]).unwrap_err(),
                kv.reserve(2).unwrap_err(),
                kv.write(0, (0, 0, 0), &[]).unwrap_err(),
                kv.read(0, (0, 0, 0), &mut []).unwrap_err(),
            ] {
                assert!(is_asleep(&error), "{error}");
            }
            assert!(!kv.can_allocate(1).unwrap() && kv.is_backed(0).unwrap());
            assert_eq!(kv.emptiest(G, &[0, 1]).unwrap(), Evictions::default());
            // A step releases nothing.
            drop(kv.step());
            kv.record_use(&Stream::new(&rig.device).unwrap()).unwrap();
            assert_eq!(kv.purge().unwrap().given_back, 0);
            assert_eq!((kv.stats().unwrap(), kv.is_asleep()), (before, true));
            assert_eq!(is_busy(&kv.alone().wake()), is_moving);
        };
        let prepared = kv.alone().prepare_sleep(Contents::Keep(&store)).unwrap();
        refused(true);
        assert!(is_busy(&kv.alone().sleep(Contents::Discard)));
        prepared.finish();
        let prepared = kv.alone().prepare_wake().unwrap();
        refused(true);
        prepared.finish();
        kv.alone().sleep(Contents::Keep(&store)).unwrap();
        refused(false);
        assert!(!kv.is_asleep(), "the refused wake was one");
        kv.back(&[2]).unwrap();
        kv.release(&[0, 1, 2]).unwrap();
    }

    // I-107
    fn no_memory_is_unmapped_under_work_or_a_step(rig) {
        let (pool, a, _b, home) = scene(rig);
        let kv = builder(&a, &home, 16, Layout::BlockMajor).build().unwrap();
        kv.back(&[0, 1]).unwrap();
        let [user, foreign] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        kv.record_use(&user).unwrap();
        for (stream, uses) in [(&home, true), (&user, true), (&foreign, false)] {
            rig.machine.hold(D0, stream.as_raw());
            match uses {
                true => stamp(rig, stream, &kv, 0, 9),
                false => drop(rig.machine.queue_kernel(D0, stream.as_raw(), vec![], vec![])),
            }
            let before = (kv.stats().unwrap(), world::books(&pool));
            let slept = kv.alone().sleep(Contents::Discard);
            assert_eq!(is_busy(&slept), uses, "{slept:?}");
            if uses {
                assert_eq!((kv.stats().unwrap(), world::books(&pool)), before);
                assert!(!kv.is_asleep());
            } else {
                kv.alone().wake().unwrap();
            }
            rig.machine.release_stream(D0, stream.as_raw());
            stream.synchronize().unwrap();
        }
        let step = kv.step();
        kv.release(&[1]).unwrap();
        assert!(is_busy(&kv.alone().sleep(Contents::Discard)));
        drop(step);
        // The step of another launch begins while the cache falls asleep.
        let (store, begun) = (store(&rig.device, 8), Mutex::new(None));
        let begin = |_: &Progress| {
            begun.lock().unwrap().get_or_insert_with(|| kv.step());
            true
        };
        stamp(rig, &home, &kv, 0, 8);
        home.synchronize().unwrap();
        let slept = kv.alone().on_progress(&begin).sleep(Contents::Keep(&store));
        assert!(is_busy(&slept), "{slept:?}");
        shows(rig, &kv, 0, 8);
        drop(begun.into_inner().unwrap());
        // One that has ended again may have written what had been copied.
        let write = |_: &Progress| {
            let step = kv.step();
            stamp(rig, &home, &kv, 0, 7);
            drop(step);
            home.synchronize().unwrap();
            true
        };
        let slept = kv.alone().on_progress(&write).sleep(Contents::Keep(&store));
        assert!(is_busy(&slept), "{slept:?}");
        shows(rig, &kv, 0, 7);
        kv.alone().sleep(Contents::Keep(&store)).unwrap();
        kv.alone().wake().unwrap();
        shows(rig, &kv, 0, 7);
    }

    fn a_cache_sleeps_and_wakes_with_blocks_or_not_at_all(rig) {
        let (_pool, a, b, home) = scene(rig);
        let kv = builder(&a, &home, 16, Layout::BlockMajor).build().unwrap();
        kv.back(&[0, 1]).unwrap();
        stamp(rig, &home, &kv, 1, 3);
        let block = a.block(2 * G).tag("weights").home_stream(&home).allocate().unwrap();
        home.synchronize().unwrap();
        let held = kv.stats().unwrap().committed;
        let all = || a.blocks().tag("weights").paged(&kv);
        // Too little host memory for both.
        let few = store(&rig.device, 2);
        let full = all().sleep(Contents::Keep(&few)).unwrap_err();
        assert!(matches!(full, SleepError::StoreFull { .. }), "{full}");
        assert!(!kv.is_asleep() && !block.is_asleep());
        // Without the cache, it stays awake and is named.
        let slept = a.blocks().tag("weights").sleep(Contents::Discard).unwrap();
        assert_eq!((slept.blocks, slept.caches, slept.awake), (1, 0, held));
        a.blocks().wake().unwrap();
        let foreign = b.blocks().paged(&kv).sleep(Contents::Discard).unwrap_err();
        assert!(matches!(foreign, SleepError::Argument(ArgumentError::WrongTenant(_))), "{foreign}");
        let store = store(&rig.device, 16);
        let slept = all().paged(&kv).sleep(Contents::Keep(&store)).unwrap();
        assert_eq!((slept.blocks, slept.caches, slept.kept), (1, 1, held + 2 * G));
        // Enough for the cache or for the block.
        let rest = 64 * G - held.max(2 * G);
        let theirs = b.block(rest).home_stream(&home).allocate().unwrap();
        let short = all().wake().unwrap_err();
        assert!(matches!(&short, SleepError::Block { cause, .. } if cause.is_out_of_memory()), "{short}");
        assert!(kv.is_asleep() && block.is_asleep());
        drop(theirs);
        let woken = all().wake().unwrap();
        assert_eq!((woken.blocks, woken.caches, woken.mapped), (1, 1, held + 2 * G));
        shows(rig, &kv, 1, 3);
        // With a cache, blocks go in turn.
        let other = b.block(2 * G).home_stream(&home).allocate().unwrap();
        b.blocks().sleep(Contents::Keep(&store)).unwrap();
        let exchange = || Exchange::new().sleep(all(), Contents::Keep(&store));
        let both = exchange().wake(a.blocks().tag("other").paged(&kv)).run();
        assert!(matches!(both, Err(SleepError::Argument(ArgumentError::SleepsAndWakes))));
        let done = exchange().wake(b.blocks()).run().unwrap();
        assert_eq!((done.passed, done.slept.caches, done.woken.blocks), (0, 1, 1));
        all().wake().unwrap();
        drop(other);
        // What was put to sleep for nothing is awake again.
        let large = b.block(8 * G).home_stream(&home).allocate().unwrap();
        b.blocks().sleep(Contents::Keep(&store)).unwrap();
        let full = b.block(64 * G - held - 2 * G).tag("full").home_stream(&home);
        let full = full.allocate().unwrap();
        let failed = Exchange::new().sleep(kv.alone(), Contents::Keep(&store));
        let failed = failed.wake(b.blocks()).run().unwrap_err();
        assert!(matches!(failed, SleepError::Block { .. }), "{failed}");
        assert!(!kv.is_asleep() && large.is_asleep());
        shows(rig, &kv, 1, 3);
        drop((full, large));
    }
}

#[test]
fn caches_of_a_selection_are_told_apart() {
    let rig = common::model();
    let (pool, a, b, home) = scene(&rig);
    let make = || {
        let kv = builder(&a, &home, 16, Layout::BlockMajor).build().unwrap();
        kv.back(&[0]).unwrap();
        kv
    };
    let (one, other) = (make(), make());
    let slept = one.alone().sleep(Contents::Discard).unwrap();
    assert_eq!((slept.caches, other.is_asleep()), (1, false));
    let slept = a
        .blocks()
        .paged(&one)
        .paged(&other)
        .sleep(Contents::Discard);
    assert_eq!(slept.unwrap().caches, 1);
    assert_eq!(one.alone().paged(&other).wake().unwrap().caches, 2);
    drop((one, other, a, b));
    pool.close().unwrap();
}
