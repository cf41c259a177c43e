//! The point in the GPU's work after which memory may be unmapped or given to another.
//!
//! A fence is open at first: it names streams, or the whole device, and nothing has been asked of
//! the driver. Events are recorded when somebody first wants the memory; they then cover what was
//! queued in between too: more, never less. Nothing here waits, but for a short spin while an
//! event that was just recorded on idle streams comes through.

use std::time::{Duration, Instant};

use cuvmm_driver::{CUresult, Call};

use crate::device::Device;
use crate::error::CallError;
use crate::own::{Event, Stream};
use crate::sync::SPINS;

/// How long a poll may spin: a recorded event takes a few microseconds to pass an idle stream.
const SPIN: Duration = Duration::from_micros(20);

/// What must pass before memory may be taken.
#[derive(Debug)]
pub(crate) struct Fence {
    /// The streams that used the memory.
    streams: Vec<Stream>,
    /// Where nobody said which streams: all work of these devices.
    devices: Vec<Device>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Nothing has been asked of the driver.
    Open,
    /// The events that must pass.
    Recorded(Vec<Event>),
    Passed,
}

/// What a poll found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Poll {
    Passed,
    Pending,
    /// The driver cannot mark all work of a device (before CUDA 12.5): only a synchronisation of
    /// the device, begun after the memory was withdrawn, tells.
    NeedsSynchronise,
}

impl Fence {
    /// Nothing to wait for.
    pub(crate) const fn passed() -> Self {
        Self {
            streams: Vec::new(),
            devices: Vec::new(),
            state: State::Passed,
        }
    }

    /// All work queued on these streams, up to when it is first asked.
    pub(crate) const fn streams(streams: Vec<Stream>) -> Self {
        let state = if streams.is_empty() {
            State::Passed
        } else {
            State::Open
        };
        Self {
            streams,
            devices: Vec::new(),
            state,
        }
    }

    /// All work of the device, up to when it is first asked.
    pub(crate) fn device(device: Device) -> Self {
        Self::devices(vec![device])
    }

    /// All work of several devices.
    pub(crate) const fn devices(devices: Vec<Device>) -> Self {
        Self {
            streams: Vec::new(),
            devices,
            state: State::Open,
        }
    }

    /// Covers what `other` covers too.
    pub(crate) fn merge(&mut self, other: Self) {
        if other.is_passed() {
            return;
        }
        if self.is_passed() {
            *self = other;
            return;
        }
        for device in other.devices {
            if !self.devices.contains(&device) {
                self.devices.push(device);
            }
        }
        for stream in other.streams {
            if !self.streams.contains(&stream) {
                self.streams.push(stream);
            }
        }
        let devices = &self.devices;
        self.streams
            .retain(|stream| !devices.contains(stream.device()));
        self.state = State::Open;
    }

    /// Whether it is known to have passed. Asks nobody.
    pub(crate) const fn is_passed(&self) -> bool {
        matches!(self.state, State::Passed)
    }

    /// Whether work queued on `stream` from now on comes after it without an event.
    pub(crate) fn precedes(&self, stream: &Stream) -> bool {
        let only = || self.streams.iter().all(|named| named == stream);
        self.is_passed() || (self.devices.is_empty() && only())
    }

    /// Whether only a synchronisation could tell, and none has been recorded.
    pub(crate) const fn is_open_device(&self) -> bool {
        !self.devices.is_empty() && matches!(self.state, State::Open)
    }

    /// Takes note of a synchronisation of its devices that began after the withdrawal.
    pub(crate) fn synchronised(&mut self) {
        self.state = State::Passed;
    }

    /// Whether it has passed; records what must be recorded.
    pub(crate) fn poll(&mut self) -> Result<Poll, CallError> {
        if self.is_passed() {
            return Ok(Poll::Passed);
        }
        let Some(device) = self.any_device().cloned() else {
            return Ok(Poll::Passed);
        };
        let poll = device.relaxed(|| self.poll_relaxed())??;
        if poll == Poll::Passed {
            self.state = State::Passed;
        }
        Ok(poll)
    }

