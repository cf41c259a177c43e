//! Errors of sharing memory between processes.

use std::path::PathBuf;
use std::time::Duration;

use cuvmm_driver::Location;
use rustix::io::Errno;

use super::{ArgumentError, MemoryError};
use crate::descriptors;
use crate::display::Bytes;

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
    #[error("the description has {length} bytes, but should have {wanted}")]
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

/// An error of sending or receiving on a channel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer did not answer in this time.
    #[error("the peer did not answer within {0:?}")]
    TimedOut(Duration),
    /// The peer has closed the connection.
    #[error("the peer has closed the connection")]
    Closed,
    /// An earlier error left the channel in an unknown state.
    #[error("the channel cannot be used after an earlier error: connect again")]
    Broken,
    /// The peer is a process of another user.
    #[error("process {pid} of user {uid} is not allowed to connect")]
    NotAllowed {
        /// Its process id.
        pid: u32,
        /// Its user id.
        uid: u32,
    },
    /// The user id is the overflow id, which stands for every user without an id in this process's
    /// user namespace, so it does not identify a user.
    #[error("process {pid} has the overflow user id {uid}: give its user an id in this namespace")]
    UnmappedUser {
        /// The process id; that of this process if it has the overflow id itself.
        pid: u32,
        /// The overflow user id.
        uid: u32,
    },
    /// A received message is not one of this protocol, or not the expected one, for this reason.
    #[error("received a message that is {0}")]
    Malformed(&'static str),
    /// A message exceeds the maximum size of its kind.
    #[error("the message exceeds the maximum of {}", Bytes(*.most as u64))]
    TooLarge {
        /// The maximum in bytes.
        most: usize,
    },
    /// Descriptors were lost in transit: this process may not open as many files.
    #[error(
        "descriptors were lost: this process may open no more than {} (RLIMIT_NOFILE): raise that limit",
        descriptors::most()
    )]
    TooManyFiles,
    /// The maximum number of peers is connected already.
    #[error("the maximum of {most} peers is connected already")]
    Busy {
        /// The maximum.
        most: usize,
    },
    /// Another process listens at this path.
    #[error("another process listens at {}", .0.display())]
    InUse(PathBuf),
    /// No process listens at this path.
    #[doc(alias = "NobodyThere")]
    #[error("no process listens at {}", .0.display())]
    NotListening(PathBuf),
    /// The path cannot be used for a socket: it is too long, or a file is there that no listener of
    /// this user has left.
    #[error("{} {problem}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The fault.
        problem: &'static str,
    },
    /// A system call failed.
    #[error("{call}: {}", descriptors::Why(*.errno))]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        #[source]
        errno: Errno,
    },
}

impl ChannelError {
    /// The error for a file that is not a socket.
    pub(crate) const fn no_socket(path: PathBuf) -> Self {
        let problem = "is not a socket";
        Self::Path { path, problem }
    }

    /// The error for a file that no listener of this library and this user has left.
    pub(crate) const fn not_ours(path: PathBuf) -> Self {
        let problem = "is in the way and was not left by a listener of this user: remove it, or use \
                       another path";
        Self::Path { path, problem }
    }
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
    Channel(#[from] ChannelError),
    /// The peer refused or gave up, for this reason.
    #[error("the peer refused: {0}")]
    Refused(String),
    /// The ledger counts no more exported blocks.
    #[error("the ledger's 256 entries for exported blocks are in use")]
    TooManyExports,
    /// The process that offered the memory has given it back. An offer that lives prevents that.
    #[error("the process that offered the memory has given it back: it has to be offered again")]
    GivenBack,
    /// Allocations of several memory pools were to be offered together.
    #[error("the allocations of an offer must be of one memory pool: make an offer for each pool")]
    SeveralPools,
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
    #[error("elements of {wanted} bytes were requested, but the memory was shared {}", shared_as(*.given))]
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
    #[error("a name of {length} bytes: use 1 to {most} bytes without control characters")]
    Name {
        /// Its length in bytes.
        length: usize,
        /// The maximum length in bytes.
        most: usize,
    },
}

/// The [folder of this user's sockets](crate::share::UserFolder) cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path:?} {problem}")]
pub struct FolderError {
    /// Its path.
    pub path: PathBuf,
    /// The reason.
    pub problem: String,
}

fn shared_as(given: Option<u32>) -> String {
    given.map_or_else(
        || "without elements".to_owned(),
        |bytes| format!("with elements of {bytes} bytes"),
    )
}
