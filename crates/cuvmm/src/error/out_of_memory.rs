//! Queries common to all errors: whether memory is short, the pool's figures, and the failed driver
//! call.
//!
//! A container that is full by its own capacity is not short of memory.

#[cfg(feature = "cudarc")]
use super::CudarcError;
#[cfg(target_os = "linux")]
use super::GroupError;
#[cfg(feature = "dlpack")]
use super::TensorError;
use super::{
    BlockError, CallError, ContainerError, DeviceError, Error, KvCacheError, MemoryError,
    PagedKvError, PoolError, ShareError, Shortage, SleepError,
};

/// Gives errors `is_out_of_memory`, `shortage` and `call`, from the variants that mean a shortage
/// themselves, those that carry the figures, and those with an inner error that may.
macro_rules! out_of_memory {
    ($($error:ident $(if $short:pat)? $(, with $with:pat => $figures:expr)? => {
        $($(#[$cfg:meta])? $inner:pat => $cause:expr),* $(,)?
    })*) => {$(
        impl $error {
            /// Returns `true` if the operation found too little memory, too few mappings or too few
            /// addresses, by the driver's answer or by a limit. Freeing memory can help then.
            #[must_use]
            pub fn is_out_of_memory(&self) -> bool {
                match self {
                    $($short => true,)?
                    $($(#[$cfg])? $inner => $cause.is_out_of_memory(),)*
                    _ => false,
                }
            }

            /// Returns the figures if a pool had too little memory, or the device of a region in no
            /// tenant.
            #[must_use]
            #[allow(unreachable_patterns, reason = "some variants have both figures and a cause")]
            pub fn shortage(&self) -> Option<&Shortage> {
                match self {
                    $($with => Some($figures),)?
                    $($(#[$cfg])? $inner => $cause.shortage(),)*
                    _ => None,
                }
            }

            /// Returns the driver call that failed or was not made, if that was the reason.
            #[must_use]
            pub fn call(&self) -> Option<&CallError> {
                match self {
                    $($(#[$cfg])? $inner => $cause.call(),)*
                    _ => None,
                }
            }
        }
    )*};
}

out_of_memory! {
    MemoryError if Self::Mappings { .. } | Self::HostOutOfMemory { .. },
        with Self::OutOfMemory { shortage, .. } => shortage => {
        Self::Create { cause, .. } | Self::NoRdma { cause, .. } | Self::OutOfMemory { cause, .. } | Self::CreatePool { cause, .. } | Self::Export { cause, .. }
        | Self::Range { cause, .. } | Self::ImportPool(cause) | Self::ImportPointer(cause)
        | Self::Call(cause) => cause,
        Self::Lost { cause, .. } => cause,
        Self::Pool(cause) => cause,
    }
    DeviceError => { Self::Call(cause) => cause }
    BlockError if Self::OutOfMemory(_)
        | Self::OutOfMappings { .. }
        | Self::OutOfAddresses { .. }
        | Self::HeapOutOfAddresses { .. }
        | Self::Capturing(_),
        with Self::OutOfMemory(shortage)
        | Self::DriverOutOfMemory { shortage, .. }
        | Self::Capturing(shortage) => shortage => {
        Self::DriverOutOfMemory { cause, .. } => cause,
        Self::Refused { cause, .. } => cause,
        Self::Lost { cause, .. } => cause,
        Self::Memory(cause) => cause,
    }
    PoolError => { Self::Memory(cause) => cause }
    SleepError if Self::StoreFull { .. } => {
        Self::Block { cause, .. } => cause,
        Self::Memory(cause) => cause,
        Self::Stayed { cause, .. } | Self::Lost { cause, .. } => cause,
    }
    KvCacheError => {
        Self::Create { cause, .. } | Self::Block { cause, .. } => cause,
        Self::Memory(cause) => cause,
    }
    PagedKvError => {
        Self::Back { cause, .. } => cause,
        Self::Memory(cause) => cause,
    }
    ContainerError => {
        Self::Brick { cause, .. } => cause,
        Self::PartlyApplied { cause, .. } => cause,
        Self::Memory(cause) => cause,
    }
    ShareError => { Self::Memory(cause) => cause }
    Error => {
        Self::Device(cause) => cause,
        Self::Memory(cause) => cause,
        Self::Container(cause) => cause,
        Self::Pool(cause) => cause,
        Self::Block(cause) => cause,
        Self::Sleep(cause) => cause,
        #[cfg(target_os = "linux")]
        Self::Group(cause) => cause,
        Self::KvCache(cause) => cause,
        Self::PagedKv(cause) => cause,
        Self::Share(cause) => cause,
        #[cfg(feature = "dlpack")]
        Self::Tensor(cause) => cause,
        #[cfg(feature = "cudarc")]
        Self::Cudarc(cause) => cause,
    }
}

#[cfg(target_os = "linux")]
out_of_memory! {
    GroupError => { Self::Sleep(cause) => cause, Self::Stayed { undone, .. } => undone }
}

#[cfg(feature = "dlpack")]
out_of_memory! { TensorError => { Self::Memory(cause) => cause } }

#[cfg(feature = "cudarc")]
out_of_memory! {
    CudarcError => { Self::Device(cause) => cause, Self::Memory(cause) => cause }
}

impl CallError {
    /// Returns `true` if the driver reported that it has no more bytes, mappings or addresses, or has none
    /// that need not stay free.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Driver(error) => error.is_out_of_memory(),
            Self::LeftFree { .. } => true,
            _ => false,
        }
    }

    /// Returns this error, for symmetry with other errors.
    #[must_use]
    pub const fn call(&self) -> Option<&Self> {
        Some(self)
    }

    /// Returns `None`, since a driver call has no figures.
    #[must_use]
    pub const fn shortage(&self) -> Option<&Shortage> {
        None
    }
}
