//! Memory pools, as far as no case of `stand-in/conformance` asks: held work, other devices and
//! processes, lost contexts, versions.
//!
//! `unsafe` because the driver's methods are, and deliberately misused.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::model_support::*;
use crate::on_both;
use cuvmm_driver::{
    AccessDesc, AccessFlags, AllocationType, Call, CudaVersion, DeviceAddress, Driver, DriverError,
    DriverKind, EventFlags, Exported, HandleTypes, Location, MemPoolAttribute as A, MemPoolHandle,
    MemPoolProps, MemPoolTicket, Ordinal, PhysicalProps, PointerAttribute, StreamFlags,
    StreamHandle,
};
use cuvmm_model::model::{Backing, Machine, Manner, ModelOptions};

/// The size in which a pool obtains memory.
const STEP: u64 = 32 << 20;
const FD: HandleTypes = HandleTypes::OS;

on_both!(
    the_maximum_holds_and_freed_memory_counts,
    small_allocations_share_the_memory,
    pieces_of_shared_memory_are_imported,
    managed_memory,
    the_threshold_keeps_memory,
    trimming_keeps_the_least,
    maxima_are_set_to_what_is_there,
    other_streams_reuse_as_the_policies_say,
    a_destroyed_pool_lives_until_its_memory_is_freed,
    each_device_has_a_current_pool,
    handles_that_name_no_pool,
    access_of_a_peer,
    memory_of_the_host,
    the_default_pool_of_the_host,
    shared_with_another_process,
    freed_by_the_call_that_waits,
    misuse_of_what_is_shared,
    a_reset_of_the_context_ends_the_memory,
);

fn stream<B: Backing>(d: &Machine<B>) -> StreamHandle {
    d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap()
}

fn pool<B: Backing>(d: &Machine<B>, props: &MemPoolProps) -> MemPoolHandle {
    d.mem_pool_create(D0, props).unwrap()
}

fn plain() -> MemPoolProps {
    MemPoolProps::device(D0)
}

fn with_maximum(pages: u64) -> MemPoolProps {
    MemPoolProps {
        maximum: pages * STEP,
        ..plain()
    }
}

fn shareable() -> MemPoolProps {
    MemPoolProps {
        handle_types: FD,
        ..plain()
    }
}

fn get<B: Backing>(d: &Machine<B>, pool: MemPoolHandle, attribute: A) -> u64 {
    unsafe { d.mem_pool_attribute(D0, pool, attribute) }.unwrap()
}

fn set<B: Backing>(d: &Machine<B>, pool: MemPoolHandle, attribute: A, value: u64) {
    unsafe { d.mem_pool_set_attribute(D0, pool, attribute, value) }.unwrap();
}

/// Returns used, reserved and their maxima, in steps.
fn figures<B: Backing>(d: &Machine<B>, pool: MemPoolHandle) -> [u64; 4] {
    let attributes = [
        A::USED_MEM_CURRENT,
        A::RESERVED_MEM_CURRENT,
        A::USED_MEM_HIGH,
        A::RESERVED_MEM_HIGH,
    ];
    attributes.map(|attribute| get(d, pool, attribute) / STEP)
}

fn alloc<B: Backing>(
    d: &Machine<B>,
    pages: u64,
    pool: MemPoolHandle,
    s: StreamHandle,
) -> Result<DeviceAddress, DriverError> {
    unsafe { d.alloc_from_pool_async(D0, pages * STEP, pool, s) }
}

fn free<B: Backing>(d: &Machine<B>, address: DeviceAddress, s: StreamHandle) {
    unsafe { d.free_async(D0, address, s) }.unwrap();
}

fn wait<B: Backing>(d: &Machine<B>, s: StreamHandle) {
    unsafe { d.stream_synchronize(D0, s) }.unwrap();
}

