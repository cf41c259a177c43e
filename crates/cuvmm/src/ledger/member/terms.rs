//! Changes of the process's guarantee, limit and priority.

use super::super::charge::MOST;
use super::super::places::InLine;
use super::{Member, check_limit};
use crate::error::{ArgumentError, LedgerError};
use crate::wanted::Purpose;

impl Member {
    /// Changes the guarantee, in bytes. A higher guarantee is a charge.
    pub(in crate::ledger) fn set_guarantee(&self, bytes: u64) -> Result<(), LedgerError> {
        self.set_guarantee_at(bytes, None)
    }

    pub(in crate::ledger) fn set_guarantee_at(
        &self,
        bytes: u64,
        place: Option<InLine>,
    ) -> Result<(), LedgerError> {
        self.own_process()?;
        let guarantee = self.granules(bytes);
        let mut account = self.account();
        if guarantee > account.guarantee {
            self.check_guarantee(guarantee)?;
            let wanted = guarantee.saturating_mul(self.granule.bytes());
            self.charge_to(wanted, 0, (Purpose::New, place))
                .map_err(LedgerError::Short)?;
        }
        account.guarantee = guarantee;
        self.slot().guarantee.store(guarantee);
        self.refund(&account, 0);
        Ok(())
    }

    /// Checks a guarantee, in granules: at most the limit of the process and that of the ledger.
    fn check_guarantee(&self, guarantee: u64) -> Result<(), ArgumentError> {
        let (own, agreed) = (self.slot().limit.load(), self.file.layout().header.limit());
        let what = match own < agreed {
            true => "bytes of a process's guarantee, which is at most its limit",
            false => "bytes of a process's guarantee, which is at most the ledger's limit",
        };
        let bytes = |granules: u64| granules.saturating_mul(self.granule.bytes());
        ArgumentError::at_most(what, bytes(guarantee), bytes(own.min(agreed)))
    }

    /// Changes the process's limit, in bytes, and releases idle memory charged above it. Returns
    /// the bytes that stay charged beyond the limit.
    pub(in crate::ledger) fn set_limit(&self, bytes: u64) -> Result<u64, LedgerError> {
        self.own_process()?;
        let account = self.account();
        let granule = self.granule.bytes();
        check_limit(bytes, account.guarantee.saturating_mul(granule), granule)?;
        let limit = (bytes / granule).min(MOST);
        self.slot().limit.store(limit);
        self.refund(&account, 0);
        let (held, lent) = (account.used, account.lent.bytes());
        drop(account);
        let keep = limit.saturating_mul(granule).saturating_sub(lent);
        self.give_back_to(held.min(keep));
        // Requests that the old limit refused may go on.
        self.file.layout().header.given.ring();
        let excess = self.count().charged().saturating_sub(limit);
        Ok(excess.saturating_mul(granule))
    }

    pub(in crate::ledger) fn set_priority(&self, priority: i32) -> Result<(), LedgerError> {
        self.own_process()?;
        let priority = i64::from(priority).cast_unsigned();
        self.slot().priority.store(priority);
        Ok(())
    }

    /// Makes the pools release memory until they have at most `keep` bytes or nothing idle is left,
    /// and refunds what they do not need. Returns the refunded bytes.
    pub(in crate::ledger) fn give_back_to(&self, keep: u64) -> u64 {
        let before = self.count().charged();
        self.givers.each(|giver| {
            let over = self.used().saturating_sub(keep);
            if over > 0 {
                giver.give_back(over);
            }
        });
        self.trim(0);
        let refunded = before.saturating_sub(self.count().charged());
        refunded.saturating_mul(self.granule.bytes())
    }
}
