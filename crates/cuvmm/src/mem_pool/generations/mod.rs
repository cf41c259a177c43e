//! The driver's memory pools of one [`TenantMemPool`](super::TenantMemPool).
//!
//! A pool of the driver keeps its maximum for life. So it is *exchanged* for another one when the
//! tenant is to be charged more or less: the new pool becomes current, and the old one stays
//! charged with what its allocations hold. The charge is at every moment at least what all of them
//! may hold:
//!
//! - The newest pool is charged with its maximum.
//! - An older pool is out of reach: it is not current, and nothing here allocates from it. It can
//!   only shrink, so it is charged with what it was last seen to hold.
//! - Between the moment at which the old pool's figure is read and the moment at which the new pool
//!   becomes current, the old pool must not grow. So a third pool, the *stand-in*, is current
//!   meanwhile. It has a maximum of one step, which is always charged.
//!
//! No lock of the library's pool is taken here.
//!
//! Keeps I-11.

mod current;
mod figures;
mod generation;

use std::time::Instant;

use self::current::let_others_end;
use self::generation::{Account, Barren, Generation};
use super::TenantMemPoolStats;
use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::own::{AccessGrant, CloseRefusal, CurrentPoolGuard, MemPool};
use crate::size::Granularity;

pub(super) use self::figures::View;

/// The bytes in which the driver obtains memory for a pool, and to which it rounds a pool's maximum
/// (measured on an H200).
const STEP: u64 = 32 << 20;

/// How often an exchange is attempted while other threads allocate.
const ATTEMPTS: usize = 4;

/// Returns the step to which maxima of a device's pools are rounded.
pub(super) fn step_of(device: &Device) -> Granularity {
    let granule = device.granule();
    Granularity::new(STEP.max(granule.bytes())).unwrap_or(granule)
}

/// The requirements of room for some bytes.
pub(super) enum Need {
    Nothing,
    /// An exchange, and more bytes than are charged.
    Charge {
        /// The bytes for what is to be allocated.
        bytes: u64,
        /// The bytes for a maximum that is not below the minimum either.
        wished: u64,
    },
}

/// The pools, with the guard that keeps the newest one current.
pub(super) struct Generations {
    granule: Granularity,
    step: Granularity,
    threshold: u64,
    /// The least maximum that is left when memory is reclaimed.
    least: u64,
    /// The access of other devices to all the pools.
    guests: Vec<AccessGrant>,
    newest: Option<Generation>,
    stand_in: Option<Generation>,
    /// The stand-in may hold memory.
    stood_in: bool,
    older: Vec<Generation>,
    guard: Option<CurrentPoolGuard<'static>>,
    /// The number of values that keep the newest pool current.
    guards: usize,
    /// When the newest pool was last made current no more, if calls of other threads may still be
    /// inside of the driver.
    left: Option<Instant>,
    /// Another pool of these was current before the newest one.
    exchanged: bool,
    account: Account,
    /// The figures with which an exchange for less gained nothing.
    barren: Option<Barren>,
}

impl Generations {
    pub(super) fn new(
        device: &Device,
        threshold: u64,
        least: u64,
        guests: Vec<AccessGrant>,
    ) -> Self {
        Self {
            granule: device.granule(),
            step: step_of(device),
            threshold,
            least,
            guests,
            newest: None,
            stand_in: None,
            stood_in: false,
            older: Vec::new(),
            guard: None,
            guards: 0,
            left: None,
            exchanged: false,
            account: Account::default(),
            barren: None,
        }
    }

    /// Creates a pool with a maximum, which nothing allocates from yet, and gives other devices their
    /// access to it.
    pub(super) fn create(&self, device: &Device, maximum: u64) -> Result<MemPool, MemoryError> {
        let pool = MemPool::builder(device).maximum(maximum).create()?;
        if !self.guests.is_empty() {
            pool.put_access(&self.guests)?;
        }
        Ok(pool.managed())
    }

