//! Making few large extents of many small ones, at the same addresses.
//!
//! A step takes one run of extents of one slot, at most as much as the largest extent. Under a
//! block the bytes are copied to new extents, which then take the place of the old ones; idle
//! memory that lies in small extents goes back to the pool. What is free is merged by giving small
//! physicals to the driver, which makes large ones of them when they are wanted.

use super::budget::TenantId;
use super::core::Core;
use super::locked::Locked;
use super::slot::Slot;
use super::state::State;
use crate::error::{CallError, CompactError};
use crate::own::Access;
use crate::region::{Extent, Fence, Space, Unmapped, Unused, wait_for};

/// What a compaction has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compaction {
    /// Steps made: each moves at most the pool's largest extent.
    pub steps: u64,
    /// Extents mapped when it began.
    pub extents_before: u64,
    /// Extents mapped now.
    pub extents_after: u64,
    /// Bytes copied from old extents to new ones.
    pub copied: u64,
    /// Bytes of small physicals given to the driver.
    pub released: u64,
    /// Runs that were left because a lease lives, work is still running on them, or the mapper is
    /// at it.
    pub in_use: u64,
    /// Runs that were left because there was no room for the copy.
    pub no_room: u64,
    /// Runs that were left because their block was exported: whoever imported it would keep the
    /// memory that the block leaves.
    pub exported: u64,
    /// Whether it was stopped before it had seen everything.
    pub stopped: bool,
}

/// Where a compaction stands: the slot, and how much of it has been seen.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    tenant: TenantId,
    slot: usize,
    offset: u64,
}

/// Extents side by side that fewer could replace.
#[derive(Debug)]
struct Run {
    offset: u64,
    size: u64,
    extents: Vec<Extent>,
}

/// What came of a run.
enum Moved {
    Copied(u64),
    InUse,
    NoRoom,
    Exported,
}

impl Core {
    pub(crate) fn compact(
        &self,
        mut go_on: impl FnMut(&Compaction) -> bool,
    ) -> Result<Compaction, CompactError> {
        let mut report = Compaction::default();
        let mut cursor = Cursor {
            tenant: TenantId(0),
            slot: 0,
            offset: 0,
        };
        let mut state = self.lock();
        state.sweep_all();
        report.extents_before = state.budget.mappings();
        loop {
            let stepped = state.compact_step(&mut cursor, &mut report);
            report.extents_after = state.budget.mappings();
            drop(state);
            self.announce();
            if !stepped? {
                return Ok(report);
            }
            if !go_on(&report) {
                report.stopped = true;
                return Ok(report);
            }
            state = self.lock();
        }
    }
}

impl Locked<'_> {
    /// Does one step from the cursor on; false when there is none left.
    fn compact_step(
        &mut self,
        cursor: &mut Cursor,
        report: &mut Compaction,
    ) -> Result<bool, CompactError> {
        if self.capturing > 0 {
            return Err(CompactError::Capturing);
        }
        if let Some(error) = self.device.lost() {
            return Err(CallError::ContextLost(error).into());
        }
        loop {
            let Some(run) = self.next_run(cursor) else {
                report.released += self.release_small_free();
                return Ok(false);
            };
            let (id, index) = (cursor.tenant, cursor.slot);
            cursor.offset = run.offset + run.size;
            match self.compact_run(id, index, &run)? {
                Moved::Copied(bytes) => {
                    report.steps += 1;
                    report.copied += bytes;
                    report.released += self.release_small_free();
                    return Ok(true);
                }
                Moved::InUse => report.in_use += 1,
                Moved::NoRoom => report.no_room += 1,
                Moved::Exported => report.exported += 1,
            }
        }
    }
}

impl State {
    /// The next run from the cursor on, which then points to its slot.
    fn next_run(&self, cursor: &mut Cursor) -> Option<Run> {
        for (&id, tenancy) in self.tenants.range(cursor.tenant..) {
            let indices = tenancy
                .indices()
                .filter(|&index| id != cursor.tenant || index >= cursor.slot);
            for index in indices {
                let same = (id, index) == (cursor.tenant, cursor.slot);
                let from = if same { cursor.offset } else { 0 };
                let run = tenancy.slot(index).and_then(|slot| self.run_of(slot, from));
                if run.is_some() {
                    *cursor = Cursor {
                        tenant: id,
                        slot: index,
                        offset: from,
                    };
                    return run;
                }
            }
        }
        None
    }

