//! Errors: one type for each subject, and [`Error`] for all of them.
//!
//! Errors are data: they carry the requested and available figures, the limit, and the driver's
//! code with the call that returned it. A failed operation has changed nothing, unless the error's
//! documentation says otherwise.
//!
//! Two types are common to all subjects: [`ArgumentError`] for an argument that cannot be used,
//! [`MemoryError`] for a failed operation on memory. Every error tells whether memory was short
//! (`is_out_of_memory`), and gives the pool's figures if a pool refused (`shortage`).

mod argument;
mod call;
#[cfg(target_os = "linux")]
mod channel;
mod container;
#[cfg(feature = "cudarc")]
mod cudarc;
mod device;
#[cfg(feature = "dlpack")]
mod dlpack;
#[cfg(target_os = "linux")]
mod group;
mod handed_back;
mod kv;
#[cfg(target_os = "linux")]
mod ledger;
mod ledger_shortage;
mod memory;
mod out_of_memory;
mod paged;
mod pool;
mod share;
mod shortage;
mod sleep;

pub use argument::ArgumentError;
pub use call::CallError;
#[cfg(target_os = "linux")]
pub use channel::{ChannelError, FolderError};
pub use container::ContainerError;
#[cfg(feature = "cudarc")]
pub use cudarc::CudarcError;
pub use device::DeviceError;
#[cfg(feature = "dlpack")]
pub use dlpack::TensorError;
#[cfg(target_os = "linux")]
pub use group::{GroupError, Undone};
pub use handed_back::HandedBack;
pub use kv::KvCacheError;
#[cfg(target_os = "linux")]
pub use ledger::{ControlError, LedgerError};
pub use ledger_shortage::{LedgerRefusal, LedgerShortage};
pub use memory::{BlockError, MemoryError};
pub use paged::PagedKvError;
pub use pool::PoolError;
pub use share::{DescriptionError, ShareError};
pub use shortage::Shortage;
pub use sleep::SleepError;

