//! Errors of devices.

use super::CallError;
use crate::display::{Bytes, Count};

/// An error of opening a device, or of starting its mapper.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device does not exist.
    #[error(
        "there is no device {ordinal}: the driver has {}",
        Count(*.count, "device")
    )]
    NoSuchDevice {
        /// The requested ordinal.
        ordinal: u32,
        /// The number of devices.
        count: i32,
    },
    /// The device has no virtual memory management (attribute 102).
    #[error("device {ordinal} ({name}) does not support virtual memory management")]
    NoVirtualMemory {
        /// The requested ordinal.
        ordinal: u32,
        /// The device's name.
        name: String,
    },
    /// The driver's granularity is not a power of two, which this library does not support.
    #[error("device {ordinal} has a granularity of {}, not a power of two", Bytes(*.granularity))]
    UnsupportedGranularity {
        /// The requested ordinal.
        ordinal: u32,
        /// The reported granularity in bytes.
        granularity: u64,
    },
    /// The device already has a mapper. A second thread would gain nothing.
    #[error("the device has a mapper already: use that one, or stop it first")]
    MapperRunning,
    /// The system could not start a thread for the mapper.
    #[error("cannot start a thread for the mapper")]
    Thread(#[source] std::io::Error),
    /// A driver call failed, or the process is a forked child of the one that opened the device.
    #[error(transparent)]
    Call(#[from] CallError),
}
