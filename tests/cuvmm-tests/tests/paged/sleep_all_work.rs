//! Caches that fall asleep only when all work of the device is complete, on streams that no call has
//! named too.

use std::sync::Mutex;
use std::time::Duration;

use crate::common::busy::while_the_device_works;
use crate::common::world;
use crate::common::{self, D0, G, Rig};
use crate::on_both;
use crate::scene::{builder, stamp, stamps};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::SleepError;
use cuvmm::paged::Layout;
use cuvmm::sleep::Progress;
use cuvmm::{Contents, HostStore, PagedKv, Pool, Stream};

/// Makes a pool, the home stream of a cache that sleeps after all work, and the cache.
fn cache(rig: &Rig<impl Backing>, backed: &[u32]) -> (Pool, Stream, PagedKv) {
    let (pool, a, home) = common::scene(rig, 64);
    let kv = builder(&a, &home, 16, Layout::BlockMajor).sleep_after_all_work(true);
    let kv = kv.build().unwrap();
    kv.back(backed).unwrap();
    (pool, home, kv)
}

on_both! {
    // I-111
    fn work_of_streams_that_no_call_has_named_keeps_the_memory(rig) {
        let (pool, _home, kv) = cache(rig, &[0, 1]);
        let foreign = Stream::new(&rig.device).unwrap();
        rig.machine.hold(D0, foreign.as_raw());
        stamp(rig, &foreign, &kv, 0, 9);
        let before = (kv.stats().unwrap(), world::books(&pool));
        let slept = kv.alone().sleep(Contents::Discard);
        assert!(matches!(slept, Err(SleepError::CacheBusy { .. })), "{slept:?}");
        assert_eq!((kv.stats().unwrap(), world::books(&pool)), before);
        assert!(!kv.is_asleep());
        rig.machine.release_stream(D0, foreign.as_raw());
        foreign.synchronize().unwrap();
        // Work of such a stream that is queued after the copy.
        let store = HostStore::builder(&rig.device).pinned(16 * G).build().unwrap();
        let launched = Mutex::new(false);
        let launch = |_: &Progress| {
            if !std::mem::replace(&mut *launched.lock().unwrap(), true) {
                rig.machine.hold(D0, foreign.as_raw());
                stamp(rig, &foreign, &kv, 0, 8);
            }
            true
        };
        let slept = kv.alone().on_progress(&launch).sleep(Contents::Keep(&store));
        assert!(matches!(slept, Err(SleepError::CacheBusy { .. })), "{slept:?}");
        assert!(!kv.is_asleep());
        std::thread::scope(|scope| {
            let sleeping = scope.spawn(|| {
                let all = kv.alone().timeout(Duration::from_secs(600));
                all.sleep(Contents::Keep(&store)).unwrap()
            });
            rig.machine.release_stream(D0, foreign.as_raw());
            assert_eq!(sleeping.join().unwrap().caches, 1);
        });
        kv.alone().wake().unwrap();
        let seen = stamps(rig, &kv, 0);
        assert!(!rig.keeps_bytes() || seen == [8; 16], "{seen:?}");
    }

    // I-111
    fn copies_of_other_memory_are_complete_before_the_memory_goes(rig) {
        let (_pool, home, first) = cache(rig, &[0, 5, 10]);
        let a = first.tenant();
        let second = builder(a, &home, 16, Layout::BlockMajor).sleep_after_all_work(true);
        let second = second.build().unwrap();
        second.back(&[0, 5, 10]).unwrap();
        let store = HostStore::builder(&rig.device).pinned(32 * G).build().unwrap();
        let mapped = || rig.machine.live().mappings;
        let (before, seen) = (mapped(), Mutex::new(Vec::new()));
        let watch = |progress: &Progress| {
            seen.lock().unwrap().push((progress.done, mapped()));
            true
        };
        let both = a.blocks().paged(&first).paged(&second).on_progress(&watch);
        assert_eq!(both.sleep(Contents::Keep(&store)).unwrap().caches, 2);
        let seen = seen.into_inner().unwrap();
        assert!(seen.len() > 2, "{seen:?}");
        assert!(seen.iter().all(|&(_, mappings)| mappings == before), "{seen:?}");
        assert!(mapped() < before);
        a.blocks().paged(&first).paged(&second).wake().unwrap();
        assert_eq!(mapped(), before);
    }

    // I-111
    fn a_cache_sleeps_also_where_only_a_wait_tells_that_the_device_is_idle(rig) {
        let (_pool, _home, kv) = cache(rig, &[0]);
        let lacking = Fault::all(CUresult::CUDA_ERROR_NOT_SUPPORTED).of(Call::CtxRecordEvent);
        rig.faults.arm(lacking);
        let slept = kv.alone().sleep(Contents::Discard);
        assert!(matches!(slept, Err(SleepError::CacheBusy { .. })), "{slept:?}");
        let alone = || kv.alone().timeout(Duration::from_secs(60));
        assert_eq!(alone().sleep(Contents::Discard).unwrap().caches, 1);
        kv.alone().wake().unwrap();
        rig.faults.disarm();
    }

    // I-111
    fn a_device_that_always_works_does_not_keep_a_cache_awake(rig) {
        let (_pool, _home, kv) = cache(rig, &[0]);
        let alone = || kv.alone().timeout(Duration::from_secs(600));
        let slept = while_the_device_works(rig, || alone().sleep(Contents::Discard));
        assert_eq!(slept.unwrap().caches, 1);
        assert!(kv.is_asleep());
        kv.alone().wake().unwrap();
    }

    // I-126
    fn work_on_its_home_stream_keeps_a_cache_also_if_it_was_queued_later(rig) {
        let (_pool, home, kv) = cache(rig, &[0]);
        let foreign = Stream::new(&rig.device).unwrap();
        let work = |stream: &Stream| {
            rig.machine.hold(D0, stream.as_raw());
            stamp(rig, stream, &kv, 0, 7);
        };
        work(&foreign);
        let mapped = rig.machine.live().mappings;
        std::thread::scope(|scope| {
            let sleeping = scope.spawn(|| {
                let alone = kv.alone().timeout(Duration::from_secs(600));
                alone.sleep(Contents::Discard).unwrap()
            });
            // The sleep waits for the work of the stream that no call has named.
            let calls = rig.device.calls().total();
            while rig.device.calls().total() < calls + 8 {
                std::thread::yield_now();
            }
            work(&home);
            rig.machine.release_stream(D0, foreign.as_raw());
            let calls = rig.device.calls().total();
            while rig.device.calls().total() < calls + 8 && !sleeping.is_finished() {
                std::thread::yield_now();
            }
            let now = rig.machine.live().mappings;
            rig.machine.release_stream(D0, home.as_raw());
            assert_eq!(sleeping.join().unwrap().caches, 1);
            assert_eq!(now, mapped);
        });
        kv.alone().wake().unwrap();
    }
}
