//! Calls that take memory away while queued work still names it.
#![allow(missing_docs, unsafe_code, clippy::unwrap_used)]
#![allow(clippy::undocumented_unsafe_blocks, clippy::expect_used, clippy::panic)]

use crate::model_support::*;
use crate::on_both;
use cuvmm_driver::{
    AccessDesc, AccessFlags, Call, DeviceAddress, Driver, EventFlags, Ordinal, StreamFlags,
    StreamHandle,
};
use cuvmm_model::model::{Backing, Hazard, Machine};

on_both!(
    unmapping_under_a_queued_kernel_is_a_hazard,
    memory_that_is_swapped_at_one_address_is_a_hazard,
    lowering_access_is_a_hazard_for_what_needs_it,
    work_that_waits_for_an_event_is_queued_too,
    work_of_a_destroyed_stream_is_queued_too,
    freeing_under_queued_work_is_a_hazard,
    what_is_done_or_has_no_right_is_no_hazard,
    a_replayed_graph_names_what_its_nodes_name,
    the_first_hazards_are_kept_and_all_are_counted,
);

fn stream<B: Backing>(d: &Machine<B>, device: Ordinal) -> StreamHandle {
    d.stream_create(device, StreamFlags::NON_BLOCKING).unwrap()
}

fn held<B: Backing>(d: &Machine<B>, device: Ordinal) -> StreamHandle {
    let stream = stream(d, device);
    d.hold(device, stream);
    stream
}

fn unmap<B: Backing>(d: &Machine<B>, address: DeviceAddress, size: u64) {
    unsafe { d.unmap(address, size) }.unwrap();
}

fn set_access<B: Backing>(d: &Machine<B>, address: DeviceAddress, rights: AccessDesc) {
    unsafe { d.set_access(address, PAGE, &[rights]) }.unwrap();
}

/// Returns the fields of a hazard other than its stream and its device.
fn facts(hazard: &Hazard) -> (Call, DeviceAddress, u64, &str, AccessFlags) {
    let Hazard { call, address, .. } = *hazard;
    (call, address, hazard.size, hazard.work, hazard.needs)
}

fn unmapping_under_a_queued_kernel_is_a_hazard<B: Backing>(d: Machine<B>) {
    let r = range(&d, 4, 4);
    let s = held(&d, D0);
    let reads = vec![(at(r.at, 100), 50)];
    let writes = vec![(at(r.page(1), 10), 2 * PAGE, 7)];
    d.queue_kernel(D0, s, reads, writes).unwrap();

    unmap(&d, r.page(3), PAGE);
    let [behind] = &d.take_hazards()[..] else {
        panic!("the kernel writes the first ten bytes of the last page");
    };
    let named = (
        Call::MemUnmap,
        r.page(3),
        10,
        "kernel",
        AccessFlags::READ_WRITE,
    );
    assert_eq!(facts(behind), named);
    assert_eq!((behind.device, behind.stream), (D0, s));

    unmap(&d, r.at, 3 * PAGE);
    let both = d.take_hazards();
    let read = (
        Call::MemUnmap,
        at(r.at, 100),
        50,
        "kernel",
        AccessFlags::READ,
    );
    let written = (
        Call::MemUnmap,
        at(r.page(1), 10),
        2 * PAGE - 10,
        "kernel",
        AccessFlags::READ_WRITE,
    );
    assert_eq!(both.iter().map(facts).collect::<Vec<_>>(), [read, written]);
    let text = both[1].to_string();
    assert!(
        text.contains("cuMemUnmap") && text.contains("kernel"),
        "{text}"
    );

    d.release_stream(D0, s);
    r.end(&d);
    assert_eq!(d.hazards(), 0);
}

