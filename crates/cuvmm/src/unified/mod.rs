//! Unified buffers: one address for the host and the devices, whose pages migrate.
//!
//! The driver moves pages of managed memory to the device or host that accesses them. It can be
//! advised where they should be ([`advise`](UnifiedBuffer::advise),
//! [`set_policy`](UnifiedBuffer::set_policy)), or move them ahead of use
//! ([`prefetch`](UnifiedBuffer::prefetch)). A device's access is a guard, the host's access a view,
//! and each waits for those that it conflicts with. A buffer has no limit but the memory of the
//! host and the device.
//!
//! Kernels are launched by the program, not here.

mod advice;
mod copies;
mod device_access;
mod host_access;
mod policy;
mod uses;

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};

use bytemuck::Pod;
use cuvmm_driver::{DeviceAddress, Ordinal};

use crate::device::Device;
use crate::error::{ArgumentError, CallError, ContainerError, MemoryError};
use crate::own::{CloseError, Managed, Stream};
use crate::sync::Mutex;

pub use advice::{Advice, PageLocation};
pub use device_access::{DeviceMut, DeviceRead};
pub use host_access::{HostView, HostViewMut};
pub use policy::Policy;

use policy::AdviceRecord;
use uses::Uses;

/// A fixed number of elements in managed memory, for the host and all devices of a driver.
///
/// - **Devices** use it under a guard: [`device_read`](Self::device_read),
///   [`device_mut`](Self::device_mut). A stream that begins an access is ordered behind conflicting
///   accesses of other streams, on the device and without waiting.
/// - **The host** uses it in a view: [`host`](Self::host), [`host_mut`](Self::host_mut). Creating
///   one waits for conflicting device accesses. Views are refused if a device cannot work while the
///   host accesses managed memory.
/// - **Copies** ([`read`](Self::read), [`write`](Self::write), [`fill`](Self::fill)) run on the
///   home stream and work on every device.
///
/// A leaked guard is sound: a conflicting access waits for its stream. An operation on a stream
/// that captures a graph is refused; captures elsewhere are not disturbed.
///
/// Dropping a buffer waits for the work that uses it. A buffer may have no elements; then it has no
/// memory.
///
/// ```
/// use std::sync::Arc;
/// use cuvmm::driver::host::{HostDriver, HostOptions};
/// use cuvmm::{Device, Stream, UnifiedBuffer};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(Arc::new(HostDriver::new(HostOptions::new())), 0)?;
/// let stream = Stream::new(&device)?;
/// let mut counts = UnifiedBuffer::<u32>::zeroed(&device, &stream, 1000)?;
/// counts.host_mut()?[7] = 42;
/// {
///     let access = counts.device_mut(&stream)?;
///     // Launch kernels on `stream` that use `access.len()` numbers at `access.address()`.
/// #   let _ = access.address();
/// }
/// assert_eq!(counts.host()?[7], 42);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ManagedBuffer")]
#[doc(alias = "cuMemAllocManaged")]
#[doc(alias = "unified memory")]
#[doc(alias = "managed memory")]
pub struct UnifiedBuffer<T: Pod> {
    /// `None` if there are no elements.
    memory: Option<Managed>,
    device: Device,
    home: Stream,
    len: usize,
    /// A device of the driver that cannot work while the host accesses managed memory.
    unshared: Option<Ordinal>,
    uses: Uses,
    told: Mutex<AdviceRecord>,
    elements: PhantomData<T>,
}

impl<T: Pod> UnifiedBuffer<T> {
    /// Creates a buffer of `len` zeroed elements, used on `home` (`cuMemAllocManaged` for all
    /// streams of all devices; `cuMemsetD8Async`, which may still be running when this returns).
    ///
    /// # Errors
    /// [`ContainerError`] when the elements have size zero or too many bytes, the stream belongs to
    /// another device or captures, or there is no such memory.
    #[doc(alias = "alloc")]
    pub fn zeroed(device: &Device, home: &Stream, len: usize) -> Result<Self, ContainerError> {
        let mut buffer = Self::allocate(device, home, len)?;
        buffer.fill(.., T::zeroed())?;
        Ok(buffer)
    }

    /// Creates a buffer of the given elements, used on `home` (`cuMemAllocManaged`;
    /// `cuMemcpyHtoDAsync`, waited for).
    ///
    /// # Errors
    /// Those of [`Self::zeroed`], and when the copy fails.
    pub fn from_slice(
        device: &Device,
        home: &Stream,
        elements: &[T],
    ) -> Result<Self, ContainerError> {
        let mut buffer = Self::allocate(device, home, elements.len())?;
        buffer.write(0, elements)?;
        Ok(buffer)
    }

    fn allocate(device: &Device, home: &Stream, len: usize) -> Result<Self, ContainerError> {
        ArgumentError::not_zero("bytes of an element", size_of::<T>() as u64)?;
        home.check_on(device)?;
        let most = isize::MAX.unsigned_abs() / size_of::<T>().max(1);
        ArgumentError::at_most("elements", len as u64, most as u64)?;
        let bytes = bytes_of::<T>(len);
        let unshared = Managed::first_unshared(device)?;
        let memory = if len == 0 {
            None
        } else {
            Some(Managed::new(device, bytes)?)
        };
        let address = memory
            .as_ref()
            .map_or(DeviceAddress::NULL, Managed::address);
        let align = align_of::<T>();
        ArgumentError::aligned("the address of managed memory", address.0, align as u64)?;
        Ok(Self {
            memory,
            device: device.clone(),
            home: home.clone(),
            len,
            unshared,
            uses: Uses::default(),
            told: Mutex::new(AdviceRecord::nothing(bytes)),
            elements: PhantomData,
        })
    }

