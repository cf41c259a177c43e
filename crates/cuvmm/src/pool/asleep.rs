//! Blocks whose memory is away: their addresses stay, nothing is mapped there, nothing is charged.
//!
//! Putting to sleep goes in steps. Under the lock the blocks are chosen and marked as moving, each
//! with a lease, so that nobody else touches what is under them. Then their extents are taken out
//! one block after another and put aside, charged still; so a failure can put back what was there.
//! When all have been, what was put aside is the pool's. Waking goes the same way back: charged and
//! marked first, then furnished bit by bit.
//!
//! What becomes of the contents meanwhile is not decided here, and no byte is copied here.
//!
//! `unsafe` here: naming a moving block's memory as a range to copy in.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use super::budget::TenantId;
use super::commit::Fit;
use super::core::Core;
use super::lease::Lease;
use super::slot::{Place, Slot};
use super::state::State;
use super::tenant::Tenant;
use crate::error::{AllocateError, CallError, CommitError, SleepError, WakeError};
use crate::own::{Right, Span, Stream};
use crate::region::Piece;
use crate::store::Saved;

/// Whether a block has its memory.
#[derive(Debug, Default)]
pub(crate) enum Slumber {
    /// It has.
    #[default]
    Awake,
    /// Somebody is putting it to sleep or waking it.
    Moving {
        /// What was taken out, last first.
        aside: Vec<Aside>,
        /// Bytes that are charged and still to be placed.
        owed: u64,
    },
    /// It has none.
    Asleep {
        /// Its contents, if they were to be kept.
        saved: Option<Saved>,
    },
}

/// An extent that was taken out of a block.
#[derive(Debug)]
pub(crate) struct Aside {
    offset: u64,
    piece: Piece,
    /// The most that anybody might do with it.
    most: Right,
}

impl Slumber {
    pub(crate) const fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }

    /// Bytes that are charged for the block and not in its slot.
    pub(crate) fn beside(&self) -> u64 {
        match self {
            Self::Moving { aside, owed } => {
                let aside: u64 = aside.iter().map(|aside| aside.piece.size()).sum();
                aside + owed
            }
            _ => 0,
        }
    }
}

/// A block that is being put to sleep or woken, and what keeps others from it.
#[derive(Debug)]
struct Bed {
    lease: Lease,
    /// Bytes that it was asked to have.
    bytes: u64,
    /// The same in whole granules.
    used: u64,
}

/// A block that is being put to sleep. Dropped before that is done, it is as it was.
#[derive(Debug)]
pub(crate) struct Falling {
    bed: Option<Bed>,
}

/// A block that is being woken. Dropped before that is done, it sleeps on, without what was kept.
#[derive(Debug)]
pub(crate) struct Rising {
    bed: Option<Bed>,
    /// What was kept of it.
    saved: Option<Saved>,
    /// Whether what is placed reads as zero.
    zeroed: bool,
    home: Option<Stream>,
    /// Whether the home stream has been told to zero some of it.
    filled: bool,
}

/// Blocks to be put to sleep or woken: those with one of these tags, or all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice<'a>(pub(crate) &'a [Arc<str>]);

impl Choice<'_> {
    fn takes(&self, slot: &Slot) -> bool {
        slot.block.as_ref().is_some_and(|block| {
            let tagged = |tag: &Arc<str>| self.0.contains(tag);
            self.0.is_empty() || block.tag.as_ref().is_some_and(tagged)
        })
    }
}

/// How many blocks something is so of, and their bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    blocks: u64,
    bytes: u64,
}

impl Tally {
    fn add(&mut self, slot: &Slot) {
        self.blocks += 1;
        self.bytes += slot.block.as_ref().map_or(0, |block| block.requested);
    }
}

impl Tenant {
    /// Chooses the blocks that are to sleep, all behind the work that may use them.
    pub(crate) fn fall(
        &self,
        choice: Choice<'_>,
        until: Option<Instant>,
    ) -> Result<Vec<Falling>, SleepError> {
        let owner = self.owner();
        let (core, id) = (&owner.core, owner.tenant);
        let chosen = core.until(
            until,
            |state| state.lull(id, choice),
            |error| matches!(error, SleepError::Leased { .. } | SleepError::Busy { .. }),
        )?;
        let falling = chosen.into_iter().map(|chosen| Falling {
            bed: Some(Bed::of(core, chosen)),
        });
        Ok(falling.collect())
    }

