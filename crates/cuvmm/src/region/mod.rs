//! Addresses that never move, with memory that comes and goes under them.
//!
//! A [`Region`] is a reservation with [`commit`](Region::commit) and
//! [`decommit`](Region::decommit). A commit covers its range by few, large extents; a decommit
//! withdraws whole extents as pending frees, which wait, still mapped, until the GPU work that
//! may use them has passed ([`purge`](Region::purge)). Committing again what is pending free
//! revives it without a driver call.
//!
//! The memory lies where the [`Layout`] says: on the device, in stripes over several, on a host NUMA
//! node, and [`relocate`](Region::relocate) moves it under the same addresses. Other devices are let
//! in by [`grant`](Region::grant), and holes can be backed with read-only zeros
//! ([`back_with_zeros`](Region::back_with_zeros)). Whoever registers memory elsewhere holds a
//! [`Registration`], which nothing here pulls it away from.
//!
//! No budget, no sharing between users: that is [`pool`](crate::pool).

mod access;
mod alias;
mod builder;
mod check;
mod commit;
mod committed;
mod completed;
mod copies;
mod dma_buf;
mod export;
mod fence;
mod fork;
mod grow;
mod host_access;
mod host_extents;
mod layout;
mod mapped;
mod mapper;
mod place;
mod register;
mod registration;
mod relocate;
mod replace;
#[cfg(test)]
pub(crate) mod rig;
mod space;
mod supply;
mod taken;
mod withdraw;
mod zero_backed;
mod zeros;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cuvmm_driver::{DeviceAddress, PhysicalProps};

use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};
use crate::own::{Access, Stream};
use crate::size::range_within;
pub(crate) use committed::Committed;
use committed::PendingExtents;
use register::Register;
use zeros::Zeros;

pub use builder::RegionBuilder;
pub(crate) use completed::Completed;
pub(crate) use copies::{WaitError, wait_for};
pub use dma_buf::DmaBuf;
pub(crate) use fence::{Fence, Poll, Round, Uses};
pub use host_extents::HostExtents;
pub use layout::Layout;
pub use mapper::Mapper;
pub(crate) use mapper::{MapperWork, Urgency, Waker};
pub(crate) use place::{LastWriter, PlaceError, PlaceFailure, Placed, Target, Unmapped};
pub(crate) use registration::Keeper;
pub use registration::Registration;
pub(crate) use replace::NotReplaced;
pub use space::Extent;
pub(crate) use space::{Footing, Space};
pub(crate) use taken::{NotPutBack, Stuck, TakenOut};

/// The largest extent by default: 1 GiB.
pub const DEFAULT_LARGEST_EXTENT: u64 = 1 << 30;

/// How many mappings a region may have by default: an eighth of what a device can have.
pub const DEFAULT_MAPPING_LIMIT: u64 = 65_536;

/// A range of addresses with commit and decommit, for one owner.
///
/// Ranges are bytes, in whole granules ([`Device::granularity`]). Fresh memory reads as zero;
/// memory revived from pending frees keeps what it held.
///
/// Dropping a region waits for the device if anything in it was committed or is pending free. What others
/// have [registered](Self::register) stays where it is, and is theirs then.
pub struct Region {
    space: Space,
    props: PhysicalProps,
    layout: Layout,
    largest: u64,
    mapping_limit: u64,
    zeros: Zeros,
    /// Host memory to move to.
    prepared: Option<HostExtents>,
    /// Whether some memory may be shown twice.
    aliased: bool,
    committed: Committed,
    /// Extents that are mapped with nothing in them committed.
    pending: PendingExtents,
    /// By the offset of an extent: what must pass before it may go. It is pending free when nothing
    /// in it is committed any more.
    withdrawn: BTreeMap<u64, Fence>,
    /// What others have registered.
    register: Arc<Register>,
}

