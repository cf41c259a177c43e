//! Compaction: giving the pool the memory that blocks have given up, and replacing many small
//! extents by few large extents at the same addresses.
//!
//! A step takes one run of extents of one slot, at most as much as the largest extent. Under a
//! block the bytes are copied to new extents, which replace the old extents; idle memory goes back
//! to the pool. Small free physicals are released to the driver, which can make large physicals of
//! the memory later.
//!
//! A block that has shrunk is *cut*: the extents behind its end go back to the pool, and the bytes
//! before the end, in the extent in which it ends, are copied to smaller extents. Blocks of which
//! the least is to be copied come first, because each cut makes room for the next copy.
//!
//! Keeps I-141.

mod prefix;
mod pressure;

use std::collections::VecDeque;
use std::ops::Range;

use crate::error::{BlockError, MemoryError};
use crate::extent_sizes::ExtentSizes;
use crate::extents::{Extent, Fence, LastWriter, New, NotReplaced, Space, SpaceCounts, Unmapped};
use crate::own::{Access, Stream};
use crate::pool::accounts::{Amount, Budget, TenantId};
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{Slot, SlotId};
use crate::pool::core::{Core, Locked};
use crate::pool::memory::Memory;
use crate::pool::supply::{AtDriver, Obtained};
use crate::size::Granularity;
use crate::wanted::Purpose;

/// The progress and result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Compaction {
    /// Steps made. Each moves at most the pool's largest extent.
    pub steps: u64,
    /// Extents mapped when the compaction began.
    pub extents_before: u64,
    /// Extents mapped now.
    pub extents_after: u64,
    /// Bytes copied to new extents.
    pub copied: u64,
    /// Bytes that blocks had given up, and that went back to the pool.
    pub given_back: u64,
    /// Bytes of small physicals released to the driver.
    pub released: u64,
    /// Runs left in place because of a lease, running work, or the mapper's work.
    pub in_use: u64,
    /// Runs left in place because there was no memory for the copy.
    pub no_space: u64,
    /// Runs left in place because their block was exported: importers would keep the old memory.
    pub exported: u64,
    /// Blocks that have shrunk and end in an extent that forks share, which stays whole.
    pub shared: u64,
    /// `true` if the compaction was stopped before it had visited all extents.
    pub stopped: bool,
}

/// The position of a compaction: a slot, and the offset up to which it was visited.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    slot: SlotId,
    offset: u64,
}

/// The work of a compaction.
struct Work {
    /// The only tenant whose blocks are visited, if it is not all.
    tenant: Option<TenantId>,
    /// Blocks that have shrunk.
    to_cut: VecDeque<SlotId>,
    cursor: Cursor,
}

/// Adjacent extents that fewer extents can replace.
#[derive(Debug)]
pub(in crate::pool) struct Run {
    pub(in crate::pool) offset: u64,
    pub(in crate::pool) size: u64,
    extents: Vec<Extent>,
    /// The sizes of extents that may replace `extents`.
    sizes: ExtentSizes,
    /// `true` if the slot's fence covers the work to wait for; otherwise all work queued by now
    /// counts.
    fenced: bool,
}

enum Moved {
    Copied(u64),
    InUse,
    NoSpace(BlockError),
    Exported,
    Shared,
}

impl Run {
    /// Returns the first and longest run of extents in a range of a slot that fewer extents of these
    /// `sizes` can replace. Its size is at most that of the largest of them.
    fn of(
        granule: Granularity,
        slot: &Slot,
        within: Range<u64>,
        sizes: ExtentSizes,
    ) -> Option<Self> {
        let from = within.start.max(slot.bound());
        let is_within = |extent: &Extent| extent.offset >= from && extent.end() <= within.end;
        let extents: Vec<Extent> = slot.space.extents().filter(is_within).collect();
        (0..extents.len()).find_map(|first| {
            let rest = extents.get(first..)?;
            let offset = rest.first()?.offset;
            let mut size = 0;
            let mut best = None;
            for (count, extent) in rest.iter().enumerate() {
                size += extent.size;
                if size > sizes.largest() {
                    break;
                }
                let replacing = sizes.cover(granule, offset..offset + size);
                if replacing.count() < count + 1 {
                    best = Some((count + 1, size));
                }
            }
            let (count, size) = best?;
            Some(Self {
                offset,
                size,
                extents: rest.get(..count)?.to_vec(),
                sizes,
                fenced: false,
            })
        })
    }

