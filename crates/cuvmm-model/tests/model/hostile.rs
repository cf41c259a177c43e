//! The hostile manner: its effects on code that relies on more than the documentation promises, and
//! the behavior that stays.
//!
//! `unsafe` because the driver's methods are, and deliberately misused: the backends under test
//! define the result of every misuse.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;

use crate::model_support::*;
use cuvmm_driver::{
    CUresult, Call, CaptureMode, CudaVersion, Driver, DriverError, DriverKind, EventFlags,
    EventHandle, GraphExecHandle, GraphHandle, HandleTypes, PhysicalHandle, PhysicalProps,
    StreamFlags, StreamHandle,
};
use cuvmm_model::model::{
    Backing, Machine, Manner, ModelDriver, ModelOptions, RandomFailures, documented,
};

fn hostile_model(seed: u64) -> ModelDriver {
    model(ModelOptions::new().manner(Manner::Hostile).seed(seed))
}

fn hostile_host(seed: u64) -> HostDriver {
    host(HostOptions::new().manner(Manner::Hostile).seed(seed))
}

/// Runs one function on a hostile model and a hostile host, as two tests.
macro_rules! on_both_hostile {
    ($($name:ident),+ $(,)?) => {
        mod on_model {
            $(
                #[test]
                fn $name() {
                    super::$name(super::hostile_model(0));
                }
            )+
        }
        mod on_host {
            $(
                #[test]
                fn $name() {
                    super::$name(super::hostile_host(0));
                }
            )+
        }
    };
}

on_both_hostile!(
    hints_are_ignored,
    what_was_freed_last_is_reserved_next,
    reservations_lie_side_by_side,
    handle_values_are_used_again,
    a_value_is_not_used_again_while_it_names_something,
    another_stream_of_that_handle_is_another_stream,
    the_old_marks_of_an_event_are_not_the_new_streams,
    what_is_strictly_forbidden_is_refused,
    codes_that_say_more_stay,
    a_lost_context_stays_recognisable,
    captures_stay_recognisable,
    spite_changes_nothing,
    spite_when_giving_back_changes_nothing,
    the_same_seed_spites_alike,
);

fn stream<B: Backing>(d: &Machine<B>) -> StreamHandle {
    d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap()
}

fn event<B: Backing>(d: &Machine<B>) -> EventHandle {
    d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap()
}

fn free<B: Backing>(d: &Machine<B>, address: cuvmm_driver::DeviceAddress, size: u64) {
    unsafe { d.free_reservation(address, size) }.unwrap();
}

fn hints_are_ignored<B: Backing>(d: Machine<B>) {
    let reserve = |hint| d.reserve(4 * PAGE, 0, hint, 0).unwrap();
    let (first, second) = (reserve(ANYWHERE), reserve(ANYWHERE));
    free(&d, first, 4 * PAGE);
    free(&d, second, 4 * PAGE);
    assert_eq!(
        reserve(first),
        second,
        "a measured driver would follow this"
    );
    let far = at(first, 1 << 40);
    assert_ne!(reserve(far), far);
}

fn what_was_freed_last_is_reserved_next<B: Backing>(d: Machine<B>) {
    // The last one is large enough to be reserved from the system separately.
    for size in [PAGE, 8 * PAGE, 1 << 37] {
        let reserve = |size, alignment| d.reserve(size, alignment, ANYWHERE, 0).unwrap();
        let (first, second) = (reserve(size, 0), reserve(size, 0));
        free(&d, second, size);
        free(&d, first, size);
        assert_eq!(reserve(size, 0), first);
        assert_eq!(reserve(size, 0), second);
        free(&d, first, size);
        assert_ne!(reserve(2 * size, 0), first, "it does not fit there");
        assert_eq!(reserve(PAGE, PAGE), first, "less than was freed does");
        if size != PAGE {
            assert_eq!(reserve(PAGE, PAGE), at(first, PAGE), "and the rest is used");
        }
    }
}

fn reservations_lie_side_by_side<B: Backing>(d: Machine<B>) {
    let (first, second) = (range(&d, 2, 2), range(&d, 2, 2));
    assert_eq!(second.at, at(first.at, first.size));
    let both = first.size + second.size;
    unsafe {
        assert_ne!(code(d.unmap(first.at, both)), SUCCESS, "they are not one");
        assert_ne!(code(d.free_reservation(first.at, both)), SUCCESS);
        d.fill(D0, first.at, 1, first.size).unwrap();
        d.fill(D0, second.at, 2, second.size).unwrap();
    }
    if d.kind() == DriverKind::Host {
        assert_eq!(first_byte(&d, first.page(1)), 1);
        assert_eq!(first_byte(&d, second.at), 2);
    }
    first.end(&d);
    second.end(&d);
    assert!(d.live().is_nothing());
}

