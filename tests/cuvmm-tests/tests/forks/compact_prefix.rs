//! Compacting a prefix before it is forked: what forks map then, what prevents it, and what happens
//! to the memory.
#![allow(clippy::unit_arg)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common;
use crate::common::attention::{SMALL, Scene, assert_attends, fill, salts};
use crate::common::books::{balanced, books};
use crate::common::compaction::sizes;
use crate::common::sweep::{sweep_partly, text};
use crate::common::{D0, G, Rig, busy, pool};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, HandleTypes};
use cuvmm::error::{ArgumentError, BlockError, CallError, KvCacheError, MemoryError};
use cuvmm::kv::Layout;
use cuvmm::{Block, Contents, HostStore, KvCache, Pool, Stream, Tenant};

/// Allocates a block for forking, with extents of two granules and a stamp in each granule.
fn prompt(tenant: &Tenant, stream: &Stream, granules: u64) -> Block {
    let builder = tenant.block(granules * G).capacity(64 * G);
    let builder = builder.largest_extent(2 * G).home_stream(stream);
    let block = builder.allocate().unwrap();
    for granule in 0..granules {
        block.write(granule * G, &[granule as u8 + 1; 8]).unwrap();
    }
    block
}

fn shows(rig: &Rig<impl Backing>, block: &Block, granules: std::ops::Range<u64>) {
    for granule in granules.filter(|_| rig.keeps_bytes()) {
        let mut bytes = [0; 8];
        block.read(granule * G, &mut bytes).unwrap();
        assert_eq!(bytes, [granule as u8 + 1; 8], "granule {granule}");
    }
}

fn is_in_use(outcome: &Result<u64, BlockError>) -> bool {
    matches!(outcome, Err(BlockError::Memory(MemoryError::InUse { .. })))
}

