//! User code is called and dropped while no lock of the library is held, so all of it may use the
//! pool.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::common;
use crate::common::{D0, G, nth_of};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::PoolError;
use cuvmm::{
    Block, CloseRefusal, Contents, Device, DropFailure, HostStore, Pool, Stream, Tenant,
    UnifiedBuffer,
};

/// Runs code that would never return if a lock were held.
fn ends(what: &str, act: impl FnOnce() + Send + 'static) {
    let (done, told) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        act();
        done.send(()).unwrap();
    });
    match told.recv_timeout(Duration::from_secs(120)) {
        Ok(()) => thread.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Disconnected) => panic!("{what}: {:?}", thread.join().err()),
        Err(mpsc::RecvTimeoutError::Timeout) => {
            eprintln!("{what} hangs");
            std::process::exit(1);
        }
    }
}

/// Uses the pool when it is dropped, as a value of a user may.
struct Uses {
    pool: Pool,
    block: Option<Block>,
    dropped: Arc<AtomicU64>,
}

impl Drop for Uses {
    fn drop(&mut self) {
        drop(self.block.take());
        self.dropped.fetch_add(1, Ordering::SeqCst);
        assert!(self.pool.stats().committed <= self.pool.stats().limit);
    }
}

fn uses(pool: &Pool, tenant: &Tenant, dropped: &Arc<AtomicU64>) -> Uses {
    Uses {
        pool: pool.clone(),
        block: Some(tenant.allocate(G).unwrap()),
        dropped: Arc::clone(dropped),
    }
}

// I-42
#[test]
fn a_hook_that_owns_blocks_is_dropped_with_its_tenant() {
    let rig = common::clean(common::model());
    let pool = common::pool(&rig, 16);
    ends("dropping a tenant", move || {
        let blocks = Arc::new(Mutex::new(Vec::<Block>::new()));
        let owned = Arc::clone(&blocks);
        let giver = pool.tenant("giver");
        let giver = giver.on_pressure(move |_| owned.lock().unwrap().clear());
        let giver = giver.register().unwrap();
        blocks.lock().unwrap().push(giver.allocate(4 * G).unwrap());
        drop(blocks);
        drop(giver);
        assert_eq!(pool.stats().committed, 0);
    });
}

// I-42
#[test]
fn a_hook_that_owns_its_own_tenant_keeps_it_until_it_is_unregistered() {
    let rig = common::clean(common::model());
    let pool = common::pool(&rig, 16);
    ends("unregistering a tenant", move || {
        let owned = Arc::new(OnceLock::<Tenant>::new());
        let owner = Arc::clone(&owned);
        let giver = pool.tenant("giver");
        let giver = giver.on_pressure(move |_| assert!(owner.get().is_some()));
        assert!(owned.set(giver.register().unwrap()).is_ok());
        drop(owned);
        let refused = pool.close().unwrap_err();
        assert_eq!(refused.reason, CloseRefusal::InUse);
        let pool = refused.owner;
        pool.find_tenant("giver").unwrap().unregister();
        pool.close().unwrap();
    });
}

// I-42
#[test]
fn hooks_of_a_tenant_that_is_refused_are_dropped_without_a_lock() {
    let rig = common::clean(common::model());
    let pool = common::pool(&rig, 16);
    let dropped = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&dropped);
    ends("registering", move || {
        let a = pool.tenant("a").register().unwrap();
        let [one, other] = [(); 2].map(|()| uses(&pool, &a, &count));
        let taken = pool
            .tenant("a")
            .on_pressure(move |_| assert!(one.block.is_some()));
        let taken = taken.on_shortage(move |_| assert!(other.block.is_some()));
        let refused = taken.register();
        assert!(matches!(refused, Err(PoolError::NameTaken(_))));
        assert_eq!(count.load(Ordering::SeqCst), 2);
        assert_eq!(pool.stats().in_use, 0);
    });
    assert_eq!(dropped.load(Ordering::SeqCst), 2);
}