fn the_maximum_holds_and_freed_memory_counts<B: Backing>(d: Machine<B>) {
    let (s, other) = (stream(&d), stream(&d));
    let p = pool(&d, &with_maximum(4));
    let all: Vec<_> = (0..4).map(|_| alloc(&d, 1, p, s).unwrap()).collect();
    let more = alloc(&d, 1, p, s);
    assert_eq!(code(more), OUT_OF_MEMORY);
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB - 4 * STEP);

    // Memory freed on a stream is used again behind its work, on that stream without waiting.
    d.hold(D0, s);
    unsafe { d.fill_async(D0, all[0], 1, STEP, s).unwrap() };
    free(&d, all[0], s);
    let again = alloc(&d, 1, p, s).unwrap();
    assert_eq!(code(alloc(&d, 1, p, other)), OUT_OF_MEMORY);
    unsafe { d.fill_async(D0, again, 2, STEP, s).unwrap() };
    free(&d, all[1], s);
    // Another stream gets it behind that work: the pool makes it wait.
    let theirs = alloc(&d, 1, p, other).unwrap();
    unsafe { d.fill_async(D0, theirs, 3, STEP, other).unwrap() };
    assert!(!unsafe { d.stream_query(D0, other).unwrap() });
    d.release_stream(D0, s);
    assert!(unsafe { d.stream_query(D0, other).unwrap() });
    assert_eq!(figures(&d, p), [4, 4, 4, 4]);
    assert_eq!(d.hazards(), 0);
}

fn the_threshold_keeps_memory<B: Backing>(d: Machine<B>) {
    let (s, other, p) = (stream(&d), stream(&d), pool(&d, &plain()));
    set(&d, p, A::RELEASE_THRESHOLD, 2 * STEP);
    // Work that is not done is not given back.
    let a = alloc(&d, 4, p, s).unwrap();
    d.hold(D0, s);
    free(&d, a, s);
    wait(&d, other);
    assert_eq!(figures(&d, p)[..2], [0, 4]);
    d.release_stream(D0, s);
    wait(&d, other);
    assert_eq!(figures(&d, p)[..2], [0, 2]);
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB - 2 * STEP);
}

fn trimming_keeps_the_least<B: Backing>(d: Machine<B>) {
    let (s, p) = (stream(&d), pool(&d, &plain()));
    set(&d, p, A::RELEASE_THRESHOLD, u64::MAX);
    let trim = |keep| unsafe { d.mem_pool_trim(D0, p, keep).unwrap() };
    let held = alloc(&d, 1, p, s).unwrap();
    let a = alloc(&d, 5, p, s).unwrap();
    free(&d, a, s);
    trim(0);
    assert_eq!(figures(&d, p)[1], 6, "nothing was seen to be done");
    wait(&d, s);
    trim(7 * STEP);
    assert_eq!(figures(&d, p)[1], 6);
    trim(4 * STEP - 1);
    assert_eq!(figures(&d, p)[1], 4, "whole steps");
    trim(0);
    assert_eq!(figures(&d, p)[..2], [1, 1], "what is in use stays");
    free(&d, held, s);
    wait(&d, s);
    trim(0);
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
}

fn maxima_are_set_to_what_is_there<B: Backing>(d: Machine<B>) {
    let (s, p) = (stream(&d), pool(&d, &plain()));
    let a = alloc(&d, 2, p, s).unwrap();
    free(&d, a, s);
    wait(&d, s);
    let held = alloc(&d, 1, p, s).unwrap();
    assert_eq!(figures(&d, p), [1, 1, 2, 2]);
    let put = |attribute, value| code(unsafe { d.mem_pool_set_attribute(D0, p, attribute, value) });
    for (attribute, value) in [
        (A::RESERVED_MEM_HIGH, u64::MAX),
        (A::RESERVED_MEM_CURRENT, 0),
        (A(0), 0),
    ] {
        assert_eq!(put(attribute, value), INVALID_VALUE, "{attribute:?}");
    }
    let asked = unsafe { d.mem_pool_attribute(D0, p, A(99)) };
    assert_eq!(code(asked), INVALID_VALUE);
    assert_eq!(put(A::RESERVED_MEM_HIGH, 0), SUCCESS);
    assert_eq!(figures(&d, p), [1, 1, 2, 1]);
    free(&d, held, s);
}

