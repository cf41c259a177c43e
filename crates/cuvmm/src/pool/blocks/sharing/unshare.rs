//! Unsharing: making a block's memory its own from some byte on, so that it can be written there.
//! The extents of [shared memory](super::shared) behind the byte are unmapped. The extent that
//! contains the byte is replaced by memory of the block's own with the same bytes before it, or
//! made writable if no other slot maps it any more.
//!
//! Addresses stay, so the work that may use them must be complete when the extent is unmapped. Each
//! attempt proves that anew: with memory found and the slot to copy from out, the fence is extended
//! to the work queued by now and polled, and the lock is not released before the extent is
//! unmapped. If the fence is incomplete, the memory and the slot go back. The copy is made from
//! another block that maps the extent, behind the work queued on the home stream.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::deferred::is_in_hook;
use crate::device::Device;
use crate::error::{BlockError, CallError, MemoryError};
use crate::extents::{Extent, Fence, LastWriter, Poll, TakenOut};
use crate::own::Access;
use crate::pool::accounts::{Charge, TenantId};
use crate::pool::blocks::slots::{BlockPlace, Slot, SlotId};
use crate::pool::blocks::{Blocks, Charging, Gathered, Unfinished};
use crate::pool::core::{Core, Locked};
use crate::pool::line::{Attempt, Wait};
use crate::wanted::Purpose;

/// The longest time that an attempt waits for its own copies: several times as long as a copy of
/// the largest extent takes.
const COPY_WAIT: Duration = Duration::from_millis(20);

/// How often an attempt polls its copies.
const COPY_PAUSE: Duration = Duration::from_micros(20);

/// A block's slot, and the offset from which its memory must be its own.
#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct Step {
    pub(in crate::pool) slot: SlotId,
    pub(in crate::pool) from: u64,
}

#[derive(Debug)]
pub(in crate::pool) struct Refused {
    pub(in crate::pool) index: usize,
    pub(in crate::pool) cause: BlockError,
}

impl Refused {
    pub(in crate::pool::blocks) fn with_size(
        self,
        size: impl Fn(usize) -> Option<u64>,
    ) -> BlockError {
        let Self { index, cause } = self;
        let size = size(index).unwrap_or(0);
        let cause = Box::new(cause);
        BlockError::Refused { index, size, cause }
    }
}

/// Memory for a slot. After a panic of the driver its charge stays, and counts the memory.
#[must_use = "it is placed or put back"]
struct Own {
    bytes: u64,
    charge: Option<Charge>,
    gathered: Gathered,
}

enum Made {
    Own,
    /// The memory is the block's own, and a copy to it is queued on the home stream.
    Copied,
    /// Other operations have all slots that could be copied from.
    NotYet,
}

impl Core {
    /// Unshares memory of blocks that could not write all of it when grown to the given sizes.
    pub(in crate::pool::blocks) fn unshare_cuts(
        &self,
        tenant: TenantId,
        wanted: &[(BlockPlace, u64)],
        wait: Wait,
    ) -> Result<(), Refused> {
        let slots = wanted.iter().map(|(place, size)| (place.slot, *size));
        let state = self.await_slots(self.lock(), slots);
        let (mut indices, mut cut) = (Vec::new(), Vec::new());
        for (index, (place, size)) in wanted.iter().enumerate() {
            let step = state.blocks.cut_in(place, *size);
            if let Some(step) = step.map_err(|cause| Refused { index, cause })? {
                indices.push(index);
                cut.push(step);
            }
        }
        Self::unlock(state);
        if cut.is_empty() {
            return Ok(());
        }
        let made = self.unshare(tenant, &cut, wait);
        made.map_err(|Refused { index, cause }| Refused {
            index: indices.get(index).copied().unwrap_or_default(),
            cause,
        })
    }

    pub(in crate::pool::blocks) fn unshare(
        &self,
        tenant: TenantId,
        steps: &[Step],
        wait: Wait,
    ) -> Result<(), Refused> {
        let slots = steps.iter().map(|step| (step.slot, 0));
        let state = self.await_slots(self.lock(), slots);
        let bytes: u64 = steps.iter().map(|step| state.blocks.replaced(step)).sum();
        Self::unlock(state);
        let waits = wait.waits() && !is_in_hook();
        let refused = Cell::new(0);
        let made = self.request(tenant, bytes, wait, |state| {
            self.attempt_to_unshare(state, steps, waits, &refused)
        });
        let index = refused.get();
        made.map_err(|cause| Refused { index, cause })
    }