fn handle_values_are_used_again<B: Backing>(d: Machine<B>) {
    let first = page(&d);
    unsafe { d.release(first) }.unwrap();
    let second = page(&d);
    assert_eq!(second, first);

    let gone = stream(&d);
    unsafe { d.stream_destroy(D0, gone) }.unwrap();
    assert_eq!(event(&d).0, gone.0, "across kinds");
    assert_ne!(
        code(unsafe { d.stream_query(D0, gone) }),
        SUCCESS,
        "the value names an event now"
    );

    let (one, other) = (stream(&d), stream(&d));
    unsafe {
        d.stream_destroy(D0, one).unwrap();
        d.stream_destroy(D0, other).unwrap();
    }
    assert_eq!(stream(&d), other, "the last gone first");
    assert_eq!(page(&d).0, one.0);

    let s = stream(&d);
    let graph = unsafe {
        d.capture_begin(D0, s, CaptureMode::RELAXED).unwrap();
        d.capture_end(D0, s).unwrap()
    };
    let exec = unsafe { d.graph_instantiate(D0, graph) }.unwrap();
    unsafe {
        d.graph_destroy(D0, graph).unwrap();
        d.graph_exec_destroy(D0, exec).unwrap();
    }
    assert_eq!(event(&d).0, exec.0);
    assert_eq!(page(&d).0, graph.0);
}

fn a_value_is_not_used_again_while_it_names_something<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    unsafe { d.release(r.handles[0]) }.unwrap();
    assert_ne!(page(&d), r.handles[0], "a mapping keeps it");
    let kept = d.retain(r.at).unwrap();
    assert_eq!(kept, r.handles[0]);
    unsafe {
        d.unmap(r.at, PAGE).unwrap();
        d.release(kept).unwrap();
    }
    assert_eq!(page(&d), kept);
}

/// The work of a destroyed stream continues while another stream has its handle.
fn another_stream_of_that_handle_is_another_stream<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let first = stream(&d);
    d.hold(D0, first);
    unsafe {
        d.fill_async(D0, r.at, 1, PAGE, first).unwrap();
        d.stream_destroy(D0, first).unwrap();
    }
    let second = stream(&d);
    assert_eq!(second, first);
    assert!(
        unsafe { d.stream_query(D0, second) }.unwrap(),
        "nothing was queued on this one"
    );
    assert_eq!((d.live().queued, d.live().streams), (1, 1));
    d.release_all_streams(D0);
    assert_eq!(d.live().queued, 0);
}

fn the_old_marks_of_an_event_are_not_the_new_streams<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let (first, e) = (stream(&d), event(&d));
    for byte in 0..9 {
        unsafe { d.fill_async(D0, r.at, byte, PAGE, first) }.unwrap();
    }
    unsafe {
        d.event_record(D0, e, first).unwrap();
        d.stream_destroy(D0, first).unwrap();
    }
    let second = stream(&d);
    assert_eq!(second, first);
    d.hold(D0, second);
    unsafe { d.fill_async(D0, r.at, 9, PAGE, second) }.unwrap();
    assert!(unsafe { d.event_query(D0, e) }.unwrap());
}

fn what_is_strictly_forbidden_is_refused<B: Backing>(d: Machine<B>) {
    let r = range(&d, 3, 1);
    let behind = page(&d);
    unsafe {
        d.map(r.page(2), PAGE, 0, behind, 0).unwrap();
        assert_ne!(code(d.unmap(r.at, r.size)), SUCCESS, "a hole");
        assert_ne!(code(d.set_access(r.at, r.size, &[rw(D0)])), SUCCESS);
        d.release(behind).unwrap();
        assert_ne!(code(d.map(r.page(1), PAGE, 0, behind, 0)), SUCCESS);
    }
}

fn codes_that_say_more_stay<B: Backing>(d: Machine<B>) {
    for _ in 0..32 {
        let props = PhysicalProps::device(D0);
        assert_eq!(code(d.create(1 << 40, &props, 0)), OUT_OF_MEMORY);
        assert_eq!(code(d.reserve(1 << 47, 0, ANYWHERE, 0)), OUT_OF_MEMORY);
        assert_ne!(code(d.create(1, &props, 0)), OUT_OF_MEMORY);
        assert_ne!(code(d.reserve(1, 0, ANYWHERE, 0)), OUT_OF_MEMORY);
    }
}

