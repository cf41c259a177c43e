//! What the mapper's thread does for a pool: memory ahead of blocks that grow, and memory taken
//! back before somebody has to wait for that.
//!
//! Placing ahead goes in three steps. Under the lock the memory is charged and the slot is marked
//! as busy; without the lock the driver maps; under the lock again the extent is taken in. So the
//! block grows into its margin all the while, and only one that has used all of it waits.

use std::sync::Arc;
use std::time::Duration;

use super::budget::TenantId;
use super::core::Core;
use super::pace::{Ahead, Growth};
use super::slot::Occupant;
use super::state::{Policy, State};
use super::tenancy::{Give, Tenancy};
use crate::device::Device;
use crate::error::CreateError;
use crate::region::{Bell, Chores, Ground, Piece, PlaceFailure, Placed, Ring};
use crate::sync::atomic::{AtomicBool, Ordering};

/// How often the mapper looks after what unregistered tenants left, until its fences have passed.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// How often it looks for memory to keep ready while there is none to be had.
const LOOK_FOR_MORE: Duration = Duration::from_millis(20);

/// An extent to be placed without the lock.
struct Job {
    tenant: TenantId,
    slot: usize,
    offset: u64,
    size: u64,
    /// From stock; created if there is none.
    piece: Option<Piece>,
    ground: Ground,
}

impl Ahead {
    /// Notes a block that runs low on margin in a slot that has `bytes` of memory.
    pub(crate) fn look_at(&mut self, place: (TenantId, usize), block: &mut Occupant, bytes: u64) {
        let low = bytes.saturating_sub(block.used) < block.pace.low && bytes < block.most;
        if low && !block.pace.called && !self.bell.is_dead() {
            block.pace.called = true;
            self.growing.push_back(place);
            self.call(block.pace.ring());
        }
    }
}

impl State {
    /// Calls the mapper, when the lock is let go, if a block's margin runs low.
    pub(crate) fn look_ahead(&mut self, id: TenantId, index: usize) {
        let Some(slot) = self
            .tenants
            .get_mut(&id)
            .and_then(|tenancy| tenancy.slot_mut(index))
        else {
            return;
        };
        let bytes = slot.space.bytes();
        if let (Some(block), Some(ahead)) = (&mut slot.block, &mut self.ahead) {
            ahead.look_at((id, index), block, bytes);
        }
    }

    /// Calls the mapper, when the lock is let go, if there is work behind.
    pub(crate) fn look_behind(&mut self) {
        let lacks = self.lacks_ready() > 0;
        if let Some(ahead) = self.ahead.as_mut().filter(|_| lacks) {
            ahead.call(Ring::Soon);
        }
    }

    pub(crate) fn take_ring(&mut self) -> Option<(Bell, Ring)> {
        self.ahead.as_mut()?.take_ring()
    }

    /// Whether a block that wants to use `size` bytes must wait for what the mapper is placing.
    pub(crate) fn waits_for_mapper(&self, id: TenantId, index: usize, size: u64) -> bool {
        self.slot(id, index)
            .is_some_and(|slot| slot.is_busy() && slot.space.bytes() < size)
    }

    /// The next extent to be placed ahead: charged, and its slot marked.
    fn begin_ahead(&mut self) -> Option<Job> {
        loop {
            let (id, index) = self.ahead.as_mut()?.growing.pop_front()?;
            if let Some(job) = self.prepare(id, index) {
                return Some(job);
            }
        }
    }

    fn prepare(&mut self, id: TenantId, index: usize) -> Option<Job> {
        let granule = self.device.granule();
        let registered = self.tenants.get(&id)?.registered;
        let slot = self.tenants.get_mut(&id)?.slot_mut(index)?;
        let offset = slot.space.bytes();
        let busy = slot.is_busy() || slot.broken || !slot.slumber.is_awake();
        let largest = slot.class.largest;
        let block = slot.block.as_mut()?;
        block.pace.called = false;
        let Growth::Part(part) = block.growth else {
            return None;
        };
        if busy || !registered || offset >= block.most {
            return None;
        }
        let step = granule
            .step(block.used / part.max(1), largest)
            .max(granule.bytes())
            .min(granule.extent_within(block.most - offset, largest));
        block.pace.learn(block.used, step);
        let margin = offset.saturating_sub(block.used);
        if margin >= block.pace.low || slot.stuck_at(offset, step) {
            return None;
        }
        let zeroed = slot.block.as_ref().is_some_and(|block| block.zeroed);
        if step > self.budget.available_to(id) || self.budget.mappings_left() == 0 {
            return None;
        }
        let piece = self.stock.take(step, (!zeroed).then_some(id.0), false);
        if piece.is_none() {
            if self.budget.creatable() < step {
                return None;
            }
            self.budget.created(step);
        }
        self.budget.charge(id, step);
        self.budget.charge_mappings(id, 1);
        let mut slot = self.take_slot(id, index)?;
        slot.coming = step;
        let ground = slot.space.ground();
        self.put_slot(id, index, slot);
        Some(Job {
            tenant: id,
            slot: index,
            offset,
            size: step,
            piece,
            ground,
        })
    }

