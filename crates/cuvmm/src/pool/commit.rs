//! Putting memory under a slot: charge, gather, place, scrub; or nothing.

use super::budget::TenantId;
use super::locked::Locked;
use super::slot::Slot;
use super::state::Scrub;
use crate::error::{AllocateError, CallError, CommitError};
use crate::own::Stream;
#[cfg(doc)]
use crate::region::Space;
use crate::region::{Fence, LastWriter, PlaceError, Unused, WaitError, wait_for};

/// What memory a block is to find in its slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit<'a> {
    /// Up to where the block uses memory.
    pub(crate) to: u64,
    /// Up to where there shall be memory: more than it uses is precommitted.
    pub(crate) end: u64,
    /// The stream it is used on.
    pub(crate) home: Option<&'a Stream>,
    /// Whether new memory must read as zero.
    pub(crate) zeroed: bool,
    /// The part of the memory that is there already which must read as zero.
    pub(crate) zeros: Option<(u64, u64)>,
}

/// What a slot was given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Furnished {
    /// Up to where there was memory before.
    pub(crate) begun: u64,
    /// Whether the home stream has been told to zero some of what is there now.
    pub(crate) filled: bool,
}

impl<'a> Fit<'a> {
    /// For the first `used` bytes of a slot and no more.
    pub(crate) fn new(used: u64, home: Option<&'a Stream>, zeroed: bool) -> Self {
        Self {
            to: used,
            end: used,
            home,
            zeroed,
            zeros: zeroed.then_some((0, used)),
        }
    }

    /// Whether what it takes may be taken from others: precommitted memory is made of what nobody has.
    const fn claims(&self) -> bool {
        self.end == self.to
    }
}

/// A fill or copy that failed.
#[derive(Debug)]
pub(super) struct Unfinished {
    pub(super) error: AllocateError,
    /// What of it may still be running: nothing, if this has passed.
    pub(super) running: Fence,
}

impl Unfinished {
    /// What is left of work on a stream that could not be waited for.
    pub(super) fn of(failed: WaitError, stream: Stream) -> Self {
        Self {
            error: failed.error.into(),
            running: match failed.ended {
                true => Fence::complete(),
                false => Fence::stream(stream),
            },
        }
    }
}

impl<E: Into<AllocateError>> From<E> for Unfinished {
    fn from(error: E) -> Self {
        Self {
            error: error.into(),
            running: Fence::complete(),
        }
    }
}