fn other_streams_reuse_as_the_policies_say<B: Backing>(d: Machine<B>) {
    let (s, other) = (stream(&d), stream(&d));
    let p = pool(&d, &with_maximum(1));
    let event = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    set(&d, p, A::REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0);
    let a = alloc(&d, 1, p, s).unwrap();
    d.hold(D0, s);
    free(&d, a, s);
    assert_eq!(code(alloc(&d, 1, p, other)), OUT_OF_MEMORY, "not done");
    unsafe {
        d.event_record(D0, event, s).unwrap();
        d.stream_wait_event(D0, other, event).unwrap();
    }
    set(&d, p, A::REUSE_FOLLOW_EVENT_DEPENDENCIES, 0);
    assert_eq!(code(alloc(&d, 1, p, other)), OUT_OF_MEMORY);
    set(&d, p, A::REUSE_FOLLOW_EVENT_DEPENDENCIES, 1);
    let a = alloc(&d, 1, p, other).unwrap();
    d.release_stream(D0, s);
    set(&d, p, A::REUSE_ALLOW_OPPORTUNISTIC, 0);
    free(&d, a, other);
    assert_eq!(code(alloc(&d, 1, p, s)), OUT_OF_MEMORY, "done, by chance");
    set(&d, p, A::REUSE_ALLOW_OPPORTUNISTIC, 1);
    let a = alloc(&d, 1, p, s).unwrap();
    free(&d, a, s);
}

fn a_destroyed_pool_lives_until_its_memory_is_freed<B: Backing>(d: Machine<B>) {
    let (s, p) = (stream(&d), pool(&d, &plain()));
    let a = alloc(&d, 1, p, s).unwrap();
    let b = alloc(&d, 1, p, s).unwrap();
    unsafe {
        d.mem_pool_destroy(D0, p).unwrap();
        assert_eq!(code(d.mem_pool_destroy(D0, p)), INVALID_VALUE);
        assert_eq!(code(d.mem_pool_attribute(D0, p, A(5))), INVALID_VALUE);
        assert_eq!(code(alloc(&d, 1, p, s)), INVALID_VALUE);
        d.fill_async(D0, a, 1, STEP, s).unwrap();
        free(&d, a, s);
        assert_eq!(d.live().mem_pools, 1);
        assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB - 2 * STEP);
        d.hold(D0, s);
        free(&d, b, s);
        assert_eq!(d.live().mem_pools, 1);
        d.release_stream(D0, s);
        assert_eq!(d.live().mem_pools, 0);
        d.stream_destroy(D0, s).unwrap();
    }
    assert!(d.live().is_nothing());
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
}

fn each_device_has_a_current_pool<B: Backing>(d: Machine<B>) {
    let default = d.default_mem_pool(D0).unwrap();
    assert_ne!(d.default_mem_pool(D1).unwrap(), default);
    assert_eq!(code(d.default_mem_pool(Ordinal(2))), INVALID_DEVICE);
    let (s, p) = (stream(&d), pool(&d, &with_maximum(1)));
    unsafe {
        assert_eq!(code(d.set_current_mem_pool(D1, p)), INVALID_VALUE);
        d.set_current_mem_pool(D0, p).unwrap();
    }
    assert_eq!(d.current_mem_pool(D0), Ok(p));
    let a = unsafe { d.alloc_async(D0, STEP, s) }.unwrap();
    assert_eq!([p, default].map(|pool| figures(&d, pool)[0]), [1, 0]);
    free(&d, a, s);
}

