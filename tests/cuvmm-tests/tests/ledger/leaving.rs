//! Leaving a ledger: from several threads and out of hooks; and cuts while the ledger is full.

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use crate::basics::directory;
use crate::common::{self, G, Rig, wait_until};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::{Ledger, LedgerView, Pool};

fn process(rig: &Rig<impl Backing>, dir: &tempfile::TempDir, name: &str) -> (Ledger, Pool) {
    let ledger = Ledger::builder(&rig.device, dir.path());
    let ledger = ledger.limit(64 * G).name(name).open().unwrap();
    let pool = common::limited(rig, 64).ledger(&ledger).build().unwrap();
    (ledger, pool)
}

on_both! {
    // The last handle leaves, or the ledger's thread right after it if that looks after a pool then.
    fn who_has_dropped_the_last_handle_leaves(rig) {
        let dir = directory();
        let (keeps, _pool) = process(rig, &dir, "keeps");
        for turn in 0..100 {
            let (ledger, pool) = process(rig, &dir, "goes");
            match turn % 2 {
                0 => drop((pool, ledger)),
                _ => drop((ledger, pool)),
            }
            wait_until("the slot is free", || keeps.stats().processes.len() == 1);
        }
    }

    fn handles_are_dropped_by_several_threads_at_once(rig) {
        let dir = directory();
        let (keeps, pool_of_keeps) = process(rig, &dir, "keeps");
        let view = LedgerView::open(keeps.path()).unwrap();
        for round in 0..150 {
            let (ledger, pool) = process(rig, &dir, "goes");
            let second = common::limited(rig, 64).ledger(&ledger).build().unwrap();
            let tenant = pool.tenant("a").register().unwrap();
            let block = tenant.block(8 * G).timeout(Duration::from_secs(20)).allocate().unwrap();
            // Another process waits for all: its request keeps the thread at work.
            let waiter = (round % 3 == 0).then(|| {
                let tenant = pool_of_keeps.tenant("w").register().unwrap();
                std::thread::spawn(move || tenant.block(60 * G).timeout(Duration::from_secs(20)).allocate().map(drop).unwrap())
            });
            if round % 6 == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            let barrier = Arc::new(Barrier::new(5));
            let things: Vec<Box<dyn std::any::Any + Send>> =
                vec![Box::new(ledger), Box::new(pool), Box::new(tenant), Box::new(block), Box::new(second)];
            let threads: Vec<_> = things.into_iter().map(|thing| {
                let barrier = Arc::clone(&barrier);
                std::thread::spawn(move || { barrier.wait(); drop(thing); })
            }).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            waiter.into_iter().for_each(|waiter| waiter.join().unwrap());
            wait_until("the slot is free", || view.stats().processes.len() == 1);
            let _ = pool_of_keeps.trim(0);
        }
    }

    fn a_hook_that_owns_the_last_handles_is_called_for_another_process(rig) {
        let dir = directory();
        let (keeps, pool_of_keeps) = process(rig, &dir, "keeps");
        let view = LedgerView::open(keeps.path()).unwrap();
        for round in 0..8 {
            let (ledger, pool) = process(rig, &dir, "goes");
            let owned = Arc::new(Mutex::new(None));
            let in_hook = Arc::clone(&owned);
            let tenant = pool.tenant("a").on_pressure(move |_| { drop(in_hook.lock().unwrap().take()); }).register().unwrap();
            let block = tenant.block(32 * G).timeout(Duration::from_secs(20)).allocate().unwrap();
            let ledger = (round % 2 == 0).then_some(ledger);
            *owned.lock().unwrap() = Some((ledger, pool, tenant, block));
            let tenant = pool_of_keeps.tenant("w").register().unwrap();
            tenant.block(60 * G).timeout(Duration::from_secs(20)).allocate().map(drop).unwrap();
            wait_until("the slot is free", || view.stats().processes.len() == 1);
            drop(tenant);
            let _ = pool_of_keeps.trim(0);
        }
    }

    fn a_full_ledger_stops_no_cut(rig) {
        let dir = directory();
        let (ledger, pool) = process(rig, &dir, "one");
        let (_other, other_pool) = process(rig, &dir, "two");
        let pool_growth = common::limited(rig, 64).growth(cuvmm::Growth::Exact)
            .largest_extent(8 * G).ledger(&ledger).build().unwrap();
        let tenant = pool_growth.tenant("a").register().unwrap();
        let mut block = tenant.try_allocate(16 * G).unwrap();
        block.shrink_to(9 * G).unwrap();
        let others = other_pool.tenant("b").register().unwrap();
        let mut kept = vec![];
        while let Ok(block) = others.try_allocate(G) { kept.push(block); }
        let done = pool_growth.compact(|_| true).unwrap();
        assert_eq!(done.given_back + if done.no_space > 0 { 7 * G } else { 0 }, 7 * G);
        drop(kept);
        other_pool.trim(0).unwrap();
        pool_growth.compact(|_| true).unwrap();
        assert_eq!(tenant.stats().committed, 9 * G);
        drop(block);
        drop((tenant, others, pool));
    }
}
