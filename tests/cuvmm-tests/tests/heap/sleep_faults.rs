//! Fails every driver call of a heap's sleep and wake once. A failure changes nothing, and the
//! operation then succeeds. Also tests heaps that stay asleep because the roll-back fails twice.

use crate::common;
use crate::common::panics::{panics_at, woken_unless_lost};
use crate::common::sweep::{sweep, text};
use crate::common::world::{Books, books};
use crate::common::{D0, G, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{MemoryError, SleepError};
use cuvmm::{Allocation, Block, Contents, Heap, HostStore, Pool, Stream, Tenant};

/// A heap whose extents have aliases, a block of the same tenant, and a store for both.
struct World {
    // Fields in drop order.
    live: Vec<Allocation>,
    heap: Heap,
    block: Block,
    tenant: Tenant,
    store: HostStore,
    stream: Stream,
    pool: Pool,
}

fn world(rig: &Rig<Nothing>) -> World {
    let (pool, tenant, stream) = common::scene(rig, 32);
    let heap = Heap::builder(&tenant).for_graphs(true).build().unwrap();
    let allocate = |size| heap.allocate(size, 1, &stream).unwrap();
    let mut live: Vec<Allocation> = (0..5).map(|_| allocate(G)).collect();
    for index in [2, 0] {
        drop(live.remove(index));
    }
    live.push(allocate(2 * G));
    assert_eq!(heap.stats().stitches, 1);
    let block = tenant.block(2 * G).home_stream(&stream).allocate().unwrap();
    World {
        live,
        heap,
        block,
        tenant,
        store: HostStore::builder(&rig.device)
            .pinned(8 * G)
            .build()
            .unwrap(),
        stream,
        pool,
    }
}

/// The figures of the pool, those of the heap, what sleeps, and the free bytes of the store.
type Picture = (Books, [u64; 6], (bool, bool), u64);

impl World {
    fn all(&self) -> cuvmm::sleep::Blocks<'_> {
        self.tenant.blocks().heap(&self.heap)
    }

    fn contents(&self, keeps: bool) -> Contents<'_> {
        match keeps {
            true => Contents::Keep(&self.store),
            false => Contents::Discard,
        }
    }

    fn picture(&self) -> Picture {
        let heap = self.heap.stats();
        let heap = [
            heap.live,
            heap.held,
            heap.free,
            heap.extents,
            heap.mappings,
            heap.asleep,
        ];
        let asleep = (self.heap.is_asleep(), self.block.is_asleep());
        (books(&self.pool), heap, asleep, self.store.free())
    }
}

#[test]
fn falling_asleep() {
    for keeps in [false, true] {
        let sleep = |_: &Rig<Nothing>, world: &mut World| {
            let slept = text(world.all().sleep(world.contents(keeps)))?;
            assert_eq!((slept.heaps, slept.blocks, slept.given), (1, 1, 7 * G));
            Ok(())
        };
        let calls = sweep(world, sleep, World::picture);
        assert!(
            calls >= 9,
            "{calls}: one unmapping for each of the mappings, and queries"
        );
    }
}

#[test]
fn waking() {
    for keeps in [false, true] {
        for soil in [false, true] {
            let asleep = |rig: &Rig<Nothing>| {
                let world = world(rig);
                world.all().sleep(world.contents(keeps)).unwrap();
                if soil {
                    let other = world.pool.tenant("other").register().unwrap();
                    let block = other.allocate_on(&world.stream, 4 * G).unwrap();
                    block.write(0, &[1]).unwrap();
                    world.stream.synchronize().unwrap();
                }
                world
            };
            let wake = |_: &Rig<Nothing>, world: &mut World| {
                let woken = text(world.all().wake())?;
                assert_eq!((woken.heaps, woken.blocks, woken.mapped), (1, 1, 7 * G));
                assert_eq!(world.store.free(), 8 * G);
                Ok(())
            };
            let calls = sweep(asleep, wake, World::picture);
            assert!(calls >= 16, "{calls}: two calls for each mapping");
        }
    }
}

