//! Owners: what they refuse, what they keep alive, and what they release.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common;
use crate::common::{G, GIB, MIB};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call, HandleTypes, StreamHandle};
use cuvmm::error::{ArgumentError, DeviceError, MemoryError};
use cuvmm::own::CloseRefusal;
use cuvmm::{
    Access, AccessGrant, CallError, Device, Event, Managed, Physical, Reservation, Stream,
};

fn open(rig_device: &Device, mapping: &cuvmm::Mapping) {
    mapping
        .set_access(&[AccessGrant::new(rig_device, Access::ReadWrite)])
        .unwrap();
}

on_both! {
    fn bytes_go_in_and_come_out(rig) {
        let reservation = Reservation::new(&rig.device, 4 * G).unwrap();
        let physical = Physical::new(&rig.device, 2 * G).unwrap();
        let mapping = reservation.map(G, &physical).unwrap();
        assert_eq!(mapping.address().offset_from(reservation.address()), Some(G));
        assert_eq!(mapping.access_of(&rig.device).unwrap(), Access::None);
        open(&rig.device, &mapping);
        assert_eq!(mapping.access_of(&rig.device).unwrap(), Access::ReadWrite);
        if rig.keeps_bytes() {
            let mut fresh = [1u8; 8];
            mapping.read(2 * G - 8, &mut fresh).unwrap();
            assert_eq!(fresh, [0; 8], "fresh memory reads as zero");
            mapping.write(2 * G - 8, b"end here").unwrap();
            mapping.read(2 * G - 8, &mut fresh).unwrap();
            assert_eq!(&fresh, b"end here");
        }
        assert!(matches!(
            mapping.write(2 * G - 7, b"end here"),
            Err(MemoryError::Argument(ArgumentError::OutOfRange { start, end, len, .. }))
                if (start, end, len) == (2 * G - 7, 2 * G + 1, 2 * G)
        ));
    }

    fn sizes_and_places_that_cannot_be_reach_no_driver(rig) {
        let device = &rig.device;
        let reservation = Reservation::new(device, 4 * G).unwrap();
        let physical = Physical::new(device, 2 * G).unwrap();
        let first = reservation.map(0, &physical).unwrap();
        rig.faults.forget();

        assert!(matches!(Reservation::new(device, 0), Err(MemoryError::Argument(ArgumentError::Zero { .. }))));
        assert!(matches!(Reservation::new(device, G + 1), Err(MemoryError::Argument(ArgumentError::Misaligned { .. }))));
        assert!(matches!(
            Reservation::builder(device, G).alignment(3).reserve(),
            Err(MemoryError::Argument(ArgumentError::NotPowerOfTwo { value: 3, .. }))
        ));
        assert!(matches!(Physical::new(device, 0), Err(MemoryError::Argument(ArgumentError::Zero { .. }))));
        assert!(matches!(Physical::new(device, MIB), Err(MemoryError::Argument(ArgumentError::Misaligned { .. }))));
        assert!(matches!(
            Physical::builder(device, G).on_host_numa(-1).create(),
            Err(MemoryError::Argument(ArgumentError::NoSuch { what: "NUMA node", number: -1 }))
        ));
        assert!(matches!(
            Physical::builder(device, G).shareable(HandleTypes::from_bits_retain(0x40)).create(),
            Err(MemoryError::Argument(ArgumentError::HandleType(0x40)))
        ));
        // Ranges that the real driver accepts or crashes on: past the end, overlapping from above
        // and below, unaligned to the granule, and with an overflowing offset.
        assert!(matches!(reservation.map(3 * G, &physical), Err(MemoryError::Argument(ArgumentError::OutOfRange { .. }))));
        assert!(matches!(reservation.map(4 * G, &physical), Err(MemoryError::Argument(ArgumentError::OutOfRange { .. }))));
        assert!(matches!(
            reservation.map(0u64.wrapping_sub(G), &physical),
            Err(MemoryError::Argument(ArgumentError::OutOfRange { .. }))
        ));
        assert!(matches!(reservation.map(G, &physical), Err(MemoryError::Overlap { taken: 0, .. })));
        assert!(matches!(reservation.map(0, &physical), Err(MemoryError::Overlap { taken: 0, .. })));
        assert!(matches!(reservation.map(MIB, &physical), Err(MemoryError::Argument(ArgumentError::Misaligned { .. }))));
        assert!(matches!(first.set_access(&[]), Err(MemoryError::Argument(ArgumentError::Zero { .. }))));
        assert!(matches!(
            reservation.physical_at(2 * G),
            Err(MemoryError::NotCommitted(bytes)) if bytes.start == 2 * G
        ));
        assert_eq!(rig.faults.calls(), vec![], "no driver call");
        assert_eq!(reservation.mapped_bytes(), 2 * G);
    }

    fn owners_may_be_dropped_in_any_order(rig) {
        for order in 0..6 {
            let reservation = Reservation::new(&rig.device, 2 * G).unwrap();
            let physical = Physical::new(&rig.device, G).unwrap();
            let mapping = reservation.map(0, &physical).unwrap();
            match order {
                0 => { drop(reservation); drop(physical); drop(mapping); }
                1 => { drop(reservation); drop(mapping); drop(physical); }
                2 => { drop(physical); drop(reservation); drop(mapping); }
                3 => { drop(physical); drop(mapping); drop(reservation); }
                4 => { drop(mapping); drop(reservation); drop(physical); }
                _ => { drop(mapping); drop(physical); drop(reservation); }
            }
            assert!(rig.machine.live().is_nothing(), "order {order}");
        }
    }

    fn an_alias_shows_the_same_bytes(rig) {
        let reservation = Reservation::new(&rig.device, 2 * G).unwrap();
        let physical = Physical::new(&rig.device, G).unwrap();
        let one = reservation.map(0, &physical).unwrap();
        let two = reservation.map(G, &physical).unwrap();
        open(&rig.device, &one);
        open(&rig.device, &two);
        if rig.keeps_bytes() {
            one.write(17, b"seen twice").unwrap();
            let mut seen = [0; 10];
            two.read(17, &mut seen).unwrap();
            assert_eq!(&seen, b"seen twice");
        }
        let retained = reservation.physical_at(G + 5).unwrap();
        assert_eq!(retained.size(), G);
        drop((physical, one, two));
        assert_eq!(rig.machine.live().physical_bytes, G, "the retained reference keeps it");
    }

    fn a_read_only_mapping_takes_no_writes(rig) {
        let reservation = Reservation::new(&rig.device, G).unwrap();
        let physical = Physical::new(&rig.device, G).unwrap();
        let mapping = reservation.map(0, &physical).unwrap();
        let unread = mapping.read(0, &mut [0; 4]);
        assert!(matches!(unread, Err(MemoryError::NoAccess { wanted: "read", .. })), "no access yet");
        mapping.set_access(&[AccessGrant::new(&rig.device, Access::Read)]).unwrap();
        assert_eq!(mapping.access_of(&rig.device).unwrap(), Access::Read);
        mapping.read(0, &mut [0; 4]).unwrap();
        let refused = mapping.write(0, b"no").unwrap_err();
        assert!(matches!(refused, MemoryError::NoAccess { wanted: "write", .. }), "{refused}");
        assert!(refused.to_string().contains("device 0 may not write the memory: grant access with `set_access`"), "{refused}");
    }

    fn a_reservation_lists_its_mappings(rig) {
        let reservation = Reservation::new(&rig.device, 8 * G).unwrap();
        assert_eq!(reservation.mappings(), []);
        let physical = Physical::new(&rig.device, 2 * G).unwrap();
        let second = reservation.map(4 * G, &physical).unwrap();
        let first = reservation.map(G, &physical).unwrap();
        open(&rig.device, &first);
        let listed = reservation.mappings();
        let seen = |at: usize| (listed[at].offset, listed[at].size, listed[at].access);
        assert_eq!(seen(0), (G, 2 * G, Some(Access::ReadWrite)));
        assert_eq!(seen(1), (4 * G, 2 * G, Some(Access::None)));
        assert!(listed.iter().all(|it| it.handle == physical.as_raw()));
        assert!(listed.iter().all(|it| it.location == rig.device.location()));
        drop(first);
        assert_eq!(reservation.mappings().len(), 1);
        assert!(reservation.contains(second.address()) && second.contains(second.address()));
        assert!(!second.contains(second.end()) && reservation.contains(second.end()));
        assert!(!reservation.contains(reservation.end()));
        let recommended = rig.device.recommended_granularity().unwrap();
        assert_eq!(recommended % rig.device.granularity(), 0);
    }

    fn an_extent_has_its_handle_and_its_access(rig) {
        let mut region = common::region(rig, 4 * G, 2 * G);
        let extent = region.extents()[0];
        assert_eq!(extent.access, Access::ReadWrite);
        assert!(extent.contains(region.address() + (2 * G - 1)));
        assert!(!extent.contains(region.address() + extent.end()));
        let fork = region.fork(&[]).unwrap();
        let shared = [region.extents()[0], fork.extents()[0]];
        assert!(shared.iter().all(|it| (it.handle, it.access) == (extent.handle, Access::Read)));
        assert_eq!(region.end() - region.address(), region.size());
        assert!(region.contains(region.address()) && !fork.contains(region.address()));
    }

    fn host_memory_is_opened_to_the_device_and_its_node(rig) {
        let reservation = Reservation::new(&rig.device, 2 * G).unwrap();
        let physical =
            Physical::builder(&rig.device, G).on_host_numa(0).create().unwrap();
        assert_eq!(physical.props().unwrap().location, cuvmm::driver::Location::host_numa(0));
        let mapping = reservation.map(0, &physical).unwrap();
        let both = [
            AccessGrant::new(&rig.device, Access::ReadWrite),
            AccessGrant::new(cuvmm::Place::HostNuma(0), Access::ReadWrite),
        ];
        mapping.set_access(&both).unwrap();
        mapping.write(8, b"from here").unwrap();
        // The host has no access to device memory.
        let physical = Physical::new(&rig.device, G).unwrap();
        let mapping = reservation.map(G, &physical).unwrap();
        let refused = mapping.set_access(&[AccessGrant::new(cuvmm::Place::HostNuma(0), Access::Read)]);
        assert!(matches!(refused, Err(MemoryError::Range { .. })), "{refused:?}");
        let missing = Physical::builder(&rig.device, G).on_host_numa(99).create();
        assert!(matches!(missing, Err(MemoryError::Create { .. })));
    }

    fn what_is_in_use_is_not_closed(rig) {
        let reservation = Reservation::new(&rig.device, G).unwrap();
        let physical = Physical::new(&rig.device, G).unwrap();
        let mapping = reservation.map(0, &physical).unwrap();
        let failed = reservation.close().unwrap_err();
        assert_eq!(failed.reason, CloseRefusal::InUse);
        let reservation = failed.owner;
        let failed = physical.close().unwrap_err();
        assert_eq!(failed.reason, CloseRefusal::InUse);
        drop(failed.owner);
        let physical = mapping.close().unwrap();
        physical.close().unwrap();
        reservation.close().unwrap();
        assert!(rig.machine.live().is_nothing());
    }

    fn a_refused_close_hands_the_owner_back(rig) {
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        let reservation = Reservation::new(&rig.device, G).unwrap();
        let physical = Physical::new(&rig.device, G).unwrap();
        let mapping = reservation.map(0, &physical).unwrap();
        rig.faults.arm(Fault::all(code));
        let failed = mapping.close().unwrap_err();
        assert!(matches!(failed.reason, CloseRefusal::Call(CallError::Driver(e)) if e.code() == Some(code)));
        rig.faults.disarm();
        assert_eq!(rig.machine.live().mappings, 1);
        drop(failed.owner);
        assert_eq!(rig.machine.live().mappings, 0);
        rig.faults.arm(Fault::nth(1, code));
        let failed = physical.close().unwrap_err();
        failed.owner.close().unwrap();
        rig.faults.arm(Fault::nth(1, code));
        let failed = reservation.close().unwrap_err();
        failed.owner.close().unwrap();
    }

    fn managed_memory_is_had_and_freed(rig) {
        assert!(matches!(Managed::new(&rig.device, 0), Err(MemoryError::Argument(ArgumentError::Zero { .. }))));
        let managed = Managed::new(&rig.device, 12345).unwrap();
        assert_eq!((managed.size(), managed.device()), (12345, &rig.device));
        assert!(!managed.address().is_null());
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(Fault::nth(1, code).of(Call::MemFree));
        let failed = managed.close().unwrap_err();
        assert_eq!(rig.machine.live().allocations, 1);
        // A failure to restore the thread's capture mode does not undo the free.
        rig.faults.arm(Fault::nth(2, code).of(Call::ThreadExchangeStreamCaptureMode));
        failed.owner.close().unwrap();
        rig.faults.disarm();
        assert_eq!(rig.machine.live().allocations, 0);
        drop(Managed::new(&rig.device, 1).unwrap());
        rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(Call::MemAllocManaged));
        let refused = Managed::new(&rig.device, 77).unwrap_err();
        assert!(matches!(refused, MemoryError::Create { size: 77, cause, .. }
            if cause.is_out_of_memory()));
        rig.faults.disarm();
    }

    fn streams_and_events_order_work(rig) {
        let one = Stream::new(&rig.device).unwrap();
        let two = Stream::new(&rig.device).unwrap();
        let event = Event::new(&rig.device).unwrap();
        assert!(
            event.is_complete().unwrap(),
            "an event that was never recorded counts as complete"
        );
        rig.machine.hold(common::D0, one.as_raw());
        rig.machine.queue_kernel(common::D0, one.as_raw(), vec![], vec![]).unwrap();
        event.record(&one).unwrap();
        two.wait(&event).unwrap();
        rig.machine.queue_kernel(common::D0, two.as_raw(), vec![], vec![]).unwrap();
        assert!(!one.is_done().unwrap() && !two.is_done().unwrap() && !event.is_complete().unwrap());
        rig.machine.release_stream(common::D0, one.as_raw());
        assert!(one.is_done().unwrap() && two.is_done().unwrap());
        assert!(event.is_complete().unwrap());
    }
}

