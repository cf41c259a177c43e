//! Calls that are allowed while a stream captures, and calls that invalidate the capture.

use std::thread;

use cuvmm_driver::{
    AccessFlags, CUresult, Call, CaptureMode, CaptureStatus, DriverError, EventHandle, StreamHandle,
};

use crate::{Answer, Answered, Bench, Case, Need, Rule};

pub(super) const MEMORY: &[Case] = &Rule::new("capture-memory-calls").cases([
    Case::new("capture.reserve", "Reserve.", |b| {
        global(b, |b| b.addresses(1).map(drop))
    }),
    Case::new("capture.create", "Create.", |b| {
        global(b, |b| b.physical(1).map(drop))
    }),
    Case::new("capture.map", "Map.", |b| {
        let (base, size, handle) = (b.addresses(1)?, b.granule(), b.physical(1)?);
        global(b, |b| b.map(base, size, 0, handle, 0))
    }),
    Case::new("capture.set_access", "Grant access.", |b| {
        let base = b.lay("x")?;
        global(b, |b| b.grant(base, 1, AccessFlags::READ_WRITE))
    }),
    Case::new("capture.unmap", "Unmap.", |b| {
        let (base, _) = b.open(1)?;
        global(b, |b| b.unmap(base, b.granule()))
    }),
    Case::new("capture.release", "Release.", |b| {
        let handle = b.physical(1)?;
        global(b, |b| b.release(handle))
    }),
    Case::new("capture.address_free", "Free addresses.", |b| {
        let base = b.addresses(1)?;
        global(b, |b| b.free_reservation(base, b.granule()))
    }),
]);

pub(super) const QUERIES: &[Case] = &Rule::new("capture-queries").cases([
    Case::new(
        "capture.event_record_other_stream",
        "Record an event on another stream.",
        |b| {
            let (other, event) = (b.stream()?, b.event()?);
            global(b, |b| b.record(event, other))
        },
    ),
    Case::new(
        "capture.event_query",
        "Query an event during a global capture.",
        |b| queried(b, CaptureMode::GLOBAL, query),
    ),
    Case::new(
        "capture.event_query_thread_local",
        "Query an event during a thread-local capture.",
        |b| queried(b, CaptureMode::THREAD_LOCAL, query),
    ),
    Case::new(
        "capture.event_query_relaxed_capture",
        "Query an event during a relaxed capture.",
        |b| queried(b, CaptureMode::RELAXED, query),
    ),
    Case::new(
        "capture.event_query_relaxed_thread",
        "Query an event with this thread in relaxed mode.",
        |b| {
            queried(b, CaptureMode::GLOBAL, |b, event| {
                relaxed(b, |b| query(b, event))
            })
        },
    ),
    Case::new(
        "capture.event_query_other_thread",
        "Query an event on another thread.",
        |b| {
            queried(b, CaptureMode::GLOBAL, |b, event| {
                on_thread(|| query(b, event))
            })
        },
    ),
    Case::new(
        "capture.event_query_other_thread_local",
        "Query an event on another thread during a thread-local capture.",
        |b| {
            queried(b, CaptureMode::THREAD_LOCAL, |b, event| {
                on_thread(|| query(b, event))
            })
        },
    ),
    Case::new(
        "capture.stream_query_other_stream",
        "Query another stream.",
        |b| {
            let other = b.stream()?;
            global(b, |b| b.stream_is_done(other).map(drop))
        },
    ),
    Case::new(
        "capture.stream_synchronize_other",
        "Wait for another stream.",
        |b| {
            let other = b.stream()?;
            global(b, |b| b.synchronize(other))
        },
    ),
    Case::new("capture.event_synchronize", "Wait for an event.", |b| {
        let event = recorded(b)?;
        global(b, |b| b.synchronize_event(event))
    }),
    Case::new("capture.synchronize", "Wait for the whole context.", |b| {
        global(b, |b| b.driver().context_synchronize(b.device()))
    }),
    Case::new(
        "capture.context_event",
        "Record an event behind all streams.",
        |b| {
            let event = b.event()?;
            global(b, |b| b.record_context(event))
        },
    ),
    Case::new(
        "capture.status",
        "The status of a stream before, in and after a capture.",
        |b| {
            let stream = b.stream()?;
            let before = b.capture_status(stream)?;
            b.capture_begin(stream, CaptureMode::GLOBAL)?;
            let inside = b.capture_status(stream)?;
            b.capture_end(stream)?;
            let after = b.capture_status(stream)?;
            Ok(Answer::value(before.0)
                .with("in", inside.0)
                .with("after", after.0))
        },
    ),
    Case::new(
        "capture.status_broken",
        "The status of a stream whose capture was invalidated.",
        |b| {
            let (stream, event) = (b.stream()?, recorded(b)?);
            b.capture_begin(stream, CaptureMode::GLOBAL)?;
            let query = b.event_is_done(event);
            let status = b.capture_status(stream);
            Ok(Answer::code(&query)
                .then("status", &status)
                .with("value", status.unwrap_or(CaptureStatus(-1)).0))
        },
    ),
    Case::new(
        "capture.exchange_mode",
        "The mode of a thread: the initial one, and the one that was set.",
        |b| {
            let first = b.driver().exchange_capture_mode(CaptureMode::RELAXED)?;
            let second = b.driver().exchange_capture_mode(first)?;
            Ok(Answer::value(first.0).with("then", second.0))
        },
    ),
    Case::new(
        "capture.end_without_begin",
        "End a capture that was not begun.",
        |b| {
            let stream = b.stream()?;
            Ok(Answer::code(&b.capture_end(stream)))
        },
    ),
    Case::new(
        "capture.event_create",
        "Create an event during a global capture.",
        |b| global(b, |b| b.event().map(drop)),
    ),
    Case::new(
        "capture.event_synchronize_relaxed_thread",
        "Wait for an event with this thread in relaxed mode.",
        |b| {
            let event = recorded(b)?;
            global(b, |b| relaxed(b, |b| b.synchronize_event(event)))
        },
    ),
    Case::new(
        "capture.stream_synchronize_relaxed_thread",
        "Wait for another stream with this thread in relaxed mode.",
        |b| {
            let other = b.stream()?;
            global(b, |b| relaxed(b, |b| b.synchronize(other)))
        },
    ),
]);

