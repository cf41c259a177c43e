//! Pools that share one budget through a ledger. The pools are in one process here, each with a
//! slot of its own, as processes have; `ledger_processes.rs` has several processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{G, nth_of, wait_until};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{ArgumentError, BlockError, LedgerError, LedgerRefusal, PoolError};
use cuvmm::{Device, Growth, Ledger, LedgerView, Limit, Mapper, Pool, Stream};

/// Half of the smallest ledger here, in granules.
const HALF: u64 = 32;

pub fn directory() -> tempfile::TempDir {
    let memory = std::path::Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

/// A ledger and a pool that uses it, as another process would have them.
struct Process {
    ledger: Ledger,
    pool: Pool,
}

fn process(device: &Device, dir: &tempfile::TempDir, limit: u64, name: &str) -> Process {
    let ledger = Ledger::builder(device, dir.path());
    let ledger = ledger.limit(limit * G).name(name).open().unwrap();
    let pool = Pool::builder(device).limit(Limit::Bytes(limit * G));
    let pool = pool.ledger(&ledger).build().unwrap();
    Process { ledger, pool }
}

impl Process {
    fn charged(&self) -> u64 {
        let stats = self.ledger.stats();
        let mut own = stats.processes.iter();
        own.find(|it| it.slot == self.ledger.slot())
            .unwrap()
            .charged
            / G
    }

    fn obtained(&self) -> u64 {
        let stats = self.ledger.stats();
        let mut own = stats.processes.iter();
        own.find(|it| it.slot == self.ledger.slot())
            .unwrap()
            .obtained
            / G
    }
}

fn refused(outcome: Result<cuvmm::Block, BlockError>) -> (LedgerRefusal, u64) {
    match outcome.unwrap_err() {
        BlockError::OutOfMemory(shortage) => {
            assert_eq!(
                shortage.memory_set_by, None,
                "the ledger's limit is what is reached"
            );
            (shortage.ledger.unwrap().reason, shortage.available / G)
        }
        other => panic!("{other}"),
    }
}

on_both! {
    // A row of the bench compares such a request with these calls by hand.
    fn idle_memory_of_another_process_is_unmapped_released_and_created_once(rig) {
        let dir = directory();
        let processes = ["a", "b"].map(|name| {
            let ledger = Ledger::builder(&rig.device, dir.path()).limit(64 * G);
            let ledger = ledger.name(name).open().unwrap();
            let pool = common::limited(rig, 64).largest_extent(16 * G).ledger(&ledger).build().unwrap();
            let tenant = pool.tenant("t").register().unwrap();
            (ledger, pool, tenant)
        });
        let allocate = |which: usize| {
            let block = processes[which].2.block(64 * G);
            block.timeout(Duration::from_secs(60)).allocate().unwrap()
        };
        // Both have addresses from here on.
        drop(allocate(0));
        drop(allocate(1));
        rig.faults.forget();
        let block = allocate(0);
        let calls = rig.faults.calls();
        let changes = [
            Call::MemAddressReserve,
            Call::MemAddressFree,
            Call::MemCreate,
            Call::MemRelease,
            Call::MemMap,
            Call::MemUnmap,
            Call::MemSetAccess,
        ];
        let calls: Vec<Call> = calls.into_iter().filter(|it| changes.contains(it)).collect();
        let mut expected = vec![Call::MemUnmap; 4];
        expected.extend([Call::MemRelease; 4]);
        expected.extend([Call::MemCreate; 4]);
        expected.extend([Call::MemMap, Call::MemSetAccess].repeat(4));
        assert_eq!(calls, expected);
        drop(block);
    }

    fn a_region_in_a_tenant_is_bound_by_the_ledger(rig) {
        let dir = directory();
        let (one, other) = (
            process(&rig.device, &dir, 100, "one"),
            process(&rig.device, &dir, 100, "other"),
        );
        let (a, b) = (
            one.pool.tenant("a").register().unwrap(),
            other.pool.tenant("b").register().unwrap(),
        );
        let mut region = common::committed(a.region(100 * G).largest_extent(G), 60 * G);
        assert_eq!((one.charged(), one.obtained()), (60, 60));
        let (reason, available) = refused(b.try_allocate(41 * G));
        assert_eq!((reason, available), (LedgerRefusal::Full, 40));
        let rest = b.try_allocate(40 * G).unwrap();
        let error = region.commit(0..61 * G).unwrap_err();
        assert_eq!(error.shortage().unwrap().ledger.unwrap().reason, LedgerRefusal::Full);
        region.decommit_after(0..60 * G, &[]).unwrap();
        one.pool.trim(0).unwrap();
        wait_until("withdrawn memory goes back to the ledger", || one.charged() == 0);
        drop((rest, region));
    }

    // I-73
    fn pools_of_two_processes_have_one_budget(rig) {
        let dir = directory();
        let (one, other) = (
            process(&rig.device, &dir, 100, "one"),
            process(&rig.device, &dir, 100, "other"),
        );
        let (a, b) = (
            one.pool.tenant("a").register().unwrap(),
            other.pool.tenant("b").register().unwrap(),
        );
        let held = a.try_allocate(60 * G).unwrap();
        assert_eq!((one.charged(), one.obtained()), (60, 60));
        let (reason, available) = refused(b.try_allocate(41 * G));
        assert_eq!((reason, available), (LedgerRefusal::Full, 40));
        assert_eq!((other.obtained(), rig.machine.live().physical_bytes), (0, 60 * G));
        let rest = b.try_allocate(40 * G).unwrap();
        let error = b.try_allocate(G).unwrap_err();
        assert!(error.is_out_of_memory() && error.is_shortage());
        assert!(error.to_string().contains("the ledger leaves 0 B of"), "{error}");
        assert_eq!(rig.machine.live().physical_bytes, 100 * G);
        // Cached memory stays charged to its process until it is given back.
        drop(rest);
        let (_, available) = refused(a.try_allocate(G));
        assert_eq!(available, 0);
        other.pool.trim(0).unwrap();
        wait_until("an idle process refunds what it does not need", || other.charged() == 0);
        let more = a.try_allocate(40 * G).unwrap();
        drop((held, more));
    }

    fn pools_that_need_little_take_little_of_a_small_ledger(rig) {
        let dir = directory();
        let all = ["a", "b", "c", "d"].map(|name| process(&rig.device, &dir, 128, name));
        let needs = all.each_ref().map(|it| it.pool.tenant("a").register().unwrap());
        let held = needs.each_ref().map(|tenant| tenant.try_allocate(G).unwrap());
        assert_eq!(all.each_ref().map(Process::charged), [8; 4], "a 16th each");
        // A small pool takes a 16th of its own limit.
        let small = Pool::builder(&rig.device).limit(Limit::Bytes(32 * G));
        let small = small.ledger(&all[3].ledger).build().unwrap();
        let tenant = small.tenant("small").register().unwrap();
        let block = tenant.try_allocate(G).unwrap();
        assert_eq!(all[3].charged(), 10);
        // Pools of a process with a limit take a 16th of that.
        let own = Ledger::builder(&rig.device, dir.path()).process_limit(16 * G).open().unwrap();
        let pools = [(); 4].map(|()| Pool::builder(&rig.device).ledger(&own).build().unwrap());
        let tenants = pools.each_ref().map(|it| it.tenant("a").register().unwrap());
        let blocks = tenants.each_ref().map(|it| it.try_allocate(3 * G).unwrap());
        let rest = needs[0].try_allocate(82 * G).unwrap();
        drop((held, rest, block, tenant, small, blocks, tenants, pools));
    }

    fn a_tenant_at_its_own_limit_takes_nothing_from_others(rig) {
        let dir = directory();
        let one = process(&rig.device, &dir, 100, "one");
        let tenant = one.pool.tenant("a").limit(HALF * G).register().unwrap();
        let held = tenant.try_allocate(HALF * G).unwrap();
        assert!(tenant.try_allocate(4 * G).is_err());
        assert_eq!(one.charged(), HALF);
        drop(held);
    }

    fn a_pool_that_fails_to_create_memory_gives_its_charge_back(rig) {
        let dir = directory();
        let one = process(&rig.device, &dir, 100, "one");
        let tenant = one.pool.tenant("a").register().unwrap();
        rig.faults.arm(nth_of(2, CUresult::CUDA_ERROR_OUT_OF_MEMORY, &[Call::MemCreate]));
        let outcome = tenant.block(12 * G).largest_extent(4 * G).try_allocate();
        assert!(outcome.is_err());
        rig.faults.disarm();
        assert_eq!((one.obtained(), rig.machine.live().physical_bytes), (0, 0));
        let block = tenant.try_allocate(12 * G).unwrap();
        assert_eq!(one.obtained(), 12);
        drop(block);
        one.pool.trim(0).unwrap();
        assert_eq!(one.obtained(), 0);
    }

    fn guarantees_of_tenants_are_guaranteed_by_the_ledger(rig) {
        let dir = directory();
        let (one, other) = (
            process(&rig.device, &dir, 100, "one"),
            process(&rig.device, &dir, 100, "other"),
        );
        let a = one.pool.tenant("a").guarantee(50 * G).register().unwrap();
        let b = one.pool.tenant("b").guarantee(20 * G).register().unwrap();
        assert_eq!(one.charged(), 70);
        let refused = other.pool.tenant("c").guarantee(31 * G).register().unwrap_err();
        assert!(matches!(
            refused,
            PoolError::Ledger(short) if (short.wanted, short.left) == (31 * G, 30 * G)
        ), "{refused}");
        let c = other.pool.tenant("c").guarantee(30 * G).register().unwrap();
        assert!(matches!(a.set_guarantee(51 * G), Err(PoolError::Ledger(_))));
        let all = a.try_allocate(70 * G).unwrap_err();
        assert!(matches!(all, BlockError::OutOfMemory(_)), "b's are kept by the pool: {all}");
        let (x, y) = (a.try_allocate(50 * G).unwrap(), b.try_allocate(20 * G).unwrap());
        let z = c.try_allocate(30 * G).unwrap();
        drop((x, y));
        a.set_guarantee(10 * G).unwrap();
        b.unregister();
        one.pool.trim(0).unwrap();
        wait_until("what is not guaranteed any more is refunded", || one.charged() == 10);
        drop(z);
    }

    fn a_process_that_joins_may_wait_for_its_guarantee(rig) {
        let dir = directory();
        let one = process(&rig.device, &dir, 100, "one");
        let tenant = one.pool.tenant("tenant").register().unwrap();
        drop(tenant.allocate(90 * G).unwrap());
        let second = || Ledger::builder(&rig.device, dir.path()).guarantee(60 * G);
        let refused = second().open().unwrap_err();
        assert!(matches!(refused, LedgerError::Short(short) if short.wanted == 60 * G));
        assert_eq!(one.obtained(), 90, "a request that does not wait takes nothing");
        let short = Duration::from_millis(20);
        let in_use = tenant.allocate(90 * G).unwrap();
        let refused = second().timeout(short).open().unwrap_err();
        assert!(matches!(refused, LedgerError::Short(_)), "memory in use stays");
        drop(in_use);
        let other = second().timeout(Duration::from_secs(60)).open().unwrap();
        wait_until("the refused processes have left", || other.stats().processes.len() == 2);
        let stats = other.stats();
        let own = stats.processes.iter().find(|it| it.slot == other.slot());
        assert_eq!(own.unwrap().guarantee, 60 * G);
        assert!(one.charged() <= 40);
        assert!(stats.processes.iter().all(|it| it.waits_for.is_none()));
        // The ledger's thread may still be giving: closing waits for it.
        drop(tenant);
        one.pool.close().unwrap();
    }

    fn a_request_waits_for_memory_that_another_process_has_idle(rig) {
        let dir = directory();
        let (one, other) = (
            process(&rig.device, &dir, 100, "one"),
            process(&rig.device, &dir, 100, "other"),
        );
        let a = one.pool.tenant("a").guarantee(10 * G).register().unwrap();
        let b = other.pool.tenant("b").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let used = a.allocate_on(&stream, 20 * G).unwrap();
        drop(a.allocate_on(&stream, 70 * G).unwrap());
        assert_eq!(one.obtained(), 90);
        // A request that does not wait takes nothing from other processes.
        assert_eq!(refused(b.try_allocate(50 * G)).0, LedgerRefusal::Full);
        assert_eq!(one.obtained(), 90);
        let block = b.block(50 * G).timeout(Duration::from_secs(20)).allocate().unwrap();
        assert!(one.obtained() <= 50, "{}", one.obtained());
        // In use, and not given.
        let waited = b.block(40 * G).timeout(Duration::from_millis(200)).allocate();
        assert_eq!(refused(waited).0, LedgerRefusal::Full);
        assert!(one.obtained() >= 20);
        let stats = other.ledger.stats();
        let own = &stats.processes[other.ledger.slot()];
        assert_eq!(own.waits_for, None);
        // From when it stood in line, a moment after it began.
        assert!(own.stalled >= Duration::from_millis(50), "{:?}", own.stalled);
        drop((used, block));
    }

    fn two_processes_that_wait_for_each_other_both_go_on(rig) {
        let dir = directory();
        let (one, other) = (
            process(&rig.device, &dir, 64, "one"),
            process(&rig.device, &dir, 64, "other"),
        );
        let a = one.pool.tenant("a").register().unwrap();
        let b = other.pool.tenant("b").register().unwrap();
        std::thread::scope(|scope| {
            for tenant in [&a, &b] {
                scope.spawn(|| {
                    for size in [40, 64, 10, 50].repeat(5) {
                        let block = tenant.block(size * G).timeout(Duration::from_secs(20));
                        drop(block.allocate().unwrap());
                    }
                });
            }
        });
        assert!(rig.machine.live().physical_bytes <= 64 * G);
        let used = rig.machine.live().physical_bytes / G;
        assert_eq!(one.obtained() + other.obtained(), used);
    }

    fn a_request_that_no_other_process_can_meet_holds_up_none(rig) {
        let dir = directory();
        let one = process(&rig.device, &dir, 100, "one");
        let limited = Ledger::builder(&rig.device, dir.path()).process_limit(10 * G);
        let limited = limited.name("limited").open().unwrap();
        // Its own limit is that of the device.
        let pool = Pool::builder(&rig.device).ledger(&limited).build().unwrap();
        let (a, b) = (
            one.pool.tenant("a").register().unwrap(),
            pool.tenant("b").register().unwrap(),
        );
        drop(a.try_allocate(60 * G).unwrap());
        let held = b.try_allocate(8 * G).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                b.block(5 * G).timeout(Duration::from_millis(300)).allocate()
            });
            std::thread::sleep(Duration::from_millis(100));
            let next = a.try_allocate(70 * G);
            assert!(next.is_ok(), "{}", next.unwrap_err());
            assert!(one.obtained() >= 70, "nothing was given for what cannot be granted");
            assert_eq!(refused(waits.join().unwrap()).0, LedgerRefusal::ProcessLimit);
        });
        // More than the ledger's limit will never be there.
        let begun = Instant::now();
        let never = a.block(101 * G).timeout(Duration::from_secs(60)).allocate();
        assert!(never.is_err());
        let wide = Pool::builder(&rig.device).ledger(&one.ledger).build().unwrap();
        let c = wide.tenant("c").register().unwrap();
        let never = c.block(101 * G).timeout(Duration::from_secs(60)).allocate();
        assert_eq!(refused(never).0, LedgerRefusal::Full);
        let ledger = Ledger::builder(&rig.device, dir.path()).guarantee(101 * G);
        let never = ledger.timeout(Duration::from_secs(60)).open().unwrap_err();
        assert!(matches!(never, LedgerError::Argument(_)), "{never}");
        assert!(begun.elapsed() < Duration::from_secs(30));
        drop(held);
    }

    fn memory_promised_to_another_tenant_is_waited_for_in_the_ledger(rig) {
        let dir = directory();
        let (one, other) = (
            process(&rig.device, &dir, 120, "one"),
            process(&rig.device, &dir, 120, "other"),
        );
        let a = one.pool.tenant("a").register().unwrap();
        let c = other.pool.tenant("c").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        drop(a.allocate_on(&stream, 60 * G).unwrap());
        drop(c.try_allocate(60 * G).unwrap());
        // What A has idle is promised to B. Only the ledger can give A's block other memory.
        let b = one.pool.tenant("b").guarantee(50 * G).register().unwrap();
        let block = a.block(60 * G).home_stream(&stream).timeout(Duration::from_secs(10)).allocate();
        drop((block.unwrap(), b));
    }

    fn pools_of_one_process_give_each_other_memory(rig) {
        let dir = directory();
        let one = process(&rig.device, &dir, 64, "one");
        let second = Pool::builder(&rig.device).ledger(&one.ledger).build().unwrap();
        let (a, b) = (
            one.pool.tenant("a").register().unwrap(),
            second.tenant("b").register().unwrap(),
        );
        drop(a.try_allocate(60 * G).unwrap());
        assert_eq!(refused(b.try_allocate(40 * G)).0, LedgerRefusal::Full);
        let block = b.block(40 * G).timeout(Duration::from_secs(10)).allocate().unwrap();
        drop(block);
    }

    fn a_compaction_gets_memory_for_its_copies(rig) {
        let dir = directory();
        let ledger = Ledger::builder(&rig.device, dir.path()).limit(64 * G).open().unwrap();
        let pool = Pool::builder(&rig.device).growth(Growth::Exact).largest_extent(8 * G);
        let (pool, tenant) = common::with_tenant(pool.ledger(&ledger).build().unwrap());
        let mut block = tenant.block(G).capacity(HALF * G).try_allocate().unwrap();
        for granules in 2..=HALF {
            block.try_grow_to(granules * G).unwrap();
        }
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.no_space, done.copied), (0, HALF * G), "{done:?}");
        drop(block);
    }

    fn a_future_waits_for_memory_of_another_process(rig) {
        let dir = directory();
        let one = process(&rig.device, &dir, 64, "one");
        let ledger = Ledger::builder(&rig.device, dir.path()).name("other").open().unwrap();
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = common::limited(rig, 64).mapper(&mapper);
        let pool = pool.ledger(&ledger).build().unwrap();
        let (a, b) = (
            one.pool.tenant("a").register().unwrap(),
            pool.tenant("b").register().unwrap(),
        );
        drop(a.try_allocate(60 * G).unwrap());
        let block = common::executor::block_on(b.block(40 * G).allocate_async()).unwrap();
        assert_eq!(block.size(), 40 * G);
        let slot = ledger.slot();
        wait_until("no request waits any more", || ledger.stats().processes[slot].waits_for.is_none());
    }

    fn a_process_leaves_when_its_pool_and_its_ledger_are_gone(rig) {
        let dir = directory();
        let one = process(&rig.device, &dir, 64, "one");
        let view = LedgerView::open(one.ledger.path()).unwrap();
        let tenant = one.pool.tenant("a").register().unwrap();
        let Process { ledger, pool } = one;
        drop(ledger);
        let block = tenant.try_allocate(8 * G).unwrap();
        assert_eq!(view.stats().charged, 8 * G);
        drop((block, tenant));
        pool.close().unwrap();
        wait_until("the slot is free", || view.stats().processes.is_empty());
        assert_eq!((view.stats().charged, view.stats().limit), (0, 64 * G));
    }
}