    /// Takes the first pools, whose maxima are charged.
    pub(super) fn begin(&mut self, newest: (MemPool, u64), stand_in: MemPool) {
        let step = self.step.bytes();
        self.newest = Some(Generation::new(newest.0, newest.1));
        self.stand_in = Some(Generation::new(stand_in, step));
    }

    pub(super) fn newest(&self) -> Option<&MemPool> {
        self.newest.as_ref().map(|newest| &newest.pool)
    }

    pub(super) fn apply_threshold(&self, pool: &MemPool) -> Result<(), CallError> {
        pool.set_release_threshold(self.threshold)
    }

    pub(super) const fn allow(&mut self, bytes: u64) {
        self.account.charged += bytes;
    }

    /// Takes the bytes for which the charge ends. Those that are being charged are not among them.
    pub(super) const fn take_returned(&mut self) -> u64 {
        self.account.take_returned()
    }

    /// Takes the bytes that are to be charged although the limits do not allow it.
    pub(super) fn take_overdrawn(&mut self) -> u64 {
        let bytes = std::mem::take(&mut self.account.overdrawn);
        self.account.being_charged += bytes;
        bytes
    }

    pub(super) const fn acknowledge(&mut self, bytes: u64) {
        self.account.being_charged = self.account.being_charged.saturating_sub(bytes);
    }

    fn all(&self) -> impl Iterator<Item = &Generation> {
        let first = self.newest.iter().chain(&self.stand_in);
        first.chain(&self.older)
    }

    /// Adapts the account to what the pools may hold now.
    pub(super) fn recount(&mut self) {
        let needed = self.all().map(|it| it.charged).sum();
        self.account.recount(needed);
    }

    pub(super) fn view(&self) -> View {
        let Account {
            charged,
            overdrawn,
            being_charged,
            ..
        } = self.account;
        let held = charged.saturating_sub(overdrawn + being_charged);
        let in_use = self.all().map(Generation::in_use).sum::<u64>().min(held);
        let stand_in = self.stand_in.as_ref();
        let padding = stand_in.map_or(0, |it| it.charged - it.in_use().min(it.charged));
        let padding = padding.min(held - in_use);
        let most = held - in_use - padding;
        View {
            held,
            in_use,
            padding,
            idle: self.idle().min(most),
            idle_closed: self.idle_closed().min(held - in_use),
            older: self.older.len() as u64,
            reserved: self.all().map(|it| it.reserved).sum(),
        }
    }

    /// Returns the bytes that an exchange would probably give back.
    fn idle(&self) -> u64 {
        let Some(newest) = &self.newest else {
            return 0;
        };
        let barren = |it: Barren| {
            let lower = newest.in_use() < it.used || newest.reserved < it.reserved;
            it.readings > 0 || !lower
        };
        if self.barren.is_some_and(barren) {
            return 0;
        }
        let idle = self.beyond_use(newest);
        self.step.round_down(idle.saturating_sub(self.least))
    }

    /// Returns the bytes that closing the pools would probably give back. What older pools hold has
    /// been asked for already.
    fn idle_closed(&self) -> u64 {
        let open = self.newest.iter().chain(&self.stand_in);
        open.map(|generation| self.beyond_use(generation)).sum()
    }

    fn beyond_use(&self, generation: &Generation) -> u64 {
        let used = self.step.round_up(generation.in_use()).unwrap_or(u64::MAX);
        generation.charged.saturating_sub(used)
    }

    pub(super) fn stats(&self) -> TenantMemPoolStats {
        let charged: u64 = self.all().map(|it| it.charged).sum();
        let free = |it: &Generation| it.charged.saturating_sub(it.in_use());
        let stand_in = self.stand_in.as_ref().map_or(0, free);
        TenantMemPoolStats {
            maximum: charged - stand_in,
            charged,
            in_use: self.all().map(Generation::in_use).sum(),
            reserved: self.all().map(|it| it.reserved).sum(),
            older_pools: self.older.len() as u64,
            older_held: self.older.iter().map(|it| it.charged).sum(),
            is_current: self.guard.is_some(),
        }
    }

