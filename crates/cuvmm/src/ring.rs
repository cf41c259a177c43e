//! A ring buffer that never wraps for whoever reads or writes it: its memory is mapped twice, side by
//! side, so that any run of elements is one run of addresses.

use bytemuck::Pod;

use crate::device::Device;
use crate::elements::{Elements, is_container, run};
use crate::error::ContainerError;
use crate::own::Stream;
use crate::region::Region;
use crate::view::{View, ViewMut};

/// A queue of elements in device memory, in the order in which they were added.
///
/// What is in it is always one contiguous range ([`filled`](Self::filled)), and so is what is free
/// ([`vacant`](Self::vacant)): kernels see plain arrays. The two views of the memory follow the rule
/// for aliases: see [`Region::alias`]. On one stream it is kept by the order of the launches.
///
/// Copies in and out are ordered behind what the home stream has queued and have ended when they
/// return. Dropping a ring waits for the home stream and the recorded ones.
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
/// queue.try_push(&[1, 2, 3])?;
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
    /// Where the oldest element lies, below the capacity.
    head: usize,
}

is_container!(RingBuffer [T: Pod] [T] elements);

impl<T: Pod> RingBuffer<T> {
    /// Makes a ring for at least `capacity` elements: as many as fill whole granules. Reserves twice
    /// its size of addresses and takes the memory once (`cuMemAddressReserve`; `cuMemCreate` and twice
    /// `cuMemMap` and `cuMemSetAccess` for each extent).
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have no size, the capacity is zero or too large, the
    /// stream is another device's, or the driver refuses.
    pub fn new(device: &Device, home: &Stream, capacity: usize) -> Result<Self, ContainerError> {
        let bytes = Elements::<T>::check(device, home, capacity)?;
        let whole = device.granule().round_up_for(bytes, size_of::<T>() as u64);
        let sizes = whole.and_then(|bytes| Some((bytes, bytes.checked_mul(2)?)));
        let Some((bytes, twice)) = sizes else {
            return Err(Elements::<T>::wrong_size(capacity).into());
        };
        let mut region = Region::reserve(device, twice)?;
        region.commit(0..bytes)?;
        region.alias(0..bytes, bytes)?;
        Ok(Self {
            elements: Elements::new(region, home, 0),
            capacity: Elements::<T>::count(bytes),
            head: 0,
        })
    }

    /// How many elements it can hold.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// How many elements can be added.
    #[must_use]
    pub const fn free(&self) -> usize {
        self.capacity - self.len()
    }

    /// Adds elements behind the newest (one `cuMemcpyHtoDAsync`, waited for).
    ///
    /// # Errors
    /// [`ContainerError::Full`] when they do not all fit, and nothing is added; or when the copy fails.
    pub fn try_push(&mut self, elements: &[T]) -> Result<(), ContainerError> {
        self.room_for(elements.len())?;
        self.elements.write_at(self.tail(), elements)?;
        self.elements.len += elements.len();
        Ok(())
    }

    /// Takes the oldest elements out (one `cuMemcpyDtoHAsync`, waited for).
    ///
    /// # Errors
    /// [`ContainerError::Argument`] when there are fewer than asked for, and none is taken; or when the
    /// copy fails.
    pub fn pop_into(&mut self, into: &mut [T]) -> Result<(), ContainerError> {
        self.peek(0, into)?;
        self.consume(into.len())
    }

    /// Reads elements without taking them out, from the `first` oldest on.
    ///
    /// # Errors
    /// As [`Self::pop_into`].
    pub fn peek(&self, first: usize, into: &mut [T]) -> Result<(), ContainerError> {
        self.elements.bytes(&run(first, into.len()))?;
        self.elements.read_at(self.head + first, into)
    }

    /// Everything in it, oldest first, for a kernel to read.
    #[must_use]
    pub fn filled(&self) -> View<'_, T> {
        self.elements.view(self.head, self.len())
    }

    /// What is free, for a kernel to write in order; [`produce`](Self::produce) then adds it.
    #[must_use]
    pub fn vacant(&mut self) -> ViewMut<'_, T> {
        let (tail, free) = (self.tail(), self.free());
        self.elements.view_mut(tail, free)
    }

    /// Adds elements that a kernel has written, or has been told to write, to
    /// [`vacant`](Self::vacant).
    ///
    /// # Errors
    /// [`ContainerError::Full`] when that is more than is free.
    pub fn produce(&mut self, elements: usize) -> Result<(), ContainerError> {
        self.room_for(elements)?;
        self.elements.len += elements;
        Ok(())
    }

    /// Drops the oldest elements.
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

    /// Where the next element goes.
    const fn tail(&self) -> usize {
        self.wrapped(self.head + self.len())
    }

    /// A place below the capacity for one below twice that.
    const fn wrapped(&self, place: usize) -> usize {
        if place < self.capacity {
            place
        } else {
            place - self.capacity
        }
    }
}
