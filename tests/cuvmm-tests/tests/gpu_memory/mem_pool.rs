//! Memory pools of the driver on a GPU: maxima, order of streams, the current pool.
//!
//! `unsafe` is used for the driver's own fills and copies, and for what other libraries allocate.
#![allow(unsafe_code)]

use crate::gpu::{D0, Stage};
use crate::on_each;
use cuvmm::driver::CUresult;
use cuvmm::{MemPool, PoolAllocation, Stream};

const MIB: u64 = 1 << 20;

/// Returns the size of each allocation: whole steps of 32 MiB, in which pools obtain memory.
fn part(stage: &Stage) -> u64 {
    stage.scaled(64 * MIB, 32 * MIB)
}

fn capped(stage: &Stage) -> MemPool {
    let pool = MemPool::builder(&stage.device).maximum(4 * part(stage));
    let pool = pool.create().unwrap();
    pool.set_release_threshold(u64::MAX).unwrap();
    pool
}

fn fill(stage: &Stage, stream: &Stream, memory: &PoolAllocation, byte: u8) {
    let (at, size) = (memory.address(), memory.size());
    // SAFETY: the memory is alive, and freed behind the work of the stream.
    let filled = unsafe {
        stage
            .driver()
            .fill_async(D0, at, byte, size, stream.as_raw())
    };
    filled.unwrap();
}

fn last(stage: &Stage, stream: &Stream, memory: &PoolAllocation) -> u8 {
    stream.synchronize().unwrap();
    let at = memory.address().checked_add(memory.size() - 1).unwrap();
    let mut byte = [0];
    // SAFETY: the memory is alive, and no work uses it.
    unsafe { stage.driver().copy_to_host(D0, &mut byte, at).unwrap() };
    byte[0]
}

on_each! {
    fn a_maximum_holds_and_memory_comes_back(stage) {
        let (pool, stream, part) = (capped(stage), stage.stream(), part(stage));
        let mut held: Vec<_> = (0..4).map(|_| pool.allocate_on(&stream, part).unwrap()).collect();
        for (memory, byte) in held.iter().zip(1..) {
            fill(stage, &stream, memory, byte);
        }
        let error = pool.allocate_on(&stream, part).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        for (memory, byte) in held.iter().zip(1..) {
            assert_eq!(last(stage, &stream, memory), byte);
        }
        let stats = pool.stats().unwrap();
        assert_eq!((stats.used, stats.used_peak), (4 * part, 4 * part));
        held.pop();
        let again = pool.allocate_on(&stream, part).unwrap();
        fill(stage, &stream, &again, 9);
        assert_eq!(last(stage, &stream, &again), 9);
        drop((held, again));
        stream.synchronize().unwrap();
        assert_eq!(pool.stats().unwrap().used, 0);
        pool.trim_to(0).unwrap();
        assert_eq!(pool.stats().unwrap().reserved, 0);
    }

    fn other_streams_use_the_memory_in_order(stage) {
        let (pool, part) = (capped(stage), part(stage));
        let [stream, other] = stage.streams();
        for round in 0..20 {
            let memory = pool.allocate_on(&stream, part).unwrap();
            fill(stage, &stream, &memory, 1);
            memory.record_use(&other).unwrap();
            fill(stage, &other, &memory, 2 + round);
            assert_eq!(last(stage, &other, &memory), 2 + round);
        }
        stream.synchronize().unwrap();
        assert!(pool.stats().unwrap().reserved <= 4 * part);
    }

    fn the_current_pool_caps_other_libraries(stage) {
        let (pool, stream, part) = (capped(stage), stage.stream(), part(stage));
        let guard = pool.make_current().unwrap();
        // SAFETY: the stream is alive, and nothing uses the memory.
        let allocate = |size| unsafe { stage.driver().alloc_async(D0, size, stream.as_raw()) };
        let memory = allocate(3 * part).unwrap();
        let more = allocate(2 * part).unwrap_err();
        assert_eq!(more.code(), Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(pool.stats().unwrap().used, 3 * part);
        // SAFETY: the memory was allocated above and is freed once.
        unsafe { stage.driver().free_async(D0, memory, stream.as_raw()).unwrap() };
        drop(guard);
        let default = MemPool::default_of(&stage.device).unwrap();
        assert!(default.is_current().unwrap());
        stream.synchronize().unwrap();
    }
}
