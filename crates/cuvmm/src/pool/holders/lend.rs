//! Lending to [holders](super::holder): extents, mappings and addresses, and how they come back.
//!
//! Keeps I-86 and I-124.

use std::sync::Arc;
use std::time::Instant;

use cuvmm_driver::PhysicalProps;

use super::held::{HolderId, Holders};
use super::holder::{Given, Holder};
use crate::deferred;
use crate::error::{BlockError, CallError, MemoryError, SleepError};
use crate::extents::{Space, Unmapped};
use crate::ledger::{InLine, Member};
use crate::own::Stream;
use crate::pool::accounts::Amount;
use crate::pool::blocks::sleep::GivenUp;
use crate::pool::core::{Core, Locked};
use crate::pool::gate::Polling;
use crate::pool::line::{Demand, Needs, Wait};
use crate::pool::memory::Scrub;
use crate::pool::state::gone;
use crate::pool::supply::Obtained;
use crate::pool::tenant::Tenant;
use crate::wanted::Purpose;

/// The part of its addresses that a holder gets first, and the least bytes that it gets if the pool
/// has them.
const FIRST_PART: u64 = 32;

const LEAST_PART: u64 = 1 << 30;

/// The part of the pool's remaining addresses that a holder gets at most.
const SHARE: u64 = 16;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Lending<'a> {
    pub(crate) holder: HolderId,
    /// In whole granules.
    pub(crate) sizes: &'a [u64],
    /// Mappings that the holder is about to make, besides one for each extent.
    pub(crate) mappings: u64,
    /// `true` if the holder zeroes memory that was used before.
    pub(crate) zeroes: bool,
    /// `true` if each extent must have exactly the requested size.
    pub(crate) whole: bool,
    /// `true` if memory and mappings are reclaimed when the driver or the pool has no more.
    pub(crate) claims: bool,
    /// The place in the line of a ledger of the request that [waits](Tenant::request).
    pub(crate) place: Option<InLine>,
}

/// The properties of a pool, and the most that a tenant may have.
pub(crate) struct LendingTerms {
    pub(crate) props: PhysicalProps,
    pub(crate) hardened: bool,
    /// `true` if memory is zeroed on its way between tenants.
    pub(crate) scrubs: bool,
    pub(crate) most: u64,
    pub(crate) most_addresses: u64,
}

/// The extents that each of several holders was lent.
pub(crate) type Lent = Vec<Vec<Unmapped>>;

impl Lending<'_> {
    pub(in crate::pool) fn bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }
}

