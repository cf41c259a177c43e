//! A ring buffer that never wraps for whoever reads or writes it: its memory is mapped twice, side by
//! side, so that any run of elements is one run of addresses.

use std::fmt;

use bytemuck::Pod;
use cuvmm_driver::DeviceAddress;

use crate::device::Device;
use crate::error::RingError;
use crate::own::Stream;
use crate::region::Region;
use crate::users::Users;
use crate::view::{View, ViewMut, bytes_of};

/// A queue of elements in device memory, in the order in which they were added.
///
/// What is in it is always one contiguous range ([`filled`](Self::filled)), and so is what is free
/// ([`vacant`](Self::vacant)): kernels see plain arrays. The two views of the memory follow the rule
/// for aliases: see [`Region::alias`]. On one stream it is kept by the order of the launches.
///
/// Copies in and out are ordered behind what the home stream has queued and have ended when they
/// return. Dropping it waits for those streams.
pub struct RingBuffer<T: Pod> {
    region: Region,
    users: Users,
    capacity: usize,
    /// Where the oldest element lies, below the capacity.
    head: usize,
    len: usize,
    elements: std::marker::PhantomData<T>,
}

impl<T: Pod> RingBuffer<T> {
    /// A ring for at least `capacity` elements: as many as fill whole granules. Reserves twice its
    /// size of addresses and takes the memory once (`cuMemAddressReserve`; `cuMemCreate` and twice
    /// `cuMemMap` and `cuMemSetAccess` for each extent).
    ///
    /// # Errors
    /// [`RingError`] when the elements have no size, the capacity is zero or too large, the stream
    /// is another device's, or the driver refuses.
    pub fn new(device: &Device, home: &Stream, capacity: usize) -> Result<Self, RingError> {
        if size_of::<T>() == 0 {
            return Err(RingError::ZeroSizedElements);
        }
        if capacity == 0 {
            return Err(RingError::ZeroCapacity);
        }
        if !home.device().is_same(device) {
            return Err(RingError::WrongDevice);
        }
        let too_large = RingError::TooLarge { elements: capacity };
        let whole = bytes_of::<T>(capacity)
            .and_then(|bytes| device.granule().round_up_for(bytes, size_of::<T>() as u64));
        let Some((bytes, twice)) = whole.and_then(|bytes| Some((bytes, bytes.checked_mul(2)?)))
        else {
            return Err(too_large);
        };
        let capacity = bytes.checked_div(size_of::<T>() as u64);
        let Some(capacity) = capacity.and_then(|count| usize::try_from(count).ok()) else {
            return Err(too_large);
        };
        let mut region = Region::reserve(device, twice)?;
        region.commit(0..bytes)?;
        region.alias(0..bytes, bytes)?;
        Ok(Self {
            region,
            users: Users::at(home),
            capacity,
            head: 0,
            len: 0,
            elements: std::marker::PhantomData,
        })
    }

    /// How many elements it can hold.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// How many elements are in it.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is in it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many elements can be added.
    #[must_use]
    pub const fn free(&self) -> usize {
        self.capacity - self.len
    }

    /// Bytes of memory it holds; half of its addresses.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.region.held()
    }

    /// The device it lies on.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.region.device()
    }

    /// The stream it is used on.
    #[must_use]
    pub const fn home_stream(&self) -> &Stream {
        self.users.home()
    }

    /// Adds elements behind the newest (one `cuMemcpyHtoDAsync`, waited for).
    ///
    /// # Errors
    /// [`RingError::Full`] when they do not all fit, and nothing is added; or when the copy fails.
    pub fn try_push(&mut self, elements: &[T]) -> Result<(), RingError> {
        self.room_for(elements.len())?;
        if !elements.is_empty() {
            let offset = self.offset(self.tail())?;
            let bytes = bytemuck::cast_slice(elements);
            self.region.write(self.users.home(), offset, bytes)?;
        }
        self.len += elements.len();
        Ok(())
    }

    /// Takes the oldest elements out (one `cuMemcpyDtoHAsync`, waited for).
    ///
    /// # Errors
    /// [`RingError::Short`] when there are fewer than asked for, and none is taken; or when the copy
    /// fails.
    pub fn pop_into(&mut self, into: &mut [T]) -> Result<(), RingError> {
        self.peek(0, into)?;
        self.consume(into.len())
    }

    /// Reads elements without taking them out, from the `first` oldest on.
    ///
    /// # Errors
    /// As [`Self::pop_into`].
    pub fn peek(&self, first: usize, into: &mut [T]) -> Result<(), RingError> {
        self.enough_for(first.saturating_add(into.len()))?;
        if into.is_empty() {
            return Ok(());
        }
        let offset = self.offset(self.head + first)?;
        let bytes = bytemuck::cast_slice_mut(into);
        Ok(self.region.read(self.users.home(), offset, bytes)?)
    }

    /// Everything in it, oldest first, for a kernel to read.
    #[must_use]
    pub fn filled(&self) -> View<'_, T> {
        View::new(self.address_of(self.head), self.len, &self.users)
    }

    /// What is free, for a kernel to write in order; [`produce`](Self::produce) then adds it.
    #[must_use]
    pub fn vacant(&mut self) -> ViewMut<'_, T> {
        ViewMut::new(self.address_of(self.tail()), self.free(), &self.users)
    }

    /// Adds elements that a kernel has written, or has been told to write, to
    /// [`vacant`](Self::vacant).
    ///
    /// # Errors
    /// [`RingError::Full`] when that is more than is free.
    pub fn produce(&mut self, elements: usize) -> Result<(), RingError> {
        self.room_for(elements)?;
        self.len += elements;
        Ok(())
    }

    /// Drops the oldest elements.
    ///
    /// # Errors
    /// [`RingError::Short`] when there are fewer.
    pub fn consume(&mut self, elements: usize) -> Result<(), RingError> {
        self.enough_for(elements)?;
        self.head = self.wrapped(self.head + elements);
        self.len -= elements;
        Ok(())
    }

    const fn room_for(&self, additional: usize) -> Result<(), RingError> {
        if additional > self.free() {
            return Err(RingError::Full {
                additional,
                len: self.len,
                capacity: self.capacity,
            });
        }
        Ok(())
    }

    const fn enough_for(&self, wanted: usize) -> Result<(), RingError> {
        if wanted > self.len {
            return Err(RingError::Short {
                wanted,
                len: self.len,
            });
        }
        Ok(())
    }

    /// Where the next element goes.
    const fn tail(&self) -> usize {
        self.wrapped(self.head + self.len)
    }

    /// A place below the capacity for one below twice that.
    const fn wrapped(&self, place: usize) -> usize {
        if place < self.capacity {
            place
        } else {
            place - self.capacity
        }
    }

    fn offset(&self, place: usize) -> Result<u64, RingError> {
        bytes_of::<T>(place).ok_or(RingError::TooLarge { elements: place })
    }

    fn address_of(&self, place: usize) -> DeviceAddress {
        let base = self.region.address();
        let offset = bytes_of::<T>(place).unwrap_or_default();
        base.checked_add(offset).unwrap_or(base)
    }
}

impl<T: Pod> Drop for RingBuffer<T> {
    fn drop(&mut self) {
        self.users.end(&mut self.region);
    }
}

impl<T: Pod> fmt::Debug for RingBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingBuffer")
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}
