//! Captures: the work they record, and what invalidates them where no case of
//! `stand-in/conformance` asks for it.
//!
//! `unsafe` because the driver's methods are; the backends define the result of each deliberate
//! misuse.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::thread;

use crate::model_support::*;
use crate::on_both;
use cuvmm_driver::{
    CUresult, CaptureMode, CaptureStatus, Driver, DriverKind, EventFlags, Result, StreamFlags,
    StreamHandle,
};
use cuvmm_model::model::{Backing, Machine};

on_both!(
    a_graph_replays_at_the_same_addresses,
    calls_that_are_fine,
    copies_and_allocations_break_a_capture,
    modes_belong_to_threads,
    what_concerns_the_context_breaks_its_captures_alone,
    the_default_stream_breaks_blocking_captures,
    forks_and_joins,
    a_capture_tells_its_graph_and_nodes,
    states_and_wrong_calls,
);

fn stream<B: Backing>(d: &Machine<B>) -> StreamHandle {
    d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap()
}

fn begin<B: Backing>(d: &Machine<B>, s: StreamHandle, mode: CaptureMode) {
    unsafe { d.capture_begin(D0, s, mode) }.unwrap();
}

fn status<B: Backing>(d: &Machine<B>, s: StreamHandle) -> CaptureStatus {
    unsafe { d.capture_status(D0, s) }.unwrap()
}

/// Ends a capture that must have been invalidated.
fn end_broken<B: Backing>(d: &Machine<B>, s: StreamHandle) {
    assert_eq!(status(d, s), CaptureStatus::INVALIDATED);
    assert_eq!(code(unsafe { d.capture_end(D0, s) }), CAPTURE_INVALIDATED);
    assert_eq!(status(d, s), CaptureStatus::NONE);
}

/// Ends a capture that must still be active.
fn end_well<B: Backing>(d: &Machine<B>, s: StreamHandle) {
    assert_eq!(status(d, s), CaptureStatus::ACTIVE);
    let graph = unsafe { d.capture_end(D0, s) }.unwrap();
    unsafe { d.graph_destroy(D0, graph) }.unwrap();
}

fn a_capture_tells_its_graph_and_nodes<B: Backing>(d: Machine<B>) {
    let (s, other) = (stream(&d), stream(&d));
    let event = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let memory = d.alloc(D0, 4096).unwrap();
    assert_eq!(d.recording(D0, s), Ok(None));
    begin(&d, s, CaptureMode::RELAXED);
    let told = |s| d.recording(D0, s).unwrap().unwrap();
    assert!(told(s).nodes.is_empty());
    unsafe {
        d.event_record(D0, event, s).unwrap();
        d.stream_wait_event(D0, other, event).unwrap();
        d.fill_async(D0, memory, 1, 64, s).unwrap();
        d.fill_async(D0, at(memory, 64), 1, 64, other).unwrap();
        assert_eq!([told(s).nodes.len(), told(other).nodes.len()], [1, 1]);
        assert_ne!(told(s).nodes, told(other).nodes);
        d.event_record(D0, event, other).unwrap();
        d.stream_wait_event(D0, s, event).unwrap();
        assert_eq!(told(s).nodes.len(), 2, "behind both");
        assert_eq!(
            (told(s).id, told(s).graph),
            (told(other).id, told(other).graph)
        );
        d.fill_async(D0, memory, 2, 64, s).unwrap();
        assert_eq!(told(s).nodes.len(), 1);
        let graph = told(s).graph;
        assert_eq!(d.capture_end(D0, s), Ok(graph));
        d.graph_destroy(D0, graph).unwrap();
        begin(&d, s, CaptureMode::RELAXED);
        let again = told(s);
        assert!(d.context_synchronize(D0).is_err());
        assert_eq!(told(s), again, "also once it is invalid");
        end_broken(&d, s);
        d.event_destroy(D0, event).unwrap();
        d.free(D0, memory).unwrap();
        for s in [s, other] {
            d.stream_destroy(D0, s).unwrap();
        }
    }
    assert!(d.live().is_nothing());
}

