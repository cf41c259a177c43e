//! Errors of tensors that pass between libraries.

use std::fmt;

use cuvmm_driver::{DeviceAddress, Location, Ordinal};
use dlpark::ffi::{DLDataType, DLDevice};
use dlpark::{Managed, ManagedTensorBase};

use super::{BlockRefusal, CallError, CopyError};

/// Why there is no tensor of such a shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// More dimensions than other libraries take.
    #[error("{dimensions} dimensions are more than {most}")]
    TooManyDimensions {
        /// Dimensions asked for.
        dimensions: usize,
        /// The most there can be.
        most: usize,
    },
    /// Not one stride for each dimension.
    #[error("{strides} strides for {dimensions} dimensions")]
    WrongStrides {
        /// How many strides.
        strides: usize,
        /// How many dimensions.
        dimensions: usize,
    },
    /// The elements have no bits.
    #[error("elements of {bits} bits and {lanes} lanes have no size")]
    NoElement {
        /// Bits of a lane.
        bits: u8,
        /// Lanes of an element.
        lanes: u16,
    },
    /// The elements, or the bytes from the first to the last, are more than can be counted.
    #[error("a tensor of shape {shape:?} and strides {strides:?} is too large to be counted")]
    TooLarge {
        /// The shape.
        shape: Vec<usize>,
        /// The strides, in elements; empty where they are those of the shape.
        strides: Vec<usize>,
    },
}

/// A tensor that was not exported. Its owner is handed back.
pub struct ExportTensorError<O> {
    /// The owner of the memory, as it was.
    pub owner: O,
    /// Why.
    pub reason: ExportTensorRefusal,
}

/// Why a tensor cannot be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportTensorRefusal {
    /// There is no tensor of such a shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The tensor leaves the memory.
    #[error("a tensor of {size} bytes at offset {offset} leaves the {bytes} bytes there are")]
    OutOfRange {
        /// Where it begins, in bytes.
        offset: u64,
        /// Bytes from its first element to behind its last.
        size: u64,
        /// Bytes there are.
        bytes: u64,
    },
    /// Part of the tensor has no memory behind it.
    #[error("a tensor of {size} bytes at offset {offset} is not all committed")]
    NotCommitted {
        /// Where it begins, in bytes.
        offset: u64,
        /// Bytes from its first element to behind its last.
        size: u64,
    },
    /// The first element does not lie where such elements may.
    #[error("elements at {address} are not aligned to {alignment} bytes")]
    Misaligned {
        /// Where the first element lies.
        address: DeviceAddress,
        /// What its address must be a multiple of.
        alignment: u64,
    },
    /// The memory does not all lie at one place that a tensor can name: the owner's device, or host
    /// memory.
    #[error("what is at offset {offset} lies on {location}, and the rest of the tensor does not")]
    Elsewhere {
        /// Where the extent begins, in bytes of the owner.
        offset: u64,
        /// Where its memory lies.
        location: Location,
    },
    /// The driver has addresses and no memory behind them.
    #[error("there is no memory behind the addresses of this driver")]
    NoMemory,
    /// The block sleeps, shares the memory with forks, or has lost it.
    #[error(transparent)]
    Refused(#[from] BlockRefusal),
    /// A fork of the region shares part of the memory, which must not be written before it has
    /// been unshared.
    #[error("a tensor of {size} bytes at offset {offset} can only be exported to be read")]
    ReadOnly {
        /// Where it begins, in bytes.
        offset: u64,
        /// Bytes from its first element to behind its last.
        size: u64,
    },
    /// The descriptor of before DLPack 1.0 cannot say that a tensor is only to be read.
    #[error("a legacy descriptor cannot say that the tensor is only to be read")]
    CannotSayReadOnly,
    /// A stream captures, or the driver cannot mark all work of a device (before CUDA 12.5), and so
    /// the consumer cannot be ordered behind what is queued.
    #[error(
        "the consumer's stream cannot be ordered behind what is queued: a stream captures, or the \
         driver is older than CUDA 12.5 and the memory has no stream"
    )]
    NoOrder,
    /// The descriptor could not be made.
    #[error(transparent)]
    Descriptor(#[from] dlpark::metadata::Error),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// A number that names no stream in Python's `__dlpack__`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{number} names no stream: -1, 1, 2 and the handles of streams do")]
pub struct NoSuchStream {
    /// The number given.
    pub number: i64,
}

/// A tensor that was not imported. It is handed back.
pub struct ImportTensorError<M: ManagedTensorBase> {
    /// The tensor, as it was.
    pub tensor: Managed<M>,
    /// Why.
    pub reason: ImportTensorRefusal,
}

/// Why a tensor cannot be imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportTensorRefusal {
    /// What the descriptor says contradicts itself.
    #[error(transparent)]
    Descriptor(#[from] dlpark::tensor::Error),
    /// There is no tensor of such a shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Elements lie in reverse order, which this library has no views of.
    #[error("dimension {dimension} has a stride of {stride} elements")]
    NegativeStride {
        /// Which dimension.
        dimension: usize,
        /// Its stride, in elements.
        stride: i64,
    },
    /// The elements are said to be where there can be no memory.
    #[error("a tensor of {size} bytes at {address} leaves the address space")]
    OutOfRange {
        /// The first element's address.
        address: DeviceAddress,
        /// Bytes from the first element to behind the last.
        size: u64,
    },
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
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why an operation on an imported tensor failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The elements do not lie side by side in row-major order.
    #[error("the elements do not lie side by side: shape {shape:?}, strides {strides:?}")]
    NotCompact {
        /// The shape.
        shape: Vec<usize>,
        /// The strides, in elements.
        strides: Vec<usize>,
    },
    /// The elements are of another type.
    #[error("the elements are {found:?}, not {wanted:?}")]
    OtherElements {
        /// The tensor's.
        found: DLDataType,
        /// Those asked for.
        wanted: DLDataType,
    },
    /// The first element does not lie where such elements may.
    #[error("elements at {address} are not aligned to {alignment} bytes: copy them with `read`")]
    Misaligned {
        /// Where the first element lies.
        address: DeviceAddress,
        /// What its address must be a multiple of.
        alignment: u64,
    },
    /// The tensor may not be written.
    #[error("the tensor is only to be read")]
    ReadOnly,
    /// The tensor lies in host memory that no kernel was given access to.
    #[error("the tensor lies in the host's memory, where no kernel reaches it")]
    OnHost,
    /// The stream belongs to another device.
    #[error("the stream belongs to another device")]
    WrongDevice,
    /// Bytes could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
}

fn named(device: DLDevice) -> String {
    format!(
        "device {} of type {}",
        device.device_id, device.device_type.0
    )
}

impl<O> fmt::Debug for ExportTensorError<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportTensorError")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl<O> fmt::Display for ExportTensorError<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the tensor was not exported: {}", self.reason)
    }
}

impl<O> std::error::Error for ExportTensorError<O> {}

impl<M: ManagedTensorBase> fmt::Debug for ImportTensorError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportTensorError")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl<M: ManagedTensorBase> fmt::Display for ImportTensorError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the tensor was not imported: {}", self.reason)
    }
}

impl<M: ManagedTensorBase> std::error::Error for ImportTensorError<M> {}
