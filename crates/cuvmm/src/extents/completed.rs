//! Proof for unmapping, tied to the memory.
//!
//! [`Completed`] is a space together with proof that no work can use the memory unmapped from it.
//! It borrows the space, so proof for one space unmaps nothing of another, and no use can begin
//! while it lives. Mappings that are in no space any more are unmapped with an [`Unused`] of their
//! own: those of heaps, in which one physical has several mappings with a fence each
//! ([`Placed::unmap_after`]), those that a roll-back has not put back, those of memory that an
//! operation placed and nothing used, and zeros.
//!
//! Keeps I-20.

use super::fence::{Fence, Unused};
use super::place::{Placed, Unmapped};
use super::space::Space;
use crate::error::CallError;

#[derive(Debug)]
pub(crate) struct Completed<'a> {
    pub(super) space: &'a mut Space,
    proof: Unused,
    /// The proof covers the memory from this offset on.
    from: u64,
}

impl Fence {
    /// Returns proof for a space whose memory only work covered by this fence uses; `None` while
    /// the fence is not known to be complete.
    pub(crate) fn completed<'a>(&self, space: &'a mut Space) -> Option<Completed<'a>> {
        Some(space.proved(self.proof()?))
    }
}

impl Placed {
    /// Unmaps an extent that was removed from its space and that only work covered by a fence uses
    /// (`cuMemUnmap`). Returns the extent if the fence is not known to be complete or the driver
    /// refuses.
    pub(crate) fn unmap_after(self, fence: &Fence) -> Result<Unmapped, (Self, CallError)> {
        match fence.proof() {
            Some(proof) => self.unmap(proof),
            None => Err((self, CallError::InUse)),
        }
    }
}

impl Space {
    pub(crate) const fn proved(&mut self, proof: Unused) -> Completed<'_> {
        Completed {
            space: self,
            proof,
            from: 0,
        }
    }

    /// The memory that the running operation has placed from an offset on, at addresses where no
    /// work was queued since.
    pub(crate) const fn never_used(&mut self, from: u64) -> Completed<'_> {
        Completed {
            space: self,
            proof: Unused::never_used(),
            from,
        }
    }

    #[cfg(test)]
    pub(crate) const fn promised(&mut self) -> Completed<'_> {
        self.proved(Unused::never_used())
    }

    /// All memory of the space, once the work of all devices with access is complete, or their
    /// contexts are lost and run nothing more. Waits (`cuCtxSynchronize`).
    pub(crate) fn drained(&mut self) -> Result<Completed<'_>, CallError> {
        let proof = Unused::after_drain(self.users())?;
        Ok(self.proved(proof))
    }
}

