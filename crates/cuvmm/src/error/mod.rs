//! What can go wrong: one enum for each operation, and one umbrella over all of them.
//!
//! Errors are data: they carry what was asked, what there is, the limit, and the driver's own
//! code. An operation that returns one has changed nothing, unless the enum says what it kept.

mod block;
mod call;
mod cow;
#[cfg(feature = "cudarc")]
mod cudarc;
#[cfg(feature = "dlpack")]
mod dlpack;
mod kv;
mod own;
mod plan;
mod pool;
mod range;
mod region;
mod registration;
mod ring;
mod share;
mod shortage;
mod sleep;
mod sparse;
mod unified;
mod vec;

pub use block::BlockRefusal;
pub use call::CallError;
pub use cow::CowError;
#[cfg(feature = "cudarc")]
pub use cudarc::{AdoptError, AdoptStreamError, LendError, LendRefusal};
#[cfg(feature = "dlpack")]
pub use dlpack::{
    ExportTensorError, ExportTensorRefusal, ImportTensorError, ImportTensorRefusal, NoSuchStream,
    ShapeError, TensorError,
};
pub use kv::{BuildKvCacheError, KvCacheError};
pub use own::{
    AccessError, AllocateManagedError, CopyError, CreateError, ExportError, ImportError, MapError,
    OpenError, ProbeError, RetainError,
};
pub use plan::PlanError;
pub use pool::{
    AllocateError, BuildPoolError, CompactError, ExportBlockError, ForkBlocksError, FreeError,
    FreeRefusal, GrowAllError, LimitError, RegisterError, Shortage, ShrinkError,
};
pub use range::RangeError;
pub use region::{
    AliasError, CommitError, DecommitError, ExportRegionError, ForkError, GrantError, LayoutError,
    RelocateError, ReplaceError, ReserveError, StartMapperError, UnshareError,
};
pub use registration::{DmaBufError, RegisterRangeError, StillRegistered};
pub use ring::RingError;
pub use share::{
    AttachError, ChannelError, DescriptionError, GiveError, ManifestError, OfferError,
    PublishError, PublishRefusal, SealError, SubscribeError, TakeError, ViewError,
};
pub use sleep::{BuildStoreError, SleepError, WakeError};
pub use sparse::SparseError;
pub use unified::UnifiedError;
pub use vec::VecError;

/// Any error of this library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Addresses could not be reserved.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// Physical memory could not be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// Physical memory could not be exported.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// Memory of another process could not be imported.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// Memory cannot be exported so.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// Managed memory could not be allocated.
    #[error(transparent)]
    AllocateManaged(#[from] AllocateManagedError),
    /// A physical could not be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Access could not be set or asked.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A physical could not be found by its place.
    #[error(transparent)]
    Retain(#[from] RetainError),
    /// Bytes could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// Memory could not be committed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// Memory could not be decommitted.
    #[error(transparent)]
    Decommit(#[from] DecommitError),
    /// A region cannot be laid out so.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A device's access could not be changed.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// Memory could not be moved to another place.
    #[error(transparent)]
    Relocate(#[from] RelocateError),
    /// Memory could not be shown a second time.
    #[error(transparent)]
    Alias(#[from] AliasError),
    /// A range of a region could not be exported.
    #[error(transparent)]
    ExportRegion(#[from] ExportRegionError),
    /// A region could not be forked.
    #[error(transparent)]
    Fork(#[from] ForkError),
    /// A range could not be made a region's own.
    #[error(transparent)]
    Unshare(#[from] UnshareError),
    /// A range cannot change while others have it registered.
    #[error(transparent)]
    StillRegistered(#[from] StillRegistered),
    /// A range could not be registered.
    #[error(transparent)]
    RegisterRange(#[from] RegisterRangeError),
    /// There is no dma-buf of a range.
    #[error(transparent)]
    DmaBuf(#[from] DmaBufError),
    /// A mapper could not be started.
    #[error(transparent)]
    StartMapper(#[from] StartMapperError),
    /// An operation on a vector failed.
    #[error(transparent)]
    Vec(#[from] VecError),
    /// A plan cannot be meant as it is.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// An operation on a sparse array failed.
    #[error(transparent)]
    Sparse(#[from] SparseError),
    /// An operation on a ring buffer failed.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// An operation on a buffer with snapshots failed.
    #[error(transparent)]
    Cow(#[from] CowError),
    /// An operation on a unified buffer failed.
    #[error(transparent)]
    Unified(#[from] UnifiedError),
    /// Shared memory was described wrongly.
    #[error(transparent)]
    Description(#[from] DescriptionError),
    /// Memory could not be offered.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// Shared memory could not be attached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Elements of shared memory cannot be had.
    #[error(transparent)]
    View(#[from] ViewError),
    /// A connection to another process failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// Memory could not be published.
    #[error(transparent)]
    Publish(#[from] PublishRefusal),
    /// A publication could not be had.
    #[error(transparent)]
    Subscribe(#[from] SubscribeError),
    /// Memory could not be given.
    #[error(transparent)]
    Give(#[from] GiveError),
    /// Memory could not be taken.
    #[error(transparent)]
    Take(#[from] TakeError),
    /// A pool could not be built.
    #[error(transparent)]
    BuildPool(#[from] BuildPoolError),
    /// A limit or a guarantee could not be given or changed.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// A tenant could not be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// A block could not be allocated or grown.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// A block's memory could not be used, lent or given away.
    #[error(transparent)]
    Refused(#[from] BlockRefusal),
    /// A block could not be exported.
    #[error(transparent)]
    ExportBlock(#[from] ExportBlockError),
    /// A cache of keys and values could not be built.
    #[error(transparent)]
    BuildKvCache(#[from] BuildKvCacheError),
    /// An operation on a cache of keys and values failed.
    #[error(transparent)]
    KvCache(#[from] KvCacheError),
    /// Blocks could not be forked.
    #[error(transparent)]
    ForkBlocks(#[from] ForkBlocksError),
    /// Blocks could not be grown together.
    #[error(transparent)]
    GrowAll(#[from] GrowAllError),
    /// A store of host memory could not be built.
    #[error(transparent)]
    BuildStore(#[from] BuildStoreError),
    /// Blocks could not be put to sleep.
    #[error(transparent)]
    Sleep(#[from] SleepError),
    /// Blocks could not be woken.
    #[error(transparent)]
    Wake(#[from] WakeError),
    /// Memory could not be compacted.
    #[error(transparent)]
    Compact(#[from] CompactError),
    /// A block could not be shrunk.
    #[error(transparent)]
    Shrink(#[from] ShrinkError),
    /// A tensor could not be exported.
    #[cfg(feature = "dlpack")]
    #[error(transparent)]
    ExportTensor(#[from] ExportTensorRefusal),
    /// A tensor could not be imported.
    #[cfg(feature = "dlpack")]
    #[error(transparent)]
    ImportTensor(#[from] ImportTensorRefusal),
    /// An operation on an imported tensor failed.
    #[cfg(feature = "dlpack")]
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A context of cudarc's could not be taken up.
    #[cfg(feature = "cudarc")]
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    /// A stream of cudarc's could not be taken up.
    #[cfg(feature = "cudarc")]
    #[error(transparent)]
    AdoptStream(#[from] AdoptStreamError),
    /// Memory could not be made a slice for cudarc.
    #[cfg(feature = "cudarc")]
    #[error(transparent)]
    Lend(#[from] LendRefusal),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}