#[test]
fn what_cannot_be_given_back_stays_charged() {
    let rig = common::model();
    let dir = directory();
    let one = process(&rig.device, &dir, 64, "one");
    let view = LedgerView::open(one.ledger.path()).unwrap();
    let tenant = one.pool.tenant("a").register().unwrap();
    drop(tenant.try_allocate(8 * G).unwrap());
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemRelease));
    assert_eq!(one.pool.trim(0).unwrap(), 0);
    assert_eq!(one.obtained(), 8);
    drop(tenant);
    drop(one);
    // The thread of the ledger sees that this was the last handle.
    wait_until("what is not needed is refunded", || {
        view.stats().charged <= 8 * G
    });
    assert!(
        view.stats().charged >= 8 * G,
        "the driver has not got it back for sure"
    );
    rig.faults.disarm();
}

#[test]
fn a_pool_that_could_not_be_closed_still_gives_memory_to_others() {
    let rig = common::model();
    let dir = directory();
    let one = process(&rig.device, &dir, 64, "one");
    let other = process(&rig.device, &dir, 64, "other");
    let tenant = one.pool.tenant("a").register().unwrap();
    drop(tenant.try_allocate(8 * G).unwrap());
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
    drop(tenant);
    let kept = one.pool.close().unwrap_err();
    rig.faults.disarm();
    let tenant = kept.owner.tenant("b").register().unwrap();
    drop(tenant.try_allocate(40 * G).unwrap());
    let b = other.pool.tenant("b").register().unwrap();
    let block = b.block(50 * G).timeout(Duration::from_secs(10)).allocate();
    assert_eq!(block.unwrap().size(), 50 * G);
}

