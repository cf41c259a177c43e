//! How fast blocks grow, and the call to the mapper when a block runs out of precommitted memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::extents::{Urgency, Waker};
use crate::pool::blocks::slots::SlotId;

/// The mapper is called when a block has less precommitted memory than it uses up in this time.
const LEAD: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(in crate::pool) struct Precommit {
    pub(crate) waker: Waker,
    /// The number by which the waker identifies the pool.
    pub(crate) attached: u64,
    /// Blocks that run out of precommitted memory.
    pub(crate) growing: VecDeque<SlotId>,
    /// The last block that memory was lacking for, and the bytes.
    pub(crate) lacking: Option<(SlotId, u64)>,
    /// How soon to wake the mapper after the lock is released.
    urgency: Option<Urgency>,
    /// Bytes of physical memory to keep ready.
    pub(in crate::pool) free_target: u64,
}

/// How fast a block grows, and the least precommitted memory that it should have.
#[derive(Debug)]
pub(in crate::pool) struct Pace {
    /// The time of the mapper's last look, and the bytes that the block used then.
    seen: Option<(Instant, u64)>,
    /// The mapper is called below this number of precommitted bytes.
    pub(crate) low: u64,
    /// `true` if the block is queued for the mapper.
    pub(crate) called: bool,
    /// `true` if the block uses up a step that the mapper places in less than [`LEAD`].
    is_fast: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            seen: None,
            low: u64::MAX,
            called: false,
            is_fast: false,
        }
    }
}

impl Pace {
    /// Updates the pace of a block that uses `used` bytes and is to get `step` bytes at once.
    pub(super) fn learn(&mut self, used: u64, step: u64) {
        let precommit = self.look(used);
        self.low = precommit.clamp(step / 2, step);
        self.is_fast = precommit > step;
    }

    pub(super) const fn wake(&self) -> Urgency {
        match self.is_fast {
            true => Urgency::Now,
            false => Urgency::Soon,
        }
    }

    /// Returns the bytes that the block uses up in [`LEAD`] at its pace since the last look.
    fn look(&mut self, used: u64) -> u64 {
        let now = Instant::now();
        let before = self.seen.replace((now, used));
        let Some((then, less)) = before else {
            return 0;
        };
        let grown = u128::from(used.saturating_sub(less)) * LEAD.as_nanos();
        let nanos = now.duration_since(then).as_nanos().max(1);
        u64::try_from(grown / nanos).unwrap_or(u64::MAX)
    }
}

impl Precommit {
    pub(super) const fn new(waker: Waker, free_target: u64) -> Self {
        Self {
            waker,
            attached: 0,
            growing: VecDeque::new(),
            lacking: None,
            urgency: None,
            free_target,
        }
    }

    pub(super) fn call(&mut self, urgency: Urgency) {
        self.urgency = self.urgency.max(Some(urgency));
    }

    pub(super) fn take_urgency(&mut self) -> Option<(Waker, Urgency)> {
        let urgency = self.urgency.take()?;
        Some((self.waker.clone(), urgency))
    }
}
