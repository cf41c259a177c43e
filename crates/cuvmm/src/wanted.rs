//! Terms that pools and [ledgers](crate::ledger) exchange: the purpose and size of a request, the
//! tenants that wait, and changes of a tenant.
//!
//! Pools are built with these types on every system, ledgers on Linux only.

use std::time::Duration;

use crate::size::Granularity;

/// The largest [piece](piece).
const GRANT: u64 = 64 << 20;

/// Returns the smallest grant that a pool asks for, if that much is left, and the unneeded bytes that
/// it keeps while it is in use: a 16th of the pool's limit or of the process's, which is at most the
/// ledger's, whichever is less, at most 64 MiB and at least a granule. So small changes do not touch the
/// shared file, and a pool that needs little takes little of a small limit. All sizes in bytes.
pub(crate) fn piece(granule: Granularity, pool: u64, process: u64) -> u64 {
    let part = pool.min(process) / 16;
    granule.round_down(part.min(GRANT)).max(granule.bytes())
}

/// The time after which hooks are called again for a request that still waits, from the end of their
/// last calls on. So memory that a tenant could give only later is asked for too, and a quick hook
/// that gives nothing takes little of its thread's time.
pub(crate) const HOOKS_AGAIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A new block, memory kept ready, or a guarantee. It comes after older requests of other
    /// processes, unless it may pass them.
    New,
    /// More memory for a block that has some. A waiting request does not hold growth up: otherwise
    /// work that cannot go on would give up its memory for other work that cannot go on either.
    /// Growth is bounded by the capacities of blocks.
    Growth,
}

/// A new limit or guarantee in bytes, or a new priority, of a tenant or of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Change {
    Limit(u64),
    Guarantee(u64),
    Priority(i32),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lacking {
    pub(crate) bytes: u64,
    pub(crate) tenants: Vec<u64>,
    /// The tenants of the pool that have memory in use.
    pub(crate) users: Vec<u64>,
}

impl Lacking {
    /// Adds another request of the same queue: the larger size counts.
    pub(crate) fn with(self, other: Option<Self>) -> Self {
        let Some(mut other) = other else {
            return self;
        };
        other.bytes = other.bytes.max(self.bytes);
        let new = self.tenants.into_iter();
        let new: Vec<u64> = new.filter(|it| !other.tenants.contains(it)).collect();
        other.tenants.extend(new);
        // `self` has the newer users.
        other.users = self.users;
        other
    }
}
