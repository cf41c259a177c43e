//! Copy-on-write buffers: a snapshot shows the same memory, read-only, until one of the buffers
//! makes a range mutable.
//!
//! A GPU has no write fault to catch: a kernel that writes to read-only memory loses the context.
//! So the copy is made in [`make_mut`](CowBuffer::make_mut), extent by extent, and nowhere else.

use std::ops::Range;

use bytemuck::Pod;

use crate::device::Device;
use crate::elements::{Elements, is_container, run};
use crate::error::ContainerError;
use crate::own::Stream;
use crate::region::Region;
use crate::view::{View, ViewMut};

/// The default size of the largest extent, and so the most that writing one element can copy: 64
/// MiB.
pub const DEFAULT_COW_EXTENT: u64 = 64 << 20;

/// An array of fixed length in device memory with copy-on-write snapshots.
///
/// Memory is shared by whole extents. Small extents copy less for a small change, but make
/// snapshots slower: one mapping and two changes of access each, about 50 us on an H200. With
/// extents of 8 MiB a snapshot takes eleven times as long as a copy on the device, with extents of
/// 512 MiB a third of that; what it saves is memory.
///
/// Copies in and out are ordered behind the work queued on the home stream and complete when they
/// return. Work of other streams is recorded with [`record_use`](Self::record_use). Dropping a
/// buffer waits for those streams.
///
/// ```
/// use std::sync::Arc;
/// use cuvmm::driver::host::{HostDriver, HostOptions};
/// use cuvmm::{CowBuffer, Device, Stream};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(Arc::new(HostDriver::new(HostOptions::new())), 0)?;
/// let stream = Stream::new(&device)?;
/// let mut now = CowBuffer::<u32>::zeroed(&device, &stream, 1 << 20)?;
/// now.write(0, &[1, 2])?;
/// let then = now.snapshot()?;
/// now.write(1, &[9])?;
/// assert_eq!((now.get(1)?, then.get(1)?), (9, 2));
/// # Ok(())
/// # }
/// ```
pub struct CowBuffer<T: Pod> {
    elements: Elements<T>,
}

is_container!(CowBuffer [T: Pod] [T] elements);

impl<T: Pod> CowBuffer<T> {
    /// Creates an array of zeros (`cuMemAddressReserve`; `cuMemCreate`, `cuMemMap`,
    /// `cuMemSetAccess` for each extent of at most [`DEFAULT_COW_EXTENT`]).
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have size zero, the length is zero or too large, the
    /// stream belongs to another device, or the driver refuses.
    pub fn zeroed(device: &Device, home: &Stream, len: usize) -> Result<Self, ContainerError> {
        let extent = DEFAULT_COW_EXTENT.max(device.granularity());
        Self::with_extents(device, home, len, extent)
    }

    /// Creates an array of zeros with extents of at most `extent` bytes, a power of two granules.
    ///
    /// # Errors
    /// Those of [`Self::zeroed`], and when `extent` is not a power of two granules.
    pub fn with_extents(
        device: &Device,
        home: &Stream,
        len: usize,
        extent: u64,
    ) -> Result<Self, ContainerError> {
        let bytes = Elements::<T>::check(device, home, len)?;
        let builder = Region::builder(device, bytes).largest_extent(extent);
        Self::from_region(builder.reserve()?, home, len)
    }

    /// Creates an array of `len` zeros in an empty region, for memory [of a
    /// tenant](crate::region#regions-in-a-tenant), that is
    /// [shareable](crate::region::RegionBuilder::shareable), or made for RDMA.
    ///
    /// # Errors
    /// Those of [`Self::zeroed`], and when the region is too small or has memory already.
    pub fn from_region(
        mut region: Region,
        home: &Stream,
        len: usize,
    ) -> Result<Self, ContainerError> {
        let bytes = Elements::<T>::check(region.device(), home, len)?;
        Elements::<T>::check_empty(&region)?;
        let whole = region
            .device()
            .granule()
            .whole("bytes of the elements", bytes)?;
        region.commit(0..whole)?;
        Ok(Self {
            elements: Elements::new(region, home, len),
        })
    }

    /// Returns the bytes that another snapshot shows too.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.elements.region.shared()
    }

    /// Creates a buffer that shows the present elements at its own addresses. Copies no bytes; from
    /// now on both buffers have to [`make_mut`](Self::make_mut) before they write.
    ///
    /// Waits for the work queued on the home stream and the recorded streams, since it may still
    /// write here, and for all work of a device that has access and of which no stream was recorded. Makes one `cuMemMap` and two `cuMemSetAccess` for each extent.
    ///
    /// # Errors
    /// [`ContainerError`] when the driver refuses; nothing has changed.
    pub fn snapshot(&mut self) -> Result<Self, ContainerError> {
        let mut fence = self.elements.fence();
        fence.wait()?;
        let region = self.elements.region.fork_behind(fence)?;
        Ok(Self {
            elements: Elements::new(region, self.elements.home(), self.len()),
        })
    }

    /// Returns elements for a kernel to write. Shared extents that contain them are copied first;
    /// the other snapshots keep their bytes.
    ///
    /// If anything is copied, waits for the work queued on the home stream and the recorded
    /// streams, and for all work of a device that has access and of which no stream was recorded. Makes `cuMemCreate`, a copy on the device, and two mappings for each copied extent;
    /// no driver call otherwise.
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the buffer, or there is no memory for the copies;
    /// nothing has changed then.
    pub fn make_mut(&mut self, range: Range<usize>) -> Result<ViewMut<'_, T>, ContainerError> {
        self.unshare(&range)?;
        Ok(self.elements.view_mut(range.start, range.len()))
    }

    /// Overwrites elements from `first` on, after [making them mutable](Self::make_mut).
    ///
    /// # Errors
    /// Those of [`Self::make_mut`], and when the copy fails.
    pub fn write(&mut self, first: usize, elements: &[T]) -> Result<(), ContainerError> {
        self.unshare(&run(first, elements.len()))?;
        self.elements.write_at(first, elements)
    }

    /// Reads as many elements as `into` holds, from `first` on.
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the buffer, or the copy fails.
    pub fn read(&self, first: usize, into: &mut [T]) -> Result<(), ContainerError> {
        self.elements.read(first, into)
    }

    /// Reads the element at an index.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn get(&self, index: usize) -> Result<T, ContainerError> {
        self.elements.get(index)
    }

    /// Returns the elements for a kernel to read.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        self.elements.view(0, self.len())
    }

    /// Unshares the extents that contain a range of elements.
    fn unshare(&mut self, range: &Range<usize>) -> Result<(), ContainerError> {
        let bytes = self.elements.bytes(range)?;
        let region = &self.elements.region;
        if bytes.is_empty() || !region.is_read_only(bytes.clone()) {
            return Ok(());
        }
        let granule = region.device().granule();
        let end = granule.round_up(bytes.end).unwrap_or(region.size());
        let whole = granule.round_down(bytes.start)..end;
        let (home, fence) = (self.elements.home().clone(), self.elements.fence());
        self.elements.region.unshare_behind(whole, &home, fence)?;
        Ok(())
    }
}
