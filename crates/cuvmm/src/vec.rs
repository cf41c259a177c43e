//! Vectors on the device. A vector grows in place: its base address never changes and no bytes are
//! copied.
//!
//! It reserves addresses for the most elements that it may ever have and commits memory as it
//! grows: as much again, but no more than 16 MiB, a 512th of the device's memory, or an eighth of
//! its size, whichever is most. It has one owner; over a [region in a
//! tenant](crate::region#regions-in-a-tenant) it shares a pool's memory with others, and the 512th
//! does not apply.

use std::ops::Range;

use bytemuck::Pod;

use crate::device::Device;
use crate::elements::{Elements, is_container, run};
use crate::error::{ContainerError, ShareError};
use crate::extents::{Extent, Registration};
use crate::own::{Physical, Stream};
use crate::region::Region;
use crate::view::{View, ViewMut, bytes_of};

/// Up to this number of bytes, elements are repeated in host memory; beyond it, on the device.
const REPEATED: usize = 256 << 10;

/// A resizable array in device memory. Its address is fixed for life.
///
/// Copies in and out are ordered behind the work queued on the home stream and complete when they
/// return. Work of other streams is recorded with [`record_use`](Self::record_use): memory that the
/// vector gives up waits for it. Dropping a vector waits for those streams, and in a tenant for nothing.
///
/// An operation that returns an error leaves length and elements unchanged; the vector may have
/// more capacity then.
///
/// ```
/// use std::sync::Arc;
/// use cuvmm::driver::host::{HostDriver, HostOptions};
/// use cuvmm::{Device, DeviceVec, Stream};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(Arc::new(HostDriver::new(HostOptions::new())), 0)?;
/// let stream = Stream::new(&device)?;
/// let mut numbers = DeviceVec::<u32>::new(&device, &stream, 1 << 30)?;
/// let address = numbers.address();
/// numbers.extend_from_slice(&[1, 2, 3])?;
/// numbers.resize(1 << 20, 7)?;
/// assert_eq!((numbers.get(1)?, numbers.get(1 << 19)?), (2, 7));
/// assert_eq!(numbers.address(), address);
/// # Ok(())
/// # }
/// ```
pub struct DeviceVec<T: Pod> {
    elements: Elements<T>,
    most: usize,
    /// Bytes that are committed, from the first on.
    held: u64,
}

is_container!(DeviceVec [T: Pod] [T] elements);

impl<T: Pod> DeviceVec<T> {
    /// Creates an empty vector that may grow to `most` elements, used on `home`. Reserves addresses
    /// (`cuMemAddressReserve`) and allocates no memory.
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have size zero, `most` is zero or too large, or the
    /// stream belongs to another device.
    pub fn new(device: &Device, home: &Stream, most: usize) -> Result<Self, ContainerError> {
        let bytes = Elements::<T>::check(device, home, most)?;
        Ok(Self::build(Region::reserve(device, bytes)?, home, most))
    }

    /// Creates an empty vector in an empty region, for memory [of a
    /// tenant](crate::region#regions-in-a-tenant), that is
    /// [shareable](crate::region::RegionBuilder::shareable), made for RDMA, or in extents of
    /// another size. It may grow to the size of the region.
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have size zero, the region has memory already, or the
    /// stream belongs to another device.
    #[doc(alias = "over")]
    pub fn from_region(region: Region, home: &Stream) -> Result<Self, ContainerError> {
        let most = Elements::<T>::count(region.size());
        Elements::<T>::check(region.device(), home, most)?;
        Elements::<T>::check_empty(&region)?;
        Ok(Self::build(region, home, most))
    }

    fn build(region: Region, home: &Stream, most: usize) -> Self {
        Self {
            elements: Elements::new(region, home, 0),
            most,
            held: 0,
        }
    }

    /// Returns the number of elements that fit without allocating memory.
    #[must_use]
    pub fn capacity(&self) -> usize {
        Elements::<T>::count(self.held).min(self.most)
    }

    /// Returns the maximum number of elements.
    #[must_use]
    pub const fn max_len(&self) -> usize {
        self.most
    }

    /// Reserves capacity for at least `additional` more elements (`cuMemCreate`, `cuMemMap` and
    /// `cuMemSetAccess` for each extent), and for some beyond if there is memory for that.
    ///
    /// # Errors
    /// [`ContainerError`] when the vector would exceed [`max_len`](Self::max_len), or the driver
    /// has no memory.
    #[doc(alias = "try_reserve")]
    pub fn reserve(&mut self, additional: usize) -> Result<(), ContainerError> {
        let wanted = self.len().checked_add(additional);
        let Some(wanted) = wanted.filter(|&wanted| wanted <= self.most) else {
            return Err(self.full(additional, self.most));
        };
        let need = self.whole(wanted)?;
        if need > self.held {
            self.held = self.elements.region.grow_to(need)?;
        }
        Ok(())
    }

