//! The figures of the driver's own memory pools, which only the driver knows. It is asked without
//! the lock: before memory is reclaimed, before memory is created if some has to stay free, by the
//! mapper, and by the ledger's thread.

use std::sync::Arc;

use super::held::Held;
use super::holder::{Given, Holder};
use crate::error::CallError;
use crate::pool::core::{Core, Locked};

impl Core {
    /// Returns the device's free memory (`cuMemGetInfo`), and the bytes that the driver's memory
    /// pools are charged and may still obtain. Each pool is read before and after that call, and
    /// the larger figure counts: memory that the pool returns meanwhile is free, and the pool may
    /// obtain it again. Called without the lock.
    pub(in crate::pool) fn free_and_promised(&self) -> Result<(u64, u64), CallError> {
        let holders: Vec<(u64, Arc<dyn Holder>)> = self.look(|state| {
            let all = state.memory.holders.all();
            let of_driver = all.filter(|held| held.holder.is_of_driver());
            let of_driver = of_driver.map(|held| (held.bytes, Arc::clone(&held.holder)));
            of_driver.collect()
        });
        let promised = |(bytes, holder): &(u64, Arc<dyn Holder>)| {
            let obtained = holder.obtained();
            bytes.saturating_sub(obtained)
        };
        let before: Vec<u64> = holders.iter().map(promised).collect();
        let free = self.device.memory_info()?.free;
        let both = before.into_iter().zip(holders.iter().map(promised));
        Ok((free, both.map(|(one, other)| one.max(other)).sum()))
    }

    /// Reads the driver's memory pools on the ledger's thread, and asks the ledger again for the
    /// bytes that tenants are charged beyond its grants.
    pub(in crate::pool) fn tidy_driver_memory(&self) {
        let is_of_driver = |held: &Held| held.holder.is_of_driver();
        if self.look(|state| state.memory.holders.all().any(is_of_driver)) {
            let mut state = self.lock();
            state.read_driver_memory(|holder| holder.tidy());
            if state.memory.holders.is_uncovered {
                state.cover_overdrawn();
            }
            Self::unlock(state);
        }
    }
}

impl Locked<'_> {
    /// [Reads](Self::read_driver_memory) the driver's memory pools for a request that needs memory.
    pub(in crate::pool) fn refresh_driver_memory(&mut self) {
        self.read_driver_memory(|holder| holder.refresh());
    }

    /// Reads with `read` how much memory the driver's pools hold, counts it in the ledger, and ends
    /// the charge for memory that they have returned. Makes no driver call while a capture guard
    /// lives.
    fn read_driver_memory(&mut self, read: fn(&dyn Holder) -> Given) {
        if self.memory.gate.is_capturing() || self.memory.device.usable().is_err() {
            return;
        }
        for id in self.memory.holders.ids() {
            let holder = match self.memory.holders.get(id) {
                Some(held) if held.holder.is_of_driver() => Arc::clone(&held.holder),
                _ => continue,
            };
            let given = self.unlocked(move || read(&*holder));
            self.receive(id, given);
            self.forget_holder(id);
        }
    }
}
