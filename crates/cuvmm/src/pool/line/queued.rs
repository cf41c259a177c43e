//! The attempt of a [holder](crate::pool::Holder) whose request waits in the [queue](super::queue): the
//! holder's own, made on the mapper's thread.
//!
//! The mapper does not know what an attempt obtains. What it granted is the holder's, until the future
//! takes it or is dropped.

use std::fmt;
use std::sync::Arc;

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

    /// Returns the new memory that the last attempt lacked, in bytes: it changes with what the holder
    /// uses.
    fn missing(&self) -> u64;
}

/// A holder's request: the memory that it needs, and its attempt.
#[derive(Clone)]
pub(crate) struct HolderWant {
    /// The bytes that the holder has at least once the request is granted, whatever it gives up before.
    pub(crate) least: u64,
    /// The stream that the holder works on.
    pub(crate) home: Stream,
    pub(crate) attempt: Arc<dyn QueuedAttempt>,
}

impl HolderWant {
    /// Returns what the request lacks.
    pub(super) fn demand(&self) -> Demand<'static> {
        let more = self.attempt.missing();
        let least = self.least.max(more);
        Demand::Holder { more, least }
    }
}

impl fmt::Debug for HolderWant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HolderWant")
            .field("least", &self.least)
            .finish_non_exhaustive()
    }
}
