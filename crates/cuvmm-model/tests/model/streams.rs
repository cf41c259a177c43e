//! Streams that are held back, late work, lost contexts.
//!
//! `unsafe` because the driver's methods are, and deliberately misused: the backends under test
//! define the result of every misuse.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::model_support::*;
use crate::on_both;
use cuvmm_driver::{
    CUresult, DeviceAddress, Driver, DriverKind, EventFlags, EventHandle, Ordinal, StreamFlags,
    StreamHandle,
};
use cuvmm_model::model::{Backing, Machine};

on_both!(
    work_runs_at_once,
    held_work_waits,
    a_late_write_lands_in_the_new_owner,
    a_late_write_into_nothing_loses_the_context,
    a_right_that_went_away_loses_the_context,
    kernels_are_not_checked_at_launch,
    a_kernel_that_reads_nothing_mapped_loses_the_context,
    losing_a_context,
    the_other_device_lives_on,
    events_cover_what_was_queued_before,
    events_join_streams_and_devices,
    the_default_stream_waits_for_blocking_ones,
    context_events_cover_all_streams,
    step_by_step,
    hold_all_holds_what_comes_later,
    destroyed_streams_finish_their_work,
    synchronising_blocks_until_let_go,
    a_test_that_has_failed_waits_for_nothing_that_is_held,
    a_stream_is_held_until_somebody_waits_for_it,
    copies_wait_for_the_default_stream,
    wrong_handles,
);

fn stream<B: Backing>(d: &Machine<B>) -> StreamHandle {
    d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap()
}

fn event<B: Backing>(d: &Machine<B>) -> EventHandle {
    d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap()
}

fn fill<B: Backing>(d: &Machine<B>, s: StreamHandle, address: DeviceAddress, byte: u8) {
    unsafe { d.fill_async(D0, address, byte, PAGE, s) }.unwrap();
}

fn done<B: Backing>(d: &Machine<B>, s: StreamHandle) -> bool {
    unsafe { d.stream_query(D0, s) }.unwrap()
}

/// Returns `true` if the first byte is `byte`; a model, which has no bytes, reads 0.
fn is<B: Backing>(d: &Machine<B>, address: DeviceAddress, byte: u8) -> bool {
    let has_bytes = d.kind() == DriverKind::Host;
    first_byte(d, address) == if has_bytes { byte } else { 0 }
}

fn work_runs_at_once<B: Backing>(d: Machine<B>) {
    let r = range(&d, 2, 2);
    let s = stream(&d);
    fill(&d, s, r.at, 3);
    assert!(done(&d, s) && is(&d, r.at, 3) && is(&d, r.page(1), 0));
    unsafe { d.copy_on_device_async(D0, r.page(1), r.at, PAGE, s) }.unwrap();
    assert!(is(&d, r.page(1), 3));
    assert_eq!(d.live().queued, 0);
    unsafe { d.stream_destroy(D0, s) }.unwrap();
    r.end(&d);
    assert!(d.live().is_nothing());
}

fn held_work_waits<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let s = stream(&d);
    fill(&d, s, r.at, 1);
    d.hold(D0, s);
    assert!(done(&d, s), "what ran before it was held");
    fill(&d, s, r.at, 2);
    let other = stream(&d);
    assert!(!done(&d, s) && done(&d, other) && is(&d, r.at, 1));
    assert_eq!(d.live().queued, 1);
    d.release_stream(D0, s);
    assert!(done(&d, s) && is(&d, r.at, 2));
}

fn a_late_write_lands_in_the_new_owner<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let s = stream(&d);
    d.hold(D0, s);
    fill(&d, s, r.at, 0xee);
    let next = page(&d);
    unsafe {
        d.unmap(r.at, PAGE).unwrap();
        d.map(r.at, PAGE, 0, next, 0).unwrap();
        d.set_access(r.at, PAGE, &[rw(D0)]).unwrap();
        d.fill(D0, r.at, 5, PAGE).unwrap();
    }
    assert!(is(&d, r.at, 5));
    d.release_stream(D0, s);
    assert!(
        is(&d, r.at, 0xee),
        "that is how reuse that is too early shows"
    );
    assert_eq!(code(d.context_synchronize(D0)), SUCCESS);
}

