//! Failures of an exchange: everything is as before, or blocks sleep with their contents.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::exchange::{World, shows};
use crate::common;
use crate::common::books::{books, figures};
use crate::common::{D0, G, Rig};
use cuvmm::driver::fault::{Fault, FaultDriver};
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::model::Machine;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{MemoryError, SleepError};
use cuvmm::{Block, Contents, Exchange};

const REFUSED: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

/// Memory that passes, memory that is given up, and memory that comes from the pool, with a tail.
fn world(rig: &Rig<HostMemory>) -> World {
    World::new(rig, 40, &[12 * G, G], &[9 * G, 4 * G + 3])
}

/// The bytes of memory and host memory that the world has.
fn picture(rig: &Rig<HostMemory>, world: &World) -> (u64, u64, u64, u64) {
    let stats = books(rig, &world.pool);
    let store = &world.store;
    (
        stats.committed,
        stats.mappings,
        stats.quarantined,
        store.free(),
    )
}

/// Runs an exchange that fails under the faults that are set, and removes them.
fn fails(rig: &Rig<HostMemory>, world: &World) -> SleepError {
    let error = world.exchange().unwrap_err();
    rig.faults.disarm();
    rig.faults.watch(None);
    error
}

/// Wakes all blocks, which have their contents.
fn all_wake(rig: &Rig<HostMemory>, world: &World) {
    world.asleep.blocks().wake().unwrap();
    world.awake.blocks().wake().unwrap();
    for (blocks, seed) in [(&world.old, 1), (&world.new, 100)] {
        for (block, seed) in blocks.iter().zip(seed..) {
            shows(rig, block, seed);
        }
    }
}

/// Lets no stream go on, and no wait for one succeed.
fn stop(machine: &Machine<HostMemory>, faults: &FaultDriver) {
    machine.hold_all(D0);
    let waits = [Call::StreamSynchronize, Call::CtxSynchronize];
    faults.arm(Fault::all(REFUSED).only(&waits));
}

/// Frees all memory, whose streams go on: nothing that a copy uses is unmapped or reused.
fn ends(rig: &Rig<HostMemory>, world: World) {
    drop((world.old, world.new));
    world.pool.trim(0).unwrap();
    assert_eq!(rig.machine.hazards(), 0);
}

/// Fails each driver call of an exchange once: it is undone, all contents are where they were, and
/// then it succeeds.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn each_call_that_fails_once_changes_nothing() {
    for code in common::sweep::CODES {
        for k in 1.. {
            assert!(k < 500, "the exchange never ends");
            let rig = common::host();
            let world = world(&rig);
            let before = picture(&rig, &world);
            rig.faults.forget();
            rig.faults.arm(Fault::nth(k, code));
            let outcome = world.exchange();
            let (injected, calls) = (rig.faults.injected(), rig.faults.calls());
            rig.faults.disarm();
            let what = calls.get(k as usize - 1);
            if let Err(error) = outcome {
                assert!(!matches!(
                    error,
                    SleepError::Lost { .. } | SleepError::Stayed { .. }
                ));
                world.has(&rig, false);
                let after = picture(&rig, &world);
                assert_eq!(after, before, "call {k}, {what:?}, {code}: {error}");
                world.exchange().unwrap();
            }
            world.has(&rig, true);
            world.back().unwrap();
            world.has(&rig, false);
            if injected == 0 {
                drop(world);
                common::nothing_left(rig);
                assert!(k > 40, "{k}: thirteen copies out and in, and the mappings");
                break;
            }
        }
    }
}

/// Lets the last unmapping of an exchange fail, when all was copied, and also all calls of a kind from
/// then on.
fn fails_late(rig: &Rig<HostMemory>, world: &World, also: Call) {
    let sizes = world.old.iter().chain(&world.new);
    let all: u64 = sizes.map(|it| it.size().div_ceil(G)).sum();
    let (faults, copies) = (Arc::clone(&rig.faults), AtomicU64::new(0));
    rig.faults.watch(Some(Arc::new(move |call| {
        let copied = [Call::MemcpyDtoHAsync, Call::MemcpyHtoDAsync].contains(&call);
        let done = copies.fetch_add(u64::from(copied), Ordering::SeqCst);
        // Copies back make it more later.
        if call == Call::MemUnmap && done == all {
            copies.store(all + 1, Ordering::SeqCst);
            faults.arm(Fault::nth(1, REFUSED).of(Call::MemUnmap));
            faults.arm(Fault::all(REFUSED).of(also));
        }
    })));
}

