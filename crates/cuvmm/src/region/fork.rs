//! Forks of a region: a second region over the same memory, which both can only read until one of
//! them unshares it.
//!
//! A GPU has no write fault that a library could catch: a kernel that writes to read-only memory
//! loses the context. So the owner calls `unshare` before it writes, and the copy is made then.

use std::ops::Range;

use super::Region;
use crate::error::{CallError, MemoryError};
use crate::extents::{Extent, Failure, Fence, Poll, Unmapped, Unused};
use crate::own::{Access, Stream};

impl Region {
    /// Creates a region of the same shape that shows the same bytes at its own addresses. Neither
    /// region can write them before it has [unshared](Self::unshare) them.
    ///
    /// Maps every extent again (`cuMemMap`, `cuMemSetAccess`) and makes this region's extents
    /// read-only (`cuMemSetAccess`); copies no bytes. Devices have the same access to the fork as
    /// to this region. Never waits: `streams` names the streams that may still write to this
    /// region, besides the region's own [fills](Self::fill) and [copies](Self::copy_from).
    ///
    /// # Errors
    /// [`MemoryError`] while that work is running or queued or part of the region is
    /// [registered](Self::register), when the region maps memory twice or has
    /// [exported](Self::export) some, or the driver refuses. Nothing has changed.
    pub fn fork(&mut self, streams: &[Stream]) -> Result<Self, MemoryError> {
        let fence = self.fence_of(streams)?;
        self.fork_behind(fence)
    }

    /// Forks the region if the work of a fence, and that which the region has noted, is complete.
    pub(crate) fn fork_behind(&mut self, fence: Fence) -> Result<Self, MemoryError> {
        self.check_unaliased()?;
        self.all_unregistered()?;
        let mut fence = self.and_noted(fence);
        let extents: Vec<Extent> = self
            .space
            .extents()
            .filter(|extent| self.committed.overlaps(&(extent.offset..extent.end())))
            .collect();
        self.check_unexported(&extents)?;
        // Queued work may still write to withdrawn parts.
        let withdrawn = extents
            .iter()
            .map(|extent| match self.withdrawn.get_mut(&extent.offset) {
                Some(withdrawn) => withdrawn.poll(),
                None => Ok(Poll::Complete),
            })
            .collect::<Result<Vec<_>, _>>()?;
        if fence.poll()? != Poll::Complete || withdrawn.iter().any(|poll| *poll != Poll::Complete) {
            let device = self.device().location();
            return Err(MemoryError::InUse(device));
        }
        let family = self.supply.family().cloned();
        let (charged, mut mapped) = (extents.len() as u64, 0);
        if let Some(family) = &family {
            if let Err(error) = family.purge_ended() {
                log!(warn, %error, "memory of a dropped fork stays mapped for now");
            }
            family.lend_mappings(charged)?;
        }
        let forked = self.empty_like().and_then(|mut fork| {
            let shown = self.show_in(&mut fork, &extents);
            mapped = fork.mappings();
            shown.map(|()| fork)
        });
        if let (Err(_), Some(family)) = (&forked, family) {
            family.give_back(Vec::new(), charged - mapped);
            if let Err(error) = family.purge_all() {
                log!(warn, %error, "memory of a failed fork stays mapped for now");
            }
        }
        let mut fork = forked?;
        fork.committed = self.committed.clone();
        Ok(fork)
    }

    /// Maps extents in a fork, which is empty, and makes them read-only here.
    fn show_in(&mut self, fork: &mut Self, extents: &[Extent]) -> Result<(), MemoryError> {
        for extent in extents {
            let Some(physical) = self.space.physical_at(extent.offset) else {
                continue;
            };
            let handle = physical.as_raw();
            fork.space
                .place_for(extent.offset, vec![Unmapped::fresh(physical)], Access::Read)
                .map_err(|failed| failed.error)?;
            // If the fork fails, no work was queued on it.
            fork.withdrawn.insert(extent.offset, Fence::complete());
            if let Some(family) = self.supply.family() {
                family.shared.add_mapping(handle);
            }
        }
        let holes = self.zeros.meeting(&(0..self.size()));
        fork.zeros.put(&fork.space, &holes)?;
        let mut capped = vec![];
        for extent in extents {
            let before = self.space.most_at(extent.offset);
            if let Err(error) = self.space.cap(extent.offset, Access::Read) {
                for (offset, most) in capped {
                    if let Err(error) = self.space.cap(offset, most) {
                        log!(error, %error, offset, "a region stays read-only");
                    }
                }
                return Err(error);
            }
            capped.push((extent.offset, before));
        }
        Ok(())
    }

