//! Compaction: replacing many small extents by few large extents at the same addresses.
//!
//! A step takes one run of extents of one slot, at most as much as the largest extent. Under a
//! block the bytes are copied to new extents, which replace the old extents; idle memory goes back
//! to the pool. Small free physicals are released to the driver, which can make large physicals of
//! the memory later.

mod prefix;

use std::ops::Range;

use crate::error::{BlockError, MemoryError};
use crate::extents::{Extent, Fence, LastWriter, NotReplaced, SpaceCounts, Unmapped};
use crate::ledger::Purpose;
use crate::own::{Access, Stream};
use crate::pool::accounts::{Amount, TenantId};
use crate::pool::blocks::slots::{Slot, SlotId};
use crate::pool::core::{Core, Locked};
use crate::pool::state::State;

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
    /// Bytes of small physicals released to the driver.
    pub released: u64,
    /// Runs left in place because of a lease, running work, or the mapper's work.
    pub in_use: u64,
    /// Runs left in place because there was no memory for the copy.
    pub no_space: u64,
    /// Runs left in place because their block was exported: importers would keep the old memory.
    pub exported: u64,
    /// `true` if the compaction was stopped before it had visited all extents.
    pub stopped: bool,
}

/// The position of a compaction: a slot, and the offset up to which it was visited.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    slot: SlotId,
    offset: u64,
}

/// Adjacent extents that fewer extents can replace.
#[derive(Debug)]
pub(in crate::pool) struct Run {
    pub(in crate::pool) offset: u64,
    pub(in crate::pool) size: u64,
    extents: Vec<Extent>,
    /// The largest extent that may replace `extents`.
    largest: u64,
    /// `true` if the slot's fence covers the work to wait for; otherwise all work queued by now
    /// counts.
    fenced: bool,
}

enum Moved {
    Copied(u64),
    InUse,
    NoSpace(BlockError),
    Exported,
}

impl Run {
    pub(in crate::pool) const fn end(&self) -> u64 {
        self.offset + self.size
    }
}

impl Core {
    pub(crate) fn compact(
        &self,
        mut go_on: impl FnMut(&Compaction) -> bool,
    ) -> Result<Compaction, BlockError> {
        let mut report = Compaction::default();
        let mut cursor = Cursor {
            slot: SlotId {
                tenant: TenantId(0),
                index: 0,
            },
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
    /// Makes one step from the cursor on; returns `false` if no run is left.
    fn compact_step(
        &mut self,
        cursor: &mut Cursor,
        report: &mut Compaction,
    ) -> Result<bool, BlockError> {
        self.may_compact()?;
        loop {
            let Some(run) = self.next_run(cursor) else {
                report.released += self.release_small_free();
                return Ok(false);
            };
            cursor.offset = run.end();
            let moved = self.with_slot_out(cursor.slot, |state, slot| state.move_run(slot, &run));
            match moved.unwrap_or(Ok(Moved::InUse))? {
                Moved::Copied(bytes) => {
                    report.steps += 1;
                    report.copied += bytes;
                    report.released += self.release_small_free();
                    return Ok(true);
                }
                Moved::InUse => report.in_use += 1,
                Moved::NoSpace(_) => report.no_space += 1,
                Moved::Exported => report.exported += 1,
            }
        }
    }
}

impl State {
    fn next_run(&self, cursor: &mut Cursor) -> Option<Run> {
        let begun = *cursor;
        let tenants = self.slots.iter_from(begun.slot.tenant);
        let slots = tenants.flat_map(|(_, tenancy)| {
            let indices = tenancy.indices();
            indices.filter_map(|index| tenancy.slot(index))
        });
        let mut left = slots.filter(|slot| slot.id >= begun.slot);
        left.find_map(|slot| {
            let offset = if slot.id == begun.slot {
                begun.offset
            } else {
                0
            };
            let run = self.run_of(slot, offset..u64::MAX, slot.class.largest)?;
            let slot = slot.id;
            *cursor = Cursor { slot, offset };
            Some(run)
        })
    }

    fn may_compact(&self) -> Result<(), BlockError> {
        match self.is_capturing() {
            true => Err(MemoryError::Capturing.into()),
            false => Ok(self.device.usable()?),
        }
    }

    /// Returns the first and longest run of extents in a range of a slot that fewer extents of at
    /// most `largest` bytes can replace.
    fn run_of(&self, slot: &Slot, within: Range<u64>, largest: u64) -> Option<Run> {
        let granule = self.device.granule();
        let from = within.start.max(slot.bound());
        let extents: Vec<Extent> = slot
            .space
            .extents()
            .filter(|extent| extent.offset >= from && extent.end() <= within.end)
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
                largest,
                fenced: false,
            })
        })
    }
}

