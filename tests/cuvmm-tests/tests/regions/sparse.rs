//! A sparse array compared with a plain one with holes, and its state after a failure.

use crate::common;
use crate::common::{D0, G, Rig};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, Driver};
use cuvmm::error::{ArgumentError, ContainerError, MemoryError};
use cuvmm::sparse::Holes;
use cuvmm::{Place, Region, SparseArray, Stream};
use proptest::prelude::*;

/// Elements per granule, which is the size of a tile here.
const PER_TILE: usize = G as usize / 4;

fn array(rig: &Rig<impl Backing>, tiles: usize) -> SparseArray<u32> {
    let stream = Stream::new(&rig.device).unwrap();
    SparseArray::builder(&rig.device, &stream, tiles * PER_TILE)
        .tile_bytes(G)
        .zero_extent(4 * G)
        .reserve()
        .unwrap()
}

fn committed(array: &SparseArray<u32>) -> Vec<usize> {
    array.tiles().map(|tile| tile.index).collect()
}

on_both! {
    fn tiles_are_committed_by_index(rig) {
        // 1 TiB of addresses, of which three tiles have memory.
        let mut array = array(rig, 1 << 19);
        assert_eq!((array.stats().reserved, array.stats().held), (1 << 40, 0));
        let far = (1 << 18) * PER_TILE;
        assert_eq!(array.commit(far - 1..far + 1).unwrap(), 2);
        assert_eq!(array.commit(far - 5..far).unwrap(), 0, "the tile has memory already");
        assert_eq!(array.commit(array.len() - 1..array.len()).unwrap(), 1);
        assert_eq!(committed(&array), [(1 << 18) - 1, 1 << 18, (1 << 19) - 1]);
        let tile = array.tiles().nth(1).unwrap();
        assert_eq!(tile.elements, far..far + PER_TILE);
        assert_eq!(tile.address.0, array.address().0 + far as u64 * 4);
        let stats = array.stats();
        assert_eq!((stats.committed_tiles, stats.committed, stats.mappings), (3, 3 * G, 3));
        assert_eq!((stats.tiles, stats.tile_bytes), (1 << 19, G));
        assert_eq!(array.write(far - 2, &[1, 2, 3, 4], Holes::Refuse).unwrap(), 4);
        let mut seen = [9; 4];
        array.read(far - 2, &mut seen, Holes::Refuse).unwrap();
        rig.shows(seen, [1, 2, 3, 4]);
        assert_eq!(array.view(far - 2..far + 2).unwrap().len(), 4);
        // Only tiles that are entirely in the range are released.
        assert_eq!(array.decommit(far - 1..far + PER_TILE).unwrap(), 1);
        assert_eq!(committed(&array), [(1 << 18) - 1, (1 << 19) - 1]);
        assert_eq!(array.decommit(0..array.len()).unwrap(), 2);
        assert_eq!((array.stats().held, array.stats().mappings), (0, 0));
    }

    fn holes_are_zero_or_an_error_by_choice(rig) {
        let mut array = array(rig, 8);
        array.commit(PER_TILE..2 * PER_TILE).unwrap();
        array.commit(3 * PER_TILE..4 * PER_TILE).unwrap();
        let ones = vec![1; 8 * PER_TILE];
        let error = array.write(PER_TILE, &ones[..2 * PER_TILE], Holes::Refuse).unwrap_err();
        assert!(matches!(error, ContainerError::Uncommitted { first, .. } if first == 2 * PER_TILE));
        let error = array.read(0, &mut [0; 3], Holes::Refuse).unwrap_err();
        assert!(matches!(error, ContainerError::Uncommitted { first: 0, .. }));
        assert!(array.view(PER_TILE..2 * PER_TILE + 1).is_err());
        assert!(array.view_mut(PER_TILE + 1..2 * PER_TILE).is_ok());
        let mut seen = vec![7; 8 * PER_TILE];
        array.read(0, &mut seen, Holes::AsZero).unwrap();
        if rig.keeps_bytes() {
            assert!(seen.iter().all(|&n| n == 0), "a refused write writes nothing");
        }
        assert_eq!(array.write(0, &ones, Holes::AsZero).unwrap(), 2 * PER_TILE);
        array.read(0, &mut seen, Holes::AsZero).unwrap();
        if rig.keeps_bytes() {
            let sum: usize = seen.iter().map(|&n| n as usize).sum();
            assert_eq!((sum, seen[PER_TILE], seen[2 * PER_TILE], seen[3 * PER_TILE]), (2 * PER_TILE, 1, 0, 1));
        }
    }

    fn tiles_hold_whole_elements(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut array = SparseArray::<[f32; 3]>::builder(&rig.device, &stream, 4_000_000)
            .tile_bytes(G)
            .reserve()
            .unwrap();
        let tile = array.stats().tile_bytes;
        assert_eq!((tile, tile % 12, tile % G), (3 * G, 0, 0));
        let per_tile = tile as usize / 12;
        array.commit(per_tile - 1..per_tile + 1).unwrap();
        assert_eq!(array.stats().mappings, 4, "two granules, and one per tile");
        array.write(per_tile - 1, &[[1.0; 3], [2.0; 3]], Holes::Refuse).unwrap();
        assert_eq!(array.decommit(0..per_tile).unwrap(), 1);
        let mut seen = [[9.0; 3]; 2];
        array.read(per_tile - 1, &mut seen, Holes::AsZero).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(seen, [[0.0; 3], [2.0; 3]]);
        }
        let last = array.tiles().last().unwrap().elements;
        assert_eq!(last, per_tile..2 * per_tile);
        let odd = SparseArray::<[[u8; 31]; 31]>::builder(&rig.device, &stream, 100)
            .tile_bytes(G)
            .reserve();
        assert!(matches!(odd, Err(ContainerError::TileSize { tile: G, element: 961 })));
    }

    fn what_cannot_be_is_refused_and_changes_nothing(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let other = common::model();
        let stranger = Stream::new(&other.device).unwrap();
        let made = SparseArray::<u32>::new(&rig.device, &stranger, 8);
        assert!(matches!(made, Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))));
        let made = SparseArray::<()>::new(&rig.device, &stream, 8);
        assert!(matches!(
            made,
            Err(ContainerError::Argument(ArgumentError::Zero("bytes of the elements")))
        ));
        let made = SparseArray::<u64>::new(&rig.device, &stream, usize::MAX);
        assert!(matches!(
            made,
            Err(ContainerError::Argument(ArgumentError::Overflow { value: u64::MAX, .. }))
        ));
        let made = SparseArray::<u32>::new(&rig.device, &stream, 0);
        assert!(matches!(
            made,
            Err(ContainerError::Argument(ArgumentError::Zero("bytes of the elements")))
        ));
        let made = SparseArray::<u32>::builder(&rig.device, &stream, 8).tile_bytes(0).reserve();
        assert!(matches!(made, Err(ContainerError::TileSize { tile: 0, .. })));
        let mut array = array(rig, 4);
        rig.faults.forget();
        #[allow(clippy::reversed_empty_ranges)]
        for range in [0..0, 5..4, 0..4 * PER_TILE + 1, usize::MAX..usize::MAX] {
            let refused = [
                array.commit(range.clone()).map(|_| ()),
                array.back_with_zeros(range.clone()),
                array.remove_zeros(range.clone()).map(|_| ()),
            ];
            for refused in refused {
                assert!(matches!(
                    refused,
                    Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))
                ), "{range:?}");
            }
        }
        assert!(array.decommit(0..usize::MAX).is_err());
        assert!(array.read(4 * PER_TILE, &mut [0], Holes::AsZero).is_err());
        assert!(array.write(usize::MAX, &[0, 0], Holes::AsZero).is_err());
        assert!(matches!(
            array.record_use(&stranger),
            Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))
        ));
        assert_eq!((rig.faults.total(), array.stats().held), (0, 0));
    }

    fn what_is_given_up_waits_for_the_streams_and_comes_back_as_zero(rig) {
        let mut array = array(rig, 8);
        let user = Stream::new(&rig.device).unwrap();
        array.record_use(&user).unwrap();
        array.commit(0..2 * PER_TILE).unwrap();
        array.write(0, &[5; 8], Holes::Refuse).unwrap();
        rig.held_kernel(&user, &[], &[(array.address(), 2 * G, 1)]);
        assert_eq!(array.decommit(0..2 * PER_TILE).unwrap(), 2);
        assert_eq!((array.stats().pending_free, array.stats().committed), (2 * G, 0));
        assert_eq!(array.purge().unwrap(), 0);
        // Other tiles need no wait.
        assert_eq!(array.commit(4 * PER_TILE..5 * PER_TILE).unwrap(), 1);
        rig.machine.release_all_streams(D0);
        assert_eq!(array.commit(0..PER_TILE).unwrap(), 1);
        let mut seen = [9; 8];
        array.read(0, &mut seen, Holes::Refuse).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(seen, [0; 8]);
        }
        assert!(rig.device.lost().is_none());
        assert_eq!(array.purge().unwrap(), G);
    }

    fn zeros_under_holes_let_kernels_read_and_not_write(rig) {
        let mut array = array(rig, 16);
        let home = array.home_stream().as_raw();
        array.commit(5 * PER_TILE..6 * PER_TILE).unwrap();
        array.back_with_zeros(0..16 * PER_TILE).unwrap();
        let stats = array.stats();
        assert_eq!((stats.zero_backed, stats.committed), (15 * G, G));
        // 5 tiles as 4 and 1, and 10 as 4, 4 and 2, over one physical per size.
        assert_eq!((stats.mappings, stats.held), (1 + 5, G + 7 * G));
        rig.machine.queue_kernel(D0, home, vec![(array.address(), 16 * G)], vec![]).unwrap();
        let mut seen = [9; 4];
        array.read(1, &mut seen, Holes::AsZero).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(seen, [0; 4]);
        }
        // A commit waits for readers of the zeros that it replaces.
        rig.machine.queue_kernel(D0, home, vec![(array.address(), 16 * G)], vec![]).unwrap();
        assert_eq!(array.commit(PER_TILE..2 * PER_TILE).unwrap(), 1);
        assert_eq!((array.stats().zero_backed, array.stats().committed_tiles), (14 * G, 2));
        rig.machine.queue_kernel(D0, home, vec![(array.address(), 16 * G)], vec![]).unwrap();
        array.home_stream().synchronize().unwrap();
        assert_eq!(array.decommit(PER_TILE..2 * PER_TILE).unwrap(), 1);
        array.back_with_zeros(PER_TILE..PER_TILE + 1).unwrap();
        assert_eq!(array.stats().zero_backed, 15 * G);
        assert_eq!(array.remove_zeros(8 * PER_TILE..16 * PER_TILE).unwrap(), 8 * G);
        rig.machine.queue_kernel(D0, home, vec![], vec![(array.address(), 4, 1)]).unwrap();
        assert!(array.home_stream().synchronize().is_err(), "a stray write faults");
    }

    fn a_commit_over_zeros_in_use_is_refused_before_it_makes_anything(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = Region::builder(&rig.device, 16 * G).reserve().unwrap();
        region.back_with_zeros(0..16 * G).unwrap();
        rig.held_kernel(&stream, &[(region.address(), 16 * G)], &[]);
        let before = (rig.machine.live(), region.held(), region.mappings());
        rig.faults.forget();
        let refused = region.commit_after(0..7 * G, std::slice::from_ref(&stream));
        let made = [Call::MemCreate, Call::MemRelease, Call::MemUnmap];
        let made = made.map(|call| rig.faults.count(call));
        let after = (rig.machine.live(), region.held(), region.mappings());
        rig.machine.release_all_streams(D0);
        assert!(matches!(
            refused,
            Err(MemoryError::PendingFree { ref range, .. }) if *range == (0..7 * G)
        ), "{refused:?}");
        assert_eq!(made, [0; 3]);
        assert_eq!((after.1, after.2), (before.1, before.2));
        assert_eq!(after.0.physicals, before.0.physicals);
        region.commit_after(0..7 * G, std::slice::from_ref(&stream)).unwrap();
    }

    fn streams_that_are_gone_and_done_are_forgotten(rig) {
        let mut array = array(rig, 8);
        let home = rig.machine.live().streams;
        let (kept, busy) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        array.commit(0..8 * PER_TILE).unwrap();
        array.record_use(&kept).unwrap();
        array.record_use(&busy).unwrap();
        rig.held_kernel(&busy, &[], &[(array.address(), 8 * G, 1)]);
        drop(busy);
        for _ in 0..1000 {
            array.record_use(&Stream::new(&rig.device).unwrap()).unwrap();
            array.record_use(&kept).unwrap();
        }
        let streams = rig.machine.live().streams - home;
        let named: Vec<_> = array.view(0..1).unwrap().streams().cloned().collect();
        // Work on a decommitted tile is waited for as before.
        array.decommit(0..8 * PER_TILE).unwrap();
        let pending_free = array.stats().pending_free;
        rig.machine.release_all_streams(D0);
        assert!(streams <= 34, "{streams} streams are kept alive");
        assert!(named.contains(&kept), "the stream may still be in use");
        assert_eq!(named.len(), streams + 1, "each stream once, and the home stream");
        assert_eq!(pending_free, 8 * G);
        assert_eq!(array.purge().unwrap(), 8 * G);
        assert!(rig.device.lost().is_none());
    }

    fn zeros_count_against_the_mappings(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut array = SparseArray::<u32>::builder(&rig.device, &stream, 1 << 38)
            .tile_bytes(G)
            .zero_extent(4 * G)
            .mapping_limit(1000)
            .reserve()
            .unwrap();
        let error = array.back_with_zeros(0..1 << 38).unwrap_err();
        assert!(matches!(
            error,
            ContainerError::Memory(MemoryError::Mappings { needed, held: 0, limit: 1000 })
                if needed == (1 << 40) / (4 * G)
        ), "{error}");
        assert_eq!((array.stats().mappings, array.stats().held), (0, 0));
        assert_eq!(array.stats().mapping_limit, 1000);
    }

    fn tiles_may_lie_on_several_devices(rig) {
        let second = rig.second();
        let stream = Stream::new(&rig.device).unwrap();
        let mut array = SparseArray::<u32>::builder(&rig.device, &stream, 8 * PER_TILE)
            .tile_bytes(G)
            .places([Place::from(&rig.device), Place::from(&second)])
            .reserve()
            .unwrap();
        let before = second.memory_info().unwrap().free;
        array.commit(0..8 * PER_TILE).unwrap();
        assert_eq!(before - second.memory_info().unwrap().free, 4 * G);
    }

    fn every_call_may_fail_once(rig) {
        for code in [CUresult::CUDA_ERROR_OUT_OF_MEMORY, CUresult::CUDA_ERROR_UNKNOWN] {
            for k in 1..200 {
                let mut array = array(rig, 16);
                array.commit(2 * PER_TILE..4 * PER_TILE).unwrap();
                array.write(2 * PER_TILE, &[8; 4], Holes::Refuse).unwrap();
                array.back_with_zeros(6 * PER_TILE..14 * PER_TILE).unwrap();
                let before = array.stats();
                rig.faults.forget();
                // Drops may fail, and so may putting zeros back; those calls are not failed here.
                rig.faults.arm(common::nth_of(k, code, &[
                    Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::StreamSynchronize,
                    Call::StreamQuery, Call::EventRecord,
                ]));
                let outcome = array.commit(0..10 * PER_TILE);
                let hit = rig.faults.injected() > 0;
                rig.faults.disarm();
                if let Err(error) = outcome {
                    let after = array.stats();
                    // Physicals of zeros may have been created for sizes that were then not needed.
                    assert_eq!(
                        (after.committed, after.mappings, after.zero_backed, after.pending_free),
                        (before.committed, before.mappings, before.zero_backed, before.pending_free),
                        "{k}: {error}"
                    );
                    assert_eq!(array.commit(0..10 * PER_TILE).unwrap(), 8);
                }
                let mut seen = [0; 4];
                array.read(2 * PER_TILE, &mut seen, Holes::Refuse).unwrap();
                if rig.keeps_bytes() {
                    assert_eq!(seen, [8; 4]);
                }
                assert_eq!((array.stats().committed, array.stats().zero_backed), (10 * G, 4 * G));
                drop(array);
                let live = rig.machine.live();
                assert_eq!((live.physicals, live.mappings, live.reservations), (0, 0, 0), "{k}");
                if !hit {
                    assert!(k > 20, "{k}");
                    break;
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Commit(usize, usize),
    Decommit(usize, usize),
    Write(usize, usize),
    Zeros(usize, usize),
    NoZeros(usize, usize),
}

const TILES: usize = 12;

fn step() -> impl Strategy<Value = Step> {
    let run = || (0..TILES * PER_TILE, 1..4 * PER_TILE);
    prop_oneof![
        run().prop_map(|(at, count)| Step::Commit(at, count)),
        run().prop_map(|(at, count)| Step::Decommit(at, count)),
        run().prop_map(|(at, count)| Step::Write(at, count)),
        run().prop_map(|(at, count)| Step::Zeros(at, count)),
        run().prop_map(|(at, count)| Step::NoZeros(at, count)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(48), ..ProptestConfig::default() })]

    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn it_holds_what_a_plain_array_with_holes_would(steps in prop::collection::vec(step(), 1..16)) {
        let rig = common::clean(common::host());
        let mut array = array(&rig, TILES);
        let nothing = common::filled(0u32, PER_TILE);
        let mut known = common::filled(0u32, array.len());
        let mut has = [false; TILES];
        let mut zeros = [false; TILES];
        let clip = |at: usize, count: usize| at..(at + count).min(TILES * PER_TILE);
        let touched = |at: usize, count: usize| {
            let range = clip(at, count);
            range.start / PER_TILE..range.end.div_ceil(PER_TILE)
        };
        for (number, step) in steps.iter().enumerate() {
            match *step {
                Step::Commit(at, count) => {
                    let new = touched(at, count).filter(|&tile| !has[tile]).count();
                    assert_eq!(array.commit(clip(at, count)).unwrap(), new);
                    touched(at, count).for_each(|tile| (has[tile], zeros[tile]) = (true, false));
                }
                Step::Decommit(at, count) => {
                    let range = clip(at, count);
                    let whole = range.start.div_ceil(PER_TILE)..range.end / PER_TILE;
                    let gone = whole.clone().filter(|&tile| has[tile]).count();
                    assert_eq!(array.decommit(range).unwrap(), gone);
                    for tile in whole {
                        has[tile] = false;
                        known[tile * PER_TILE..(tile + 1) * PER_TILE].copy_from_slice(&nothing);
                    }
                }
                Step::Write(at, wanted) => {
                    let range = clip(at, wanted);
                    let value = number as u32 + 1;
                    let elements = common::filled(value, range.len());
                    let mut count = 0;
                    for tile in touched(at, wanted).filter(|&tile| has[tile]) {
                        let start = range.start.max(tile * PER_TILE);
                        let here = start..range.end.min((tile + 1) * PER_TILE);
                        count += here.len();
                        known[here.clone()].copy_from_slice(&elements[..here.len()]);
                    }
                    assert_eq!(array.write(at, &elements, Holes::AsZero).unwrap(), count);
                }
                Step::Zeros(at, count) => {
                    array.back_with_zeros(clip(at, count)).unwrap();
                    touched(at, count).for_each(|tile| zeros[tile] = !has[tile]);
                }
                Step::NoZeros(at, count) => {
                    let gone = touched(at, count).filter(|&tile| zeros[tile]).count() as u64;
                    assert_eq!(array.remove_zeros(clip(at, count)).unwrap(), gone * G);
                    touched(at, count).for_each(|tile| zeros[tile] = false);
                }
            }
            let stats = array.stats();
            let count = |which: &[bool]| which.iter().filter(|&&yes| yes).count();
            assert_eq!(stats.committed_tiles, count(&has));
            assert_eq!(stats.zero_backed, count(&zeros) as u64 * G);
            assert_eq!(stats.pending_free, 0);
            assert_eq!(committed(&array).len(), count(&has));
            let mut seen = common::filled(9, array.len());
            array.read(0, &mut seen, Holes::AsZero).unwrap();
            assert!(seen == known, "step {number}: {step:?}");
            // The device can read without a fault exactly the tiles with memory or zeros.
            let address = array.address();
            for tile in 0..TILES {
                let byte = cuvmm::driver::DeviceAddress(address.0 + tile as u64 * G);
                let readable = rig.machine.get_access(byte, rig.device.location()).is_ok();
                assert_eq!(readable, has[tile] || zeros[tile], "tile {tile}");
            }
        }
    }
}
