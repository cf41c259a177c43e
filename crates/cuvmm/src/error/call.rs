//! Errors of driver calls.

use cuvmm_driver::{CUresult, DriverError};

use crate::display::Bytes;

/// The codes of calls that a capture prevents.
const CAPTURES: [CUresult; 8] = [
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    CUresult::CUDA_ERROR_CAPTURED_EVENT,
];

/// A driver call that failed or was not made.
#[doc(alias = "check_status")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The driver returned an error.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver failed for want of a descriptor: the process may open no more (`EMFILE`).
    #[error(
        "{error}: this process has as many file descriptors open as it may, {limit} (RLIMIT_NOFILE): \
         raise that limit"
    )]
    Descriptors {
        /// The driver's answer, which is also one for other reasons.
        error: DriverError,
        /// The most descriptors that the process may have open.
        limit: u64,
    },
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
    /// A stream that the call concerns captures, or a capture guard lives. The call was not made,
    /// since it would break the capture.
    #[error("a capture is running, which the call would break: end the capture first")]
    Capturing,
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
    /// The stream has [ended](crate::Stream::end). Its handle is not given to the driver any more.
    #[error("the stream has ended: use another one")]
    StreamEnded,
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
    /// Returns the driver's answer, if any.
    #[must_use]
    pub const fn driver(&self) -> Option<&DriverError> {
        match self {
            Self::Driver(error) | Self::ContextLost(error) | Self::Descriptors { error, .. } => {
                Some(error)
            }
            _ => None,
        }
    }

    /// Returns `true` if a capture prevents the call: the library did not make it, or the driver
    /// refused it.
    pub(crate) fn is_of_capture(&self) -> bool {
        let code = self.driver().and_then(|error| error.code());
        matches!(self, Self::Capturing) || code.is_some_and(|code| CAPTURES.contains(&code))
    }

    /// Returns `true` if it is the driver's answer about an event recorded in a capture which is
    /// over.
    pub(crate) fn is_of_ended_capture(&self) -> bool {
        let code = self.driver().and_then(|error| error.code());
        code == Some(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}
