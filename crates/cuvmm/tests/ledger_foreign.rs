//! Memory of other programs, which processes of a ledger notice.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;

use std::time::{Duration, Instant};

use common::{D0, G, nth_of};
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{BlockError, LedgerRefusal};
use cuvmm::pool::{Block, Tenant};
use cuvmm::{Device, Ledger, LedgerView, Limit, Pool};

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
}
