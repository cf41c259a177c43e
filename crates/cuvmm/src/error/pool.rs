//! Errors of pools and tenants.

use super::{ArgumentError, MemoryError};

/// Why a pool could not be built, a tenant not be registered, or a limit or a guarantee not be
/// changed. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A value that was given cannot be meant: a limit that holds no granule or is more than the device
    /// has, a guarantee above the tenant's own limit, a mapper of another device.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// Another tenant has the name.
    #[error("a tenant named {name:?} is registered already")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The tenant has been unregistered.
    #[error("tenant {tenant:?} has been unregistered")]
    Unregistered {
        /// Its name.
        tenant: String,
    },
    /// The tenants are guaranteed more than the pool's limit: lower their guarantees first.
    #[error(
        "a limit of {limit} bytes is less than the {guaranteed} bytes that tenants are guaranteed"
    )]
    BelowGuarantees {
        /// The limit, in whole granules.
        limit: u64,
        /// The guarantees of all tenants.
        guaranteed: u64,
    },
    /// The guarantees, and what others use beyond theirs, would add up to more than the pool's
    /// limit.
    #[error(
        "a guarantee of {guarantee} bytes is more than the {left} bytes that other guarantees and memory in use leave of the limit, {limit}"
    )]
    GuaranteeTooLarge {
        /// Bytes asked for.
        guarantee: u64,
        /// Bytes that neither guarantees nor memory in use beyond them take.
        left: u64,
        /// The pool's limit.
        limit: u64,
    },
    /// Memory of that kind cannot be created, or a driver call failed.
    #[error(transparent)]
    Memory(MemoryError),
}
