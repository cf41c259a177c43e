//! Forked blocks: what they contain, which memory they share, what cannot be written, and what
//! happens when one of them shrinks, grows or is freed.
#![allow(clippy::unit_arg)]

use std::sync::{Arc, Mutex};

use crate::common;
use crate::common::books::{balanced, books};
use crate::common::sweep::{sweep, sweep_partly, text};
use crate::common::{G, Rig, pool};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, HandleTypes};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, ShareError};
use cuvmm::{Block, Hardened, Offer, Pool, PoolStats, Stream, Tenant};
use proptest::prelude::*;

/// The unit in which blocks are written and checked.
const CELL: u64 = G / 2;

/// Writes a byte derived from the salt and the offset to each cell from `from` on.
fn write(block: &Block, salt: u8, from: u64) {
    for at in (from..block.size()).step_by(CELL as usize) {
        block.write(at, &[byte(salt, at); 32]).unwrap();
    }
}

const fn byte(salt: u8, at: u64) -> u8 {
    salt.wrapping_mul(16).wrapping_add((at / CELL) as u8)
}

/// Checks that the cells in a range are as they were written.
fn shows(rig: &Rig<impl Backing>, block: &Block, salt: u8, cells: std::ops::Range<u64>) {
    for at in cells.step_by(CELL as usize) {
        let mut bytes = [0; 32];
        block.read(at, &mut bytes).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(bytes, [byte(salt, at); 32], "at {at:#x}");
        }
    }
}

fn plain_or_hardened(rig: &Rig<impl Backing>, granules: u64, hardened: bool) -> Pool {
    let builder = common::limited(rig, granules);
    let builder = match hardened {
        true => builder.hardened(Hardened::new()),
        false => builder,
    };
    builder.build().unwrap()
}

/// Allocates a block for forking, with extents of two granules.
fn allocate(tenant: &Tenant, stream: &Stream, size: u64) -> Block {
    let builder = tenant.block(size).capacity(32 * G).largest_extent(2 * G);
    builder.home_stream(stream).tag("kv").allocate().unwrap()
}

fn stride(blocks: &[Block]) -> u64 {
    let distances = blocks
        .windows(2)
        .map(|two| two[1].address().0 - two[0].address().0);
    let distances: Vec<u64> = distances.collect();
    assert!(distances.iter().all(|distance| *distance == distances[0]));
    distances[0]
}

