//! Addresses that never move, with memory that comes and goes under them.
//!
//! A [`Region`] is a reservation with [`commit`](Region::commit) and
//! [`decommit`](Region::decommit). A commit covers its range by few, large extents; a decommit
//! withdraws whole extents through limbo, where they wait, still mapped, until the GPU work that
//! may use them has passed ([`reclaim`](Region::reclaim)). Committing again what is in limbo
//! revives it without a driver call.
//!
//! No budget, no sharing between users: that is [`pool`](crate::pool).

mod builder;
mod fence;
mod mapper;
mod space;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use cuvmm_driver::{DeviceAddress, PhysicalProps};
use rangemap::RangeSet;

use crate::device::Device;
use crate::error::{CallError, CommitError, CopyError, DecommitError, RangeError};
use crate::own::{CloseError, CloseRefusal, Physical, Stream};
use crate::size::range_within;

pub use builder::RegionBuilder;
pub(crate) use fence::{Fence, Poll};
pub use mapper::Mapper;
pub(crate) use mapper::{Bell, Chores};
pub use space::Extent;
pub(crate) use space::{Ground, Piece, PlaceError, PlaceFailure, Placed, Space};

/// The largest extent by default: 1 GiB.
pub const DEFAULT_LARGEST_EXTENT: u64 = 1 << 30;

/// A range of addresses with commit and decommit, for one owner.
///
/// Ranges are bytes, in whole granules ([`Device::granularity`]). Fresh memory reads as zero;
/// memory revived from limbo keeps what it held.
///
/// Dropping a region waits for the device if anything in it was committed or is in limbo.
pub struct Region {
    space: Space,
    props: PhysicalProps,
    largest: u64,
    committed: RangeSet<u64>,
    /// By the offset of an extent: what must pass before it may go. It is in limbo when nothing
    /// in it is committed any more.
    withdrawn: BTreeMap<u64, Fence>,
}

impl Region {
    fn new(space: Space, props: PhysicalProps, largest: u64) -> Self {
        Self {
            space,
            props,
            largest,
            committed: RangeSet::new(),
            withdrawn: BTreeMap::new(),
        }
    }

