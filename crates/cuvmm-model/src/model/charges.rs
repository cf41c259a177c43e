//! The memory in use at each owner, by this driver and by other programs.

use super::answer::{Answer, OUT_OF_MEMORY};
use super::backing::Backing;
use super::device_state::{Owner, ScheduledUse};
use super::state::State;
use cuvmm_driver::{Call, Ordinal};

impl<B: Backing> State<B> {
    /// Fails if too few bytes are free.
    pub(crate) fn charge(&mut self, owner: Owner, bytes: u64) -> Answer {
        let capacity = match owner {
            Owner::Device(index) => {
                let elsewhere = self.devices.get(index).map(|device| device.elsewhere);
                self.rules
                    .capacity
                    .saturating_sub(elsewhere.unwrap_or_default())
            }
            Owner::Host => self.rules.host_capacity,
        };
        let Some(used) = self.used_of(owner) else {
            return Ok(());
        };
        match used.checked_add(bytes) {
            Some(sum) if sum <= capacity => *used = sum,
            _ => return Err(OUT_OF_MEMORY),
        }
        Ok(())
    }

    pub(crate) fn refund(&mut self, owner: Owner, bytes: u64) {
        if let Some(used) = self.used_of(owner) {
            *used = used.saturating_sub(bytes);
        }
    }

    fn used_of(&mut self, owner: Owner) -> Option<&mut u64> {
        match owner {
            Owner::Device(index) => self.devices.get_mut(index).map(|device| &mut device.used),
            Owner::Host => Some(&mut self.physicals.host_used),
        }
    }

    pub(crate) fn set_used_elsewhere(&mut self, device: Ordinal, bytes: u64) {
        if let Ok(index) = self.device(device) {
            self.devices[index].elsewhere = bytes;
        }
    }

    /// Applies the other programs' allocations that are scheduled before this call.
    pub(crate) fn apply_scheduled(&mut self, call: Call) {
        if self.arrivals.is_empty() {
            return;
        }
        let counted = |arrival: &mut ScheduledUse| {
            arrival.calls -= u64::from(arrival.call == call);
            arrival.calls == 0
        };
        let arrived: Vec<_> = self.arrivals.extract_if(.., counted).collect();
        for arrival in arrived {
            self.set_used_elsewhere(arrival.device, arrival.bytes);
        }
    }
}
