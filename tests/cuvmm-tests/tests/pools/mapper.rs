//! The mapper's thread, which precommits memory and unmaps freed memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use crate::common;
use crate::common::books::figures;
use crate::common::{D0, G, mapped_pool, until};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{ArgumentError, DeviceError, PoolError};
use cuvmm::{Limit, Mapper, Pool, Stream};

on_both! {
    fn a_growing_block_finds_memory_that_another_thread_mapped(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 256);
        let stream = Stream::new(&rig.device).unwrap();
        let block = tenant.block(32 * G).capacity(256 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        let own = || pool.calls().total() - rig.device.mapper_calls().total();
        block.try_grow_to(33 * G).unwrap();
        let before = own();
        for granules in 34..=256 {
            until(&pool, "precommitted", || {
                let stats = tenant.stats();
                stats.precommitted > 0 || stats.committed == 256 * G
            });
            block.try_grow_to(granules * G).unwrap();
            let stats = tenant.stats();
            assert!(stats.precommitted <= granules * G / 4 + G, "{} at {granules}", stats.precommitted / G);
        }
        assert_eq!(own(), before, "the growing thread makes no driver call");
        assert!(rig.device.mapper_calls().count(Call::MemCreate) > 0);
        drop(block);
        drop(tenant);
        pool.close().unwrap();
    }

    fn nothing_is_mapped_ahead_of_a_block_of_zero_bytes(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 256);
        let mut range = tenant.block(0).capacity(256 * G).try_allocate().unwrap();
        let mut other = tenant.block(8 * G).capacity(16 * G).try_allocate().unwrap();
        range.try_grow_to(0).unwrap();
        // The mapper comes to the other block after the range.
        other.try_grow_to(9 * G).unwrap();
        until(&pool, "precommitted", || tenant.stats().precommitted > 0);
        assert!(range.extents().is_empty());
        drop((range, other, tenant));
        pool.close().unwrap();
    }

    fn a_mapper_hears_whoever_rings_rarely_and_whoever_hurries(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 256);
        let mut block = tenant.block(8 * G).capacity(128 * G).try_allocate().unwrap();
        let mut size = 8 * G;
        // First slowly enough for the thread to sleep in between, then as fast as it keeps up.
        for pause in [0, 1100, 0, 0, 0, 0, 0, 0] {
            std::thread::sleep(Duration::from_millis(pause));
            size += G;
            block.try_grow_to(size).unwrap();
            until(&pool, "precommitted", || tenant.stats().precommitted > 0);
        }
        drop(block);
        drop(tenant);
        pool.close().unwrap();
    }

    fn everything_goes_on_when_the_mapper_stops(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        assert!(matches!(Mapper::start(&rig.device), Err(DeviceError::MapperRunning)));
        let pool = mapped_pool(rig, 128, &mapper);
        let tenant = pool.tenant("a").register().unwrap();
        let mut block = tenant.block(16 * G).capacity(128 * G).try_allocate().unwrap();
        block.try_grow_to(20 * G).unwrap();
        mapper.stop();
        for granules in 21..=128 {
            block.try_grow_to(granules * G).unwrap();
        }
        drop(block);
        drop(tenant);
        let again = Mapper::start(&rig.device).unwrap();
        pool.close().unwrap();
        drop(again);
    }

    fn a_pool_is_closed_or_given_back_while_the_mapper_serves_it(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        for _ in 0..50 {
            let pool = mapped_pool(rig, 64, &mapper);
            let tenant = pool.tenant("a").register().unwrap();
            let mut block = tenant.block(8 * G).capacity(64 * G).try_allocate().unwrap();
            block.try_grow_to(9 * G).unwrap();
            let pool = pool.close().unwrap_err().owner;
            // The mapper serves the block again after the refusal.
            block.try_grow_to(13 * G).unwrap();
            until(&pool, "precommitted", || tenant.stats().precommitted > 0);
            drop((block, tenant));
            pool.close().unwrap();
        }
        assert_eq!(rig.machine.live().physicals, 0);
    }

    fn a_mapper_of_another_device_is_refused(rig) {
        let other = common::model();
        let mapper = Mapper::start(&other.device).unwrap();
        let built = Pool::builder(&rig.device).limit(Limit::Bytes(G)).mapper(&mapper).build();
        assert!(matches!(built, Err(PoolError::Argument(ArgumentError::WrongDevice("the mapper")))));
        let mapper = Mapper::start(&rig.device).unwrap();
        let built = Pool::builder(&rig.device).limit(Limit::Bytes(G)).mapper(&mapper).free_target(2 * G).build();
        let built = built.unwrap_err();
        let too_much = ArgumentError::TooLarge { what: "bytes that are kept ready", value: 2 * G, most: G };
        assert_eq!(built, PoolError::Argument(too_much));
    }

    fn margin_made_ahead_goes_to_whoever_needs_memory(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 64, &mapper);
        let [a, b] = common::tenants(&pool);
        let mut block = a.block(32 * G).capacity(64 * G).try_allocate().unwrap();
        block.try_grow_to(40 * G).unwrap();
        until(&pool, "precommitted", || a.stats().precommitted > 0);
        // At most about a granule is stranded in the extent at the block's end.
        let size = 64 * G - 40 * G - pool.stats().stranded;
        until(&pool, "the mapper to be done", || b.try_allocate(size).is_ok());
        assert_eq!(figures(&pool).leased, 0);
    }

    fn memory_that_is_being_placed_ahead_goes_to_whoever_needs_it_too(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 64, &mapper);
        let [a, b] = common::tenants(&pool);
        let mut block = a.block(32 * G).capacity(64 * G).try_allocate().unwrap();
        // The mapper is held in its first call.
        let (reached, go_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (here, told, main) = (Arc::clone(&reached), Arc::clone(&go_on), std::thread::current().id());
        rig.faults.watch(Some(Arc::new(move |call| {
            if call == Call::MemMap && std::thread::current().id() != main {
                here.store(true, SeqCst);
                while !told.load(SeqCst) {
                    std::thread::yield_now();
                }
            }
        })));
        block.try_grow_to(40 * G).unwrap();
        until(&pool, "begun", || reached.load(SeqCst));
        let size = 64 * G - 40 * G - pool.stats().stranded;
        let taken = std::thread::scope(|scope| {
            let taking = scope.spawn(|| b.try_allocate(size).map(drop));
            std::thread::sleep(Duration::from_millis(20));
            go_on.store(true, SeqCst);
            taking.join().unwrap()
        });
        rig.faults.watch(None);
        taken.unwrap();
        assert_eq!(block.size(), 40 * G);
    }

    fn what_a_tenant_left_behind_is_unmapped_without_anybody_asking(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 16);
        let stream = Stream::new(&rig.device).unwrap();
        let block = tenant.allocate_on(&stream, 16 * G).unwrap();
        rig.held_kernel(&stream, &[], &[(block.address(), G, 1)]);
        drop(block);
        tenant.unregister();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(pool.stats().pending_free, 16 * G, "a kernel may still write there");
        rig.machine.release_stream(D0, stream.as_raw());
        until(&pool, "the tenant to be gone", || pool.stats().tenants.is_empty());
        assert_eq!((pool.stats().committed, pool.stats().free), (0, 16 * G));
    }

    fn memory_is_kept_ready(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let limit = Limit::Bytes(32 * G);
        let pool = Pool::builder(&rig.device).limit(limit).mapper(&mapper).free_target(8 * G).largest_extent(4 * G);
        let pool = pool.build().unwrap();
        let a = pool.tenant("a").guarantee(20 * G).register().unwrap();
        let blocks: Vec<_> = (0..8).map(|_| a.try_allocate(4 * G).unwrap()).collect();
        assert_eq!(pool.stats().free, 0, "memory in use is not taken");
        drop(blocks);
        // An allocation makes the mapper check.
        drop(a.try_allocate(4 * G).unwrap());
        until(&pool, "8 granules to be ready", || pool.stats().free >= 8 * G);
        assert!(a.stats().committed >= 20 * G, "a guarantee is not touched");
    }

    fn a_mapper_that_fails_leaves_the_books_right(rig) {
        for (call, code) in [
            (Call::MemCreate, CUresult::CUDA_ERROR_OUT_OF_MEMORY),
            (Call::MemMap, CUresult::CUDA_ERROR_UNKNOWN),
            (Call::MemSetAccess, CUresult::CUDA_ERROR_OUT_OF_MEMORY),
        ] {
            let (_mapper, pool, tenant) = common::mapped(rig, 64);
            let mut block = tenant.block(31 * G).capacity(64 * G).try_allocate().unwrap();
            rig.faults.forget();
            rig.faults.arm(Fault::all(code).of(call));
            // This commits nothing in the calling thread: the failure is the mapper's.
            block.shrink_to(30 * G).unwrap();
            block.try_grow_to(31 * G).unwrap();
            until(&pool, "the mapper to fail", || rig.faults.injected() > 0);
            // The mapper retries when the block grows, not by itself.
            std::thread::sleep(Duration::from_millis(20));
            assert!(rig.faults.injected() <= 2, "{} attempts", rig.faults.injected());
            rig.faults.disarm();
            block.try_grow_to(40 * G).unwrap();
            drop((block, tenant));
            pool.close().unwrap();
            assert_eq!(rig.machine.live().physicals, 0);
        }
    }
}
