//! Growing in place: into memory that is there, or in steps ahead of the block's use.

use std::ops::Range;

use super::budget::TenantId;
use super::commit::{Fit, Furnished, is_capturing};
use super::locked::Locked;
use super::pace::{Growth, Precommit};
use super::slot::{Slot, SlotId};
use super::state::State;
use super::tenancy::Tenancy;
use crate::error::AllocateError;
use crate::own::Stream;

impl Slot {
    /// Whether its block can grow to `size` bytes, `used` in whole granules, and needs nothing for
    /// that.
    pub(super) fn has_room(&self, capacity: u64, size: u64, used: u64) -> bool {
        let Some(block) = &self.block else {
            return false;
        };
        let grows = block.requested <= size && size <= capacity && used <= self.space.bytes();
        // Zeros are owed only where memory was used before.
        let owed = block.used < block.reach && used > block.used;
        self.sleep_state.is_awake()
            && grows
            && !self.is_cut()
            && !(block.zeroed && (owed || !block.stale(size).is_empty()))
    }

    /// Grows its block, which has room for that.
    pub(super) fn grow_within(
        &mut self,
        place: &SlotId,
        size: u64,
        used: u64,
        precommit: Option<&mut Precommit>,
    ) {
        let bytes = self.space.bytes();
        let Some(block) = &mut self.block else {
            return;
        };
        block.requested = size;
        block.ever = block.ever.max(size);
        block.used = block.used.max(used);
        if let Some(precommit) = precommit {
            precommit.look_at((place.tenant, place.slot), block, bytes);
        }
    }
}

/// What growing from where a slot stands asks for.
struct Step {
    from: u64,
    to: u64,
    zeroed: bool,
    home: Option<Stream>,
    growth: Growth,
    /// The largest extent in bytes.
    largest: u64,
    /// Up to where memory may have been written to.
    reach: u64,
    most: u64,
}

impl State {
    /// Grows a block into memory that is there already and needs nothing: no fence, no zeros, no
    /// charge. False, and nothing has changed, if that is not so; [`Self::grow`] knows why.
    pub(crate) fn grow_within(&mut self, place: &SlotId, size: u64) -> bool {
        let granule = self.device.granule();
        let (Some((tenancy, precommit)), Some(used)) =
            (self.growing(place.tenant), granule.round_up(size))
        else {
            return false;
        };
        match tenancy.slot_mut(place.slot) {
            Some(slot) if slot.has_room(place.capacity, size, used) => {
                slot.grow_within(place, size, used, precommit);
                true
            }
            _ => false,
        }
    }

    /// The same for several blocks of a tenant: all of them or none. Looks at all before it changes
    /// one, so that nothing has to be undone, and does little with each: what lies far away in memory
    /// is on its way for several at a time.
    pub(super) fn grow_all_within(&mut self, id: TenantId, steps: &[(SlotId, u64)]) -> bool {
        let granule = self.device.granule();
        let Some((tenancy, mut precommit)) = self.growing(id) else {
            return false;
        };
        let fits = |(place, size): &(SlotId, u64)| {
            let slot = tenancy.slot(place.slot).zip(granule.round_up(*size));
            slot.is_some_and(|(slot, used)| slot.has_room(place.capacity, *size, used))
        };
        if !steps.iter().all(fits) {
            return false;
        }
        for (place, size) in steps {
            let slot = tenancy.slot_mut(place.slot).zip(granule.round_up(*size));
            if let Some((slot, used)) = slot {
                slot.grow_within(place, *size, used, precommit.as_deref_mut());
            }
        }
        true
    }

    /// A tenant whose blocks may grow over what they have now.
    pub(super) fn growing(
        &mut self,
        id: TenantId,
    ) -> Option<(&mut Tenancy, Option<&mut Precommit>)> {
        let usable = self.device.lost().is_none() && self.device.forked().is_none();
        if !usable || self.budget.is_overdrawn() {
            return None;
        }
        let tenancy = self.tenants.get_mut(&id)?;
        tenancy
            .registered
            .then_some((tenancy, self.precommit.as_mut()))
    }
}