#[test]
fn a_hook_that_unregisters_its_own_tenant_is_dropped_afterwards() {
    let rig = common::clean(common::model());
    let pool = common::pool(&rig, 8);
    let dropped = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&dropped);
    ends("allocating", move || {
        let other = pool.tenant("other").register().unwrap();
        let kept = uses(&pool, &other, &count);
        let of_hook = Arc::new(Mutex::new(None::<(Tenant, Block)>));
        let gives = Arc::clone(&of_hook);
        let giver = pool.tenant("giver").on_pressure(move |_| {
            assert!(kept.block.is_some());
            drop(gives.lock().unwrap().take());
        });
        let giver = giver.register().unwrap();
        let block = giver.allocate(7 * G).unwrap();
        *of_hook.lock().unwrap() = Some((giver, block));
        drop(other.allocate(4 * G).unwrap());
        assert_eq!(count.load(Ordering::SeqCst), 1);
        assert_eq!(pool.stats().in_use, 0);
    });
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
}

#[test]
fn what_keeps_a_stream_alive_is_dropped_when_the_streams_last_use_is_over() {
    last_use_is_over(Device::clone);
}

#[test]
fn the_same_with_a_stream_of_the_device_opened_a_second_time() {
    last_use_is_over(|device| {
        let ordinal = device.ordinal().0.cast_unsigned();
        Device::open(Arc::clone(device.driver()), ordinal).unwrap()
    });
}

fn last_use_is_over(of: fn(&Device) -> Device) {
    let rig = common::clean(common::model());
    let pool = common::pool(&rig, 16);
    let device = of(&rig.device);
    let own = Stream::new(&device).unwrap();
    let handle = own.as_raw();
    let dropped = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&dropped);
    ends("using the memory again", move || {
        let tenant = pool.tenant("a").register().unwrap();
        let keeps = Arc::new(Mutex::new(uses(&pool, &tenant, &count)));
        // SAFETY: the stream lives until the end of the test.
        let stream = unsafe { Stream::from_raw(&device, handle, keeps) }.unwrap();
        let block = tenant.allocate_on(&stream, 4 * G).unwrap();
        drop(stream);
        drop(block);
        // An allocation that needs the memory polls its fence, and drops the stream with it.
        let other = pool.tenant("b").register().unwrap();
        drop(other.allocate(14 * G).unwrap());
        drop(tenant);
        drop(other);
        assert_eq!(count.load(Ordering::SeqCst), 1);
        drop(pool);
    });
}

/// A stream in a fence of the pool is the last owner of another handle of the device.
#[test]
fn the_hook_of_a_second_handle_is_dropped_behind_the_lock() {
    let rig = common::clean(common::model());
    let pool = common::pool(&rig, 16);
    let ordinal = rig.device.ordinal().0.cast_unsigned();
    let second = Device::open(Arc::clone(rig.device.driver()), ordinal).unwrap();
    let dropped = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&dropped);
    ends("using the memory again", move || {
        let tenant = pool.tenant("a").register().unwrap();
        let kept = Mutex::new(uses(&pool, &tenant, &count));
        second.on_drop_failure(Some(Arc::new(move |_| drop(kept.lock()))));
        let stream = Stream::new(&second).unwrap();
        drop(tenant.allocate_on(&stream, 4 * G).unwrap());
        drop((stream, second));
        let other = pool.tenant("b").register().unwrap();
        drop(other.allocate(14 * G).unwrap());
        assert_eq!(count.load(Ordering::SeqCst), 1);
        drop((tenant, other, pool));
    });
}

#[test]
fn a_hook_for_failed_drops_may_use_the_pool() {
    let rig = common::model();
    let (pool, tenant, stream) = common::scene(&rig, 16);
    let told = Arc::new(AtomicU64::new(0));
    let (asked, count) = (pool.clone(), Arc::clone(&told));
    rig.device.on_drop_failure(Some(Arc::new(move |_| {
        assert_eq!(asked.stats().limit, 16 * G);
        count.fetch_add(1, Ordering::SeqCst);
    })));
    let faults = Arc::clone(&rig.faults);
    let device = rig.device.clone();
    ends("reporting a failure", move || {
        let other = pool.tenant("b").register().unwrap();
        drop(tenant.allocate_on(&stream, 4 * G).unwrap());
        // The driver is asked twice.
        for nth in [1, 2] {
            let unknown = CUresult::CUDA_ERROR_UNKNOWN;
            faults.arm(nth_of(nth, unknown, &[Call::MemAddressFree]));
        }
        drop(other.allocate(14 * G).unwrap());
        // The addresses of the tenant's slots are freed under the lock.
        drop((tenant, other, stream));
        faults.disarm();
        // The hook holds a pool, so it is dropped first.
        device.on_drop_failure(None);
        drop(pool);
    });
    assert_eq!(
        (told.load(Ordering::SeqCst), rig.device.drop_failures()),
        (1, 1)
    );
    assert_eq!(rig.machine.live().reservations, 1);
}

