//! Addresses of blocks that are gone: reserved, with nothing mapped, kept from whoever reserves
//! next.
//!
//! Oldest first. They belong to no tenant any more and count against the pool's limit of addresses,
//! which they make way for: rest is a precaution, and no allocation fails for it. Nothing is
//! unmapped here.

use std::collections::VecDeque;

use super::budget::TenantId;
use super::slot::Slot;
use super::state::State;
use crate::error::ReserveError;
use crate::region::Space;

/// Empty spaces at rest, up to so many and to so many bytes of addresses.
#[derive(Debug)]
pub(crate) struct Resting {
    spaces: VecDeque<Space>,
    bytes: u64,
    most_spaces: u64,
    most_bytes: u64,
}

impl Resting {
    pub(crate) const fn new(most_spaces: u64, most_bytes: u64) -> Self {
        Self {
            spaces: VecDeque::new(),
            bytes: 0,
            most_spaces,
            most_bytes,
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.spaces.len() as u64
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    fn add(&mut self, space: Space) {
        self.bytes += space.addresses();
        self.spaces.push_back(space);
    }

    fn is_over(&self) -> bool {
        self.count() > self.most_spaces || self.bytes > self.most_bytes
    }

    /// The one that has rested longest.
    fn oldest(&mut self) -> Option<Space> {
        let space = self.spaces.pop_front()?;
        self.bytes -= space.addresses();
        Some(space)
    }
}

impl State {
    /// Lets the addresses of an empty slot that was taken out rest, where the pool does that; else
    /// they go back to the driver.
    pub(crate) fn put_away(&mut self, id: TenantId, index: usize, slot: Box<Slot>) {
        let stuck = slot.space.stuck_count() > 0;
        let Some(hardening) = self.hardening.as_mut().filter(|_| !stuck) else {
            return self.drop_slot(id, index, slot);
        };
        if let Some(tenancy) = self.tenants.get_mut(&id) {
            tenancy.vacate(index);
        }
        self.budget.disown_addresses(id, slot.space.addresses());
        hardening.resting.add(slot.space);
        while self.rests_too_much() && self.rouse_one() {}
    }

    fn rests_too_much(&self) -> bool {
        let hardening = self.hardening.as_ref();
        hardening.is_some_and(|hardening| hardening.resting.is_over())
    }

    /// Gives the addresses that have rested longest back to the driver; false if there are none.
    fn rouse_one(&mut self) -> bool {
        let hardening = self.hardening.as_mut();
        let Some(space) = hardening.and_then(|hardening| hardening.resting.oldest()) else {
            return false;
        };
        self.budget.refund_disowned(space.addresses());
        drop(space);
        true
    }

    /// Gives resting addresses back until `bytes` may be reserved, or none rest.
    pub(crate) fn rouse_for(&mut self, bytes: u64) {
        while self.budget.addresses_left() < bytes && self.rouse_one() {}
    }

    /// Reserves addresses that were charged. Where the driver has none left, those that rest go
    /// first.
    pub(crate) fn reserve(&mut self, size: u64, guard: u64) -> Result<Space, ReserveError> {
        loop {
            match Space::guarded(&self.device, size, guard) {
                Err(ReserveError::Call { cause, .. })
                    if cause.is_out_of_memory() && self.rouse_one() => {}
                outcome => return outcome,
            }
        }
    }
}
