//! The effects of other users of a device: programs that hold its memory, and a part of this
//! program that resets its primary context.
#![allow(missing_docs, unsafe_code, clippy::unwrap_used, clippy::expect_used)]
#![allow(clippy::undocumented_unsafe_blocks)]

use crate::model_support::*;
use crate::on_both;
use cuvmm_driver::{
    Call, CaptureMode, Driver, EventFlags, PhysicalProps, StreamFlags, StreamHandle,
};
use cuvmm_model::model::{Backing, Machine};

on_both!(
    what_other_programs_hold_is_not_free,
    another_program_comes_between_the_question_and_the_creation,
    a_reset_ends_streams_events_and_allocations,
    a_reset_ends_what_is_queued_and_a_loss,
    a_reset_leaves_mappings_and_other_devices,
);

const INVALID_HANDLE: cuvmm_driver::CUresult = cuvmm_driver::CUresult::CUDA_ERROR_INVALID_HANDLE;

fn free<B: Backing>(d: &Machine<B>) -> u64 {
    d.memory_info(D0).unwrap().free
}

fn what_other_programs_hold_is_not_free<B: Backing>(d: Machine<B>) {
    let all = free(&d);
    d.set_used_elsewhere(D0, all - PAGE);
    assert_eq!(free(&d), PAGE);
    let first = page(&d);
    let second = d.create(PAGE, &PhysicalProps::device(D0), 0);
    assert_eq!(code(second), OUT_OF_MEMORY);
    assert_eq!(code(d.alloc(D0, PAGE)), OUT_OF_MEMORY);
    d.set_used_elsewhere(D0, u64::MAX);
    assert_eq!(free(&d), 0, "more than there is");
    unsafe { d.release(first) }.unwrap();
    assert_eq!(
        code(d.create(PAGE, &PhysicalProps::device(D0), 0)),
        OUT_OF_MEMORY
    );
    let elsewhere = d.create(PAGE, &PhysicalProps::device(D1), 0).unwrap();
    unsafe { d.release(elsewhere) }.unwrap();
    d.set_used_elsewhere(D0, 0);
    assert_eq!(free(&d), all);
}

fn another_program_comes_between_the_question_and_the_creation<B: Backing>(d: Machine<B>) {
    let all = free(&d);
    d.set_used_elsewhere_before(Call::MemCreate, 2, D0, all - PAGE);
    d.set_used_elsewhere_before(Call::MemRelease, 1, D0, 0);
    let first = page(&d);
    assert_eq!(free(&d), all - PAGE, "there seems to be memory");
    assert_eq!(
        code(d.create(PAGE, &PhysicalProps::device(D0), 0)),
        OUT_OF_MEMORY
    );
    assert_eq!(free(&d), 0);
    unsafe { d.release(first) }.unwrap();
    assert_eq!(free(&d), all, "the other program has gone");
    let again = page(&d);
    assert_eq!(free(&d), all - PAGE, "and comes no second time");
    unsafe { d.release(again) }.unwrap();
}

fn a_reset_ends_streams_events_and_allocations<B: Backing>(d: Machine<B>) {
    let all = free(&d);
    let stream = d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap();
    let event = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
    let plain = d.alloc(D0, PAGE).unwrap();
    let pinned = d.host_alloc(D0, 4096, 0).unwrap();
    unsafe {
        let pooled = d.alloc_async(D0, PAGE, stream).unwrap();
        d.free_async(D0, pooled, stream).unwrap();
        d.alloc_async(D0, PAGE, stream).unwrap();
        d.capture_begin(D0, stream, CaptureMode::GLOBAL).unwrap();
        d.reset_context(D0);

        assert_eq!(code(d.stream_query(D0, stream)), INVALID_HANDLE);
        assert_eq!(code(d.event_query(D0, event)), INVALID_HANDLE);
        assert_eq!(code(d.event_destroy(D0, event)), INVALID_HANDLE);
        assert_eq!(code(d.stream_destroy(D0, stream)), INVALID_HANDLE);
        assert_eq!(code(d.free(D0, plain)), INVALID_VALUE);
        assert_eq!(free(&d), all);
        d.host_free(D0, pinned).unwrap();
        assert_eq!(code(d.stream_synchronize(D0, StreamHandle::NULL)), SUCCESS);
    }
    assert!(d.live().is_nothing(), "{:?}", d.live());
}

fn a_reset_ends_what_is_queued_and_a_loss<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    d.hold(D0, StreamHandle::NULL);
    let writes = vec![(r.at, PAGE, 7)];
    d.queue_kernel(D0, StreamHandle::NULL, vec![], writes)
        .unwrap();
    d.reset_context(D0);
    assert_eq!(d.live().queued, 0);
    assert_eq!(code(d.context_synchronize(D0)), SUCCESS);
    assert_eq!(first_byte(&d, r.at), 0, "the kernel never ran");

    d.lose_context(D0, ILLEGAL_ADDRESS);
    assert_eq!(code(d.context_synchronize(D0)), ILLEGAL_ADDRESS);
    d.reset_context(D0);
    assert_eq!(code(d.context_synchronize(D0)), SUCCESS);
    r.end(&d);
    assert_eq!(d.hazards(), 0);
}

fn a_reset_leaves_mappings_and_other_devices<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let stream = d.stream_create(D1, StreamFlags::NON_BLOCKING).unwrap();
    let before = d.snapshot();
    d.reset_context(D0);
    assert_eq!(d.snapshot(), before);
    unsafe {
        assert_eq!(d.stream_query(D1, stream), Ok(true));
        d.fill(D0, r.at, 3, PAGE).unwrap();
        d.stream_destroy(D1, stream).unwrap();
    }
    r.end(&d);
}
