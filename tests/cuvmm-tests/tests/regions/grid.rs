//! A sparse grid compared with a plain table of bricks, and effects between bricks that share a
//! tile.

use crate::common;
use crate::common::{D0, G, Rig};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{ArgumentError, ContainerError};
use cuvmm::sparse::{BrickShape, Holes};
use cuvmm::{SparseArray, SparseGrid, Stream};
use proptest::prelude::*;

/// Elements per granule.
const PER_GRANULE: usize = G as usize / 4;

/// Creates a row of bricks of `4 * edge * edge` bytes each.
fn row(rig: &Rig<impl Backing>, count: usize, edge: usize) -> SparseGrid<u32, 2> {
    let stream = Stream::new(&rig.device).unwrap();
    let bricks = BrickShape::new([edge, count * edge], [edge, edge]).unwrap();
    SparseGrid::new(&rig.device, &stream, bricks).unwrap()
}

/// The edge of a brick of half a granule.
const HALF: usize = 512;

fn filled(grid: &SparseGrid<u32, 2>, value: u32) -> Vec<u32> {
    common::filled(value, grid.bricks().brick_len())
}

fn read(grid: &SparseGrid<u32, 2>, brick: usize) -> Vec<u32> {
    let mut seen = filled(grid, 99);
    grid.read_brick([0, brick], &mut seen, Holes::AsZero)
        .unwrap();
    seen
}

