//! Blocks whose memory is away: their addresses stay, nothing is mapped there, nothing is charged.
//!
//! [Falling asleep](super::sleep) and [waking](super::wake) go in steps, between which the lock is let
//! go. A block that somebody is moving bears a lease of theirs, so that nobody else touches what is
//! under it, and what of it is charged and not in its slot is counted with the slot.
//!
//! What becomes of the contents meanwhile is not decided here, and no byte is copied here.
//!
//! `unsafe` here: naming a moving block's memory as a range to copy in.
#![allow(unsafe_code)]

use std::num::NonZeroU64;
use std::sync::Arc;

use super::budget::TenantId;
use super::core::{Core, Locked};
use super::ids::{BlockPlace, SlotId};
use super::lease::Lease;
use super::sleep_state::SleepState;
use super::slot::{Figures, Slot};
use super::state::State;
use super::tenancy::Tenancy;
use super::tenant::Tenant;
use crate::error::CallError;
use crate::own::Span;

/// A block that is being put to sleep or woken, and what keeps others from it.
#[derive(Debug)]
pub(crate) struct MovingBlock {
    pub(super) lease: Lease,
    /// Bytes that it was asked to have.
    pub(super) bytes: u64,
    /// The same in whole granules.
    pub(super) used: u64,
}

/// A chosen block's place, bytes and bytes in whole granules.
pub(super) type Chosen = (BlockPlace, u64, u64);

/// Blocks to be put to sleep or woken: those with one of these tags, or all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice<'a>(pub(crate) &'a [Arc<str>]);

impl Choice<'_> {
    fn takes(&self, slot: &Slot) -> bool {
        let block = slot.block.as_ref();
        block.is_some_and(|block| self.takes_tagged(block.tag.as_ref()))
    }

    /// Whether it takes a block with this tag.
    fn takes_tagged(&self, tag: Option<&Arc<str>>) -> bool {
        self.0.is_empty() || tag.is_some_and(|tag| self.0.contains(tag))
    }
}

/// How many blocks something is so of, and their bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) blocks: u64,
    pub(super) bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, slot: &Slot) {
        self.blocks += 1;
        self.bytes += slot.block.as_ref().map_or(0, |block| block.requested);
    }
}

impl Tenant {
    /// Whether any of its blocks may sleep, or may be moving. Asks no lock.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.owner().stream_caches.is_bypassed()
    }

    /// Takes back what of its memory is idle; gives it to the driver if that is wished.
    pub(crate) fn give_up_cached(&self, release: bool) -> Result<u64, CallError> {
        let owner = self.owner();
        let mut state = owner.core.lock();
        let free_list = state.free_list.bytes();
        let given = state.take_back_all_of(owner.tenant);
        if release {
            state.release_growth(free_list);
        }
        drop(state);
        owner.core.announce();
        given
    }
}

impl MovingBlock {
    /// Of a block whose lease has been counted.
    pub(super) fn of(core: &Arc<Core>, (place, bytes, used): Chosen) -> Self {
        let lease = Lease::counted(Arc::clone(core), place, bytes);
        Self { lease, bytes, used }
    }

    /// Locks the pool, once no operation has the block's slot.
    pub(super) fn lock(&self) -> Locked<'_> {
        self.lease.core().lock_with(self.lease.place().slot)
    }

    /// Where it lies.
    pub(super) const fn place(&self) -> &BlockPlace {
        self.lease.place()
    }

    /// The block's size in whole granules.
    pub(crate) const fn used(&self) -> u64 {
        self.used
    }

    /// What is mapped there is for the device to copy in.
    pub(crate) fn span(&self) -> Span<'_> {
        // SAFETY: what is mapped under a moving block is unmapped by nobody but whoever moves it,
        // who has waited for the copies before, or quarantines what they may write and keeps what
        // they may read; and where nothing is mapped the driver refuses a copy, which harms nothing.
        unsafe { Span::new(self.lease.device(), self.lease.address(), self.bytes) }
    }
}

impl Core {
    /// Waits until the operations have ended that have slots of chosen blocks.
    pub(super) fn await_choice<'a>(
        &'a self,
        mut state: Locked<'a>,
        id: TenantId,
        choice: Choice<'_>,
    ) -> Locked<'a> {
        let flights: Vec<NonZeroU64> = state.out_of(id, choice).map(|(flight, _)| flight).collect();
        while state.flights.has_any(&flights) {
            state = state.wait(&self.settled, None);
        }
        state
    }
}

impl State {
    /// The chosen blocks whose slots are out: the operation that has each, and what it counts for.
    fn out_of<'a>(
        &'a self,
        id: TenantId,
        choice: Choice<'a>,
    ) -> impl Iterator<Item = (NonZeroU64, &'a Figures)> + 'a {
        let tenancy = self.tenants.get(&id);
        let out = tenancy.into_iter().flat_map(Tenancy::blocks_out);
        out.filter(move |(_, tag, _)| choice.takes_tagged(*tag))
            .map(|(flight, _, figures)| (flight, figures))
    }

    /// Those of them that operations have begun to work on since: all, or those that are not awake.
    pub(super) fn busy(&self, id: TenantId, choice: Choice<'_>, awake: bool) -> Tally {
        let out = self.out_of(id, choice);
        let counted = out.filter(|(_, figures)| awake || figures.sleeps);
        counted.fold(Tally::default(), |busy, (_, figures)| Tally {
            blocks: busy.blocks + 1,
            bytes: busy.bytes + figures.in_use,
        })
    }

    /// Whether the context is there, and this process's.
    pub(super) fn check_alive(&self) -> Result<(), CallError> {
        if let Some(error) = self.device.lost() {
            return Err(CallError::ContextLost(error));
        }
        self.device.forked().map_or(Ok(()), Err)
    }

    /// The chosen slots of a tenant.
    pub(super) fn choose(
        &self,
        id: TenantId,
        choice: Choice<'_>,
        of: impl Fn(&SleepState) -> bool,
    ) -> Vec<SlotId> {
        let Some(tenancy) = self.tenants.get(&id) else {
            return Vec::new();
        };
        let chosen = |slot: &&Slot| of(&slot.sleep_state) && choice.takes(slot);
        let slots = tenancy.indices().filter_map(|index| tenancy.slot(index));
        slots.filter(chosen).map(|slot| slot.id).collect()
    }

    /// Marks a slot, and counts the lease of whoever moves its block.
    pub(super) fn mark(&mut self, id: SlotId, sleep_state: SleepState) -> Option<Chosen> {
        let chosen = self.with_slot(id, |_, slot| {
            slot.leases += 1;
            slot.sleep_state = sleep_state;
            let block = slot.block.as_ref()?;
            Some((slot.place(block.most), block.requested, block.used))
        });
        chosen.flatten()
    }
}
