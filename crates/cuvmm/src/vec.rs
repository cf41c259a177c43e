//! A vector on the device: it grows in place, so its base address never changes and no byte is
//! copied when it does.
//!
//! It reserves addresses for as many elements as it may ever have and commits memory as far as it
//! is used: doubled up to 32 MiB, then in steps of 16 MiB or of an eighth of what it has. For one owner: no budget, no sharing; that is
//! [`pool`](crate::pool).

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;
use cuvmm_driver::DeviceAddress;

use crate::device::Device;
use crate::error::{SealError, VecError};
use crate::own::{Physical, Stream};
use crate::region::{Extent, Region, Registration};
use crate::users::Users;
use crate::view::{View, ViewMut, bytes_of};

/// Elements are repeated in host memory up to so many bytes, and from there on the device.
const REPEATED: usize = 256 << 10;

/// A resizable array in device memory. Its address is fixed for life.
///
/// Copies in and out are ordered behind what its home stream has queued and have ended when they
/// return. Work of other streams is recorded with [`record_use`](Self::record_use): memory that the
/// vector gives up waits for it. Dropping a vector waits for those streams.
///
/// Every operation that can fail returns an error and leaves length and elements as they were; the
/// vector may have more capacity then.
pub struct DeviceVec<T: Pod> {
    region: Region,
    users: Users,
    len: usize,
    most: usize,
    /// Bytes that are committed, from the first on.
    held: u64,
    elements: PhantomData<T>,
}

impl<T: Pod> DeviceVec<T> {
    /// An empty vector that may grow to `most` elements, used on `home`. Reserves addresses
    /// (`cuMemAddressReserve`) and takes no memory.
    ///
    /// # Errors
    /// [`VecError`] when the elements have no size, `most` is zero or too large, or the stream is
    /// another device's.
    pub fn new(device: &Device, home: &Stream, most: usize) -> Result<Self, VecError> {
        Self::check(device, home)?;
        let bytes = bytes_of::<T>(most).ok_or(VecError::TooLarge { elements: most })?;
        Ok(Self::build(Region::reserve(device, bytes)?, home, most))
    }

    /// An empty vector in a region of the caller's making, with nothing in it yet: to be
    /// [shareable](crate::region::RegionBuilder::shareable), for RDMA, or in other extents. It may
    /// grow to as many elements as the region has room for.
    ///
    /// # Errors
    /// [`VecError`] when the elements have no size, the region has memory already, or the stream is
    /// another device's.
    pub fn over(region: Region, home: &Stream) -> Result<Self, VecError> {
        Self::check(region.device(), home)?;
        if region.mappings() > 0 {
            return Err(VecError::RegionInUse {
                held: region.held(),
            });
        }
        let most = usize::try_from(region.size()).unwrap_or(usize::MAX) / size_of::<T>().max(1);
        Ok(Self::build(region, home, most))
    }

    fn check(device: &Device, home: &Stream) -> Result<(), VecError> {
        if size_of::<T>() == 0 {
            return Err(VecError::ZeroSizedElements);
        }
        if !home.device().is_same(device) {
            return Err(VecError::WrongDevice);
        }
        Ok(())
    }

    fn build(region: Region, home: &Stream, most: usize) -> Self {
        Self {
            region,
            users: Users::at(home),
            len: 0,
            most,
            held: 0,
            elements: PhantomData,
        }
    }

    /// The first element's address; fixed for life.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.region.address()
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

    /// How many elements it has.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many elements it can have without asking the driver for memory.
    #[must_use]
    pub fn capacity(&self) -> usize {
        let fit = usize::try_from(self.held).unwrap_or(usize::MAX) / size_of::<T>().max(1);
        fit.min(self.most)
    }

    /// How many elements it can have at all.
    #[must_use]
    pub const fn max_len(&self) -> usize {
        self.most
    }