#[test]
fn released_memory_that_comes_back() {
    let asleep = |rig: &Rig<Nothing>| {
        let world = world(rig);
        let contents = Contents::Keep(&world.store);
        world.all().release(true).sleep(contents).unwrap();
        assert_eq!(world.pool.stats().free, 0);
        world
    };
    let wake = |_: &Rig<Nothing>, world: &mut World| text(world.all().wake()).map(drop);
    let calls = sweep(asleep, wake, World::picture);
    assert!(calls >= 21, "{calls}: creations in addition");
}

/// Makes a sleep fail at the driver's refusal to unmap the last mapping, and then to map the
/// memory again, each time of two.
fn refuse_and_refuse(rig: &Rig<Nothing>, mappings: u64) {
    rig.faults.forget();
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    for nth in [mappings, mappings + 1] {
        rig.faults.arm(Fault::nth(nth, code).of(Call::MemUnmap));
    }
    for nth in [1, 2] {
        rig.faults.arm(Fault::nth(nth, code).of(Call::MemMap));
    }
}

#[test]
fn a_heap_that_cannot_stay_awake_sleeps_whole_with_its_contents() {
    for keeps in [false, true] {
        let rig = common::clean(common::model());
        let world = world(&rig);
        let mappings = world.heap.stats().mappings;
        let before = world.picture();
        refuse_and_refuse(&rig, mappings);
        let outcome = world.heap.alone().sleep(world.contents(keeps));
        rig.faults.disarm();
        let Err(SleepError::Stayed {
            blocks,
            bytes,
            cause,
        }) = outcome
        else {
            panic!("{outcome:?}");
        };
        assert!(
            matches!(*cause, SleepError::Memory(MemoryError::Call(_))),
            "{cause:?}"
        );
        assert_eq!((blocks, bytes), (1, 5 * G));
        assert_eq!(
            (world.heap.is_asleep(), world.heap.stats().asleep),
            (true, 5 * G)
        );
        let stats = world.pool.stats();
        assert_eq!((stats.committed, stats.quarantined), (2 * G, 0));
        assert_eq!(world.store.free(), if keeps { 3 * G } else { 8 * G });
        let woken = world.heap.alone().wake().unwrap();
        assert_eq!(
            (woken.mapped, woken.restored),
            (5 * G, if keeps { 5 * G } else { 0 })
        );
        let after = world.picture();
        assert_eq!((after.1, after.2, after.3), (before.1, before.2, before.3));
    }
}

/// Copies that the driver cannot wait for: the memory that they may use is neither unmapped nor
/// given on.
#[test]
fn what_a_copy_may_still_be_using_is_not_given_on() {
    for waking in [false, true] {
        let rig = common::model();
        let world = world(&rig);
        let keep = || world.heap.alone().sleep(Contents::Keep(&world.store));
        if waking {
            keep().unwrap();
        }
        rig.machine.hold_all(D0);
        let refused = CUresult::CUDA_ERROR_UNKNOWN;
        let waits = [Call::StreamSynchronize, Call::CtxSynchronize];
        rig.faults.arm(Fault::all(refused).only(&waits));
        let failed = match waking {
            false => keep().map(drop).unwrap_err(),
            true => world.heap.alone().wake().map(drop).unwrap_err(),
        };
        assert!(matches!(failed, SleepError::Memory(_)), "{failed}");
        assert_eq!(world.heap.is_asleep(), waking);
        // Free memory under a copy stays.
        world.heap.end_graphs();
        let World {
            live, heap, pool, ..
        } = &world;
        assert_eq!((live.len(), heap.trim().unwrap()), (4, 0));
        assert_eq!(pool.stats().quarantined > 0, waking);
        rig.machine.release_all_streams(D0);
        rig.faults.disarm();
        world.stream.synchronize().unwrap();
        drop(world);
        common::only_counted_left(&rig);
    }
}

