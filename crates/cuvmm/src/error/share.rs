//! Errors of sharing between processes.

use std::path::PathBuf;
use std::time::Duration;

use cuvmm_driver::HandleTypes;
use rustix::io::Errno;

use super::{
    AccessError, BlockRefusal, CallError, CommitError, ExportError, ImportError, RangeError,
    ReserveError, StillRegistered,
};

/// What is wrong with a description of shared memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptionError {
    /// It is no such description.
    #[error("this is no description of shared memory")]
    Magic,
    /// It is of another version.
    #[error("the description is of version {version}; this library knows {known}")]
    Version {
        /// Its version.
        version: u16,
        /// The version that is known here.
        known: u16,
    },
    /// It has bits where its version has none.
    #[error(
        "the description has {value:#x} where version {version} has zero: it is damaged, or says more \
         than this library knows"
    )]
    Reserved {
        /// Its version.
        version: u16,
        /// What is there.
        value: u32,
    },
    /// It is too short or too long.
    #[error("a description of {length} bytes should have {wanted}")]
    Length {
        /// Bytes there are.
        length: u64,
        /// Bytes there should be.
        wanted: u64,
    },
    /// There are none of something, or too many.
    #[error("{count} {what}: there must be at least one and at most {most}")]
    Count {
        /// What was counted.
        what: &'static str,
        /// How many.
        count: u64,
        /// The most there may be.
        most: u64,
    },
    /// It allows neither reading nor more.
    #[doc(alias = "NoRight")]
    #[error("the description allows nothing that is known")]
    NoAccess,
    /// Its handles are of a type that is not known here.
    #[error("handle types {bits:#x} are neither descriptors nor fabric handles")]
    HandleType {
        /// The bits.
        bits: u32,
    },
    /// Its granularity is not a power of two.
    #[error("a granularity of {granularity} bytes is not a power of two")]
    Granularity {
        /// In bytes.
        granularity: u64,
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
    /// An extent lies at a place that is not listed, or a place is listed for none, twice, or out of
    /// order.
    #[error("place {place} is not listed, or for nothing, twice or out of order")]
    Place {
        /// Its number.
        place: u32,
    },
    /// A place is neither a device nor a NUMA node.
    #[error("a place of kind {kind} and number {id} is neither a device nor a NUMA node")]
    Origin {
        /// Its kind.
        kind: i32,
        /// Its number.
        id: i32,
    },
    /// There is no memory for so many elements.
    #[error("{count} elements of {size} bytes do not fit the {bytes} bytes from the first on")]
    Elements {
        /// How many.
        count: u64,
        /// Bytes of one.
        size: u32,
        /// Bytes of memory from the first on.
        bytes: u64,
    },
}