#[test]
fn devices_that_are_not_there_are_refused() {
    let rig = common::model();
    let driver = rig.device.driver().clone();
    assert!(matches!(
        Device::open(driver.clone(), 2),
        Err(DeviceError::NoSuchDevice {
            ordinal: 2,
            count: 2
        })
    ));
    assert!(matches!(
        Device::open(driver, u32::MAX),
        Err(DeviceError::NoSuchDevice { .. })
    ));
}

#[test]
fn another_drivers_physical_is_refused() {
    let (here, there) = (common::model(), common::model());
    let reservation = Reservation::new(&here.device, G).unwrap();
    let physical = Physical::new(&there.device, G).unwrap();
    assert!(matches!(
        reservation.map(0, &physical),
        Err(MemoryError::Argument(ArgumentError::WrongDriver { .. }))
    ));
    let own = Physical::new(&here.device, G).unwrap();
    let mapping = reservation.map(0, &own).unwrap();
    assert!(matches!(
        mapping.set_access(&[AccessGrant::new(&there.device, Access::Read)]),
        Err(MemoryError::Argument(ArgumentError::WrongDriver { .. }))
    ));
}

#[test]
fn a_failed_drop_is_told_and_nothing_is_reused() {
    let rig = common::model();
    let told = Arc::new(AtomicU64::new(0));
    let hook = told.clone();
    rig.device.on_drop_failure(Some(Arc::new(move |failure| {
        assert_eq!((failure.what, failure.bytes), ("mapping", G));
        hook.fetch_add(1, Ordering::Relaxed);
    })));
    let reservation = Reservation::new(&rig.device, 2 * G).unwrap();
    let physical = Physical::new(&rig.device, G).unwrap();
    let mapping = reservation.map(0, &physical).unwrap();
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
    drop(mapping);
    rig.faults.disarm();
    assert_eq!(
        (told.load(Ordering::Relaxed), rig.device.drop_failures()),
        (1, 1)
    );
    assert!(matches!(
        reservation.map(0, &physical),
        Err(MemoryError::Overlap { .. })
    ));
    drop((reservation, physical));
    let live = rig.machine.live();
    assert_eq!(
        (live.reservations, live.mappings, live.physical_bytes),
        (1, 1, G)
    );
}

