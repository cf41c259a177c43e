//! Locations of a region's memory, and access to it: layouts, grants, memory that moves under its
//! addresses, host memory beside device memory.

use std::collections::HashMap;

use crate::common;
use crate::common::{D0, D1, G};
use crate::on_both;
use cuvmm::driver::Driver;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call, Location};
use cuvmm::error::{ArgumentError, MemoryError};
use cuvmm::{Access, HostExtents, Layout, Place, Region, Stream};

/// The calls that a move makes.
const MOVES: [Call; 12] = [
    Call::CtxSynchronize,
    Call::MemCreate,
    Call::MemAddressReserve,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemcpyDtoDAsync,
    Call::StreamSynchronize,
    Call::ThreadExchangeStreamCaptureMode,
    Call::MemUnmap,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventSynchronize,
];

/// Returns offset and size in granules and the location of each extent.
fn lie(region: &Region) -> Vec<(u64, u64, Location)> {
    let one = |extent: &cuvmm::Extent| (extent.offset / G, extent.size / G, extent.location);
    region.extents().iter().map(one).collect()
}

const ON_0: Location = Location::device(D0);
const ON_1: Location = Location::device(D1);

on_both! {
    fn stripes_lie_on_each_device_in_turn(rig) {
        let second = rig.second();
        let stripes = [Place::from(&rig.device), Place::from(&second)];
        let layout = Layout::round_robin(stripes, 2 * G);
        let mut region = Region::builder(&rig.device, 16 * G).layout(layout).reserve().unwrap();
        region.commit(G..7 * G).unwrap();
        assert_eq!(lie(&region), [(1, 1, ON_0), (2, 2, ON_1), (4, 2, ON_0), (6, 1, ON_1)]);
        // The layout applies to later commits too.
        region.commit(0..8 * G).unwrap();
        assert_eq!(lie(&region)[0], (0, 1, ON_0));
        assert_eq!(lie(&region)[5], (7, 1, ON_1));
        let (one, two) = (Stream::new(&rig.device).unwrap(), Stream::new(&second).unwrap());
        region.write(&one, 2 * G - 3, b"across").unwrap();
        let mut seen = [0; 6];
        let refused = region.read(&two, 2 * G - 3, &mut seen);
        assert!(matches!(refused, Err(MemoryError::Argument(ArgumentError::WrongDevice { .. }))), "it has no access");
        region.grant(&second, Access::Read).unwrap();
        region.read(&two, 2 * G - 3, &mut seen).unwrap();
        rig.shows(&seen, b"across");
        assert!(region.write(&two, 0, b"x").is_err(), "it may only read");
        region.grant(&second, Access::ReadWrite).unwrap();
        region.write(&two, 0, b"x").unwrap();
    }

    fn shares_lie_one_after_the_other(rig) {
        let second = rig.second();
        let shares = [(Place::from(&rig.device), 3 * G), (Place::from(&second), 2 * G), (Place::HostNuma(1), G)];
        let region = common::committed(Region::builder(&rig.device, 8 * G)
            .layout(Layout::shares(shares)), 8 * G);
        let node = Location::host_numa(1);
        assert_eq!(
            lie(&region),
            [(0, 2, ON_0), (2, 1, ON_0), (3, 2, ON_1), (5, 2, node), (7, 1, node)]
        );
    }

    fn a_place_is_one_key_however_its_device_was_opened(rig) {
        let (second, again, stranger) = (rig.second(), rig.second(), common::model());
        #[allow(clippy::mutable_key_type, reason = "what a place is compared by never changes")]
        let mut bytes: HashMap<Place, u64> = HashMap::new();
        for device in [&rig.device, &second, &again, &stranger.device] {
            *bytes.entry(Place::from(device)).or_default() += G;
        }
        for node in [0, 1, 0] {
            *bytes.entry(Place::HostNuma(node)).or_default() += G;
        }
        assert_eq!(bytes.len(), 5);
        assert_eq!(bytes[&Place::from(&again)], 2 * G);
        assert_eq!(bytes[&Place::HostNuma(0)], 2 * G);
    }

    fn layouts_that_cannot_be_are_refused(rig) {
        let (second, stranger) = (rig.second(), common::model());
        let refused = |layout| match Region::builder(&rig.device, 8 * G).layout(layout).reserve() {
            Err(error) => error,
            Ok(region) => panic!("{region:?}"),
        };
        let here = || Place::from(&rig.device);
        rig.faults.forget();
        assert!(matches!(refused(Layout::round_robin([], G)), MemoryError::Argument(ArgumentError::Zero { .. })));
        assert!(matches!(refused(Layout::shares([])), MemoryError::Argument(ArgumentError::Zero { .. })));
        for unit in [0, 1, G + 1] {
            let (what, multiple) = ("bytes of a stripe or share", G);
            let expected = MemoryError::Argument(match unit {
                0 => ArgumentError::Zero(what),
                value => ArgumentError::Misaligned { what, value, multiple },
            });
            assert_eq!(refused(Layout::round_robin([here()], unit)), expected);
            assert_eq!(refused(Layout::shares([(here(), G), (here(), unit)])), expected);
        }
        let error = refused(Layout::on(&stranger.device));
        assert!(matches!(error, MemoryError::Argument(ArgumentError::WrongDriver { .. })));
        assert_eq!(rig.faults.total(), 0, "refused before any driver call");
        assert!(rig.device.can_reach(&second).unwrap() && rig.device.can_reach(&rig.device).unwrap());
        assert!(!rig.device.can_reach(&stranger.device).unwrap());
    }

    fn access_is_granted_when_asked_for_and_taken_when_idle(rig) {
        let second = rig.second();
        let stream = Stream::new(&second).unwrap();
        let mut region = common::region(rig, 8 * G, 3 * G);
        assert_eq!((region.access_of(&rig.device), region.access_of(&second)), (Access::ReadWrite, Access::None));
        rig.faults.forget();
        region.grant(&second, Access::ReadWrite).unwrap();
        assert_eq!(rig.faults.count(Call::MemSetAccess), 2, "one for each extent");
        assert_eq!(region.access_of(&second), Access::ReadWrite);
        assert!(matches!(region.grant(&second, Access::Read), Err(MemoryError::Access(ON_1))));
        assert!(matches!(region.grant(&second, Access::None), Err(MemoryError::Access(ON_1))));
        assert!(matches!(region.grant(&rig.device, Access::Read), Err(MemoryError::Access(ON_0))));
        assert!(matches!(region.revoke(&rig.device), Err(MemoryError::Access(ON_0))));
        assert!(matches!(
            region.revoke(&common::model().device),
            Err(MemoryError::Argument(ArgumentError::WrongDriver { .. }))
        ));

        // Memory committed later is accessible to it as well.
        region.commit(3 * G..4 * G).unwrap();
        rig.machine.hold(D1, stream.as_raw());
        let all = (region.address(), 4 * G, 7);
        rig.machine.queue_kernel(D1, stream.as_raw(), vec![], vec![all]).unwrap();
        assert!(matches!(region.revoke(&second), Err(MemoryError::InUse(ON_1))));
        // A decommit waits for every device with access.
        region.decommit(0..2 * G).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 0);
        rig.machine.release_all_streams(D1);
        assert_eq!(region.purge().unwrap().given_back, 2 * G);
        region.revoke(&second).unwrap();
        assert_eq!(region.access_of(&second), Access::None);
        assert!(second.lost().is_none() && rig.device.lost().is_none());
        let used = region.decommit_after(2 * G..4 * G, &[stream]);
        assert!(matches!(used, Err(MemoryError::Argument(ArgumentError::WrongDevice { .. }))));
        region.grant(&second, Access::Read).unwrap();
        region.revoke_blocking(&second).unwrap();
        assert_eq!(region.access_of(&second), Access::None);
    }

    fn a_grant_that_fails_grants_nothing(rig) {
        let second = rig.second();
        let stream = Stream::new(&second).unwrap();
        let mut region = common::committed(Region::builder(&rig.device, 8 * G).largest_extent(G), 3 * G);
        region.back_with_zeros(3 * G..5 * G).unwrap();
        for k in 1..=4 {
            let fault = Fault::nth(k, CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(Call::MemSetAccess);
            rig.faults.arm(fault);
            assert!(region.grant(&second, Access::ReadWrite).is_err(), "{k}");
            rig.faults.disarm();
            rig.faults.forget();
            assert_eq!(region.access_of(&second), Access::None);
            for granule in 0..5 {
                let mut byte = [0];
                assert!(region.read(&stream, granule * G, &mut byte).is_err());
            }
        }
        region.grant(&second, Access::Read).unwrap();
        assert!(rig.faults.count(Call::MemSetAccess) > 0);
        for k in 1..=3 {
            let fault = Fault::nth(k, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemSetAccess);
            rig.faults.arm(fault);
            assert!(region.revoke(&second).is_err(), "{k}");
            rig.faults.disarm();
            rig.faults.forget();
            assert_eq!(region.access_of(&second), Access::Read);
            region.read(&stream, 2 * G, &mut [0]).unwrap();
        }
        region.revoke(&second).unwrap();
    }

    fn host_memory_lies_in_the_same_range_and_the_host_reaches_it(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::region(rig, 8 * G, 2 * G);
        region.commit_at(2 * G..4 * G, &Place::HostNuma(0)).unwrap();
        assert_eq!(lie(&region), [(0, 2, ON_0), (2, 2, Location::host_numa(0))]);
        // No single copy or fill crosses the boundary, on which the real driver crashes.
        rig.faults.forget();
        region.fill(&stream, G..3 * G, 4).unwrap();
        region.write(&stream, 2 * G - 2, b"spill").unwrap();
        let mut seen = [0; 7];
        region.read(&stream, 2 * G - 3, &mut seen).unwrap();
        rig.shows(&seen, b"\x04spill\x04");
        let calls = [Call::MemsetD8Async, Call::MemcpyHtoDAsync, Call::MemcpyDtoHAsync];
        assert_eq!(calls.map(|call| rig.faults.count(call)), [2, 2, 2]);
        let error = region.host_pointer(2 * G - 1..2 * G + 1).unwrap_err();
        assert!(matches!(error, MemoryError::Elsewhere { offset: 0, found: ON_0, wanted: Location::HOST }));
        assert!(matches!(region.host_pointer(4 * G..5 * G), Err(MemoryError::NotCommitted { .. })));
        let pointer = region.host_pointer(2 * G..4 * G).unwrap();
        assert_eq!(pointer.addr() as u64, region.address().0 + 2 * G);
        let nowhere = region.commit_at(4 * G..5 * G, &Place::HostNuma(-1));
        assert!(matches!(nowhere, Err(MemoryError::Argument(ArgumentError::NoSuch { number: -1, .. }))));
        assert!(region.commit_at(4 * G..5 * G, &Place::HostNuma(2)).is_err());
        assert_eq!(region.committed(), 4 * G);
    }

    fn bytes_are_copied_within(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let region = common::region(rig, 8 * G, 4 * G);
        region.write(&stream, 10, b"abc").unwrap();
        region.copy_within(&stream, 10..13, 3 * G - 1).unwrap();
        let mut seen = [0; 3];
        region.read(&stream, 3 * G - 1, &mut seen).unwrap();
        rig.shows(&seen, b"abc");
        rig.faults.forget();
        for to in [8, 10, 12] {
            let refused = region.copy_within(&stream, 10..13, to);
            assert!(matches!(refused, Err(MemoryError::Overlap { offset: 10, size: 3, .. })), "{to}");
        }
        let refused = region.copy_within(&stream, 0..G, 4 * G);
        assert!(matches!(refused, Err(MemoryError::NotCommitted { .. })));
        let refused = region.copy_within(&stream, 7 * G..9 * G, 0);
        assert!(matches!(refused, Err(MemoryError::Argument(ArgumentError::OutOfRange { .. }))));
        region.copy_within(&stream, 5..5, 5).unwrap();
        assert_eq!(rig.faults.total(), 0);
    }

    fn copies_between_regions_are_split_by_device(rig) {
        let second = rig.second();
        let stream = Stream::new(&rig.device).unwrap();
        let places = [Place::from(&rig.device), Place::from(&second)];
        let layout = Layout::round_robin(places, 2 * G);
        let mut striped = Region::builder(&rig.device, 8 * G).layout(layout).reserve().unwrap();
        let mut plain = Region::reserve(&rig.device, 8 * G).unwrap();
        striped.commit(0..8 * G).unwrap();
        plain.commit(0..8 * G).unwrap();
        let bytes: Vec<u8> = (0..5 * G).map(|byte| (byte / 1000) as u8).collect();
        striped.write(&stream, G, &bytes).unwrap();
        rig.faults.forget();
        plain.copy_from(&stream, 3 * G, &striped, G..6 * G).unwrap();
        assert_eq!(rig.faults.count(Call::MemcpyDtoDAsync), 3, "1, 2 and 2 granules");
        // Two striped regions whose boundaries differ.
        striped.copy_from(&stream, 0, &plain, 3 * G..8 * G).unwrap();
        assert_eq!(rig.faults.count(Call::MemcpyDtoDAsync), 6);
        let mut seen = vec![0; bytes.len()];
        striped.read(&stream, 0, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert!(seen == bytes);
        }
        let strange = common::model();
        let other = Stream::new(&strange.device).unwrap();
        let refused = plain.copy_from(&other, 0, &striped, 0..G);
        assert!(matches!(refused, Err(MemoryError::Argument(ArgumentError::WrongDevice { .. }))));
    }

    fn memory_moves_under_its_addresses(rig) {
        let second = rig.second();
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::committed(Region::builder(&rig.device, 8 * G).largest_extent(2 * G), 4 * G);
        region.write(&stream, 2 * G - 3, b"abcdef").unwrap();
        let free = rig.device.memory_info().unwrap().free;
        let host = Place::HostNuma(0);
        assert_eq!(region.relocate(0..2 * G, &host, &stream).unwrap(), 2 * G);
        assert_eq!(lie(&region), [(0, 2, Location::host_numa(0)), (2, 2, ON_0)]);
        assert_eq!(rig.device.memory_info().unwrap().free, free + 2 * G);
        assert_eq!(
            region.relocate(0..4 * G, &host, &stream).unwrap(), 2 * G,
            "existing memory stays"
        );
        assert_eq!(region.relocate(0..4 * G, &Place::from(&second), &stream).unwrap(), 4 * G);
        assert_eq!(lie(&region), [(0, 2, ON_1), (2, 2, ON_1)]);
        if rig.keeps_bytes() {
            let mut seen = [0; 6];
            region.read(&stream, 2 * G - 3, &mut seen).unwrap();
            assert_eq!(&seen, b"abcdef");
        }
        let cut = region.relocate(G..4 * G, &host, &stream);
        assert!(matches!(cut, Err(MemoryError::CutsExtent(extent)) if extent == (0..2 * G)));
        let beyond = region.relocate(0..6 * G, &host, &stream);
        assert!(matches!(beyond, Err(MemoryError::NotCommitted { .. })));
        assert!(matches!(
            region.relocate(0..0, &host, &stream),
            Err(MemoryError::Argument(ArgumentError::Empty { start: 0, end: 0, .. }))
        ));
        let stranger = Stream::new(&second).unwrap();
        assert!(matches!(
            region.relocate(0..G, &host, &stranger),
            Err(MemoryError::Argument(ArgumentError::WrongDevice { .. }))
        ));
    }

    fn moving_waits_for_all_who_may_use_the_memory(rig) {
        let second = rig.second();
        let stream = Stream::new(&rig.device).unwrap();
        let user = Stream::new(&second).unwrap();
        let mut region = common::committed(Region::builder(&rig.device, 2 * G)
            .open_to(&second, Access::ReadWrite), 2 * G);
        rig.machine.queue_kernel(D1, user.as_raw(), vec![], vec![(region.address(), 2 * G, 9)]).unwrap();
        rig.faults.forget();
        region.relocate(0..2 * G, &Place::HostNuma(0), &stream).unwrap();
        assert_eq!(rig.faults.count(Call::CtxSynchronize), 2);
        if rig.keeps_bytes() {
            let mut seen = [0; 2];
            region.read(&stream, 2 * G - 2, &mut seen).unwrap();
            assert_eq!(seen, [9; 2]);
        }
    }

    fn a_move_that_fails_moves_nothing(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        for code in [CUresult::CUDA_ERROR_OUT_OF_MEMORY, CUresult::CUDA_ERROR_UNKNOWN] {
            for k in 1.. {
                let mut region = common::committed(Region::builder(&rig.device, 4 * G).largest_extent(2 * G), 4 * G);
                region.write(&stream, 2 * G - 2, b"kept").unwrap();
                let before = lie(&region);
                rig.faults.forget();
                // Calls of drops are left out: their failure may leave memory mapped.
                rig.faults.arm(common::nth_of(k, code, &MOVES));
                let moved = region.relocate(0..4 * G, &Place::HostNuma(0), &stream);
                let (hit, calls) = (rig.faults.injected() > 0, rig.faults.calls());
                rig.faults.disarm();
                if let Err(error) = &moved {
                    assert!(!matches!(error, MemoryError::Lost { .. }));
                    assert_eq!(lie(&region), before, "{k}: {error}\n{calls:?}");
                    if rig.keeps_bytes() {
                        let mut seen = [0; 4];
                        region.read(&stream, 2 * G - 2, &mut seen).unwrap();
                        assert_eq!(&seen, b"kept");
                    }
                    region.relocate(0..4 * G, &Place::HostNuma(0), &stream).unwrap();
                }
                assert!(region.extents().iter().all(|extent| extent.location == Location::host_numa(0)));
                region.close().unwrap();
                let live = rig.machine.live();
                assert_eq!((live.physicals, live.mappings), (0, 0), "{k}: {calls:?}");
                if !hit {
                    assert!(k > 15, "{k}");
                    break;
                }
            }
        }
    }

    fn every_call_of_a_move_may_fail_from_then_on(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        for down in [true, false] {
            for k in 1.. {
                let mut region = Region::builder(&rig.device, 12 * G).largest_extent(2 * G).reserve().unwrap();
                let (here, there) = match down {
                    true => (Place::from(&rig.device), Place::HostNuma(0)),
                    false => (Place::HostNuma(0), Place::from(&rig.device)),
                };
                region.commit_at(0..12 * G, &here).unwrap();
                for granule in 0..12 {
                    region.write(&stream, granule * G, &[granule as u8 + 1; 4]).unwrap();
                }
                rig.faults.forget();
                rig.faults.arm(MOVES.iter().fold(Fault::from(k, CUresult::CUDA_ERROR_UNKNOWN), |fault, &call| fault.of(call)));
                let moved = region.relocate(0..12 * G, &there, &stream);
                let (hit, calls) = (rig.faults.injected() > 0, rig.faults.calls());
                rig.faults.disarm();
                assert_eq!(moved.is_err(), hit, "{k}: {calls:?}");
                let lost = match &moved {
                    Err(MemoryError::Lost { ranges, .. }) => ranges.clone(),
                    _ => vec![],
                };
                for granule in 0..12 {
                    let at = granule * G;
                    let is_lost = lost.iter().any(|range| range.contains(&at));
                    assert_eq!(region.is_committed(at..at + G), !is_lost, "{k}: {calls:?}");
                    let mut seen = [0; 4];
                    if !is_lost {
                        region.read(&stream, at, &mut seen).unwrap();
                        let kept = seen == [granule as u8 + 1; 4];
                        assert!(kept || !rig.keeps_bytes(), "{k}, {granule}: {moved:?} {seen:?} {calls:?}");
                    }
                }
                region.close().unwrap();
                let live = rig.machine.live();
                assert_eq!((live.physicals, live.mappings), (0, 0), "{k}: {calls:?}");
                if !hit {
                    assert!(k > 60, "{k}");
                    break;
                }
            }
        }
    }

    fn each_extent_is_prepared_while_the_copies_before_it_run(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::committed(Region::builder(&rig.device, 6 * G).largest_extent(2 * G), 6 * G);
        let bytes: Vec<u8> = (0..6 * G).map(|byte| (byte / 1000) as u8).collect();
        region.write(&stream, 0, &bytes).unwrap();
        let order = [Call::MemCreate, Call::MemMap, Call::MemUnmap, Call::MemcpyDtoDAsync];
        let made = || -> Vec<Call> {
            let calls = rig.faults.calls().into_iter();
            calls.filter(|call| order.contains(call)).collect()
        };
        let [create, map, unmap, copy] = order;
        rig.faults.forget();
        region.relocate(0..6 * G, &Place::HostNuma(0), &stream).unwrap();
        // All new memory, all old memory beside; then each extent is exchanged before its copy.
        let each = [unmap, map, copy];
        let expected = [&[create; 3][..], &[map; 3], &each, &each, &each, &[unmap; 3]].concat();
        assert_eq!(made(), expected);
        rig.faults.forget();
        region.relocate(0..6 * G, &Place::from(&rig.device), &stream).unwrap();
        // Each extent is created and mapped beside before its copy; then all are exchanged.
        let (each, exchange) = ([create, map, copy], [unmap, unmap, map]);
        let expected = [each, each, each, exchange, exchange, exchange].concat();
        assert_eq!(made(), expected);
        let mut seen = vec![0; bytes.len()];
        region.read(&stream, 0, &mut seen).unwrap();
        assert!(seen == bytes || !rig.keeps_bytes());
    }

    fn extents_that_lie_ready_are_moved_to(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let ready = HostExtents::new(&rig.device, 0, 8 * G);
        ready.prepare(2 * G, 2).unwrap();
        assert_eq!(ready.ready(), 4 * G);
        let builder = || Region::builder(&rig.device, 8 * G).largest_extent(2 * G).host_extents(&ready);
        let mut region = common::committed(builder(), 6 * G);
        region.write(&stream, 4 * G - 2, b"kept").unwrap();
        let (host, device) = (Place::HostNuma(0), Place::from(&rig.device));
        rig.faults.forget();
        assert_eq!(region.relocate(2 * G..6 * G, &host, &stream).unwrap(), 4 * G);
        assert_eq!(rig.faults.count(Call::MemCreate), 0);
        // Each is mapped once permanently, and the memory that it replaces once temporarily.
        assert_eq!((rig.faults.count(Call::MemMap), rig.faults.count(Call::MemSetAccess)), (4, 4));
        assert_eq!(ready.ready(), 0);
        assert_eq!(region.relocate(0..6 * G, &host, &stream).unwrap(), 2 * G, "one more is created");
        assert_eq!(region.relocate(0..6 * G, &device, &stream).unwrap(), 6 * G);
        assert_eq!((ready.ready(), region.held()), (6 * G, 6 * G));
        let mut seen = [0; 4];
        region.read(&stream, 4 * G - 2, &mut seen).unwrap();
        assert!(seen == *b"kept" || !rig.keeps_bytes());
        // A commit does not use prepared extents: committed memory must be zero.
        let mut other = builder().reserve().unwrap();
        other.commit_at(0..8 * G, &host).unwrap();
        assert_eq!(ready.ready(), 6 * G);
        other.decommit(0..4 * G).unwrap();
        other.purge_blocking().unwrap();
        assert_eq!(ready.ready(), 8 * G, "the store of extents is full");
        drop(other);
        assert_eq!((ready.ready(), ready.trim(3 * G)), (8 * G, 6 * G));
        assert_eq!((ready.ready(), rig.machine.live().physical_bytes), (2 * G, 8 * G));
        drop((region, ready));
        assert_eq!(rig.machine.live().physicals, 0);
    }

    fn what_a_failed_move_took_lies_ready_again(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let ready = HostExtents::new(&rig.device, 0, 4 * G);
        ready.prepare(G, 3).unwrap();
        let mut region = common::committed(Region::builder(&rig.device, 4 * G).largest_extent(G).host_extents(&ready), 3 * G);
        for call in [Call::CtxSynchronize, Call::MemMap, Call::MemcpyDtoDAsync] {
            for nth in 1..3 {
                rig.faults.arm(Fault::nth(nth, CUresult::CUDA_ERROR_UNKNOWN).of(call));
                let moved = region.relocate(0..3 * G, &Place::HostNuma(0), &stream);
                rig.faults.disarm();
                if moved.is_ok() {
                    assert_eq!((call, nth), (Call::CtxSynchronize, 2));
                    region.relocate(0..3 * G, &Place::from(&rig.device), &stream).unwrap();
                }
                assert_eq!(ready.ready(), 3 * G, "{call:?} {nth}");
            }
        }
    }

    fn only_what_is_its_own_lies_ready_again(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let ready = HostExtents::new(&rig.device, 0, 16 * G);
        let host = Place::HostNuma(0);
        let builder = || Region::builder(&rig.device, 4 * G).largest_extent(2 * G).host_extents(&ready);
        // A fork shares it too.
        let mut region = builder().reserve().unwrap();
        region.commit_at(0..2 * G, &host).unwrap();
        let fork = region.fork(&[]).unwrap();
        drop(region);
        assert_eq!(ready.ready(), 0);
        drop(fork);
        assert_eq!(ready.ready(), 2 * G, "the last region was the only owner");
        // Memory made for handles may be shared with another process.
        let types = cuvmm::driver::HandleTypes::POSIX_FD;
        let mut region = common::committed(builder().shareable(types), 2 * G);
        region.relocate(0..2 * G, &host, &stream).unwrap();
        assert_eq!(ready.ready(), 2 * G, "memory made for handles is not kept for reuse");
        drop(region);
        assert_eq!(ready.ready(), 2 * G);
        let elsewhere = HostExtents::new(&rig.device, 1, 16 * G);
        let mut region = Region::builder(&rig.device, 4 * G).host_extents(&elsewhere).reserve().unwrap();
        region.commit_at(0..2 * G, &host).unwrap();
        drop(region);
        assert_eq!(elsewhere.ready(), 0, "the memory is on another node");
    }

    fn bad_host_extents_are_refused(rig) {
        let ready = HostExtents::new(&rig.device, 0, 8 * G);
        for size in [0, G / 2, 3 * G] {
            let refused = ready.prepare(size, 1);
            assert!(matches!(refused, Err(MemoryError::Argument(_))), "{size}: {refused:?}");
        }
        let refused = ready.prepare(G, 9);
        assert!(matches!(refused, Err(MemoryError::Argument(ArgumentError::TooLarge { .. }))), "{refused:?}");
        assert!(ready.prepare(G, u64::MAX).is_err());
        assert!(HostExtents::new(&rig.device, 7, 8 * G).prepare(G, 1).is_err(), "no such node");
        assert!(HostExtents::new(&rig.device, -1, 8 * G).prepare(G, 1).is_err());
        rig.faults.arm(Fault::nth(3, CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(Call::MemCreate));
        assert!(matches!(ready.prepare(G, 4), Err(MemoryError::Create { .. })));
        rig.faults.disarm();
        assert_eq!(ready.ready(), 2 * G, "created extents are kept");
        ready.prepare(G, 4).unwrap();
        ready.prepare(G, 4).unwrap();
        assert_eq!((ready.ready(), ready.trim(0), ready.trim(0)), (4 * G, 4 * G, 0));
        let other = common::model();
        let refused = Region::builder(&other.device, G).host_extents(&ready).reserve();
        assert!(matches!(refused, Err(MemoryError::Argument(ArgumentError::WrongDriver { .. }))), "{refused:?}");
    }

    fn the_host_is_let_in_when_it_asks(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = Region::builder(&rig.device, 8 * G).largest_extent(2 * G).reserve().unwrap();
        let (host, device) = (Place::HostNuma(0), Place::from(&rig.device));
        region.commit_at(0..6 * G, &host).unwrap();
        let node = Location::host_numa(0);
        let address = region.address();
        let access = |offset| rig.machine.get_access(address.checked_add(offset).unwrap(), node).unwrap();
        let (none, all) = (cuvmm::driver::AccessFlags::NONE, cuvmm::driver::AccessFlags::READ_WRITE);
        assert_eq!([access(0), access(2 * G), access(4 * G)], [none; 3]);
        rig.faults.forget();
        let pointer = region.host_pointer(2 * G..4 * G + 1).unwrap();
        assert_eq!([access(0), access(2 * G), access(4 * G)], [none, all, all]);
        assert_eq!(region.host_pointer(2 * G..6 * G).unwrap(), pointer);
        assert_eq!(rig.faults.count(Call::MemSetAccess), 2, "the host had access already");
        region.relocate(0..6 * G, &device, &stream).unwrap();
        assert!(matches!(region.host_pointer(0..G), Err(MemoryError::Elsewhere { .. })));
        region.relocate(0..6 * G, &host, &stream).unwrap();
        assert_eq!(access(2 * G), none, "the host has no access to moved memory");
        rig.faults.arm(Fault::nth(2, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemSetAccess));
        assert!(region.host_pointer(0..6 * G).is_err());
        rig.faults.disarm();
        assert_eq!([access(0), access(2 * G)], [all, none]);
        region.host_pointer(0..6 * G).unwrap();
        assert_eq!([access(0), access(2 * G), access(4 * G)], [all; 3]);
        // A fork is read-only, for the host too once it was granted access.
        let mut fork = region.fork(&[]).unwrap();
        let address = fork.address();
        let access = |offset| rig.machine.get_access(address.checked_add(offset).unwrap(), node).unwrap();
        assert_eq!(access(0), none);
        fork.host_pointer(0..G).unwrap();
        assert_eq!(access(0), cuvmm::driver::AccessFlags::READ);
    }

    fn what_a_failed_move_loses_is_named(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::region(rig, 4 * G, 4 * G);
        // The copy is mapped, and from then on every mapping fails.
        rig.faults.arm(Fault::from(2, CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(Call::MemMap));
        let error = region.relocate(0..4 * G, &Place::HostNuma(0), &stream).unwrap_err();
        rig.faults.disarm();
        match error {
            MemoryError::Lost { ranges, .. } => {
                assert_eq!(ranges.first(), Some(&(0..4 * G)));
            }
            other => panic!("{other}"),
        }
        assert_eq!((region.committed(), region.held()), (0, 0));
        region.commit(0..4 * G).unwrap();
    }

    fn zeros_lie_under_holes_and_make_way(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = Region::builder(&rig.device, 64 * G).zero_extent(8 * G).reserve().unwrap();
        region.commit(20 * G..24 * G).unwrap();
        region.write(&stream, 20 * G, &[7; 4]).unwrap();
        rig.faults.forget();
        region.back_with_zeros(0..64 * G).unwrap();
        // 20 granules as 8, 8 and 4, and 40 as five of 8, with one physical per size.
        assert_eq!(region.zero_backed(), 60 * G);
        assert_eq!((rig.faults.count(Call::MemMap), rig.faults.count(Call::MemCreate)), (8, 2));
        assert_eq!((region.held(), region.mappings(), region.committed()), (16 * G, 9, 4 * G));
        let refused = region.write(&stream, 0, b"x");
        assert!(matches!(refused, Err(MemoryError::NotCommitted { .. })));
        let hole = region.address();
        rig.kernel(&stream, &[(hole, 20 * G)], &[]);
        rig.held_kernel(&stream, &[(hole, G)], &[]);
        let error = region.commit(G..2 * G).unwrap_err();
        assert!(matches!(error, MemoryError::PendingFree { range, bytes: G } if range == (G..2 * G)));
        assert!(matches!(region.remove_zeros(0..G), Err(MemoryError::PendingFree { .. })));
        assert_eq!((region.zero_backed(), region.mappings()), (60 * G, 9));
        region.commit_after(25 * G..26 * G, &[]).unwrap();
        rig.machine.release_all_streams(D0);
        region.commit(G..2 * G).unwrap();
        assert_eq!(region.zero_backed(), 58 * G);
        region.write(&stream, 2 * G - 1, &[1]).unwrap();
        assert_eq!(region.remove_zeros(30 * G..64 * G).unwrap(), 34 * G);
        assert_eq!(region.zero_backed(), 24 * G);
        stream.synchronize().unwrap();
        assert!(rig.device.lost().is_none());
        // A stray write faults.
        rig.kernel(&stream, &[], &[(hole, 1, 1)]);
        assert!(stream.synchronize().is_err());
    }

    fn zeros_that_do_not_fit_change_nothing(rig) {
        let mut region = common::committed(Region::builder(&rig.device, 64 * G)
            .zero_extent(8 * G)
            .mapping_limit(6), G);
        let error = region.back_with_zeros(0..64 * G).unwrap_err();
        assert!(matches!(error, MemoryError::Mappings { needed: 10, held: 1, limit: 6 }), "{error}");
        region.back_with_zeros(8 * G..40 * G).unwrap();
        assert_eq!(region.mappings(), 5);
        // One alias is replaced: the rest of it takes three mappings beside the granule.
        let error = region.commit(9 * G..10 * G).unwrap_err();
        assert!(matches!(error, MemoryError::Mappings { needed: 4, held: 5, limit: 6 }), "{error}");
        for (call, most) in [(Call::MemCreate, 1), (Call::MemMap, 1), (Call::MemUnmap, 1)] {
            for k in 1..=most {
                rig.faults.arm(Fault::nth(k, CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(call));
                assert!(region.commit(8 * G..16 * G).is_err(), "{call:?}");
                rig.faults.disarm();
                assert_eq!((region.zero_backed(), region.mappings(), region.held()), (32 * G, 5, 9 * G));
            }
        }
        region.commit(8 * G..16 * G).unwrap();
        assert_eq!((region.zero_backed(), region.mappings()), (24 * G, 5));
    }

    fn what_is_in_limbo_is_no_hole_yet(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::region(rig, 8 * G, 2 * G);
        rig.held_kernel(&stream, &[], &[(region.address(), G, 1)]);
        region.decommit_after(0..2 * G, std::slice::from_ref(&stream)).unwrap();
        let error = region.back_with_zeros(0..4 * G).unwrap_err();
        assert!(matches!(error, MemoryError::PendingFree { bytes, .. } if bytes == 2 * G));
        assert_eq!(region.zero_backed(), 0);
        rig.machine.release_all_streams(D0);
        region.back_with_zeros(0..4 * G).unwrap();
        assert_eq!((region.zero_backed(), region.pending_free()), (4 * G, 0));
    }
}

#[test]
fn a_device_that_cannot_reach_another_is_told_so() {
    let options = common::model_options().unreachable(0, 1);
    let rig = common::rig(cuvmm::driver::model::ModelDriver::new(options));
    let second = rig.second();
    let layout = Layout::on(&second);
    let refused = Region::builder(&rig.device, G).layout(layout).reserve();
    assert!(matches!(
        refused,
        Err(MemoryError::Unreachable {
            device: ON_0,
            place: ON_1
        })
    ));
    let mut region = Region::reserve(&second, 4 * G).unwrap();
    region.commit(0..G).unwrap();
    let refused = region.grant(&rig.device, Access::Read);
    assert!(matches!(refused, Err(MemoryError::Unreachable { .. })));
    assert_eq!(region.access_of(&rig.device), Access::None);
}
