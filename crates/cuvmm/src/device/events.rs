//! Events of a stream, or of all work of a context, and the progress of that work.
//!
//! Every [`Device`] has a clock. A fence is stamped with it when the use of some memory ends, and
//! an event when it is recorded. An event that was recorded after the stamp covers all work that
//! the fence has to wait for, no matter for which fence it was recorded. So a stream needs at most
//! two outstanding events, however many fences name it. The older one is polled first; the younger
//! one is recorded anew when a later fence needs it.
//!
//! The lock in this module is a leaf: no other lock is taken under it, and no user code runs under
//! it.
//!
//! `unsafe` is used for calls that take the handles of a stream and of events. The events are
//! created and destroyed here; the stream's owner passes its own handle.
#![allow(unsafe_code)]

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cuvmm_driver::{CUresult, Call, CaptureStatus, EventFlags, EventHandle, Ordinal, StreamHandle};

use super::Device;
use crate::error::CallError;
use crate::sync::{Mutex, MutexGuard, SPINS};

/// How long a poll may spin: an event takes a few microseconds to complete on an idle context.
const SPIN: Duration = Duration::from_micros(20);

/// The most outstanding events of one stream.
const OUTSTANDING: usize = 2;

/// A point on the clock of a device.
pub(crate) type Stamp = u64;

/// The work that events are recorded behind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// The work of one stream.
    Stream(StreamHandle),
    /// The work of all streams of the device's context.
    Context,
}

/// The progress of the work before a stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Complete,
    Pending,
    /// The driver cannot record an event behind all work of a context (before CUDA 12.5). Only a
    /// synchronization of the device, begun after the stamp, proves completion.
    NeedsSynchronise,
}

/// The outstanding events of some work.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// All work queued before this stamp is complete.
    done: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Events that were recorded and are not known to be complete, the older first.
    outstanding: Vec<(Stamp, EventHandle)>,
    /// Events that are complete and can be recorded again.
    spare: Vec<EventHandle>,
    /// The stamp of the last poll that found the work pending.
    asked: Stamp,
}

/// The outcome of recording an event.
enum Recorded {
    Yes,
    /// A stream captures, so no event can be recorded now.
    Capturing,
    /// The driver cannot record events behind all work of a context.
    Lacking,
}

impl Events {
    /// Returns `true` if all work queued before a stamp is known to be complete. Does not poll.
    pub(crate) fn is_complete(&self, stamp: Stamp) -> bool {
        self.done.load(Ordering::Acquire) > stamp
    }

    /// Notes that a synchronization which began at `begun` has returned.
    pub(crate) fn synchronised(&self, begun: Stamp) {
        self.completed(begun);
        let mut inner = self.lock();
        let outstanding = std::mem::take(&mut inner.outstanding);
        for (at, event) in outstanding {
            match at > begun {
                true => inner.outstanding.push((at, event)),
                false => inner.spare.push(event),
            }
        }
    }

    /// Destroys the events that nothing waits for.
    pub(super) fn destroy_spare(&self, device: &Device) {
        let spare = std::mem::take(&mut self.lock().spare);
        destroy(device, spare);
    }

    /// Notes that the work was found complete by a query made at `asked`.
    fn completed(&self, asked: Stamp) {
        self.done.fetch_max(asked, Ordering::AcqRel);
    }

    /// Polls the work before `stamp`, and records an event behind it if none covers it yet. A
    /// pending answer that the driver gave after `since` is reused.
    pub(crate) fn poll(
        &self,
        device: &Device,
        work: Work,
        stamp: Stamp,
        since: Stamp,
    ) -> Result<Progress, CallError> {
        if self.is_complete(stamp) {
            return Ok(Progress::Complete);
        }
        // A thread that does not exist in a forked child may have held the lock.
        device.own_process()?;
        let mut inner = self.lock();
        if inner.asked > since {
            return Ok(Progress::Pending);
        }
        let now = device.tick();
        let progress = device.relaxed(|| self.ask(&mut inner, device, work, stamp))??;
        if progress == Progress::Pending {
            inner.asked = now;
        }
        if let Work::Context = work {
            // A context is polled seldom, and a device lives long: no unneeded event is kept.
            let spare = std::mem::take(&mut inner.spare);
            drop(inner);
            destroy(device, spare);
        }
        Ok(progress)
    }

