//! Captures: the work they record, and the calls that invalidate them.
//!
//! `unsafe` because the driver's methods are; the backends define the result of each deliberate
//! misuse.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
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
    queries_break_a_capture,
    relaxed_mode_is_fine,
    pinned_memory_and_instantiation_break_a_capture,
    modes_belong_to_threads,
    what_concerns_the_context_breaks_it,
    captured_events_break_their_capture_alone,
    events_from_outside_break_a_capture,
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

fn pinned_memory_and_instantiation_break_a_capture<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    begin(&d, s, CaptureMode::RELAXED);
    let graph = unsafe { d.capture_end(D0, s) }.unwrap();
    let pinned = d.host_alloc(D0, 4096, 0).unwrap().expose_provenance();
    let free = || unsafe { d.host_free(D0, std::ptr::with_exposed_provenance_mut(pinned)) };
    let instantiate = || unsafe { d.graph_instantiate(D0, graph) };
    let refused = |call: &(dyn Fn() -> Result<()> + Sync)| {
        for mode in [CaptureMode::GLOBAL, CaptureMode::THREAD_LOCAL] {
            begin(&d, s, mode);
            assert_eq!(code(call()), CAPTURE_UNSUPPORTED);
            end_broken(&d, s);
        }
        // A global capture is broken by other threads too, and by none in relaxed mode.
        begin(&d, s, CaptureMode::GLOBAL);
        let elsewhere = thread::scope(|scope| scope.spawn(call).join().unwrap());
        assert_eq!(code(elsewhere), CAPTURE_UNSUPPORTED);
        end_broken(&d, s);
    };
    refused(&|| d.host_alloc(D0, 4096, 0).map(drop));
    refused(&free);
    refused(&|| instantiate().map(drop));
    let memory = Box::leak(Box::new([0u8; 4096]))
        .as_mut_ptr()
        .expose_provenance();
    let at = || std::ptr::with_exposed_provenance_mut(memory);
    refused(&|| unsafe { d.host_register(D0, at(), 4096, 0) });
    unsafe { d.host_register(D0, at(), 4096, 0) }.unwrap();
    refused(&|| unsafe { d.host_unregister(D0, at()) });
    begin(&d, s, CaptureMode::GLOBAL);
    let before = d.exchange_capture_mode(CaptureMode::RELAXED).unwrap();
    free().unwrap();
    unsafe { d.host_unregister(D0, at()) }.unwrap();
    let executable = instantiate().unwrap();
    d.exchange_capture_mode(before).unwrap();
    end_well(&d, s);
    unsafe {
        d.graph_exec_destroy(D0, executable).unwrap();
        d.graph_destroy(D0, graph).unwrap();
        d.stream_destroy(D0, s).unwrap();
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

fn queries_break_a_capture<B: Backing>(d: Machine<B>) {
    let (s, other) = (stream(&d), stream(&d));
    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let r = range(&d, 1, 1);
    let mut byte = [0];
    let mut calls: Vec<Box<dyn FnMut() -> Result<()> + '_>> = vec![
        Box::new(|| unsafe { d.event_query(D0, e) }.map(drop)),
        Box::new(|| unsafe { d.event_synchronize(D0, e) }),
        Box::new(|| unsafe { d.stream_query(D0, other) }.map(drop)),
        Box::new(|| unsafe { d.stream_synchronize(D0, other) }),
        Box::new(|| d.context_synchronize(D0)),
        Box::new(|| unsafe { d.copy_to_host(D0, &mut byte, r.at) }),
        Box::new(|| d.alloc(D0, PAGE).map(drop)),
    ];
    for call in &mut calls {
        begin(&d, s, CaptureMode::GLOBAL);
        assert_eq!(code(call()), CAPTURE_UNSUPPORTED);
        assert_eq!(
            code(unsafe { d.fill_async(D0, r.at, 1, 1, s) }),
            CAPTURE_INVALIDATED
        );
        end_broken(&d, s);
        assert_eq!(code(call()), SUCCESS, "afterwards");
    }
}

