//! Memory that several blocks of a tenant show under their first bytes: mapped under each of them,
//! held and charged once.
//!
//! Which slots show an extent stands in the tenant's [share table](super::share_table); a slot knows up to where it
//! shares and leaves that out of its figures. Two slots that share an extent share all before it:
//! sharing begins with a [fork](super::fork), which takes a prefix, and ends from behind.
//!
//! Every slot unmaps what it shows behind its own fence, so that the last one, which frees the
//! memory, does so behind all of them. Whoever is left alone with an extent has it for its own. What
//! a slot shows of memory that it shares, or may only read, and does not use is nobody's to reuse:
//! it is [purged](super::purge).

use cuvmm_driver::PhysicalHandle;

use super::budget::TenantId;
use super::commit::Unfinished;
use super::locked::Locked;
use super::share_table::Left;
use super::slot::Slot;
use super::state::State;
use super::tenancy::Tenancy;
use crate::error::{AllocateError, CallError};
use crate::own::{Physical, Stream};
use crate::region::{Extent, Fence, Unmapped, Unused, wait_for};

impl Tenancy {
    /// Bytes of shared memory that some block uses or a lease keeps.
    pub(crate) fn shared_in_use(&self) -> u64 {
        let uses = |holder: usize, offset: u64| {
            let slot = self.slot(holder);
            slot.is_none_or(|slot| slot.used() > offset || slot.leases > 0)
        };
        let entries = self.share_table.entries();
        entries
            .filter(|entry| {
                let mut holders = entry.holders.iter();
                holders.any(|&holder| uses(holder, entry.offset))
            })
            .map(|entry| entry.size)
            .sum()
    }

    /// Bytes of shared memory that nobody uses any more, and that wait to be unmapped by the last who
    /// shows them.
    pub(crate) fn shared_pending_free(&self) -> u64 {
        match self.share_table.bytes() {
            0 => 0,
            bytes => bytes - self.shared_in_use(),
        }
    }
}

impl Slot {
    /// Up to where it may not write, or should not.
    #[inline]
    pub(crate) fn bound(&self) -> u64 {
        self.shared.max(self.lent)
    }

    /// Whether its block has shrunk to less than it may not write: what it grows by is to be
    /// [made its own](super::unshare) first.
    #[inline]
    pub(crate) fn is_cut(&self) -> bool {
        let block = self.block.as_ref();
        block.is_some_and(|block| block.requested < self.bound())
    }

    /// The extents that others show too and its block does not use, last first.
    fn parting(&self) -> impl Iterator<Item = Extent> + '_ {
        let (from, to) = (self.used(), self.shared);
        let from = if self.is_free() { from } else { to };
        let extents = self.space.extents().rev();
        extents
            .skip_while(move |extent| extent.offset >= to)
            .take_while(move |extent| extent.offset >= from)
    }

    /// Whether memory that it may not write could be unmapped if its fence has passed.
    #[inline]
    pub(crate) fn has_parting(&self) -> bool {
        // Most share nothing, and are not asked further.
        let bound = self.bound();
        if bound == 0 {
            return false;
        }
        let used = self.used();
        let last = || self.space.last_offset();
        bound > used && self.is_free() && last().is_some_and(|offset| offset >= used)
    }

    /// The memory that it shares and its block uses.
    pub(crate) fn shared_parts(&self) -> impl Iterator<Item = (Extent, &Physical)> + '_ {
        self.space.parts_in(0, self.shared.min(self.used()))
    }
}

impl State {
    /// Notes that a slot shows what another has under its first bytes, up to `end`. Both are out.
    pub(super) fn share(
        &mut self,
        id: TenantId,
        (from, source): (usize, &mut Slot),
        (index, slot): (usize, &mut Slot),
        end: u64,
    ) {
        let Some(tenancy) = self.tenants.get_mut(&id) else {
            return;
        };
        for (extent, physical) in slot.space.parts_in(0, end) {
            tenancy
                .share_table
                .add(physical, extent.offset, from, index);
        }
        slot.shared = end;
        slot.lent = end;
        source.shared = source.shared.max(end);
        self.renew((id, from), source);
    }

    /// Books a mapping of a shared extent that can neither be used nor unmapped.
    pub(super) fn stuck(
        &mut self,
        id: TenantId,
        index: usize,
        slot: &mut Slot,
        offset: u64,
        (handle, size): (PhysicalHandle, u64),
    ) {
        slot.broken = true;
        let bytes = match self.leave(id, index, slot, offset, handle) {
            Left::Nobody => {
                self.budget.refund(id, size);
                size
            }
            Left::One(_) | Left::Several => 0,
        };
        self.budget.quarantine(bytes, 1);
    }

    /// A slot shows a shared extent no more.
    fn leave(
        &mut self,
        id: TenantId,
        index: usize,
        slot: &mut Slot,
        offset: u64,
        handle: PhysicalHandle,
    ) -> Left {
        slot.shared = slot.shared.min(offset);
        self.budget.refund_mappings(id, 1);
        let tenancy = self.tenants.get_mut(&id);
        let left = tenancy.map_or(Left::Nobody, |tenancy| {
            tenancy.share_table.remove(handle, index)
        });
        // One that is out finds that it is alone when it is put back.
        if let Left::One(other) = left
            && let Some(other_slot) = self.take_slot(id, other)
        {
            self.put_slot(id, other, other_slot);
        }
        left
    }