fn a_late_write_into_nothing_loses_the_context<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let s = stream(&d);
    d.hold(D0, s);
    fill(&d, s, r.at, 1);
    unsafe { d.unmap(r.at, PAGE) }.unwrap();
    assert_eq!(code(unsafe { d.stream_query(D0, s) }), SUCCESS);
    d.release_stream(D0, s);
    assert_eq!(code(unsafe { d.stream_query(D0, s) }), ILLEGAL_ADDRESS);
}

fn a_right_that_went_away_loses_the_context<B: Backing>(d: Machine<B>) {
    let r = range(&d, 2, 2);
    let s = stream(&d);
    d.hold(D0, s);
    unsafe { d.copy_on_device_async(D0, r.at, r.page(1), PAGE, s) }.unwrap();
    unsafe { d.set_access(r.page(1), PAGE, &[ro(D0)]) }.unwrap();
    d.release_stream(D0, s);
    assert_eq!(
        code(d.context_synchronize(D0)),
        SUCCESS,
        "reading is still allowed"
    );
    d.hold(D0, s);
    unsafe { d.copy_on_device_async(D0, r.at, r.page(1), PAGE, s) }.unwrap();
    unsafe { d.set_access(r.page(1), PAGE, &[none(D0)]) }.unwrap();
    d.release_stream(D0, s);
    assert_eq!(code(d.context_synchronize(D0)), ILLEGAL_ADDRESS);
}

fn kernels_are_not_checked_at_launch<B: Backing>(d: Machine<B>) {
    let r = range(&d, 2, 2);
    let s = stream(&d);
    let reads = vec![(r.at, 2 * PAGE)];
    d.queue_kernel(D0, s, reads, vec![(at(r.at, PAGE - 1), 2, 9)])
        .unwrap();
    assert!(is(&d, r.page(1), 9) && is(&d, at(r.page(1), 1), 0));
    unsafe { d.set_access(r.at, PAGE, &[ro(D0)]) }.unwrap();
    assert_eq!(
        d.queue_kernel(D0, s, vec![], vec![(r.at, 1, 1)]),
        Ok(()),
        "the launch"
    );
    assert_eq!(code(d.context_synchronize(D0)), ILLEGAL_ADDRESS);
    assert_eq!(
        d.queue_kernel(D0, s, vec![], vec![]),
        Err(ILLEGAL_ADDRESS),
        "sticky"
    );
}

fn a_kernel_that_reads_nothing_mapped_loses_the_context<B: Backing>(d: Machine<B>) {
    let r = range(&d, 2, 1);
    let s = stream(&d);
    assert_eq!(
        d.queue_kernel(D0, s, vec![(r.at, 2 * PAGE)], vec![]),
        Ok(())
    );
    assert_eq!(code(d.context_synchronize(D0)), ILLEGAL_ADDRESS);
}

fn losing_a_context<B: Backing>(d: Machine<B>) {
    let r = range(&d, 2, 1);
    let s = stream(&d);
    let e = event(&d);
    d.hold(D0, s);
    fill(&d, s, r.at, 1);
    let lost = CUresult::CUDA_ERROR_ECC_UNCORRECTABLE;
    d.lose_context(D0, lost);
    assert_eq!(d.live().queued, 0, "never runs");
    assert!(is(&d, r.at, 0));
    let mut byte = [0];
    unsafe {
        for answer in [
            d.fill(D0, r.at, 1, PAGE),
            d.copy_to_host(D0, &mut byte, r.at),
            d.copy_to_device(D0, r.at, &byte),
            d.context_synchronize(D0),
            d.stream_synchronize(D0, s),
            d.event_record(D0, e, s),
            d.event_synchronize(D0, e),
            d.context_record_event(D0, e),
        ] {
            assert_eq!(code(answer), lost);
        }
        assert_eq!(code(d.event_query(D0, e)), lost);
        assert_eq!(code(d.memory_info(D0)), lost);
        assert_eq!(code(d.alloc(D0, PAGE)), lost);
        // As measured, the virtual-memory calls still work.
        let handle = page(&d);
        assert_eq!(code(d.map(r.page(1), PAGE, 0, handle, 0)), SUCCESS);
        assert_eq!(code(d.set_access(r.page(1), PAGE, &[rw(D0)])), SUCCESS);
        assert_eq!(code(d.release(handle)), SUCCESS);
        assert_eq!(code(d.stream_destroy(D0, s)), lost);
        assert_eq!(code(d.event_destroy(D0, e)), lost);
    }
    r.end(&d);
    assert!(d.live().is_nothing(), "all of it could be given back");
}

