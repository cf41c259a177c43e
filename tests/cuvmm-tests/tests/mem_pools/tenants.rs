//! Memory pools of the driver within a tenant's limit: what is charged, exchanged, reclaimed and
//! given back, and that the driver never holds more than is charged.
//!
//! `unsafe` is used for what other libraries would allocate.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common;
use crate::common::books::figures;
use crate::common::{D0, D1, G, GIB, Rig, captures};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{
    AccessFlags, CUresult, Call, CudaVersion, DeviceAddress, DeviceAttribute, Driver, DriverError,
    Location,
};
use cuvmm::error::{ArgumentError, BlockError, MemoryError};
use cuvmm::mem_pool::TenantMemPoolStats;
use cuvmm::own::CloseRefusal;
use cuvmm::{
    Access, CallError, CurrentTenantMemPool, Device, Ledger, Limit, MemPool, Pool, PoolAllocation,
    Stream, Tenant, TenantMemPool,
};

/// The size in which a pool of the driver obtains memory.
const STEP: u64 = 32 << 20;

fn pool(rig: &Rig<impl Backing>, steps: u64) -> Pool {
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(steps * STEP));
    pool.build().unwrap()
}

fn tenant(pool: &Pool, name: &str) -> Tenant {
    pool.tenant(name).register().unwrap()
}

fn memory(tenant: &Tenant, steps: u64, minimum: u64) -> TenantMemPool {
    let memory = tenant.memory_pool(steps * STEP).minimum(minimum * STEP);
    memory.build().unwrap()
}

/// Returns what a tenant is charged, in steps.
fn charged(tenant: &Tenant) -> u64 {
    tenant.stats().committed / STEP
}

fn stats(memory: &TenantMemPool) -> TenantMemPoolStats {
    memory.stats().unwrap()
}

/// Returns the bytes of the device in use, as its driver counts them.
fn used(rig: &Rig<impl Backing>) -> u64 {
    let info = rig.machine.memory_info(D0).unwrap();
    info.total - info.free
}

/// Allocates as another library does.
fn library(
    rig: &Rig<impl Backing>,
    stream: &Stream,
    steps: u64,
) -> Result<DeviceAddress, DriverError> {
    // SAFETY: the stream is alive.
    unsafe { rig.machine.alloc_async(D0, steps * STEP, stream.as_raw()) }
}

/// Frees as another library does.
fn free(rig: &Rig<impl Backing>, stream: &Stream, at: DeviceAddress) {
    // SAFETY: the stream is alive, and nothing uses the memory.
    unsafe { rig.machine.free_async(D0, at, stream.as_raw()).unwrap() }
}

fn is_full(outcome: &Result<DeviceAddress, DriverError>) -> bool {
    matches!(outcome, Err(error) if error.is_out_of_memory())
}

fn is_default_current(device: &Device) -> bool {
    MemPool::default_of(device).unwrap().is_current().unwrap()
}