/// The driver panics inside of the call, and may have mapped the memory.
#[test]
fn memory_whose_mapping_panicked_in_a_wake_is_lent_to_no_other_tenant() {
    for keeps in [false, true] {
        let rig = common::model();
        let world = world(&rig);
        world.heap.alone().sleep(world.contents(keeps)).unwrap();
        let wake = || world.heap.alone().wake();
        let (woken, _) = panics_at(&rig, 1, |call| call == Call::MemMap, wake);
        assert!(woken.is_none());
        assert!(world.heap.is_asleep());
        assert!(world.pool.stats().quarantined > 0);
        books(&world.pool);
        let hazards = rig.machine.take_hazards();
        assert!(hazards.is_empty(), "{}", hazards[0]);
    }
}

// I-125
#[test]
fn a_panic_in_a_sleep_leaves_the_heap_awake_or_asleep() {
    for keeps in [false, true] {
        for nth in 1.. {
            let rig = common::model();
            let world = world(&rig);
            let held = world.heap.stats().held;
            let sleep = || world.heap.alone().sleep(world.contents(keeps)).map(drop);
            let (outcome, panicked) = panics_at(&rig, nth, |_| true, sleep);
            assert_eq!(outcome.is_none(), panicked);
            let asleep = world.heap.is_asleep();
            let charged = world.pool.stats().committed;
            assert_eq!(charged, if asleep { 2 * G } else { 2 * G + held }, "{nth}");
            books(&world.pool);
            let woken = woken_unless_lost(world.heap.alone().wake(), panicked && asleep);
            let is_it = woken.is_none_or(|woken| woken.heaps == u64::from(asleep));
            assert!(is_it, "{nth}");
            let hazards = rig.machine.take_hazards();
            assert!(hazards.is_empty(), "{}", hazards[0]);
            drop(world);
            if !panicked {
                assert!(nth > 6, "each mapping is unmapped");
                break;
            }
        }
    }
}

/// The memory of both heaps is lent together.
// I-124
#[test]
fn a_panic_while_memory_is_gathered_for_a_wake_leaves_no_charge() {
    for (call, least) in [(Call::MemCreate, 6), (Call::MemRelease, 2)] {
        for nth in 1.. {
            let rig = common::model();
            let world = world(&rig);
            let other = Heap::builder(&world.tenant)
                .for_graphs(true)
                .build()
                .unwrap();
            let live = other.allocate(3 * G, 1, &world.stream).unwrap();
            let all = || world.heap.alone().heap(&other);
            all().release(true).sleep(Contents::Discard).unwrap();
            if call == Call::MemRelease {
                // All memory of the pool is free in single granules.
                let soils = world.pool.tenant("other").register().unwrap();
                let single = |_| soils.block(G).capacity(G).try_allocate().unwrap();
                drop((0..30).map(single).collect::<Vec<_>>());
                soils.blocks().sleep(Contents::Discard).unwrap();
                assert_eq!(world.pool.stats().free, 30 * G);
            }
            let is_it = move |it| it == call;
            let (woken, panicked) = panics_at(&rig, nth, is_it, || all().wake().map(drop));
            assert_eq!(woken.is_none(), panicked);
            let asleep = [world.heap.is_asleep(), other.is_asleep()];
            assert_eq!(asleep, [panicked; 2], "{call:?}, {nth}");
            if panicked {
                let stats = world.pool.stats();
                assert_eq!(stats.committed, 2 * G, "{call:?}, {nth}");
                assert!(stats.quarantined > 0, "{call:?}, {nth}");
                books(&world.pool);
                assert_eq!(all().wake().unwrap().mapped, 8 * G);
            }
            books(&world.pool);
            drop((live, other, world));
            if !panicked {
                assert!(nth > least, "{call:?}: {nth}");
                break;
            }
        }
    }
}
