//! Memory that is not ours to map: plain, pooled, pinned, managed.
//!
//! `unsafe` because the calls are, and on purpose misused.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model_support;

use std::thread;
use std::time::Duration;

use cuvmm_driver::model::{Backing, Machine};
use cuvmm_driver::{
    Advice, DeviceAddress, Driver, DriverKind, Location, Ordinal, PointerAttribute, RangeAttribute,
    StreamFlags, StreamHandle,
};
use model_support::*;

on_both!(
    plain,
    freeing_waits_for_the_device,
    pooled,
    pinned,
    managed,
    advice
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
        d.let_go(D0, s);
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
        d.let_go(D0, s);
        assert_eq!(d.live().allocations, 0);
        assert_eq!(code(d.context_synchronize(D0)), SUCCESS);
        assert_eq!(code(d.alloc_async(D0, 0, s)), INVALID_VALUE);

        let b = d.alloc_async(D0, PAGE, s).unwrap();
        d.hold(D0, s);
        d.free_async(D0, b, s).unwrap();
        d.lose_context(D0, ILLEGAL_ADDRESS);
        assert_eq!(d.live().allocations, 0, "a lost context does not leak it");
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
