//! The calls that a GPU was measured to accept and to refuse, made on the model and on the host
//! driver.
//!
//! `unsafe` because the driver's methods are, and deliberately misused: the backends under test
//! define the result of every misuse.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::model_support::*;
use crate::on_both;
use cuvmm_driver::{
    AccessDesc, AccessFlags, AllocationType, CUresult, Call, CudaVersion, DeviceAddress,
    DeviceAttribute, Driver, DriverError, Exported, GranularityKind, HandleTypes, ImportSource,
    Location, LocationKind, Ordinal, OsHandle, PhysicalHandle, PhysicalProps, PointerAttribute,
};
use cuvmm_model::model::{Backing, Machine, Manner, ModelOptions};
use std::fs::File;

on_both!(
    reserving,
    hints,
    granularities,
    creating,
    mapping,
    mapping_past_the_end_and_across,
    granting,
    granting_to_peers,
    unmapping,
    freeing_addresses,
    handles_and_their_lives,
    exporting_and_importing,
    an_open_descriptor_keeps_memory,
    counting_bytes,
    copies_are_checked_at_the_call,
    pointers,
    host_memory_opens_to_both,
    the_ceiling_of_mappings,
    devices,
);

fn reserving<B: Backing>(d: Machine<B>) {
    let reserve = |size, alignment, flags| code(d.reserve(size, alignment, ANYWHERE, flags));
    for size in [0, 4096, 64 << 10, MIB, 3 * MIB, u64::MAX] {
        assert_eq!(reserve(size, 0, 0), INVALID_VALUE, "size {size}");
    }
    for alignment in [3, 3 * MIB] {
        assert_eq!(
            reserve(PAGE, alignment, 0),
            INVALID_VALUE,
            "alignment {alignment}"
        );
    }
    assert_eq!(reserve(PAGE, 0, 1), INVALID_VALUE, "flags");
    assert_eq!(reserve(1 << 47, 0, 0), OUT_OF_MEMORY);
    assert_eq!(reserve(1 << 63, 0, 0), OUT_OF_MEMORY);
    for (alignment, really) in [
        (0, PAGE),
        (4096, PAGE),
        (PAGE, PAGE),
        (GIB, GIB),
        (1 << 40, 1 << 40),
    ] {
        let address = d.reserve(PAGE, alignment, ANYWHERE, 0).unwrap();
        assert!(
            address.0.is_multiple_of(really),
            "{address} for {alignment}"
        );
        unsafe { d.free_reservation(address, PAGE) }.unwrap();
    }
    let huge = d.reserve(1 << 46, 0, ANYWHERE, 0).unwrap();
    assert_eq!(
        d.memory_info(D0).unwrap().free,
        4 * GIB,
        "addresses take no memory"
    );
    unsafe { d.free_reservation(huge, 1 << 46) }.unwrap();
    assert!(d.live().is_nothing());
}

fn hints<B: Backing>(d: Machine<B>) {
    let taken = d.reserve(8 * PAGE, 0, ANYWHERE, 0).unwrap();
    let other = d.reserve(PAGE, 0, taken, 0).unwrap();
    assert_ne!(other, taken, "a hint that is taken");
    assert_eq!(code(d.reserve(PAGE, 0, at(taken, 4096), 0)), INVALID_VALUE);
    let far = DeviceAddress(taken.0 ^ (1 << 42));
    assert_ne!(d.reserve(PAGE, 0, far, 0).unwrap(), far, "far away");
    let own = d.reserve(PAGE, 0, ANYWHERE, 0).unwrap();
    let behind = at(own, PAGE);
    assert_ne!(
        d.reserve(PAGE, 0, behind, 0).unwrap(),
        behind,
        "just behind"
    );
    unsafe { d.free_reservation(taken, 8 * PAGE) }.unwrap();
    // At its start, and then at the start of the rest: adjacent reservations.
    for place in [taken, at(taken, PAGE)] {
        assert_eq!(d.reserve(PAGE, 0, place, 0).unwrap(), place, "at the start");
    }
    let inside = at(taken, 4 * PAGE);
    assert_ne!(
        d.reserve(PAGE, 0, inside, 0).unwrap(),
        inside,
        "in the middle of what was freed"
    );
    let over_the_end = at(taken, 7 * PAGE);
    assert_ne!(
        d.reserve(2 * PAGE, 0, over_the_end, 0).unwrap(),
        over_the_end
    );
}

fn granularities<B: Backing>(d: Machine<B>) {
    let ask = |location, kind| d.allocation_granularity(&PhysicalProps::at(location), kind);
    for location in [
        Location::device(D0),
        Location::HOST,
        Location::host_numa(0),
        Location::device(Ordinal(99)),
    ] {
        for kind in [GranularityKind::MINIMUM, GranularityKind::RECOMMENDED] {
            assert_eq!(ask(location, kind), Ok(PAGE), "{location}");
        }
    }
    assert_eq!(code(ask(Location::HOST, GranularityKind(7))), INVALID_VALUE);
}

