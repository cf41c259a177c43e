//! What the mapper's thread does for a pool: memory ahead of blocks that grow, and memory taken
//! back before somebody has to wait for that.
//!
//! Placing ahead goes in three steps. Under the lock the memory is charged and the slot is marked
//! as busy; without the lock the driver maps; under the lock again the extent is taken in. So the
//! block grows into its precommitted memory all the while, and only one that has used all of it waits.

use std::sync::Arc;
use std::time::Duration;

use super::budget::TenantId;
use super::core::Core;
use super::locked::Locked;
use super::pace::{Growth, Precommit};
use super::slot::Occupant;
use super::state::{Policy, State};
use super::tenancy::{Give, Tenancy};
use crate::error::CreateError;
use crate::region::{MapperWork, PlaceFailure, Placed, Target, Unmapped, Urgency, Waker};
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
    /// From the free list; created if there is none.
    unmapped: Option<Unmapped>,
    target: Target,
}

impl Precommit {
    /// Notes a block that runs low on precommitted memory in a slot that has `bytes` of memory.
    pub(crate) fn look_at(&mut self, place: (TenantId, usize), block: &mut Occupant, bytes: u64) {
        let low = bytes.saturating_sub(block.used) < block.pace.low && bytes < block.most;
        if low && !block.pace.called && !self.waker.is_dead() {
            block.pace.called = true;
            self.growing.push_back(place);
            self.call(block.pace.wake());
        }
    }
}

impl State {
    /// Calls the mapper, when the lock is let go, if a block's precommitted memory runs low.
    pub(crate) fn ask_precommit(&mut self, id: TenantId, index: usize) {
        let Some(slot) = self
            .tenants
            .get_mut(&id)
            .and_then(|tenancy| tenancy.slot_mut(index))
        else {
            return;
        };
        let bytes = slot.space.bytes();
        if let (Some(block), Some(precommit)) = (&mut slot.block, &mut self.precommit) {
            precommit.look_at((id, index), block, bytes);
        }
    }

    /// Calls the mapper, when the lock is let go, if blocks run low whose slots were out when it came.
    pub(crate) fn remind_mapper(&mut self) {
        if let Some(precommit) = &mut self.precommit
            && !precommit.growing.is_empty()
        {
            precommit.call(Urgency::Soon);
        }
    }

    pub(crate) fn take_urgency(&mut self) -> Option<(Waker, Urgency)> {
        self.precommit.as_mut()?.take_urgency()
    }

    /// Whether a block that wants to use `size` bytes must wait for what the mapper is placing.
    pub(crate) fn waits_for_mapper(&self, id: TenantId, index: usize, size: u64) -> bool {
        self.slot(id, index)
            .is_some_and(|slot| slot.is_busy() && slot.space.bytes() < size)
    }

    /// The next extent to be placed ahead: charged, and its slot marked.
    fn begin_precommit(&mut self) -> Option<Job> {
        loop {
            let growing = &self.precommit.as_ref()?.growing;
            let (id, index) = growing
                .iter()
                .copied()
                .find(|&(id, index)| !self.is_out(id, index))?;
            let growing = &mut self.precommit.as_mut()?.growing;
            growing.retain(|&place| place != (id, index));
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
        let busy = slot.is_busy() || slot.broken || !slot.sleep_state.is_awake();
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
        let precommitted = offset.saturating_sub(block.used);
        if precommitted >= block.pace.low || slot.stuck_at(offset, step) {
            return None;
        }
        let zeroed = slot.block.as_ref().is_some_and(|block| block.zeroed);
        if step > self.budget.available_to(id) || self.budget.mappings_left() == 0 {
            return None;
        }
        let unmapped = self.free_list.take(step, (!zeroed).then_some(id.0), false);
        if unmapped.is_none() {
            if self.budget.creatable() < step {
                return None;
            }
            self.budget.created(step);
        }
        self.budget.charge(id, step);
        self.budget.charge_mappings(id, 1);
        let mut slot = self.take_slot(id, index)?;
        slot.coming = step;
        let target = slot.space.target();
        self.put_slot(id, index, slot);
        Some(Job {
            tenant: id,
            slot: index,
            offset,
            size: step,
            unmapped,
            target,
        })
    }

    /// Bytes that are to be ready and are not, and that could be.
    fn lacks_free(&self) -> u64 {
        let free_target = self
            .precommit
            .as_ref()
            .map_or(0, |precommit| precommit.free_target);
        free_target.saturating_sub(self.free_list.bytes() + self.budget.creatable())
    }

    /// When to look again for memory that will be taken back once its fences have passed.
    fn look_again(&self) -> Option<Duration> {
        let draining = |tenancy: &Tenancy| {
            !tenancy.registered && tenancy.next_giving(Give::Cached, None).is_some()
        };
        if self.has_purging() || self.tenants.values().any(draining) {
            Some(LOOK_AGAIN)
        } else {
            (self.lacks_free() > 0).then_some(LOOK_FOR_MORE)
        }
    }
}

impl Locked<'_> {
    /// Calls the mapper, when the lock is let go, if there is work behind.
    pub(crate) fn look_behind(&mut self) {
        let lacks = self.lacks_free() > 0;
        if let Some(precommit) = self.precommit.as_mut().filter(|_| lacks) {
            precommit.call(Urgency::Soon);
        }
    }

