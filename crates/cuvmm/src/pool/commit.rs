//! Putting memory under a slot: charge, gather, place, scrub; or nothing.

use super::budget::TenantId;
use super::slot::Slot;
use super::state::{Scrub, State};
use crate::error::{AllocateError, CallError, CommitError};
use crate::own::Stream;
use crate::region::PlaceError;

impl State {
    /// Gets a slot, which has been taken out, ready for a block that used `from` bytes of it and
    /// now uses `to`: memory under all of it, no other tenant's data in it, and zeros in the new
    /// part if the block wants them. On failure the slot is as before, except for what is
    /// quarantined.
    pub(crate) fn furnish(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        (from, to): (u64, u64),
        home: Option<&Stream>,
        zeroed: bool,
    ) -> Result<(), AllocateError> {
        let begun = slot.space.bytes();
        let bytes = to.saturating_sub(begun);
        let count = if bytes > 0 {
            self.commit(id, slot, begun, bytes)?
        } else {
            0
        };
        if let Err(error) = self.cleanse(id, slot, begun, (from, to), home, zeroed) {
            self.uncommit(slot, begun);
            self.budget.refund(id, bytes);
            self.budget.refund_mappings(id, count);
            return Err(error);
        }
        slot.space.settle(begun);
        Ok(())
    }

    /// Charges for, gathers and places `bytes` behind the memory of a slot; returns how many
    /// extents that took.
    fn commit(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        begun: u64,
        bytes: u64,
    ) -> Result<u64, AllocateError> {
        let end = begun + bytes;
        let stuck = slot.space.stuck_in(begun, end);
        if stuck > 0 {
            return Err(CommitError::Quarantined {
                start: begun,
                end,
                bytes: stuck,
            }
            .into());
        }
        self.make_room(id, bytes)?;
        self.budget.charge(id, bytes);
        self.place(id, slot, begun, bytes)
            .inspect_err(|_| self.budget.refund(id, bytes))
    }

    fn place(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        begun: u64,
        bytes: u64,
    ) -> Result<u64, AllocateError> {
        let pieces = self.gather(id, bytes)?;
        let count = pieces.len() as u64;
        if let Err(error) = self.make_mapping_room(id, count) {
            self.put_back(pieces);
            return Err(error);
        }
        self.budget.charge_mappings(id, count);
        if let Err(PlaceError {
            error,
            pieces,
            stuck,
        }) = slot.space.place(begun, pieces)
        {
            let stuck_count = count - pieces.len() as u64;
            self.budget.refund_mappings(id, count);
            self.set_aside(slot, stuck, stuck_count);
            self.put_back(pieces);
            return Err(match error.call() {
                Some(cause) if cause.is_out_of_memory() => AllocateError::DriverOutOfMemory {
                    cause: *cause,
                    shortage: self.shortage(id, bytes, 0),
                },
                _ => error.into(),
            });
        }
        Ok(count)
    }

    fn make_mapping_room(&mut self, id: TenantId, count: u64) -> Result<(), AllocateError> {
        if let Some(missing) = count
            .checked_sub(self.budget.mappings_left())
            .filter(|&n| n > 0)
        {
            self.take_back_mappings(id, missing)?;
        }
        if self.budget.mappings_left() < count {
            return Err(AllocateError::OutOfMappings {
                wanted: count,
                held: self.budget.mappings(),
                limit: self.budget.limits().mappings,
            });
        }
        Ok(())
    }

    /// Takes out what a commit placed behind `begun`, whose charges have been or will be
    /// refunded.
    fn uncommit(&mut self, slot: &mut Slot, begun: u64) {
        let offsets: Vec<u64> = slot
            .space
            .extents()
            .rev()
            .map(|extent| extent.offset)
            .take_while(|&offset| offset >= begun)
            .collect();
        for offset in offsets {
            match slot.space.withdraw(offset) {
                Ok(Some(piece)) => self.put_back(vec![piece]),
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(%error, offset, "a roll-back could not unmap: quarantined");
                    let before = slot.space.stuck_bytes();
                    slot.space.quarantine(offset);
                    self.set_aside(slot, slot.space.stuck_bytes() - before, 1);
                }
            }
        }
    }

    /// Books bytes that are stuck in a slot as quarantined.
    fn set_aside(&mut self, slot: &mut Slot, bytes: u64, mappings: u64) {
        if bytes > 0 {
            slot.broken = true;
            self.budget.quarantine(bytes, mappings);
        }
    }

    /// Zeroes what another tenant wrote to in the memory behind `begun`, and whatever was written
    /// to in the new part of a block that wants zeros; ordered before the new owner's work.
    fn cleanse(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        begun: u64,
        (from, to): (u64, u64),
        home: Option<&Stream>,
        zeroed: bool,
    ) -> Result<(), AllocateError> {
        let foreign = |stain: u64| stain != id.0 && self.policy.scrub != Scrub::Never;
        let first = if zeroed { from } else { begun.min(to) };
        let soiled = slot.space.stained(first, to);
        let mut soiled = soiled
            .into_iter()
            .filter(|&(_, _, stain)| zeroed || foreign(stain));
        let Some((start, size, _)) = soiled.next() else {
            return Ok(());
        };
        let end = soiled
            .next_back()
            .map_or(start + size, |(offset, size, _)| offset + size);
        // A fill on a stream that captures would become part of the graph, and not run now.
        if self.capturing > 0 || is_capturing(home)? {
            return Err(AllocateError::Capturing(self.shortage(id, to - from, 0)));
        }
        self.zero(slot, start, end - start, home)
    }

    /// Fills a range with zeros on the home stream, or on a stream of ours that is waited for. One
    /// fill, so that one that fails leaves nothing running.
    fn zero(
        &mut self,
        slot: &Slot,
        offset: u64,
        size: u64,
        home: Option<&Stream>,
    ) -> Result<(), AllocateError> {
        let stream = match home {
            Some(home) => home.clone(),
            None => self.scrubber()?,
        };
        slot.space
            .zero(&stream, offset, size)
            .map_err(AllocateError::Zero)?;
        if home.is_none() {
            self.device.relaxed(|| stream.synchronize())??;
        }
        Ok(())
    }
}

fn is_capturing(home: Option<&Stream>) -> Result<bool, CallError> {
    home.map_or(Ok(false), Stream::is_capturing)
}