impl Locked<'_> {
    /// Grows a block, whose slot is in its place.
    pub(crate) fn grow(&mut self, place: &SlotId, size: u64) -> Result<(), AllocateError> {
        let Some(mut slot) = self.take_out(place.tenant, place.slot) else {
            return Err(gone());
        };
        let grown = self.grow_slot(place, &mut slot, size);
        if let Ok(given) = &grown {
            slot.space.settle(given.begun);
        }
        self.put_slot(place.tenant, place.slot, slot);
        grown.map(drop)
    }

    /// Grows the block of a slot that is out. What it took can still be told from what was there.
    pub(super) fn grow_slot(
        &mut self,
        place: &SlotId,
        slot: &mut Slot,
        size: u64,
    ) -> Result<Furnished, AllocateError> {
        let (tenant, capacity) = (place.tenant, place.capacity);
        if size > capacity {
            return Err(AllocateError::OverCapacity { size, capacity });
        }
        let Some(used) = self.device.granule().round_up(size) else {
            return Err(AllocateError::TooLarge { size });
        };
        let Some(block) = &slot.block else {
            return Err(gone());
        };
        if !slot.sleep_state.is_awake() {
            let size = block.requested;
            return Err(AllocateError::Asleep { size });
        }
        if size < block.requested {
            return Err(AllocateError::WouldShrink {
                size: block.requested,
                wanted: size,
            });
        }
        let stale = block.stale(size);
        if block.zeroed && !stale.is_empty() {
            self.check_usable(tenant)?;
            self.blank(tenant, slot, stale)?;
        }
        self.grow_clean(place, slot, size, used)
    }

    /// Grows a block that has nothing to hide within the granules that it has.
    fn grow_clean(
        &mut self,
        place: &SlotId,
        slot: &mut Slot,
        size: u64,
        used: u64,
    ) -> Result<Furnished, AllocateError> {
        let tenant = place.tenant;
        let bytes = slot.space.bytes();
        let Some(block) = &mut slot.block else {
            return Err(gone());
        };
        if used <= block.used {
            block.requested = size;
            block.ever = block.ever.max(size);
            return Ok(Furnished {
                begun: bytes,
                filled: false,
            });
        }
        let revived = used.min(bytes).saturating_sub(block.used);
        self.check_usable(tenant)?;
        self.permit_reuse((tenant, place.slot), revived)?;
        let given = self.extend((tenant, place.slot), slot, used)?;
        slot.touched = self.tick();
        if let Some(block) = &mut slot.block {
            block.requested = size;
            block.ever = block.ever.max(size);
            block.used = used;
        }
        slot.note_writer(tenant);
        Ok(given)
    }

    /// Zeroes what a block would show of what it gave up, behind the work that may still write there.
    fn blank(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        stale: Range<u64>,
    ) -> Result<(), AllocateError> {
        let home = slot.block.as_ref().and_then(|block| block.home.clone());
        let bytes = stale.end - stale.start;
        self.settle_before(id, slot, home.as_ref(), bytes)?;
        if self.capturing > 0 || is_capturing(home.as_ref())? {
            return Err(AllocateError::Capturing(self.shortage(id, bytes, 0)));
        }
        let zeroed = self.zero(slot, stale.start, bytes, home.as_ref());
        zeroed.map_err(|unfinished| {
            // It is memory in use, which is not unmapped.
            slot.fence.merge(unfinished.running);
            unfinished.error
        })
    }

    /// Gets memory under the first `to` bytes of a block's slot, which is out, and precommitted
    /// memory behind them if there is enough for that.
    fn extend(
        &mut self,
        (id, index): (TenantId, usize),
        slot: &mut Slot,
        to: u64,
    ) -> Result<Furnished, AllocateError> {
        let Some(block) = &slot.block else {
            return Err(gone());
        };
        let step = Step {
            from: block.used,
            to,
            zeroed: block.zeroed,
            home: block.home.clone(),
            growth: block.growth,
            largest: slot.class.largest,
            reach: block.reach.max(block.used),
            most: block.most,
        };
        // What was given up a moment ago may still be written to by work that was queued before:
        // zeros must come after that.
        if step.zeroed && step.from < step.reach {
            self.settle_before(id, slot, step.home.as_ref(), to - step.from)?;
        }
        let begun = slot.space.bytes();
        let end = begun + self.step_of(id, begun, &step);
        let fit = Fit {
            zeros: step.zeroed.then_some((step.from, to.min(step.reach))),
            ..Fit::new(to, step.home.as_ref(), step.zeroed)
        };
        if end > to {
            match self.furnish((id, index), slot, &Fit { end, ..fit }) {
                // It was more than was asked for: without it there may be enough.
                Err(error) if error.is_shortage() => self.furnish((id, index), slot, &fit),
                outcome => outcome,
            }
        } else {
            self.furnish((id, index), slot, &fit)
        }
    }

    /// How much memory to put behind a block's, `begun` bytes, whose growth asks for a step.
    fn step_of(&self, id: TenantId, begun: u64, step: &Step) -> u64 {
        let need = step.to.saturating_sub(begun);
        let Growth::Part(part) = step.growth else {
            return need;
        };
        if need == 0 {
            return 0;
        }
        let granule = self.device.granule();
        let precommit = granule.step(step.to / part.max(1), step.largest);
        let room = step.most.saturating_sub(begun);
        let wished = need.max(precommit).min(room);
        // Precommitted memory is made of what nobody else has.
        if wished > need && wished <= self.budget.available_to(id) {
            wished
        } else {
            need
        }
    }

    /// Makes sure that what the fence of a slot covers comes before what is done next: on the home
    /// stream by events, elsewhere only if it has passed.
    fn settle_before(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        home: Option<&Stream>,
        bytes: u64,
    ) -> Result<(), AllocateError> {
        if slot.fence.is_complete() || home.is_some_and(|home| slot.fence.precedes(home)) {
            return Ok(());
        }
        if self.capturing > 0 {
            return Err(AllocateError::Capturing(self.shortage(id, bytes, 0)));
        }
        let ordered = match home {
            Some(home) => slot.fence.order_before(home)?,
            None => false,
        };
        let needs = &mut self.needs_synchronise;
        if ordered || State::poll(0, needs, &mut slot.fence)? {
            return Ok(());
        }
        Err(AllocateError::OutOfMemory(self.shortage(id, bytes, 0)))
    }
}

/// A block whose tenant has gone.
pub(super) fn gone() -> AllocateError {
    AllocateError::Unregistered {
        tenant: String::new(),
    }
}