fn handles_that_name_no_pool<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    unsafe {
        for wrong in [MemPoolHandle::NULL, MemPoolHandle(s.0), MemPoolHandle(99)] {
            assert_eq!(code(d.mem_pool_destroy(D0, wrong)), INVALID_VALUE);
            assert_eq!(code(d.mem_pool_trim(D0, wrong, 0)), INVALID_VALUE);
            assert_eq!(code(d.set_current_mem_pool(D0, wrong)), INVALID_VALUE);
            assert_eq!(code(alloc(&d, 1, wrong, s)), INVALID_VALUE);
        }
    }
}

fn access_of_a_peer<B: Backing>(d: Machine<B>) {
    let (s, p) = (stream(&d), pool(&d, &plain()));
    let a = alloc(&d, 1, p, s).unwrap();
    let access = |device| unsafe { d.mem_pool_access(D0, p, Location::device(device)) };
    let fill = || code(unsafe { d.fill(D1, a, 5, STEP) });
    let set = |desc| code(unsafe { d.mem_pool_set_access(D0, p, &[desc]) });
    assert_eq!(access(D0), Ok(rw(D0).flags));
    assert_eq!(access(D1), Ok(none(D1).flags));
    assert_eq!(fill(), INVALID_VALUE);
    assert_eq!(set(rw(D1)), SUCCESS);
    assert_eq!((access(D1), fill()), (Ok(rw(D1).flags), SUCCESS));
    assert_eq!(code(unsafe { d.mem_pool_set_access(D0, p, &[]) }), SUCCESS);
    let reading = AccessDesc {
        flags: AccessFlags::READ,
        ..rw(D0)
    };
    assert_eq!(set(none(D0)), INVALID_DEVICE, "its own device");
    assert_eq!(set(reading), NOT_SUPPORTED, "its own device");
    assert_eq!(set(rw(Ordinal(7))), INVALID_DEVICE);
    let theirs = d.stream_create(D1, StreamFlags::NON_BLOCKING).unwrap();
    d.hold(D1, theirs);
    unsafe { d.fill_async(D1, a, 6, STEP, theirs).unwrap() };
    assert_eq!(set(none(D1)), SUCCESS);
    let hazards = d.take_hazards();
    assert_eq!(hazards.len(), 1);
    assert_eq!(hazards[0].call, Call::MemPoolSetAccess);
    // A pool may be used on a stream of another device.
    let far = unsafe { d.alloc_from_pool_async(D1, STEP, p, theirs) }.unwrap();
    unsafe { d.fill_async(D0, far, 1, STEP, s).unwrap() };
    free(&d, far, s);
    free(&d, a, s);
}

fn memory_of_the_host<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    for location in [Location::HOST, Location::host_numa(0)] {
        let p = pool(&d, &MemPoolProps::at(location));
        let access = |location| unsafe { d.mem_pool_access(D0, p, location) }.unwrap();
        assert_eq!(access(location), rw(D0).flags);
        assert_eq!(access(Location::device(D0)), none(D0).flags);
        let a = alloc(&d, 1, p, s).unwrap();
        assert_eq!(code(unsafe { d.fill(D0, a, 5, STEP) }), INVALID_VALUE);
        unsafe { d.mem_pool_set_access(D0, p, &[rw(D0)]).unwrap() };
        let pointer = std::ptr::with_exposed_provenance_mut::<u8>(a.0 as usize);
        unsafe {
            pointer.write(9);
            d.fill_async(D0, at(a, 1), 5, STEP - 1, s).unwrap();
            wait(&d, s);
            // The model's device has no memory to fill.
            let filled = [0, 5][usize::from(d.kind() == DriverKind::Host)];
            assert_eq!([pointer.read(), pointer.add(1).read()], [9, filled]);
            assert_eq!(code(d.set_current_mem_pool(D0, p)), INVALID_VALUE);
        }
        assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
        free(&d, a, s);
        unsafe { d.mem_pool_destroy(D0, p).unwrap() };
    }
}