    /// Chooses the blocks that are to wake, and charges for them.
    pub(crate) fn rise(
        &self,
        choice: Choice<'_>,
        until: Option<Instant>,
    ) -> Result<Vec<Rising>, WakeError> {
        let owner = self.owner();
        let (core, id) = (&owner.core, owner.tenant);
        let bytes = core.lock().asleep(id, choice);
        let chosen = core.insist(id, bytes, until, |mut state| {
            let outcome = state.rouse(id, choice);
            (state, outcome)
        });
        let chosen = chosen.map_err(|cause| WakeError::Memory { bytes, cause })??;
        let rising = chosen.into_iter().map(|(chosen, mut rising)| {
            rising.bed = Some(Bed::of(core, chosen));
            rising
        });
        Ok(rising.collect())
    }

    /// Whether any of its blocks sleeps, or somebody is moving one. Asks no lock.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.owner().shelves.is_bypassed()
    }

    /// Takes back what of its memory is idle; gives it to the driver if that is wished.
    pub(crate) fn give_up_idle(&self, release: bool) -> Result<u64, CallError> {
        let owner = self.owner();
        let mut state = owner.core.lock();
        let given = state.take_back_all_of(owner.tenant);
        if let (true, Ok(given)) = (release, &given) {
            let keep = state.stock.bytes().saturating_sub(*given);
            state.release_stock(keep);
        }
        drop(state);
        owner.core.announce();
        given
    }
}

/// A chosen block's place, bytes and bytes in whole granules.
type Chosen = (Place, u64, u64);

impl Bed {
    /// Of a block whose lease has been counted.
    fn of(core: &Arc<Core>, (place, bytes, used): Chosen) -> Self {
        let lease = Lease::counted(Arc::clone(core), place, bytes);
        Self { lease, bytes, used }
    }

    /// What is mapped there is for the device to copy in.
    fn span(&self) -> Span<'_> {
        // SAFETY: what is mapped under a moving block is unmapped by nobody but whoever moves it,
        // who has waited for the copies before; and where nothing is mapped the driver refuses a
        // copy, which harms nothing.
        unsafe { Span::new(self.lease.device(), self.lease.address(), self.bytes) }
    }
}

impl Falling {
    /// The block's size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bed.as_ref().map_or(0, |bed| bed.bytes)
    }

    /// What it shows, to be copied.
    pub(crate) fn span(&self) -> Option<Span<'_>> {
        self.bed.as_ref().map(Bed::span)
    }

    /// Takes its memory out and puts it aside.
    pub(crate) fn withdraw(&self) -> Result<(), SleepError> {
        let Some(bed) = &self.bed else { return Ok(()) };
        bed.lease.core().lock().withdraw_all(bed.lease.place())
    }

    /// Gives up what was put aside; returns the bytes.
    pub(crate) fn sleep(mut self, saved: Option<Saved>, release: bool) -> u64 {
        let Some(bed) = self.bed.take() else { return 0 };
        let mut state = bed.lease.core().lock();
        let given = state.settle_asleep(bed.lease.place(), saved, release);
        drop(state);
        bed.lease.core().announce();
        given
    }

    /// Puts what was put aside back where it was. False if that failed: then it sleeps.
    pub(crate) fn stay(mut self, saved: Option<Saved>) -> bool {
        match self.bed.take() {
            Some(bed) => put_back(&bed, saved),
            None => true,
        }
    }
}

fn put_back(bed: &Bed, saved: Option<Saved>) -> bool {
    let mut state = bed.lease.core().lock();
    state.restore(bed.lease.place(), saved)
}

impl Drop for Falling {
    fn drop(&mut self) {
        if let Some(bed) = self.bed.take() {
            put_back(&bed, None);
        }
    }
}

