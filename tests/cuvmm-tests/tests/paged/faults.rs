//! Fails every driver call of a paged cache once, and panics in each.
#![allow(clippy::unit_arg)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::sweep::{sweep, sweep_partly, text};
use crate::common::world::{Books, books};
use crate::common::{self, G, Rig, host, limited};
use crate::scene::{LAYOUTS, builder, stamps};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Backing, Nothing};
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{BlockError, MemoryError, PagedKvError};
use cuvmm::paged::{Layout, PagedStats};
use cuvmm::{PagedKv, Pool, Stream, Tenant};

struct World {
    // Fields in drop order.
    kv: Option<PagedKv>,
    home: Stream,
    a: Tenant,
    b: Tenant,
    pool: Pool,
}

/// A cache with two blocks in use, beside a tenant that has used memory.
fn world(rig: &Rig<Nothing>, layout: Layout) -> World {
    let pool = limited(rig, 24).build().unwrap();
    let [a, b] = common::tenants(&pool);
    let home = Stream::new(&rig.device).unwrap();
    let kv = builder(&a, &home, 12, layout).build().unwrap();
    kv.back(&[0, 1]).unwrap();
    drop(b.allocate(3 * G).unwrap());
    World {
        kv: Some(kv),
        home,
        a,
        b,
        pool,
    }
}

fn told(world: &World) -> (Books, Option<PagedStats>) {
    let stats = world.kv.as_ref().map(|kv| kv.stats().unwrap());
    (books(&world.pool), stats)
}

type Operation = fn(&PagedKv) -> Result<(), String>;

#[test]
fn backing_and_reserving() {
    let operations: [Operation; 2] = [|kv| text(kv.back(&[2, 11])), |kv| text(kv.reserve(10))];
    for layout in LAYOUTS {
        for operation in operations {
            let calls = sweep(
                |rig| world(rig, layout),
                |_, world| operation(world.kv.as_ref().unwrap()),
                told,
            );
            assert!(calls >= 3, "{layout:?}: {calls}");
        }
    }
}

#[test]
fn backing_again_what_was_released_and_partly_taken() {
    for layout in LAYOUTS {
        let released = |rig: &Rig<Nothing>| {
            let world = world(rig, layout);
            let kv = world.kv.as_ref().unwrap();
            kv.back(&[6, 11]).unwrap();
            kv.release(&[0, 1, 6]).unwrap();
            world
        };
        let back =
            |_: &Rig<Nothing>, world: &mut World| text(world.kv.as_ref().unwrap().back(&[0, 6, 8]));
        sweep(released, back, told);
    }
}

#[test]
fn backing_with_memory_of_another_tenant() {
    for layout in LAYOUTS {
        let full = |rig: &Rig<Nothing>| {
            let world = world(rig, layout);
            let held = world.a.stats().committed;
            drop(world.b.allocate(24 * G - held).unwrap());
            world
        };
        let back =
            |_: &Rig<Nothing>, world: &mut World| text(world.kv.as_ref().unwrap().back(&[2, 11]));
        let calls = sweep_partly(full, back, |_| ());
        assert!(calls >= 3, "{calls}");
    }
}

#[test]
fn building_with_pinned_blocks() {
    for layout in LAYOUTS {
        let none = |rig: &Rig<Nothing>| {
            let mut world = world(rig, layout);
            world.kv = None;
            world.pool.trim(0).unwrap();
            world
        };
        let build = |_: &Rig<Nothing>, world: &mut World| {
            let kv = builder(&world.a, &world.home, 12, layout).pinned([0, 11]);
            Ok(world.kv = Some(text(kv.build())?))
        };
        // The memory of a failed build stays in the pool, and its addresses go.
        let addresses = |world: &World| books(&world.pool).tenants;
        assert!(sweep_partly(none, build, addresses) >= 4);
    }
}

#[test]
fn releasing_and_purging_and_dropping() {
    for layout in LAYOUTS {
        let purge = |_: &Rig<Nothing>, world: &mut World| {
            let kv = world.kv.as_ref().unwrap();
            if kv.stats().unwrap().in_use > 0 {
                kv.release(&[0, 1]).unwrap();
            }
            text(kv.purge())?;
            match kv.stats().unwrap().held {
                0 => Ok(()),
                held => Err(format!("{held} held")),
            }
        };
        assert!(sweep_partly(|rig| world(rig, layout), purge, |_| ()) >= 2);
        let drops = |_: &Rig<Nothing>, world: &mut World| Ok(world.kv = None);
        sweep_partly(|rig| world(rig, layout), drops, |_| ());
    }
}

/// The calls with which memory that the pool has lent is mapped and zeroed.
const OWN: [Call; 5] = [
    Call::MemMap,
    Call::MemSetAccess,
    Call::StreamCreate,
    Call::MemsetD8Async,
    Call::StreamSynchronize,
];

