//! Events of a stream, or of all work of a context, and the progress of that work.
//!
//! Every [`Device`] has a clock. A fence is stamped with it when the use of some memory ends, and
//! an event when it is recorded. An event that was recorded after the stamp covers all work that
//! the fence has to wait for, no matter for which fence it was recorded. So a stream needs at most
//! two outstanding events, however many fences name it. The older one is polled first; the younger
//! one is recorded anew when a later fence needs it.
//!
//! A stream may begin to capture at any time. An event recorded in a running capture breaks it when
//! it is queried, and draws a stream that waits for it into it. So each stream is asked before an
//! event is recorded and once more afterwards. If it captures then, the event counts as captured
//! and is spare: it is not used before it was recorded anew. If a capture began and ended between
//! both questions, the driver refuses to answer about the event, which breaks nothing, and the
//! event is spare too. So captures need not be told apart.
//!
//! What cannot be excluded without a [capture guard](crate::pool::CaptureGuard): a stream that begins
//! to capture between the question and a query of the stream itself loses that capture.
//!
//! The lock in this module is a leaf: no other lock is taken under it, and no user code runs under
//! it.
//!
//! Keeps I-22 and I-27.
//!
//! `unsafe` is used for calls that take the handles of a stream and of events. The events are
//! created and destroyed here; the stream's owner passes its own handle.
#![allow(unsafe_code)]

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cuvmm_driver::{CUresult, Call, CaptureStatus, EventFlags, EventHandle, Ordinal, StreamHandle};

use super::Device;
use crate::deferred::before_user_code;
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
    Stream(StreamHandle),
    /// The work of all streams of the device's context.
    Context,
}

/// The progress of the work before a stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkState {
    Complete,
    Pending,
    /// The driver cannot record an event behind all work of a context (before CUDA 12.5). Only a
    /// synchronization of the device, begun after the stamp, proves completion.
    NeedsSynchronise,
}

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