impl Rising {
    /// The block's size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bed.as_ref().map_or(0, |bed| bed.bytes)
    }

    /// The same in whole granules.
    pub(crate) fn used(&self) -> u64 {
        self.bed.as_ref().map_or(0, |bed| bed.used)
    }

    /// What was kept of it, to be given back if it sleeps on.
    pub(crate) const fn take_saved(&mut self) -> Option<Saved> {
        self.saved.take()
    }

    /// What it shows, to be copied to.
    pub(crate) fn span(&self) -> Option<Span<'_>> {
        self.bed.as_ref().map(Bed::span)
    }

    /// Places all that it lacks where nothing was kept.
    pub(crate) fn furnish(&mut self) -> Result<(), AllocateError> {
        let (zeroed, home) = (self.zeroed, self.home.clone());
        let Some(bed) = &self.bed else { return Ok(()) };
        let mut state = bed.lease.core().lock();
        let step = (bed.used, u64::MAX);
        let (_, filled) = state.furnish_next(bed.lease.place(), step, home.as_ref(), zeroed)?;
        self.filled |= filled;
        Ok(())
    }

    /// Places the next extent, to be copied to at once; returns up to where there is memory.
    pub(crate) fn furnish_next(&self) -> Result<u64, AllocateError> {
        let Some(bed) = &self.bed else { return Ok(0) };
        let mut state = bed.lease.core().lock();
        let largest = state.largest_under(bed.lease.place());
        let step = (bed.used, largest);
        let (end, _) = state.furnish_next(bed.lease.place(), step, None, false)?;
        Ok(end)
    }

    /// It has its memory again. Whether that shows what was kept.
    pub(crate) fn wake(mut self, restored: bool) {
        if let Some(bed) = self.bed.take() {
            let mut state = bed.lease.core().lock();
            state.settle_awake(bed.lease.place(), restored);
        }
    }

    /// It sleeps on.
    pub(crate) fn sleep_on(mut self, saved: Option<Saved>) {
        self.lie_down(saved);
    }

    fn lie_down(&mut self, saved: Option<Saved>) {
        let Some(bed) = self.bed.take() else { return };
        if let (true, Some(home)) = (self.filled, &self.home) {
            // Nothing is unmapped under a fill. If this fails the context is lost.
            let waited = bed.lease.device().relaxed(|| home.synchronize());
            if let Err(error) = waited.and_then(|waited| waited) {
                tracing::warn!(%error, "zeros that were on their way could not be waited for");
            }
        }
        let mut state = bed.lease.core().lock();
        state.relapse(bed.lease.place(), bed.used, saved);
        drop(state);
        bed.lease.core().announce();
    }
}

impl Drop for Rising {
    fn drop(&mut self) {
        let saved = self.saved.take();
        self.lie_down(saved);
    }
}

impl State {
    /// Marks the chosen blocks of a tenant that are awake as moving, if nothing is in the way.
    fn lull(&mut self, id: TenantId, choice: Choice<'_>) -> Result<Vec<Chosen>, SleepError> {
        if self.capturing > 0 {
            return Err(SleepError::Capturing);
        }
        self.check_alive()?;
        // A block on a shelf is handed on as it is: none must come there while it sleeps.
        if let Some(tenancy) = self.tenants.get(&id) {
            tenancy.unswept.bypass(true);
            let freed = tenancy.unswept.sweep_each();
            self.free_all(&freed);
        }
        let outcome = self.lull_all(id, choice);
        self.heed_sleepers(id);
        outcome
    }

    /// Whether the context is there, and this process's.
    fn check_alive(&self) -> Result<(), CallError> {
        if let Some(error) = self.device.lost() {
            return Err(CallError::ContextLost(error));
        }
        self.device.forked().map_or(Ok(()), Err)
    }

    fn lull_all(&mut self, id: TenantId, choice: Choice<'_>) -> Result<Vec<Chosen>, SleepError> {
        let chosen = self.choose(id, choice, |slumber| {
            !matches!(slumber, Slumber::Asleep { .. })
        });
        let (mut leased, mut exported) = (Tally::default(), Tally::default());
        let mut busy = Tally::default();
        let needs = &mut self.needs_synchronise;
        let Some(tenancy) = self.tenants.get_mut(&id) else {
            return Ok(Vec::new());
        };
        for &index in &chosen {
            let Some(slot) = tenancy.slot_mut(index) else {
                continue;
            };
            if !slot.slumber.is_awake() {
                busy.add(slot);
            } else if slot.leases > 0 {
                leased.add(slot);
            } else if slot.exported {
                exported.add(slot);
            } else if slot.is_busy() || !Self::has_passed(needs, slot)? {
                busy.add(slot);
            }
        }
        if let Tally { blocks: 1.., .. } = exported {
            let Tally { blocks, bytes } = exported;
            return Err(SleepError::Exported { blocks, bytes });
        }
        if let Tally { blocks: 1.., .. } = leased {
            let Tally { blocks, bytes } = leased;
            return Err(SleepError::Leased { blocks, bytes });
        }
        if let Tally { blocks: 1.., .. } = busy {
            let Tally { blocks, bytes } = busy;
            return Err(SleepError::Busy { blocks, bytes });
        }
        let marked = chosen.into_iter().filter_map(|index| {
            let aside = Vec::new();
            self.mark(id, index, Slumber::Moving { aside, owed: 0 })
        });
        Ok(marked.collect())
    }

