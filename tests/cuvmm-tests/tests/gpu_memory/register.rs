//! Registered memory on a GPU: kernels continue to write after the region is dropped, and NICs get
//! descriptors.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::Duration;

use crate::gpu;
use crate::on_each;
use cuvmm::driver::{DeviceAttribute, PointerAttribute};
use cuvmm::error::MemoryError;
use cuvmm::{Limit, Physical, Pool, Region};

/// Delay of kernels, so that an access that does not wait for them is too early.
const LATE: Duration = Duration::from_millis(20);

on_each! {
    fn what_is_registered_is_written_after_the_region_has_gone(stage) {
        let g = stage.g();
        let stream = stage.stream();
        let mut region = Region::builder(&stage.device, 8 * g).largest_extent(2 * g).reserve().unwrap();
        region.commit(0..8 * g).unwrap();
        let registration = region.register(2 * g..6 * g).unwrap();
        let stamp = stage.stamp();
        drop(region);
        stage.work().fill(&stream, registration.address(), 4 * g, stamp, LATE);
        stage.work().check(&stream, registration.address(), 4 * g, stamp);
        // The drop waits for both kernels, or the context is lost.
        drop(registration);
        stage.settle();
    }

    fn a_blocks_memory_is_written_while_it_is_registered(stage) {
        let g = stage.g();
        let stream = stage.stream();
        let pool = Pool::builder(&stage.device).limit(Limit::Bytes(8 * g)).largest_extent(g).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let block = tenant.block(8 * g).home_stream(&stream).try_allocate().unwrap();
        let registration = block.register().unwrap();
        drop(block);
        assert!(pool.tenant("b").register().unwrap().try_allocate(g).is_err());
        pool.compact(|_| true).unwrap();
        pool.trim(0).unwrap();
        let stamp = stage.stamp();
        stage.work().fill(&stream, registration.address(), 8 * g, stamp, LATE);
        stage.work().check(&stream, registration.address(), 8 * g, stamp);
        drop(registration);
        stage.settle();
    }

    fn memory_is_for_rdma_where_the_device_has_it(stage) {
        let g = stage.g();
        let pool = Pool::builder(&stage.device).limit(Limit::Bytes(4 * g));
        let pool = pool.rdma_if_supported().unwrap().build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let block = tenant.try_allocate(3 * g).unwrap();
        let (driver, asked) = (stage.driver(), PointerAttribute::IS_GPU_DIRECT_RDMA_CAPABLE);
        let reached = driver.pointer_attribute(gpu::D0, block.address(), asked).unwrap();
        let probed = Physical::probe_rdma(&stage.device);
        assert_eq!(reached == 1, probed.is_ok(), "{probed:?}");
        drop(block);
        stage.settle();
    }

    fn dma_bufs_are_had_over_one_and_over_several_extents(stage) {
        let g = stage.g();
        let mut region = Region::builder(&stage.device, 8 * g)
            .largest_extent(2 * g)
            .for_nccl()
            .unwrap()
            .reserve()
            .unwrap();
        region.commit(0..4 * g).unwrap();
        let driver = stage.driver();
        let types = PointerAttribute::ALLOWED_HANDLE_TYPES;
        assert_ne!(driver.pointer_attribute(gpu::D0, region.address(), types).unwrap() & 1, 0);
        let registration = region.register(0..4 * g).unwrap();
        let there = driver.device_attribute(gpu::D0, DeviceAttribute::DMA_BUF).unwrap() != 0;
        for range in [0..2 * g, g..3 * g, 0..4 * g, g..g + 65_536] {
            match registration.dma_buf(range.clone()) {
                Ok(buffer) => assert!(there && buffer.as_fd().as_raw_fd() >= 0, "{range:?}"),
                Err(MemoryError::Range { cause, .. }) => assert!(!there, "{range:?}: {cause}"),
                Err(other) => panic!("{range:?}: {other}"),
            }
        }
        assert_eq!(registration.is_exported(), there);
        registration.close().unwrap();
        region.close().unwrap();
        stage.settle();
    }
}
