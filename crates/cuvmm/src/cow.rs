//! A buffer whose snapshots cost no copy: both show the same memory, read-only, until one of them
//! says what it wants to write.
//!
//! A GPU has no write fault to catch: a kernel that writes to what is shared loses the context. So
//! the copy is made in [`make_mut`](CowBuffer::make_mut), extent by extent, and nowhere else.

use std::ops::Range;

use bytemuck::Pod;

use crate::device::Device;
use crate::elements::{Elements, is_container, run};
use crate::error::ContainerError;
use crate::own::Stream;
use crate::region::Region;
use crate::view::{View, ViewMut};

/// The largest extent by default, and so the most that one written element can copy: 64 MiB.
pub const DEFAULT_COW_EXTENT: u64 = 64 << 20;

/// An array of fixed length in device memory with copy-on-write snapshots.
///
/// The memory is shared by whole extents. Small ones copy less for a small change, and make the
/// snapshot slower: one mapping and two changes of rights each, some 50 us on an H200. In extents of
/// 8 MiB a snapshot takes eleven times as long as a copy on the device, in extents of 512 MiB a third of
/// that; what it saves is memory.
///
/// Copies in and out are ordered behind what the home stream has queued and have ended when they
/// return. Work of other streams is named with [`record_use`](Self::record_use). Dropping a buffer
/// waits for those streams.
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
    /// An array of zeros (`cuMemAddressReserve`; `cuMemCreate`, `cuMemMap`, `cuMemSetAccess` for
    /// each extent of at most [`DEFAULT_COW_EXTENT`]).
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have no size, the length is zero or too large, the stream is
    /// another device's, or the driver refuses.
    pub fn zeroed(device: &Device, home: &Stream, len: usize) -> Result<Self, ContainerError> {
        let extent = DEFAULT_COW_EXTENT.max(device.granularity());
        Self::with_extents(device, home, len, extent)
    }

    /// The same with extents of at most `extent` bytes, a power of two granules.
    ///
    /// # Errors
    /// As [`Self::zeroed`], and when `extent` is no such size.
    pub fn with_extents(
        device: &Device,
        home: &Stream,
        len: usize,
        extent: u64,
    ) -> Result<Self, ContainerError> {
        let bytes = Elements::<T>::check(device, home, len)?;
        let mut region = Region::builder(device, bytes)
            .largest_extent(extent)
            .reserve()?;
        region.commit(0..region.size())?;
        Ok(Self {
            elements: Elements::new(region, home, len),
        })
    }

    /// Bytes of it that a snapshot shows too.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.elements.region.shared()
    }

    /// The elements as they are now, at addresses of their own: one more buffer of the same kind.
    /// No byte is copied; from now on both have to [`make_mut`](Self::make_mut) what they write.
    ///
    /// Waits for what the home stream and the recorded streams have queued, since it may still write
    /// here. Per extent one `cuMemMap` and two `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`ContainerError`] when the driver refuses; nothing has changed.
    pub fn snapshot(&mut self) -> Result<Self, ContainerError> {
        let Elements {
            region, users, len, ..
        } = &mut self.elements;
        users.wait()?;
        let region = region.fork(&users.all())?;
        Ok(Self {
            elements: Elements::new(region, users.home(), *len),
        })
    }

    /// Elements for a kernel to write. What is shared of the extents they lie in is copied first;
    /// the other snapshots keep what they had.
    ///
    /// Where something is copied it waits for what the home stream and the recorded streams have
    /// queued. Per copied extent `cuMemCreate`, a copy on the device, and mapping it twice; without
    /// any it makes no driver call.
    ///
    /// # Errors
    /// [`ContainerError`] when the elements are not all there, or there is no memory for the copies;
    /// nothing has changed then.
    pub fn make_mut(&mut self, range: Range<usize>) -> Result<ViewMut<'_, T>, ContainerError> {
        self.unshare(&range)?;
        Ok(self.elements.view_mut(range.start, range.len()))
    }

    /// Overwrites elements from `first` on, which are [made](Self::make_mut) this buffer's own.
    ///
    /// # Errors
    /// As [`Self::make_mut`], and when the copy fails.
    pub fn write(&mut self, first: usize, elements: &[T]) -> Result<(), ContainerError> {
        self.unshare(&run(first, elements.len()))?;
        self.elements.write_at(first, elements)
    }

    /// Reads as many elements as `into` holds, from `first` on.
    ///
    /// # Errors
    /// [`ContainerError`] when they are not all there, or the copy fails.
    pub fn read(&self, first: usize, into: &mut [T]) -> Result<(), ContainerError> {
        self.elements.read(first, into)
    }

    /// Reads the element at an index.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn get(&self, index: usize) -> Result<T, ContainerError> {
        self.elements.get(index)
    }

    /// The elements for a kernel to read.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        self.elements.view(0, self.len())
    }

    /// Copies what is shared of the extents that a range of elements lies in.
    fn unshare(&mut self, range: &Range<usize>) -> Result<(), ContainerError> {
        let bytes = self.elements.bytes(range)?;
        let Elements { region, users, .. } = &mut self.elements;
        if bytes.is_empty() || !region.is_read_only(bytes.clone()) {
            return Ok(());
        }
        let granule = region.device().granule();
        let end = granule.round_up(bytes.end).unwrap_or(region.size());
        let whole = granule.round_down(bytes.start)..end;
        region.unshare(whole, users.home(), &users.all())?;
        Ok(())
    }
}
