//! A pool in a [ledger](crate::ledger): requests that wait for other processes, and memory that other
//! processes wait for.

use std::sync::{Arc, PoisonError};

use super::budget::TenantId;
use super::joined::Joined;
use crate::error::{BlockError, CallError};
use crate::ledger::Member;
#[cfg(target_os = "linux")]
use crate::ledger::{Giver, Hook, PoolReport, TenantReport};
use crate::pool::core::{Core, Locked};
#[cfg(target_os = "linux")]
use crate::pool::stats::TenantStats;
use crate::sync::atomic::AtomicUsize;
#[cfg(target_os = "linux")]
use crate::sync::atomic::Ordering;
use crate::sync::{Mutex, MutexGuard};
#[cfg(target_os = "linux")]
use crate::wanted::Change;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// Makes a ledger grant the pool's memory. Called once, before the pool is used.
    pub(in crate::pool) fn join(core: &Arc<Self>, member: &Arc<Member>) {
        core.look(|state| state.memory.budget.needs_grants());
        core.ledger.get_or_init(|| Joined {
            member: Arc::clone(member),
            attached: Mutex::new(None),
            queued: Mutex::new(None),
            awaiting: AtomicUsize::new(0),
        });
        Self::attach_to_ledger(core);
    }

    /// Makes the ledger's thread call the pool when other processes need memory.
    pub(in crate::pool) fn attach_to_ledger(core: &Arc<Self>) {
        if let Some(joined) = core.ledger.get()
            && !core.device.is_forked()
        {
            let giver = Arc::downgrade(core);
            *lock(&joined.attached) = Some(joined.member.givers().attach(giver));
        }
    }

    /// Ends these calls, and waits until the ledger's thread has returned from the last.
    pub(in crate::pool) fn detach_from_ledger(&self) {
        if let Some(joined) = self.ledger.get()
            && !self.device.is_forked()
        {
            // Not locked while `detach` waits: the ledger's thread may be waiting for the pool.
            let number = lock(&joined.attached).take();
            number.inspect(|&number| joined.member.givers().detach(number));
        }
    }
}

impl Locked<'_> {
    /// Refuses a new block while idle memory is owed to an older request of another process.
    pub(in crate::pool) fn leave_to_others(
        &mut self,
        id: TenantId,
        bytes: u64,
    ) -> Result<(), BlockError> {
        if bytes == 0 || !self.memory.line.others_lack() {
            return Ok(());
        }
        let Some(joined) = self.core().ledger.get() else {
            return Ok(());
        };
        let (granted, place) = (self.memory.budget.totals().granted, self.place);
        // Memory that a guarantee keeps and nothing uses is not in use.
        let in_use = || self.memory.budget.ids().map(|id| self.kept_by(id)).sum();
        match joined.member.owes(bytes, granted, place, in_use) {
            Some(refused) => Err(self.short_of(id, bytes, 0, Some(refused))),
            None => Ok(()),
        }
    }

    /// Returns the bytes that could go back to the ledger now.
    fn idle_bytes(&mut self) -> u64 {
        // No tenant makes the request, so every tenant's guarantee counts.
        let (_, others) = self.reach(TenantId::NONE);
        let (gained, free) = (others.gained(), self.memory.supply.free());
        self.memory.budget.unneeded_after(gained, gained + free)
    }

    fn need_at_most(&mut self, keep: u64) -> Result<(), CallError> {
        self.purge_all();
        let over = self.memory.budget.spoken_for().saturating_sub(keep);
        if over > 0 {
            // For no tenant, too.
            self.take_back_any(TenantId::NONE, over)?;
        }
        // Free memory that a guarantee promises would stay granted after its release.
        let keep = keep.max(self.memory.budget.spoken_for());
        if self.memory.budget.totals().obtained > keep {
            self.trim(keep)?;
        }
        Ok(())
    }
}

