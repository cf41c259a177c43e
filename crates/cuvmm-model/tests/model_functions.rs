//! Functions of the program in the order of a stream, which a thread of the machine's owner runs.
//!
//! `unsafe` because the driver's methods are. Every object belongs to the test that uses it.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model_support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use cuvmm_driver::{CaptureMode, Driver, EventFlags, Ordinal, StreamFlags, StreamHandle};
use cuvmm_model::model::{Backing, Machine};
use model_support::*;

on_both!(
    a_stream_is_busy_until_its_function_has_returned,
    every_stream_that_waits_for_a_function_waits,
    functions_of_a_device_come_in_the_order_of_the_streams,
    a_function_that_panics_ends,
    a_held_stream_steps_to_its_function,
    a_graph_goes_on_behind_its_function,
    work_that_was_discarded_waits_for_no_function,
    a_synchronization_waits_for_the_function,
);

fn stream<B: Backing>(d: &Machine<B>) -> StreamHandle {
    d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap()
}

fn done<B: Backing>(d: &Machine<B>, s: StreamHandle) -> bool {
    unsafe { d.stream_query(D0, s) }.unwrap()
}

/// Queues a function that adds a digit to a number.
fn digit<B: Backing>(d: &Machine<B>, s: StreamHandle, seen: &Arc<AtomicU32>, digit: u32) {
    let seen = Arc::clone(seen);
    let add = move |before: u32| Some(before * 10 + digit);
    let call = move || {
        let _ = seen.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add);
    };
    d.queue_host_call(D0, s, call).unwrap();
}

fn number(seen: &AtomicU32) -> u32 {
    seen.load(Ordering::SeqCst)
}

fn a_stream_is_busy_until_its_function_has_returned<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let (s, seen) = (stream(&d), Arc::default());
    digit(&d, s, &seen, 1);
    unsafe { d.fill_async(D0, r.at, 1, PAGE, s) }.unwrap();
    assert!(!done(&d, s));
    assert_eq!((number(&seen), d.live().queued), (0, 2));
    let work = d.next_host_work(D0);
    assert!(!done(&d, s));
    work.run();
    assert!(done(&d, s));
    assert_eq!((number(&seen), d.live().queued), (1, 0));
}

fn every_stream_that_waits_for_a_function_waits<B: Backing>(d: Machine<B>) {
    let (s, other, seen) = (stream(&d), stream(&d), Arc::default());
    let blocking = d.stream_create(D0, StreamFlags::empty()).unwrap();
    let event = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    digit(&d, s, &seen, 1);
    digit(&d, blocking, &seen, 2);
    unsafe {
        d.event_record(D0, event, s).unwrap();
        d.stream_wait_event(D0, other, event).unwrap();
        assert!(!d.event_query(D0, event).unwrap());
    }
    assert!(!done(&d, other) && !done(&d, StreamHandle::NULL));
    d.next_host_work(D0).run();
    assert!(done(&d, other) && !done(&d, StreamHandle::NULL));
    assert!(unsafe { d.event_query(D0, event) }.unwrap());
    d.next_host_work(D0).run();
    assert!(done(&d, StreamHandle::NULL));
}

fn functions_of_a_device_come_in_the_order_of_the_streams<B: Backing>(d: Machine<B>) {
    let (one, two, seen) = (stream(&d), stream(&d), Arc::default());
    digit(&d, two, &seen, 1);
    digit(&d, two, &seen, 3);
    digit(&d, one, &seen, 2);
    let elsewhere = d.stream_create(D1, StreamFlags::NON_BLOCKING).unwrap();
    d.queue_host_call(D1, elsewhere, || {}).unwrap();
    for _ in 0..3 {
        d.next_host_work(D0).run();
    }
    assert_eq!(number(&seen), 123);
    assert!(!unsafe { d.stream_query(D1, elsewhere) }.unwrap());
    d.next_host_work(D1).run();
    d.finish_host_work(D1);
    assert!(unsafe { d.stream_query(D1, elsewhere) }.unwrap());
}

fn a_function_that_panics_ends<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    let call = || panic!("on purpose: the function fails");
    d.queue_host_call(D0, s, call).unwrap();
    let work = d.next_host_work(D0);
    assert!(catch_unwind(AssertUnwindSafe(|| work.run())).is_err());
    assert!(done(&d, s));
}

fn a_held_stream_steps_to_its_function<B: Backing>(d: Machine<B>) {
    let (s, seen) = (stream(&d), Arc::default());
    d.hold(D0, s);
    digit(&d, s, &seen, 1);
    digit(&d, s, &seen, 2);
    assert!(d.step(D0, s));
    assert!(!d.step(D0, s), "the stream is busy");
    d.next_host_work(D0).run();
    assert_eq!((number(&seen), d.live().queued), (1, 1));
    // A stream that was destroyed goes on.
    unsafe { d.stream_destroy(D0, s) }.unwrap();
    d.release_all_streams(D0);
    d.next_host_work(D0).run();
    assert_eq!((number(&seen), d.live().queued), (12, 0));
}