#[test]
fn a_hook_for_failed_drops_may_remove_itself_and_is_dropped_without_a_lock() {
    let rig = common::clean(common::model());
    let device = rig.device.clone();
    ends("replacing the hook", move || {
        struct Removes(cuvmm::Device);
        impl Drop for Removes {
            fn drop(&mut self) {
                self.0.on_drop_failure(None);
            }
        }
        let removes = Removes(device.clone());
        device.on_drop_failure(Some(Arc::new(move |_| assert!(removes.0.lost().is_none()))));
        device.on_drop_failure(None);
    });
}

#[test]
fn what_watches_a_tenant_fall_asleep_may_use_the_same_store() {
    let rig = common::clean(common::host());
    let pool = common::pool(&rig, 64);
    let device = rig.device.clone();
    ends("sleeping in a callback", move || {
        for ordinary in [false, true] {
            let store = HostStore::builder(&device);
            let store = match ordinary {
                true => store.ordinary(40 * G).staging(4 * G),
                false => store.pinned(40 * G),
            };
            let store = store.build().unwrap();
            let (one, other) = (pool.tenant("one"), pool.tenant("other"));
            let (one, other) = (one.register().unwrap(), other.register().unwrap());
            let (kept, theirs) = (
                one.allocate(20 * G).unwrap(),
                other.allocate(9 * G).unwrap(),
            );
            kept.write(19 * G, b"kept").unwrap();
            theirs.write(8 * G, b"theirs").unwrap();
            let moves = |asleep: bool| {
                let theirs = other.blocks();
                match asleep {
                    false => assert_eq!(theirs.sleep(Contents::Keep(&store)).unwrap().blocks, 1),
                    true => assert_eq!(theirs.wake().unwrap().blocks, 1),
                }
            };
            // In this thread, and in another that is joined.
            let watch = |_: &cuvmm::sleep::Progress| {
                moves(theirs.is_asleep());
                let asleep = theirs.is_asleep();
                std::thread::scope(|scope| scope.spawn(|| moves(asleep)).join().unwrap());
                true
            };
            let watched = one.blocks().on_progress(&watch);
            watched.sleep(Contents::Keep(&store)).unwrap();
            watched.wake().unwrap();
            let mut seen = [0; 6];
            kept.read(19 * G, &mut seen[..4]).unwrap();
            assert_eq!(&seen[..4], b"kept");
            theirs.read(8 * G, &mut seen).unwrap();
            assert_eq!(&seen, b"theirs");
            assert_eq!(store.free(), store.capacity());
        }
    });
}

#[test]
fn what_keeps_the_stream_of_a_reader_alive_may_use_the_same_buffer() {
    let rig = common::clean(common::host());
    let own = Stream::new(&rig.device).unwrap();
    let (device, handle) = (rig.device.clone(), own.as_raw());
    let dropped = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&dropped);
    struct Reads(Arc<UnifiedBuffer<u32>>, Stream, Arc<AtomicU64>);
    impl Drop for Reads {
        fn drop(&mut self) {
            drop(self.0.device_read(&self.1).unwrap());
            self.2.fetch_add(1, Ordering::SeqCst);
        }
    }
    ends("reading", move || {
        let stream = Stream::new(&device).unwrap();
        let buffer = Arc::new(UnifiedBuffer::<u32>::zeroed(&device, &stream, 100).unwrap());
        let reads = Reads(Arc::clone(&buffer), stream.clone(), count);
        // SAFETY: the stream lives until the end of the test.
        let theirs = unsafe { Stream::from_raw(&device, handle, Arc::new(reads)) }.unwrap();
        drop(buffer.device_read(&theirs).unwrap());
        drop(theirs);
        let third = Stream::new(&device).unwrap();
        // Polls which readers are complete, and forgets those.
        drop(buffer.device_read(&third).unwrap());
    });
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
}

