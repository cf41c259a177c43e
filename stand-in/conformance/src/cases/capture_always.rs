//! Calls that invalidate a capture of every mode, from every thread, in relaxed mode too: those that
//! concern the whole context, and those that ask about an event of the capture.

use cuvmm_driver::{CaptureMode, DriverError, EventHandle};

use super::capture::{during, on_thread, relaxed};
use crate::{Answer, Answered, Bench, Case, Rule};

/// A call about an event. Waiting for the context ignores it.
type Ask = fn(&Bench, EventHandle) -> Result<(), DriverError>;

const WAIT_FOR_ALL: Ask = |b, _| b.driver().context_synchronize(b.device());
const RECORD_ALL: Ask = Bench::record_context;
const QUERY: Ask = |b, event| b.event_is_done(event).map(drop);
const WAIT: Ask = Bench::synchronize_event;

/// A case for each mode of the capture: its name, the start of its description, and the question.
macro_rules! in_each_mode {
    ($rule:literal $(, $name:literal, $about:literal, $ask:expr)+ $(,)?) => {
        &Rule::new($rule).cases([$(
            Case::new(concat!("capture.", $name, "_global"), concat!($about, ", global."),
                |b| $ask(b, CaptureMode::GLOBAL)),
            Case::new(concat!("capture.", $name, "_local"), concat!($about, ", local."),
                |b| $ask(b, CaptureMode::THREAD_LOCAL)),
            Case::new(concat!("capture.", $name, "_relaxed"), concat!($about, ", relaxed."),
                |b| $ask(b, CaptureMode::RELAXED)),
        )+])
    };
}
pub(super) use in_each_mode;

pub(super) const OF_CONTEXT: &[Case] = in_each_mode!(
    "capture-context",
    "synchronize_relaxed_thread",
    "Wait for the context, this thread in relaxed mode",
    |b, mode| whole(b, mode, WAIT_FOR_ALL, here),
    "synchronize_other_thread",
    "Wait for the context on another thread in relaxed mode",
    |b, mode| whole(b, mode, WAIT_FOR_ALL, elsewhere),
    "context_event_relaxed_thread",
    "Record an event behind all streams, this thread in relaxed mode",
    |b, mode| whole(b, mode, RECORD_ALL, here),
    "context_event_other_thread",
    "Record an event behind all streams on another thread in relaxed mode",
    |b, mode| whole(b, mode, RECORD_ALL, elsewhere),
);

pub(super) const OF_EVENTS: &[Case] = in_each_mode!(
    "capture-events",
    "captured_query",
    "Query a captured event",
    |b, mode| captured(b, mode, QUERY, as_usual),
    "captured_query_relaxed_thread",
    "Query a captured event, this thread in relaxed mode",
    |b, mode| captured(b, mode, QUERY, here),
    "captured_query_other_thread",
    "Query a captured event on another thread in relaxed mode",
    |b, mode| captured(b, mode, QUERY, elsewhere),
    "captured_synchronize",
    "Wait for a captured event",
    |b, mode| captured(b, mode, WAIT, as_usual),
    "captured_synchronize_relaxed_thread",
    "Wait for a captured event, this thread in relaxed mode",
    |b, mode| captured(b, mode, WAIT, here),
    "captured_synchronize_other_thread",
    "Wait for a captured event on another thread in relaxed mode",
    |b, mode| captured(b, mode, WAIT, elsewhere),
    "captured_beside",
    "Query an event of one capture while another runs",
    beside,
    "captured_query_invalid",
    "Query an event of a capture that is invalid",
    invalid,
    "captured_query_over",
    "Query an event of a capture that is over, while another runs",
    over,
    "captured_wait_over",
    "A stream waits for an event of a capture that is over, and a capture does",
    wait_over,
    "captured_recorded_anew",
    "Record a captured event on another stream, and wait for it in relaxed mode",
    anew,
    "captured_destroy",
    "Destroy a captured event",
    destroyed,
    "wait_outside",
    "A capture waits for an event from outside",
    outside,
    "wait_never_recorded",
    "A capture waits for an event that was never recorded",
    never_recorded,
);

