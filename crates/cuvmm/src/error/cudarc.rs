//! Errors of what is taken from cudarc and given to it.

use std::fmt;

use cuvmm_driver::{CUresult, auto};

use super::{BlockRefusal, CallError, OpenError};

/// Why a context of cudarc's could not be taken up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// There is no driver, it sees no GPU, or it is another one than cudarc's.
    #[error(transparent)]
    Driver(#[from] auto::OpenError),
    /// cudarc could not make the context or make it current, or an earlier call of its own had failed
    /// and nobody had been told yet.
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
    Device(#[from] OpenError),
}

/// Why a stream of cudarc's could not be taken up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptStreamError {
    /// It belongs to another context.
    #[error("the stream belongs to another context")]
    WrongContext,
    /// It is another stream on each thread: what one queued on it another could not wait for. candle's
    /// `Device::new_cuda` works on it, its `Device::new_cuda_with_stream` does not.
    #[error("the per-thread stream is another one on each thread; take a stream of its own")]
    PerThread,
}

/// Why memory cannot be made a slice for cudarc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LendRefusal {
    /// The block was allocated without a home stream, and a slice is used on one.
    #[error("the memory has no home stream")]
    NoHomeStream,
    /// The home stream is none that was taken up from cudarc.
    #[error("the memory's home stream is not one of cudarc's")]
    NotOfCudarc,
    /// The stream belongs to another device.
    #[error("the stream belongs to another device")]
    WrongDevice,
    /// Elements without a size.
    #[error("the elements have no size")]
    ZeroSizedElements,
    /// The bytes are not so many whole elements.
    #[error("{bytes} bytes are not whole elements of {element}")]
    OddSize {
        /// Bytes there are.
        bytes: u64,
        /// Bytes of an element.
        element: usize,
    },
    /// Elements do not begin at such an address.
    #[error("elements that are aligned to {alignment} bytes do not begin at {address:#x}")]
    Misaligned {
        /// The first address.
        address: u64,
        /// What the elements are aligned to.
        alignment: usize,
    },
    /// Some of the range is not committed, or not there at all.
    #[error("bytes {start:#x}..{end:#x} are not all committed")]
    NotCommitted {
        /// Where the range starts.
        start: u64,
        /// Where it ends.
        end: u64,
    },
    /// The block sleeps, or shares memory with forks: cudarc has no slices that are only to be
    /// read.
    #[error(transparent)]
    Refused(#[from] BlockRefusal),
    /// A fork of the region shares some of the range: cudarc has no slices that are only to be
    /// read.
    #[error("bytes {start:#x}..{end:#x} are shared with a fork: unshare them before they are lent")]
    ReadOnly {
        /// Where the range starts.
        start: u64,
        /// Where it ends.
        end: u64,
    },
    /// cudarc could not make what it needs beside the memory.
    #[error("cudarc answered {0}")]
    Cudarc(CUresult),
    /// The context is lost, or the process was forked.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Memory that was not made a slice, handed back as it was.
pub struct LendError<M> {
    /// The memory.
    pub memory: M,
    /// Why.
    pub reason: LendRefusal,
}

impl<M> fmt::Debug for LendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LendError")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl<M> fmt::Display for LendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not made a slice: {}", self.reason)
    }
}

impl<M> std::error::Error for LendError<M> {}
