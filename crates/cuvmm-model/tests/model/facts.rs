//! Answers of the model and of the host driver that no case of `stand-in/conformance` asks for:
//! that crate holds both to what GPUs answered, call by call.
//!
//! `unsafe` because the driver's methods are, and deliberately misused: the backends under test
//! define the result of every misuse.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::model_support::*;
use crate::on_both;
use cuvmm_driver::{
    AccessDesc, AccessFlags, CUresult, Call, CudaVersion, DeviceAddress, DeviceAttribute, Driver,
    DriverError, Exported, GranularityKind, HandleTypes, ImportSource, Location, Ordinal,
    PhysicalProps, PointerAttribute,
};
use cuvmm_model::model::{Backing, Machine, Manner, ModelOptions};

on_both!(
    hints,
    creating,
    granting_to_peers,
    handles_and_their_lives,
    importing,
    an_open_descriptor_keeps_memory,
    counting_bytes,
    pointers,
    access_of_the_host,
    the_ceiling_of_mappings,
    devices,
);

fn hints<B: Backing>(d: Machine<B>) {
    let freed = d.reserve(8 * PAGE, 0, ANYWHERE, 0).unwrap();
    unsafe { d.free_reservation(freed, 8 * PAGE) }.unwrap();
    // At its start, and then at the start of the rest: adjacent reservations.
    for place in [freed, at(freed, PAGE)] {
        assert_eq!(d.reserve(PAGE, 0, place, 0).unwrap(), place, "at the start");
    }
    let over_the_end = at(freed, 7 * PAGE);
    let got = d.reserve(2 * PAGE, 0, over_the_end, 0).unwrap();
    assert_ne!(got, over_the_end);
}

fn creating<B: Backing>(d: Machine<B>) {
    let plain = PhysicalProps::device(D0);
    let create = |size, props: PhysicalProps, flags| code(d.create(size, &props, flags));
    let typed = |handle_types| PhysicalProps {
        handle_types,
        ..plain
    };
    let of_other_systems = HandleTypes::POSIX_FD | HandleTypes::WIN32 | HandleTypes::WIN32_KMT;
    for one in of_other_systems.difference(HandleTypes::OS) {
        assert_eq!(create(PAGE, typed(one), 0), INVALID_VALUE, "{one}");
    }
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
    }
}

fn granting_to_peers<B: Backing>(d: Machine<B>) {
    assert_eq!(code(d.can_access_peer(D0, Ordinal(2))), INVALID_DEVICE);
    let r = range(&d, 1, 1);
    unsafe {
        d.set_access(r.at, PAGE, &[ro(D1)]).unwrap();
        let filled = [D1, D0].map(|device| code(d.fill(device, r.at, 1, PAGE)));
        assert_eq!(filled, [INVALID_VALUE, SUCCESS], "read only for the peer");
    }
    let of_peer = d.get_access(r.at, Location::device(D1));
    assert_eq!(of_peer, Ok(AccessFlags::READ));
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

fn handles_and_their_lives<B: Backing>(d: Machine<B>) {
    let r = range(&d, 2, 1);
    let handle = r.handles[0];
    unsafe {
        for _ in 0..2 {
            d.retain(r.at).unwrap();
        }
        assert_eq!(d.live().references, 3);
        for expected in [SUCCESS, SUCCESS, SUCCESS, INVALID_VALUE] {
            assert_eq!(code(d.release(handle)), expected);
        }
        d.map(r.page(1), PAGE, 0, handle, 0).unwrap();
        d.unmap(r.at, PAGE).unwrap();
        assert_eq!(d.live().physicals, 1, "the second mapping keeps it");
        d.unmap(r.page(1), PAGE).unwrap();
        assert_eq!(d.live().physicals, 0);
        let dead = d.map(r.at, PAGE, 0, handle, 0);
        assert_eq!(code(dead), INVALID_VALUE);
    }
}

fn shareable() -> PhysicalProps {
    PhysicalProps {
        handle_types: HandleTypes::OS,
        ..PhysicalProps::device(D0)
    }
}

fn importing<B: Backing>(d: Machine<B>) {
    let handle = d.create(PAGE, &shareable(), 0).unwrap();
    let exported = unsafe { d.export(handle, HandleTypes::OS, 0) }.unwrap();
    let import = |source, kind| unsafe { d.import(source, kind) };
    for bad in NO_HANDLES.map(source_of) {
        assert_eq!(code(import(bad, HandleTypes::OS)), UNKNOWN, "{bad:?}");
    }
    let source = exported.as_source();
    for kind in [HandleTypes::FABRIC, HandleTypes::empty()] {
        assert_eq!(code(import(source, kind)), INVALID_VALUE, "{kind}");
    }
    let imported = import(source, HandleTypes::OS).unwrap();
    let live = d.live().physical_bytes;
    assert_eq!(live, PAGE, "the same memory under another handle");
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB - live);
    let va = d.reserve(PAGE, 0, ANYWHERE, 0).unwrap();
    unsafe { d.map(va, PAGE, 0, imported, 0) }.unwrap();
    assert_eq!(d.retain(va), Ok(imported));
}

#[cfg(target_os = "linux")]
#[test]
fn only_a_sealed_file_is_imported() {
    let d = model(Default::default());
    let unsealed = rustix::fs::memfd_create("cuvmm-1-0", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let unsealed = Exported::from(unsealed);
    let imported = unsafe { d.import(unsealed.as_source(), HandleTypes::POSIX_FD) };
    assert_eq!(code(imported), UNKNOWN);
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

fn pointers<B: Backing>(d: Machine<B>) {
    let r = range(&d, 3, 2);
    unsafe { d.set_access(r.at, PAGE, &[none(D0)]) }.unwrap();
    for (attribute, value) in [
        (PointerAttribute::RANGE_SIZE, 3 * PAGE),
        (PointerAttribute::RANGE_START_ADDR, r.at.0),
        (PointerAttribute::MAPPING_SIZE, PAGE),
        (PointerAttribute::MAPPING_BASE_ADDR, r.page(1).0),
    ] {
        let asked = d.pointer_attribute(D0, at(r.page(1), 77), attribute);
        assert_eq!(asked, Ok(value), "{attribute:?}");
    }
    unsafe {
        d.set_access(r.at, PAGE, &[ro(D0)]).unwrap();
        assert_eq!(d.address_range(D0, r.at), Ok((r.at, PAGE)), "open to read");
        assert_eq!(code(d.fill(D0, r.page(2), 1, 0)), SUCCESS, "no bytes");
        let buffer = d.dma_buf(D0, r.at, 2 * PAGE).map(Exported::from);
        if cfg!(windows) {
            assert_eq!(code(buffer), NOT_SUPPORTED);
        } else {
            let imported = d.import(buffer.unwrap().as_source(), HandleTypes::OS);
            assert_eq!(code(imported), UNKNOWN, "no physical");
        }
    }
}

fn access_of_the_host<B: Backing>(d: Machine<B>) {
    for location in [Location::HOST, Location::host_numa(0)] {
        let handle = d.create(PAGE, &PhysicalProps::at(location), 0).unwrap();
        let va = d.reserve(PAGE, 0, ANYWHERE, 0).unwrap();
        let flags = AccessFlags::READ_WRITE;
        unsafe {
            d.map(va, PAGE, 0, handle, 0).unwrap();
            d.set_access(va, PAGE, &[AccessDesc { location, flags }])
                .unwrap();
        }
        assert_eq!(d.get_access(va, location), Ok(flags));
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
