//! Blocks [side by side](crate::pool::BlockBuilder::allocate_adjacent).
//!
//! Each block has a slot of its own in a [row](super::slots::rows) reserved at once, and its memory never
//! reaches into its neighbor's addresses. The slots of a row with at most 1,024 slots, on which one
//! locked section works, serve later blocks too: side by side, single, or [in a hole of the
//! row](super::beside). The driver gets the addresses back when the last slot of the row is gone.
//! Until then those of slots that are gone count against the pool's limit and no tenant's.

use super::Blocks;
use super::allocate::{CANDIDATES, Needs};
use super::change::Change;
use super::commit::Charging;
use super::slots::{BlockPlace, Slot, SlotId, Tenancy, too_large};
use crate::error::{ArgumentError, BlockError};
use crate::own::Stream;
use crate::pool::accounts::{Charge, TenantId};
use crate::pool::core::{Core, Locked, SLOTS_A_SECTION};
use crate::pool::gate::Gate;
use crate::pool::line::{Attempt, Wait, Wanted};
use crate::pool::memory::Memory;
use crate::pool::state::gone;
use crate::wanted::Purpose;

/// The rank of part of a row, the best first: whether memory is lacking, whether a fence must
/// become complete, the length of the row that the part is cut from, and the bytes of memory too
/// few or too many.
type Rank = (bool, bool, usize, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) enum Placement {
    Anywhere,
    Adjacent,
}

/// Slots side by side, for blocks to be put in.
struct Lot {
    needs: Needs,
    /// Changes of a row's used slots, in the order of their addresses. These slots are in their
    /// places and pinned.
    changes: Vec<Change>,
    /// New slots, in the order of their addresses. They are out.
    #[allow(clippy::vec_box, reason = "slots are boxed in their places too")]
    opened: Vec<Box<Slot>>,
    /// The charge for the memory of the new slots.
    charge: Option<Charge>,
}

impl Core {
    /// Makes places for `count` equal blocks: all of them or none.
    pub(super) fn allocate_many(
        &self,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        (count, placement): (usize, Placement),
        wait: Wait,
    ) -> Result<Vec<BlockPlace>, BlockError> {
        let each = self.device.granule().round_up(wanted.size);
        let bytes = each.unwrap_or(u64::MAX).saturating_mul(count as u64);
        let exact_extents = Wanted {
            exact_extents: true,
            ..wanted.clone()
        };
        self.request(tenant, bytes, wait, |state| {
            // A forked child finds no tenant, and so no tenant's limit.
            if let Err(forked) = self.device.own_process() {
                return (state, Err(forked.into()));
            }
            // No addresses and no slots for blocks that the tenant can never have.
            if bytes > state.memory.budget.most_for(tenant, true) {
                let refused = state.out_of_memory(tenant, bytes);
                return (state, Err(refused));
            }
            let place = |state, wanted| match placement {
                Placement::Anywhere => self.scatter(state, tenant, wanted, count),
                Placement::Adjacent => self.line_up(state, tenant, wanted, count),
            };
            match place(state, wanted) {
                // The memory left over behind each block may be what the last block lacks.
                (state, Err(error)) if count > 1 && error.is_shortage() => {
                    place(state, &exact_extents)
                }
                attempted => attempted,
            }
        })
    }