fn the_other_device_lives_on<B: Backing>(d: Machine<B>) {
    d.lose_context(D0, ILLEGAL_ADDRESS);
    assert_eq!(code(d.context_synchronize(D1)), SUCCESS);
    assert_eq!(code(d.memory_info(D1)), SUCCESS);
    d.lose_context(Ordinal(7), ILLEGAL_ADDRESS);
}

fn events_cover_what_was_queued_before<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let s = stream(&d);
    let e = event(&d);
    let query = || unsafe { d.event_query(D0, e) }.unwrap();
    assert!(query(), "never recorded counts as done");
    d.hold(D0, s);
    unsafe { d.event_record(D0, e, s) }.unwrap();
    assert!(!query(), "a record waits like other work");
    d.release_stream(D0, s);
    assert!(query());
    d.hold(D0, s);
    fill(&d, s, r.at, 1);
    assert!(query(), "what came after the record is not covered");
    unsafe { d.event_record(D0, e, s) }.unwrap();
    fill(&d, s, r.at, 2);
    assert!(d.step(D0, s) && !query());
    assert!(d.step(D0, s) && query(), "the record has passed");
    assert!(!done(&d, s));
    d.release_stream(D0, s);
    assert!(done(&d, s) && is(&d, r.at, 2));
}

fn events_join_streams_and_devices<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    unsafe { d.set_access(r.at, PAGE, &[rw(D1)]) }.unwrap();
    let first = stream(&d);
    let second = d.stream_create(D1, StreamFlags::NON_BLOCKING).unwrap();
    let e = event(&d);
    d.hold(D0, first);
    fill(&d, first, r.at, 1);
    unsafe {
        d.event_record(D0, e, first).unwrap();
        d.stream_wait_event(D1, second, e).unwrap();
        d.fill_async(D1, r.at, 2, PAGE, second).unwrap();
        assert_eq!(
            d.stream_query(D1, second),
            Ok(false),
            "waits though it is not held"
        );
        d.event_destroy(D0, e).unwrap();
        d.release_stream(D0, first);
        assert_eq!(d.stream_query(D1, second), Ok(true));
    }
    assert!(is(&d, r.at, 2), "in that order");
}

fn the_default_stream_waits_for_blocking_ones<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let blocking = d.stream_create(D0, StreamFlags::empty()).unwrap();
    let free = stream(&d);
    d.hold(D0, blocking);
    fill(&d, blocking, r.at, 1);
    unsafe { d.fill(D0, r.at, 2, PAGE) }.unwrap();
    fill(&d, free, r.at, 3);
    assert!(done(&d, free) && !done(&d, StreamHandle::NULL) && is(&d, r.at, 3));
    let later = d.stream_create(D0, StreamFlags::empty()).unwrap();
    fill(&d, later, r.at, 4);
    assert!(
        !done(&d, later),
        "blocking streams wait for the default stream"
    );
    d.release_stream(D0, blocking);
    assert!(done(&d, later) && done(&d, StreamHandle::NULL) && is(&d, r.at, 4));

    d.hold(D0, StreamHandle::NULL);
    unsafe { d.fill(D0, r.at, 5, PAGE) }.unwrap();
    fill(&d, blocking, r.at, 6);
    fill(&d, free, r.at, 7);
    assert!(is(&d, r.at, 7) && !done(&d, blocking));
    d.release_stream(D0, StreamHandle(1));
    assert!(is(&d, r.at, 6), "1 is its other name");
}

fn context_events_cover_all_streams<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let (one, two) = (stream(&d), stream(&d));
    let e = event(&d);
    d.hold(D0, one);
    d.hold(D0, two);
    fill(&d, one, r.at, 1);
    fill(&d, two, r.at, 2);
    unsafe { d.context_record_event(D0, e) }.unwrap();
    let query = || unsafe { d.event_query(D0, e) }.unwrap();
    assert!(!query());
    d.release_stream(D0, one);
    assert!(!query());
    unsafe { d.stream_destroy(D0, two) }.unwrap();
    assert!(!query(), "its work is still to come");
    d.release_all_streams(D0);
    assert!(query() && is(&d, r.at, 2));
}

