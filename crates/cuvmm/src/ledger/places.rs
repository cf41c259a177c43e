//! The places of waiting requests in the line of all processes' requests.

use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct InLine {
    /// Lower tickets go first.
    pub(super) ticket: u64,
    pub(super) since: Instant,
}

/// A waiting request as other processes count it.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) place: InLine,
    /// In bytes.
    pub(super) lacking: u64,
    /// The time from which on the request does not count, also if its thread has not returned.
    pub(super) until: Option<Instant>,
}
