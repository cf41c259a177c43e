//! Memory of a device that other programs hold.
//!
//! They take theirs at any moment, also between a question how much is free and a creation.

use super::backing::Backing;
use super::machine::Machine;
use super::state::State;
use crate::{Call, Ordinal};

/// Another program takes memory just before a call.
#[derive(Debug)]
pub(crate) struct Arrival {
    call: Call,
    /// Calls of that kind until then, with the one that it comes before.
    calls: u64,
    device: Ordinal,
    bytes: u64,
}

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

impl<B: Backing> State<B> {
    fn hold_elsewhere(&mut self, device: Ordinal, bytes: u64) {
        if let Ok(index) = self.device(device) {
            self.devices[index].elsewhere = bytes;
        }
    }

    /// Other programs take what they were to take before this call.
    pub(crate) fn let_arrive(&mut self, call: Call) {
        if self.arrivals.is_empty() {
            return;
        }
        let counted = |arrival: &mut Arrival| {
            arrival.calls -= u64::from(arrival.call == call);
            arrival.calls == 0
        };
        let arrived: Vec<_> = self.arrivals.extract_if(.., counted).collect();
        for arrival in arrived {
            self.hold_elsewhere(arrival.device, arrival.bytes);
        }
    }
}