fn creating<B: Backing>(d: Machine<B>) {
    let plain = PhysicalProps::device(D0);
    let create = |size, props: PhysicalProps, flags| code(d.create(size, &props, flags));
    for size in [0, 1, 64 << 10, MIB, 3 * MIB] {
        assert_eq!(create(size, plain, 0), INVALID_VALUE, "size {size}");
    }
    assert_eq!(create(PAGE, plain, 1), INVALID_VALUE);
    for allocation_type in [AllocationType::INVALID, AllocationType::MANAGED] {
        assert_eq!(
            create(
                PAGE,
                PhysicalProps {
                    allocation_type,
                    ..plain
                },
                0
            ),
            INVALID_VALUE
        );
    }
    let bad = |kind, id| PhysicalProps::at(Location { kind, id });
    assert_eq!(
        create(PAGE, bad(LocationKind::DEVICE, -1), 0),
        INVALID_DEVICE
    );
    assert_eq!(
        create(PAGE, bad(LocationKind::DEVICE, 99), 0),
        INVALID_DEVICE
    );
    assert_eq!(
        create(PAGE, bad(LocationKind::HOST_NUMA, 99), 0),
        INVALID_VALUE
    );
    assert_eq!(
        create(PAGE, bad(LocationKind::HOST_NUMA_CURRENT, 0), 0),
        INVALID_VALUE
    );
    assert_eq!(
        create(PAGE, bad(LocationKind::INVALID, 0), 0),
        INVALID_VALUE
    );
    let typed = |handle_types| PhysicalProps {
        handle_types,
        ..plain
    };
    assert_eq!(create(PAGE, typed(HandleTypes::FABRIC), 0), NOT_PERMITTED);
    let of_other_systems = HandleTypes::POSIX_FD | HandleTypes::WIN32 | HandleTypes::WIN32_KMT;
    for one in of_other_systems.difference(HandleTypes::OS) {
        assert_eq!(create(PAGE, typed(one), 0), INVALID_VALUE, "{one}");
    }
    assert_eq!(create(1 << 40, plain, 0), OUT_OF_MEMORY);
    assert_eq!(create(!(PAGE - 1), plain, 0), OUT_OF_MEMORY);
    assert!(d.live().is_nothing(), "nothing was made so far");

    assert_eq!(
        create(PAGE, typed(HandleTypes::from_bits_retain(0x40)), 0),
        SUCCESS
    );
    assert_eq!(create(PAGE, typed(HandleTypes::OS), 0), SUCCESS);
    assert_eq!(create(PAGE, PhysicalProps::at(Location::HOST), 0), SUCCESS);
    assert_eq!(
        create(PAGE, PhysicalProps::at(Location::host_numa(0)), 0),
        SUCCESS
    );
    let compressed = PhysicalProps {
        compression: 1,
        ..plain
    };
    let for_rdma = PhysicalProps {
        rdma_capable: true,
        ..plain
    };
    let usage = PhysicalProps {
        usage: 0xff,
        ..plain
    };
    for props in [compressed, for_rdma, usage] {
        let handle = d.create(PAGE, &props, 0).unwrap();
        // SAFETY: the handle is alive.
        let granted = unsafe { d.physical_props(handle) };
        assert_eq!(granted, Ok(props), "what is asked for is granted");
    }
    let both = PhysicalProps {
        compression: 1,
        ..for_rdma
    };
    let handle = d.create(PAGE, &both, 0).unwrap();
    for (compression, rdma_capable) in [(1, false), (0, true), (1, true)] {
        let pair = PhysicalProps {
            compression,
            rdma_capable,
            ..usage
        };
        assert_eq!(create(PAGE, pair, 0), INVALID_VALUE);
    }
    unsafe {
        let granted = d.physical_props(handle);
        assert_eq!(granted, Ok(for_rdma), "compression is dropped");
        assert_eq!(code(d.physical_props(PhysicalHandle::NULL)), INVALID_VALUE);
    }
}

fn mapping<B: Backing>(d: Machine<B>) {
    let va = d.reserve(8 * PAGE, 0, ANYWHERE, 0).unwrap();
    let handle = d.create(2 * PAGE, &PhysicalProps::device(D0), 0).unwrap();
    let before = d.snapshot();
    let map = |address, size, offset, handle, flags| unsafe {
        code(d.map(address, size, offset, handle, flags))
    };
    let size = 2 * PAGE;
    assert_eq!(
        map(DeviceAddress(PAGE), size, 0, handle, 0),
        INVALID_VALUE,
        "unreserved"
    );
    assert_eq!(map(va, size, PAGE, handle, 0), NOT_SUPPORTED, "offset");
    assert_eq!(map(va, size, 1, handle, 0), NOT_SUPPORTED, "bad offset");
    assert_eq!(map(va, PAGE, 0, handle, 0), NOT_SUPPORTED, "too small");
    assert_eq!(map(va, 4 * PAGE, 0, handle, 0), NOT_SUPPORTED, "too large");
    assert_eq!(map(va, 0, 0, handle, 0), INVALID_VALUE);
    assert_eq!(map(at(va, 4096), size, 0, handle, 0), INVALID_VALUE);
    assert_eq!(map(at(va, MIB), size, 0, handle, 0), INVALID_VALUE);
    assert_eq!(map(va, size, 0, handle, 1), INVALID_VALUE);
    assert_eq!(map(va, size, 0, PhysicalHandle::NULL, 0), INVALID_VALUE);
    assert_eq!(
        map(at(va, 8 * PAGE), size, 0, handle, 0),
        INVALID_VALUE,
        "wholly outside"
    );
    assert_eq!(d.snapshot(), before, "nothing changed");

    let middle = at(va, 2 * PAGE);
    assert_eq!(map(middle, size, 0, handle, 0), SUCCESS);
    for overlapping in [0, PAGE, 2 * PAGE].map(|back| at(va, PAGE + back)) {
        assert_eq!(
            map(overlapping, size, 0, handle, 0),
            INVALID_VALUE,
            "{overlapping}"
        );
    }
    assert_eq!(
        map(at(va, 4 * PAGE), size, 0, handle, 0),
        SUCCESS,
        "an alias next to it"
    );
    assert_eq!(
        d.get_access(middle, Location::device(D0)),
        Ok(AccessFlags::NONE)
    );
    assert_eq!(
        code(d.get_access(va, Location::device(D0))),
        INVALID_VALUE,
        "unmapped"
    );
    assert_eq!(
        code(d.get_access(DeviceAddress(PAGE), Location::device(D0))),
        INVALID_VALUE
    );
}

