//! Memory that the pool's mapper maps ahead of the blocks in use.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;

use crate::common::books::books;
use crate::common::{
    self, D0, G, Rig, calls_without_mapper, host, limited, mapped_pool, model, nothing_left, until,
};
use crate::on_both;
use crate::scene::{LAYOUTS, builder, extents_under, stamps};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Backing, Nothing};
use cuvmm::driver::{CUresult, Call};
use cuvmm::paged::Layout;
use cuvmm::{Contents, Mapper, PagedKv, Pool, Stream, Tenant};

/// Blocks that the caches map memory ahead for.
const AHEAD: u32 = 12;

struct World {
    // Fields in drop order.
    kv: PagedKv,
    home: Stream,
    a: Tenant,
    b: Tenant,
    pool: Pool,
    mapper: Mapper,
}

fn world(rig: &Rig<impl Backing>, granules: u64, layout: Layout) -> World {
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = mapped_pool(rig, granules, &mapper);
    let [a, b] = common::tenants(&pool);
    let home = Stream::new(&rig.device).unwrap();
    let kv = builder(&a, &home, 40, layout).precommit(AHEAD);
    World {
        kv: kv.build().unwrap(),
        home,
        a,
        b,
        pool,
        mapper,
    }
}

impl World {
    /// Waits until the memory that some blocks lack is mapped ahead.
    fn is_ahead(&self, used: &BTreeSet<u32>) {
        let next = (0..40).filter(|it| !used.contains(it)).take(AHEAD as usize);
        let with = used.iter().copied().chain(next).collect();
        let known = extents_under(&self.kv, &with) - extents_under(&self.kv, used);
        until(&self.pool, "mapped ahead", || {
            self.kv.stats().unwrap().precommitted == known
        });
    }
}

/// Backs blocks for which memory is mapped ahead. The device's counts know one mapper.
fn the_next_blocks(rig: &Rig<impl Backing>, layout: Layout) {
    let world = world(rig, 200, layout);
    let (kv, mut used) = (&world.kv, BTreeSet::new());
    let calls = || calls_without_mapper(&rig.device, &world.pool);
    assert_eq!(kv.stats().unwrap().precommitted, 0);
    kv.back(&[0]).unwrap();
    used.insert(0);
    for _ in 0..3 {
        world.is_ahead(&used);
        let stats = kv.stats().unwrap();
        assert_eq!(stats.withdrawn, stats.precommitted);
        assert_eq!(books(rig, &world.pool).tenants[0].cached, stats.withdrawn);
        let unused = (0..40).filter(|it| !used.contains(it));
        let next: Vec<u32> = unused.take(AHEAD as usize).collect();
        let before = calls();
        kv.back(&next).unwrap();
        assert_eq!(calls(), before, "{layout:?}");
        if rig.keeps_bytes() {
            assert_eq!(stamps(rig, kv, next[0]), [0; 16]);
        }
        used.extend(next);
    }
    // Released blocks below are the next ones, and their extents are there.
    let low = [0, 1, 2, 3, 4, 5];
    kv.release(&low).unwrap();
    let before = calls();
    kv.back(&low).unwrap();
    assert_eq!(calls(), before);
}

#[test]
fn the_next_blocks_have_memory_and_backing_them_makes_no_call() {
    for layout in LAYOUTS {
        let rig = model();
        the_next_blocks(&rig, layout);
        nothing_left(rig);
        let rig = host();
        the_next_blocks(&rig, layout);
        nothing_left(rig);
    }
}

#[test]
fn memory_ahead_is_given_up_in_sleep_and_is_mapped_again_when_the_cache_wakes() {
    for layout in LAYOUTS {
        let rig = common::clean(model());
        let world = world(&rig, 200, layout);
        let (kv, used) = (&world.kv, BTreeSet::from([0]));
        kv.back(&[0]).unwrap();
        world.is_ahead(&used);
        let held = kv.stats().unwrap().held;
        assert_eq!(kv.alone().sleep(Contents::Discard).unwrap().given, held);
        let asleep = kv.stats().unwrap();
        assert_eq!((asleep.held, asleep.precommitted), (0, 0));
        kv.alone().wake().unwrap();
        world.is_ahead(&used);
    }
}

