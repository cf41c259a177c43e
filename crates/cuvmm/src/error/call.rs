//! Why a call did not reach the driver, or what the driver answered.

use cuvmm_driver::DriverError;

/// A driver call that failed or was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The driver answered with an error.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The process was forked after the device was opened; CUDA does not survive that.
    #[error(
        "the device was opened by process {opened_by}, and this is its forked child: open a device of your own"
    )]
    Forked {
        /// The process that opened the device.
        opened_by: u32,
    },
    /// A stream or event of another driver was given: its handle means nothing to this one.
    #[error("the stream or event belongs to another driver")]
    WrongDriver,
    /// Work that may use the memory is not known to be complete, and so it cannot be unmapped.
    #[error("work that may use the memory is not known to be complete")]
    InUse,
    /// The handle of the per-thread default stream was given (`CU_STREAM_PER_THREAD`). It names
    /// another stream on each thread.
    #[error(
        "the per-thread default stream is another stream on each thread: make a stream, or use the legacy default stream"
    )]
    PerThreadStream,
    /// An earlier call found the context lost (a kernel fault, say); nothing new is done on it.
    #[error("the device's context is lost since {0}; memory can only be given back")]
    ContextLost(DriverError),
}

impl CallError {
    /// The driver's answer, where there is one.
    #[must_use]
    pub const fn driver(&self) -> Option<&DriverError> {
        match self {
            Self::Driver(error) | Self::ContextLost(error) => Some(error),
            Self::Forked { .. } | Self::WrongDriver | Self::InUse | Self::PerThreadStream => None,
        }
    }
}