    fn scatter<'a>(
        &'a self,
        mut state: Locked<'a>,
        tenant: TenantId,
        wanted: &Wanted<'_>,
        count: usize,
    ) -> Attempt<'a, Vec<BlockPlace>> {
        let mut changes: Vec<Change> = Vec::with_capacity(count);
        let mut outcome = Ok(());
        while outcome.is_ok() && changes.len() < count {
            state.end_section(changes.len());
            match state.allocate_slot(tenant, wanted) {
                Ok((change, mut slot)) => {
                    slot.pinned = true;
                    state.blocks.put_slot(slot);
                    changes.push(change);
                }
                Err(error) => outcome = Err(error),
            }
        }
        let places = changes.iter().map(|change| change.place).collect();
        state = self.conclude(state, changes, outcome.is_ok());
        (state, outcome.map(|()| places))
    }

    fn line_up<'a>(
        &'a self,
        mut state: Locked<'a>,
        id: TenantId,
        wanted: &Wanted<'_>,
        count: usize,
    ) -> Attempt<'a, Vec<BlockPlace>> {
        let lot = match state.find_lot(id, wanted, count) {
            Ok(lot) => lot,
            Err(error) => return (state, Err(error)),
        };
        let (needs, mut changes) = (lot.needs, lot.changes);
        let new = !lot.opened.is_empty();
        let mut outcome = Ok(());
        for change in &mut changes {
            // Another operation may take memory from a slot that has no block yet.
            state = self.await_slot(state, change.place.slot);
            outcome = state.move_in_pinned(change, wanted, &needs);
            if outcome.is_err() {
                break;
            }
        }
        let mut charging = Charging(&mut state, lot.charge);
        for slot in lot.opened {
            match outcome {
                Ok(()) => {
                    let charge = charging.1.as_mut().map(|charge| charge.split(needs.used));
                    match charging.0.move_in_new(slot, wanted, &needs, charge) {
                        Ok(change) => changes.push(change),
                        Err(error) => outcome = Err(error),
                    }
                }
                Err(_) => charging.0.drop_slot(slot),
            }
        }
        drop(charging);
        let places: Vec<BlockPlace> = changes.iter().map(|change| change.place).collect();
        state = self.conclude(state, changes, outcome.is_ok());
        // A section that uses a row again works on all of it.
        if new
            && outcome.is_ok()
            && count <= SLOTS_A_SECTION
            && let Some(tenancy) = state.blocks.slots.of_mut(id)
        {
            let slots = places.iter().map(|place| place.slot.index);
            tenancy.rows.add(slots.collect());
        }
        (state, outcome.map(|()| places))
    }
}

impl Locked<'_> {
    /// Finds or reserves slots side by side for `count` blocks.
    fn find_lot(
        &mut self,
        id: TenantId,
        wanted: &Wanted<'_>,
        count: usize,
    ) -> Result<Lot, BlockError> {
        let guards = self.blocks.guard().saturating_mul(2);
        let needs = needs_apart(&self.memory, id, wanted, guards)?;
        let bytes = needs.used.saturating_mul(count as u64);
        self.leave_to_others(id, bytes)?;
        self.purge_some();
        // A stream cache hands out single blocks: their slots are available here only after a
        // sweep.
        self.blocks.sweep(id);
        let mut lot = Lot {
            needs,
            changes: Vec::new(),
            opened: Vec::new(),
            charge: None,
        };
        let (memory, blocks) = self.halves();
        let Some(row) = blocks.pick_row(&mut memory.gate, id, &needs, wanted.home, count) else {
            // Without memory no addresses are reserved.
            let charge = self.obtain(id, bytes, Purpose::New)?;
            let charging = Charging(self, Some(charge));
            lot.opened = charging.0.open_slots(id, needs.class, count)?.collect();
            lot.charge = charging.take();
            return Ok(lot);
        };
        for index in row {
            let slot = self.blocks.slots.take(SlotId { tenant: id, index });
            if let Some(mut slot) = slot {
                let change = Change::of(&slot, slot.place(wanted.capacity));
                lot.changes.push(change);
                slot.pinned = true;
                self.blocks.put_slot(slot);
            }
        }
        Ok(lot)
    }

    /// Puts a block in a new slot, which is out. On failure the slot is gone.
    fn move_in_new(
        &mut self,
        mut slot: Box<Slot>,
        wanted: &Wanted<'_>,
        needs: &Needs,
        charge: Option<Charge>,
    ) -> Result<Change, BlockError> {
        let mut change = Change::of(&slot, slot.place(wanted.capacity));
        change.new = true;
        match self.move_in(&mut slot, wanted, needs, charge) {
            Ok(given) => {
                change.given = Some(given);
                slot.pinned = true;
                self.blocks.put_slot(slot);
                Ok(change)
            }
            Err(error) => {
                self.drop_slot(slot);
                Err(error)
            }
        }
    }

    /// Puts a block in a slot that is in its place.
    fn move_in_pinned(
        &mut self,
        change: &mut Change,
        wanted: &Wanted<'_>,
        needs: &Needs,
    ) -> Result<(), BlockError> {
        let id = change.place.slot;
        let moved = self.with_slot_out(id, |state, slot| state.move_in(slot, wanted, needs, None));
        change.given = Some(moved.ok_or_else(gone)??);
        Ok(())
    }
}