impl Completed<'_> {
    /// Unmaps the extent at `offset` (`cuMemUnmap`). On failure it stays mapped. After a panic of the
    /// driver it is stuck.
    pub(crate) fn withdraw(&mut self, offset: u64) -> Result<Option<Unmapped>, CallError> {
        if offset < self.from {
            return Err(CallError::InUse);
        }
        let Some(placed) = self.space.remove(offset) else {
            return Ok(None);
        };
        placed
            .unmap(self.proof)
            .map(Some)
            .map_err(|(placed, cause)| {
                self.space.adopt(placed);
                cause
            })
    }

    /// Unmaps the extent at `offset` in a roll-back or at the end of its owner. Tries twice, so
    /// that one refusal changes nothing.
    pub(crate) fn withdraw_back(&mut self, offset: u64) -> Result<Option<Unmapped>, CallError> {
        self.withdraw(offset).or_else(|error| {
            log!(warn, %error, offset, "a roll-back is tried again");
            self.withdraw(offset)
        })
    }

    /// Tries again to unmap stuck mappings and releases their memory. Returns the first error.
    pub(crate) fn retry_stuck(&mut self) -> Result<(), CallError> {
        let mut outcome = Ok(());
        let stuck = std::mem::take(&mut *self.space.target.stuck.lock());
        for mapping in stuck {
            // What is dropped is stuck again.
            let unmapped = mapping.unmap(self.proof).map_err(|(_, error)| error);
            outcome = outcome.and(unmapped.map(drop));
        }
        for space in &mut self.space.beside {
            // Copies through the addresses of another space are made by the same devices.
            outcome = outcome.and(space.proved(self.proof).retry_all());
        }
        outcome
    }

    /// Unmaps all that can be unmapped and releases its memory. Returns the first error.
    pub(crate) fn retry_all(&mut self) -> Result<(), CallError> {
        let mut outcome = self.retry_stuck();
        let extents = self.space.extents().map(|extent| extent.offset);
        for offset in extents.collect::<Vec<u64>>() {
            outcome = outcome.and(self.withdraw_back(offset).map(drop));
        }
        outcome
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::Call;

    use super::*;
    use crate::extents::Poll;
    use crate::extents::rig::{G, rig};

    #[test]
    fn there_is_no_proof_before_the_work_has_passed() {
        let rig = rig();
        let (mut space, stream) = (rig.space(2), rig.busy_stream());
        let mut fence = Fence::stream(stream.clone());
        assert!(fence.completed(&mut space).is_none());
        assert_eq!(fence.poll().unwrap(), Poll::Pending);
        assert!(fence.completed(&mut space).is_none());
        rig.finish(&stream);
        assert!(fence.completed(&mut space).is_none(), "it was not polled");
        assert_eq!(fence.poll().unwrap(), Poll::Complete);
        let mut completed = fence.completed(&mut space).unwrap();
        assert_eq!(completed.withdraw(G).unwrap().unwrap().size(), G);
        assert!(completed.withdraw(G).unwrap().is_none(), "it has gone");
        assert_eq!((space.bytes(), space.count()), (G, 1));
    }

    #[test]
    fn what_was_there_before_an_operation_is_not_taken_for_what_it_placed() {
        let rig = rig();
        let mut space = rig.space(3);
        let mut new = space.never_used(G);
        assert!(matches!(new.withdraw(0), Err(CallError::InUse)));
        assert!(new.withdraw(G).unwrap().is_some());
        assert!(new.withdraw(2 * G).unwrap().is_some());
        assert_eq!((space.bytes(), space.count()), (G, 1));
    }

    #[test]
    fn what_the_driver_does_not_unmap_stays_where_it_is() {
        let rig = rig();
        let mut space = rig.space(2);
        rig.fail_from(Call::MemUnmap, 1);
        assert!(space.promised().withdraw(0).is_err());
        assert!(space.promised().withdraw_back(0).is_err());
        assert!(space.promised().retry_all().is_err());
        assert_eq!((space.bytes(), space.count()), (2 * G, 2));
        assert_eq!(space.handle_at(0).is_some(), space.handle_at(G).is_some());
        rig.heal();
        // A single refusal is tried again.
        rig.fail(Call::MemUnmap, 1);
        assert!(space.promised().withdraw_back(0).unwrap().is_some());
        rig.fail_from(Call::MemUnmap, 1);
        space.quarantine(G);
        assert!(space.promised().retry_stuck().is_err());
        assert_eq!((space.count(), space.stuck_bytes()), (0, G));
        rig.heal();
        space.promised().retry_stuck().unwrap();
        assert_eq!(space.stuck_bytes(), 0);
    }

    #[test]
    fn draining_waits_for_all_work() {
        let rig = rig();
        let (mut space, stream) = (rig.space(1), rig.busy_stream());
        let raw = stream.as_raw();
        rig.machine
            .hold_until_awaited(cuvmm_driver::Ordinal(0), raw);
        let mut drained = space.drained().unwrap();
        drained.retry_all().unwrap();
        assert_eq!(space.count(), 0);
        let mut fence = Fence::stream(stream);
        assert_eq!(fence.poll().unwrap(), Poll::Complete);
    }
}
