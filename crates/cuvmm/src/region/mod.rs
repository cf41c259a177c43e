//! Reservations whose addresses never move, while physical memory is mapped and unmapped under
//! them.
//!
//! A [`Region`] is a reservation with [`commit`](Region::commit) and
//! [`decommit`](Region::decommit). A commit covers its range with few, large extents. A decommit
//! withdraws whole extents as pending frees, which stay mapped until the GPU work that may use them
//! is complete ([`purge`](Region::purge)). Committing a range that is pending free revives it
//! without a driver call.
//!
//! The [`Layout`] decides where the memory is: on the device, in stripes over several devices, or
//! on a host NUMA node. [`relocate`](Region::relocate) moves it under the same addresses.
//! [`grant`](Region::grant) gives other devices access, and
//! [`back_with_zeros`](Region::back_with_zeros) maps read-only zeros into holes. A [`Registration`]
//! keeps memory in place while it is registered with another library.
//!
//! A region has one owner. Its memory comes from the driver, without a budget, unless it is in a
//! tenant of a [`pool`](crate::pool).
//!
//! # Regions in a tenant
//! A region that is built with [`Tenant::region`] or [`RegionBuilder::in_tenant`] gets its memory
//! from the tenant's pool, and so do containers that are built from it.
//!
//! - **Charged** to the tenant are all extents, committed and withdrawn, all mappings, and the
//!   addresses. Memory that forks and aliases show is charged once.
//! - **The pool takes** extents without a committed byte, once all work on them is complete, when
//!   another request needs memory. Until then they count as cached or pending free. It takes no
//!   committed byte, such as a vector's spare capacity.
//! - **A commit** calls pressure hooks if memory is short, and waits as
//!   [`RegionBuilder::timeout`] says. A refusal is a [`MemoryError::Pool`]. Memory that was used
//!   before is zeroed on the [home stream](RegionBuilder::home_stream), and the commit waits for
//!   that. Withdrawn memory that is committed again has its contents, or zeros if the pool took it
//!   meanwhile. [`grow_to`](Region::grow_to) commits beyond the need only where no memory must be
//!   reclaimed for that.
//! - **A drop** waits for nothing: the pool gets memory and addresses behind the work. The region
//!   keeps the pool alive. After the tenant is unregistered, commits are refused.
//! - **Not possible** ([`MemoryError::InTenant`]) are memory elsewhere than on the pool's device,
//!   with other properties than the pool's, [`commit_at`](Region::commit_at),
//!   [`relocate`](Region::relocate) and [`back_with_zeros`](Region::back_with_zeros).
//! - [Sleep](crate::sleep) is for blocks, heaps and paged caches: other containers stay awake.
//!
//! ```rust
//! # use cuvmm::driver::auto;
//! # use cuvmm::{Device, DeviceVec, Limit, Pool, Stream};
//! # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
//! # let stream = Stream::new(&device)?;
//! const MIB: u64 = 1 << 20;
//! let pool = Pool::builder(&device).limit(Limit::Bytes(64 * MIB)).build()?;
//! let tenant = pool.tenant("index").register()?;
//! let region = tenant.region(1 << 40).home_stream(&stream).reserve()?; // addresses only
//! let mut vector = DeviceVec::<u32>::from_region(region, &stream)?;
//! vector.resize(1 << 20, 7)?;
//! assert_eq!(tenant.stats().in_use, vector.held());
//! assert!(vector.resize(1 << 30, 7).unwrap_err().is_out_of_memory()); // beyond the limit
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
mod ahead;
mod alias;
mod builder;
mod check;
mod commit;
mod committed;
mod compact;
#[cfg(target_os = "linux")]
mod dma_buf;
mod end;
mod export;
mod family;
mod fork;
mod grow;
mod holder;
mod host_access;
mod host_extents;
mod kept;
mod layout;
mod lent;
mod noted;
mod register;
mod relocate;
mod replace;
mod sleep;
mod stats;
mod supply;
mod withdraw;
mod zero_backed;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cuvmm_driver::{DeviceAddress, PhysicalProps};

use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};
use crate::extent_sizes::ExtentSizes;
use crate::extents::{Fence, Space, Zeros};
use crate::own::{Access, Stream};
#[cfg(doc)]
use crate::pool::Tenant;
use crate::size::range_within;
pub(crate) use committed::Committed;
use committed::PendingExtents;
use family::{Ending, Supply};
pub(crate) use holder::WorksAhead;
use register::Register;
pub(crate) use sleep::MemoryInUse;

