//! Blocks put to sleep or woken. A sleeping block keeps its addresses; nothing is mapped there, and
//! nothing is charged.
//!
//! [Falling asleep](crate::pool::blocks::sleep) and [waking](super::wake) take several steps, between which the
//! lock is released. The operation that moves a block has a lease on it, so that no other operation
//! touches its memory. Charged memory of the block outside its slot is counted with the slot.
//!
//! This module copies no byte, and does not decide what becomes of the contents.
//!
//! `unsafe` here: naming a moving block's memory as a range to copy in.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::Arc;

use cuvmm_driver::{DeviceAddress, PhysicalHandle};

use crate::error::{CallError, SleepError};
use crate::own::{Physical, Span};
use crate::pool::accounts::TenantId;
use crate::pool::blocks::slots::{BlockPlace, Figures, SleepState, Slot, SlotId, Tenancy};
use crate::pool::blocks::{Blocks, Lease};
use crate::pool::core::{Core, Locked};
use crate::pool::tenant::Tenant;

/// A block that is falling asleep or waking, and the lease that keeps other operations from it.
#[derive(Debug)]
pub(crate) struct TransitioningBlock {
    pub(in crate::pool) lease: Lease,
    /// The requested size in bytes.
    pub(in crate::pool) bytes: u64,
    /// The size in whole granules.
    pub(in crate::pool) used: u64,
}

/// A chosen block's place, size in bytes, and size in whole granules.
pub(super) type Chosen = (BlockPlace, u64, u64);

/// The blocks to be put to sleep or woken: those with one of the tags, all without tags, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice<'a> {
    pub(crate) tags: Option<&'a [Arc<str>]>,
    /// The addresses of the blocks among these that are chosen, or all of them without.
    pub(crate) addresses: Option<&'a [DeviceAddress]>,
}

impl Choice<'_> {
    fn takes(&self, slot: &Slot) -> bool {
        let block = slot.block.as_ref();
        let address = slot.space.address();
        let is_listed = self.addresses.is_none_or(|all| all.contains(&address));
        is_listed && block.is_some_and(|block| self.takes_tagged(block.tag.as_ref()))
    }

    fn takes_tagged(&self, tag: Option<&Arc<str>>) -> bool {
        self.tags
            .is_some_and(|tags| tags.is_empty() || tag.is_some_and(|tag| tags.contains(tag)))
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(in crate::pool) struct Tally {
    pub(in crate::pool) blocks: u64,
    pub(in crate::pool) bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, slot: &Slot) {
        self.blocks += 1;
        self.bytes += slot.block.as_ref().map_or(0, |block| block.requested);
    }

    /// Fails with the error that `error` makes of the blocks and bytes, if any.
    pub(super) fn none_or(self, error: fn(u64, u64) -> SleepError) -> Result<(), SleepError> {
        match self.blocks {
            0 => Ok(()),
            blocks => Err(error(blocks, self.bytes)),
        }
    }
}

/// Memory that sleep gave up, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GivenUp {
    pub(crate) bytes: u64,
    /// The part that the driver refused to take back.
    pub(crate) refused: u64,
}

impl Locked<'_> {
    /// Ends an operation that gave up `bytes`. With `release`, releases the bytes by which the free
    /// list has grown since it had `before`.
    pub(in crate::pool) fn gave_up(&mut self, bytes: u64, before: u64, release: bool) -> GivenUp {
        if release {
            self.release_growth(before);
        }
        // At the end of the operation it would be too late to say how much the driver refused.
        self.release_marked();
        let refused = self.refused;
        GivenUp { bytes, refused }
    }
}

impl Tenant {
    /// Returns `true` if a block of the tenant may be asleep or moving. Takes no lock.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.owner().stream_caches.is_bypassed()
    }

    /// Reclaims the tenant's idle memory; with `release`, releases it to the driver. After an error
    /// the memory reclaimed before it is given up, and the rest stays.
    pub(crate) fn give_up_cached(&self, release: bool) -> (GivenUp, Result<(), CallError>) {
        let owner = self.owner();
        let mut state = owner.core.lock();
        let free_list = state.memory.supply.free();
        let (bytes, taken) = state.take_back_own(owner.tenant, u64::MAX);
        let given = state.gave_up(bytes, free_list, release);
        drop(state);
        owner.core.announce();
        (given, taken)
    }

    /// Returns all memory of the pool that the driver has refused to take back.
    pub(crate) fn refused_releases(&self) -> BTreeSet<PhysicalHandle> {
        let state = self.owner().core.lock();
        let refused = state.memory.supply.refused();
        refused.map(Physical::as_raw).collect()
    }

    /// Asks the driver again to take all memory of the pool that it has refused. Returns the bytes
    /// that it still refuses, without the memory that it had refused `before`.
    pub(crate) fn retry_releases(&self, before: &BTreeSet<PhysicalHandle>) -> u64 {
        let core = &self.owner().core;
        let mut state = core.lock();
        let (released, _) = state.retry_releases(usize::MAX);
        let refused = state.memory.supply.refused();
        let left = refused.filter(|it| !before.contains(&it.as_raw()));
        let left = left.map(Physical::size).sum();
        drop(state);
        if released > 0 {
            core.announce();
        }
        left
    }
}

