//! The error of an operation that takes ownership.

use std::{error, fmt};

/// An owner that an operation could not take, with the reason. The owner is unchanged.
pub struct HandedBack<T, E> {
    /// The owner.
    pub owner: T,
    /// The reason.
    pub reason: E,
}

impl<T, E> HandedBack<T, E> {
    pub(crate) fn new(owner: T, reason: impl Into<E>) -> Self {
        let reason = reason.into();
        Self { owner, reason }
    }
}

impl<T, E: fmt::Debug> fmt::Debug for HandedBack<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("HandedBack");
        debug.field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<T, E: fmt::Display> fmt::Display for HandedBack<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl<T, E: error::Error + 'static> error::Error for HandedBack<T, E> {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.reason.source()
    }
}
