//! The attempt of a [holder](crate::pool::Holder) whose request waits in the [queue](super::queue): the
//! holder's own, made on the mapper's thread.
//!
//! The mapper does not know what an attempt obtains. What it granted is the holder's, until the future
//! takes it or is dropped.

use std::fmt;
use std::sync::Arc;

use super::needs::Needs;
use super::relief::Demand;
use crate::error::BlockError;
use crate::ledger::InLine;
use crate::own::Stream;

/// The attempt of a holder whose request waits in the queue. It is made without the pool's lock.
pub(crate) trait QueuedAttempt: Send + Sync {
    /// Makes one attempt, given the request's place in the line of a ledger. Returns `None` if a lock
    /// of the holder is taken: the mapper does not wait for it. Grants nothing once the request was
    /// withdrawn from the holder.
    fn attempt(&self, place: Option<InLine>) -> Option<Result<(), BlockError>>;

    fn needs(&self) -> &Needs;
}

/// A holder's request: the memory that it needs, and its attempt.
#[derive(Clone)]
pub(crate) struct HolderWant {
    /// The stream that the holder works on.
    pub(crate) home: Stream,
    pub(crate) attempt: Arc<dyn QueuedAttempt>,
}

impl HolderWant {
    /// Returns what the request lacks.
    pub(super) fn demand(&self) -> Demand<'_> {
        Demand::Holder(self.attempt.needs())
    }
}

impl fmt::Debug for HolderWant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HolderWant")
            .field("needs", self.attempt.needs())
            .finish_non_exhaustive()
    }
}
