//! Memory of a device that other programs hold. They allocate at any moment, including between a
//! query of the free memory and a create.

use super::backing::Backing;
use super::device_state::ScheduledUse;
use super::machine::Machine;
use cuvmm_driver::{Call, Ordinal};

impl<B: Backing> Machine<B> {
    /// Makes other programs hold `bytes` of a device from now on, in addition to this driver's
    /// memory. If that exceeds the device's memory, none is free.
    pub fn set_used_elsewhere(&self, device: Ordinal, bytes: u64) {
        self.with(|state| state.set_used_elsewhere(device, bytes));
    }

    /// Makes other programs hold `bytes` of a device from just before the `nth` call of a kind on.
    /// An `nth` of 1 is the next call.
    pub fn set_used_elsewhere_before(&self, call: Call, nth: u64, device: Ordinal, bytes: u64) {
        let arrival = ScheduledUse {
            call,
            calls: nth.max(1),
            device,
            bytes,
        };
        self.with(|state| state.arrivals.push(arrival));
    }
}