fn the_default_pool_of_the_host<B: Backing>(d: Machine<B>) {
    let host = MemPoolProps::at(Location::HOST);
    let (s, p) = (stream(&d), d.default_mem_pool_of(&host).unwrap());
    assert_eq!(d.default_mem_pool_of(&host).unwrap(), p);
    let a = alloc(&d, 1, p, s).unwrap();
    free(&d, a, s);
    wait(&d, s);
    let refused = unsafe { d.mem_pool_destroy(D0, p) };
    assert_eq!(code(refused), INVALID_VALUE);
    assert_eq!(d.live().mem_pools, 0);
    unsafe { d.stream_destroy(D0, s).unwrap() };
    assert!(d.objects().is_empty());
}

/// Exports a pool and one allocation of it.
fn give<B: Backing>(
    d: &Machine<B>,
    p: MemPoolHandle,
    a: DeviceAddress,
) -> (Exported, MemPoolTicket) {
    let exported = unsafe { d.mem_pool_export(D0, p, FD, 0) }.unwrap();
    (exported, d.mem_pool_export_pointer(D0, a).unwrap())
}

fn import<B: Backing>(d: &Machine<B>, exported: &Exported) -> MemPoolHandle {
    unsafe { d.mem_pool_import(D0, exported.as_source(), FD, 0) }.unwrap()
}

fn shared_with_another_process<B: Backing>(d: Machine<B>) {
    let (s, p) = (stream(&d), pool(&d, &shareable()));
    let _first = alloc(&d, 1, p, s).unwrap();
    let a = alloc(&d, 2, p, s).unwrap();
    unsafe { d.fill_async(D0, a, 77, 2 * STEP, s).unwrap() };
    let (exported, ticket) = give(&d, p, a);
    // Another machine stands for another process; the same machine imports it too.
    let other = host(HostOptions::new());
    let q = import(&other, &exported);
    let theirs = unsafe { other.mem_pool_import_pointer(D0, q, &ticket) }.unwrap();
    let t = other.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap();
    let here = import(&d, &exported);
    let alias = unsafe { d.mem_pool_import_pointer(D0, here, &ticket) }.unwrap();
    assert_ne!(alias, a);
    if d.kind() == DriverKind::Host {
        assert_eq!(first_byte(&other, at(theirs, 2 * STEP - 1)), 77);
        unsafe { other.fill_async(D0, theirs, 78, 1, t).unwrap() };
        assert_eq!([first_byte(&d, a), first_byte(&d, alias)], [78, 78]);
    }
    for attribute in [A::USED_MEM_CURRENT, A::USED_MEM_HIGH] {
        let figure = unsafe { other.mem_pool_attribute(D0, q, attribute) };
        assert_eq!(code(figure), INVALID_VALUE);
    }
    assert_eq!(
        other.memory_info(D0).unwrap().free,
        4 * GIB,
        "the giver is charged"
    );
    assert_eq!(code(alloc(&other, 1, q, t)), INVALID_VALUE);
    unsafe {
        assert_eq!(code(other.set_current_mem_pool(D0, q)), INVALID_VALUE);
        assert_eq!(code(other.mem_pool_export(D0, q, FD, 0)), INVALID_VALUE);
        assert_eq!(
            code(other.mem_pool_export_pointer(D0, theirs)),
            INVALID_VALUE
        );
        other.free_async(D0, theirs, t).unwrap();
        other.mem_pool_destroy(D0, q).unwrap();
        other.stream_destroy(D0, t).unwrap();
        free(&d, alias, s);
        d.mem_pool_destroy(D0, here).unwrap();
        free(&d, a, s);
        wait(&d, s);
        assert_eq!(figures(&d, p)[..2], [1, 1], "released like that of others");
        d.mem_pool_destroy(D0, p).unwrap();
    }
    assert!(other.live().is_nothing());
    assert_eq!(d.live().mem_pools, 1);
}