on_both! {
    // I-11
    fn the_maximum_is_charged_and_bounds_what_other_libraries_allocate(rig) {
        let pool = pool(rig, 8);
        let tenant = pool.tenant("a").limit(6 * STEP).register().unwrap();
        let memory = memory(&tenant, 4, 1);
        assert_eq!((charged(&tenant), used(rig)), (5, 0), "and a step for exchanges");
        assert_eq!(tenant.stats().in_use, 0);
        let stream = Stream::new(&rig.device).unwrap();
        let current = memory.make_current().unwrap();
        assert!(memory.is_current().unwrap());
        let one = library(rig, &stream, 3).unwrap();
        assert!(is_full(&library(rig, &stream, 2)));
        let two = memory.allocate_on(&stream, STEP).unwrap();
        assert!(memory.allocate_on(&stream, 1).unwrap_err().is_out_of_memory());
        assert_eq!(used(rig), 4 * STEP);
        let now = stats(&memory);
        assert_eq!((now.maximum, now.charged, now.in_use), (4 * STEP, 5 * STEP, 4 * STEP));
        assert!(now.is_current);
        assert_eq!((now.reserved, now.older_pools, now.older_held), (4 * STEP, 0, 0));
        assert_eq!(tenant.stats().in_use, 4 * STEP);
        figures(&pool);
        free(rig, &stream, one);
        drop(two);
        stream.synchronize().unwrap();
        assert_eq!(used(rig), 4 * STEP, "the threshold keeps it");
        assert_eq!(memory.trim().unwrap(), 4 * STEP);
        assert_eq!((charged(&tenant), used(rig)), (5, 0));
        drop(current);
        assert!(is_default_current(&rig.device));
        drop(memory);
        assert_eq!(charged(&tenant), 0);
    }

    fn blocks_and_the_pool_have_one_limit(rig) {
        let pool = pool(rig, 8);
        let tenant = pool.tenant("a").limit(6 * STEP).register().unwrap();
        let memory = memory(&tenant, 4, 4);
        let _block = tenant.try_allocate(STEP).unwrap();
        let refused = tenant.try_allocate(G).unwrap_err();
        let shortage = refused.shortage().unwrap();
        assert_eq!((shortage.tenant_held, shortage.tenant_limit), (6 * STEP, 6 * STEP));
        assert!(tenant.memory_pool(STEP).build().unwrap_err().is_out_of_memory());
        let other = common_tenant(&pool);
        let refused = other.try_allocate(3 * STEP).unwrap_err();
        assert_eq!(refused.shortage().unwrap().holders, [("a".to_owned(), 6 * STEP)]);
        let refused = memory.reserve(5 * STEP).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        assert_eq!((stats(&memory).maximum, charged(&tenant)), (4 * STEP, 6));
    }

    fn a_growth_exchanges_the_drivers_pool_and_charges_more(rig) {
        let pool = pool(rig, 16);
        let tenant = tenant(&pool, "a");
        let memory = memory(&tenant, 4, 1);
        let stream = Stream::new(&rig.device).unwrap();
        let current = memory.make_current().unwrap();
        let old = library(rig, &stream, 3).unwrap();
        memory.reserve(STEP).unwrap();
        assert_eq!(charged(&tenant), 5, "there is room");
        memory.reserve(4 * STEP).unwrap();
        assert_eq!(charged(&tenant), 8, "three in use, four more, one for exchanges");
        let now = stats(&memory);
        assert_eq!((now.maximum, now.older_pools, now.older_held), (7 * STEP, 1, 3 * STEP));
        assert_eq!(now.in_use, 3 * STEP);
        let new = library(rig, &stream, 4).unwrap();
        assert!(is_full(&library(rig, &stream, 1)));
        assert_eq!(used(rig), 7 * STEP);
        free(rig, &stream, old);
        stream.synchronize().unwrap();
        assert_eq!(used(rig), 4 * STEP, "an older pool keeps nothing");
        assert_eq!(stats(&memory).older_pools, 0);
        assert_eq!(charged(&tenant), 5);
        memory.grow_to(4 * STEP).unwrap();
        memory.grow_to(3 * STEP).unwrap();
        assert_eq!(charged(&tenant), 5, "it has that");
        memory.grow_to(6 * STEP).unwrap();
        assert_eq!((stats(&memory).maximum, charged(&tenant)), (6 * STEP, 7));
        memory.grow_to(2 * STEP).unwrap();
        free(rig, &stream, new);
        stream.synchronize().unwrap();
        drop(current);
        drop(memory);
        assert_eq!((charged(&tenant), used(rig)), (0, 0));
    }

    fn a_pool_shrinks_to_what_is_in_use(rig) {
        let pool = pool(rig, 16);
        let tenant = tenant(&pool, "a");
        let memory = memory(&tenant, 8, 8);
        let stream = Stream::new(&rig.device).unwrap();
        assert_eq!(memory.shrink_to(8 * STEP).unwrap(), 0);
        assert_eq!(memory.shrink_to(6 * STEP).unwrap(), 2 * STEP);
        let held = memory.allocate_on(&stream, 3 * STEP).unwrap();
        assert_eq!(memory.shrink_to(0).unwrap(), 2 * STEP);
        let now = stats(&memory);
        assert_eq!((now.maximum, now.in_use, now.charged), (4 * STEP, 3 * STEP, 5 * STEP));
        assert_eq!(memory.shrink_to(0).unwrap(), 0, "that is the least");
        drop(memory.allocate_on(&stream, STEP).unwrap());
        assert!(memory.allocate_on(&stream, 2 * STEP).is_err());
        drop(held);
        stream.synchronize().unwrap();
        assert_eq!(memory.shrink_to(0).unwrap(), 3 * STEP);
        assert_eq!((charged(&tenant), used(rig)), (2, 0));
    }

    fn what_is_not_in_use_is_reclaimed_down_to_the_minimum_before_hooks(rig) {
        let pool = pool(rig, 12);
        let calls = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&calls);
        let hooked = pool.tenant("a").on_pressure(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
        });
        let tenant = hooked.register().unwrap();
        let memory = memory(&tenant, 9, 2);
        let stream = Stream::new(&rig.device).unwrap();
        let current = memory.make_current().unwrap();
        let one = library(rig, &stream, 3).unwrap();
        let two = library(rig, &stream, 5).unwrap();
        free(rig, &stream, two);
        stream.synchronize().unwrap();
        let other = common_tenant(&pool);
        // Two are free. Of the pool three are in use, two are the minimum, and one is for exchanges.
        assert_eq!(other.headroom().unwrap().taking_back, 6 * STEP);
        assert_eq!(tenant.stats().cached, 6 * STEP);
        assert_eq!(tenant.stats().stranded, 2 * STEP);
        let block = other.allocate(3 * STEP).unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 0);
        assert_eq!(charged(&tenant), 9);
        assert!(memory.is_current().unwrap(), "the new one");
        let rest = other.allocate(3 * STEP).unwrap();
        assert_eq!((charged(&tenant), charged(&other)), (6, 6));
        assert!(other.allocate(G).unwrap_err().is_out_of_memory());
        assert_eq!(calls.load(Ordering::SeqCst), 1, "it could give nothing");
        let two = library(rig, &stream, 2).unwrap();
        assert!(is_full(&library(rig, &stream, 1)));
        drop((block, rest));
        memory.reserve(4 * STEP).unwrap();
        assert_eq!(charged(&tenant), 3 + 2 + 4 + 1);
        for at in [one, two] {
            free(rig, &stream, at);
        }
        stream.synchronize().unwrap();
        drop(current);
    }

    fn a_hook_gives_what_the_minimum_keeps(rig) {
        let pool = pool(rig, 8);
        let given: Arc<std::sync::Mutex<Option<TenantMemPool>>> = Arc::default();
        let giving = Arc::clone(&given);
        let hooked = pool.tenant("a").on_pressure(move |pressure| {
            let memory = giving.lock().unwrap().clone().unwrap();
            let maximum = memory.stats().unwrap().maximum;
            memory.shrink_to(maximum - pressure.bytes).unwrap();
            // It waits for nothing here.
            assert!(memory.reserve(8 * STEP).is_err());
        });
        let a = hooked.register().unwrap();
        *given.lock().unwrap() = Some(a.memory_pool(6 * STEP).build().unwrap());
        let other = common_tenant(&pool);
        let _block = other.allocate(4 * STEP).unwrap();
        assert_eq!((charged(&a), charged(&other)), (4, 4));
        given.lock().unwrap().take();
        assert_eq!(charged(&a), 0);
    }

    fn a_shrink_that_gains_nothing_leaves_the_pool_reclaimable(rig) {
        let pool = pool(rig, 10);
        let one = tenant(&pool, "a");
        let memory = memory(&one, 9, 1);
        for _ in 0..3 {
            assert_eq!(memory.shrink_to(9 * STEP).unwrap(), 0);
        }
        let _block = common_tenant(&pool).allocate(8 * STEP).unwrap();
        assert_eq!((charged(&one), stats(&memory).maximum), (2, STEP));
    }

    fn a_growth_leaves_the_minimum_where_it_can_be_charged(rig) {
        let pool = pool(rig, 20);
        let one = tenant(&pool, "a");
        let memory = one.memory_pool(8 * STEP).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let full = memory.allocate_on(&stream, 8 * STEP).unwrap();
        memory.reserve(1).unwrap();
        assert_eq!(charged(&one), 17, "eight in use, the minimum, and one for exchanges");
        drop(full);
        stream.synchronize().unwrap();
        assert_eq!((stats(&memory).maximum, charged(&one)), (8 * STEP, 9));
        drop(memory.allocate_on(&stream, 8 * STEP).unwrap());
        stream.synchronize().unwrap();
        // Where it cannot, the next reservation makes up for it.
        let _block = common_tenant(&pool).allocate(10 * STEP).unwrap();
        let full = memory.allocate_on(&stream, 8 * STEP).unwrap();
        memory.reserve(1).unwrap();
        assert_eq!(charged(&one), 10);
        drop(full);
        stream.synchronize().unwrap();
        assert_eq!((stats(&memory).maximum, charged(&one)), (STEP, 2));
        memory.reserve(2 * STEP).unwrap();
        assert_eq!((stats(&memory).maximum, charged(&one)), (8 * STEP, 9));
    }

    fn a_library_keeps_its_free_memory_after_another_tenant_could_get_nothing(rig) {
        let pool = pool(rig, 8);
        let one = tenant(&pool, "a");
        let memory = memory(&one, 6, 1);
        let stream = Stream::new(&rig.device).unwrap();
        // What is freed waits for the stream, so it cannot be given yet.
        drop(memory.allocate_on(&stream, 5 * STEP).unwrap());
        let other = common_tenant(&pool);
        assert!(other.try_allocate(2 * STEP).unwrap_err().is_out_of_memory());
        rig.faults.forget();
        memory.reserve(STEP).unwrap();
        stats(&memory);
        let trims = |call: &Call| *call == Call::MemPoolTrimTo;
        assert_eq!(rig.faults.calls().iter().filter(|it| trims(it)).count(), 0);
        stream.synchronize().unwrap();
        // It is offered again after some requests.
        let block = (0..20).find_map(|_| other.try_allocate(5 * STEP).ok());
        assert_eq!((block.is_some(), charged(&one)), (true, 3));
    }

    fn by_default_nothing_is_reclaimed(rig) {
        let pool = pool(rig, 8);
        let one = tenant(&pool, "a");
        let memory = one.memory_pool(6 * STEP).build().unwrap();
        let other = common_tenant(&pool);
        assert!(other.allocate(2 * STEP).unwrap_err().is_out_of_memory());
        assert_eq!(pool.trim(0).unwrap(), 0);
        assert_eq!((charged(&one), stats(&memory).maximum), (7, 6 * STEP));
        // A guarantee cannot be given over it either.
        assert!(pool.tenant("c").guarantee(2 * STEP).register().is_err());
        assert!(pool.tenant("c").guarantee(STEP).register().is_ok());
    }

    fn a_guarantee_is_kept_by_what_is_reclaimed(rig) {
        let pool = pool(rig, 8);
        let tenant = pool.tenant("a").guarantee(4 * STEP).register().unwrap();
        let memory = memory(&tenant, 6, 0);
        let other = common_tenant(&pool);
        let held = other.allocate(4 * STEP).unwrap();
        assert_eq!(charged(&tenant), 4);
        assert!(other.allocate(G).is_err());
        drop(held);
        let late = pool.tenant("c").guarantee(4 * STEP).register();
        assert!(late.is_ok(), "{late:?}");
        memory.reserve(3 * STEP).unwrap();
    }

    fn memory_freed_in_an_older_pool_is_noticed_when_memory_is_short(rig) {
        let pool = pool(rig, 10);
        let tenant = tenant(&pool, "a");
        let memory = memory(&tenant, 4, 4);
        let stream = Stream::new(&rig.device).unwrap();
        let old = memory.allocate_on(&stream, 4 * STEP).unwrap();
        memory.reserve(4 * STEP).unwrap();
        assert_eq!(charged(&tenant), 9);
        let other = common_tenant(&pool);
        assert!(other.try_allocate(2 * STEP).is_err());
        drop(old);
        assert!(other.try_allocate(2 * STEP).is_err(), "the driver has not seen that it is free");
        stream.synchronize().unwrap();
        assert_eq!(charged(&tenant), 9, "statistics ask nothing");
        let _block = other.try_allocate(5 * STEP).unwrap();
        assert_eq!(charged(&tenant), 5);
    }

    fn the_mapper_notices_it_by_itself(rig) {
        let mapper = cuvmm::Mapper::start(&rig.device).unwrap();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(10 * STEP));
        let pool = pool.mapper(&mapper).build().unwrap();
        let tenant = tenant(&pool, "a");
        let memory = memory(&tenant, 2, 2);
        let stream = Stream::new(&rig.device).unwrap();
        let old = memory.allocate_on(&stream, 2 * STEP).unwrap();
        memory.reserve(3 * STEP).unwrap();
        drop(old);
        stream.synchronize().unwrap();
        common::until(&pool, "the older pool ends", || charged(&tenant) == 4);
        drop(memory);
        drop(tenant);
        drop(pool);
        drop(mapper);
    }

    fn one_tenants_pool_at_a_time_is_current(rig) {
        let pool = pool(rig, 12);
        let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
        let (one, two) = (memory(&a, 2, 1), memory(&b, 2, 1));
        let guard = one.make_current().unwrap();
        let refused = two.make_current().unwrap_err();
        let is_that = matches!(refused, BlockError::Memory(MemoryError::CurrentPool { .. }));
        assert!(is_that && refused.to_string().contains("drop the guard"), "{refused}");
        let again = one.make_current().unwrap();
        drop(guard);
        assert!(one.is_current().unwrap() && !two.is_current().unwrap());
        again.close().unwrap();
        assert!(is_default_current(&rig.device));
        let guard = two.make_current().unwrap();
        assert!(two.is_current().unwrap());
        drop(two);
        assert_eq!(guard.pool().tenant().name(), "b");
        assert!(guard.pool().is_current().unwrap(), "the guard keeps it");
        // Another library's pool is left alone.
        let foreign = MemPool::builder(&rig.device).maximum(STEP).create().unwrap();
        // SAFETY: the pool is alive, and the default pool is set again below.
        unsafe { rig.machine.set_current_mem_pool(D0, foreign.as_raw()).unwrap() };
        guard.pool().reserve(3 * STEP).unwrap();
        assert!(foreign.is_current().unwrap());
        drop(guard);
        assert!(foreign.is_current().unwrap());
        foreign.close().unwrap();
        assert!(is_default_current(&rig.device));
    }

    fn a_pool_that_another_library_puts_back_after_an_exchange_is_not_current_for_long(rig) {
        let pool = pool(rig, 16);
        let one = tenant(&pool, "a");
        let memory = memory(&one, 2, 1);
        let stream = Stream::new(&rig.device).unwrap();
        let held = memory.allocate_on(&stream, STEP).unwrap();
        let _current = memory.make_current().unwrap();
        let saved = MemPool::current_of(&rig.device).unwrap();
        let foreign = MemPool::builder(&rig.device).maximum(STEP).create().unwrap();
        // SAFETY: the pool is alive, and the saved one is set again below.
        unsafe { rig.machine.set_current_mem_pool(D0, foreign.as_raw()).unwrap() };
        memory.reserve(3 * STEP).unwrap();
        assert!(foreign.is_current().unwrap());
        // SAFETY: the saved pool is alive, since an allocation lives in it.
        unsafe { rig.machine.set_current_mem_pool(D0, saved).unwrap() };
        assert!(!memory.is_current().unwrap());
        stats(&memory);
        assert!(memory.is_current().unwrap());
        drop(held);
        stream.synchronize().unwrap();
        assert_eq!(stats(&memory).older_pools, 0);
        assert!(memory.is_current().unwrap());
    }

    fn a_pool_becomes_current_again_instead_of_the_default_one_alone(rig) {
        let pool = pool(rig, 8);
        let one = tenant(&pool, "a");
        let memory = memory(&one, 2, 1);
        let guard = memory.make_current().unwrap();
        let foreign = MemPool::builder(&rig.device).maximum(STEP).create().unwrap();
        // SAFETY: the pool is alive, and another one is set below.
        unsafe { rig.machine.set_current_mem_pool(D0, foreign.as_raw()).unwrap() };
        let refused = memory.make_current().unwrap_err();
        assert!(matches!(refused, BlockError::Memory(MemoryError::CurrentPool { .. })));
        let default = MemPool::default_of(&rig.device).unwrap();
        // SAFETY: the default pool is alive.
        unsafe { rig.machine.set_current_mem_pool(D0, default.as_raw()).unwrap() };
        let again = memory.make_current().unwrap();
        assert!(memory.is_current().unwrap());
        drop((guard, again));
        assert!(is_default_current(&rig.device));
    }

    fn its_parts_cannot_be_used_beside_it(rig) {
        let pool = pool(rig, 12);
        let tenant = tenant(&pool, "a");
        let memory = memory(&tenant, 2, 1);
        let stream = Stream::new(&rig.device).unwrap();
        let held = memory.allocate_on(&stream, STEP).unwrap();
        let part = held.pool().clone();
        assert!(matches!(part.allocate_on(&stream, 1), Err(MemoryError::ManagedPool)));
        assert!(matches!(part.make_current(), Err(MemoryError::ManagedPool)));
        let own = MemPool::new(&rig.device).unwrap();
        let guard = own.make_current().unwrap();
        assert!(matches!(guard.replace(&part), Err(MemoryError::ManagedPool)));
        drop(guard);
        drop((held, part, own));
        stream.synchronize().unwrap();
    }

    fn what_lives_at_the_end_of_a_tenant_stays_charged(rig) {
        let pool = pool(rig, 8);
        let tenant = tenant(&pool, "a");
        let memory = memory(&tenant, 4, 4);
        let stream = Stream::new(&rig.device).unwrap();
        let guard = memory.make_current().unwrap();
        let held = library(rig, &stream, 2).unwrap();
        tenant.unregister();
        assert!(is_default_current(&rig.device), "put back at once");
        let stats = pool.stats();
        assert_eq!((stats.tenants[0].draining, stats.committed), (true, 2 * STEP));
        assert!(matches!(memory.reserve(STEP), Err(BlockError::Unregistered { .. })));
        assert!(matches!(memory.shrink_to(0), Err(BlockError::Unregistered { .. })));
        assert!(matches!(memory.stats(), Err(BlockError::Unregistered { .. })));
        assert!(memory.allocate_on(&stream, 1).is_err());
        assert!(matches!(memory.make_current(), Err(BlockError::Unregistered { .. })));
        guard.close().unwrap();
        drop(memory);
        assert_eq!(pool.stats().committed, 2 * STEP);
        free(rig, &stream, held);
        stream.synchronize().unwrap();
        let other = common_tenant(&pool);
        let _all = other.try_allocate(8 * STEP).unwrap();
        assert_eq!(pool.stats().tenants.len(), 1);
    }

    fn a_pool_closes_when_nothing_lives_in_it(rig) {
        let pool = pool(rig, 8);
        let tenant = tenant(&pool, "a");
        let memory = memory(&tenant, 4, 4);
        let stream = Stream::new(&rig.device).unwrap();
        let held = memory.allocate_on(&stream, STEP).unwrap();
        drop((memory, tenant));
        let refused = pool.close().unwrap_err();
        assert_eq!(refused.reason, CloseRefusal::Call(CallError::InUse));
        let pool = refused.owner;
        assert_eq!(pool.stats().committed, STEP);
        drop(held);
        pool.close().unwrap();
        assert_eq!((used(rig), rig.machine.live().mem_pools), (0, 0));
    }

    fn drops_in_any_order_leave_nothing(rig) {
        for order in 0..24 {
            let pool = pool(rig, 8);
            let tenant = tenant(&pool, "a");
            let memory = memory(&tenant, 4, 4);
            let stream = Stream::new(&rig.device).unwrap();
            let held = memory.allocate_on(&stream, STEP).unwrap();
            memory.reserve(4 * STEP).unwrap();
            let guard = memory.make_current().unwrap();
            type Parts = (Option<TenantMemPool>, Option<CurrentTenantMemPool>, Option<Tenant>);
            let mut parts: (Parts, Option<PoolAllocation>) =
                ((Some(memory), Some(guard), Some(tenant)), Some(held));
            let mut left = vec![0, 1, 2, 3];
            let mut code = order;
            while !left.is_empty() {
                match left.remove(code % left.len()) {
                    0 => drop(parts.0.0.take()),
                    1 => drop(parts.0.1.take()),
                    2 => drop(parts.0.2.take()),
                    _ => drop(parts.1.take()),
                }
                code /= left.len() + 1;
                assert!(used(rig) <= pool.stats().committed);
            }
            pool.close().unwrap();
            let kept = rig.device.kept_memory_pools();
            assert_eq!((used(rig), rig.machine.live().mem_pools), (0, kept), "{order}");
            assert!(is_default_current(&rig.device));
        }
    }

    /// A thread was inside of `cuMemAllocAsync`, for which the driver had chosen the old pool, when
    /// that was exchanged.
    fn what_the_driver_holds_beyond_the_charge_is_charged_when_it_is_seen(rig) {
        let pool = pool(rig, 8);
        let tenant = pool.tenant("a").limit(7 * STEP).register().unwrap();
        let memory = memory(&tenant, 4, 4);
        let stream = Stream::new(&rig.device).unwrap();
        let held = memory.allocate_on(&stream, STEP).unwrap();
        memory.reserve(5 * STEP).unwrap();
        assert_eq!(charged(&tenant), 7);
        let old = held.pool().as_raw();
        // SAFETY: the pool lives as long as the allocation, and the stream is alive.
        let late = unsafe { rig.machine.alloc_from_pool_async(D0, 3 * STEP, old, stream.as_raw()) };
        let late = late.unwrap();
        let now = stats(&memory);
        assert_eq!((now.charged, now.older_held, charged(&tenant)), (10 * STEP, 4 * STEP, 10));
        assert!(tenant.try_allocate(G).unwrap_err().is_out_of_memory());
        let other = common_tenant(&pool);
        assert!(other.try_allocate(G).unwrap_err().is_out_of_memory());
        free(rig, &stream, late);
        stream.synchronize().unwrap();
        let _block = other.try_allocate(STEP).unwrap();
        assert_eq!((stats(&memory).charged, charged(&tenant)), (7 * STEP, 7));
        drop(held);
        stream.synchronize().unwrap();
        drop(memory);
        assert_eq!(charged(&tenant), 0);
    }

    fn a_ledger_grants_what_is_charged_and_gets_back_what_is_not_in_use(rig) {
        let dir = tempfile::tempdir().unwrap();
        let process = |name: &str| {
            let ledger = Ledger::builder(&rig.device, dir.path());
            let ledger = ledger.limit(12 * STEP).name(name).open().unwrap();
            let pool = Pool::builder(&rig.device).limit(Limit::Bytes(12 * STEP));
            (pool.ledger(&ledger).build().unwrap(), ledger)
        };
        let ((one, ledger), (two, _other)) = (process("one"), process("two"));
        let (a, b) = (tenant(&one, "a"), tenant(&two, "b"));
        let memory = memory(&a, 8, 1);
        let own = |of: fn(&cuvmm::ledger::ProcessStats) -> u64| {
            let stats = ledger.stats();
            let own = stats.processes.iter().find(|it| it.slot == ledger.slot());
            of(own.unwrap()) / STEP
        };
        assert_eq!((own(|it| it.charged), own(|it| it.obtained)), (9, 0));
        let stream = Stream::new(&rig.device).unwrap();
        let held = memory.allocate_on(&stream, 2 * STEP).unwrap();
        assert_eq!(stats(&memory).reserved, 2 * STEP);
        assert_eq!((own(|it| it.charged), own(|it| it.obtained)), (9, 2));
        let refused = b.try_allocate(5 * STEP).unwrap_err();
        assert!(refused.shortage().unwrap().ledger.is_some(), "{refused}");
        let waits = std::time::Duration::from_secs(60);
        let block = b.block(6 * STEP).timeout(waits).allocate().unwrap();
        assert!(charged(&a) <= 6, "{}", charged(&a));
        assert!(own(|it| it.charged) <= 6);
        let refused = memory.reserve(4 * STEP).unwrap_err();
        assert!(refused.shortage().unwrap().ledger.is_some(), "{refused}");
        drop(block);
        assert!(two.trim(0).unwrap() > 0);
        memory.reserve(4 * STEP).unwrap();
        // What the older pool holds counts too, until it is freed.
        let more = memory.allocate_on(&stream, 4 * STEP).unwrap();
        assert_eq!(stats(&memory).older_held, 2 * STEP);
        assert_eq!(own(|it| it.obtained), 6);
        drop((held, more));
        stream.synchronize().unwrap();
        memory.trim().unwrap();
        assert_eq!(own(|it| it.obtained), 0);
    }

    fn other_devices_keep_their_access_through_exchanges(rig) {
        let peer = rig.second();
        let pool = pool(rig, 9);
        let one = tenant(&pool, "a");
        let memory = one.memory_pool(4 * STEP).minimum(STEP).open_to(&peer, Access::ReadWrite);
        let memory = memory.build().unwrap();
        let [stream, theirs] = [&rig.device, &peer].map(|device| Stream::new(device).unwrap());
        let current = memory.make_current().unwrap();
        let machine = Arc::clone(&rig.machine);
        let default = machine.default_mem_pool(D0).unwrap();
        let pools: Arc<std::sync::Mutex<std::collections::BTreeSet<u64>>> = Arc::default();
        let seen = Arc::clone(&pools);
        // A library may allocate before each driver call, from the stand-in too.
        rig.faults.watch(Some(Arc::new(move |_| {
            let now = machine.current_mem_pool(D0).unwrap();
            if now != default {
                // SAFETY: the current pool is alive.
                let access = unsafe { machine.mem_pool_access(D0, now, Location::device(D1)) };
                assert_eq!(access.unwrap(), AccessFlags::READ_WRITE);
                seen.lock().unwrap().insert(now.0);
            }
        })));
        let held = library(rig, &stream, 3).unwrap();
        memory.reserve(4 * STEP).unwrap();
        // SAFETY: the memory is alive.
        let fill = |at| unsafe { rig.machine.fill_async(D1, at, 9, STEP, theirs.as_raw()) };
        fill(held).unwrap();
        let newer = library(rig, &stream, 1).unwrap();
        fill(newer).unwrap();
        theirs.synchronize().unwrap();
        memory.shrink_to(0).unwrap();
        let block = common_tenant(&pool).allocate(STEP).unwrap();
        for at in [held, newer] {
            free(rig, &stream, at);
        }
        stream.synchronize().unwrap();
        drop(block);
        // Exchanged pools that are kept serve again.
        for _ in 0..8 {
            memory.reserve(4 * STEP).unwrap();
            memory.shrink_to(0).unwrap();
        }
        assert!(pools.lock().unwrap().len() >= 3, "{pools:?}");
        assert!(rig.device.kept_memory_pools() <= 6, "{}", rig.device.kept_memory_pools());
        drop(current);
        drop(memory);
        rig.faults.watch(None);
        // They serve for a tenant that is open to no device, too.
        let memory = one.memory_pool(STEP).build().unwrap();
        let own = memory.allocate_on(&stream, STEP).unwrap();
        assert_eq!(own.pool().access_of(&peer).unwrap(), Access::None);
    }

    fn a_growth_takes_what_another_pool_that_grows_does_not_use(rig) {
        let pool = pool(rig, 16);
        let growing: Arc<std::sync::Mutex<Option<TenantMemPool>>> = Arc::default();
        let grows = Arc::clone(&growing);
        // Called while the other pool waits for more than there is.
        let hooked = pool.tenant("a").on_pressure(move |_| {
            if let Some(memory) = grows.lock().unwrap().take() {
                memory.try_reserve(8 * STEP).unwrap();
            }
        });
        let (a, b) = (hooked.register().unwrap(), tenant(&pool, "b"));
        let (one, two) = (memory(&a, 7, 1), memory(&b, 7, 1));
        *growing.lock().unwrap() = Some(one.clone());
        assert!(two.reserve(15 * STEP).unwrap_err().is_out_of_memory());
        assert!(growing.lock().unwrap().is_none(), "called");
        assert_eq!(stats(&one).maximum, 8 * STEP);
        assert!(charged(&b) <= 7);
    }

    fn a_growth_to_a_size_counts_only_what_can_be_allocated(rig) {
        let pool = pool(rig, 16);
        let one = tenant(&pool, "a");
        let memory = memory(&one, 4, 1);
        let stream = Stream::new(&rig.device).unwrap();
        let _little: Vec<_> = (0..4)
            .map(|_| memory.allocate_on(&stream, STEP * 3 / 4).unwrap())
            .collect();
        memory.reserve(4 * STEP).unwrap();
        memory.grow_to(8 * STEP).unwrap();
        let _rest = memory.allocate_on(&stream, 5 * STEP).unwrap();
    }

    fn arguments_that_cannot_be_change_nothing(rig) {
        let pool = pool(rig, 8);
        let tenant = pool.tenant("a").limit(4 * STEP).register().unwrap();
        let is_zero = |error| {
            matches!(error, BlockError::Argument(ArgumentError::Zero { .. }))
        };
        assert!(is_zero(tenant.memory_pool(0).build().unwrap_err()));
        let more = tenant.memory_pool(STEP).minimum(2 * STEP).build();
        assert!(matches!(more, Err(BlockError::Argument(ArgumentError::TooLarge { .. }))));
        for bytes in [u64::MAX, u64::MAX - STEP + 1] {
            let error = tenant.memory_pool(bytes).build().unwrap_err();
            assert!(matches!(error, BlockError::Argument(ArgumentError::Overflow { .. })));
        }
        let peer = rig.second();
        let open = |devices: &[(&Device, Access)]| {
            let open = devices.iter();
            let open = open.fold(tenant.memory_pool(STEP), |open, &(device, access)| {
                open.open_to(device, access)
            });
            open.build().unwrap_err()
        };
        let argument = |error| match error {
            BlockError::Argument(error) => error,
            other => panic!("{other}"),
        };
        let own = argument(open(&[(&rig.device, Access::Read)]));
        assert!(matches!(own, ArgumentError::HasAccess { .. }), "{own}");
        let twice = argument(open(&[(&peer, Access::Read), (&peer, Access::Read)]));
        assert!(matches!(twice, ArgumentError::HasAccess { .. }), "{twice}");
        let none = argument(open(&[(&peer, Access::None)]));
        assert!(matches!(none, ArgumentError::Zero { .. }), "{none}");
        let elsewhere = common::model();
        argument(open(&[(&elsewhere.device, Access::Read)]));
        assert_eq!(rig.machine.live().mem_pools, 0, "no driver call");
        let error = tenant.memory_pool(4 * STEP).build().unwrap_err();
        let shortage = error.shortage().unwrap();
        assert_eq!((shortage.wanted, shortage.available), (5 * STEP, 4 * STEP));
        assert!(error.to_string().contains("tenant \"a\""), "{error}");
        let memory = tenant.memory_pool(1).build().unwrap();
        assert_eq!(charged(&tenant), 2, "whole steps");
        assert!(is_zero(memory.reserve(0).unwrap_err()));
        assert!(is_zero(memory.grow_to(0).unwrap_err()));
        assert!(memory.reserve(u64::MAX).is_err());
        assert!(memory.grow_to(u64::MAX).is_err());
        let foreign = Stream::new(&rig.second()).unwrap();
        assert!(matches!(
            memory.allocate_on(&foreign, 1),
            Err(BlockError::Argument(ArgumentError::WrongDevice { .. }))
        ));
        let stream = Stream::new(&rig.device).unwrap();
        assert!(memory.allocate_on(&stream, 0).is_err());
        assert_eq!((charged(&tenant), stats(&memory).maximum), (2, STEP));
        assert!(format!("{memory:?}").contains("TenantMemPool"));
        assert_eq!(memory.tenant().name(), "a");
    }

    fn an_exchange_asks_little_of_an_empty_pool_that_was_never_current(rig) {
        let pool = pool(rig, 16);
        let tenant = tenant(&pool, "a");
        let memory = memory(&tenant, 2, 2);
        let stream = Stream::new(&rig.device).unwrap();
        let asked = || {
            [
                Call::MemPoolCreate,
                Call::MemPoolDestroy,
                Call::MemPoolGetAttribute,
                Call::MemPoolSetAttribute,
                Call::MemPoolTrimTo,
            ]
            .map(|call| rig.faults.count(call))
        };
        rig.faults.forget();
        memory.reserve(4 * STEP).unwrap();
        assert_eq!(asked(), [1, 1, 4, 1, 0]);
        // What was allocated since the figures were read is seen and stays charged.
        let held = memory.allocate_on(&stream, 3 * STEP).unwrap();
        memory.reserve(4 * STEP).unwrap();
        let now = stats(&memory);
        assert_eq!((now.maximum, now.older_pools, now.older_held), (7 * STEP, 1, 3 * STEP));
        assert_eq!(charged(&tenant), 8);
        drop(held);
        stream.synchronize().unwrap();
        let now = stats(&memory);
        assert_eq!((now.maximum, now.older_pools, charged(&tenant)), (4 * STEP, 0, 5));
    }

    fn a_capture_guard_is_left_alone(rig) {
        let pool = pool(rig, 8);
        let tenant = tenant(&pool, "a");
        let memory = memory(&tenant, 5, 0);
        let other = common_tenant(&pool);
        let guard = pool.capture_guard();
        rig.faults.forget();
        assert!(matches!(memory.reserve(6 * STEP), Err(BlockError::Capturing(_))));
        assert!(matches!(memory.stats(), Err(BlockError::Capturing(_))));
        assert!(matches!(memory.shrink_to(0), Err(BlockError::Capturing(_))));
        assert!(matches!(tenant.memory_pool(STEP).build(), Err(BlockError::Capturing(_))));
        assert!(other.try_allocate(3 * STEP).unwrap_err().is_out_of_memory());
        assert_eq!(rig.faults.calls(), vec![], "no driver call");
        drop(guard);
        let _block = other.try_allocate(3 * STEP).unwrap();
        // A capture of another library on this thread is not broken by a reclaim.
        let stream = Stream::new(&rig.device).unwrap();
        captures::begin(&rig.machine, &stream);
        let _more = other.try_allocate(STEP).unwrap();
        captures::end(&rig.machine, &stream);
    }

    fn pools_that_leave_memory_free_leave_what_is_promised(rig) {
        let total = rig.device.total_memory();
        let pool = Pool::builder(&rig.device).limit(Limit::LeaveFree(total - 12 * STEP));
        let pool = pool.build().unwrap();
        let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
        // Another program has two.
        let foreign = MemPool::new(&rig.device).unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let theirs = foreign.allocate_on(&stream, 2 * STEP).unwrap();
        let refused = a.memory_pool(10 * STEP).build().unwrap_err();
        assert!(matches!(refused, BlockError::DriverOutOfMemory { .. }), "{refused}");
        assert_eq!((charged(&a), pool.stats().free), (0, 0));
        let memory = memory(&a, 6, 6);
        let refused = b.try_allocate(4 * STEP).unwrap_err();
        assert!(matches!(refused, BlockError::DriverOutOfMemory { .. }), "{refused}");
        let block = b.try_allocate(3 * STEP).unwrap();
        let held = memory.allocate_on(&stream, 6 * STEP).unwrap();
        assert_eq!(used(rig), 11 * STEP);
        drop((held, block, theirs));
        stream.synchronize().unwrap();
    }
}

