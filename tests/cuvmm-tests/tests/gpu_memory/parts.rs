//! Parts of extents that are given back: other tenants have them, the driver counts them, and what
//! kernels wrote before and after the cut is there.

use std::time::Duration;

use crate::gpu;
use crate::on_each;
use cuvmm::driver::DeviceAddress;
use cuvmm::{Limit, Pool, Region};

/// Delay of kernels, so that an access that does not wait for them is too early.
const LATE: Duration = Duration::from_millis(20);

on_each! {
    fn what_a_block_gives_up_is_the_drivers_again(stage) {
        let g = stage.g();
        let [home, other] = stage.streams();
        let pool = Pool::builder(&stage.device).limit(Limit::Bytes(96 * g)).build().unwrap();
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let free = || stage.driver().memory_info(stage.device.ordinal()).unwrap().free;
        let mut block = a.block(64 * g).home_stream(&home).try_allocate().unwrap();
        assert_eq!(block.extents().len(), 1);
        let stamp = stage.stamp();
        stage.fill(&home, &block, stamp);
        block.shrink_to(24 * g).unwrap();
        home.synchronize().unwrap();
        let before = free();
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.given_back, done.copied), (40 * g, 24 * g));
        pool.trim(24 * g).unwrap();
        assert!(free() >= before + 40 * g, "{} then {}", before, free());
        let rest = b.block(72 * g).home_stream(&other).try_allocate().unwrap();
        let foreign = stage.stamp();
        stage.fill(&other, &rest, foreign);
        stage.check(&home, &block, stamp);
        stage.check(&other, &rest, foreign);
        drop(rest);
        other.synchronize().unwrap();
        block.try_grow_to(64 * g).unwrap();
        stage.work().check(&home, block.address(), gpu::words(24 * g), stamp);
        let stamp = stage.stamp();
        stage.fill(&home, &block, stamp);
        stage.check(&home, &block, stamp);
    }

    fn a_movable_block_gives_once_its_kernel_has_ended(stage) {
        let g = stage.g();
        let [home, other] = stage.streams();
        let pool = Pool::builder(&stage.device).limit(Limit::Bytes(96 * g)).build().unwrap();
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let block = a.block(64 * g).home_stream(&home).movable(true);
        let mut block = block.try_allocate().unwrap();
        block.shrink_to(16 * g).unwrap();
        let lease = block.lease();
        let stamp = stage.stamp();
        stage.work().fill(&home, lease.address(), gpu::words(16 * g), stamp, LATE);
        drop(lease);
        let rest = b.block(72 * g).home_stream(&other).timeout(Duration::from_secs(30));
        let rest = rest.allocate().unwrap();
        assert_eq!(a.stats().committed, 16 * g);
        stage.fill(&other, &rest, stage.stamp());
        stage.work().check(&home, block.address(), gpu::words(16 * g), stamp);
        other.synchronize().unwrap();
    }

    fn what_a_region_withdraws_is_the_drivers_again(stage) {
        let g = stage.g();
        let home = stage.stream();
        let mut region = Region::reserve(&stage.device, 64 * g).unwrap();
        region.commit(0..64 * g).unwrap();
        let stamp = stage.stamp();
        stage.work().fill(&home, region.address(), gpu::words(64 * g), stamp, LATE);
        region.decommit_after(8 * g..40 * g, std::slice::from_ref(&home)).unwrap();
        let done = region.compact(&home).unwrap();
        assert_eq!((done.given_back, done.copied), (32 * g, 32 * g));
        assert_eq!(region.held(), 32 * g);
        stage.work().check(&home, region.address(), gpu::words(8 * g), stamp);
        let rest = DeviceAddress(region.address().0 + 40 * g);
        stage.work().check(&home, rest, gpu::words(24 * g), stamp);
        home.synchronize().unwrap();
    }
}
