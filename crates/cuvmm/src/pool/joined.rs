//! A pool's part in a [ledger](crate::ledger).

use std::sync::Arc;

use crate::ledger::{Member, Waiting};
use crate::sync::Mutex;

#[derive(Debug)]
pub(super) struct Joined {
    pub(super) member: Arc<Member>,
    /// The pool's number as a giver, while it is attached.
    pub(super) attached: Mutex<Option<u64>>,
    /// The request that stands for the queue of futures, while they wait for the ledger.
    pub(super) queued: Mutex<Option<Waiting>>,
}
