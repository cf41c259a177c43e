//! Operations on several blocks in one call, growth policies, and headroom.
#![allow(clippy::unit_arg)]

use crate::common;
use crate::common::sweep::{sweep, text};
use crate::common::{D0, G, Rig, mapped_pool, pool, until};
use crate::on_both;
use cuvmm::driver::Call;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::error::{ArgumentError, BlockError};
use cuvmm::{Block, Growth, Hardened, Limit, Mapper, Pool, Stream, Tenant};

/// Returns the sizes of a block's extents in granules.
fn extents(block: &Block) -> Vec<u64> {
    block
        .extents()
        .iter()
        .map(|extent| extent.size / G)
        .collect()
}

/// Figures that a failed call must not change: committed, in-use, precommitted and free bytes,
/// mappings, addresses.
type Books = [u64; 6];

fn books(pool: &Pool) -> Books {
    let stats = pool.stats();
    [
        stats.committed,
        stats.in_use,
        stats.precommitted,
        stats.free,
        stats.mappings,
        stats.addresses,
    ]
}

fn grow_all(tenant: &Tenant, blocks: &mut [Block], sizes: &[u64]) -> Result<(), BlockError> {
    let mut pairs: Vec<_> = blocks
        .iter_mut()
        .zip(sizes.iter().map(|size| size * G))
        .collect();
    tenant.try_grow_all(&mut pairs)
}

