//! Commits: the extents are planned first, then all created, and only then mapped.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use super::Region;
use super::family::Family;
use super::layout::Layout;
use super::supply::Planned;
use crate::error::{ArgumentError, BlockError, MemoryError};
use crate::extents::{Extent, Failure, Fence, PlaceError, Unmapped, beside};
use crate::ledger::InLine;
use crate::own::{Place, Stream, reachable};

/// An attempt to commit ranges. Its end, also by a panic of the driver, leaves what is not committed
/// pending free.
struct Attempt<'a> {
    region: &'a mut Region,
    ranges: &'a [Range<u64>],
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.region.note_pending_in(self.ranges);
    }
}

impl Region {
    /// Commits memory to a range, placed by the [layout](super::RegionBuilder::layout). Parts that
    /// are committed already keep their memory and contents.
    ///
    /// Withdrawn memory that is still mapped is revived with its contents, even if it was
    /// [exported](Self::export). An extent that a [fork](Self::fork) or an [alias](Self::alias)
    /// shows too, or that may only be read, is purged instead, if its fence is complete, and new
    /// memory takes its place.
    ///
    /// Makes `cuMemCreate`, `cuMemMap` and `cuMemSetAccess` for each extent. All or nothing. Zeros
    /// under the range ([`back_with_zeros`](Self::back_with_zeros)) are unmapped if all work of the
    /// devices with access is complete.
    ///
    /// # Errors
    /// [`MemoryError`]: for a range of other than whole granules
    /// [`MisalignedRange`](crate::error::ArgumentError::MisalignedRange), which names the granules
    /// that [`commit_covering`](Self::commit_covering) takes; without memory
    /// [`OutOfMemory`](MemoryError::OutOfMemory) with the figures. Nothing has changed, except that
    /// withdrawn memory may have been released, and that [`Region::quarantined`] may have grown if a
    /// roll-back failed as well.
    #[doc(alias = "allocate")]
    pub fn commit(&mut self, range: Range<u64>) -> Result<(), MemoryError> {
        let fence = self.fence_of_all();
        self.commit_with(range, None, fence)
    }

    /// Commits memory to all granules that a range of bytes touches, as [`commit`](Self::commit)
    /// does. Returns their range: that which the error of a commit of the bytes themselves names.
    ///
    /// # Errors
    /// Those of [`Self::commit`].
    #[doc(alias = "allocate")]
    pub fn commit_covering(&mut self, range: Range<u64>) -> Result<Range<u64>, MemoryError> {
        let covering = self.covering(&range)?;
        self.commit(covering.clone())?;
        Ok(covering)
    }

    /// Commits memory to a range at a given place: another device that the region's device can
    /// reach, or a host NUMA node. Otherwise like [`commit`](Self::commit).
    ///
    /// # Errors
    /// Those of [`Self::commit`], and when the region's device cannot reach the place.
    pub fn commit_at(&mut self, range: Range<u64>, place: &Place) -> Result<(), MemoryError> {
        self.supply.check_no_tenant("committing at a given place")?;
        for user in self.space.users() {
            reachable(user, place)?;
        }
        let fence = self.fence_of_all();
        self.commit_with(range, Some(place), fence)
    }

    /// Commits memory to a range, given that only `streams` read the zeros that must be unmapped.
    /// Otherwise like [`commit`](Self::commit).
    ///
    /// # Errors
    /// Those of [`Self::commit`], and when a stream's device has no access.
    pub fn commit_after(
        &mut self,
        range: Range<u64>,
        streams: &[Stream],
    ) -> Result<(), MemoryError> {
        let fence = self.fence_of(streams)?;
        self.commit_with(range, None, fence)
    }

    /// Commits memory to a range behind the work of a fence, which covers all that may read the
    /// zeros that must be unmapped.
    pub(crate) fn commit_behind(
        &mut self,
        range: Range<u64>,
        fence: Fence,
    ) -> Result<(), MemoryError> {
        self.commit_with(range, None, fence)
    }

    fn commit_with(
        &mut self,
        range: Range<u64>,
        place: Option<&Place>,
        fence: Fence,
    ) -> Result<(), MemoryError> {
        self.check(&range)?;
        self.check_not_stuck(&range)?;
        if let Some(family) = self.supply.family() {
            let family = Arc::clone(family);
            return self.commit_in(&family, &range);
        }
        let attempt = Attempt {
            region: self,
            ranges: std::slice::from_ref(&range),
        };
        attempt.region.create_for(&range, place, fence)?;
        attempt.region.committed.insert(range.clone());
        Ok(())
    }

    /// Creates and maps the memory that a range lacks.
    fn create_for(
        &mut self,
        range: &Range<u64>,
        place: Option<&Place>,
        fence: Fence,
    ) -> Result<(), MemoryError> {
        self.clear_for(range)?;
        let planned = self.plan(range, place);
        if planned.is_empty() {
            return Ok(());
        }
        let backed = self.zeros.meeting(range);
        let granule = self.device().granule();
        let beside = beside(&backed, range);
        let kept: u64 = beside
            .iter()
            .map(|hole| self.zeros.needed(granule, hole))
            .sum();
        self.check_mapping_limit(planned.len() as u64 + kept, backed.len() as u64)?;
        // Polled before anything is created, so that a refusal costs nothing.
        let proof = self.zeros_are_unread(range, fence)?;
        let physicals = self.create(&planned)?;
        let taken = self.zeros.take(&self.space, range, proof)?;
        let settled = Failure::of(|| {
            let placed = self.place(physicals)?;
            let put = self.zeros.put(&self.space, &beside);
            put.inspect_err(|_| self.undo(&placed))
        });
        settled.map_err(|failure| {
            self.restore_zeros(&taken);
            failure.into_error()
        })
    }