pub use crate::extents::{DEFAULT_LARGEST_EXTENT, Extent, Mapper, Registration};
pub use builder::RegionBuilder;
pub use compact::Compacted;
#[cfg(target_os = "linux")]
pub use dma_buf::DmaBuf;
pub use host_extents::HostExtents;
pub use kept::{Kept, Purged};
pub use layout::Layout;
pub use stats::RegionStats;

/// The default limit on the mappings of a region: an eighth of what a device can have.
pub const DEFAULT_MAPPING_LIMIT: u64 = 65_536;

/// A reservation with commit and decommit, for one owner.
///
/// Ranges are in bytes and consist of whole granules ([`Device::granularity`]). Fresh memory reads
/// as zero. Memory revived from pending frees keeps its contents, except [in a
/// tenant](self#regions-in-a-tenant).
///
/// Dropping a region waits for the device if anything in it was committed or is pending free,
/// unless the region is in a tenant. [Registered](Self::register) memory stays mapped until its last
/// registration ends.
///
/// ```rust
/// # use cuvmm::driver::auto;
/// # use cuvmm::{Device, Region, Stream};
/// # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
/// # let stream = Stream::new(&device)?;
/// const MIB: u64 = 1 << 20;
/// let mut region = Region::reserve(&device, 1 << 30)?; // addresses only
/// region.commit(0..16 * MIB)?;
/// region.write(&stream, 0, b"bytes")?;
/// region.decommit_after(0..16 * MIB, &[stream.clone()])?; // pending free; does not wait
/// stream.synchronize()?;
/// assert_eq!(region.purge()?.given_back, 16 * MIB); // unmapped and released
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "VirtualMemoryManager")]
#[doc(alias = "VirtualMemoryPool")]
pub struct Region {
    space: Space,
    props: PhysicalProps,
    layout: Layout,
    sizes: ExtentSizes,
    mapping_limit: u64,
    zeros: Zeros,
    prepared: Option<HostExtents>,
    /// Set once an alias was made: some memory may be mapped twice.
    aliased: bool,
    committed: Committed,
    pending: PendingExtents,
    /// By the offset of an extent: the fence of its withdrawn parts. The extent is pending free
    /// once none of it is committed.
    withdrawn: BTreeMap<u64, Fence>,
    register: Arc<Register>,
    supply: Supply,
    /// Set while a region in a tenant is being dropped. Dropped behind the space.
    ending: Option<Arc<Ending>>,
}