pub(super) const REPLAY: &[Case] = &Rule::new("capture-replay").cases([
    Case::new("capture.replay", "A captured fill, launched.", |b| {
        let (address, _) = b.open(1)?;
        let stream = b.stream()?;
        b.capture_begin(stream, CaptureMode::GLOBAL)?;
        let queued = b.fill_async(address, 7, 64, stream);
        let graph = b.capture_end(stream)?;
        let exec = b.instantiate(graph)?;
        let launched = b.launch(exec, stream);
        let sync = b.synchronize(stream);
        Ok(Answer::code(&queued)
            .then("launch", &launched)
            .then("sync", &sync))
    }),
    Case::new(
        "capture.replay_after_remap",
        "Other memory at the same address.",
        |b| {
            let (address, first) = b.open(1)?;
            let (stream, size) = (b.stream()?, b.granule());
            b.capture_begin(stream, CaptureMode::GLOBAL)?;
            b.fill_async(address, 7, 64, stream)?;
            let graph = b.capture_end(stream)?;
            let captured = b.read(address)?[0];
            let exec = b.instantiate(graph)?;
            let replay = |b: &Bench| {
                b.launch(exec, stream)?;
                b.synchronize(stream)?;
                Ok::<_, DriverError>(b.read(address)?[0])
            };
            let before = replay(b)?;
            b.unmap(address, size)?;
            b.release(first)?;
            b.place(address, 1)?;
            b.grant(address, 1, AccessFlags::READ_WRITE)?;
            let fresh = b.read(address)?[0];
            let after = replay(b)?;
            Ok(Answer::named::<()>("capture", &Ok(()))
                .with("wrote", captured)
                .with("launch", before)
                .with("new memory", fresh)
                .with("launch", after))
        },
    )
    .needing(&[Need::Memory]),
]);

/// Creates an event that has been recorded and is complete.
pub(super) fn recorded(b: &mut Bench) -> Result<EventHandle, DriverError> {
    let (stream, event) = (b.stream()?, b.event()?);
    b.record(event, stream)?;
    b.synchronize(stream)?;
    Ok(event)
}

fn query(b: &mut Bench, event: EventHandle) -> Result<(), DriverError> {
    b.event_is_done(event).map(drop)
}

/// Asks about a complete event while a stream captures.
fn queried(
    b: &mut Bench,
    mode: CaptureMode,
    ask: fn(&mut Bench, EventHandle) -> Result<(), DriverError>,
) -> Answered {
    let event = recorded(b)?;
    during(b, mode, |b, _| ask(b, event))
}

/// Runs `act` while a stream captures globally, and reports how the capture ended.
pub(super) fn global(
    b: &mut Bench,
    act: impl FnOnce(&mut Bench) -> Result<(), DriverError>,
) -> Answered {
    during(b, CaptureMode::GLOBAL, |b, _| act(b))
}

/// Runs `act` while a stream captures, and reports how the capture ended.
pub(super) fn during(
    b: &mut Bench,
    mode: CaptureMode,
    act: impl FnOnce(&mut Bench, StreamHandle) -> Result<(), DriverError>,
) -> Answered {
    let stream = b.stream()?;
    b.capture_begin(stream, mode)?;
    let outcome = act(b, stream);
    let end = b.capture_end(stream);
    Ok(Answer::code(&outcome).then("end", &end))
}

/// Runs `act` with this thread in relaxed mode.
pub(super) fn relaxed(
    b: &mut Bench,
    act: impl FnOnce(&mut Bench) -> Result<(), DriverError>,
) -> Result<(), DriverError> {
    let mode = b.driver().exchange_capture_mode(CaptureMode::RELAXED)?;
    let outcome = act(b);
    b.driver().exchange_capture_mode(mode)?;
    outcome
}

/// Runs `act` on a thread that was just started, so that no context is current on it.
pub(super) fn on_thread(
    act: impl FnOnce() -> Result<(), DriverError> + Send,
) -> Result<(), DriverError> {
    let gone = DriverError::new(Call::EventQuery, CUresult::CUDA_ERROR_UNKNOWN);
    thread::scope(|scope| scope.spawn(act).join()).unwrap_or(Err(gone))
}