    /// Takes in what was placed, or books back what was not.
    fn finish_ahead(
        &mut self,
        (id, index): (TenantId, usize),
        size: u64,
        outcome: Result<Placed, Failure>,
    ) {
        let Some(mut slot) = self.take_slot(id, index) else {
            return;
        };
        slot.coming = 0;
        let placed = outcome.is_ok();
        match outcome {
            Ok(placed) => {
                slot.space.adopt(placed);
                slot.space.settle(slot.space.bytes() - size);
            }
            Err(failure) => {
                self.budget.refund(id, size);
                self.budget.refund_mappings(id, 1);
                match failure {
                    Failure::Create(error) => {
                        self.budget.released(size);
                        tracing::debug!(%error, size, "nothing could be created ahead");
                    }
                    Failure::Place(failed) => {
                        let PlaceFailure {
                            error,
                            pieces,
                            stuck,
                        } = *failed;
                        tracing::debug!(%error, size, "nothing could be placed ahead");
                        let count = stuck.len() as u64;
                        let bytes = slot.space.keep_stuck(stuck);
                        self.set_aside(&mut slot, bytes, count);
                        self.put_back(pieces);
                    }
                }
            }
        }
        // The block may be gone by now.
        self.lay_down(id, index, slot);
        self.collect_if_draining(id);
        // What failed is tried again when the block grows, not at once and for ever.
        if placed {
            self.look_ahead(id, index);
        }
    }

    /// Bytes that are to be ready and are not, and that could be.
    fn lacks_ready(&self) -> u64 {
        let ready = self.ahead.as_ref().map_or(0, |ahead| ahead.ready);
        ready.saturating_sub(self.stock.bytes() + self.budget.creatable())
    }

    /// Takes back one extent, or a tenant's idle memory, that nobody has asked for yet. Whether
    /// there may be more.
    fn unmap_behind(&mut self) -> bool {
        let draining: Vec<TenantId> = self
            .tenants
            .iter()
            .filter(|(_, tenancy)| !tenancy.registered)
            .map(|(&id, _)| id)
            .collect();
        for id in draining {
            self.collect_if_draining(id);
        }
        let retired = self.retire_some() > 0;
        let lacking = self.lacks_ready().min(self.policy.largest_extent);
        if lacking == 0 {
            return retired;
        }
        // Nobody in particular asks, so everybody's guarantee counts.
        match self.take_back_any(TenantId(u64::MAX), lacking) {
            Ok(got) => retired || got > 0,
            Err(error) => {
                tracing::warn!(%error, "idle memory stays mapped for now");
                false
            }
        }
    }

    /// When to look again for memory that will be taken back once its fences have passed.
    fn look_again(&self) -> Option<Duration> {
        let draining = |tenancy: &Tenancy| {
            !tenancy.registered && tenancy.next_giving(Give::Idle, None).is_some()
        };
        if self.has_retiring() || self.tenants.values().any(draining) {
            Some(LOOK_AGAIN)
        } else {
            (self.lacks_ready() > 0).then_some(LOOK_FOR_MORE)
        }
    }
}

/// Why nothing was placed.
enum Failure {
    Create(CreateError),
    Place(Box<PlaceFailure>),
}

impl Job {
    /// Makes the driver calls.
    fn carry_out(self, device: &Device, policy: &Policy) -> Result<Placed, Failure> {
        let piece = match self.piece {
            Some(piece) => piece,
            None => Piece::fresh(policy.create(device, self.size).map_err(Failure::Create)?),
        };
        self.ground
            .place(self.offset, piece)
            .map_err(|failed| Failure::Place(Box::new(failed)))
    }
}

impl Core {
    /// Has a mapper do the pool's chores.
    pub(crate) fn attach(core: &Arc<Self>, bell: Bell, ready: u64) {
        core.device.count_apart(bell.thread());
        let weak = Arc::downgrade(core);
        let attached = bell.attach(weak);
        // After a refused `close` it is there already: a pool has one mapper in its life.
        core.bell.get_or_init(|| bell.clone());
        core.lock().ahead = Some(Ahead::new(bell, attached, ready));
    }

    /// Whether a mapper looks after the pool. Takes no lock.
    pub(crate) fn has_mapper(&self) -> bool {
        self.bell.get().is_some_and(|bell| !bell.is_dead())
    }

    /// Ends that, once the mapper's thread is out of it; returns what to attach with again.
    pub(crate) fn detach(&self) -> Option<(Bell, u64)> {
        let mut state = self.lock();
        let ahead = state.ahead.take()?;
        // Nobody will come: they may call the next one.
        for &(id, index) in &ahead.growing {
            if let Some(block) = state
                .slot_mut(id, index)
                .and_then(|slot| slot.block.as_mut())
            {
                block.pace.called = false;
            }
        }
        drop(state);
        ahead.bell.detach(ahead.attached);
        Some((ahead.bell, ahead.ready))
    }
}

impl Chores for Core {
    fn work(&self, stop: &AtomicBool) -> Option<Duration> {
        while !stop.load(Ordering::Acquire) {
            let mut state = self.lock();
            let Some(job) = state.begin_ahead() else {
                break;
            };
            let policy = state.policy;
            drop(state);
            let (place, size) = ((job.tenant, job.slot), job.size);
            let outcome = job.carry_out(&self.device, &policy);
            let mut state = self.lock();
            state.finish_ahead(place, size, outcome);
            // Before what users gave is dropped, which may take its time.
            self.placed();
            drop(state);
        }
        while !stop.load(Ordering::Acquire) {
            let mut state = self.lock();
            let more = state.unmap_behind();
            drop(state);
            self.announce();
            if !more {
                break;
            }
        }
        let state = self.lock();
        state.look_again()
    }
}
