//! Withdrawal of a region's memory as pending frees, which stay mapped until the work that may use
//! them is complete.

use std::ops::Range;

use super::Region;
use crate::error::{ArgumentError, CallError, MemoryError};
use crate::extents::{Extent, Fence, Round, Unused};
use crate::own::{CloseError, CloseRefusal, Stream};

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

    /// Withdraws a range after all work of the devices with access: extents with no committed byte
    /// left become pending free. Makes no driver call and never waits.
    ///
    /// Purging the range later marks all work of the context in the driver, which breaks a running
    /// capture on it; [`decommit_after`](Self::decommit_after) does not.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed.
    pub fn decommit(&mut self, range: Range<u64>) -> Result<(), MemoryError> {
        self.withdraw(range, |region| Ok(region.fence_of_all()))
    }

    /// Withdraws a range after the work of the streams that used it. The region's own
    /// [fills](Self::fill) and [copies](Self::copy_from) and the streams recorded through a
    /// [`Registration`](super::Registration::record_use) need not be named. Without a named stream,
    /// no other work counts.
    ///
    /// If fills and copies on more than 64 streams are incomplete, all work of their devices is
    /// waited for, as after [`decommit`](Self::decommit).
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed.
    pub fn decommit_after(
        &mut self,
        range: Range<u64>,
        streams: &[Stream],
    ) -> Result<(), MemoryError> {
        self.withdraw(range, |region| region.fence_after(streams))
    }

    /// Unmaps and releases pending frees whose fences are complete, and returns their bytes. Never
    /// waits.
    ///
    /// Makes `cuMemUnmap` and `cuMemRelease` for each extent, and the calls that poll the fences.
    ///
    /// # Errors
    /// The first [`CallError`] of the driver. The extents concerned stay pending free; the rest is
    /// released.
    #[doc(alias = "reclaim")]
    pub fn purge(&mut self) -> Result<u64, CallError> {
        let all = 0..self.size();
        self.purge_from(&all)
    }

    /// Purges pending frees in a range. Fails if some have incomplete fences.
    pub(crate) fn purge_in(&mut self, range: &Range<u64>) -> Result<(), MemoryError> {
        let (start, end) = (range.start, range.end);
        self.purge_from(range)
            .map_err(|cause| MemoryError::range(start, end - start, cause))?;
        let left = self.pending.meeting(range);
        let bytes: u64 = left.map(|extent| extent.end - extent.start).sum();
        if bytes > 0 {
            let range = range.clone();
            return Err(MemoryError::PendingFree { range, bytes });
        }
        Ok(())
    }

    fn purge_from(&mut self, range: &Range<u64>) -> Result<u64, CallError> {
        let mut given = 0;
        let mut outcome = Ok(());
        let round = Round::begin(self.device());
        for extent in self.pending.meeting(range).collect::<Vec<_>>() {
            match self.purge_one(extent.start, &round) {
                Ok(true) => given += extent.end - extent.start,
                Ok(false) => {}
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome.map(|()| given)
    }

    fn purge_one(&mut self, offset: u64, round: &Round) -> Result<bool, CallError> {
        let Some(fence) = self.withdrawn.get_mut(&offset) else {
            return Ok(false);
        };
        fence.poll_in(round)?;
        let Some(mut completed) = fence.completed(&mut self.space) else {
            return Ok(false);
        };
        let freed = completed.withdraw(offset)?;
        self.withdrawn.remove(&offset);
        self.pending.remove(offset);
        freed
            .into_iter()
            .for_each(|unmapped| self.release_unmapped(unmapped));
        Ok(true)
    }

    /// Waits for the devices with access (`cuCtxSynchronize`), then [`purge`](Self::purge)s all
    /// pending frees.
    ///
    /// # Errors
    /// Those of [`Region::purge`].
    #[doc(alias = "reclaim_blocking")]
    pub fn purge_blocking(&mut self) -> Result<u64, CallError> {
        if self.withdrawn.values().any(|fence| !fence.is_complete()) {
            Unused::after_drain(self.space.users())?;
        }
        self.purge()
    }

    fn withdraw(
        &mut self,
        range: Range<u64>,
        fence: impl FnOnce(&Self) -> Result<Fence, ArgumentError>,
    ) -> Result<(), MemoryError> {
        self.check_committed(&range)?;
        self.unregistered(&range)?;
        // Until the last registration has ended, another thread may record a stream through it.
        let fence = fence(self)?;
        self.committed.remove(range.clone());
        let extents = self.space.extents_in(range.start, range.end);
        for extent in extents {
            // Parts of an extent may have been withdrawn after different streams: all must be
            // complete.
            self.withdrawn
                .entry(extent.offset)
                .or_insert_with(Fence::complete)
                .merge(fence.clone());
        }
        self.note_pending(&range);
        Ok(())
    }

    /// Withdraws all committed memory after the work of some streams and the work that the region
    /// has noted, because its owner is being dropped. If other devices have access, withdraws
    /// nothing: their streams are not named, and dropping the region waits for all work of all
    /// devices.
    pub(crate) fn end_after(&mut self, streams: &[Stream]) {
        if self.space.users().nth(1).is_some() {
            return;
        }
        // Memory that stays in the region has no registration any more that could record a stream.
        self.leave_registered();
        let Ok(fence) = self.fence_after(streams) else {
            return;
        };
        let all = 0..self.size();
        for extent in self.space.extents() {
            if self.committed.overlaps(&(extent.offset..extent.end())) {
                self.withdrawn
                    .entry(extent.offset)
                    .or_insert_with(Fence::complete)
                    .merge(fence.clone());
            }
        }
        self.committed.remove(all.clone());
        self.note_pending(&all);
    }

    /// Unmaps everything: withdrawn memory behind its own fence, the rest behind all work of the
    /// devices with access. Memory without proof of completion stays, and the first reason is the
    /// error.
    pub(super) fn empty(&mut self) -> Result<(), CallError> {
        self.device().own_process()?;
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
}

impl Drop for Region {
    fn drop(&mut self) {
        self.leave_registered();
        let held = self.held();
        if let Err(error) = self.empty() {
            self.device().report_drop("region", held, error);
        }
    }
}
