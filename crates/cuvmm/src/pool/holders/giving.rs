//! Taking memory back from [holders](super::holder).
//!
//! The pool asks under the lock how much a holder can give; the memory is unmapped without the
//! lock, and the charge ends under the lock again. The extents then go to the free list. An extent
//! whose size is not a power of two goes to the driver, because blocks are made of extents of such
//! sizes only. Memory that the driver's pools give is with the driver already: only its charge
//! ends.
//!
//! Keeps I-120.

use std::sync::Arc;

use super::held::{Held, HolderId};
use super::holder::Given;
use crate::error::CallError;
use crate::extents::Space;
use crate::pool::accounts::{Amount, TenantId};
use crate::pool::core::Locked;
use crate::pool::state::State;
use crate::wanted::Purpose;

/// A holder that the mapper tidies. The end of this value lets the holder go, also after a panic of
/// the driver: the next operation then removes it if it has ended.
struct Tidying<'b, 'a>(&'b mut Locked<'a>, HolderId);

impl Drop for Tidying<'_, '_> {
    fn drop(&mut self) {
        let Self(state, id) = self;
        if let Some(held) = state.memory.holders.get_mut(*id) {
            held.tidied = false;
        }
        state.memory.has_deferred |= std::thread::panicking();
    }
}

/// Memory that is leaving a holder. The drop of this value ends the charge for what has left, also
/// after a panic of the driver.
struct Leaving<'b, 'a> {
    state: &'b mut Locked<'a>,
    id: HolderId,
    given: Given,
}

impl Drop for Leaving<'_, '_> {
    fn drop(&mut self) {
        let given = std::mem::take(&mut self.given);
        self.state.memory.has_deferred |= std::thread::panicking();
        self.state.receive(self.id, given);
    }
}

