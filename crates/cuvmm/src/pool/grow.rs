//! Growing in place: into memory that is there, or in steps ahead of the block's use.

use std::cell::Cell;
use std::ops::Range;

use super::budget::TenantId;
use super::change::Change;
use super::commit::{Fit, Furnished};
use super::core::{Core, Locked};
use super::fills::is_capturing;
use super::ids::BYTES;
use super::ids::BlockPlace;
use super::pace::Precommit;
use super::relief::Demand;
use super::slot::Slot;
use super::state::{State, gone};
use super::tenancy::Tenancy;
use super::unshare::Refused;
use super::wait::{Attempt, Wait};
use crate::error::{ArgumentError, BlockError, CallError, MemoryError};
use crate::growth::Steps;
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
    pub(super) fn grow_within(&mut self, size: u64, used: u64, precommit: Option<&mut Precommit>) {
        let (id, bytes) = (self.id, self.space.bytes());
        let Some(block) = &mut self.block else {
            return;
        };
        block.requested = size;
        block.ever = block.ever.max(size);
        block.used = block.used.max(used);
        if let Some(precommit) = precommit {
            precommit.look_at(id, block, bytes);
        }
    }
}

/// A block to grow, and to how many bytes.
type Step = (BlockPlace, u64);

/// What growing from where a slot stands asks for.
struct Need {
    from: u64,
    to: u64,
    zeroed: bool,
    home: Option<Stream>,
    steps: Steps,
    /// Up to where memory may have been written to.
    reach: u64,
    most: u64,
}

impl State {
    /// Grows a block into memory that is there already and needs nothing: no fence, no zeros, no
    /// charge. False, and nothing has changed, if that is not so; growing whatever it takes tells why.
    pub(crate) fn grow_within(&mut self, place: &BlockPlace, size: u64) -> bool {
        let granule = self.device.granule();
        let (Some((tenancy, precommit)), Some(used)) =
            (self.growing(place.slot.tenant), granule.round_up(size))
        else {
            return false;
        };
        match tenancy.slot_mut(place.slot.index) {
            Some(slot) if slot.has_room(place.capacity, size, used) => {
                slot.grow_within(size, used, precommit);
                true
            }
            _ => false,
        }
    }