fn mapping_past_the_end_and_across<B: Backing>(d: Machine<B>) {
    let handle = d.create(2 * PAGE, &PhysicalProps::device(D0), 0).unwrap();
    let whole = d.reserve(64 * PAGE, 0, ANYWHERE, 0).unwrap();
    unsafe {
        d.free_reservation(whole, 64 * PAGE).unwrap();
        let low = d.reserve(PAGE, 0, whole, 0).unwrap();
        assert_eq!(low, whole, "the place that was freed a moment ago");
        assert_eq!(
            code(d.map(low, 2 * PAGE, 0, handle, 0)),
            SUCCESS,
            "past the end"
        );
        d.set_access(low, 2 * PAGE, &[rw(D0)]).unwrap();
        d.fill(D0, low, 5, 2 * PAGE).unwrap();
        if d.kind() == cuvmm_driver::DriverKind::Host {
            assert_eq!(
                first_byte(&d, at(low, PAGE + 7)),
                5,
                "the bytes past the end are there"
            );
        }
        assert_eq!(code(d.free_reservation(low, PAGE)), INVALID_VALUE);
        d.unmap(low, 2 * PAGE).unwrap();

        let high = d.reserve(PAGE, 0, at(whole, PAGE), 0).unwrap();
        assert_eq!(high, at(low, PAGE));
        assert_eq!(
            code(d.map(low, 2 * PAGE, 0, handle, 0)),
            SUCCESS,
            "across two reservations"
        );
        d.set_access(low, 2 * PAGE, &[rw(D0)]).unwrap();
        d.fill(D0, low, 6, 2 * PAGE).unwrap();
        assert_eq!(
            code(d.free_reservation(low, 2 * PAGE)),
            INVALID_VALUE,
            "not as one"
        );
        assert_eq!(code(d.free_reservation(low, PAGE)), INVALID_VALUE);
        assert_eq!(code(d.free_reservation(high, PAGE)), INVALID_VALUE);
        assert_eq!(code(d.unmap(low, PAGE)), INVALID_VALUE, "a part of it");
        d.unmap(low, 2 * PAGE).unwrap();
        d.free_reservation(low, PAGE).unwrap();
        d.free_reservation(high, PAGE).unwrap();
        d.release(handle).unwrap();
    }
    assert!(d.live().is_nothing());
}

fn granting<B: Backing>(d: Machine<B>) {
    // Two pages, a hole, one page, a hole at the end.
    let r = range(&d, 5, 2);
    let far = page(&d);
    unsafe { d.map(r.page(3), PAGE, 0, far, 0) }.unwrap();
    unsafe { d.set_access(r.at, 2 * PAGE, &[none(D0)]) }.unwrap();
    let before = d.snapshot();
    let set =
        |address, size, access: &[AccessDesc]| unsafe { code(d.set_access(address, size, access)) };
    let all = [rw(D0)];
    assert_eq!(set(r.at, 0, &all), INVALID_VALUE);
    assert_eq!(set(r.at, PAGE, &[]), INVALID_VALUE, "no descriptor");
    assert_eq!(set(at(r.at, 4096), PAGE, &all), INVALID_VALUE);
    assert_eq!(set(r.at, 4096, &all), INVALID_VALUE);
    assert_eq!(set(r.page(2), PAGE, &all), INVALID_VALUE, "nothing mapped");
    assert_eq!(
        set(r.page(2), 2 * PAGE, &all),
        INVALID_VALUE,
        "hole at the start"
    );
    assert_eq!(
        set(r.page(3), 2 * PAGE, &all),
        INVALID_VALUE,
        "hole at the end"
    );
    assert_eq!(
        set(DeviceAddress(PAGE), PAGE, &all),
        INVALID_VALUE,
        "unreserved"
    );
    assert_eq!(
        set(r.at, PAGE, &[grant(D0, AccessFlags(2))]),
        INVALID_VALUE,
        "flags 2"
    );
    assert_eq!(set(r.at, PAGE, &[rw(Ordinal(99))]), INVALID_VALUE);
    assert_eq!(
        set(r.at, PAGE, &[rw(D0), rw(Ordinal(99))]),
        INVALID_VALUE,
        "one of two bad"
    );
    for location in [Location::HOST, Location::host_numa(0)] {
        let host = AccessDesc {
            location,
            flags: AccessFlags::READ,
        };
        assert_eq!(
            set(r.at, PAGE, &[host]),
            NOT_SUPPORTED,
            "host on device memory"
        );
    }
    assert_eq!(d.snapshot(), before, "nothing changed");

    assert_eq!(set(r.at, 4 * PAGE, &all), SUCCESS, "over a hole");
    let right = |index| d.get_access(r.page(index), Location::device(D0)).unwrap();
    assert_eq!(
        [right(0), right(1), right(3)],
        [
            AccessFlags::READ_WRITE,
            AccessFlags::READ_WRITE,
            AccessFlags::NONE
        ]
    );
    assert_eq!(set(r.at, PAGE, &[ro(D0)]), SUCCESS);
    assert_eq!(right(0), AccessFlags::READ);
    assert_eq!(set(r.at, PAGE, &all), SUCCESS, "1 then 3");
    assert_eq!(right(0), AccessFlags::READ_WRITE);

    let large = d.create(2 * PAGE, &PhysicalProps::device(D0), 0).unwrap();
    let va = d.reserve(4 * PAGE, 0, ANYWHERE, 0).unwrap();
    unsafe { d.map(va, 2 * PAGE, 0, large, 0) }.unwrap();
    unsafe { d.map(at(va, 2 * PAGE), 2 * PAGE, 0, large, 0) }.unwrap();
    let before = d.snapshot();
    for (from, size) in [(0, PAGE), (PAGE, PAGE), (0, 3 * PAGE), (PAGE, 3 * PAGE)] {
        assert_eq!(
            set(at(va, from), size, &all),
            INVALID_VALUE,
            "part of a mapping"
        );
    }
    assert_eq!(d.snapshot(), before);
    assert_eq!(set(va, 4 * PAGE, &all), SUCCESS);
}