fn common_tenant(pool: &Pool) -> Tenant {
    tenant(pool, "other")
}

#[test]
fn a_lost_context_gives_everything_back() {
    let rig = common::model();
    let pool = pool(&rig, 8);
    let tenant = tenant(&pool, "a");
    let memory = memory(&tenant, 4, 4);
    let stream = Stream::new(&rig.device).unwrap();
    let guard = memory.make_current().unwrap();
    let held = memory.allocate_on(&stream, STEP).unwrap();
    rig.machine
        .lose_context(D0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(stream.synchronize().is_err());
    assert!(memory.reserve(5 * STEP).is_err());
    assert!(memory.stats().is_err());
    assert_eq!(charged(&tenant), 5);
    drop((held, guard));
    drop(memory);
    assert_eq!(charged(&tenant), 0);
    drop(tenant);
    let _ = pool.close();
    assert_eq!(rig.device.drop_failures(), 0);
}

#[test]
fn what_a_driver_lacks_is_named_and_nothing_is_charged() {
    use cuvmm::driver::model::ModelDriver;
    let of = |options| {
        let device = Device::open(Arc::new(ModelDriver::new(options)), 0).unwrap();
        let pool = Pool::builder(&device).limit(Limit::Bytes(GIB));
        let pool = pool.build().unwrap();
        let tenant = tenant(&pool, "a");
        let error = tenant.memory_pool(STEP).build().unwrap_err();
        assert_eq!(pool.stats().committed, 0);
        error.to_string()
    };
    let version = |major, minor| {
        let options = common::model_options();
        of(options.version(CudaVersion::new(major, minor)))
    };
    assert!(version(11, 1).contains("CUDA 12.2"), "{}", version(11, 1));
    assert!(version(12, 1).contains("CUDA 12.2"), "{}", version(12, 1));
    let without = common::model_options().attribute(DeviceAttribute::MEMORY_POOLS, 0);
    let error = of(without);
    assert!(error.contains("memory pools"), "{error}");
}

/// Threads of another library allocate and free while the pool grows, shrinks and is reclaimed from,
/// and a thread watches that the driver holds no more than the limit.
#[test]
fn threads_of_other_libraries_stay_within_the_limit() {
    let rig = common::host();
    let pool = pool(&rig, 16);
    let tenant = tenant(&pool, "a");
    let other = common_tenant(&pool);
    let memory = memory(&tenant, 6, 1);
    let guard = memory.make_current().unwrap();
    let stop = AtomicBool::new(false);
    let served = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let stream = Stream::new(&rig.device).unwrap();
                let mut held = Vec::new();
                for step in 0_u64.. {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    match library(&rig, &stream, 1 + step % 2) {
                        Ok(at) => held.push(at),
                        Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                    }
                    served.fetch_add(1, Ordering::SeqCst);
                    if step % 3 == 2 || held.len() > 3 {
                        held.drain(..).for_each(|at| free(&rig, &stream, at));
                        stream.synchronize().unwrap();
                    }
                }
                held.into_iter().for_each(|at| free(&rig, &stream, at));
                stream.synchronize().unwrap();
            });
        }
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                let held = used(&rig);
                assert!(held <= 16 * STEP, "{} steps", held as f64 / STEP as f64);
            }
        });
        for round in 0_u64.. {
            if round >= 150 && served.load(Ordering::SeqCst) >= 600 {
                break;
            }
            match round % 5 {
                0 => drop(memory.reserve((1 + round % 7) * STEP)),
                1 => drop(other.try_allocate((1 + round % 11) * STEP)),
                2 => drop(memory.shrink_to((round % 4) * STEP)),
                3 => drop(pool.trim(0)),
                _ => drop(memory.stats().unwrap()),
            }
            assert!(memory.is_current().unwrap());
        }
        stop.store(true, Ordering::SeqCst);
    });
    drop(guard);
    drop(memory);
    assert_eq!(charged(&tenant), 0);
}

