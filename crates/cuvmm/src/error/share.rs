//! Errors of sharing between processes.

use std::path::PathBuf;
use std::time::Duration;

use cuvmm_driver::Location;
use rustix::io::Errno;

use super::{ArgumentError, MemoryError};

/// What is wrong with a description of shared memory, or with its manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptionError {
    /// The description is of another version.
    #[error("the description is of version {version}; this library knows {known}")]
    Version {
        /// Its version.
        version: u16,
        /// The version that is known here.
        known: u16,
    },
    /// The description has another length than what it says takes.
    #[error("a description of {length} bytes should have {wanted}")]
    Length {
        /// Bytes there are.
        length: u64,
        /// Bytes there should be.
        wanted: u64,
    },
    /// Something in the description cannot be meant, is damaged, or says more than this version knows.
    #[error("the description's {what} cannot be {value:#x}")]
    Field {
        /// What it is.
        what: &'static str,
        /// What it says.
        value: u64,
    },
    /// An extent is empty, odd, outside, or not behind the one before it.
    #[error(
        "{size} bytes at offset {offset} are no extent in {within} bytes with a granularity of \
         {granularity}, or not behind the one before"
    )]
    Extent {
        /// Where it begins.
        offset: u64,
        /// Its size.
        size: u64,
        /// The size of the range.
        within: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// Two tensors have the same name.
    #[error("there are two tensors of the name {name:?}")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// A tensor lies where there is no memory.
    #[error("tensor {name:?} has {size} bytes at offset {offset}, which are not all there")]
    Tensor {
        /// Its name.
        name: String,
        /// Its first byte.
        offset: u64,
        /// How many bytes it has.
        size: u64,
    },
}

/// Why nothing came over a channel, or nothing went.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer did not answer in time.
    #[error("the peer did not answer within {waited:?}")]
    TimedOut {
        /// How long was waited.
        waited: Duration,
    },
    /// The peer is gone.
    #[error("the peer has closed the connection")]
    Closed,
    /// Something went wrong before, and what comes now cannot be told.
    #[error("the channel is of no use since an error on it")]
    Broken,
    /// The peer is another user's process.
    #[error("process {pid} of user {uid} may not connect")]
    NotAllowed {
        /// Its process id.
        pid: u32,
        /// Its user id.
        uid: u32,
    },
    /// A user's id is the one that stands for every user without an id in this process's user
    /// namespace, so it says nothing about who it is.
    #[error(
        "process {pid} has user id {uid}, which stands for every user that has no id in this user \
         namespace: give the user an id there"
    )]
    UnmappedUser {
        /// The process id; this process's own where it has that user id itself.
        pid: u32,
        /// The overflow user id.
        uid: u32,
    },
    /// What came is no message of ours, or not the next one.
    #[error("a message that is {what}")]
    Malformed {
        /// What is wrong with it.
        what: &'static str,
    },
    /// A message is larger than such a message may be.
    #[error("a message of more than {most} bytes")]
    TooLarge {
        /// The most that it may have.
        most: usize,
    },
    /// Descriptors were lost on their way: this process has no room for them.
    #[error("descriptors were lost: this process may not open so many files")]
    NoRoomForHandles,
    /// As many peers as possible are connected already.
    #[error("{most} are connected, and there is no room for more")]
    Busy {
        /// How many.
        most: usize,
    },
    /// Another process listens there.
    #[error("another process listens at {}", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// No process listens there.
    #[doc(alias = "NobodyThere")]
    #[error("no process listens at {}", path.display())]
    NotListening {
        /// The path.
        path: PathBuf,
    },
    /// The path cannot be a socket's: it is too long, or another file is in the way that no listener of
    /// this user has left.
    #[error("{} {problem}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A system call failed.
    #[error("{call}: {errno}")]
    System {
        /// Which one.
        call: &'static str,
        /// Its answer.
        #[source]
        errno: Errno,
    },
}

impl ChannelError {
    /// Another file than a socket is there.
    pub(crate) const fn no_socket(path: PathBuf) -> Self {
        let problem = "is no socket";
        Self::Path { path, problem }
    }

    /// A file is in the way that is not this library's and this user's.
    pub(crate) const fn not_ours(path: PathBuf) -> Self {
        let problem = "is in the way and was not left by a listener of this user: remove it, or use \
                       another path";
        Self::Path { path, problem }
    }
}

/// Why memory could not be offered, given, taken, attached, published or subscribed to. Nothing of it
/// is held then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// A value that was given cannot be meant.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// The memory cannot be shared, mapped or made read-only as it is, or the driver refused:
    /// `CUDA_ERROR_NOT_SUPPORTED` and `CUDA_ERROR_INVALID_VALUE` of a mapping say that a size is not
    /// as described.
    #[error(transparent)]
    Memory(MemoryError),
    /// The description or the manifest is not consistent.
    #[error(transparent)]
    Description(#[from] DescriptionError),
    /// The connection failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The peer refused or gave up.
    #[error("the peer refused: {reason}")]
    Refused {
        /// In the peer's words.
        reason: String,
    },
    /// The memory lies where a description cannot say.
    #[error("memory at {location} cannot be described to another process")]
    Unnameable {
        /// Where it lies.
        location: Location,
    },
    /// The memory lies on a device that was not named, or that this process does not see.
    #[error(
        "the memory lies on device {:032x}, which is none of those named",
        u128::from_be_bytes(*.uuid)
    )]
    NoSuchDevice {
        /// The device's identity.
        uuid: [u8; 16],
    },
    /// The memory was not given as elements, or of another size.
    #[error("elements of {wanted} bytes are wanted, and it has some of {given:?} bytes")]
    ElementSize {
        /// Bytes of an element that is wanted.
        wanted: usize,
        /// Bytes of an element that was given, if it was given as elements.
        given: Option<u32>,
    },
    /// Nothing is published under the name, or the publication has no such tensor.
    #[error("there is nothing named {name:?}")]
    NotFound {
        /// The name.
        name: String,
    },
    /// The name is empty, too long, or has control characters in it.
    #[error(
        "a name has from 1 to {most} bytes and no control characters, and this one has {length} bytes"
    )]
    Name {
        /// Its bytes.
        length: usize,
        /// The most it may have.
        most: usize,
    },
}