/// Any error of this library.
#[doc(alias = "VmmError")]
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum Error {
    /// A device could not be opened, or its mapper could not be started.
    Device(#[from] DeviceError),
    /// An argument cannot be used.
    Argument(#[from] ArgumentError),
    /// An operation on memory or a driver call failed.
    Memory(MemoryError),
    /// An operation on a container failed.
    Container(#[from] ContainerError),
    /// A pool could not be built, a tenant could not be registered, or a limit could not be
    /// changed.
    Pool(#[from] PoolError),
    /// A block could not be allocated, grown, shrunk, forked, freed or moved.
    Block(#[from] BlockError),
    /// Blocks could not be put to sleep or woken.
    Sleep(#[from] SleepError),
    /// An operation on a KV cache failed.
    KvCache(#[from] KvCacheError),
    /// An operation on a paged KV cache failed.
    PagedKv(#[from] PagedKvError),
    /// A ledger could not be opened, or its terms could not be changed.
    #[cfg(target_os = "linux")]
    Ledger(#[from] LedgerError),
    /// A group could not be joined, or an operation of its ranks was undone.
    #[cfg(target_os = "linux")]
    Group(#[from] GroupError),
    /// Memory could not be shared with another process.
    Share(#[from] ShareError),
    /// A connection to another process failed.
    #[cfg(target_os = "linux")]
    Channel(#[from] ChannelError),
    /// A description of shared memory is invalid.
    Description(#[from] DescriptionError),
    /// A tensor could not be exported, imported or used.
    #[cfg(feature = "dlpack")]
    Tensor(#[from] TensorError),
    /// An object could not be taken from cudarc, or given to it.
    #[cfg(feature = "cudarc")]
    Cudarc(#[from] CudarcError),
}

/// Converts `MemoryError` and `CallError` into the errors of other subjects. An argument error
/// moves to the outer `Argument` variant, so that each fault has one pattern to match.
macro_rules! from_memory {
    ($($(#[$cfg:meta])? $error:ident),* $(,)?) => {$(
        $(#[$cfg])?
        impl From<MemoryError> for $error {
            fn from(error: MemoryError) -> Self {
                match error {
                    MemoryError::Argument(error) => Self::Argument(error),
                    error => Self::Memory(error),
                }
            }
        }

        $(#[$cfg])?
        impl From<CallError> for $error {
            fn from(error: CallError) -> Self {
                Self::Memory(error.into())
            }
        }
    )*};
}

from_memory! {
    BlockError, ContainerError, Error, KvCacheError, PagedKvError, PoolError, ShareError, SleepError,
    #[cfg(feature = "cudarc")] CudarcError,
    #[cfg(feature = "dlpack")] TensorError,
}

#[cfg(test)]
mod tests {
    use cuvmm_driver::{CUresult, Call, DriverError};

    use super::*;

    /// Every error that a memory error can be converted into.
    fn all_of(error: &MemoryError) -> Vec<Error> {
        let error = || error.clone();
        vec![
            error().into(),
            ContainerError::from(error()).into(),
            PoolError::from(error()).into(),
            BlockError::from(error()).into(),
            SleepError::from(error()).into(),
            KvCacheError::from(error()).into(),
            PagedKvError::from(error()).into(),
            ShareError::from(error()).into(),
        ]
    }

    #[test]
    fn a_wrong_argument_is_an_argument_in_every_error() {
        let wrong = ArgumentError::Zero("bytes");
        for error in all_of(&wrong.into()) {
            let found = match error {
                Error::Argument(found)
                | Error::Container(ContainerError::Argument(found))
                | Error::Pool(PoolError::Argument(found))
                | Error::Block(BlockError::Argument(found))
                | Error::Sleep(SleepError::Argument(found))
                | Error::KvCache(KvCacheError::Argument(found))
                | Error::PagedKv(PagedKvError::Argument(found))
                | Error::Share(ShareError::Argument(found)) => Some(found),
                _ => None,
            };
            assert_eq!(found, Some(wrong));
        }
    }

    #[test]
    fn the_driver_call_and_a_shortage_are_found_in_every_error() {
        for (code, short) in [
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, true),
            (CUresult::CUDA_ERROR_INVALID_VALUE, false),
        ] {
            let cause = CallError::from(DriverError::new(Call::MemMap, code));
            let error = MemoryError::range(0, 4096, cause);
            let lost = MemoryError::Lost {
                ranges: vec![0..2048, 2048..4096],
                cause: Box::new(error.clone()),
            };
            for error in all_of(&error).into_iter().chain(all_of(&lost)) {
                assert_eq!(error.call(), Some(&cause), "{error}");
                assert_eq!(error.is_out_of_memory(), short, "{error}");
                assert!(error.shortage().is_none(), "{error}");
            }
        }
    }

    #[test]
    fn the_figures_of_a_pool_are_found_however_deep_they_lie() {
        let shortage = Shortage {
            tenant: "a".to_owned(),
            wanted: 8,
            available: 4,
            largest_run: 2,
            limit: 16,
            tenant_limit: 16,
            tenant_held: 12,
            guaranteed_to_others: 0,
            pending_free: 0,
            leased: 0,
            stranded: 0,
            quarantined: 0,
            holders: vec![],
            ledger: None,
            memory_set_by: None,
        };
        let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let cause = CallError::from(DriverError::new(Call::MemCreate, code));
        let driver = |shortage| BlockError::DriverOutOfMemory { cause, shortage };
        for error in [
            BlockError::OutOfMemory(Box::new(shortage.clone())),
            BlockError::Capturing(Box::new(shortage.clone())),
            driver(Box::new(shortage.clone())),
        ] {
            let refused = BlockError::Refused {
                index: 1,
                size: 8,
                cause: Box::new(error.clone()),
            };
            let called = error.call().copied();
            for error in [
                Error::from(error.clone()),
                Error::from(refused.clone()),
                Error::from(PagedKvError::Back {
                    blocks: 7,
                    cause: refused.clone(),
                }),
                Error::from(KvCacheError::Block {
                    sequence: 7,
                    cause: refused,
                }),
                Error::from(SleepError::Stayed {
                    blocks: 1,
                    bytes: 8,
                    cause: Box::new(SleepError::Block {
                        bytes: 8,
                        cause: error,
                    }),
                }),
            ] {
                assert_eq!(error.shortage(), Some(&shortage), "{error}");
                assert!(error.is_out_of_memory(), "{error}");
                assert_eq!(error.call().copied(), called, "{error}");
            }
        }
    }
}
