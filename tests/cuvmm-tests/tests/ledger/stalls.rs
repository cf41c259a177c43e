//! Requests that wait for memory of other processes: for how long, behind which requests, and which
//! processes have the memory. The processes are members of one ledger in one process here, each with
//! a slot of its own.

use std::thread::{ScopedJoinHandle, scope};
use std::time::{Duration, Instant};

use crate::basics::directory;
use crate::common;
use crate::common::G;
use crate::common::executor::Task;
use cuvmm::ledger::{HolderStats, LedgerStats, ProcessStats};
use cuvmm::{Block, Device, Ledger, LedgerView, Limit, Mapper, Pool, Tenant};

/// Granules of the ledger.
const LIMIT: u64 = 64;

struct Member {
    pool: Pool,
    ledger: Ledger,
}

impl Member {
    fn join(device: &Device, dir: &tempfile::TempDir, name: &str) -> Self {
        let ledger = Ledger::builder(device, dir.path());
        let ledger = ledger.limit(LIMIT * G).name(name).open().unwrap();
        let pool = Pool::builder(device).limit(Limit::Bytes(LIMIT * G));
        let pool = pool.ledger(&ledger).build().unwrap();
        Self { pool, ledger }
    }

    /// Joins with a pool whose futures are served.
    fn with_mapper(device: &Device, dir: &tempfile::TempDir, name: &str) -> (Self, Mapper) {
        let ledger = Ledger::builder(device, dir.path());
        let ledger = ledger.limit(LIMIT * G).name(name).open().unwrap();
        let mapper = Mapper::start(device).unwrap();
        let pool = Pool::builder(device)
            .limit(Limit::Bytes(LIMIT * G))
            .mapper(&mapper);
        let pool = pool.ledger(&ledger).build().unwrap();
        (Self { pool, ledger }, mapper)
    }

    fn tenant(&self, name: &str) -> Tenant {
        self.pool.tenant(name).register().unwrap()
    }

    fn of(&self, stats: &LedgerStats) -> ProcessStats {
        let mut processes = stats.processes.iter();
        let own = processes.find(|it| it.slot == self.ledger.slot());
        own.unwrap().clone()
    }
}