on_both! {
    fn a_fork_maps_few_extents(rig) {
        let (pool, tenant, stream) = common::scene(rig, 96);
        let parent = prompt(&tenant, &stream, 23);
        assert_eq!(parent.extents().len(), 12);
        let address = parent.address();
        // The last byte of the prefix is in an extent that is only partly covered, which stays
        // unchanged.
        assert_eq!(parent.compact_prefix(21 * G).unwrap(), 20 * G);
        assert_eq!((sizes(&parent), parent.address()), (vec![16, 4, 2, 1], address));
        assert_eq!(books(rig, &pool).committed, 23 * G);
        shows(rig, &parent, 0..23);
        assert_eq!(parent.compact_prefix(21 * G).unwrap(), 0, "the prefix is compact already");
        rig.faults.forget();
        let fork = parent.fork(21 * G, 22 * G).unwrap();
        assert_eq!(rig.faults.count(Call::MemMap), 3, "two shared extents, and one of its own");
        assert_eq!(sizes(&fork), [16, 4, 2]);
        shows(rig, &fork, 0..21);
        assert_eq!(books(rig, &pool).shared, 20 * G);
        drop(parent);
        shows(rig, &fork, 0..21);
        drop(fork);
        assert_eq!(books(rig, &pool).in_use, 0);
    }

    fn what_is_shared_stays_and_what_lies_behind_is_made_large(rig) {
        let (pool, tenant, stream) = common::scene(rig, 96);
        let parent = prompt(&tenant, &stream, 20);
        let fork = parent.fork(4 * G, 4 * G).unwrap();
        assert_eq!(parent.compact_prefix(20 * G).unwrap(), 16 * G);
        assert_eq!((sizes(&parent), sizes(&fork)), (vec![2, 2, 16], vec![2, 2]));
        assert_eq!(fork.compact_prefix(4 * G).unwrap(), 0);
        shows(rig, &parent, 0..20);
        shows(rig, &fork, 0..4);
        balanced(rig, &pool);
    }

    fn it_waits_for_work_as_long_as_the_block_may(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 96);
        let parent = prompt(&tenant, &stream, 8);
        busy(rig, &stream, &parent, 1);
        assert!(is_in_use(&parent.compact_prefix(8 * G)), "the call does not wait");
        assert_eq!(sizes(&parent), [2; 4]);
        let builder = tenant.block(8 * G).capacity(8 * G).largest_extent(2 * G);
        let builder = builder.home_stream(&stream).timeout(Duration::from_secs(600));
        let patient = builder.allocate().unwrap();
        {
            // A lease is not waited for.
            let _lease = patient.lease();
            let refused = patient.compact_prefix(8 * G);
            assert!(matches!(refused, Err(BlockError::Memory(MemoryError::Call(CallError::InUse)))), "{refused:?}");
        }
        std::thread::scope(|scope| {
            let compacted = scope.spawn(|| tenant.compact_prefix(&[&parent, &patient], 8 * G));
            rig.machine.release_stream(D0, stream.as_raw());
            assert_eq!(compacted.join().unwrap().unwrap(), 16 * G);
        });
        assert_eq!((sizes(&parent), sizes(&patient)), (vec![8], vec![8]));
    }

    fn what_is_queued_after_the_call_is_not_waited_for(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 64);
        let builder = tenant.block(8 * G).capacity(8 * G).largest_extent(2 * G).home_stream(&stream);
        let parent = builder.timeout(Duration::from_secs(600)).allocate().unwrap();
        let other = prompt(&tenant, &stream, 2);
        busy(rig, &stream, &other, 1);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // The stream always has work, and all but the last work is always complete.
            scope.spawn(|| while !done.load(Ordering::Acquire) {
                rig.kernel(&stream, &[], &[(other.address(), G, 1)]);
                rig.machine.step(D0, stream.as_raw());
                std::thread::yield_now();
            });
            let compacted = parent.compact_prefix(8 * G);
            done.store(true, Ordering::Release);
            assert_eq!(compacted.unwrap(), 8 * G);
        });
        rig.machine.release_all_streams(D0);
    }

    fn there_need_be_room_for_one_at_a_time(rig) {
        let (pool, tenant, stream) = common::scene(rig, 24);
        let (one, two) = (prompt(&tenant, &stream, 8), prompt(&tenant, &stream, 8));
        assert_eq!(tenant.compact_prefix(&[&one, &two], 8 * G).unwrap(), 16 * G);
        assert_eq!((sizes(&one), sizes(&two)), (vec![8], vec![8]));
        // The same if the free memory is in small physicals.
        let three = prompt(&tenant, &stream, 8);
        drop((one, two));
        assert_eq!(pool.trim(8 * G).unwrap(), 16 * G);
        let small: Vec<Block> = (0..8).map(|_| tenant.block(G).allocate().unwrap()).collect();
        rig.device.synchronize().unwrap();
        drop(small);
        assert_eq!(three.compact_prefix(8 * G).unwrap(), 8 * G);
        shows(rig, &three, 0..8);
    }

    fn what_a_failed_copy_was_made_to_is_scrubbed_for_the_next(rig) {
        for nth in 1..4 {
            let pool = pool(rig, 40);
            let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
            let stream = Stream::new(&rig.device).unwrap();
            let parent = prompt(&tenant, &stream, 8);
            let secret = other.block(8 * G).home_stream(&stream).allocate().unwrap();
            secret.write(0, b"secret!!").unwrap();
            drop(secret);
            stream.synchronize().unwrap();
            drop(other);
            // Before the copy, and after it.
            rig.faults.forget();
            rig.faults.arm(Fault::nth(nth, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
            let failed = parent.compact_prefix(8 * G);
            rig.faults.disarm();
            assert_eq!(failed.is_err(), nth < 3, "{failed:?}");
            shows(rig, &parent, 0..8);
            let third = pool.tenant("c").register().unwrap();
            for tenant in [&tenant, &third] {
                let next = tenant.block(8 * G).home_stream(&stream).allocate().unwrap();
                let mut bytes = [1; 8];
                next.read(0, &mut bytes).unwrap();
                assert!(bytes == [0; 8] || bytes[0] == 1 && tenant.name() == "a" || !rig.keeps_bytes(), "{nth}: {bytes:?}");
                assert_ne!(&bytes, b"secret!!");
            }
        }
    }

    fn it_takes_nothing_from_others(rig) {
        let pool = pool(rig, 24);
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let parent = prompt(&tenant, &stream, 12);
        drop(other.block(8 * G).home_stream(&stream).allocate().unwrap());
        stream.synchronize().unwrap();
        let held = || {
            let tenants = balanced(rig, &pool).tenants;
            tenants.iter().map(|one| (one.in_use, one.pending_free)).collect::<Vec<_>>()
        };
        let before = held();
        assert_eq!(before, [(12 * G, 0), (0, 8 * G)]);
        let refused = parent.compact_prefix(12 * G);
        let Err(BlockError::OutOfMemory(shortage)) = &refused else {
            panic!("{refused:?}");
        };
        assert_eq!(shortage.tenant, "a");
        assert_eq!(held(), before, "another tenant's cached memory is not taken");
        assert_eq!(sizes(&parent), [2; 6]);
        // A shorter prefix fits.
        assert_eq!(parent.compact_prefix(4 * G).unwrap(), 4 * G);
        assert_eq!(sizes(&parent), [4, 2, 2, 2, 2]);
        shows(rig, &parent, 0..12);
    }

    fn what_cannot_be_is_refused_and_changes_nothing(rig) {
        let pool = common::shareable(rig, 96).build().unwrap();
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let parent = prompt(&tenant, &stream, 8);
        let too_large = parent.compact_prefix(8 * G + 1);
        assert!(matches!(too_large, Err(BlockError::Argument(ArgumentError::TooLarge { .. }))));
        assert!(matches!(other.compact_prefix(&[&parent], G), Err(BlockError::WrongTenant { index: 0 })));
        assert_eq!(tenant.compact_prefix(&[], G).unwrap(), 0);
        assert_eq!(parent.compact_prefix(0).unwrap(), 0);
        {
            let _guard = pool.capture_guard();
            let captured = parent.compact_prefix(8 * G);
            assert!(matches!(captured, Err(BlockError::Memory(MemoryError::Capturing))), "{captured:?}");
        }
        let store = HostStore::builder(&rig.device).pinned(16 * G).build().unwrap();
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        let asleep = parent.compact_prefix(8 * G);
        let size = parent.size();
        let whole = |error: &BlockError| {
            matches!(error, BlockError::Memory(MemoryError::Asleep(it)) if *it == size)
        };
        assert!(asleep.as_ref().is_err_and(whole), "{asleep:?}");
        tenant.blocks().wake().unwrap();
        assert_eq!(sizes(&parent), [2; 4]);
        drop(parent.export(HandleTypes::POSIX_FD).unwrap());
        let refused = parent.compact_prefix(8 * G);
        assert!(matches!(refused, Err(BlockError::Memory(MemoryError::Exported { .. }))), "{refused:?}");
        shows(rig, &parent, 0..8);
    }

    fn large_extents_serve_no_other_block(rig) {
        let (pool, tenant, stream) = common::scene(rig, 96);
        let parent = prompt(&tenant, &stream, 16);
        parent.compact_prefix(16 * G).unwrap();
        drop(parent);
        let next = prompt(&tenant, &stream, 16);
        assert_eq!(sizes(&next), [2; 8], "large extents of a fork source are not reused");
        // The same after a fork that was the last owner of its memory.
        next.compact_prefix(16 * G).unwrap();
        let mut fork = next.fork(16 * G, 16 * G).unwrap();
        drop(next);
        fork.shrink_to(15 * G).unwrap();
        fork.grow_to(16 * G).unwrap();
        assert_eq!(fork.read_only(), 0, "the extent was made writable in place");
        drop(fork);
        let next = prompt(&tenant, &stream, 16);
        assert_eq!(sizes(&next), [2; 8]);
        balanced(rig, &pool);
    }

    fn a_cut_copies_what_lies_before_it_in_its_extent(rig) {
        let (pool, tenant, stream) = common::scene(rig, 96);
        let parent = prompt(&tenant, &stream, 20);
        parent.compact_prefix(20 * G).unwrap();
        let mut fork = parent.fork(20 * G, 20 * G).unwrap();
        // In the second extent, of four granules.
        fork.shrink_to(18 * G).unwrap();
        fork.grow_to(19 * G).unwrap();
        assert_eq!(fork.read_only(), 16 * G);
        assert_eq!(sizes(&fork)[..2], [16, 2]);
        fork.write(18 * G, &[99; 8]).unwrap();
        shows(rig, &fork, 0..18);
        shows(rig, &parent, 0..20);
        // In the first extent: nothing is shared any more.
        fork.shrink_to(10 * G).unwrap();
        fork.grow_to(11 * G).unwrap();
        assert_eq!((fork.read_only(), books(rig, &pool).shared), (0, 0));
        shows(rig, &fork, 0..10);
        shows(rig, &parent, 0..20);
    }

    fn sequences_of_a_cache(rig) {
        let build = |tenant: &Tenant, stream: &Stream, layout| {
            let builder = KvCache::builder(tenant, stream, SMALL).layout(layout);
            builder.may_fork(true).build().unwrap()
        };
        let scene = Scene::new(rig, pool(rig, 160), Layout::TokenMajor, build);
        let Scene { pool, mut cache, stream, .. } = scene;
        let root = cache.create(400).unwrap();
        fill(&mut cache, root, 1, 0..400);
        stream.synchronize().unwrap();
        let before = pool.stats().mappings;
        let zero = cache.compact_prefix(root, 0);
        assert!(matches!(zero, Err(KvCacheError::Argument(_))), "{zero:?}");
        let more = cache.compact_prefix(root, 401);
        assert!(matches!(more, Err(KvCacheError::BeyondEnd { tokens: 401, held: 400, .. })), "{more:?}");
        // 16 tokens per granule: 24 whole granules, which were six extents of four.
        assert_eq!(cache.compact_prefix(root, 392).unwrap(), 24 * G);
        assert_eq!(pool.stats().mappings, before - 4);
        let fork = cache.fork(root, 392).unwrap();
        cache.append(&[(fork, 8)]).unwrap();
        fill(&mut cache, fork, 2, 392..400);
        assert_attends(rig, &cache, root, &[1; 400]);
        assert_attends(rig, &cache, fork, &salts(&[(1, 392), (2, 8)]));
        assert_eq!(cache.stats().shared, 24 * G);
        cache.truncate(fork, 30).unwrap();
        cache.append(&[(fork, 10)]).unwrap();
        fill(&mut cache, fork, 3, 30..40);
        assert_attends(rig, &cache, fork, &salts(&[(1, 30), (3, 10)]));
        assert_attends(rig, &cache, root, &[1; 400]);
        cache.free(root).unwrap();
        assert!(cache.compact_prefix(root, 1).is_err(), "the sequence was freed");
        balanced(rig, &pool);
    }
}

#[test]
fn every_driver_call_failed_once() {
    struct World {
        blocks: Vec<Block>,
        tenant: Tenant,
        pool: Pool,
        _stream: Stream,
    }
    let calls = sweep_partly(
        |rig| {
            let builder = common::limited(rig, 96);
            let (pool, tenant) =
                common::with_tenant(builder.largest_extent(8 * G).build().unwrap());
            let stream = Stream::new(&rig.device).unwrap();
            let blocks = (0..2).map(|_| prompt(&tenant, &stream, 12)).collect();
            World {
                blocks,
                tenant,
                pool,
                _stream: stream,
            }
        },
        |_, world| {
            let blocks: Vec<&Block> = world.blocks.iter().collect();
            text(world.tenant.compact_prefix(&blocks, 12 * G).map(drop))
        },
        |world| {
            let stats = world.pool.stats();
            [stats.in_use, stats.shared, stats.quarantined]
        },
    );
    // In each block a run of four extents and one of two.
    assert!(calls > 4 * 8, "{calls}");
}