/// Blocks whose memory cannot be mapped again sleep, with their contents.
#[test]
fn where_going_back_fails_all_sleep_with_their_contents() {
    let rig = common::host();
    // The second block's memory does not pass, and is unmapped last.
    let world = World::new(&rig, 40, &[8 * G, 16 * G], &[8 * G]);
    fails_late(&rig, &world, Call::MemMap);
    let error = fails(&rig, &world);
    let SleepError::Stayed {
        blocks,
        bytes,
        cause,
    } = &error
    else {
        panic!("{error:?}");
    };
    let call = matches!(**cause, SleepError::Memory(MemoryError::Call(_)));
    assert!(call && (*blocks, *bytes) == (1, 8 * G), "{error:?}");
    assert!(
        error.to_string().contains("left 1 block (16 MiB) asleep"),
        "{error}"
    );
    assert!(world.new[0].is_asleep());
    figures(&world.pool);
    all_wake(&rig, &world);
}

/// Blocks that cannot be copied back sleep, with their contents.
#[test]
fn where_copying_back_fails_all_sleep_with_their_contents() {
    let rig = common::host();
    let world = World::new(&rig, 40, &[8 * G, 16 * G], &[8 * G]);
    fails_late(&rig, &world, Call::MemcpyHtoDAsync);
    let error = fails(&rig, &world);
    assert!(
        matches!(&error, SleepError::Stayed { blocks: 1, .. }),
        "{error:?}"
    );
    assert!(world.old[0].is_asleep() && !world.old[1].is_asleep());
    figures(&world.pool);
    // Memory that may have the other tenant's bytes is cleared for the next.
    let next = world.awake.allocate(8 * G).unwrap();
    let mut bytes = vec![1; next.size() as usize];
    next.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    drop(next);
    all_wake(&rig, &world);
}

/// A driver that panics once while a lane copies: all is undone.
#[test]
fn a_panic_in_a_lane_changes_nothing() {
    for call in [
        Call::MemcpyDtoHAsync,
        Call::MemcpyHtoDAsync,
        Call::StreamSynchronize,
        Call::MemsetD8Async,
    ] {
        for nth in [0, 1, 5] {
            let rig = common::host();
            let world = world(&rig);
            let left = AtomicU64::new(nth);
            let armed = AtomicU64::new(1);
            rig.faults.watch(Some(Arc::new(move |made| {
                let lane = std::thread::current().name() == Some("cuvmm-copy");
                if lane && made == call && armed.load(Ordering::SeqCst) == 1 {
                    let is_last =
                        left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
                    if is_last.is_err() {
                        armed.store(0, Ordering::SeqCst);
                        panic!("on purpose");
                    }
                }
            })));
            let outcome = world.exchange();
            rig.faults.watch(None);
            if let Err(error) = outcome {
                assert!(
                    matches!(error, SleepError::Memory(MemoryError::CopyPanicked)),
                    "{error:?}"
                );
                world.has(&rig, false);
                figures(&world.pool);
                world.exchange().unwrap();
            }
            world.has(&rig, true);
            assert_eq!(world.pool.stats().quarantined, 0, "{call:?}, {nth}");
        }
    }
}

/// A driver that panics once in any call of the calling thread: blocks are where they were or where
/// they were to be, or all sleep, with their contents.
#[test]
fn after_a_panic_of_the_driver_all_blocks_have_their_contents() {
    let mut stuck = 0;
    for (nth, release) in (0..80).flat_map(|nth| [(nth, false), (nth, true)]) {
        let rig = common::host();
        let world = World::new(&rig, 40, &[12 * G, G, 2 * G], &[8 * G, 4 * G + 3]);
        let (left, here) = (AtomicU64::new(nth), std::thread::current().id());
        rig.faults.watch(Some(Arc::new(move |call| {
            // A panic in a release loses the memory, in an exchange or not.
            if std::thread::current().id() != here || call == Call::MemRelease {
                return;
            }
            match left.load(Ordering::SeqCst) {
                0 => {
                    left.store(u64::MAX, Ordering::SeqCst);
                    panic!("on purpose");
                }
                u64::MAX => {}
                n => left.store(n - 1, Ordering::SeqCst),
            }
        })));
        let exchange = || {
            Exchange::new()
                .sleep(
                    world.awake.blocks().release(release),
                    Contents::Keep(&world.store),
                )
                .wake(world.asleep.blocks())
                .run()
        };
        let outcome = catch_unwind(AssertUnwindSafe(exchange));
        rig.faults.watch(None);
        let hazards = rig.machine.take_hazards();
        assert!(hazards.is_empty(), "{nth}: {}", hazards[0]);
        let ended = matches!(outcome, Ok(Ok(_)));
        let asleep = |blocks: &[Block]| blocks.iter().all(Block::is_asleep);
        let awake = |blocks: &[Block]| !blocks.iter().any(Block::is_asleep);
        match asleep(&world.new) {
            true => assert!(!ended && (awake(&world.old) || asleep(&world.old)), "{nth}"),
            false => assert!(awake(&world.new) && asleep(&world.old), "{nth}"),
        }
        // Each of them has its contents when it is awake. Where the driver panicked as it mapped
        // memory, that may be mapped, and nothing else is at its addresses any more.
        for (tenant, other, blocks, seed) in [
            (&world.awake, &world.asleep, &world.old, 1),
            (&world.asleep, &world.awake, &world.new, 100),
        ] {
            other.blocks().sleep(Contents::Keep(&world.store)).unwrap();
            if let Err(error) = tenant.blocks().wake() {
                assert!(seed == 100 && asleep(blocks), "{nth}: {error}");
                stuck += 1;
                continue;
            }
            for (block, seed) in blocks.iter().zip(seed..) {
                shows(&rig, block, seed);
            }
        }
        if ended && release {
            assert!(nth > 10, "{nth}");
            assert!(
                stuck <= 12,
                "{stuck}: two calls for each of three physicals, twice"
            );
            return;
        }
    }
    panic!("the exchange never ends");
}