impl Tenant {
    /// Locks the pool for work of a holder that only a registered tenant's may do.
    pub(super) fn lock_usable(&self) -> Result<Locked<'_>, BlockError> {
        let core = self.core();
        core.device.own_process()?;
        let state = core.lock();
        state.memory.check_usable(self.id())?;
        Ok(state)
    }

    pub(crate) fn attach(&self, holder: Arc<dyn Holder>) -> Result<HolderId, BlockError> {
        let (mut state, tenant) = (self.lock_usable()?, self.id());
        let id = state.memory.holders.add(tenant, holder);
        state.terms_changed(tenant);
        Ok(id)
    }

    /// Reserves addresses for a holder (`cuMemAddressReserve`), which then has at most `most` bytes
    /// of them: as many as it has already, or a [`FIRST_PART`]th of `most`, but at least
    /// [`LEAST_PART`] and at most a [`SHARE`]th of the pool's remaining addresses. If the driver
    /// grants no such range, reserves a smaller range of at least `least` bytes.
    pub(crate) fn reserve(
        &self,
        holder: HolderId,
        least: u64,
        most: u64,
    ) -> Result<Space, BlockError> {
        let (mut state, tenant) = (self.lock_usable()?, self.id());
        state
            .reserve_part(holder, (least, most))
            .map_err(|cause| BlockError::HeapOutOfAddresses {
                tenant: state.memory.budget.account(tenant).name.clone(),
                wanted: least,
                held: state.memory.holders.addresses_of(holder),
                limit: most,
                cause: cause.map(Box::new),
            })
    }

    /// Gets extents and charges for mappings, and reclaims memory if memory is short. One attempt:
    /// waits for no memory and calls no hook, so the holder may have memory out. Unless they must
    /// be whole, the extents may be more, and smaller, than requested. On failure nothing has
    /// changed, except that unused memory may have been reclaimed.
    pub(crate) fn lend(&self, lending: Lending<'_>) -> Result<Vec<Unmapped>, BlockError> {
        let core = self.core();
        core.device.own_process()?;
        let mut state = core.lock();
        (state.place, state.zeroes) = (lending.place, lending.zeroes);
        let lent = state.lend_extents(lending);
        let (memory, blocks) = state.halves();
        blocks.request_free_memory(memory);
        Core::unlock(state);
        lent
    }

    /// Makes the whole attempt of a holder that needs `bytes`, and repeats it as
    /// [`Core::request_of_holder`] does.
    pub(crate) fn request<T>(
        &self,
        bytes: u64,
        home: Option<&Stream>,
        wait: Wait,
        attempt: impl Fn(Option<InLine>) -> Result<T, BlockError>,
    ) -> Result<T, BlockError> {
        self.request_for(&Needs::of(bytes), home, wait, attempt)
    }

    /// Makes the whole attempt of a holder, which notes what it needs when it is refused, and repeats it
    /// as [`Core::request_of_holder`] does.
    pub(crate) fn request_for<T>(
        &self,
        needs: &Needs,
        home: Option<&Stream>,
        wait: Wait,
        attempt: impl Fn(Option<InLine>) -> Result<T, BlockError>,
    ) -> Result<T, BlockError> {
        let (core, at) = (self.core(), (wait, None));
        core.request_of_holder(self.id(), Demand::Holder(needs), home, at, attempt)
    }

    pub(crate) fn give_up(&self, holder: HolderId, given: Given) {
        let core = self.core();
        if given.is_nothing() && given.overdrawn == 0 {
            return;
        }
        let freed = given.bytes() > 0;
        let mut state = core.lock();
        state.receive(holder, given);
        state.release_marked();
        drop(state);
        if freed {
            core.announce();
        }
    }

    /// [Gives up](Self::give_up) memory of a holder that `take` unmaps; with `release`, releases it
    /// to the driver. What was unmapped before a panic of the driver is given up too. Returns the
    /// error that ended the taking.
    pub(crate) fn give_up_by(
        &self,
        holder: HolderId,
        release: bool,
        take: impl FnOnce(&mut Given),
    ) -> (GivenUp, Option<CallError>) {
        let core = self.core();
        let mut state = core.lock();
        let free_list = state.memory.supply.free();
        let (bytes, error) = state.receive_from(holder, take);
        let given = state.gave_up(bytes, free_list, release);
        drop(state);
        // Before an error, mappings may have come free without bytes.
        if bytes > 0 || error.is_some() {
            core.announce();
        }
        if let Some(error) = &error {
            log!(warn, %error, "unused memory of a heap or cache could not be unmapped: it stays for now");
        }
        (given, error)
    }

    /// Repeats an attempt of a holder that fails because of work, while `again` returns `true` for
    /// the error and until the deadline. No lock is held meanwhile.
    pub(crate) fn repeat<T>(
        &self,
        deadline: Option<Instant>,
        attempt: impl Fn() -> Result<T, SleepError>,
        again: impl Fn(&SleepError) -> bool,
    ) -> Result<T, SleepError> {
        let core = self.core();
        let attempt = |state| {
            Core::unlock(state);
            let outcome = attempt();
            (core.lock(), outcome)
        };
        core.until(deadline, attempt, again)
    }

    /// Takes at most about `wanted` bytes from a holder, and returns their number. Waits while the
    /// mapper unmaps the holder's mappings, whose extents cannot be taken until then.
    pub(crate) fn take_from(&self, holder: HolderId, wanted: u64) -> Result<u64, CallError> {
        let core = self.core();
        core.device.own_process()?;
        let mut state = core.lock();
        let is_tidied = |holders: &Holders| holders.get(holder).is_some_and(|it| it.tidied);
        while is_tidied(&state.memory.holders) && !deferred::is_in_hook() {
            state = state.wait(&core.settled, None);
        }
        let taken = state.take_from_holder(holder, wanted);
        state.return_addresses(holder);
        state.release_marked();
        drop(state);
        core.announce();
        taken
    }

    pub(crate) fn return_addresses(&self, holder: HolderId) {
        self.core().lock().return_addresses(holder);
    }

    /// Notes freed memory of a holder: waiting requests try again, and with `reports` the pool
    /// reclaims from the holder.
    pub(crate) fn note_freed(&self, reports: bool) {
        let core = self.core();
        if reports {
            core.lock().memory.has_deferred = true;
        }
        core.announce();
    }

    /// Asks the mapper to tidy a holder, once no capture guard lives. Returns `false` if the pool
    /// has no running mapper.
    pub(crate) fn tidy_later(&self, holder: HolderId) -> bool {
        let core = self.core();
        if !core.has_mapper() {
            return false;
        }
        let mut state = core.lock();
        state.tidy_soon(holder);
        Core::unlock(state);
        true
    }

    /// Returns the permission to query, synchronize and record on the context, or `None` while a
    /// capture guard lives. It must not be dropped under a holder's lock.
    pub(crate) fn polling(&self) -> Option<Polling<'_>> {
        self.core().polling()
    }

    /// Returns the bytes that the tenant can be charged now without a reclaim, with what a ledger has
    /// left; 0 while requests wait, which would get what the tenant gave up for them.
    pub(crate) fn available(&self) -> u64 {
        if self.is_awaited() {
            return 0;
        }
        let (state, id) = (self.core().lock(), self.id());
        let left = state.left_in_ledger(Member::left);
        state.memory.budget.available_after(id, 0, 0, left)
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.core().is_capturing()
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.core().is_awaited()
    }

    /// Returns how often waiting requests were told of memory.
    #[cfg(test)]
    pub(crate) fn told(&self) -> u64 {
        self.core().look(|state| state.memory.line.told())
    }

    /// Returns the error of a request that is refused since memory is short, or since a guard or the
    /// request's stream `captures`.
    pub(crate) fn refused(&self, wanted: u64, captures: bool) -> BlockError {
        self.core().look(|state| match captures {
            true => state.captured(self.id(), wanted),
            false => state.out_of_memory(self.id(), wanted),
        })
    }

    pub(crate) fn not_placed(&self, error: MemoryError) -> BlockError {
        self.core().lock().not_placed(self.id(), 0, error)
    }

    pub(crate) fn check_usable(&self) -> Result<(), BlockError> {
        self.core()
            .look(|state| state.memory.check_usable(self.id()))
    }

    /// Ends a holder whose owner is gone. Its memory goes to the pool as the work on it is
    /// complete.
    pub(crate) fn detach(&self, holder: HolderId) {
        let (core, tenant) = (self.core(), self.id());
        let mut state = core.lock();
        if let Some(held) = state.memory.holders.get_mut(holder) {
            held.ended = true;
        }
        state.terms_changed(tenant);
        state.memory.has_deferred = true;
        Core::unlock(state);
        core.announce();
    }

    /// Returns the number by which extents name the tenant as last writer.
    pub(crate) fn writer(&self) -> u64 {
        self.id().0
    }

    /// Returns what the pool says of itself to the tenant's holders.
    pub(crate) fn lending_terms(&self) -> LendingTerms {
        self.core().look(|state| {
            let (policy, budget) = (&state.memory.policy, &state.memory.budget);
            LendingTerms {
                props: policy.props,
                hardened: state.blocks.are_hardened(),
                scrubs: policy.scrub != Scrub::Never,
                most: budget.limit_of(self.id()),
                most_addresses: budget.totals().limits.addresses,
            }
        })
    }
}