fn a_graph_replays_at_the_same_addresses<B: Backing>(d: Machine<B>) {
    let has_bytes = d.kind() == DriverKind::Host;
    let is = |address, byte| first_byte(&d, address) == if has_bytes { byte } else { 0 };
    let r = range(&d, 2, 2);
    let s = stream(&d);
    unsafe {
        begin(&d, s, CaptureMode::GLOBAL);
        d.fill_async(D0, r.at, 7, PAGE, s).unwrap();
        d.copy_on_device_async(D0, r.page(1), r.at, PAGE, s)
            .unwrap();
        d.queue_kernel(D0, s, vec![], vec![(r.at, 1, 8)]).unwrap();
        assert!(is(r.at, 0), "recorded, not run");
        let graph = d.capture_end(D0, s).unwrap();
        let exec = d.graph_instantiate(D0, graph).unwrap();
        d.graph_destroy(D0, graph).unwrap();
        d.graph_launch(D0, exec, s).unwrap();
        assert!(is(r.at, 8) && is(r.page(1), 7));

        // With other memory at the same address, the replay writes to the new memory.
        let next = page(&d);
        d.unmap(r.at, PAGE).unwrap();
        d.map(r.at, PAGE, 0, next, 0).unwrap();
        d.set_access(r.at, PAGE, &[rw(D0)]).unwrap();
        assert!(is(r.at, 0));
        d.hold(D0, s);
        d.graph_launch(D0, exec, s).unwrap();
        assert!(is(r.at, 0), "a launch queues like other work");
        d.release_stream(D0, s);
        assert!(is(r.at, 8));

        d.unmap(r.at, PAGE).unwrap();
        assert_eq!(code(d.graph_launch(D0, exec, s)), SUCCESS);
        assert_eq!(code(d.context_synchronize(D0)), ILLEGAL_ADDRESS);
        assert_eq!(code(d.graph_exec_destroy(D0, exec)), ILLEGAL_ADDRESS);
    }
    assert_eq!(d.live().graphs, 0);
}

fn calls_that_are_fine<B: Backing>(d: Machine<B>) {
    let (s, other) = (stream(&d), stream(&d));
    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    begin(&d, s, CaptureMode::GLOBAL);
    let r = range(&d, 1, 1);
    unsafe { d.event_record(D0, e, other) }.unwrap();
    unsafe { d.fill_async(D0, r.at, 1, PAGE, other) }.unwrap();
    d.memory_info(D0).unwrap();
    r.end(&d);
    end_well(&d, s);
}

fn copies_and_allocations_break_a_capture<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    let r = range(&d, 1, 1);
    let mut byte = [0];
    let mut calls: [Box<dyn FnMut() -> Result<()> + '_>; 2] = [
        Box::new(|| unsafe { d.copy_to_host(D0, &mut byte, r.at) }),
        Box::new(|| d.alloc(D0, PAGE).map(drop)),
    ];
    for call in &mut calls {
        begin(&d, s, CaptureMode::GLOBAL);
        assert_eq!(code(call()), CAPTURE_UNSUPPORTED);
        let recorded = unsafe { d.fill_async(D0, r.at, 1, 1, s) };
        assert_eq!(code(recorded), CAPTURE_INVALIDATED);
        end_broken(&d, s);
        assert_eq!(code(call()), SUCCESS, "afterwards");
    }
}

fn modes_belong_to_threads<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    begin(&d, s, CaptureMode::GLOBAL);
    thread::scope(|scope| {
        scope.spawn(|| {
            d.exchange_capture_mode(CaptureMode::THREAD_LOCAL).unwrap();
            let looks_at_its_own_captures = unsafe { d.event_query(D0, e) };
            assert_eq!(code(looks_at_its_own_captures), SUCCESS);
            let wrong = CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
            assert_eq!(code(unsafe { d.capture_end(D0, s) }), wrong);
        });
    });
    end_well(&d, s);
    assert_eq!(code(d.exchange_capture_mode(CaptureMode(9))), INVALID_VALUE);
}