    /// The first address; fixed for life.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.space.address()
    }

    /// The size in bytes, committed or not.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.space.size()
    }

    /// The device it was reserved on.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.space.device()
    }

    /// Bytes that are committed.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.committed
            .iter()
            .map(|range| range.end - range.start)
            .sum()
    }

    /// Bytes of physical memory held: committed, in limbo, and kept because an extent is partly
    /// in use.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.space.bytes() + self.space.stuck_bytes()
    }

    /// Bytes in limbo.
    #[must_use]
    pub fn limbo(&self) -> u64 {
        self.in_limbo().map(|extent| extent.size).sum()
    }

    /// Bytes that a failed roll-back left mapped; tried again when the region is closed.
    #[must_use]
    pub fn quarantined(&self) -> u64 {
        self.space.stuck_bytes()
    }

    /// Whether the whole range is committed. An empty range is.
    #[must_use]
    pub fn is_committed(&self, range: Range<u64>) -> bool {
        range.is_empty() || self.committed.gaps(&range).next().is_none()
    }

    /// Every extent that is mapped, in order: what whoever registers memory must register.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.space.extents().collect()
    }

    /// Puts memory behind a range; parts that have it already keep it and their contents.
    ///
    /// Per extent: `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`. All or nothing.
    ///
    /// # Errors
    /// [`CommitError`]; nothing has changed, except what [`Region::quarantined`] counts if a
    /// roll-back failed as well.
    pub fn commit(&mut self, range: Range<u64>) -> Result<(), CommitError> {
        self.check(&range)?;
        let stuck = self.space.stuck_in(range.start, range.end);
        if stuck > 0 {
            return Err(CommitError::Quarantined {
                start: range.start,
                end: range.end,
                bytes: stuck,
            });
        }
        let mut placed: Vec<u64> = vec![];
        for gap in self.gaps(&range) {
            if let Err(error) = self.fill_gap(&gap, &mut placed) {
                self.undo(&placed);
                return Err(error);
            }
        }
        self.committed.insert(range);
        Ok(())
    }

    /// Withdraws a range after all work of the device: extents with nothing committed left in
    /// them go to limbo. Makes no driver call and never waits.
    ///
    /// Reclaiming them later asks the driver to mark all work of the context, which breaks a
    /// capture that is running on it; [`decommit_after`](Self::decommit_after) does not.
    ///
    /// # Errors
    /// [`DecommitError`]; nothing has changed.
    pub fn decommit(&mut self, range: Range<u64>) -> Result<(), DecommitError> {
        self.withdraw(range, |device| Fence::device(device.clone()))
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
        if streams
            .iter()
            .any(|stream| !stream.device().is_same(self.device()))
        {
            return Err(DecommitError::WrongDevice);
        }
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
        let mut given = 0;
        for extent in self.in_limbo().collect::<Vec<_>>() {
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

    /// Waits for the device (`cuCtxSynchronize`), then [`reclaim`](Self::reclaim)s all of limbo.
    ///
    /// # Errors
    /// As [`Region::reclaim`].
    pub fn reclaim_blocking(&mut self) -> Result<u64, CallError> {
        if self.withdrawn.values().any(|fence| !fence.is_passed()) {
            self.device().synchronize()?;
            self.withdrawn.values_mut().for_each(Fence::synchronised);
        }
        self.reclaim()
    }

    /// Writes committed bytes behind what `stream` has queued, and returns when they are there.
    ///
    /// # Errors
    /// [`CopyError`] when the range is not committed or the stream is another device's.
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<(), CopyError> {
        self.check_copy(offset, bytes.len() as u64)?;
        self.space.write(stream, offset, bytes)
    }

    /// Reads committed bytes behind what `stream` has queued.
    ///
    /// # Errors
    /// [`CopyError`] when the range is not committed or the stream is another device's.
    pub fn read(&self, stream: &Stream, offset: u64, bytes: &mut [u8]) -> Result<(), CopyError> {
        self.check_copy(offset, bytes.len() as u64)?;
        self.space.read(stream, offset, bytes)
    }

    /// Waits for the device and gives everything back: extents, memory, addresses. On failure
    /// the region is handed back with what could not be given.
    ///
    /// # Errors
    /// [`CloseError`] with the region in it.
    #[expect(clippy::result_large_err, reason = "the region itself is handed back")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        match self.empty() {
            Ok(()) => Ok(()),
            Err(cause) => Err(CloseError {
                owner: self,
                reason: CloseRefusal::Call(cause),
            }),
        }
    }

    fn check(&self, range: &Range<u64>) -> Result<(), RangeError> {
        let Range { start, end } = *range;
        let granule = self.device().granule();
        if start >= end {
            return Err(RangeError::Empty { start, end });
        }
        if !granule.divides(start) || !granule.divides(end) {
            return Err(RangeError::Misaligned {
                start,
                end,
                granularity: granule.bytes(),
            });
        }
        if end > self.size() {
            return Err(RangeError::OutOfRange {
                start,
                end,
                bytes: self.size(),
            });
        }
        Ok(())
    }

    fn check_copy(&self, offset: u64, size: u64) -> Result<(), CopyError> {
        if size == 0 && offset <= self.size() {
            return Ok(());
        }
        match range_within(offset, size, self.size()) {
            None => Err(CopyError::OutOfRange {
                offset,
                size,
                bytes: self.size(),
            }),
            Some(range) if !self.is_committed(range.clone()) => {
                Err(CopyError::NotCommitted { offset, size })
            }
            Some(_) => Ok(()),
        }
    }

    /// The parts of a range that have no extent.
    fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = vec![];
        let mut at = range.start;
        for extent in self.space.extents_in(range.start, range.end) {
            if extent.offset > at {
                gaps.push(at..extent.offset);
            }
            at = extent.offset + extent.size;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// Creates and places extents for a gap, noting each that stands.
    fn fill_gap(&mut self, gap: &Range<u64>, placed: &mut Vec<u64>) -> Result<(), CommitError> {
        let granule = self.device().granule();
        let mut at = gap.start;
        for size in granule.cover(gap.end - gap.start, self.largest) {
            let physical = Physical::builder(self.space.device(), size)
                .with_props(self.props)
                .create()?;
            let piece = Piece {
                physical,
                stain: None,
                fresh: true,
            };
            self.space
                .place(at, vec![piece])
                .map_err(|failed: PlaceError| failed.error)?;
            placed.push(at);
            at += size;
        }
        Ok(())
    }

    /// Takes back what a commit that failed had placed.
    fn undo(&mut self, placed: &[u64]) {
        for &offset in placed.iter().rev() {
            if let Err(error) = self.space.withdraw(offset) {
                tracing::error!(%error, offset, "a roll-back could not unmap: quarantined");
                self.space.quarantine(offset);
            }
        }
    }

    fn withdraw(
        &mut self,
        range: Range<u64>,
        fence: impl Fn(&Device) -> Fence,
    ) -> Result<(), DecommitError> {
        self.check(&range)?;
        if !self.is_committed(range.clone()) {
            return Err(DecommitError::NotCommitted {
                start: range.start,
                end: range.end,
            });
        }
        self.committed.remove(range.clone());
        for extent in self.space.extents_in(range.start, range.end) {
            let fence = fence(self.space.device());
            // Parts of an extent may have been withdrawn after other streams: all must pass.
            self.withdrawn
                .entry(extent.offset)
                .or_insert_with(Fence::passed)
                .merge(fence);
        }
        Ok(())
    }

    /// Extents that are mapped with nothing in them committed.
    fn in_limbo(&self) -> impl Iterator<Item = Extent> + '_ {
        self.space.extents().filter(|extent| {
            !self
                .committed
                .overlaps(&(extent.offset..extent.offset + extent.size))
        })
    }

    /// Unmaps everything after all work of the device.
    fn empty(&mut self) -> Result<(), CallError> {
        if let Some(forked) = self.device().forked() {
            return Err(forked);
        }
        if self.held() > 0 {
            self.device().drain()?;
        }
        drop(self.space.retry_stuck());
        self.committed = RangeSet::new();
        self.withdrawn.clear();
        let offsets: Vec<u64> = self.space.extents().map(|extent| extent.offset).collect();
        for offset in offsets {
            self.space.withdraw(offset)?;
        }
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let held = self.held();
        if let Err(error) = self.empty() {
            self.device().report_drop("region", held, error);
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("address", &self.address())
            .field("size", &self.size())
            .field("committed", &self.committed())
            .field("limbo", &self.limbo())
            .finish_non_exhaustive()
    }
}
