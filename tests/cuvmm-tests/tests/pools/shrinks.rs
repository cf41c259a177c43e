//! Blocks that are expected to shrink: after a shrink most of the memory behind their end is free,
//! without a copy. Other blocks have the fewest extents, as ever.

use crate::common::books::{balanced, books};
use crate::common::compaction::sizes;
use crate::common::executor::block_on;
use crate::common::sweep::{sweep, text};
use crate::common::world;
use crate::common::{self, G, Rig, cases, limited};
use crate::on_both;
use cuvmm::driver::Call;
use cuvmm::driver::model::Nothing;
use cuvmm::error::{ArgumentError, BlockError};
use cuvmm::pool::BlockBuilder;
use cuvmm::{Block, Contents, Growth, HostStore, Mapper, Pool, Stream, Tenant};

/// The extents of 256 granules, in granules: at most a quarter of what lies before each, or 8.
const OF_256: [u64; 16] = [8, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 32];

fn tenant(pool: &Pool, name: &str) -> Tenant {
    pool.tenant(name).register().unwrap()
}

fn shrinking<'a>(tenant: &'a Tenant, stream: &'a Stream, granules: u64) -> BlockBuilder<'a> {
    let builder = tenant.block(granules * G).home_stream(stream);
    builder.expect_shrink(true)
}

/// Returns the bytes that `kept` bytes may strand.
fn most_stranded(kept: u64) -> u64 {
    (kept / 4).max(8 * G)
}

fn assert_shaped(block: &Block) {
    for extent in block.extents() {
        assert!(extent.size <= most_stranded(extent.offset), "{extent:?}");
    }
}