on_both! {
    fn whole_extents_are_there_once_and_the_rest_is_copied(rig) {
        let (pool, tenant, stream) = common::scene(rig, 64);
        let mut root = allocate(&tenant, &stream, 7 * G);
        write(&root, 1, 0);
        // Two extents, and half of the third.
        let mut fork = root.fork(5 * G + 100, 6 * G).unwrap();
        assert_ne!(fork.address(), root.address());
        assert_eq!((fork.size(), fork.capacity()), (6 * G, 32 * G));
        assert_eq!(fork.home_stream(), Some(&stream));
        assert_eq!((root.read_only(), fork.read_only()), (4 * G, 4 * G));
        shows(rig, &fork, 1, 0..5 * G + 100);
        let stats = books(rig, &pool);
        assert_eq!((stats.shared, stats.in_use), (4 * G, 3 * G + 2 * G));
        // Behind the shared prefix each block has its own memory.
        write(&root, 2, 4 * G);
        write(&fork, 3, 5 * G + CELL);
        fork.grow_to(9 * G).unwrap();
        root.grow_to(8 * G).unwrap();
        write(&fork, 3, 6 * G);
        shows(rig, &root, 2, 4 * G..7 * G);
        shows(rig, &fork, 1, 0..5 * G + CELL);
        shows(rig, &fork, 3, 5 * G + CELL..9 * G);
        // A fork of the fork, whose whole prefix is shared. The one in the middle is dropped first.
        let last = fork.try_fork(2 * G, 2 * G).unwrap();
        assert_eq!((fork.read_only(), last.read_only()), (4 * G, 2 * G));
        assert_eq!(books(rig, &pool).shared, 4 * G);
        drop(fork);
        pool.trim(0).unwrap();
        assert_eq!((root.read_only(), last.read_only()), (2 * G, 2 * G));
        drop(root);
        pool.trim(0).unwrap();
        // The last block may not write to the memory that it took over, although it is its only
        // owner.
        assert_eq!(last.read_only(), 2 * G);
        let stats = books(rig, &pool);
        assert_eq!((stats.shared, stats.in_use, stats.committed), (0, 2 * G, 2 * G));
        shows(rig, &last, 1, 0..2 * G);
    }

    fn what_several_show_is_written_and_exported_by_none(rig) {
        let pool = common::limited(rig, 32)
            .shareable(HandleTypes::POSIX_FD);
        let (pool, tenant, stream) = common::with_stream(rig, pool.build().unwrap());
        let root = allocate(&tenant, &stream, 6 * G);
        write(&root, 1, 0);
        let fork = root.fork(4 * G, 6 * G).unwrap();
        for block in [&root, &fork] {
            for at in [0, 4 * G - 1] {
                assert!(matches!(block.write(at, &[9; 2]), Err(MemoryError::ReadOnly { .. })));
            }
            block.write(4 * G, &[9]).unwrap();
            block.write(0, &[]).unwrap();
            assert!(matches!(
                block.export(HandleTypes::POSIX_FD),
                Err(MemoryError::ReadOnly(bytes)) if bytes == (0..4 * G)
            ));
            assert!(matches!(
                Offer::block(block),
                Err(ShareError::Memory(MemoryError::ReadOnly(bytes))) if bytes == (0..4 * G)
            ));
        }
        shows(rig, &root, 1, 0..4 * G);
        drop(fork);
        pool.trim(0).unwrap();
        // No block shares it any more: the source can write to all of it again.
        assert_eq!(root.read_only(), 0);
        write(&root, 2, 0);
        let exported = root.export(HandleTypes::POSIX_FD).unwrap();
        // Exported memory, to which peers can write, is copied.
        let copy = root.fork(4 * G, 4 * G).unwrap();
        assert_eq!((copy.read_only(), books(rig, &pool).shared), (0, 0));
        shows(rig, &copy, 2, 0..4 * G);
        drop(exported);
    }

    fn one_that_shrinks_into_what_it_shares_grows_into_its_own(rig) {
        let (pool, tenant, stream) = common::scene(rig, 64);
        let mut root = allocate(&tenant, &stream, 8 * G);
        write(&root, 1, 0);
        let mut fork = root.fork(8 * G, 8 * G).unwrap();
        let other = root.fork(8 * G, 8 * G).unwrap();
        for (salt, block) in [(2, &mut root), (3, &mut fork)] {
            let address = block.address();
            block.shrink_to(5 * G + 1).unwrap();
            assert_eq!(block.read_only(), 5 * G + 1);
            block.try_grow_to(10 * G).unwrap();
            // The extent in which the block ended is its own as well.
            assert_eq!((block.read_only(), block.address()), (4 * G, address));
            shows(rig, block, 1, 0..5 * G + 1);
            write(block, salt, 4 * G);
        }
        shows(rig, &root, 2, 4 * G..10 * G);
        shows(rig, &fork, 3, 4 * G..10 * G);
        shows(rig, &other, 1, 0..8 * G);
        // It took the memory over, and still may not write to it.
        assert_eq!(other.read_only(), 8 * G);
        // The same within a granule that it has.
        let mut small = root.fork(2 * G, 2 * G).unwrap();
        small.shrink_to(2 * G - CELL).unwrap();
        small.grow_to(2 * G).unwrap();
        write(&small, 6, 2 * G - CELL);
        drop(small);
        // Together with a block that needs no unsharing.
        let mut third = allocate(&tenant, &stream, G);
        root.shrink_to(G).unwrap();
        fork.shrink_to(3 * G).unwrap();
        let mut blocks = [(&mut third, 2 * G), (&mut fork, 4 * G), (&mut root, 3 * G)];
        tenant.grow_all(&mut blocks).unwrap();
        assert_eq!((root.read_only(), fork.read_only(), third.read_only()), (0, 2 * G, 0));
        write(&root, 4, G);
        write(&fork, 5, 3 * G);
        shows(rig, &root, 1, 0..G);
        shows(rig, &root, 4, G..3 * G);
        shows(rig, &fork, 1, 0..3 * G);
        shows(rig, &other, 1, 0..8 * G);
        books(rig, &pool);
    }

    fn what_cannot_be_its_own_yet_is_refused(rig) {
        let (pool, tenant, stream) = common::scene(rig, 10);
        let mut root = allocate(&tenant, &stream, 8 * G);
        write(&root, 1, 0);
        let mut fork = root.fork(8 * G, 8 * G).unwrap();
        fork.shrink_to(3 * G).unwrap();
        let lease = fork.lease();
        let before = books(rig, &pool).committed;
        let refused = fork.grow_to(4 * G).unwrap_err();
        let BlockError::SharedInUse { offset, bytes, others: 1 } = refused else {
            panic!("{refused}")
        };
        // Behind the lease nothing is shared any more.
        assert_eq!((offset, bytes), (3 * G, G));
        drop(lease);
        // In a batch the error names the block, and no block has grown.
        let mut blocks = [(&mut root, 9 * G), (&mut fork, 6 * G)];
        let refused = tenant.grow_all(&mut blocks).unwrap_err();
        let BlockError::Refused { index, cause, .. } = refused else { panic!("{refused}") };
        assert!(cause.is_shortage(), "{cause}");
        assert_eq!((index, root.size(), fork.size()), (1, 8 * G, 3 * G));
        // The extent in the way of its growth is unshared by now.
        let stats = books(rig, &pool);
        assert_eq!((stats.in_use + stats.shared, fork.read_only()), (before + G, 2 * G));
        // An invalid size is refused before anything is unmapped.
        let snapshot = rig.machine.snapshot();
        assert!(matches!(fork.grow_to(33 * G), Err(BlockError::Argument(ArgumentError::TooLarge { .. }))));
        assert_eq!(rig.machine.snapshot(), snapshot);
        shows(rig, &fork, 1, 0..3 * G);
        fork.grow_to(4 * G).unwrap();
        shows(rig, &root, 1, 0..8 * G);
    }

    fn what_captures_by_the_time_there_is_room_gets_no_copy_into_its_graph(rig) {
        let (pool, tenant, stream) = common::scene(rig, 10);
        let root = allocate(&tenant, &stream, 8 * G);
        write(&root, 1, 0);
        let mut fork = root.fork(8 * G, 8 * G).unwrap();
        fork.shrink_to(3 * G).unwrap();
        let block = Arc::new(Mutex::new(None));
        let guard = Arc::new(Mutex::new(None));
        let (given, begun, captured) = (block.clone(), guard.clone(), pool.clone());
        let giver = pool.tenant("giver").on_pressure(move |_| {
            drop(given.lock().unwrap().take());
            *begun.lock().unwrap() = Some(captured.capture_guard());
        });
        let giver = giver.register().unwrap();
        *block.lock().unwrap() = Some(giver.allocate(2 * G).unwrap());
        let refused = fork.grow_to(4 * G).unwrap_err();
        assert!(matches!(refused, BlockError::Capturing(_)), "{refused}");
        assert_eq!(fork.size(), 3 * G);
        drop(guard.lock().unwrap().take());
        shows(rig, &fork, 1, 0..3 * G);
        fork.grow_to(4 * G).unwrap();
        shows(rig, &fork, 1, 0..3 * G);
        shows(rig, &root, 1, 0..8 * G);
        drop(giver);
    }

    fn forks_of_adjacent_blocks_are_adjacent(rig) {
        for hardened in [false, true] {
            let pool = plain_or_hardened(rig, 64, hardened);
            let (tenant, stream) = common::joined(rig, &pool);
            let builder = tenant.block(5 * G).capacity(8 * G).largest_extent(2 * G);
            let rows = builder.home_stream(&stream).allocate_adjacent(4).unwrap();
            let single = allocate(&tenant, &stream, 5 * G);
            for (salt, row) in (1..).zip(rows.iter().chain([&single])) {
                write(row, salt, 0);
            }
            // A row without its first block, a single block, and the first block.
            let chosen = [&rows[1], &rows[2], &rows[3], &single, &rows[0]];
            let reservations = rig.machine.live().reservations;
            let mut forks = tenant.fork_all(&chosen, 4 * G, 5 * G).unwrap();
            assert_eq!(rig.machine.live().reservations, reservations + 3);
            assert_eq!(stride(&forks[..3]), stride(&rows));
            assert_eq!(books(rig, &pool).shared, 5 * 4 * G);
            for (salt, fork) in [2, 3, 4, 5, 1].into_iter().zip(&forks) {
                shows(rig, fork, salt, 0..4 * G);
            }
            // The forks grow together, and are forked again, as a row.
            let mut grown: Vec<(&mut Block, u64)> =
                forks.iter_mut().take(3).map(|fork| (fork, 7 * G)).collect();
            tenant.try_grow_all(&mut grown).unwrap();
            let again: Vec<&Block> = forks.iter().take(3).collect();
            let again = tenant.try_fork_all(&again, 7 * G, 8 * G).unwrap();
            assert_eq!(stride(&again), stride(&rows));
            drop((rows, forks));
            shows(rig, &again[2], 4, 0..4 * G);
            drop((again, single));
            pool.trim(0).unwrap();
            assert_eq!(books(rig, &pool).committed, 0);
        }
    }

    fn bad_input_is_refused_and_changes_nothing(rig) {
        let pool = pool(rig, 32);
        let [one, other] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let blocks = [4, 6].map(|granules| allocate(&one, &stream, granules * G));
        let both: Vec<&Block> = blocks.iter().collect();
        let before = (books(rig, &pool), rig.machine.live());
        let refused = |tenant: &Tenant, bytes, size| tenant.fork_all(&both, bytes, size).unwrap_err();
        assert!(matches!(refused(&one, 0, G), BlockError::Argument(ArgumentError::Zero { .. })));
        assert!(matches!(refused(&other, G, G), BlockError::WrongTenant { index: 0 }));
        let error = refused(&one, 5 * G, 5 * G);
        let BlockError::Argument(ArgumentError::TooLarge { value, most, .. }) = error else { panic!("{error}") };
        assert_eq!((value, most), (5 * G, 4 * G));
        let error = refused(&one, 2 * G, 2 * G - 1);
        let BlockError::Argument(ArgumentError::TooLarge { value, most, .. }) = error else { panic!("{error}") };
        assert_eq!((value, most), (2 * G, 2 * G - 1));
        let error = refused(&one, G, 33 * G);
        assert!(matches!(
            error,
            BlockError::Argument(ArgumentError::TooLarge { value, most, .. })
                if (value, most) == (33 * G, 32 * G)
        ));
        // One of them fits, both do not.
        assert!(matches!(
            refused(&one, 2 * G, 14 * G),
            BlockError::OutOfMemory(_)
        ));
        assert!(matches!(blocks[0].fork(0, 1), Err(BlockError::Argument(ArgumentError::Zero { .. }))));
        assert!(matches!(blocks[0].try_fork(4 * G + 1, 5 * G), Err(BlockError::Argument(ArgumentError::TooLarge { .. }))));
        assert!(one.fork_all(&[], G, G).unwrap().is_empty());
        one.blocks().sleep(cuvmm::Contents::Discard).unwrap();
        assert!(matches!(
            refused(&one, G, G),
            BlockError::Memory(MemoryError::Asleep { .. })
        ));
        one.blocks().wake().unwrap();
        assert_eq!(books(rig, &pool).committed, before.0.committed);
        assert_eq!(format!("{:?}", rig.machine.live()), format!("{:?}", before.1));
        one.unregister();
        assert!(matches!(
            blocks[0].fork(G, G),
            Err(BlockError::Unregistered { .. })
        ));
    }
}