    /// Sets `refused` to the index of the block that was refused.
    fn attempt_to_unshare<'a>(
        &'a self,
        mut state: Locked<'a>,
        steps: &[Step],
        waits: bool,
        refused: &Cell<usize>,
    ) -> Attempt<'a, ()> {
        // A slot that by now is the last to map its memory needs nothing.
        state.part_all();
        // The mapper may be placing memory behind the memory that must go.
        state = self.await_slots(state, steps.iter().map(|step| (step.slot, u64::MAX)));
        // If a block is in use now, nothing is begun.
        let mut steps_and_indices = steps.iter().enumerate();
        let mut outcome = steps_and_indices.try_for_each(|(index, step)| {
            refused.set(index);
            state.check_shared(step, waits)
        });
        let mut copies = Fence::complete();
        for (index, step) in steps.iter().enumerate() {
            if outcome.is_err() {
                break;
            }
            refused.set(index);
            (state, outcome) = self.unshare_one(state, step, waits, &mut copies);
        }
        (state, outcome)
    }

    /// Unshares memory of one block. `copies` covers the copies that the attempt has queued.
    fn unshare_one<'a>(
        &'a self,
        mut state: Locked<'a>,
        step: &Step,
        waits: bool,
        copies: &mut Fence,
    ) -> Attempt<'a, ()> {
        if !copies.is_complete()
            && let Err(error) = state.unlocked(|| await_copies(copies))
        {
            return (state, Err(error.into()));
        }
        loop {
            // The lock was released since the slots were waited for.
            state = self.await_slot(state, step.slot);
            let ended = state.memory.gate.ended();
            match state.unshare_slot(step, waits) {
                // They may have ended since: memory that goes back releases the lock.
                Ok(Made::NotYet) => state = state.wait_for_end(ended),
                Ok(Made::Copied) => {
                    let slot = state.blocks.slots.get(step.slot);
                    let home = slot.and_then(Slot::home).cloned();
                    copies.merge(Fence::streams(home.into_iter().collect()));
                    return (state, Ok(()));
                }
                Ok(Made::Own) => return (state, Ok(())),
                Err(error) => return (state, Err(error)),
            }
        }
    }
}

/// Waits a short time for copies for earlier blocks, which count as work on the streams of the next
/// block. They began on idle streams, so they end soon.
fn await_copies(copies: &mut Fence) -> Result<(), CallError> {
    let begun = Instant::now();
    while copies.poll()? != Poll::Complete && begun.elapsed() < COPY_WAIT {
        std::thread::sleep(COPY_PAUSE);
    }
    Ok(())
}

impl Blocks {
    /// Returns the offset from which a block needs memory of its own before it can grow to `size`
    /// bytes. A block that is falling asleep does not grow: it may stay awake, and show the same
    /// memory as before.
    fn cut_in(&self, place: &BlockPlace, size: u64) -> Result<Option<Step>, BlockError> {
        let slot = self.slots.get(place.slot);
        let Some((slot, block)) = slot.and_then(|slot| Some((slot, slot.block.as_ref()?))) else {
            return Ok(None);
        };
        let from = block.requested;
        if !slot.is_truncated() || size <= from || size > place.capacity {
            return Ok(None);
        }
        slot.check_awake()?;
        let slot = place.slot;
        Ok(Some(Step { slot, from }))
    }

    fn replaced(&self, step: &Step) -> u64 {
        let slot = self.slots.get(step.slot);
        let slot = slot.filter(|slot| slot.shared > step.from);
        let replaced = slot.and_then(|slot| {
            let extent = slot.space.bounds_around(step.from)?;
            Some(slot.used().saturating_sub(extent.start))
        });
        replaced.unwrap_or(0)
    }

    fn others_of(&self, slot: &Slot, extent: Extent) -> Vec<SlotId> {
        let SlotId { tenant, index } = slot.id;
        let handle = slot.space.handle_at(extent.offset);
        let (Some(handle), Some(tenancy)) = (handle, self.slots.of(tenant)) else {
            return Vec::new();
        };
        let others = tenancy.share_table.others_of(handle, index);
        others.map(|index| SlotId { tenant, index }).collect()
    }
}

