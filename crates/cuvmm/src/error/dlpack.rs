//! Errors of exchanging tensors with other libraries.

use cuvmm_driver::{DeviceAddress, Ordinal};
use dlpark::ffi::{DLDataType, DLDevice};

use super::{ArgumentError, MemoryError};

/// An error of exporting, importing or using a tensor.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum TensorError {
    /// An argument cannot be used: a shape that leaves the memory, a misaligned first element, a
    /// stream of another device, or a number that is not a stream in Python's `__dlpack__`.
    Argument(#[from] ArgumentError),
    /// The number of elements, or of bytes from the first to the last, overflows.
    #[error("the size of a tensor of shape {shape:?} and strides {strides:?} overflows")]
    TooLarge {
        /// The shape.
        shape: Vec<usize>,
        /// The strides, in elements; empty if they follow from the shape.
        strides: Vec<usize>,
    },
    /// The elements are not contiguous in row-major order.
    #[error("the elements are not contiguous: shape {shape:?}, strides {strides:?}")]
    NotCompact {
        /// The shape.
        shape: Vec<usize>,
        /// The strides, in elements.
        strides: Vec<usize>,
    },
    /// Elements are in reverse order, for which this library has no views.
    #[error("dimension {dimension} has a negative stride, {stride}: this is not supported")]
    NegativeStride {
        /// The dimension.
        dimension: usize,
        /// Its stride, in elements.
        stride: i64,
    },
    /// A floating-point type of 8 bits or fewer has other bits than its code says.
    #[error("elements of DLPack's type code {} have {expected} bits, not {}", .found.code.0, .found.bits)]
    ElementBits {
        /// The tensor's type.
        found: DLDataType,
        /// The bits of a number of this type.
        expected: u8,
    },
    /// The elements are of another type.
    #[error("the elements are {found:?}, but {wanted:?} was requested")]
    OtherElements {
        /// The tensor's type.
        found: DLDataType,
        /// The requested type.
        wanted: DLDataType,
    },
    /// The driver has addresses without memory.
    #[error("the addresses of this driver have no memory: use the CUDA or the host driver")]
    NoMemory,
    /// The tensor is read-only; or a read-only tensor was to be exported by a descriptor older than
    /// DLPack 1.0, which cannot express that.
    #[error("the tensor is read-only, which a descriptor older than DLPack 1.0 cannot express")]
    ReadOnly,
    /// The tensor is in host memory that kernels have no access to.
    #[error("the tensor is in host memory, which kernels cannot access")]
    OnHost,
    /// A stream captures, or the driver cannot record an event behind all work of a device (before
    /// CUDA 12.5), so the consumer cannot be ordered behind queued work.
    #[error(
        "the consumer's stream cannot be ordered behind queued work: a stream captures, or the \
         driver is older than CUDA 12.5 and the memory has no home stream"
    )]
    NoOrder,
    /// The tensor is neither on the device of the stream nor in host memory.
    #[error("the tensor is on {}, not on {device} or the host", named(*.found))]
    WrongDevice {
        /// The device that the tensor names.
        found: DLDevice,
        /// The stream's device.
        device: Ordinal,
    },
    /// The driver reports no memory of its device at an address of the tensor.
    #[error("there is no memory of {device} at {address}, an address of the tensor")]
    NotThere {
        /// The address.
        address: DeviceAddress,
        /// The stream's device.
        device: Ordinal,
    },
    /// The descriptor could not be created.
    Descriptor(#[from] dlpark::metadata::Error),
    /// An imported descriptor contradicts itself.
    Imported(#[from] dlpark::tensor::Error),
    /// The memory cannot be exported or copied in its present state, or a driver call failed.
    Memory(MemoryError),
}

fn named(device: DLDevice) -> String {
    format!(
        "device {} of type {}",
        device.device_id, device.device_type.0
    )
}
