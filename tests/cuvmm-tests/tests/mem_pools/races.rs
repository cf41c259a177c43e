//! Other threads and libraries beside memory pools of the driver: calls that are inside of the driver
//! while the current pool changes, pools that another library puts back, and imports that stay.
//!
//! `unsafe` is used to play the other library.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{D0, MIB, Rig};
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::{Call, CaptureMode, DeviceAddress, Driver as _, HandleTypes, MemPoolHandle};
use cuvmm::own::ImportedAllocation;
use cuvmm::share::{AllocationOffer, PoolImporter};
use cuvmm::{Channel, Limit, MemPool, Pool, PoolAllocation, Stream, Tenant, TenantMemPool};

const STEP: u64 = 32 << 20;

fn pool(rig: &Rig<HostMemory>, steps: u64) -> Pool {
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(steps * STEP));
    pool.build().unwrap()
}

fn tenant(pool: &Pool, name: &str) -> Tenant {
    pool.tenant(name).register().unwrap()
}

fn memory(tenant: &Tenant, steps: u64) -> TenantMemPool {
    let memory = tenant.memory_pool(steps * STEP).minimum(STEP);
    memory.build().unwrap()
}

fn used(rig: &Rig<HostMemory>) -> u64 {
    let info = rig.machine.memory_info(D0).unwrap();
    info.total - info.free
}

fn library(rig: &Rig<HostMemory>, stream: &Stream, steps: u64) -> Option<DeviceAddress> {
    // SAFETY: the stream is alive.
    unsafe {
        rig.machine
            .alloc_async(D0, steps * STEP, stream.as_raw())
            .ok()
    }
}

fn set(rig: &Rig<HostMemory>, pool: MemPoolHandle) {
    // SAFETY: the pool is alive.
    unsafe { rig.machine.set_current_mem_pool(D0, pool).unwrap() }
}

/// The times of driver calls.
type Times = Arc<Mutex<Vec<(Call, Instant)>>>;

fn watch_times(rig: &Rig<HostMemory>) -> Times {
    let times = Times::default();
    let seen = Arc::clone(&times);
    rig.faults.watch(Some(Arc::new(move |call| {
        seen.lock().unwrap().push((call, Instant::now()));
    })));
    times
}

/// Checks that the first `then` after the first change of the current pool came at least a
/// millisecond later: until then, calls of other threads that were inside of the driver at the change
/// obtain memory from the pool that was current.
fn waited(times: &Times, then: Call) {
    let times = times.lock().unwrap();
    let mut later = times.iter();
    let changed = later.find(|(call, _)| *call == Call::DeviceSetMemPool);
    let next = later.find(|(call, _)| *call == then).unwrap();
    let pause = next.1 - changed.unwrap().1;
    assert!(pause >= Duration::from_millis(1), "{pause:?}");
}

#[test]
fn calls_that_are_inside_while_the_current_pool_is_exchanged_are_charged() {
    let rig = common::host();
    let pool = pool(&rig, 8);
    let memory = memory(&tenant(&pool, "a"), 3);
    let current = memory.make_current().unwrap();
    let times = watch_times(&rig);
    memory.shrink_to(STEP).unwrap();
    rig.faults.watch(None);
    waited(&times, Call::MemPoolGetAttribute);
    drop(current);
}

#[test]
fn calls_that_are_inside_when_the_guard_is_dropped_are_charged_after_an_exchange() {
    let rig = common::host();
    let pool = pool(&rig, 8);
    let memory = memory(&tenant(&pool, "a"), 3);
    let current = memory.make_current().unwrap();
    let times = watch_times(&rig);
    drop(current);
    memory.shrink_to(STEP).unwrap();
    rig.faults.watch(None);
    waited(&times, Call::MemPoolCreate);
}

#[test]
fn calls_that_are_inside_when_the_pool_ends_are_charged() {
    let rig = common::host();
    let pool = pool(&rig, 8);
    let memory = memory(&tenant(&pool, "a"), 3);
    let current = memory.make_current().unwrap();
    let times = watch_times(&rig);
    drop((current, memory));
    rig.faults.watch(None);
    waited(&times, Call::MemPoolSetAttribute);
}

/// Another library saves the current pool of the device and sets its own, which is returned. The saved
/// one is empty, so the device keeps it when it is exchanged. Then the library puts it back.
fn put_back_empty(rig: &Rig<HostMemory>, memory: &TenantMemPool) -> MemPool {
    let saved = MemPool::current_of(&rig.device).unwrap();
    let foreign = MemPool::builder(&rig.device).maximum(STEP);
    let foreign = foreign.create().unwrap();
    set(rig, foreign.as_raw());
    memory.reserve(3 * STEP).unwrap();
    set(rig, saved);
    foreign
}

