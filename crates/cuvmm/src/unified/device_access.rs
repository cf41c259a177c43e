//! A device's access to the elements: a guard that lasts while kernels are being launched.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use bytemuck::Pod;
use cuvmm_driver::DeviceAddress;

use super::UnifiedBuffer;
use super::uses::{Kind, Use};
use crate::error::ContainerError;
use crate::own::Stream;

/// Elements for kernels of one stream to read. While it lives the host may view them too, and other
/// streams may read them.
///
/// Kernels that are launched on its stream while it lives belong to the access; whoever writes next
/// waits for them. So does a replay of a graph that is launched on the stream.
pub struct DeviceRead<'a, T> {
    address: DeviceAddress,
    len: usize,
    using: Use<'a>,
    elements: PhantomData<&'a [T]>,
}

/// Elements for kernels of one stream to write, and to read. While it lives nobody else uses them.
///
/// Kernels that are launched on its stream while it lives belong to the access; whoever uses the
/// elements next waits for them. So does a replay of a graph that is launched on the stream.
pub struct DeviceMut<'a, T> {
    read: DeviceRead<'a, T>,
    alone: PhantomData<&'a mut [T]>,
}

impl<T> DeviceRead<'_, T> {
    /// The first element's address, on every device; null if there is none.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// How many elements there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The stream to launch kernels on.
    #[must_use]
    pub const fn stream(&self) -> &Stream {
        self.using.stream()
    }
}

impl<'a, T> Deref for DeviceMut<'a, T> {
    type Target = DeviceRead<'a, T>;

    fn deref(&self) -> &DeviceRead<'a, T> {
        &self.read
    }
}

impl<T: Pod> UnifiedBuffer<T> {
    /// Begins an access to read, by kernels of a stream of this device or another of its driver. The
    /// stream comes behind what writes the elements (`cuStreamWaitEvent`); when the guard is dropped,
    /// an event marks its end (`cuEventRecord`). Waits only for an access that was leaked.
    ///
    /// # Errors
    /// [`ContainerError`] when the stream is another driver's or captures, its device cannot use
    /// managed memory as this one does, or a driver call fails.
    pub fn device_read(&self, stream: &Stream) -> Result<DeviceRead<'_, T>, ContainerError> {
        self.access(stream, Kind::Read)
    }

    /// Begins an access to write, by kernels of a stream of this device or another of its driver.
    /// The stream comes behind all that uses the elements. For the rest as
    /// [`device_read`](Self::device_read).
    ///
    /// # Errors
    /// As [`Self::device_read`].
    pub fn device_mut(&mut self, stream: &Stream) -> Result<DeviceMut<'_, T>, ContainerError> {
        Ok(DeviceMut {
            read: self.access(stream, Kind::Write)?,
            alone: PhantomData,
        })
    }

    fn access(&self, stream: &Stream, kind: Kind) -> Result<DeviceRead<'_, T>, ContainerError> {
        self.admit(stream.device())?;
        Ok(DeviceRead {
            address: self.address(),
            len: self.len(),
            using: self.uses.begin(stream, kind)?,
            elements: PhantomData,
        })
    }
}

impl<T> fmt::Debug for DeviceRead<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRead")
            .field("address", &self.address)
            .field("len", &self.len)
            .field("using", &self.using)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for DeviceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMut")
            .field("read", &self.read)
            .finish_non_exhaustive()
    }
}