/// Returns the requirements of blocks at the requested distance on their slots.
fn needs_apart(
    memory: &Memory,
    id: TenantId,
    wanted: &Wanted<'_>,
    guards: u64,
) -> Result<Needs, BlockError> {
    ArgumentError::not_zero("bytes of a stride multiple", wanted.stride)?;
    let mut needs = Needs::of(memory, id, wanted)?;
    let granule = memory.device.granule();
    needs.class.size = granule
        .class_apart(wanted.capacity, guards, wanted.stride)
        .ok_or(too_large(wanted.capacity))?;
    Ok(needs)
}

impl Blocks {
    /// Returns the part of a row that serves best. All its slots are vacant and ordered before the
    /// work of `home`.
    fn pick_row(
        &mut self,
        gate: &mut Gate,
        id: TenantId,
        needs: &Needs,
        home: Option<&Stream>,
        count: usize,
    ) -> Option<Vec<usize>> {
        let tenancy = self.slots.of(id)?;
        let mut candidates: Vec<(Rank, Vec<usize>)> = tenancy
            .rows
            .iter()
            .flat_map(|row| row.windows(count).map(|part| (row.len(), part)))
            .filter_map(|(len, part)| Some((rank(tenancy, needs, home, len, part)?, part.to_vec())))
            .take(CANDIDATES)
            .collect();
        candidates.sort_unstable();
        for (_, part) in candidates {
            let mut ready = true;
            for &index in &part {
                ready = ready && self.is_ready_for(gate, SlotId { tenant: id, index }, home);
            }
            if ready {
                return Some(part);
            }
        }
        None
    }
}

/// Ranks part of a row. Returns `None` if one of its slots is unusable or would strand too much.
fn rank(
    tenancy: &Tenancy,
    needs: &Needs,
    home: Option<&Stream>,
    len: usize,
    part: &[usize],
) -> Option<Rank> {
    let mut rank = (false, false, len, 0u64);
    for &index in part {
        let slot = tenancy.slot(index)?;
        let usable = slot.class == needs.class && slot.is_vacant() && !slot.serves_once();
        if !usable || slot.stranded_by(needs.used) > needs.strands {
            return None;
        }
        let held = slot.space.bytes();
        rank.0 |= held < needs.used;
        rank.1 |= !slot.is_before(home);
        rank.3 = rank.3.saturating_add(held.abs_diff(needs.used));
    }
    Some(rank)
}

#[cfg(all(test, debug_assertions))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::extents::rig::{G, rig};
    use crate::pool::{Limit, Pool};

    // I-41
    #[test]
    fn a_locked_section_works_on_a_bounded_number_of_slots() {
        let rig = rig();
        let most = SLOTS_A_SECTION as u64;
        let count = 2 * SLOTS_A_SECTION + 5;
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(3 * most * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let worked_on = || pool.core.look(|state| state.blocks.slots.most_worked_on());
        for adjacent in [true, false] {
            let of = || tenant.block(G).capacity(G);
            let blocks = match adjacent {
                true => of().try_allocate_adjacent(count),
                false => of().try_allocate_many(count),
            };
            let mut blocks = blocks.unwrap();
            assert!(
                worked_on() <= SLOTS_A_SECTION,
                "{adjacent}: {}",
                worked_on()
            );
            // A failed operation is undone in parts too.
            rig.fail(crate::driver::Call::MemMap, most + 9);
            blocks.truncate(5);
            pool.core.lock().trim(0).unwrap();
            let refused = match adjacent {
                true => of().try_allocate_adjacent(count),
                false => of().try_allocate_many(count),
            };
            assert!(refused.is_err());
            rig.heal();
            assert!(
                worked_on() <= SLOTS_A_SECTION,
                "{adjacent}: {}",
                worked_on()
            );
            assert_eq!(tenant.stats().in_use, 5 * G);
        }
    }
}