/// Threads that reserve, read the figures and are short of memory take nothing from one another that
/// is charged and not used yet.
#[test]
fn threads_that_reserve_with_room_for_all_are_not_refused() {
    let rig = common::host();
    let pool = pool(&rig, 24);
    let tenant = tenant(&pool, "a");
    let memory = memory(&tenant, 2, 1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reserves = scope.spawn(|| {
            for round in 0..100 {
                memory.reserve((3 + round % 5) * STEP).unwrap();
                memory.shrink_to(0).unwrap();
            }
        });
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                stats(&memory);
            }
        });
        let outcome = reserves.join();
        stop.store(true, Ordering::SeqCst);
        outcome.unwrap();
    });
    assert_eq!((charged(&tenant), stats(&memory).maximum), (2, STEP));
}

#[test]
fn of_two_threads_that_make_their_pools_current_one_is_refused() {
    let rig = common::host();
    let pool = pool(&rig, 8);
    let tenants = ["a", "b"].map(|name| tenant(&pool, name));
    let pools = [0, 1].map(|which| memory(&tenants[which], 2, 1));
    let barrier = std::sync::Barrier::new(2);
    let become_current = |memory: &TenantMemPool| {
        let mut count = 0;
        for _ in 0..200 {
            barrier.wait();
            let guard = memory.make_current();
            barrier.wait();
            assert_eq!(guard.is_ok(), memory.is_current().unwrap());
            count += usize::from(guard.is_ok());
            barrier.wait();
        }
        count
    };
    let counts = std::thread::scope(|scope| {
        let threads = pools.each_ref();
        let threads = threads.map(|memory| scope.spawn(|| become_current(memory)));
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(counts[0] + counts[1], 200);
}
