//! Fails every driver call of sleep and wake once. A failure changes nothing, and the operation
//! then succeeds. Also tests blocks that stay asleep because the roll-back fails twice.
#![allow(clippy::unit_arg)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use crate::common;
use crate::common::sweep::{sweep, text};
use crate::common::world::{Books, books};
use crate::common::{D0, G, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{MemoryError, SleepError};
use cuvmm::sleep::HostStoreBuilder;
use cuvmm::{Block, Contents, HostStore, Pool, Stream, Tenant};

/// A tenant with blocks of two tags, and a store for their contents.
struct Sleepers {
    pool: Pool,
    tenant: Tenant,
    blocks: Vec<Block>,
    store: HostStore,
    stream: Stream,
}

fn sleepers(rig: &Rig<Nothing>) -> Sleepers {
    sleepers_of(rig, HostStore::builder(&rig.device).pinned(10 * G))
}

fn sleepers_of(rig: &Rig<Nothing>, store: HostStoreBuilder<'_>) -> Sleepers {
    let pool = common::pool(rig, 64);
    let tenant = pool.tenant("model").register().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let block = |size: u64, zeroed| {
        let block = tenant.block(size).zeroed(zeroed).home_stream(&stream);
        block.allocate().unwrap()
    };
    let blocks = vec![block(3 * G, false), block(5 * G + 1, true), block(G, false)];
    Sleepers {
        pool,
        tenant,
        blocks,
        store: store.build().unwrap(),
        stream,
    }
}

/// Blocks of which some bytes are marked: across an end of extents, in a zeroed block, and none.
fn marked(rig: &Rig<Nothing>) -> Sleepers {
    let world = sleepers(rig);
    world.blocks[0]
        .set_kept([0..1, 2 * G - 5..2 * G + 5])
        .unwrap();
    world.blocks[1].set_kept([7..8, 5 * G..5 * G + 1]).unwrap();
    world
}

/// The pool's figures, which blocks sleep, and the store's free and all bytes.
type Picture = (Books, Vec<bool>, (u64, u64));

impl Sleepers {
    fn picture(&self) -> Picture {
        let asleep = self.blocks.iter().map(Block::is_asleep).collect();
        let store = (self.store.free(), self.store.capacity());
        (books(&self.pool), asleep, store)
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn falling_asleep_and_waking() {
    let discard = |_: &Rig<Nothing>, world: &mut Sleepers| {
        let slept = text(world.tenant.blocks().sleep(Contents::Discard))?;
        assert_eq!((slept.blocks, slept.given), (3, 10 * G));
        Ok(())
    };
    let keep = |_: &Rig<Nothing>, world: &mut Sleepers| {
        let contents = Contents::Keep(&world.store);
        let slept = text(world.tenant.blocks().sleep(contents))?;
        assert_eq!((slept.blocks, slept.given), (3, 10 * G));
        assert_eq!(world.store.free(), 0);
        Ok(())
    };
    let wake = |_: &Rig<Nothing>, world: &mut Sleepers| {
        let woken = text(world.tenant.blocks().wake())?;
        assert_eq!((woken.blocks, woken.mapped), (3, 10 * G));
        assert_eq!(world.store.free(), 10 * G);
        Ok(())
    };
    let calls = sweep(sleepers, discard, Sleepers::picture);
    assert!(calls >= 6, "{calls}: queries, and one unmapping per extent");
    let calls = sweep(sleepers, keep, Sleepers::picture);
    assert!(calls >= 17, "{calls}: ten copies in addition");
    let keep_marked = |_: &Rig<Nothing>, world: &mut Sleepers| {
        let contents = Contents::KeepMarked(&world.store);
        let slept = text(world.tenant.blocks().sleep(contents))?;
        assert_eq!((slept.blocks, slept.given, slept.kept), (3, 10 * G, 13));
        Ok(())
    };
    let calls = sweep(marked, keep_marked, Sleepers::picture);
    assert!(calls >= 10, "{calls}: four copies in addition");
    let growing = |rig: &Rig<Nothing>| {
        let store = HostStore::builder(&rig.device).pinned(G).limit(10 * G);
        sleepers_of(rig, store)
    };
    let calls = sweep(growing, keep, Sleepers::picture);
    assert!(calls >= 18, "{calls}: a registration in addition");
    type Make = fn(&Rig<Nothing>) -> Sleepers;
    let after = |make: Make, fall: fn(&Sleepers) -> Contents<'_>, soil: bool| {
        move |rig: &Rig<Nothing>| {
            let world = make(rig);
            world.tenant.blocks().sleep(fall(&world)).unwrap();
            if soil {
                // Part of the free list was written by another tenant.
                let other = world.pool.tenant("other").register().unwrap();
                other
                    .allocate_on(&world.stream, 4 * G)
                    .unwrap()
                    .write(0, &[1])
                    .unwrap();
                world.stream.synchronize().unwrap();
            }
            world
        }
    };
    for soil in [false, true] {
        let calls = sweep(
            after(sleepers, |_| Contents::Discard, soil),
            wake,
            Sleepers::picture,
        );
        assert!(calls >= 8, "{calls}: two calls per extent");
        let kept = after(sleepers, |world| Contents::Keep(&world.store), soil);
        let calls = sweep(kept, wake, Sleepers::picture);
        assert!(calls >= 18, "{calls}: ten copies in addition");
        let kept = after(marked, |world| Contents::KeepMarked(&world.store), soil);
        let calls = sweep(kept, wake, Sleepers::picture);
        assert!(calls >= 12, "{calls}: four copies in addition");
    }
}

/// Two tenants that sleep and wake together, or not at all.
struct Together {
    sleepers: [Sleepers; 2],
}

impl Together {
    fn new(rig: &Rig<Nothing>) -> Self {
        let one = sleepers(rig);
        // Of the same pool.
        let tenant = one.pool.tenant("other").register().unwrap();
        let blocks = vec![tenant.allocate(2 * G).unwrap(), tenant.allocate(G).unwrap()];
        let other = Sleepers {
            pool: one.pool.clone(),
            tenant,
            blocks,
            store: one.store.clone(),
            stream: one.stream.clone(),
        };
        Self {
            sleepers: [one, other],
        }
    }

    fn picture(&self) -> Vec<Picture> {
        self.sleepers.iter().map(Sleepers::picture).collect()
    }

    fn sleep(&self, contents: [Contents<'_>; 2]) -> Result<(), String> {
        let pairs = self.sleepers.iter().zip(contents);
        let prepared = pairs.map(|(one, contents)| one.tenant.blocks().prepare_sleep(contents));
        let prepared: Vec<_> = text(prepared.collect())?;
        let slept = prepared.into_iter().map(|one| one.finish().given);
        assert_eq!(slept.collect::<Vec<_>>(), [10 * G, 3 * G]);
        Ok(())
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn tenants_sleep_and_wake_together() {
    let sleep = |_: &Rig<Nothing>, world: &mut Together| {
        let store = &world.sleepers[0].store;
        world.sleep([Contents::Keep(store), Contents::Discard])
    };
    let wake = |_: &Rig<Nothing>, world: &mut Together| {
        let prepared = world.sleepers.iter();
        let prepared = prepared.map(|one| one.tenant.blocks().prepare_wake());
        let prepared: Vec<_> = text(prepared.collect())?;
        let woken = prepared.into_iter().map(|one| one.finish().mapped);
        assert_eq!(woken.collect::<Vec<_>>(), [10 * G, 3 * G]);
        Ok(())
    };
    let calls = sweep(Together::new, sleep, Together::picture);
    assert!(
        calls >= 19,
        "{calls}: ten copies, and one unmapping per extent"
    );
    let asleep = |rig: &Rig<Nothing>| {
        let mut world = Together::new(rig);
        sleep(rig, &mut world).unwrap();
        world
    };
    let calls = sweep(asleep, wake, Together::picture);
    assert!(calls >= 20, "{calls}: ten copies, and two calls per extent");
}

#[test]
fn what_is_prepared_can_be_cancelled() {
    let rig = common::model();
    let world = sleepers(&rig);
    let before = world.picture();
    let contents = Contents::Keep(&world.store);
    for how in 0..2 {
        let prepared = world.tenant.blocks().prepare_sleep(contents).unwrap();
        match how {
            0 => drop(prepared),
            _ => prepared.cancel().unwrap(),
        }
        assert_eq!(world.picture(), before);
    }
    world.tenant.blocks().sleep(contents).unwrap();
    let asleep = world.picture();
    drop(world.tenant.blocks().prepare_wake().unwrap());
    assert_eq!(world.picture(), asleep);
    // Memory that cannot be mapped again leaves its block asleep.
    world.tenant.blocks().wake().unwrap();
    let prepared = world.tenant.blocks().prepare_sleep(contents).unwrap();
    rig.faults.forget();
    for nth in [1, 2] {
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(Fault::nth(nth, code).of(Call::MemMap));
    }
    let outcome = prepared.cancel();
    rig.faults.disarm();
    let stayed = matches!(outcome, Err(SleepError::Stayed { blocks: 1, .. }));
    assert!(stayed, "{outcome:?}");
    world.tenant.blocks().wake().unwrap();
    assert_eq!(world.picture().1, [false; 3]);
}

/// If its memory cannot be put back either, a block sleeps with its contents kept.
#[test]
fn a_block_that_cannot_stay_awake_sleeps() {
    let rig = common::clean(common::model());
    let world = sleepers(&rig);
    rig.faults.forget();
    // The last unmapping fails, and then the first mapping of the roll-back, twice.
    for (nth, call) in [(4, Call::MemUnmap), (1, Call::MemMap), (2, Call::MemMap)] {
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(Fault::nth(nth, code).of(call));
    }
    let outcome = world.tenant.blocks().sleep(Contents::Keep(&world.store));
    rig.faults.disarm();
    let Err(SleepError::Stayed {
        blocks,
        bytes,
        cause,
    }) = outcome
    else {
        panic!("{outcome:?}");
    };
    let call = matches!(*cause, SleepError::Memory(MemoryError::Call(_)));
    assert!(call, "{cause:?}");
    let asleep: Vec<&Block> = world
        .blocks
        .iter()
        .filter(|block| block.is_asleep())
        .collect();
    assert_eq!(asleep.len() as u64, blocks);
    assert_eq!(asleep.iter().map(|block| block.size()).sum::<u64>(), bytes);
    assert_eq!(blocks, 1);
    let stats = world.pool.stats();
    assert_eq!(stats.asleep + stats.committed, 10 * G);
    assert_eq!(stats.quarantined, 0);
    books(&world.pool);
    let woken = world.tenant.blocks().wake().unwrap();
    assert_eq!((woken.blocks, woken.restored), (1, bytes));
    assert_eq!(
        (world.pool.stats().committed, world.store.free()),
        (10 * G, 10 * G)
    );
}

/// Sleep and wake while neither the copies' streams nor the device can be synchronized: memory that
/// a copy may still use is neither unmapped nor reused.
#[test]
fn what_a_copy_may_still_be_using_is_not_given_on() {
    for staged in [false, true] {
        for waking in [false, true] {
            for leaking in [false, true] {
                a_copy_outlasts_its_wait(staged, waking, leaking, refuse_waits);
                a_copy_outlasts_its_wait(staged, waking, leaking, panic_in_lanes);
            }
        }
    }
}

/// Returns `true` for the error of a copy that is expected.
type Expected = fn(&MemoryError) -> bool;

/// Makes the driver refuse to wait; returns the error of a copy.
fn refuse_waits(rig: &Rig<Nothing>) -> Expected {
    let refused = CUresult::CUDA_ERROR_UNKNOWN;
    let waits = [Call::StreamSynchronize, Call::CtxSynchronize];
    rig.faults.arm(Fault::all(refused).only(&waits));
    |error| error.call().is_some()
}

/// Makes the driver panic where a lane waits for its copies; returns the error of a copy.
fn panic_in_lanes(rig: &Rig<Nothing>) -> Expected {
    rig.faults.watch(Some(Arc::new(|call| {
        let lane = std::thread::current().name() == Some("cuvmm-copy");
        assert!(!lane || call != Call::StreamSynchronize, "on purpose");
    })));
    |error| matches!(error, MemoryError::CopyPanicked)
}

/// Runs a sleep or wake whose copies cannot be waited for, with or without the store's staging
/// memory. Then the store is dropped under the copies, or they complete.
fn a_copy_outlasts_its_wait(
    staged: bool,
    waking: bool,
    leaking: bool,
    fail: fn(&Rig<Nothing>) -> Expected,
) {
    let rig = common::model();
    let mut world = sleepers(&rig);
    if staged {
        let store = HostStore::builder(&rig.device).ordinary(10 * G);
        world.store = store.staging(2 * G).build().unwrap();
    }
    let keep = |world: &Sleepers| world.tenant.blocks().sleep(Contents::Keep(&world.store));
    if waking {
        keep(&world).unwrap();
    }
    rig.machine.hold_all(D0);
    let expected = fail(&rig);
    let error = match waking {
        false => keep(&world).map(drop).unwrap_err(),
        true => world.tenant.blocks().wake().map(drop).unwrap_err(),
    };
    assert!(
        matches!(&error, SleepError::Memory(error) if expected(error)),
        "{error:?}"
    );
    rig.faults.disarm();
    rig.faults.watch(None);
    // The target of the copies is quarantined, and their source is pending once it is freed.
    assert_eq!(world.pool.stats().quarantined > 0, waking);
    drop(std::mem::take(&mut world.blocks));
    world.pool.trim(0).unwrap();
    assert_eq!(rig.machine.hazards(), 0);
    assert!(world.pool.stats().committed + world.pool.stats().quarantined > 0);
    let aside = world.store.capacity() - world.store.free();
    assert!(aside > 0);
    if leaking {
        drop(world.store);
        let leaked = rig.device.leaked();
        // Staging memory of the lanes that copied is leaked too.
        assert!(leaked == aside || (staged && leaked > aside), "{leaked}");
        rig.machine.release_all_streams(D0);
    } else {
        rig.machine.release_all_streams(D0);
        assert_eq!(world.store.free(), world.store.capacity());
        let block = world.tenant.allocate(G).unwrap();
        assert_eq!(keep(&world).unwrap().kept, G, "all lanes copy again");
        world.tenant.blocks().wake().unwrap();
        drop(block);
        drop(world.store);
        assert_eq!(rig.device.leaked(), 0);
    }
    drop(world.tenant);
    drop(world.stream);
    world.pool.close().unwrap();
    assert_eq!(rig.machine.hazards(), 0);
}

/// A driver that refuses every release.
fn refuses_releases(rig: &Rig<Nothing>) {
    let refusal = Fault::all(CUresult::CUDA_ERROR_UNKNOWN);
    rig.faults.arm(refusal.of(Call::MemRelease));
}

#[test]
fn memory_that_the_driver_does_not_take_back_is_in_what_sleep_returns() {
    for contents in [false, true] {
        let rig = common::model();
        let world = sleepers(&rig);
        let contents = match contents {
            false => Contents::Discard,
            true => Contents::Keep(&world.store),
        };
        refuses_releases(&rig);
        let slept = world.tenant.blocks().release(true).sleep(contents).unwrap();
        rig.faults.disarm();
        assert_eq!((slept.given, slept.quarantined), (10 * G, 10 * G));
        let stats = books(&world.pool);
        assert_eq!((stats.committed, stats.free), (0, 0));
        assert_eq!(stats.quarantined, slept.quarantined);
        // The driver takes it now, and the next sleep says that nothing is left.
        let slept = world.tenant.blocks().wake().unwrap();
        assert_eq!(slept.mapped, 10 * G);
        let slept = world
            .tenant
            .blocks()
            .release(true)
            .sleep(Contents::Discard)
            .unwrap();
        assert_eq!((slept.given, slept.quarantined), (10 * G, 0));
        assert_eq!(
            books(&world.pool).quarantined,
            0,
            "that of the first sleep too"
        );
    }
}

#[test]
fn a_release_that_is_refused_once_is_asked_for_again_before_sleep_ends() {
    let rig = common::model();
    let world = sleepers(&rig);
    let cached = world.tenant.allocate_on(&world.stream, 4 * G).unwrap();
    drop(cached);
    let refusal = common::nth_of(2, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemRelease]);
    rig.faults.arm(refusal);
    let slept = world
        .tenant
        .blocks()
        .release(true)
        .sleep(Contents::Discard)
        .unwrap();
    assert_eq!(rig.faults.injected(), 1);
    assert_eq!((slept.given, slept.quarantined), (14 * G, 0));
    assert_eq!(books(&world.pool).quarantined, 0);
    assert_eq!(rig.machine.live().physical_bytes, 0);
}

#[test]
fn releases_that_are_refused_are_retried_by_several_threads() {
    const ROUNDS: u32 = 60;
    let rig = common::model();
    let pool = common::pool(&rig, 64);
    let work = &|name: &str| {
        let tenant = pool.tenant(name).register().unwrap();
        let block = tenant.allocate(3 * G).unwrap();
        for round in 0..ROUNDS {
            // Each thread refuses what others release and ask for again.
            match round % 3 {
                0 => refuses_releases(&rig),
                _ => rig.faults.disarm(),
            }
            let slept = tenant.blocks().release(true).sleep(Contents::Discard);
            let slept = slept.unwrap();
            assert!(slept.quarantined <= slept.given, "{slept:?}");
            pool.trim(0).unwrap();
            // Quarantined memory may be all that is left, and is asked for again then.
            while tenant.blocks().wake().is_err() {
                rig.faults.disarm();
            }
        }
        drop(block);
    };
    std::thread::scope(|scope| {
        for name in ["one", "two", "three"] {
            scope.spawn(move || work(name));
        }
    });
    rig.faults.disarm();
    pool.trim(0).unwrap();
    let stats = books(&pool);
    assert_eq!((stats.committed, stats.free, stats.quarantined), (0, 0, 0));
    assert_eq!(rig.machine.live().physical_bytes, 0);
    pool.close().unwrap();
}

/// Memory that another sleep left is not in what this one gave up.
#[test]
fn what_the_driver_refused_before_is_not_in_what_a_later_sleep_returns() {
    let rig = common::model();
    let world = sleepers(&rig);
    let other = world.pool.tenant("other").register().unwrap();
    let block = other.allocate(2 * G).unwrap();
    refuses_releases(&rig);
    let sleep = |tenant: &Tenant| {
        let blocks = tenant.blocks().release(true);
        blocks.sleep(Contents::Discard).unwrap()
    };
    assert_eq!(sleep(&world.tenant).quarantined, 10 * G);
    // The driver refuses the other block too, and the earlier memory again, and then takes the
    // block's.
    let earlier = rig.machine.live().physicals as u64 - 1;
    let (faults, left) = (Arc::clone(&rig.faults), AtomicU64::new(1 + earlier));
    let disarm = move |call| {
        let is_last = |left: u64| left.checked_sub(u64::from(call == Call::MemRelease));
        if left.fetch_update(SeqCst, SeqCst, is_last).is_err() {
            faults.disarm();
        }
    };
    rig.faults.watch(Some(Arc::new(disarm)));
    let slept = sleep(&other);
    rig.faults.watch(None);
    assert_eq!((slept.given, slept.quarantined), (2 * G, 0));
    assert_eq!(books(&world.pool).quarantined, 10 * G);
    drop(block);
}

/// Cached memory is given up until the driver refuses to unmap some.
#[test]
fn cached_memory_that_was_given_up_before_a_refusal_counts() {
    for unmapped in 1..=5 {
        let rig = common::model();
        let pool = common::limited(&rig, 64).largest_extent(G).build().unwrap();
        let tenant = pool.tenant("model").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let cached = [3, 2].map(|granules| tenant.allocate_on(&stream, granules * G).unwrap());
        drop(cached);
        let before = books(&pool).committed;
        assert_eq!(before, 5 * G);
        refuses_releases(&rig);
        rig.faults.arm(common::nth_of(
            unmapped,
            CUresult::CUDA_ERROR_UNKNOWN,
            &[Call::MemUnmap],
        ));
        let slept = tenant.blocks().release(true).sleep(Contents::Discard);
        let slept = slept.unwrap();
        rig.faults.disarm();
        let stats = books(&pool);
        assert_eq!(slept.given, (unmapped - 1) * G);
        assert_eq!(slept.given, before - stats.committed);
        assert_eq!(slept.quarantined, slept.given);
        assert_eq!(stats.quarantined, slept.quarantined);
    }
}