fn granting_to_peers<B: Backing>(d: Machine<B>) {
    assert_eq!(d.can_access_peer(D0, D1), Ok(true));
    assert_eq!(d.can_access_peer(D0, D0), Ok(false));
    assert_eq!(code(d.can_access_peer(D0, Ordinal(2))), INVALID_DEVICE);
    let r = range(&d, 1, 1);
    unsafe {
        assert_eq!(code(d.fill(D1, r.at, 1, PAGE)), INVALID_VALUE, "no grant");
        assert_eq!(
            d.get_access(r.at, Location::device(D1)),
            Ok(AccessFlags::NONE)
        );
        d.set_access(r.at, PAGE, &[ro(D1)]).unwrap();
        assert_eq!(
            code(d.fill(D1, r.at, 1, PAGE)),
            INVALID_VALUE,
            "read only for the peer"
        );
        assert_eq!(
            code(d.fill(D0, r.at, 1, PAGE)),
            SUCCESS,
            "the owner keeps its right"
        );
        assert_eq!(
            d.get_access(r.at, Location::device(D1)),
            Ok(AccessFlags::READ)
        );
        let stripe = d.create(PAGE, &PhysicalProps::device(D1), 0).unwrap();
        let va = d.reserve(PAGE, 0, ANYWHERE, 0).unwrap();
        d.map(va, PAGE, 0, stripe, 0).unwrap();
        d.set_access(va, PAGE, &[rw(D0), rw(D1)]).unwrap();
        d.fill(D0, va, 1, PAGE).unwrap();
        let owner = d.pointer_attribute(D0, va, PointerAttribute::DEVICE_ORDINAL);
        assert_eq!(owner, Ok(1));
    }
}

