//! The gate that operations pass: which are in flight, whether a [capture guard](CaptureGuard)
//! lives, and when fences may be polled.
//!
//! While a capture guard lives, no fence is polled and no thread waits for the device, since a query
//! or a synchronization can break a capture. A new guard waits for the operations in flight and for
//! the threads that wait for the device: they began before it.
//!
//! Keeps I-23.

mod capture;
mod polls;

use std::num::NonZeroU64;

use crate::error::CallError;
use crate::extents::{Fence, Poll, Round};

pub use self::capture::CaptureGuard;
pub(crate) use self::capture::Polling;

/// The operations in flight, the capture guards, and the threads that wait for the device.
#[derive(Debug, Default)]
pub(in crate::pool) struct Gate {
    /// Operations begun so far.
    begun: u64,
    /// Operations ended so far.
    ended: u64,
    in_flight: Vec<NonZeroU64>,
    /// The number in flight of the memory that the mapper is placing.
    placing: Option<NonZeroU64>,
    /// Capture guards that live.
    guards: u64,
    /// Threads that wait for the device and began before any guard lived.
    synchronising: u64,
    /// Set when a poll found that only a synchronization can show whether a fence is complete.
    needs_synchronise: bool,
}

impl Gate {
    /// Puts an operation in flight; returns its number.
    pub(super) fn begin(&mut self) -> NonZeroU64 {
        self.begun += 1;
        let number = NonZeroU64::new(self.begun).unwrap_or(NonZeroU64::MIN);
        self.in_flight.push(number);
        number
    }

    pub(super) fn end(&mut self, number: NonZeroU64) {
        self.ended += 1;
        self.in_flight.retain(|&flight| flight != number);
    }

    /// Puts the placing of memory by the mapper in flight: the memory can be given up once it is
    /// placed, so operations may wait for that.
    pub(super) fn begin_placing(&mut self) {
        // A placing that a panic ended must hold up no guard.
        self.end_placing();
        self.placing = Some(self.begin());
    }

    pub(super) fn end_placing(&mut self) {
        if let Some(number) = self.placing.take() {
            self.end(number);
        }
    }

    /// Returns how many operations have ended so far.
    pub(super) const fn ended(&self) -> u64 {
        self.ended
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns `true` if an operation besides `own` is in flight.
    pub(super) const fn has_others(&self, own: Option<NonZeroU64>) -> bool {
        self.in_flight.len() > own.is_some() as usize
    }

    pub(super) fn has_any(&self, numbers: &[NonZeroU64]) -> bool {
        self.in_flight.iter().any(|flight| numbers.contains(flight))
    }

    pub(super) const fn is_capturing(&self) -> bool {
        self.guards > 0
    }

    /// Counts a capture guard; returns the operations that it waits for. Operations that begin from
    /// here on see the guard.
    fn begin_guard(&mut self) -> Vec<NonZeroU64> {
        self.guards += 1;
        self.in_flight.clone()
    }

    /// Returns `true` if a new guard has to wait for one of these operations or for a thread that
    /// waits for the device.
    fn holds_up_guard(&self, flights: &[NonZeroU64]) -> bool {
        self.synchronising > 0 || self.has_any(flights)
    }

    const fn end_guard(&mut self) {
        self.guards = self.guards.saturating_sub(1);
    }

    /// Counts a thread that is to wait for the device; returns `false` if a guard lives.
    const fn begin_synchronising(&mut self) -> bool {
        let may = !self.is_capturing();
        self.synchronising += may as u64;
        may
    }

    const fn end_synchronising(&mut self) {
        self.synchronising -= 1;
    }

    /// Returns `true` if only a synchronization can show that a polled fence is complete, and none
    /// is forbidden.
    pub(super) const fn is_to_synchronise(&self) -> bool {
        self.needs_synchronise && !self.is_capturing()
    }

    pub(super) const fn note_synchronised(&mut self) {
        self.needs_synchronise = false;
    }

    /// Returns `true` if a fence is complete, polling if that is allowed now.
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
                log!(debug, %error, "a fence could not be polled: it counts as pending");
                false
            }
        }
    }

    fn note(&mut self, polled: Poll) -> bool {
        self.needs_synchronise |= polled == Poll::NeedsSynchronise;
        polled == Poll::Complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_guard_waits_for_what_began_before_it() {
        let mut gate = Gate::default();
        let before = gate.begin();
        assert!(gate.begin_synchronising());
        let flights = gate.begin_guard();
        let after = gate.begin();
        assert!(!gate.begin_synchronising(), "a guard lives");
        assert!(gate.holds_up_guard(&flights));
        gate.end(before);
        assert!(
            gate.holds_up_guard(&flights),
            "a thread waits for the device"
        );
        gate.end_synchronising();
        assert!(!gate.holds_up_guard(&flights), "{after} sees the guard");
        assert!(gate.is_capturing());
        gate.end_guard();
        assert!(!gate.is_capturing() && gate.begin_synchronising());
    }

    #[test]
    fn a_placing_that_never_ended_holds_up_no_guard_after_the_next() {
        let mut gate = Gate::default();
        gate.begin_placing();
        gate.begin_placing();
        let flights = gate.begin_guard();
        gate.end_placing();
        assert!(!gate.holds_up_guard(&flights) && gate.is_idle());
    }

    #[test]
    fn operations_in_flight_are_counted_until_they_end() {
        let mut gate = Gate::default();
        assert!(gate.is_idle() && !gate.has_others(None));
        let own = gate.begin();
        assert!(!gate.has_others(Some(own)) && gate.has_others(None));
        let other = gate.begin();
        assert!(gate.has_others(Some(own)) && gate.has_any(&[other]));
        gate.end(other);
        assert_eq!(gate.ended(), 1);
        assert!(!gate.has_others(Some(own)) && !gate.has_any(&[other]));
    }
}
