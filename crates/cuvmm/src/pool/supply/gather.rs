//! The supply of memory: from the free list, or else from the driver.

use std::ops::Range;
use std::sync::PoisonError;

use super::{AtDriver, Obtained, Room};
use crate::error::{BlockError, CallError, MemoryError};
use crate::extent_sizes::ExtentSizes;
use crate::extents::Unmapped;
use crate::own::Physical;
use crate::pool::accounts::TenantId;
use crate::pool::core::{Core, Locked};
use crate::pool::memory::{Policy, Scrub};
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;

/// The most small physicals that are mapped rather than released and created anew as one: each
/// costs the driver about 25 us to open and 11 us to release, and a creation at least 20 us
/// (`docs/measurements.md`).
const WORTH_MAPPING: u64 = 4;

impl Locked<'_> {
    /// Gathers unmapped physicals for a range of offsets in whole granules, in their order, of at
    /// most these `sizes`. The tenant has been charged for them. With `claims`, reclaims memory from other tenants if the driver
    /// has no more. On failure nothing has changed, except that memory of the free list may have
    /// been released.
    pub(in crate::pool) fn gather(
        &mut self,
        id: TenantId,
        range: Range<u64>,
        sizes: ExtentSizes,
        claims: bool,
    ) -> Result<Vec<Unmapped>, BlockError> {
        let Range { start: mut at, end } = range;
        self.room.foresee(end.saturating_sub(at));
        let mut obtained = Obtained(self, vec![]);
        while at < end {
            let largest = sizes.at(at);
            let unmapped = obtained.0.one_unmapped(id, end - at, largest, claims)?;
            at += unmapped.size();
            obtained.1.push(unmapped);
        }
        Ok(obtained.take())
    }

    /// Gathers physicals of exactly these sizes (whole granules), which the tenant has been
    /// charged, or, unless they must be `whole`, smaller physicals that make them up. Reclaims and
    /// fails as [`gather`](Self::gather) does.
    pub(in crate::pool) fn gather_sizes(
        &mut self,
        id: TenantId,
        sizes: &[u64],
        (whole, claims): (bool, bool),
    ) -> Result<Vec<Unmapped>, BlockError> {
        self.room.foresee(sizes.iter().sum());
        let mut obtained = Obtained(self, vec![]);
        for &size in sizes {
            match whole {
                true => obtained.1.push(obtained.0.one_whole(id, size, claims)?),
                false => (obtained.1).extend(obtained.0.one_of_size(id, size, claims)?),
            }
        }
        Ok(obtained.take())
    }

    fn one_of_size(
        &mut self,
        id: TenantId,
        size: u64,
        claims: bool,
    ) -> Result<Vec<Unmapped>, BlockError> {
        let (own, foreign) = self.usable_of(id);
        if let Some(unmapped) = self.memory.supply.free_list.take(size, own, foreign) {
            return Ok(vec![unmapped]);
        }
        // Makes one physical of the free list's memory.
        self.merge_free(size);
        if self.memory.budget.totals().left.bytes >= size
            && let Ok(unmapped) = self.create(size)
        {
            return Ok(vec![unmapped]);
        }
        self.gather(id, 0..size, ExtentSizes::up_to(size), claims)
    }

    /// Gets one physical of exactly `size`. If there are only smaller ones, releases as many as make
    /// it up, and creates one in their place.
    fn one_whole(&mut self, id: TenantId, size: u64, claims: bool) -> Result<Unmapped, BlockError> {
        let mut found = self.one_of_size(id, size, claims)?;
        if found.len() == 1
            && let Some(one) = found.pop()
        {
            return Ok(one);
        }
        self.release_all(found);
        if self.memory.budget.totals().left.bytes < size {
            // The driver refused a release, or another operation has created memory meanwhile.
            return Err(self.out_of_memory(id, size));
        }
        self.create(size).map_err(|error| match error {
            MemoryError::Create { cause, .. } if cause.is_out_of_memory() => {
                self.driver_out_of_memory(id, size, cause)
            }
            error => error.into(),
        })
    }

    /// Returns the last writer whose memory the operation can use as it is, and `true` if it can
    /// use memory of others. While a capture guard lives, nothing can be scrubbed or zeroed.
    fn usable_of(&self, id: TenantId) -> (Option<u64>, bool) {
        let captures = self.memory.gate.is_capturing();
        let own = Some(id.0).filter(|_| !(captures && self.zeroes));
        let foreign = !captures || (self.memory.policy.scrub == Scrub::Never && !self.zeroes);
        (own, foreign)
    }

    /// Gets one physical of at most `left` bytes, as large as possible.
    fn one_unmapped(
        &mut self,
        id: TenantId,
        left: u64,
        largest: u64,
        claims: bool,
    ) -> Result<Unmapped, BlockError> {
        let want = self.memory.device.granule().extent_within(left, largest);
        let (own, foreign) = self.usable_of(id);
        loop {
            if let Some(unmapped) = self.memory.supply.free_list.take(want, own, foreign) {
                return Ok(unmapped);
            }
            let mut refused = None;
            self.merge_free(want);
            if self.memory.budget.totals().left.bytes >= want {
                match self.create(want) {
                    Ok(unmapped) => return Ok(unmapped),
                    Err(MemoryError::Create { cause, .. }) if cause.is_out_of_memory() => {
                        refused = Some(cause);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            if let Some(unmapped) = self.memory.supply.free_list.take_within(want, own, foreign) {
                return Ok(unmapped);
            }
            // The memory left in the free list is too large or needs a scrub.
            if let Some(unmapped) = self.memory.supply.free_list.take_largest() {
                self.release(unmapped);
                continue;
            }
            let Some(cause) = refused else {
                return Err(self.out_of_memory(id, left));
            };
            // Other programs have the memory that the pool's limit allows. The pool's idle memory
            // is reclaimed instead.
            if !claims || self.take_back_any(id, want)? == 0 {
                return Err(self.driver_out_of_memory(id, left, cause));
            }
        }
    }

    /// Releases many small physicals of the free list so that one of `want` bytes can be created,
    /// if that costs less than mapping them all, or releases one larger physical.
    fn merge_free(&mut self, want: u64) {
        let missing = want.saturating_sub(self.memory.budget.totals().left.bytes);
        if missing == 0 || self.memory.supply.free_list.unmapped_for(want) <= WORTH_MAPPING {
            return;
        }
        if let Some(unmapped) = self.memory.supply.free_list.take_smallest_above(want) {
            self.release(unmapped);
            return;
        }
        if self.memory.supply.free_list.bytes() < missing {
            return;
        }
        while self.memory.budget.totals().left.bytes < want {
            let Some(unmapped) = self.memory.supply.free_list.take_smallest() else {
                return;
            };
            self.release(unmapped);
        }
    }

    fn create(&mut self, size: u64) -> Result<Unmapped, MemoryError> {
        // Counted before the creation, so that no other operation creates the same quota.
        self.memory.budget.created(size);
        let core = self.core();
        let policy = self.memory.policy;
        let mut room = std::mem::replace(&mut self.room, core.room(0));
        let at_driver = AtDriver::begin(self, size);
        let created = (at_driver.0).unlocked(|| core.create(&policy, size, &mut room));
        at_driver.end();
        self.room = room;
        if created.is_err() {
            self.memory.budget.not_created(size);
        }
        created.map(Unmapped::fresh)
    }
}

impl Core {
    pub(in crate::pool) const fn room(&self, ahead: u64) -> Room<'_> {
        Room::new(&self.claimed, ahead)
    }

    /// Checks that the limit's free bytes are free, as [`free_beyond`](Self::free_beyond) counts.
    /// Called without the pool's lock.
    pub(in crate::pool) fn check_left(&self, policy: &Policy) -> Result<(), CallError> {
        let _one_by_one = self.creating();
        self.free_beyond(policy.leave_free, 0).map(drop)
    }

    /// Ensures that `size` bytes may be created. Asks the driver how much is free, if the limit
    /// requires that and `room` has too little. No other thread of the pool asks or creates while
    /// the returned value lives. Called without the pool's lock.
    fn find_room(
        &self,
        policy: &Policy,
        size: u64,
        room: &mut Room<'_>,
    ) -> Result<Option<MutexGuard<'_, ()>>, CallError> {
        if policy.leave_free == 0 {
            return Ok(None);
        }
        let creating = self.creating();
        if !room.has(size) {
            room.give_up();
            room.take(self.free_beyond(policy.leave_free, size)?, size);
        }
        Ok(Some(creating))
    }

    /// Excludes the other threads of the pool that ask and create: two concurrent questions would
    /// both find room for one creation.
    fn creating(&self) -> MutexGuard<'_, ()> {
        let creating = self.creating.lock();
        creating.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the driver's free bytes beyond `leave_free`, beyond those that memory pools of the
    /// driver may still obtain, and beyond those that operations are about to create; an error if
    /// there are fewer than `least`.
    fn free_beyond(&self, leave_free: u64, least: u64) -> Result<u64, CallError> {
        let (free, promised) = self.free_and_promised()?;
        let kept = leave_free.saturating_add(promised);
        let kept = kept.saturating_add(self.claimed.load(Ordering::SeqCst));
        let beyond = free.checked_sub(kept).filter(|&beyond| beyond >= least);
        beyond.ok_or(CallError::LeftFree { free, kept })
    }

    /// Creates memory with the pool's properties, unless the limit requires it to stay free.
    pub(in crate::pool) fn create(
        &self,
        policy: &Policy,
        size: u64,
        room: &mut Room<'_>,
    ) -> Result<Physical, MemoryError> {
        let failed = |cause| MemoryError::Create {
            size,
            location: policy.props.location,
            cause,
        };
        let _one_by_one = self.find_room(policy, size, room).map_err(failed)?;
        // Counted before it exists, so that other processes never take it for foreign memory.
        let member = self.ledger.get().map(|joined| &joined.member);
        member.inspect(|member| member.note_created(size));
        let created = Physical::builder(&self.device, size)
            .with_props(policy.props)
            .create();
        match created {
            Ok(_) => room.use_up(size),
            Err(_) => {
                // The free figure was wrong: the next creation asks again.
                room.give_up();
                member.inspect(|member| member.note_released(size));
            }
        }
        created
    }
}
