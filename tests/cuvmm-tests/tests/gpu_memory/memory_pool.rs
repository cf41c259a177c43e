//! Memory pools of the driver within a tenant's limit, on a GPU: what other libraries allocate is
//! bounded, exchanged pools keep their contents, and the driver's own figures stay within the limit.
//!
//! `unsafe` is used for the driver's own fills and copies, and for what other libraries allocate.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::gpu::{D0, Stage};
use crate::on_each;
use cuvmm::driver::{CUresult, DeviceAddress, DriverError};
use cuvmm::{Limit, MemPool, Pool, Stream, Tenant, TenantMemPool};

/// The step in which pools of the driver obtain memory.
const STEP: u64 = 32 << 20;

fn pool(stage: &Stage, steps: u64) -> Pool {
    let pool = Pool::builder(&stage.device).limit(Limit::Bytes(steps * STEP));
    pool.build().unwrap()
}

fn memory(tenant: &Tenant, steps: u64, minimum: u64) -> TenantMemPool {
    let memory = tenant.memory_pool(steps * STEP).minimum(minimum * STEP);
    memory.build().unwrap()
}

fn charged(tenant: &Tenant) -> u64 {
    tenant.stats().committed / STEP
}

/// Allocates as another library does.
fn library(stage: &Stage, stream: &Stream, steps: u64) -> Result<DeviceAddress, DriverError> {
    // SAFETY: the stream is alive.
    unsafe {
        stage
            .driver()
            .alloc_async(D0, steps * STEP, stream.as_raw())
    }
}

fn free(stage: &Stage, stream: &Stream, at: DeviceAddress) {
    // SAFETY: the memory is freed once, behind its work.
    unsafe { stage.driver().free_async(D0, at, stream.as_raw()).unwrap() }
}

fn is_full(outcome: &Result<DeviceAddress, DriverError>) -> bool {
    let code = outcome.as_ref().err().and_then(DriverError::code);
    code == Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
}

fn used(stage: &Stage) -> u64 {
    let info = stage.device.memory_info().unwrap();
    info.total - info.free
}

