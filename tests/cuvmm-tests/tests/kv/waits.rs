//! Requests of a cache for other tenants' memory, and its waits: for memory in use by another
//! tenant, pending work, and captures. An operation that may not wait is refused at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::attention::{SMALL, Scene};
use crate::common::{D0, G, Rig, busy, captures, pool};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::error::{KvCacheError, MemoryError};
use cuvmm::kv::{Layout, SequenceId};
use cuvmm::{Block, KvCache, Pool, Stream, Tenant};

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

fn scene(rig: &Rig<impl Backing>, wait: Option<Duration>) -> Scene {
    let build = |tenant: &Tenant, stream: &Stream, layout| {
        let builder = KvCache::builder(tenant, stream, SMALL).layout(layout);
        let builder = builder.may_fork(true);
        let builder = match wait {
            Some(wait) => builder.timeout(wait),
            None => builder,
        };
        builder.build().unwrap()
    };
    Scene::new(rig, pool(rig, 20), Layout::TokenMajor, build)
}

/// Another tenant, whose pressure hook gives up its block.
struct Giver {
    tenant: Tenant,
    has: Arc<Mutex<Option<Block>>>,
    /// The tenant that each pressure call was for, and the number of bytes.
    asked: Arc<Mutex<Vec<(String, u64)>>>,
}

impl Giver {
    fn new(pool: &Pool) -> Self {
        let has = Arc::new(Mutex::new(None::<Block>));
        let asked = Arc::new(Mutex::new(vec![]));
        let (gives, hears) = (Arc::clone(&has), Arc::clone(&asked));
        let tenant = pool.tenant("giver").on_pressure(move |pressure| {
            let asked = (pressure.wanted_by.clone(), pressure.bytes);
            hears.lock().unwrap().push(asked);
            drop(gives.lock().unwrap().take());
        });
        let tenant = tenant.register().unwrap();
        Self { tenant, has, asked }
    }

    fn takes(&self, stream: &Stream, granules: u64) {
        let block = self.tenant.block(granules * G).home_stream(stream);
        *self.has.lock().unwrap() = Some(block.try_allocate().unwrap());
    }

    fn was_asked(&self) -> Vec<(String, u64)> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

/// An operation that lacks memory, as a variant that is refused at once and one that waits, and the
/// bytes that it lacks.
struct Case {
    tries: fn(&mut KvCache, Option<SequenceId>) -> Result<(), KvCacheError>,
    waits: fn(&mut KvCache, Option<SequenceId>) -> Result<(), KvCacheError>,
    lacks: u64,
}

/// Ten granules, four more, and two for the part of a fork that is copied.
const CASES: [Case; 3] = [
    Case {
        tries: |cache, _| cache.try_create(160).map(drop),
        waits: |cache, _| cache.create(160).map(drop),
        lacks: 10,
    },
    Case {
        tries: |cache, id| cache.try_append(&[(id.unwrap(), 64)]),
        waits: |cache, id| cache.append(&[(id.unwrap(), 64)]),
        lacks: 4,
    },
    Case {
        tries: |cache, id| cache.try_fork(id.unwrap(), 155).map(drop),
        waits: |cache, id| cache.fork(id.unwrap(), 155).map(drop),
        lacks: 2,
    },
];

fn first(cache: &KvCache) -> Option<SequenceId> {
    cache.views().map(|view| view.id()).next()
}

on_both! {
    fn only_who_may_wait_asks_others_for_memory(rig) {
        let Scene { pool, stream, mut cache, .. } = scene(rig, None);
        let giver = Giver::new(&pool);
        for Case { tries, waits, lacks } in CASES {
            let held = cache.stats().held;
            // The free memory is a granule short.
            giver.takes(&stream, 20 - held / G - (lacks - 1));
            let id = first(&cache);
            let refused = tries(&mut cache, id).unwrap_err();
            assert!(refused.is_shortage(), "{refused}");
            assert_eq!(giver.was_asked(), []);
            assert_eq!(cache.stats().held, held);
            let left = 20 * G - pool.stats().committed;
            waits(&mut cache, id).unwrap();
            assert_eq!(
                giver.was_asked(), [("a".to_string(), lacks * G - left)],
                "the missing bytes"
            );
            assert_eq!(cache.stats().held, held + lacks * G);
        }
    }

    fn only_who_may_wait_waits_for_work(rig) {
        let Scene { pool, mut cache, .. } = scene(rig, Some(LONG));
        let other = pool.tenant("b").register().unwrap();
        let theirs = Stream::new(&rig.device).unwrap();
        for Case { tries, waits, lacks } in CASES {
            let id = first(&cache);
            let block = other.allocate_on(&theirs, 20 * G - cache.stats().held).unwrap();
            busy(rig, &theirs, &block, 1);
            drop(block);
            let begun = Instant::now();
            let refused = tries(&mut cache, id).unwrap_err();
            assert!(refused.is_shortage(), "{refused}");
            assert!(begun.elapsed() < LONG / 2);
            let held = cache.stats().held;
            let passed = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(30));
                    passed.store(true, Ordering::SeqCst);
                    rig.machine.release_all_streams(D0);
                });
                waits(&mut cache, id).unwrap();
                assert!(passed.load(Ordering::SeqCst), "the call waits for the work");
            });
            assert_eq!(cache.stats().held, held + lacks * G);
        }
    }

    fn a_sequence_is_not_freed_on_a_stream_that_captures(rig) {
        let Scene { pool, stream, mut cache, .. } = scene(rig, None);
        let id = cache.create(20).unwrap();
        let guard = pool.capture_guard();
        captures::begin(&rig.machine, &stream);
        let refused = cache.free(id).unwrap_err();
        assert_eq!(refused, KvCacheError::Memory(MemoryError::Capturing));
        assert_eq!((cache.len(), cache.view(id).unwrap().tokens()), (1, 20));
        captures::end(&rig.machine, &stream);
        drop(guard);
        cache.free(id).unwrap();
        assert!(cache.is_empty());
    }
}
