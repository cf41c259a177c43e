//! Compaction: many small extents become few large ones, with the same addresses and bytes.

use crate::common;
use crate::common::books::{are_the_drivers, balanced};
use crate::common::compaction::{CALLS, assert_stamped, exact, sizes, stamp_all};
use crate::common::panics::panics_at;
use crate::common::{D0, G};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{BlockError, MemoryError};
use cuvmm::{Block, Growth, Stream, Tenant};

/// Allocates a block of single granules, each stamped with its number.
fn pieces(tenant: &Tenant, stream: &Stream, granules: u64) -> Block {
    let block = tenant.block(G).capacity(32 * G).home_stream(stream);
    let mut block = block.try_allocate().unwrap();
    for granule in 1..granules {
        block.try_grow_to((granule + 1) * G).unwrap();
    }
    stamp_all(&block);
    block
}

on_both! {
    fn many_small_extents_become_few_and_keep_their_bytes(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let block = pieces(&tenant, &stream, 20);
        let address = block.address();
        assert_eq!(block.extents().len(), 20);
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.extents_before, done.extents_after), (20, 3), "8 + 8 + 4");
        assert_eq!((done.copied, done.steps, done.stopped), (20 * G, 3, false));
        assert_eq!(done.released, 20 * G, "the old extents");
        assert_eq!(block.address(), address);
        assert_eq!(sizes(&block), [8, 8, 4]);
        assert_stamped(rig, &block);
        balanced(rig, &pool);
        assert_eq!(pool.stats().in_use, 20 * G);
        let again = pool.compact(|_| true).unwrap();
        assert_eq!((again.steps, again.copied), (0, 0));
    }

    fn it_stops_when_told_to_and_goes_on_later(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let (one, two) = (pieces(&tenant, &stream, 8), pieces(&tenant, &stream, 8));
        let done = pool.compact(|so_far| so_far.steps < 1).unwrap();
        assert_eq!((done.steps, done.stopped, done.extents_after), (1, true, 9));
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.steps, done.stopped, done.extents_after), (1, false, 2));
        assert_stamped(rig, &one);
        assert_stamped(rig, &two);
    }

    fn what_is_leased_or_at_work_stays(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let (leased, busy) = (pieces(&tenant, &stream, 8), pieces(&tenant, &stream, 8));
        let lease = leased.lease();
        rig.held_kernel(&stream, &[], &[(busy.address(), G, 1)]);
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.in_use, done.copied, done.extents_after), (2, 0, 16));
        rig.machine.release_stream(D0, stream.as_raw());
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.in_use, done.copied), (1, 8 * G));
        assert_eq!((leased.extents().len(), busy.extents().len()), (8, 1));
        drop(lease);
        let guard = pool.capture_guard();
        assert!(matches!(pool.compact(|_| true), Err(BlockError::Memory(MemoryError::Capturing))));
        drop(guard);
        assert_eq!(pool.compact(|_| true).unwrap().extents_after, 2);
        assert_stamped(rig, &leased);
    }

    fn without_room_for_a_copy_nothing_moves(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 20).build().unwrap());
        let block = pieces(&tenant, &stream, 16);
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.no_space, done.copied, done.extents_after), (2, 0, 16));
        assert!(rig.machine.live().physical_bytes <= 20 * G);
        assert_stamped(rig, &block);
        balanced(rig, &pool);
    }

    fn idle_memory_in_pieces_goes_back(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        drop(pieces(&tenant, &stream, 8));
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.copied, done.released, done.extents_after), (0, 8 * G, 0));
        assert_eq!(rig.machine.live().physical_bytes, 0);
    }

    fn every_call_of_a_compaction_may_fail_once(rig) {
        for k in 1..200 {
            let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
            let block = pieces(&tenant, &stream, 8);
            rig.faults.forget();
            rig.faults.arm(common::nth_of(k, CUresult::CUDA_ERROR_UNKNOWN, CALLS));
            let outcome = pool.compact(|_| true);
            let hit = rig.faults.injected() > 0;
            rig.faults.disarm();
            // A block stays unchanged if its streams cannot be queried.
            let whole = [1, 8].contains(&block.extents().len());
            assert!(outcome.is_err() || !hit || pool.stats().quarantined > 0 || whole, "{k}");
            assert_stamped(rig, &block);
            assert_eq!(pool.stats().in_use, 8 * G);
            balanced(rig, &pool);
            if !hit {
                assert!(k > 10, "only {k} calls were failed");
                return;
            }
            drop((block, tenant));
            pool.close().unwrap();
            assert_eq!(rig.machine.live().physicals, 0, "call {k}");
        }
        panic!("a compaction of eight extents made 200 calls");
    }

    fn what_two_failures_lose_is_said(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let block = pieces(&tenant, &stream, 8);
        rig.faults.forget();
        // The first mapping is the copy's own. Then neither the new nor the old memory can be
        // mapped.
        rig.faults.arm(Fault::from(2, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
        let lost = pool.compact(|_| true);
        assert!(matches!(lost, Err(BlockError::Lost { bytes, .. }) if bytes == 8 * G), "{lost:?}");
        rig.faults.disarm();
        // The block still has its size, but no memory.
        are_the_drivers(rig, &pool.stats(), 0);
        drop((block, tenant));
        pool.close().unwrap();
    }

    fn a_hole_beside_new_memory_that_stays_is_said(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let mut block = tenant
            .block(G)
            .capacity(8 * G)
            .growth(Growth::Exact)
            .home_stream(&stream)
            .allocate()
            .unwrap();
        for granules in [3, 5] {
            block.grow_to(granules * G).unwrap();
        }
        assert_eq!(sizes(&block), [1, 2, 2]);
        rig.faults.forget();
        // New memory of four granules is mapped, the next extent is not; and the first cannot be
        // unmapped.
        rig.faults.arm(Fault::nth(4, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
        for nth in [6, 7] {
            rig.faults.arm(Fault::nth(nth, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
        }
        let lost = pool.compact(|_| true);
        rig.faults.disarm();
        assert_eq!(sizes(&block), [4]);
        assert!(
            matches!(lost, Err(BlockError::Lost { offset, bytes, .. }) if (offset, bytes) == (4 * G, G)),
            "{lost:?}"
        );
        drop((block, tenant));
        pool.close().unwrap();
        assert_eq!(rig.machine.live().physicals, 0);
    }

    fn what_can_be_put_back_is_not_lost_with_what_cannot(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, exact(rig, 64).build().unwrap());
        let block = pieces(&tenant, &stream, 8);
        rig.faults.forget();
        // The new memory cannot be mapped, and neither can the last but one extent of the old, in
        // both attempts.
        for nth in [2, 4, 5] {
            rig.faults.arm(Fault::nth(nth, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
        }
        let lost = pool.compact(|_| true);
        rig.faults.disarm();
        let extents: Vec<u64> = block.extents().iter().map(|extent| extent.offset / G).collect();
        assert_eq!(extents, [0, 1, 2, 3, 4, 5, 7]);
        assert!(
            matches!(lost, Err(BlockError::Lost { offset, bytes, .. }) if (offset, bytes) == (6 * G, G)),
            "{lost:?}"
        );
        drop((block, tenant));
        pool.close().unwrap();
        assert_eq!(rig.machine.live().physicals, 0);
    }
}

#[test]
fn a_panic_while_the_addresses_of_a_copy_are_freed_loses_no_memory_of_the_pool() {
    let rig = common::host();
    let (pool, tenant, stream) = common::with_stream(&rig, exact(&rig, 64).build().unwrap());
    let block = pieces(&tenant, &stream, 5);
    stream.synchronize().unwrap();
    let compact = || pool.compact(|_| true).map(drop);
    let (_, panicked) = panics_at(&rig, 1, |call| call == Call::MemAddressFree, compact);
    assert!(panicked);
    // The block has its new memory for good, and the pool what was in its place.
    let held = || {
        let stats = pool.stats();
        [stats.committed, stats.free, stats.mappings * G].map(|bytes| bytes / G)
    };
    assert_eq!(held(), [5, 5, 2]);
    drop(block);
    pool.trim(0).unwrap();
    assert_eq!(held(), [5, 0, 2]);
}
