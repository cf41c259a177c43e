//! Memory in use that processes give up for requests of other processes: by their tenants' hooks,
//! and by sleep. The processes are in one here, each with a slot of its own.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::executor::Task;
use crate::common::{self, G, host, until};
use crate::on_both;
use cuvmm::error::BlockError;
use cuvmm::ledger::LedgerBuilder;
use cuvmm::pool::{Block, Pressure, Tenant};
use cuvmm::{Device, Ledger, Limit, Mapper, Pool};

/// Longer than any of these tests waits.
const LONG: Duration = Duration::from_secs(60);

/// Long enough for every step of two processes.
const ALL_STEPS: Duration = Duration::from_millis(500);

fn builder<'a>(device: &'a Device, dir: &tempfile::TempDir, name: &str) -> LedgerBuilder<'a> {
    let builder = Ledger::builder(device, dir.path()).limit(100 * G);
    builder.name(name)
}

fn pool(device: &Device, ledger: &Ledger) -> Pool {
    let pool = Pool::builder(device).limit(Limit::Bytes(100 * G));
    pool.ledger(ledger).build().unwrap()
}

/// The arguments of a hook's calls.
type Calls = Arc<Mutex<Vec<Pressure>>>;

/// Blocks that a hook drops.
type Kept = Arc<Mutex<Vec<Block>>>;

/// A tenant whose hook drops a block with each call.
fn giving(pool: &Pool, name: &str, priority: i32, sizes: &[u64]) -> (Tenant, Kept, Calls) {
    let (kept, calls) = (Kept::default(), Calls::default());
    let (drops, notes) = (Arc::clone(&kept), Arc::clone(&calls));
    let tenant = pool.tenant(name).priority(priority);
    let tenant = tenant.on_pressure(move |pressure| {
        notes.lock().unwrap().push(pressure.clone());
        let dropped = drops.lock().unwrap().pop();
        drop(dropped);
    });
    let tenant = tenant.register().unwrap();
    for size in sizes {
        let block = tenant.try_allocate(size * G).unwrap();
        kept.lock().unwrap().push(block);
    }
    (tenant, kept, calls)
}

fn allocate(tenant: &Tenant, granules: u64, timeout: Duration) -> Result<Block, BlockError> {
    tenant.block(granules * G).timeout(timeout).allocate()
}

