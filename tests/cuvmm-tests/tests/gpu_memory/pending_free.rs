//! Operations that wait for the device and those that do not: pending frees, leases, growing and
//! shrinking, scrubbing and regions, under work that runs until a gate opens.

use std::time::{Duration, Instant};

use crate::gpu;
use crate::on_each;
use cuvmm::Region;
use cuvmm::error::BlockError;

/// Far longer than any call takes, and far shorter than a gate stays closed.
const PROMPT: Duration = Duration::from_millis(500);

fn pending_free(error: &BlockError) -> u64 {
    match error {
        BlockError::OutOfMemory(shortage) => shortage.pending_free,
        other => panic!("{other}"),
    }
}

on_each! {
    fn nothing_that_must_not_wait_waits(stage) {
        let g = stage.g();
        let pool = stage.pool(96);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [one, two] = stage.streams();
        let block = a.allocate_on(&one, 32 * g).unwrap();
        let nowhere = a.try_allocate(8 * g).unwrap();
        let gate = stage.work().gate(&one);
        stage.fill(&one, &block, stage.stamp());
        let mut slowest = Duration::ZERO;
        let mut timed = |act: &mut dyn FnMut()| {
            let begun = Instant::now();
            act();
            slowest = slowest.max(begun.elapsed());
        };
        let mut blocks = vec![block, nowhere];
        timed(&mut || blocks.clear());
        // Fresh memory, memory pending on a stream and on the device, and more than there is.
        timed(&mut || drop(b.try_allocate(16 * g).unwrap()));
        timed(&mut || drop(a.block(8 * g).try_allocate().map(drop)));
        timed(&mut || assert!(pending_free(&b.try_allocate(40 * g).unwrap_err()) >= 32 * g));
        timed(&mut || drop(a.block(32 * g).home_stream(&two).try_allocate().unwrap()));
        timed(&mut || assert!(pool.trim(0).is_ok()));
        let mut grown = b.block(g).capacity(8 * g).home_stream(&two).try_allocate().unwrap();
        timed(&mut || grown.try_grow_to(8 * g).unwrap());
        timed(&mut || grown.shrink_to(g).unwrap());
        assert!(!one.is_done().unwrap(), "the kernel ended before its gate opened");
        assert!(slowest < PROMPT, "{slowest:?}");
        gate.open();
        drop(grown);
        stage.settle();
        let block = gpu::eventually(|| b.try_allocate(96 * g));
        drop((block, a, b));
        pool.close().unwrap();
    }

    fn memory_under_a_kernel_stays_until_it_ends(stage) {
        let size = 32 * stage.g();
        let pool = stage.pool(32);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [one, two] = stage.streams();
        for homeless in [false, true] {
            let mut builder = a.block(size).timeout(Duration::from_secs(10));
            if !homeless {
                builder = builder.home_stream(&one);
            }
            let block = builder.allocate().unwrap();
            let gate = stage.work().gate(&one);
            stage.fill(&one, &block, stage.stamp());
            drop(block);
            for _ in 0..50 {
                assert_eq!(pending_free(&b.try_allocate(size).unwrap_err()), size);
            }
            assert!(!one.is_done().unwrap());
            let waited = std::thread::scope(|scope| {
                let waits = scope.spawn(|| {
                    b.block(size).home_stream(&two).timeout(Duration::from_secs(10)).allocate()
                });
                std::thread::sleep(Duration::from_millis(20));
                assert!(!waits.is_finished(), "reused under a running kernel");
                gate.open();
                waits.join().unwrap()
            });
            let block = waited.unwrap();
            stage.check(&two, &block, 0);
            let stamp = stage.stamp();
            stage.fill(&two, &block, stamp);
            one.synchronize().unwrap();
            stage.check(&two, &block, stamp);
            drop(block);
        }
        drop((a, b));
        stage.settle();
        pool.close().unwrap();
    }

    fn a_lease_keeps_memory_for_work_that_is_launched_later(stage) {
        let size = 16 * stage.g();
        let pool = stage.pool(16);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [home, other] = stage.streams();
        let block = a.allocate_on(&home, size).unwrap();
        let lease = block.lease();
        drop(block);
        assert!(b.try_allocate(size).is_err());
        assert!(a.block(size).home_stream(&home).try_allocate().is_err());
        // Work begins only now, on a stream that the block does not know.
        let gate = stage.work().gate(&other);
        let stamp = stage.stamp();
        stage.work().fill(&other, lease.address(), size, stamp, Duration::ZERO);
        stage.work().check(&other, lease.address(), size, stamp);
        lease.record_use(&other).unwrap();
        drop(lease);
        assert_eq!(pending_free(&b.try_allocate(size).unwrap_err()), size);
        assert!(!other.is_done().unwrap());
        gate.open();
        let block = b.block(size).home_stream(&home).timeout(Duration::from_secs(10));
        let block = block.allocate().unwrap();
        assert!(other.is_done().unwrap());
        stage.check(&home, &block, 0);
        drop((block, a, b));
        stage.settle();
        pool.close().unwrap();
    }

    fn what_another_tenant_left_reads_as_zero(stage) {
        let pool = stage.pool(64);
        let tenants = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let streams: [_; 2] = stage.streams();
        let mut dice = fastrand::Rng::with_seed(3);
        for round in 0..stage.scaled(200, 20) {
            let tenant = &tenants[round % 2];
            // No memory is left to it, so anything that it gets was the other tenant's.
            let mut held = vec![];
            let mut left = 64;
            while left > 0 {
                let granules = (1 + dice.u64(..32)).min(left);
                left -= granules;
                let stream = &streams[dice.usize(..2)];
                let mut builder = tenant.block(granules * stage.g());
                if dice.u8(..4) > 0 {
                    builder = builder.home_stream(stream);
                }
                let block = builder.timeout(Duration::from_secs(10)).allocate().unwrap();
                stage.check(stream, &block, 0);
                stage.late_fill(stream, &block, stage.stamp(), Duration::from_micros(50));
                held.push(block);
            }
        }
        stage.settle();
        drop(tenants);
        pool.close().unwrap();
    }

    fn a_block_grows_in_place_under_running_work(stage) {
        let g = stage.g();
        let pool = stage.pool(128);
        let tenant = pool.tenant("a").register().unwrap();
        let stream = stage.stream();
        let mut block = tenant.block(g).capacity(96 * g).home_stream(&stream).allocate().unwrap();
        let address = block.address();
        let mut parts: Vec<(u64, u64, u32)> = vec![];
        let mut from = 0;
        let mut dice = fastrand::Rng::with_seed(11);
        loop {
            let stamp = stage.stamp();
            let bytes = block.size() - from;
            let at = address.checked_add(from).unwrap();
            stage.work().fill(&stream, at, bytes, stamp, Duration::from_millis(1));
            parts.push((from, bytes, stamp));
            from = block.size();
            let size = from + (1 + dice.u64(..8)) * g;
            if size > block.capacity() {
                break;
            }
            block.try_grow_to(size).unwrap();
            assert_eq!(block.address(), address);
        }
        assert!(parts.len() > 8);
        for &(offset, bytes, stamp) in &parts {
            let at = address.checked_add(offset).unwrap();
            stage.work().check(&stream, at, bytes, stamp);
        }
        stage.settle();
        drop((block, tenant));
        pool.close().unwrap();
    }

    fn what_grows_again_over_a_running_kernel_reads_as_zero(stage) {
        let g = stage.g();
        let pool = stage.pool(16);
        let tenant = pool.tenant("a").register().unwrap();
        let [home, other] = stage.streams();
        let builder = tenant.block(8 * g).home_stream(&home).zeroed(true);
        let mut block = builder.allocate().unwrap();
        for stream in [&home, &other] {
            block.record_use(stream).unwrap();
            let gate = stage.work().gate(stream);
            stage.fill(stream, &block, stage.stamp());
            block.shrink_to(4).unwrap();
            block.try_grow_to(8 * g).unwrap();
            // The zeros are ordered after the kernel, and the check on the home stream after the
            // zeros.
            let at = block.address().checked_add(g).unwrap();
            stage.work().check(&home, at, 7 * g, 0);
            gate.open();
            stage.device.synchronize().unwrap();
        }
        stage.settle();
        drop((block, tenant));
        pool.close().unwrap();
    }

    fn what_is_given_up_twice_waits_for_both_streams(stage) {
        let g = stage.g();
        // Small extents, so that the end of the block can be reclaimed separately.
        let pool = cuvmm::Pool::builder(&stage.device)
            .limit(cuvmm::Limit::Bytes(8 * g))
            .largest_extent(g)
            .build()
            .unwrap();
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [home, other] = stage.streams();
        let mut block = a.block(8 * g).home_stream(&home).zeroed(true).allocate().unwrap();
        block.record_use(&other).unwrap();
        let gate = stage.work().gate(&home);
        stage.fill(&home, &block, stage.stamp());
        block.shrink_to(g).unwrap();
        // Growing again orders the home stream behind the other stream. The rest of the given-up
        // memory still waits for the home stream.
        block.try_grow_to(2 * g).unwrap();
        assert_eq!(pending_free(&b.try_allocate(4 * g).unwrap_err()), 6 * g);
        assert!(!home.is_done().unwrap());
        gate.open();
        let taken = b.block(4 * g).timeout(Duration::from_secs(10)).allocate().unwrap();
        stage.check(&other, &taken, 0);
        drop((taken, block, a, b));
        stage.settle();
        pool.close().unwrap();
    }

    fn a_region_withdraws_behind_the_work_that_uses_it(stage) {
        let g = stage.g();
        let stream = stage.stream();
        let mut region = Region::builder(&stage.device, 64 * g).largest_extent(8 * g).reserve().unwrap();
        let address = region.address();
        for named in [true, false] {
            region.commit(0..32 * g).unwrap();
            let gate = stage.work().gate(&stream);
            let stamp = stage.stamp();
            stage.work().fill(&stream, address, 32 * g, stamp, Duration::ZERO);
            let begun = Instant::now();
            if named {
                region.decommit_after(0..32 * g, std::slice::from_ref(&stream)).unwrap();
            } else {
                region.decommit(0..32 * g).unwrap();
            }
            assert_eq!(region.purge().unwrap().given_back, 0, "the kernel still runs");
            assert_eq!((region.pending_free(), region.held()), (32 * g, 32 * g));
            // Part of it is committed again, and was never unmapped.
            region.commit(0..8 * g).unwrap();
            assert_eq!(region.purge().unwrap().given_back, 0);
            assert!(begun.elapsed() < PROMPT);
            assert!(!stream.is_done().unwrap());
            gate.open();
            let mut given = 0;
            gpu::eventually(|| {
                given += region.purge().unwrap().given_back;
                if given < 24 * g { Err("memory is pending after the work") } else { Ok(()) }
            });
            assert_eq!((given, region.held()), (24 * g, 8 * g));
            stage.work().check(&stream, address, 8 * g, stamp);
            stage.settle();
            region.decommit(0..8 * g).unwrap();
            region.purge_blocking().unwrap();
        }
        assert_eq!(region.held(), 0);
        // Memory committed anew at the same addresses is fresh.
        region.commit(0..32 * g).unwrap();
        stage.work().check(&stream, address, 32 * g, 0);
        stage.settle();
        region.close().unwrap();
    }
}