impl Locked<'_> {
    /// Gets a slot, which is out, ready for a block: memory where it is to be, no other
    /// tenant's data in it, and zeros where they are owed. On failure the slot is as before, except
    /// for what is quarantined. What it placed is [fresh](Space::settle) until the operation has
    /// succeeded as a whole.
    pub(crate) fn furnish(
        &mut self,
        (id, index): (TenantId, usize),
        slot: &mut Slot,
        fit: &Fit<'_>,
    ) -> Result<Furnished, AllocateError> {
        let begun = slot.space.bytes();
        let bytes = fit.end.saturating_sub(begun);
        let count = if bytes > 0 {
            self.commit((id, index), slot, begun, bytes, fit.claims())?
        } else {
            0
        };
        let cleansed = self.cleanse(id, slot, begun, fit);
        let filled = cleansed.map_err(|Unfinished { error, running }| {
            self.uncommit(slot, begun, running.proof());
            // What lay there before may be written to as well.
            slot.fence.merge(running);
            self.refund_for((id, index), bytes);
            self.budget.refund_mappings(id, count);
            error
        })?;
        Ok(Furnished { begun, filled })
    }

    /// Charges for, gathers and places `bytes` behind the memory of a slot that is out; returns how
    /// many extents that took.
    pub(super) fn commit(
        &mut self,
        (id, index): (TenantId, usize),
        slot: &mut Slot,
        begun: u64,
        bytes: u64,
        claims: bool,
    ) -> Result<u64, AllocateError> {
        let end = begun + bytes;
        let stuck = slot.space.stuck_in(begun, end);
        if stuck > 0 {
            return Err(CommitError::Quarantined {
                start: begun,
                end,
                bytes: stuck,
            }
            .into());
        }
        self.make_room(id, bytes)?;
        self.charge_for((id, index), bytes);
        let placed = self.place(id, slot, begun, bytes, claims);
        if placed.is_err() {
            self.refund_for((id, index), bytes);
        }
        placed
    }

    /// Gathers and places `bytes` behind the memory of a slot that is out, which were charged for.
    pub(super) fn place(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        begun: u64,
        bytes: u64,
        claims: bool,
    ) -> Result<u64, AllocateError> {
        let physicals = self.gather(id, bytes, slot.class.largest, claims)?;
        let count = physicals.len() as u64;
        if let Err(error) = self.make_mapping_room(id, count, claims) {
            self.put_back(physicals);
            return Err(error);
        }
        self.budget.charge_mappings(id, count);
        let placed = self.unlocked(|| slot.space.place(begun, physicals));
        if let Err(PlaceError {
            error,
            physicals,
            stuck,
        }) = placed
        {
            let stuck_count = count - physicals.len() as u64;
            self.budget.refund_mappings(id, count);
            self.set_aside(slot, stuck, stuck_count);
            self.put_back(physicals);
            return Err(self.not_placed(id, bytes, error));
        }
        Ok(count)
    }

    /// Why `bytes` could not be placed for a tenant.
    pub(super) fn not_placed(&self, id: TenantId, bytes: u64, error: CommitError) -> AllocateError {
        match error.call() {
            Some(cause) if cause.is_out_of_memory() => AllocateError::DriverOutOfMemory {
                cause: *cause,
                shortage: self.shortage(id, bytes, 0),
            },
            _ => error.into(),
        }
    }

    pub(super) fn make_mapping_room(
        &mut self,
        id: TenantId,
        count: u64,
        claims: bool,
    ) -> Result<(), AllocateError> {
        if claims
            && let Some(missing) = count
                .checked_sub(self.budget.mappings_left())
                .filter(|&n| n > 0)
        {
            self.take_back_mappings(id, missing)?;
        }
        if self.budget.mappings_left() < count {
            return Err(AllocateError::OutOfMappings {
                wanted: count,
                held: self.budget.mappings(),
                limit: self.budget.limits().mappings,
            });
        }
        Ok(())
    }

    /// Takes out what a commit placed behind `begun`, whose charges have been or will be
    /// refunded. What cannot be unmapped, or may be in use, is quarantined.
    pub(super) fn uncommit(&mut self, slot: &mut Slot, begun: u64, proof: Option<Unused>) {
        let offsets: Vec<u64> = slot
            .space
            .extents()
            .rev()
            .map(|extent| extent.offset)
            .take_while(|&offset| offset >= begun)
            .collect();
        if offsets.is_empty() {
            return;
        }
        let before = (slot.space.stuck_bytes(), slot.space.stuck_count());
        let mut unmapped = Vec::with_capacity(offsets.len());
        let withdraw = |offset| {
            let withdrawn = proof.ok_or(CallError::InUse);
            match withdrawn.and_then(|proof| slot.space.withdraw_back(offset, proof)) {
                Ok(here) => unmapped.extend(here),
                Err(error) => {
                    tracing::error!(%error, offset, "a roll-back could not unmap: quarantined");
                    slot.space.quarantine(offset);
                }
            }
        };
        self.unlocked(|| offsets.into_iter().for_each(withdraw));
        let stuck = slot.space.stuck_bytes() - before.0;
        self.set_aside(slot, stuck, slot.space.stuck_count() - before.1);
        self.put_back(unmapped);
    }

    /// Books bytes that are stuck in a slot as quarantined.
    pub(crate) fn set_aside(&mut self, slot: &mut Slot, bytes: u64, mappings: u64) {
        if bytes > 0 {
            slot.broken = true;
            self.budget.quarantine(bytes, mappings);
        }
    }

    /// Zeroes what another tenant wrote to in the memory behind `begun`, and whatever was written
    /// to where a block wants zeros; ordered before the new owner's work. In a pool that overwrites
    /// what is freed also what it could not overwrite, unless a stream captures. Whether that is
    /// still going on, on the home stream.
    pub(super) fn cleanse(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        begun: u64,
        fit: &Fit<'_>,
    ) -> Result<bool, Unfinished> {
        let scrubs = self.policy.scrub != Scrub::Never;
        let owed = |last_writer: LastWriter| fit.zeroed || (scrubs && last_writer.by != id.0);
        let overwrites = self.fill().is_some();
        let mut must = false;
        let revived = fit.zeros.map_or((0, 0), |(from, to)| (from, to.min(begun)));
        let placed = (begun, slot.space.bytes());
        let mut soiled: Option<(u64, u64)> = None;
        for (from, to) in [revived, placed] {
            if from >= to {
                continue;
            }
            for (offset, size, last_writer) in slot.space.noted(from, to) {
                let owed = owed(last_writer);
                if owed || (overwrites && !last_writer.blank) {
                    must |= owed;
                    let start = soiled.map_or(offset, |(start, _)| start);
                    soiled = Some((start, offset + size));
                }
            }
        }
        let Some((start, end)) = soiled else {
            return Ok(false);
        };
        // A fill on a stream that captures would become part of the graph, and not run now.
        if self.capturing > 0 || is_capturing(fit.home)? {
            if !must {
                return Ok(false);
            }
            let bytes = fit.to.saturating_sub(slot.used());
            return Err(AllocateError::Capturing(self.shortage(id, bytes, 0)).into());
        }
        self.zero(slot, start, end - start, fit.home)?;
        // Precommitted memory that is being zeroed must not be unmapped under the fill.
        if let Some(home) = fit.home.filter(|_| end > fit.to) {
            slot.fence.merge(Fence::stream(home.clone()));
        }
        Ok(fit.home.is_some())
    }

    /// Fills a range with zeros on the home stream, or on a stream of ours that is waited for. One
    /// fill, so that one that fails leaves nothing running.
    pub(super) fn zero(
        &mut self,
        slot: &Slot,
        offset: u64,
        size: u64,
        home: Option<&Stream>,
    ) -> Result<(), Unfinished> {
        let stream = match home {
            Some(home) => home.clone(),
            None => self.scrubber()?,
        };
        slot.space
            .fill(&stream, offset, 0, size)
            .map_err(AllocateError::Zero)?;
        if home.is_some() {
            return Ok(());
        }
        let waited = self.unlocked(|| wait_for(&stream));
        waited.map_err(|failed| Unfinished::of(failed, stream))
    }
}

pub(super) fn is_capturing(home: Option<&Stream>) -> Result<bool, CallError> {
    home.map_or(Ok(false), Stream::is_capturing)
}
