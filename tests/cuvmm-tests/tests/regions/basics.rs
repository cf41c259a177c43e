//! Regions: what a commit covers, what a decommit withdraws, and when memory is unmapped.

use crate::common;
use crate::common::{D0, G, GIB};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{ArgumentError, MemoryError};
use cuvmm::{Region, Stream};

fn sizes(region: &Region) -> Vec<(u64, u64)> {
    region
        .extents()
        .iter()
        .map(|extent| (extent.offset / G, extent.size / G))
        .collect()
}

on_both! {
    // I-84
    fn a_commit_takes_few_and_large_extents(rig) {
        let mut region = Region::reserve(&rig.device, 64 * G).unwrap();
        assert_eq!((region.committed(), region.held()), (0, 0));
        region.commit(0..13 * G).unwrap();
        assert_eq!(sizes(&region), [(0, 8), (8, 4), (12, 1)]);
        assert_eq!(rig.faults.count(Call::MemCreate), 3);
        // Committed parts keep their memory; only the gap is filled.
        region.commit(10 * G..16 * G).unwrap();
        assert_eq!(sizes(&region), [(0, 8), (8, 4), (12, 1), (13, 2), (15, 1)]);
        assert!(region.is_committed(0..16 * G) && !region.is_committed(0..16 * G + 1));
        assert_eq!(region.committed(), 16 * G);
    }

    fn the_largest_extent_bounds_them(rig) {
        let region = common::committed(Region::builder(&rig.device, 8 * G).largest_extent(2 * G), 7 * G);
        assert_eq!(sizes(&region), [(0, 2), (2, 2), (4, 2), (6, 1)]);
        for largest in [0, G / 2, 3 * G] {
            let refused = Region::builder(&rig.device, G).largest_extent(largest).reserve();
            let (what, value) = ("bytes of an extent", largest);
            let expected = match largest.is_power_of_two() {
                true => ArgumentError::Misaligned { what, value, multiple: G },
                false => ArgumentError::NotPowerOfTwo { what, value },
            };
            assert_eq!(refused.err(), Some(expected.into()));
        }
    }

    fn growth_goes_on_from_the_first_gap(rig) {
        let mut region = Region::reserve(&rig.device, 16 * G).unwrap();
        // Beyond what is needed a step, here half as much or more as is there before the gap.
        assert_eq!(region.grow_to(3 * G).unwrap(), 3 * G);
        region.commit(8 * G..9 * G).unwrap();
        assert_eq!(region.grow_to(2 * G).unwrap(), 3 * G, "nothing to do");
        assert_eq!(region.grow_to(4 * G).unwrap(), 5 * G);
        region.commit(9 * G..10 * G).unwrap();
        assert_eq!(region.grow_to(6 * G).unwrap(), 10 * G, "the memory behind the gap counts");
        for (size, kind) in [(0, "empty"), (G + 1, "off"), (17 * G, "out")] {
            let refused = match region.grow_to(size) {
                Err(MemoryError::Argument(ArgumentError::Empty { .. })) => "empty",
                Err(MemoryError::Argument(ArgumentError::MisalignedRange { .. })) => "off",
                Err(MemoryError::Argument(ArgumentError::OutOfRange { .. })) => "out",
                other => panic!("{size}: {other:?}"),
            };
            assert_eq!(refused, kind, "{size}");
        }
        assert_eq!(region.committed(), 10 * G);
        // Where memory is short, only what is needed.
        rig.faults.arm(Fault::nth(1, CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(Call::MemCreate));
        assert_eq!(region.grow_to(13 * G).unwrap(), 13 * G);
        rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(Call::MemCreate));
        assert!(region.grow_to(14 * G).is_err());
        assert_eq!(region.committed(), 13 * G);
    }

    fn ranges_that_cannot_be_are_refused(rig) {
        let mut region = common::region(rig, 8 * G, 2 * G);
        rig.faults.forget();
        #[allow(clippy::reversed_empty_ranges)]
        let wrong = [
            (0..0, "empty"), (2 * G..G, "empty"), (0..G + 1, "off"), (1..G, "off"),
            (0..9 * G, "out"), (8 * G..9 * G, "out"), (0..!(G - 1), "out"),
        ];
        for (range, kind) in wrong {
            let error = match region.commit(range.clone()) {
                Err(error) => error,
                Ok(()) => panic!("{range:?}"),
            };
            let as_said = match error {
                MemoryError::Argument(ArgumentError::Empty { .. }) => kind == "empty",
                MemoryError::Argument(ArgumentError::MisalignedRange { .. }) => kind == "off",
                MemoryError::Argument(ArgumentError::OutOfRange { .. }) => kind == "out",
                _ => false,
            };
            assert!(as_said, "{range:?}: {error}");
            assert_eq!(region.decommit(range), Err(error));
        }
        assert!(matches!(region.decommit(0..3 * G), Err(MemoryError::NotCommitted { .. })));
        assert_eq!((rig.faults.total(), region.committed()), (0, 2 * G));
    }

    fn a_decommit_waits_in_limbo_for_the_stream_that_used_it(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::region(rig, 8 * G, 4 * G);
        rig.machine.hold(D0, stream.as_raw());
        let target = region.address();
        rig.kernel(&stream, &[], &[(target, 4 * G, 7)]);
        rig.faults.forget();
        region.decommit_after(0..4 * G, std::slice::from_ref(&stream)).unwrap();
        assert_eq!(rig.faults.total(), 0, "a decommit makes no driver call");
        assert_eq!((region.committed(), region.pending_free(), region.held()), (0, 4 * G, 4 * G));
        assert_eq!(region.purge().unwrap().given_back, 0, "the kernel has not run");
        assert_eq!(rig.machine.live().mappings, 1);
        rig.machine.release_stream(D0, stream.as_raw());
        assert_eq!(region.purge().unwrap().given_back, 4 * G);
        assert_eq!((region.pending_free(), region.held(), rig.machine.live().mappings), (0, 0, 0));
        stream.synchronize().unwrap();
    }

    fn without_streams_all_work_of_the_device_counts(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::region(rig, 8 * G, G);
        rig.held_kernel(&stream, &[], &[]);
        region.decommit(0..G).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 0);
        rig.machine.release_all_streams(D0);
        assert_eq!(region.purge().unwrap().given_back, G);
    }

    fn a_driver_without_context_events_needs_a_synchronisation(rig) {
        let mut region = common::region(rig, 8 * G, G);
        region.decommit(0..G).unwrap();
        let lacking = Fault::all(CUresult::CUDA_ERROR_NOT_SUPPORTED).of(Call::CtxRecordEvent);
        rig.faults.arm(lacking);
        assert_eq!(region.purge().unwrap().given_back, 0);
        assert_eq!(region.purge_blocking().unwrap().given_back, G);
        rig.faults.disarm();
    }

    fn committing_again_revives_without_a_driver_call(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::region(rig, 8 * G, 4 * G);
        region.write(&stream, 5, b"kept").unwrap();
        region.decommit_after(0..4 * G, std::slice::from_ref(&stream)).unwrap();
        assert!(matches!(region.write(&stream, 0, b"x"), Err(MemoryError::NotCommitted { .. })));
        rig.faults.forget();
        region.commit(0..4 * G).unwrap();
        assert_eq!((rig.faults.total(), region.pending_free()), (0, 0));
        assert_eq!(region.purge().unwrap().given_back, 0, "committed memory is not reclaimed");
        let mut seen = [0; 4];
        region.read(&stream, 5, &mut seen).unwrap();
        rig.shows(&seen, b"kept");
    }

    fn an_extent_goes_when_its_last_part_has(rig) {
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let mut region = common::region(rig, 8 * G, 4 * G);
        rig.held_kernel(&one, &[], &[]);
        region.decommit_after(0..G, std::slice::from_ref(&one)).unwrap();
        assert_eq!((region.committed(), region.held(), region.pending_free()), (3 * G, 4 * G, 0));
        region.decommit_after(G..4 * G, std::slice::from_ref(&two)).unwrap();
        assert_eq!(region.pending_free(), 4 * G);
        // The first part was used on a stream that is still busy, so the whole extent waits for it.
        assert_eq!(region.purge().unwrap().given_back, 0);
        rig.machine.release_all_streams(D0);
        assert_eq!(region.purge().unwrap().given_back, 4 * G);
    }

    fn dropping_a_region_waits_for_the_device(rig) {
        let mut region = Region::reserve(&rig.device, 8 * G).unwrap();
        region.commit(2 * G..4 * G).unwrap();
        rig.faults.forget();
        drop(region);
        let calls = rig.faults.calls();
        let at = |call| calls.iter().position(|&made| made == call);
        assert!(at(Call::CtxSynchronize) < at(Call::MemUnmap), "{calls:?}");
    }
}

#[test]
fn out_of_memory_in_the_middle_changes_nothing() {
    let rig = common::clean(common::rig(cuvmm::driver::model::ModelDriver::new(
        common::model_options().capacity(10 * G),
    )));
    let mut region = common::region(&rig, GIB, 2 * G);
    let before = rig.machine.snapshot();
    let error = region.commit(0..14 * G).unwrap_err();
    assert!(error.call().unwrap().is_out_of_memory(), "{error}");
    assert_eq!(rig.machine.snapshot(), before);
    assert_eq!(region.committed(), 2 * G);
    region.commit(0..10 * G).unwrap();
}