enum Recorded {
    Yes,
    /// A stream captures, so no event marks the work now.
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
        device.destroy_events(spare);
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
    ) -> Result<WorkState, CallError> {
        if self.is_complete(stamp) {
            return Ok(WorkState::Complete);
        }
        // A thread that does not exist in a forked child may have held the lock.
        device.own_process()?;
        before_user_code(|| self.poll_now(device, work, stamp, since))
    }

    fn poll_now(
        &self,
        device: &Device,
        work: Work,
        stamp: Stamp,
        since: Stamp,
    ) -> Result<WorkState, CallError> {
        let mut inner = self.lock();
        if inner.asked > since {
            return Ok(WorkState::Pending);
        }
        let now = device.tick();
        let progress = device.relaxed(|| self.ask(&mut inner, device, work, stamp))??;
        if progress == WorkState::Pending {
            inner.asked = now;
        }
        if let Work::Context = work {
            // A context is polled seldom, and a device lives long: no unneeded event is kept.
            let spare = std::mem::take(&mut inner.spare);
            drop(inner);
            device.destroy_events(spare);
        }
        Ok(progress)
    }

    fn ask(
        &self,
        inner: &mut Inner,
        device: &Device,
        work: Work,
        stamp: Stamp,
    ) -> Result<WorkState, CallError> {
        self.collect(inner, device)?;
        if self.is_complete(stamp) {
            return Ok(WorkState::Complete);
        }
        if inner.covering(stamp).is_some() {
            return Ok(WorkState::Pending);
        }
        if let Work::Stream(stream) = work {
            if device.is_capturing(stream)? {
                return Ok(WorkState::Pending);
            }
            let asked = device.tick();
            // With an event outstanding the stream is known to be busy.
            if inner.outstanding.is_empty() {
                match is_idle(device, stream) {
                    Ok(false) => {}
                    Ok(true) => {
                        self.completed(asked);
                        return Ok(WorkState::Complete);
                    }
                    Err(error) if error.is_of_capture() => return Ok(WorkState::Pending),
                    Err(error) => return Err(error),
                }
            }
        }
        match inner.record(device, work)? {
            Recorded::Yes => {}
            Recorded::Capturing => return Ok(WorkState::Pending),
            Recorded::Lacking => return Ok(WorkState::NeedsSynchronise),
        }
        if let Work::Context = work {
            self.spin(inner, device)?;
        }
        Ok(match self.is_complete(stamp) {
            true => WorkState::Complete,
            false => WorkState::Pending,
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

    /// Polls outstanding events, the older first, and notes those that are complete. An event about
    /// which the driver does not answer is spare: it may have been captured.
    fn collect(&self, inner: &mut Inner, device: &Device) -> Result<(), CallError> {
        while let Some(&(at, event)) = inner.outstanding.first() {
            // SAFETY: the event is owned here and alive.
            let complete = device.call(Call::EventQuery, |driver, device| unsafe {
                driver.event_query(device, event)
            });
            if complete == Ok(false) {
                break;
            }
            inner.outstanding.remove(0);
            inner.spare.push(event);
            match complete {
                Ok(_) => self.completed(at),
                Err(error) if is_void(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes later work of a stream, which may be another device's, wait for the work before `stamp`
    /// (`cuStreamWaitEvent`). Returns `false` if no event can be recorded behind that work now, or
    /// the waiting stream captures by now.
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
        before_user_code(|| self.make_wait_now(device, work, stamp, (waiter, waiting)))
    }

    fn make_wait_now(
        &self,
        device: &Device,
        work: Work,
        stamp: Stamp,
        (waiter, waiting): (&Device, StreamHandle),
    ) -> Result<bool, CallError> {
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
        let queued = waiter.call(Call::StreamWaitEvent, |driver, waiter| unsafe {
            driver.stream_wait_event(waiter, waiting, event)
        });
        match queued {
            // In a capture the wait would order the work of the graph alone.
            Ok(()) => Ok(!waiter.is_capturing(waiting)?),
            Err(error) => {
                inner.outstanding.retain(|&(_, other)| other != event);
                inner.spare.push(event);
                match is_void(&error) {
                    true => Ok(false),
                    false => Err(error),
                }
            }
        }
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
        device.destroy_events(outstanding.chain(spare));
    }

    /// Returns `true` if the stream of the events has ended.
    pub(crate) fn have_ended(&self) -> bool {
        self.done.load(Ordering::Acquire) == Stamp::MAX
    }

    /// Destroys all events, before the stream that they were recorded on is destroyed.
    pub(crate) fn destroy(&mut self, device: &Device) {
        device.destroy_events(self.take_all());
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
        let again = (self.outstanding.len() >= OUTSTANDING).then(|| self.outstanding.pop());
        let event = match again.flatten().map(|(_, event)| event).or(self.spare.pop()) {
            Some(event) => event,
            None => device.call(Call::EventCreate, |driver, device| {
                driver.event_create(device, EventFlags::DISABLE_TIMING)
            })?,
        };
        let at = device.tick();
        let recorded = record_behind(device, work, event);
        match recorded {
            Ok(Recorded::Yes) => self.outstanding.push((at, event)),
            _ => self.spare.push(event),
        }
        recorded
    }
}

/// Records an event behind work, and asks a stream afterwards whether the event was captured.
fn record_behind(device: &Device, work: Work, event: EventHandle) -> Result<Recorded, CallError> {
    let recorded = match work {
        Work::Stream(stream) => device.record_uncaptured(event, stream).map(|it| match it {
            true => Recorded::Yes,
            false => Recorded::Capturing,
        }),
        Work::Context => device.beside_captures(|| {
            // SAFETY: the event is owned here and alive.
            device.call(Call::CtxRecordEvent, |driver, device| unsafe {
                driver.context_record_event(device, event)
            })?;
            Ok(Recorded::Yes)
        }),
    };
    match recorded {
        Err(error) if lacks_context_events(&error) => Ok(Recorded::Lacking),
        Err(error) if error.is_of_capture() => Ok(Recorded::Capturing),
        recorded => recorded,
    }
}

impl Device {
    /// Destroys events whose owners are gone (`cuEventDestroy`).
    pub(crate) fn destroy_events(&self, events: impl IntoIterator<Item = EventHandle>) {
        for event in events {
            // SAFETY: the caller owned the event, and the driver allows destroying an event while
            // work still refers to its last record.
            let destroyed = self.give_back(Call::EventDestroy, |driver, device| unsafe {
                driver.event_destroy(device, event)
            });
            self.report_end("event", 0, destroyed);
        }
    }

    /// Returns `true` if a stream, which is alive, captures.
    pub(crate) fn is_capturing(&self, stream: StreamHandle) -> Result<bool, CallError> {
        // SAFETY: the caller's stream is alive.
        let status = self.call(Call::StreamIsCapturing, |driver, device| unsafe {
            driver.capture_status(device, stream)
        });
        match status {
            Ok(status) => Ok(status != CaptureStatus::NONE),
            // The legacy stream takes part in the capture of a blocking stream.
            Err(error) if error.is_of_capture() => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Records an event behind the work of a stream, both alive. Returns `false` if the stream
    /// captures by then: the event may belong to a graph and may not be used before it was recorded
    /// anew.
    pub(crate) fn record_uncaptured(
        &self,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<bool, CallError> {
        // SAFETY: the caller's event and stream are alive.
        let recorded = self.call(Call::EventRecord, |driver, device| unsafe {
            driver.event_record(device, event, stream)
        });
        match recorded {
            Ok(()) => Ok(!self.is_capturing(stream)?),
            Err(error) if error.is_of_capture() => Ok(false),
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

/// Returns `true` if the driver does not answer about an event that is alive because it was recorded
/// in a capture: one that runs (which is not asked about knowingly), or one that is over.
fn is_void(error: &CallError) -> bool {
    error.is_of_capture() || error.is_of_ended_capture()
}

fn lacks_context_events(error: &CallError) -> bool {
    error.driver().is_some_and(|error| {
        error.call() == Call::CtxRecordEvent
            && error
                .code()
                .is_none_or(|code| code == CUresult::CUDA_ERROR_NOT_SUPPORTED)
    })
}
