//! Kernels that write words and compare what they read, for the cases in which one kernel reads what
//! another has written. Only a GPU runs them.

use std::fmt::Debug;

use cuvmm_driver::{DeviceAddress, DriverError, Ordinal, StreamHandle};

/// Words of four bytes.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    /// The address of the first.
    pub at: DeviceAddress,
    /// Their number.
    pub count: u64,
}

/// How a kernel loads what it compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Through the cache of the multiprocessor (`ld.ca`).
    Cached,
    /// By read-only loads (`ld.nc`), through the texture path where there is one.
    NonCoherent,
}

/// Runs kernels that write and compare words. All methods only launch.
///
/// A report is two counters of eight bytes: the words that differed, and those that differed before
/// the kernel ahead had ended.
pub trait ComparingKernels: Debug + Send + Sync {
    /// Returns `true` if kernels can start before the kernel ahead of them has ended.
    fn is_programmatic(&self) -> bool;

    /// Launches a kernel that writes a value to all words.
    ///
    /// # Errors
    /// Returns the driver's error of the launch.
    fn write(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        words: Words,
        value: u32,
    ) -> Result<(), DriverError>;

    /// Launches a kernel that counts the words that differ from a value.
    ///
    /// # Errors
    /// Returns the driver's error of the launch.
    fn compare(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        loaded: (Words, Load),
        value: u32,
        report: DeviceAddress,
    ) -> Result<(), DriverError>;

    /// Launches a kernel that lets the kernel behind it start, waits for a while, and then writes a
    /// value to all words.
    ///
    /// # Errors
    /// Returns the driver's error of the launch.
    fn write_late(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        words: Words,
        value: u32,
    ) -> Result<(), DriverError>;

    /// Launches a kernel that starts before the one ahead of it has ended, waits for that
    /// (`griddepcontrol.wait`), and counts the words that differ from a value. If the `bool` of
    /// `read` is `true`, it counts them before it waits, too.
    ///
    /// # Errors
    /// Returns the driver's error of the launch.
    fn compare_early(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        read: (Words, bool),
        value: u32,
        report: DeviceAddress,
    ) -> Result<(), DriverError>;
}