fn what_concerns_the_context_breaks_its_captures_alone<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    let theirs = d.event_create(D1, EventFlags::DISABLE_TIMING).unwrap();
    d.exchange_capture_mode(CaptureMode::RELAXED).unwrap();
    begin(&d, s, CaptureMode::RELAXED);
    let recorded = unsafe { d.context_record_event(D1, theirs) };
    assert_eq!(code(recorded), SUCCESS, "another context");
    assert_eq!(code(d.context_synchronize(D1)), SUCCESS);
    for _ in 0..2 {
        let waited = code(d.context_synchronize(D0));
        assert_eq!(waited, CAPTURE_UNSUPPORTED, "until it has ended");
    }
    end_broken(&d, s);
    begin(&d, s, CaptureMode::RELAXED);
    let asked = code(unsafe { d.stream_query(D0, s) });
    assert_eq!(asked, CAPTURE_UNSUPPORTED, "the stream itself");
    end_broken(&d, s);
    assert_eq!(code(d.context_synchronize(D0)), SUCCESS);
}

fn the_default_stream_breaks_blocking_captures<B: Backing>(d: Machine<B>) {
    let blocking = d.stream_create(D0, StreamFlags::empty()).unwrap();
    let free = stream(&d);
    let r = range(&d, 1, 1);
    begin(&d, free, CaptureMode::GLOBAL);
    assert_eq!(
        code(unsafe { d.fill(D0, r.at, 1, PAGE) }),
        SUCCESS,
        "it takes no part"
    );
    end_well(&d, free);
    begin(&d, blocking, CaptureMode::GLOBAL);
    let implicit = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    assert_eq!(code(unsafe { d.fill(D0, r.at, 1, PAGE) }), implicit);
    end_broken(&d, blocking);
}

fn forks_and_joins<B: Backing>(d: Machine<B>) {
    let (s, fork) = (stream(&d), stream(&d));
    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let r = range(&d, 1, 1);
    unsafe {
        begin(&d, s, CaptureMode::GLOBAL);
        d.event_record(D0, e, s).unwrap();
        d.stream_wait_event(D0, fork, e).unwrap();
        assert_eq!(status(&d, fork), CaptureStatus::ACTIVE);
        d.fill_async(D0, r.at, 3, PAGE, fork).unwrap();
        d.event_record(D0, e, fork).unwrap();
        d.stream_wait_event(D0, s, e).unwrap();
        assert_eq!(
            code(d.capture_end(D0, fork)),
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        );
        let graph = d.capture_end(D0, s).unwrap();
        assert_eq!(status(&d, fork), CaptureStatus::NONE);
        let exec = d.graph_instantiate(D0, graph).unwrap();
        d.graph_launch(D0, exec, s).unwrap();
        if d.kind() == DriverKind::Host {
            assert_eq!(first_byte(&d, r.at), 3, "the fork's work is in the graph");
        }
        d.event_record(D0, e, s).unwrap();
        assert_eq!(d.event_query(D0, e), Ok(true), "recorded anew");
    }
}

fn states_and_wrong_calls<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    let illegal = CUresult::CUDA_ERROR_ILLEGAL_STATE;
    unsafe {
        assert_eq!(status(&d, s), CaptureStatus::NONE);
        assert_eq!(code(d.capture_end(D0, s)), illegal);
        assert_eq!(
            code(d.capture_begin(D0, StreamHandle::NULL, CaptureMode::GLOBAL)),
            CAPTURE_UNSUPPORTED
        );
        assert_eq!(code(d.capture_begin(D0, s, CaptureMode(3))), INVALID_VALUE);
        begin(&d, s, CaptureMode::GLOBAL);
        assert_eq!(code(d.capture_begin(D0, s, CaptureMode::GLOBAL)), illegal);
        assert_eq!(d.live().captures, 1);
        d.stream_destroy(D0, s).unwrap();
        assert_eq!(d.live().captures, 0, "a destroyed stream ends its capture");
        assert_eq!(d.stream_query(D0, StreamHandle::NULL), Ok(true));
    }
}