on_both! {
    fn two_bricks_of_a_tile_are_freed_by_the_second(rig) {
        let mut grid = row(rig, 4, HALF);
        assert_eq!((grid.stats().tiles, grid.stats().tile_bytes, grid.held()), (2, G, 0));
        assert!(grid.commit_brick([0, 0]).unwrap());
        rig.faults.forget();
        assert!(grid.commit_brick([0, 1]).unwrap());
        assert!(!grid.commit_brick([0, 1]).unwrap(), "the brick is committed");
        assert_eq!((rig.faults.total(), grid.held()), (0, G));
        assert_eq!(grid.committed_bricks().collect::<Vec<_>>(), [[0, 0], [0, 1]]);
        grid.write_brick([0, 1], &filled(&grid, 8)).unwrap();
        assert!(grid.decommit_brick([0, 0]).unwrap());
        assert!(!grid.decommit_brick([0, 0]).unwrap());
        assert_eq!((grid.held(), grid.committed_count()), (G, 1));
        assert!(!grid.is_committed([0, 0]) && grid.is_committed([0, 1]) && !grid.is_committed([1, 0]));
        rig.shows(read(&grid, 1), filled(&grid, 8));
        assert!(grid.decommit_brick([0, 1]).unwrap());
        assert_eq!((grid.held(), grid.stats().mappings, grid.committed_count()), (0, 0, 0));
    }

    fn a_brick_across_tiles_keeps_both(rig) {
        // Bricks of three quarters of a granule: 0 and 1, and 2 and 3, share a tile, and 1 and 2
        // cross tiles.
        let stream = Stream::new(&rig.device).unwrap();
        let bricks = BrickShape::new([4 * 3 * PER_GRANULE / 4], [3 * PER_GRANULE / 4]).unwrap();
        let builder = SparseGrid::<u32, 1>::builder(&rig.device, &stream, bricks);
        let mut grid = builder.tile_bytes(G).reserve().unwrap();
        assert_eq!(grid.stats().tiles, 3);
        for (brick, held) in [(1, 2), (2, 3), (0, 3), (3, 3)] {
            grid.commit_brick([brick]).unwrap();
            assert_eq!(grid.held(), held * G);
        }
        for (brick, held) in [(1, 3), (0, 2), (3, 2), (2, 0)] {
            grid.decommit_brick([brick]).unwrap();
            assert_eq!(grid.held(), held * G, "after brick {brick}");
        }
    }

    fn a_brick_that_comes_back_is_zero(rig) {
        let mut grid = row(rig, 4, HALF);
        let user = Stream::new(&rig.device).unwrap();
        grid.record_use(&user).unwrap();
        for brick in 0..2 {
            grid.commit_brick([0, brick]).unwrap();
            grid.write_brick([0, brick], &filled(&grid, 7)).unwrap();
        }
        grid.decommit_brick([0, 0]).unwrap();
        // Late writes to the old brick are ordered before the zeros of the new one.
        let late = vec![(grid.address(), G / 2, 0x55)];
        rig.machine.hold_until_awaited(D0, user.as_raw());
        rig.kernel(&user, &[], &late);
        rig.faults.forget();
        assert!(grid.commit_brick([0, 0]).unwrap());
        assert_eq!((rig.faults.count(Call::MemsetD8Async), rig.faults.count(Call::MemCreate)), (1, 0));
        rig.shows((read(&grid, 0), read(&grid, 1)), (filled(&grid, 0), filled(&grid, 7)));
        // A brick that was never committed needs no zeros, and neither does one whose tile was
        // released in between.
        grid.decommit_brick([0, 0]).unwrap();
        grid.decommit_brick([0, 1]).unwrap();
        rig.faults.forget();
        grid.commit_brick([0, 1]).unwrap();
        grid.commit_brick([0, 0]).unwrap();
        assert_eq!(rig.faults.count(Call::MemsetD8Async), 0);
        rig.shows((read(&grid, 0), read(&grid, 1)), (filled(&grid, 0), filled(&grid, 0)));
    }

    fn a_tile_goes_only_behind_the_work_on_all_of_its_bricks(rig) {
        let mut grid = row(rig, 2, HALF);
        let user = Stream::new(&rig.device).unwrap();
        grid.record_use(&user).unwrap();
        grid.commit_brick([0, 0]).unwrap();
        grid.commit_brick([0, 1]).unwrap();
        rig.held_kernel(&user, &[], &[(grid.address(), G / 2, 0x55)]);
        grid.decommit_brick([0, 0]).unwrap();
        grid.decommit_brick([0, 1]).unwrap();
        assert_eq!((grid.stats().pending_free, grid.committed_count()), (G, 0));
        assert_eq!(grid.purge().unwrap(), 0);
        let seen = grid.read_brick([0, 0], &mut filled(&grid, 1), Holes::Refuse);
        rig.machine.release_all_streams(D0);
        assert!(matches!(seen, Err(ContainerError::Brick { brick, .. }) if brick == [0, 0]));
        assert_eq!(grid.purge().unwrap(), G);
        assert!(rig.device.lost().is_none());
    }

    fn what_cannot_be_is_refused_and_changes_nothing(rig) {
        let mut grid = row(rig, 3, HALF);
        grid.commit_brick([0, 1]).unwrap();
        let (before, stranger) = (grid.stats(), Stream::new(&common::model().device).unwrap());
        let few = vec![0; 3];
        rig.faults.forget();
        for brick in [[0, 3], [1, 0], [usize::MAX; 2]] {
            let refused = [
                grid.commit_brick(brick).map(drop),
                grid.decommit_brick(brick).map(drop),
                grid.write_brick(brick, &few),
                grid.read_brick(brick, &mut [0; 3], Holes::AsZero),
            ];
            for refused in refused {
                assert!(matches!(refused, Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))), "{brick:?}");
            }
        }
        let least = (HALF * HALF) as u64;
        let what = "elements of a slice for a brick";
        let short = ContainerError::Argument(ArgumentError::TooSmall { what, value: 3, least });
        let long = vec![0; HALF * HALF + 1];
        let most = ArgumentError::TooLarge { what, value: least + 1, most: least };
        assert_eq!(grid.write_brick([0, 1], &long).unwrap_err(), most.into());
        assert_eq!(grid.write_brick([0, 1], &few).unwrap_err(), short);
        assert_eq!(grid.read_brick([0, 1], &mut [0; 3], Holes::AsZero).unwrap_err(), short);
        let absent = ContainerError::Uncommitted { range: 2 * HALF * HALF..3 * HALF * HALF, first: 2 * HALF * HALF };
        let absent = ContainerError::Brick { brick: vec![0, 2], cause: Box::new(absent) };
        assert_eq!(grid.write_brick([0, 2], &filled(&grid, 1)).unwrap_err(), absent);
        assert_eq!(grid.read_brick([0, 2], &mut filled(&grid, 1), Holes::Refuse).unwrap_err(), absent);
        assert!(absent.to_string().starts_with("brick [0, 2]: of elements 524288..786432"), "{absent}");
        assert!(matches!(grid.record_use(&stranger), Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))));
        assert_eq!((rig.faults.total(), grid.stats()), (0, before));
        let huge = BrickShape::new([usize::MAX / 2], [1]).unwrap();
        let refused = SparseGrid::<u32, 1>::new(&rig.device, grid.home_stream(), huge);
        assert!(matches!(refused, Err(ContainerError::Argument(ArgumentError::Overflow { what: "elements", value, .. })) if value == (usize::MAX / 2) as u64));
        let refused = SparseGrid::<(), 1>::new(&rig.device, grid.home_stream(), huge);
        assert!(matches!(refused, Err(ContainerError::Argument(ArgumentError::Zero("bytes of the elements")))));
        let refused = SparseGrid::<u32, 2>::new(&rig.device, &stranger, grid.bricks());
        assert!(matches!(refused, Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))));
        let builder = SparseGrid::<u32, 2>::builder(&rig.device, grid.home_stream(), grid.bricks());
        assert!(matches!(builder.tile_bytes(0).reserve(), Err(ContainerError::TileSize { tile: 0, .. })));
    }

    fn zeros_that_fail_leave_the_brick_out(rig) {
        for call in [Call::MemsetD8Async, Call::StreamSynchronize] {
            let mut grid = row(rig, 2, HALF);
            grid.commit_brick([0, 0]).unwrap();
            grid.commit_brick([0, 1]).unwrap();
            grid.write_brick([0, 0], &filled(&grid, 7)).unwrap();
            grid.decommit_brick([0, 0]).unwrap();
            rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(call));
            let failed = grid.commit_brick([0, 0]);
            rig.faults.disarm();
            assert!(failed.is_err() && !grid.is_committed([0, 0]));
            assert_eq!((grid.held(), grid.committed_count()), (G, 1));
            assert!(grid.commit_brick([0, 0]).unwrap());
            rig.shows(read(&grid, 0), filled(&grid, 0));
        }
    }

    fn an_error_names_the_brick(rig) {
        let mut grid = row(rig, 6, HALF);
        grid.commit_brick([0, 0]).unwrap();
        grid.write_brick([0, 0], &filled(&grid, 7)).unwrap();
        let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let refused = |error: ContainerError, brick: usize, short: bool| {
            assert!(matches!(&error, ContainerError::Brick { brick: at, .. } if *at == [0, brick]), "{error}");
            assert!(error.to_string().starts_with(&format!("brick [0, {brick}]: ")), "{error}");
            assert_eq!((error.call().is_some(), error.is_out_of_memory()), (true, short), "{error}");
        };
        rig.faults.arm(common::nth_of(1, code, &[Call::MemCreate]));
        refused(grid.commit_brick([0, 5]).unwrap_err(), 5, true);
        rig.faults.arm(common::nth_of(1, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemcpyHtoDAsync]));
        let elements = filled(&grid, 8);
        refused(grid.write_brick([0, 0], &elements).unwrap_err(), 0, false);
        rig.faults.arm(common::nth_of(1, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemcpyDtoHAsync]));
        let mut seen = filled(&grid, 0);
        refused(grid.read_brick([0, 0], &mut seen, Holes::Refuse).unwrap_err(), 0, false);
        rig.faults.arm(common::nth_of(1, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemUnmap]));
        refused(grid.decommit_brick([0, 0]).unwrap_err(), 0, false);
        rig.faults.disarm();
    }

    fn bricks_larger_than_a_granule_are_tiles(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let bricks = BrickShape::new([3, 2048, 2048], [1, 2048, 1024]).unwrap();
        let mut grid = SparseGrid::<u32, 3>::new(&rig.device, &stream, bricks).unwrap();
        assert_eq!((grid.stats().tile_bytes, grid.stats().tiles), (4 * G, 6));
        grid.commit_brick([1, 0, 1]).unwrap();
        assert_eq!((grid.held(), grid.stats().mappings), (4 * G, 1));
        let params = bricks.params();
        let number = params.counts[1] * params.counts[2] + 1;
        rig.kernel(&stream, &[], &[(
            cuvmm::driver::DeviceAddress(grid.view_mut().address().0 + number * params.brick_len * 4),
            4 * G,
            0x11,
        )]);
        let mut seen = vec![0; bricks.brick_len()];
        grid.read_brick([1, 0, 1], &mut seen, Holes::Refuse).unwrap();
        if rig.keeps_bytes() {
            assert!(seen.iter().all(|&it| it == 0x1111_1111));
        }
    }

    fn tiles_come_and_go_one_at_a_time(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let len = 3 * PER_GRANULE - 5;
        let builder = SparseArray::<u32>::builder(&rig.device, &stream, len);
        let mut array = builder.tile_bytes(G).reserve().unwrap();
        assert!(array.commit_tile(2).unwrap() && !array.commit_tile(2).unwrap());
        assert_eq!(array.tile(2).unwrap(), array.tiles().next().unwrap());
        assert_eq!(array.tile(2).unwrap().elements, 2 * PER_GRANULE..len);
        assert!(array.commit_tile(0).unwrap());
        assert_eq!(array.stats().committed, 2 * G);
        assert!(!array.decommit_tile(1).unwrap() && array.decommit_tile(2).unwrap());
        assert_eq!((array.held(), array.tiles().count()), (G, 1));
        for index in [3, usize::MAX] {
            for refused in [array.commit_tile(index), array.decommit_tile(index)] {
                let refused = refused.unwrap_err();
                assert!(matches!(refused, ContainerError::Argument(ArgumentError::OutOfRange { what: "tiles", len: 3, .. })));
            }
        }
        assert_eq!(array.held(), G);
    }
}