fn step_by_step<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let s = stream(&d);
    assert!(!d.step(D0, s), "nothing to do");
    d.hold(D0, s);
    for byte in 1..4 {
        fill(&d, s, r.at, byte);
    }
    for byte in 1..4 {
        assert!(d.step(D0, s) && is(&d, r.at, byte));
    }
    assert!(!d.step(D0, s) && done(&d, s));
    let e = event(&d);
    let other = stream(&d);
    fill(&d, s, r.at, 4);
    unsafe { d.event_record(D0, e, s) }.unwrap();
    unsafe { d.stream_wait_event(D0, other, e) }.unwrap();
    assert!(!d.step(D0, other), "it waits");
}

fn hold_all_holds_what_comes_later<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let early = stream(&d);
    d.hold_all(D0);
    let late = stream(&d);
    fill(&d, early, r.at, 1);
    fill(&d, late, r.at, 2);
    unsafe { d.fill(D0, r.at, 3, PAGE) }.unwrap();
    assert_eq!(d.live().queued, 3);
    let elsewhere = d.stream_create(D1, StreamFlags::NON_BLOCKING).unwrap();
    d.queue_kernel(D1, elsewhere, vec![], vec![]).unwrap();
    assert_eq!(d.live().queued, 3, "other devices run on");
    d.release_all_streams(D0);
    assert_eq!(d.live().queued, 0);
    let after = stream(&d);
    fill(&d, after, r.at, 4);
    assert!(is(&d, r.at, 4));
}

fn destroyed_streams_finish_their_work<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let s = stream(&d);
    d.hold(D0, s);
    fill(&d, s, r.at, 1);
    unsafe { d.stream_destroy(D0, s) }.unwrap();
    assert_eq!((d.live().streams, d.live().queued), (0, 1));
    let answer = unsafe { d.fill_async(D0, r.at, 2, PAGE, s) };
    assert_eq!(code(answer), CUresult::CUDA_ERROR_INVALID_HANDLE);
    d.release_all_streams(D0);
    assert!(is(&d, r.at, 1));
    assert_eq!(d.live().queued, 0);
}

type Wait<B> = fn(&Machine<B>, StreamHandle, EventHandle) -> CUresult;

fn a_stream_is_held_until_somebody_waits_for_it<B: Backing>(d: Machine<B>) {
    let s = d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap();
    let address = d.alloc(D0, PAGE).unwrap();
    d.hold_until_awaited(D0, s);
    unsafe {
        d.fill_async(D0, address, 1, PAGE, s).unwrap();
        assert!(!d.stream_query(D0, s).unwrap(), "asking is not waiting");
        assert_eq!(code(d.stream_synchronize(D0, s)), SUCCESS);
        d.fill_async(D0, address, 2, PAGE, s).unwrap();
        assert!(d.stream_query(D0, s).unwrap(), "once");
        assert_eq!(code(d.free(D0, address)), SUCCESS);
    }
}

fn a_test_that_has_failed_waits_for_nothing_that_is_held<B: Backing>(d: Machine<B>) {
    struct Waits<'a, B: Backing>(&'a Machine<B>);
    impl<B: Backing> Drop for Waits<'_, B> {
        fn drop(&mut self) {
            assert_eq!(code(self.0.context_synchronize(D0)), SUCCESS);
        }
    }
    let s = d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap();
    let address = d.alloc(D0, PAGE).unwrap();
    d.hold(D0, s);
    unsafe { d.fill_async(D0, address, 1, PAGE, s) }.unwrap();
    let failed = thread::scope(|scope| {
        let test = scope.spawn(|| {
            let _waits = Waits(&d);
            panic!("on purpose: the test fails");
        });
        test.join()
    });
    assert!(failed.is_err());
    assert_eq!(code(unsafe { d.free(D0, address) }), SUCCESS);
}

