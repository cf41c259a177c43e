//! The part of a pool's limit that a [ledger](crate::ledger) grants.
//!
//! The pool charges its tenants within that part, so guarantees hold within it. The ledger grants
//! more when a request finds too little memory, before anything is reclaimed. Granted bytes that
//! are neither claimed by a tenant nor obtained from the driver are *unneeded*; the pool keeps a
//! few of them for its next requests.
//!
//! Keeps I-73.

use super::budget::TenantId;
use crate::error::{LedgerShortage, PoolError, ShareError};
use crate::extents::Extent;
use crate::ledger::Member;
#[cfg(target_os = "linux")]
use crate::ledger::OpenOffer;
use crate::own::Physical;
use crate::pool::core::{Core, Locked};
use crate::wanted::{GRANT, Purpose};

impl Core {
    /// Ends the pool's part. `kept` bytes could not be released: they stay granted.
    pub(in crate::pool) fn leave_ledger(&self, kept: u64) {
        if let Some(joined) = self.ledger.get() {
            let granted = self.look(|state| state.memory.budget.granted());
            joined.member.give(granted.saturating_sub(kept));
            if kept > 0 {
                log!(error, kept, "memory stays charged to the ledger");
            }
        }
    }

    /// Counts a block's exported memory as one block of the ledger, if any. Returns the ledger's
    /// number and the block's name.
    pub(in crate::pool) fn count_export(
        &self,
        list: &[(Extent, Physical)],
    ) -> Result<Option<(u64, u64)>, ShareError> {
        let Some(joined) = self.ledger.get() else {
            return Ok(None);
        };
        let member = &joined.member;
        let marks = list.iter().map(|(_, physical)| physical.export_mark());
        // The block of memory that was released in part is closed, and a new one counts all the rest.
        let mut names = marks.clone().filter_map(|mark| mark.counted_as());
        let known = names.find(|&block| member.is_open(block));
        let is_new = |(_, it): &&(Extent, Physical)| {
            known.is_none() || it.export_mark().counted_as() != known
        };
        let new = list.iter().filter(is_new);
        let bytes = new.map(|(_, physical)| physical.size()).sum();
        let block = member.export(known, bytes);
        let block = block.ok_or(ShareError::TooManyExports)?;
        marks.for_each(|mark| mark.count_as(block, |known| member.has_entry(known)));
        Ok(Some((joined.member.ledger_number(), block)))
    }
}

#[cfg(target_os = "linux")]
impl Core {
    /// Counts physicals as one offer in the ledger, if any.
    pub(in crate::pool) fn count_offer<'a>(
        &self,
        physicals: impl Iterator<Item = &'a Physical> + Clone,
    ) -> Result<Option<OpenOffer>, ShareError> {
        let Some(joined) = self.ledger.get() else {
            return Ok(None);
        };
        let bytes = physicals.clone().map(Physical::size).sum();
        let mut names = physicals.clone().map(|it| it.export_mark().names());
        let mut common = names.next().unwrap_or_default();
        names.for_each(|names| common.retain(|name| names.contains(name)));
        let offer = joined.member.open_offer(&common, bytes);
        let offer = offer.ok_or(ShareError::TooManyExports)?;
        let (_, name) = offer.name();
        for physical in physicals {
            let mark = physical.export_mark();
            mark.add_name(name, |known| joined.member.has_entry(known));
        }
        Ok(Some(offer))
    }
}

impl Locked<'_> {
    /// Makes the ledger grant the bytes that a tenant lacks to be charged `bytes` more. Returns a
    /// refusal. Releases the lock.
    pub(in crate::pool) fn grant_for(
        &mut self,
        id: TenantId,
        bytes: u64,
        purpose: Purpose,
    ) -> Option<LedgerShortage> {
        let lacking = self.memory.budget.lacks_grant(id, bytes);
        self.grant(lacking, GRANT, purpose)
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
        let least = least.min(self.memory.budget.ungranted());
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
    /// are at least twice [`GRANT`].
    pub(in crate::pool) fn note_returned(&mut self, bytes: u64) {
        self.memory.budget.released(bytes);
        if self.memory.budget.unneeded() >= 2 * GRANT {
            self.return_unneeded(GRANT);
        }
    }

    /// Returns all unneeded bytes to the ledger except `keep`.
    pub(in crate::pool) fn return_unneeded(&mut self, keep: u64) {
        let Some(joined) = self.core().ledger.get() else {
            return;
        };
        let unneeded = self.memory.budget.unneeded().saturating_sub(keep);
        if unneeded > 0 {
            self.memory.budget.return_grant(unneeded);
            joined.member.give(unneeded);
        }
    }

    pub(in crate::pool) fn left_in_ledger(&self) -> u64 {
        self.could_be_granted(Member::left)
    }

    /// Returns the bytes that are left in the ledger once other processes have released what they last
    /// found idle above their guarantees.
    pub(in crate::pool) fn left_with_idle_in_ledger(&self) -> u64 {
        self.could_be_granted(Member::left_with_idle)
    }

    /// Returns the bytes that the ledger could grant within the pool's limit, as `left` reads them.
    fn could_be_granted(&self, left: impl FnOnce(&Member) -> u64) -> u64 {
        let joined = self.core().ledger.get();
        let left = joined.map_or(0, |joined| left(&joined.member));
        left.min(self.memory.budget.ungranted())
    }
}
