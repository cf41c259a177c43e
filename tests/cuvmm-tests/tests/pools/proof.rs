//! Nothing is unmapped without proof that no work can use it. A drop without proof leaves memory
//! mapped and counts it, and memory in use is never found complete.
//!
//! `unsafe` is used to begin captures on the machine itself, as another library would.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common;
use crate::common::{D0, G, Rig, busy, nth_of};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, CaptureMode, DeviceAddress, Driver};
use cuvmm::error::MemoryError;
use cuvmm::{DeviceVec, Place, Region, RingBuffer, SparseArray, Stream};

/// Queues a kernel that will write to a range, and holds it back.
fn kernel(rig: &Rig<impl Backing>, stream: &Stream, at: DeviceAddress, size: u64) {
    rig.held_kernel(stream, &[], &[(at, size, 9)]);
}

/// Begins a capture of another library on a stream of its own, in relaxed mode.
fn capture(rig: &Rig<impl Backing>, stream: &Stream) {
    let mode = CaptureMode::RELAXED;
    // SAFETY: the stream is alive.
    unsafe { rig.machine.capture_begin(D0, stream.as_raw(), mode) }.unwrap();
}

fn end_capture(rig: &Rig<impl Backing>, stream: &Stream) {
    // SAFETY: the stream is alive.
    let graph = unsafe { rig.machine.capture_end(D0, stream.as_raw()) };
    // A synchronization of the device has broken the capture.
    let Ok(graph) = graph else { return };
    // SAFETY: the test owns the graph and does not use it afterwards.
    unsafe { rig.machine.graph_destroy(D0, graph) }.unwrap();
}

/// Lets the kernel run, and checks that it found its memory.
fn ran_well(rig: &Rig<impl Backing>) {
    rig.machine.release_all_streams(D0);
    rig.device.synchronize().unwrap();
    assert!(rig.device.lost().is_none());
    assert_eq!(rig.machine.hazards(), 0);
}

// I-25
#[test]
fn a_region_dropped_under_a_foreign_capture_stays_mapped() {
    let rig = common::model();
    let region = common::region(&rig, 4 * G, 2 * G);
    let (stream, theirs) = (
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    );
    kernel(&rig, &stream, region.address(), 2 * G);
    capture(&rig, &theirs);
    drop(region);
    assert_eq!(
        (rig.device.drop_failures(), rig.device.leaked()),
        (1, 2 * G)
    );
    end_capture(&rig, &theirs);
    ran_well(&rig);
}

#[test]
fn what_a_region_withdrew_after_streams_is_given_back_under_a_foreign_capture() {
    let rig = common::model();
    let mut region =
        common::committed(Region::builder(&rig.device, 4 * G).largest_extent(G), 4 * G);
    let (stream, theirs) = (
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    );
    region
        .decommit_after(0..3 * G, std::slice::from_ref(&stream))
        .unwrap();
    capture(&rig, &theirs);
    drop(region);
    // All that is known of the last granule is that it is in use.
    assert_eq!((rig.device.drop_failures(), rig.device.leaked()), (1, G));
    assert_eq!(rig.machine.live().mappings, 1);
    end_capture(&rig, &theirs);
}

#[test]
fn a_region_that_cannot_be_closed_is_handed_back_whole() {
    let rig = common::clean(common::model());
    let region = common::region(&rig, 4 * G, 2 * G);
    let theirs = Stream::new(&rig.device).unwrap();
    capture(&rig, &theirs);
    let region = region.close().unwrap_err().owner;
    assert_eq!((region.committed(), region.held()), (2 * G, 2 * G));
    end_capture(&rig, &theirs);
    region.close().unwrap();
}

#[test]
fn a_container_waits_for_its_streams_and_not_for_the_device() {
    let rig = common::clean(common::model());
    let home = Stream::new(&rig.device).unwrap();
    let theirs = Stream::new(&rig.device).unwrap();
    let mut vector = DeviceVec::<u32>::new(&rig.device, &home, 1 << 20).unwrap();
    vector.extend_from_slice(&[1, 2, 3]).unwrap();
    let mut ring = RingBuffer::<u32>::new(&rig.device, &home, 1 << 19).unwrap();
    ring.extend_from_slice(&[1, 2, 3]).unwrap();
    let mut sparse = SparseArray::<u32>::builder(&rig.device, &home, 1 << 22)
        .reserve()
        .unwrap();
    sparse.commit(0..1 << 19).unwrap();
    capture(&rig, &theirs);
    drop((vector, ring, sparse));
    end_capture(&rig, &theirs);
}

