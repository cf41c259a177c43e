//! Allocation: takes the best idle slot or a new slot, and places memory under it; on failure
//! nothing changes.
//!
//! Keeps I-83.

use super::Blocks;
use super::ahead::Pace;
use super::change::Change;
use super::commit::{Charging, Fit, PlacedMemory};
use super::slots::{BYTES, BlockPlace, Class, Occupant, Slot, SlotId, too_large};
use crate::error::{ArgumentError, BlockError};
use crate::extent_sizes::ExtentSizes;
use crate::extents::{Space, Uses};
use crate::growth::Growth;
use crate::own::Stream;
use crate::pool::accounts::{Amount, Charge, TenantId};
use crate::pool::core::{Core, Locked};
use crate::pool::gate::Gate;
use crate::pool::line::{Attempt, ExtentOptions, Wait, Wanted};
use crate::pool::memory::{Memory, Policy};
use crate::pool::state::gone;
use crate::store::Ranges;
use crate::wanted::Purpose;

/// The most idle slots to compare.
pub(super) const CANDIDATES: usize = 8;

/// A block that takes over idle memory may strand this part of its size (one eighth), or one
/// granule if that is more. Memory behind the block's end is stranded if its extent also holds the
/// block's end.
const STRANDED_PART: u64 = 8;

/// The requirements of a block on its slot, in bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct Needs {
    pub(in crate::pool) class: Class,
    /// In whole granules.
    pub(in crate::pool) used: u64,
    most: u64,
    /// The most bytes that the block may strand.
    pub(super) strands: u64,
}

impl Core {
    pub(super) fn allocate(
        &self,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        wait: Wait,
    ) -> Result<BlockPlace, BlockError> {
        self.request(tenant, wanted.size, wait, |state| {
            Self::attempt_to_allocate(state, tenant, wanted)
        })
    }

    pub(in crate::pool) fn attempt_to_allocate<'a>(
        mut state: Locked<'a>,
        tenant: TenantId,
        wanted: &Wanted<'_>,
    ) -> Attempt<'a, BlockPlace> {
        let allocated = state.allocate_slot(tenant, wanted);
        let outcome = allocated.map(|(change, mut slot)| {
            let begun = change.given.map_or(u64::MAX, |given| given.begun);
            slot.space.settle(begun);
            state.blocks.put_slot(slot);
            change.place
        });
        (state, outcome)
    }
}

