//! The work of the mapper's thread for a pool: it places memory ahead of blocks that grow, and
//! reclaims memory ahead of requests.
//!
//! Memory is placed ahead in three steps. Under the lock it is charged and the slot marked as busy;
//! without the lock the driver maps it; under the lock again the slot gets the extent. Meanwhile
//! the block grows into its precommitted memory, and only a block that has used all of it waits.
//!
//! Keeps I-131.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::pace::Precommit;
use crate::error::MemoryError;
use crate::extents::{MapperWork, PlaceError, Placed, Target, Unmapped, Waker};
use crate::growth::Steps;
use crate::pool::accounts::{Amount, TenantId};
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::SlotId;
use crate::pool::core::{Core, Locked};
use crate::pool::memory::{Memory, Policy};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::wanted::Purpose;

/// How often the mapper checks the memory of unregistered tenants until its fences are complete.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// How often the mapper looks for memory for the free target, or beyond a lowered limit, while none
/// is available.
const LOOK_FOR_MORE: Duration = Duration::from_millis(20);

/// An extent to be placed without the lock.
struct Job {
    slot: SlotId,
    offset: u64,
    size: u64,
    /// From the free list; if `None`, created.
    unmapped: Option<Unmapped>,
    target: Target,
}

impl Blocks {
    /// Charges the next extent to be placed ahead, and marks its slot.
    fn begin_precommit(&mut self, memory: &mut Memory) -> Option<Job> {
        loop {
            let mut growing = self.precommit.as_ref()?.growing.iter().copied();
            let id = growing.find(|&id| !self.slots.is_out(id))?;
            let growing = &mut self.precommit.as_mut()?.growing;
            growing.retain(|&slot| slot != id);
            if let Some(job) = self.prepare(memory, id) {
                // The memory can be given up once it is placed, so other operations may wait for it.
                memory.gate.begin_placing();
                return Some(job);
            }
        }
    }

    fn prepare(&mut self, memory: &mut Memory, id: SlotId) -> Option<Job> {
        let (granule, tenant) = (self.granule, id.tenant);
        let registered = memory.budget.account(tenant).registered;
        let slot = self.slots.get_mut(id)?;
        let offset = slot.space.bytes();
        let busy = slot.is_busy() || slot.broken || !slot.sleep_state.is_awake();
        let sizes = slot.class.sizes;
        let block = slot.block.as_mut()?;
        block.pace.called = false;
        if busy || !registered {
            return None;
        }
        let steps = Steps::of_block(granule, block.growth, sizes);
        let step = steps.extent(block.used, offset, block.most)?;
        block.pace.learn(block.used, step);
        let precommitted = offset.saturating_sub(block.used);
        if precommitted >= block.pace.low || slot.stuck_at(offset, step) {
            return None;
        }
        let zeroed = slot.block.as_ref().is_some_and(|block| block.zeroed);
        if step > memory.budget.available_to(tenant) || memory.budget.totals().left.mappings == 0 {
            if let Some(precommit) = &mut self.precommit {
                precommit.lacking = Some((id, step));
            }
            return None;
        }
        let own = (!zeroed).then_some(tenant.0);
        let unmapped = memory.supply.take_unscrubbed(step, own);
        if unmapped.is_none() {
            if memory.budget.totals().left.bytes < step {
                return None;
            }
            memory.budget.created(step);
        }
        let charge = memory.budget.charge(Some(tenant), Amount::of(step, 1, 0));
        // The bytes are the slot's from here on.
        memory.budget.keep(charge);
        self.with_slot(id, |slot| {
            slot.coming = step;
            Job {
                slot: id,
                offset,
                size: step,
                unmapped,
                target: slot.space.target(),
            }
        })
    }

    /// Returns the time until memory is to be looked for again whose fences may then be complete.
    fn look_again(&self, memory: &Memory) -> Option<Duration> {
        // Nothing is reclaimed on a lost context.
        if memory.device.lost().is_some() {
            return None;
        }
        match self.queues.are_empty() {
            true => {
                let later =
                    memory.lowered || self.lacks_free(memory) > 0 || memory.holders.is_untidy();
                later.then_some(LOOK_FOR_MORE)
            }
            false => Some(LOOK_AGAIN),
        }
    }
}