    /// Takes in what was placed, or books back what was not.
    fn finish_precommit(
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
        let mut back = Vec::new();
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
                        self.budget.not_created(size);
                        tracing::debug!(%error, size, "nothing could be created ahead");
                    }
                    Failure::Place(failed) => {
                        let PlaceFailure {
                            error,
                            physicals,
                            stuck,
                        } = *failed;
                        tracing::debug!(%error, size, "nothing could be placed ahead");
                        let count = stuck.len() as u64;
                        let bytes = slot.space.keep_stuck(stuck);
                        self.set_aside(&mut slot, bytes, count);
                        back = physicals;
                    }
                }
            }
        }
        // The block may be gone by now.
        self.lay_down(id, index, slot);
        self.put_back(back);
        self.collect_if_draining(id);
        // What failed is tried again when the block grows, not at once and for ever.
        if placed {
            self.ask_precommit(id, index);
        }
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
        let purged = self.purge_some() > 0;
        let lacking = self.lacks_free().min(self.policy.largest_extent);
        if lacking == 0 {
            return purged;
        }
        // Nobody in particular asks, so everybody's guarantee counts.
        match self.take_back_any(TenantId(u64::MAX), lacking) {
            Ok(got) => purged || got > 0,
            Err(error) => {
                tracing::warn!(%error, "idle memory stays mapped for now");
                false
            }
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
    fn carry_out(self, core: &Core, policy: &Policy) -> Result<Placed, Failure> {
        let unmapped = match self.unmapped {
            Some(unmapped) => unmapped,
            None => {
                let created = core.create(policy, self.size);
                Unmapped::fresh(created.map_err(Failure::Create)?)
            }
        };
        self.target
            .place(self.offset, unmapped)
            .map_err(|failed| Failure::Place(Box::new(failed)))
    }
}

impl Core {
    /// Attaches a mapper to the pool.
    pub(crate) fn attach(core: &Arc<Self>, waker: Waker, free_target: u64) {
        core.device.count_apart(waker.thread());
        // After a refused `close` it is there already: a pool has one mapper in its life.
        core.waker.get_or_init(|| waker.clone());
        Self::reattach(core, Precommit::new(waker, free_target));
    }

    /// Attaches the mapper again that was [detached](Self::detach).
    pub(crate) fn reattach(core: &Arc<Self>, mut precommit: Precommit) {
        let weak = Arc::downgrade(core);
        precommit.attached = precommit.waker.attach(weak);
        let mut state = core.lock();
        state.precommit = Some(precommit);
        state.remind_mapper();
        Self::let_go(state);
    }

    /// Whether a mapper looks after the pool. Takes no lock.
    pub(crate) fn has_mapper(&self) -> bool {
        self.waker.get().is_some_and(|waker| !waker.is_dead())
    }

    /// Ends that, once the mapper's thread is out of it; returns what to attach again.
    pub(crate) fn detach(&self) -> Option<Precommit> {
        let precommit = self.lock().precommit.take()?;
        precommit.waker.detach(precommit.attached);
        Some(precommit)
    }
}

impl MapperWork for Core {
    fn work(&self, stop: &AtomicBool) -> Option<Duration> {
        while !stop.load(Ordering::Acquire) {
            let mut state = self.lock();
            let Some(job) = state.begin_precommit() else {
                break;
            };
            let policy = state.policy;
            drop(state);
            let (place, size) = ((job.tenant, job.slot), job.size);
            let outcome = job.carry_out(self, &policy);
            let mut state = self.lock();
            while state.is_out(place.0, place.1) {
                state = state.wait(&self.settled, None);
            }
            state.finish_precommit(place, size, outcome);
            // Before what users gave is dropped, which may take its time.
            self.settled.notify_all();
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