    const fn end(&self) -> u64 {
        self.offset + self.size
    }

    const fn range(&self) -> Range<u64> {
        self.offset..self.end()
    }

    /// Returns the first byte of the run that has no memory, and how many there are, in the ranges
    /// of extents that could not be put back. New memory may have replaced a part of such an extent.
    fn missing(&self, slot: &Slot, lost: Vec<Range<u64>>) -> (u64, u64) {
        let (mut offset, mut bytes) = (self.end(), 0);
        for range in lost {
            let (start, end) = (range.start.max(self.offset), range.end.min(self.end()));
            let there = slot.space.extents_in(start, end);
            let mut at = start;
            for (from, to) in there.map(|it| (it.offset, it.end())).chain([(end, end)]) {
                if from > at {
                    offset = offset.min(at);
                    bytes += from - at;
                }
                at = at.max(to);
            }
        }
        (offset, bytes)
    }

    /// Places physicals one behind the other at the run, which a tenant's bytes are copied to.
    fn written_by(&self, by: u64, physicals: Vec<Unmapped>) -> New {
        let mut at = self.offset;
        let placed = physicals.into_iter().map(|mut unmapped| {
            let offset = at;
            at += unmapped.size();
            // Another tenant may have written to the memory before, and this tenant too if the copy
            // fails.
            let writer = unmapped
                .last_writer
                .get_or_insert(LastWriter { by, blank: false });
            if writer.by != by {
                let by = LastWriter::SEVERAL;
                *writer = LastWriter { by, blank: false };
            }
            writer.blank = false;
            (offset, unmapped)
        });
        placed.collect()
    }

    /// Returns the bytes of a slot's block in the extent in which it ends, if idle memory lies
    /// behind them there.
    fn cut(slot: &Slot) -> Option<Self> {
        let end = slot.taken();
        let extent = slot.space.extent_around(end)?;
        (extent.offset < end && slot.idle() > 0).then(|| Self {
            offset: extent.offset,
            size: end - extent.offset,
            extents: vec![extent],
            sizes: slot.class.sizes,
            fenced: false,
        })
    }
}

impl Compaction {
    /// Counts a run that was visited. Returns `true` if it was moved.
    fn count(&mut self, moved: &Moved) -> bool {
        match moved {
            Moved::Copied(bytes) => {
                self.steps += 1;
                self.copied += bytes;
                return true;
            }
            Moved::InUse => self.in_use += 1,
            Moved::NoSpace(_) => self.no_space += 1,
            Moved::Exported => self.exported += 1,
            Moved::Shared => self.shared += 1,
        }
        false
    }
}

