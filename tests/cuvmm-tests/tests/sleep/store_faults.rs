//! Stores that grow while the driver panics, refuses to leave a thread's capture mode, or other
//! threads use the store.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use crate::common::world::books;
use crate::common::{D0, G, MIB, Rig, host, model, pool};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::SleepError;
use cuvmm::{Contents, HostStore};

const REFUSED: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

/// The size in which a store takes memory.
const PIECE: u64 = 64 * MIB;

/// Makes the driver panic in a call of a kind, from the `nth` on.
fn panic_in<B: cuvmm::driver::model::Backing>(rig: &Rig<B>, kind: Call, nth: u64) {
    let seen = AtomicU64::new(0);
    rig.faults.watch(Some(Arc::new(move |call| {
        let panics = call == kind && seen.fetch_add(1, SeqCst) + 1 >= nth;
        assert!(!panics, "on purpose");
    })));
}

/// A store whose driver registers no memory of the process.
fn allocating(rig: &Rig<Nothing>, limit: u64) -> HostStore {
    let unsupported = CUresult::CUDA_ERROR_NOT_SUPPORTED;
    rig.faults
        .arm(Fault::from(1, unsupported).of(Call::MemHostRegister));
    let store = HostStore::builder(&rig.device).limit(limit).build();
    rig.faults.disarm();
    store.unwrap()
}

#[test]
fn a_panic_of_the_driver_leaves_a_store_as_it_was() {
    let rig = host();
    let pool = pool(&rig, 128);
    let tenant = pool.tenant("model").register().unwrap();
    let block = tenant.allocate(PIECE + 8 * G).unwrap();
    block.write(0, &[7; 100]).unwrap();
    let store = HostStore::builder(&rig.device).pinned(2 * G);
    let store = store.limit(128 * G).build().unwrap();
    let before = books(&pool);
    for nth in [1, 2] {
        panic_in(&rig, Call::MemHostRegister, nth);
        let slept = catch_unwind(AssertUnwindSafe(|| {
            tenant.blocks().sleep(Contents::Keep(&store)).map(drop)
        }));
        assert!(slept.is_err());
        let grown = catch_unwind(AssertUnwindSafe(|| store.reserve(2 * PIECE)));
        assert!(grown.is_err());
        rig.faults.watch(None);
        assert_eq!((store.capacity(), store.free()), (2 * G, 2 * G));
        assert_eq!(books(&pool), before);
        assert_eq!(
            rig.machine.live().registered,
            1,
            "what the store is built with"
        );
    }
    tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
    tenant.blocks().wake().unwrap();
    let mut seen = [0; 100];
    block.read(0, &mut seen).unwrap();
    assert_eq!(seen, [7; 100]);
    // No later memory is where the driver still has some.
    store.reserve(32 * G).unwrap();
}

#[test]
fn a_panic_of_the_driver_that_allocates_leaves_a_store_as_it_was() {
    let rig = model();
    let store = allocating(&rig, 16 * G);
    store.reserve(2 * G).unwrap();
    let pool = pool(&rig, 16);
    let tenant = pool.tenant("model").register().unwrap();
    let _block = tenant.allocate(8 * G).unwrap();
    panic_in(&rig, Call::MemHostAlloc, 1);
    let slept = catch_unwind(AssertUnwindSafe(|| {
        tenant.blocks().sleep(Contents::Keep(&store)).map(drop)
    }));
    rig.faults.watch(None);
    assert!(slept.is_err());
    assert_eq!((store.capacity(), store.free()), (2 * G, 2 * G));
    store.reserve(16 * G).unwrap();
    assert_eq!((store.capacity(), store.free()), (16 * G, 16 * G));
}