    /// Commits memory of the region's tenant to a range. The whole attempt is repeated while memory
    /// is short: what it revived is withdrawn again in between.
    fn commit_in(&mut self, family: &Family, range: &Range<u64>) -> Result<(), MemoryError> {
        let needed = self.holes(range).into_iter();
        let bytes = needed.map(|hole| hole.end - hole.start).sum();
        let region = RefCell::new(self);
        let ranges = std::slice::from_ref(range);
        let attempt = |place| region.borrow_mut().attempt(family, ranges, place);
        Ok(family.request(bytes, attempt)?)
    }

    /// Makes one attempt to commit ranges of a region in a tenant, all or none. Waits for no memory
    /// and calls no hook, so the caller may hold a lock: it repeats the attempt without the lock in
    /// between.
    pub(crate) fn attempt_all(
        &mut self,
        ranges: &[Range<u64>],
        place: Option<InLine>,
    ) -> Result<(), BlockError> {
        for range in ranges {
            self.check(range)?;
            self.check_not_stuck(range)?;
        }
        let Some(family) = self.supply.family().cloned() else {
            return Err(ArgumentError::Zero("tenants of the region").into());
        };
        self.attempt(&family, ranges, place)
    }

    fn attempt(
        &mut self,
        family: &Family,
        ranges: &[Range<u64>],
        place: Option<InLine>,
    ) -> Result<(), BlockError> {
        let attempt = Attempt {
            region: self,
            ranges,
        };
        attempt.region.obtain(family, ranges, place)?;
        for range in ranges {
            attempt.region.committed.insert(range.clone());
        }
        Ok(())
    }

    /// Takes withdrawn memory of ranges back, and gets memory for the rest.
    fn obtain(
        &mut self,
        family: &Family,
        ranges: &[Range<u64>],
        place: Option<InLine>,
    ) -> Result<(), BlockError> {
        family.may_grow()?;
        let mut planned: Vec<(u64, u64)> = Vec::new();
        let is_unclean = self.take_back(family, ranges);
        for range in ranges {
            // Memory that could not be zeroed.
            if is_unclean && self.withdrawn_bytes(range) > 0 {
                self.purge_in(range)?;
            }
            self.clear_for(range)?;
            let new = self.plan(range, None).into_iter();
            planned.extend(new.map(|it| (it.offset, it.size)));
        }
        if planned.is_empty() {
            return Ok(());
        }
        self.check_mapping_limit(planned.len() as u64, 0)?;
        self.commit_lent(family, &planned, place)
    }

    /// Ensures that a commit of a range revives only the region's own memory: purges withdrawn
    /// extents that others share, and refuses if part of such an extent is still committed.
    fn clear_for(&mut self, range: &Range<u64>) -> Result<(), MemoryError> {
        let revived = |extent: &Extent| {
            let part = extent.offset.max(range.start)..extent.end().min(range.end);
            !self.committed.covers(&part) && !self.space.is_own(extent.offset)
        };
        let extents = self.space.extents_in(range.start, range.end);
        let foreign: Vec<Extent> = extents.filter(revived).collect();
        if let Some(cut) = foreign
            .iter()
            .find(|extent| self.committed.overlaps(&(extent.offset..extent.end())))
        {
            return Err(MemoryError::ReadOnly(cut.offset..cut.end()));
        }
        foreign.iter().try_for_each(|extent| {
            let range = extent.offset..extent.end();
            self.note_pending(&range);
            self.purge_in(&range)
        })
    }

    pub(super) fn plan(&self, range: &Range<u64>, place: Option<&Place>) -> Vec<Planned> {
        let chosen = place.map(|place| Layout::on(place.clone()));
        let layout = chosen.as_ref().unwrap_or(&self.layout);
        let mut planned = vec![];
        for gap in self.holes(range) {
            for (part, place) in layout.parts(gap) {
                let extents = self.extents_for(range, part);
                planned.extend(extents.map(|(offset, size)| Planned {
                    offset,
                    size,
                    place: place.clone(),
                }));
            }
        }
        planned
    }

    /// Maps physicals and returns their offsets: all of them or none.
    fn place(&mut self, physicals: Vec<(u64, Unmapped)>) -> Result<Vec<u64>, MemoryError> {
        let mut placed = Vec::with_capacity(physicals.len());
        for (offset, unmapped) in physicals {
            if let Err(PlaceError { error, .. }) = self.space.place(offset, vec![unmapped]) {
                self.undo(&placed);
                return Err(error);
            }
            placed.push(offset);
        }
        Ok(placed)
    }

    /// Unmaps the extents that a failed commit had placed.
    fn undo(&mut self, placed: &[u64]) {
        for &offset in placed.iter().rev() {
            if let Err(error) = self.space.never_used(offset).withdraw(offset) {
                log!(error, %error, offset, "a roll-back could not unmap: quarantined");
                self.space.quarantine(offset);
            }
        }
    }
}
