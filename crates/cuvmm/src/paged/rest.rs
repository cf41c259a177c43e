//! The states of a cache: awake, moving, asleep.

use crate::store::Saved;

/// An extent that has no memory while the cache sleeps.
pub(super) struct Sleeping {
    pub(super) offset: u64,
    pub(super) size: u64,
    /// `None` if the contents were lost.
    pub(super) saved: Option<Saved>,
}

#[derive(Default)]
pub(super) enum Rest {
    #[default]
    Awake,
    /// An operation puts the cache to sleep or wakes it.
    Moving,
    /// Nothing is mapped or charged.
    Asleep(Vec<Sleeping>),
}

impl Rest {
    pub(super) const fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }
}
