//! Driver calls on events, so that each can be timed, and the search for a second device.
//!
//! `unsafe` here: the `Driver` methods that take handles. Each receives values that the driver
//! returned.
#![allow(unsafe_code)]

use cuvmm::Stream;
use cuvmm::driver::{EventFlags, EventHandle, Ordinal, Result};

use super::by_hand::Hand;

/// Returns the next device such that both devices can access each other's memory.
pub(super) fn peer_of(hand: &Hand) -> Option<Ordinal> {
    let (driver, device) = (hand.driver(), hand.device());
    let count = driver.device_count().ok()?;
    let reaches = |one, other| driver.can_access_peer(one, other).unwrap_or(false);
    (1..count)
        .map(|step| Ordinal((device.0 + step) % count))
        .find(|&peer| reaches(peer, device) && reaches(device, peer))
}

pub(super) struct Event<'a> {
    hand: &'a Hand,
    handle: EventHandle,
}

impl<'a> Event<'a> {
    pub(super) fn new(hand: &'a Hand) -> Result<Self> {
        let flags = EventFlags::DISABLE_TIMING;
        let handle = hand.driver().event_create(hand.device(), flags)?;
        Ok(Self { hand, handle })
    }

    pub(super) fn record(&self, stream: &Stream) -> Result<()> {
        let (driver, device) = (self.hand.driver(), self.hand.device());
        // SAFETY: the event and the stream are live.
        unsafe { driver.event_record(device, self.handle, stream.as_raw()) }
    }

    pub(super) fn query(&self) -> Result<bool> {
        // SAFETY: the event is live.
        unsafe {
            self.hand
                .driver()
                .event_query(self.hand.device(), self.handle)
        }
    }

    pub(super) fn wait_on(&self, stream: &Stream) -> Result<()> {
        let (driver, device) = (self.hand.driver(), self.hand.device());
        // SAFETY: the event and the stream are live.
        unsafe { driver.stream_wait_event(device, stream.as_raw(), self.handle) }
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        let (driver, device) = (self.hand.driver(), self.hand.device());
        // SAFETY: this value owns the event. An event that cannot be destroyed stays with the
        // driver.
        let _ = unsafe { driver.event_destroy(device, self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuvmm::driver::model::{ModelDriver, ModelOptions};

    use super::*;

    fn peer(options: ModelOptions, device: i32) -> Option<i32> {
        let hand = Hand::new(Arc::new(ModelDriver::new(options)), Ordinal(device));
        peer_of(&hand).map(|peer| peer.0)
    }

    #[test]
    fn a_peer_is_the_next_that_is_reached_both_ways() {
        let devices = |count| ModelOptions::new().devices(count);
        assert_eq!(peer(devices(1), 0), None);
        assert_eq!(peer(devices(3), 0), Some(1));
        assert_eq!(peer(devices(3), 2), Some(0));
        assert_eq!(peer(devices(3).unreachable(0, 1), 0), Some(2));
        assert_eq!(peer(devices(3).unreachable(1, 0), 0), Some(2));
        assert_eq!(peer(devices(2).unreachable(1, 0), 0), None);
    }
}
