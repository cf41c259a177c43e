//! A pool in which a late user faults instead of corrupting somebody else's memory.
//!
//! Each block has addresses of its own with guards on either side. What it gives up is overwritten
//! at once where its home stream alone used it, and unmapped as soon as its fence has passed: not
//! kept warm. Its addresses then [rest](super::resting). Nothing here waits: a slot whose fence has
//! not passed is looked at again by later operations, a few at a time, and by the mapper's thread
//! if there is one.
//!
//! Where memory could not be overwritten as it was given up, it is zeroed when it is placed again
//! ([`commit`](super::commit)), so that a new block never shows what an earlier one held.

use std::collections::VecDeque;

use super::budget::TenantId;
use super::resting::Resting;
use super::slot::Slot;
use super::state::State;
use crate::error::CallError;
use crate::own::Stream;
use crate::size::Granularity;

/// Slots that one operation looks at. A free adds one, so that what has passed is caught up with.
const LOOKS: usize = 8;

/// How a pool makes use after free and running over an end fault; see
/// [the pool's documentation](super#hardened-pools).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a pool is hardened by `PoolBuilder::hardened`"]
pub struct Hardened {
    guard: u64,
    fill: Option<u8>,
    rest_blocks: u64,
    rest_addresses: u64,
}

impl Hardened {
    /// A granule of guard on either side, freed memory filled with 0xDF, and addresses that rest
    /// until 1024 more blocks are gone or 1 TiB of addresses rests.
    pub const fn new() -> Self {
        Self {
            // Any is rounded up to a granule.
            guard: 1,
            fill: Some(0xDF),
            rest_blocks: 1024,
            rest_addresses: 1 << 40,
        }
    }

    /// Bytes of addresses before each block and behind it where nothing is ever mapped, rounded up
    /// to whole granules; a granule by default, and none for 0. They cost no memory, and count
    /// against the pool's limit of addresses.
    pub const fn guard(mut self, bytes: u64) -> Self {
        self.guard = bytes;
        self
    }

    /// The byte that memory is filled with as a block gives it up (`cuMemsetD8Async` on its home
    /// stream); 0xDF by default, which makes large negative numbers of most types and never a
    /// plausible address. `None` leaves what was there, as a plain pool does.
    pub const fn fill(mut self, byte: Option<u8>) -> Self {
        self.fill = byte;
        self
    }

    /// How many blocks that are gone keep their addresses: those of a block rest until so many
    /// others have come to rest after it; 1024 by default. With 0 none rest.
    pub const fn rest_blocks(mut self, blocks: u64) -> Self {
        self.rest_blocks = blocks;
        self
    }

    /// How many bytes of addresses rest at most, guards included; 1 TiB by default. Where the limit
    /// of addresses is short they make way sooner.
    pub const fn rest_addresses(mut self, bytes: u64) -> Self {
        self.rest_addresses = bytes;
        self
    }

    /// With guards in whole granules, if these and a granule between them fit in `addresses`.
    pub(super) fn checked(mut self, granule: Granularity, addresses: u64) -> Result<Self, u64> {
        let given = self.guard;
        let rounded = granule.round_up(given).ok_or(given)?;
        let least = rounded
            .checked_mul(2)
            .and_then(|both| both.checked_add(granule.bytes()));
        if least.is_none_or(|least| least > addresses) {
            return Err(given);
        }
        self.guard = rounded;
        Ok(self)
    }
}

impl Default for Hardened {
    fn default() -> Self {
        Self::new()
    }
}

/// What a hardened pool knows besides.
#[derive(Debug)]
pub(crate) struct Hardening {
    guard: u64,
    fill: Option<u8>,
    /// Slots with memory that is to be unmapped once their fences have passed.
    retiring: VecDeque<(TenantId, usize)>,
    pub(super) resting: Resting,
}

impl Hardening {
    pub(crate) const fn new(options: Hardened) -> Self {
        Self {
            guard: options.guard,
            fill: options.fill,
            retiring: VecDeque::new(),
            resting: Resting::new(options.rest_blocks, options.rest_addresses),
        }
    }
}

impl State {
    /// Bytes of guard on either side of a slot.
    pub(crate) fn guard(&self) -> u64 {
        self.hardening.as_ref().map_or(0, |hardened| hardened.guard)
    }

    /// What memory that is given up is filled with.
    pub(crate) fn fill(&self) -> Option<u8> {
        self.hardening.as_ref()?.fill
    }

    /// Blocks that are gone and whose addresses rest, and the bytes of those.
    pub(crate) fn resting(&self) -> (u64, u64) {
        let hardening = self.hardening.as_ref();
        hardening.map_or((0, 0), |hardened| {
            (hardened.resting.count(), hardened.resting.bytes())
        })
    }

