//! The outcome of giving something back by hand.

use std::fmt;

use crate::error::CallError;

/// An owner that could not be closed, handed back as it was.
pub struct CloseError<T> {
    /// The owner. Dropping it tries again.
    pub owner: T,
    /// Why it could not be closed.
    pub reason: CloseRefusal,
}

/// Why something could not be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseRefusal {
    /// Something still stands on it: a mapping on a reservation or a physical, a clone elsewhere.
    #[error("it is still in use")]
    InUse,
    /// The driver refused.
    #[error(transparent)]
    Call(#[from] CallError),
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
        write!(f, "not closed: {}", self.reason)
    }
}

impl<T> std::error::Error for CloseError<T> {}