#[test]
fn devices_that_do_not_reach_each_other() {
    let d = model(ModelOptions::new().unreachable(1, 0));
    assert_eq!(d.can_access_peer(D1, D0), Ok(false));
    assert_eq!(d.can_access_peer(D0, D1), Ok(true));
    let r = range(&d, 1, 1);
    let before = d.snapshot();
    let answer = code(unsafe { d.set_access(r.at, PAGE, &[ro(D0), rw(D1)]) });
    assert_eq!(answer, CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    assert_eq!(d.snapshot(), before);
}

fn unmapping<B: Backing>(d: Machine<B>) {
    let va = d.reserve(10 * PAGE, 0, ANYWHERE, 0).unwrap();
    let handle = d.create(2 * PAGE, &PhysicalProps::device(D0), 0).unwrap();
    let map = |page| unsafe { d.map(at(va, page * PAGE), 2 * PAGE, 0, handle, 0).unwrap() };
    let unmap = |address, size| unsafe { code(d.unmap(address, size)) };
    map(0);
    map(2);
    let before = d.snapshot();
    for (from, size) in [
        (0, PAGE),
        (PAGE, PAGE),
        (0, 3 * PAGE),
        (PAGE, 3 * PAGE),
        (0, 0),
        (0, 4096),
    ] {
        assert_eq!(unmap(at(va, from), size), INVALID_VALUE, "{from} {size}");
    }
    assert_eq!(unmap(at(va, 4096), PAGE), INVALID_VALUE);
    assert_eq!(
        unmap(DeviceAddress(PAGE), PAGE),
        INVALID_VALUE,
        "unreserved"
    );
    assert_eq!(d.snapshot(), before, "nothing changed");
    assert_eq!(unmap(va, 4 * PAGE), SUCCESS, "two whole ones");
    assert_eq!(unmap(va, 4 * PAGE), SUCCESS, "nothing mapped");
    map(0);
    map(4);
    assert_eq!(unmap(va, 6 * PAGE), SUCCESS, "a hole between");
    map(6);
    assert_eq!(unmap(va, 10 * PAGE), SUCCESS, "all of it, one mapped");
    map(8);
    assert_eq!(unmap(at(va, 8 * PAGE), 4 * PAGE), SUCCESS, "past the end");
    assert_eq!(d.live().mappings, 0);
}

fn freeing_addresses<B: Backing>(d: Machine<B>) {
    let r = range(&d, 4, 1);
    let free = |address, size| unsafe { code(d.free_reservation(address, size)) };
    let before = d.snapshot();
    assert_eq!(free(r.at, 4 * PAGE), INVALID_VALUE, "while mapped");
    unsafe { d.unmap(r.at, PAGE) }.unwrap();
    assert_ne!(d.snapshot(), before);
    let before = d.snapshot();
    for (from, size) in [
        (0, PAGE),
        (0, 8 * PAGE),
        (0, 0),
        (PAGE, 3 * PAGE),
        (PAGE, 4 * PAGE),
    ] {
        assert_eq!(free(at(r.at, from), size), INVALID_VALUE, "{from} {size}");
    }
    assert_eq!(d.snapshot(), before);
    assert_eq!(free(r.at, 4 * PAGE), SUCCESS);
    assert_eq!(free(r.at, 4 * PAGE), INVALID_VALUE, "twice");
}

fn handles_and_their_lives<B: Backing>(d: Machine<B>) {
    let r = range(&d, 3, 1);
    let handle = r.handles[0];
    unsafe {
        assert_eq!(d.retain(r.at), Ok(handle));
        assert_eq!(d.retain(at(r.at, PAGE / 2)), Ok(handle), "interior");
        assert_eq!(code(d.retain(r.page(1))), INVALID_VALUE, "unmapped");
        assert_eq!(d.live().references, 3);
        for _ in 0..3 {
            assert_eq!(code(d.release(handle)), SUCCESS);
        }
        assert_eq!(code(d.release(handle)), INVALID_VALUE, "once too often");
        assert_eq!(code(d.release(PhysicalHandle::NULL)), INVALID_VALUE);
        assert_eq!(
            d.memory_info(D0).unwrap().free,
            4 * GIB - PAGE,
            "the mapping keeps it"
        );
        assert_eq!(code(d.fill(D0, r.at, 1, PAGE)), SUCCESS, "and it is usable");
        assert_eq!(
            code(d.map(r.page(1), PAGE, 0, handle, 0)),
            SUCCESS,
            "released, still mapped"
        );
        d.unmap(r.at, PAGE).unwrap();
        assert_eq!(d.live().physicals, 1, "the second mapping keeps it");
        d.unmap(r.page(1), PAGE).unwrap();
        assert_eq!(d.live().physicals, 0);
        assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
        assert_eq!(
            code(d.map(r.at, PAGE, 0, handle, 0)),
            INVALID_VALUE,
            "a dead handle"
        );
    }
}

fn shareable() -> PhysicalProps {
    PhysicalProps {
        handle_types: HandleTypes::OS,
        ..PhysicalProps::device(D0)
    }
}

fn exporting_and_importing<B: Backing>(d: Machine<B>) {
    let export = |handle, kind, flags| unsafe { d.export(handle, kind, flags) };
    let import = |source, kind| unsafe { d.import(source, kind) };
    let fd_type = HandleTypes::OS;
    let unshared = page(&d);
    let handle = d.create(PAGE, &shareable(), 0).unwrap();
    assert_eq!(code(export(unshared, fd_type, 0)), INVALID_VALUE);
    assert_eq!(code(export(handle, fd_type, 1)), INVALID_VALUE);
    assert_eq!(code(export(handle, HandleTypes::FABRIC, 0)), INVALID_VALUE);
    assert_eq!(code(export(handle, HandleTypes::empty(), 0)), INVALID_VALUE);
    assert_eq!(
        code(export(PhysicalHandle::NULL, fd_type, 0)),
        INVALID_VALUE
    );
    let first = export(handle, fd_type, 0).unwrap();
    let second = export(handle, fd_type, 0).unwrap();
    let source = first.as_source();
    assert_ne!(source.os_handle(), second.as_source().os_handle());

    let some_file = OsHandle::from(File::open(std::env::current_exe().unwrap()).unwrap());
    let bad = NO_HANDLES.map(source_of);
    for bad in [Exported::from(some_file).as_source()].iter().chain(&bad) {
        assert_eq!(code(import(*bad, fd_type)), UNKNOWN, "{bad:?}");
    }
    assert_eq!(code(import(source, HandleTypes::FABRIC)), INVALID_VALUE);
    assert_eq!(code(import(source, HandleTypes::empty())), INVALID_VALUE);

    let imported = import(source, fd_type).unwrap();
    assert_ne!(imported, handle);
    assert_eq!(
        d.live().physical_bytes,
        2 * PAGE,
        "the same memory under another handle"
    );
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB - 2 * PAGE);
    unsafe {
        assert_eq!(
            d.physical_props(imported),
            Ok(PhysicalProps::device(D0)),
            "without the type"
        );
        assert_eq!(
            code(export(imported, fd_type, 0)),
            INVALID_VALUE,
            "no second hand"
        );
        let va = d.reserve(8 * PAGE, 0, ANYWHERE, 0).unwrap();
        assert_eq!(code(d.map(va, 2 * PAGE, 0, imported, 0)), NOT_SUPPORTED);
        d.map(va, PAGE, 0, imported, 0).unwrap();
        d.map(at(va, PAGE), PAGE, 0, handle, 0).unwrap();
        d.set_access(va, 2 * PAGE, &[rw(D0)]).unwrap();
        d.fill(D0, va, 33, PAGE).unwrap();
        if d.kind() == cuvmm_driver::DriverKind::Host {
            assert_eq!(first_byte(&d, at(va, PAGE)), 33);
        }
        assert_eq!(d.retain(va), Ok(imported));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_descriptor_is_close_on_exec_and_only_a_sealed_file_is_imported() {
    let d = model(Default::default());
    let handle = d.create(PAGE, &shareable(), 0).unwrap();
    let Exported::Fd(fd) = unsafe { d.export(handle, HandleTypes::POSIX_FD, 0) }.unwrap() else {
        panic!("a descriptor")
    };
    let flags = rustix::io::fcntl_getfd(&fd).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    let null = OsHandle::from(File::open("/dev/null").unwrap());
    let unsealed = rustix::fs::memfd_create("cuvmm-1-0", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    for bad in [null, unsealed].map(Exported::from) {
        let imported = unsafe { d.import(bad.as_source(), HandleTypes::POSIX_FD) };
        assert_eq!(code(imported), UNKNOWN, "{bad:?}");
    }
}

fn an_open_descriptor_keeps_memory<B: Backing>(d: Machine<B>) {
    let free = || d.memory_info(D0).unwrap().free;
    let handle = d.create(GIB, &shareable(), 0).unwrap();
    let exported = unsafe { d.export(handle, HandleTypes::OS, 0) }.unwrap();
    unsafe { d.release(handle) }.unwrap();
    assert_eq!(free(), 3 * GIB, "the descriptor keeps it");
    assert_eq!(d.live().exported_only, 1);
    let copy = copy_of(&exported);
    drop(exported);
    assert_eq!(free(), 3 * GIB, "a copy of the descriptor keeps it");
    let again = unsafe { d.import(copy.as_source(), HandleTypes::OS) }.unwrap();
    drop(copy);
    assert_eq!(free(), 3 * GIB, "the import keeps it");
    assert_eq!(d.live().exported_only, 0);
    unsafe { d.release(again) }.unwrap();
    assert_eq!(free(), 4 * GIB);
    assert!(d.live().is_nothing());
}

fn counting_bytes<B: Backing>(d: Machine<B>) {
    let free = |device| d.memory_info(device).unwrap().free;
    let props = PhysicalProps::device(D1);
    let handle = d.create(512 * MIB, &props, 0).unwrap();
    assert_eq!((free(D0), free(D1)), (4 * GIB, 4 * GIB - 512 * MIB));
    assert_eq!(code(d.create(4 * GIB, &props, 0)), OUT_OF_MEMORY);
    let rest = d.create(4 * GIB - 512 * MIB, &props, 0).unwrap();
    assert_eq!(free(D1), 0);
    assert_eq!(code(d.create(PAGE, &props, 0)), OUT_OF_MEMORY);
    unsafe { d.release(handle) }.unwrap();
    assert_eq!(free(D1), 512 * MIB);
    unsafe { d.release(rest) }.unwrap();
    assert_eq!(d.memory_info(D1).unwrap().total, 4 * GIB);
    assert_eq!(d.total_memory(D1), Ok(4 * GIB));
    let on_host = d
        .create(PAGE, &PhysicalProps::at(Location::HOST), 0)
        .unwrap();
    assert_eq!(
        (free(D0), free(D1)),
        (4 * GIB, 4 * GIB),
        "host memory is not a device's"
    );
    unsafe { d.release(on_host) }.unwrap();
}

fn copies_are_checked_at_the_call<B: Backing>(d: Machine<B>) {
    // Read and write, read only, no access, not mapped.
    let r = range(&d, 4, 3);
    let mut bytes = [0; 64];
    unsafe {
        d.set_access(r.page(1), PAGE, &[ro(D0)]).unwrap();
        d.set_access(r.page(2), PAGE, &[none(D0)]).unwrap();
        for (index, readable, writable) in [
            (0, true, true),
            (1, true, false),
            (2, false, false),
            (3, false, false),
        ] {
            let there = r.page(index);
            let expect = |yes| if yes { SUCCESS } else { INVALID_VALUE };
            assert_eq!(
                code(d.fill(D0, there, 1, PAGE)),
                expect(writable),
                "{index}"
            );
            assert_eq!(
                code(d.copy_to_device(D0, there, &bytes)),
                expect(writable),
                "{index}"
            );
            assert_eq!(
                code(d.copy_to_host(D0, &mut bytes, there)),
                expect(readable),
                "{index}"
            );
            assert_eq!(
                code(d.copy_on_device(D0, r.at, there, 64)),
                expect(readable),
                "{index}"
            );
            assert_eq!(
                code(d.copy_on_device(D0, there, r.at, 64)),
                expect(writable),
                "{index}"
            );
        }
        let over = at(r.page(1), PAGE - 32);
        assert_eq!(
            code(d.copy_to_host(D0, &mut bytes, over)),
            INVALID_VALUE,
            "an overrun"
        );
        let over = at(r.at, PAGE - 32);
        assert_eq!(
            code(d.copy_to_host(D0, &mut bytes, over)),
            SUCCESS,
            "over two mappings"
        );
        assert_eq!(
            code(d.copy_to_device(D0, over, &bytes)),
            INVALID_VALUE,
            "one is read only"
        );
        assert_eq!(code(d.fill(D0, r.page(3), 1, 0)), SUCCESS, "no bytes");
        d.context_synchronize(D0).unwrap();
    }
}

fn pointers<B: Backing>(d: Machine<B>) {
    let r = range(&d, 3, 2);
    let inside = at(r.page(1), 77);
    let ask = |address, attribute| d.pointer_attribute(D0, address, attribute);
    assert_eq!(d.address_range(D0, inside), Ok((r.page(1), PAGE)));
    let not_found = CUresult::CUDA_ERROR_NOT_FOUND;
    unsafe { d.set_access(r.at, PAGE, &[none(D0)]) }.unwrap();
    assert_eq!(code(d.address_range(D0, r.at)), not_found, "closed");
    assert_eq!(ask(r.at, PointerAttribute::RANGE_SIZE), Ok(3 * PAGE));
    assert_eq!(ask(r.at, PointerAttribute::MAPPING_SIZE), Ok(PAGE));
    unsafe { d.set_access(r.at, PAGE, &[ro(D0)]) }.unwrap();
    assert_eq!(d.address_range(D0, r.at), Ok((r.at, PAGE)), "open to read");
    assert_eq!(code(d.address_range(D0, r.page(2))), not_found, "a hole");
    assert_eq!(ask(inside, PointerAttribute::MEMORY_TYPE), Ok(2));
    assert_eq!(ask(inside, PointerAttribute::DEVICE_ORDINAL), Ok(0));
    assert_eq!(ask(inside, PointerAttribute::IS_MANAGED), Ok(0));
    assert_eq!(ask(inside, PointerAttribute::ALLOWED_HANDLE_TYPES), Ok(0));
    assert_eq!(ask(inside, PointerAttribute::RANGE_START_ADDR), Ok(r.at.0));
    assert_eq!(
        ask(inside, PointerAttribute::MAPPING_BASE_ADDR),
        Ok(r.page(1).0)
    );
    assert_ne!(
        ask(r.at, PointerAttribute::BUFFER_ID),
        ask(r.page(1), PointerAttribute::BUFFER_ID)
    );
    for attribute in [
        PointerAttribute::MEMORY_TYPE,
        PointerAttribute::RANGE_START_ADDR,
    ] {
        assert_eq!(
            code(ask(r.page(2), attribute)),
            INVALID_VALUE,
            "reserved, unmapped"
        );
    }
    assert_eq!(code(d.ipc_mem_handle(D0, r.at)), INVALID_VALUE);
    unsafe {
        assert_eq!(code(d.free(D0, r.at)), INVALID_VALUE);
        let buffer = d.dma_buf(D0, r.at, 2 * PAGE).map(Exported::from);
        if cfg!(windows) {
            assert_eq!(code(buffer), NOT_SUPPORTED);
        } else {
            let imported = d.import(buffer.unwrap().as_source(), HandleTypes::OS);
            assert_eq!(code(imported), UNKNOWN, "no physical");
        }
        assert_eq!(code(d.dma_buf(D0, r.at, 3 * PAGE)), INVALID_VALUE, "a hole");
    }
}

fn host_memory_opens_to_both<B: Backing>(d: Machine<B>) {
    for location in [Location::HOST, Location::host_numa(0)] {
        let handle = d.create(PAGE, &PhysicalProps::at(location), 0).unwrap();
        let va = d.reserve(PAGE, 0, ANYWHERE, 0).unwrap();
        let for_host = AccessDesc {
            location,
            flags: AccessFlags::READ_WRITE,
        };
        unsafe {
            d.map(va, PAGE, 0, handle, 0).unwrap();
            d.set_access(va, PAGE, &[rw(D0), for_host]).unwrap();
            assert_eq!(d.get_access(va, location), Ok(AccessFlags::READ_WRITE));
            assert_eq!(code(d.fill(D0, va, 9, PAGE)), SUCCESS);
        }
        assert_eq!(
            d.pointer_attribute(D0, va, PointerAttribute::MEMORY_TYPE),
            Ok(1)
        );
    }
}

fn the_ceiling_of_mappings<B: Backing>(d: Machine<B>) {
    drop(d);
    let d = model(ModelOptions::new().mapping_ceiling(3));
    let r = range(&d, 8, 3);
    unsafe {
        d.map(r.page(3), PAGE, 0, r.handles[0], 0).unwrap();
        let before = d.snapshot();
        assert_eq!(
            code(d.set_access(r.page(3), PAGE, &[rw(D0)])),
            OUT_OF_MEMORY
        );
        assert_eq!(code(d.set_access(r.at, 4 * PAGE, &[rw(D0)])), OUT_OF_MEMORY);
        assert_eq!(d.snapshot(), before);
        d.set_access(r.page(3), PAGE, &[rw(D1)]).unwrap();
        d.set_access(r.at, PAGE, &[ro(D0)]).unwrap();
        d.set_access(r.at, PAGE, &[none(D0)]).unwrap();
        d.set_access(r.page(3), PAGE, &[rw(D0)]).unwrap();
        d.unmap(r.page(1), PAGE).unwrap();
        d.set_access(r.at, PAGE, &[rw(D0)]).unwrap();
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_measured_ceiling() {
    let d = model(ModelOptions::new());
    let count = 524_001;
    let va = d.reserve(count * PAGE, 0, ANYWHERE, 0).unwrap();
    let handle = page(&d);
    unsafe {
        for index in 0..count {
            d.map(at(va, index * PAGE), PAGE, 0, handle, 0).unwrap();
        }
        d.set_access(va, (count - 1) * PAGE, &[rw(D0)]).unwrap();
        let last = at(va, (count - 1) * PAGE);
        assert_eq!(code(d.set_access(last, PAGE, &[rw(D0)])), OUT_OF_MEMORY);
        assert_eq!(
            d.memory_info(D0).unwrap().free,
            4 * GIB - PAGE,
            "while memory is free"
        );
        assert_eq!(
            code(d.set_access(last, PAGE, &[rw(D1)])),
            SUCCESS,
            "each device has its own"
        );
        d.unmap(va, count * PAGE).unwrap();
    }
}

fn devices<B: Backing>(d: Machine<B>) {
    assert_eq!(d.device_count(), Ok(2));
    assert!(d.version().unwrap() >= CudaVersion::new(12, 5));
    assert_ne!(d.device_uuid(D0).unwrap(), d.device_uuid(D1).unwrap());
    assert!(!d.device_name(D1).unwrap().is_empty());
    assert_eq!(
        d.device_attribute(D0, DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT),
        Ok(1)
    );
    assert_eq!(
        d.device_attribute(D0, DeviceAttribute::HANDLE_TYPE_FABRIC),
        Ok(1),
        "so it says"
    );
    assert_eq!(
        code(d.device_attribute(D0, DeviceAttribute(-5))),
        INVALID_VALUE
    );
    for bad in [Ordinal(-1), Ordinal(2)] {
        assert_eq!(code(d.device_name(bad)), INVALID_DEVICE);
        assert_eq!(code(d.memory_info(bad)), INVALID_DEVICE);
        assert_eq!(code(d.alloc(bad, PAGE)), INVALID_DEVICE);
        assert_eq!(code(d.context_synchronize(bad)), INVALID_DEVICE);
    }
}

fn strictly<B: Backing>(d: Machine<B>) {
    let bad = PhysicalProps::device(Ordinal(99));
    assert_eq!(
        code(d.allocation_granularity(&bad, GranularityKind::MINIMUM)),
        INVALID_DEVICE
    );
    let handle_types = HandleTypes::from_bits_retain(0x40);
    let odd = PhysicalProps {
        handle_types,
        ..PhysicalProps::device(D0)
    };
    assert_eq!(code(d.create(PAGE, &odd, 0)), INVALID_VALUE);
    let r = range(&d, 4, 1);
    let large = d.create(2 * PAGE, &PhysicalProps::device(D0), 0).unwrap();
    unsafe {
        d.map(r.page(2), PAGE, 0, r.handles[0], 0).unwrap();
        let before = d.snapshot();
        assert_eq!(
            code(d.map(r.page(3), 2 * PAGE, 0, large, 0)),
            INVALID_VALUE,
            "past the end"
        );
        assert_eq!(
            code(d.unmap(r.at, 3 * PAGE)),
            INVALID_VALUE,
            "a hole between"
        );
        assert_eq!(
            code(d.unmap(r.page(1), PAGE)),
            INVALID_VALUE,
            "nothing mapped"
        );
        assert_eq!(
            code(d.unmap(r.page(3), 2 * PAGE)),
            INVALID_VALUE,
            "past the end"
        );
        assert_eq!(
            code(d.set_access(r.at, 3 * PAGE, &[rw(D0)])),
            INVALID_VALUE,
            "over a hole"
        );
        assert_eq!(d.snapshot(), before);
        d.release(r.handles[0]).unwrap();
        assert_eq!(
            code(d.map(r.page(1), PAGE, 0, r.handles[0], 0)),
            INVALID_VALUE,
            "released"
        );
        assert_eq!(code(d.unmap(r.at, PAGE)), SUCCESS);
    }
}

#[test]
fn strict_manner() {
    strictly(model(ModelOptions::new().manner(Manner::Strict)));
    strictly(host(HostOptions::new().manner(Manner::Strict)));
}

#[test]
fn older_versions_lack_symbols() {
    let d = model(ModelOptions::new().version(CudaVersion::new(12, 4)));
    let event = d.event_create(D0, Default::default()).unwrap();
    let answer = unsafe { d.context_record_event(D0, event) };
    let Err(DriverError::MissingSymbol {
        call,
        symbol,
        since,
    }) = answer
    else {
        panic!("{answer:?}")
    };
    assert_eq!(
        (call, since),
        (Call::CtxRecordEvent, CudaVersion::new(12, 5))
    );
    assert!(symbol.starts_with("cuCtxRecordEvent"));
    let old = model(ModelOptions::new().version(CudaVersion::new(10, 2)));
    assert!(matches!(
        old.retain(DeviceAddress(0)),
        Err(DriverError::MissingSymbol { .. })
    ));
    assert_eq!(code(old.reserve(PAGE, 0, ANYWHERE, 0)), SUCCESS);
    assert_eq!(code(old.memory_info(D0)), SUCCESS);
}

#[test]
fn fabric_handles_where_they_are_permitted() {
    let d = model(ModelOptions::new().fabric(true));
    let handle_types = HandleTypes::FABRIC | HandleTypes::OS;
    let props = PhysicalProps {
        handle_types,
        ..PhysicalProps::device(D0)
    };
    let handle = d.create(PAGE, &props, 0).unwrap();
    unsafe {
        let Exported::Fabric(name) = d.export(handle, HandleTypes::FABRIC, 0).unwrap() else {
            panic!("64 bytes")
        };
        assert_eq!(
            code(d.export(handle, handle_types, 0)),
            INVALID_VALUE,
            "one type at a time"
        );
        assert_eq!(
            code(d.import(ImportSource::Fabric(name), HandleTypes::FABRIC)),
            SUCCESS
        );
        assert_eq!(
            code(d.import(ImportSource::Fabric([7; 64]), HandleTypes::FABRIC)),
            UNKNOWN
        );
    }
}