impl Locked<'_> {
    /// Makes a place for a block in a slot that stays out: while it is out, the memory that it was
    /// given can be told from the memory it had.
    pub(super) fn allocate_slot(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<(Change, Box<Slot>), BlockError> {
        let needs = Needs::of(&self.memory, id, wanted)?;
        self.leave_to_others(id, needs.used)?;
        self.purge_some();
        let found = self.find_slot(id, &needs, wanted.home);
        let new = found.is_none();
        let (mut slot, charge) = match found {
            Some(slot) => (slot, None),
            None => {
                // Without memory no addresses are reserved.
                let charge = self.obtain(id, needs.used, Purpose::New)?;
                let charging = Charging(self, Some(charge));
                let mut opened = charging.0.open_slots(id, needs.class, 1)?;
                (opened.next().ok_or_else(gone)?, charging.take())
            }
        };
        let mut change = Change::of(&slot, slot.place(wanted.capacity));
        match self.move_in(&mut slot, wanted, &needs, charge) {
            Ok(given) => {
                change.new = new;
                change.given = Some(given);
                Ok((change, slot))
            }
            Err(error) => {
                match new {
                    true => self.drop_slot(slot),
                    false => self.blocks.put_slot(slot),
                }
                Err(error)
            }
        }
    }

    /// Takes the reusable slot that serves best. The slot is out if the lock may be released
    /// for it.
    fn find_slot(
        &mut self,
        id: TenantId,
        needs: &Needs,
        home: Option<&Stream>,
    ) -> Option<Box<Slot>> {
        let (memory, blocks) = self.halves();
        let mut picked = blocks.pick(&mut memory.gate, id, needs, home);
        let lacks = |blocks: &Blocks, id| {
            let slot = blocks.slots.get(id);
            slot.is_none_or(|slot| slot.space.bytes() < needs.used)
        };
        // A block that was just freed may have all the memory needed.
        if picked.is_none_or(|picked| lacks(blocks, picked)) && blocks.sweep(id) {
            picked = blocks.pick(&mut memory.gate, id, needs, home);
        }
        let picked = picked?;
        // The usual case makes no driver call without the lock.
        match home.is_some() && !lacks(blocks, picked) && !memory.budget.totals().overdrawn {
            true => blocks.slots.take(picked),
            false => self.take_out(picked),
        }
    }

    /// Puts a block in a slot that is out, and memory under it, which may be charged already. On
    /// failure the slot is as before.
    #[inline(always)]
    pub(super) fn move_in(
        &mut self,
        slot: &mut Slot,
        wanted: &Wanted<'_>,
        needs: &Needs,
        charge: Option<Charge>,
    ) -> Result<PlacedMemory, BlockError> {
        let &Wanted {
            size, home, zeroed, ..
        } = wanted;
        let used = needs.used;
        // A new slot, whose memory is charged already, has none to use again.
        if charge.is_none() {
            let revived = slot.space.bytes().min(used);
            self.permit_reuse(slot.id, revived, slot.purpose())?;
        }
        let given = self.place_memory(slot, &Fit::new(used, home, zeroed), charge)?;
        let noted = slot.space.note_writer(0, used, slot.id.tenant.0);
        slot.touched = self.blocks.tick();
        slot.block = Some(Occupant {
            requested: size,
            ever: size,
            used,
            most: needs.most,
            reach: slot.space.bytes(),
            noted,
            growth: self.blocks.growth(&self.memory.policy, wanted.grain),
            pace: Pace::default(),
            home: home.cloned(),
            uses: Uses::none(),
            tag: wanted.tag.clone(),
            zeroed,
            movable: wanted.movable,
            kept: Ranges::default(),
        });
        if wanted.movable {
            self.blocks.slots.note_movable();
        }
        Ok(given)
    }

    /// Reserves addresses for new slots side by side, which are out.
    pub(super) fn open_slots(
        &mut self,
        id: TenantId,
        class: Class,
        count: usize,
    ) -> Result<impl Iterator<Item = Box<Slot>> + use<>, BlockError> {
        let guard = self.blocks.guard();
        let each = class.size.saturating_add(guard).saturating_add(guard);
        let addresses = each.saturating_mul(count as u64);
        self.make_address_room(addresses)?;
        // The tenant is no longer empty, and cannot be removed.
        let flight = self.flight();
        let mut ids: Vec<SlotId> = Vec::new();
        for number in 0..count {
            self.end_section(number);
            self.blocks.slots.note_work();
            let tenancy = self.blocks.slots.of_mut(id).ok_or_else(gone)?;
            let index = tenancy.vacancy(flight);
            ids.push(SlotId { tenant: id, index });
        }
        // The lock may have been released since the first check.
        let reserved = self
            .make_address_room(addresses)
            .and_then(|()| self.reserve_for(id, class.size, guard, count as u64));
        let now = self.blocks.clock.now();
        let single = self.blocks.are_hardened();
        match reserved {
            Ok(spaces) => {
                let slots = ids.into_iter().zip(spaces);
                Ok(
                    slots
                        .map(move |(id, space)| Box::new(Slot::new(id, space, class, now, single))),
                )
            }
            Err(error) => {
                for (number, id) in ids.into_iter().rev().enumerate() {
                    self.end_section(number);
                    self.remove_slot(id);
                }
                Err(error)
            }
        }
    }

    /// Reserves `count` ranges of addresses with guards, and charges them to a tenant.
    pub(in crate::pool) fn reserve_for(
        &mut self,
        id: TenantId,
        size: u64,
        guard: u64,
        count: u64,
    ) -> Result<Vec<Space>, BlockError> {
        let each = size.saturating_add(guard).saturating_add(guard);
        let addresses = Amount::of(0, 0, each.saturating_mul(count));
        let charge = self.memory.budget.charge(Some(id), addresses);
        let reserved = self.reserve(size, guard, count);
        match &reserved {
            Ok(_) => self.memory.budget.keep(charge),
            Err(_) => self.memory.budget.refund(charge),
        }
        Ok(reserved?)
    }
}