    /// Appends an element. A copy of one element takes about ten microseconds; prefer
    /// [`extend_from_slice`](Self::extend_from_slice).
    ///
    /// # Errors
    /// Those of [`Self::reserve`], and when the copy fails.
    #[doc(alias = "try_push")]
    pub fn push(&mut self, element: T) -> Result<(), ContainerError> {
        self.extend_from_slice(&[element])
    }

    /// Appends elements (`cuMemcpyHtoDAsync`, waited for).
    ///
    /// # Errors
    /// Those of [`Self::reserve`], and when the copy fails.
    #[doc(alias = "try_extend_from_slice")]
    pub fn extend_from_slice(&mut self, elements: &[T]) -> Result<(), ContainerError> {
        self.reserve(elements.len())?;
        self.elements.write_at(self.len(), elements)?;
        self.elements.len += elements.len();
        Ok(())
    }

    /// Resizes the vector to `len` elements; new ones are `element`. They are written on the
    /// device: by a fill if all bytes of the element are equal (`cuMemsetD8Async`), or else by
    /// copies that double.
    ///
    /// # Errors
    /// Those of [`Self::extend_from_slice`].
    #[doc(alias = "try_resize")]
    pub fn resize(&mut self, len: usize, element: T) -> Result<(), ContainerError> {
        let Some(more) = len.checked_sub(self.len()).filter(|&more| more > 0) else {
            self.truncate(len);
            return Ok(());
        };
        self.reserve(more)?;
        let bytes = Elements::<T>::offset(self.len())?..Elements::<T>::offset(len)?;
        let queued = self.repeat(bytes, &element);
        // Work that was queued before a later call failed must not outlast this function.
        self.elements.home().settle()?;
        queued?;
        self.elements.len = len;
        Ok(())
    }

    /// Queues filling committed bytes with repetitions of an element.
    fn repeat(&self, bytes: Range<u64>, element: &T) -> Result<(), ContainerError> {
        let (region, home) = (&self.elements.region, self.elements.home());
        let pattern = bytemuck::bytes_of(element);
        let (first, others) = pattern.split_first().unwrap_or((&0, &[]));
        if others.iter().all(|byte| byte == first) {
            return Ok(region.fill(home, bytes, *first)?);
        }
        let all = bytes.end - bytes.start;
        let each = (REPEATED / pattern.len().max(1)).max(1) as u64 * pattern.len() as u64;
        let chunk = vec![
            *element;
            usize::try_from(each.min(all)).unwrap_or(REPEATED) / pattern.len().max(1)
        ];
        region.write(home, bytes.start, bytemuck::cast_slice(&chunk))?;
        // Each copy doubles the written part.
        let mut made = each.min(all);
        while made < all {
            let size = made.min(all - made);
            let from = bytes.start..bytes.start + size;
            region.copy_within(home, from, bytes.start + made)?;
            made += size;
        }
        Ok(())
    }

