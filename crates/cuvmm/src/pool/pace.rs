//! How fast blocks grow, and who is told when one runs out of precommitted memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::ids::SlotId;
use crate::region::{Urgency, Waker};

/// The mapper is called when a block has less precommitted memory than it uses up in so long.
const LEAD: Duration = Duration::from_millis(20);

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
