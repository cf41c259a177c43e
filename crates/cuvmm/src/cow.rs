//! A buffer whose snapshots cost no copy: both show the same memory, read-only, until one of them
//! says what it wants to write.
//!
//! A GPU has no write fault to catch: a kernel that writes to what is shared loses the context. So
//! the copy is made in [`make_mut`](CowBuffer::make_mut), extent by extent, and nowhere else.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;
use cuvmm_driver::DeviceAddress;

use crate::device::Device;
use crate::error::CowError;
use crate::own::Stream;
use crate::region::Region;
use crate::users::Users;
use crate::view::{View, ViewMut, bytes_of};

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
/// return. Work of other streams is named with [`record_use`](Self::record_use). Dropping it waits
/// for those streams.
pub struct CowBuffer<T: Pod> {
    region: Region,
    users: Users,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> CowBuffer<T> {
    /// An array of zeros (`cuMemAddressReserve`; `cuMemCreate`, `cuMemMap`, `cuMemSetAccess` for
    /// each extent of at most [`DEFAULT_COW_EXTENT`]).
    ///
    /// # Errors
    /// [`CowError`] when the elements have no size, the length is zero or too large, the stream is
    /// another device's, or the driver refuses.
    pub fn zeroed(device: &Device, home: &Stream, len: usize) -> Result<Self, CowError> {
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
    ) -> Result<Self, CowError> {
        if size_of::<T>() == 0 {
            return Err(CowError::ZeroSizedElements);
        }
        if !home.device().is_same(device) {
            return Err(CowError::WrongDevice);
        }
        let bytes = bytes_of::<T>(len).ok_or(CowError::TooLarge { elements: len })?;
        let mut region = Region::builder(device, bytes)
            .largest_extent(extent)
            .reserve()?;
        region.commit(0..region.size())?;
        Ok(Self {
            region,
            users: Users::at(home),
            len,
            elements: PhantomData,
        })
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

    /// Whether it has none, which it never has.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory it shows, [shared](Self::shared) ones included.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.region.held()
    }

    /// Bytes of it that a snapshot shows too.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.region.shared()
    }

    /// Notes that another stream uses the elements.
    ///
    /// # Errors
    /// [`CowError::WrongDevice`] when it is another device's.
    pub fn record_use(&mut self, stream: &Stream) -> Result<(), CowError> {
        if self.users.record(stream) {
            Ok(())
        } else {
            Err(CowError::WrongDevice)
        }
    }

    /// The elements as they are now, at addresses of their own: one more buffer of the same kind.
    /// No byte is copied; from now on both have to [`make_mut`](Self::make_mut) what they write.
    ///
    /// Waits for what the home stream and the recorded streams have queued, since it may still write
    /// here. Per extent one `cuMemMap` and two `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`CowError`] when the driver refuses; nothing has changed.
    pub fn snapshot(&mut self) -> Result<Self, CowError> {
        self.users.wait()?;
        let region = self.region.fork(&self.users.all())?;
        Ok(Self {
            region,
            users: Users::at(self.users.home()),
            len: self.len,
            elements: PhantomData,
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
    /// [`CowError`] when the elements are not all there, or there is no memory for the copies;
    /// nothing has changed then.
    pub fn make_mut(&mut self, range: Range<usize>) -> Result<ViewMut<'_, T>, CowError> {
        let bytes = self.bytes(&range)?;
        if !bytes.is_empty() {
            self.unshare(&bytes)?;
        }
        let len = range.end.saturating_sub(range.start);
        Ok(ViewMut::new(self.address_at(bytes.start), len, &self.users))
    }

    /// Overwrites elements from `first` on, which are [made](Self::make_mut) this buffer's own.
    ///
    /// # Errors
    /// As [`Self::make_mut`], and when the copy fails.
    pub fn write(&mut self, first: usize, elements: &[T]) -> Result<(), CowError> {
        let bytes = self.bytes(&(first..first.saturating_add(elements.len())))?;
        if elements.is_empty() {
            return Ok(());
        }
        self.unshare(&bytes)?;
        let source = bytemuck::cast_slice(elements);
        Ok(self.region.write(self.users.home(), bytes.start, source)?)
    }

    /// Reads as many elements as `into` holds, from `first` on.
    ///
    /// # Errors
    /// [`CowError`] when they are not all there, or the copy fails.
    pub fn read(&self, first: usize, into: &mut [T]) -> Result<(), CowError> {
        let bytes = self.bytes(&(first..first.saturating_add(into.len())))?;
        if into.is_empty() {
            return Ok(());
        }
        let into = bytemuck::cast_slice_mut(into);
        Ok(self.region.read(self.users.home(), bytes.start, into)?)
    }

    /// Reads the element at an index.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn get(&self, index: usize) -> Result<T, CowError> {
        let mut element = [T::zeroed()];
        self.read(index, &mut element)?;
        let [element] = element;
        Ok(element)
    }

    /// The elements for a kernel to read.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        View::new(self.address(), self.len, &self.users)
    }

    fn unshare(&mut self, bytes: &Range<u64>) -> Result<(), CowError> {
        if !self.region.is_read_only(bytes.clone()) {
            return Ok(());
        }
        let granule = self.device().granule();
        let whole = granule.round_down(bytes.start)
            ..granule.round_up(bytes.end).unwrap_or(self.region.size());
        let streams = self.users.all();
        self.region.unshare(whole, self.users.home(), &streams)?;
        Ok(())
    }

    /// Where elements lie that are there.
    fn bytes(&self, range: &Range<usize>) -> Result<Range<u64>, CowError> {
        let outside = CowError::OutOfRange {
            range: range.clone(),
            len: self.len,
        };
        if range.start > range.end || range.end > self.len {
            return Err(outside);
        }
        match (bytes_of::<T>(range.start), bytes_of::<T>(range.end)) {
            (Some(start), Some(end)) => Ok(start..end),
            _ => Err(outside),
        }
    }

    fn address_at(&self, offset: u64) -> DeviceAddress {
        let base = self.address();
        base.checked_add(offset).unwrap_or(base)
    }
}

impl<T: Pod> Drop for CowBuffer<T> {
    fn drop(&mut self) {
        self.users.end(&mut self.region);
    }
}

impl<T: Pod> fmt::Debug for CowBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CowBuffer")
            .field("address", &self.address())
            .field("len", &self.len)
            .field("shared", &self.shared())
            .finish_non_exhaustive()
    }
}
