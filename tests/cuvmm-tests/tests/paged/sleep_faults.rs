//! Fails every driver call of a cache's sleep and wake once, and panics in each. A failure changes
//! nothing, and the operation then succeeds. Also caches that stay asleep because the roll-back fails
//! twice.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::common::panics::{panics_at, woken_unless_lost};
use crate::common::sweep::{sweep_of, text};
use crate::common::world::{Books, books};
use crate::common::{self, G, Rig, limited};
use crate::scene::{LAYOUTS, builder, stamp, stamps};
use crate::sleep::store;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Backing, Nothing};
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{MemoryError, PagedKvError, SleepError};
use cuvmm::paged::{Layout, PagedStats};
use cuvmm::{Contents, HostStore, PagedKv, Pool, Stream, Tenant};

/// A cache with blocks in use and in no use, and a store for it.
struct World {
    // Fields in drop order.
    kv: PagedKv,
    home: Stream,
    b: Tenant,
    store: HostStore,
    pool: Pool,
}

fn world(rig: &Rig<impl Backing>, layout: Layout) -> World {
    let pool = limited(rig, 32).build().unwrap();
    let [a, b] = common::tenants(&pool);
    let home = Stream::new(&rig.device).unwrap();
    let kv = builder(&a, &home, 12, layout).pinned([11]);
    let kv = kv.build().unwrap();
    kv.back(&[0, 1, 2, 6]).unwrap();
    for (byte, number) in (1..).zip([0, 1, 2, 11]) {
        stamp(rig, &home, &kv, number, byte);
    }
    home.synchronize().unwrap();
    kv.release(&[6]).unwrap();
    let store = store(&rig.device, kv.stats().unwrap().committed / G);
    World {
        kv,
        home,
        b,
        store,
        pool,
    }
}

/// The figures of the pool and of the cache, and the free bytes of the store.
type Picture = (Books, PagedStats, u64);

impl World {
    fn contents(&self, keeps: bool) -> Contents<'_> {
        match keeps {
            true => Contents::Keep(&self.store),
            false => Contents::Discard,
        }
    }

    fn picture(&self) -> Picture {
        let stats = self.kv.stats().unwrap();
        (books(&self.pool), stats, self.store.free())
    }

    /// Lets the other tenant use all memory that is free, and give it up.
    fn soil(&self, rig: &Rig<impl Backing>) {
        let size = self.b.headroom().unwrap().taking_back;
        if size == 0 {
            return;
        }
        let block = self.b.block(size).home_stream(&self.home);
        let block = block.allocate().unwrap();
        rig.kernel(&self.home, &[], &[(block.address(), size, 99)]);
        self.home.synchronize().unwrap();
        drop(block);
        // Its cached memory goes to the free list.
        self.b.blocks().sleep(Contents::Discard).unwrap();
    }

    /// Checks the bytes of blocks that were kept or discarded.
    fn shows(&self, rig: &Rig<impl Backing>, kept: bool) {
        for (byte, number) in (1..).zip([0, 1, 2, 11]) {
            let seen = stamps(rig, &self.kv, number);
            let known = if kept { byte } else { 0 };
            assert!(
                !rig.keeps_bytes() || seen == [known; 16],
                "block {number}: {seen:?}"
            );
        }
    }
}

#[test]
fn falling_asleep() {
    for (layout, keeps) in LAYOUTS.into_iter().zip([true, false, true]) {
        for release in [false, true] {
            let sleep = |_: &Rig<Nothing>, world: &mut World| {
                let all = world.kv.alone().release(release);
                let slept = text(all.sleep(world.contents(keeps)))?;
                assert_eq!(slept.caches, 1);
                assert_eq!(world.kv.stats().unwrap().committed, 0);
                Ok(())
            };
            // The driver may refuse to take back memory that the cache has given up.
            let calls = sweep_of(|rig| world(rig, layout), sleep, World::picture, !release);
            assert!(calls >= 4, "{layout:?}: {calls}");
        }
    }
}

#[test]
fn waking() {
    for layout in LAYOUTS {
        for keeps in [false, true] {
            for (soils, release) in [(false, false), (true, false), (false, true)] {
                let asleep = |rig: &Rig<Nothing>| {
                    let world = world(rig, layout);
                    let all = world.kv.alone().release(release);
                    all.sleep(world.contents(keeps)).unwrap();
                    if soils {
                        world.soil(rig);
                    }
                    world
                };
                let wake = |_: &Rig<Nothing>, world: &mut World| {
                    let woken = text(world.kv.alone().wake())?;
                    assert_eq!(
                        (woken.caches, world.store.free()),
                        (1, world.store.capacity())
                    );
                    Ok(())
                };
                // Memory of the other tenant may have been taken, and what was created stays in the
                // pool.
                let strict = !soils && !release;
                let calls = sweep_of(asleep, wake, World::picture, strict);
                assert!(calls >= 6, "{layout:?}: {calls}");
            }
        }
    }
}

