//! Errors of sharing memory between processes.

use cuvmm_driver::Location;

use super::{ArgumentError, MemoryError};
#[cfg(target_os = "linux")]
use super::{ChannelError, LedgerError};
use crate::display::{Bytes, Count};

/// An error in a description of shared memory, or in its manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptionError {
    /// The description is of another version.
    #[error("the description is of version {version}, but this library supports {known}")]
    Version {
        /// The description's version.
        version: u16,
        /// The version that this library supports.
        known: u16,
    },
    /// The length of the description does not match its contents.
    #[error("the description has {}, but should have {wanted}", Count(*.length, "byte"))]
    Length {
        /// The actual number of bytes.
        length: u64,
        /// The expected number of bytes.
        wanted: u64,
    },
    /// A field of the description is invalid, damaged, or unknown to this version.
    #[error("the description's {what} is invalid: {value:#x}")]
    Field {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// An extent is empty, of an invalid size, out of range, or not behind the one before it.
    #[error(
        "{} at offset {} are not an extent in {} with a granularity of {}, or not behind the one before",
        Bytes(*.size), Bytes(*.offset), Bytes(*.within), Bytes(*.granularity)
    )]
    Extent {
        /// Its offset.
        offset: u64,
        /// Its size.
        size: u64,
        /// The size of the range.
        within: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// The description is of another kind of memory.
    #[error("the description is of {found}: receive it with `{call}`")]
    Kind {
        /// The kind of memory that it describes.
        found: &'static str,
        /// The function that receives it.
        call: &'static str,
    },
    /// A part of an allocation is empty or not within it.
    #[error(
        "{} at offset {} are not a part of an allocation of {}",
        Bytes(*.length), Bytes(*.offset), Bytes(*.size)
    )]
    Allocation {
        /// The offset of the first byte.
        offset: u64,
        /// The number of bytes.
        length: u64,
        /// The size of the allocation in bytes.
        size: u64,
    },
    /// The element type of a tensor is none that safetensors names, and has no lower-case letter, as a
    /// name of the publisher's own has.
    #[error(
        "tensor {name:?}: the element type {dtype:?} is none of safetensors, such as F32 or BF16"
    )]
    ElementType {
        /// The tensor's name.
        name: String,
        /// The name of the type.
        dtype: String,
    },
    /// The elements of a tensor are no whole bytes, or their bytes do not fit 64 bits.
    #[error(
        "tensor {name:?}: elements of type {dtype} in the shape {shape:?} are no whole bytes, or overflow \
         64 bits"
    )]
    Shape {
        /// The tensor's name.
        name: String,
        /// The type of its elements.
        dtype: String,
        /// Its size in each dimension, in elements.
        shape: Vec<u64>,
    },
    /// The size of a tensor is not that of its elements.
    #[error(
        "tensor {name:?}: {}, but {} are needed for elements of type {dtype} in the shape {shape:?}",
        Bytes(*.size), Bytes(*.wanted)
    )]
    TensorSize {
        /// The tensor's name.
        name: String,
        /// The type of its elements.
        dtype: String,
        /// Its size in each dimension, in elements.
        shape: Vec<u64>,
        /// The size given, in bytes.
        size: u64,
        /// The bytes of its elements.
        wanted: u64,
    },
    /// Two tensors have this name.
    #[error("two tensors have the name {0:?}")]
    NameTaken(String),
    /// A tensor is not wholly within the described memory.
    #[error(
        "tensor {name:?}: {} at offset {} are not all in the memory",
        Bytes(*.size), Bytes(*.offset)
    )]
    Tensor {
        /// The tensor's name.
        name: String,
        /// The offset of its first byte.
        offset: u64,
        /// Its size in bytes.
        size: u64,
    },
}

/// An error of offering, sending, receiving, attaching, publishing or subscribing to memory. None
/// of the memory is held afterwards.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum ShareError {
    /// An argument cannot be used.
    Argument(#[from] ArgumentError),
    /// The memory cannot be shared, mapped or made read-only in its present state, or the driver
    /// refused. `CUDA_ERROR_NOT_SUPPORTED` and `CUDA_ERROR_INVALID_VALUE` of a mapping mean that a
    /// size is not as described.
    Memory(MemoryError),
    /// The description or the manifest is inconsistent.
    Description(#[from] DescriptionError),
    /// The connection failed.
    #[cfg(target_os = "linux")]
    Channel(#[from] ChannelError),
    /// The peer refused or gave up, for this reason.
    #[error("the peer refused: {0}")]
    Refused(String),
    /// The ledger counts no more exported blocks.
    #[error("the ledger's 256 entries for exported blocks are in use")]
    TooManyExports,
    /// The ledger that counts the memory cannot be joined.
    #[cfg(target_os = "linux")]
    #[error("the ledger of the memory cannot be joined: {0}")]
    Ledger(Box<LedgerError>),
    /// The process that offered the memory has given it back. An offer that lives prevents that.
    #[error("the process that offered the memory has given it back: it has to be offered again")]
    GivenBack,
    /// Allocations of several memory pools were to be offered together.
    #[error("the allocations of an offer must be of one memory pool: make an offer for each pool")]
    SeveralPools,
    /// Memory of pools in different ledgers, or that have opened one twice, was to be offered together.
    #[error("the memory of an offer must be of pools of one ledger: make an offer for each ledger")]
    SeveralLedgers,
    /// A keeper was to have memory of this name that is published in place: its owner uses it further
    /// when it is withdrawn.
    #[error("{0:?} is published in place, and a keeper has finished memory only: publish a copy")]
    InPlace(String),
    /// Memory at this location cannot be described to another process.
    #[error("memory at {0} cannot be described to another process")]
    Unnameable(Location),
    /// The memory is on the device of this UUID, which was not named, or which this process does not
    /// see.
    #[error(
        "the memory is on device {:032x}, which is not one of those named",
        u128::from_be_bytes(*.0)
    )]
    NoSuchDevice([u8; 16]),
    /// The memory was not shared as elements, or with elements of another size.
    #[error("elements of {} were requested, but the memory was shared {}", Count(*.wanted, "byte"), shared_as(*.given))]
    ElementSize {
        /// The requested bytes of an element.
        wanted: usize,
        /// Bytes of an element as shared; `None` if it was not shared as elements.
        given: Option<u32>,
    },
    /// The manifest says that a tensor has elements of another type.
    #[error("tensor {tensor:?} has elements of type {dtype}, and a view of {wanted} was requested")]
    ElementType {
        /// The tensor's name.
        tensor: String,
        /// The type of its elements, as the manifest names it.
        dtype: String,
        /// The requested Rust type.
        wanted: &'static str,
    },
    /// No publication has this name, or the publication has no tensor of this name.
    #[error("there is nothing named {0:?}")]
    NotFound(String),
    /// The name is empty, too long, or contains control characters.
    #[error("a name of {}: use 1 to {most} bytes without control characters", Count(*.length, "byte"))]
    Name {
        /// Its length in bytes.
        length: usize,
        /// The maximum length in bytes.
        most: usize,
    },
}

fn shared_as(given: Option<u32>) -> String {
    given.map_or_else(
        || "without elements".to_owned(),
        |bytes| format!("with elements of {}", Count(bytes, "byte")),
    )
}