/// Asks the pool for its figures whenever it is asked or told about an event.
#[derive(Clone)]
struct Asks {
    pool: Arc<Mutex<Option<Pool>>>,
    told: Arc<Mutex<Vec<&'static str>>>,
}

impl Asks {
    fn ask(&self) {
        let pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = pool.clone();
        if let Some(pool) = pool {
            assert!(pool.stats().committed <= pool.stats().limit);
        }
    }

    /// Returns the modules that have emitted events since the last call.
    fn told(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.told.lock().unwrap())
    }
}

impl Subscriber for Asks {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        self.ask();
        true
    }

    fn event(&self, event: &Event<'_>) {
        self.ask();
        self.told.lock().unwrap().push(event.metadata().target());
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

// I-43
#[test]
fn a_subscriber_of_events_may_ask_the_pool() {
    let rig = common::model();
    ends("emitting events", move || {
        let pool = common::pool(&rig, 16);
        let asks = Asks {
            pool: Arc::new(Mutex::new(Some(pool.clone()))),
            told: Arc::default(),
        };
        // With one dispatcher alone, `tracing` asks only the thread that reaches a place in the
        // code first whether its events are wanted, and that may be another test's.
        let _second = tracing::Dispatch::new(asks.clone());
        let _default = tracing::subscriber::set_default(asks.clone());
        let fail = |calls: &[Call]| {
            let fault = Fault::all(CUresult::CUDA_ERROR_UNKNOWN);
            rig.faults.arm(fault.only(calls));
        };
        let (one, other) = (pool.tenant("a"), pool.tenant("b"));
        let (one, other) = (one.register().unwrap(), other.register().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        // A fence that cannot be polled counts as pending.
        drop(one.allocate_on(&stream, 8 * G).unwrap());
        fail(&[Call::EventQuery, Call::StreamQuery, Call::EventRecord]);
        assert!(other.try_allocate(12 * G).is_err());
        rig.faults.disarm();
        assert!(asks.told().contains(&"cuvmm::pool::gate"));
        // A physical that the driver does not take back is quarantined.
        drop(other.allocate(2 * G).unwrap());
        fail(&[Call::MemRelease]);
        assert_eq!(pool.trim(0), Ok(0));
        rig.faults.disarm();
        assert!(asks.told().contains(&"cuvmm::pool::supply::release"));
        *asks.pool.lock().unwrap() = None;
        drop((one, other, stream, pool));
        common::nothing_left(rig);
    });
}

/// A block that sleeps is the last owner of the store that has its contents.
#[test]
fn a_store_ends_with_a_sleeping_block_after_the_lock() {
    let rig = common::clean(common::host());
    let (_pool, tenant) = common::tenancy(&rig, 16);
    let block = tenant.allocate(2 * G).unwrap();
    let store = HostStore::builder(&rig.device)
        .pinned(2 * G)
        .build()
        .unwrap();
    let live = || {
        let live = rig.machine.live();
        (live.registered, live.streams > 0)
    };
    tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
    drop(store);
    assert_eq!(live(), (1, true));
    // Not under the lock, which the library checks.
    drop(block);
    assert_eq!(live(), (0, false));
}

#[test]
fn a_hook_takes_a_capture_guard_while_a_device_has_just_been_waited_for() {
    let rig = common::model();
    let pool = common::pool(&rig, 1);
    let stream = Stream::new(&rig.device).unwrap();
    let mut region = common::region(&rig, G, G);
    rig.held_kernel(&stream, &[], &[]);
    region.decommit(0..G).unwrap();
    assert_eq!(
        region.purge().unwrap().given_back,
        0,
        "an event is recorded"
    );
    rig.machine.release_stream(D0, stream.as_raw());
    let hook = move |_: &DropFailure| drop(pool.capture_guard());
    rig.device.on_drop_failure(Some(Arc::new(hook)));
    rig.faults
        .arm(Fault::nth(1, CUresult::CUDA_ERROR_UNKNOWN).of(Call::EventDestroy));
    ends("a hook", move || {
        assert_eq!(region.purge_blocking().unwrap().given_back, G);
    });
    assert_eq!(rig.device.drop_failures(), 1);
    rig.device.on_drop_failure(None);
}