/// Allocates 64 bytes.
fn small<B: Backing>(d: &Machine<B>, pool: MemPoolHandle, s: StreamHandle) -> DeviceAddress {
    unsafe { d.alloc_from_pool_async(D0, 64, pool, s) }.unwrap()
}

fn small_allocations_share_the_memory<B: Backing>(d: Machine<B>) {
    let node = MemPoolProps::at(Location::host_numa(0));
    let shared_node = MemPoolProps {
        handle_types: FD,
        ..node
    };
    for props in [with_maximum(1), shareable(), node, shared_node] {
        if props == shared_node && d.kind() == DriverKind::Model {
            assert_eq!(code(d.mem_pool_create(D0, &props)), NOT_SUPPORTED);
            continue;
        }
        let (s, p) = (stream(&d), pool(&d, &props));
        let many: Vec<_> = (0..200).map(|_| small(&d, p, s)).collect();
        assert_eq!(many[1].0 - many[0].0, 512);
        let bytes = |p| {
            [
                get(&d, p, A::USED_MEM_CURRENT),
                get(&d, p, A::RESERVED_MEM_CURRENT),
            ]
        };
        assert_eq!(bytes(p), [200 * 64, STEP]);
        unsafe { d.mem_pool_set_access(D0, p, &[rw(D0)]).unwrap() };
        for (number, &one) in many.iter().enumerate() {
            unsafe { d.fill_async(D0, one, number as u8, 64, s).unwrap() };
            let past = unsafe { d.fill_async(D0, one, 0, 65, s) };
            assert_eq!(code(past), INVALID_VALUE);
        }
        wait(&d, s);
        if d.kind() == DriverKind::Host {
            let byte = |one: DeviceAddress| {
                let mut byte = [77];
                unsafe { d.copy_to_host(D0, &mut byte, one).unwrap() };
                byte[0]
            };
            assert_eq!([many[0], many[199]].map(byte), [0, 199]);
        }
        if d.kind() == DriverKind::Host && props.location == node.location {
            // The program reads and writes such memory itself.
            let pointer = std::ptr::with_exposed_provenance_mut::<u8>(many[199].0 as usize);
            assert_eq!(unsafe { pointer.read() }, 199);
        }
        many[1..].iter().for_each(|&one| free(&d, one, s));
        wait(&d, s);
        assert_eq!(bytes(p), [64, STEP]);
        assert_eq!(d.live().allocations, 1);
        free(&d, many[0], s);
        wait(&d, s);
        assert_eq!(bytes(p), [0, 0]);
        unsafe { d.mem_pool_destroy(D0, p).unwrap() };
    }
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
}

fn pieces_of_shared_memory_are_imported<B: Backing>(d: Machine<B>) {
    let (s, p) = (stream(&d), pool(&d, &shareable()));
    let [first, second] = [(); 2].map(|()| small(&d, p, s));
    unsafe { d.fill_async(D0, second, 77, 64, s).unwrap() };
    let (exported, ticket) = give(&d, p, second);
    let other = host(HostOptions::new());
    let q = import(&other, &exported);
    let theirs = unsafe { other.mem_pool_import_pointer(D0, q, &ticket) }.unwrap();
    let size = other.pointer_attribute(D0, theirs, PointerAttribute::RANGE_SIZE);
    assert_eq!(size, Ok(64));
    if d.kind() == DriverKind::Host {
        assert_eq!(first_byte(&other, theirs), 77);
        unsafe { other.fill(D0, theirs, 78, 64).unwrap() };
        assert_eq!([first, second].map(|one| first_byte(&d, one)), [0, 78]);
    }
    free(&d, second, s);
    free(&d, first, s);
    unsafe {
        other.free(D0, theirs).unwrap();
        other.mem_pool_destroy(D0, q).unwrap();
        d.mem_pool_destroy(D0, p).unwrap();
        d.stream_destroy(D0, s).unwrap();
    }
    assert!(other.live().is_nothing());
    assert!(d.live().is_nothing());
}

