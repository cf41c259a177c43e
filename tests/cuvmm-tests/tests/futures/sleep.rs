//! Sleeping and waking as futures: each operation has a thread of its own, and ends when its future
//! is dropped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::books::books;
use crate::common::executor::{Task, block_on};
use crate::common::{D0, G, busy, nth_of, until};
use crate::on_both;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{ArgumentError, SleepError};
use cuvmm::sleep::Progress;
use cuvmm::{Contents, HostStore, Pool};

on_both! {
    fn blocks_sleep_and_wake_beside_the_one_who_polls(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let block = tenant.block(9 * G).tag("w").try_allocate().unwrap();
        let other = tenant.try_allocate(G).unwrap();
        block.write(3 * G, b"kept").unwrap();
        let store = HostStore::builder(&rig.device).ordinary(9 * G).build().unwrap();
        let calls = rig.device.calls().total();
        let sleeping = tenant.blocks().tag("w").sleep_async(Contents::Keep(&store));
        assert_eq!(rig.device.calls().total(), calls, "the operation begins with the first poll");
        let slept = block_on(sleeping).unwrap();
        assert_eq!((slept.blocks, slept.kept), (1, 9 * G));
        assert!(block.is_asleep() && !other.is_asleep());
        assert_eq!(books(rig, &pool).in_use, G);
        let woken = block_on(tenant.blocks().wake_async()).unwrap();
        assert_eq!((woken.blocks, woken.restored), (1, 9 * G));
        let mut bytes = [0; 4];
        block.read(3 * G, &mut bytes).unwrap();
        assert!(&bytes == b"kept" || !rig.keeps_bytes());
        assert_eq!(store.free(), store.capacity());
    }

    fn what_was_dropped_is_as_it_was(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let block = tenant.try_allocate(9 * G).unwrap();
        let store = HostStore::builder(&rig.device).ordinary(9 * G).build().unwrap();
        // It was not polled, so nothing has begun.
        drop(tenant.blocks().sleep_async(Contents::Discard));
        // It waits for a lease, far longer than the test may take.
        let lease = block.lease();
        let far = Duration::from_secs(3600);
        let begun = Instant::now();
        drop(Task::waiting(tenant.blocks().timeout(far).sleep_async(Contents::Keep(&store))));
        drop(lease);
        tenant.blocks().timeout(far).sleep(Contents::Discard).unwrap();
        // Or for memory.
        let hog = pool.tenant("b").register().unwrap();
        let held = hog.try_allocate(16 * G).unwrap();
        drop(Task::waiting(tenant.blocks().timeout(far).wake_async()));
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
        until(&pool, "canceled", || {
            let stats = pool.stats();
            stats.in_use == 0 && stats.asleep == 9 * G
        });
        // The thread may have begun only now, and undoes its work.
        until(&pool, "woken", || match tenant.blocks().timeout(far).wake() {
            Err(SleepError::Busy { .. }) => false,
            woken => woken.unwrap().blocks == 1,
        });
        assert!(begun.elapsed() < far / 2 && !block.is_asleep());
        drop(tenant);
        drop(hog);
        drop(block);
        close(pool);
    }

    fn the_watcher_is_called_in_polls_and_ends_it(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let blocks: Vec<_> = (0..8).map(|_| tenant.try_allocate(2 * G).unwrap()).collect();
        let (here, calls) = (std::thread::current().id(), AtomicU64::new(0));
        let watch = |progress: &Progress| {
            assert_eq!(std::thread::current().id(), here);
            assert!(progress.done <= progress.total && progress.total == 16 * G);
            calls.fetch_add(1, Ordering::SeqCst);
            true
        };
        block_on(tenant.blocks().on_progress(&watch).sleep_async(Contents::Discard)).unwrap();
        block_on(tenant.blocks().on_progress(&watch).wake_async()).unwrap();
        assert!(blocks.iter().all(|block| !block.is_asleep()));
        // The operation may be complete before its progress is polled.
        assert!(calls.load(Ordering::SeqCst) <= 16);
        // A callback that panics does so in the thread that polls.
        let stop = |_: &Progress| -> bool { panic!("a mistake") };
        let store = HostStore::builder(&rig.device).ordinary(16 * G).build().unwrap();
        let stopped = catch_unwind(AssertUnwindSafe(|| {
            block_on(tenant.blocks().on_progress(&stop).sleep_async(Contents::Keep(&store)))
        }));
        // The callback may never be called. If it panicked, the thread has undone everything by its
        // end, unless everything was done already.
        drop(tenant);
        let pool = ended(pool, blocks.len() as u64);
        let asleep = pool.stats().asleep;
        assert!(asleep == 16 * G || stopped.is_err() && asleep == 0, "{asleep}");
        drop(blocks);
        close(pool);
    }

    fn failures_are_the_answer(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 16);
        let block = tenant.allocate_on(&stream, 2 * G).unwrap();
        busy(rig, &stream, &block, 7);
        let refused = block_on(tenant.blocks().sleep_async(Contents::Discard)).unwrap_err();
        assert!(matches!(refused, SleepError::Busy { blocks: 1, .. }), "{refused}");
        rig.machine.release_stream(D0, stream.as_raw());
        let second = rig.second();
        let elsewhere = HostStore::builder(&second).ordinary(2 * G).build().unwrap();
        let refused = block_on(tenant.blocks().sleep_async(Contents::Keep(&elsewhere))).unwrap_err();
        assert!(matches!(refused, SleepError::Argument(ArgumentError::WrongDevice { .. })), "{refused}");
        rig.faults.arm(nth_of(1, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemUnmap]));
        block_on(tenant.blocks().sleep_async(Contents::Discard)).unwrap_err();
        assert!(!block.is_asleep());
        block_on(tenant.blocks().timeout(Duration::from_secs(100)).sleep_async(Contents::Discard)).unwrap();
        rig.faults.arm(nth_of(1, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemMap]));
        block_on(tenant.blocks().wake_async()).unwrap_err();
        assert!(block.is_asleep());
        block_on(tenant.blocks().wake_async()).unwrap();
    }
}

