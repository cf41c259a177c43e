//! A pool's part in a [ledger](crate::ledger).

use std::sync::Arc;

use crate::ledger::{Member, Waiting};
use crate::sync::Mutex;
use crate::sync::atomic::AtomicUsize;

#[derive(Debug)]
pub(crate) struct Joined {
    pub(in crate::pool) member: Arc<Member>,
    /// The pool's number as a giver, while it is attached.
    pub(in crate::pool) attached: Mutex<Option<u64>>,
    /// The request that stands for the queue of futures, while they wait for the ledger.
    pub(in crate::pool) queued: Mutex<Option<Waiting>>,
    /// The threads that [wait for refunds](Waiting::await_refund), and that idle memory of the pool
    /// wakes too. Raised under the pool's lock.
    pub(in crate::pool) awaiting: AtomicUsize,
}

impl Drop for Joined {
    fn drop(&mut self) {
        Member::leave_if_last(&self.member);
    }
}