    /// Bytes of memory it holds: its capacity, and what it gave up and is still pending free.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.region.held()
    }

    /// Makes room for `additional` elements more (`cuMemCreate`, `cuMemMap` and `cuMemSetAccess`
    /// for each extent), and for some beyond if there is memory for that.
    ///
    /// # Errors
    /// [`VecError`] when it would have more than [`max_len`](Self::max_len), or the driver has no
    /// memory.
    pub fn try_reserve(&mut self, additional: usize) -> Result<(), VecError> {
        let wanted = self.longer_by(additional)?;
        let granule = self.device().granule();
        let too_large = VecError::TooLarge { elements: wanted };
        let Some(need) = bytes_of::<T>(wanted).and_then(|bytes| granule.round_up(bytes)) else {
            return Err(too_large);
        };
        if need <= self.held {
            return Ok(());
        }
        self.held = self.region.grow(self.held, need)?;
        Ok(())
    }

    /// Adds an element. A copy for one element takes some ten microseconds: rather
    /// [extend](Self::try_extend_from_slice).
    ///
    /// # Errors
    /// As [`Self::try_reserve`], and when the copy fails.
    pub fn try_push(&mut self, element: T) -> Result<(), VecError> {
        self.try_extend_from_slice(&[element])
    }

    /// Adds elements (`cuMemcpyHtoDAsync`, waited for).
    ///
    /// # Errors
    /// As [`Self::try_reserve`], and when the copy fails.
    pub fn try_extend_from_slice(&mut self, elements: &[T]) -> Result<(), VecError> {
        self.try_reserve(elements.len())?;
        self.put(self.len, elements)?;
        self.len += elements.len();
        Ok(())
    }

    /// Makes it `len` elements long; new ones are `element`. They are made on the device: by a fill
    /// where all bytes of the element are the same (`cuMemsetD8Async`), else by copies of copies.
    ///
    /// # Errors
    /// As [`Self::try_extend_from_slice`].
    pub fn try_resize(&mut self, len: usize, element: T) -> Result<(), VecError> {
        let Some(more) = len.checked_sub(self.len) else {
            self.len = len;
            return Ok(());
        };
        if more == 0 {
            return Ok(());
        }
        self.try_reserve(more)?;
        let (Some(start), Some(end)) = (bytes_of::<T>(self.len), bytes_of::<T>(len)) else {
            return Err(VecError::TooLarge { elements: len });
        };
        let queued = self.repeat(start..end, &element);
        // What is queued when a later call fails must not outlast this one.
        self.users.wait()?;
        queued?;
        self.len = len;
        Ok(())
    }

    /// Queues filling bytes that are committed with an element again and again.
    fn repeat(&self, bytes: Range<u64>, element: &T) -> Result<(), VecError> {
        let home = self.users.home();
        let pattern = bytemuck::bytes_of(element);
        let (first, others) = pattern.split_first().unwrap_or((&0, &[]));
        if others.iter().all(|byte| byte == first) {
            return Ok(self.region.fill(home, bytes, *first)?);
        }
        let all = bytes.end - bytes.start;
        let each = (REPEATED / pattern.len().max(1)).max(1) as u64 * pattern.len() as u64;
        let chunk = vec![
            *element;
            usize::try_from(each.min(all)).unwrap_or(REPEATED) / pattern.len().max(1)
        ];
        self.region
            .write(home, bytes.start, bytemuck::cast_slice(&chunk))?;
        // Each copy doubles what is there.
        let mut made = each.min(all);
        while made < all {
            let size = made.min(all - made);
            let from = bytes.start..bytes.start + size;
            self.region.copy_within(home, from, bytes.start + made)?;
            made += size;
        }
        Ok(())
    }

    /// What has memory behind the last element, for a kernel to write in order;
    /// [`produce`](Self::produce) then adds it. [Reserve](Self::try_reserve) to have as much as is
    /// wanted. It holds zeros, or what elements that are gone have left.
    #[must_use]
    pub fn vacant(&mut self) -> ViewMut<'_, T> {
        let offset = bytes_of::<T>(self.len).unwrap_or_default();
        let base = self.address();
        let address = base.checked_add(offset).unwrap_or(base);
        ViewMut::new(address, self.capacity() - self.len, &self.users)
    }

    /// Adds elements that a kernel has written, or has been told to write, to
    /// [`vacant`](Self::vacant). Makes no driver call.
    ///
    /// # Errors
    /// [`VecError::OverCapacity`] when there is no memory for so many.
    pub fn produce(&mut self, elements: usize) -> Result<(), VecError> {
        let capacity = self.capacity();
        if elements > capacity - self.len {
            return Err(VecError::OverCapacity {
                len: self.len,
                additional: elements,
                capacity,
            });
        }
        self.len += elements;
        Ok(())
    }

    /// Drops the elements from `len` on. Keeps the memory; makes no driver call.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Drops all elements. Keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Proof for whoever registers memory with a NIC or with NCCL: the extents under all of the
    /// capacity, which stay as they are while it lives. The vector may grow meanwhile; what it
    /// grows by needs another. Makes no driver call.
    ///
    /// # Errors
    /// [`VecError::RegisterRange`] when there is no capacity, or the context is lost.
    pub fn register(&self) -> Result<Registration, VecError> {
        Ok(self.region.register(0..self.held)?)
    }

    /// Gives up memory that no element lies in, in whole extents, behind the work of the streams
    /// that used it, and gives back to the driver what has passed: what has not goes with the next
    /// call. What is [registered](Self::register) stays. Returns the bytes given back; never waits.
    ///
    /// # Errors
    /// [`VecError`] from the driver; the elements stay.
    pub fn shrink_to_fit(&mut self) -> Result<u64, VecError> {
        let granule = self.device().granule();
        let used = bytes_of::<T>(self.len).and_then(|bytes| granule.round_up(bytes));
        let used = used.unwrap_or(self.held);
        let used = used.max(self.region.registered_end());
        if used < self.held {
            let unused = used..self.held;
            if self.users.are_anywhere() {
                self.region.decommit(unused)?;
            } else {
                self.region.decommit_after(unused, &self.users.all())?;
            }
            self.held = used;
        }
        Ok(self.region.purge()?)
    }

    /// Notes that another stream uses the elements.
    ///
    /// # Errors
    /// [`VecError::WrongDevice`] when it is another device's.
    pub fn record_use(&mut self, stream: &Stream) -> Result<(), VecError> {
        if self.users.record(stream) {
            Ok(())
        } else {
            Err(VecError::WrongDevice)
        }
    }

    /// Notes that work which is on no stream of this library uses the elements too: that of another
    /// library which was given the address, say. Memory that the vector gives up waits for all work
    /// of the device from then on.
    pub fn record_use_anywhere(&self) {
        self.users.record_anywhere();
    }

    /// The streams whose work may use the elements, the home first; nothing where that is all work
    /// of the device.
    #[must_use]
    pub fn streams(&self) -> Option<Vec<Stream>> {
        (!self.users.are_anywhere()).then(|| self.users.all())
    }

    /// Reads the element at an index.
    ///
    /// # Errors
    /// [`VecError`] when there is none, or the copy fails.
    pub fn get(&self, index: usize) -> Result<T, VecError> {
        let mut element = [T::zeroed()];
        self.read(index, &mut element)?;
        let [element] = element;
        Ok(element)
    }

    /// Reads as many elements as `into` holds, from `first` on (`cuMemcpyDtoHAsync`, waited for).
    ///
    /// # Errors
    /// [`VecError`] when they are not all there, or the copy fails.
    pub fn read(&self, first: usize, into: &mut [T]) -> Result<(), VecError> {
        let offset = self.offset_of(first, into.len())?;
        if into.is_empty() {
            return Ok(());
        }
        let bytes = bytemuck::cast_slice_mut(into);
        Ok(self.region.read(self.users.home(), offset, bytes)?)
    }

    /// Overwrites elements from `first` on.
    ///
    /// # Errors
    /// [`VecError`] when they are not all there, or the copy fails.
    pub fn write(&mut self, first: usize, elements: &[T]) -> Result<(), VecError> {
        self.offset_of(first, elements.len())?;
        self.put(first, elements)
    }

    /// All elements, in host memory.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn to_vec(&self) -> Result<Vec<T>, VecError> {
        let mut elements = vec![T::zeroed(); self.len];
        self.read(0, &mut elements)?;
        Ok(elements)
    }

    /// The elements for a kernel to read. Launching one is up to whoever can: on the home stream,
    /// or on one that was [recorded](Self::record_use).
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        View::new(self.address(), self.len, &self.users)
    }

    /// The elements for a kernel to write.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut::new(self.address(), self.len, &self.users)
    }

    /// Every extent under it, in order: what whoever registers memory must register.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.region.extents()
    }

    /// The extents that its elements lie in, with their memory, which counts as exported from here
    /// on.
    pub(crate) fn promise(&self) -> Vec<(Extent, Physical)> {
        self.region.promise(0..self.bytes()).unwrap_or_default()
    }

    /// The bytes of its elements.
    pub(crate) fn bytes(&self) -> u64 {
        bytes_of::<T>(self.len).unwrap_or_default()
    }

    /// Whether no registration of it may write.
    pub(crate) fn may_be_sealed(&self) -> Result<(), SealError> {
        self.region.may_be_sealed()
    }

    /// Waits for what writes to it, and lets nobody write any more.
    pub(crate) fn seal(&mut self) -> Result<(), SealError> {
        self.region.seal()
    }

    /// Writes where there is capacity.
    fn put(&self, first: usize, elements: &[T]) -> Result<(), VecError> {
        if elements.is_empty() {
            return Ok(());
        }
        let offset = bytes_of::<T>(first).ok_or(VecError::TooLarge { elements: first })?;
        let bytes = bytemuck::cast_slice(elements);
        Ok(self.region.write(self.users.home(), offset, bytes)?)
    }

    fn longer_by(&self, additional: usize) -> Result<usize, VecError> {
        let wanted = self.len.checked_add(additional);
        wanted
            .filter(|&wanted| wanted <= self.most)
            .ok_or(VecError::OverReserved {
                len: self.len,
                additional,
                most: self.most,
            })
    }

    /// Where elements lie that are there.
    fn offset_of(&self, first: usize, count: usize) -> Result<u64, VecError> {
        let range = Range {
            start: first,
            end: first.saturating_add(count),
        };
        let outside = VecError::OutOfRange {
            range: range.clone(),
            len: self.len,
        };
        match bytes_of::<T>(first) {
            Some(offset) if range.end <= self.len => Ok(offset),
            _ => Err(outside),
        }
    }
}

impl<T: Pod> Drop for DeviceVec<T> {
    fn drop(&mut self) {
        self.users.end(&mut self.region);
    }
}

impl<T: Pod> fmt::Debug for DeviceVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceVec")
            .field("address", &self.address())
            .field("len", &self.len)
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}