    /// The same for several blocks of a tenant: all of them or none. Looks at all before it changes
    /// one, so that nothing has to be undone, and does little with each: what lies far away in memory
    /// is on its way for several at a time.
    pub(super) fn grow_all_within(&mut self, id: TenantId, steps: &[(BlockPlace, u64)]) -> bool {
        let granule = self.device.granule();
        let Some((tenancy, mut precommit)) = self.growing(id) else {
            return false;
        };
        let fits = |(place, size): &(BlockPlace, u64)| {
            let slot = tenancy.slot(place.slot.index).zip(granule.round_up(*size));
            slot.is_some_and(|(slot, used)| slot.has_room(place.capacity, *size, used))
        };
        if !steps.iter().all(fits) {
            return false;
        }
        for (place, size) in steps {
            let slot = tenancy
                .slot_mut(place.slot.index)
                .zip(granule.round_up(*size));
            if let Some((slot, used)) = slot {
                slot.grow_within(*size, used, precommit.as_deref_mut());
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
        let may = tenancy.registered && !tenancy.beyond;
        may.then_some((tenancy, self.precommit.as_mut()))
    }
}

impl Locked<'_> {
    /// Grows the block of a slot that is out. What it took can still be told from what was there.
    pub(super) fn grow_slot(
        &mut self,
        slot: &mut Slot,
        capacity: u64,
        size: u64,
    ) -> Result<Furnished, BlockError> {
        ArgumentError::at_most(BYTES, size, capacity)?;
        let Some(used) = self.device.granule().round_up(size) else {
            return Err(ArgumentError::Uncountable {
                what: BYTES,
                value: size,
            }
            .into());
        };
        let Some(block) = &slot.block else {
            return Err(gone());
        };
        if !slot.sleep_state.is_awake() {
            let size = block.requested;
            return Err(MemoryError::Asleep { size }.into());
        }
        ArgumentError::at_least(BYTES, size, block.requested)?;
        let stale = block.stale(size);
        if block.zeroed && !stale.is_empty() {
            self.check_usable(slot.id.tenant)?;
            self.blank(slot, stale)?;
        }
        self.grow_clean(slot, size, used)
    }

    /// Grows a block that has nothing to hide within the granules that it has.
    fn grow_clean(
        &mut self,
        slot: &mut Slot,
        size: u64,
        used: u64,
    ) -> Result<Furnished, BlockError> {
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
        self.check_usable(slot.id.tenant)?;
        self.permit_reuse(slot.id, revived)?;
        let given = self.extend(slot, used)?;
        slot.touched = self.tick();
        if let Some(block) = &mut slot.block {
            block.requested = size;
            block.ever = block.ever.max(size);
            block.used = used;
        }
        slot.note_writer();
        Ok(given)
    }

    /// Zeroes what a block would show of what it gave up, behind the work that may still write there.
    fn blank(&mut self, slot: &mut Slot, stale: Range<u64>) -> Result<(), BlockError> {
        let home = slot.home().cloned();
        let bytes = stale.end - stale.start;
        self.settle_before(slot, home.as_ref(), bytes)?;
        if self.capturing > 0 || is_capturing(home.as_ref())? {
            let shortage = self.shortage(slot.id.tenant, bytes, 0);
            return Err(BlockError::Capturing(shortage));
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
    fn extend(&mut self, slot: &mut Slot, to: u64) -> Result<Furnished, BlockError> {
        let Some(block) = &slot.block else {
            return Err(gone());
        };
        let step = Need {
            from: block.used,
            to,
            zeroed: block.zeroed,
            home: block.home.clone(),
            steps: Steps::of_block(self.device.granule(), block.growth, slot.class.largest),
            reach: block.reach.max(block.used),
            most: block.most,
        };
        // What was given up a moment ago may still be written to by work that was queued before:
        // zeros must come after that.
        if step.zeroed && step.from < step.reach {
            self.settle_before(slot, step.home.as_ref(), to - step.from)?;
        }
        let begun = slot.space.bytes();
        let end = self.end_of(slot.id.tenant, begun, &step);
        let fit = Fit {
            zeros: step.zeroed.then_some((step.from, to.min(step.reach))),
            ..Fit::new(to, step.home.as_ref(), step.zeroed)
        };
        match self.furnish(slot, &Fit { end, ..fit }) {
            // It was more than was asked for: without it there may be enough.
            Err(error) if end > to && error.is_shortage() => self.furnish(slot, &fit),
            outcome => outcome,
        }
    }

    /// Where a block's memory, `begun` bytes, is to end.
    fn end_of(&self, id: TenantId, begun: u64, need: &Need) -> u64 {
        let to = need.to;
        if begun >= to {
            return begun;
        }
        let wished = need.steps.end(to, begun, to, need.most);
        // Precommitted memory is made of what nobody else has.
        if wished > to && wished - begun <= self.budget.available_to(id) {
            wished
        } else {
            to
        }
    }

    /// Makes sure that what the fence of a slot covers comes before what is done next: on the home
    /// stream by events, elsewhere only if it has passed.
    fn settle_before(
        &mut self,
        slot: &mut Slot,
        home: Option<&Stream>,
        bytes: u64,
    ) -> Result<(), BlockError> {
        if slot.is_before(home) {
            return Ok(());
        }
        let id = slot.id.tenant;
        if self.capturing > 0 {
            return Err(BlockError::Capturing(self.shortage(id, bytes, 0)));
        }
        let ordered = match home {
            Some(home) => slot.fence.order_before(home)?,
            None => false,
        };
        let needs = &mut self.needs_synchronise;
        if ordered || State::poll(0, needs, &mut slot.fence)? {
            return Ok(());
        }
        Err(BlockError::OutOfMemory(self.shortage(id, bytes, 0)))
    }
}

impl Core {
    /// Grows one block.
    pub(super) fn grow(
        &self,
        place: &BlockPlace,
        size: u64,
        wait: impl FnOnce() -> Wait,
    ) -> Result<(), BlockError> {
        let mut state = self.lock();
        let grown = state.grow_within(place, size);
        Self::let_go(state);
        if grown {
            return Ok(());
        }
        let grown = self.grow_all(place.slot.tenant, &[(*place, size)], wait());
        grown.map_err(|refused| refused.cause)
    }

    /// Grows blocks that have not all room for that.
    pub(super) fn grow_all(
        &self,
        tenant: TenantId,
        steps: &[Step],
        wait: Wait,
    ) -> Result<(), Refused> {
        self.grow_claimed(tenant, steps, wait, |_| true)
    }

    /// Grows blocks that have not all room for that. Where `claims` says in the end that the growth is
    /// wanted no more, it is undone.
    pub(super) fn grow_claimed(
        &self,
        tenant: TenantId,
        steps: &[Step],
        wait: Wait,
        claims: impl Fn(&mut Locked<'_>) -> bool,
    ) -> Result<(), Refused> {
        let forked = |cause: CallError| Refused {
            index: 0,
            cause: cause.into(),
        };
        self.device.own_process().map_err(forked)?;
        self.unshare_cuts(tenant, steps, wait)?;
        let failed = Cell::new(0);
        let grown = self.request(tenant, Demand::Growth(steps), wait, |state| {
            self.attempt_to_grow(state, steps, &failed, &claims)
        });
        let index = failed.get();
        grown.map_err(|cause| Refused { index, cause })
    }

    /// Grows blocks, first all those that have what they need; `failed` is told which could not.
    fn attempt_to_grow<'a>(
        &'a self,
        mut state: Locked<'a>,
        steps: &[Step],
        failed: &Cell<usize>,
        claims: &impl Fn(&mut Locked<'_>) -> bool,
    ) -> Attempt<'a, ()> {
        state.purge_some();
        state = self.await_slots(state, steps.iter().map(|(place, size)| (place.slot, *size)));
        let mut changes = Vec::with_capacity(steps.len());
        let mut lacking = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            match state.step_within(step) {
                Some(change) => changes.push(change),
                None => lacking.push((index, step)),
            }
        }
        let mut outcome = Ok(());
        for (index, step) in lacking {
            // Another operation may take what lies behind its end meanwhile, and the mapper place more.
            state = self.await_slots(state, std::iter::once((step.0.slot, step.1)));
            match state.step_far(step) {
                Ok(change) => changes.push(change),
                Err(error) => {
                    failed.set(index);
                    outcome = Err(error);
                    break;
                }
            }
        }
        if outcome.is_ok() && !claims(&mut state) {
            outcome = Err(gone());
        }
        state = self.conclude(state, changes, outcome.is_ok());
        (state, outcome)
    }
}

impl Locked<'_> {
    /// Grows a block into what is there; nothing if that is not enough.
    fn step_within(&mut self, (place, size): &Step) -> Option<Change> {
        let change = Change::of(self.slot(place.slot)?, *place);
        if !self.grow_within(place, *size) {
            return None;
        }
        self.slot_mut(place.slot)?.pinned = true;
        Some(change)
    }

    /// Grows a block, whose slot is in its place, whatever it takes.
    fn step_far(&mut self, (place, size): &Step) -> Result<Change, BlockError> {
        let grown = self.with_slot_out(place.slot, |state, slot| {
            let mut change = Change::of(slot, *place);
            change.given = Some(state.grow_slot(slot, place.capacity, *size)?);
            slot.pinned = true;
            Ok(change)
        });
        grown.ok_or_else(gone)?
    }
}
