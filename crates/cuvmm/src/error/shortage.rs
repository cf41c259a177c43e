//! Which errors say that memory is short. A container that is full by its own capacity does not: there
//! may be memory enough.

use super::{
    AccessError, AliasError, AllocateError, AllocateManagedError, AttachError, BuildPoolError,
    BuildStoreError, CommitError, CompactError, CopyError, CowError, CreateError, DmaBufError,
    Error, ExportBlockError, ExportError, ExportRegionError, ForkBlocksError, ForkError, GiveError,
    GrantError, GrowAllError, ImportError, KvCacheError, LayoutError, MapError, OfferError,
    OpenError, ProbeError, PublishRefusal, RegisterRangeError, RelocateError, ReplaceError,
    ReserveError, RetainError, RingError, SealError, SleepError, SparseError, SubscribeError,
    TakeError, UnifiedError, UnshareError, VecError, WakeError,
};

/// Gives errors `is_out_of_memory`: variants that say so themselves, and those with an error inside that
/// may.
macro_rules! out_of_memory {
    ($($error:ident $(if $itself:pat =>)? {
        $($variant:pat => $inner:expr),* $(,)?
    })*) => {$(
        impl $error {
            /// Whether the operation found too little memory, too few mappings or too few addresses: by
            /// the driver's answer, or by a limit. Then giving something back can help.
            #[must_use]
            pub fn is_out_of_memory(&self) -> bool {
                match self {
                    $($itself => true,)?
                    $($variant => $inner.is_out_of_memory(),)*
                    #[allow(unreachable_patterns, reason = "every variant of some of them may say so")]
                    _ => false,
                }
            }
        }
    )*};
}

// The owners.
out_of_memory! {
    OpenError { Self::Call(inner) => inner }
    ReserveError {
        Self::Layout(inner) => inner,
        Self::Grant(inner) => inner,
        Self::Call { cause, .. } => cause,
    }
    CreateError { Self::Call { cause, .. } => cause }
    ExportError { Self::Call { cause, .. } => cause }
    ImportError { Self::Call(inner) => inner }
    ProbeError {
        Self::Create(inner) => inner,
        Self::Export(inner) => inner,
        Self::Call(inner) => inner,
    }
    AllocateManagedError { Self::Call { cause, .. } => cause }
    MapError { Self::Call { cause, .. } => cause }
    AccessError { Self::Call { cause, .. } => cause }
    RetainError { Self::Call { cause, .. } => cause }
    CopyError { Self::Call { cause, .. } => cause }
}

// Regions.
out_of_memory! {
    LayoutError { Self::Call(inner) => inner }
    GrantError {
        Self::Layout(inner) => inner,
        Self::Access(inner) => inner,
        Self::Call(inner) => inner,
    }
    ReplaceError {
        Self::Reserve(inner) => inner,
        Self::Place(inner) => inner,
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
        Self::Lost { cause, .. } => cause,
    }
    RelocateError {
        Self::Layout(inner) => inner,
        Self::Create(inner) => inner,
        Self::Replace(inner) => inner,
        Self::Call(inner) => inner,
    }
    AliasError { Self::Place(inner) => inner }
    ExportRegionError { Self::Export(inner) => inner }
    ForkError {
        Self::Reserve(inner) => inner,
        Self::Place(inner) => inner,
        Self::Access(inner) => inner,
        Self::Call(inner) => inner,
    }
    UnshareError {
        Self::Create(inner) => inner,
        Self::Replace(inner) => inner,
        Self::Access(inner) => inner,
        Self::Call(inner) => inner,
    }
    CommitError if Self::Mappings { .. } => {
        Self::Layout(inner) => inner,
        Self::Create(inner) => inner,
        Self::Map(inner) => inner,
        Self::Access(inner) => inner,
        Self::Call { cause, .. } => cause,
    }
    RegisterRangeError { Self::Call(inner) => inner }
    DmaBufError { Self::Call { cause, .. } => cause }
}

// Containers.
out_of_memory! {
    VecError {
        Self::Reserve(inner) => inner,
        Self::Commit(inner) => inner,
        Self::RegisterRange(inner) => inner,
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
    }
    SparseError {
        Self::Reserve(inner) => inner,
        Self::Commit(inner) => inner,
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
    }
    RingError {
        Self::Reserve(inner) => inner,
        Self::Commit(inner) => inner,
        Self::Alias(inner) => inner,
        Self::Copy(inner) => inner,
    }
    CowError {
        Self::Reserve(inner) => inner,
        Self::Commit(inner) => inner,
        Self::Fork(inner) => inner,
        Self::Unshare(inner) => inner,
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
    }
    UnifiedError {
        Self::Allocate(inner) => inner,
        Self::Prefetch { cause, .. } => cause,
        Self::Advise { cause, .. } => cause,
        Self::HalfWay { cause, .. } => cause,
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
    }
}