    fn ask(
        &self,
        inner: &mut Inner,
        device: &Device,
        work: Work,
        stamp: Stamp,
    ) -> Result<Progress, CallError> {
        self.collect(inner, device)?;
        if self.is_complete(stamp) {
            return Ok(Progress::Complete);
        }
        if inner.covering(stamp).is_some() {
            return Ok(Progress::Pending);
        }
        if let Work::Stream(stream) = work {
            if device.is_capturing(stream)? {
                return Ok(Progress::Pending);
            }
            let asked = device.tick();
            // With an event outstanding the stream is known to be busy.
            if inner.outstanding.is_empty() && is_idle(device, stream)? {
                self.completed(asked);
                return Ok(Progress::Complete);
            }
        }
        match inner.record(device, work)? {
            Recorded::Yes => {}
            Recorded::Capturing => return Ok(Progress::Pending),
            Recorded::Lacking => return Ok(Progress::NeedsSynchronise),
        }
        if let Work::Context = work {
            self.spin(inner, device)?;
        }
        Ok(match self.is_complete(stamp) {
            true => Progress::Complete,
            false => Progress::Pending,
        })
    }

    /// Waits a few microseconds for an event that an idle context completes at once.
    fn spin(&self, inner: &mut Inner, device: &Device) -> Result<(), CallError> {
        let begun = Instant::now();
        loop {
            self.collect(inner, device)?;
            if inner.outstanding.is_empty() || !SPINS || begun.elapsed() > SPIN {
                return Ok(());
            }
            std::hint::spin_loop();
        }
    }

    /// Polls outstanding events, the older first, and notes those that are complete.
    fn collect(&self, inner: &mut Inner, device: &Device) -> Result<(), CallError> {
        while let Some(&(at, event)) = inner.outstanding.first() {
            // SAFETY: the event is owned here and alive.
            let complete = device.call(Call::EventQuery, |driver, device| unsafe {
                driver.event_query(device, event)
            });
            match complete {
                Ok(true) => self.completed(at),
                Ok(false) => break,
                // The stream began to capture just before the event was recorded, so the event does
                // not cover the work before.
                Err(error) if is_captured(&error) => {}
                Err(error) => return Err(error),
            }
            inner.outstanding.remove(0);
            inner.spare.push(event);
        }
        Ok(())
    }

    /// Makes later work of a stream, which may be another device's, wait for the work before `stamp`
    /// (`cuStreamWaitEvent`). Returns `false` if no event can be recorded behind that work now.
    pub(crate) fn make_wait(
        &self,
        device: &Device,
        work: Work,
        stamp: Stamp,
        (waiter, waiting): (&Device, StreamHandle),
    ) -> Result<bool, CallError> {
        if self.is_complete(stamp) {
            return Ok(true);
        }
        device.own_process()?;
        let mut inner = self.lock();
        self.collect(&mut inner, device)?;
        if self.is_complete(stamp) {
            return Ok(true);
        }
        if inner.covering(stamp).is_none() {
            if let Work::Stream(stream) = work
                && device.is_capturing(stream)?
            {
                return Ok(false);
            }
            if !matches!(inner.record(device, work)?, Recorded::Yes) {
                return Ok(false);
            }
        }
        let Some(event) = inner.covering(stamp) else {
            return Ok(false);
        };
        // SAFETY: the event is owned here and alive, and the caller's stream is alive.
        waiter.call(Call::StreamWaitEvent, |driver, waiter| unsafe {
            driver.stream_wait_event(waiter, waiting, event)
        })?;
        Ok(true)
    }

    /// Removes all events, for their owner to destroy.
    pub(super) fn take_all(&mut self) -> Vec<EventHandle> {
        let inner = self.inner.get_mut();
        let inner = inner.unwrap_or_else(PoisonError::into_inner);
        let outstanding = std::mem::take(&mut inner.outstanding);
        let mut events = std::mem::take(&mut inner.spare);
        events.extend(outstanding.into_iter().map(|(_, event)| event));
        events
    }

    /// Notes that the stream of the events has ended: all its work is complete, and none will come. The
    /// driver is not asked again.
    pub(crate) fn end(&self, device: &Device) {
        self.completed(Stamp::MAX);
        let Inner {
            outstanding, spare, ..
        } = std::mem::take(&mut *self.lock());
        let outstanding = outstanding.into_iter().map(|(_, event)| event);
        destroy(device, outstanding.chain(spare));
    }

    /// Returns `true` if the stream of the events has ended.
    pub(crate) fn have_ended(&self) -> bool {
        self.done.load(Ordering::Acquire) == Stamp::MAX
    }

    /// Destroys all events, before the stream that they were recorded on is destroyed.
    pub(crate) fn destroy(&mut self, device: &Device) {
        destroy(device, self.take_all());
    }