fn managed_memory<B: Backing>(d: Machine<B>) {
    let at_host = MemPoolProps {
        allocation_type: AllocationType::MANAGED,
        ..MemPoolProps::at(Location::HOST)
    };
    let of_device = MemPoolProps {
        location: Location::device(D0),
        ..at_host
    };
    let s = stream(&d);
    for props in [at_host, of_device] {
        let p = pool(&d, &props);
        let a = small(&d, p, s);
        unsafe { d.fill_async(D0, a, 5, 64, s).unwrap() };
        wait(&d, s);
        let pointer = std::ptr::with_exposed_provenance_mut::<u8>(a.0 as usize);
        let filled = [0, 5][usize::from(d.kind() == DriverKind::Host)];
        assert_eq!(unsafe { pointer.read() }, filled);
        let managed = d.pointer_attribute(D0, a, PointerAttribute::IS_MANAGED);
        assert_eq!(managed, Ok(1));
        free(&d, a, s);
        unsafe { d.mem_pool_destroy(D0, p).unwrap() };
    }
    let shared = MemPoolProps {
        handle_types: FD,
        ..of_device
    };
    assert_eq!(code(d.mem_pool_create(D0, &shared)), INVALID_VALUE);
    let plain = d.managed_alloc(D0, 64, 1).unwrap();
    assert_eq!(code(unsafe { d.free_async(D0, plain, s) }), INVALID_VALUE);
}

fn freed_by_the_call_that_waits<B: Backing>(d: Machine<B>) {
    let (s, p) = (stream(&d), pool(&d, &plain()));
    let a = alloc(&d, 1, p, s).unwrap();
    unsafe { d.free(D0, a).unwrap() };
    assert_eq!(figures(&d, p), [1, 0, 1, 1], "still counted as in use");
    let a = alloc(&d, 1, p, s).unwrap();
    d.hold(D0, s);
    free(&d, a, s);
    assert_eq!(code(unsafe { d.free(D0, a) }), INVALID_VALUE, "being freed");
    d.lose_context(D0, ILLEGAL_ADDRESS);
    assert_eq!(d.live().allocations, 0);
    unsafe { d.mem_pool_destroy(D0, p).unwrap() };
    assert_eq!(d.live().mem_pools, 0, "also on a lost context");
    d.reset_context(D0);
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
}

fn misuse_of_what_is_shared<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    let p = pool(&d, &shareable());
    let a = alloc(&d, 1, p, s).unwrap();
    let physical = PhysicalProps {
        handle_types: FD,
        ..PhysicalProps::device(D0)
    };
    let physical = d.create(STEP, &physical, 0).unwrap();
    unsafe {
        let fabric = d.mem_pool_export(D0, p, HandleTypes::FABRIC, 0);
        assert_eq!(code(fabric), INVALID_VALUE);
        let (exported, ticket) = give(&d, p, a);
        let other = d.export(physical, FD, 0).unwrap();
        for wrong in [source_of(NO_HANDLES[0]), other.as_source()] {
            assert_eq!(code(d.mem_pool_import(D0, wrong, FD, 0)), UNKNOWN);
        }
        let source = exported.as_source();
        assert_eq!(code(d.import(source, FD)), UNKNOWN, "no physical");
        let q = import(&d, &exported);
        let take = |pool, ticket: &MemPoolTicket| code(d.mem_pool_import_pointer(D0, pool, ticket));
        let mut far = ticket;
        far.0[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(take(q, &far), INVALID_VALUE);
        let foreign = import(&d, &give_another(&d));
        assert_eq!(take(foreign, &ticket), INVALID_VALUE, "of another pool");
        assert_eq!(take(q, &ticket), SUCCESS);
    }
}

