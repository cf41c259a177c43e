//! Memory outside virtual memory management: plain, pooled, pinned, managed.
//!
//! `unsafe` because the driver's methods are, and deliberately misused.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::thread;
use std::time::Duration;

use crate::model_support::*;
use crate::on_both;
use cuvmm_driver::{
    Advice, CUresult, CudaVersion, DeviceAddress, DeviceAttribute, Driver, DriverError, DriverKind,
    EventFlags, Location, LocationKind, Ordinal, PhysicalProps, PointerAttribute, RangeAttribute,
    StreamFlags, StreamHandle,
};
use cuvmm_model::model::{Backing, Machine, ModelOptions};

on_both!(
    plain,
    freeing_waits_for_the_device,
    pooled,
    a_pool_gives_back_when_something_is_waited_for,
    pinned,
    registered,
    managed,
    advice,
    places_of_managed_memory,
    who_managed_memory_is_accessed_by
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

fn freeing_waits_for_the_device<B: Backing>(d: Machine<B>) {
    let s = d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap();
    let address = d.alloc(D0, PAGE).unwrap();
    d.hold(D0, s);
    unsafe { d.fill_async(D0, address, 1, PAGE, s) }.unwrap();
    thread::scope(|scope| {
        let free = scope.spawn(|| code(unsafe { d.free(D0, address) }));
        thread::sleep(Duration::from_millis(20));
        assert!(!free.is_finished());
        assert_eq!(d.live().allocations, 1);
        d.release_stream(D0, s);
        assert_eq!(free.join().unwrap(), SUCCESS);
    });
    assert_eq!(d.live().allocations, 0);
    assert_eq!(code(d.context_synchronize(D0)), SUCCESS);
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

fn a_pool_gives_back_when_something_is_waited_for<B: Backing>(d: Machine<B>) {
    let free = || d.memory_info(D0).unwrap().free;
    let (s, other) = (StreamHandle::NULL, StreamHandle::LEGACY);
    let all = free();
    // Pools obtain memory in steps of this size.
    const STEP: u64 = 32 << 20;
    unsafe {
        let event = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
        for wait in 0..3 {
            let a = d.alloc_async(D0, 2 * STEP, s).unwrap();
            d.free_async(D0, a, s).unwrap();
            assert!(d.stream_query(D0, s).unwrap());
            assert_eq!(free(), all - 2 * STEP, "the pool keeps it");
            let again = d.alloc_async(D0, 3 * STEP, other).unwrap();
            assert_eq!(free(), all - 3 * STEP, "and uses it again");
            d.free_async(D0, again, other).unwrap();
            let waited = match wait {
                0 => d.stream_synchronize(D0, s),
                1 => d.event_synchronize(D0, event),
                _ => d.context_synchronize(D0),
            };
            assert_eq!((code(waited), free()), (SUCCESS, all));
        }
        d.event_destroy(D0, event).unwrap();

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

fn managed<B: Backing>(d: Machine<B>) {
    assert_eq!(code(d.managed_alloc(D0, 0, 1)), INVALID_VALUE);
    assert_eq!(code(d.managed_alloc(D0, PAGE, 0)), INVALID_VALUE);
    assert_eq!(code(d.managed_alloc(D0, PAGE, 3)), INVALID_VALUE);
    let address = d.managed_alloc(D0, 16 * MIB, 1).unwrap();
    assert_eq!(
        d.pointer_attribute(D0, address, PointerAttribute::IS_MANAGED),
        Ok(1)
    );
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address.0 as usize);
    unsafe {
        pointer.add(100).write(1);
        assert_eq!(pointer.add(100).read(), 1, "the host touches it directly");
        d.fill(D0, address, 3, 16 * MIB).unwrap();
        d.context_synchronize(D0).unwrap();
        if d.kind() == DriverKind::Host {
            assert_eq!(pointer.add(100).read(), 3);
        }
        assert_eq!(
            d.peek(D0, address, &mut [0]),
            Err(INVALID_VALUE),
            "the program's own"
        );
        for location in [Location::device(D0), Location::HOST] {
            d.prefetch(D0, address, 16 * MIB, location, StreamHandle::NULL)
                .unwrap();
        }
        let nowhere = Location::device(Ordinal(9));
        assert_ne!(
            code(d.prefetch(D0, address, PAGE, nowhere, StreamHandle::NULL)),
            SUCCESS
        );
        let r = range(&d, 1, 1);
        let on_mapping = d.prefetch(D0, r.at, PAGE, Location::HOST, StreamHandle::NULL);
        assert_eq!(code(on_mapping), INVALID_VALUE);
        d.free(D0, address).unwrap();
        assert_eq!(code(d.free(D0, address)), INVALID_VALUE, "twice");
    }
}

fn advice<B: Backing>(d: Machine<B>) {
    let address = d.managed_alloc(D0, 4 * PAGE, 1).unwrap();
    let ask = |from, pages, attribute| {
        d.range_attribute(D0, at(address, from * PAGE), pages * PAGE, attribute)
    };
    let tell = |from, pages, advice, location| {
        code(d.advise(D0, at(address, from * PAGE), pages * PAGE, advice, location))
    };
    assert_eq!(ask(0, 4, RangeAttribute::READ_MOSTLY), Ok(0));
    assert_eq!(ask(0, 4, RangeAttribute::PREFERRED_LOCATION), Ok(-2));
    assert_eq!(
        tell(1, 2, Advice::SET_READ_MOSTLY, Location::device(D0)),
        SUCCESS
    );
    assert_eq!(ask(1, 2, RangeAttribute::READ_MOSTLY), Ok(1));
    assert_eq!(ask(1, 1, RangeAttribute::READ_MOSTLY), Ok(1));
    assert_eq!(
        ask(0, 4, RangeAttribute::READ_MOSTLY),
        Ok(0),
        "not the whole of it"
    );
    assert_eq!(
        tell(2, 1, Advice::UNSET_READ_MOSTLY, Location::device(D0)),
        SUCCESS
    );
    assert_eq!(ask(1, 2, RangeAttribute::READ_MOSTLY), Ok(0));
    assert_eq!(
        tell(0, 4, Advice::SET_PREFERRED_LOCATION, Location::device(D1)),
        SUCCESS
    );
    assert_eq!(ask(0, 4, RangeAttribute::PREFERRED_LOCATION), Ok(1));
    assert_eq!(
        tell(3, 1, Advice::SET_PREFERRED_LOCATION, Location::HOST),
        SUCCESS
    );
    assert_eq!(ask(3, 1, RangeAttribute::PREFERRED_LOCATION), Ok(-1));
    assert_eq!(
        ask(0, 4, RangeAttribute::PREFERRED_LOCATION),
        Ok(-2),
        "not the same everywhere"
    );
    unsafe { d.prefetch(D0, address, PAGE, Location::device(D1), StreamHandle::NULL) }.unwrap();
    assert_eq!(ask(0, 1, RangeAttribute::LAST_PREFETCH_LOCATION), Ok(1));
    assert_eq!(ask(1, 1, RangeAttribute::LAST_PREFETCH_LOCATION), Ok(-2));
    assert_eq!(
        tell(0, 5, Advice::SET_READ_MOSTLY, Location::HOST),
        INVALID_VALUE,
        "too long"
    );
    assert_eq!(tell(0, 4, Advice(99), Location::HOST), INVALID_VALUE);
    assert_eq!(code(ask(0, 4, RangeAttribute(99))), INVALID_VALUE);
    assert_eq!(code(ask(0, 0, RangeAttribute::READ_MOSTLY)), INVALID_VALUE);
}

fn places_of_managed_memory<B: Backing>(d: Machine<B>) {
    let address = d.managed_alloc(D0, 4 * PAGE, 1).unwrap();
    let preferred = |from, pages| {
        let ask = |attribute| {
            let start = at(address, from * PAGE);
            d.range_attribute(D0, start, pages * PAGE, attribute)
                .unwrap()
        };
        (
            ask(RangeAttribute::PREFERRED_LOCATION),
            ask(RangeAttribute::PREFERRED_LOCATION_TYPE),
            ask(RangeAttribute::PREFERRED_LOCATION_ID),
        )
    };
    let prefer = |from, pages, place| {
        let advice = Advice::SET_PREFERRED_LOCATION;
        code(d.advise(D0, at(address, from * PAGE), pages * PAGE, advice, place))
    };
    assert_eq!(preferred(0, 4), (-2, LocationKind::INVALID.0, -2));
    assert_eq!(prefer(0, 4, Location::host_numa(0)), SUCCESS);
    let untold = (-2, LocationKind::INVALID.0, -2);
    assert_eq!(
        preferred(0, 4),
        untold,
        "a node is accepted and not reported"
    );
    let current = Location {
        kind: LocationKind::HOST_NUMA_CURRENT,
        id: 77,
    };
    assert_eq!(prefer(1, 1, current), SUCCESS);
    assert_eq!(preferred(0, 4), untold);
    assert_eq!(prefer(1, 1, Location::HOST), SUCCESS);
    assert_eq!(preferred(1, 1).1, LocationKind::HOST.0);
    assert_eq!(
        preferred(0, 4).1,
        LocationKind::INVALID.0,
        "a node is not the host as a whole"
    );
    assert_eq!(prefer(2, 2, Location::device(D1)), SUCCESS);
    assert_eq!(preferred(2, 2), (1, LocationKind::DEVICE.0, 1));
    for nowhere in [
        Location::host_numa(1),
        Location::host_numa(-1),
        Location::device(Ordinal(2)),
        Location {
            kind: LocationKind::INVALID,
            id: 0,
        },
    ] {
        assert_ne!(prefer(2, 2, nowhere), SUCCESS, "{nowhere}");
    }
    assert_eq!(preferred(2, 2), (1, LocationKind::DEVICE.0, 1));

    // The stream is held back: the reported location is that of the last prefetch, whether or not
    // it has run.
    let stream = d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap();
    d.hold(D0, stream);
    // One byte means one page of the host.
    unsafe { d.prefetch(D0, at(address, 1), 1, Location::host_numa(0), stream) }.unwrap();
    let sent = |start, size| {
        let ask = |attribute| d.range_attribute(D0, start, size, attribute).unwrap();
        (
            ask(RangeAttribute::LAST_PREFETCH_LOCATION),
            ask(RangeAttribute::LAST_PREFETCH_LOCATION_TYPE),
            ask(RangeAttribute::LAST_PREFETCH_LOCATION_ID),
        )
    };
    assert_eq!(sent(address, 4096), (-1, LocationKind::HOST_NUMA.0, 0));
    assert_eq!(sent(address, PAGE), (-2, LocationKind::INVALID.0, -2));
    d.release_stream(D0, stream);
    unsafe {
        d.free(D0, address).unwrap();
        d.stream_destroy(D0, stream).unwrap();
    }
}

fn who_managed_memory_is_accessed_by<B: Backing>(d: Machine<B>) {
    let address = d.managed_alloc(D0, 4 * PAGE, 1).unwrap();
    let users = |from, pages| {
        d.range_accessed_by(D0, at(address, from * PAGE), pages * PAGE)
            .unwrap()
    };
    let tell = |from, pages, advice, user| {
        code(d.advise(D0, at(address, from * PAGE), pages * PAGE, advice, user))
    };
    let (one, two) = (Location::device(D0), Location::device(D1));
    assert_eq!(users(0, 4), []);
    assert_eq!(tell(0, 4, Advice::SET_ACCESSED_BY, one), SUCCESS);
    assert_eq!(tell(0, 2, Advice::SET_ACCESSED_BY, Location::HOST), SUCCESS);
    assert_eq!(tell(1, 3, Advice::SET_ACCESSED_BY, two), SUCCESS);
    assert_eq!(users(1, 1), [one, two, Location::HOST]);
    assert_eq!(users(0, 4), [one], "only who accesses all of it");
    assert_eq!(users(2, 2), [one, two]);
    assert_eq!(tell(0, 4, Advice::UNSET_ACCESSED_BY, one), SUCCESS);
    assert_eq!(users(0, 4), []);
    assert_eq!(users(0, 2), [Location::HOST]);
    for advice in [Advice::SET_ACCESSED_BY, Advice::UNSET_ACCESSED_BY] {
        let node = Location::host_numa(0);
        assert_eq!(
            tell(0, 4, advice, node),
            INVALID_VALUE,
            "a node touches nothing"
        );
    }
    assert_eq!(code(d.range_accessed_by(D0, address, 0)), INVALID_VALUE);
    assert_eq!(
        code(d.range_accessed_by(D0, address, 4 * PAGE + 1)),
        INVALID_VALUE
    );
    unsafe { d.free(D0, address).unwrap() };
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
