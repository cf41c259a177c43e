//! The errors of this library's functions.

use std::path::{Path, PathBuf};

use cuvmm::display::Bytes;
use cuvmm::driver::cuda::OpenError;
use cuvmm::error::{ChannelError, FolderError, GroupError, PagedKvError, ShareError};
use cuvmm::{
    BlockError, CallError, CloseRefusal, DeviceError, LedgerError, MemoryError, PoolError,
    SleepError,
};

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
        "{name} is {}: the device allows {} to {}",
        Bytes(*value), Bytes(*least), Bytes(*most)
    )]
    Limit {
        name: &'static str,
        value: u64,
        least: u64,
        most: u64,
    },
    #[error("the JSON is not understood: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the setting {name} is {value}: it must be {expected}")]
    Configured {
        name: &'static str,
        value: String,
        expected: &'static str,
    },
    #[error("memory was allocated before: settings come first")]
    TooLate,
    #[error("a text is missing, or is not UTF-8")]
    NotText,
    #[error("a fraction of a device's memory lies between 0 and 1, and {0} does not")]
    Fraction(f64),
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
    #[error("no memory of the device is mapped at {0:#x}: it was freed, or its pool sleeps")]
    NotMapped(u64),
    #[error("the memory pool ({0}, {1}) is not open")]
    NotOpen(u64, u64),
    #[error("no memory was allocated under the tag {tag:?}: {known}")]
    UnknownTag { tag: String, known: String },
    #[error("the tag {0:?} is asleep")]
    Asleep(String),
    #[error("keep is {0}: it must be 0, 1 or 2")]
    Keep(i32),
    #[error("stacks is {0}: it must be 0, 1 or 2")]
    Stacks(i32),
    #[error("a timeout of {0} s: it must not be negative")]
    Timeout(f64),
    #[error("no pool has the memory, or not all of it in one allocation")]
    NotInPool,
    #[error("the tag {0:?} is awake")]
    Awake(String),
    #[error("the tag {tag:?} of device {device}: {cause}")]
    Sleep {
        tag: String,
        device: i32,
        cause: SleepError,
    },
    #[error("{cause}; {stayed}")]
    Stayed { stayed: Box<Self>, cause: Box<Self> },
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("there is no memory pool ({0}, {1})")]
    NoSuchPool(u64, u64),
    #[error("the memory pool ({first}, {second}): {cause}")]
    InPool {
        first: u64,
        second: u64,
        cause: BlockError,
    },
    #[error("a null address was passed where a result is to be written")]
    Null,
    #[error(
        "there is no room for {} of shareable memory: the limit is {}, other allocations hold {} of it \
         and shareable memory {}, and {} always stay for other allocations",
        Bytes(*wanted), Bytes(*limit), Bytes(*held), Bytes(*shareable), Bytes(*granule)
    )]
    NoRoom {
        wanted: u64,
        limit: u64,
        held: u64,
        shareable: u64,
        granule: u64,
    },
    #[error(
        "the pool {0:?} is not shareable: enter it with cuvmm.torch.pool({0:?}, shareable=True) before \
         it has memory, or send a copy in host memory (tensor.cpu())"
    )]
    NotShareable(String),
    #[error(
        "the memory at {0:#x} is not shareable as it lies: allocate it in cuvmm.torch.pool(name, \
         shareable=True), or after cuvmm.torch.install(shareable=True) or \
         cuvmm.configure(shareable=True) and outside of pools of graphs, or publish a copy \
         (copy=True)"
    )]
    NotInPlace(u64),
    #[error(
        "the pool {0:?} has memory that is not shareable: use another name for shareable memory"
    )]
    HasOther(String),
    #[error("the pool {0:?} is shareable, and graphs have memory of their own: use another name")]
    GraphsInShareable(String),
    #[error("the pool {0:?} is shareable: put it to sleep and wake it, it is not exchanged")]
    ExchangeOfShareable(String),
    #[error(
        "tensors of the pool {0:?} were sent to other processes, which may have its memory: free them, \
         and call cuvmm.trim({0:?}), before it sleeps"
    )]
    WasSent(String),
    #[error("{bytes} bytes at offset {offset} are not all in a block of {}", Bytes(*.block))]
    OutsideOfBlock { offset: u64, bytes: u64, block: u64 },
    #[error("the memory came from another process: send a copy of it (tensor.clone())")]
    FromElsewhere,
    #[error("{0} is no open descriptor")]
    NoDescriptor(i32),
    #[error(
        "this process may open no more files, and each storage and each piece of memory that another \
         process gives is one: raise the limit (RLIMIT_NOFILE), or send one large tensor and its views"
    )]
    NoMoreDescriptors,
    #[error("nothing is offered under the number {0}")]
    NotOffered(u64),
    #[error(
        "a graph is captured, which waiting for the device would break: call this before or after it"
    )]
    Capturing,
    #[error(
        "already recording to the memory pool ({0}, {1}): another capture into it has not ended"
    )]
    Recording(u64, u64),
    #[error("part {index} of the publication: {problem}")]
    Part { index: usize, problem: &'static str },
    #[error("{name:?} is not published: {instead}")]
    NotPublished { name: String, instead: String },
    #[error("{name:?} is published by several processes: name the path, one of {paths}")]
    Ambiguous { name: String, paths: String },
    #[error("{} is open to other users than these already", path.display())]
    OtherUsers { path: PathBuf },
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("{}: {cause}", path.display())]
    Publisher { path: PathBuf, cause: ShareError },
    #[error("no keeper listens at {}: `cuvmm share keep` and `python3 -m cuvmm.keeper` are keepers", path.display())]
    NoKeeper { path: PathBuf },
    #[error("{}: the keeper does not keep it: {cause}", path.display())]
    Keeper { path: PathBuf, cause: ShareError },
    #[error("{name:?} is on device {device}: attach it there")]
    OtherDevice { name: String, device: i32 },
    #[error("nothing is attached under the number {0}")]
    NotAttached(u64),
    #[error("it stays attached, and is detached later: {0}")]
    StaysAttached(CloseRefusal),
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error(transparent)]
    Channel(#[from] ChannelError),
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
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error("this process is in no group under the number {0}")]
    NoGroup(u64),
    #[error(transparent)]
    Paged(#[from] PagedKvError),
    #[error("there is no paged cache with the number {0}: it was closed")]
    NoPaged(u64),
    #[error("there is no request for blocks with the number {0}: it was ended")]
    NoPagedRequest(u64),
    #[error("a function that is called for memory cannot wait for a request for blocks")]
    WaitsWithin,
    #[error("the paged cache sleeps with the pool {0:?}: call cuvmm.wake({0:?}) first")]
    PagedAsleep(String),
    #[error(
        "the pool {0:?} is shareable, and a paged cache has memory that is not: use another name"
    )]
    PagedInShareable(String),
    #[error(
        "a paged cache cannot have the name {0:?}, which is that of the process's other memory \
         (cuvmm.configure(tenant=...)): use another name"
    )]
    PagedInHeap(String),
    #[error("the paged cache has no part {part} of layer {layer} in group {group}")]
    NoPart { group: u32, layer: u32, part: u32 },
    #[error("a block has a number from 0 to 2147483646, not {0}")]
    BlockNumber(i64),
    #[error("block numbers are integers of 4 or 8 bytes, not of {0}")]
    NumberWidth(i32),
}

