//! How far blocks grow at once, how fast they do, and who is told when one runs out of precommitted memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::ids::SlotId;
use crate::region::{Urgency, Waker};

/// The mapper is called when a block has less precommitted memory than it uses up in so long.
const LEAD: Duration = Duration::from_millis(20);

/// How much memory a block that outgrows what it has gets at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// What it asks for and no more: an extent a granule for a block that grows by granules.
    Exact,
    /// Up to one nth of its size, rounded down to a power of two, if that is more than it asks
    /// for: 8 by default. With a mapper up to twice that lies ahead. What is ahead of its use is
    /// precommitted memory: charged to the tenant, counted apart, never taken from others, and given up before
    /// anybody is refused.
    Part(u64),
}

impl Default for Growth {
    fn default() -> Self {
        Self::Part(8)
    }
}

/// What a pool has for its mapper.
#[derive(Debug)]
pub(crate) struct Precommit {
    pub(crate) waker: Waker,
    /// The number by which the waker knows the pool.
    pub(crate) attached: u64,
    /// Blocks whose precommitted memory runs out.
    pub(crate) growing: VecDeque<SlotId>,
    /// How soon to wake the mapper once the lock is released.
    urgency: Option<Urgency>,
    /// Bytes of physical memory to keep ready.
    pub(crate) free_target: u64,
}

/// How fast a block grows, and how much precommitted memory it should have at least.
#[derive(Debug)]
pub(crate) struct Pace {
    /// When the mapper looked last, and how much the block used then.
    seen: Option<(Instant, u64)>,
    /// The mapper is called when the precommitted memory falls below.
    pub(crate) low: u64,
    /// The mapper knows of it.
    pub(crate) called: bool,
    /// Whether it uses up what the mapper places at once sooner than in [`LEAD`].
    hurries: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            seen: None,
            low: u64::MAX,
            called: false,
            hurries: false,
        }
    }
}

impl Pace {
    /// Learns how fast the block grows that uses so much, and is to get `step` bytes at once.
    pub(crate) fn learn(&mut self, used: u64, step: u64) {
        let precommit = self.look(used);
        self.low = precommit.clamp(step / 2, step);
        self.hurries = precommit > step;
    }

    /// How soon the mapper is to come.
    pub(crate) const fn wake(&self) -> Urgency {
        match self.hurries {
            true => Urgency::Now,
            false => Urgency::Soon,
        }
    }

    /// Bytes that the block uses up in [`LEAD`], going by what it did since the last look.
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
    /// For a waker that does not know the pool yet.
    pub(crate) const fn new(waker: Waker, free_target: u64) -> Self {
        Self {
            waker,
            attached: 0,
            growing: VecDeque::new(),
            urgency: None,
            free_target,
        }
    }

    /// Has the mapper called when the lock is let go.
    pub(crate) fn call(&mut self, urgency: Urgency) {
        self.urgency = self.urgency.max(Some(urgency));
    }

    /// The waker, if the mapper is to be woken.
    pub(crate) fn take_urgency(&mut self) -> Option<(Waker, Urgency)> {
        let urgency = self.urgency.take()?;
        Some((self.waker.clone(), urgency))
    }
}