fn a_lost_context_stays_recognisable<B: Backing>(d: Machine<B>) {
    let (s, e) = (stream(&d), event(&d));
    // The second code is one that a refusal may have too.
    for lost in [ILLEGAL_ADDRESS, UNKNOWN] {
        let device = if lost == UNKNOWN { D1 } else { D0 };
        d.lose_context(device, lost);
        for _ in 0..8 {
            assert_eq!(code(d.context_synchronize(device)), lost);
            assert_eq!(
                code(d.stream_create(device, StreamFlags::NON_BLOCKING)),
                lost
            );
            assert_eq!(code(d.memory_info(device)), lost);
        }
    }
    assert_eq!(code(unsafe { d.event_destroy(D0, e) }), ILLEGAL_ADDRESS);
    assert_eq!(code(unsafe { d.stream_destroy(D0, s) }), ILLEGAL_ADDRESS);
    let gone = code(unsafe { d.stream_destroy(D0, s) });
    assert!(documented(Call::StreamDestroy).contains(&gone), "{gone}");
}

fn captures_stay_recognisable<B: Backing>(d: Machine<B>) {
    for _ in 0..8 {
        let (s, e) = (stream(&d), event(&d));
        unsafe {
            d.capture_begin(D0, s, CaptureMode::GLOBAL).unwrap();
            assert_eq!(code(d.context_record_event(D0, e)), CAPTURE_UNSUPPORTED);
            assert_eq!(code(d.capture_end(D0, s)), CAPTURE_INVALIDATED);
            d.capture_begin(D0, s, CaptureMode::GLOBAL).unwrap();
            assert_eq!(code(d.event_query(D0, e)), CAPTURE_UNSUPPORTED);
            assert_eq!(code(d.capture_end(D0, s)), CAPTURE_INVALIDATED);
            d.stream_destroy(D0, s).unwrap();
            d.event_destroy(D0, e).unwrap();
        }
    }
    assert!(d.live().is_nothing());
}

#[test]
fn a_missing_symbol_is_no_code() {
    let options = ModelOptions::new().manner(Manner::Hostile);
    let d = model(options.version(CudaVersion::new(12, 0)));
    let answer = unsafe { d.context_record_event(D0, EventHandle(1)) };
    assert!(matches!(answer, Err(DriverError::MissingSymbol { .. })));
}

/// Makes misuses of many kinds, and returns for each the call that refuses it and the measured
/// code.
fn misuse<B: Backing>(d: &Machine<B>) -> Vec<(Call, CUresult)> {
    let r = range(d, 2, 1);
    let (none, stray) = (PhysicalHandle(0x5550), at(r.at, 1 << 44));
    let (stream, event) = (StreamHandle(0x5550), EventHandle(0x5550));
    let props = PhysicalProps::device(D0);
    let fabric = PhysicalProps {
        handle_types: HandleTypes::FABRIC,
        ..props
    };
    let posix = HandleTypes::OS;
    unsafe {
        vec![
            (Call::MemAddressReserve, code(d.reserve(1, 0, ANYWHERE, 0))),
            (Call::MemAddressFree, code(d.free_reservation(stray, PAGE))),
            (Call::MemCreate, code(d.create(1, &props, 0))),
            (Call::MemCreate, code(d.create(PAGE, &fabric, 0))),
            (Call::MemRelease, code(d.release(none))),
            (Call::MemMap, code(d.map(r.page(1), PAGE, 0, none, 0))),
            (
                Call::MemMap,
                code(d.map(r.page(1), PAGE, PAGE, r.handles[0], 0)),
            ),
            (Call::MemUnmap, code(d.unmap(stray, PAGE))),
            (
                Call::MemSetAccess,
                code(d.set_access(r.page(1), PAGE, &[rw(D0)])),
            ),
            (Call::MemRetainAllocationHandle, code(d.retain(stray))),
            (
                Call::MemGetAllocationPropertiesFromHandle,
                code(d.physical_props(none)),
            ),
            (
                Call::MemExportToShareableHandle,
                code(d.export(r.handles[0], posix, 0)),
            ),
            (
                Call::MemImportFromShareableHandle,
                code(d.import(source_of(NO_HANDLES[0]), posix)),
            ),
            (Call::MemGetAddressRange, code(d.address_range(D0, stray))),
            (Call::MemGetInfo, code(d.memory_info(bad_device()))),
            (Call::MemsetD8, code(d.fill(D0, stray, 0, PAGE))),
            (
                Call::MemcpyDtoD,
                code(d.copy_on_device(D0, stray, r.at, PAGE)),
            ),
            (
                Call::MemcpyHtoD,
                code(d.copy_to_device(D0, stray, &[0; 16])),
            ),
            (Call::StreamQuery, code(d.stream_query(D0, stream))),
            (
                Call::StreamSynchronize,
                code(d.stream_synchronize(D0, stream)),
            ),
            (Call::StreamDestroy, code(d.stream_destroy(D0, stream))),
            (Call::EventQuery, code(d.event_query(D0, event))),
            (Call::EventDestroy, code(d.event_destroy(D0, event))),
            (
                Call::EventRecord,
                code(d.event_record(D0, event, StreamHandle::NULL)),
            ),
            (
                Call::CtxRecordEvent,
                code(d.context_record_event(D0, event)),
            ),
            (
                Call::GraphInstantiate,
                code(d.graph_instantiate(D0, GraphHandle(0x5550))),
            ),
            (
                Call::GraphLaunch,
                code(d.graph_launch(D0, GraphExecHandle(0x5550), StreamHandle::NULL)),
            ),
            (Call::MemFree, code(d.free(D0, stray))),
        ]
    }
}