    /// Returns the device that it was allocated on.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the stream that copies and fills run on.
    #[must_use]
    pub const fn home_stream(&self) -> &Stream {
        &self.home
    }

    /// Returns the number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the size in bytes.
    #[must_use]
    #[doc(alias = "byte_size")]
    pub fn size(&self) -> u64 {
        bytes_of::<T>(self.len)
    }

    /// Returns `true` if the host can view it: no device of the driver lacks concurrent managed
    /// access (attribute 89).
    #[must_use]
    pub const fn is_host_accessible(&self) -> bool {
        self.unshared.is_none()
    }

    /// Frees the buffer once the work that uses it is complete (`cuMemFree`), or returns it with
    /// the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the buffer in it when the work cannot be waited for, or the driver
    /// refuses. It always does once the context is lost; the memory is freed with the context.
    #[doc(alias = "cuMemFree")]
    #[allow(clippy::result_large_err, reason = "the owner is handed back as it is")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let freed = self.free();
        CloseError::of(self, freed)
    }

    fn free(&mut self) -> Result<(), CallError> {
        let Some(memory) = &mut self.memory else {
            return Ok(());
        };
        self.uses.drain()?;
        memory.free()?;
        self.memory = None;
        Ok(())
    }

    /// The address of the first element; null if there are none.
    fn address(&self) -> DeviceAddress {
        self.memory
            .as_ref()
            .map_or(DeviceAddress::NULL, Managed::address)
    }

    /// Converts a range of elements, and checks that it is inside the buffer.
    fn elements(&self, range: impl RangeBounds<usize>) -> Result<Range<usize>, ContainerError> {
        let start = match range.start_bound() {
            Bound::Included(&start) => Some(start),
            Bound::Excluded(&before) => before.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.checked_add(1),
            Bound::Excluded(&end) => Some(end),
            Bound::Unbounded => Some(self.len),
        };
        let range = start.unwrap_or(usize::MAX)..end.unwrap_or(usize::MAX);
        if range.start <= range.end && range.end <= self.len {
            Ok(range)
        } else {
            Err(ArgumentError::outside("elements", &range, self.len).into())
        }
    }

    /// The range of `count` elements from `first` on, if it is inside the buffer.
    fn run(&self, first: usize, count: usize) -> Result<Range<usize>, ContainerError> {
        self.elements(first..first.saturating_add(count))
    }

    /// Checks that a device may use the buffer.
    fn admit(&self, device: &Device) -> Result<(), ContainerError> {
        if device.is_same(&self.device) {
            return Ok(());
        }
        device.check_driver(&self.device)?;
        let ordinal = device.ordinal();
        if !Managed::is_supported(device)? {
            let (device, what) = (device.location(), "managed memory");
            return Err(MemoryError::NotSupported { device, what }.into());
        }
        if !Managed::is_concurrent(device)? {
            return Err(ContainerError::NoConcurrentAccess(ordinal));
        }
        Ok(())
    }

    /// Refuses an operation that requires concurrent managed access of all devices.
    const fn shared(&self) -> Result<(), ContainerError> {
        match self.unshared {
            Some(device) => Err(ContainerError::NoConcurrentAccess(device)),
            None => Ok(()),
        }
    }

    /// The memory, if the range is not empty: the driver accepts no empty range.
    pub(super) fn memory_of(&self, range: &Range<usize>) -> Option<&Managed> {
        self.memory.as_ref().filter(|_| !range.is_empty())
    }

    /// Checks that a device can migrate pages while others use them.
    fn moves_on(&self, device: &Device) -> Result<(), ContainerError> {
        let ordinal = self.device().ordinal();
        if device.is_same(self.device()) && self.unshared == Some(ordinal) {
            return Err(ContainerError::NoConcurrentAccess(ordinal));
        }
        self.admit(device)
    }
}

/// The bytes of a number of elements that fit in one object.
fn bytes_of<T>(elements: usize) -> u64 {
    (elements as u64).saturating_mul(size_of::<T>() as u64)
}

fn bytes_at<T>(elements: &Range<usize>) -> Range<u64> {
    bytes_of::<T>(elements.start)..bytes_of::<T>(elements.end)
}

impl<T: Pod> Drop for UnifiedBuffer<T> {
    fn drop(&mut self) {
        let waited = self.uses.drain();
        let (Err(error), Some(memory)) = (waited, &mut self.memory) else {
            // Dropping the memory frees it, and reports a failure.
            return;
        };
        memory.abandon();
        self.device
            .report_drop("unified buffer", memory.size(), error);
    }
}

impl<T: Pod> fmt::Debug for UnifiedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnifiedBuffer")
            .field("address", &self.address())
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

fn failed<T>(elements: &Range<usize>, cause: CallError) -> MemoryError {
    let bytes = bytes_at::<T>(elements);
    MemoryError::range(bytes.start, bytes.end - bytes.start, cause)
}