    /// Whether what was queued on a block that is in use has passed.
    fn has_passed(needs: &mut bool, slot: &mut Slot) -> Result<bool, CallError> {
        if let Some(block) = &slot.block {
            let fence = block.fence(&slot.space);
            slot.fence.merge(fence);
        }
        Self::poll(0, needs, &mut slot.fence)
    }

    /// The chosen slots of a tenant.
    fn choose(
        &self,
        id: TenantId,
        choice: Choice<'_>,
        of: impl Fn(&Slumber) -> bool,
    ) -> Vec<usize> {
        let Some(tenancy) = self.tenants.get(&id) else {
            return Vec::new();
        };
        let chosen = |slot: &Slot| of(&slot.slumber) && choice.takes(slot);
        let indices = tenancy.indices();
        indices
            .filter(|&index| tenancy.slot(index).is_some_and(chosen))
            .collect()
    }

    /// Marks a slot, and counts the lease of whoever moves its block.
    fn mark(&mut self, id: TenantId, index: usize, slumber: Slumber) -> Option<Chosen> {
        let mut slot = self.take_slot(id, index)?;
        slot.leases += 1;
        slot.slumber = slumber;
        let chosen = slot.block.as_ref().map(|block| {
            let place = Place {
                tenant: id,
                slot: index,
                address: slot.space.address(),
                capacity: block.most,
            };
            (place, block.requested, block.used)
        });
        self.put_slot(id, index, slot);
        chosen
    }

    /// Whether a block has no memory, or somebody is moving it.
    pub(super) fn is_asleep(&self, place: &Place) -> bool {
        let slot = self.slot(place.tenant, place.slot);
        slot.is_some_and(|slot| !slot.slumber.is_awake())
    }

    /// Blocks are shelved again when none of a tenant sleeps.
    pub(super) fn heed_sleepers(&self, id: TenantId) {
        if let Some(tenancy) = self.tenants.get(&id) {
            let sleeps = |slot: &Slot| !slot.slumber.is_awake();
            tenancy.unswept.bypass(tenancy.slots().any(sleeps));
        }
    }

    /// Takes all memory out of a moving block's slot, last first.
    fn withdraw_all(&mut self, place: &Place) -> Result<(), SleepError> {
        let Some(mut slot) = self.take_slot(place.tenant, place.slot) else {
            return Ok(());
        };
        let outcome = Self::empty_slot(&mut slot);
        self.put_slot(place.tenant, place.slot, slot);
        outcome
    }

    fn empty_slot(slot: &mut Slot) -> Result<(), SleepError> {
        // One lease is that of whoever moves it.
        if slot.leases > 1 {
            let mut leased = Tally::default();
            leased.add(slot);
            let Tally { blocks, bytes } = leased;
            return Err(SleepError::Leased { blocks, bytes });
        }
        let offsets: Vec<u64> = slot.space.extents().rev().map(|it| it.offset).collect();
        for offset in offsets {
            let most = slot.space.most_at(offset);
            let piece = slot.space.withdraw(offset)?;
            if let (Some(piece), Slumber::Moving { aside, .. }) = (piece, &mut slot.slumber) {
                aside.push(Aside {
                    offset,
                    piece,
                    most,
                });
            }
        }
        Ok(())
    }

