//! Allocations of a memory pool that are offered to other processes.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cuvmm_driver::{Exported, HandleTypes, LocationKind};

use super::allocation_wire::{AllocationDescription, MOST};
use super::grant::Grant;
use super::wait::{Deadline, pause};
use crate::error::{ArgumentError, ChannelError, DescriptionError, ShareError};
use crate::own::{Access, AllocationPart, MemPool, PoolAllocation, Recipients as _};
use crate::size::range_within;

/// The pause between two looks for released memory.
const AGAIN: Duration = Duration::from_millis(1);

/// Allocations of one memory pool of the driver, to be given to other processes.
///
/// The pool must have been created as [shareable](crate::own::MemPoolBuilder::shareable). Memory of
/// another library's `cuMemAllocAsync` can be given if such a pool was
/// [current](MemPool::make_current) at the allocation: [`MemPool::borrow`] wraps it.
///
/// An offer grants read access unless [`read_write`](Self::read_write) is called. The driver does
/// not enforce this. A process that gets an offer has the handle of the *whole pool*: use separate
/// pools for memory that only one process should see.
///
/// The memory is kept while the offer lives, and while a process that was given it has it: the drop
/// of a [held](PoolAllocation::is_held) [`PoolAllocation`] does not free it. CUDA requires that
/// each importing process frees an allocation before the exporting process does.
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// use std::thread;
/// use cuvmm::driver::HandleTypes;
/// use cuvmm::share::{AllocationOffer, PoolImporter};
/// use cuvmm::{Channel, MemPool, Stream};
///
/// let pool = MemPool::builder(&device).shareable(HandleTypes::POSIX_FD).create()?;
/// let stream = Stream::new(&device)?;
/// let memory = pool.allocate_on(&stream, 1 << 20)?;
/// memory.write(&stream, 0, b"activations")?;
///
/// let (mut giver, mut taker) = Channel::pair()?; // usually in two processes
/// let offer = AllocationOffer::new(&memory)?;
/// let given = thread::spawn(move || giver.send_allocations(&offer));
/// let importer = PoolImporter::new(&device, &stream)?;
/// let imported = taker.recv_allocations(&importer)?.remove(0);
/// given.join().map_err(|_| "the giver panicked")??;
///
/// let mut bytes = [0; 11];
/// imported.read(&stream, 0, &mut bytes)?;
/// assert_eq!(&bytes, b"activations");
/// assert!(memory.is_held());
/// drop(imported); // waits for its stream, and tells the giver
/// memory.close()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[doc(alias = "cuMemPoolExportPointer")]
pub struct AllocationOffer {
    access: Access,
    pool: MemPool,
    /// Each allocation with its offered part.
    parts: Vec<(PoolAllocation, Range<u64>)>,
}

impl AllocationOffer {
    /// Offers a whole allocation.
    ///
    /// # Errors
    /// [`ShareError`] when its pool is not shareable or does not have the memory of a device.
    pub fn new(allocation: &PoolAllocation) -> Result<Self, ShareError> {
        Self::part(allocation, 0..allocation.size())
    }

    /// Offers a range of bytes of an allocation. The other process gets the address of the first
    /// byte, and can reach the whole allocation.
    ///
    /// # Errors
    /// [`ShareError`] when the range is empty or not within the allocation, or its pool is not
    /// shareable or does not have the memory of a device.
    pub fn part(allocation: &PoolAllocation, range: Range<u64>) -> Result<Self, ShareError> {
        let pool = allocation.pool().clone();
        pool.check_shareable(HandleTypes::POSIX_FD)?;
        let location = pool.location();
        if location.kind != LocationKind::DEVICE {
            return Err(ShareError::Unnameable(location));
        }
        let empty = Self {
            access: Access::Read,
            pool,
            parts: vec![],
        };
        empty.and_part(allocation, range)
    }

    /// Adds a whole allocation of the same pool. Allocations sent together are held until all of
    /// them are released.
    ///
    /// # Errors
    /// [`ShareError`] when it is of another pool, or the offer has 4,096 allocations.
    pub fn and(self, allocation: &PoolAllocation) -> Result<Self, ShareError> {
        self.and_part(allocation, 0..allocation.size())
    }

    /// Adds a range of bytes of an allocation of the same pool.
    ///
    /// # Errors
    /// [`ShareError`] when the range is empty or not within the allocation, it is of another pool,
    /// or the offer has 4,096 allocations.
    pub fn and_part(
        mut self,
        allocation: &PoolAllocation,
        range: Range<u64>,
    ) -> Result<Self, ShareError> {
        let (offset, length) = (range.start, range.end.saturating_sub(range.start));
        if length == 0 || range_within(offset, length, allocation.size()).is_none() {
            return Err(ArgumentError::bytes(offset, length, allocation.size()).into());
        }
        let pool = allocation.pool();
        let same = pool.as_raw() == self.pool.as_raw() && pool.device().is_same(self.pool.device());
        if !same {
            return Err(ShareError::SeveralPools);
        }
        let many = self.parts.len() as u64 + 1;
        ArgumentError::at_most("allocations of an offer", many, MOST as u64)?;
        self.parts.push((allocation.share(), range));
        Ok(self)
    }