/// Waits until the figures satisfy a condition, and returns them.
fn until(view: &LedgerView, what: &str, done: impl Fn(&LedgerStats) -> bool) -> LedgerStats {
    let begun = Instant::now();
    loop {
        let stats = view.stats();
        if done(&stats) {
            return stats;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "{what}: {stats:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn allocated(waiting: ScopedJoinHandle<'_, Block>) -> Block {
    waiting.join().unwrap()
}

fn waiting(tenant: &Tenant, granules: u64) -> Block {
    let wait = Duration::from_secs(120);
    tenant.block(granules * G).timeout(wait).allocate().unwrap()
}

const SOME: Duration = Duration::from_millis(20);

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn requests_that_wait_together_count_once_and_full_means_every_tenant() {
    let (device, dir) = (common::host().device.clone(), directory());
    let (one, other) = (
        Member::join(&device, &dir, "one"),
        Member::join(&device, &dir, "other"),
    );
    let view = LedgerView::open(one.ledger.path()).unwrap();
    let (a, b, c) = (one.tenant("a"), other.tenant("b"), other.tenant("c"));
    let held = a.try_allocate(60 * G).unwrap();
    let idle = other.tenant("idle");
    drop(idle.try_allocate(G).unwrap());
    let small = c.try_allocate(2 * G).unwrap();
    let begun = Instant::now();
    scope(|scope| {
        let first = scope.spawn(|| waiting(&b, 20));
        let stats = until(&view, "some", |it| other.of(it).stalled >= SOME);
        let process = other.of(&stats);
        assert_eq!(process.stalled_full, Duration::ZERO, "tenant c goes on");
        assert_eq!(stats.stalled_full, Duration::ZERO);
        // The same tenant again: it is no other time.
        let second = scope.spawn(|| waiting(&b, 20));
        until(&view, "both wait", |it| {
            other.of(it).waits.is_some_and(|waits| waits.lacks > 20 * G)
        });
        let third = scope.spawn(|| waiting(&c, 20));
        let stats = until(&view, "full", |it| other.of(it).stalled_full >= SOME);
        let process = other.of(&stats);
        assert!(process.stalled <= begun.elapsed(), "{:?}", process.stalled);
        assert!(process.stalled_full < process.stalled);
        assert!(stats.stalled >= SOME && stats.stalled <= begun.elapsed());
        assert_eq!(stats.stalled_full, Duration::ZERO, "tenant a goes on");
        assert_eq!(one.of(&stats).stalled, Duration::ZERO);
        let stats = until(&view, "averages", |it| {
            other.of(it).stalled_full_average.avg300 > 0.0 && it.stalled_average.avg300 > 0.0
        });
        let (process, ledger) = (other.of(&stats), stats.stalled_average);
        let [some, full] = [process.stalled_average, process.stalled_full_average];
        assert!(some.avg10 <= 100.0 && some.avg10 > some.avg60 && some.avg60 > some.avg300);
        assert!(full.avg10 <= some.avg10 && full.avg300 <= some.avg300);
        assert!(ledger.avg10 > 0.0 && ledger.avg10 <= 100.0);
        drop(held);
        drop([allocated(first), allocated(second), allocated(third)]);
    });
    drop(small);
    let stats = until(&view, "none waits", |it| other.of(it).waits_for.is_none());
    assert_eq!(other.of(&stats).waits, None);
    assert!(other.of(&stats).stalled <= begun.elapsed());
}

#[test]
fn futures_of_every_tenant_that_wait_are_a_full_stall() {
    let (device, dir) = (common::host().device.clone(), directory());
    let one = Member::join(&device, &dir, "one");
    let (other, _mapper) = Member::with_mapper(&device, &dir, "other");
    let view = LedgerView::open(one.ledger.path()).unwrap();
    let (a, b, c) = (one.tenant("a"), other.tenant("b"), other.tenant("c"));
    let held = a.try_allocate(60 * G).unwrap();
    let small = c.try_allocate(2 * G).unwrap();
    let first = Task::waiting(b.block(20 * G).allocate_async());
    let stats = until(&view, "some", |it| other.of(it).stalled >= SOME);
    assert_eq!(
        other.of(&stats).stalled_full,
        Duration::ZERO,
        "tenant c goes on"
    );
    let second = Task::waiting(c.block(30 * G).allocate_async());
    until(&view, "full", |it| other.of(it).stalled_full >= SOME);
    let stats = until(&view, "the larger request", |it| {
        other.of(it).waits.is_some_and(|waits| waits.lacks > 20 * G)
    });
    assert_eq!(stats.stalled_full, Duration::ZERO, "tenant a goes on");
    drop((first, second));
    until(&view, "none waits", |it| other.of(it).waits.is_none());
    drop((held, small));
}

#[test]
fn the_ledger_is_stalled_in_full_while_every_process_is() {
    let (device, dir) = (common::host().device.clone(), directory());
    let members = [
        Member::join(&device, &dir, "one"),
        Member::join(&device, &dir, "other"),
        // It has no memory.
        Member::join(&device, &dir, "idle"),
    ];
    let [one, other, _] = &members;
    let view = LedgerView::open(one.ledger.path()).unwrap();
    let (a, b) = (one.tenant("a"), other.tenant("b"));
    let (held, more) = (
        a.try_allocate(30 * G).unwrap(),
        b.try_allocate(30 * G).unwrap(),
    );
    scope(|scope| {
        let first = scope.spawn(|| waiting(&a, 20));
        until(&view, "a waits", |it| one.of(it).stalled_full >= SOME);
        assert_eq!(view.stats().stalled_full, Duration::ZERO);
        let second = scope.spawn(|| waiting(&b, 10));
        let stats = until(&view, "both wait", |it| it.stalled_full >= SOME);
        assert!(stats.stalled > stats.stalled_full);
        let sum = one.of(&stats).stalled + other.of(&stats).stalled;
        assert!(stats.stalled < sum, "they waited together: {stats:?}");
        drop((held, more));
        drop([allocated(first), allocated(second)]);
    });
}

#[test]
fn a_waiting_process_says_behind_which_requests_and_who_has_the_memory() {
    let (device, dir) = (common::host().device.clone(), directory());
    let names = ["most", "less", "first", "second"];
    let members = names.map(|name| Member::join(&device, &dir, name));
    let [most, less, first, second] = &members;
    let view = LedgerView::open(most.ledger.path()).unwrap();
    let (a, b) = (most.tenant("a"), less.tenant("b"));
    most.ledger.set_guarantee(10 * G).unwrap();
    let held = [
        a.try_allocate(42 * G).unwrap(),
        b.try_allocate(22 * G).unwrap(),
    ];
    let (c, d) = (first.tenant("c"), second.tenant("d"));
    scope(|scope| {
        let c = scope.spawn(|| waiting(&c, 5));
        until(&view, "the first", |it| first.of(it).waits.is_some());
        let d = scope.spawn(|| waiting(&d, 7));
        let stats = until(&view, "the second", |it| second.of(it).waits.is_some());
        let waits = [first, second].map(|it| it.of(&stats).waits.unwrap());
        assert_eq!((waits[0].lacks, waits[1].lacks), (5 * G, 7 * G));
        assert!(waits[0].behind.is_empty());
        assert_eq!(waits[1].behind, [first.ledger.slot()]);
        for waits in &waits {
            let holders = waits
                .holders
                .iter()
                .map(|it: &HolderStats| (it.slot, it.above / G));
            let expected = [(most.ledger.slot(), 32), (less.ledger.slot(), 22)];
            assert_eq!(holders.collect::<Vec<_>>(), expected);
        }
        let earlier = waits[1].waited;
        until(&view, "it waits on", |it| {
            second
                .of(it)
                .waits
                .is_some_and(|waits| waits.waited > earlier)
        });
        drop(held);
        drop([allocated(c), allocated(d)]);
    });
}