on_both! {
    fn a_block_grows_as_it_says_and_not_as_its_pool_does(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 256);
        let of = || tenant.block(64 * G).capacity(128 * G).home_stream(&stream);
        let mut plain = of().try_allocate().unwrap();
        let mut fine = of().growth(Growth::Part(32)).try_allocate().unwrap();
        let mut exact = of().growth(Growth::Exact).try_allocate().unwrap();
        for block in [&mut plain, &mut fine, &mut exact] {
            block.try_grow_to(65 * G).unwrap();
        }
        assert_eq!((extents(&plain), extents(&fine), extents(&exact)), (
            vec![64, 8], vec![64, 2], vec![64, 1],
        ));
        // The stream cache distinguishes growth policies: the next block grows by its own.
        drop(plain);
        let mut next = tenant.block(65 * G).capacity(128 * G).home_stream(&stream)
            .growth(Growth::Part(16)).try_allocate().unwrap();
        next.try_grow_to(73 * G).unwrap();
        assert_eq!(extents(&next).last(), Some(&4), "a sixteenth of 73");
        drop((fine, exact, next));
    }

    fn a_block_keeps_to_small_extents_and_trades_places_with_its_like(rig) {
        let (pool, tenant, stream) = common::scene(rig, 64);
        let of = |largest: u64| tenant.block(11 * G).capacity(16 * G).home_stream(&stream)
            .largest_extent(largest);
        let small = of(4 * G).try_allocate().unwrap();
        assert_eq!(extents(&small), [4, 4, 2, 1]);
        let address = small.address();
        drop(small);
        let large = of(1 << 40).try_allocate().unwrap();
        assert_eq!(extents(&large), [8, 2, 1], "no extent larger than the pool's largest");
        rig.faults.forget();
        let again = tenant.block(7 * G).capacity(16 * G).home_stream(&stream)
            .largest_extent(4 * G).try_allocate().unwrap();
        assert_eq!((again.address(), rig.faults.total()), (address, 0));
        let refused = of(3 * G).try_allocate();
        assert!(matches!(
            refused,
            Err(BlockError::Argument(ArgumentError::NotPowerOfTwo { value, .. })) if value == 3 * G
        ), "{refused:?}");
        // A compaction creates no larger extents.
        let mut grown = tenant.block(G).capacity(16 * G).largest_extent(2 * G)
            .growth(Growth::Exact).try_allocate().unwrap();
        for size in 2..=8 {
            grown.try_grow_to(size * G).unwrap();
        }
        assert_eq!(extents(&grown), [1; 8]);
        pool.compact(|_| true).unwrap();
        assert_eq!(extents(&grown), [2; 4]);
        drop((large, again, grown));
    }

    fn many_blocks_of_a_shape_come_at_once_and_from_the_shelf(rig) {
        let (pool, tenant, stream) = common::scene(rig, 16);
        let of = || tenant.block(2 * G).capacity(4 * G).home_stream(&stream);
        let blocks = of().try_allocate_many(3).unwrap();
        let mut addresses: Vec<_> = blocks.iter().map(Block::address).collect();
        addresses.sort_unstable();
        drop(blocks);
        rig.faults.forget();
        let blocks = of().allocate_many(3).unwrap();
        let mut again: Vec<_> = blocks.iter().map(Block::address).collect();
        again.sort_unstable();
        assert_eq!((again, rig.faults.total()), (addresses, 0));
        assert!(of().try_allocate_many(0).unwrap().is_empty());
        drop(blocks);
        let before = books(&pool);
        let refused = of().try_allocate_many(9);
        assert!(matches!(refused, Err(BlockError::OutOfMemory(_))), "{refused:?}");
        assert_eq!(books(&pool), before);
        assert_eq!(tenant.stats().blocks, 0);
    }

    fn blocks_grow_together_or_not_at_all(rig) {
        let (pool, tenant, stream) = common::scene(rig, 16);
        let of = || tenant.block(2 * G).capacity(16 * G).home_stream(&stream);
        let mut blocks = of().try_allocate_many(4).unwrap();
        blocks[1].write(0, b"stays").unwrap();
        grow_all(&tenant, &mut blocks, &[2, 3, 2, 4]).unwrap();
        assert_eq!(tenant.stats().in_use, 11 * G);
        let before = books(&pool);
        let extents_before: Vec<_> = blocks.iter().map(extents).collect();
        // The first three would fit.
        let refused = grow_all(&tenant, &mut blocks, &[4, 4, 3, 10]);
        let Err(BlockError::Refused { index: 3, size, ref cause }) = refused else { panic!("{refused:?}") };
        let short = cause.shortage().unwrap();
        assert_eq!((size, short.wanted), (10 * G, 10 * G));
        assert_eq!(books(&pool), before);
        assert_eq!(blocks.iter().map(extents).collect::<Vec<_>>(), extents_before);
        let sizes: Vec<_> = blocks.iter().map(|block| block.size() / G).collect();
        assert_eq!(sizes, [2, 3, 2, 4]);
        assert_eq!(pool.stats().refusals, 1);
        // One size is too small, and one too large.
        assert!(matches!(
            grow_all(&tenant, &mut blocks, &[2, 2, 2, 4]),
            Err(BlockError::Refused { index: 1, ref cause, .. })
                if matches!(**cause, BlockError::Argument(ArgumentError::TooSmall { .. }))
        ));
        assert!(matches!(
            grow_all(&tenant, &mut blocks, &[3, 3, 17, 4]),
            Err(BlockError::Refused { index: 2, ref cause, .. })
                if matches!(**cause, BlockError::Argument(ArgumentError::TooLarge { .. }))
        ));
        assert_eq!(books(&pool), before);
        grow_all(&tenant, &mut blocks, &[4, 4, 4, 4]).unwrap();
        let mut bytes = [0; 5];
        blocks[1].read(0, &mut bytes).unwrap();
        rig.shows(&bytes, b"stays");
        let other = pool.tenant("b").register().unwrap();
        assert!(matches!(
            grow_all(&other, &mut blocks, &[4, 4, 4, 4]),
            Err(BlockError::WrongTenant { index: 0 })
        ));
        drop(blocks);
    }

    fn what_fits_makes_no_driver_call_and_a_refusal_asks_the_others(rig) {
        let (pool, tenant, stream) = common::scene(rig, 32);
        let spare = std::sync::Arc::new(std::sync::Mutex::new(None::<Block>));
        let kept = spare.clone();
        let other = pool.tenant("b").on_pressure(move |_| drop(kept.lock().unwrap().take()))
            .register().unwrap();
        let mut blocks = tenant.block(8 * G).capacity(16 * G).home_stream(&stream)
            .try_allocate_many(2).unwrap();
        for block in &mut blocks {
            block.shrink_to(G).unwrap();
        }
        rig.faults.forget();
        grow_all(&tenant, &mut blocks, &[8, 7]).unwrap();
        assert_eq!(rig.faults.total(), 0);
        let block = other.allocate_on(&stream, 16 * G).unwrap();
        *spare.lock().unwrap() = Some(block);
        assert!(grow_all(&tenant, &mut blocks, &[12, 12]).is_err());
        let mut pairs: Vec<_> = blocks.iter_mut().map(|block| (block, 12 * G)).collect();
        tenant.grow_all(&mut pairs).unwrap();
        assert_eq!(tenant.stats().in_use, 24 * G);
        assert!(spare.lock().unwrap().is_none(), "the hook gave up the block");
        drop(blocks);
    }

    fn memory_that_is_being_zeroed_is_not_pulled_away_by_a_refusal(rig) {
        let pool = pool(rig, 16);
        let stream = Stream::new(&rig.device).unwrap();
        let secret = pool.tenant("secret").register().unwrap();
        let block = secret.allocate_on(&stream, 12 * G).unwrap();
        block.write(0, &[7; 64]).unwrap();
        drop(block);
        pool.trim(16 * G).unwrap();
        secret.unregister();
        let (tenant, other) = common::joined(rig, &pool);
        let mut blocks = tenant.block(G).capacity(16 * G).home_stream(&other)
            .growth(Growth::Exact).try_allocate_many(2).unwrap();
        rig.machine.hold(D0, other.as_raw());
        assert!(grow_all(&tenant, &mut blocks, &[4, 15]).is_err());
        let stats = tenant.stats();
        assert_eq!(stats.in_use, 2 * G);
        assert_eq!(
            stats.committed, 2 * G + stats.precommitted,
            "memory being zeroed is precommitted"
        );
        rig.machine.release_all_streams(D0);
        rig.device.synchronize().unwrap();
        grow_all(&tenant, &mut blocks, &[8, 8]).unwrap();
        let mut bytes = [1; 64];
        for offset in [G, 2 * G, 7 * G] {
            blocks[0].read(offset, &mut bytes).unwrap();
            if rig.keeps_bytes() {
                assert_eq!(bytes, [0; 64]);
            }
        }
        drop(blocks);
    }

    fn what_blocks_wrote_to_their_margin_is_nobody_elses_to_see(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 8, &mapper);
        let stream = Stream::new(&rig.device).unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let of = tenant.block(2 * G).capacity(16 * G).home_stream(&stream);
        let mut blocks = of.growth(Growth::Part(64)).try_allocate_many(2).unwrap();
        grow_all(&tenant, &mut blocks, &[3, 3]).unwrap();
        until(&pool, "precommitted", || tenant.stats().precommitted >= 2 * G);
        // An extent of its own, which the driver has just zeroed.
        mapper.stop();
        rig.faults.forget();
        grow_all(&tenant, &mut blocks, &[4, 4]).unwrap();
        assert_eq!(rig.faults.total(), 0);
        for block in &blocks {
            block.write(3 * G, &[7; 64]).unwrap();
        }
        drop(blocks);
        let other = pool.tenant("b").register().unwrap();
        let of = other.block(G).home_stream(&stream);
        for block in of.try_allocate_many(8).unwrap() {
            let mut bytes = [1; 64];
            block.read(0, &mut bytes).unwrap();
            assert!(!rig.keeps_bytes() || bytes == [0; 64], "{:?}", block.address());
        }
    }

    fn a_mapper_is_called_for_all_that_run_low(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 256);
        let stream = Stream::new(&rig.device).unwrap();
        let mut blocks = tenant.block(2 * G).capacity(32 * G).home_stream(&stream)
            .growth(Growth::Part(64)).try_allocate_many(8).unwrap();
        grow_all(&tenant, &mut blocks, &[3; 8]).unwrap();
        let own = || common::calls_without_mapper(&rig.device, &pool);
        for size in 4..16 {
            until(&pool, "precommitted", || tenant.stats().precommitted >= 8 * G);
            let before = own();
            grow_all(&tenant, &mut blocks, &[size; 8]).unwrap();
            assert_eq!(own(), before, "the growing thread makes no driver call");
        }
        drop(blocks);
        drop(tenant);
        pool.close().unwrap();
    }

    fn room_is_what_can_be_had(rig) {
        let pool = pool(rig, 32);
        let stream = Stream::new(&rig.device).unwrap();
        let tenant = pool.tenant("a").guarantee(8 * G).register().unwrap();
        let other = pool.tenant("b").guarantee(6 * G).register().unwrap();
        let figures = || {
            let room = tenant.headroom().unwrap();
            [room.at_worst / G, room.now / G, room.taking_back / G]
        };
        assert_eq!(figures(), [8, 26, 26]);
        let theirs = other.allocate_on(&stream, 10 * G).unwrap();
        let ours = tenant.allocate_on(&stream, 5 * G).unwrap();
        assert_eq!(figures(), [3, 17, 17]);
        drop(theirs);
        // Memory above the guarantee may be reclaimed: 2 granules and an extent of 8, which is
        // taken as a whole. 6 granules stay guaranteed.
        assert_eq!(figures(), [3, 17, 21]);
        rig.held_kernel(&stream, &[], &[(ours.address(), G, 1)]);
        drop(ours);
        assert_eq!(figures(), [8, 17, 21], "pending memory is not available");
        rig.machine.release_all_streams(D0);
        rig.device.synchronize().unwrap();
        assert_eq!(figures(), [8, 22, 26]);
        for wanted in [22, 26] {
            let block = tenant.block(wanted * G).home_stream(&stream).try_allocate().unwrap();
            drop(block);
        }
        assert!(tenant.try_allocate(27 * G).is_err());
        // The tenant's own limit is another bound.
        let small = pool.tenant("small").limit(3 * G).register().unwrap();
        let room = small.headroom().unwrap();
        assert_eq!((room.at_worst, room.now, room.taking_back), (0, 0, 3 * G));
    }
}