    /// Grants other processes write access as well.
    #[must_use]
    pub fn read_write(mut self) -> Self {
        self.access = Access::ReadWrite;
        self
    }

    /// Returns the access that is granted.
    #[must_use]
    pub const fn access(&self) -> Access {
        self.access
    }

    /// Returns `true` if a process may still use memory that this offer or another has given.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.parts
            .iter()
            .any(|(allocation, _)| allocation.is_held())
    }

    /// Waits until no other process uses the memory.
    ///
    /// # Errors
    /// [`ChannelError::TimedOut`] when one still does after `time`.
    pub fn wait_until_returned(&self, time: Duration) -> Result<(), ShareError> {
        let deadline = Deadline::after(time);
        while self.is_held() {
            deadline.check()?;
            pause(AGAIN.min(deadline.left()));
        }
        Ok(())
    }

    /// Makes the description and the handles, for a transport of the caller
    /// (`cuMemPoolExportPointer` for each allocation, `cuMemPoolExportToShareableHandle`). Waits
    /// for the queued work of the allocations' streams.
    ///
    /// The memory is held until each process that opened the parcel has released everything or has
    /// ended, and all copies of the parcel's descriptors are closed, also those of forked children.
    /// The end of at most 64 processes without a release is noticed.
    ///
    /// # Errors
    /// [`ShareError`] when a stream captures, the driver refuses, or no file can be opened.
    pub fn parcel(&self) -> Result<AllocationParcel, ShareError> {
        let description = self.describe()?;
        let (pool, held, _) = self.grant(false)?;
        Ok(AllocationParcel {
            description,
            pool,
            held,
        })
    }

    pub(super) fn describe(&self) -> Result<AllocationDescription, ShareError> {
        let describe = |(allocation, range): &(PoolAllocation, Range<u64>)| {
            // An allocation must be complete before another process uses it.
            allocation.settle()?;
            Ok(AllocationPart {
                ticket: allocation.export()?,
                size: allocation.size(),
                range: range.clone(),
            })
        };
        let parts = self.parts.iter().map(describe);
        Ok(AllocationDescription {
            access: self.access,
            uuid: self.pool.device().uuid(),
            pool: self.pool.identity(),
            parts: parts.collect::<Result<_, ShareError>>()?,
        })
    }

    /// Makes the pool's handle and the taker's end of a grant that holds the memory from now on.
    pub(super) fn grant(&self, single: bool) -> Result<(OwnedFd, OwnedFd, Arc<Grant>), ShareError> {
        let Exported::Fd(pool) = self.pool.export(HandleTypes::POSIX_FD)? else {
            return Err(ArgumentError::HandleType(0).into());
        };
        let (grant, held) = Grant::new(single)?;
        let grant = Arc::new(grant);
        for (allocation, _) in &self.parts {
            allocation.hold(Arc::clone(&grant) as _);
        }
        Ok((pool, held, grant))
    }
}

/// A description of allocations and the two descriptors for them, for transports other than a
/// channel.
///
/// Send [`AllocationDescription::to_bytes`] and both descriptors, and open the parcel in the other
/// process with [`PoolImporter::open`](super::PoolImporter::open). The first descriptor is the
/// pool's handle; the second tells the giver when the memory was released.
#[derive(Debug)]
pub struct AllocationParcel {
    pub(super) description: AllocationDescription,
    pub(super) pool: OwnedFd,
    pub(super) held: OwnedFd,
}

impl AllocationParcel {
    /// Creates a parcel from a serialized description and the received descriptors, in the order of
    /// [`into_parts`](Self::into_parts).
    ///
    /// # Errors
    /// [`DescriptionError`] if the bytes are not a valid description.
    pub fn from_bytes(
        description: &[u8],
        [pool, held]: [OwnedFd; 2],
    ) -> Result<Self, DescriptionError> {
        Ok(Self {
            description: AllocationDescription::from_bytes(description)?,
            pool,
            held,
        })
    }

    /// Returns the description of the memory.
    #[must_use]
    pub const fn description(&self) -> &AllocationDescription {
        &self.description
    }

    /// Splits the parcel into description and descriptors.
    #[must_use]
    pub fn into_parts(self) -> (AllocationDescription, [OwnedFd; 2]) {
        (self.description, [self.pool, self.held])
    }
}

impl Grant {
    /// Notes a taker that has greeted.
    pub(super) fn meet(&self) {
        self.is_over();
    }
}

/// Returns the two descriptors of a grant in a message.
pub(super) fn two(body: &[u8], handles: Vec<OwnedFd>) -> Result<[OwnedFd; 2], ChannelError> {
    let malformed = ChannelError::Malformed("not the two descriptors of a memory pool alone");
    match handles.try_into() {
        Ok(two) if body.is_empty() => Ok(two),
        _ => Err(malformed),
    }
}