on_both! {
    // I-102
    fn memory_ahead_is_taken_for_other_tenants_and_before_what_blocks_have_used(rig) {
        let world = world(rig, 24, Layout::BlockMajor);
        let (kv, b) = (&world.kv, &world.b);
        kv.back(&(0..8).collect::<Vec<_>>()).unwrap();
        world.is_ahead(&(0..8).collect());
        kv.release(&[5, 6, 7]).unwrap();
        world.home.synchronize().unwrap();
        let stats = kv.stats().unwrap();
        let free = 24 * G - world.pool.stats().committed;
        assert!(stats.precommitted > 0 && stats.withdrawn > stats.precommitted);
        // All that is free, and one extent beyond.
        let first = b.try_allocate(free + G).unwrap();
        let after = kv.stats().unwrap();
        assert!(after.precommitted < stats.precommitted, "{after:?}");
        assert_eq!(
            after.withdrawn - after.precommitted,
            stats.withdrawn - stats.precommitted
        );
        // And all the rest.
        let rest = b.try_allocate(24 * G - after.committed - first.size()).unwrap();
        assert_eq!(kv.stats().unwrap().withdrawn, 0);
        assert_eq!(books(rig, &world.pool).tenants[0].committed, after.committed);
        drop((first, rest));
    }
}

#[test]
fn memory_beyond_a_tenants_limit_is_not_mapped_ahead() {
    let rig = model();
    let world = world(&rig, 64, Layout::BlockMajor);
    // Blocks 0 to 2 touch the first extent of two granules.
    world.a.set_limit(3 * G).unwrap();
    world.kv.back(&[0]).unwrap();
    // A second cache, whose memory ahead comes after the first one's turn.
    let other = builder(&world.b, &world.home, 40, Layout::BlockMajor).precommit(AHEAD);
    let other = other.build().unwrap();
    other.back(&[0]).unwrap();
    until(&world.pool, "mapped ahead", || {
        other.stats().unwrap().precommitted > 0
    });
    assert_eq!(world.kv.stats().unwrap().held, 2 * G);
    world.a.set_limit(u64::MAX).unwrap();
    world.kv.back(&[3]).unwrap();
    world.is_ahead(&BTreeSet::from([0, 3]));
}

#[test]
fn without_a_mapper_nothing_is_mapped_ahead() {
    let rig = model();
    let (pool, a, home) = common::with_stream(&rig, limited(&rig, 64).build().unwrap());
    let kv = builder(&a, &home, 40, Layout::BlockMajor).precommit(AHEAD);
    let kv = kv.build().unwrap();
    kv.back(&[0, 9]).unwrap();
    assert_eq!(kv.stats().unwrap().precommitted, 0);
    // A mapper that ends leaves what it has mapped.
    drop((kv, a, pool));
    let world = world(&rig, 64, Layout::BlockMajor);
    world.kv.back(&[0]).unwrap();
    world.is_ahead(&BTreeSet::from([0]));
    let World {
        kv,
        home: _home,
        mapper,
        pool,
        ..
    } = world;
    mapper.stop();
    kv.back(&[1, 2, 3]).unwrap();
    kv.purge().unwrap();
    assert_eq!(kv.stats().unwrap().precommitted, 0);
    assert_eq!(books(&rig, &pool).committed, kv.stats().unwrap().committed);
}

/// Does something on the mapper's thread before its first call of a kind.
fn on_the_mapper(rig: &Rig<Nothing>, call: Call, act: impl FnOnce() + Send + 'static) {
    let act: Mutex<Option<Box<dyn FnOnce() + Send>>> = Mutex::new(Some(Box::new(act)));
    rig.faults.watch(Some(Arc::new(move |made| {
        let is_mapper = thread::current().name() == Some("cuvmm-mapper");
        let taken = (made == call && is_mapper).then(|| act.lock().unwrap().take());
        if let Some(act) = taken.flatten() {
            act();
        }
    })));
}

#[test]
fn a_call_that_the_mapper_fails_leaves_all_as_it_was() {
    for layout in LAYOUTS {
        for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
            for nth in [1, 2, 4] {
                let rig = common::clean(model());
                let world = world(&rig, 200, layout);
                let (kv, faults) = (&world.kv, Arc::clone(&rig.faults));
                let (told, tells) = mpsc::channel();
                on_the_mapper(&rig, call, move || {
                    let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
                    faults.arm(Fault::nth(nth, code).of(call));
                    told.send(()).unwrap();
                });
                kv.back(&[0]).unwrap();
                tells.recv().unwrap();
                until(&world.pool, "failed", || rig.faults.injected() > 0);
                rig.faults.watch(None);
                // What is mapped ahead before that stays.
                let stats = kv.stats().unwrap();
                assert_eq!(stats.withdrawn, stats.precommitted);
                rig.faults.disarm();
                let used = BTreeSet::from([0]);
                assert_eq!(stats.committed, extents_under(kv, &used));
                // The next extent calls the mapper again.
                let next = (1..40).find(|&it| {
                    let with = BTreeSet::from([0, it]);
                    extents_under(kv, &with) > extents_under(kv, &used)
                });
                let next = next.unwrap();
                kv.back(&[next]).unwrap();
                world.is_ahead(&BTreeSet::from([0, next]));
                books(&rig, &world.pool);
            }
        }
    }
}

