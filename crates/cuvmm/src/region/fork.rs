//! A second region over the same memory, which both can only read until one of them asks for bytes
//! of its own.
//!
//! A GPU has no write fault that a library could catch: a kernel that writes to what is shared loses
//! the context. So whoever wants to write says so first, and the copy is made then.

use std::ops::Range;

use super::Region;
use super::fence::{Fence, Poll, Unused};
use super::place::Unmapped;
use super::space::Extent;
use crate::error::{CallError, MemoryError};
use crate::own::{Access, Stream};

impl Region {
    /// A region of the same shape that shows the same bytes at addresses of its own. Neither can
    /// write them any more before it has [unshared](Self::unshare) them.
    ///
    /// Maps every extent again (`cuMemMap`, `cuMemSetAccess`) and makes this one's read-only
    /// (`cuMemSetAccess`): no byte is copied. Devices that were let in have the same access to the
    /// new region. Never waits: `streams` are those that may still write here.
    ///
    /// # Errors
    /// [`MemoryError`] while work of those streams is running or queued or part of the region is
    /// [registered](Self::register), when the region shows memory twice or has
    /// [exported](Self::export) some, or the driver refuses. Nothing has changed.
    pub fn fork(&mut self, streams: &[Stream]) -> Result<Self, MemoryError> {
        self.check_unaliased()?;
        self.all_unregistered()?;
        let mut fence = self.fence_of(streams)?;
        let extents: Vec<Extent> = self
            .space
            .extents()
            .filter(|extent| self.committed.overlaps(&(extent.offset..extent.end())))
            .collect();
        self.check_unexported(&extents)?;
        // Parts that were withdrawn may be written still.
        let withdrawn = extents
            .iter()
            .map(|extent| match self.withdrawn.get_mut(&extent.offset) {
                Some(withdrawn) => withdrawn.poll(),
                None => Ok(Poll::Complete),
            })
            .collect::<Result<Vec<_>, _>>()?;
        if fence.poll()? != Poll::Complete || withdrawn.iter().any(|poll| *poll != Poll::Complete) {
            let device = self.device().location();
            return Err(MemoryError::InUse { device });
        }
        let mut fork = self.empty_twin()?;
        for extent in &extents {
            let Some(physical) = self.space.physical_at(extent.offset) else {
                continue;
            };
            fork.space
                .place_for(extent.offset, vec![Unmapped::fresh(physical)], Access::Read)
                .map_err(|failed| failed.error)?;
            // If the fork fails, nothing was queued on it.
            fork.withdrawn.insert(extent.offset, Fence::complete());
        }
        let holes = self.zeros.meeting(&(0..self.size()));
        fork.zeros.put(&mut fork.space, &holes)?;
        let mut capped = vec![];
        for extent in &extents {
            let before = self.space.most_at(extent.offset);
            if let Err(error) = self.space.cap(extent.offset, Access::Read) {
                for (offset, most) in capped {
                    if let Err(error) = self.space.cap(offset, most) {
                        tracing::error!(%error, offset, "a region stays read-only");
                    }
                }
                return Err(error);
            }
            capped.push((extent.offset, before));
        }
        fork.committed = self.committed.clone();
        Ok(fork)
    }

    /// Waits for the work that may use extents: that of the streams that read what is committed, and
    /// what the withdrawn parts of the extents wait for.
    fn wait_for(
        &mut self,
        extents: &[(u64, Unmapped)],
        streams: &[Stream],
    ) -> Result<Unused, CallError> {
        for (offset, _) in extents {
            if let Some(withdrawn) = self.withdrawn.get_mut(offset) {
                withdrawn.wait()?;
            }
        }
        Fence::streams(streams.to_vec()).wait()
    }

    /// Makes a committed range this region's own, to be written: extents that somebody else has too
    /// are copied, those that nobody else has any more are opened. Extents that the range cuts count
    /// whole. Returns the bytes copied.
    ///
    /// Waits for `streams`, which are those that may be reading here, and copies on `stream`. Per
    /// copied extent `cuMemCreate`, a copy, and unmapping and mapping twice. Copies all or nothing. The
    /// host's processors have no access to copies before [`host_pointer`](Self::host_pointer) gives it.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, an extent that would be copied is
    /// [registered](Self::register), there is no memory for the copies, or the
    /// driver refuses.
    pub fn unshare(
        &mut self,
        range: Range<u64>,
        stream: &Stream,
        streams: &[Stream],
    ) -> Result<u64, MemoryError> {
        self.check(&range)?;
        let (start, end) = (range.start, range.end);
        self.check_stream(stream)?;
        self.fence_of(streams)?;
        self.check_committed(&range)?;
        let copied = |extent: &Extent| {
            self.space.most_at(extent.offset) != Access::ReadWrite
                && self.space.is_shared(extent.offset)
        };
        for extent in self.space.extents_in(start, end).filter(copied) {
            self.unregistered(&(extent.offset..extent.end()))?;
        }
        let mut alone = vec![];
        let mut new = vec![];
        for extent in self.space.extents_in(start, end) {
            if self.space.most_at(extent.offset) == Access::ReadWrite {
                continue;
            }
            if self.space.is_shared(extent.offset) {
                let place = self.space.place_of(extent.offset);
                let place = place.unwrap_or_else(|| self.device().into());
                let physical = self.physical(extent.size, &place)?;
                new.push((extent.offset, Unmapped::fresh(physical)));
            } else {
                alone.push(extent.offset);
            }
        }
        for offset in alone {
            self.space.cap(offset, Access::ReadWrite)?;
        }
        let bytes = new.iter().map(|(_, unmapped)| unmapped.size()).sum();
        if bytes > 0 {
            let proof = self.wait_for(&new, streams)?;
            self.replace(new, stream, proof)?;
        }
        Ok(bytes)
    }

    /// Bytes of memory that another region or mapping holds too.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.space
            .extents()
            .filter(|extent| self.space.is_shared(extent.offset))
            .map(|extent| extent.size)
            .sum()
    }
}