fn relaxed_mode_is_fine<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    begin(&d, s, CaptureMode::GLOBAL);
    assert_eq!(
        d.exchange_capture_mode(CaptureMode::RELAXED),
        Ok(CaptureMode::GLOBAL)
    );
    assert_eq!(unsafe { d.event_query(D0, e) }, Ok(true));
    assert_eq!(
        d.exchange_capture_mode(CaptureMode::GLOBAL),
        Ok(CaptureMode::RELAXED)
    );
    end_well(&d, s);
    begin(&d, s, CaptureMode::RELAXED);
    assert_eq!(
        unsafe { d.event_query(D0, e) },
        Ok(true),
        "a capture that does not mind"
    );
    end_well(&d, s);
    assert_eq!(code(d.exchange_capture_mode(CaptureMode(9))), INVALID_VALUE);
    assert_eq!(
        d.exchange_capture_mode(CaptureMode::GLOBAL),
        Ok(CaptureMode::GLOBAL)
    );
}

fn modes_belong_to_threads<B: Backing>(d: Machine<B>) {
    let d = Arc::new(d);
    let s = stream(&d);
    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let elsewhere = |act: fn(&Machine<B>, _, _) -> CUresult| {
        let d = Arc::clone(&d);
        thread::spawn(move || act(&d, e, s)).join().unwrap()
    };
    begin(&d, s, CaptureMode::GLOBAL);
    assert_eq!(
        elsewhere(|d, e, _| {
            d.exchange_capture_mode(CaptureMode::THREAD_LOCAL).unwrap();
            code(unsafe { d.event_query(D0, e) })
        }),
        SUCCESS,
        "a thread that looks only at its own captures"
    );
    assert_eq!(
        elsewhere(|d, _, s| code(unsafe { d.capture_end(D0, s) })),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    );
    assert_eq!(
        elsewhere(|d, e, _| code(unsafe { d.event_query(D0, e) })),
        CAPTURE_UNSUPPORTED
    );
    end_broken(&d, s);
    begin(&d, s, CaptureMode::THREAD_LOCAL);
    assert_eq!(
        elsewhere(|d, e, _| code(unsafe { d.event_query(D0, e) })),
        SUCCESS
    );
    assert_eq!(
        code(unsafe { d.event_query(D0, e) }),
        CAPTURE_UNSUPPORTED,
        "but not here"
    );
    end_broken(&d, s);
}

/// The modes in which a stream captures.
const MODES: [CaptureMode; 3] = [
    CaptureMode::GLOBAL,
    CaptureMode::THREAD_LOCAL,
    CaptureMode::RELAXED,
];

/// Runs a call in each way: on this thread or another one, in the usual mode or in relaxed mode.
fn in_each_way<B: Backing>(d: &Machine<B>, mut check: impl FnMut(&dyn Fn(Call<B>) -> CUresult)) {
    let relaxed = |act: Call<B>| {
        let mode = d.exchange_capture_mode(CaptureMode::RELAXED).unwrap();
        let outcome = act(d);
        d.exchange_capture_mode(mode).unwrap();
        outcome
    };
    let elsewhere = |act: &(dyn Fn() -> CUresult + Sync)| {
        thread::scope(|scope| scope.spawn(act).join()).unwrap()
    };
    check(&|act| act(d));
    check(&relaxed);
    check(&|act| elsewhere(&|| act(d)));
    check(&|act| elsewhere(&|| relaxed(act)));
}

type Call<'a, B> = &'a (dyn Fn(&Machine<B>) -> CUresult + Sync);