fn synchronising_blocks_until_let_go<B: Backing>(d: Machine<B>) {
    let d = Arc::new(d);
    let r = range(&d, 1, 1);
    let s = stream(&d);
    let e = event(&d);
    d.hold(D0, s);
    fill(&d, s, r.at, 1);
    unsafe { d.event_record(D0, e, s) }.unwrap();
    let gone = Arc::new(AtomicBool::new(false));
    let waits: [Wait<B>; 3] = [
        |d, s, _| code(unsafe { d.stream_synchronize(D0, s) }),
        |d, _, e| code(unsafe { d.event_synchronize(D0, e) }),
        |d, _, _| code(d.context_synchronize(D0)),
    ];
    let threads: Vec<_> = waits
        .into_iter()
        .map(|wait| {
            let (d, gone) = (Arc::clone(&d), Arc::clone(&gone));
            thread::spawn(move || {
                assert_eq!(wait(&d, s, e), SUCCESS);
                assert!(gone.load(Ordering::SeqCst), "returned before it was let go");
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(30));
    gone.store(true, Ordering::SeqCst);
    d.release_stream(D0, s);
    for thread in threads {
        thread.join().unwrap();
    }

    d.hold(D0, s);
    fill(&d, s, r.at, 1);
    let waiting = Arc::clone(&d);
    let thread = thread::spawn(move || code(waiting.context_synchronize(D0)));
    thread::sleep(Duration::from_millis(10));
    d.lose_context(D0, ILLEGAL_ADDRESS);
    assert_eq!(
        thread.join().unwrap(),
        ILLEGAL_ADDRESS,
        "a loss wakes who waits"
    );
}

fn copies_wait_for_the_default_stream<B: Backing>(d: Machine<B>) {
    let d = Arc::new(d);
    let r = range(&d, 1, 1);
    d.hold(D0, StreamHandle::NULL);
    unsafe { d.fill(D0, r.at, 8, PAGE) }.unwrap();
    let (reader, from) = (Arc::clone(&d), r.at);
    let thread = thread::spawn(move || {
        let mut bytes = [1; 3];
        unsafe { reader.copy_to_host(D0, &mut bytes, from) }.unwrap();
        bytes
    });
    thread::sleep(Duration::from_millis(10));
    assert!(!thread.is_finished());
    d.release_stream(D0, StreamHandle::NULL);
    let expected = if d.kind() == DriverKind::Host { 8 } else { 0 };
    assert_eq!(thread.join().unwrap(), [expected; 3]);

    // Queued copies keep the host pointers until they run.
    let s = stream(&d);
    let source = [42_u8; 100];
    let mut target = vec![0_u8; 100];
    d.hold(D0, s);
    unsafe {
        d.copy_to_device_async(D0, r.at, source.as_ptr(), 100, s)
            .unwrap();
        d.copy_to_host_async(D0, target.as_mut_ptr(), r.at, 100, s)
            .unwrap();
        assert_eq!(
            code(d.copy_to_device_async(D0, r.at, std::ptr::null(), 1, s)),
            INVALID_VALUE
        );
    }
    assert!(is(&d, r.at, 8));
    d.release_stream(D0, s);
    let expected = if d.kind() == DriverKind::Host { 42 } else { 0 };
    assert_eq!(target, vec![expected; 100]);
}

fn wrong_handles<B: Backing>(d: Machine<B>) {
    let bad = CUresult::CUDA_ERROR_INVALID_HANDLE;
    let s = stream(&d);
    let e = event(&d);
    unsafe {
        assert_eq!(code(d.stream_query(D0, StreamHandle(77))), bad);
        assert_eq!(code(d.stream_query(D1, s)), bad, "of another device");
        assert_eq!(code(d.event_record(D1, e, StreamHandle::NULL)), bad);
        assert_eq!(code(d.event_query(D0, EventHandle(77))), bad);
        assert_eq!(code(d.stream_destroy(D0, StreamHandle::NULL)), bad);
        d.stream_destroy(D0, s).unwrap();
        d.event_destroy(D0, e).unwrap();
        assert_eq!(code(d.stream_destroy(D0, s)), bad, "twice");
        assert_eq!(code(d.event_destroy(D0, e)), bad, "twice");
    }
    assert_eq!(
        code(d.stream_create(D0, StreamFlags::from_bits_retain(4))),
        INVALID_VALUE
    );
}