    /// Reads the figures of all pools, and ends older ones that hold nothing. Returns the first
    /// error, after all were read.
    pub(super) fn look(&mut self) -> Result<(), CallError> {
        let granule = self.granule;
        let mut outcome = self.resume().and_then(|()| self.claim());
        let all_but_current = outcome.is_ok();
        if let Some(newest) = &mut self.newest {
            outcome = outcome.and(newest.look(granule));
        }
        if let Some(stand_in) = self.stand_in.as_mut().filter(|_| self.stood_in) {
            outcome = outcome.and(stand_in.pool.trim_to(0));
            outcome = outcome.and(stand_in.look(granule));
            self.stood_in = outcome.is_err() || stand_in.reserved > 0;
        }
        let older = std::mem::take(&mut self.older);
        for mut generation in older {
            let drained = generation.drain(granule);
            let empty = all_but_current && drained.is_ok() && generation.reserved == 0;
            outcome = outcome.and(drained);
            self.keep_unless_ended(generation, empty);
        }
        self.recount();
        outcome
    }

    /// Reads the figures for a request of another tenant. Where nothing could be given before, free
    /// memory goes back to the device now and then, which shows whether something can be given.
    pub(super) fn refresh(&mut self) -> Result<(), CallError> {
        let mut outcome = Ok(());
        if let (Some(newest), Some(barren)) = (&self.newest, &mut self.barren) {
            barren.readings = barren.readings.saturating_sub(1);
            if barren.readings == 0 {
                outcome = newest.pool.trim_to(0);
            }
        }
        outcome = outcome.and(self.look());
        if self.idle() == 0
            && let Some(barren) = self.barren.as_mut().filter(|it| it.readings == 0)
        {
            barren.postpone();
        }
        outcome
    }

    /// Ends a pool that is out of reach and empty, or keeps it to try again. The device keeps one that
    /// was current.
    fn keep_unless_ended(&mut self, generation: Generation, empty: bool) {
        if !empty {
            self.older.push(generation);
            return;
        }
        let Generation { pool, maximum, .. } = generation;
        if let Err(refused) = pool.close() {
            if let CloseRefusal::Call(error) = &refused.reason {
                log!(warn, %error, "an empty memory pool could not be ended for now");
            }
            let mut kept = Generation::new(refused.owner, maximum);
            kept.charged = 0;
            self.older.push(kept);
        }
    }

    /// Returns what it takes to have room for `bytes`, and for a newer pool of `whole` bytes if
    /// there is none. With `at_worst`, the newest pool counts with all that it may hold, otherwise
    /// with what it holds.
    pub(super) fn need(
        &mut self,
        bytes: u64,
        whole: u64,
        at_worst: bool,
    ) -> Result<Need, CallError> {
        self.look()?;
        let granule = self.granule;
        let (allowed, wished) = (self.allowed(), whole.max(self.least));
        let Some(newest) = &mut self.newest else {
            return Err(CallError::InUse);
        };
        if newest.maximum.saturating_sub(newest.in_use()) >= bytes {
            return Ok(Need::Nothing);
        }
        let mut held = newest.charged;
        if !at_worst {
            newest.trim(granule)?;
            held = granule.round_up(newest.reserved).unwrap_or(u64::MAX);
        }
        let charge = |maximum| held.saturating_add(maximum).saturating_sub(allowed);
        Ok(Need::Charge {
            bytes: charge(whole),
            wished: charge(wished),
        })
    }

    /// Returns the bytes that the newest pool and its successor may hold together.
    fn allowed(&self) -> u64 {
        let others = self.stand_in.iter().chain(&self.older);
        let others: u64 = others.map(|it| it.charged).sum();
        self.account.charged.saturating_sub(others)
    }

