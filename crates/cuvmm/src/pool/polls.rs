//! When fences may be polled: not while a [capture guard](super::CaptureGuard) lives, since a query
//! can break a capture.

use super::slot::Slot;
use crate::error::CallError;
use crate::own::Stream;
use crate::region::{Fence, Poll, Round};

/// The live capture guards, the threads that wait for the device, and what polls have found.
#[derive(Debug, Default)]
pub(crate) struct Polls {
    /// The number of live capture guards.
    pub(super) guards: u64,
    /// The number of threads that wait for the device and began before any guard lived.
    pub(super) synchronising: u64,
    /// Set when a poll found that only a synchronization can show whether a fence is complete.
    pub(super) needs_synchronise: bool,
}

impl Polls {
    /// Returns `true` while a capture guard lives.
    pub(super) const fn is_capturing(&self) -> bool {
        self.guards > 0
    }

    /// Returns `true` if a fence is complete, as far as it may be polled now.
    pub(super) fn poll(&mut self, fence: &mut Fence) -> Result<bool, CallError> {
        if fence.is_complete() || self.is_capturing() {
            return Ok(fence.is_complete());
        }
        let polled = fence.poll()?;
        Ok(self.note(polled))
    }

    /// Returns `true` if a fence is complete, using the driver's answers of this round. A fence for
    /// which the driver fails counts as pending, so that it holds up no other.
    pub(super) fn poll_in(&mut self, fence: &mut Fence, round: &Round) -> bool {
        if fence.is_complete() || self.is_capturing() {
            return fence.is_complete();
        }
        match fence.poll_in(round) {
            Ok(polled) => self.note(polled),
            Err(error) => {
                tracing::debug!(%error, "a fence could not be polled: it counts as pending");
                false
            }
        }
    }

    /// Returns `true` if the work that a slot's fence covers comes before any work queued on `home`
    /// from here on, or can be ordered so now.
    pub(super) fn comes_before(
        &mut self,
        slot: &mut Slot,
        home: Option<&Stream>,
    ) -> Result<bool, CallError> {
        if slot.is_before(home) || self.is_capturing() {
            return Ok(slot.is_before(home));
        }
        let ordered = home.map_or(Ok(false), |home| slot.fence.order_before(home))?;
        Ok(ordered || self.poll(&mut slot.fence)?)
    }

    fn note(&mut self, polled: Poll) -> bool {
        self.needs_synchronise |= polled == Poll::NeedsSynchronise;
        polled == Poll::Complete
    }
}
