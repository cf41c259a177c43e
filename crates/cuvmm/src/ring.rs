//! Ring buffers that never wrap for their readers and writers: the memory is mapped twice, one
//! range behind the other, so that any run of elements is one run of addresses.

use bytemuck::Pod;

use crate::device::Device;
use crate::elements::{Elements, is_container, run};
use crate::error::ContainerError;
use crate::own::Stream;
use crate::region::Region;
use crate::view::{View, ViewMut};

/// A queue of elements in device memory, in the order in which they were added.
///
/// The elements are always one contiguous range ([`filled`](Self::filled)), and so is the free
/// space ([`spare_capacity_mut`](Self::spare_capacity_mut)), so kernels see plain arrays. The two
/// mappings of the memory follow the coherence rule for aliases: see [`Region::alias`]. On one
/// stream the order of launches satisfies it.
///
/// Copies in and out are ordered behind the work queued on the home stream and complete when they
/// return. Dropping a ring buffer waits for the home stream and the recorded streams.
///
/// ```
/// use std::sync::Arc;
/// use cuvmm::driver::host::{HostDriver, HostOptions};
/// use cuvmm::{RingBuffer, Device, Stream};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(Arc::new(HostDriver::new(HostOptions::new())), 0)?;
/// let stream = Stream::new(&device)?;
/// let mut queue = RingBuffer::<u32>::new(&device, &stream, 1000)?;
/// queue.extend_from_slice(&[1, 2, 3])?;
/// let mut oldest = [0; 2];
/// queue.pop_into(&mut oldest)?;
/// assert_eq!((oldest, queue.len()), ([1, 2], 1));
/// // Launch kernels on `stream` that read `queue.filled()`.
/// # Ok(())
/// # }
/// ```
pub struct RingBuffer<T: Pod> {
    elements: Elements<T>,
    capacity: usize,
    /// The index of the oldest element, below the capacity.
    head: usize,
}

is_container!(RingBuffer [T: Pod] [T] elements);

impl<T: Pod> RingBuffer<T> {
    /// Creates a ring buffer for at least `capacity` elements, rounded up to fill whole granules.
    /// Reserves twice its size of addresses and allocates the memory once (`cuMemAddressReserve`;
    /// `cuMemCreate` and twice `cuMemMap` and `cuMemSetAccess` for each extent).
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have size zero, the capacity is zero or too large, the
    /// stream belongs to another device, or the driver refuses.
    pub fn new(device: &Device, home: &Stream, capacity: usize) -> Result<Self, ContainerError> {
        let bytes = Elements::<T>::check(device, home, capacity)?;
        let whole = device.granule().round_up_for(bytes, size_of::<T>() as u64);
        let sizes = whole.and_then(|bytes| Some((bytes, bytes.checked_mul(2)?)));
        let Some((bytes, twice)) = sizes else {
            return Err(Elements::<T>::wrong_size(capacity).into());
        };
        Self::in_half(Region::reserve(device, twice)?, home, bytes)
    }

    /// Creates a ring buffer in an empty region, for memory [of a
    /// tenant](crate::region#regions-in-a-tenant), that is
    /// [shareable](crate::region::RegionBuilder::shareable), or made for RDMA. Its capacity is what
    /// fits in half of the region in whole granules.
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have size zero, half of the region has no room for
    /// whole elements in whole granules, the region has memory already, the stream belongs to
    /// another device, or memory is refused.
    pub fn from_region(region: Region, home: &Stream) -> Result<Self, ContainerError> {
        let half = region.size() / 2;
        let capacity = Elements::<T>::count(half);
        Elements::<T>::check(region.device(), home, capacity)?;
        Elements::<T>::check_empty(&region)?;
        let granule = region.device().granule();
        let unit = granule.round_up_for(1, size_of::<T>() as u64);
        let bytes = unit.and_then(|unit| Some(half - half.checked_rem(unit)?));
        match bytes.filter(|&bytes| bytes > 0) {
            Some(bytes) => Self::in_half(region, home, bytes),
            None => Err(Elements::<T>::wrong_size(capacity).into()),
        }
    }