fn bad_device() -> cuvmm_driver::Ordinal {
    cuvmm_driver::Ordinal(99)
}

#[test]
fn refusals_carry_any_documented_code() {
    let mut seen: BTreeSet<(Call, i32)> = BTreeSet::new();
    let mut calls = BTreeSet::new();
    for seed in 0..64 {
        let answers = misuse(&hostile_model(seed));
        assert_eq!(answers, misuse(&hostile_model(seed)), "the same seed");
        assert_eq!(answers, misuse(&hostile_host(seed)), "on the host too");
        for (call, code) in answers {
            assert!(documented(call).contains(&code), "{call}: {code}");
            assert!(!DriverError::new(call, code).is_deinitialized());
            seen.insert((call, code.0));
            calls.insert(call);
        }
    }
    for call in calls {
        let codes = seen.iter().filter(|(of, _)| *of == call).count();
        assert!(codes > 1, "{call} answers always alike");
    }
}

#[test]
fn other_manners_answer_as_measured() {
    for manner in [Manner::AsMeasured, Manner::Strict] {
        let answers = |seed| misuse(&model(ModelOptions::new().manner(manner).seed(seed)));
        assert_eq!(answers(1), answers(2));
    }
}

#[test]
fn the_table_names_errors_once_each() {
    for &call in Call::ALL {
        let codes: BTreeSet<_> = documented(call).iter().map(|code| code.0).collect();
        assert!(
            !codes.is_empty() && codes.len() == documented(call).len(),
            "{call}"
        );
        assert!(!codes.contains(&0), "{call}");
        assert!(documented(call).iter().all(|code| code.name().is_some()));
    }
}

/// Makes every acquiring call that a pool makes once, and returns the codes of those that failed.
fn acquire<B: Backing>(
    d: &Machine<B>,
    r: &Range,
    s: StreamHandle,
    e: EventHandle,
) -> Vec<(Call, CUresult)> {
    let before = (d.snapshot(), d.live());
    let mut failed = Vec::new();
    let mut note = |answer: Result<(), DriverError>| {
        if let Err(error) = answer {
            failed.push((error.call(), error.code().unwrap()));
        }
    };
    let with_random_failures = d.with_random_failures();
    let mut acquired = 0;
    unsafe {
        let got = d.reserve(PAGE, 0, ANYWHERE, 0);
        note(got.map(|address| {
            acquired += 1;
            free(d, address, PAGE);
        }));
        let got = d.create(PAGE, &PhysicalProps::device(D0), 0);
        note(got.map(|handle| {
            acquired += 1;
            d.release(handle).unwrap();
        }));
        note(d.set_access(r.at, PAGE, &[rw(D0)]));
        note(d.stream_create(D0, StreamFlags::NON_BLOCKING).map(|s| {
            d.stream_destroy(D0, s).unwrap();
        }));
        note(d.event_create(D0, EventFlags::DISABLE_TIMING).map(|e| {
            d.event_destroy(D0, e).unwrap();
        }));
        note(d.fill_async(D0, r.at, 1, PAGE, s));
        note(d.event_record(D0, e, s));
        note(d.context_record_event(D0, e));
        note(d.event_query(D0, e).map(drop));
        note(d.stream_query(D0, s).map(drop));
        note(d.stream_wait_event(D0, s, e));
        note(d.copy_on_device(D0, r.at, r.at, 0));
        note(d.memory_info(D0).map(drop));
        note(d.context_synchronize(D0));
        note(d.retain(r.at).map(|handle| d.release(handle).unwrap()));
    }
    assert_eq!((d.snapshot(), d.live()), before);
    assert_eq!(
        d.with_random_failures() - with_random_failures,
        failed.len() as u64
    );
    failed
}

