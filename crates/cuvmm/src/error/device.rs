//! Errors of devices.

use super::CallError;

/// Why a device could not be opened, or its mapper not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no such device.
    #[error("there is no device {ordinal}; the driver has {count}")]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: u32,
        /// How many devices there are.
        count: i32,
    },
    /// The device has no virtual memory management (attribute 102 says so).
    #[error("device {ordinal} ({name}) has no virtual memory management")]
    NoVirtualMemory {
        /// The ordinal asked for.
        ordinal: u32,
        /// The device's name.
        name: String,
    },
    /// The driver's granularity is not a power of two, which nothing here can work with.
    #[error(
        "device {ordinal} reports an allocation granularity of {granularity} bytes, which is not a power of two"
    )]
    OddGranularity {
        /// The ordinal asked for.
        ordinal: u32,
        /// What the driver reported.
        granularity: u64,
    },
    /// The device has a mapper already: a second thread would gain nothing.
    #[error("the device has a mapper already")]
    MapperRunning,
    /// The system gives no thread for the mapper.
    #[error("the system gives no thread for the mapper")]
    Thread(#[source] std::io::Error),
    /// A driver call failed, or the process is a forked child of the one that opened the device.
    #[error(transparent)]
    Call(#[from] CallError),
}
