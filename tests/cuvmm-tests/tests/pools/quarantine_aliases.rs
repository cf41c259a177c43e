//! Double failures of operations that replace the memory of a block: memory that the roll-back
//! leaves mapped is given to no other tenant, and memory that a copy may still use is not unmapped.

use std::cell::Cell;

use crate::common;
use crate::common::books::are_the_drivers;
use crate::common::{D0, G, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::model::MappedAt;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{BlockError, MemoryError, SleepError};
use cuvmm::sleep::Progress;
use cuvmm::{Block, Contents, Growth, Place, Pool, Region, Stream, Tenant};

const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

/// The calls that fail after the first failure.
const REFUSED: [&[Call]; 6] = [
    &[Call::MemUnmap],
    &[Call::MemMap],
    &[Call::MemUnmap, Call::MemMap],
    &[Call::MemSetAccess, Call::MemUnmap],
    &[Call::StreamSynchronize, Call::CtxSynchronize],
    &[
        Call::MemRelease,
        Call::MemUnmap,
        Call::StreamSynchronize,
        Call::CtxSynchronize,
    ],
];

/// Two failures of an operation.
struct Twice<'a> {
    rig: &'a Rig<HostMemory>,
    k: u64,
    refused: &'a [Call],
    hit: &'a Cell<bool>,
}

impl Twice<'_> {
    /// Runs an operation in which call k fails, and then all later calls of the refused kinds.
    fn fail<T>(&self, operate: impl FnOnce() -> T) -> T {
        let faults = &self.rig.faults;
        faults.forget();
        faults.arm(Fault::nth(self.k, UNKNOWN));
        faults.arm(Fault::from(self.k + 1, UNKNOWN).only(self.refused));
        let outcome = operate();
        self.hit.set(faults.injected() > 0);
        faults.disarm();
        outcome
    }
}