    /// Waits for the work that may use extents: the readers of the committed parts, and the fences
    /// of the withdrawn parts.
    fn wait_for(&mut self, extents: &[Extent], mut readers: Fence) -> Result<Unused, CallError> {
        if extents.is_empty() {
            return Ok(Unused::never_used());
        }
        for extent in extents {
            if let Some(withdrawn) = self.withdrawn.get_mut(&extent.offset) {
                withdrawn.wait()?;
            }
        }
        readers.wait()
    }

    /// Makes a committed range writable: copies extents that another owner has too, and lifts the
    /// cap of extents that only this region has. An extent that the range cuts is included whole.
    /// Returns the bytes copied.
    ///
    /// Waits for `streams`, which may be reading the range, and for the region's own
    /// [copies](Self::copy_from), and copies on `stream`. Makes `cuMemCreate`, a copy, and two
    /// unmappings and mappings for each copied extent. Copies all or nothing. The host's processors
    /// have no access to the copies before [`host_pointer`](Self::host_pointer) gives it.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, an extent that would be copied is
    /// [registered](Self::register), there is no memory for the copies, or the driver refuses.
    pub fn unshare(
        &mut self,
        range: Range<u64>,
        stream: &Stream,
        streams: &[Stream],
    ) -> Result<u64, MemoryError> {
        let fence = self.fence_of(streams)?;
        self.unshare_behind(range, stream, fence)
    }

    /// Unshares a range behind the work of a fence, and that which the region has noted.
    pub(crate) fn unshare_behind(
        &mut self,
        range: Range<u64>,
        stream: &Stream,
        fence: Fence,
    ) -> Result<u64, MemoryError> {
        self.check(&range)?;
        let (start, end) = (range.start, range.end);
        stream.check_on(self.device())?;
        self.check_committed(&range)?;
        if let Some(family) = self.supply.family()
            && self.is_read_only(range.clone())
        {
            // What a dropped fork showed is copied only while work uses it there.
            family.purge_all()?;
        }
        let copied = |extent: &Extent| {
            self.space.most_at(extent.offset) != Access::ReadWrite
                && self.space.is_shared(extent.offset)
        };
        for extent in self.space.extents_in(start, end).filter(copied) {
            self.unregistered(&(extent.offset..extent.end()))?;
        }
        // Until the last registration has ended, another thread may record a stream through it.
        let readers = self.and_noted(fence);
        let mut alone = vec![];
        let mut copied = vec![];
        for extent in self.space.extents_in(start, end) {
            if self.space.most_at(extent.offset) == Access::ReadWrite {
                continue;
            }
            match self.space.is_shared(extent.offset) {
                true => copied.push(extent),
                false => alone.push(extent.offset),
            }
        }
        let new = self.memory_for_copies(&copied)?;
        let bytes = copied.iter().map(|extent| extent.size).sum();
        let proof = Failure::of(|| {
            let mut alone = alone.into_iter();
            alone.try_for_each(|offset| self.space.cap(offset, Access::ReadWrite))?;
            Ok(self.wait_for(&copied, readers)?)
        });
        match proof {
            Ok(_) if bytes == 0 => {}
            Ok(proof) => self.replace(new, stream, proof)?,
            Err(failure) => {
                self.give_copies_back(new);
                return Err(failure.into_error());
            }
        }
        Ok(bytes)
    }

    /// Returns the bytes of memory that another region or mapping holds too.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.space
            .extents()
            .filter(|extent| self.space.is_shared(extent.offset))
            .map(|extent| extent.size)
            .sum()
    }
}