impl Locked<'_> {
    /// Copies the bytes of a run to fewer extents, which replace it. If the slot, which is out, has
    /// no block, reclaims the run instead.
    fn move_run(&mut self, slot: &mut Slot, run: &Run) -> Result<Moved, BlockError> {
        if slot.leases > 0 || slot.is_busy() || slot.broken || slot.pinned {
            return Ok(Moved::InUse);
        }
        if slot.exported && slot.block.is_some() {
            return Ok(Moved::Exported);
        }
        if !run.fenced {
            slot.fence_work();
        }
        if let Err(error) = slot.fence.poll() {
            log!(debug, %error, "a fence could not be polled: the block stays in place");
        }
        if !slot.is_unused() {
            return Ok(Moved::InUse);
        }
        if slot.block.is_none() {
            self.take_unused(slot)?;
            return Ok(Moved::Copied(0));
        }
        let stream = self.scrubber()?;
        let physicals = match self.gather_for(slot, run) {
            Ok(physicals) => physicals,
            Err(error) if error.is_shortage() => return Ok(Moved::NoSpace(error)),
            Err(error) => return Err(error),
        };
        let count = physicals.len() as u64;
        self.return_resting_for(run.size);
        if let Err(error) = self.check_copy_fits(slot, run, count) {
            self.put_back(physicals);
            return Ok(Moved::NoSpace(error));
        }
        // The copy's own mappings and addresses count against the limits, and are no tenant's.
        let own = Amount {
            mappings: count,
            addresses: run.size,
            ..Amount::default()
        };
        let charge = self.budget.charge(None, own);
        let replaced = self.replace_run(slot, run, physicals, &stream);
        self.budget.refund(charge);
        replaced.map(|()| Moved::Copied(run.size))
    }

    /// Gathers memory for the bytes of a run. If it has no fewer physicals than the run, first
    /// releases the small free physicals to the driver, which makes large physicals of the memory.
    fn gather_for(&mut self, slot: &Slot, run: &Run) -> Result<Vec<Unmapped>, BlockError> {
        let tenant = slot.id.tenant;
        let there = self.budget.creatable() + self.supply.free();
        let lacking = run.size.saturating_sub(there);
        if lacking <= self.budget.ungranted() {
            // If a ledger refuses, there is no memory for the copy.
            self.grant(lacking, 0, Purpose::New);
        }
        let physicals = self.gather(tenant, run.size, run.largest, false)?;
        if physicals.len() < run.extents.len() {
            return Ok(physicals);
        }
        self.put_back(physicals);
        self.release_small_free();
        self.gather(tenant, run.size, run.largest, false)
    }

    /// Checks that `count` extents are fewer than a run's, and can be mapped beside it.
    fn check_copy_fits(&mut self, slot: &Slot, run: &Run, count: u64) -> Result<(), BlockError> {
        if count >= run.extents.len() as u64 {
            // There is enough memory, but in small physicals.
            let shortage = self.shortage(slot.id.tenant, run.size, 0);
            return Err(BlockError::OutOfMemory(shortage));
        }
        self.make_mapping_room(slot.id.tenant, count, false)?;
        self.check_addresses(run.size)
    }

    fn replace_run(
        &mut self,
        slot: &mut Slot,
        run: &Run,
        physicals: Vec<Unmapped>,
        stream: &Stream,
    ) -> Result<(), BlockError> {
        let by = slot.id.tenant.0;
        let mut at = run.offset;
        let new = physicals.into_iter().map(|mut unmapped| {
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
        let new = new.collect();
        let before = slot.space.footing();
        slot.merged |= run.largest > slot.class.largest;
        let replaced = self.unlocked(|| match slot.completed() {
            Ok(mut completed) => completed.replace(new, Access::ReadWrite, stream),
            Err(error) => Err(NotReplaced::unchanged(error, new)),
        });
        slot.space.note_writer(run.offset, run.end(), by);
        self.rebook(slot, before);
        let failed = match replaced {
            Ok(old) => {
                slot.space.settle(run.offset);
                old.into_parts()
                    .for_each(|(_, unmapped)| self.keep(unmapped));
                return Ok(());
            }
            Err(failed) => failed,
        };
        if failed.running {
            // The copy's source and target must not be unmapped before the copy ends.
            slot.fence.merge(Fence::stream(stream.clone()));
        }
        self.put_back(failed.physicals);
        let Some(lost) = failed.lost else {
            return Err(failed.error.into());
        };
        slot.broken = true;
        let bytes = lost.bytes();
        let rest = lost.rest.into_parts().map(|(_, unmapped)| unmapped);
        self.put_back(rest.collect());
        Err(BlockError::Lost {
            address: slot.space.address(),
            offset: lost.offset,
            bytes,
            cause: lost.error,
        })
    }

    fn rebook(&mut self, slot: &mut Slot, before: SpaceCounts) {
        let (now, tenant) = (slot.space.footing(), slot.id.tenant);
        self.budget.give_up(
            tenant,
            Amount {
                bytes: before.bytes - now.bytes,
                mappings: before.count,
                addresses: 0,
            },
        );
        let now_there = Amount::mappings(now.count);
        let charge = self.budget.charge(Some(tenant), now_there);
        self.budget.keep(charge);
        let stuck = now.stuck_bytes - before.stuck_bytes;
        self.budget
            .quarantine(stuck, now.stuck_count - before.stuck_count);
        // Memory stuck at the copy's own addresses does not concern the block.
        slot.broken |= slot.space.stuck_in(0, slot.space.size()) > 0;
        self.slots.renew(slot);
    }
}