impl TransitioningBlock {
    pub(super) fn of(core: &Arc<Core>, (place, bytes, used): Chosen) -> Self {
        let lease = Lease::counted(Arc::clone(core), place, bytes);
        Self { lease, bytes, used }
    }

    /// Locks the pool once no operation has the block's slot out.
    pub(super) fn lock(&self) -> Locked<'_> {
        self.lease.core().lock_with(self.lease.place().slot)
    }

    pub(super) const fn place(&self) -> &BlockPlace {
        self.lease.place()
    }

    pub(crate) const fn used(&self) -> u64 {
        self.used
    }

    pub(super) const fn address(&self) -> DeviceAddress {
        self.lease.address()
    }

    /// Returns the block's memory as a range to copy in, in whole granules.
    pub(crate) fn whole_span(&self) -> Span<'_> {
        // SAFETY: as for `span`. In an exchange the memory of a block that falls asleep is mapped
        // at the addresses of the block that wakes until the copies have ended, or for good.
        unsafe { Span::new(self.lease.device(), self.lease.address(), self.used) }
    }

    pub(crate) fn span(&self) -> Span<'_> {
        // SAFETY: memory under a moving block is unmapped only by the operation that moves it. That
        // operation has waited for the copies before, or quarantines memory that they may write and
        // keeps memory that they may read. Where nothing is mapped the driver refuses a copy, which
        // harms nothing.
        unsafe { Span::new(self.lease.device(), self.lease.address(), self.bytes) }
    }
}

impl Core {
    /// Waits until the operations that have chosen slots out have ended.
    pub(super) fn await_choice<'a>(
        &'a self,
        mut state: Locked<'a>,
        id: TenantId,
        choice: Choice<'_>,
    ) -> Locked<'a> {
        let out = state.blocks.out_of(id, choice);
        let flights: Vec<NonZeroU64> = out.map(|(flight, _)| flight).collect();
        while state.memory.gate.has_any(&flights) {
            state = state.wait(&self.settled, None);
        }
        state
    }
}

impl Blocks {
    /// Returns the chosen blocks whose slots are out: the number of the operation, and the slot's
    /// figures.
    fn out_of<'a>(
        &'a self,
        id: TenantId,
        choice: Choice<'a>,
    ) -> impl Iterator<Item = (NonZeroU64, &'a Figures)> + 'a {
        let tenancy = self.slots.of(id);
        let out = tenancy.into_iter().flat_map(Tenancy::blocks_out);
        out.filter(move |(_, tag, _)| choice.takes_tagged(*tag))
            .map(|(flight, _, figures)| (flight, figures))
    }

    /// Counts the chosen blocks whose slots are out. Without `awake` counts only blocks that are
    /// not awake.
    pub(super) fn busy(&self, id: TenantId, choice: Choice<'_>, awake: bool) -> Tally {
        let out = self.out_of(id, choice);
        let counted = out.filter(|(_, figures)| awake || figures.sleeps);
        counted.fold(Tally::default(), |busy, (_, figures)| Tally {
            blocks: busy.blocks + 1,
            bytes: busy.bytes + figures.in_use,
        })
    }

    pub(super) fn choose(
        &self,
        id: TenantId,
        choice: Choice<'_>,
        of: impl Fn(&SleepState) -> bool,
    ) -> Vec<SlotId> {
        let Some(tenancy) = self.slots.of(id) else {
            return Vec::new();
        };
        let chosen = |slot: &&Slot| of(&slot.sleep_state) && choice.takes(slot);
        let slots = tenancy.indices().filter_map(|index| tenancy.slot(index));
        slots.filter(chosen).map(|slot| slot.id).collect()
    }

    /// Marks a slot, and counts the lease of the operation that moves its block.
    pub(super) fn mark(&mut self, id: SlotId, sleep_state: SleepState) -> Option<Chosen> {
        let chosen = self.with_slot(id, |slot| {
            slot.leases += 1;
            slot.sleep_state = sleep_state;
            let block = slot.block.as_ref()?;
            Some((slot.place(block.most), block.requested, block.used))
        });
        chosen.flatten()
    }
}