/// Why memory could not be offered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OfferError {
    /// The range cannot be meant.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// There is no memory in the range.
    #[error("there is no memory in {start}..{end}")]
    Empty {
        /// Its first byte.
        start: u64,
        /// One past its last byte.
        end: u64,
    },
    /// The range begins or ends within an extent, and memory is shared by whole extents.
    #[error("the range cuts the extent of {size} bytes at offset {offset}")]
    CutsExtent {
        /// Where the extent begins.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// A fork of the region shares the memory, and a process that imports it could write to it:
    /// [unshare](crate::Region::unshare) it first.
    #[error("{start}..{end} is shared with a fork: unshare it before it is offered")]
    ReadOnly {
        /// Its first byte.
        start: u64,
        /// One past its last byte.
        end: u64,
    },
    /// The block sleeps, or shares memory with forks.
    #[error(transparent)]
    Refused(#[from] BlockRefusal),
    /// The memory lies where a description cannot say.
    #[error("memory at {location} cannot be described to another process")]
    Unnameable {
        /// Where it lies.
        location: cuvmm_driver::Location,
    },
    /// The driver gives handles of a kind that is not known here.
    #[error("the driver gives handles of a kind that is not known here")]
    UnknownHandle,
    /// What the offer would say is not consistent.
    #[error(transparent)]
    Description(#[from] DescriptionError),
    /// The driver gives no handle.
    #[error(transparent)]
    Export(#[from] ExportError),
}

/// Why shared memory could not be attached. Nothing of it is held then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// What came with it is not consistent.
    #[error(transparent)]
    Description(#[from] DescriptionError),
    /// It is to be written, and its giver lets others only read.
    #[error("the memory is to be written here, and its giver lets others only read")]
    ReadOnly,
    /// It lies on a device that was not named, or that this process does not see.
    #[error("the memory lies on device {}, which is none of those named", uuid_text(.uuid))]
    NoSuchDevice {
        /// The device's identity.
        uuid: [u8; 16],
    },
    /// A device was named that belongs to another driver.
    #[error("a device of another driver was named")]
    WrongDriver,
    /// The home stream belongs to another device.
    #[error("the stream belongs to another device than the memory is attached for")]
    WrongDevice,
    /// The granule of the giver is none here.
    #[error("extents in granules of {theirs} bytes cannot be mapped in granules of {ours}")]
    Granularity {
        /// The giver's granule in bytes.
        theirs: u64,
        /// Ours.
        ours: u64,
    },
    /// There are not as many handles as extents.
    #[error("{handles} handles for {extents} extents")]
    Handles {
        /// How many came.
        handles: usize,
        /// How many should have come.
        extents: usize,
    },
    /// A handle is not of the type that was described.
    #[error("a handle is not {wanted:?}, as was described")]
    HandleType {
        /// The type that was described.
        wanted: HandleTypes,
    },
    /// A handle is of memory at another place than was described.
    #[error("the memory for offset {offset} lies on {location}, and not where it was said to")]
    Elsewhere {
        /// Where the extent begins.
        offset: u64,
        /// Where it lies.
        location: cuvmm_driver::Location,
    },
    /// A handle could not be imported.
    #[error("the memory for offset {offset}: {cause}")]
    Import {
        /// Where the extent begins.
        offset: u64,
        /// Why.
        #[source]
        cause: ImportError,
    },
    /// There are no addresses for it.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// It could not be mapped: `CUDA_ERROR_NOT_SUPPORTED` and `CUDA_ERROR_INVALID_VALUE` say that a
    /// size is not as described.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// Why elements of shared memory cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// It was not given as elements, or of another size.
    #[error("elements of {wanted} bytes are wanted, and it has some of {given:?} bytes")]
    ElementSize {
        /// Bytes of an element that is wanted.
        wanted: usize,
        /// Bytes of an element that was given, if it was given as elements.
        given: Option<u32>,
    },
    /// The bytes are not whole elements, or not aligned to them.
    #[error("{size} bytes at offset {offset} are no whole elements of {element} bytes")]
    Misaligned {
        /// The first byte.
        offset: u64,
        /// How many.
        size: u64,
        /// Bytes of an element.
        element: usize,
    },
    /// Part of the range has no memory behind it.
    #[error("{size} bytes at offset {offset} are not all there")]
    NotThere {
        /// The first byte.
        offset: u64,
        /// How many.
        size: u64,
    },
    /// It may only be read.
    #[error("the memory may only be read")]
    ReadOnly,
    /// There is no tensor of that name.
    #[error("there is no tensor {name:?}")]
    NoSuchTensor {
        /// The name.
        name: String,
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
    /// So many are connected already.
    #[error("{most} are connected, and there is no room for more")]
    Busy {
        /// How many.
        most: usize,
    },
    /// The path is too long for a socket.
    #[error("{} has {length} bytes, and the path of a socket may have {most}", path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its bytes.
        length: usize,
        /// The most it may have.
        most: usize,
    },
    /// Somebody else listens there.
    #[error("another process listens at {}", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Nobody listens there.
    #[error("nobody listens at {}", path.display())]
    NobodyThere {
        /// The path.
        path: PathBuf,
    },
    /// Something else than a socket is there.
    #[error("{} is no socket", path.display())]
    NoSocket {
        /// The path.
        path: PathBuf,
    },
    /// A file is in the way that is not this library's and this user's.
    #[error(
        "{} is in the way and was not left by a listener of this user: remove it, or use another path",
        path.display()
    )]
    NotOurs {
        /// The file.
        path: PathBuf,
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

/// Why memory could not be given over a channel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GiveError {
    /// The peer will not have it.
    #[error("the peer refused: {reason}")]
    Refused {
        /// In the peer's words.
        reason: String,
    },
    /// The handles could not be made.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// The channel failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

/// Why memory could not be taken from a channel. Nothing of it is held then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeError {
    /// The peer gave up.
    #[error("the peer gave up: {reason}")]
    Withdrawn {
        /// In the peer's words.
        reason: String,
    },
    /// It could not be attached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The channel failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

/// What is wrong with a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// Two tensors have the same name.
    #[error("there are two tensors of the name {name:?}")]
    Twice {
        /// The name.
        name: String,
    },
    /// A tensor lies where there is no memory.
    #[error("tensor {name:?} has {size} bytes at offset {offset}, which are not all there")]
    Outside {
        /// Its name.
        name: String,
        /// Its first byte.
        offset: u64,
        /// How many bytes it has.
        size: u64,
    },
    /// It is too large to be read by anybody.
    #[error("a manifest of {bytes} bytes; the most is {most}")]
    TooLarge {
        /// Its bytes as it travels.
        bytes: usize,
        /// The most there may be.
        most: usize,
    },
}

/// Why writing to memory could not be ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// Leases, registrations, tensors or slices of the block may still write to it.
    #[error(transparent)]
    Refused(#[from] BlockRefusal),
    /// Registrations of the region or vector may still write to it.
    #[error(transparent)]
    Registered(#[from] StillRegistered),
    /// A device's access could not be lowered.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// A publishing that did not come about.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct PublishError<M> {
    /// The memory, as it was.
    pub memory: M,
    /// Why.
    #[source]
    pub reason: PublishRefusal,
}

/// Why memory could not be published.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishRefusal {
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
    /// The manifest does not fit the memory.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The memory cannot be offered.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// Writing to it could not be ended.
    #[error(transparent)]
    Seal(#[from] SealError),
}

/// Why a publication could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubscribeError {
    /// There is nothing of that name.
    #[error("nothing is published as {name:?}")]
    NotPublished {
        /// The name.
        name: String,
    },
    /// Its manifest does not fit its memory.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The memory could not be taken.
    #[error(transparent)]
    Take(#[from] TakeError),
    /// The publisher does not answer, or not as it should.
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

/// The usual way to write an identity.
fn uuid_text(uuid: &[u8; 16]) -> String {
    uuid.iter().map(|byte| format!("{byte:02x}")).collect()
}