#[test]
fn a_pool_whose_device_cannot_be_waited_for_leaves_what_is_pending() {
    let rig = common::model();
    let (pool, tenant) = common::tenancy(&rig, 8);
    let (home, theirs) = (
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    );
    let on_stream = tenant.allocate_on(&home, 2 * G).unwrap();
    let on_none = tenant.try_allocate(G).unwrap();
    kernel(&rig, &theirs, on_none.address(), G);
    let refused = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    let device_wide = [Call::CtxRecordEvent, Call::CtxSynchronize];
    rig.faults.arm(Fault::all(refused).only(&device_wide));
    drop((on_stream, on_none, tenant));
    drop(pool);
    rig.faults.disarm();
    assert_eq!((rig.device.drop_failures(), rig.device.leaked()), (1, G));
    ran_well(&rig);
}

#[test]
fn a_registration_that_ends_under_a_foreign_capture_leaves_its_memory() {
    let rig = common::model();
    let region = common::region(&rig, 2 * G, 2 * G);
    let registration = region.register(0..2 * G).unwrap();
    let (stream, theirs) = (
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    );
    kernel(&rig, &stream, region.address(), 2 * G);
    drop(region);
    capture(&rig, &theirs);
    drop(registration);
    assert_eq!(
        (rig.device.drop_failures(), rig.device.leaked()),
        (1, 2 * G)
    );
    end_capture(&rig, &theirs);
    ran_well(&rig);
}