    /// How many other slots show the extent of a slot that an offset lies in.
    pub(super) fn count_others(&self, id: TenantId, slot: &Slot, offset: u64) -> usize {
        let mut here = slot.space.parts_in(offset, offset.saturating_add(1));
        let (Some((_, physical)), Some(tenancy)) = (here.next(), self.tenants.get(&id)) else {
            return 0;
        };
        tenancy.share_table.others(physical.as_raw())
    }
}

impl Locked<'_> {
    /// Unmaps what slots have given up of memory that others show too, as far as their fences have
    /// passed: then it is known whose it is.
    pub(super) fn part_all(&mut self) {
        let shares = |tenancy: &Tenancy| tenancy.share_table.bytes() > 0;
        if self.tenants.values().any(shares) {
            self.purge_all();
        }
    }

    /// Unmaps what a slot, which is out, shows of shared memory and does not use. Nothing lies
    /// behind.
    pub(super) fn part(
        &mut self,
        id: TenantId,
        index: usize,
        slot: &mut Slot,
        proof: Unused,
    ) -> Result<(), CallError> {
        let at: Vec<u64> = slot.parting().map(|extent| extent.offset).collect();
        if at.is_empty() {
            return Ok(());
        }
        let mut unmapped = Vec::with_capacity(at.len());
        let mut withdraw = |offset| {
            let here = slot.space.withdraw(offset, proof)?;
            unmapped.extend(here.map(|here| (offset, here)));
            Ok(())
        };
        let outcome = self.unlocked(|| at.into_iter().try_for_each(&mut withdraw));
        for (offset, unmapped) in unmapped {
            self.parted(id, index, slot, offset, unmapped);
        }
        slot.receded();
        self.renew((id, index), slot);
        outcome
    }

    /// Unmaps all that a slot, which is out, shares, where a roll-back needs it. What cannot be
    /// unmapped, or may be in use, is quarantined.
    pub(super) fn leave_shared(
        &mut self,
        id: TenantId,
        index: usize,
        slot: &mut Slot,
        proof: Option<Unused>,
    ) {
        let extents: Vec<(Extent, PhysicalHandle)> = slot
            .space
            .parts_in(0, slot.shared)
            .map(|(extent, physical)| (extent, physical.as_raw()))
            .collect();
        for (extent, handle) in extents.into_iter().rev() {
            let withdrawn = proof.ok_or(CallError::InUse);
            let offset = extent.offset;
            let withdrawn =
                self.unlocked(|| withdrawn.and_then(|proof| slot.space.withdraw(offset, proof)));
            match withdrawn {
                Ok(Some(unmapped)) => self.parted(id, index, slot, offset, unmapped),
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(%error, "a roll-back could not unmap: quarantined");
                    slot.space.quarantine(offset);
                    self.stuck(id, index, slot, offset, (handle, extent.size));
                }
            }
            self.renew((id, index), slot);
        }
    }

    /// Books a shared extent that was withdrawn from a slot, and keeps it if nobody else shows it.
    pub(super) fn parted(
        &mut self,
        id: TenantId,
        index: usize,
        slot: &mut Slot,
        offset: u64,
        unmapped: Unmapped,
    ) {
        let (handle, size) = (unmapped.physical.as_raw(), unmapped.size());
        match self.leave(id, index, slot, offset, handle) {
            Left::Nobody => {
                self.budget.refund(id, size);
                self.keep(unmapped);
            }
            // Their mappings hold it.
            Left::One(_) | Left::Several => drop(unmapped),
        }
    }

    /// Copies bytes at an offset from one slot to the same place in another, behind what the stream
    /// of that other one's block has queued, or waits for the copy. Both are out. The first is not
    /// unmapped before that has passed; where the wait failed, [`Unfinished::running`] has to keep
    /// the other one too.
    pub(super) fn copy_between(
        &mut self,
        source: &mut Slot,
        to: &Slot,
        (offset, size): (u64, u64),
        home: Option<&Stream>,
    ) -> Result<(), Unfinished> {
        let stream = match home {
            Some(home) => home.clone(),
            None => self.scrubber()?,
        };
        let copied = to
            .space
            .copy_within(&stream, offset, &source.space, offset, size);
        copied.map_err(AllocateError::Copy)?;
        if let Some(home) = home {
            source.is_read_on(home);
            return Ok(());
        }
        let waited = self.unlocked(|| wait_for(&stream));
        waited.map_err(|failed| {
            let failed = Unfinished::of(failed, stream.clone());
            if !failed.running.is_complete() {
                source.is_read_on(&stream);
            }
            failed
        })
    }
}

impl Slot {
    /// Notes that work on a stream reads its memory.
    pub(super) fn is_read_on(&mut self, stream: &Stream) {
        // Nobody captures: it has just been copied.
        self.record_use(stream, false);
        // Also where that is the home: the memory may be exchanged before the block is freed.
        self.fence.merge(Fence::stream(stream.clone()));
    }
}
