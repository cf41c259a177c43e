//! Memory of a device that other programs hold.
//!
//! They take theirs at any moment, also between a question how much is free and a creation.

use super::backing::Backing;
use super::device_state::Arrival;
use super::machine::Machine;
use crate::{Call, Ordinal};

impl<B: Backing> Machine<B> {
    /// Has other programs hold `bytes` of a device from now on, beside all that this driver
    /// has given out. Where that is more than the device has, nothing is free.
    pub fn hold_elsewhere(&self, device: Ordinal, bytes: u64) {
        self.with(|state| state.hold_elsewhere(device, bytes));
    }

    /// Has other programs hold `bytes` of a device from just before the `nth` call of a kind
    /// on: 1 is the next one.
    pub fn hold_elsewhere_before(&self, call: Call, nth: u64, device: Ordinal, bytes: u64) {
        let arrival = Arrival {
            call,
            calls: nth.max(1),
            device,
            bytes,
        };
        self.with(|state| state.arrivals.push(arrival));
    }
}