    /// Overwrites what lies behind the first `from` bytes of a slot, which a block has just given
    /// up, behind the work of its home stream. Not if another stream or a lease may still use it,
    /// nor while the stream captures: the fill would become part of the graph.
    pub(crate) fn overwrite(&self, slot: &mut Slot, home: Option<&Stream>, from: u64) {
        let (Some(byte), Some(home)) = (self.fill(), home) else {
            return;
        };
        let to = slot.space.bytes();
        let alone = slot.leases == 0 && slot.fence.precedes(home);
        if from >= to || !alone || self.capturing > 0 || home.is_capturing().unwrap_or(true) {
            return;
        }
        match slot.space.fill(home, from, byte, to - from) {
            Ok(()) => slot.space.blank(from),
            Err(error) => tracing::debug!(%error, "what a block gave up was not overwritten"),
        }
        // If the block grows over it again, that is noted anew.
        if let Some(block) = &mut slot.block {
            block.stained = block.stained.min(from);
        }
    }

    /// Has a slot looked after, and sooner than those that wait already, if it has memory or
    /// addresses to give up.
    pub(crate) fn retire_later(&mut self, id: TenantId, index: usize) {
        let Some(hardening) = &mut self.hardening else {
            return;
        };
        let tenancy = self.tenants.get_mut(&id);
        let Some(slot) = tenancy.and_then(|tenancy| tenancy.slot_mut(index)) else {
            return;
        };
        let gives = slot.is_vacant() || slot.has_spare();
        if gives && !slot.retiring {
            slot.retiring = true;
            hardening.retiring.push_front((id, index));
        }
    }

    /// Unmaps what a few slots have to give up, as far as their fences have passed; how many were
    /// done with. What is left is the mapper's to look after.
    #[inline]
    pub(crate) fn retire_some(&mut self) -> usize {
        if self.hardening.is_none() {
            return 0;
        }
        self.retire(LOOKS)
    }

    /// The same with all slots.
    pub(crate) fn retire_all(&mut self) {
        self.retire(usize::MAX);
    }

    /// Whether something waits for its fence.
    pub(crate) fn has_retiring(&self) -> bool {
        let hardening = self.hardening.as_ref();
        hardening.is_some_and(|hardened| !hardened.retiring.is_empty())
    }

    fn retire(&mut self, looks: usize) -> usize {
        // Of a context that is lost nothing is reused.
        if self.device.lost().is_some() || self.device.forked().is_some() {
            return 0;
        }
        let mut done = 0;
        let waiting = self.hardening.as_ref().map_or(0, |it| it.retiring.len());
        for _ in 0..looks.min(waiting) {
            let hardening = self.hardening.as_mut();
            let Some((id, index)) = hardening.and_then(|it| it.retiring.pop_front()) else {
                break;
            };
            let outcome = self.retire_slot(id, index);
            if let Ok(true) = outcome {
                done += 1;
                continue;
            }
            // To the end of the queue, so that one that waits long holds up no other.
            if let Some(hardening) = &mut self.hardening {
                hardening.retiring.push_back((id, index));
            }
            if let Err(error) = outcome {
                // It stays charged to its tenant.
                tracing::warn!(%error, "memory that was given up stays mapped for now");
                break;
            }
        }
        if self.has_retiring()
            && let Some(ahead) = &mut self.ahead
        {
            ahead.ring = true;
        }
        done
    }

    /// Unmaps what a slot has to give up, and lets its addresses rest if that was all of it. False
    /// if its fence has not passed.
    fn retire_slot(&mut self, id: TenantId, index: usize) -> Result<bool, CallError> {
        let (capturing, needs) = (self.capturing, &mut self.needs_synchronise);
        let tenancy = self.tenants.get_mut(&id);
        let slot = tenancy.and_then(|tenancy| tenancy.slot_mut(index));
        // Another slot may have its number by now.
        let Some(slot) = slot.filter(|slot| slot.retiring) else {
            return Ok(true);
        };
        if slot.has_spare() && !Self::poll(capturing, needs, &mut slot.fence)? {
            return Ok(false);
        }
        let Some(mut slot) = self.take_slot(id, index) else {
            return Ok(true);
        };
        // With a lease there is nothing to take, and its end lists the slot again.
        let outcome = self.take_spare(id, &mut slot);
        slot.retiring = outcome.is_err();
        if slot.is_vacant() && slot.space.bytes() == 0 {
            self.put_away(id, index, slot);
            self.forget_if_drained(id);
        } else {
            self.put_slot(id, index, slot);
        }
        outcome.map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 2 << 20;

    #[test]
    fn guards_are_whole_granules_that_leave_room_for_one() {
        let granule = Granularity::new(G).unwrap();
        let checked = |guard, addresses| {
            let hardened = Hardened::new().guard(guard);
            let checked = hardened.checked(granule, addresses);
            checked.map(|hardened| hardened.guard)
        };
        assert_eq!(checked(0, G), Ok(0));
        assert_eq!(checked(1, 3 * G), Ok(G));
        assert_eq!(checked(G + 1, 5 * G), Ok(2 * G));
        assert_eq!(checked(G, 3 * G - 1), Err(G));
        assert_eq!(checked(u64::MAX, u64::MAX), Err(u64::MAX));
        assert_eq!(checked(u64::MAX / 2, u64::MAX), Err(u64::MAX / 2));
    }
}
