//! The part of a pool's limit that a [ledger](crate::ledger) grants.
//!
//! The pool charges its tenants within that part, so guarantees hold within it. The ledger grants
//! more when a request finds too little memory, before anything is reclaimed. Granted bytes that
//! are neither claimed by a tenant nor obtained from the driver are *unneeded*; the pool keeps a
//! few of them for its next requests.
//!
//! Keeps I-73.

use super::budget::TenantId;
use crate::error::{LedgerShortage, PoolError};
use crate::ledger::Member;
use crate::pool::core::Locked;
use crate::wanted::{Purpose, piece};

impl Locked<'_> {
    /// Makes the ledger grant the bytes that a tenant lacks to be charged `bytes` more. Returns a
    /// refusal. Releases the lock.
    pub(in crate::pool) fn grant_for(
        &mut self,
        id: TenantId,
        bytes: u64,
        purpose: Purpose,
    ) -> Option<LedgerShortage> {
        match self.memory.budget.lacks_grant(id, bytes) {
            0 => None,
            lacking => self.grant(lacking, self.piece(), purpose),
        }
    }

    /// Returns the [smallest grant](piece) of the pool; 0 without a ledger.
    pub(in crate::pool) fn piece(&self) -> u64 {
        let (granule, limits) = (
            self.memory.device.granule(),
            self.memory.budget.totals().limits,
        );
        let joined = self.core().ledger.get();
        joined.map_or(0, |it| piece(granule, limits.bytes, it.member.limit()))
    }

    /// Makes the ledger grant `bytes`, and up to `least` if that is more and available. Returns a
    /// refusal. Releases the lock.
    pub(in crate::pool) fn grant(
        &mut self,
        bytes: u64,
        least: u64,
        purpose: Purpose,
    ) -> Option<LedgerShortage> {
        let joined = self.core().ledger.get().filter(|_| bytes > 0)?;
        let least = least.min(self.memory.budget.totals().ungranted);
        let place = self.place;
        match self.unlocked(|| joined.member.grant(bytes, least, purpose, place)) {
            Ok(granted) => {
                self.memory.budget.grant(granted);
                None
            }
            Err(refused) => Some(refused),
        }
    }

    /// Makes the ledger grant the bytes that a tenant, new or registered, lacks to be guaranteed
    /// `bytes`. Returns `true` if it released the lock.
    pub(super) fn grant_guarantee(
        &mut self,
        tenant: Option<TenantId>,
        bytes: u64,
    ) -> Result<bool, PoolError> {
        let mut released = false;
        loop {
            let lacking = bytes.saturating_sub(self.guaranteeable(tenant, true));
            if lacking == 0 || self.core().ledger.get().is_none() {
                return Ok(released);
            }
            if let Some(refused) = self.grant(lacking, 0, Purpose::New) {
                return Err(PoolError::Ledger(refused));
            }
            released = true;
        }
    }

    /// Counts memory that the pool has released. Exported memory that other processes have by one of
    /// its `names` in the ledger is no longer granted: the process stays charged for it.
    pub(in crate::pool) fn note_released(&mut self, size: u64, names: &[u64]) {
        let joined = self.core().ledger.get();
        if let Some(joined) = joined
            && joined.member.lend(names, size)
        {
            self.memory.budget.released(size);
            self.memory.budget.return_grant(size);
            return;
        }
        joined.inspect(|joined| joined.member.note_released(size));
        self.note_returned(size);
    }

    /// Counts bytes that went back to the driver, and returns unneeded bytes to the ledger if they
    /// are at least twice a [piece].
    pub(in crate::pool) fn note_returned(&mut self, bytes: u64) {
        self.memory.budget.released(bytes);
        let piece = self.piece();
        if piece > 0 && self.memory.budget.unneeded_after(0, 0) >= 2 * piece {
            self.return_unneeded(piece);
        }
    }

    /// Returns all unneeded bytes to the ledger except `keep`.
    pub(in crate::pool) fn return_unneeded(&mut self, keep: u64) {
        let Some(joined) = self.core().ledger.get() else {
            return;
        };
        let unneeded = self.memory.budget.unneeded_after(0, 0).saturating_sub(keep);
        if unneeded > 0 {
            self.memory.budget.return_grant(unneeded);
            joined.member.give(unneeded);
        }
    }

    /// Returns the bytes that the ledger could grant within the pool's limit, as `left` reads them.
    pub(in crate::pool) fn left_in_ledger(&self, left: fn(&Member) -> u64) -> u64 {
        let joined = self.core().ledger.get();
        let left = joined.map_or(0, |joined| left(&joined.member));
        left.min(self.memory.budget.totals().ungranted)
    }
}