impl Region {
    /// Returns the first address, which never changes.
    #[doc(alias = "base_address")]
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.space.address()
    }

    /// Returns the size in bytes, committed or not.
    #[doc(alias = "capacity")]
    #[must_use]
    pub fn size(&self) -> u64 {
        self.space.size()
    }

    /// Returns the device that the region was reserved on.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.space.device()
    }

    /// Returns the size up to which the region's extents go, in bytes, as
    /// [`RegionBuilder::largest_extent`] set it. Memory comes back by whole extents: of a commit, a
    /// granule times a power of two each, the largest first. With the [granularity](Device::granularity)
    /// as this size every granule comes back by itself, and costs a mapping.
    ///
    /// [`RegionStats::largest_extent`] is that of the extents that there are.
    #[doc(alias("page_size", "granularity"))]
    #[must_use]
    pub const fn largest_extent(&self) -> u64 {
        self.sizes.largest()
    }

    /// Returns the number of committed bytes.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.committed.bytes()
    }

    /// Returns the bytes of physical memory held: committed, pending free, kept because an extent
    /// is partly in use, and backing holes with zeros.
    #[doc(alias = "physical_memory_usage")]
    #[must_use]
    pub fn held(&self) -> u64 {
        self.memory() + self.space.stuck_bytes() + self.zeros.held()
    }

    /// Returns the number of mappings in use: one for each extent and one for each alias of zeros.
    /// A device can have about 524,000.
    #[must_use]
    pub fn mappings(&self) -> u64 {
        let withdrawn = self.withdrawn_physicals().len() as u64;
        self.space.count() + withdrawn + self.space.stuck_count() + self.zeros.count()
    }

    /// Returns the bytes that a failed roll-back left mapped. Closing the region tries to unmap
    /// them again.
    #[must_use]
    pub fn quarantined(&self) -> u64 {
        self.space.stuck_bytes()
    }

    /// Returns `true` if the whole range is committed; an empty range is.
    #[doc(alias = "is_mapped")]
    #[must_use]
    pub fn is_committed(&self, range: Range<u64>) -> bool {
        self.committed.covers(&range)
    }

    /// Returns every mapped extent, in order; in a tenant, those with a committed byte. Registering
    /// the memory elsewhere takes one registration for each.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.space.extents().collect()
    }

    /// Writes committed bytes behind the work queued on `stream`, and waits until they are written.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed or the stream belongs to another device.
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.check_copy(offset, bytes.len() as u64)?;
        let written = self.space.write(stream, offset, bytes);
        // A copy that could not be waited for may still run.
        if written.is_err() {
            self.note_work(stream, &written);
        }
        written
    }

    /// Reads committed bytes behind the work queued on `stream`.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed or the stream belongs to another device.
    pub fn read(&self, stream: &Stream, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.check_copy(offset, bytes.len() as u64)?;
        let read = self.space.read(stream, offset, bytes);
        if read.is_err() {
            self.note_work(stream, &read);
        }
        read
    }

    /// Queues filling committed bytes with one byte on a stream (`cuMemsetD8Async`), and returns at
    /// once. Memory that is withdrawn later waits for the fill, whichever streams are named.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed or the stream belongs to another device.
    pub fn fill(&self, stream: &Stream, range: Range<u64>, byte: u8) -> Result<(), MemoryError> {
        let (offset, size) = (range.start, range.end.saturating_sub(range.start));
        self.check_copy(offset, size)?;
        if size == 0 {
            return Ok(());
        }
        let filled = self.space.fill(stream, offset, byte, size);
        self.note_work(stream, &filled);
        filled
    }

    /// Queues a copy of committed bytes to another offset of the region on a stream
    /// (`cuMemcpyDtoDAsync`), and returns at once. Memory that is withdrawn later waits for the copy,
    /// whichever streams are named.
    ///
    /// # Errors
    /// [`MemoryError`] when either range is not committed, the ranges overlap, or the stream
    /// belongs to another device.
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

    /// Queues a copy of committed bytes from another region that the stream's device has access to,
    /// and returns at once. Makes one `cuMemcpyDtoDAsync` for each run of memory that is at one
    /// place on both sides, since the driver is four times slower where one copy spans several
    /// devices. Memory that either region withdraws later waits for the copy.
    ///
    /// # Errors
    /// Those of [`Self::copy_within`].
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
        let copied = self
            .space
            .copy_within(stream, to, &source.space, offset, size);
        source.note_work(stream, &copied);
        self.note_work(stream, &copied);
        copied
    }

    /// Notes a fill or copy on a stream, unless it was refused before any of it was queued.
    fn note_work(&self, stream: &Stream, outcome: &Result<(), MemoryError>) {
        let is_queued = match outcome {
            Ok(()) => true,
            // The driver may have refused its second part.
            Err(error) => error.call().is_some(),
        };
        // Another thread may have held the lock at the fork: a child never gets it.
        if is_queued && !self.device().is_forked() {
            self.register.noted().queued(Fence::stream(stream.clone()));
        }
    }

    /// Notes that work on streams that are not known has used the memory until now.
    #[cfg(feature = "dlpack")]
    pub(crate) fn note_use_anywhere(&self) {
        self.register.noted().queued(self.fence_of_all());
    }

    /// Returns the committed parts of a range, in order.
    pub fn committed_in(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.committed.parts(range)
    }

    /// A fence over all work of every device that has access.
    fn fence_of_all(&self) -> Fence {
        Fence::devices(self.space.users().cloned().collect())
    }

    /// The parts of a range without an extent.
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

    /// Returns `true` if part of a range must be [unshared](Self::unshare) before it is written.
    #[must_use]
    pub fn is_read_only(&self, range: Range<u64>) -> bool {
        self.space
            .extents_in(range.start, range.end)
            .any(|extent| self.space.most_at(extent.offset) != Access::ReadWrite)
    }

    /// Bytes of extents; memory that is mapped twice counts once.
    pub(super) fn memory(&self) -> u64 {
        if !self.aliased {
            return self.mapped();
        }
        let mut seen = BTreeSet::new();
        let physicals = self.space.physicals().map(|it| (it.as_raw(), it.size()));
        physicals
            .chain(self.withdrawn_physicals())
            .filter(|&(handle, _)| seen.insert(handle))
            .map(|(_, size)| size)
            .sum()
    }

    /// Bytes of extents; memory that is mapped twice counts twice.
    pub(super) fn mapped(&self) -> u64 {
        self.space.bytes() + self.withdrawn_bytes(&(0..self.size()))
    }

    fn check_copy(&self, offset: u64, size: u64) -> Result<(), MemoryError> {
        if size == 0 && offset <= self.size() {
            return Ok(());
        }
        let Some(range) = range_within(offset, size, self.size()) else {
            return Err(ArgumentError::bytes(offset, size, self.size()).into());
        };
        match self.is_committed(range.clone()) {
            true => Ok(()),
            false => Err(MemoryError::NotCommitted(range.clone())),
        }
    }
}

crate::size::bounds!(Region);

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