fn memory_that_is_swapped_at_one_address_is_a_hazard<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let other = page(&d);
    let s = held(&d, D0);
    d.queue_kernel(D0, s, vec![], vec![(r.at, PAGE, 7)])
        .unwrap();
    unmap(&d, r.at, PAGE);
    unsafe { d.map(r.at, PAGE, 0, other, 0) }.unwrap();
    set_access(&d, r.at, rw(D0));
    d.release_stream(D0, s);
    assert_eq!(code(unsafe { d.stream_synchronize(D0, s) }), SUCCESS);
    assert_eq!(d.take_hazards().len(), 1);
    unsafe { d.release(other) }.unwrap();
    r.end(&d);
}

fn lowering_access_is_a_hazard_for_what_needs_it<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    set_access(&d, r.at, rw(D1));
    let (s, peer) = (held(&d, D0), held(&d, D1));
    d.queue_kernel(D0, s, vec![(r.at, 8)], vec![]).unwrap();
    d.queue_kernel(D1, peer, vec![], vec![(r.at, 8, 1)])
        .unwrap();

    set_access(&d, r.at, ro(D0));
    assert_eq!(d.hazards(), 0, "a reader still reads, a peer still writes");
    set_access(&d, r.at, ro(D1));
    let [writer] = &d.take_hazards()[..] else {
        panic!("the peer's kernel writes");
    };
    let named = (
        Call::MemSetAccess,
        r.at,
        8,
        "kernel",
        AccessFlags::READ_WRITE,
    );
    assert_eq!((facts(writer), writer.device), (named, D1));
    set_access(&d, r.at, rw(D0));
    set_access(&d, r.at, none(D0));
    let [reader] = &d.take_hazards()[..] else {
        panic!("the kernel reads");
    };
    assert_eq!((reader.needs, reader.device), (AccessFlags::READ, D0));

    set_access(&d, r.at, rw(D0));
    set_access(&d, r.at, rw(D1));
    d.release_all_streams(D0);
    d.release_all_streams(D1);
    r.end(&d);
    assert_eq!(d.hazards(), 0);
}

fn work_that_waits_for_an_event_is_queued_too<B: Backing>(d: Machine<B>) {
    let r = range(&d, 2, 2);
    let (first, second) = (held(&d, D0), stream(&d, D0));
    let event = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    unsafe {
        d.fill_async(D0, r.at, 1, PAGE, first).unwrap();
        d.event_record(D0, event, first).unwrap();
        d.stream_wait_event(D0, second, event).unwrap();
        d.copy_on_device_async(D0, r.page(1), r.at, 64, second)
            .unwrap();
    }
    unmap(&d, r.page(1), PAGE);
    let [copy] = &d.take_hazards()[..] else {
        panic!("the copy waits for the fill");
    };
    assert_eq!((copy.work, copy.stream), ("copy", second));
    d.lose_context(D0, ILLEGAL_ADDRESS);
    r.end(&d);
    assert_eq!(d.hazards(), 0, "what never runs uses nothing");
}

fn work_of_a_destroyed_stream_is_queued_too<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let s = held(&d, D0);
    unsafe {
        d.fill_async(D0, r.at, 1, PAGE, s).unwrap();
        d.stream_destroy(D0, s).unwrap();
    }
    r.end(&d);
    let [fill] = &d.take_hazards()[..] else {
        panic!("the fill is still to run");
    };
    assert_eq!((fill.work, fill.stream, fill.size), ("fill", s, PAGE));
}

