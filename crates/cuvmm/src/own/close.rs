//! The outcome of closing an owner explicitly.

use std::fmt;

use crate::error::CallError;

/// An owner that could not be closed, returned unchanged.
pub struct CloseError<T> {
    /// The owner. Its drop tries again.
    pub owner: T,
    /// The reason of the refusal.
    pub reason: CloseRefusal,
}

/// The reason why an owner could not be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseRefusal {
    /// A mapping, a clone or another holder still uses the object.
    #[error("it is still in use: drop everything that holds it first")]
    InUse,
    /// The driver refused.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl<T> CloseError<T> {
    /// Returns the owner with the reason if it could not be closed.
    pub(crate) fn of<R: Into<CloseRefusal>>(owner: T, closed: Result<(), R>) -> Result<(), Self> {
        closed.map_err(|reason| Self {
            owner,
            reason: reason.into(),
        })
    }
}

impl<T> fmt::Debug for CloseError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CloseError")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Display for CloseError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot close: {}", self.reason)
    }
}

impl<T> std::error::Error for CloseError<T> {}