fn captured_events_break_their_capture_alone<B: Backing>(d: Machine<B>) {
    let (s, other) = (stream(&d), stream(&d));
    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let query = |d: &Machine<B>| code(unsafe { d.event_query(D0, e) });
    let wait = |d: &Machine<B>| code(unsafe { d.event_synchronize(D0, e) });
    let calls: [Call<B>; 2] = [&query, &wait];
    for (mode, call) in MODES
        .iter()
        .flat_map(|&mode| calls.map(|call| (mode, call)))
    {
        in_each_way(&d, |asked| {
            begin(&d, s, mode);
            unsafe { d.event_record(D0, e, s) }.unwrap();
            begin(&d, other, CaptureMode::GLOBAL);
            assert_eq!(asked(call), CUresult::CUDA_ERROR_CAPTURED_EVENT);
            assert_eq!(asked(call), INVALID_VALUE, "its capture is invalid");
            end_broken(&d, s);
            assert_eq!(asked(call), INVALID_VALUE, "its capture is over");
            end_well(&d, other);
            unsafe { d.event_record(D0, e, other) }.unwrap();
            assert_eq!(asked(call), SUCCESS, "recorded anew");
        });
    }
    begin(&d, s, CaptureMode::GLOBAL);
    unsafe { d.event_record(D0, e, s) }.unwrap();
    unsafe { d.event_destroy(D0, e) }.unwrap();
    end_well(&d, s);
}

fn events_from_outside_break_a_capture<B: Backing>(d: Machine<B>) {
    let (s, other) = (stream(&d), stream(&d));
    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let wait = |stream| code(unsafe { d.stream_wait_event(D0, stream, e) });
    for mode in MODES {
        let isolated = CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        unsafe { d.event_record(D0, e, other) }.unwrap();
        begin(&d, s, mode);
        assert_eq!(wait(s), isolated);
        end_broken(&d, s);
        begin(&d, s, mode);
        unsafe { d.event_record(D0, e, s) }.unwrap();
        end_well(&d, s);
        assert_eq!(wait(other), INVALID_VALUE, "the capture is over");
        begin(&d, s, mode);
        assert_eq!(wait(s), INVALID_VALUE);
        end_broken(&d, s);
    }
    let never = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    begin(&d, s, CaptureMode::GLOBAL);
    unsafe { d.stream_wait_event(D0, s, never) }.unwrap();
    end_well(&d, s);
}

fn what_concerns_the_context_breaks_it<B: Backing>(d: Machine<B>) {
    let s = stream(&d);
    let of_all = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let wait = |d: &Machine<B>| code(d.context_synchronize(D0));
    let record = |d: &Machine<B>| code(unsafe { d.context_record_event(D0, of_all) });
    let calls: [Call<B>; 2] = [&wait, &record];
    for (mode, call) in MODES
        .iter()
        .flat_map(|&mode| calls.map(|call| (mode, call)))
    {
        in_each_way(&d, |asked| {
            begin(&d, s, mode);
            assert_eq!(asked(call), CAPTURE_UNSUPPORTED);
            assert_eq!(asked(call), CAPTURE_UNSUPPORTED, "until it has ended");
            end_broken(&d, s);
            assert_eq!(asked(call), SUCCESS);
        });
    }
    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let e1 = d.event_create(D1, EventFlags::DISABLE_TIMING).unwrap();
    d.exchange_capture_mode(CaptureMode::RELAXED).unwrap();
    begin(&d, s, CaptureMode::RELAXED);
    assert_eq!(
        code(unsafe { d.context_record_event(D1, e1) }),
        SUCCESS,
        "another context"
    );
    assert_eq!(code(d.context_synchronize(D1)), SUCCESS);
    assert_eq!(
        code(unsafe { d.context_record_event(D0, e) }),
        CAPTURE_UNSUPPORTED
    );
    end_broken(&d, s);
    begin(&d, s, CaptureMode::RELAXED);
    assert_eq!(code(d.context_synchronize(D0)), CAPTURE_UNSUPPORTED);
    end_broken(&d, s);
    begin(&d, s, CaptureMode::RELAXED);
    assert_eq!(
        code(unsafe { d.stream_query(D0, s) }),
        CAPTURE_UNSUPPORTED,
        "the stream itself"
    );
    end_broken(&d, s);
    assert_eq!(code(unsafe { d.context_record_event(D0, e) }), SUCCESS);
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