impl Core {
    /// Compacts a tenant's blocks, or all blocks.
    pub(crate) fn compact(
        &self,
        tenant: Option<TenantId>,
        mut go_on: impl FnMut(&Compaction) -> bool,
    ) -> Result<Compaction, BlockError> {
        let mut report = Compaction::default();
        let mut state = self.lock();
        state.blocks.sweep_all();
        let mut work = Work {
            tenant,
            to_cut: state.blocks.to_cut(tenant),
            cursor: Cursor {
                slot: SlotId {
                    tenant: tenant.unwrap_or(TenantId(0)),
                    index: 0,
                },
                offset: 0,
            },
        };
        report.extents_before = extents_of(&state.memory.budget, tenant);
        loop {
            let stepped = state.compact_step(&mut work, &mut report);
            report.extents_after = extents_of(&state.memory.budget, tenant);
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
    /// Makes one step; returns `false` if nothing is left.
    fn compact_step(
        &mut self,
        work: &mut Work,
        report: &mut Compaction,
    ) -> Result<bool, BlockError> {
        may_compact(&self.memory)?;
        while let Some(id) = work.to_cut.pop_front() {
            let cut = self.with_slot_out(id, |state, slot| state.cut(slot, report));
            if report.count(&cut.unwrap_or(Ok(Moved::InUse))?) {
                return Ok(true);
            }
        }
        loop {
            let Some(run) = self.blocks.next_run(work) else {
                report.released += self.release_small_free();
                return Ok(false);
            };
            work.cursor.offset = run.end();
            let id = work.cursor.slot;
            let moved = self.with_slot_out(id, |state, slot| state.move_run(slot, &run));
            if report.count(&moved.unwrap_or(Ok(Moved::InUse))?) {
                report.released += self.release_small_free();
                return Ok(true);
            }
        }
    }
}

impl Blocks {
    /// Returns the blocks that have given memory up, those first of which the least is to be
    /// copied.
    fn to_cut(&self, tenant: Option<TenantId>) -> VecDeque<SlotId> {
        let tenancies = self.slots.iter();
        let tenancies = tenancies.filter(|&(id, _)| tenant.is_none_or(|tenant| tenant == id));
        let mut found: Vec<(u64, SlotId)> = tenancies
            .flat_map(|(_, tenancy)| tenancy.indices().filter_map(|index| tenancy.slot(index)))
            .filter(|slot| slot.block.is_some() && slot.sleep_state.is_awake() && slot.idle() > 0)
            .map(|slot| (Run::cut(slot).map_or(0, |run| run.size), slot.id))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, id)| id).collect()
    }

    fn next_run(&self, work: &mut Work) -> Option<Run> {
        let begun = work.cursor;
        let tenants = self.slots.iter_from(begun.slot.tenant);
        let tenants = tenants.take_while(|&(id, _)| work.tenant.is_none_or(|tenant| tenant == id));
        let slots = tenants.flat_map(|(_, tenancy)| {
            let indices = tenancy.indices();
            indices.filter_map(|index| tenancy.slot(index))
        });
        let mut left = slots.filter(|slot| slot.id >= begun.slot);
        let (cursor, run) = left.find_map(|slot| {
            let offset = if slot.id == begun.slot {
                begun.offset
            } else {
                0
            };
            let run = Run::of(self.granule, slot, offset..u64::MAX, slot.class.sizes)?;
            let slot = slot.id;
            Some((Cursor { slot, offset }, run))
        })?;
        work.cursor = cursor;
        Some(run)
    }
}

fn extents_of(budget: &Budget, tenant: Option<TenantId>) -> u64 {
    match tenant {
        Some(id) => budget.account(id).mappings,
        None => budget.totals().mappings,
    }
}

/// Returns why a slot's memory must stay in place; `None` once no work can use it.
fn stays(slot: &mut Slot, fenced: bool) -> Option<Moved> {
    if slot.leases > 0 || slot.is_busy() || slot.broken || slot.pinned {
        return Some(Moved::InUse);
    }
    if slot.exported && slot.block.is_some() {
        return Some(Moved::Exported);
    }
    if !fenced {
        slot.fence_work();
    }
    if let Err(error) = slot.fence.poll() {
        log!(debug, %error, "a fence could not be polled: the block stays in place");
    }
    (!slot.is_unused()).then_some(Moved::InUse)
}

fn may_compact(memory: &Memory) -> Result<(), BlockError> {
    match memory.gate.is_capturing() {
        true => Err(MemoryError::Capturing.into()),
        false => Ok(memory.device.usable()?),
    }
}

