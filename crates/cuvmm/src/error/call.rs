//! Errors of driver calls.

use cuvmm_driver::DriverError;

use crate::display::Bytes;

/// A driver call that failed or was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The driver returned an error.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The process was forked after the device was opened, which CUDA does not support.
    #[error("the device was opened by process {opened_by}: a forked child opens its own")]
    Forked {
        /// The id of the process that opened the device.
        opened_by: u32,
    },
    /// A stream or event belongs to another driver, for which its handle means something else.
    #[error("the stream or event belongs to another driver")]
    WrongDriver,
    /// Work that may use the memory is not known to be complete, so the memory cannot be unmapped.
    #[error("work that may use the memory is not known to be complete: wait for it first")]
    InUse,
    /// The handle of the per-thread default stream was given (`CU_STREAM_PER_THREAD`). It names a
    /// different stream on each thread.
    #[error(
        "the per-thread default stream differs between threads: create a stream, or use the legacy \
         default stream"
    )]
    PerThreadStream,
    /// An earlier call found the context lost, for example after a kernel fault. No new work is
    /// started on it.
    #[error("the device's context is lost since {0}: memory can only be freed")]
    ContextLost(DriverError),
    /// The driver has the memory free, and the pool's limit [leaves it free](crate::Limit::LeaveFree).
    #[error("of the {} that the driver has free, {} stay free", Bytes(*free), Bytes(*kept))]
    LeftFree {
        /// The bytes that the driver has free.
        free: u64,
        /// The bytes that are to stay free.
        kept: u64,
    },
}

impl CallError {
    /// Returns the driver's answer, if there is one.
    #[must_use]
    pub const fn driver(&self) -> Option<&DriverError> {
        match self {
            Self::Driver(error) | Self::ContextLost(error) => Some(error),
            Self::Forked { .. }
            | Self::WrongDriver
            | Self::InUse
            | Self::PerThreadStream
            | Self::LeftFree { .. } => None,
        }
    }
}