    /// Returns the elements behind the last one that have memory, for a kernel to write in order;
    /// [`assume_written`](Self::assume_written) then appends them. [`reserve`](Self::reserve)
    /// provides as many as needed. They hold zeros, or the bytes of removed elements.
    #[must_use]
    #[doc(alias = "vacant")]
    pub fn spare_capacity_mut(&mut self) -> ViewMut<'_, T> {
        let (len, vacant) = (self.len(), self.capacity() - self.len());
        self.elements.view_mut(len, vacant)
    }

    /// Appends elements that a kernel has written, or was launched to write, to
    /// [`spare_capacity_mut`](Self::spare_capacity_mut). Makes no driver call.
    ///
    /// # Errors
    /// [`ContainerError::Full`] when there is no memory for that number of elements.
    #[doc(alias = "produce")]
    #[doc(alias = "set_len")]
    pub fn assume_written(&mut self, elements: usize) -> Result<(), ContainerError> {
        let capacity = self.capacity();
        if elements > capacity - self.len() {
            return Err(self.full(elements, capacity));
        }
        self.elements.len += elements;
        Ok(())
    }

    /// Removes the elements from `len` on. Keeps the memory; makes no driver call.
    pub fn truncate(&mut self, len: usize) {
        self.elements.len = self.len().min(len);
    }

    /// Removes all elements. Keeps the memory.
    pub fn clear(&mut self) {
        self.elements.len = 0;
    }

    /// Registers the extents of the whole capacity, so that they can be registered with a NIC or
    /// with NCCL: none of them changes while the registration lives. The vector may grow meanwhile;
    /// the added extents need another registration. Makes no driver call.
    ///
    /// # Errors
    /// [`ContainerError::Memory`] when there is no capacity, or the context is lost.
    pub fn register(&self) -> Result<Registration, ContainerError> {
        Ok(self.elements.region.register(0..self.held)?)
    }

    /// Withdraws whole extents without elements, behind the work of the streams that used them, and
    /// releases those whose fence is complete; the rest is released by a later call.
    /// [Registered](Self::register) memory stays. Returns the bytes released; never waits.
    ///
    /// # Errors
    /// [`ContainerError`] from the driver; the elements stay.
    pub fn shrink_to_fit(&mut self) -> Result<u64, ContainerError> {
        let used = self.whole(self.len())?;
        let used = used.max(self.elements.region.registered_end());
        if used < self.held {
            self.elements.withdraw(used..self.held)?;
            self.held = used;
        }
        Ok(self.elements.region.give_back_pending()?)
    }

    /// Notes that work outside this library's streams uses the elements too, such as that of
    /// another library which was given the address. From then on, memory that the vector gives up
    /// waits for all work of the devices that have access.
    pub fn record_use_anywhere(&self) {
        self.elements.record_use_anywhere();
    }

    /// Returns the streams whose work may use the elements, the home stream first; `None` if all
    /// work of the devices that have access may.
    #[must_use]
    pub fn streams(&self) -> Option<Vec<Stream>> {
        self.elements.streams()
    }

    /// The devices that have access.
    #[cfg(feature = "dlpack")]
    pub(crate) fn users(&self) -> impl Iterator<Item = &Device> {
        self.elements.region.users()
    }

    /// Reads the element at an index.
    ///
    /// # Errors
    /// [`ContainerError`] when there is none, or the copy fails.
    pub fn get(&self, index: usize) -> Result<T, ContainerError> {
        self.elements.get(index)
    }

    /// Reads as many elements as `into` holds, from `first` on (`cuMemcpyDtoHAsync`, waited for).
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the vector, or the copy fails.
    pub fn read(&self, first: usize, into: &mut [T]) -> Result<(), ContainerError> {
        self.elements.read(first, into)
    }

    /// Overwrites elements from `first` on.
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the vector, or the copy fails.
    pub fn write(&mut self, first: usize, elements: &[T]) -> Result<(), ContainerError> {
        self.elements.bytes(&run(first, elements.len()))?;
        self.elements.write_at(first, elements)
    }

    /// Copies all elements to host memory.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn to_vec(&self) -> Result<Vec<T>, ContainerError> {
        let mut elements = vec![T::zeroed(); self.len()];
        self.read(0, &mut elements)?;
        Ok(elements)
    }

    /// Returns the elements for a kernel to read. Launch it on the home stream, or on one that was
    /// [recorded](Self::record_use).
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        self.elements.view(0, self.len())
    }

    /// Returns the elements for a kernel to write.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        let len = self.len();
        self.elements.view_mut(0, len)
    }

    /// Returns every extent of the vector, in order. Registering the memory elsewhere takes one
    /// registration for each.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.elements.region.extents()
    }

    /// The extents that contain elements, each with its physical, which is marked as exported.
    pub(crate) fn promise(&self) -> Vec<(Extent, Physical)> {
        let promised = self.elements.region.promise(0..self.bytes());
        promised.unwrap_or_default()
    }

    pub(crate) fn bytes(&self) -> u64 {
        bytes_of::<T>(self.len()).unwrap_or_default()
    }

    /// Checks that no registration may write to the vector, and that no capture is known that
    /// waiting for its devices would break.
    pub(crate) fn may_be_sealed(&self) -> Result<(), ShareError> {
        self.elements.check_none_captured()?;
        self.elements.region.may_be_sealed()
    }

    /// Waits for the work that writes to the vector, and makes it read-only.
    pub(crate) fn seal(&mut self) -> Result<(), ShareError> {
        self.may_be_sealed()?;
        self.elements.region.seal()
    }

    /// The bytes of a number of elements, rounded up to whole granules.
    fn whole(&self, elements: usize) -> Result<u64, ContainerError> {
        let bytes = self
            .device()
            .granule()
            .round_up(Elements::<T>::offset(elements)?);
        bytes.ok_or(Elements::<T>::wrong_size(elements).into())
    }

    fn full(&self, additional: usize, capacity: usize) -> ContainerError {
        let len = self.len();
        ContainerError::Full {
            len,
            additional,
            capacity,
        }
    }
}