    fn in_half(mut region: Region, home: &Stream, bytes: u64) -> Result<Self, ContainerError> {
        region.commit(0..bytes)?;
        region.alias(0..bytes, bytes)?;
        Ok(Self {
            elements: Elements::new(region, home, 0),
            capacity: Elements::<T>::count(bytes),
            head: 0,
        })
    }

    /// Returns the number of elements that it can hold.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of elements that can be added.
    #[must_use]
    pub const fn free(&self) -> usize {
        self.capacity - self.len()
    }

    /// Adds elements behind the newest (one `cuMemcpyHtoDAsync`, waited for).
    ///
    /// # Errors
    /// [`ContainerError::Full`] when they do not all fit, and none is added; or when the copy
    /// fails.
    #[doc(alias = "try_push")]
    #[doc(alias = "push")]
    pub fn extend_from_slice(&mut self, elements: &[T]) -> Result<(), ContainerError> {
        self.room_for(elements.len())?;
        self.elements.write_at(self.tail(), elements)?;
        self.elements.len += elements.len();
        Ok(())
    }

    /// Removes the oldest elements and reads them (one `cuMemcpyDtoHAsync`, waited for).
    ///
    /// # Errors
    /// [`ContainerError::Argument`] when there are fewer than requested, and none is removed; or
    /// when the copy fails.
    pub fn pop_into(&mut self, into: &mut [T]) -> Result<(), ContainerError> {
        self.peek(0, into)?;
        self.consume(into.len())
    }

    /// Reads elements without removing them, from the `first` oldest on.
    ///
    /// # Errors
    /// Those of [`Self::pop_into`].
    pub fn peek(&self, first: usize, into: &mut [T]) -> Result<(), ContainerError> {
        self.elements.bytes(&run(first, into.len()))?;
        self.elements.read_at(self.head + first, into)
    }

    /// Returns all elements, oldest first, for a kernel to read.
    #[must_use]
    pub fn filled(&self) -> View<'_, T> {
        self.elements.view(self.head, self.len())
    }

    /// Returns the free space, for a kernel to write in order; [`produce`](Self::produce) then adds
    /// the elements.
    #[must_use]
    #[doc(alias = "vacant")]
    pub fn spare_capacity_mut(&mut self) -> ViewMut<'_, T> {
        let (tail, free) = (self.tail(), self.free());
        self.elements.view_mut(tail, free)
    }

    /// Adds elements that a kernel has written, or was launched to write, to
    /// [`spare_capacity_mut`](Self::spare_capacity_mut).
    ///
    /// # Errors
    /// [`ContainerError::Full`] when they exceed the free space.
    pub fn produce(&mut self, elements: usize) -> Result<(), ContainerError> {
        self.room_for(elements)?;
        self.elements.len += elements;
        Ok(())
    }

    /// Removes the oldest elements.
    ///
    /// # Errors
    /// [`ContainerError::Argument`] when there are fewer.
    pub fn consume(&mut self, elements: usize) -> Result<(), ContainerError> {
        self.elements.bytes(&(0..elements))?;
        self.head = self.wrapped(self.head + elements);
        self.elements.len -= elements;
        Ok(())
    }

    const fn room_for(&self, additional: usize) -> Result<(), ContainerError> {
        if additional > self.free() {
            return Err(ContainerError::Full {
                additional,
                len: self.len(),
                capacity: self.capacity,
            });
        }
        Ok(())
    }

    /// The index where the next element is written.
    const fn tail(&self) -> usize {
        self.wrapped(self.head + self.len())
    }

    /// Reduces an index below twice the capacity to one below the capacity.
    const fn wrapped(&self, place: usize) -> usize {
        if place < self.capacity {
            place
        } else {
            place - self.capacity
        }
    }
}