    /// Notes what was charged, and exchanges the newest pool for one with a maximum of `bytes`, or of
    /// up to the minimum if what is charged allows it. Returns `false` if it does not allow `bytes`.
    pub(super) fn grow(
        &mut self,
        device: &Device,
        charged: u64,
        bytes: u64,
    ) -> Result<bool, MemoryError> {
        // In one step with the exchange: otherwise a reading of the figures would return it.
        self.allow(charged);
        let (step, allowed, wished) = (self.step, self.allowed(), bytes.max(self.least));
        self.exchange(device, |held| {
            let left = step.round_down(allowed.checked_sub(held)?);
            (left >= bytes).then_some(wished.min(left))
        })
    }

    /// Exchanges the newest pool for a smaller one, so that about `wanted` bytes less are charged.
    /// Returns `false` if nothing could be gained.
    pub(super) fn give(&mut self, device: &Device, wanted: u64) -> Result<bool, MemoryError> {
        self.look()?;
        let idle = self.idle();
        if idle == 0 {
            self.note_barren();
            return Ok(false);
        }
        // Each exchange costs the pool its free memory, so small requests do not come one by one.
        let part = self.step.round_down(self.account.charged / 8).min(idle);
        let wanted = self.step.round_up(wanted).unwrap_or(u64::MAX).max(part);
        let least = self.least;
        let choose = move |left: u64| left.saturating_sub(wanted).max(least);
        let gave = self.exchange_for_less(device, choose);
        if matches!(gave, Ok(false)) {
            self.note_barren();
        }
        gave
    }

    /// Exchanges the newest pool for a smaller one, so that the pools may hold `most` bytes in all.
    /// Returns `false` if nothing could be gained.
    pub(super) fn shrink(&mut self, device: &Device, most: u64) -> Result<bool, MemoryError> {
        self.look()?;
        let older: u64 = self.older.iter().map(|it| it.charged).sum();
        let allowed = self.allowed();
        let step = self.step.bytes();
        self.exchange_for_less(device, move |left| {
            let held = allowed - left;
            most.saturating_sub(older + held).max(step)
        })
    }

    /// Exchanges the newest pool for a smaller one. `choose` returns the maximum that is wanted if
    /// the new pool may have at most `left` bytes.
    fn exchange_for_less(
        &mut self,
        device: &Device,
        choose: impl Fn(u64) -> u64,
    ) -> Result<bool, MemoryError> {
        let (step, allowed) = (self.step, self.allowed());
        self.exchange(device, |held| {
            let left = allowed.checked_sub(held)?;
            let maximum = step.round_up(choose(left))?;
            // At least a step is gained.
            (maximum.checked_add(step.bytes())? <= left).then_some(maximum)
        })
    }

    fn note_barren(&mut self) {
        let times = self.barren.map_or(0, |it| it.times);
        self.barren = self.newest.as_ref().map(|newest| {
            let mut barren = Barren {
                used: newest.in_use(),
                reserved: newest.reserved,
                times,
                readings: 0,
            };
            barren.postpone();
            barren
        });
    }

    /// Exchanges the newest pool for one with the maximum that `choose` returns for the bytes that
    /// the old one still holds. Returns `false` if `choose` allows none; then, and on failure, the
    /// newest pool is as before.
    fn exchange(
        &mut self,
        device: &Device,
        choose: impl Fn(u64) -> Option<u64>,
    ) -> Result<bool, MemoryError> {
        let granule = self.granule;
        self.let_last_calls_end();
        for _ in 0..ATTEMPTS {
            let Some(newest) = &mut self.newest else {
                return Ok(false);
            };
            newest.look(granule)?;
            newest.trim(granule)?;
            let Some(maximum) = choose(newest.reserved) else {
                return Ok(false);
            };
            let next = self.create(device, maximum)?;
            self.apply_threshold(&next)?;
            self.suspend(maximum)?;
            // From here on the newest pool can only shrink, unless the charge covers both.
            match self.put_in_place(next, maximum, &choose) {
                Ok(true) => return Ok(true),
                // Another thread allocated before the pool was out of reach.
                Ok(false) => self.resume()?,
                Err(error) => {
                    self.resume()?;
                    return Err(error.into());
                }
            }
        }
        Ok(false)
    }