#[cfg(target_os = "linux")]
impl Core {
    /// Works for another process, unless the device is lost or this process a forked child.
    fn if_usable<T: Default>(&self, work: impl FnOnce(&mut Locked<'_>) -> T) -> T {
        if self.device.usable().is_err() {
            return T::default();
        }
        let mut state = self.lock();
        let outcome = work(&mut state);
        Self::unlock(state);
        outcome
    }
}

#[cfg(target_os = "linux")]
impl Giver for Core {
    fn idle(&self) -> u64 {
        self.if_usable(|state| state.idle_bytes())
    }

    fn give_back(&self, bytes: u64) {
        let given = self.if_usable(|state| {
            let keep = state.memory.budget.totals().granted.saturating_sub(bytes);
            let given = state.need_at_most(keep);
            state.return_unneeded(0);
            given.err()
        });
        if let Some(error) = given {
            log!(warn, %error, "memory that another process needs stays for now");
        }
    }

    fn next_hook(&self, bytes: u64, wanted_by: &str, asked: &[u64]) -> Option<(u64, Hook)> {
        let asked: Vec<TenantId> = asked.iter().map(|&id| TenantId(id)).collect();
        let next = |state: &mut Locked<'_>| state.next_hook_for_process(bytes, wanted_by, &asked);
        let hook_call = self.if_usable(next)?;
        Some((hook_call.to().0, Box::new(move || hook_call.call())))
    }

    fn read_driver_memory(&self) {
        self.tidy_driver_memory();
    }

    fn give_unneeded(&self) {
        self.if_usable(|state| state.return_unneeded(0));
    }

    fn leave_idle_to_others(&self, yes: bool) {
        // Counted as a waiting request: freed blocks are announced instead of going to a stream
        // cache.
        let changed = self.look(|state| state.memory.line.set_others_lack(yes));
        match changed {
            true if yes => self.waiting.fetch_add(1, Ordering::SeqCst),
            true => self.waiting.fetch_sub(1, Ordering::SeqCst),
            false => 0,
        };
    }

    fn report(&self) -> PoolReport {
        let (granted, stats) =
            self.look(|state| (state.memory.budget.totals().granted, state.stats()));
        PoolReport {
            limit: stats.limit,
            granted,
            committed: stats.committed,
            free: stats.free,
            quarantined: stats.quarantined,
            tenants: stats.tenants.into_iter().map(tenant).collect(),
        }
    }

    fn change(&self, tenant: &str, change: Change) -> Option<Result<u64, String>> {
        let id = self.look(|state| state.memory.budget.find(tenant))?;
        let changed = self.change_terms(id, change).map(|it| it.excess);
        Some(changed.map_err(|error| error.to_string()))
    }
}

#[cfg(target_os = "linux")]
fn tenant(stats: TenantStats) -> TenantReport {
    TenantReport {
        name: stats.name,
        draining: stats.draining,
        guarantee: stats.guarantee,
        limit: stats.limit,
        priority: stats.priority,
        committed: stats.committed,
        in_use: stats.in_use + stats.shared,
        cached: stats.cached,
        pending_free: stats.pending_free,
        precommitted: stats.precommitted,
        leased: stats.leased,
        asleep: stats.asleep,
        blocks: stats.blocks,
        refusals: stats.refusals,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::extents::rig::{G, rig};
    use crate::ledger::Ledger;
    use crate::pool::{Limit, Pool};

    #[test]
    fn idle_memory_wakes_threads_that_wait_for_refunds() {
        let rig = rig();
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::builder(&rig.device, dir.path()).limit(8 * G);
        let ledger = ledger.open().unwrap();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.ledger(&ledger).build().unwrap();
        let joined = pool.core.ledger.get().unwrap();
        pool.core.waiting.fetch_add(1, Ordering::SeqCst);
        let before = joined.member.wake_ups();
        pool.core.announce();
        assert_eq!(joined.member.wake_ups(), before, "no thread waits there");
        joined.awaiting.fetch_add(1, Ordering::SeqCst);
        pool.core.announce();
        assert_eq!(joined.member.wake_ups(), before + 1);
        joined.awaiting.fetch_sub(1, Ordering::SeqCst);
        pool.core.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
