//! Kernels, which the trait `Driver` does not have: a hook for the few cases that need one.

use std::fmt::Debug;

use cuvmm_driver::{DeviceAddress, DriverError, Ordinal, StreamHandle};

/// Runs kernels that touch memory or take time.
///
/// Both methods only launch: what comes of it shows at the next synchronisation, as with any
/// kernel.
pub trait KernelToucher: Debug + Send + Sync {
    /// Launches a kernel of one thread that reads, or writes, four bytes at an address.
    ///
    /// # Errors
    /// The driver's answer to the launch.
    fn touch(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        address: DeviceAddress,
        write: bool,
    ) -> Result<(), DriverError>;

    /// Launches a kernel that does nothing for about so long.
    ///
    /// # Errors
    /// The driver's answer to the launch.
    fn spin(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        milliseconds: u32,
    ) -> Result<(), DriverError>;
}