/// A way to make a call: on some thread, in some mode.
type Way = fn(&mut Bench, EventHandle, Ask) -> Result<(), DriverError>;

fn as_usual(b: &mut Bench, event: EventHandle, ask: Ask) -> Result<(), DriverError> {
    ask(b, event)
}

fn here(b: &mut Bench, event: EventHandle, ask: Ask) -> Result<(), DriverError> {
    relaxed(b, |b| ask(b, event))
}

fn elsewhere(b: &mut Bench, event: EventHandle, ask: Ask) -> Result<(), DriverError> {
    on_thread(|| here(b, event, ask))
}

/// Asks something that concerns the whole context while a stream captures.
fn whole(b: &mut Bench, mode: CaptureMode, ask: Ask, way: Way) -> Answered {
    let event = b.event()?;
    during(b, mode, |b, _| way(b, event, ask))
}

/// Asks about an event that was recorded in the running capture.
fn captured(b: &mut Bench, mode: CaptureMode, ask: Ask, way: Way) -> Answered {
    let event = b.event()?;
    during(b, mode, |b, stream| {
        b.record(event, stream)?;
        way(b, event, ask)
    })
}

fn beside(b: &mut Bench, mode: CaptureMode) -> Answered {
    let (first, second, event) = (b.stream()?, b.stream()?, b.event()?);
    b.capture_begin(first, mode)?;
    b.record(event, first)?;
    b.capture_begin(second, mode)?;
    let query = b.event_is_done(event);
    let end = b.capture_end(first);
    Ok(Answer::code(&query)
        .then("end", &end)
        .then("other", &b.capture_end(second)))
}

fn invalid(b: &mut Bench, mode: CaptureMode) -> Answered {
    let event = b.event()?;
    during(b, mode, |b, stream| {
        b.record(event, stream)?;
        let _ = b.driver().context_synchronize(b.device());
        here(b, event, QUERY)
    })
}

/// Creates an event that was recorded in a capture that is over.
fn from_before(b: &mut Bench, mode: CaptureMode) -> Result<EventHandle, DriverError> {
    let (stream, event) = (b.stream()?, b.event()?);
    b.capture_begin(stream, mode)?;
    b.record(event, stream)?;
    b.capture_end(stream)?;
    Ok(event)
}

fn over(b: &mut Bench, mode: CaptureMode) -> Answered {
    let event = from_before(b, mode)?;
    during(b, mode, |b, _| b.event_is_done(event).map(drop))
}

fn wait_over(b: &mut Bench, mode: CaptureMode) -> Answered {
    let (event, stream) = (from_before(b, mode)?, b.stream()?);
    let waited = b.wait_event(stream, event);
    b.capture_begin(stream, mode)?;
    let captured = b.wait_event(stream, event);
    Ok(Answer::code(&waited)
        .then("capture", &captured)
        .then("end", &b.capture_end(stream)))
}

fn anew(b: &mut Bench, mode: CaptureMode) -> Answered {
    let (other, event) = (b.stream()?, b.event()?);
    during(b, mode, |b, stream| {
        b.record(event, stream)?;
        b.record(event, other)?;
        here(b, event, WAIT)
    })
}

fn destroyed(b: &mut Bench, mode: CaptureMode) -> Answered {
    let event = b.event()?;
    during(b, mode, |b, stream| {
        b.record(event, stream)?;
        b.destroy_event(event)
    })
}

fn outside(b: &mut Bench, mode: CaptureMode) -> Answered {
    let (other, event) = (b.stream()?, b.event()?);
    b.record(event, other)?;
    b.synchronize(other)?;
    during(b, mode, |b, stream| b.wait_event(stream, event))
}

fn never_recorded(b: &mut Bench, mode: CaptureMode) -> Answered {
    let event = b.event()?;
    during(b, mode, |b, stream| b.wait_event(stream, event))
}
