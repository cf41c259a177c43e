//! The end of a region: all its memory is unmapped and released. A region in a tenant hands it to its
//! pool instead.

use super::Region;
use super::family::Family;
use crate::error::CallError;
use crate::extents::{Extent, Fence, Unused};
use crate::own::{CloseError, CloseRefusal};

impl Region {
    /// Waits for the device and releases extents, memory and addresses. On failure the region is
    /// returned with all that could not be released.
    ///
    /// # Errors
    /// [`CloseError`] with the region in it while part of it is [registered](Self::register), or
    /// when the driver refuses.
    #[expect(clippy::result_large_err, reason = "the region itself is handed back")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let closed = match self.all_unregistered() {
            Ok(()) => self.empty().map_err(CloseRefusal::Call),
            Err(_) => Err(CloseRefusal::InUse),
        };
        CloseError::of(self, closed)
    }

    /// Unmaps everything: withdrawn memory behind its own fence, the rest behind all work of the
    /// devices with access. Memory without proof of completion stays, and the first reason is the
    /// error.
    fn empty(&mut self) -> Result<(), CallError> {
        self.device().own_process()?;
        if let Some(family) = self.supply.family().cloned() {
            return self.empty_lent(&family);
        }
        let mut outcome = Ok(());
        let mut all = None;
        let extents: Vec<Extent> = self.space.extents().collect();
        for extent in extents {
            let proof = self.proof_for(&extent, &mut all);
            let space = &mut self.space;
            match proof.and_then(|proof| space.proved(proof).withdraw_back(extent.offset)) {
                Ok(freed) => {
                    freed
                        .into_iter()
                        .for_each(|unmapped| self.release_unmapped(unmapped));
                    self.withdrawn.remove(&extent.offset);
                    self.pending.remove(extent.offset);
                    self.committed.remove(extent.offset..extent.end());
                }
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        if self.space.stuck_count() + self.zeros.count() > 0 {
            let drained = self.drained(&mut all);
            let cleared = drained.and_then(|proof| {
                let freed = self.space.proved(proof).retry_stuck();
                freed.and(self.zeros.clear(proof))
            });
            outcome = outcome.and(cleared);
        }
        outcome
    }

    fn proof_for(
        &mut self,
        extent: &Extent,
        all: &mut Option<Result<Unused, CallError>>,
    ) -> Result<Unused, CallError> {
        if !self.committed.overlaps(&(extent.offset..extent.end()))
            && let Some(fence) = self.withdrawn.get_mut(&extent.offset)
        {
            return fence.wait();
        }
        self.drained(all)
    }

    /// Waits once for all work of the devices with access.
    fn drained(&self, all: &mut Option<Result<Unused, CallError>>) -> Result<Unused, CallError> {
        *all.get_or_insert_with(|| Unused::after_drain(self.space.users()))
    }

    /// Unmaps everything and gives it to the tenant's pool, behind all work of the devices with
    /// access.
    fn empty_lent(&mut self, family: &Family) -> Result<(), CallError> {
        let proof = Unused::after_drain(self.space.users())?;
        self.withdraw_all(&Fence::complete());
        let purged = family.purge_all().map(drop);
        let stuck = self.space.stuck_count();
        let retried = self.space.proved(proof).retry_stuck();
        family.give_back(Vec::new(), stuck.saturating_sub(self.space.stuck_count()));
        let all = self.addresses(&(0..self.size()));
        let left = match family.shared.withdrawn_in(&all).is_empty() {
            true => Ok(()),
            false => Err(CallError::InUse),
        };
        purged.and(retried).and(left)
    }

    /// Gives the region's memory and addresses to its tenant's pool, behind all work of the devices
    /// with access. Waits for nothing.
    fn end_lent(&mut self, family: &Family) {
        if self.device().is_forked() {
            return;
        }
        self.leave_registered();
        family.shared.set_asleep(0);
        let fence = self.fence_of_all();
        self.withdraw_all(&fence);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(family) = self.supply.family().cloned() {
            return self.end_lent(&family);
        }
        self.leave_registered();
        let held = self.held();
        if let Err(error) = self.empty() {
            self.device().report_drop("region", held, error);
        }
    }
}