impl Needs {
    /// Returns the requirements of a block on its slot, if the block's options are valid.
    #[inline(always)]
    pub(in crate::pool) fn of(
        memory: &Memory,
        id: TenantId,
        wanted: &Wanted<'_>,
    ) -> Result<Self, BlockError> {
        let &Wanted { size, capacity, .. } = wanted;
        ArgumentError::at_most(BYTES, size, capacity)?;
        // A block of zero bytes is a range of addresses, and needs some.
        ArgumentError::not_zero(BYTES, capacity)?;
        let granule = memory.device.granule();
        let most = granule.whole(BYTES, capacity)?;
        let used = granule.whole(BYTES, size)?;
        let size_of_slot = granule.class(capacity).ok_or(too_large(capacity))?;
        let home = wanted.home;
        home.map_or(Ok(()), |home| home.check_on(&memory.device))?;
        let class = Class {
            size: size_of_slot,
            sizes: extent_sizes(memory, wanted)?,
        };
        memory.check_usable(id)?;
        let strands = match wanted.exact_extents {
            true => 0,
            false => granule.bytes().max(used / STRANDED_PART),
        };
        Ok(Self {
            class,
            used,
            most,
            strands,
        })
    }
}

fn extent_sizes(memory: &Memory, wanted: &Wanted<'_>) -> Result<ExtentSizes, BlockError> {
    let pools = memory.policy.largest_extent;
    let largest = match wanted.grain.largest {
        Some(bytes) => {
            ArgumentError::extent(bytes, memory.device.granule().bytes())?;
            bytes.min(pools)
        }
        None => pools,
    };
    Ok(ExtentSizes::up_to(largest).expect_shrink(wanted.shrinks))
}

impl Blocks {
    /// Returns how far ahead a new block grows. In a hardened pool nothing is mapped behind its end.
    fn growth(&self, policy: &Policy, grain: ExtentOptions) -> Growth {
        match &self.hardening {
            Some(_) => Growth::Exact,
            None => grain.growth.unwrap_or(policy.growth),
        }
    }

    /// Returns the best idle slot of the class: ordered before the work of `home`, and with no more
    /// stranded than `needs` permits.
    fn pick(
        &mut self,
        gate: &mut Gate,
        id: TenantId,
        needs: &Needs,
        home: Option<&Stream>,
    ) -> Option<SlotId> {
        let used = needs.used;
        let tenancy = self.slots.of(id)?;
        // Too little memory is worse than an incomplete fence, and an incomplete fence is worse
        // than too much memory. Among equals rows are kept whole; all other differences are whole
        // granules.
        let mut candidates = [(true, true, u64::MAX, usize::MAX); CANDIDATES];
        let fitting = tenancy
            .reusable(needs.class)
            .take(CANDIDATES)
            .filter(|(_, slot)| slot.stranded_by(used) <= needs.strands);
        let mut count = 0;
        for ((index, slot), candidate) in fitting.zip(&mut candidates) {
            let held = slot.space.bytes();
            let ready = slot.is_before(home);
            let differs = held.abs_diff(used) + u64::from(tenancy.rows.has(index));
            *candidate = (held < used, !ready, differs, index);
            count += 1;
        }
        let candidates = candidates.get_mut(..count).unwrap_or_default();
        candidates.sort_unstable();
        for &mut (_, unready, _, index) in candidates {
            let picked = SlotId { tenant: id, index };
            if !unready || self.is_ready_for(gate, picked, home) {
                return Some(picked);
            }
        }
        None
    }

    /// Returns `true` if the work that a slot's fence covers comes before the work of `home`, or
    /// can be ordered before it now. A slot for which the driver fails is passed over.
    pub(super) fn is_ready_for(
        &mut self,
        gate: &mut Gate,
        id: SlotId,
        home: Option<&Stream>,
    ) -> bool {
        let Some(slot) = self.slots.get_mut(id) else {
            return false;
        };
        let ready = gate.comes_before(&mut slot.fence, home);
        ready.unwrap_or_else(|error| {
            log!(debug, %error, "a fence could not be polled: the slot is passed over");
            false
        })
    }
}