fn spite_changes_nothing<B: Backing>(d: Machine<B>) {
    let (r, s, e) = (range(&d, 2, 1), stream(&d), event(&d));
    let all = {
        d.set_random_failures(Some(RandomFailures::new(1, 1)));
        let failed = acquire(&d, &r, s, e);
        assert_eq!(failed.len(), 15, "one in one is all: {failed:?}");
        let handle = r.handles[0];
        let before = d.snapshot();
        assert_ne!(
            code(unsafe { d.map(r.page(1), PAGE, 0, handle, 0) }),
            SUCCESS
        );
        assert_eq!(d.snapshot(), before);
        failed.len()
    };
    let mut codes = BTreeSet::new();
    let mut some = 0;
    for seed in 0..100 {
        d.set_random_failures(Some(RandomFailures::new(seed, 4)));
        let failed = acquire(&d, &r, s, e);
        for &(call, code) in &failed {
            let error = DriverError::new(call, code);
            assert!(documented(call).contains(&code), "{error}");
            assert!(!error.is_sticky() && !error.is_deinitialized(), "{error}");
            codes.insert(code.0);
        }
        some += failed.len();
    }
    assert!(
        (all * 15..all * 35).contains(&some),
        "{some} of {}",
        all * 100
    );
    assert!(codes.contains(&OUT_OF_MEMORY.0) && codes.len() > 4);
    d.set_random_failures(None);
    assert!(acquire(&d, &r, s, e).is_empty());
    assert_eq!(
        code(d.context_synchronize(D0)),
        SUCCESS,
        "no context was lost"
    );
}

fn spite_when_giving_back_changes_nothing<B: Backing>(d: Machine<B>) {
    let (r, s, e) = (range(&d, 1, 1), stream(&d), event(&d));
    let before = (d.snapshot(), d.live());
    d.set_random_failures(Some(RandomFailures::new(0, 0).giving_back(1)));
    let answers = unsafe {
        [
            d.unmap(r.at, PAGE),
            d.release(r.handles[0]),
            d.free_reservation(r.at, r.size),
            d.stream_destroy(D0, s),
            d.event_destroy(D0, e),
        ]
    };
    for answer in answers {
        let error = answer.unwrap_err();
        let code = error.code().unwrap();
        assert!(documented(error.call()).contains(&code), "{error}");
    }
    assert_eq!((d.snapshot(), d.live()), before);
    assert_eq!(d.with_random_failures(), 5);
    d.create(PAGE, &PhysicalProps::device(D0), 0)
        .map(|handle| {
            d.set_random_failures(None);
            unsafe { d.release(handle) }.unwrap();
        })
        .unwrap();
    unsafe {
        d.stream_destroy(D0, s).unwrap();
        d.event_destroy(D0, e).unwrap();
    }
    r.end(&d);
    assert!(d.live().is_nothing());
}

fn the_same_seed_spites_alike<B: Backing>(d: Machine<B>) {
    let (r, s, e) = (range(&d, 2, 1), stream(&d), event(&d));
    let failed = |seed| {
        d.set_random_failures(Some(RandomFailures::new(seed, 3)));
        [(); 8].map(|()| acquire(&d, &r, s, e))
    };
    assert_eq!(failed(5), failed(5));
    assert_ne!(failed(5), failed(6));
}

#[test]
fn spite_comes_by_the_options_in_any_manner() {
    let spite = RandomFailures::new(3, 1);
    let model = model(ModelOptions::new().spite(spite));
    let host = host(HostOptions::new().spite(spite));
    assert_ne!(code(model.reserve(PAGE, 0, ANYWHERE, 0)), SUCCESS);
    assert_ne!(code(host.reserve(PAGE, 0, ANYWHERE, 0)), SUCCESS);
    assert_eq!(
        (model.with_random_failures(), host.with_random_failures()),
        (1, 1)
    );
    assert_eq!(
        code(model.device_name(D0)),
        SUCCESS,
        "what is there is told"
    );
}
