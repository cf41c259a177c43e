//! Bytes that a cache keeps while it sleeps.

use crate::pool;
use crate::store::Saved;

/// An extent that has no memory while the cache sleeps.
pub(super) struct Sleeping {
    pub(super) offset: u64,
    pub(super) size: u64,
    /// `None` if the contents were lost.
    pub(super) saved: Option<Saved>,
}

/// The state of a cache.
pub(super) type Rest = pool::Rest<Vec<Sleeping>>;