struct World {
    rows: Vec<Block>,
    forks: Vec<Block>,
    _stream: Stream,
    tenant: Tenant,
    pool: Pool,
}

fn figures(world: &World) -> [u64; 6] {
    let stats = world.pool.stats();
    assert_eq!(stats.quarantined, 0);
    let PoolStats {
        committed,
        in_use,
        shared,
        mappings,
        addresses,
        ..
    } = stats;
    let sizes = world.rows.iter().map(Block::size).sum();
    [committed, in_use, shared, mappings, addresses, sizes]
}

#[test]
fn every_driver_call_failed_once() {
    let world = |rig: &Rig<_>, forked: bool| {
        let (pool, tenant, stream) = common::scene(rig, 64);
        let builder = tenant.block(5 * G).capacity(8 * G).largest_extent(2 * G);
        let rows = builder.home_stream(&stream).allocate_adjacent(3).unwrap();
        let mut world = World {
            rows,
            forks: Vec::new(),
            _stream: stream,
            tenant,
            pool,
        };
        if forked {
            fork(&mut world).unwrap();
        }
        world
    };
    fn fork(world: &mut World) -> Result<(), String> {
        let rows: Vec<&Block> = world.rows.iter().collect();
        let forks = world.tenant.try_fork_all(&rows, 4 * G + 100, 5 * G);
        world.forks = text(forks)?;
        Ok(())
    }
    let forked = sweep(|rig| world(rig, false), |_, world| fork(world), figures);
    // One reservation. Each fork maps two extents, creates a third, and asks whether its stream
    // captures before and after it copies to that extent.
    assert_eq!(forked, 1 + 3 * (2 * 2 + 3 + 3));
    // Unshared memory stays unshared, with the same contents: only the books must add up.
    let grown = sweep_partly(
        |rig| world(rig, true),
        |_, World { tenant, rows, .. }| {
            for row in &mut *rows {
                text(row.shrink_to(3 * G))?;
            }
            let mut pairs: Vec<_> = rows.iter_mut().map(|row| (row, 5 * G)).collect();
            text(tenant.try_grow_all(&mut pairs))
        },
        |world| figures(world)[5] % G,
    );
    assert!(grown >= 3 * 4, "{grown}");
}