#[test]
fn a_cache_that_cannot_stay_awake_sleeps_whole_with_its_contents() {
    for layout in LAYOUTS {
        for keeps in [false, true] {
            let rig = common::clean(common::host());
            let world = world(&rig, layout);
            let before = world.kv.stats().unwrap();
            let count = rig.machine.live().mappings as u64;
            let withdrawn = before.mappings - extents(&world);
            rig.faults.forget();
            let code = CUresult::CUDA_ERROR_UNKNOWN;
            // The last extent is not unmapped, and then another not mapped again, twice.
            let last = count - withdrawn;
            rig.faults.arm(Fault::nth(last, code).of(Call::MemUnmap));
            for nth in [1, 2] {
                rig.faults.arm(Fault::nth(nth, code).of(Call::MemMap));
            }
            let outcome = world.kv.alone().sleep(world.contents(keeps));
            rig.faults.disarm();
            let Err(SleepError::Stayed {
                blocks,
                bytes,
                cause,
            }) = outcome
            else {
                panic!("{outcome:?}");
            };
            let is_known = matches!(*cause, SleepError::Memory(MemoryError::Call(_)));
            assert!(is_known, "{cause:?}");
            assert_eq!((blocks, bytes), (1, before.committed));
            assert!(world.kv.is_asleep());
            let stats = world.pool.stats();
            assert_eq!((stats.committed, stats.quarantined), (0, 0));
            world.soil(&rig);
            let woken = world.kv.alone().wake().unwrap();
            assert_eq!(woken.mapped, before.committed);
            world.shows(&rig, keeps);
            assert_eq!(world.store.free(), world.store.capacity());
        }
    }
}

/// The number of extents under blocks in use.
fn extents(world: &World) -> u64 {
    let stats = world.kv.stats().unwrap();
    stats.mappings - stats.withdrawn / (2 * G)
}

// I-108
#[test]
fn a_panic_of_the_driver_lets_no_tenant_see_what_another_wrote() {
    for layout in LAYOUTS {
        for (wakes, keeps) in [(false, true), (true, true), (true, false)] {
            for nth in 1.. {
                assert!(nth < 200, "the operation never ends");
                let rig = common::host();
                let world = world(&rig, layout);
                if wakes {
                    world.kv.alone().sleep(world.contents(keeps)).unwrap();
                    world.soil(&rig);
                }
                let moves = || match wakes {
                    true => drop(world.kv.alone().wake().unwrap()),
                    false => drop(world.kv.alone().sleep(world.contents(true)).unwrap()),
                };
                let (_, panicked) = panics_at(&rig, nth, |_| true, moves);
                let hazards = rig.machine.take_hazards();
                assert!(hazards.is_empty(), "{nth}: {}", hazards[0]);
                books(&world.pool);
                // The other tenant uses all the memory that there is.
                world.soil(&rig);
                // The extent whose call panicked may be mapped: its addresses are lost.
                if woken_unless_lost(world.kv.alone().wake(), panicked).is_some() {
                    world.shows(&rig, keeps);
                    // Where the driver panicked other memory may be mapped still.
                    if let Err(error) = world.kv.back(&[6]) {
                        let is_known = matches!(&error, PagedKvError::Back { .. });
                        assert!(panicked && is_known, "{nth}: {error}");
                    }
                }
                drop(world);
                if !panicked {
                    break;
                }
            }
        }
    }
}

/// Acts in the first event.
struct Acts(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Subscriber for Acts {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn event(&self, _: &Event<'_>) {
        let act = self.0.lock().unwrap().take();
        act.into_iter().for_each(|act| act());
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The event of a roll-back that is tried again is emitted as soon as the cache is awake.
#[test]
fn memory_of_a_cache_that_is_awake_again_has_no_other_holder() {
    let rig = common::clean(common::host());
    let world = Arc::new(world(&rig, Layout::BlockMajor));
    let prepared = world.kv.alone().prepare_sleep(Contents::Discard).unwrap();
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    rig.faults.forget();
    rig.faults.arm(Fault::nth(1, code).of(Call::MemMap));
    let there = Arc::clone(&world);
    let takes = move || {
        there.kv.release(&[0, 1, 2]).unwrap();
        let kept = there.kv.stats().unwrap().committed;
        let all = there.b.allocate(32 * G - kept).unwrap();
        assert_eq!(there.pool.stats().quarantined, 0);
        drop(all);
    };
    let acts = Arc::new(Acts(Mutex::new(Some(Box::new(takes)))));
    // With one dispatcher alone, `tracing` may not ask this thread.
    let _second = tracing::Dispatch::from(Arc::clone(&acts) as Arc<dyn Subscriber + Send + Sync>);
    let default = tracing::subscriber::set_default(Arc::clone(&acts));
    prepared.cancel().unwrap();
    drop(default);
    rig.faults.disarm();
    assert!(acts.0.lock().unwrap().is_none(), "no event");
    assert_eq!(world.pool.stats().quarantined, 0);
    drop(Arc::into_inner(world));
}

/// The driver panics in work of the pool that was put off, at the end of the poll that finds the
/// cache unused.
#[test]
fn a_cache_that_does_not_fall_asleep_after_all_is_awake() {
    let rig = common::host();
    let world = world(&rig, Layout::BlockMajor);
    let ending = builder(world.kv.tenant(), &world.home, 4, Layout::BlockMajor);
    let ending = ending.build().unwrap();
    ending.back(&[0]).unwrap();
    let (ending, here) = (Mutex::new(Some(ending)), std::thread::current().id());
    rig.faults.watch(Some(Arc::new(move |call| {
        if std::thread::current().id() != here || std::thread::panicking() {
            return;
        }
        // A thread that panics puts work of the pool off.
        if let Some(ending) = ending.lock().unwrap().take() {
            let panicking = std::thread::spawn(move || {
                let _ending = ending;
                panic!("a mistake elsewhere");
            });
            assert!(panicking.join().is_err());
        } else {
            assert_ne!(call, Call::MemUnmap, "a mistake in the driver");
        }
    })));
    let sleep = || world.kv.alone().sleep(Contents::Discard);
    let panicked = catch_unwind(AssertUnwindSafe(sleep)).is_err();
    rig.faults.watch(None);
    assert!(panicked && !world.kv.is_asleep());
    world.kv.back(&[6]).unwrap();
    world.shows(&rig, true);
    assert_eq!(sleep().unwrap().caches, 1);
}
