//! Errors of tensors that pass between libraries.

use cuvmm_driver::{DeviceAddress, Ordinal};
use dlpark::ffi::{DLDataType, DLDevice};

use super::{ArgumentError, MemoryError};

/// Why a tensor could not be exported, imported or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// A value that was given cannot be meant: a shape that leaves the memory, a first element that is
    /// not aligned, a stream of another device, or a number that names no stream in Python's
    /// `__dlpack__`.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// The elements, or the bytes from the first to the last, are more than can be counted.
    #[error("a tensor of shape {shape:?} and strides {strides:?} is too large to be counted")]
    TooLarge {
        /// The shape.
        shape: Vec<usize>,
        /// The strides, in elements; empty where they are those of the shape.
        strides: Vec<usize>,
    },
    /// The elements do not lie side by side in row-major order.
    #[error("the elements do not lie side by side: shape {shape:?}, strides {strides:?}")]
    NotCompact {
        /// The shape.
        shape: Vec<usize>,
        /// The strides, in elements.
        strides: Vec<usize>,
    },
    /// Elements lie in reverse order, which this library has no views of.
    #[error("dimension {dimension} has a stride of {stride} elements")]
    NegativeStride {
        /// Which dimension.
        dimension: usize,
        /// Its stride, in elements.
        stride: i64,
    },
    /// The elements are of another type.
    #[error("the elements are {found:?}, not {wanted:?}")]
    OtherElements {
        /// The tensor's.
        found: DLDataType,
        /// Those asked for.
        wanted: DLDataType,
    },
    /// The driver has addresses and no memory behind them.
    #[error("there is no memory behind the addresses of this driver")]
    NoMemory,
    /// The tensor may only be read; or it was to be exported so by a descriptor of before DLPack 1.0,
    /// which cannot say it.
    #[error("the tensor is only to be read, which a descriptor of before DLPack 1.0 cannot say")]
    ReadOnly,
    /// The tensor lies in host memory that no kernel was given access to.
    #[error("the tensor lies in the host's memory, where no kernel reaches it")]
    OnHost,
    /// A stream captures, or the driver cannot mark all work of a device (before CUDA 12.5), and so
    /// the consumer cannot be ordered behind what is queued.
    #[error(
        "the consumer's stream cannot be ordered behind what is queued: a stream captures, or the \
         driver is older than CUDA 12.5 and the memory has no stream"
    )]
    NoOrder,
    /// The tensor lies neither on the device of the stream nor in host memory.
    #[error("the tensor lies on {}, and not on {device} or the host", named(*.found))]
    WrongDevice {
        /// Where it says that it lies.
        found: DLDevice,
        /// The stream's device.
        device: Ordinal,
    },
    /// The driver knows of no memory of its device at an address of the tensor.
    #[error("there is no memory of {device} at {address}, which is the tensor's")]
    NotThere {
        /// The address in question.
        address: DeviceAddress,
        /// The stream's device.
        device: Ordinal,
    },
    /// The descriptor could not be made.
    #[error(transparent)]
    Descriptor(#[from] dlpark::metadata::Error),
    /// What an imported descriptor says contradicts itself.
    #[error(transparent)]
    Imported(#[from] dlpark::tensor::Error),
    /// The memory cannot be exported or copied as it is, or a driver call failed.
    #[error(transparent)]
    Memory(MemoryError),
}

fn named(device: DLDevice) -> String {
    format!(
        "device {} of type {}",
        device.device_id, device.device_type.0
    )
}
