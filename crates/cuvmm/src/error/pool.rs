//! Errors of pools and tenants.

use super::{ArgumentError, LedgerShortage, MemoryError};
use crate::display::{Bytes, SetBy};

/// An error of building a pool, registering a tenant, or changing a limit or a guarantee. Sizes are
/// in bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum PoolError {
    /// An argument cannot be used: a limit below one granule or above the device's memory, a
    /// guarantee above the tenant's own limit, a mapper of another device.
    Argument(#[from] ArgumentError),
    /// Another tenant has this name.
    #[error("a tenant named {0:?} is registered already")]
    NameTaken(String),
    /// The tenant of this name has been unregistered.
    #[error("tenant {0:?} has been unregistered")]
    Unregistered(String),
    /// The guarantees of the tenants add up to more than the limit.
    #[error(
        "a limit of {} is less than the tenants' guarantees of {}: lower the guarantees first",
        Bytes(*.limit), Bytes(*.guaranteed)
    )]
    BelowGuarantees {
        /// The requested limit, in whole granules.
        limit: u64,
        /// The sum of all tenants' guarantees.
        guaranteed: u64,
    },
    /// The guarantees, and the memory that other tenants use beyond theirs, would add up to more
    /// than the pool's limit.
    #[error(
        "a guarantee of {} exceeds the {} that other guarantees and memory in use leave of the \
         pool's limit of {}{}",
        Bytes(*.guarantee), Bytes(*.left), Bytes(*.limit), SetBy(*.memory_set_by)
    )]
    GuaranteeTooLarge {
        /// The requested guarantee in bytes.
        guarantee: u64,
        /// Bytes that are neither guaranteed nor in use beyond a guarantee.
        left: u64,
        /// The pool's limit.
        limit: u64,
        /// The option that sets the device's memory, if that memory is the limit and the device no
        /// GPU.
        memory_set_by: Option<&'static str>,
    },
    /// The ledger leaves too little for the guarantees of the pool's tenants.
    Ledger(#[from] LedgerShortage),
    /// Memory of that kind cannot be created, or a driver call failed.
    Memory(MemoryError),
}