on_each! {
    fn the_maximum_bounds_other_libraries(stage) {
        let pool = pool(stage, 8);
        let tenant = pool.tenant("a").register().unwrap();
        let memory = memory(&tenant, 4, 1);
        let stream = stage.stream();
        let current = memory.make_current().unwrap();
        let before = used(stage);
        let one = library(stage, &stream, 3).unwrap();
        assert!(is_full(&library(stage, &stream, 2)));
        let two = memory.allocate_on(&stream, STEP).unwrap();
        assert!(memory.allocate_on(&stream, STEP).unwrap_err().is_out_of_memory());
        stream.synchronize().unwrap();
        assert_eq!(memory.stats().unwrap().reserved, 4 * STEP, "a step is 32 MiB");
        assert!(used(stage) - before <= 5 * STEP);
        free(stage, &stream, one);
        drop(two);
        stream.synchronize().unwrap();
        assert_eq!(memory.trim().unwrap(), 4 * STEP);
        assert_eq!(charged(&tenant), 5);
        drop(current);
        let default = MemPool::default_of(&stage.device).unwrap();
        assert!(default.is_current().unwrap());
    }

    fn contents_stay_in_an_exchanged_pool(stage) {
        let pool = pool(stage, 8);
        let tenant = pool.tenant("a").register().unwrap();
        let memory = memory(&tenant, 3, 1);
        let stream = stage.stream();
        let current = memory.make_current().unwrap();
        let old = library(stage, &stream, 2).unwrap();
        let stamp = stage.stamp();
        stage.work().fill(&stream, old, 2 * STEP, stamp, std::time::Duration::from_millis(2));
        memory.reserve(4 * STEP).unwrap();
        assert_eq!(memory.stats().unwrap().older_pools, 1);
        let new = library(stage, &stream, 4).unwrap();
        assert!(is_full(&library(stage, &stream, 1)));
        let other = stage.stamp();
        stage.work().fill(&stream, new, 4 * STEP, other, std::time::Duration::ZERO);
        stage.work().check(&stream, old, 2 * STEP, stamp);
        stage.work().check(&stream, new, 4 * STEP, other);
        assert_eq!(charged(&tenant), 7);
        free(stage, &stream, old);
        stream.synchronize().unwrap();
        assert_eq!(memory.stats().unwrap().older_pools, 0);
        assert_eq!(charged(&tenant), 5);
        assert!(memory.is_current().unwrap());
        free(stage, &stream, new);
        stream.synchronize().unwrap();
        drop(current);
    }

    fn another_tenant_gets_what_is_not_in_use(stage) {
        let pool = pool(stage, 8);
        let a = pool.tenant("a").register().unwrap();
        let b = pool.tenant("b").register().unwrap();
        let memory = memory(&a, 6, 1);
        let stream = stage.stream();
        let current = memory.make_current().unwrap();
        let kept = library(stage, &stream, 1).unwrap();
        let stamp = stage.stamp();
        stage.work().fill(&stream, kept, STEP, stamp, std::time::Duration::ZERO);
        let idle = library(stage, &stream, 4).unwrap();
        free(stage, &stream, idle);
        stream.synchronize().unwrap();
        let block = b.allocate(5 * STEP).unwrap();
        assert_eq!((charged(&a), charged(&b)), (3, 5));
        assert!(b.allocate(STEP).unwrap_err().is_out_of_memory());
        let theirs = stage.stamp();
        stage.fill(&stream, &block, theirs);
        stage.check(&stream, &block, theirs);
        stage.work().check(&stream, kept, STEP, stamp);
        assert!(is_full(&library(stage, &stream, 2)));
        drop(block);
        stream.synchronize().unwrap();
        memory.reserve(4 * STEP).unwrap();
        let again = library(stage, &stream, 4).unwrap();
        for at in [kept, again] {
            free(stage, &stream, at);
        }
        stream.synchronize().unwrap();
        drop(current);
    }

    fn what_outlives_its_tenant_stays_charged(stage) {
        let pool = pool(stage, 8);
        let tenant = pool.tenant("a").register().unwrap();
        let memory = memory(&tenant, 4, 4);
        let stream = stage.stream();
        let current = memory.make_current().unwrap();
        let held = library(stage, &stream, 2).unwrap();
        tenant.unregister();
        let default = MemPool::default_of(&stage.device).unwrap();
        assert!(default.is_current().unwrap());
        assert_eq!(pool.stats().committed, 2 * STEP);
        drop((memory, current));
        free(stage, &stream, held);
        stream.synchronize().unwrap();
        pool.trim(0).unwrap();
        assert_eq!(pool.stats().committed, 0);
        pool.close().unwrap();
    }

    /// Threads of another library allocate while the pool is exchanged and reclaimed from. The
    /// driver's figures of the device stay within the limit, with what it had before.
    fn threads_stay_within_the_limit_by_the_drivers_figure(stage) {
        let limit = 8;
        let pool = pool(stage, limit);
        let tenant = pool.tenant("a").register().unwrap();
        let other = pool.tenant("b").register().unwrap();
        let memory = memory(&tenant, 3, 1);
        // What a stream and a first allocation cost the driver itself.
        let streams: [Stream; 2] = stage.streams();
        for stream in &streams {
            drop(memory.allocate_on(stream, STEP).unwrap());
            stream.synchronize().unwrap();
        }
        memory.trim().unwrap();
        let before = used(stage);
        let guard = memory.make_current().unwrap();
        let (stop, served) = (AtomicBool::new(false), AtomicU64::new(0));
        let most = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for stream in &streams {
                let (stop, served) = (&stop, &served);
                scope.spawn(move || {
                    let mut held = Vec::new();
                    for step in 0_u64.. {
                        if stop.load(Ordering::SeqCst) {
                            break;
                        }
                        match library(stage, stream, 1 + step % 2) {
                            Ok(at) => held.push(at),
                            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                        }
                        served.fetch_add(1, Ordering::SeqCst);
                        if step % 3 == 2 || held.len() > 3 {
                            held.drain(..).for_each(|at| free(stage, stream, at));
                            stream.synchronize().unwrap();
                        }
                    }
                    held.into_iter().for_each(|at| free(stage, stream, at));
                    stream.synchronize().unwrap();
                });
            }
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    most.fetch_max(used(stage).saturating_sub(before), Ordering::SeqCst);
                }
            });
            for round in 0_u64.. {
                if round >= 200 && served.load(Ordering::SeqCst) >= 1000 {
                    break;
                }
                match round % 5 {
                    0 => drop(memory.reserve((1 + round % 4) * STEP)),
                    1 => drop(other.try_allocate((1 + round % 6) * STEP)),
                    2 => drop(memory.shrink_to((round % 4) * STEP)),
                    3 => drop(pool.trim(0)),
                    _ => drop(memory.stats().unwrap()),
                }
                assert!(memory.is_current().unwrap());
            }
            stop.store(true, Ordering::SeqCst);
        });
        let most = most.load(Ordering::SeqCst);
        assert!(most <= limit * STEP, "{} MiB more than before", most >> 20);
        drop(guard);
        drop(memory);
        assert_eq!(charged(&tenant), 0);
    }
}