on_both! {
    fn hooks_of_other_processes_give_memory_the_lowest_priority_first(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = builder(&rig.device, &dir, "a").open().unwrap();
        let b = builder(&rig.device, &dir, "b").open().unwrap();
        let (held, wants) = (pool(&rig.device, &a), pool(&rig.device, &b));
        let (_low, low_kept, low) = giving(&held, "low", -1, &[40, 30]);
        let (_high, high_kept, high) = giving(&held, "high", 1, &[30]);
        let tenant = wants.tenant("wants").register().unwrap();
        let got = allocate(&tenant, 20, LONG).unwrap();
        let calls = low.lock().unwrap().clone();
        assert_eq!(calls.len(), 1);
        let call = &calls[0];
        assert_eq!((&*call.wanted_by, call.bytes, call.waits), ("b", 20 * G, true));
        assert_eq!((low_kept.lock().unwrap().len(), high.lock().unwrap().len()), (1, 0));
        // The next request needs both.
        let more = allocate(&tenant, 60, LONG).unwrap();
        assert_eq!((low.lock().unwrap().len(), high.lock().unwrap().len()), (2, 1));
        // What is missing: without what the first one gave, or with it if that is still on its way to
        // the ledger.
        let asked = high.lock().unwrap()[0].bytes;
        assert!([10 * G, 50 * G].contains(&asked), "{asked}");
        assert_eq!(high_kept.lock().unwrap().len(), 0);
        assert!(rig.machine.live().physical_bytes <= 100 * G);
        drop((got, more));
    }

    // I-155
    fn hooks_of_another_pool_of_the_process_give_memory(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = builder(&rig.device, &dir, "a").sleep_for_others(true);
        let a = a.on_sleep(|_| panic!("no other process waits")).open().unwrap();
        let (held, wants) = (pool(&rig.device, &a), pool(&rig.device, &a));
        let (_tenant, _kept, calls) = giving(&held, "held", 0, &[70]);
        let (_own, _its, own) = giving(&wants, "own", 0, &[10, 20]);
        let tenant = wants.tenant("wants").register().unwrap();
        let got = allocate(&tenant, 50, LONG).unwrap();
        let wanted_by = |calls: &Calls| {
            let calls = calls.lock().unwrap();
            calls.iter().map(|it| it.wanted_by.clone()).collect::<Vec<_>>()
        };
        assert_eq!(wanted_by(&calls), ["a"]);
        // That of its own pool is called by the request.
        assert!(wanted_by(&own).iter().all(|it| it == "wants"), "{:?}", wanted_by(&own));
        drop(got);
    }

    fn a_tenant_within_its_guarantee_and_a_request_that_does_not_wait_call_no_hook(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = builder(&rig.device, &dir, "a").guarantee(100 * G).open().unwrap();
        let b = builder(&rig.device, &dir, "b").open().unwrap();
        let (held, wants) = (pool(&rig.device, &a), pool(&rig.device, &b));
        let (_tenant, _kept, calls) = giving(&held, "held", 0, &[100]);
        let tenant = wants.tenant("wants").register().unwrap();
        allocate(&tenant, 20, ALL_STEPS).unwrap_err();
        a.set_guarantee(0).unwrap();
        tenant.allocate(20 * G).unwrap_err();
        assert_eq!(calls.lock().unwrap().len(), 0);
        allocate(&tenant, 20, LONG).unwrap();
        assert_eq!(calls.lock().unwrap().len(), 1);
    }

    fn a_hook_that_panics_gives_nothing_and_harms_nothing(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = builder(&rig.device, &dir, "a").open().unwrap();
        let b = builder(&rig.device, &dir, "b").open().unwrap();
        let (held, wants) = (pool(&rig.device, &a), pool(&rig.device, &b));
        let rude = held.tenant("rude").priority(-9);
        let rude = rude.on_pressure(|_| panic!("on purpose")).register().unwrap();
        let kept = rude.try_allocate(50 * G).unwrap();
        let (_tenant, _kept, calls) = giving(&held, "kind", 0, &[50]);
        let tenant = wants.tenant("wants").register().unwrap();
        let got = allocate(&tenant, 20, LONG).unwrap();
        assert_eq!(calls.lock().unwrap().len(), 1);
        drop((kept, got));
    }

    fn a_hook_may_drop_its_own_pool(rig) {
        let dir = tempfile::tempdir().unwrap();
        let a = builder(&rig.device, &dir, "a").open().unwrap();
        let b = builder(&rig.device, &dir, "b").open().unwrap();
        let (held, wants) = (pool(&rig.device, &a), pool(&rig.device, &b));
        drop(a);
        let all: Arc<Mutex<Option<(Pool, Tenant, Block)>>> = Arc::default();
        let dropped = Arc::downgrade(&all);
        let owner = held.tenant("owner").on_pressure(move |_| {
            let all = dropped.upgrade().and_then(|all| all.lock().unwrap().take());
            drop(all);
        });
        let owner = owner.register().unwrap();
        let block = owner.try_allocate(100 * G).unwrap();
        *all.lock().unwrap() = Some((held, owner, block));
        let tenant = wants.tenant("wants").register().unwrap();
        let got = allocate(&tenant, 100, LONG).unwrap();
        assert!(all.lock().unwrap().is_none());
        assert_eq!(rig.machine.live().physical_bytes, 100 * G);
        drop(got);
    }

    fn a_process_that_allows_it_puts_tenants_to_sleep(rig) {
        for allowed in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let held: Arc<Mutex<Vec<(Tenant, Block)>>> = Arc::default();
            let slept: Arc<Mutex<Vec<String>>> = Arc::default();
            let (drops, notes) = (Arc::clone(&held), Arc::clone(&slept));
            let a = builder(&rig.device, &dir, "a").sleep_for_others(allowed);
            let a = a.on_sleep(move |name| {
                let name = name.unwrap();
                notes.lock().unwrap().push(name.to_owned());
                if name == "stubborn" {
                    return Err("it is in use".to_owned());
                }
                let mut held = drops.lock().unwrap();
                let at = held.iter().position(|(it, _)| it.name() == name).unwrap();
                let freed = held.swap_remove(at);
                drop(held);
                drop(freed);
                Ok(())
            });
            let a = a.open().unwrap();
            let b = builder(&rig.device, &dir, "b").open().unwrap();
            let (pool_a, wants) = (pool(&rig.device, &a), pool(&rig.device, &b));
            let tenants = [("chat", 2, 40), ("batch", 0, 20), ("stubborn", -1, 20), ("idle", -5, 20)];
            for (name, priority, granules) in tenants {
                let tenant = pool_a.tenant(name).priority(priority);
                let guarantee = if name == "idle" { 20 * G } else { 0 };
                let tenant = tenant.guarantee(guarantee).register().unwrap();
                let block = tenant.try_allocate(granules * G).unwrap();
                held.lock().unwrap().push((tenant, block));
            }
            let tenant = wants.tenant("wants").register().unwrap();
            if allowed {
                let got = allocate(&tenant, 30, LONG).unwrap();
                assert_eq!(*slept.lock().unwrap(), ["stubborn", "batch", "chat"]);
                drop(got);
            } else {
                allocate(&tenant, 30, ALL_STEPS).unwrap_err();
                assert_eq!(slept.lock().unwrap().len(), 0);
            }
            held.lock().unwrap().clear();
        }
    }
}

/// Each process waits for memory of the others, whose hooks had nothing when they were called first.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn memory_that_processes_could_give_only_later_ends_their_wait_for_each_other() {
    let rig = common::clean(host());
    let (dir, mapper) = (
        tempfile::tempdir().unwrap(),
        Mapper::start(&rig.device).unwrap(),
    );
    let processes = ["a", "b", "c"].map(|name| {
        let ledger = builder(&rig.device, &dir, name).open().unwrap();
        let pool = common::limited(&rig, 100)
            .mapper(&mapper)
            .ledger(&ledger)
            .build()
            .unwrap();
        let giving = giving(&pool, name, 0, &[]);
        (giving, pool, ledger)
    });
    let held = [34, 33, 33].map(|it| it * G).into_iter();
    let held = held
        .zip(&processes)
        .map(|(size, ((tenant, ..), ..))| tenant.try_allocate(size));
    let held: Vec<Block> = held.map(Result::unwrap).collect();
    let requests = processes
        .each_ref()
        .map(|((tenant, ..), ..)| Task::waiting(tenant.allocate_async(20 * G)));
    for ((_, _, calls), pool, _) in &processes[1..] {
        until(pool, "hooks are called for the first request", || {
            !calls.lock().unwrap().is_empty()
        });
    }
    for (held, ((_, kept, _), ..)) in held.into_iter().zip(&processes) {
        kept.lock().unwrap().push(held);
    }
    let _granted = requests.map(|request| request.finish().unwrap());
}
