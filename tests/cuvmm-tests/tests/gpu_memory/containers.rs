//! Containers in a tenant: memory that comes from a pool and goes back to it under kernels, charged
//! as the driver counts it.

use std::time::Duration;

use crate::gpu;
use crate::gpu::Stage;
use crate::on_each;
use cuvmm::driver::DeviceAddress;
use cuvmm::{DeviceVec, Heap, Limit, Pool, Region, SparseArray, Stream};

/// Fills all of a range of a region on a stream, some time later.
fn fill(stage: &Stage, stream: &Stream, region: &Region, at: u64, bytes: u64, stamp: u32) {
    let at = DeviceAddress(region.address().0 + at);
    let late = Duration::from_millis(2);
    stage
        .work()
        .fill(stream, at, gpu::words(bytes), stamp, late);
}

on_each! {
    fn containers_beside_a_heap_and_blocks_hold_what_the_driver_counts(stage) {
        let g = stage.g();
        let pool = Pool::builder(&stage.device).limit(Limit::Bytes(32 * g)).build().unwrap();
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [home, other] = stage.streams();
        let mut region = a.region(16 * g).largest_extent(g).home_stream(&home).reserve().unwrap();
        let growing = a.region(32 * g).home_stream(&home).reserve().unwrap();
        let mut vector = DeviceVec::<u32>::from_region(growing, &home).unwrap();
        let elements = g as usize / 4;
        let array = SparseArray::<u32>::builder(&stage.device, &home, 8 * elements);
        let mut array = array.tile_bytes(g).in_tenant(&a).reserve().unwrap();
        let heap = Heap::builder(&b).build().unwrap();
        let before = stage.driver().memory_info(stage.device.ordinal()).unwrap().free;

        region.commit(0..4 * g).unwrap();
        vector.resize(3 * elements, 7).unwrap();
        array.commit(0..2 * elements).unwrap();
        let (memory, block) = (heap.allocate(5 * g, 512, &other).unwrap(), b.allocate(3 * g).unwrap());
        home.synchronize().unwrap();
        let stats = pool.stats();
        let containers = region.held() + vector.held() + array.held();
        assert_eq!((a.stats().committed, a.stats().in_use), (containers, containers));
        assert_eq!(stats.committed, containers + b.stats().committed);
        let after = stage.driver().memory_info(stage.device.ordinal()).unwrap().free;
        assert!(before - after >= stats.committed + stats.free, "{stats:#?}");
        assert_eq!(vector.to_vec().unwrap(), vec![7; 3 * elements]);

        // What a kernel still writes is not given to others.
        let (stamp, kept) = (stage.stamp(), stage.stamp());
        fill(stage, &home, &region, 0, 2 * g, kept);
        fill(stage, &home, &region, 2 * g, 2 * g, stamp);
        region.decommit_after(2 * g..4 * g, std::slice::from_ref(&home)).unwrap();
        drop((memory, block));
        other.synchronize().unwrap();
        let rest = 32 * g - a.stats().committed;
        let more = b.block(rest + 2 * g).home_stream(&other).timeout(Duration::from_secs(30));
        let more = more.allocate().unwrap();
        stage.fill(&other, &more, stage.stamp());
        assert_eq!(region.held(), 2 * g);
        stage.work().check(&home, region.address(), gpu::words(2 * g), kept);
        // Memory of another tenant comes back as zeros.
        drop(more);
        region.commit(2 * g..4 * g).unwrap();
        let mut bytes = vec![1; 2 * g as usize];
        region.read(&home, 2 * g, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0));

        // A drop waits for nothing, and memory is given once the kernel has ended.
        fill(stage, &home, &region, 0, 4 * g, stamp);
        drop((region, vector, array));
        let all = b.block(32 * g).home_stream(&other).timeout(Duration::from_secs(30));
        let all = all.allocate().unwrap();
        assert_eq!(a.stats().committed, 0);
        stage.fill(&other, &all, stamp);
        stage.check(&other, &all, stamp);
    }
}