    fn any_device(&self) -> Option<&Device> {
        let first = self.streams.first().map(Stream::device);
        first.or_else(|| self.devices.first())
    }

    fn poll_relaxed(&mut self) -> Result<Poll, CallError> {
        let mut new = false;
        if let State::Open = self.state {
            let mut events = vec![];
            for stream in &self.streams {
                // A capturing stream may not be queried, and an event recorded on it would become
                // part of the graph.
                if stream.is_capturing()? {
                    return Ok(Poll::Pending);
                }
                if !stream.is_done()? {
                    events.push(record(stream)?);
                }
            }
            for device in &self.devices {
                match record_all(device)? {
                    Marked::Event(event) => events.push(event),
                    Marked::Lacking => return Ok(Poll::NeedsSynchronise),
                    Marked::Capturing => return Ok(Poll::Pending),
                }
            }
            self.state = State::Recorded(events);
            new = !self.devices.is_empty();
        }
        poll_events(&mut self.state, new)
    }

    /// Has later work of `stream` come after it, by events and without waiting; from then on that
    /// stream stands for all that it covered. False, and nothing changed, if the driver has no way
    /// to.
    pub(crate) fn order_before(&mut self, stream: &Stream) -> Result<bool, CallError> {
        if self.precedes(stream) {
            return Ok(true);
        }
        let ordered = stream.device().relaxed(|| self.wait_on(stream))??;
        if ordered {
            *self = Self::streams(vec![stream.clone()]);
        }
        Ok(ordered)
    }

    /// Queues waits for all that it covers on a stream.
    fn wait_on(&self, stream: &Stream) -> Result<bool, CallError> {
        // A stream that captures takes no event from outside its graph.
        if stream.is_capturing()? {
            return Ok(false);
        }
        let mut new = vec![];
        let events = match &self.state {
            State::Recorded(events) => events,
            _ => {
                for named in self.streams.iter().filter(|named| *named != stream) {
                    if named.is_capturing()? {
                        return Ok(false);
                    }
                    new.push(record(named)?);
                }
                for device in &self.devices {
                    match record_all(device)? {
                        Marked::Event(event) => new.push(event),
                        Marked::Lacking | Marked::Capturing => return Ok(false),
                    }
                }
                &new
            }
        };
        for event in events {
            stream.wait(event)?;
        }
        Ok(true)
    }
}

fn record(stream: &Stream) -> Result<Event, CallError> {
    let event = Event::new(stream.device())?;
    event.record(stream)?;
    Ok(event)
}

/// An attempt at an event behind all work of a device.
enum Marked {
    Event(Event),
    /// The driver cannot do that.
    Lacking,
    /// A stream of the context captures, and so nothing can be marked now.
    Capturing,
}

fn record_all(device: &Device) -> Result<Marked, CallError> {
    let event = Event::new(device)?;
    match event.record_all() {
        Ok(()) => Ok(Marked::Event(event)),
        Err(error) if lacks_context_events(&error) => Ok(Marked::Lacking),
        Err(error) if refused_by_capture(&error) => Ok(Marked::Capturing),
        Err(error) => Err(error),
    }
}

fn refused_by_capture(error: &CallError) -> bool {
    let code = error.driver().and_then(|error| error.code());
    code == Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

fn lacks_context_events(error: &CallError) -> bool {
    error.driver().is_some_and(|error| {
        error.call() == Call::CtxRecordEvent
            && error
                .code()
                .is_none_or(|code| code == CUresult::CUDA_ERROR_NOT_SUPPORTED)
    })
}

fn poll_events(state: &mut State, spin: bool) -> Result<Poll, CallError> {
    let State::Recorded(events) = state else {
        return Ok(Poll::Pending);
    };
    let spin = spin && SPINS;
    let begun = Instant::now();
    loop {
        while let Some(event) = events.last() {
            if !event.is_passed()? {
                break;
            }
            events.pop();
        }
        if events.is_empty() {
            return Ok(Poll::Passed);
        }
        if !spin || begun.elapsed() > SPIN {
            return Ok(Poll::Pending);
        }
        std::hint::spin_loop();
    }
}