fn a_graph_goes_on_behind_its_function<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let (s, seen) = (stream(&d), Arc::default());
    let capture = |act: &dyn Fn()| unsafe {
        d.capture_begin(D0, s, CaptureMode::RELAXED).unwrap();
        act();
        d.capture_end(D0, s).unwrap()
    };
    let inner = capture(&|| {
        digit(&d, s, &seen, 1);
        unsafe { d.fill_async(D0, r.at, 1, PAGE, s) }.unwrap();
        digit(&d, s, &seen, 2);
    });
    unsafe {
        let inner = d.graph_instantiate(D0, inner).unwrap();
        let outer = capture(&|| {
            d.graph_launch(D0, inner, s).unwrap();
            digit(&d, s, &seen, 3);
        });
        let outer = d.graph_instantiate(D0, outer).unwrap();
        for _ in 0..2 {
            d.graph_launch(D0, outer, s).unwrap();
        }
    }
    assert_eq!((number(&seen), d.live().queued), (0, 2));
    for (left, wanted) in [
        (2, 1),
        (2, 12),
        (1, 123),
        (1, 1231),
        (1, 12312),
        (0, 123_123),
    ] {
        d.next_host_work(D0).run();
        assert_eq!((number(&seen), d.live().queued), (wanted, left));
    }
    assert!(done(&d, s));
}

fn work_that_was_discarded_waits_for_no_function<B: Backing>(d: Machine<B>) {
    let seen = Arc::default();
    digit(&d, StreamHandle::NULL, &seen, 1);
    digit(&d, StreamHandle::NULL, &seen, 2);
    let running = d.next_host_work(D0);
    d.lose_context(D0, ILLEGAL_ADDRESS);
    d.finish_host_work(D0);
    d.reset_context(D0);
    // The first function of the new context has the place in its stream that the running one had.
    digit(&d, StreamHandle::NULL, &seen, 3);
    running.run();
    assert!(!done(&d, StreamHandle::NULL));
    d.next_host_work(D0).run();
    assert!(done(&d, StreamHandle::NULL));
    assert_eq!(number(&seen), 13);
}

fn a_synchronization_waits_for_the_function<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let plain = d.alloc(D0, PAGE).unwrap();
    let event = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let s = d.stream_create(D0, StreamFlags::empty()).unwrap();
    let waits: [&(dyn Fn() + Sync); 6] = [
        &|| unsafe { d.stream_synchronize(D0, s) }.unwrap(),
        &|| unsafe { d.event_synchronize(D0, event) }.unwrap(),
        &|| d.context_synchronize(D0).unwrap(),
        &|| unsafe { d.copy_to_device(D0, r.at, &[1]) }.unwrap(),
        &|| unsafe { d.copy_to_host(D0, &mut [0], r.at) }.unwrap(),
        &|| unsafe { d.free(D0, plain) }.unwrap(),
    ];
    for wait in waits {
        let seen = Arc::default();
        digit(&d, s, &seen, 1);
        unsafe { d.event_record(D0, event, s) }.unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                wait();
                assert_eq!(number(&seen), 1);
            });
            let work = d.next_host_work(D0);
            // Another thread's calls are not kept waiting meanwhile.
            assert_eq!(d.can_access_peer(D0, Ordinal(0)).ok(), Some(false));
            work.run();
            waiting.join().unwrap();
        });
    }
}

/// A thread may wait for a function without a call of the driver. Other work stays late.
// It looks at bytes.
#[cfg(target_os = "linux")]
#[test]
fn late_work_before_a_function_runs() {
    let d = host(HostOptions::new().late(true));
    let r = range(&d, 3, 3);
    let (s, awaited, other) = (stream(&d), stream(&d), stream(&d));
    let (event, seen) = (
        d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap(),
        Arc::default(),
    );
    let fill = |page, s| unsafe { d.fill_async(D0, r.page(page), 7, PAGE, s) }.unwrap();
    fill(0, awaited);
    fill(1, other);
    unsafe {
        d.event_record(D0, event, awaited).unwrap();
        d.stream_wait_event(D0, s, event).unwrap();
    }
    assert_eq!(first_byte(&d, r.page(0)), 0);
    digit(&d, s, &seen, 1);
    fill(2, s);
    digit(&d, s, &seen, 2);
    fill(2, s);
    let work = d.next_host_work(D0);
    let bytes = |d: &_| [0, 1, 2].map(|page| first_byte(d, r.page(page)));
    assert_eq!(bytes(&d), [7, 0, 0]);
    work.run();
    d.next_host_work(D0).run();
    assert_eq!(bytes(&d), [7, 0, 7]);
    assert_eq!((number(&seen), d.live().queued), (12, 2));
    assert!(!done(&d, s) && done(&d, s));
    assert_eq!(d.live().queued, 0);
}