#[test]
fn a_ledger_is_of_one_device_and_its_values_are_checked() {
    let rig = common::model();
    let dir = directory();
    let builder = || Ledger::builder(&rig.device, dir.path());
    let bad = |outcome: Result<Ledger, LedgerError>| match outcome.map(drop).unwrap_err() {
        LedgerError::Argument(error) => error,
        other => panic!("{other}"),
    };
    assert!(matches!(
        bad(builder().limit(0).open()),
        ArgumentError::TooSmall { .. }
    ));
    assert!(matches!(
        bad(builder().guarantee(u64::MAX).open()),
        ArgumentError::TooLarge { .. }
    ));
    assert!(matches!(
        bad(builder().guarantee(4 * G).process_limit(2 * G).open()),
        ArgumentError::TooSmall { .. }
    ));
    assert!(matches!(
        bad(builder().process_limit(0).open()),
        ArgumentError::TooSmall { .. }
    ));
    assert!(
        std::fs::read_dir(dir.path()).unwrap().next().is_none(),
        "no file was made"
    );
    let ledger = builder().open().unwrap();
    assert_eq!(ledger.stats().limit, rig.device.total_memory());
    let second = rig.second();
    let wrong = Pool::builder(&second).ledger(&ledger).build().unwrap_err();
    assert_eq!(
        wrong,
        PoolError::Argument(ArgumentError::WrongDevice("the ledger"))
    );
    let missing = Ledger::builder(&rig.device, dir.path().join("a/b"))
        .open()
        .unwrap_err();
    assert!(
        matches!(missing, LedgerError::System { call: "mkdir", .. }),
        "{missing}"
    );
    assert!(LedgerView::open(dir.path().join("none")).is_err());
}