    /// Destroys all events of a device that has no owner any more.
    pub(super) fn destroy_by(&mut self, driver: &dyn cuvmm_driver::Driver, device: Ordinal) {
        for event in self.take_all() {
            // SAFETY: as in `destroy`.
            if let Err(error) = unsafe { driver.event_destroy(device, event) } {
                log!(debug, %error, "an event was not destroyed with its device");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// The oldest outstanding event that covers all work before a stamp.
    fn covering(&self, stamp: Stamp) -> Option<EventHandle> {
        let mut outstanding = self.outstanding.iter();
        let covering = outstanding.find(|&&(at, _)| at > stamp);
        covering.map(|&(_, event)| event)
    }

    /// Records an event behind all work queued so far. If two are outstanding, the younger one is
    /// recorded anew: it then covers more. The older one is never recorded anew, so no fence waits
    /// forever.
    fn record(&mut self, device: &Device, work: Work) -> Result<Recorded, CallError> {
        if self.outstanding.len() < OUTSTANDING {
            let event = match self.spare.pop() {
                Some(event) => event,
                None => device.call(Call::EventCreate, |driver, device| {
                    driver.event_create(device, EventFlags::DISABLE_TIMING)
                })?,
            };
            let (recorded, at) = record_behind(device, work, event);
            match recorded {
                Ok(Recorded::Yes) => self.outstanding.push((at, event)),
                _ => self.spare.push(event),
            }
            return recorded;
        }
        let Some((stamp, event)) = self.outstanding.last_mut() else {
            return Ok(Recorded::Capturing);
        };
        let (recorded, at) = record_behind(device, work, *event);
        if let Ok(Recorded::Yes) = recorded {
            *stamp = at;
        }
        recorded
    }
}

fn destroy(device: &Device, events: impl IntoIterator<Item = EventHandle>) {
    for event in events {
        // SAFETY: the event is owned here, and the driver allows destroying an event while work
        // still refers to its last record.
        let destroyed = device.give_back(Call::EventDestroy, |driver, device| unsafe {
            driver.event_destroy(device, event)
        });
        // The objects of a lost context are gone with it.
        if let (Err(error), None) = (destroyed, device.lost()) {
            device.report_drop("event", 0, error);
        }
    }
}

/// Records an event behind work; returns the outcome and the stamp taken before recording.
fn record_behind(
    device: &Device,
    work: Work,
    event: EventHandle,
) -> (Result<Recorded, CallError>, Stamp) {
    let at = device.tick();
    let recorded = match work {
        // SAFETY: the event is owned here and alive, and the caller's stream is alive.
        Work::Stream(stream) => device.call(Call::EventRecord, |driver, device| unsafe {
            driver.event_record(device, event, stream)
        }),
        // SAFETY: the event is owned here and alive.
        Work::Context => device.call(Call::CtxRecordEvent, |driver, device| unsafe {
            driver.context_record_event(device, event)
        }),
    };
    let recorded = match (recorded, work) {
        (Ok(()), _) => Ok(Recorded::Yes),
        (Err(error), Work::Context) if lacks_context_events(&error) => Ok(Recorded::Lacking),
        (Err(error), _) if refused_by_capture(&error) => Ok(Recorded::Capturing),
        (Err(error), _) => Err(error),
    };
    (recorded, at)
}

impl Device {
    /// Returns `true` if a stream, which is alive, captures.
    pub(crate) fn is_capturing(&self, stream: StreamHandle) -> Result<bool, CallError> {
        // SAFETY: the caller's stream is alive.
        let status = self.call(Call::StreamIsCapturing, |driver, device| unsafe {
            driver.capture_status(device, stream)
        });
        match status {
            Ok(status) => Ok(status != CaptureStatus::NONE),
            // The legacy stream takes part in the capture of a blocking stream.
            Err(error) if refused_by_capture(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

fn is_idle(device: &Device, stream: StreamHandle) -> Result<bool, CallError> {
    // SAFETY: the caller's stream is alive.
    device.call(Call::StreamQuery, |driver, device| unsafe {
        driver.stream_query(device, stream)
    })
}

/// Returns `true` if a capture somewhere in the context refused a call.
fn refused_by_capture(error: &CallError) -> bool {
    let code = error.driver().and_then(|error| error.code());
    matches!(
        code,
        Some(
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        )
    )
}

/// Returns `true` if an event belongs to a graph that was being captured when it was recorded.
fn is_captured(error: &CallError) -> bool {
    let code = error.driver().and_then(|error| error.code());
    code == Some(CUresult::CUDA_ERROR_CAPTURED_EVENT)
}

fn lacks_context_events(error: &CallError) -> bool {
    error.driver().is_some_and(|error| {
        error.call() == Call::CtxRecordEvent
            && error
                .code()
                .is_none_or(|code| code == CUresult::CUDA_ERROR_NOT_SUPPORTED)
    })
}