// Pools.
out_of_memory! {
    BuildPoolError { Self::Create(inner) => inner, Self::Call(inner) => inner }
    AllocateError if Self::OutOfMemory(_)
        | Self::OutOfMappings { .. }
        | Self::OutOfAddresses { .. }
        | Self::DriverOutOfMemory { .. }
        | Self::Capturing(_) =>
    {
        Self::Lost { cause, .. } => cause,
        Self::Reserve(inner) => inner,
        Self::Commit(inner) => inner,
        Self::Zero(inner) => inner,
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
    }
    ForkBlocksError { Self::Allocate(inner) => inner }
    GrowAllError { Self::Refused { cause, .. } => cause }
    CompactError {
        Self::Create(inner) => inner,
        Self::Reserve(inner) => inner,
        Self::Commit(inner) => inner,
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
        Self::Lost { cause, .. } => cause,
    }
    ExportBlockError { Self::Export(inner) => inner }
    KvCacheError {
        Self::Create { cause, .. } => cause,
        Self::Fork { cause, .. } => cause,
        Self::Append { cause, .. } => cause,
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
    }
    BuildStoreError if Self::OutOfMemory { .. } => {
        Self::Pinned { cause, .. } => cause,
        Self::Call(inner) => inner,
    }
    SleepError if Self::StoreFull { .. } => {
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
        Self::Stayed { cause, .. } => cause,
    }
    WakeError {
        Self::Memory { cause, .. } => cause,
        Self::Copy(inner) => inner,
        Self::Call(inner) => inner,
    }
}

// Sharing.
out_of_memory! {
    OfferError { Self::Export(inner) => inner }
    AttachError {
        Self::Import { cause, .. } => cause,
        Self::Reserve(inner) => inner,
        Self::Commit(inner) => inner,
    }
    GiveError { Self::Offer(inner) => inner }
    TakeError { Self::Attach(inner) => inner }
    SealError { Self::Access(inner) => inner, Self::Call(inner) => inner }
    PublishRefusal { Self::Offer(inner) => inner, Self::Seal(inner) => inner }
    SubscribeError { Self::Take(inner) => inner }
}

out_of_memory! {
    Error {
        Self::Open(inner) => inner,
        Self::Reserve(inner) => inner,
        Self::Create(inner) => inner,
        Self::Export(inner) => inner,
        Self::Import(inner) => inner,
        Self::Probe(inner) => inner,
        Self::AllocateManaged(inner) => inner,
        Self::Map(inner) => inner,
        Self::Access(inner) => inner,
        Self::Retain(inner) => inner,
        Self::Copy(inner) => inner,
        Self::Commit(inner) => inner,
        Self::Layout(inner) => inner,
        Self::Grant(inner) => inner,
        Self::Relocate(inner) => inner,
        Self::Alias(inner) => inner,
        Self::ExportRegion(inner) => inner,
        Self::Fork(inner) => inner,
        Self::Unshare(inner) => inner,
        Self::RegisterRange(inner) => inner,
        Self::DmaBuf(inner) => inner,
        Self::Vec(inner) => inner,
        Self::Sparse(inner) => inner,
        Self::Ring(inner) => inner,
        Self::Cow(inner) => inner,
        Self::Unified(inner) => inner,
        Self::Offer(inner) => inner,
        Self::Attach(inner) => inner,
        Self::Publish(inner) => inner,
        Self::Subscribe(inner) => inner,
        Self::Give(inner) => inner,
        Self::Take(inner) => inner,
        Self::BuildPool(inner) => inner,
        Self::Allocate(inner) => inner,
        Self::ExportBlock(inner) => inner,
        Self::KvCache(inner) => inner,
        Self::ForkBlocks(inner) => inner,
        Self::GrowAll(inner) => inner,
        Self::BuildStore(inner) => inner,
        Self::Sleep(inner) => inner,
        Self::Wake(inner) => inner,
        Self::Compact(inner) => inner,
        Self::Call(inner) => inner,
    }
}