impl Region {
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
        self.committed.bytes()
    }

    /// Bytes of physical memory held: committed, pending free, kept because an extent is partly in use,
    /// and what lies behind holes as zeros.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.memory() + self.space.stuck_bytes() + self.zeros.held()
    }

    /// Mappings in use, of which a device has about 524,000: one for each extent, and one for each
    /// alias of zeros.
    #[must_use]
    pub fn mappings(&self) -> u64 {
        self.space.count() + self.space.stuck_count() + self.zeros.count()
    }

    /// Bytes that a failed roll-back left mapped; tried again when the region is closed.
    #[must_use]
    pub fn quarantined(&self) -> u64 {
        self.space.stuck_bytes()
    }

    /// Whether the whole range is committed. An empty range is.
    #[must_use]
    pub fn is_committed(&self, range: Range<u64>) -> bool {
        self.committed.covers(&range)
    }

    /// Every extent that is mapped, in order: what whoever registers memory must register.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.space.extents().collect()
    }

    /// Writes committed bytes behind what `stream` has queued, and returns when they are there.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed or the stream is another device's.
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.check_copy(offset, bytes.len() as u64)?;
        self.space.write(stream, offset, bytes)
    }

    /// Reads committed bytes behind what `stream` has queued.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed or the stream is another device's.
    pub fn read(&self, stream: &Stream, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.check_copy(offset, bytes.len() as u64)?;
        self.space.read(stream, offset, bytes)
    }

    /// Queues filling committed bytes with one byte on a stream (`cuMemsetD8Async`), and returns at
    /// once. Whoever decommits them names that stream, or all work.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed or the stream is another device's.
    pub fn fill(&self, stream: &Stream, range: Range<u64>, byte: u8) -> Result<(), MemoryError> {
        let (offset, size) = (range.start, range.end.saturating_sub(range.start));
        self.check_copy(offset, size)?;
        if size == 0 {
            return Ok(());
        }
        self.space.fill(stream, offset, byte, size)
    }

    /// Queues a copy of committed bytes to another place in the region on a stream
    /// (`cuMemcpyDtoDAsync`), and returns at once. Whoever decommits either names that stream, or
    /// all work.
    ///
    /// # Errors
    /// [`MemoryError`] when either range is not committed, they overlap, or the stream is another
    /// device's.
    pub fn copy_within(
        &self,
        stream: &Stream,
        from: Range<u64>,
        to: u64,
    ) -> Result<(), MemoryError> {
        let (offset, size) = (from.start, from.end.saturating_sub(from.start));
        if size > 0 && offset.abs_diff(to) < size {
            let taken = to;
            return Err(MemoryError::Overlap {
                offset,
                size,
                taken,
            });
        }
        self.copy_from(stream, to, self, from)
    }

    /// The same from another region that the stream's device has access to: one
    /// `cuMemcpyDtoDAsync` for each run of memory that lies at one place on both sides, since the
    /// driver is four times slower where one copy goes over several devices.
    ///
    /// # Errors
    /// As [`Self::copy_within`].
    pub fn copy_from(
        &self,
        stream: &Stream,
        to: u64,
        source: &Self,
        from: Range<u64>,
    ) -> Result<(), MemoryError> {
        let (offset, size) = (from.start, from.end.saturating_sub(from.start));
        source.check_copy(offset, size)?;
        self.check_copy(to, size)?;
        if size == 0 {
            return Ok(());
        }
        self.space
            .copy_within(stream, to, &source.space, offset, size)
    }

    /// The parts of a range that are committed, in order.
    pub fn committed_in(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.committed.parts(range)
    }

    /// All work of every device that has access.
    pub(super) fn fence_of_all(&self) -> Fence {
        Fence::devices(self.space.users().cloned().collect())
    }

    /// The parts of a range that have no extent.
    pub(super) fn holes(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut holes = vec![];
        let mut at = range.start;
        for extent in self.space.extents_in(range.start, range.end) {
            if extent.offset > at {
                holes.push(at..extent.offset);
            }
            at = extent.end();
        }
        if at < range.end {
            holes.push(at..range.end);
        }
        holes
    }

    /// Whether part of a range has to be [unshared](Self::unshare) before it is written.
    #[must_use]
    pub fn is_read_only(&self, range: Range<u64>) -> bool {
        self.space
            .extents_in(range.start, range.end)
            .any(|extent| self.space.most_at(extent.offset) != Access::ReadWrite)
    }

    /// Bytes of extents, each memory counted once.
    pub(super) fn memory(&self) -> u64 {
        if !self.aliased {
            return self.space.bytes();
        }
        let mut seen = BTreeSet::new();
        let placed = self.space.extents.values();
        placed
            .map(|placed| placed.mapping.physical())
            .filter(|physical| seen.insert(physical.as_raw()))
            .map(crate::own::Physical::size)
            .sum()
    }

    /// Refuses a copy that leaves the region, or reaches memory that is not committed.
    fn check_copy(&self, offset: u64, size: u64) -> Result<(), MemoryError> {
        if size == 0 && offset <= self.size() {
            return Ok(());
        }
        let Some(range) = range_within(offset, size, self.size()) else {
            return Err(ArgumentError::bytes(offset, size, self.size()).into());
        };
        match self.is_committed(range.clone()) {
            true => Ok(()),
            false => Err(MemoryError::not_committed(&range)),
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("address", &self.address())
            .field("size", &self.size())
            .field("committed", &self.committed())
            .field("pending_free", &self.pending.bytes())
            .finish_non_exhaustive()
    }
}