/// Copies that can neither be waited for nor have ended: memory that they use is not reused.
#[test]
fn what_a_copy_may_still_be_using_is_not_given_on() {
    let rig = common::host();
    let world = World::new(&rig, 40, &[16 * G], &[16 * G]);
    stop(&rig.machine, &rig.faults);
    let error = fails(&rig, &world);
    assert!(matches!(error, SleepError::Memory(_)), "{error:?}");
    // Nothing was overwritten: the copies out had not ended.
    assert!(!world.old[0].is_asleep() && world.new[0].is_asleep());
    assert_eq!(rig.machine.hazards(), 0);
    rig.machine.release_all_streams(D0);
    shows(&rig, &world.old[0], 1);
    figures(&world.pool);
    ends(&rig, world);
}

/// Copies in that can no longer be waited for: the block sleeps, and its memory is not reused.
#[test]
fn what_a_copy_may_still_be_writing_is_not_given_on() {
    let rig = common::host();
    let world = World::new(&rig, 40, &[16 * G], &[16 * G]);
    let machine = Arc::clone(&rig.machine);
    let faults = Arc::clone(&rig.faults);
    let begun = AtomicU64::new(0);
    rig.faults.watch(Some(Arc::new(move |call| {
        // From the first copy in on, no stream goes on.
        if call == Call::MemcpyHtoDAsync && begun.fetch_add(1, Ordering::SeqCst) == 0 {
            stop(&machine, &faults);
        }
    })));
    let error = fails(&rig, &world);
    assert!(
        matches!(
            error,
            SleepError::Lost { blocks: 1, .. } | SleepError::Stayed { blocks: 1, .. }
        ),
        "{error:?}"
    );
    assert!(world.old.iter().chain(&world.new).all(Block::is_asleep));
    assert_eq!(rig.machine.hazards(), 0);
    let stats = figures(&world.pool);
    assert!(stats.quarantined > 0, "{stats:?}");
    rig.machine.release_all_streams(D0);
    assert_eq!(rig.machine.hazards(), 0);
    // What wakes has its own bytes, or none.
    world.awake.blocks().wake().unwrap();
    let mut bytes = vec![1; 16 * G as usize];
    world.old[0].read(0, &mut bytes).unwrap();
    match error {
        SleepError::Stayed { .. } => shows(&rig, &world.old[0], 1),
        _ => assert!(bytes.iter().all(|&byte| byte == 0)),
    }
    drop((world.old, world.new));
    world.pool.trim(0).unwrap();
    drop(world.awake.blocks().sleep(Contents::Discard));
    assert_eq!(rig.machine.hazards(), 0);
}

/// Copies back that can no longer be waited for: memory that they may write is not unmapped or given
/// on, and no block that they may write to stays awake.
#[test]
fn what_a_copy_back_may_still_be_writing_is_not_given_on() {
    let rig = common::host();
    let world = World::new(&rig, 40, &[8 * G, 16 * G], &[8 * G]);
    let (machine, faults) = (Arc::clone(&rig.machine), Arc::clone(&rig.faults));
    let copies = AtomicU64::new(0);
    rig.faults.watch(Some(Arc::new(move |call| {
        // All is copied in 32 copies. Then an unmapping fails, and no copy back ends.
        let copied = match call {
            Call::MemcpyDtoHAsync | Call::MemcpyHtoDAsync => copies.fetch_add(1, Ordering::SeqCst),
            Call::MemUnmap if copies.load(Ordering::SeqCst) == 32 => {
                copies.store(100, Ordering::SeqCst);
                faults.arm(Fault::nth(1, REFUSED).of(Call::MemUnmap));
                0
            }
            _ => 0,
        };
        if copied == 100 {
            stop(&machine, &faults);
        }
    })));
    let error = fails(&rig, &world);
    assert!(
        matches!(error, SleepError::Stayed { blocks: 1, .. }),
        "{error:?}"
    );
    assert!(world.old[0].is_asleep() && !world.old[1].is_asleep());
    assert_eq!(rig.machine.hazards(), 0);
    let stats = figures(&world.pool);
    assert!(stats.quarantined > 0, "{stats:?}");
    rig.machine.release_all_streams(D0);
    assert_eq!(rig.machine.hazards(), 0);
    world.awake.blocks().wake().unwrap();
    for (block, seed) in world.old.iter().zip(1..) {
        shows(&rig, block, seed);
    }
    ends(&rig, world);
}
