//! Withdrawal of a region's memory as pending frees, which stay mapped until the work that may use
//! them is complete.

use std::ops::Range;

use super::Region;
use super::kept::Purged;
use crate::error::{ArgumentError, CallError, MemoryError};
use crate::extents::{Fence, Round, Unused};
use crate::own::Stream;

impl Region {
    /// Withdraws a range after all work of the devices with access: extents with no committed byte
    /// left become pending free. Makes no driver call and never waits.
    ///
    /// **When the memory returns.** [`purge`](Self::purge) gives pending frees back once the work
    /// on them is complete; only then does what `nvidia-smi` shows as used fall. Memory returns by
    /// whole extents: one with another committed byte stays whole until its last byte is
    /// decommitted, or until [`compact`](Self::compact). The range of one commit returns whole; of a
    /// part of it, [`largest_extent`](Self::largest_extent) bounds what is held back.
    ///
    /// In a tenant, the pool takes pending frees when another request needs memory, or by `purge`;
    /// what `nvidia-smi` shows falls when [`Pool::trim`](crate::Pool::trim) releases them.
    ///
    /// Purging the range later marks all work of the context in the driver, which breaks a running
    /// capture on it; [`decommit_after`](Self::decommit_after) does not.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed.
    #[doc(alias = "free")]
    pub fn decommit(&mut self, range: Range<u64>) -> Result<(), MemoryError> {
        self.withdraw(&[range], |region| Ok(region.fence_of_all()))
    }

    /// Withdraws a range after the work of the streams that used it. The region's own
    /// [fills](Self::fill) and [copies](Self::copy_from) and the streams recorded through a
    /// [`Registration`](super::Registration::record_use) need not be named. Without a named stream,
    /// no other work counts, except after a DLPack tensor over the region was dropped: then all work
    /// that was queued on the devices with access by that time.
    ///
    /// If fills and copies on more than 64 streams are incomplete, all work of their devices is
    /// waited for, as after [`decommit`](Self::decommit).
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed.
    #[doc(alias("unmap", "deallocate_for_model"))]
    #[doc(alias = "deallocate")]
    pub fn decommit_after(
        &mut self,
        range: Range<u64>,
        streams: &[Stream],
    ) -> Result<(), MemoryError> {
        self.withdraw(&[range], |region| region.fence_after(streams))
    }

    /// Withdraws ranges, which have no extent in common, after the work of a fence and that which the
    /// region has noted: all or none.
    pub(crate) fn decommit_behind(
        &mut self,
        ranges: &[Range<u64>],
        fence: Fence,
    ) -> Result<(), MemoryError> {
        self.withdraw(ranges, |region| Ok(region.and_noted(fence)))
    }

    /// Unmaps and releases pending frees whose fences are complete. Never waits. The result says how
    /// much that was, and what stays, with the reasons. In a tenant, the pool gets the memory, also
    /// that of the region's forks.
    ///
    /// Makes `cuMemUnmap` and `cuMemRelease` for each extent, and the calls that poll the fences.
    ///
    /// # Errors
    /// The first [`CallError`] of the driver. The extents concerned stay pending free; the rest is
    /// released.
    #[doc(alias = "reclaim")]
    pub fn purge(&mut self) -> Result<Purged, CallError> {
        let given_back = self.give_back_pending()?;
        let kept = self.kept();
        Ok(Purged { given_back, kept })
    }

    /// [Purges](Self::purge), and returns the bytes given back.
    pub(crate) fn give_back_pending(&mut self) -> Result<u64, CallError> {
        if let Some(family) = self.supply.family() {
            return family.purge_all();
        }
        let all = 0..self.size();
        self.purge_from(&all)
    }

    /// Purges pending frees in a range. Fails if some have incomplete fences.
    pub(crate) fn purge_in(&mut self, range: &Range<u64>) -> Result<(), MemoryError> {
        let (start, end) = (range.start, range.end);
        let purged = match self.supply.family() {
            Some(family) => family.purge(&[self.addresses(range)]),
            None => self.purge_from(range),
        };
        purged.map_err(|cause| MemoryError::range(start, end - start, cause))?;
        let left = self.pending.meeting(range);
        let left: u64 = left.map(|extent| extent.end - extent.start).sum();
        let bytes = left + self.withdrawn_bytes(range);
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
                Ok(bytes) => given += bytes,
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome.map(|()| given)
    }

    /// Unmaps a pending extent if its fence is complete. Returns the bytes given back: none of
    /// memory that an alias or a fork shows too.
    fn purge_one(&mut self, offset: u64, round: &Round) -> Result<u64, CallError> {
        let Some(fence) = self.withdrawn.get_mut(&offset) else {
            return Ok(0);
        };
        fence.poll_in(round)?;
        let (Some(proof), Some(extent)) = (fence.proof(), self.space.bounds_around(offset)) else {
            return Ok(0);
        };
        // A panic of the driver leaves no extent.
        self.pending.remove(offset);
        let fence = self.withdrawn.remove(&offset);
        let freed = self.space.proved(proof).withdraw(offset);
        let freed = freed.inspect_err(|_| {
            self.pending.insert(offset, extent.end - offset);
            self.withdrawn.extend(fence.map(|fence| (offset, fence)));
        })?;
        let Some(unmapped) = freed else {
            return Ok(0);
        };
        let given = match unmapped.physical.is_shared() {
            true => 0,
            false => unmapped.size(),
        };
        self.release_unmapped(unmapped);
        Ok(given)
    }

    /// Waits for the devices with access (`cuCtxSynchronize`), then [`purge`](Self::purge)s all
    /// pending frees.
    ///
    /// # Errors
    /// Those of [`Region::purge`].
    #[doc(alias = "reclaim_blocking")]
    pub fn purge_blocking(&mut self) -> Result<Purged, CallError> {
        let lent = !self.withdrawn_physicals().is_empty();
        if lent || self.withdrawn.values().any(|fence| !fence.is_complete()) {
            Unused::after_drain(self.space.users())?;
        }
        self.purge()
    }

    fn withdraw(
        &mut self,
        ranges: &[Range<u64>],
        fence: impl FnOnce(&Self) -> Result<Fence, ArgumentError>,
    ) -> Result<(), MemoryError> {
        for range in ranges {
            self.check_committed(range)?;
            self.unregistered(range)?;
        }
        // Until the last registration has ended, another thread may record a stream through it.
        let fence = fence(self)?;
        for range in ranges {
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
        }
        self.note_pending_in(ranges);
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
        self.withdraw_all(&fence);
    }

    /// Withdraws all committed memory behind a fence.
    pub(super) fn withdraw_all(&mut self, fence: &Fence) {
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
}