on_both! {
    fn nothing_is_exchanged_by_a_stream_that_captures(rig) {
        let (stream, captures) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        for place in [Place::from(&rig.device), Place::HostNuma(0)] {
            let mut region = Region::builder(&rig.device, 2 * G).largest_extent(G).reserve().unwrap();
            region.commit_at(0..2 * G, &place).unwrap();
            region.write(&stream, G, b"kept").unwrap();
            let mut fork = region.fork(&[]).unwrap();
            capture(rig, &captures);
            let refused = fork.unshare(0..2 * G, &captures, &[]);
            assert!(matches!(refused, Err(MemoryError::Capturing)), "{refused:?}");
            end_capture(rig, &captures);
            let mut seen = [0; 4];
            fork.read(&stream, G, &mut seen).unwrap();
            assert!(seen == *b"kept" || !rig.keeps_bytes());
            assert_eq!(fork.unshare(0..2 * G, &captures, &[]).unwrap(), 2 * G);
            fork.read(&stream, G, &mut seen).unwrap();
            assert!(seen == *b"kept" || !rig.keeps_bytes());
        }
    }

    // I-21
    fn a_lease_that_lives_while_a_fence_is_asked_covers_what_is_queued_later(rig) {
        let (_pool, tenant, home) = common::scene(rig, 8);
        // An extent of two granules, and one of one granule, which is given up.
        let mut block = tenant.block(3 * G).capacity(8 * G).home_stream(&home).allocate().unwrap();
        let fork = block.fork(3 * G, 3 * G).unwrap();
        let lease = block.lease();
        let tail = block.address().checked_add(2 * G).unwrap();
        block.shrink_to(2 * G).unwrap();
        // The growth is refused because of the lease, and polls the fence of the given-up memory.
        assert!(block.try_grow_to(3 * G).is_err());
        rig.held_kernel(&home, &[(tail, G)], &[]);
        drop(lease);
        let early = block.try_grow_to(3 * G);
        assert!(early.is_err(), "the leased tail is being read");
        rig.machine.release_all_streams(D0);
        block.try_grow_to(3 * G).unwrap();
        assert!(rig.device.lost().is_none());
        drop(fork);
    }

    fn a_lease_on_a_freed_block_covers_its_home_stream_until_it_ends(rig) {
        let (_pool, [a, b], home) = common::pair(rig, 4);
        let block = a.allocate_on(&home, 4 * G).unwrap();
        let lease = block.lease();
        drop(block);
        // The work queued until the block was freed is known to be complete.
        assert!(b.try_allocate(G).is_err());
        rig.held_kernel(&home, &[], &[(lease.address(), G, 9)]);
        drop(lease);
        let early = b.try_allocate(G);
        rig.machine.release_all_streams(D0);
        assert!(early.is_err(), "the lease was in use until now");
        drop(b.try_allocate(4 * G).unwrap());
        assert!(rig.device.lost().is_none());
    }

    fn a_copy_that_unshares_one_block_is_waited_for_before_its_source_is_unshared(rig) {
        let (_pool, tenant, home) = common::scene(rig, 16);
        let mut root = tenant.block(2 * G).home_stream(&home).allocate().unwrap();
        let mut one = root.fork(2 * G, 2 * G).unwrap();
        let two = root.fork(2 * G, 2 * G).unwrap();
        one.shrink_to(G).unwrap();
        root.shrink_to(G).unwrap();
        // Nothing is queued, so the stream is idle until the first copy is queued.
        rig.machine.hold(D0, home.as_raw());
        let grown = tenant.try_grow_all(&mut [(&mut one, 2 * G), (&mut root, 2 * G)]);
        assert!(grown.is_err(), "one block's copy reads the other block");
        rig.machine.release_all_streams(D0);
        tenant.try_grow_all(&mut [(&mut one, 2 * G), (&mut root, 2 * G)]).unwrap();
        home.synchronize().unwrap();
        assert!(rig.device.lost().is_none());
        drop(two);
    }

    fn a_lease_that_ends_while_an_unsharing_waits_is_covered(rig) {
        let (_pool, tenant, home) = common::scene(rig, 16);
        let root = tenant.block(2 * G).home_stream(&home).timeout(Duration::from_secs(20));
        let root = root.allocate().unwrap();
        let mut fork = root.fork(2 * G, 2 * G).unwrap();
        let address = fork.address();
        fork.shrink_to(G).unwrap();
        let lease = fork.lease();
        std::thread::scope(|scope| {
            // The growth finds the stream idle, and waits for the lease.
            let grows = scope.spawn(|| fork.grow_to(2 * G));
            std::thread::sleep(Duration::from_millis(20));
            rig.held_kernel(&home, &[(address, G)], &[]);
            drop(lease);
            std::thread::sleep(Duration::from_millis(20));
            rig.machine.release_all_streams(D0);
            grows.join().unwrap().unwrap();
        });
        assert!(rig.device.lost().is_none());
    }

    fn what_was_withdrawn_of_an_extent_is_waited_for_before_it_is_unshared(rig) {
        let mut region = common::committed(Region::builder(&rig.device, 2 * G), 2 * G);
        let mut fork = region.fork(&[]).unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let half = fork.address().checked_add(G).unwrap();
        rig.held_kernel(&stream, &[(half, G)], &[]);
        fork.decommit_after(G..2 * G, std::slice::from_ref(&stream)).unwrap();
        let own = Stream::new(&rig.device).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| fork.unshare(0..G, &own, &[]));
            rig.machine.release_all_streams(D0);
            assert_eq!(waits.join().unwrap().unwrap(), 2 * G);
        });
        assert!(rig.device.lost().is_none());
    }

    fn what_is_shared_is_not_revived(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::committed(Region::builder(&rig.device, 8 * G).largest_extent(2 * G), 2 * G);
        region.write(&stream, 0, &[1; 4]).unwrap();
        let fork = region.fork(&[]).unwrap();
        // Half of an extent cannot be committed anew.
        region.decommit_after(G..2 * G, &[]).unwrap();
        let refused = region.commit(G..2 * G).unwrap_err();
        assert!(matches!(refused, MemoryError::ReadOnly(ref bytes) if *bytes == (0..2 * G)), "{refused}");
        region.decommit_after(0..G, &[]).unwrap();
        region.commit(0..2 * G).unwrap();
        assert!(!region.is_read_only(0..2 * G));
        region.write(&stream, 0, &[2; 4]).unwrap();
        let mut seen = [9; 4];
        fork.read(&stream, 0, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(seen, [1; 4]);
        }
        // Neither can the second mapping of an alias.
        region.alias(0..2 * G, 4 * G).unwrap();
        region.decommit_after(4 * G..6 * G, &[]).unwrap();
        region.commit(4 * G..6 * G).unwrap();
        region.write(&stream, 4 * G, &[3; 4]).unwrap();
        region.read(&stream, 0, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(seen, [2; 4]);
        }
    }

    fn what_is_shared_and_in_use_is_not_revived_either(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::committed(Region::builder(&rig.device, 4 * G), 2 * G);
        let fork = region.fork(&[]).unwrap();
        rig.held_kernel(&stream, &[(region.address(), G)], &[]);
        region.decommit_after(0..2 * G, std::slice::from_ref(&stream)).unwrap();
        let refused = region.commit(0..2 * G).unwrap_err();
        assert!(matches!(refused, MemoryError::PendingFree { bytes, .. } if bytes == 2 * G), "{refused}");
        rig.machine.release_all_streams(D0);
        region.commit(0..2 * G).unwrap();
        assert!(!region.is_read_only(0..2 * G));
        drop(fork);
    }

    // I-23
    fn a_fence_that_cannot_be_asked_holds_up_no_other(rig) {
        let (pool, a) = common::tenancy(rig, 8);
        let b = pool.tenant("b").register().unwrap();
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        drop(a.allocate_on(&one, 4 * G).unwrap());
        drop(a.allocate_on(&two, 4 * G).unwrap());
        // The first query, about the stream that was used first, fails.
        let refused = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(nth_of(1, refused, &[Call::StreamIsCapturing]));
        let block = b.try_allocate(4 * G).unwrap();
        rig.faults.disarm();
        drop(block);
    }

    fn work_of_another_device_is_not_complete_when_ours_is(rig) {
        let second = rig.second();
        let (pool, a) = common::tenancy(rig, 4);
        let b = pool.tenant("b").register().unwrap();
        let theirs = Stream::new(&second).unwrap();
        let block = a.try_allocate(4 * G).unwrap();
        block.record_use(&theirs).unwrap();
        let d1 = second.ordinal();
        rig.machine.hold(d1, theirs.as_raw());
        rig.machine.queue_kernel(d1, theirs.as_raw(), vec![], vec![]).unwrap();
        drop(block);
        rig.device.synchronize().unwrap();
        assert!(b.try_allocate(G).is_err(), "the other device's stream is busy");
        rig.machine.release_all_streams(d1);
        drop(b.try_allocate(4 * G).unwrap());
        drop(theirs);
        drop((a, b));
        drop(pool);
        drop(second);
    }

    fn a_thousand_streams_of_a_block_do_not_pile_up(rig) {
        let (_pool, tenant, home) = common::scene(rig, 4);
        let block = tenant.allocate_on(&home, G).unwrap();
        for _ in 0..1_000 {
            let stream = Stream::new(&rig.device).unwrap();
            block.record_use(&stream).unwrap();
        }
        assert!(rig.machine.live().streams < 200, "{:?}", rig.machine.live());
        drop(block);
        drop(tenant.try_allocate(4 * G).unwrap());
    }

    fn a_scrub_that_cannot_be_waited_for_is_not_rolled_back_under_it(rig) {
        let (pool, [a, b], home) = common::pair(rig, 4);
        let block = a.allocate_on(&home, 4 * G).unwrap();
        busy(rig, &home, &block, 7);
        rig.machine.release_all_streams(D0);
        drop(block);
        drop(a);
        // The scrub is queued, and its stream can neither be synchronized nor queried.
        let refused = CUresult::CUDA_ERROR_UNKNOWN;
        let of_stream = [Call::StreamSynchronize, Call::StreamQuery];
        rig.faults.arm(Fault::all(refused).only(&of_stream));
        b.try_allocate(4 * G).unwrap_err();
        rig.faults.disarm();
        let stats = pool.stats();
        assert_eq!((stats.quarantined, stats.committed), (4 * G, 0));
        drop(b);
        pool.close().unwrap();
    }
}