#[derive(Clone, Debug)]
enum Step {
    Allocate {
        cells: u64,
        zeroed: bool,
        home: bool,
    },
    Fork {
        block: usize,
        cells: u64,
        more: u64,
    },
    Grow {
        block: usize,
        by: u64,
    },
    Shrink {
        block: usize,
        by: u64,
    },
    Write {
        block: usize,
        cell: u64,
    },
    Compact {
        block: usize,
        cells: u64,
    },
    Sleep,
    Drop {
        block: usize,
    },
    Trim,
    Fault {
        k: u64,
        memory: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let block = || 0usize..4;
    prop_oneof![
        3 => (4u64..13, any::<bool>(), any::<bool>())
            .prop_map(|(cells, zeroed, home)| Step::Allocate { cells, zeroed, home }),
        6 => (block(), prop_oneof![1u64..16, Just(4), Just(8)], 0u64..6)
            .prop_map(|(block, cells, more)| Step::Fork { block, cells, more }),
        6 => (block(), 1u64..8).prop_map(|(block, by)| Step::Grow { block, by }),
        5 => (block(), 1u64..6).prop_map(|(block, by)| Step::Shrink { block, by }),
        10 => (block(), 0u64..20).prop_map(|(block, cell)| Step::Write { block, cell }),
        2 => (block(), 4u64..20).prop_map(|(block, cells)| Step::Compact { block, cells }),
        1 => Just(Step::Sleep),
        4 => block().prop_map(|block| Step::Drop { block }),
        1 => Just(Step::Trim),
        3 => (1u64..10, any::<bool>()).prop_map(|(k, memory)| Step::Fault { k, memory }),
    ]
}

/// A block and what is known about its cells: the bytes written to it or inherited from the block
/// that it was forked from. Other blocks are not known here.
struct Known {
    block: Block,
    zeroed: bool,
    cells: Vec<Option<u8>>,
    /// Number of cells that another block shares, or shared.
    common: u64,
}

impl Known {
    fn resized(&mut self, cells: u64) {
        let new = self.zeroed.then_some(0);
        self.cells.resize(cells as usize, new);
        self.common = self.common.min(cells);
    }
}

const fn cells(bytes: u64) -> u64 {
    bytes / CELL
}

/// Runs a program, and compares every block with the reference after each step.
fn run(rig: &Rig<impl Backing>, hardened: bool, steps: &[Step]) {
    let pool = plain_or_hardened(rig, 40, hardened);
    let (tenant, stream) = common::joined(rig, &pool);
    let mut known: Vec<Known> = Vec::new();
    let mut next = 0u8;
    for step in steps {
        match *step {
            Step::Fault { k, memory } => {
                let code = match memory {
                    true => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
                    false => CUresult::CUDA_ERROR_UNKNOWN,
                };
                rig.faults.disarm();
                rig.faults.forget();
                rig.faults.arm(Fault::nth(k, code));
                continue;
            }
            Step::Allocate {
                cells,
                zeroed,
                home,
            } => {
                let builder = tenant
                    .block(cells * CELL)
                    .capacity(16 * G)
                    .largest_extent(2 * G);
                let builder = builder.zeroed(zeroed);
                let builder = match home {
                    true => builder.home_stream(&stream),
                    false => builder,
                };
                if let Ok(block) = builder.allocate() {
                    let mut new = Known {
                        block,
                        zeroed,
                        cells: Vec::new(),
                        common: 0,
                    };
                    new.resized(cells);
                    known.push(new);
                }
            }
            Step::Fork {
                block,
                cells: first,
                more,
            } => {
                let Some(it) = known.get_mut(block) else {
                    continue;
                };
                let (bytes, size) = (first * CELL, (first + more) * CELL);
                match it.block.fork(bytes, size) {
                    Ok(block) => {
                        assert_ne!(block.address(), it.block.address());
                        let kept = it.cells[..first as usize].to_vec();
                        let mut new = Known {
                            block,
                            zeroed: it.zeroed,
                            cells: kept,
                            common: first,
                        };
                        it.common = it.common.max(first);
                        new.resized(first + more);
                        known.push(new);
                    }
                    Err(BlockError::Argument(ArgumentError::TooLarge { .. })) => {
                        assert!(bytes > it.block.size())
                    }
                    Err(error) if error.is_shortage() || matches!(error, BlockError::Memory(_)) => {
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            Step::Grow { block, by } => {
                let Some(it) = known.get_mut(block) else {
                    continue;
                };
                let size = it.block.size() + by * CELL;
                let injected = rig.faults.injected();
                match it.block.grow_to(size) {
                    Ok(()) => {
                        // The new memory can be written.
                        let first = it.cells.len();
                        it.resized(cells(size));
                        rig.faults.disarm();
                        it.block.write(first as u64 * CELL, &[0xFF; 32]).unwrap();
                        it.cells[first] = Some(0xFF);
                    }
                    Err(BlockError::Argument(ArgumentError::TooLarge { .. })) => {
                        assert!(size > 16 * G)
                    }
                    Err(BlockError::Lost { .. }) => panic!("one fault loses nothing"),
                    Err(error) => {
                        let faulty = rig.faults.injected() > injected;
                        assert!(faulty || error.is_shortage(), "{error}");
                    }
                }
            }
            Step::Shrink { block, by } => {
                let Some(it) = known.get_mut(block) else {
                    continue;
                };
                let size = it.block.size().saturating_sub(by * CELL);
                if size > 0 {
                    it.block.shrink_to(size).unwrap();
                    it.resized(cells(size));
                }
            }
            Step::Write { block, cell } => {
                let Some(it) = known.get_mut(block) else {
                    continue;
                };
                let at = cell * CELL;
                next = next.wrapping_add(1);
                let written = it.block.write(at, &[next; 32]);
                match written {
                    Ok(()) => it.cells[cell as usize] = Some(next),
                    Err(MemoryError::ReadOnly { .. }) => {
                        assert!(cell < it.common && at < it.block.read_only());
                    }
                    Err(MemoryError::Argument(ArgumentError::OutOfRange { .. })) => {
                        assert!(at >= it.block.size())
                    }
                    // The bytes may have been written, although the call failed.
                    Err(MemoryError::Range { .. } | MemoryError::Call(_)) => {
                        it.cells[cell as usize] = None
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            Step::Compact { block, cells } => {
                let Some(it) = known.get(block) else {
                    continue;
                };
                let (bytes, injected) = (cells * CELL, rig.faults.injected());
                match it.block.compact_prefix(bytes) {
                    Ok(copied) => assert!(copied <= bytes),
                    Err(BlockError::Argument(ArgumentError::TooLarge { .. })) => {
                        assert!(bytes > it.block.size())
                    }
                    Err(BlockError::Lost { .. }) => panic!("one fault loses nothing"),
                    Err(error) => {
                        let faulty = rig.faults.injected() > injected;
                        assert!(faulty || error.is_shortage(), "{error}");
                    }
                }
            }
            Step::Sleep => {
                let store = cuvmm::HostStore::builder(&rig.device).pinned(40 * G);
                if let Ok(store) = store.build() {
                    let kept = tenant.blocks().sleep(cuvmm::Contents::Keep(&store));
                    rig.faults.disarm();
                    if kept.is_ok() {
                        // Shared memory is unshared on waking, and may not all fit.
                        if tenant.blocks().wake().is_err() {
                            known.truncate(2);
                            tenant.blocks().wake().unwrap();
                        }
                    }
                }
            }
            Step::Drop { block } => {
                if block < known.len() {
                    drop(known.remove(block));
                }
            }
            Step::Trim => drop(pool.trim(0)),
        }
        rig.faults.disarm();
        for it in &known {
            assert_eq!(cells(it.block.size()), it.cells.len() as u64);
            for (cell, byte) in it.cells.iter().enumerate() {
                let mut bytes = [0; 32];
                it.block.read(cell as u64 * CELL, &mut bytes).unwrap();
                if let (Some(byte), true) = (byte, rig.keeps_bytes()) {
                    assert_eq!(bytes, [*byte; 32], "cell {cell} after {step:?}");
                }
            }
        }
        // Addresses that a failed call left reserved are counted as such, and belong to no pool.
        match rig.device.drop_failures() {
            0 => books(rig, &pool),
            _ => balanced(rig, &pool),
        };
    }
    rig.faults.disarm();
}

fn programs<B: Backing>(rig: impl Fn() -> Rig<B>, hardened: bool) {
    crate::programs::run(300, step(), 1..40, |steps| {
        let rig = rig();
        run(&rig, hardened, steps);
        common::only_counted_left(&rig);
    });
}

#[test]
fn programs_on_model() {
    programs(common::model, false);
}

#[test]
fn programs_on_host() {
    programs(common::host, false);
}

#[test]
fn programs_hardened_on_host() {
    programs(common::host, true);
}
