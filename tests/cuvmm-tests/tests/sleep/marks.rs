//! Marked ranges: a sleep that keeps only what is marked, and one that would lose it.
#![allow(clippy::single_range_in_vec_init)]

use std::ops::Range;

use crate::common::world::books;
use crate::common::{G, Rig, pool};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::error::{ArgumentError, MemoryError, SleepError};
use cuvmm::{Block, Contents, HostStore, Stream, Tenant};

fn store<B: Backing>(rig: &Rig<B>, limit: u64) -> HostStore {
    let builder = HostStore::builder(&rig.device);
    builder.limit(limit).build().unwrap()
}

/// Bytes that tell where they are, none of which is zero.
fn contents(size: u64, seed: u8) -> Vec<u8> {
    let byte = |at: u64| (at / 509) as u8 ^ seed | 1;
    (0..size).map(byte).collect()
}

fn written(tenant: &Tenant, size: u64, seed: u8) -> Block {
    let block = tenant.allocate(size).unwrap();
    block.write(0, &contents(size, seed)).unwrap();
    block
}

/// Checks that a block has its bytes in some ranges, and zeros elsewhere if `zeros`.
fn assert_kept<B: Backing>(
    rig: &Rig<B>,
    block: &Block,
    seed: u8,
    kept: &[Range<u64>],
    zeros: bool,
) {
    let mut seen = vec![7; block.size() as usize];
    block.read(0, &mut seen).unwrap();
    if !rig.keeps_bytes() {
        return;
    }
    let expected = contents(block.size(), seed);
    let mut end = 0;
    for range in kept {
        let (from, to) = (range.start as usize, range.end as usize);
        assert!(seen[from..to] == expected[from..to], "{range:?}");
        assert!(!zeros || seen[end..from].iter().all(|&byte| byte == 0));
        end = to;
    }
    assert!(!zeros || seen[end..].iter().all(|&byte| byte == 0));
}

/// Fills memory that blocks gave up with another tenant's bytes.
fn soil<B: Backing>(rig: &Rig<B>, tenant: &Tenant, granules: u64) {
    let block = tenant.allocate(granules * G).unwrap();
    block
        .write(0, &vec![0xFF; (granules * G) as usize])
        .unwrap();
    drop(block);
    rig.device.synchronize().unwrap();
}