/// Panics in the nth of these calls that `operate` makes. Returns `true` if it made that many.
fn panics_in(rig: &Rig<impl Backing + 'static>, nth: u64, operate: impl FnOnce()) -> bool {
    let seen = AtomicU64::new(0);
    rig.faults.watch(Some(Arc::new(move |call| {
        if OWN.contains(&call) && seen.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            panic!("a mistake in the driver");
        }
    })));
    let outcome = catch_unwind(AssertUnwindSafe(operate));
    rig.faults.watch(None);
    outcome.is_err()
}

// I-101
#[test]
fn a_panic_of_the_driver_leaves_blocks_as_they_were_and_bytes_of_other_tenants_unseen() {
    for layout in LAYOUTS {
        let operations: [fn(&PagedKv); 2] = [
            |kv| kv.try_back(&[2, 3, 8, 23]).unwrap(),
            |kv| kv.reserve(23).unwrap(),
        ];
        for operation in operations {
            for nth in 1.. {
                let rig = host();
                let pool = limited(&rig, 24).build().unwrap();
                let [a, b] = common::tenants(&pool);
                let home = Stream::new(&rig.device).unwrap();
                let kv = builder(&a, &home, 24, layout).build().unwrap();
                kv.back(&[0, 11]).unwrap();
                kv.release(&[11]).unwrap();
                // The rest of the memory has bytes of the other tenant.
                let rest = b.allocate(24 * G - a.stats().committed).unwrap();
                rig.kernel(&home, &[], &[(rest.address(), rest.size(), 9)]);
                home.synchronize().unwrap();
                drop(rest);
                let before = kv.stats().unwrap();
                if !panics_in(&rig, nth, || operation(&kv)) {
                    assert!(nth > 3, "{nth}");
                    break;
                }
                let after = kv.stats().unwrap();
                let known = (before.in_use, before.reserved, before.committed);
                assert_eq!((after.in_use, after.reserved, after.committed), known);
                assert!(!kv.is_backed(2).unwrap() && kv.is_backed(0).unwrap());
                for number in [2, 3, 8, 23] {
                    if let Err(error) = kv.try_back(&[number]) {
                        // The extent whose call panicked may be mapped: its addresses are lost.
                        let cause = matches!(&error, PagedKvError::Back { cause, .. }
                            if matches!(cause, BlockError::Memory(MemoryError::Quarantined { .. })));
                        assert!(cause, "{error}");
                        continue;
                    }
                    let found = stamps(&rig, &kv, number);
                    assert_eq!(found, [0; 16], "{layout:?}, call {nth}, block {number}");
                }
                drop(kv);
                pool.trim(0).unwrap();
            }
        }
    }
}

#[test]
fn a_panic_of_the_driver_while_an_extent_is_unmapped_holds_up_no_call() {
    for layout in LAYOUTS {
        let takes: [fn(&PagedKv, &Tenant); 2] = [
            |kv, _| drop(kv.purge()),
            |kv, b| drop(b.try_allocate(32 * G - kv.stats().unwrap().committed)),
        ];
        for (take, refuses) in takes.into_iter().flat_map(|it| [(it, false), (it, true)]) {
            let rig = host();
            let pool = limited(&rig, 32).build().unwrap();
            let [a, b] = common::tenants(&pool);
            let home = Stream::new(&rig.device).unwrap();
            let kv = builder(&a, &home, 24, layout).build().unwrap();
            kv.back(&[0, 11, 23]).unwrap();
            kv.release(&[0, 23]).unwrap();
            home.synchronize().unwrap();
            let before = kv.stats().unwrap();
            let (panics, faults) = (AtomicU64::new(0), Arc::clone(&rig.faults));
            rig.faults.watch(Some(Arc::new(move |call| {
                if call == Call::MemUnmap && panics.fetch_add(1, Ordering::SeqCst) == 0 {
                    if refuses {
                        let refused = Fault::all(CUresult::CUDA_ERROR_UNKNOWN);
                        faults.arm(refused.of(Call::MemUnmap));
                    }
                    panic!("a mistake in the driver");
                }
            })));
            let taken = catch_unwind(AssertUnwindSafe(|| take(&kv, &b)));
            rig.faults.watch(None);
            rig.faults.disarm();
            assert!(taken.is_err());
            let after = kv.stats().unwrap();
            assert_eq!((after.in_use, after.committed), (1, before.committed));
            // An extent that is mapped still keeps its addresses.
            let refused = [0, 23].map(|number| kv.try_back(&[number]).is_err());
            assert_eq!(refused.contains(&true), refuses, "{layout:?}");
            kv.back(&[12, 13]).unwrap();
            assert_eq!(stamps(&rig, &kv, 12), [0; 16]);
            drop(kv);
            pool.trim(0).unwrap();
        }
    }
}