#[test]
fn an_empty_pool_that_another_library_puts_back_is_not_current_for_long() {
    let rig = common::host();
    let pool = pool(&rig, 16);
    let one = tenant(&pool, "a");
    let memory = memory(&one, 2);
    let stream = Stream::new(&rig.device).unwrap();
    let _current = memory.make_current().unwrap();
    let _foreign = put_back_empty(&rig, &memory);
    memory.stats().unwrap();
    let _held = memory.allocate_on(&stream, 3 * STEP).unwrap();
    // Refused if it comes from the newest pool, which is full.
    let _more = library(&rig, &stream, 2);
    memory.stats().unwrap();
    let most = pool.stats().committed;
    assert!(
        used(&rig) <= most,
        "{} of {}",
        used(&rig) / STEP,
        most / STEP
    );
}

/// Otherwise what the library allocates would be another tenant's.
#[test]
fn a_kept_pool_that_is_current_is_not_used_again() {
    let rig = common::host();
    let pool = pool(&rig, 16);
    let (one, other) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let first = memory(&one, 2);
    let stream = Stream::new(&rig.device).unwrap();
    let _current = first.make_current().unwrap();
    let _foreign = put_back_empty(&rig, &first);
    let second = memory(&other, 2);
    let _theirs = library(&rig, &stream, 2).unwrap();
    assert_eq!(second.stats().unwrap().in_use, 0);
}

/// Another library finds the stand-in current, and puts it back after the exchange.
#[test]
fn a_stand_in_that_another_library_puts_back_is_not_current_for_long() {
    let rig = common::host();
    let pool = pool(&rig, 8);
    let one = tenant(&pool, "a");
    let memory = memory(&one, 6);
    let _current = memory.make_current().unwrap();
    let found = Arc::new(Mutex::new(Vec::new()));
    let (machine, finds) = (Arc::clone(&rig.machine), Arc::clone(&found));
    rig.faults.watch(Some(Arc::new(move |call| {
        if call == Call::DeviceSetMemPool {
            let current = machine.current_mem_pool(D0).unwrap();
            finds.lock().unwrap().push(current);
        }
    })));
    memory.shrink_to(5 * STEP).unwrap();
    rig.faults.watch(None);
    let found = found.lock().unwrap().clone();
    assert_eq!(found.len(), 2, "the old pool and the stand-in");
    set(&rig, found[1]);
    memory.stats().unwrap();
    assert!(memory.is_current().unwrap());
}

fn give_one(memory: &PoolAllocation, importer: &PoolImporter) -> ImportedAllocation {
    let offer = AllocationOffer::new(memory).unwrap();
    let (mut one, mut other) = Channel::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| one.send_allocations(&offer).unwrap());
        other.recv_allocations(importer).unwrap().remove(0)
    })
}

/// An H200 gives it the same address the second time, and one free ends both.
#[test]
fn what_stays_imported_is_not_imported_again() {
    let (giver, taker) = (common::host(), common::host());
    let shareable = MemPool::builder(&giver.device).shareable(HandleTypes::POSIX_FD);
    let pool = shareable.create().unwrap();
    let stream = Stream::new(&giver.device).unwrap();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let here = Stream::new(&taker.device).unwrap();
    let importer = PoolImporter::new(&taker.device, &here).unwrap();
    let (one, keeps_pool) = (give_one(&memory, &importer), {
        let second = pool.allocate_on(&stream, MIB).unwrap();
        give_one(&second, &importer)
    });
    // SAFETY: the stream is alive, and the graph is destroyed.
    unsafe {
        let machine = &taker.machine;
        machine
            .capture_begin(D0, here.as_raw(), CaptureMode::RELAXED)
            .unwrap();
        drop(one);
        let graph = machine.capture_end(D0, here.as_raw()).unwrap();
        machine.graph_destroy(D0, graph).unwrap();
    }
    let imports = || {
        let calls = taker.faults.calls();
        calls
            .iter()
            .filter(|call| **call == Call::MemPoolImportPointer)
            .count()
    };
    let before = imports();
    let again = give_one(&memory, &importer);
    assert_eq!(
        imports() - before,
        0,
        "the driver may give the address that is in use"
    );
    drop((again, keeps_pool));
}