#[test]
fn memory_belongs_to_the_store_if_the_driver_keeps_the_capture_mode() {
    let rig = model();
    // Asked twice for the mode that the thread had.
    let stay = || {
        for nth in [2, 3] {
            let fault = Fault::nth(nth, REFUSED).of(Call::ThreadExchangeStreamCaptureMode);
            rig.faults.arm(fault);
        }
    };
    let store = HostStore::builder(&rig.device).limit(16 * G).build();
    let store = store.unwrap();
    let before = rig.machine.live();
    stay();
    assert!(store.reserve(2 * G).is_err());
    rig.faults.disarm();
    assert_eq!((store.capacity(), rig.device.drop_failures()), (0, 0));
    assert_eq!(
        rig.machine.live(),
        before,
        "unregistered before it was unmapped"
    );

    let store = allocating(&rig, 16 * G);
    let before = rig.machine.live();
    stay();
    assert!(store.reserve(2 * G).is_err());
    rig.faults.disarm();
    assert_eq!(store.capacity(), 0);
    assert_eq!(rig.machine.live(), before, "allocated memory is freed");
}

#[test]
fn a_panic_of_the_driver_frees_no_memory_that_a_copy_may_use() {
    for drops in [false, true] {
        let rig = model();
        let pool = pool(&rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.allocate(3 * G).unwrap();
        let store = HostStore::builder(&rig.device).limit(8 * G).build();
        let store = store.unwrap();
        rig.machine.hold_all(D0);
        let waits = [Call::StreamSynchronize, Call::CtxSynchronize];
        rig.faults.arm(Fault::all(REFUSED).only(&waits));
        assert!(tenant.blocks().sleep(Contents::Keep(&store)).is_err());
        rig.faults.disarm();
        assert_eq!((store.capacity(), store.free()), (3 * G, 0));
        panic_in(&rig, Call::StreamQuery, 1);
        assert_eq!(store.free(), 0);
        assert_eq!(store.shrink_to(0), 0);
        if drops {
            drop(store);
            rig.faults.watch(None);
            assert_eq!(rig.device.leaked(), 3 * G);
            assert_eq!(rig.machine.live().registered, 1);
        } else {
            rig.faults.watch(None);
            assert_eq!((store.capacity(), store.free()), (3 * G, 0));
            rig.machine.release_all_streams(D0);
            // The growth has failed, so that nothing of it is used again.
            assert_eq!((store.free(), store.capacity()), (0, 0));
            assert_eq!(rig.machine.live().registered, 0);
        }
        drop(block);
        rig.machine.release_all_streams(D0);
    }
}

#[test]
fn memory_whose_end_panics_stays_mapped() {
    let rig = host();
    let store = HostStore::builder(&rig.device).limit(16 * G).build();
    let store = store.unwrap();
    store.reserve(2 * G).unwrap();
    panic_in(&rig, Call::MemHostUnregister, 1);
    let given = catch_unwind(AssertUnwindSafe(|| store.shrink_to(0)));
    rig.faults.watch(None);
    assert!(given.is_err());
    assert_eq!((store.capacity(), rig.machine.live().registered), (0, 1));
    // No later memory is where the driver still has that.
    store.reserve(16 * G).unwrap();
    assert_eq!(rig.machine.live().registered, 2);
}

#[test]
fn others_use_what_is_free_while_memory_is_taken_in_advance() {
    let rig = model();
    let pool = pool(&rig, 16);
    let tenant = pool.tenant("model").register().unwrap();
    let block = tenant.allocate(2 * G).unwrap();
    let store = HostStore::builder(&rig.device).pinned(2 * G);
    let store = store.limit(4 * G).build().unwrap();
    let slept = Arc::new(Mutex::new(None));
    let (told, theirs) = (Arc::clone(&slept), store.clone());
    rig.faults.watch(Some(Arc::new(move |call| {
        if call == Call::MemHostRegister {
            let slept = tenant.blocks().sleep(Contents::Keep(&theirs));
            *told.lock().unwrap() = Some(slept.map(|slept| slept.kept));
        }
    })));
    store.reserve(4 * G).unwrap();
    rig.faults.watch(None);
    let slept = slept.lock().unwrap().take();
    assert!(
        matches!(slept, Some(Ok(kept)) if kept == 2 * G),
        "{slept:?}"
    );
    assert!(block.is_asleep());
    assert_eq!((store.capacity(), store.free()), (4 * G, 2 * G));
    assert!(matches!(
        store.reserve(3 * G),
        Err(SleepError::StoreFull { .. })
    ));
}
