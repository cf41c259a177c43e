//! Figures and terms of a process of a ledger, read and changed by another program.
//!
//! Each process serves a Unix socket beside the ledger's file, named by the file's number, the slot
//! and the slot's generation. A connection carries one request and its answer, each a line of JSON.
//! A thread answers one connection after the other. A client has one second to send its request and
//! another to receive the answer.
//!
//! Processes of the ledger in other PID namespaces get a [pidfd](pidfds) here, to know when this
//! process has ended.
//!
//! Only processes of the same user are answered, or of any user if the ledger is a
//! [group's](super::LedgerBuilder::group): the socket's mode then admits the group. The system's
//! overflow user is never answered. [`LedgerBuilder::remote`](super::LedgerBuilder::remote) sets
//! which requests are allowed.

mod client;
mod pidfds;
mod served;
mod server;
mod timed;

use std::time::Duration;

use crate::wanted::Change;
use serde::{Deserialize, Serialize};

pub use client::Control;
pub(super) use pidfds::{Pidfds, Whom};
pub(super) use served::{Served, socket_path};
pub(super) use server::{Commands, start};

/// The requests that a process of a ledger answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Remote {
    /// None: the process serves no socket.
    Nothing,
    /// Reading the process's figures.
    Figures,
    /// Also changing limits, guarantees and priorities, and releasing idle memory. Sleep and wake
    /// need functions in addition ([`LedgerBuilder::on_sleep`](super::LedgerBuilder::on_sleep),
    /// [`LedgerBuilder::on_group`](super::LedgerBuilder::on_group)).
    #[default]
    Changes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    Report,
    /// Has a pidfd of the process beside it; for [`pidfds`].
    Pidfd,
    Change {
        tenant: Option<String>,
        change: Change,
    },
    Trim {
        keep: u64,
    },
    Sleep {
        tenant: Option<String>,
    },
    Wake {
        tenant: Option<String>,
    },
    Group(GroupRequest),
}

/// An operation that another program asks of all ranks of a [group](crate::Group).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupRequest {
    /// The group's name.
    pub group: String,
    /// `true` to wake, `false` to sleep.
    pub wake: bool,
    /// The tags of the blocks; all blocks if there are none.
    pub tags: Vec<String>,
    /// How long the ranks may wait for each other.
    pub timeout: Duration,
}

impl GroupRequest {
    /// Returns a request for all blocks, with a timeout of 10 seconds.
    #[must_use]
    pub fn new(group: impl Into<String>, wake: bool) -> Self {
        Self {
            group: group.into(),
            wake,
            tags: Vec::new(),
            timeout: Duration::from_secs(10),
        }
    }

    /// Restricts the request to blocks with these tags.
    #[must_use]
    pub fn tags(mut self, tags: Vec<String>) -> Self {
        self.tags = tags;
        self
    }

    /// Sets how long the ranks may wait for each other. The asking program waits a second longer.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Report(ProcessReport),
    Done(u64),
    Refused(String),
}

/// The figures of a process's pools. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessReport {
    /// The pools that use the ledger.
    pub pools: Vec<PoolReport>,
}

/// The figures of a pool that uses a ledger. Sizes in bytes.
/// [`PoolStats`](crate::pool::PoolStats) explains them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PoolReport {
    /// The pool's own limit.
    pub limit: u64,
    /// The part of the ledger's limit granted to the pool.
    pub granted: u64,
    /// Memory charged to tenants.
    pub committed: u64,
    /// Unmapped memory that no tenant holds.
    pub free: u64,
    /// Memory that could not be released to the driver.
    pub quarantined: u64,
    /// The tenants, in the order of their registration.
    pub tenants: Vec<TenantReport>,
}

/// The figures of a tenant. Sizes in bytes. [`TenantStats`](crate::pool::TenantStats) explains them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TenantReport {
    /// The tenant's name.
    pub name: String,
    /// `true` if the tenant is unregistered and waits for its last block and lease to end.
    pub draining: bool,
    /// The guarantee.
    pub guarantee: u64,
    /// The most that the tenant may be charged: the least of its own limit, its pool's, its process's and
    /// the ledger's.
    pub limit: u64,
    /// The priority.
    pub priority: i32,
    /// Memory charged to the tenant.
    pub committed: u64,
    /// Memory in use, shared memory included.
    pub in_use: u64,
    /// Idle memory whose fence is complete.
    pub cached: u64,
    /// Idle memory whose fence is not known to be complete.
    pub pending_free: u64,
    /// Memory mapped ahead of growth.
    pub precommitted: u64,
    /// Freed memory that a lease keeps.
    pub leased: u64,
    /// Memory that sleeping blocks and heaps have when they are awake.
    pub asleep: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Requests that were refused.
    pub refusals: u64,
}

/// In bytes.
const LONGEST_REQUEST: u64 = 64 << 10;

/// In bytes.
const LONGEST_REPLY: u64 = 16 << 20;
