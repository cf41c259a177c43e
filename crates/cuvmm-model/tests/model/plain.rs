//! Memory outside virtual memory management: plain, pooled, pinned, managed.
//!
//! `unsafe` because the driver's methods are, and deliberately misused.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::model_support::*;
use crate::on_both;
use cuvmm_driver::{
    Advice, CUresult, CudaVersion, DeviceAddress, DeviceAttribute, Driver, DriverError, DriverKind,
    Location, LocationKind, PhysicalProps, PointerAttribute, RangeAttribute, StreamFlags,
    StreamHandle,
};
use cuvmm_model::model::{Backing, Machine, ModelOptions};

on_both!(
    plain,
    pooled,
    what_a_pool_keeps_is_its_own,
    pinned,
    registered,
    managed_memory_belongs_to_the_program,
    advice_for_a_part,
);

fn plain<B: Backing>(d: Machine<B>) {
    assert_eq!(code(d.alloc(D0, 0)), INVALID_VALUE);
    assert_eq!(code(d.alloc(D0, 5 * GIB)), OUT_OF_MEMORY);
    let a = d.alloc(D0, 1000).unwrap();
    let b = d.alloc(D0, PAGE).unwrap();
    let r = range(&d, 1, 1);
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB - 3 * PAGE);
    assert_eq!(d.address_range(D0, at(a, 9)), Ok((a, 1000)));
    let mut bytes = [0; 1000];
    unsafe {
        assert_eq!(code(d.fill(D0, a, 1, 1001)), INVALID_VALUE, "past its end");
        d.fill(D0, b, 3, PAGE).unwrap();
        d.copy_on_device(D0, a, b, 1000).unwrap();
        d.copy_on_device(D0, r.at, a, 1000).unwrap();
        d.copy_to_host(D0, &mut bytes, r.at).unwrap();
        if d.kind() == DriverKind::Host {
            assert_eq!(
                bytes, [3; 1000],
                "from allocation to allocation to mapping to host"
            );
            d.copy_to_device(D0, b, &[9; 1000]).unwrap();
            d.copy_to_host(D0, &mut bytes, b).unwrap();
            assert_eq!(bytes, [9; 1000]);
        }
        assert_eq!(code(d.ipc_mem_handle(D0, a)), SUCCESS);
        assert_eq!(code(d.free(D0, at(a, 1))), INVALID_VALUE);
        d.free(D0, a).unwrap();
        d.free(D0, b).unwrap();
        assert_eq!(code(d.free(D0, b)), INVALID_VALUE, "twice");
    }
    r.end(&d);
    assert!(d.live().is_nothing());
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
}

fn pooled<B: Backing>(d: Machine<B>) {
    let s = d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap();
    unsafe {
        let a = d.alloc_async(D0, PAGE, s).unwrap();
        d.fill_async(D0, a, 1, PAGE, s).unwrap();
        d.hold(D0, s);
        d.fill_async(D0, a, 2, PAGE, s).unwrap();
        d.free_async(D0, a, s).unwrap();
        assert_eq!(code(d.free_async(D0, a, s)), INVALID_VALUE, "twice");
        assert_eq!(d.live().allocations, 1, "until the stream gets there");
        d.release_stream(D0, s);
        assert_eq!(d.live().allocations, 0);
        assert_eq!(code(d.context_synchronize(D0)), SUCCESS);
        let nothing = d.alloc_async(D0, 0, s).unwrap();
        d.free_async(D0, nothing, s).unwrap();

        let b = d.alloc_async(D0, PAGE, s).unwrap();
        d.hold(D0, s);
        d.free_async(D0, b, s).unwrap();
        d.lose_context(D0, ILLEGAL_ADDRESS);
        assert_eq!(d.live().allocations, 0, "a lost context does not leak it");
    }
}

fn what_a_pool_keeps_is_its_own<B: Backing>(d: Machine<B>) {
    let (s, all) = (StreamHandle::NULL, d.memory_info(D0).unwrap().free);
    // Pools obtain memory in steps of this size.
    const STEP: u64 = 32 << 20;
    unsafe {
        let a = d.alloc_async(D0, 3 * STEP, s).unwrap();
        d.free_async(D0, a, s).unwrap();
        let rest = d.create(all, &PhysicalProps::device(D0), 0);
        assert_eq!(code(rest), OUT_OF_MEMORY, "nothing is waited for here");
        let a = d.alloc_async(D0, all, s).unwrap();
        d.free_async(D0, a, s).unwrap();
        d.lose_context(D0, ILLEGAL_ADDRESS);
    }
}

