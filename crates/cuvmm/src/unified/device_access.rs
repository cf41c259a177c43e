//! Access of a device to the elements: a guard that lives while kernels are being launched.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use bytemuck::Pod;
use cuvmm_driver::DeviceAddress;

use super::UnifiedBuffer;
use super::uses::{Kind, Use};
use crate::error::ContainerError;
use crate::own::Stream;

/// Elements for kernels of one stream to read. While the guard lives the host may view them too,
/// and other streams may read them.
///
/// Kernels launched on its stream while the guard lives belong to the access, and so does a replay
/// of a graph launched on the stream. Later writes wait for them.
pub struct DeviceRead<'a, T> {
    address: DeviceAddress,
    len: usize,
    using: Use<'a>,
    elements: PhantomData<&'a [T]>,
}

/// Elements for kernels of one stream to write and read. While the guard lives nothing else uses
/// them.
///
/// Kernels launched on its stream while the guard lives belong to the access, and so does a replay
/// of a graph launched on the stream. Later uses of the elements wait for them.
pub struct DeviceMut<'a, T> {
    read: DeviceRead<'a, T>,
    alone: PhantomData<&'a mut [T]>,
}

impl<T> DeviceRead<'_, T> {
    /// Returns the address of the first element, the same on every device; null if there are none.
    #[doc(alias = "as_device_ptr")]
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
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

    /// Returns the stream to launch kernels on.
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
    /// Begins an access to read, by kernels of a stream of this device or another of its driver.
    /// The stream is ordered behind writes of the elements (`cuStreamWaitEvent`). The guard's drop
    /// records an event at its end (`cuEventRecord`). Waits only for an access that was leaked.
    ///
    /// # Errors
    /// [`ContainerError`] when the stream belongs to another driver or captures, its device cannot
    /// use managed memory concurrently, or a driver call fails.
    pub fn device_read(&self, stream: &Stream) -> Result<DeviceRead<'_, T>, ContainerError> {
        self.access(stream, Kind::Read)
    }

    /// Begins an access to write, by kernels of a stream of this device or another of its driver.
    /// The stream is ordered behind all uses of the elements. Otherwise like
    /// [`device_read`](Self::device_read).
    ///
    /// # Errors
    /// Those of [`Self::device_read`].
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