fn a_reset_of_the_context_ends_the_memory<B: Backing>(d: Machine<B>) {
    let (p, legacy) = (pool(&d, &plain()), StreamHandle::NULL);
    let far = pool(&d, &MemPoolProps::device(D1));
    set(&d, far, A::RELEASE_THRESHOLD, u64::MAX);
    for from in [p, far] {
        let a = alloc(&d, 1, from, legacy).unwrap();
        let _held = alloc(&d, 2, from, legacy).unwrap();
        free(&d, a, legacy);
    }
    d.reset_context(D0);
    assert_eq!(figures(&d, p)[..2], [0, 0]);
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
    // Memory of another device stays, and what was freed can be released.
    assert_eq!(figures(&d, far)[..2], [2, 3]);
    unsafe { d.mem_pool_trim(D0, far, 0).unwrap() };
    assert_eq!(figures(&d, far)[..2], [2, 2]);
}

fn give_another<B: Backing>(d: &Machine<B>) -> Exported {
    let p = pool(d, &shareable());
    unsafe { d.mem_pool_export(D0, p, FD, 0) }.unwrap()
}

#[test]
fn versions_bring_what_they_brought() {
    let of = |version| model(ModelOptions::new().version(version));
    let old = of(CudaVersion::new(11, 1));
    let missing = old.mem_pool_create(D0, &plain());
    let expected = DriverError::MissingSymbol {
        call: Call::MemPoolCreate,
        symbol: "cuMemPoolCreate",
        since: CudaVersion::new(11, 2),
    };
    assert_eq!(missing, Err(expected));
    assert!(expected.to_string().contains("introduced in CUDA 11.2"));
    let middle = of(CudaVersion::new(12, 1));
    assert_eq!(code(middle.mem_pool_create(D0, &plain())), SUCCESS);
    assert_eq!(
        code(middle.mem_pool_create(D0, &with_maximum(1))),
        INVALID_VALUE
    );
    let (host, node) = (
        MemPoolProps::at(Location::HOST),
        MemPoolProps::at(Location::host_numa(0)),
    );
    for (version, of_node, of_host) in [
        (CudaVersion::new(12, 1), INVALID_VALUE, INVALID_VALUE),
        (CudaVersion::new(12, 9), SUCCESS, INVALID_VALUE),
        (CudaVersion::new(13, 0), SUCCESS, SUCCESS),
    ] {
        let d = of(version);
        let made = [&node, &host].map(|props| code(d.mem_pool_create(D0, props)));
        assert_eq!(made, [of_node, of_host], "{version}");
    }
}

#[test]
fn a_hostile_driver_gives_the_handle_to_another_object() {
    let d = model(ModelOptions::new().manner(Manner::Hostile));
    let (s, p) = (stream(&d), pool(&d, &plain()));
    let a = alloc(&d, 1, p, s).unwrap();
    unsafe { d.mem_pool_destroy(D0, p).unwrap() };
    let q = pool(&d, &plain());
    assert_eq!(p, q);
    free(&d, a, s);
    wait(&d, s);
    assert_eq!(d.live().mem_pools, 1);
    assert_eq!(figures(&d, q), [0; 4], "the figures of the new pool");
}

#[test]
fn growing_costs_more_than_using_what_is_there() {
    let d = model(ModelOptions::new());
    let (s, p) = (stream(&d), pool(&d, &plain()));
    set(&d, p, A::RELEASE_THRESHOLD, u64::MAX);
    let took = || {
        let before = d.clock();
        let a = alloc(&d, 4, p, s).unwrap();
        let took = d.clock() - before;
        free(&d, a, s);
        took
    };
    let (cold, warm) = (took(), took());
    assert!(cold > 10 * warm, "{cold:?} {warm:?}");
    assert!(d.spent(Call::MemAllocFromPoolAsync) >= cold + warm);
}