    /// The first run of a slot from an offset on, as long as may be.
    fn run_of(&self, slot: &Slot, from: u64) -> Option<Run> {
        let granule = self.device.granule();
        let largest = slot.class.largest;
        let extents: Vec<Extent> = slot
            .space
            .extents()
            .filter(|extent| extent.offset >= from.max(slot.bound()))
            .collect();
        (0..extents.len()).find_map(|first| {
            let rest = extents.get(first..)?;
            let mut size = 0;
            let mut best = None;
            for (count, extent) in rest.iter().enumerate() {
                size += extent.size;
                if size > largest {
                    break;
                }
                if granule.cover(size, largest).count() < count + 1 {
                    best = Some((count + 1, size));
                }
            }
            let (count, size) = best?;
            Some(Run {
                offset: rest.first()?.offset,
                size,
                extents: rest.get(..count)?.to_vec(),
            })
        })
    }
}

impl Locked<'_> {
    fn compact_run(
        &mut self,
        id: TenantId,
        index: usize,
        run: &Run,
    ) -> Result<Moved, CompactError> {
        let Some(mut slot) = self.take_out(id, index) else {
            return Ok(Moved::InUse);
        };
        let moved = self.move_run((id, index), &mut slot, run);
        slot.receded();
        self.put_slot(id, index, slot);
        moved
    }

    fn move_run(
        &mut self,
        (id, index): (TenantId, usize),
        slot: &mut Slot,
        run: &Run,
    ) -> Result<Moved, CompactError> {
        if slot.leases > 0 || slot.is_busy() || slot.broken || slot.pinned {
            return Ok(Moved::InUse);
        }
        if slot.exported && slot.block.is_some() {
            return Ok(Moved::Exported);
        }
        if let Some(block) = &slot.block {
            let fence = block.fence(&slot.space);
            slot.fence.merge(fence);
        }
        if let Err(error) = slot.fence.poll() {
            tracing::debug!(%error, "a fence could not be asked: the block stays where it is");
        }
        let Some(proof) = slot.proof() else {
            return Ok(Moved::InUse);
        };
        if slot.block.is_none() {
            self.take_spare((id, index), slot, proof)?;
            return Ok(Moved::Copied(0));
        }
        let physicals = match self.gather(id, run.size, slot.class.largest, false) {
            Ok(physicals) => physicals,
            Err(error) if error.is_shortage() => return Ok(Moved::NoRoom),
            Err(error) => return Err(CompactError::Create(Box::new(error))),
        };
        let count = physicals.len() as u64;
        self.return_resting_for(run.size);
        let room = count < run.extents.len() as u64
            && count <= self.budget.mappings_left()
            && run.size <= self.budget.addresses_left();
        if !room {
            self.put_back(physicals);
            return Ok(Moved::NoRoom);
        }
        // The copy's own mappings and addresses are charged to no tenant, and count against the limits.
        self.budget.lend(count, run.size);
        let copied = self.copy_out(slot, run, physicals);
        let exchanged = copied.and_then(|copy| self.exchange_run(id, slot, run, copy, proof));
        self.budget.unlend(count, run.size);
        exchanged.map(|()| Moved::Copied(run.size))
    }

    /// Places physicals at addresses of their own and copies a run to them.
    fn copy_out(
        &mut self,
        slot: &mut Slot,
        run: &Run,
        physicals: Vec<Unmapped>,
    ) -> Result<Space, CompactError> {
        let stream = match self.scrubber() {
            Ok(stream) => stream,
            Err(error) => {
                self.put_back(physicals);
                return Err(error.into());
            }
        };
        let device = &self.core().device;
        let mut copy = match self.unlocked(|| Space::reserve(device, run.size)) {
            Ok(space) => space,
            Err(error) => {
                self.put_back(physicals);
                return Err(error.into());
            }
        };
        if let Err(failed) = self.unlocked(|| copy.place(0, physicals)) {
            self.put_back(failed.physicals);
            self.discard(copy);
            return Err(failed.error.into());
        }
        let queued = copy.copy_from(&stream, &slot.space, run.offset, run.size);
        let waited = self.unlocked(|| wait_for(&stream));
        let error = match (queued, waited) {
            (Ok(()), Ok(())) => return Ok(copy),
            (_, Err(failed)) if !failed.ended => {
                // The copy may be running: neither what it writes to nor what it reads goes before it.
                slot.fence.merge(Fence::streams(vec![stream]));
                self.keep_copy(copy, true);
                return Err(failed.error.into());
            }
            (Err(error), _) => CompactError::Copy(error),
            (_, Err(failed)) => failed.error.into(),
        };
        self.discard(copy);
        Err(error)
    }

    /// Gives the memory of a copy that is of no use back, or keeps what cannot be given back.
    fn discard(&mut self, mut copy: Space) {
        let offsets: Vec<u64> = copy.extents().map(|extent| extent.offset).collect();
        for offset in offsets {
            let withdrawn = self.unlocked(|| copy.withdraw_back(offset, Unused::never_used()));
            if let Ok(Some(unmapped)) = withdrawn {
                self.put_back(vec![unmapped]);
            }
        }
        self.keep_copy(copy, true);
    }

    /// Keeps what of a copy could not be unmapped, until the pool is closed.
    fn keep_copy(&mut self, copy: Space, with_memory: bool) {
        let mappings = copy.extents().count() as u64 + copy.stuck_count();
        if mappings > 0 {
            let bytes = copy.bytes() + copy.stuck_bytes();
            self.budget
                .quarantine(if with_memory { bytes } else { 0 }, mappings);
            self.quarantine.1.push(copy);
        } else {
            self.unlocked(|| drop(copy));
        }
    }

    /// Puts the copy's memory where the run lies.
    fn exchange_run(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        run: &Run,
        mut copy: Space,
        proof: Unused,
    ) -> Result<(), CompactError> {
        let mut old = vec![];
        for extent in &run.extents {
            match self.unlocked(|| slot.space.withdraw(extent.offset, proof)) {
                Ok(unmapped) => old.extend(unmapped),
                Err(error) => {
                    let outcome = self.put_run_back(id, slot, run.offset, old);
                    self.discard(copy);
                    return Err(outcome.err().unwrap_or_else(|| error.into()));
                }
            }
        }
        let new: Vec<Unmapped> = copy.clones(id.0).collect();
        let (count, stuck) = (new.len() as u64, slot.space.stuck_count());
        if let Err(failed) = self.unlocked(|| slot.space.place(run.offset, new)) {
            // They are the copy's physicals too, which it gives back itself. What is stuck of them is
            // charged with the copy's.
            drop(failed.physicals);
            self.budget.quarantine(0, slot.space.stuck_count() - stuck);
            slot.broken |= failed.stuck > 0;
            let outcome = self.put_run_back(id, slot, run.offset, old);
            self.discard(copy);
            return Err(outcome.err().unwrap_or_else(|| failed.error.into()));
        }
        slot.space.settle(run.offset);
        self.budget.refund_mappings(id, run.extents.len() as u64);
        self.budget.charge_mappings(id, count);
        old.into_iter().for_each(|unmapped| self.keep(unmapped));
        // The second mapping of the same memory goes.
        let offsets: Vec<u64> = copy.extents().map(|extent| extent.offset).collect();
        for offset in offsets {
            // The copy was waited for.
            let withdrawn = self.unlocked(|| copy.withdraw_back(offset, Unused::never_used()));
            if let Err(error) = withdrawn {
                tracing::error!(%error, "a second mapping could not be unmapped: quarantined");
                copy.quarantine(offset);
            }
        }
        self.keep_copy(copy, false);
        Ok(())
    }

    /// Places what was just taken out again. If even that fails, the block has lost it.
    fn put_run_back(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        offset: u64,
        old: Vec<Unmapped>,
    ) -> Result<(), CompactError> {
        let (bytes, count) = old.iter().fold((0, 0), |(bytes, count), unmapped| {
            (bytes + unmapped.size(), count + 1)
        });
        let before = slot.space.stuck_count();
        let placed = self.unlocked(|| slot.space.place_back(offset, old, Access::ReadWrite));
        let Err(failed) = placed else {
            return Ok(());
        };
        self.budget.refund(id, bytes);
        self.budget.refund_mappings(id, count);
        let stuck = slot.space.stuck_count() - before;
        self.set_aside(slot, failed.stuck, stuck);
        slot.broken = true;
        self.put_back(failed.physicals);
        Err(CompactError::Lost {
            address: slot.space.address(),
            offset,
            bytes,
            cause: failed.error,
        })
    }

    /// Gives free physicals that are smaller than the largest extent to the driver.
    fn release_small_free(&mut self) -> u64 {
        let mut released = 0;
        let largest = self.policy.largest_extent;
        while let Some(unmapped) = self.free_list.take_below(largest) {
            released += self.release(unmapped);
        }
        released
    }
}