impl Locked<'_> {
    /// Copies the bytes of a run to fewer extents, which replace it. If the slot, which is out, has
    /// no block, reclaims the run instead.
    fn move_run(&mut self, slot: &mut Slot, run: &Run) -> Result<Moved, BlockError> {
        if let Some(stays) = stays(slot, run.fenced) {
            return Ok(stays);
        }
        if slot.block.is_none() {
            self.take_unused(slot)?;
            return Ok(Moved::Copied(0));
        }
        match self.gather_for(slot, run) {
            Ok(physicals) if physicals.len() < run.extents.len() => {
                self.copy_run(slot, run, physicals)
            }
            Ok(physicals) => {
                // There is enough memory, but in small physicals.
                self.put_back(physicals);
                let shortage = self.shortage(slot.id.tenant, run.size, 0);
                Ok(Moved::NoSpace(BlockError::OutOfMemory(shortage)))
            }
            Err(error) if error.is_shortage() => Ok(Moved::NoSpace(error)),
            Err(error) => Err(error),
        }
    }

    /// Gives the pool the memory that the block in a slot, which is out, has given up. The extent
    /// in which the block ends is replaced by smaller extents with the bytes before the end.
    fn cut(&mut self, slot: &mut Slot, report: &mut Compaction) -> Result<Moved, BlockError> {
        if slot.idle() == 0 {
            // It has grown again meanwhile.
            return Ok(Moved::Copied(0));
        }
        if let Some(stays) = stays(slot, false) {
            return Ok(stays);
        }
        let before = slot.space.bytes();
        let unused = self.take_unused(slot);
        report.given_back += before - slot.space.bytes();
        unused?;
        let Some(run) = Run::cut(slot) else {
            return Ok(Moved::Copied(0));
        };
        if run.offset < slot.bound() {
            return Ok(Moved::Shared);
        }
        self.grant_for_copy(run.size);
        let physicals = match self.gather(slot.id.tenant, run.range(), run.sizes, false) {
            Ok(physicals) => physicals,
            Err(error) if error.is_shortage() => return Ok(Moved::NoSpace(error)),
            Err(error) => return Err(error),
        };
        let before = slot.space.bytes();
        let moved = self.copy_run(slot, &run, physicals)?;
        report.given_back += before - slot.space.bytes();
        Ok(moved)
    }

    /// Copies the bytes of a run to physicals, which replace it.
    fn copy_run(
        &mut self,
        slot: &mut Slot,
        run: &Run,
        physicals: Vec<Unmapped>,
    ) -> Result<Moved, BlockError> {
        let count = physicals.len() as u64;
        let obtained = Obtained(self, physicals);
        let stream = obtained.0.scrubber()?;
        obtained.0.return_resting_for(run.size);
        let room = (obtained.0).make_mapping_room(slot.id.tenant, count, false);
        if let Err(error) = room.and_then(|()| obtained.0.memory.check_addresses(run.size)) {
            return Ok(Moved::NoSpace(error));
        }
        let physicals = obtained.take();
        // The copy's own mappings and addresses count against the limits, and are no tenant's. After
        // a panic of the driver, which may have them, they count for good.
        let budget = &mut self.memory.budget;
        let mappings = budget.charge(None, Amount::mappings(count));
        let addresses = budget.charge(None, Amount::of(0, 0, run.size));
        // Until the driver has freed them.
        budget.keep(addresses);
        let replaced = self.replace_run(slot, run, physicals, &stream);
        self.memory.budget.refund(mappings);
        self.give_space_back(replaced?);
        Ok(Moved::Copied(run.size))
    }

    /// Makes the ledger grant what a copy of `bytes` lacks. If it refuses, there is no memory for
    /// the copy.
    fn grant_for_copy(&mut self, bytes: u64) {
        let there = self.memory.budget.totals().left.bytes + self.memory.supply.free();
        let lacking = bytes.saturating_sub(there);
        if lacking <= self.memory.budget.totals().ungranted {
            self.grant(lacking, 0, Purpose::New);
        }
    }

    /// Gathers memory for the bytes of a run. If it has no fewer physicals than the run, first
    /// releases the small free physicals to the driver, which makes large physicals of the memory.
    fn gather_for(&mut self, slot: &Slot, run: &Run) -> Result<Vec<Unmapped>, BlockError> {
        let tenant = slot.id.tenant;
        self.grant_for_copy(run.size);
        let physicals = self.gather(tenant, run.range(), run.sizes, false)?;
        if physicals.len() < run.extents.len() {
            return Ok(physicals);
        }
        self.put_back(physicals);
        self.release_small_free();
        self.gather(tenant, run.range(), run.sizes, false)
    }

    /// Returns the addresses that were copied through. Memory that a panic of the driver loses is
    /// quarantined.
    fn replace_run(
        &mut self,
        slot: &mut Slot,
        run: &Run,
        physicals: Vec<Unmapped>,
        stream: &Stream,
    ) -> Result<Space, BlockError> {
        let by = slot.id.tenant.0;
        let gathered: u64 = physicals.iter().map(Unmapped::size).sum();
        let new = run.written_by(by, physicals);
        let before = slot.space.footing();
        slot.merged |= run.sizes != slot.class.sizes;
        let at_driver = AtDriver::begin(self, gathered);
        let replaced = at_driver.0.unlocked(|| match slot.completed() {
            Ok(mut completed) => completed.replace(new, Access::ReadWrite, stream),
            Err(error) => Err(NotReplaced::unchanged(error, new)),
        });
        at_driver.end();
        slot.space.note_writer(run.offset, run.end(), by);
        self.rebook(slot, before);
        let failed = match replaced {
            Ok((old, beside)) => {
                slot.space.settle(run.offset);
                old.into_parts()
                    .for_each(|(_, unmapped)| self.memory.keep(unmapped));
                return Ok(beside);
            }
            Err(failed) => failed,
        };
        let freed = Amount::of(0, 0, run.size - failed.reserved);
        self.memory.budget.give_up(None, freed);
        if failed.running {
            // The copy's source and target must not be unmapped before the copy ends.
            slot.fence.merge(Fence::stream(stream.clone()));
        }
        let mut back = failed.physicals;
        let lost = failed.lost.map(|lost| {
            slot.broken = true;
            let missing = run.missing(slot, lost.ranges());
            back.extend(lost.rest.into_parts().map(|(_, unmapped)| unmapped));
            (missing, lost.error)
        });
        let known = slot.space.bytes() + slot.space.stuck_bytes();
        let known = known + back.iter().map(Unmapped::size).sum::<u64>();
        let all = before.bytes + before.stuck_bytes + gathered;
        // Nothing, unless the driver panicked.
        self.memory.budget.quarantine(all.saturating_sub(known), 0);
        // At once and last: the driver may panic in it.
        self.put_back(back);
        let error = failed.failure.into_error();
        Err(match lost {
            None => error.into(),
            Some(((offset, bytes), cause)) => BlockError::Lost {
                address: slot.space.address(),
                offset,
                bytes,
                cause,
            },
        })
    }

    fn rebook(&mut self, slot: &mut Slot, before: SpaceCounts) {
        let (now, tenant) = (slot.space.footing(), slot.id.tenant);
        let left = Amount::of(before.bytes - now.bytes, before.count, 0);
        self.memory.budget.give_up(tenant, left);
        let budget = &mut self.memory.budget;
        budget.hold(tenant, Amount::mappings(now.count));
        let stuck = now.stuck_bytes - before.stuck_bytes;
        budget.quarantine(stuck, now.stuck_count - before.stuck_count);
        // Memory stuck at the copy's own addresses does not concern the block.
        slot.broken |= slot.space.stuck_in(0, slot.space.size()) > 0;
        self.blocks.slots.renew(slot);
    }
}