struct World {
    pool: Pool,
    tenant: Tenant,
    stream: Stream,
    blocks: Vec<Block>,
}

fn world(rig: &Rig<Nothing>) -> World {
    let (pool, tenant, stream) = common::scene(rig, 32);
    let of = tenant.block(2 * G).capacity(16 * G).home_stream(&stream);
    let blocks = of.try_allocate_many(3).unwrap();
    World {
        pool,
        tenant,
        stream,
        blocks,
    }
}

// I-30
#[test]
fn every_driver_call_of_a_batch_failed_once() {
    let calls = sweep(
        world,
        |_, world| text(grow_all(&world.tenant, &mut world.blocks, &[3, 2, 7])),
        |world| {
            let sizes: Vec<u64> = world.blocks.iter().map(Block::size).collect();
            (books(&world.pool), sizes)
        },
    );
    assert_eq!(calls, 9, "three extents of three calls");
    let calls = sweep(
        world,
        |_, world| {
            let of = world.tenant.block(3 * G).home_stream(&world.stream);
            Ok(world.blocks.extend(text(of.try_allocate_many(3))?))
        },
        |world| books(&world.pool),
    );
    assert_eq!(calls, 21, "three reservations, and two extents each");
}

#[test]
fn what_a_batch_cannot_undo_is_quarantined() {
    let rig = common::clean(common::model());
    let mut world = world(&rig);
    // The third block's memory cannot be mapped, and the first block's cannot be unmapped, in both
    // attempts.
    rig.faults.arm(common::nth_of(
        2,
        cuvmm::driver::CUresult::CUDA_ERROR_UNKNOWN,
        &[Call::MemMap],
    ));
    for nth in [1, 2] {
        let code = cuvmm::driver::CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(Fault::nth(nth, code).of(Call::MemUnmap));
    }
    assert!(grow_all(&world.tenant, &mut world.blocks, &[3, 2, 7]).is_err());
    rig.faults.disarm();
    let stats = world.pool.stats();
    assert_eq!((stats.quarantined, stats.committed), (G, 6 * G));
    assert_eq!(stats.in_use, 6 * G);
    // Its addresses are taken: that block can no longer grow, the others can.
    assert!(grow_all(&world.tenant, &mut world.blocks, &[3, 2, 2]).is_err());
    grow_all(&world.tenant, &mut world.blocks, &[2, 3, 7]).unwrap();
}

