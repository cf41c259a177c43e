//! Kernels, which the trait `Driver` does not have: an interface for the few cases that need one.

use std::fmt::Debug;

use cuvmm_driver::{DeviceAddress, DriverError, Ordinal, StreamHandle};

use crate::PtxToucher;

/// Runs kernels that access memory or take time.
///
/// The methods that launch do nothing else. The outcome shows at the next synchronization, as with any kernel.
pub trait KernelToucher: Debug + Send + Sync {
    /// Launches a kernel of one thread that reads, or writes, four bytes at an address.
    ///
    /// # Errors
    /// Returns the driver's error of the launch.
    fn touch(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        address: DeviceAddress,
        write: bool,
    ) -> Result<(), DriverError>;

    /// Launches a kernel that does nothing for about `milliseconds`.
    ///
    /// # Errors
    /// Returns the driver's error of the launch.
    fn spin(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        milliseconds: u32,
    ) -> Result<(), DriverError>;

    /// Returns the kernels that compare what they read, which only a GPU runs.
    fn comparing(&self) -> Option<&PtxToucher> {
        None
    }
}