fn pinned<B: Backing>(d: Machine<B>) {
    let none = d.host_alloc(D0, 0, 0).unwrap();
    unsafe { d.host_free(D0, none) }.unwrap();
    assert_eq!(code(d.host_alloc(D0, PAGE, 8)), INVALID_VALUE);
    let pointer = d.host_alloc(D0, 5000, 1).unwrap();
    let address = DeviceAddress(pointer.expose_provenance() as u64);
    assert_eq!(
        d.pointer_attribute(D0, address, PointerAttribute::MEMORY_TYPE),
        Ok(1)
    );
    unsafe {
        for index in 0..5000 {
            assert_eq!(pointer.add(index).read(), 0);
            pointer.add(index).write(7);
        }
        let r = range(&d, 1, 1);
        d.copy_to_device_async(D0, r.at, pointer, 5000, StreamHandle::NULL)
            .unwrap();
        d.fill(D0, r.at, 8, 2500).unwrap();
        d.copy_to_host_async(D0, pointer, r.at, 5000, StreamHandle::NULL)
            .unwrap();
        if d.kind() == DriverKind::Host {
            assert_eq!((pointer.read(), pointer.add(2500).read()), (8, 7));
        }
        assert_eq!(code(d.free(D0, address)), INVALID_VALUE, "not that way");
        d.host_free(D0, pointer).unwrap();
        assert_eq!(code(d.host_free(D0, pointer)), INVALID_VALUE);
    }
}

fn registered<B: Backing>(d: Machine<B>) {
    let mut memory = vec![7_u8; 4 * 4096];
    let at = memory.as_mut_ptr();
    let (part, end) = unsafe { (at.add(4096), at.add(2 * 4096)) };
    let null = std::ptr::null_mut();
    let pinned = d.host_alloc(D0, 4096, 0).unwrap();
    let known = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    let unknown = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    unsafe {
        for (start, size, flags) in [
            (at, 0, 0),
            (null, 4096, 0),
            (at, u64::MAX, 0),
            (at, 4096, 4),
            (at, 4096, 16),
            (pinned, 4096, 0),
        ] {
            let refused = d.host_register(D0, start, size, flags);
            assert_eq!(code(refused), INVALID_VALUE, "{start:?} {size} {flags}");
        }
        assert_eq!(code(d.host_unregister(D0, at)), unknown);
        assert_eq!(code(d.host_unregister(D0, null)), INVALID_VALUE);
        assert_eq!(code(d.host_unregister(D0, pinned)), INVALID_VALUE);

        d.host_register(D0, at, 2 * 4096, 1).unwrap();
        d.host_register(D0, end, 2 * 4096, 8).unwrap();
        assert_eq!(d.live().registered, 2);
        for (start, size) in [(at, 2 * 4096), (part, 1), (part, 2 * 4096), (end, 1)] {
            assert_eq!(code(d.host_register(D0, start, size, 0)), known);
        }
        assert_eq!(code(d.host_unregister(D0, part)), INVALID_VALUE, "inside");

        // A copy lies within one registration.
        let r = range(&d, 1, 1);
        d.copy_to_device_async(D0, r.at, part, 4096, StreamHandle::NULL)
            .unwrap();
        let spans = d.copy_to_device_async(D0, r.at, part, 4097, StreamHandle::NULL);
        assert_eq!(code(spans), INVALID_VALUE);
        let spans = d.copy_to_host_async(D0, part, r.at, 4097, StreamHandle::NULL);
        assert_eq!(code(spans), INVALID_VALUE);
        d.stream_synchronize(D0, StreamHandle::NULL).unwrap();
        if d.kind() == DriverKind::Host {
            assert_eq!(first_byte(&d, r.at), 7);
        }
        d.host_unregister(D0, at).unwrap();
        assert_eq!(code(d.host_unregister(D0, at)), unknown);
        d.host_unregister(D0, end).unwrap();
        assert_eq!(d.live().registered, 0);
        d.host_free(D0, pinned).unwrap();
    }
}

fn managed_memory_belongs_to_the_program<B: Backing>(d: Machine<B>) {
    let address = d.managed_alloc(D0, 16 * MIB, 1).unwrap();
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address.0 as usize);
    unsafe {
        pointer.add(100).write(1);
        assert_eq!(pointer.add(100).read(), 1);
    }
    assert_eq!(d.peek(D0, address, &mut [0]), Err(INVALID_VALUE));
}

