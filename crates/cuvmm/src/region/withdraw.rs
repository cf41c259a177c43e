//! Taking memory out of a region: through limbo, where it stays mapped until the work that may use
//! it has passed.

use std::ops::Range;

use super::Region;
use super::fence::{Fence, Poll};
use super::space::Extent;
use crate::device::Device;
use crate::error::{CallError, CommitError, DecommitError};
use crate::own::Stream;
use rangemap::RangeSet;

impl Region {
    /// Withdraws a range after all work of the devices that have access: extents with nothing committed left in
    /// them go to limbo. Makes no driver call and never waits.
    ///
    /// Reclaiming them later asks the driver to mark all work of the context, which breaks a
    /// capture that is running on it; [`decommit_after`](Self::decommit_after) does not.
    ///
    /// # Errors
    /// [`DecommitError`]; nothing has changed.
    pub fn decommit(&mut self, range: Range<u64>) -> Result<(), DecommitError> {
        self.withdraw(range, Self::fence_of_all)
    }

    /// Withdraws a range after the work of the streams that used it. With no stream named,
    /// nothing used it.
    ///
    /// # Errors
    /// [`DecommitError`]; nothing has changed.
    pub fn decommit_after(
        &mut self,
        range: Range<u64>,
        streams: &[Stream],
    ) -> Result<(), DecommitError> {
        self.fence_of(streams).ok_or(DecommitError::WrongDevice)?;
        self.withdraw(range, |_| Fence::streams(streams.to_vec()))
    }

    /// Gives extents in limbo back to the driver, as far as their fences have passed, and returns
    /// their bytes. Never waits.
    ///
    /// Per extent `cuMemUnmap` and `cuMemRelease`, and what asking the fences takes.
    ///
    /// # Errors
    /// [`CallError`] from the driver; what was given back until then stays given back.
    pub fn reclaim(&mut self) -> Result<u64, CallError> {
        let all = 0..self.size();
        self.reclaim_from(&all)
    }

    /// Gives back what of a range is in limbo and has passed. An error if some has not.
    pub(crate) fn reclaim_in(&mut self, range: &Range<u64>) -> Result<(), CommitError> {
        let (start, end) = (range.start, range.end);
        self.reclaim_from(range)
            .map_err(|cause| CommitError::Call {
                offset: start,
                size: end - start,
                cause,
            })?;
        let bytes: u64 = self
            .in_limbo()
            .filter(|extent| extent.offset < end && start < extent.end())
            .map(|extent| extent.size)
            .sum();
        if bytes > 0 {
            return Err(CommitError::InLimbo { start, end, bytes });
        }
        Ok(())
    }

    fn reclaim_from(&mut self, range: &Range<u64>) -> Result<u64, CallError> {
        let mut given = 0;
        let limbo = self.in_limbo();
        let here = limbo.filter(|extent| extent.offset < range.end && range.start < extent.end());
        for extent in here.collect::<Vec<_>>() {
            let Some(fence) = self.withdrawn.get_mut(&extent.offset) else {
                continue;
            };
            if fence.poll()? == Poll::Passed {
                drop(self.space.withdraw(extent.offset)?);
                self.withdrawn.remove(&extent.offset);
                given += extent.size;
            }
        }
        Ok(given)
    }

    /// Waits for the devices that have access (`cuCtxSynchronize`), then [`reclaim`](Self::reclaim)s all of limbo.
    ///
    /// # Errors
    /// As [`Region::reclaim`].
    pub fn reclaim_blocking(&mut self) -> Result<u64, CallError> {
        if self.withdrawn.values().any(|fence| !fence.is_passed()) {
            self.space.users().try_for_each(Device::synchronize)?;
            self.withdrawn.values_mut().for_each(Fence::synchronised);
        }
        self.reclaim()
    }

    fn withdraw(
        &mut self,
        range: Range<u64>,
        fence: impl Fn(&Self) -> Fence,
    ) -> Result<(), DecommitError> {
        self.check(&range)?;
        if !self.is_committed(range.clone()) {
            return Err(DecommitError::NotCommitted {
                start: range.start,
                end: range.end,
            });
        }
        self.unregistered(&range)?;
        self.committed.remove(range.clone());
        let extents = self.space.extents_in(range.start, range.end);
        for extent in extents.collect::<Vec<_>>() {
            let fence = fence(self);
            // Parts of an extent may have been withdrawn after other streams: all must pass.
            self.withdrawn
                .entry(extent.offset)
                .or_insert_with(Fence::passed)
                .merge(fence);
        }
        Ok(())
    }

    /// Extents that are mapped with nothing in them committed.
    pub(super) fn in_limbo(&self) -> impl Iterator<Item = Extent> + '_ {
        self.space
            .extents()
            .filter(|extent| !self.committed.overlaps(&(extent.offset..extent.end())))
    }

    /// Unmaps everything after all work of the device.
    pub(super) fn empty(&mut self) -> Result<(), CallError> {
        if let Some(forked) = self.device().forked() {
            return Err(forked);
        }
        if self.mappings() > 0 {
            self.drain()?;
        }
        drop(self.space.retry_stuck());
        self.committed = RangeSet::new();
        self.withdrawn.clear();
        let offsets: Vec<u64> = self.space.extents().map(|extent| extent.offset).collect();
        for offset in offsets {
            self.space.withdraw(offset)?;
        }
        self.zeros.clear()
    }
}