    /// Gives up what was put aside of a moving block; returns the bytes.
    fn settle_asleep(&mut self, place: &Place, saved: Option<Saved>, release: bool) -> u64 {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return 0;
        };
        let Slumber::Moving { aside, .. } = std::mem::take(&mut slot.slumber) else {
            return 0;
        };
        let held = self.budget.account(id).held;
        let stock = self.stock.bytes();
        for Aside { offset, piece, .. } in aside {
            self.abandon(id, (index, &mut slot), offset, piece);
        }
        if release {
            self.release_stock(stock);
        }
        let given = held - self.budget.account(id).held;
        // What it wakes to is its own.
        slot.lent = 0;
        // The block may have been dropped meanwhile.
        if slot.block.is_some() {
            slot.slumber = Slumber::Asleep { saved };
        }
        slot.receded();
        self.put_slot(id, index, slot);
        self.heed_sleepers(id);
        given
    }

    /// Puts what was put aside back. If that fails the block sleeps, with what was saved of it.
    fn restore(&mut self, place: &Place, saved: Option<Saved>) -> bool {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return true;
        };
        let Slumber::Moving { aside, .. } = std::mem::take(&mut slot.slumber) else {
            self.put_slot(id, index, slot);
            return true;
        };
        let mut aside = aside.into_iter().rev();
        let failed = aside.by_ref().find_map(|aside| {
            let Aside {
                offset,
                piece,
                most,
            } = aside;
            let handle = piece.physical.as_raw();
            let failed = slot.space.place_for(offset, vec![piece], most).err()?;
            Some((offset, handle, failed))
        });
        let stays = failed.is_some();
        if let Some((offset, handle, failed)) = failed {
            tracing::error!(error = %failed.error, "a block that was to stay awake sleeps");
            let lost = failed.stuck;
            if lost > 0 && offset < slot.shared {
                self.stuck(id, index, &mut slot, offset, (handle, lost));
            } else if lost > 0 {
                self.budget.refund(id, lost);
                self.budget.refund_mappings(id, 1);
                self.set_aside(&mut slot, lost, 1);
            }
            let rest = aside.map(|aside| (aside.offset, aside.piece));
            let rest: Vec<(u64, Piece)> = rest.collect();
            let failed = failed.pieces.into_iter().map(|piece| (offset, piece));
            for (offset, piece) in rest.into_iter().rev().chain(failed) {
                self.abandon(id, (index, &mut slot), offset, piece);
            }
            self.take_all_out(id, (index, &mut slot));
            slot.lent = 0;
            if slot.block.is_some() {
                slot.slumber = Slumber::Asleep { saved };
            }
        }
        self.put_slot(id, index, slot);
        self.heed_sleepers(id);
        !stays
    }

    /// Books a piece that a moving block had at an offset, and keeps it.
    fn abandon(
        &mut self,
        id: TenantId,
        (index, slot): (usize, &mut Slot),
        offset: u64,
        piece: Piece,
    ) {
        if offset < slot.shared {
            self.parted(id, index, slot, offset, piece);
        } else {
            self.taken(id, piece);
        }
    }

    /// Takes what is left of a moving block's memory out, for good.
    fn take_all_out(&mut self, id: TenantId, (index, slot): (usize, &mut Slot)) {
        let (shared, mut own) = (slot.shared, (0, 0));
        for extent in slot
            .space
            .extents()
            .filter(|extent| extent.offset >= shared)
        {
            own = (own.0 + extent.size, own.1 + 1);
        }
        self.uncommit(slot, shared);
        self.budget.refund(id, own.0);
        self.budget.refund_mappings(id, own.1);
        self.unshare(id, index, slot);
        slot.receded();
    }

    /// Bytes that waking the chosen blocks takes.
    fn asleep(&self, id: TenantId, choice: Choice<'_>) -> u64 {
        let sleepers = self.choose(id, choice, |slumber| {
            matches!(slumber, Slumber::Asleep { .. })
        });
        let slots = sleepers.iter().filter_map(|&index| self.slot(id, index));
        slots
            .filter_map(|slot| Some(slot.block.as_ref()?.used))
            .sum()
    }

    /// Charges for the chosen blocks of a tenant that sleep, and marks them as moving.
    fn rouse(
        &mut self,
        id: TenantId,
        choice: Choice<'_>,
    ) -> Result<Result<Vec<(Chosen, Rising)>, WakeError>, AllocateError> {
        if self.capturing > 0 {
            return Ok(Err(WakeError::Capturing));
        }
        self.check_usable(id)?;
        let moving = self.choose(id, choice, |slumber| {
            matches!(slumber, Slumber::Moving { .. })
        });
        let mut busy = Tally::default();
        for slot in moving.iter().filter_map(|&index| self.slot(id, index)) {
            busy.add(slot);
        }
        if busy.blocks > 0 {
            let Tally { blocks, bytes } = busy;
            return Ok(Err(WakeError::Busy { blocks, bytes }));
        }
        let total = self.asleep(id, choice);
        self.make_room(id, total)?;
        self.budget.charge(id, total);
        let sleepers = self.choose(id, choice, |slumber| {
            matches!(slumber, Slumber::Asleep { .. })
        });
        let risen = sleepers
            .into_iter()
            .filter_map(|index| self.raise(id, index));
        Ok(Ok(risen.collect()))
    }

    /// Marks a sleeping block that was charged for as moving.
    fn raise(&mut self, id: TenantId, index: usize) -> Option<(Chosen, Rising)> {
        let slot = self.slot_mut(id, index)?;
        let block = slot.block.as_ref()?;
        let (zeroed, home, owed) = (block.zeroed, block.home.clone(), block.used);
        let saved = match &mut slot.slumber {
            Slumber::Asleep { saved } => saved.take(),
            _ => None,
        };
        let aside = Vec::new();
        let chosen = self.mark(id, index, Slumber::Moving { aside, owed })?;
        let rising = Rising {
            bed: None,
            saved,
            zeroed,
            home,
            filled: false,
        };
        Some((chosen, rising))
    }

    /// The largest extent that may lie under a block.
    fn largest_under(&self, place: &Place) -> u64 {
        let slot = self.slot(place.tenant, place.slot);
        slot.map_or(self.policy.largest_extent, |slot| slot.class.largest)
    }

    /// Places what a moving block of `used` bytes lacks, at most one extent of `most` bytes or all;
    /// returns up to where there is memory, and whether the home stream zeroes some of it.
    fn furnish_next(
        &mut self,
        place: &Place,
        (used, most): (u64, u64),
        home: Option<&Stream>,
        zeroed: bool,
    ) -> Result<(u64, bool), AllocateError> {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return Ok((used, false));
        };
        let begun = slot.space.bytes();
        let left = used.saturating_sub(begun);
        let bytes = match most {
            u64::MAX => left,
            most => self.device.granule().extent_within(left, most),
        };
        let furnished = self.furnish_moving(id, &mut slot, (begun, begun + bytes), home, zeroed);
        let end = slot.space.bytes();
        self.put_slot(id, index, slot);
        Ok((end, furnished?))
    }

    /// Places charged memory in a range of a moving block's slot, with no other tenant's data in it.
    fn furnish_moving(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        (begun, end): (u64, u64),
        home: Option<&Stream>,
        zeroed: bool,
    ) -> Result<bool, AllocateError> {
        if begun >= end {
            return Ok(false);
        }
        let stuck = slot.space.stuck_in(begun, end);
        if stuck > 0 {
            let start = begun;
            return Err(CommitError::Quarantined {
                start,
                end,
                bytes: stuck,
            }
            .into());
        }
        self.place(id, slot, begun, end - begun, true)?;
        if let Slumber::Moving { owed, .. } = &mut slot.slumber {
            *owed = owed.saturating_sub(end - begun);
        }
        let fit = Fit {
            zeros: None,
            ..Fit::new(end, home, zeroed)
        };
        self.cleanse(id, slot, begun, &fit)
    }

    /// A moving block has all its memory.
    fn settle_awake(&mut self, place: &Place, restored: bool) {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return;
        };
        slot.slumber = Slumber::Awake;
        slot.touched = self.tick();
        slot.space.settle(0);
        let bytes = slot.space.bytes();
        if let Some(block) = &mut slot.block {
            block.reach = bytes;
            block.stained = slot.space.stain(0, block.used, id.0);
            if restored && block.zeroed {
                // What the last granule holds behind what was kept is not zero for certain.
                block.ever = block.ever.max(block.used);
            }
        }
        self.put_slot(id, index, slot);
        self.heed_sleepers(id);
    }

    /// A moving block is to sleep on: what it was given and what was charged go back.
    fn relapse(&mut self, place: &Place, used: u64, saved: Option<Saved>) {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return;
        };
        let count = slot.space.count();
        self.uncommit(&mut slot, 0);
        self.budget.refund(id, used);
        self.budget.refund_mappings(id, count);
        slot.receded();
        slot.slumber = match slot.block {
            Some(_) => Slumber::Asleep { saved },
            None => Slumber::Awake,
        };
        self.put_slot(id, index, slot);
        self.heed_sleepers(id);
    }
}
