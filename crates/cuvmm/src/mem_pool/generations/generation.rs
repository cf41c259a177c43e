//! One pool of the driver, what all of them are charged, and what an exchange without gain leaves.

use crate::error::CallError;
use crate::own::MemPool;
use crate::size::Granularity;

/// A pool of the driver, with its last figures in bytes.
pub(super) struct Generation {
    pub(super) pool: MemPool,
    pub(super) maximum: u64,
    pub(super) charged: u64,
    pub(super) used: u64,
    pub(super) reserved: u64,
}

impl Generation {
    pub(super) const fn new(pool: MemPool, maximum: u64) -> Self {
        Self {
            pool,
            maximum,
            charged: maximum,
            used: 0,
            reserved: 0,
        }
    }

    /// Reads the figures of a pool allocated from.
    pub(super) fn look(&mut self, granule: Granularity) -> Result<(), CallError> {
        (self.used, self.reserved) = (self.pool.used()?, self.pool.reserved()?);
        let reserved = granule.round_up(self.reserved).unwrap_or(u64::MAX);
        self.charged = self.maximum.max(reserved);
        Ok(())
    }

    /// Returns memory that nothing uses to the device, and reads the figures again. Makes no call if
    /// the pool held nothing when they were last read.
    pub(super) fn trim(&mut self, granule: Granularity) -> Result<(), CallError> {
        if self.reserved == 0 {
            return Ok(());
        }
        self.pool.trim_to(0)?;
        self.look(granule)
    }

    /// Returns `true` if other libraries cannot allocate from the pool, because it was never
    /// current: what it holds does not grow while the lock is held.
    pub(super) fn is_private(&self) -> bool {
        !self.pool.was_current()
    }

    /// Returns memory that nothing uses to the device, and charges the rest.
    pub(super) fn drain(&mut self, granule: Granularity) -> Result<(), CallError> {
        self.pool.trim_to(0)?;
        (self.used, self.reserved) = (self.pool.used()?, self.pool.reserved()?);
        self.charged = granule.round_up(self.reserved).unwrap_or(u64::MAX);
        Ok(())
    }

    /// Returns the bytes in use. The driver counts memory as in use that `cuMemFree` has freed.
    pub(super) fn in_use(&self) -> u64 {
        self.used.min(self.reserved)
    }
}

/// The figures of the newest pool in bytes when an exchange for less gained nothing. Nothing is
/// offered until they are lower, and for some readings in any case: otherwise a request and a
/// library that allocates and frees all the time could disturb each other without end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Barren {
    pub(super) used: u64,
    pub(super) reserved: u64,
    /// The number of such exchanges in sequence.
    pub(super) times: u32,
    pub(super) readings: u32,
}

/// The most readings for which nothing is offered.
const MOST_READINGS: u32 = 16;

impl Barren {
    /// Offers nothing for more readings than the last time.
    pub(super) fn postpone(&mut self) {
        self.readings = self.times.min(MOST_READINGS);
        self.times = self.times.saturating_add(1);
    }
}

#[derive(Default)]
pub(super) struct Account {
    /// The bytes that the pools may hold, and those charged for an exchange.
    pub(super) charged: u64,
    /// Bytes that are not needed any more and that the tenant is still charged.
    pub(super) returned: u64,
    /// Bytes that were seen beyond the charge, and that the tenant is not charged yet.
    pub(super) overdrawn: u64,
    /// The part of them that is being charged.
    pub(super) being_charged: u64,
}

impl Account {
    pub(super) const fn take_returned(&mut self) -> u64 {
        let bytes = self.returned.saturating_sub(self.being_charged);
        self.returned -= bytes;
        bytes
    }

    /// Adapts the account to the bytes that the pools may hold now.
    pub(super) fn recount(&mut self, needed: u64) {
        if needed > self.charged {
            self.overdrawn += needed - self.charged;
        } else {
            let less = self.charged - needed;
            let uncharged = less.min(self.overdrawn);
            self.overdrawn -= uncharged;
            self.returned += less - uncharged;
        }
        self.charged = needed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beyond_the_charge_that_ends_while_it_is_being_charged_is_not_refunded_before() {
        let mut account = Account {
            charged: 2,
            ..Account::default()
        };
        account.recount(7);
        assert_eq!(account.overdrawn, 5);
        account.being_charged += std::mem::take(&mut account.overdrawn);
        // The tenant is charged two.
        account.recount(2);
        assert_eq!(account.take_returned(), 0);
        account.recount(1);
        assert_eq!(account.take_returned(), 1);
        account.being_charged = 0;
        assert_eq!((account.take_returned(), account.returned), (5, 0));
    }
}