#[test]
fn a_driver_that_is_gone_at_exit_is_silent() {
    let rig = common::model();
    let physical = Physical::new(&rig.device, G).unwrap();
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_DEINITIALIZED));
    drop(physical);
    assert_eq!(rig.device.drop_failures(), 0);
}

#[test]
fn terabytes_of_addresses_cost_nothing() {
    let rig = common::clean(common::host());
    let reservation = Reservation::new(&rig.device, 4096 * GIB).unwrap();
    assert_eq!(reservation.size(), 4096 * GIB);
}

#[test]
fn a_lost_context_takes_nothing_new_and_gives_everything_back() {
    let rig = common::clean(common::model());
    let reservation = Reservation::new(&rig.device, G).unwrap();
    let physical = Physical::new(&rig.device, G).unwrap();
    let _mapping = reservation.map(0, &physical).unwrap();
    rig.machine
        .lose_context(common::D0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(rig.device.synchronize().is_err());
    assert!(rig.device.lost().is_some());
    assert!(matches!(
        Physical::new(&rig.device, G),
        Err(MemoryError::Create {
            cause: CallError::ContextLost(_),
            ..
        })
    ));
}

#[test]
fn calls_are_counted_by_kind() {
    let rig = common::model();
    let before = rig.device.calls();
    let apart = rig.device.with_own_counters();
    drop(Physical::new(&rig.device, G).unwrap());
    drop(Physical::new(&apart, G).unwrap());
    let made = rig.device.calls().since(&before);
    assert_eq!(
        (
            made.count(Call::MemCreate),
            made.count(Call::MemRelease),
            made.total()
        ),
        (1, 1, 2)
    );
    assert_eq!(apart.calls().total(), 2);
}

#[test]
fn the_per_thread_stream_is_refused_and_both_legacy_handles_are_one_stream() {
    let rig = common::clean(common::model());
    let from_raw = |handle| {
        // SAFETY: the default streams live as long as the context.
        #[allow(unsafe_code)]
        unsafe {
            Stream::from_raw(&rig.device, handle, Arc::new(()))
        }
    };
    let refused = from_raw(StreamHandle::PER_THREAD).unwrap_err();
    assert_eq!(refused, CallError::PerThreadStream);
    assert!(refused.driver().is_none() && rig.faults.calls().is_empty());
    for handle in [StreamHandle::NULL, StreamHandle::LEGACY] {
        let stream = from_raw(handle).unwrap();
        assert_eq!(stream, Stream::legacy(&rig.device));
        stream.synchronize().unwrap();
    }
    let own = Stream::new(&rig.device).unwrap();
    assert_eq!(from_raw(own.as_raw()).unwrap(), own);
}
