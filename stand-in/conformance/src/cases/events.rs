//! Streams and events, as far as fences depend on them.

use cuvmm_driver::StreamHandle;

use crate::answer::bit;
use crate::{Answer, Bench, Case, Need, Rule};

const KERNELS: &[Need] = &[Need::Kernels];

pub(super) const CASES: &[Case] = &Rule::new("events").cases([
    Case::new("event.never_recorded", "Counts as done.", |b| {
        let event = b.event()?;
        let done = b.event_is_done(event);
        Ok(Answer::code(&done).with("done", bit(done == Ok(true))))
    }),
    Case::new(
        "event.after_synchronize",
        "Done once its stream was synchronized.",
        |b| {
            let (address, _) = b.open(1)?;
            let (stream, event) = (b.stream()?, b.event()?);
            b.fill_async(address, 1, 64, stream)?;
            b.record(event, stream)?;
            b.synchronize(stream)?;
            let done = b.event_is_done(event);
            Ok(Answer::code(&done).with("done", bit(done == Ok(true))))
        },
    ),
    Case::new(
        "event.synchronize",
        "Waiting for it waits for the work before it.",
        |b| {
            let (address, _) = b.open(1)?;
            let (stream, event) = (b.stream()?, b.event()?);
            b.fill_async(address, 1, 64, stream)?;
            b.record(event, stream)?;
            let waited = b.synchronize_event(event);
            Ok(Answer::code(&waited).with("stream done", bit(b.stream_is_done(stream)?)))
        },
    ),
    Case::new(
        "event.on_default_stream",
        "Recorded on the default stream.",
        |b| {
            let event = b.event()?;
            Ok(Answer::code(&b.record(event, StreamHandle::NULL)))
        },
    ),
    Case::new(
        "event.of_the_context",
        "Recorded behind all streams at once.",
        |b| {
            let event = b.event()?;
            let recorded = b.record_context(event);
            let waited = b.synchronize_event(event);
            Ok(Answer::code(&recorded).then("synchronize", &waited))
        },
    ),
    Case::new("event.wait", "A stream waits for another's event.", |b| {
        let (first, second, event) = (b.stream()?, b.stream()?, b.event()?);
        b.record(event, first)?;
        Ok(Answer::code(&b.wait_event(second, event)))
    }),
    Case::new("stream.idle", "A stream without work is done.", |b| {
        let stream = b.stream()?;
        let done = b.stream_is_done(stream);
        Ok(Answer::code(&done).with("done", bit(done == Ok(true))))
    }),
    Case::new(
        "event.while_running",
        "Not done while the kernel before it runs.",
        |b| {
            let event = b.event()?;
            while_running(b, |b, stream| {
                b.record(event, stream)?;
                b.event_is_done(event)
            })
        },
    )
    .needing(KERNELS),
    Case::new(
        "event.recorded_before_work",
        "Work queued later does not count.",
        |b| {
            let event = b.event()?;
            let early = b.stream()?;
            b.record(event, early)?;
            b.synchronize(early)?;
            while_running(b, |b, _| b.event_is_done(event))
        },
    )
    .needing(KERNELS),
    Case::new(
        "event.context_while_running",
        "One event behind another stream.",
        |b| {
            let event = b.event()?;
            while_running(b, |b, _| {
                b.record_context(event)?;
                b.event_is_done(event)
            })
        },
    )
    .needing(KERNELS),
    Case::new(
        "stream.wait_while_running",
        "A waiting stream is not done.",
        |b| {
            let (event, second) = (b.event()?, b.stream()?);
            while_running(b, |b, stream| {
                b.record(event, stream)?;
                b.wait_event(second, event)?;
                b.stream_is_done(second)
            })
        },
    )
    .needing(KERNELS),
]);

/// Queries something while a kernel runs on a stream.
fn while_running(
    b: &mut Bench,
    ask: impl FnOnce(&mut Bench, StreamHandle) -> Result<bool, cuvmm_driver::DriverError>,
) -> crate::Answered {
    let stream = b.spinning()?;
    let done = ask(b, stream);
    b.synchronize(stream)?;
    Ok(Answer::code(&done).with("done", bit(done == Ok(true))))
}