// I-22
#[test]
fn a_stream_has_two_events_however_many_blocks_wait_for_it() {
    let rig = common::model();
    let (_pool, [tenant, other], home) = common::pair(&rig, 64);
    let blocks: Vec<_> = (0..64)
        .map(|_| tenant.block(G).home_stream(&home).allocate().unwrap())
        .collect();
    rig.machine.hold(D0, home.as_raw());
    let first = blocks[0].address();
    rig.kernel(&home, &[], &[(first, G, 1)]);
    drop(blocks);
    other.try_allocate(G).unwrap_err();
    rig.faults.forget();
    other.try_allocate(G).unwrap_err();
    // One query, and the thread's capture mode before and after it, however many blocks there are.
    let asked = rig.faults.count(Call::EventQuery);
    assert!(asked <= 4, "{asked} queries");
    assert_eq!(rig.faults.count(Call::EventRecord), 0);
    assert!(rig.machine.live().events <= 2);
    let waited = other.block(G).timeout(Duration::from_millis(5)).allocate();
    waited.unwrap_err();
    assert!(rig.machine.live().events <= 2);
    rig.machine.release_all_streams(D0);
    drop(other.try_allocate(64 * G).unwrap());
}

#[test]
fn what_keeps_a_stream_alive_is_dropped_behind_the_lock() {
    struct Frees(Arc<AtomicU64>, Option<cuvmm::Tenant>);
    impl Drop for Frees {
        fn drop(&mut self) {
            // The drop uses the pool, and would deadlock under the pool's lock.
            if let Some(tenant) = &self.1 {
                drop(tenant.try_allocate(G));
            }
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let rig = common::model();
    let (pool, [tenant, other], raw) = common::pair(&rig, 4);
    let count = Arc::new(AtomicU64::new(0));
    let keep = Arc::new(Frees(
        Arc::clone(&count),
        Some(pool.tenant("c").register().unwrap()),
    ));
    // SAFETY: `raw` lives to the end of the test.
    let stream = unsafe { Stream::from_raw(&rig.device, raw.as_raw(), keep) }.unwrap();
    drop(tenant.allocate_on(&stream, 2 * G).unwrap());
    drop(stream);
    // The fence that names the stream is found complete and is dropped within the pool.
    drop(other.try_allocate(4 * G).unwrap());
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[test]
fn a_context_that_was_reset_holds_up_no_tenant() {
    let rig = common::model();
    let (pool, [a, b], stream) = common::pair(&rig, 8);
    let block = a.allocate_on(&stream, 2 * G).unwrap();
    // Another library resets the primary context, which invalidates the stream's handle.
    rig.machine.reset_context(D0);
    drop(block);
    drop(b.try_allocate(6 * G).unwrap());
    drop((a, b));
    pool.close().unwrap();
    assert_eq!(rig.device.leaked(), 0);
}

#[test]
fn a_thousand_extents_that_wait_for_one_stream_ask_once() {
    let rig = common::clean(common::model());
    let mut region = common::committed(
        Region::builder(&rig.device, 1024 * G).largest_extent(G),
        1024 * G,
    );
    let stream = Stream::new(&rig.device).unwrap();
    kernel(&rig, &stream, region.address(), G);
    let used = std::slice::from_ref(&stream);
    region.decommit_after(0..1024 * G, used).unwrap();
    assert_eq!(region.purge().unwrap().given_back, 0);
    rig.faults.forget();
    assert_eq!(region.purge().unwrap().given_back, 0);
    // One query, and the thread's capture mode before and after it.
    assert_eq!(rig.faults.calls().len(), 3, "{:?}", rig.faults.calls());
    rig.machine.release_all_streams(D0);
    assert_eq!(region.purge().unwrap().given_back, 1024 * G);
}

#[test]
fn what_stays_stuck_at_the_end_is_told() {
    let rig = common::model();
    let mut region = Region::reserve(&rig.device, 4 * G).unwrap();
    let refused = CUresult::CUDA_ERROR_UNKNOWN;
    let both = [Call::MemSetAccess, Call::MemUnmap];
    rig.faults.arm(Fault::all(refused).only(&both));
    region.commit(0..G).unwrap_err();
    assert_eq!(region.quarantined(), G);
    let region = region.close().unwrap_err().owner;
    drop(region);
    assert_eq!((rig.device.drop_failures(), rig.device.leaked()), (1, G));
}

#[test]
fn a_container_over_memory_of_two_devices_waits_for_both() {
    let rig = common::model();
    let second = rig.second();
    let home = Stream::new(&rig.device).unwrap();
    let theirs = Stream::new(&second).unwrap();
    let mut region = Region::reserve(&rig.device, 4 * G).unwrap();
    region.grant(&second, cuvmm::Access::ReadWrite).unwrap();
    let mut vector = DeviceVec::<u32>::from_region(region, &home).unwrap();
    vector.extend_from_slice(&[1, 2, 3]).unwrap();
    let d1 = second.ordinal();
    rig.machine.hold(d1, theirs.as_raw());
    let writes = vec![(vector.address(), 8, 9)];
    let queued = rig
        .machine
        .queue_kernel(d1, theirs.as_raw(), vec![], writes);
    queued.unwrap();
    // The drop returns only after the kernel has run. Unmapping earlier is a hazard.
    std::thread::scope(|scope| {
        let drops = scope.spawn(|| drop(vector));
        // Time in which a drop that does not wait would do harm.
        std::thread::sleep(Duration::from_millis(20));
        rig.machine.release_all_streams(d1);
        drops.join().unwrap();
    });
    assert_eq!(rig.machine.hazards(), 0);
    assert!(second.lost().is_none());
}
