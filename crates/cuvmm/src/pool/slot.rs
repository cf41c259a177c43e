//! A place for a block: addresses, the memory under them, and who uses it.
//!
//! Memory lies in a slot as a prefix of its addresses. The first `used` bytes belong to the block;
//! what lies behind them, and everything when the block is gone, is idle: it stays mapped, waits
//! for its fence, and can be revived or taken back from the end.

use crate::own::Stream;
use crate::region::{Extent, Fence, Space};

/// Where a slot's memory stands when it is not in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Idle {
    /// Its fence has passed.
    Warm,
    /// It is not known whether its fence has passed.
    Limbo,
    /// A lease lives.
    Leased,
}

#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) space: Space,
    /// The class of capacities it serves: its size.
    pub(crate) class: u64,
    /// The block in it, if there is one.
    pub(crate) block: Option<Occupant>,
    /// Leases on the block that is in it or was in it last.
    pub(crate) leases: u64,
    /// What must pass before idle memory may be unmapped or given to another stream.
    pub(crate) fence: Fence,
    /// When it was used last, on the pool's clock.
    pub(crate) touched: u64,
    /// A roll-back failed in it: it serves its block and no other.
    pub(crate) broken: bool,
}

#[derive(Debug)]
pub(crate) struct Occupant {
    /// Bytes the block was asked to have.
    pub(crate) requested: u64,
    /// The same in whole granules.
    pub(crate) used: u64,
    /// The stream it was allocated on.
    pub(crate) home: Option<Stream>,
    /// Other streams that used it.
    pub(crate) users: Vec<Stream>,
    pub(crate) tag: Option<String>,
    pub(crate) zeroed: bool,
}

impl Occupant {
    /// What must pass once memory of the block is withdrawn.
    pub(crate) fn fence(&self, space: &Space) -> Fence {
        match &self.home {
            Some(home) => {
                let mut streams = vec![home.clone()];
                streams.extend(self.users.iter().cloned());
                Fence::streams(streams)
            }
            None => Fence::device(space.device().clone()),
        }
    }
}

impl Slot {
    pub(crate) fn used(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.used)
    }

    pub(crate) fn requested(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.requested)
    }

    /// Bytes of memory that are not in use.
    pub(crate) fn idle(&self) -> u64 {
        self.space.bytes().saturating_sub(self.used())
    }

    pub(crate) const fn idle_state(&self) -> Idle {
        if self.leases > 0 {
            Idle::Leased
        } else if self.fence.is_passed() {
            Idle::Warm
        } else {
            Idle::Limbo
        }
    }

    /// Idle bytes that share an extent with bytes in use, and so cannot be taken back.
    pub(crate) fn stranded(&self) -> u64 {
        let used = self.used();
        self.space
            .extents_in(used, used.saturating_add(1))
            .first()
            .filter(|extent| extent.offset < used)
            .map_or(0, |extent| extent.offset + extent.size - used)
    }

    /// Bytes that cannot be taken back, however long one waits for the GPU.
    pub(crate) fn kept(&self) -> u64 {
        if self.leases > 0 {
            self.space.bytes()
        } else {
            self.used() + self.stranded()
        }
    }

    /// The extents that could be taken back now, last first, if their fence has passed.
    pub(crate) fn spare(&self) -> impl Iterator<Item = Extent> + '_ {
        let used = self.used();
        let free = self.leases == 0;
        self.space
            .extents()
            .rev()
            .take_while(move |extent| free && extent.offset >= used)
    }
}
