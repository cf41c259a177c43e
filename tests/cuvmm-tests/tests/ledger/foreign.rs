//! Memory of other programs, which processes of a ledger notice.
//!
//! `unsafe` is used for what another library would allocate.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crate::common::{D0, G, nth_of};
use crate::on_both;
use std::sync::{Arc, Mutex};

use cuvmm::driver::{CUresult, Call, Driver};
use cuvmm::error::{BlockError, LedgerRefusal};
use cuvmm::pool::{Block, Tenant};
use cuvmm::{Device, Ledger, LedgerView, Limit, Pool, Stream};

/// The size in which a memory pool of the driver obtains memory.
const STEP: u64 = 32 << 20;

const LONG: Duration = Duration::from_secs(60);

/// A ledger of `limit` granules, a pool that uses it, and a tenant.
fn process(device: &Device, dir: &tempfile::TempDir, limit: u64) -> (Ledger, Pool, Tenant) {
    let ledger = Ledger::builder(device, dir.path()).limit(limit * G);
    let ledger = ledger.open().unwrap();
    let pool = Pool::builder(device).limit(Limit::Bytes(limit * G));
    let pool = pool.ledger(&ledger).build().unwrap();
    let tenant = pool.tenant("tenant").register().unwrap();
    (ledger, pool, tenant)
}

fn refusal(outcome: Result<Block, BlockError>) -> (LedgerRefusal, u64) {
    match outcome.unwrap_err() {
        BlockError::OutOfMemory(shortage) => {
            let refused = shortage.ledger.unwrap();
            (refused.reason, refused.left / G)
        }
        other => panic!("{other}"),
    }
}

fn until(mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(1));
    }
}

on_both! {
    fn foreign_memory_counts_while_it_is_there(rig) {
        let dir = tempfile::tempdir().unwrap();
        let total = rig.device.total_memory() / G;
        let (ledger, _pool, tenant) = process(&rig.device, &dir, total);
        assert_eq!((ledger.stats().foreign, ledger.stats().usable), (0, total * G));
        let first = tenant.try_allocate(10 * G).unwrap();
        rig.machine.set_used_elsewhere(D0, (total - 30) * G);
        until(|| ledger.stats().foreign == (total - 30) * G);
        let stats = LedgerView::open(ledger.path()).unwrap().stats();
        assert_eq!((stats.limit, stats.usable), (total * G, 30 * G));
        assert_eq!(stats.processes[0].foreign, (total - 30) * G);
        // The process already has a grant, so the ledger counts more than the block.
        let used = ledger.stats().charged / G;
        let creations = rig.faults.count(Call::MemCreate);
        assert_eq!(
            refusal(tenant.try_allocate(25 * G)),
            (LedgerRefusal::Foreign, 30u64.saturating_sub(used)),
        );
        assert_eq!(rig.faults.count(Call::MemCreate), creations);
        // It falls too, and a waiting request notices.
        let waiting = std::thread::spawn({
            let tenant = tenant.clone();
            move || tenant.block(25 * G).timeout(LONG).allocate()
        });
        until(|| ledger.stats().processes[0].waits_for.is_some());
        rig.machine.set_used_elsewhere(D0, (total - 60) * G);
        let second = waiting.join().unwrap().unwrap();
        drop((first, second));
    }

    fn memory_of_pools_is_not_foreign_and_an_error_of_the_driver_leaves_the_limit(rig) {
        let dir = tempfile::tempdir().unwrap();
        let (one, _one_pool, one_tenant) = process(&rig.device, &dir, 100);
        let (other, other_pool, other_tenant) = process(&rig.device, &dir, 100);
        let first = one_tenant.try_allocate(60 * G).unwrap();
        let second = other_tenant.try_allocate(40 * G).unwrap();
        drop(second);
        other_pool.trim(0).unwrap();
        rig.faults.arm(nth_of(1, CUresult::CUDA_ERROR_OUT_OF_MEMORY, &[Call::MemCreate]));
        let refused = other_tenant.try_allocate(10 * G).unwrap_err();
        assert!(matches!(refused, BlockError::DriverOutOfMemory { .. }), "{refused}");
        let stats = one.stats();
        assert_eq!((stats.foreign, stats.usable), (0, 100 * G));
        assert_eq!(stats.processes[other.slot()].obtained, 0);
        let again = other_tenant.try_allocate(40 * G).unwrap();
        drop((first, again));
    }

    fn a_memory_pool_of_the_driver_counts_with_what_it_holds(rig) {
        let dir = tempfile::tempdir().unwrap();
        let total = rig.device.total_memory();
        rig.machine.set_used_elsewhere(D0, total - 12 * STEP);
        let (ledger, _pool, tenant) = process(&rig.device, &dir, total / G);
        let memory = tenant.memory_pool(8 * STEP).build().unwrap();
        let usable = || ledger.stats().usable;
        assert_eq!(usable(), 12 * STEP, "nothing is obtained yet");
        let refused = refusal(tenant.try_allocate(4 * STEP));
        assert_eq!(refused.0, LedgerRefusal::Foreign, "what is charged can still be obtained");
        let block = tenant.try_allocate(3 * STEP).unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let held = memory.allocate_on(&stream, 8 * STEP).unwrap();
        memory.stats().unwrap();
        refusal(tenant.try_allocate(STEP));
        assert_eq!((usable(), ledger.stats().foreign), (12 * STEP, total - 12 * STEP));
        drop((held, block));
        stream.synchronize().unwrap();
        memory.trim().unwrap();
        refusal(tenant.try_allocate(4 * STEP));
        assert_eq!(usable(), 12 * STEP);
    }

    fn what_a_library_allocates_during_a_measurement_never_raises_what_is_left(rig) {
        let dir = tempfile::tempdir().unwrap();
        let total = rig.device.total_memory();
        rig.machine.set_used_elsewhere(D0, total - 12 * STEP);
        let (one, _pool, tenant) = process(&rig.device, &dir, total / G);
        let (two, _other_pool, other) = process(&rig.device, &dir, total / G);
        let memory = tenant.memory_pool(8 * STEP).build().unwrap();
        let current = memory.make_current().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let (machine, queue) = (Arc::clone(&rig.machine), stream.as_raw());
        let library = Arc::new(Mutex::new(None));
        let theirs = Arc::clone(&library);
        // Another library, between the reading of the slots and the driver's answer.
        rig.faults.watch(Some(Arc::new(move |call| {
            let mut theirs = theirs.lock().unwrap();
            if call == Call::MemGetInfo && theirs.is_none() {
                // SAFETY: the stream is alive.
                *theirs = Some(unsafe { machine.alloc_async(D0, 8 * STEP, queue).unwrap() });
            }
        })));
        assert_eq!(refusal(other.try_allocate(4 * STEP)).0, LedgerRefusal::Foreign);
        rig.faults.watch(None);
        for ledger in [&one, &two] {
            let usable = ledger.stats().usable;
            assert!((4 * STEP..=12 * STEP).contains(&usable), "{usable}");
        }
        // The process reads it when another one waits.
        let block = other.block(3 * STEP).timeout(LONG).allocate().unwrap();
        until(|| two.stats().foreign == total - 12 * STEP);
        let free = rig.machine.memory_info(D0).unwrap().free;
        assert_eq!(free, STEP, "the step for exchanges");
        let at = library.lock().unwrap().unwrap();
        // SAFETY: nothing uses the memory.
        unsafe { rig.machine.free_async(D0, at, queue).unwrap() };
        stream.synchronize().unwrap();
        drop((block, current));
    }
}