on_both! {
    // I-88
    fn after_a_shrink_a_block_holds_its_size_and_a_quarter_or_16_mib(rig) {
        let pool = common::pool(rig, 256);
        let tenant = tenant(&pool, "a");
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = shrinking(&tenant, &stream, 200).capacity(256 * G).allocate().unwrap();
        for granules in (1..200).rev() {
            block.shrink_to(granules * G).unwrap();
            stream.synchronize().unwrap();
            pool.trim(0).unwrap();
            let held = tenant.stats().committed;
            assert!(held - block.size() < most_stranded(block.size()), "{granules}: {held}");
            assert_eq!(held - block.size(), tenant.stats().stranded);
        }
        // Grown again by steps, and all at once.
        for granules in [2, 3, 17, 18, 40, 41, 200, 256] {
            block.grow_to(granules * G).unwrap();
            assert_shaped(&block);
        }
        for granules in [255, 129, 128, 127, 1] {
            block.shrink_to(granules * G).unwrap();
            stream.synchronize().unwrap();
            pool.trim(0).unwrap();
            let held = tenant.stats().committed;
            assert!(held - block.size() < most_stranded(block.size()), "{granules}: {held}");
        }
        books(rig, &pool);
    }

    fn no_program_makes_an_end_that_strands_more(rig) {
        for seed in 0..u64::from(cases(24)) {
            let mut random = fastrand::Rng::with_seed(seed);
            let growth = random.choice([Growth::Exact, Growth::Part(8), Growth::Part(1)]).unwrap();
            let pool = limited(rig, 320).growth(growth).build().unwrap();
            let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
            let stream = Stream::new(&rig.device).unwrap();
            let largest = G << random.u32(0..10);
            let builder = shrinking(&a, &stream, 1).capacity(128 * G).largest_extent(largest);
            let mut blocks = vec![builder.clone().allocate().unwrap()];
            let mut others = vec![];
            for _ in 0..80 {
                let granules = random.u64(1..=128);
                let at = random.usize(0..blocks.len());
                match random.u8(0..16) {
                    0..4 => drop(blocks[at].grow_to(granules * G)),
                    4..8 => {
                        let size = blocks[at].size().min(granules * G);
                        blocks[at].shrink_to(size).unwrap();
                    }
                    8 => others.extend(b.block(granules * G).home_stream(&stream).allocate()),
                    9 => others.truncate(1),
                    10 if blocks.len() < 2 => blocks.extend(builder.clone().allocate()),
                    11 if blocks.len() < 2 => {
                        let fork = blocks[at].fork(blocks[at].size().min(granules * G), 128 * G);
                        blocks.extend(fork);
                    }
                    12 if blocks.len() > 1 => drop(blocks.swap_remove(at)),
                    13 => {
                        stream.synchronize().unwrap();
                        a.blocks().release(random.bool()).sleep(Contents::Discard).unwrap();
                        // Another tenant may have the memory meanwhile.
                        others.clear();
                        stream.synchronize().unwrap();
                        let awake = a.blocks().wake();
                        assert!(awake.is_ok(), "{awake:?}");
                    }
                    14 => {
                        stream.synchronize().unwrap();
                        a.compact(|_| true).unwrap();
                    }
                    _ => {
                        stream.synchronize().unwrap();
                        pool.trim(0).unwrap();
                    }
                }
                for block in &blocks {
                    assert_shaped(block);
                    let size = block.size();
                    let extents = block.extents();
                    let last = extents.iter().rfind(|it| it.offset < size).unwrap();
                    let stranded = (last.offset + last.size).saturating_sub(size);
                    assert!(stranded < most_stranded(size), "{size}: {last:?}");
                }
            }
            drop((blocks, others));
            stream.synchronize().unwrap();
            balanced(rig, &pool);
        }
    }

    fn half_of_a_block_serves_another_tenant_without_a_copy(rig) {
        let pool = common::pool(rig, 256);
        let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = shrinking(&a, &stream, 256).try_allocate().unwrap();
        assert_eq!(sizes(&block), OF_256);
        block.write(0, &[7; 64]).unwrap();
        block.write(128 * G - 64, &[8; 64]).unwrap();
        block.shrink_to(128 * G).unwrap();
        stream.synchronize().unwrap();
        rig.faults.forget();
        let other = b.block(128 * G).home_stream(&stream).try_allocate().unwrap();
        assert_eq!(rig.faults.count(Call::MemcpyDtoDAsync), 0);
        assert_eq!((sizes(&block), a.stats().committed), (OF_256[..12].to_vec(), 128 * G));
        let mut bytes = [0; 64];
        for (offset, byte) in [(0, 7), (128 * G - 64, 8)] {
            block.read(offset, &mut bytes).unwrap();
            assert!(bytes == [byte; 64] || !rig.keeps_bytes());
        }
        drop(other);
        books(rig, &pool);
    }

    fn other_blocks_have_the_fewest_extents(rig) {
        let pool = common::pool(rig, 256);
        let tenant = tenant(&pool, "a");
        let stream = Stream::new(&rig.device).unwrap();
        let allocate = |shrinks| {
            rig.faults.forget();
            let builder = tenant.block(128 * G).home_stream(&stream);
            let block = builder.expect_shrink(shrinks).try_allocate().unwrap();
            let calls = [Call::MemCreate, Call::MemMap, Call::MemSetAccess];
            (block, calls.map(|call| rig.faults.count(call)))
        };
        let (usual, calls) = allocate(false);
        assert_eq!((sizes(&usual), calls), (vec![128], [1; 3]));
        let (block, calls) = allocate(true);
        assert_eq!((sizes(&block), calls), (OF_256[..12].to_vec(), [12; 3]));
        books(rig, &pool);
    }

    fn its_memory_is_reused_by_blocks_that_shrink_and_reclaimed_for_others(rig) {
        let pool = common::pool(rig, 64);
        let tenant = tenant(&pool, "a");
        let stream = Stream::new(&rig.device).unwrap();
        let block = shrinking(&tenant, &stream, 64).try_allocate().unwrap();
        let address = block.address();
        drop(block);
        rig.faults.forget();
        let block = shrinking(&tenant, &stream, 64).try_allocate().unwrap();
        assert_eq!(block.address(), address);
        assert_eq!((rig.faults.count(Call::MemMap), rig.faults.count(Call::MemCreate)), (0, 0));
        drop(block);
        stream.synchronize().unwrap();
        // Eight extents of eight granules become one for a block that has no reason for eight.
        let usual = tenant.block(64 * G).home_stream(&stream).try_allocate().unwrap();
        assert_eq!(sizes(&usual), [64]);
        drop(usual);
        stream.synchronize().unwrap();
        // And the reverse: the one extent in the free list would strand all of itself.
        let block = shrinking(&tenant, &stream, 64).try_allocate().unwrap();
        assert_eq!(sizes(&block), [8; 8]);
        books(rig, &pool);
    }

    fn the_free_list_serves_with_extents_that_are_small_enough(rig) {
        let pool = common::pool(rig, 64);
        let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
        let stream = Stream::new(&rig.device).unwrap();
        let builder = b.block(16 * G).largest_extent(4 * G).home_stream(&stream);
        let small = builder.try_allocate().unwrap();
        let large = b.block(32 * G).home_stream(&stream).try_allocate().unwrap();
        drop((small, large));
        stream.synchronize().unwrap();
        drop(b);
        // 16 granules were never created; the extent of 32 is released.
        let block = shrinking(&a, &stream, 64).try_allocate().unwrap();
        assert_shaped(&block);
        assert_eq!(block.extents().iter().map(|extent| extent.size).sum::<u64>(), 64 * G);
        books(rig, &pool);
    }

    fn sleep_and_wake_shape_its_memory_as_before(rig) {
        let pool = common::pool(rig, 128);
        let tenant = tenant(&pool, "a");
        let stream = Stream::new(&rig.device).unwrap();
        let store = HostStore::builder(&rig.device).pinned(100 * G).build().unwrap();
        let mut block = shrinking(&tenant, &stream, 100).try_allocate().unwrap();
        let shape = sizes(&block);
        block.write(50 * G, &[5; 32]).unwrap();
        for contents in [Contents::Keep(&store), Contents::Discard] {
            let keeps = matches!(contents, Contents::Keep(_));
            stream.synchronize().unwrap();
            tenant.blocks().release(true).sleep(contents).unwrap();
            assert_eq!(tenant.stats().committed, 0);
            tenant.blocks().wake().unwrap();
            assert_eq!(sizes(&block), shape);
            let mut bytes = [0; 32];
            block.read(50 * G, &mut bytes).unwrap();
            assert!(bytes == [5; 32] || !keeps || !rig.keeps_bytes());
        }
        block.shrink_to(33 * G).unwrap();
        stream.synchronize().unwrap();
        pool.trim(0).unwrap();
        assert_eq!(tenant.stats().committed, 40 * G);
        balanced(rig, &pool);
    }

    fn a_compaction_merges_no_further_and_a_cut_keeps_the_shape(rig) {
        let pool = limited(rig, 256).growth(Growth::Exact).build().unwrap();
        let tenant = tenant(&pool, "a");
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = shrinking(&tenant, &stream, 1).capacity(64 * G).allocate().unwrap();
        for granules in 2..=40 {
            block.grow_to(granules * G).unwrap();
        }
        assert_eq!(sizes(&block), [1; 40]);
        stream.synchronize().unwrap();
        tenant.compact(|_| true).unwrap();
        assert_eq!(sizes(&block), [8; 5]);
        block.shrink_to(13 * G).unwrap();
        stream.synchronize().unwrap();
        let done = tenant.compact(|_| true).unwrap();
        assert_eq!((done.given_back, done.copied), (27 * G, 5 * G));
        assert_eq!(sizes(&block), [8, 4, 1]);
        // A prefix is merged on request only, and then serves no other block.
        block.grow_to(64 * G).unwrap();
        assert_shaped(&block);
        stream.synchronize().unwrap();
        block.compact_prefix(64 * G).unwrap();
        assert_eq!(sizes(&block), [64]);
        drop(block);
        stream.synchronize().unwrap();
        let next = shrinking(&tenant, &stream, 64).capacity(64 * G).allocate().unwrap();
        assert_shaped(&next);
        books(rig, &pool);
    }

    fn a_movable_block_is_cut_under_pressure_to_its_size(rig) {
        let pool = common::pool(rig, 64);
        let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = shrinking(&a, &stream, 64).movable(true).allocate().unwrap();
        block.shrink_to(12 * G).unwrap();
        stream.synchronize().unwrap();
        // 48 granules lie in extents of their own; only for more is the last one copied.
        rig.faults.forget();
        let other = b.block(48 * G).home_stream(&stream).try_allocate().unwrap();
        assert_eq!(rig.faults.count(Call::MemcpyDtoDAsync), 0);
        drop(other);
        stream.synchronize().unwrap();
        pool.trim(0).unwrap();
        let other = b.block(50 * G).home_stream(&stream).allocate().unwrap();
        assert_eq!(sizes(&block), [8, 4]);
        drop(other);
        books(rig, &pool);
    }

    fn forks_and_adjacent_blocks_have_the_shape(rig) {
        let pool = common::pool(rig, 256);
        let tenant = tenant(&pool, "a");
        let stream = Stream::new(&rig.device).unwrap();
        let builder = || shrinking(&tenant, &stream, 48).capacity(64 * G);
        let row = builder().allocate_adjacent(2).unwrap();
        row.iter().for_each(|block| assert_eq!(sizes(block), [8; 6]));
        let fork = row[0].fork(20 * G, 60 * G).unwrap();
        // Two whole extents are shared.
        assert_eq!((fork.read_only(), sizes(&fork)), (16 * G, vec![8, 8, 8, 8, 8, 8, 8, 4]));
        let apart = builder().allocate_many(1).unwrap();
        assert_eq!(sizes(&apart[0]), [8; 6]);
        drop((row, fork, apart));
        stream.synchronize().unwrap();
        books(rig, &pool);
    }

    fn a_future_gives_a_block_with_the_shape(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = common::mapped_pool(rig, 64, &mapper);
        let tenant = tenant(&pool, "a");
        let stream = Stream::new(&rig.device).unwrap();
        let block = block_on(shrinking(&tenant, &stream, 40).allocate_async()).unwrap();
        assert_eq!(sizes(&block), [8; 5]);
        drop(block);
        balanced(rig, &pool);
    }

    fn the_mapper_works_ahead_in_the_shape(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = limited(rig, 256).growth(Growth::Part(1)).mapper(&mapper).build().unwrap();
        let tenant = tenant(&pool, "a");
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = shrinking(&tenant, &stream, 40).capacity(200 * G).allocate().unwrap();
        block.grow_to(41 * G).unwrap();
        common::until(&pool, "precommitted", || tenant.stats().precommitted >= 16 * G);
        for granules in [60, 100, 200] {
            block.grow_to(granules * G).unwrap();
            assert_shaped(&block);
        }
        drop(block);
        balanced(rig, &pool);
    }

    fn what_is_refused_changes_nothing(rig) {
        let pool = limited(rig, 256).mapping_limit(11).build().unwrap();
        let tenant = tenant(&pool, "a");
        let stream = Stream::new(&rig.device).unwrap();
        let builder = || shrinking(&tenant, &stream, 128);
        let refused = builder().try_allocate().unwrap_err();
        assert!(matches!(refused, BlockError::OutOfMappings { wanted: 12, held: 0, limit: 11 }), "{refused}");
        for bytes in [0, G / 2, 3 * G] {
            let refused = builder().largest_extent(bytes).try_allocate().unwrap_err();
            let BlockError::Argument(error) = refused else { panic!("{refused}") };
            let named = match error {
                ArgumentError::Misaligned { what, .. } | ArgumentError::NotPowerOfTwo { what, .. } => what,
                _ => panic!("{error}"),
            };
            assert_eq!(named, "bytes of an extent");
        }
        assert_eq!((tenant.stats().committed, tenant.stats().mappings), (0, 0));
        // Smaller extents than the shape asks for are as small as the caller says.
        let block = shrinking(&tenant, &stream, 32).largest_extent(4 * G).try_allocate().unwrap();
        assert_eq!(sizes(&block), [4; 8]);
        drop(block);
        books(rig, &pool);
    }
}

#[test]
fn a_failed_call_changes_nothing() {
    type World = (Vec<Block>, Tenant, Stream, Pool);
    let make = |rig: &Rig<Nothing>| -> World {
        let pool = limited(rig, 64).build().unwrap();
        let tenant = tenant(&pool, "a");
        (vec![], tenant, Stream::new(&rig.device).unwrap(), pool)
    };
    let picture = |world: &World| world::books(&world.3);
    let calls = sweep(
        make,
        |_, (blocks, tenant, stream, _)| {
            let block = shrinking(tenant, stream, 40).capacity(64 * G);
            blocks.push(text(block.try_allocate())?);
            Ok(())
        },
        picture,
    );
    assert_eq!(
        calls,
        1 + 5 * 3,
        "addresses, and three calls for each extent"
    );
    let calls = sweep(
        |rig| {
            let mut world = make(rig);
            let (blocks, tenant, stream, _) = &mut world;
            let block = shrinking(tenant, stream, 8).capacity(64 * G);
            blocks.push(block.try_allocate().unwrap());
            world
        },
        |_, (blocks, ..)| text(blocks[0].try_grow_to(64 * G)),
        picture,
    );
    assert_eq!(calls, 7 * 3);
}
