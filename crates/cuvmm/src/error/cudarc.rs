//! Errors of exchanging contexts, streams and memory with cudarc.

use cuvmm_driver::CUresult;

use super::{ArgumentError, DeviceError, MemoryError};
use crate::driver::auto::OpenError;

/// An error of adopting a context or stream of cudarc, or of making memory a slice for it.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum CudarcError {
    /// An argument cannot be used: elements of size zero, bytes that are not whole elements, a
    /// stream of another device.
    Argument(#[from] ArgumentError),
    /// There is no driver, it sees no GPU, or it is not the driver that cudarc uses.
    Driver(#[from] OpenError),
    /// cudarc failed, or reported an earlier error of its own.
    #[error("cudarc failed with {0}")]
    Cudarc(CUresult),
    /// cudarc has a different device than the one that the context belongs to.
    #[error("the context belongs to device {found}, but cudarc has it for device {claimed}")]
    WrongDevice {
        /// The ordinal by cudarc.
        claimed: usize,
        /// The ordinal by the driver.
        found: i32,
    },
    /// The device cannot be used.
    Device(#[from] DeviceError),
    /// The stream belongs to another context.
    #[error("the stream belongs to another context")]
    WrongContext,
    /// The stream is the per-thread default stream, another stream on each thread: one thread could
    /// not wait for the other's work. candle's `Device::new_cuda` uses it, its
    /// `Device::new_cuda_with_stream` does not.
    #[error("the per-thread stream differs between threads: create a stream")]
    PerThread,
    /// The block was allocated without a home stream adopted from cudarc, which a slice requires.
    #[error("the home stream was not adopted from cudarc: allocate on one that was")]
    NotOfCudarc,
    /// The memory is not wholly committed, is asleep or is shared with forks (cudarc has no
    /// read-only slices), or a driver call failed.
    Memory(MemoryError),
}