/// An operation on a brick.
#[derive(Clone, Debug)]
enum Step {
    Commit(usize),
    Decommit(usize),
    Write(usize),
}

/// Bricks of a little more than a quarter of a granule, so that they cross tiles.
const BRICK: [usize; 2] = [257, 513];
const COUNTS: [usize; 2] = [3, 5];

fn step() -> impl Strategy<Value = Step> {
    let brick = || 0..COUNTS[0] * COUNTS[1];
    prop_oneof![
        3 => brick().prop_map(Step::Commit),
        3 => brick().prop_map(Step::Decommit),
        1 => brick().prop_map(Step::Write),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(48), ..ProptestConfig::default() })]

    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn it_holds_what_a_table_of_bricks_would(steps in prop::collection::vec(step(), 1..40)) {
        let rig = common::clean(common::host());
        let stream = Stream::new(&rig.device).unwrap();
        let bricks = BrickShape::new([3 * BRICK[0] - 1, 5 * BRICK[1] - 2], BRICK).unwrap();
        let builder = SparseGrid::<u32, 2>::builder(&rig.device, &stream, bricks);
        let mut grid = builder.tile_bytes(G).reserve().unwrap();
        let mut known: Vec<Option<u32>> = vec![None; 15];
        let mut seen = vec![0; bricks.brick_len()];
        let bytes = bricks.brick_len() as u64 * 4;
        for (number, step) in steps.iter().enumerate() {
            match *step {
                Step::Commit(brick) => {
                    let new = known[brick].is_none();
                    prop_assert_eq!(grid.commit_brick(bricks.at(brick).unwrap()).unwrap(), new);
                    known[brick].get_or_insert(0);
                }
                Step::Decommit(brick) => {
                    let there = known[brick].take().is_some();
                    prop_assert_eq!(grid.decommit_brick(bricks.at(brick).unwrap()).unwrap(), there);
                }
                Step::Write(brick) => {
                    let value = number as u32 + 1;
                    let elements = common::filled(value, bricks.brick_len());
                    let done = grid.write_brick(bricks.at(brick).unwrap(), &elements);
                    prop_assert_eq!(done.is_ok(), known[brick].is_some());
                    known[brick] = known[brick].map(|_| value);
                }
            }
            let there = |brick: &usize| known[*brick].is_some();
            let all: Vec<usize> = (0..15).filter(there).collect();
            let told = grid.committed_bricks().map(|brick| bricks.number_of(brick).unwrap());
            prop_assert_eq!(told.collect::<Vec<_>>(), all.clone());
            // A tile has memory if and only if a brick in it is committed.
            let used = |tile: u64| all.iter().any(|&brick| {
                let start = brick as u64 * bytes;
                start < (tile + 1) * G && start + bytes > tile * G
            });
            let tiles = (0..grid.stats().tiles as u64).filter(|&tile| used(tile)).count();
            prop_assert_eq!(grid.held(), tiles as u64 * G);
            prop_assert_eq!(grid.committed_count(), all.len());
            for (brick, known) in known.iter().enumerate() {
                grid.read_brick(bricks.at(brick).unwrap(), &mut seen, Holes::AsZero).unwrap();
                let wanted = known.unwrap_or(0);
                prop_assert!(seen == common::filled(wanted, seen.len()), "step {}, brick {}", number, brick);
            }
        }
    }
}