#[test]
fn a_cache_is_dropped_while_the_mapper_maps_for_it() {
    for close in [false, true] {
        let rig = common::clean(model());
        let World {
            kv,
            home,
            a,
            b,
            pool,
            mapper,
        } = world(&rig, 64, Layout::BlockMajor);
        let (begun, begins) = mpsc::channel();
        let (ends, ended) = mpsc::channel::<()>();
        on_the_mapper(&rig, Call::MemMap, move || {
            begun.send(()).unwrap();
            ended.recv().unwrap();
        });
        kv.back(&[0]).unwrap();
        begins.recv().unwrap();
        // Waits for nothing.
        drop(kv);
        drop((a, b));
        // Closed or not: with memory on its way, a pool is only closed when it is dropped.
        let ending = thread::spawn(move || close && pool.close().is_ok());
        ends.send(()).unwrap();
        ending.join().unwrap();
        rig.faults.watch(None);
        drop((mapper, home));
    }
}

#[test]
fn while_a_capture_guard_lives_nothing_is_mapped_ahead() {
    let rig = model();
    let world = world(&rig, 64, Layout::BlockMajor);
    let guard = world.pool.capture_guard();
    let captures = Arc::new(AtomicBool::new(true));
    let sees = Arc::clone(&captures);
    on_the_mapper(&rig, Call::MemMap, move || {
        assert!(!sees.load(Ordering::SeqCst), "mapped under a capture guard");
    });
    world.kv.back(&[0]).unwrap();
    assert_eq!(world.kv.stats().unwrap().precommitted, 0);
    captures.store(false, Ordering::SeqCst);
    drop(guard);
    world.is_ahead(&BTreeSet::from([0]));
    rig.faults.watch(None);
}

#[test]
fn a_panic_of_the_driver_on_the_mappers_thread_leaves_the_cache_usable() {
    let rig = model();
    let world = world(&rig, 64, Layout::BlockMajor);
    let panics = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&panics);
    on_the_mapper(&rig, Call::MemSetAccess, move || {
        told.store(true, Ordering::SeqCst);
        panic!("a mistake in the driver")
    });
    world.kv.back(&[0]).unwrap();
    // The panic ends the mapper's thread, and dropping the mapper waits for that.
    let World {
        kv, mapper, pool, ..
    } = world;
    until(&pool, "panicked", || panics.load(Ordering::SeqCst));
    drop(mapper);
    rig.faults.watch(None);
    kv.back(&[1, 9, 10]).unwrap();
    assert_eq!(kv.stats().unwrap().in_use, 4);
    kv.release(&[0, 1]).unwrap();
}

#[test]
fn threads_back_and_release_while_the_mapper_maps_and_another_tenant_presses() {
    for layout in LAYOUTS {
        let rig = common::clean(model());
        let world = world(&rig, 40, layout);
        let (kv, home) = (&world.kv, &world.home);
        let together = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                together.wait();
                for turn in 0..200_u64 {
                    drop(world.b.try_allocate((turn % 17 + 4) * G));
                }
            });
            together.wait();
            let mut used = BTreeSet::new();
            let mut random = fastrand::Rng::with_seed(7);
            for _ in 0..300 {
                let number = random.u32(0..12);
                if used.remove(&number) {
                    kv.release(&[number]).unwrap();
                } else if kv.try_back(&[number]).is_ok() {
                    used.insert(number);
                }
                assert_eq!(kv.stats().unwrap().committed, extents_under(kv, &used));
            }
        });
        rig.machine.release_stream(D0, home.as_raw());
    }
}

#[test]
fn nothing_is_reclaimed_for_memory_ahead_if_the_driver_has_no_more() {
    for layout in LAYOUTS {
        let rig = model();
        let World {
            kv,
            b,
            pool,
            mapper,
            ..
        } = world(&rig, 200, layout);
        drop(b.allocate(4 * G).unwrap());
        let (faults, unmaps) = (Arc::clone(&rig.faults), rig.faults.count(Call::MemUnmap));
        on_the_mapper(&rig, Call::MemCreate, move || {
            let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            faults.arm(Fault::from(3, code).of(Call::MemCreate));
        });
        kv.back(&[0]).unwrap();
        until(&pool, "refused", || rig.faults.injected() > 0);
        // Memory that is taken for other memory ahead would be taken without end.
        let faults = Arc::clone(&rig.faults);
        on_the_mapper(&rig, Call::MemUnmap, move || faults.disarm());
        mapper.stop();
        rig.faults.watch(None);
        assert_eq!(rig.faults.count(Call::MemUnmap), unmaps, "{layout:?}");
        assert_eq!(b.stats().committed, 4 * G);
        // In layer-major layout the first extents are four, all or none.
        let some = kv.stats().unwrap().precommitted > 0;
        assert_eq!(some, layout != Layout::LayerMajor);
    }
}