#[test]
fn a_name_is_one_that_commands_can_show_and_take() {
    let (device, dir) = (common::host().device.clone(), directory());
    for (name, why) in [
        ("", "it is empty"),
        ("1234", "it is a number"),
        ("x\ny", "it has control characters"),
        ("x\u{9b}2J", "it has control characters"),
    ] {
        let refused = Ledger::builder(&device, dir.path()).name(name).open();
        let refused = refused.unwrap_err();
        assert!(matches!(refused, LedgerError::Name { .. }), "{refused}");
        assert!(refused.to_string().contains(why), "{refused}");
    }
    assert!(
        std::fs::read_dir(dir.path()).unwrap().next().is_none(),
        "no file was made"
    );
    for name in ["meta-llama/Llama-3", "7B", "größe 2", "a@1"] {
        let ledger = Ledger::builder(&device, dir.path())
            .name(name)
            .open()
            .unwrap();
        assert_eq!(ledger.stats().processes[0].name, name);
    }
}

/// Processes in slices of a GPU (vGPU) see a part of its memory, under the UUID of the whole.
#[test]
fn a_limit_above_the_memory_that_a_process_sees_is_refused_with_both() {
    let dir = directory();
    let sees = |granules: u64| {
        let options = HostOptions::new().capacity(granules * G);
        Device::open(Arc::new(HostDriver::new(options)), 0).unwrap()
    };
    let (slice, whole) = (sees(20), sees(40));
    let refused = |limit: Option<u64>| {
        let builder = Ledger::builder(&slice, dir.path());
        let builder = match limit {
            Some(granules) => builder.limit(granules * G),
            None => builder,
        };
        match builder.open().unwrap_err() {
            error @ LedgerError::BeyondView { .. } => {
                assert!(
                    error
                        .to_string()
                        .ends_with("`HostOptions::capacity` sets the device's memory")
                );
                let LedgerError::BeyondView {
                    path, limit, view, ..
                } = error
                else {
                    unreachable!()
                };
                assert!(path.starts_with(dir.path()), "{path:?}");
                (limit / G, view / G)
            }
            other => panic!("{other}"),
        }
    };
    assert_eq!(refused(Some(30)), (30, 20));
    let ledger = Ledger::builder(&whole, dir.path()).open().unwrap();
    assert_eq!(refused(None), (40, 20), "the limit is agreed already");
    assert_eq!(ledger.stats().processes.len(), 1);
    drop(ledger);
    let ledger = Ledger::builder(&slice, dir.path()).open().unwrap();
    assert_eq!(ledger.stats().limit, 20 * G);
    drop(Ledger::builder(&whole, dir.path()).open().unwrap());
}

#[test]
fn the_group_can_use_a_directory_that_is_made_for_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let (device, dir) = (common::host().device.clone(), directory());
    for (group, mode) in [(true, 0o770), (false, 0o700)] {
        let path = dir.path().join(mode.to_string());
        let ledger = Ledger::builder(&device, &path).group(group).open().unwrap();
        let found = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
        // The process's umask takes writing from the group, as a rule.
        assert_eq!((found(&path), found(ledger.path())), (mode, mode & 0o666));
        let entries = std::fs::read_dir(&path).unwrap();
        let mut paths = entries.map(|entry| entry.unwrap().path());
        let socket = paths.find(|it| it.extension().is_some_and(|it| it == "control"));
        assert_eq!(found(&socket.unwrap()), mode & 0o666);
    }
}