    /// Makes the stand-in current, unless what is charged covers the newest pool and one with this
    /// maximum beside it.
    fn suspend(&mut self, maximum: u64) -> Result<(), CallError> {
        if self.covers_both(maximum) {
            return Ok(());
        }
        match (&mut self.guard, &self.stand_in) {
            (Some(guard), Some(stand_in)) => {
                guard.switch(&stand_in.pool)?;
                (self.stood_in, self.exchanged) = (true, true);
                let_others_end(Instant::now());
                Ok(())
            }
            // Nothing but this value allocates from the newest pool.
            _ => Ok(()),
        }
    }

    /// Returns `true` if what is charged covers the newest pool and one with this maximum beside it.
    fn covers_both(&self, maximum: u64) -> bool {
        let newest = self.newest.as_ref().map_or(0, |newest| newest.charged);
        newest.saturating_add(maximum) <= self.allowed()
    }

    fn put_in_place(
        &mut self,
        next: MemPool,
        maximum: u64,
        choose: impl Fn(u64) -> Option<u64>,
    ) -> Result<bool, CallError> {
        let (granule, covered) = (self.granule, self.covers_both(maximum));
        let Some(newest) = &mut self.newest else {
            return Ok(false);
        };
        // Nothing has allocated from a private pool since it was looked at.
        let private = newest.is_private();
        if !private {
            newest.look(granule)?;
            if choose(newest.reserved).is_none_or(|most| most < maximum) {
                return Ok(false);
            }
        }
        let ended = private && newest.reserved == 0;
        if let Some(guard) = &mut self.guard {
            guard.switch(&next)?;
            self.exchanged = true;
            if covered {
                let_others_end(Instant::now());
            }
        }
        if !covered {
            // It was out of reach when it was looked at.
            newest.charged = granule.round_up(newest.reserved).unwrap_or(u64::MAX);
        }
        let old = self.newest.replace(Generation::new(next, maximum));
        self.barren = None;
        match old {
            Some(old) if ended => self.keep_unless_ended(old, true),
            Some(old) => self.retire(old),
            None => {}
        }
        self.recount();
        Ok(true)
    }

    /// Notes that a pool is out of reach, and returns what it does not use to the device.
    fn retire(&mut self, mut generation: Generation) {
        let granule = self.granule;
        // What is freed later goes back at the next synchronization already.
        let released = generation.pool.set_release_threshold(0);
        let drained = released.and_then(|()| generation.drain(granule));
        match drained {
            Ok(()) => {
                let empty = generation.reserved == 0;
                self.keep_unless_ended(generation, empty);
            }
            Err(error) => {
                log!(warn, %error, "memory of a memory pool that was replaced stays for now");
                self.older.push(generation);
            }
        }
    }

    /// Puts the previous pool of the device back, and returns what no allocation uses.
    pub(super) fn wind_down(&mut self) -> Result<(), CallError> {
        self.close_guard()?;
        self.let_last_calls_end();
        let open = self.newest.take().into_iter().chain(self.stand_in.take());
        for generation in open.collect::<Vec<_>>() {
            self.retire(generation);
        }
        self.look()
    }

    /// Gives up all pools: their memory is gone with the context.
    pub(super) fn abandon(&mut self) {
        self.guard = None;
        self.newest = None;
        self.stand_in = None;
        self.older.clear();
        self.recount();
    }

    /// Returns what the newest pool does not use to the device. Returns the bytes.
    pub(super) fn trim(&mut self) -> Result<u64, CallError> {
        self.look()?;
        let before = self.stats().reserved;
        if let Some(newest) = &self.newest {
            newest.pool.trim_to(0)?;
        }
        self.look()?;
        Ok(before.saturating_sub(self.stats().reserved))
    }

    /// Returns the bytes that the driver has given out.
    pub(super) fn obtained(&self) -> u64 {
        let reserved = |it: &Generation| it.pool.reserved().unwrap_or(0);
        self.all().map(reserved).sum()
    }
}