/// Bytes charged for a holder, whose memory is being obtained. The drop of this value ends the charge,
/// also after a panic of the driver.
struct Charged<'b, 'a> {
    state: &'b mut Locked<'a>,
    /// `None` once the holder has the memory.
    of: Option<(HolderId, u64)>,
}

impl Drop for Charged<'_, '_> {
    fn drop(&mut self) {
        if let Some((id, bytes)) = self.of {
            self.state.end_charge(id, Amount::bytes(bytes));
        }
    }
}

/// Memory that several holders were lent. The drop of this value takes it back, also after a panic of
/// the driver.
struct LentTo<'b, 'a> {
    state: &'b mut Locked<'a>,
    lendings: &'b [Lending<'b>],
    all: Lent,
}

impl Drop for LentTo<'_, '_> {
    fn drop(&mut self) {
        let all = std::mem::take(&mut self.all);
        for (lending, extents) in self.lendings.iter().zip(&all) {
            let mappings = lending.mappings + extents.len() as u64;
            let amount = Amount::of(lending.bytes(), mappings, 0);
            self.state.end_charge(lending.holder, amount);
        }
        self.state.put_back(all.into_iter().flatten().collect());
    }
}

impl Locked<'_> {
    /// Reserves addresses for a holder. The error has no cause if the holder would have more than
    /// `most` bytes.
    fn reserve_part(
        &mut self,
        id: HolderId,
        (least, most): (u64, u64),
    ) -> Result<Space, Option<BlockError>> {
        let granule = self.memory.device.granule();
        let mut largest = most;
        loop {
            if least > most.saturating_sub(self.memory.holders.addresses_of(id)) {
                return Err(None);
            }
            self.make_address_room(least)?;
            // The holder may have given addresses back.
            let held = self.memory.holders.addresses_of(id);
            let allowed = most.saturating_sub(held);
            let share = self.memory.budget.totals().left.addresses / SHARE;
            let usual = held.max(most / FIRST_PART).max(LEAST_PART);
            let size = usual.min(share).min(largest).min(allowed);
            let size = granule.round_down(size).max(least);
            // Counted first, so that no other thread of the heap reserves the same bytes.
            self.memory.holders.add_addresses(id, size);
            match self.reserve_for(id.tenant(), size, 0, 1) {
                Ok(mut spaces) => return spaces.pop().ok_or_else(|| Some(gone())),
                Err(error) => {
                    self.memory.holders.subtract_addresses(id, size);
                    if size == least || !error.is_out_of_memory() {
                        return Err(Some(error));
                    }
                    largest = size / 2;
                }
            }
        }
    }

    /// Reclaims memory, charges a tenant `bytes` for a holder and calls `obtain` to get them. If
    /// that fails, refunds them. May release the lock.
    pub(super) fn charge_holder<T>(
        &mut self,
        id: HolderId,
        bytes: u64,
        obtain: impl FnOnce(&mut Self) -> Result<T, BlockError>,
    ) -> Result<T, BlockError> {
        let tenant = id.tenant();
        self.memory.check_usable(tenant)?;
        // A request that needs no memory is served from the heap's own.
        if bytes > 0 {
            self.leave_to_others(tenant, bytes)?;
        }
        let charge = self.obtain(tenant, bytes, Purpose::New)?;
        // The bytes are the holder's from here on.
        self.memory.budget.keep(charge);
        if let Some(held) = self.memory.holders.get_mut(id) {
            held.bytes += bytes;
        }
        let mut charged = Charged {
            state: self,
            of: Some((id, bytes)),
        };
        let obtained = obtain(charged.state).map_err(|error| error.without_charge(bytes))?;
        charged.of = None;
        Ok(obtained)
    }

    /// Lends memory to several holders, and carries out `act`: all or nothing. May release the lock.
    pub(in crate::pool) fn lend_and<T, E>(
        &mut self,
        lendings: &[Lending<'_>],
        act: impl FnOnce(&mut Self) -> Result<Result<T, E>, BlockError>,
    ) -> Result<Result<(T, Lent), E>, BlockError> {
        let mut lent = LentTo {
            state: self,
            lendings,
            all: Vec::with_capacity(lendings.len()),
        };
        for &lending in lendings {
            lent.all.push(lent.state.lend_extents(lending)?);
        }
        let done = act(lent.state)?;
        Ok(done.map(|done| (done, std::mem::take(&mut lent.all))))
    }

    pub(super) fn lend_extents(
        &mut self,
        lending: Lending<'_>,
    ) -> Result<Vec<Unmapped>, BlockError> {
        let (tenant, bytes) = (lending.holder.tenant(), lending.bytes());
        self.charge_holder(lending.holder, bytes, |state| {
            let extents =
                state.gather_sizes(tenant, lending.sizes, (lending.whole, lending.claims))?;
            let count = extents.len() as u64 + lending.mappings;
            let obtained = Obtained(state, extents);
            (obtained.0).make_mapping_room(tenant, count, lending.claims)?;
            let extents = obtained.take();
            let mappings = Amount::mappings(count);
            let charge = state.memory.budget.charge(Some(tenant), mappings);
            state.memory.budget.keep(charge);
            if let Some(held) = state.memory.holders.get_mut(lending.holder) {
                held.mappings += count;
            }
            Ok(extents)
        })
    }
}