#[test]
fn a_hardened_pool_grows_exactly_whatever_a_block_says() {
    let rig = common::clean(common::model());
    let limit = Limit::Bytes(64 * G);
    let pool = Pool::builder(&rig.device)
        .limit(limit)
        .hardened(Hardened::new());
    let (pool, tenant) = common::with_tenant(pool.build().unwrap());
    let block = tenant
        .block(16 * G)
        .capacity(32 * G)
        .growth(Growth::Part(2));
    let mut block = block.try_allocate().unwrap();
    block.try_grow_to(17 * G).unwrap();
    assert_eq!(pool.stats().precommitted, 0);
}

#[test]
fn what_idle_extents_leave_over_is_not_what_the_last_block_lacks() {
    let rig = common::clean(common::model());
    let (_pool, tenant, stream) = common::scene(&rig, 4);
    let of = |granules| {
        let block = tenant.block(granules * G).capacity(2 * G);
        block.home_stream(&stream)
    };
    drop(of(2).try_allocate_many(2).unwrap());
    // Two blocks would fit in place, but each would strand a granule.
    let blocks = of(1).try_allocate_many(4).unwrap();
    assert_eq!(tenant.stats().stranded, 0);
    drop(blocks);
    // The same when the blocks are in the stream cache.
    let mut blocks = of(2).try_allocate_many(2).unwrap();
    for block in &mut blocks {
        block.shrink_to(G).unwrap();
    }
    drop(blocks);
    assert_eq!(of(1).try_allocate_many(4).unwrap().len(), 4);
}
