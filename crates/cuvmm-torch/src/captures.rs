//! Open pools of graphs, and the state of the captures that they were opened for.
//!
//! PyTorch does not close a pool whose capture has failed, and its filter may refer to a graph that
//! is gone. So the streams that the filter accepted tell whether the capture runs.
//!
//! `unsafe` is used to ask the driver about these streams, for which PyTorch vouches.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::{Arc, Weak};

use cuvmm::driver::{CaptureStatus, Driver as _, StreamHandle};

use crate::cxx::Filter;
use crate::{entered, heaps};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capture {
    /// An accepted stream still captures, or the capture may be about to begin.
    MayRun,
    /// No accepted stream has captured.
    None,
    /// All captures of accepted streams have ended. The filter must not be called again.
    Over,
}

thread_local! {
    /// A token of the thread, dropped at its end.
    static THREAD: Arc<()> = Arc::default();
}

/// The driver's number of a capture; each capture on a stream has its own. 0 if the driver gives
/// none, as for a broken capture that has not ended.
type CaptureId = u64;

pub(crate) struct Open {
    filter: Filter,
    /// The [moment](entered::now) of the opening.
    since: u64,
    thread: Weak<()>,
    has_accepted: bool,
    /// Streams that captured when the filter accepted them, each with its capture, without those
    /// that have ended. The driver is asked about no other stream, which may be destroyed.
    captured: Vec<(StreamHandle, CaptureId)>,
    has_captured: bool,
    /// `true` once the thread has opened another pool: this pool's capture is not awaited any more.
    is_superseded: bool,
    capture: Capture,
}

impl Open {
    pub(crate) fn new(filter: Filter) -> Self {
        Self {
            filter,
            since: entered::now(),
            thread: THREAD.try_with(Arc::downgrade).unwrap_or_default(),
            has_accepted: false,
            captured: Vec::new(),
            has_captured: false,
            is_superseded: false,
            capture: Capture::MayRun,
        }
    }

    pub(crate) fn is_mine(&self) -> bool {
        let is_it = |thread: &Arc<()>| self.thread.as_ptr() == Arc::as_ptr(thread);
        THREAD.try_with(is_it).unwrap_or(false)
    }

    pub(crate) const fn since(&self) -> u64 {
        self.since
    }

    pub(crate) const fn supersede(&mut self) {
        self.is_superseded = true;
    }

    pub(crate) const fn capture(&self) -> Capture {
        self.capture
    }

    pub(crate) fn look(&mut self, device: i32) -> Capture {
        if self.capture == Capture::Over {
            return Capture::Over;
        }
        let is_it = |id, now| now == id || now == 0 || id == 0;
        let mut captured = self.captured.iter();
        let captures = captured
            .any(|&(stream, id)| capture_on(device, stream).is_some_and(|now| is_it(id, now)));
        // A thread that has ended begins no capture.
        let may_begin = !self.is_superseded && self.thread.strong_count() > 0;
        let is_awaited = !self.has_accepted && may_begin;
        self.capture = match captures || is_awaited {
            true => Capture::MayRun,
            false if !self.has_captured => Capture::None,
            false => Capture::Over,
        };
        self.capture
    }

    /// Returns `true` if the filter accepts a stream, and notes a stream that captures. The filter
    /// may throw without any loss. It is not called once the capture is over.
    pub(crate) fn accepts(&mut self, device: i32, stream: *mut c_void) -> bool {
        if self.look(device) == Capture::Over || !self.filter.accepts(stream) {
            return false;
        }
        self.has_accepted = true;
        let stream = StreamHandle(stream.addr() as u64);
        if let Some(id) = capture_on(device, stream) {
            self.captured.retain(|&(other, _)| other != stream);
            self.captured.push((stream, id));
            self.has_captured = true;
        }
        self.look(device);
        true
    }

    /// Forgets a stream that is about to be destroyed, unless it captures.
    pub(crate) fn end_stream(&mut self, device: i32, stream: StreamHandle) {
        self.captured
            .retain(|&(other, _)| other != stream || capture_on(device, stream).is_some());
    }
}

/// Returns the capture that a stream takes part in. A device without a heap has no such stream, a
/// lost context captures nothing, and the legacy stream, about which the driver may refuse to
/// answer, never captures.
fn capture_on(device: i32, stream: StreamHandle) -> Option<CaptureId> {
    let of = heaps::known(device)?;
    let (driver, ordinal) = (of.driver(), of.device.ordinal());
    // SAFETY: PyTorch keeps the streams that it has allocated for while its capture ran. Programs
    // announce the end of other streams.
    let (status, id) = unsafe {
        (
            driver.capture_status(ordinal, stream),
            driver.capture_id(ordinal, stream),
        )
    };
    let captures = status.is_ok_and(|status| status != CaptureStatus::NONE);
    captures.then(|| id.ok().flatten().unwrap_or(0))
}