fn freeing_under_queued_work_is_a_hazard<B: Backing>(d: Machine<B>) {
    let (s, other, peer) = (stream(&d, D0), held(&d, D0), held(&d, D1));
    let calls = || -> Vec<_> { d.take_hazards().iter().map(|h| (h.call, h.work)).collect() };
    let plain = d.alloc(D0, PAGE).unwrap();
    unsafe {
        d.copy_on_device_async(D1, plain, plain, 16, peer).unwrap();
        d.free(D0, plain).unwrap();
    }
    let twice = [(Call::MemFree, "copy"); 2];
    assert_eq!(calls(), twice, "the call waits for its own device alone");

    d.lose_context(D1, ILLEGAL_ADDRESS);
    let pooled = unsafe { d.alloc_async(D0, PAGE, s) }.unwrap();
    let pinned = d.host_alloc(D0, 4096, 0).unwrap();
    let plain_again = d.alloc(D0, PAGE).unwrap();
    unsafe {
        d.fill_async(D0, pooled, 1, PAGE, other).unwrap();
        d.copy_to_device_async(D0, pooled, pinned, 4096, other)
            .unwrap();
        d.free_async(D0, pooled, s).unwrap();
        d.host_free(D0, pinned).unwrap();
    }
    let mut registered = [0u8; 64];
    let (start, middle) = (registered.as_mut_ptr(), DeviceAddress(plain_again.0 + 64));
    unsafe {
        d.host_register(D0, start, 64, 0).unwrap();
        d.copy_to_host_async(D0, start, middle, 64, other).unwrap();
        d.host_unregister(D0, start).unwrap();
    }
    let expected = [
        (Call::MemFreeAsync, "fill"),
        (Call::MemFreeAsync, "copy to the device"),
        (Call::MemFreeHost, "copy to the device"),
        (Call::MemHostUnregister, "copy to the host"),
    ];
    assert_eq!(calls(), expected);
}

fn what_is_done_or_has_no_right_is_no_hazard<B: Backing>(d: Machine<B>) {
    let r = range(&d, 4, 3);
    let s = held(&d, D0);
    set_access(&d, r.page(1), ro(D0));
    d.queue_kernel(D0, s, vec![], vec![(r.at, PAGE, 1)])
        .unwrap();
    d.queue_kernel(
        D0,
        s,
        vec![],
        vec![(r.page(1), PAGE, 1), (r.page(3), PAGE, 1)],
    )
    .unwrap();
    d.queue_kernel(D0, s, vec![(r.page(2), 0)], vec![]).unwrap();
    assert!(d.step(D0, s), "the first kernel has run");
    unmap(&d, r.at, 4 * PAGE);
    assert_eq!(d.hazards(), 0, "the second would have failed anyway");
    unsafe {
        for &handle in &r.handles {
            d.release(handle).unwrap();
        }
        d.free_reservation(r.at, r.size).unwrap();
    }
    assert_eq!(code(unsafe { d.unmap(r.at, PAGE) }), INVALID_VALUE);
    assert_eq!(d.hazards(), 0, "a refused call takes nothing away");
}

fn a_replayed_graph_names_what_its_nodes_name<B: Backing>(d: Machine<B>) {
    use cuvmm_driver::CaptureMode;
    let r = range(&d, 1, 1);
    let s = stream(&d, D0);
    let graph = unsafe {
        d.capture_begin(D0, s, CaptureMode::RELAXED).unwrap();
        d.fill_async(D0, r.at, 1, PAGE, s).unwrap();
        let graph = d.capture_end(D0, s).unwrap();
        d.graph_instantiate(D0, graph).unwrap()
    };
    set_access(&d, r.at, none(D0));
    assert_eq!(d.hazards(), 0, "a graph that is not launched is not queued");
    set_access(&d, r.at, rw(D0));
    d.hold(D0, s);
    unsafe { d.graph_launch(D0, graph, s) }.unwrap();
    r.end(&d);
    let [launched] = &d.take_hazards()[..] else {
        panic!("the graph is queued");
    };
    assert_eq!(launched.work, "graph");
}

fn the_first_hazards_are_kept_and_all_are_counted<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let s = held(&d, D0);
    for _ in 0..100 {
        unsafe { d.fill_async(D0, r.at, 1, PAGE, s) }.unwrap();
    }
    r.end(&d);
    assert_eq!(d.hazards(), 100);
    assert_eq!(d.take_hazards().len(), 64);
    assert_eq!((d.hazards(), d.take_hazards().len()), (0, 0));
}
