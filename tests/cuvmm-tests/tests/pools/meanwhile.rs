//! Operations in whose middle others unregister the tenant or lower the limit, at each driver call that
//! is made without the pool's lock.
//!
//! Others act in the thread of the operation, so nothing that waits for other operations can be tried.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{self, G, Rig};
use crate::on_both;
use cuvmm::driver::Call;
use cuvmm::driver::model::Backing;
use cuvmm::{Contents, Heap, Limit, Pool, Stream, Tenant};

/// The calls that are never made under the pool's lock.
const UNLOCKED: &[Call] = &[
    Call::MemAddressReserve,
    Call::MemAddressFree,
    Call::MemCreate,
    Call::MemRelease,
    Call::MemMap,
    Call::MemUnmap,
    Call::MemSetAccess,
];

/// An intervention, which is made once.
type Intervene = Box<dyn FnOnce() + Send>;

fn unregister(_: &Pool, tenant: &Tenant) -> Intervene {
    let tenant = tenant.clone();
    Box::new(move || tenant.unregister())
}

fn lower_the_limit(pool: &Pool, _: &Tenant) -> Intervene {
    let pool = pool.clone();
    Box::new(move || drop(pool.set_limit(Limit::Bytes(3 * G))))
}

/// Runs an operation of a tenant again and again, and intervenes at the first call, at the second and so
/// on, until no call is left. The operation may fail. Nothing is left of it. Returns the number of
/// calls.
fn at_each_call(
    rig: &Rig<impl Backing>,
    intervention: fn(&Pool, &Tenant) -> Intervene,
    operate: impl Fn(&Tenant),
) -> u64 {
    for nth in 1.. {
        let (pool, tenant) = common::tenancy(rig, 32);
        let left = Arc::new(AtomicU64::new(nth));
        let reached = Arc::clone(&left);
        let once = Mutex::new(Some(intervention(&pool, &tenant)));
        rig.faults.watch(Some(Arc::new(move |call| {
            let due = UNLOCKED.contains(&call)
                && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |it| it.checked_sub(1))
                    == Ok(1);
            let intervene = if due {
                once.lock().unwrap().take()
            } else {
                None
            };
            if let Some(intervene) = intervene {
                intervene();
            }
        })));
        operate(&tenant);
        rig.faults.watch(None);
        let ended = reached.load(Ordering::SeqCst) == 0;
        drop(tenant);
        pool.trim(0).unwrap();
        let stats = pool.stats();
        let left = (
            stats.tenants.len(),
            stats.committed,
            stats.addresses,
            stats.mappings,
        );
        assert_eq!(
            (left, stats.quarantined),
            ((0, 0, 0, 0), 0),
            "at call {nth}"
        );
        pool.close().unwrap();
        if !ended {
            return nth - 1;
        }
    }
    0
}

/// Runs an operation with each intervention. Returns the least number of calls.
fn with_each(rig: &Rig<impl Backing>, operate: impl Fn(&Tenant)) -> u64 {
    let all = [unregister, lower_the_limit];
    let calls = all.map(|intervention| at_each_call(rig, intervention, &operate));
    calls.into_iter().min().unwrap()
}

on_both! {
    fn while_it_allocates_grows_and_forks(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let calls = with_each(rig, |tenant| {
            let Ok(mut block) = tenant.block(2 * G).capacity(8 * G).home_stream(&stream).allocate()
            else {
                return;
            };
            let grown = block.grow_to(6 * G);
            let fork = block.fork(2 * G, 3 * G);
            let row = tenant.block(G).allocate_adjacent(3);
            drop((block.shrink_to(G), grown, fork, row));
            stream.synchronize().unwrap();
        });
        assert!(calls > 20, "{calls}");
    }

    fn while_its_heap_is_built_and_serves(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let calls = with_each(rig, |tenant| {
            let Ok(heap) = Heap::builder(tenant).build() else {
                return;
            };
            let first = heap.allocate(3 * G, 1, &stream);
            let second = heap.allocate(2 * G, 1, &stream);
            drop(first);
            let stitched = heap.allocate(5 * G, 1, &stream);
            drop((second, stitched, heap.trim()));
            stream.synchronize().unwrap();
        });
        assert!(calls > 10, "{calls}");
    }

    fn while_its_blocks_sleep_and_wake(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let calls = with_each(rig, |tenant| {
            let Ok(blocks) = tenant.block(2 * G).home_stream(&stream).allocate_many(3) else {
                return;
            };
            stream.synchronize().unwrap();
            let slept = tenant.blocks().release(true).sleep(Contents::Discard);
            drop((slept, tenant.blocks().wake(), blocks));
            stream.synchronize().unwrap();
        });
        assert!(calls > 15, "{calls}");
    }
}