on_both! {
    // I-97
    fn only_what_is_marked_comes_back(rig) {
        let pool = pool(rig, 32);
        let (tenant, other) = (pool.tenant("model").register().unwrap(), pool.tenant("other").register().unwrap());
        let blocks = [9 * G, 5 * G + 17, 3 * G].map(|size| written(&tenant, size, 1));
        // Across the ends of parts and extents, at the very end, and nothing.
        let kept = [vec![100..101, 5000..9000, G - 3..4 * G + 5, 9 * G - 1..9 * G], vec![0..5 * G + 17], vec![]];
        for (block, kept) in blocks.iter().zip(&kept) {
            block.set_kept(kept.clone()).unwrap();
            assert_eq!(&block.kept(), kept);
        }
        let store = store(rig, 32 * G);
        let bytes = (1 + 4000 + 3 * G + 8 + 1) + (5 * G + 17);
        for _ in 0..2 {
            let slept = tenant.blocks().sleep(Contents::KeepMarked(&store)).unwrap();
            assert_eq!((slept.blocks, slept.given, slept.kept), (3, 18 * G, bytes));
            // The ranges of a block lie one behind the other: they take whole parts together.
            assert_eq!(store.capacity() - store.free(), (4 + 6) * G);
            assert_eq!((tenant.stats().committed, pool.stats().asleep), (0, 18 * G));
            let mut read = [0; 8];
            let start = blocks[0].read_kept(5000, &mut read);
            assert!(start.is_ok() && (!rig.keeps_bytes() || read == contents(5008, 1)[5000..]));
            let outside = blocks[0].read_kept(8996, &mut read);
            assert!(matches!(outside, Err(SleepError::NotKept { .. })));
            soil(rig, &other, 32);
            let woken = tenant.blocks().wake().unwrap();
            assert_eq!((woken.blocks, woken.mapped, woken.restored), (3, 18 * G, bytes));
            assert_eq!(store.free(), store.capacity());
            for (block, kept) in blocks.iter().zip(&kept) {
                // No byte of the other tenant is to be seen, so the rest is zero.
                assert_kept(rig, block, 1, kept, true);
                assert_eq!(&block.kept(), kept, "the marks stay");
            }
        }
    }

    fn what_is_marked_is_not_discarded(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let blocks = [2 * G, 3 * G].map(|size| written(&tenant, size, 2));
        blocks[1].set_kept([10..20, 15..40]).unwrap();
        let before = books(&pool);
        let refused = tenant.blocks().sleep(Contents::Discard).unwrap_err();
        assert!(matches!(refused, SleepError::Marked { blocks: 1, bytes: 30 }), "{refused}");
        assert_eq!(books(&pool), before);
        assert!(!blocks.iter().any(Block::is_asleep));
        for block in &blocks {
            assert_kept(rig, block, 2, &[0..block.size()], false);
        }
        // All contents are kept with and without marks.
        let store = store(rig, 16 * G);
        assert_eq!(tenant.blocks().sleep(Contents::Keep(&store)).unwrap().kept, 5 * G);
        tenant.blocks().wake().unwrap();
        assert_kept(rig, &blocks[1], 2, &[0..3 * G], false);
        blocks[1].set_kept([]).unwrap();
        assert_eq!(tenant.blocks().sleep(Contents::Discard).unwrap().blocks, 2);
    }

    fn without_a_mark_nothing_is_kept(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let block = written(&tenant, 5 * G, 3);
        let store = store(rig, G);
        let slept = tenant.blocks().sleep(Contents::KeepMarked(&store)).unwrap();
        assert_eq!((slept.given, slept.kept, store.capacity()), (5 * G, 0, 0));
        tenant.blocks().wake().unwrap();
        assert!(!block.is_asleep());
    }

    fn marks_are_checked(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let mut block = tenant.block(2 * G).capacity(8 * G).allocate().unwrap();
        block.set_kept([G..2 * G, 5..5]).unwrap();
        assert_eq!(block.kept(), [G..2 * G]);
        let refused = block.set_kept([0..1, G..2 * G + 1]).unwrap_err();
        assert!(matches!(refused, MemoryError::Argument(ArgumentError::OutOfRange { end, .. }) if end == 2 * G + 1));
        assert_eq!(block.kept(), [G..2 * G]);
        // What is cut off by a shrink is not kept.
        block.shrink_to(G + 100).unwrap();
        assert_eq!(block.kept(), [G..G + 100]);
        let store = store(rig, 16 * G);
        assert_eq!(tenant.blocks().sleep(Contents::KeepMarked(&store)).unwrap().kept, 100);
        assert!(matches!(block.set_kept([]), Err(MemoryError::Asleep(_))));
        assert_eq!(block.kept(), [G..G + 100], "asleep too");
        tenant.blocks().wake().unwrap();
        block.grow_to(2 * G).unwrap();
        assert_eq!(block.kept(), [G..2 * G]);
    }

    fn marks_end_with_their_block(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let block = || tenant.block(2 * G).home_stream(&stream).allocate().unwrap();
        let first = block();
        let address = first.address();
        first.set_kept([0..2 * G]).unwrap();
        drop(first);
        let next = block();
        assert_eq!((next.address(), next.kept()), (address, vec![]));
        next.set_kept([0..G]).unwrap();
        let fork = next.fork(2 * G, 2 * G).unwrap();
        assert_eq!(fork.kept(), []);
    }

    fn zeros_are_owed_beside_marked_bytes(rig) {
        let pool = pool(rig, 32);
        let (tenant, stream) = (pool.tenant("model").register().unwrap(), Stream::new(&rig.device).unwrap());
        let zeroed = tenant.block(5 * G + 100).capacity(8 * G).zeroed(true).home_stream(&stream);
        let mut block = zeroed.allocate().unwrap();
        let store = store(rig, 16 * G);
        let kept = [50..60, 2 * G + 1..2 * G + 2, 5 * G + 99..5 * G + 100];
        block.set_kept(kept.clone()).unwrap();
        block.write(0, &contents(5 * G + 100, 4)).unwrap();
        tenant.blocks().sleep(Contents::KeepMarked(&store)).unwrap();
        // The tenant's own bytes are no zeros either.
        soil(rig, &tenant, 24);
        tenant.blocks().wake().unwrap();
        assert_kept(rig, &block, 4, &kept, true);
        block.grow_to(8 * G).unwrap();
        let mut bytes = vec![1; (3 * G - 100) as usize];
        block.read(5 * G + 100, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    fn pageable_memory_keeps_ranges_too(rig) {
        let pool = pool(rig, 64);
        let tenant = pool.tenant("model").register().unwrap();
        let block = written(&tenant, 40 * G, 5);
        // One byte of each 8 KiB: 256 ranges in a granule, all of them in one part of the store.
        let kept: Vec<_> = (0..40 * G / 8192).map(|at| at * 8192..at * 8192 + 1).collect();
        block.set_kept(kept.clone()).unwrap();
        let store = HostStore::builder(&rig.device).ordinary(4 * G).staging(2 * G).build().unwrap();
        let slept = tenant.blocks().sleep(Contents::KeepMarked(&store)).unwrap();
        assert_eq!((slept.kept, store.free()), (40 * 256, 3 * G));
        tenant.blocks().wake().unwrap();
        assert_kept(rig, &block, 5, &kept, false);
        // More than the staging area.
        let kept = [1..4 * G - 1, 8 * G..8 * G + 2];
        block.write(0, &contents(40 * G, 5)).unwrap();
        block.set_kept(kept.clone()).unwrap();
        tenant.blocks().sleep(Contents::KeepMarked(&store)).unwrap();
        assert_eq!(store.free(), 0);
        tenant.blocks().wake().unwrap();
        assert_kept(rig, &block, 5, &kept, false);
    }

    fn too_little_host_memory_for_what_is_marked_leaves_all_awake(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let blocks = [4 * G, 4 * G].map(|size| written(&tenant, size, 6));
        for block in &blocks {
            block.set_kept([0..G + 1]).unwrap();
        }
        let store = store(rig, 3 * G);
        let refused = tenant.blocks().sleep(Contents::KeepMarked(&store)).unwrap_err();
        assert!(matches!(refused, SleepError::StoreFull { wanted, .. } if wanted == 2 * G + 2), "{refused}");
        for block in &blocks {
            assert!(!block.is_asleep());
            assert_kept(rig, block, 6, &[0..4 * G], false);
        }
        blocks[0].set_kept([0..G]).unwrap();
        tenant.blocks().sleep(Contents::KeepMarked(&store)).unwrap();
        assert_eq!(store.free(), 0);
    }
}