/// Waits until no thread of a future holds a tenant of the pool, and checks the number of remaining
/// blocks.
fn ended(pool: Pool, blocks: u64) -> Pool {
    until(&pool, "ended", || {
        let stats = pool.stats();
        let live: u64 = stats.tenants.iter().map(|it| it.blocks).sum();
        let drains = stats.tenants.iter().all(|it| it.draining && it.leases == 0);
        live == blocks && drains
    });
    pool
}

/// Closes a pool as soon as no thread of a future uses it.
fn close(mut pool: Pool) {
    let begun = Instant::now();
    while let Err(refused) = pool.close() {
        assert!(begun.elapsed().as_secs() < 120, "{refused}");
        pool = refused.owner;
        std::thread::sleep(Duration::from_micros(50));
    }
}

#[test]
fn a_panic_of_the_operation_is_that_of_the_poll() {
    let rig = common::clean(common::host());
    let (pool, tenant) = common::tenancy(&rig, 4);
    let block = tenant.try_allocate(3 * G).unwrap();
    tenant.blocks().sleep(Contents::Discard).unwrap();
    let hog = pool
        .tenant("b")
        .on_pressure(|_| panic!("a mistake in a hook"));
    let hog = hog.register().unwrap();
    let held = hog.try_allocate(3 * G).unwrap();
    let mut waking = Task::new(tenant.blocks().wake_async());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        while waking.poll().is_pending() {
            assert!(waking.is_woken(Duration::from_secs(120)));
        }
    }));
    assert!(panicked.is_err() && block.is_asleep());
    assert!(
        matches!(waking.poll(), Poll::Pending),
        "the thread has ended"
    );
    drop(held);
    block_on(tenant.blocks().wake_async()).unwrap();
    drop(waking);
    drop((block, tenant, hog));
    pool.close().unwrap();
}

#[test]
fn sleepers_can_be_sent() {
    fn sends<T: Send>(future: T) -> T {
        future
    }
    let rig = common::host();
    let (_pool, tenant) = common::tenancy(&rig, 4);
    let block = tenant.try_allocate(3 * G).unwrap();
    let task = sends(async {
        tenant.blocks().sleep_async(Contents::Discard).await?;
        tenant.blocks().wake_async().await
    });
    let woken = std::thread::scope(|scope| scope.spawn(|| block_on(task)).join().unwrap());
    assert_eq!(woken.unwrap().blocks, 1);
    drop(block);
}