impl Locked<'_> {
    /// Lets `take` unmap memory of a holder, and ends the charge for it. Returns the bytes, and the
    /// error that ended the taking. Releases the lock.
    pub(super) fn receive_from(
        &mut self,
        id: HolderId,
        take: impl FnOnce(&mut Given),
    ) -> (u64, Option<CallError>) {
        let mut leaving = Leaving {
            state: self,
            id,
            given: Given::default(),
        };
        let Leaving { state, given, .. } = &mut leaving;
        state.unlocked(|| take(given));
        (leaving.given.bytes(), leaving.given.error.take())
    }

    /// Takes at most about `wanted` bytes. Returns their number.
    pub(in crate::pool) fn take_from_holder(
        &mut self,
        id: HolderId,
        wanted: u64,
    ) -> Result<u64, CallError> {
        let Some(holder) = self.memory.holders.holder(id) else {
            return Ok(0);
        };
        if self.memory.gate.is_capturing() && holder.is_of_driver() {
            return Ok(0);
        }
        let (bytes, error) = self.receive_from(id, move |given| holder.give(wanted, given));
        if self.memory.holders.get(id).is_some_and(Held::is_untidy) {
            self.tidy_soon(id);
        }
        self.forget_holder(id);
        error.map_or(Ok(bytes), Err)
    }

    /// Ends the charge for memory that left a holder, and gives its extents up. May release the
    /// lock.
    pub(super) fn receive(&mut self, id: HolderId, given: Given) {
        // Charged first, so that no process is granted bytes that are only counted. Uncounted bytes
        // are foreign to the ledger, and may leave too little for the charge.
        self.charge_overdrawn(id, given.overdrawn);
        self.count_obtained(id);
        if given.is_nothing() {
            // Another thread may have taken the last extents, and removed the holder.
            if given.overdrawn > 0 {
                self.cover_overdrawn();
            }
            return;
        }
        self.end_charge(id, Amount::of(given.bytes(), given.mappings, 0));
        if given.returned > 0 {
            self.note_returned(given.returned);
        }
        self.put_back(given.extents);
        if given.overdrawn > 0 {
            self.cover_overdrawn();
        }
    }

    /// Ends the charge for bytes and mappings of a holder.
    pub(super) fn end_charge(&mut self, id: HolderId, amount: Amount) {
        let Some(held) = self.memory.holders.get_mut(id) else {
            debug_assert!(false, "extents come from a holder that is gone");
            return;
        };
        held.bytes -= amount.bytes;
        held.mappings -= amount.mappings;
        self.memory.budget.give_up(id.tenant(), amount);
    }

    /// Makes the ledger grant the bytes that tenants are charged beyond its grants. If it refuses,
    /// takes what it has left, and the ledger's thread asks again later. Releases the lock.
    pub(super) fn cover_overdrawn(&mut self) {
        // No tenant: only the sum of all charges counts.
        let refused = self.grant_for(TenantId::NONE, 0, Purpose::Growth);
        self.memory.holders.is_uncovered = refused.is_some();
        if let Some(refused) = refused {
            let lacking = self.memory.budget.lacks_grant(TenantId::NONE, 0);
            self.grant(lacking.min(refused.left), 0, Purpose::Growth);
        }
    }

    pub(super) fn count_obtained(&mut self, id: HolderId) {
        let Some(held) = self.memory.holders.get_mut(id) else {
            return;
        };
        let now = held.holder.figures().obtained;
        let before = std::mem::replace(&mut held.obtained, now);
        if let Some(joined) = self.core().ledger.get() {
            joined.member.note_read(before, now);
        }
    }

    /// Charges memory that the driver held beyond the charge, even beyond the limits, and makes the
    /// ledger grant it if it can. Releases the lock.
    fn charge_overdrawn(&mut self, id: HolderId, bytes: u64) {
        let Some(held) = self.memory.holders.get_mut(id).filter(|_| bytes > 0) else {
            return;
        };
        held.bytes += bytes;
        let holder = Arc::clone(&held.holder);
        let of = Amount::bytes(bytes);
        self.memory.budget.hold(id.tenant(), of);
        self.memory.budget.created(bytes);
        self.unlocked(move || holder.acknowledge(bytes));
        self.grant_for(id.tenant(), 0, Purpose::Growth);
        log!(
            warn,
            bytes,
            "a memory pool of the driver held more than was charged"
        );
    }

    /// Asks the mapper, if there is one, to tidy a holder.
    pub(super) fn tidy_soon(&mut self, id: HolderId) {
        if self.blocks.call_mapper() {
            self.memory.holders.list(id);
        }
    }

    /// Makes the listed holders give up unused memory. Makes no driver call while a capture guard
    /// lives.
    pub(in crate::pool) fn tidy_holders(&mut self) {
        if self.memory.gate.is_capturing() {
            return;
        }
        for id in self.memory.holders.take_listed() {
            let Some(held) = self.memory.holders.get_mut(id) else {
                continue;
            };
            held.tidied = true;
            let holder = Arc::clone(&held.holder);
            let tidying = Tidying(self, id);
            // Polls.
            holder.reclaimable(true);
            let given = tidying.0.unlocked(move || holder.tidy());
            tidying.0.receive(id, given);
            drop(tidying);
            if self.memory.holders.get(id).is_some_and(Held::is_untidy) {
                self.memory.holders.list(id);
            }
            self.forget_holder(id);
        }
    }

    /// Takes all that ended holders, and holders of draining tenants, can give, and removes empty
    /// holders.
    pub(in crate::pool) fn purge_holders(&mut self) {
        let ends = |state: &State, id: HolderId| {
            let ended = state.memory.holders.get(id).is_some_and(|held| held.ended);
            ended || state.memory.budget.account(id.tenant()).drains
        };
        if let Err(error) = self.empty_holders(ends) {
            log!(warn, %error, "memory of a heap or memory pool that ended stays for now");
        }
    }

    /// Takes all unused memory and addresses of the holders for which `chosen` returns `true`.
    /// Returns the first error at the end. Releases the lock.
    pub(in crate::pool) fn empty_holders(
        &mut self,
        chosen: impl Fn(&State, HolderId) -> bool,
    ) -> Result<(), CallError> {
        let mut outcome = Ok(());
        for id in self.memory.holders.ids() {
            if chosen(self, id) {
                outcome = outcome.and(self.empty_holder(id).map(drop));
            }
        }
        outcome
    }

    fn empty_holder(&mut self, id: HolderId) -> Result<u64, CallError> {
        if let Some(held) = self.memory.holders.get(id) {
            // Polls.
            held.holder.reclaimable(!self.memory.gate.is_capturing());
        }
        let taken = self.take_from_holder(id, u64::MAX);
        self.return_addresses(id);
        taken
    }

    /// Frees addresses that a holder does not use (`cuMemAddressFree`), unless the thread panics.
    /// Releases the lock.
    pub(super) fn return_addresses(&mut self, id: HolderId) {
        let holder = self.memory.holders.holder(id);
        let Some(holder) = holder.filter(|_| !std::thread::panicking()) else {
            return;
        };
        let free = holder.take_free_spaces();
        // All at once: the lock is released for each space.
        let bytes = free.iter().map(Space::addresses).sum();
        self.memory.holders.subtract_addresses(id, bytes);
        for space in free {
            let bytes = space.addresses();
            self.memory.budget.disown_addresses(id.tenant(), bytes);
            self.give_space_back(space);
        }
    }

    /// Waits for the work on all memory of a tenant's holders and takes the memory, at the end of
    /// the pool.
    pub(in crate::pool) fn drain_holders(&mut self, tenant: TenantId) -> Result<(), CallError> {
        let mut outcome = Ok(());
        let of_tenant = self.memory.holders.of(tenant).iter().map(|held| held.id);
        for id in of_tenant.collect::<Vec<_>>() {
            let Some(holder) = self.memory.holders.holder(id) else {
                continue;
            };
            let settled = self.unlocked(move || holder.settle());
            let taken = settled.and_then(|()| self.take_from_holder(id, u64::MAX));
            let used = |held: &Held| held.holder.is_of_driver() && held.bytes > 0;
            let taken = match self.memory.holders.get(id).is_some_and(used) {
                // Allocations of another library live.
                true => taken.and(Err(CallError::InUse)),
                false => taken.map(drop),
            };
            outcome = outcome.and(taken);
        }
        outcome
    }

    /// Removes a holder whose owner is gone and that has nothing left.
    pub(super) fn forget_holder(&mut self, id: HolderId) {
        let done = |held: &Held| held.ended && held.bytes == 0 && !held.tidied;
        if !self.memory.holders.get(id).is_some_and(done) {
            return;
        }
        let Some(held) = self.memory.holders.remove(id) else {
            return;
        };
        let tenant = id.tenant();
        // The addresses stay reserved with the mappings that are stuck in them.
        self.memory.budget.disown_addresses(tenant, held.addresses);
        let stuck = Amount::mappings(held.mappings);
        self.memory.budget.give_up(tenant, stuck);
        self.memory.budget.quarantine(0, held.mappings);
        for space in held.holder.take_spaces() {
            self.give_space_back(space);
        }
        self.unlocked(move || drop(held));
        self.forget_if_drained(tenant);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Mutex, TryLockError, mpsc};
    use std::thread;
    use std::time::{Duration, Instant};

    use cuvmm_driver::Ordinal;

    use super::*;
    use crate::error::BlockError;
    use crate::extents::Space;
    use crate::extents::rig::{G, rig};
    use crate::ledger::Ledger;
    use crate::pool::holders::holder::{Holder, HolderFigures};
    use crate::pool::{Lending, Limit, Pool, Tenant, Wait};

    /// A holder that acts while a mapping of it is unmapped.
    #[derive(Default)]
    struct Tidied {
        space: Mutex<Option<Space>>,
        meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
        has_given: AtomicBool,
        /// Set if the driver panics when the holder gives memory.
        breaks: AtomicBool,
        /// Set if the holder asks to be tidied again.
        asks: AtomicBool,
        /// The bytes seen to be held: the first value once, the other from then on.
        holds: [AtomicU64; 2],
        was_seen: AtomicU64,
    }

    impl Holder for Tidied {
        fn figures(&self) -> HolderFigures {
            HolderFigures {
                obtained: self.was_seen.load(Ordering::SeqCst),
                ..HolderFigures::default()
            }
        }

        fn obtained(&self) -> u64 {
            let [once, then] = &self.holds;
            once.swap(then.load(Ordering::SeqCst), Ordering::SeqCst)
        }

        fn reclaimable(&self, _: bool) -> Vec<u64> {
            Vec::new()
        }

        fn give(&self, _: u64, _: &mut Given) {
            assert!(!self.breaks.load(Ordering::SeqCst), "on purpose");
            self.has_given.store(true, Ordering::SeqCst);
        }

        fn is_untidy(&self) -> bool {
            self.asks.load(Ordering::SeqCst)
        }

        fn is_of_driver(&self) -> bool {
            self.asks.load(Ordering::SeqCst)
        }

        fn tidy(&self) -> Given {
            if let Some(act) = self.meanwhile.lock().unwrap().take() {
                act();
            }
            Given {
                mappings: self.space.lock().unwrap().iter().count() as u64,
                ..Given::default()
            }
        }

        fn settle(&self) -> Result<(), CallError> {
            Ok(())
        }

        fn report_freed(&self, _: bool) {}

        fn close(&self) {}

        fn take_spaces(&self) -> Vec<Space> {
            self.space.lock().unwrap().take().into_iter().collect()
        }
    }

    impl Tidied {
        /// Makes a holder of `tenant` with one mapping to unmap.
        fn of(tenant: &Tenant) -> (Arc<Self>, HolderId) {
            let this = Arc::new(Self::default());
            let holder = tenant.attach(Arc::clone(&this) as _).unwrap();
            let space = tenant.reserve(holder, 4 * G, 4 * G).unwrap();
            *this.space.lock().unwrap() = Some(space);
            let lent = tenant.lend(Lending {
                holder,
                sizes: &[],
                mappings: 1,
                zeroes: false,
                whole: false,
                claims: true,
                place: None,
            });
            assert!(lent.unwrap().is_empty());
            (this, holder)
        }

        /// Unmaps the mapping as the mapper does, and calls `act` meanwhile.
        fn tidy_and(&self, tenant: &Tenant, id: HolderId, act: impl FnOnce() + Send + 'static) {
            *self.meanwhile.lock().unwrap() = Some(Box::new(act));
            let mut state = tenant.core().lock();
            state.memory.holders.list(id);
            state.tidy_holders();
        }
    }

    #[test]
    fn requests_that_wait_hear_of_mappings_that_came_free_before_a_refusal() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.mapping_limit(1).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let (_holder, id) = Tidied::of(&tenant);
        assert!(tenant.try_allocate(G).is_err());
        // One request waits.
        pool.core.waiting.fetch_add(1, Ordering::SeqCst);
        let told = tenant.told();
        let (given, error) = tenant.give_up_by(id, false, |given| {
            given.mappings = 1;
            given.error = Some(CallError::InUse);
        });
        assert_eq!((given.bytes, error.is_some()), (0, true));
        // Of the end of the operation, and of what came free.
        assert_eq!(tenant.told(), told + 2);
        pool.core.waiting.fetch_sub(1, Ordering::SeqCst);
        drop(tenant.try_allocate(G).unwrap());
    }

    #[test]
    fn a_holder_that_ends_while_it_is_tidied_stays_until_its_mappings_are_counted() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let (tidied, id) = Tidied::of(&tenant);
        let owner = tenant.clone();
        tidied.tidy_and(&tenant, id, move || owner.detach(id));
        let state = tenant.core().lock();
        assert!(state.memory.holders.get(id).is_none());
        drop(state);
        assert_eq!(pool.stats().quarantined, 0);
    }

    #[test]
    fn a_holder_that_ends_while_the_driver_panics_is_removed_by_the_next_operation() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let (tidied, id) = Tidied::of(&tenant);
        let owner = tenant.clone();
        let breaks = || {
            tidied.tidy_and(&tenant, id, move || {
                owner.detach(id);
                panic!("on purpose");
            });
        };
        assert!(catch_unwind(AssertUnwindSafe(breaks)).is_err());
        drop(tenant.core().lock());
        assert!(tenant.core().lock().memory.holders.get(id).is_none());
        // Its mapping was not counted as unmapped.
        assert_eq!(pool.stats().mappings, 1);
    }

    // I-109
    #[test]
    fn a_pool_is_not_locked_after_a_panic_in_work_that_was_put_off_and_the_next_operation_does_it()
    {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let (holder, id) = Tidied::of(&tenant);
        holder.breaks.store(true, Ordering::SeqCst);
        let detach = || tenant.detach(id);
        assert!(catch_unwind(AssertUnwindSafe(detach)).is_err());
        let is_free = !matches!(
            tenant.core().state.try_lock(),
            Err(TryLockError::WouldBlock)
        );
        assert!(is_free);
        holder.breaks.store(false, Ordering::SeqCst);
        drop(tenant.core().lock());
        assert!(tenant.core().lock().memory.holders.get(id).is_none());
        assert!(holder.has_given.load(Ordering::SeqCst));
    }

    #[test]
    fn what_a_holder_can_give_is_asked_when_the_mapper_is_done_with_it() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let (tidied, id) = Tidied::of(&tenant);
        let (asker, gives) = (tenant.clone(), Arc::clone(&tidied));
        let (send, sent) = mpsc::channel();
        tidied.tidy_and(&tenant, id, move || {
            let asking = thread::spawn(move || asker.take_from(id, u64::MAX).unwrap());
            // A thread that does not wait asks within this time.
            let patience = Instant::now() + Duration::from_millis(50);
            while Instant::now() < patience {
                assert!(!gives.has_given.load(Ordering::SeqCst));
                thread::yield_now();
            }
            send.send(asking).unwrap();
        });
        assert_eq!(sent.recv().unwrap().join().unwrap(), 0);
        assert!(tidied.has_given.load(Ordering::SeqCst));
        tenant.detach(id);
    }

    #[test]
    fn a_holder_that_is_asked_for_while_it_is_tidied_is_listed_once() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let (tidied, id) = Tidied::of(&tenant);
        tidied.asks.store(true, Ordering::SeqCst);
        let owner = tenant.clone();
        tidied.tidy_and(&tenant, id, move || {
            owner.core().lock().memory.holders.list(id);
        });
        let mut state = tenant.core().lock();
        assert_eq!(state.memory.holders.take_listed(), [id]);
        drop(state);
        tenant.detach(id);
    }

    #[test]
    fn what_the_driver_may_hold_is_left_to_it_as_soon_as_it_is_charged() {
        let rig = rig();
        let total = rig.device.total_memory();
        let pool = Pool::builder(&rig.device).limit(Limit::LeaveFree(total - 8 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let fake = Arc::new(Tidied {
            asks: AtomicBool::new(true),
            ..Tidied::default()
        });
        let holder = tenant.attach(Arc::clone(&fake) as _).unwrap();
        // The driver's pool is not created yet.
        let charged = tenant.charge_driver_memory(holder, 6 * G, Wait::Never);
        charged.unwrap();
        let refused = tenant.try_allocate(4 * G);
        assert!(matches!(refused, Err(BlockError::OutOfMemory(_))));
        let other = pool.tenant("b").register().unwrap();
        assert_eq!(other.try_allocate(2 * G).unwrap().size(), 2 * G);
        let core = tenant.core();
        let policy = core.lock().memory.policy;
        pool.trim(0).unwrap();
        let create = |bytes| core.create(&policy, bytes, &mut core.room(0));
        assert!(create(3 * G).is_err());
        assert!(create(2 * G).is_ok());
        // The holder returns memory meanwhile, which is free, and which it may have again.
        fake.holds[0].store(6 * G, Ordering::SeqCst);
        assert!(create(3 * G).is_err());
        let given = Given {
            returned: 6 * G,
            ..Given::default()
        };
        tenant.give_up(holder, given);
        tenant.detach(holder);
    }

    #[test]
    fn what_the_driver_holds_beyond_its_charge_is_charged_in_the_ledger() {
        let rig = rig();
        let directory = tempfile::tempdir().unwrap();
        let total = rig.device.total_memory();
        let ledger = Ledger::builder(&rig.device, directory.path()).limit(total);
        let ledger = ledger.open().unwrap();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(total));
        let pool = pool.ledger(&ledger).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let fake = Arc::new(Tidied {
            asks: AtomicBool::new(true),
            ..Tidied::default()
        });
        let holder = tenant.attach(Arc::clone(&fake) as _).unwrap();
        // Some of the device's memory, and all of it, which is foreign until it is counted.
        for (bytes, more) in [(2 * G, 2 * G), (total, total - 2 * G)] {
            rig.machine.set_used_elsewhere(Ordinal(0), bytes);
            fake.was_seen.store(bytes, Ordering::SeqCst);
            let given = Given {
                overdrawn: more,
                ..Given::default()
            };
            tenant.core().lock().receive(holder, given);
            assert!(ledger.stats().charged >= bytes);
        }
        rig.machine.set_used_elsewhere(Ordinal(0), 0);
        fake.was_seen.store(0, Ordering::SeqCst);
        let returned = Given {
            returned: total,
            ..Given::default()
        };
        tenant.give_up(holder, returned);
        tenant.detach(holder);
    }
}
