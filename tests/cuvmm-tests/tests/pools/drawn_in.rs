//! Captures that begin on a home stream just before the pool queues a fill or a copy there: none
//! takes it in unnoticed. The call is refused, and no tenant gets memory that was not scrubbed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::captures::{before, begin, end, end_broken};
use crate::common::{self, G, Rig, copy, pool};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{Call, DeviceAddress};
use cuvmm::pool::Hardened;
use cuvmm::{Block, BlockError, Heap, Limit, Pool, Stream};

const FILL: Call = Call::MemsetD8Async;
const COPY: Call = Call::MemcpyDtoDAsync;

/// Makes a call before whose first fill or copy a capture begins. The call is refused, and no graph
/// has the fill or the copy.
fn refused<B: Backing, T>(
    rig: &Rig<B>,
    home: &Stream,
    queued: Call,
    call: impl FnOnce() -> Result<T, BlockError>,
) {
    let captures = home.clone();
    before(rig, queued, 1, move |machine| begin(machine, &captures));
    let refused = call().err();
    rig.faults.watch(None);
    end_broken(&rig.machine, home);
    assert!(
        matches!(refused, Some(BlockError::Capturing(_))),
        "{refused:?}"
    );
}

/// Fails unless bytes read as this one, on drivers that keep bytes.
fn shows(rig: &Rig<impl Backing>, block: &Block, at: u64, byte: u8) {
    let mut seen = [!byte; 32];
    block.read(at, &mut seen).unwrap();
    assert!(!rig.keeps_bytes() || seen == [byte; 32], "{seen:?}");
}

fn dirty(rig: &Rig<impl Backing>, stream: &Stream, at: DeviceAddress) {
    rig.kernel(stream, &[], &[(at, G, 7)]);
}

on_both! {
    // I-28
    fn memory_of_another_tenant_is_not_handed_out_unscrubbed(rig) {
        let pool = pool(rig, 1);
        let [a, b] = common::tenants(&pool);
        let home = Stream::new(&rig.device).unwrap();
        let block = a.allocate_on(&home, G).unwrap();
        dirty(rig, &home, block.address());
        drop(block);
        refused(rig, &home, FILL, || b.allocate_on(&home, G));
        assert_eq!(pool.stats().quarantined, 0, "the fill runs nowhere");
        shows(rig, &b.allocate_on(&home, G).unwrap(), 0, 0);
    }

    fn what_a_graph_may_fill_is_used_by_nothing(rig) {
        for of_heap in [false, true] {
            let pool = pool(rig, 1);
            let [a, b] = common::tenants(&pool);
            let home = Stream::new(&rig.device).unwrap();
            let heap = Heap::builder(&b).build().unwrap();
            drop(a.allocate_on(&home, G).unwrap());
            pool.trim(u64::MAX).unwrap();
            // The capture ends before it can be invalidated.
            let (machine, captures) = (Arc::clone(&rig.machine), home.clone());
            let captured = AtomicBool::new(false);
            rig.faults.watch(Some(Arc::new(move |call| match call {
                FILL => {
                    begin(&machine, &captures);
                    captured.store(true, Ordering::SeqCst);
                }
                Call::StreamQuery if captured.swap(false, Ordering::SeqCst) => end(&machine, &captures),
                _ => {}
            })));
            let refused = match of_heap {
                true => heap.allocate(G, 1, &home).err(),
                false => b.allocate_on(&home, G).err(),
            };
            rig.faults.watch(None);
            assert!(refused.is_some(), "{refused:?}");
            assert_eq!(pool.stats().quarantined, G);
        }
    }

    fn what_a_zeroed_block_gave_up_is_not_shown_again(rig) {
        let (_pool, tenant, home) = common::scene(rig, 1);
        let mut block = tenant.block(G).zeroed(true).home_stream(&home).allocate().unwrap();
        dirty(rig, &home, block.address());
        block.shrink_to(G / 2).unwrap();
        refused(rig, &home, FILL, || block.try_grow_to(G));
        assert_eq!(block.size(), G / 2);
        block.try_grow_to(G).unwrap();
        shows(rig, &block, 0, 7);
        shows(rig, &block, G / 2, 0);
    }

    fn a_fork_has_the_bytes_of_its_block(rig) {
        let (_pool, tenant, home) = common::scene(rig, 4);
        let block = tenant.allocate_on(&home, 2 * G).unwrap();
        dirty(rig, &home, block.address());
        refused(rig, &home, COPY, || block.fork(G, G));
        shows(rig, &block.fork(G, G).unwrap(), 0, 7);
    }

    fn memory_that_becomes_a_blocks_own_has_its_bytes(rig) {
        let (_pool, tenant, home) = common::scene(rig, 8);
        let block = tenant.block(2 * G).largest_extent(2 * G).home_stream(&home).allocate().unwrap();
        dirty(rig, &home, block.address());
        let mut fork = block.fork(2 * G, 2 * G).unwrap();
        fork.shrink_to(G).unwrap();
        refused(rig, &home, COPY, || fork.grow_to(2 * G));
        shows(rig, &fork, 0, 7);
        fork.grow_to(2 * G).unwrap();
        shows(rig, &fork, 0, 7);
        drop(block);
        shows(rig, &fork, G - 32, 7);
    }

    fn freed_memory_of_a_hardened_pool_counts_as_written(rig) {
        let builder = Pool::builder(&rig.device).limit(Limit::Bytes(G));
        let (_pool, tenant) = common::with_tenant(builder.hardened(Hardened::new()).build().unwrap());
        let home = Stream::new(&rig.device).unwrap();
        let block = tenant.allocate_on(&home, G).unwrap();
        dirty(rig, &home, block.address());
        let captures = home.clone();
        before(rig, FILL, 1, move |machine| begin(machine, &captures));
        drop(block);
        rig.faults.watch(None);
        end_broken(&rig.machine, &home);
        shows(rig, &tenant.allocate_on(&home, G).unwrap(), 0, 0);
    }

    fn a_heap_zeroes_memory_of_another_tenant(rig) {
        let pool = pool(rig, 1);
        let [a, b] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let block = a.allocate_on(&stream, G).unwrap();
        dirty(rig, &stream, block.address());
        drop(block);
        let heap = Heap::builder(&b).build().unwrap();
        refused(rig, &stream, FILL, || heap.allocate(G, 1, &stream));
        let memory = heap.allocate(G, 1, &stream).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(copy(rig, memory.address().0), Some([0; 4]));
        }
    }
}
