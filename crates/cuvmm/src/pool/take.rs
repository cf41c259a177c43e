//! Memory that is taken out of slots: unmapped, booked, and given up if no other slot shows it.

use super::budget::Amount;
use super::core::Locked;
use super::slot::Slot;
use crate::error::{CallError, MemoryError};
use crate::region::{Fence, NotPutBack, TakenOut};

impl Locked<'_> {
    /// Takes out what was put behind `begun` in a slot that is out, and refunds it. No work but
    /// `running` may use it. What cannot be unmapped, and all of it if that has not passed, is
    /// quarantined.
    pub(super) fn uncommit(&mut self, slot: &mut Slot, begun: u64, running: &Fence) {
        if slot.space.last_offset().is_none_or(|last| last < begun) {
            return;
        }
        let (taken, stuck) = self.unlocked(|| slot.space.empty_from(begun, running));
        stuck.into_iter().for_each(|stuck| self.stuck(slot, stuck));
        self.abandon(slot, taken);
    }

    /// Books extents that a slot, which is out, has lost since a roll-back failed; returns why.
    pub(super) fn lose(&mut self, slot: &mut Slot, lost: NotPutBack) -> MemoryError {
        let stuck = lost.stuck.into_iter();
        stuck.for_each(|stuck| self.stuck(slot, stuck));
        self.abandon(slot, lost.rest);
        lost.error
    }

    /// Books extents that were taken out of a slot, which is out, and gives up those that no other
    /// slot shows; returns the bytes of these.
    pub(super) fn abandon(&mut self, slot: &mut Slot, taken: TakenOut) -> u64 {
        let (mut own, mut bytes) = (Vec::new(), 0);
        for (offset, unmapped) in taken.into_parts() {
            // Else the mappings of others hold it.
            if self.leave(slot, offset, unmapped.physical.as_raw()) {
                bytes += unmapped.size();
                own.push(unmapped);
            }
        }
        self.budget.give_up(slot.id.tenant, Amount::bytes(bytes));
        self.renew(slot);
        self.put_back(own);
        bytes
    }

    /// Books bytes that are stuck in a slot as quarantined.
    pub(crate) fn set_aside(&mut self, slot: &mut Slot, bytes: u64, mappings: u64) {
        if bytes > 0 {
            slot.broken = true;
            self.budget.quarantine(bytes, mappings);
        }
    }

    /// Unmaps extents of a slot that is out, last first, and keeps them where they may be kept;
    /// returns the bytes.
    pub(super) fn take_extents(&mut self, slot: &mut Slot, at: Vec<u64>) -> Result<u64, CallError> {
        let mut taken = TakenOut::default();
        let outcome = self.unlocked(|| slot.completed()?.take_out(at, &mut taken));
        taken.settle();
        let bytes = taken.bytes();
        self.abandon(slot, taken);
        outcome.map(|()| bytes)
    }

    /// Takes everything from a slot, which is out, that its block does not use: what could be taken
    /// back, and what others show too.
    pub(super) fn take_unused(&mut self, slot: &mut Slot) -> Result<(), CallError> {
        let unused = slot.spare().chain(slot.parting());
        let at: Vec<u64> = unused.map(|extent| extent.offset).collect();
        match at.is_empty() {
            true => Ok(()),
            false => self.take_extents(slot, at).map(drop),
        }
    }
}