impl Error {
    pub(crate) fn in_pool(self, first: u64, second: u64) -> Self {
        match self {
            Self::Block(cause @ BlockError::HeapOutOfAddresses { .. }) => Self::InPool {
                first,
                second,
                cause,
            },
            other => other,
        }
    }

    pub(crate) fn at(path: &Path, cause: impl Into<ShareError>) -> Self {
        let cause = cause.into();
        match cause.to_string().contains(&*path.to_string_lossy()) {
            true => Self::Share(cause),
            false => Self::Publisher {
                path: path.to_owned(),
                cause,
            },
        }
    }

    pub(crate) fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Block(cause) | Self::InPool { cause, .. } => cause.is_out_of_memory(),
            Self::Pool(error) => error.is_out_of_memory(),
            Self::Call(error) => error.is_out_of_memory(),
            Self::Memory(error) => error.is_out_of_memory(),
            Self::Paged(error) => error.is_out_of_memory(),
            Self::Share(error) => error.is_out_of_memory(),
            Self::Sleep { cause, .. } => cause.is_out_of_memory(),
            Self::Stayed { cause, .. } => cause.is_out_of_memory(),
            Self::NoRoom { .. } => true,
            _ => false,
        }
    }

    /// Returns `true` if memory is short that may become free with work of the GPU.
    pub(crate) fn is_pending(&self) -> bool {
        let shortage = match self {
            Self::Block(cause)
            | Self::InPool { cause, .. }
            | Self::Paged(PagedKvError::Back { cause, .. }) => cause.shortage(),
            _ => None,
        };
        shortage.is_some_and(|it| it.pending_free > 0)
    }

    pub(crate) const fn is_not_published(&self) -> bool {
        let share = match self {
            Self::NotPublished { .. } => return true,
            Self::Share(error) | Self::Publisher { cause: error, .. } => error,
            Self::Channel(error) => return is_gone(error),
            _ => return false,
        };
        match share {
            ShareError::NotFound { .. } => true,
            ShareError::Channel(error) => is_gone(error),
            _ => false,
        }
    }
}

/// Returns `true` if no process listens at the other end, or it has closed the channel.
const fn is_gone(error: &ChannelError) -> bool {
    matches!(
        error,
        ChannelError::Closed | ChannelError::NotListening { .. }
    )
}

/// Formats the size that a caller asked for, which may be negative.
pub(crate) fn asked(size: isize) -> String {
    match u64::try_from(size) {
        Ok(bytes) => Bytes(bytes).to_string(),
        Err(_) => format!("{size} bytes"),
    }
}

/// Formats bytes as PyTorch does, with two digits after the point: programs parse the text.
pub(crate) fn as_pytorch(bytes: u64) -> String {
    for (unit, name) in [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes > unit {
            return format!("{:.2} {name}", bytes as f64 / unit as f64);
        }
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests {
    use cuvmm::BlockError;

    use super::{Error, as_pytorch};

    #[test]
    fn addresses_that_are_short_are_those_of_a_pool() {
        let cause = BlockError::HeapOutOfAddresses {
            tenant: "torch".to_owned(),
            wanted: 3 << 20,
            held: 1 << 30,
            limit: 1 << 30,
            cause: None,
        };
        let error = Error::from(cause).in_pool(0, 7);
        let text = error.to_string();
        assert!(
            text.starts_with("the memory pool (0, 7): out of addresses: "),
            "{text}"
        );
        assert!(error.is_out_of_memory());
    }

    #[test]
    fn sizes_have_two_digits() {
        for (bytes, text) in [
            (1024, "1024 bytes"),
            (1536, "1.50 KiB"),
            (20 << 20, "20.00 MiB"),
            (5 << 29, "2.50 GiB"),
            (1 << 50, "1048576.00 GiB"),
        ] {
            assert_eq!(as_pytorch(bytes), text);
        }
    }
}