impl Locked<'_> {
    /// Checks that the work queued on a block by now is complete, and that no lease keeps the
    /// memory in place. With `waits`, work that only a synchronization proves complete passes: it
    /// is waited for later.
    fn check_shared(&mut self, step: &Step, waits: bool) -> Result<(), BlockError> {
        let (memory, blocks) = self.halves();
        let Some(slot) = blocks.slots.get_mut(step.slot) else {
            return Ok(());
        };
        if slot.bound() <= step.from {
            return Ok(());
        }
        slot.fence_work();
        let seen = memory.gate.ask(&mut slot.fence)?;
        let passes = seen == Poll::Complete || (waits && seen == Poll::NeedsSynchronise);
        match self.blocks.slots.get(step.slot) {
            Some(slot) if !passes || slot.leases > 0 => Err(self.shared_in_use(slot, step.from)),
            _ => Ok(()),
        }
    }

    fn shared_in_use(&self, slot: &Slot, from: u64) -> BlockError {
        let bytes = slot.bound() - from;
        if self.memory.gate.is_capturing() {
            return self.captured(slot.id.tenant, bytes);
        }
        BlockError::SharedInUse {
            offset: from,
            bytes,
            others: self.blocks.count_others(slot, from),
        }
    }

    fn unshare_slot(&mut self, step: &Step, waits: bool) -> Result<Made, BlockError> {
        self.memory.check_usable(step.slot.tenant)?;
        let made = self.with_slot_out(step.slot, |state, slot| {
            state.own_from(slot, step.from, waits)
        });
        made.unwrap_or(Ok(Made::Own))
    }

    /// Checks that the work queued on the block of a slot, which is out, is complete by now. The
    /// lock must not be released before the extent is unmapped.
    fn prove_unused(&mut self, slot: &mut Slot, from: u64, waits: bool) -> Result<(), BlockError> {
        slot.fence_work();
        let mut seen = self.memory.gate.ask(&mut slot.fence)?;
        if seen == Poll::NeedsSynchronise && waits && slot.leases == 0 {
            let core = self.core();
            match self.unlocked(|| core.users().try_for_each(Device::settle)) {
                Ok(()) => {
                    // Work launched meanwhile is seen on the known streams.
                    if let Some(block) = &slot.block {
                        slot.fence.merge(block.fence_of_known());
                    }
                    seen = slot.fence.poll()?;
                }
                Err(error) if self.memory.device.usable().is_err() => return Err(error.into()),
                // For instance, another library captures.
                Err(error) => log!(debug, %error, "the device could not be waited for"),
            }
        }
        match seen == Poll::Complete && slot.leases == 0 {
            true => Ok(()),
            false => Err(self.shared_in_use(slot, from)),
        }
    }

    fn own_from(&mut self, slot: &mut Slot, from: u64, waits: bool) -> Result<Made, BlockError> {
        if slot.bound() <= from {
            return Ok(Made::Own);
        }
        if !slot.is_unused() {
            self.prove_unused(slot, from, waits)?;
        }
        self.take_unused(slot)?;
        // The extent that contains the byte is left.
        let (Some(extent), to) = (slot.space.extent_around(from), slot.used()) else {
            return Ok(Made::Own);
        };
        if slot.shared <= from {
            return self.open(slot, extent);
        }
        let (id, bytes) = (slot.id.tenant, to.saturating_sub(extent.offset));
        // The copy would become part of the graph instead of running now. The lock may have been
        // released since the fence was polled.
        if self.memory.captures(slot.home())? {
            return Err(self.captured(id, bytes));
        }
        if slot.stuck_at(extent.offset, bytes) {
            let range = extent.offset..to;
            return Err(MemoryError::Quarantined { range, bytes }.into());
        }
        if self.blocks.others_of(slot, extent).is_empty() {
            return self.keep_alone(slot, extent);
        }
        let charge = self.obtain(id, bytes, Purpose::Growth)?;
        let range = extent.offset..extent.offset + bytes;
        let charging = Charging(self, Some(charge));
        let gathered = charging.0.gather_to_place(slot, range, true)?;
        let own = Own {
            bytes,
            charge: charging.take(),
            gathered,
        };
        self.exchange_with(slot, (extent, from), own, waits)
    }

    /// Replaces a slot's shared extent by gathered memory, with bytes of another slot that maps the
    /// extent.
    fn exchange_with(
        &mut self,
        slot: &mut Slot,
        (extent, from): (Extent, u64),
        own: Own,
        waits: bool,
    ) -> Result<Made, BlockError> {
        let others = self.blocks.others_of(slot, extent);
        let Some(mut source) = others.iter().find_map(|&other| self.take_out(other)) else {
            let are_out = others.iter().any(|&other| self.is_out(other));
            self.put_own_back(own);
            return match are_out {
                true => Ok(Made::NotYet),
                false if others.is_empty() => self.keep_alone(slot, extent),
                // Lost to a panic.
                false => Err(CallError::InUse.into()),
            };
        };
        let owned = match self.prove_unused(slot, from, waits) {
            Ok(()) => self.exchange_for_own(slot, extent, own, &mut source),
            Err(error) => {
                self.put_own_back(own);
                Err(error)
            }
        };
        self.blocks.put_slot(source);
        owned.map(|()| Made::Copied)
    }

    fn put_own_back(&mut self, own: Own) {
        self.memory.budget.refund(own.charge);
        self.put_gathered_back(own.gathered);
    }

    /// Makes an extent writable that no other slot maps any more.
    fn keep_alone(&mut self, slot: &mut Slot, extent: Extent) -> Result<Made, BlockError> {
        if let Some(tenancy) = self.blocks.slots.of_mut(slot.id.tenant) {
            tenancy.share_table.settle(slot);
        }
        self.blocks.slots.renew(slot);
        self.open(slot, extent)
    }

    /// Replaces a shared extent of a slot, whose fence is complete, by memory of the slot's own
    /// with the same bytes.
    fn exchange_for_own(
        &mut self,
        slot: &mut Slot,
        extent: Extent,
        own: Own,
        source: &mut Slot,
    ) -> Result<(), BlockError> {
        let (offset, to) = (extent.offset, extent.offset + own.bytes);
        let mut old = TakenOut::default();
        let taken = self.unlocked(|| slot.completed()?.take_out([offset], &mut old));
        if let Err(error) = taken {
            self.put_own_back(own);
            return Err(error.into());
        }
        let shared = std::mem::replace(&mut slot.shared, offset);
        let copied = self.copy_to_own(slot, offset, own, source);
        let outcome = match copied {
            Ok(()) => Ok(()),
            Err(Unfinished { error, running }) if !running.is_complete() => {
                // The memory may not be written before the copy is complete, which is checked when
                // the memory is next needed.
                slot.fence.merge(running);
                Err(error)
            }
            Err(failed) => {
                self.put_shared_back(slot, old)?;
                slot.shared = shared;
                return Err(failed.error);
            }
        };
        self.abandon(slot, old);
        if outcome.is_ok() {
            slot.lent = slot.lent.min(offset);
        }
        slot.space.settle(offset);
        let noted = slot.space.note_writer(offset, to, slot.id.tenant.0);
        slot.touched = self.blocks.tick();
        if let Some(block) = &mut slot.block {
            block.noted = block.noted.max(noted);
        }
        outcome
    }

    /// Puts a shared extent back. If that fails too, the block has lost the extent.
    fn put_shared_back(&mut self, slot: &mut Slot, old: TakenOut) -> Result<(), BlockError> {
        let bytes = old.bytes();
        let Err(lost) = self.unlocked(|| slot.space.put_back(old)) else {
            return Ok(());
        };
        let offset = lost.offset;
        let cause = self.lose(slot, lost);
        slot.broken = true;
        Err(BlockError::Lost {
            address: slot.space.address(),
            offset,
            bytes,
            cause,
        })
    }

    fn open(&mut self, slot: &mut Slot, extent: Extent) -> Result<Made, BlockError> {
        let opened = self.unlocked(|| slot.space.cap(extent.offset, Access::ReadWrite));
        opened?;
        slot.lent = slot.lent.min(extent.offset);
        Ok(Made::Own)
    }

    /// Places memory of a slot's own for a shared extent, and copies the extent's first bytes
    /// there.
    fn copy_to_own(
        &mut self,
        slot: &mut Slot,
        offset: u64,
        own: Own,
        source: &mut Slot,
    ) -> Result<(), Unfinished> {
        let bytes = own.bytes;
        // The copy overwrites all the memory: there is nothing to scrub.
        self.place_gathered(slot, offset, own.gathered, own.charge)?;
        // Another tenant may have written to the memory before, and this tenant too if the copy
        // fails.
        let several = LastWriter::SEVERAL;
        slot.space.note_writer(offset, offset + bytes, several);
        let home = slot.home().cloned();
        let copied = self.copy_between(source, slot, (offset, bytes), home.as_ref());
        copied.inspect_err(|failed| {
            if failed.running.is_complete() {
                self.uncommit(slot, offset, &Fence::complete());
            }
        })
    }
}
