//! What can go wrong: one enum for each operation, and one umbrella over all of them.
//!
//! Errors are data: they carry what was asked, what there is, the limit, and the driver's own
//! code. An operation that returns one has changed nothing, unless the enum says what it kept.

mod call;
mod own;
mod pool;
mod region;
mod vec;

pub use call::CallError;
pub use own::{
    AccessError, CopyError, CreateError, MapError, OpenError, ReserveError, RetainError,
};
pub use pool::{
    AllocateError, BuildPoolError, CompactError, FreeError, FreeRefusal, RegisterError, Shortage,
    ShrinkError,
};
pub use region::{CommitError, DecommitError, RangeError, StartMapperError};
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
    /// A mapper could not be started.
    #[error(transparent)]
    StartMapper(#[from] StartMapperError),
    /// An operation on a vector failed.
    #[error(transparent)]
    Vec(#[from] VecError),
    /// A pool could not be built.
    #[error(transparent)]
    BuildPool(#[from] BuildPoolError),
    /// A tenant could not be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// A block could not be allocated or grown.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// Memory could not be compacted.
    #[error(transparent)]
    Compact(#[from] CompactError),
    /// A block could not be shrunk.
    #[error(transparent)]
    Shrink(#[from] ShrinkError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}
