//! A vector on the device: it grows in place, so its base address never changes and no byte is
//! copied when it does.
//!
//! It reserves addresses for as many elements as it may ever have and commits memory as far as it
//! is used: doubled up to 32 MiB, then in steps of 16 MiB or of an eighth of what it has. For one
//! owner: no budget, no sharing; that is [`pool`](crate::pool).

use std::ops::Range;

use bytemuck::Pod;

use crate::device::Device;
use crate::elements::{Elements, is_container, run};
use crate::error::{ContainerError, ShareError};
use crate::own::{Physical, Stream};
use crate::region::{Extent, Region, Registration};
use crate::view::{View, ViewMut, bytes_of};

/// Elements are repeated in host memory up to this number of bytes, and from there on the device.
const REPEATED: usize = 256 << 10;

/// A resizable array in device memory. Its address is fixed for life.
///
/// Copies in and out are ordered behind what its home stream has queued and have ended when they
/// return. Work of other streams is recorded with [`record_use`](Self::record_use): memory that the
/// vector gives up waits for it. Dropping a vector waits for those streams.
///
/// Every operation that can fail returns an error and leaves length and elements as they were; the
/// vector may have more capacity then.
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
/// numbers.try_extend_from_slice(&[1, 2, 3])?;
/// numbers.try_resize(1 << 20, 7)?;
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
    /// Makes an empty vector that may grow to `most` elements, used on `home`. Reserves addresses
    /// (`cuMemAddressReserve`) and takes no memory.
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have no size, `most` is zero or too large, or the stream
    /// is another device's.
    pub fn new(device: &Device, home: &Stream, most: usize) -> Result<Self, ContainerError> {
        let bytes = Elements::<T>::check(device, home, most)?;
        Ok(Self::build(Region::reserve(device, bytes)?, home, most))
    }

    /// Makes an empty vector in a region of the caller's making, with nothing in it yet: to be
    /// [shareable](crate::region::RegionBuilder::shareable), for RDMA, or in other extents. It may
    /// grow to as many elements as the region has room for.
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have no size, the region has memory already, or the
    /// stream is another device's.
    pub fn over(region: Region, home: &Stream) -> Result<Self, ContainerError> {
        let most = Elements::<T>::count(region.size());
        Elements::<T>::check(region.device(), home, most)?;
        if region.mappings() > 0 {
            return Err(ContainerError::RegionInUse {
                held: region.held(),
            });
        }
        Ok(Self::build(region, home, most))
    }

    fn build(region: Region, home: &Stream, most: usize) -> Self {
        Self {
            elements: Elements::new(region, home, 0),
            most,
            held: 0,
        }
    }

    /// How many elements it can have without asking the driver for memory.
    #[must_use]
    pub fn capacity(&self) -> usize {
        Elements::<T>::count(self.held).min(self.most)
    }

    /// How many elements it can have at all.
    #[must_use]
    pub const fn max_len(&self) -> usize {
        self.most
    }

    /// Makes room for `additional` elements more (`cuMemCreate`, `cuMemMap` and `cuMemSetAccess`
    /// for each extent), and for some beyond if there is memory for that.
    ///
    /// # Errors
    /// [`ContainerError`] when it would have more than [`max_len`](Self::max_len), or the driver has no
    /// memory.
    pub fn try_reserve(&mut self, additional: usize) -> Result<(), ContainerError> {
        let wanted = self.len().checked_add(additional);
        let Some(wanted) = wanted.filter(|&wanted| wanted <= self.most) else {
            return Err(self.full(additional, self.most));
        };
        let need = self.whole(wanted)?;
        if need > self.held {
            self.held = self.elements.region.grow(self.held, need)?;
        }
        Ok(())
    }

    /// Adds an element. A copy for one element takes some ten microseconds: rather
    /// [extend](Self::try_extend_from_slice).
    ///
    /// # Errors
    /// As [`Self::try_reserve`], and when the copy fails.
    pub fn try_push(&mut self, element: T) -> Result<(), ContainerError> {
        self.try_extend_from_slice(&[element])
    }

    /// Adds elements (`cuMemcpyHtoDAsync`, waited for).
    ///
    /// # Errors
    /// As [`Self::try_reserve`], and when the copy fails.
    pub fn try_extend_from_slice(&mut self, elements: &[T]) -> Result<(), ContainerError> {
        self.try_reserve(elements.len())?;
        self.elements.write_at(self.len(), elements)?;
        self.elements.len += elements.len();
        Ok(())
    }

    /// Makes it `len` elements long; new ones are `element`. They are made on the device: by a fill
    /// where all bytes of the element are the same (`cuMemsetD8Async`), else by copies of copies.
    ///
    /// # Errors
    /// As [`Self::try_extend_from_slice`].
    pub fn try_resize(&mut self, len: usize, element: T) -> Result<(), ContainerError> {
        let Some(more) = len.checked_sub(self.len()).filter(|&more| more > 0) else {
            self.truncate(len);
            return Ok(());
        };
        self.try_reserve(more)?;
        let bytes = Elements::<T>::offset(self.len())?..Elements::<T>::offset(len)?;
        let queued = self.repeat(bytes, &element);
        // What is queued when a later call fails must not outlast this one.
        self.elements.users.wait()?;
        queued?;
        self.elements.len = len;
        Ok(())
    }

    /// Queues filling bytes that are committed with an element again and again.
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
        // Each copy doubles what is there.
        let mut made = each.min(all);
        while made < all {
            let size = made.min(all - made);
            let from = bytes.start..bytes.start + size;
            region.copy_within(home, from, bytes.start + made)?;
            made += size;
        }
        Ok(())
    }

    /// What has memory behind the last element, for a kernel to write in order;
    /// [`produce`](Self::produce) then adds it. [Reserve](Self::try_reserve) to have as much as is
    /// wanted. It holds zeros, or what elements that are gone have left.
    #[must_use]
    pub fn vacant(&mut self) -> ViewMut<'_, T> {
        let (len, vacant) = (self.len(), self.capacity() - self.len());
        self.elements.view_mut(len, vacant)
    }

    /// Adds elements that a kernel has written, or has been told to write, to
    /// [`vacant`](Self::vacant). Makes no driver call.
    ///
    /// # Errors
    /// [`ContainerError::Full`] when there is no memory for that number of elements.
    pub fn produce(&mut self, elements: usize) -> Result<(), ContainerError> {
        let capacity = self.capacity();
        if elements > capacity - self.len() {
            return Err(self.full(elements, capacity));
        }
        self.elements.len += elements;
        Ok(())
    }

    /// Drops the elements from `len` on. Keeps the memory; makes no driver call.
    pub fn truncate(&mut self, len: usize) {
        self.elements.len = self.len().min(len);
    }

    /// Drops all elements. Keeps the memory.
    pub fn clear(&mut self) {
        self.elements.len = 0;
    }

    /// Proof for whoever registers memory with a NIC or with NCCL: the extents under all of the
    /// capacity, which stay as they are while it lives. The vector may grow meanwhile; what it
    /// grows by needs another. Makes no driver call.
    ///
    /// # Errors
    /// [`ContainerError::Memory`] when there is no capacity, or the context is lost.
    pub fn register(&self) -> Result<Registration, ContainerError> {
        Ok(self.elements.region.register(0..self.held)?)
    }

    /// Gives up memory that no element lies in, in whole extents, behind the work of the streams
    /// that used it, and gives back to the driver what has passed: what has not goes with the next
    /// call. What is [registered](Self::register) stays. Returns the bytes given back; never waits.
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
        Ok(self.elements.region.purge()?)
    }

    /// Notes that work which is on no stream of this library uses the elements too: that of another
    /// library which was given the address, say. Memory that the vector gives up waits for all work
    /// of the device from then on.
    pub fn record_use_anywhere(&self) {
        self.elements.users.record_anywhere();
    }

    /// The streams whose work may use the elements, the home first; nothing where that is all work
    /// of the device.
    #[must_use]
    pub fn streams(&self) -> Option<Vec<Stream>> {
        let users = &self.elements.users;
        (!users.are_anywhere()).then(|| users.all())
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
    /// [`ContainerError`] when they are not all there, or the copy fails.
    pub fn read(&self, first: usize, into: &mut [T]) -> Result<(), ContainerError> {
        self.elements.read(first, into)
    }

    /// Overwrites elements from `first` on.
    ///
    /// # Errors
    /// [`ContainerError`] when they are not all there, or the copy fails.
    pub fn write(&mut self, first: usize, elements: &[T]) -> Result<(), ContainerError> {
        self.elements.bytes(&run(first, elements.len()))?;
        self.elements.write_at(first, elements)
    }

    /// All elements, in host memory.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn to_vec(&self) -> Result<Vec<T>, ContainerError> {
        let mut elements = vec![T::zeroed(); self.len()];
        self.read(0, &mut elements)?;
        Ok(elements)
    }

    /// The elements for a kernel to read. Launching one is up to whoever can: on the home stream,
    /// or on one that was [recorded](Self::record_use).
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        self.elements.view(0, self.len())
    }

    /// The elements for a kernel to write.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        let len = self.len();
        self.elements.view_mut(0, len)
    }

    /// Every extent under it, in order: what whoever registers memory must register.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.elements.region.extents()
    }

    /// The extents that its elements lie in, with their memory, which counts as exported from here
    /// on.
    pub(crate) fn promise(&self) -> Vec<(Extent, Physical)> {
        let promised = self.elements.region.promise(0..self.bytes());
        promised.unwrap_or_default()
    }

    /// The bytes of its elements.
    pub(crate) fn bytes(&self) -> u64 {
        bytes_of::<T>(self.len()).unwrap_or_default()
    }

    /// Whether no registration of it may write.
    pub(crate) fn may_be_sealed(&self) -> Result<(), ShareError> {
        self.elements.region.may_be_sealed()
    }

    /// Waits for what writes to it, and lets nobody write any more.
    pub(crate) fn seal(&mut self) -> Result<(), ShareError> {
        self.elements.region.seal()
    }

    /// The bytes of a number of elements, in whole granules.
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