impl Locked<'_> {
    /// Makes a ledger grant the bytes that [`Precommit::lacking`] names; returns `true` if it did.
    fn grant_lacking(&mut self) -> bool {
        let precommit = self.blocks.precommit.as_mut();
        let Some((slot, step)) = precommit.and_then(|it| it.lacking.take()) else {
            return false;
        };
        let missing = self.memory.budget.lacks_grant(slot.tenant, step) > 0;
        let granted = missing && self.grant_for(slot.tenant, step, Purpose::New).is_none();
        if granted {
            self.blocks.request_precommit(slot);
        }
        granted
    }

    /// Adds the placed extent to its slot, or refunds it. Returns the driver's panic.
    fn finish_precommit(
        &mut self,
        (id, size): (SlotId, u64),
        outcome: Result<Placed, Failure>,
    ) -> Option<Panic> {
        self.memory.gate.end_placing();
        let placed = outcome.is_ok();
        let slot = self.blocks.slots.take(id);
        if slot.is_none() || !placed {
            let lost = Amount::of(size, 1, 0);
            self.memory.budget.give_up(id.tenant, lost);
        }
        let Some(mut slot) = slot else {
            // Lost to a panic: memory placed behind its block stays there for good.
            return match outcome {
                Err(Failure::Create(_)) => {
                    self.memory.budget.not_created(size);
                    None
                }
                Err(Failure::Panic(panic, mappings)) => {
                    self.memory.budget.quarantine(size, mappings);
                    Some(panic)
                }
                Ok(_) | Err(Failure::Place(_)) => {
                    self.memory.budget.quarantine(size, 1);
                    None
                }
            };
        };
        slot.coming = 0;
        let (mut back, mut panicked) = (Vec::new(), None);
        match outcome {
            Ok(placed) => {
                slot.space.adopt(placed);
                slot.space.settle(slot.space.bytes() - size);
            }
            Err(Failure::Create(error)) => {
                self.memory.budget.not_created(size);
                log!(debug, %error, size, "no memory could be created ahead of growth");
            }
            Err(Failure::Place(failed)) => {
                let error = &failed.error;
                log!(debug, %error, size, "no memory could be placed ahead of growth");
                self.set_aside(&mut slot, failed.stuck, 1);
                back = failed.physicals;
            }
            Err(Failure::Panic(panic, mappings)) => {
                self.memory.budget.quarantine(size, mappings);
                slot.broken |= mappings > 0;
                panicked = Some(panic);
            }
        }
        // The block may be gone by now.
        self.blocks.put_slot(slot);
        self.put_back(back);
        // A failed placement is tried again when the block grows, not at once and without end.
        if placed {
            self.blocks.request_precommit(id);
        }
        panicked
    }

    /// Purges a few slots, and reclaims one extent if the free target lacks memory. Returns `true`
    /// if there may be more to do.
    fn unmap_ahead(&mut self) -> bool {
        let purged = self.purge_some() + self.purge_draining() > 0;
        self.keep_to_limits();
        let largest = self.memory.policy.largest_extent;
        let lacking = self.blocks.lacks_free(&self.memory).min(largest);
        if lacking == 0 {
            return purged;
        }
        self.grant(lacking, self.piece(), Purpose::New);
        if self.blocks.lacks_free(&self.memory) == 0 {
            return purged;
        }
        // No tenant makes the request, so every tenant's guarantee counts.
        match self.take_back_any(TenantId::NONE, lacking) {
            Ok(got) => purged || got > 0,
            Err(error) => {
                log!(warn, %error, "idle memory stays mapped for now");
                false
            }
        }
    }
}

type Panic = Box<dyn Any + Send>;

enum Failure {
    Create(MemoryError),
    Place(Box<PlaceError>),
    /// The driver panicked, and may have created the memory and made this number of mappings.
    Panic(Panic, u64),
}

impl Job {
    fn carry_out(self, core: &Core, policy: &Policy) -> ((SlotId, u64), Result<Placed, Failure>) {
        let begun = (self.slot, self.size);
        let create = || match self.unmapped {
            Some(unmapped) => Ok(unmapped),
            None => {
                let created = core.create(policy, self.size, &mut core.room(0));
                created.map(Unmapped::fresh)
            }
        };
        let unmapped = match catch_unwind(AssertUnwindSafe(create)) {
            Ok(Ok(unmapped)) => unmapped,
            Ok(Err(error)) => return (begun, Err(Failure::Create(error))),
            Err(panic) => return (begun, Err(Failure::Panic(panic, 0))),
        };
        let place = || self.target.place(self.offset, unmapped);
        let placed = match catch_unwind(AssertUnwindSafe(place)) {
            Ok(placed) => placed.map_err(|failed| Failure::Place(Box::new(failed))),
            Err(panic) => Err(Failure::Panic(panic, 1)),
        };
        (begun, placed)
    }
}