/// Fails call 1, 2, 3, ... of an operation, each time in a new world, until it completes without a
/// fault.
fn each_two(run: impl Fn(&Rig<HostMemory>, Twice<'_>)) {
    for refused in REFUSED {
        for k in 1.. {
            assert!(k < 200, "the operation never ends");
            let (rig, hit) = (common::host(), Cell::new(false));
            let twice = Twice {
                rig: &rig,
                k,
                refused,
                hit: &hit,
            };
            run(&rig, twice);
            if !hit.get() {
                assert!(k > 5, "only {k} calls were failed");
                break;
            }
        }
    }
}

fn pool(rig: &Rig<HostMemory>) -> Pool {
    let builder = common::limited(rig, 40);
    let builder = builder.growth(Growth::Exact).largest_extent(8 * G);
    builder.build().unwrap()
}

/// Leaves memory of a former tenant in the free list.
fn free_list(pool: &Pool, granules: u64) {
    let gone = pool.tenant("gone").register().unwrap();
    drop(gone.try_allocate(granules * G).unwrap());
    gone.unregister();
    assert_eq!(pool.stats().free, granules * G);
}

fn stamp(block: &Block) {
    for granule in 0..block.size() / G {
        block.write(granule * G, &[granule as u8 + 1; 8]).unwrap();
    }
}

fn is_stamped(block: &Block) -> bool {
    (0..block.size() / G).all(|granule| {
        let mut bytes = [0; 8];
        block.read(granule * G, &mut bytes).unwrap();
        bytes == [granule as u8 + 1; 8]
    })
}

/// Allocates all remaining memory for another tenant, and checks that none of it is mapped
/// elsewhere.
fn all_the_rest_is_mapped_once(rig: &Rig<HostMemory>, pool: &Pool) {
    let other = pool.tenant("other").register().unwrap();
    let sizes = [8, 4, 2, 1].into_iter();
    let taken = sizes.flat_map(|granules| {
        let other = &other;
        std::iter::from_fn(move || other.try_allocate(granules * G).ok())
    });
    let taken: Vec<Block> = taken.collect();
    let stats = pool.stats();
    assert!(
        stats.committed + stats.quarantined + 2 * G > 40 * G,
        "{stats:#?}"
    );
    are_the_drivers(rig, &stats, 0);
    let mappings = rig.machine.snapshot().mappings;
    let ours = |at: &&MappedAt| {
        let mut extents = taken.iter().flat_map(Block::extents);
        extents.any(|extent| extent.address == at.address)
    };
    for one in mappings.iter().filter(ours) {
        let shown = mappings.iter().filter(|other| other.handle == one.handle);
        assert_eq!(shown.count(), 1, "{one:?} of {mappings:#?}");
    }
}

fn close(rig: &Rig<HostMemory>, pool: Pool) {
    pool.close().unwrap();
    let live = rig.machine.live();
    assert_eq!((live.mappings, live.physicals), (0, 0), "{live:?}");
}

/// Allocates a block of single granules.
fn pieces(tenant: &Tenant, stream: &Stream, granules: u64) -> Block {
    let block = tenant.block(G).capacity(32 * G).home_stream(stream);
    let mut block = block.try_allocate().unwrap();
    for granule in 1..granules {
        block.try_grow_to((granule + 1) * G).unwrap();
    }
    stamp(&block);
    block
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn compaction() {
    each_two(|rig, twice| {
        let pool = pool(rig);
        let (tenant, stream) = common::joined(rig, &pool);
        let block = pieces(&tenant, &stream, 8);
        free_list(&pool, 8);
        let outcome = twice.fail(|| pool.compact(|_| true));
        let lost = matches!(outcome, Err(BlockError::Lost { .. }));
        assert!(lost || is_stamped(&block), "{outcome:?}");
        are_the_drivers(rig, &pool.stats(), 0);
        all_the_rest_is_mapped_once(rig, &pool);
        drop(block);
        all_the_rest_is_mapped_once(rig, &pool);
        drop((tenant, stream));
        close(rig, pool);
    });
}

/// Allocates a block of two extents of two granules, and a fork of it that has shrunk into the
/// second.
fn cut(tenant: &Tenant, home: Option<&Stream>) -> (Block, Block) {
    let builder = tenant.block(4 * G).capacity(32 * G).largest_extent(2 * G);
    let root = match home {
        Some(home) => builder.home_stream(home),
        None => builder,
    };
    let root = root.try_allocate().unwrap();
    stamp(&root);
    let mut fork = root.fork(4 * G, 4 * G).unwrap();
    fork.shrink_to(3 * G).unwrap();
    (root, fork)
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn unsharing_before_growth() {
    for at_home in [true, false] {
        each_two(|rig, twice| {
            let pool = pool(rig);
            let (tenant, stream) = common::joined(rig, &pool);
            let (root, mut fork) = cut(&tenant, at_home.then_some(&stream));
            free_list(&pool, 2);
            let outcome = twice.fail(|| tenant.try_grow_all(&mut [(&mut fork, 5 * G)]));
            let lost = matches!(
                &outcome,
                Err(BlockError::Refused { cause, .. }) if matches!(**cause, BlockError::Lost { .. })
            );
            assert!(is_stamped(&root));
            fork.shrink_to(3 * G).unwrap();
            assert!(lost || is_stamped(&fork), "{outcome:?}");
            are_the_drivers(rig, &pool.stats(), 0);
            drop(root);
            all_the_rest_is_mapped_once(rig, &pool);
            drop(fork);
            all_the_rest_is_mapped_once(rig, &pool);
            drop((tenant, stream));
            close(rig, pool);
        });
    }
}

#[test]
fn forking() {
    for at_home in [true, false] {
        each_two(|rig, twice| {
            let pool = pool(rig);
            let (tenant, stream) = common::joined(rig, &pool);
            let (root, twig) = cut(&tenant, at_home.then_some(&stream));
            free_list(&pool, 2);
            let forks = twice.fail(|| tenant.try_fork_all(&[&root, &twig], 3 * G, 4 * G));
            assert!(is_stamped(&root) && is_stamped(&twig));
            are_the_drivers(rig, &pool.stats(), 0);
            drop((root, twig));
            if let Ok(mut forks) = forks {
                for fork in &mut forks {
                    fork.shrink_to(3 * G).unwrap();
                    assert!(is_stamped(fork));
                }
            }
            all_the_rest_is_mapped_once(rig, &pool);
            drop((tenant, stream));
            close(rig, pool);
        });
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn regions_that_unshare_and_move() {
    for moves in [true, false] {
        each_two(|rig, twice| {
            let stream = Stream::new(&rig.device).unwrap();
            let builder = Region::builder(&rig.device, 8 * G).largest_extent(G);
            let mut region = common::committed(builder, 3 * G);
            region.write(&stream, 0, &[7; 8]).unwrap();
            let fork = (!moves).then(|| region.fork(&[]).unwrap());
            let lost = match moves {
                true => {
                    let host = Place::HostNuma(0);
                    let moved = twice.fail(|| region.relocate(0..3 * G, &host, &stream));
                    moved.is_err_and(|error| error.to_string().contains("put back"))
                }
                false => {
                    let own = twice.fail(|| region.unshare(0..3 * G, &stream, &[]));
                    own.is_err_and(|error| {
                        matches!(error, MemoryError::Lost { .. })
                            && error.to_string().contains("put back")
                    })
                }
            };
            for one in [Some(&region).filter(|_| !lost), fork.as_ref()]
                .into_iter()
                .flatten()
            {
                let mut bytes = [0; 8];
                one.read(&stream, 0, &mut bytes).unwrap();
                assert_eq!(bytes, [7; 8]);
            }
            assert_eq!(region.committed() == 3 * G, !lost);
            region.close().unwrap();
            drop((fork, stream));
            common::only_counted_left(rig);
        });
    }
}

/// Runs an operation that fails while its copy is held back and cannot be waited for, then gives up
/// all memory that the copy may use, and lets the copy run.
fn under_a_copy<W>(
    rig: &Rig<HostMemory>,
    mut world: W,
    fails: impl FnOnce(&mut W),
    give_up: impl FnOnce(W),
) {
    rig.machine.hold_all(D0);
    for call in [Call::StreamSynchronize, Call::CtxSynchronize] {
        rig.faults.arm(Fault::all(UNKNOWN).of(call));
    }
    fails(&mut world);
    rig.faults.disarm();
    give_up(world);
    rig.machine.release_all_streams(D0);
    rig.device.synchronize().unwrap();
}

#[test]
fn what_a_copy_of_a_pool_may_still_use_is_not_unmapped() {
    let rig = common::host();
    let pool = pool(&rig);
    let (tenant, stream) = common::joined(&rig, &pool);
    let compacts = |_: &mut Block| drop(pool.compact(|_| true).unwrap_err());
    under_a_copy(&rig, pieces(&tenant, &stream, 8), compacts, |block| {
        drop(block);
        pool.trim(0).unwrap();
    });
    for grows in [true, false] {
        let fails = |(root, fork): &mut (Block, Block)| match grows {
            true => drop(fork.try_grow_to(4 * G).unwrap_err()),
            false => drop(root.try_fork(3 * G, 3 * G).unwrap_err()),
        };
        under_a_copy(&rig, cut(&tenant, None), fails, |both| {
            drop(both);
            pool.trim(0).unwrap();
        });
    }
    pool.trim(0).unwrap();
    assert_eq!(pool.stats().committed, 0);
    drop((tenant, stream));
    close(&rig, pool);
}

#[test]
fn what_zeros_are_on_their_way_to_is_not_unmapped_when_waking_is_cancelled() {
    let rig = common::host();
    let pool = pool(&rig);
    let (tenant, stream) = common::joined(&rig, &pool);
    let block = tenant.block(2 * G).home_stream(&stream).zeroed(true);
    let block = block.try_allocate().unwrap();
    let asleep = tenant.blocks().release(true).sleep(Contents::Discard);
    assert_eq!(asleep.unwrap().blocks, 1);
    // The block wakes in memory that another tenant wrote to.
    free_list(&pool, 2);
    let wakes = |block: &mut Block| {
        let stop = |_: &Progress| false;
        let woken = tenant.blocks().on_progress(&stop).wake();
        assert!(matches!(woken, Err(SleepError::Cancelled)), "{woken:?}");
        let stats = pool.stats();
        assert!(block.is_asleep());
        assert_eq!((stats.quarantined, stats.committed), (2 * G, 0));
    };
    under_a_copy(&rig, block, wakes, |block| {
        drop(block);
        pool.trim(0).unwrap();
        all_the_rest_is_mapped_once(&rig, &pool);
    });
    drop((tenant, stream));
    close(&rig, pool);
}

#[test]
fn what_a_copy_of_a_region_may_still_use_is_not_unmapped() {
    let rig = common::clean(common::host());
    let stream = Stream::new(&rig.device).unwrap();
    let mut region = common::region(&rig, 4 * G, 2 * G);
    let _fork = region.fork(&[]).unwrap();
    let fails = |region: &mut &mut Region| drop(region.unshare(0..G, &stream, &[]).unwrap_err());
    under_a_copy(&rig, &mut region, fails, |region| {
        region.decommit_after(0..2 * G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().kept.pending_free, 2 * G);
    });
    // Unmapped here, and shown by the fork.
    let purged = region.purge().unwrap();
    assert_eq!((purged.given_back, purged.kept.pending_free), (0, 0));
    assert_eq!(region.held(), purged.kept.quarantined);
    region.close().unwrap();
}
