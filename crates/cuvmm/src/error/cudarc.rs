//! Errors of what is taken from cudarc and given to it.

use cuvmm_driver::{CUresult, auto};

use super::{ArgumentError, DeviceError, MemoryError};

/// Why a context or a stream of cudarc's could not be taken up, or memory not be made a slice for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudarcError {
    /// A value that was given cannot be meant: elements without a size, bytes that are no whole
    /// elements, a stream of another device.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// There is no driver, it sees no GPU, or it is another one than cudarc's.
    #[error(transparent)]
    Driver(#[from] auto::OpenError),
    /// cudarc failed, or an earlier call of its own had failed and had not been told yet.
    #[error("cudarc answered {0}")]
    Cudarc(CUresult),
    /// cudarc was told another device than the context belongs to.
    #[error("cudarc has it for a context of device {claimed}, and it is one of device {found}")]
    WrongDevice {
        /// The ordinal that cudarc has.
        claimed: usize,
        /// The ordinal of the device that the driver says.
        found: i32,
    },
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The stream belongs to another context.
    #[error("the stream belongs to another context")]
    WrongContext,
    /// The stream is another one on each thread: what one queued on it another could not wait for.
    /// candle's `Device::new_cuda` works on it, its `Device::new_cuda_with_stream` does not.
    #[error("the per-thread stream is another one on each thread; take a stream of its own")]
    PerThread,
    /// The block was allocated without a home stream that was taken up from cudarc, and a slice is used
    /// on one.
    #[error("the memory's home stream is none of cudarc's")]
    NotOfCudarc,
    /// The memory is not all committed, sleeps or is shared with forks (cudarc has no slices that are
    /// only to be read), or a driver call failed.
    #[error(transparent)]
    Memory(MemoryError),
}
