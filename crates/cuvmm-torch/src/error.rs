//! The reasons why a function of this library fails.

use bytesize::ByteSize;
use cuvmm::driver::cuda::OpenError;
use cuvmm::{BlockError, CallError, DeviceError, PoolError};

/// The number of devices that can have a heap.
pub(crate) const DEVICES: usize = 64;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the environment variable {name} is {value:?}: it must be {expected}")]
    Setting {
        name: &'static str,
        value: String,
        expected: &'static str,
    },
    #[error(
        "the environment variable {name} is {}: the device allows {} to {}",
        Self::size(*value), Self::size(*least), Self::size(*most)
    )]
    Limit {
        name: &'static str,
        value: u64,
        least: u64,
        most: u64,
    },
    #[error("this process was forked from one that uses CUDA: start it another way (spawn)")]
    Forked,
    #[error("a size is not negative")]
    NegativeSize,
    #[error("devices are numbered from 0 to {}", DEVICES - 1)]
    NoSuchDevice,
    #[error("the stream does not belong to the primary context of device {0}")]
    OtherContext(i32),
    #[error("it is not allocated here, or was freed before")]
    NotAllocated,
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error(transparent)]
    Call(#[from] CallError),
}

impl Error {
    fn size(bytes: u64) -> impl std::fmt::Display {
        ByteSize::b(bytes).display().iec()
    }
}
