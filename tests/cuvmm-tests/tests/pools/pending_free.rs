//! Memory that waits for the GPU: pending frees, leases, home streams, captures, lost contexts,
//! forks.

use std::time::Duration;

use crate::common::{self, D0, G, busy, captures};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call, Driver};
use cuvmm::error::{BlockError, MemoryError};
use cuvmm::{CallError, Stream};

fn pending_free(error: &BlockError) -> u64 {
    match error {
        BlockError::OutOfMemory(shortage) | BlockError::Capturing(shortage) => {
            shortage.pending_free
        }
        other => panic!("{other}"),
    }
}

on_both! {
    // I-20
    fn nothing_under_a_running_kernel_is_unmapped(rig) {
        let (pool, [a, b], stream) = common::pair(rig, 4);
        let block = a.allocate_on(&stream, 4 * G).unwrap();
        busy(rig, &stream, &block, 9);
        drop(block);
        assert_eq!(pool.stats().pending_free, 4 * G);
        let refused = b.try_allocate(G).unwrap_err();
        assert_eq!(pending_free(&refused), 4 * G);
        assert_eq!(rig.machine.live().mappings, 1);
        let refused = b.block(G).timeout(Duration::from_millis(5)).allocate().unwrap_err();
        assert_eq!(pending_free(&refused), 4 * G);
        rig.machine.release_all_streams(D0);
        // The kernel found its memory. Only now is the memory given to B, without any of A's bytes.
        let block = b.try_allocate(4 * G).unwrap();
        let mut seen = [1; 4];
        block.read(G, &mut seen).unwrap();
        assert_eq!(seen, [0; 4]);
        assert!(rig.device.lost().is_none());
    }

    fn a_late_fence_covers_what_was_queued_in_between(rig) {
        let (_pool, [a, b], stream) = common::pair(rig, 4);
        let block = a.allocate_on(&stream, 4 * G).unwrap();
        let address = block.address();
        drop(block);
        // Work queued after the drop and before the memory was requested is covered too: a late
        // fence covers more, never less.
        rig.held_kernel(&stream, &[], &[(address, G, 3)]);
        assert!(b.try_allocate(G).is_err());
        rig.machine.release_all_streams(D0);
        drop(b.try_allocate(G).unwrap());
        assert!(rig.device.lost().is_none());
    }

    fn work_on_streams_that_nobody_can_name_is_waited_for(rig) {
        let (_pool, [a, b], home) = common::pair(rig, 4);
        let theirs = Stream::new(&rig.device).unwrap();
        for by_lease in [false, true] {
            let block = a.allocate_on(&home, 4 * G).unwrap();
            assert_eq!(block.device(), &rig.device);
            assert_eq!(block.streams(), Some(vec![home.clone()]));
            busy(rig, &theirs, &block, 9);
            if by_lease {
                let lease = block.lease();
                drop(block);
                assert_eq!(lease.streams(), None, "the block is dropped");
                assert_eq!((lease.device(), lease.size()), (&rig.device, 4 * G));
                lease.record_use_anywhere();
            } else {
                block.record_use_anywhere();
                assert_eq!(block.streams(), None);
                drop(block);
            }
            let early = b.try_allocate(G);
            rig.machine.release_all_streams(D0);
            assert_eq!(pending_free(&early.unwrap_err()), 4 * G);
            drop(b.try_allocate(4 * G).unwrap());
            assert!(rig.device.lost().is_none());
        }
    }

    fn a_lease_covers_what_its_block_gave_up(rig) {
        let (_pool, [a, b], home) = common::pair(rig, 4);
        let theirs = Stream::new(&rig.device).unwrap();
        for named in [false, true] {
            let mut block = a.block(G).capacity(4 * G).home_stream(&home).allocate().unwrap();
            block.grow_to(4 * G).unwrap();
            let lease = block.lease();
            let last = block.address().checked_add(3 * G).unwrap();
            block.shrink_to(G).unwrap();
            // The refusal has polled the fence, so the work of the block's own streams is known to
            // be complete.
            assert!(b.try_allocate(2 * G).is_err());
            rig.held_kernel(&theirs, &[], &[(last, G, 9)]);
            if named {
                lease.record_use(&theirs).unwrap();
            } else {
                lease.record_use_anywhere();
            }
            drop(lease);
            let early = b.try_allocate(2 * G);
            rig.machine.release_all_streams(D0);
            assert!(early.is_err(), "the lease was in use until now");
            drop(b.try_allocate(2 * G).unwrap());
            assert!(rig.device.lost().is_none());
            drop(block);
        }
    }

    fn another_stream_of_the_tenant_waits_on_the_device_and_not_here(rig) {
        let (_pool, tenant, one) = common::scene(rig, 4);
        let two = Stream::new(&rig.device).unwrap();
        let block = tenant.allocate_on(&one, 4 * G).unwrap();
        let address = block.address();
        busy(rig, &one, &block, 1);
        drop(block);
        let block = tenant.block(4 * G).home_stream(&two).try_allocate().unwrap();
        assert_eq!(block.address(), address, "cached memory, behind an event");
        rig.kernel(&two, &[], &[(block.address(), 4 * G, 2)]);
        assert!(!two.is_done().unwrap(), "ordered after the first stream's work");
        rig.machine.release_all_streams(D0);
        if rig.keeps_bytes() {
            let mut seen = [0; 4];
            block.read(2 * G, &mut seen).unwrap();
            assert_eq!(seen, [2; 4], "the first stream's late write was overtaken");
        }
    }

    fn streams_that_were_recorded_count_too(rig) {
        let (pool, tenant, home) = common::scene(rig, 4);
        let other = Stream::new(&rig.device).unwrap();
        let block = tenant.allocate_on(&home, 4 * G).unwrap();
        block.record_use(&other).unwrap();
        busy(rig, &other, &block, 1);
        drop(block);
        assert_eq!(pool.trim(0).unwrap(), 0);
        // On the home stream the memory is reusable at once, ordered behind the other stream by an
        // event.
        let block = tenant.block(4 * G).home_stream(&home).try_allocate().unwrap();
        rig.kernel(&home, &[], &[(block.address(), G, 2)]);
        assert!(!home.is_done().unwrap());
        rig.machine.release_all_streams(D0);
        assert!(home.is_done().unwrap());
        drop(block);
        assert_eq!(pool.trim(0).unwrap(), 4 * G);
    }

    fn a_block_without_a_stream_waits_for_all_of_them(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 4);
        let block = tenant.try_allocate(4 * G).unwrap();
        busy(rig, &stream, &block, 1);
        drop(block);
        assert_eq!(pending_free(&tenant.try_allocate(4 * G).unwrap_err()), 4 * G);
        rig.machine.release_all_streams(D0);
        drop(tenant.try_allocate(4 * G).unwrap());
    }

    fn without_context_events_the_one_who_waits_synchronises(rig) {
        let (_pool, tenant) = common::tenancy(rig, 4);
        drop(tenant.try_allocate(4 * G).unwrap());
        let lacking = Fault::all(CUresult::CUDA_ERROR_NOT_SUPPORTED).of(Call::CtxRecordEvent);
        rig.faults.arm(lacking);
        assert!(tenant.try_allocate(4 * G).is_err(), "try_allocate never waits");
        let block = tenant.block(4 * G).timeout(Duration::from_secs(60)).allocate().unwrap();
        assert_eq!(rig.faults.count(Call::CtxSynchronize), 1);
        rig.faults.disarm();
        drop(block);
    }

    fn a_lease_keeps_everything_in_place(rig) {
        let (pool, [a, b], stream) = common::pair(rig, 8);
        let mut block = a.allocate_on(&stream, 8 * G).unwrap();
        let lease = block.lease();
        let extents = lease.extents();
        assert_eq!(extents, block.extents());
        block.shrink_to(G).unwrap();
        assert_eq!(pool.stats().tenants[0].leased, 7 * G);
        assert!(b.try_allocate(G).is_err());
        drop(block);
        let second = lease.clone();
        drop(lease);
        assert!(b.try_allocate(G).is_err());
        assert!(a.block(G).capacity(8 * G).home_stream(&stream).try_allocate().is_err(),
            "not even the tenant itself may reuse what is leased");
        assert_eq!((pool.stats().leased, rig.machine.live().mappings), (8 * G, 1));
        // The block is used on a second stream.
        let other = Stream::new(&rig.device).unwrap();
        rig.held_kernel(&other, &[], &[(second.address(), G, 1)]);
        second.record_use(&other).unwrap();
        drop(second);
        assert!(b.try_allocate(G).is_err(), "the lease has ended, the work has not");
        rig.machine.release_all_streams(D0);
        drop(b.try_allocate(8 * G).unwrap());
    }

    fn streams_stay_alive_until_their_use_has_passed(rig) {
        let (pool, tenant, stream) = common::scene(rig, 4);
        drop(tenant.allocate_on(&stream, G).unwrap());
        drop(stream);
        assert_eq!(rig.machine.live().streams, 1);
        assert_eq!(pool.trim(0).unwrap(), G);
        drop(tenant.try_allocate(4 * G).unwrap());
        drop((tenant, pool));
        assert_eq!(rig.machine.live().streams, 0);
    }

    fn a_capture_is_not_broken(rig) {
        let (pool, [a, b], stream) = common::pair(rig, 8);
        let other = Stream::new(&rig.device).unwrap();
        let block = a.allocate_on(&stream, 2 * G).unwrap();
        let warm = a.allocate_on(&stream, G).unwrap();
        drop(warm);
        drop(b.allocate_on(&other, 4 * G).unwrap());
        let guard = pool.capture_guard();
        captures::begin(&rig.machine, &stream);
        // Cached memory of the home stream and fresh memory can be allocated.
        drop(a.allocate_on(&stream, G).unwrap());
        // Memory that must be zeroed cannot, on a capturing stream or on any other.
        let zeroed = b.block(4 * G).home_stream(&other).zeroed(true).try_allocate();
        assert!(matches!(zeroed, Err(BlockError::Capturing(_))), "{zeroed:?}");
        let fresh = a.allocate_on(&stream, G).unwrap();
        // Memory with a pending fence cannot be allocated, and the error says so.
        let refused = a.try_allocate(4 * G).unwrap_err();
        assert!(matches!(refused, BlockError::Capturing(_)), "{refused}");
        assert_eq!(pending_free(&refused), 4 * G);
        assert!(matches!(block.write(0, b"x"), Err(MemoryError::Capturing)));
        assert_eq!(pool.trim(0).unwrap(), 0);
        let kept = block.free().unwrap_err();
        assert_eq!(kept.reason, MemoryError::Capturing);
        let block = kept.owner;
        let lease = block.lease();
        rig.kernel(&stream, &[], &[(block.address(), G, 5)]);
        drop(fresh);
        // SAFETY: the capture was begun above.
        #[allow(unsafe_code)]
        let graph = unsafe { rig.machine.capture_end(D0, stream.as_raw()) };
        let graph = graph.expect("the capture was not broken");
        drop(guard);
        // SAFETY: the block is leased until the launch below has completed.
        #[allow(unsafe_code)]
        unsafe {
            let ready = rig.machine.graph_instantiate(D0, graph).unwrap();
            block.free().unwrap();
            rig.machine.graph_launch(D0, ready, stream.as_raw()).unwrap();
            stream.synchronize().unwrap();
            rig.machine.graph_exec_destroy(D0, ready).unwrap();
            rig.machine.graph_destroy(D0, graph).unwrap();
        }
        drop(lease);
        drop(a.try_allocate(8 * G).unwrap());
    }

    fn nothing_of_ours_slips_into_a_graph_even_without_a_guard(rig) {
        let (_pool, [a, b], stream) = common::pair(rig, 4);
        let other = Stream::new(&rig.device).unwrap();
        drop(a.allocate_on(&other, 2 * G).unwrap());
        drop(b.allocate_on(&other, 2 * G).unwrap());
        captures::begin(&rig.machine, &stream);
        // The scrub of B's memory would be captured instead of run.
        let refused = a.allocate_on(&stream, 4 * G).unwrap_err();
        assert!(matches!(refused, BlockError::Capturing(_)), "{refused}");
        // An event of the other stream cannot be recorded, but its completion can be queried.
        drop(a.allocate_on(&stream, 2 * G).unwrap());
        captures::end(&rig.machine, &stream);
    }

    fn queries_of_ours_leave_a_foreign_capture_alone(rig) {
        let (_pool, [a, b], ours) = common::pair(rig, 4);
        let theirs = Stream::new(&rig.device).unwrap();
        drop(a.allocate_on(&ours, 4 * G).unwrap());
        captures::begin(&rig.machine, &theirs);
        drop(b.try_allocate(4 * G).unwrap());
        captures::end(&rig.machine, &theirs);
    }

    fn a_foreign_capture_that_marking_breaks_is_no_failure_here(rig) {
        let (pool, a, theirs) = common::scene(rig, 4);
        drop(a.try_allocate(4 * G).unwrap());
        captures::begin(&rig.machine, &theirs);
        assert_eq!(pool.trim(0).unwrap(), 0, "the driver records no event while a stream captures");
        assert_eq!(pool.stats().pending_free, 4 * G);
        captures::end_broken(&rig.machine, &theirs);
        drop(a.try_allocate(4 * G).unwrap());
    }

    fn a_lost_context_loses_the_pool_and_not_the_program(rig) {
        let (pool, tenant, stream) = common::scene(rig, 8);
        let mut block = tenant.block(G).capacity(4 * G).home_stream(&stream).allocate().unwrap();
        drop(tenant.allocate_on(&stream, 2 * G).unwrap());
        rig.machine.lose_context(D0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert!(stream.synchronize().is_err());
        for refused in [tenant.allocate_on(&stream, 2 * G).map(drop), block.try_grow_to(2 * G)] {
            let lost = matches!(refused, Err(BlockError::Memory(MemoryError::Call(CallError::ContextLost(_)))));
            assert!(lost, "{refused:?}");
        }
        drop((block, tenant, stream));
        pool.close().unwrap();
        assert_eq!((rig.machine.live().mappings, rig.machine.live().physical_bytes), (0, 0));
    }

    fn a_pool_that_is_in_use_is_not_closed(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        let block = tenant.try_allocate(G).unwrap();
        let lease = block.lease();
        let pool = pool.close().unwrap_err().owner;
        drop((tenant, block));
        let pool = pool.close().unwrap_err().owner;
        drop(lease);
        pool.close().unwrap();
        assert!(rig.machine.live().is_nothing());
    }

    fn the_last_owner_waits_for_the_device_before_it_unmaps(rig) {
        let (pool, tenant, stream) = common::scene(rig, 8);
        let block = tenant.allocate_on(&stream, 4 * G).unwrap();
        busy(rig, &stream, &block, 1);
        drop((pool, tenant));
        std::thread::scope(|scope| {
            scope.spawn(|| drop(block));
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(rig.machine.live().mappings, 1, "unmapped under a kernel");
            rig.machine.release_all_streams(D0);
        });
        assert_eq!(rig.machine.live().mappings, 0);
        assert!(rig.device.lost().is_none());
    }
}
