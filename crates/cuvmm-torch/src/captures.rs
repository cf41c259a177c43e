//! Pools of graphs that are open, and whether the captures run that they were opened for.
//!
//! PyTorch closes no pool whose capture has failed, and the filter of that pool refers to a graph that
//! may be gone. So the streams that a filter accepted tell whether the capture runs.
//!
//! `unsafe` is used to ask the driver about these streams, for which PyTorch vouches.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::thread::{self, ThreadId};

use cuvmm::driver::{CaptureStatus, StreamHandle};

use crate::cxx::Filter;
use crate::heaps;

/// The state of the capture for which a pool was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capture {
    /// A stream captures that the filter accepted, or the capture may be about to begin.
    MayRun,
    /// No stream captures that the filter accepted.
    None,
    /// No stream captures any more, and one did. The filter must not be called again.
    Over,
}

/// A pool that a thread has opened.
pub(crate) struct Open {
    filter: Filter,
    thread: ThreadId,
    /// The streams that the filter accepted, and whether they have captured.
    accepted: Vec<(StreamHandle, bool)>,
    /// `true` once the thread has opened another pool: a capture of this one is not awaited any more.
    is_superseded: bool,
    /// The answer of the last look.
    capture: Capture,
}

impl Open {
    /// Notes that the calling thread opens a pool.
    pub(crate) fn new(filter: Filter) -> Self {
        Self {
            filter,
            thread: thread::current().id(),
            accepted: Vec::new(),
            is_superseded: false,
            capture: Capture::MayRun,
        }
    }

    /// Returns `true` if the calling thread has opened it.
    pub(crate) fn is_mine(&self) -> bool {
        self.thread == thread::current().id()
    }

    /// Notes that its thread has opened another pool.
    pub(crate) const fn supersede(&mut self) {
        self.is_superseded = true;
    }

    /// Returns the answer of the last look.
    pub(crate) const fn capture(&self) -> Capture {
        self.capture
    }

    /// Asks the driver whether the capture runs.
    pub(crate) fn look(&mut self, device: i32) -> Capture {
        if self.capture == Capture::Over {
            return Capture::Over;
        }
        let (mut captures, mut has_captured) = (false, false);
        for (stream, noted) in &mut self.accepted {
            let now = is_capturing(device, *stream);
            captures |= now;
            *noted |= now;
            has_captured |= *noted;
        }
        let is_awaited = self.accepted.is_empty() && !self.is_superseded;
        self.capture = match (captures || is_awaited, has_captured) {
            (true, _) => Capture::MayRun,
            (false, true) => Capture::Over,
            (false, false) => Capture::None,
        };
        self.capture
    }

    /// Returns `true` if the filter accepts a stream, which is then noted. The filter may throw, and
    /// nothing is lost if it does. It is not called once the capture is over.
    pub(crate) fn accepts(&mut self, device: i32, stream: *mut c_void) -> bool {
        if self.look(device) == Capture::Over || !self.filter.accepts(stream) {
            return false;
        }
        let stream = StreamHandle(stream.addr() as u64);
        if !self.accepted.iter().any(|&(known, _)| known == stream) {
            self.accepted.push((stream, false));
            self.look(device);
        }
        true
    }
}

/// Returns `true` if a stream captures. A device without a heap has no such stream, a lost context
/// captures nothing, and the legacy stream, for which the driver may refuse an answer, never does.
fn is_capturing(device: i32, stream: StreamHandle) -> bool {
    let Some(of) = heaps::known(device) else {
        return false;
    };
    let (driver, ordinal) = (of.device.driver(), of.device.ordinal());
    // SAFETY: PyTorch has allocated for the stream while its capture ran, and keeps its streams.
    let status = unsafe { driver.capture_status(ordinal, stream) };
    status.is_ok_and(|status| status != CaptureStatus::NONE)
}