fn advice_for_a_part<B: Backing>(d: Machine<B>) {
    let address = d.managed_alloc(D0, 4 * PAGE, 1).unwrap();
    let tell = |from, pages, advice, location| {
        code(d.advise(D0, at(address, from * PAGE), pages * PAGE, advice, location))
    };
    let mostly_read = |from, pages| {
        let (start, attribute) = (at(address, from * PAGE), RangeAttribute::READ_MOSTLY);
        d.range_attribute(D0, start, pages * PAGE, attribute)
            .unwrap()
    };
    let read = tell(0, 4, Advice::SET_READ_MOSTLY, Location::HOST);
    let not = tell(2, 1, Advice::UNSET_READ_MOSTLY, Location::HOST);
    assert_eq!([read, not], [SUCCESS; 2]);
    let told = [(0, 2), (2, 1), (3, 1), (0, 4)].map(|(from, pages)| mostly_read(from, pages));
    assert_eq!(told, [1, 0, 1, 0]);

    let prefer = |place| tell(0, 4, Advice::SET_PREFERRED_LOCATION, place);
    let (kind, id) = (LocationKind::HOST_NUMA_CURRENT, 77);
    assert_eq!(prefer(Location { kind, id }), SUCCESS);
    assert_ne!(prefer(Location::host_numa(-1)), SUCCESS);
}

#[test]
fn what_a_device_cannot_do_with_managed_memory_is_refused() {
    let none = DeviceAttribute::MANAGED_MEMORY;
    let d = model(ModelOptions::new().attribute(none, 0));
    let refused = d.managed_alloc(D0, PAGE, 1);
    assert_eq!(code(refused), CUresult::CUDA_ERROR_NOT_SUPPORTED);

    let alone = DeviceAttribute::CONCURRENT_MANAGED_ACCESS;
    let d = model(ModelOptions::new().attribute(alone, 0));
    let address = d.managed_alloc(D0, PAGE, 1).unwrap();
    let here = Location::device(D0);
    for place in [here, Location::HOST] {
        let moved = unsafe { d.prefetch(D0, address, PAGE, place, StreamHandle::NULL) };
        assert_eq!(code(moved), INVALID_DEVICE, "{place}");
    }
    let tell = |advice, place| code(d.advise(D0, address, PAGE, advice, place));
    assert_eq!(tell(Advice::SET_PREFERRED_LOCATION, here), INVALID_DEVICE);
    assert_eq!(tell(Advice::SET_ACCESSED_BY, here), INVALID_DEVICE);
    assert_eq!(
        tell(Advice::SET_PREFERRED_LOCATION, Location::HOST),
        SUCCESS
    );
    assert_eq!(tell(Advice::SET_READ_MOSTLY, here), SUCCESS);
    unsafe { d.free(D0, address).unwrap() };
}

#[test]
fn before_cuda_12_2_there_are_no_nodes() {
    let d = model(ModelOptions::new().version(CudaVersion::new(12, 1)));
    let address = d.managed_alloc(D0, PAGE, 1).unwrap();
    let node = Location::host_numa(0);
    let advised = d.advise(D0, address, PAGE, Advice::SET_PREFERRED_LOCATION, node);
    let moved = unsafe { d.prefetch(D0, address, PAGE, node, StreamHandle::NULL) };
    for (refused, younger) in [
        (advised, "cuMemAdvise_v2"),
        (moved, "cuMemPrefetchAsync_v2"),
    ] {
        let error = refused.unwrap_err();
        assert!(
            matches!(error, DriverError::MissingSymbol { symbol, since, .. }
                if symbol == younger && since == CudaVersion::new(12, 2)),
            "{error}"
        );
    }
    let asked = RangeAttribute::PREFERRED_LOCATION_TYPE;
    assert_eq!(
        code(d.range_attribute(D0, address, PAGE, asked)),
        INVALID_VALUE
    );
    let host = Location::HOST;
    d.advise(D0, address, PAGE, Advice::SET_PREFERRED_LOCATION, host)
        .unwrap();
    let asked = RangeAttribute::PREFERRED_LOCATION;
    assert_eq!(d.range_attribute(D0, address, PAGE, asked), Ok(-1));
    unsafe { d.free(D0, address).unwrap() };
}