impl Core {
    pub(crate) fn attach(core: &Arc<Self>, waker: Waker, free_target: u64) {
        core.device.count_apart(waker.thread());
        // Set already after a refused `close`: a pool has one mapper in its life.
        core.waker.get_or_init(|| waker.clone());
        Self::reattach(core, Precommit::new(waker, free_target));
    }

    pub(in crate::pool) fn reattach(core: &Arc<Self>, mut precommit: Precommit) {
        let weak = Arc::downgrade(core);
        precommit.attached = precommit.waker.attach(weak);
        let mut state = core.lock();
        state.blocks.precommit = Some(precommit);
        state.blocks.request_growth();
        let queued = state.memory.line.has_requests();
        Self::unlock(state);
        if !core.has_mapper() {
            core.fail_queue();
        } else if queued {
            core.call_mapper();
        }
    }

    /// Detaches the mapper, waiting until its thread has left the pool. Returns the state to
    /// [reattach](Self::reattach) it with.
    pub(crate) fn detach(&self) -> Option<Precommit> {
        let precommit = self.lock().blocks.precommit.take()?;
        precommit.waker.detach(precommit.attached);
        Some(precommit)
    }
}

impl MapperWork for Core {
    fn work(&self, stop: &AtomicBool) -> Option<Duration> {
        while !stop.load(Ordering::Acquire) {
            let mut state = self.lock();
            let (memory, blocks) = state.halves();
            let Some(job) = blocks.begin_precommit(memory) else {
                if state.grant_lacking() {
                    continue;
                }
                break;
            };
            let policy = state.memory.policy;
            drop(state);
            let slot = job.slot;
            let (begun, outcome) = job.carry_out(self, &policy);
            let mut state = self.lock_with(slot);
            let panicked = state.finish_precommit(begun, outcome);
            // Notified before values of users are dropped, which may take time.
            self.settled.notify_all();
            drop(state);
            if let Some(panic) = panicked {
                resume_unwind(panic);
            }
        }
        while !stop.load(Ordering::Acquire) {
            let mut state = self.lock();
            let more = state.unmap_ahead();
            drop(state);
            if !more {
                break;
            }
            self.announce();
        }
        self.lock().tidy_holders();
        let serve_again = self.serve(stop);
        let state = self.lock();
        let look_again = state.blocks.look_again(&state.memory);
        drop(state);
        [serve_again, look_again].into_iter().flatten().min()
    }

    fn ended(&self) {
        // A panic may have ended the thread while it placed memory.
        let mut state = self.lock();
        state.memory.gate.end_placing();
        drop(state);
        self.settled.notify_all();
        self.fail_queue();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::Call;

    use super::*;
    use crate::extents::Mapper;
    use crate::extents::rig::{G, rig};
    use crate::pool::{Limit, Pool};

    // I-131
    #[test]
    fn a_panic_while_memory_is_placed_ahead_leaves_no_charge_and_no_block_that_waits() {
        for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
            let rig = rig();
            let mapper = Mapper::start(&rig.device).unwrap();
            let pool = Pool::builder(&rig.device).limit(Limit::Bytes(64 * G));
            let pool = pool.mapper(&mapper).build().unwrap();
            // The work of its thread is done here.
            mapper.stop();
            let tenant = pool.tenant("a").register().unwrap();
            let block = tenant.block(16 * G).capacity(32 * G);
            let mut block = block.try_allocate().unwrap();
            let before = pool.stats();
            let grows = |state: &mut Locked<'_>| {
                let precommit = state.blocks.precommit.as_mut().unwrap();
                precommit.growing.push_back(block.place().slot);
            };
            grows(&mut pool.core.lock());
            rig.panic_at(call, 1);
            let work = || {
                pool.core.work(&AtomicBool::new(false));
            };
            assert!(catch_unwind(AssertUnwindSafe(work)).is_err());
            let after = pool.stats();
            assert_eq!(after.committed, before.committed, "{call:?}");
            assert!(after.quarantined > 0);
            // The addresses behind the block may have memory, unless none was mapped.
            let grown = block.try_grow_to(24 * G).is_ok();
            assert_eq!(grown, call == Call::MemCreate, "{call:?}");
            drop(block);
            pool.trim(0).unwrap();
            let stats = pool.stats();
            assert_eq!((stats.committed, stats.free), (0, 0), "{call:?}");
            let rest = 64 * G - stats.quarantined;
            assert_eq!(tenant.try_allocate(rest).unwrap().size(), rest);
        }
    }
}
