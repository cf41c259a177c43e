//! The state of a pool behind its lock: budget, free list, tenants and their slots.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuvmm_driver::{HandleTypes, PhysicalProps};

use super::accounts::{Budget, Charge, TenantId, Tenants, Terms};
use super::blocks::ahead::Precommit;
use super::blocks::slots::{
    Freed, FreedBlock, Hardening, PurgeQueues, Slot, SlotId, Slots, Tenancy,
};
use super::gate::Gate;
use super::holders::{Held, Holders};
use super::line::Line;
use super::supply::Supply;
use crate::device::Device;
use crate::driver::memory_option;
use crate::error::{BlockError, CallError, Shortage};
use crate::growth::Growth;
use crate::own::Stream;

#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct Policy {
    pub(crate) props: PhysicalProps,
    pub(crate) largest_extent: u64,
    pub(crate) scrub: Scrub,
    pub(crate) growth: Growth,
    /// Bytes that must stay free on the device after a creation.
    pub(super) leave_free: u64,
}

impl Policy {
    pub(crate) fn new(device: &Device, largest_extent: u64) -> Self {
        Self {
            props: PhysicalProps::device(device.ordinal()),
            largest_extent,
            scrub: Scrub::default(),
            growth: Growth::default(),
            leave_free: 0,
        }
    }

    pub(crate) const fn shareable(&mut self, types: HandleTypes) {
        self.props.handle_types = types;
    }
}

/// When memory is filled with zeros on its way from one tenant to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scrub {
    /// Whenever memory changes tenants, ordered before the new owner's work. The default.
    #[default]
    BetweenTenants,
    /// Never: the pool's tenants trust each other.
    Never,
}

pub(crate) struct State {
    pub(crate) device: Device,
    pub(crate) policy: Policy,
    pub(super) budget: Budget,
    pub(crate) supply: Supply,
    pub(crate) terms: Tenants,
    pub(super) slots: Slots,
    /// Slots with memory to be unmapped.
    pub(super) queues: PurgeQueues,
    /// Counts uses, to order memory by its last use. Stream caches advance it too.
    pub(crate) clock: Arc<AtomicU64>,
    pub(super) gate: Gate,
    pub(super) line: Line,
    /// `true` if the pool or a tenant may exceed a lowered limit.
    pub(super) lowered: bool,
    /// `true` if work is left to do before an operation ends, its own or another operation's.
    pub(super) has_deferred: bool,
    pub(super) holders: Holders,
    pub(super) to_free: Vec<FreedBlock>,
    pub(crate) refusals: u64,
    #[cfg(debug_assertions)]
    pub(super) audits: u64,
    pub(crate) precommit: Option<Precommit>,
    pub(super) hardening: Option<Box<Hardening>>,
    /// The stream that fills and copies for blocks without a home stream.
    pub(super) scrubber: Option<Stream>,
}

impl State {
    pub(crate) fn new(device: Device, policy: Policy, budget: Budget) -> Self {
        Self {
            device,
            policy,
            budget,
            supply: Supply::default(),
            terms: Tenants::default(),
            slots: Slots::default(),
            queues: PurgeQueues::default(),
            clock: Arc::default(),
            gate: Gate::default(),
            line: Line::default(),
            lowered: false,
            has_deferred: false,
            holders: Holders::default(),
            to_free: Vec::new(),
            refusals: 0,
            #[cfg(debug_assertions)]
            audits: 0,
            precommit: None,
            hardening: None,
            scrubber: None,
        }
    }

    pub(crate) fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    pub(crate) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn register(
        &mut self,
        terms: Terms,
        tenancy: Tenancy,
        (guarantee, limit): (u64, u64),
    ) -> TenantId {
        let id = self.terms.open(terms);
        self.budget.open(id, guarantee, limit);
        self.slots.open(id, tenancy);
        self.update_bypass(id);
        id
    }

    /// Returns the bytes of a tenant that cannot be reclaimed, however long a request waits for the
    /// GPU.
    pub(super) fn kept_by(&self, id: TenantId) -> u64 {
        let kept = self.slots.of(id).map_or(0, Tenancy::kept);
        kept + self.holders.kept_by(id) + self.budget.account(id).in_flight
    }

    /// Returns a slot for changes that do not alter its place on the lists, and the gate that polls
    /// its fence.
    pub(super) fn slot_and_gate(&mut self, id: SlotId) -> Option<(&mut Slot, &mut Gate)> {
        Some((self.slots.get_mut(id)?, &mut self.gate))
    }

    pub(super) const fn is_capturing(&self) -> bool {
        self.gate.is_capturing()
    }

    /// Returns `true` if work queued on `home` now would become part of a graph, or might break a
    /// capture.
    pub(super) fn captures(&self, home: Option<&Stream>) -> Result<bool, CallError> {
        Ok(self.is_capturing() || home.map_or(Ok(false), Stream::is_capturing)?)
    }

    /// Takes a slot, works on it, and puts it back: no work done for the slot can take memory from
    /// it. Returns `None` if there is no such slot, or if it is out.
    pub(super) fn with_slot<T>(
        &mut self,
        id: SlotId,
        work: impl FnOnce(&mut Self, &mut Slot) -> T,
    ) -> Option<T> {
        let mut slot = self.slots.take(id)?;
        let done = work(self, &mut slot);
        self.put_slot(slot);
        Some(done)
    }

    /// Puts a slot in its place, and lists it for the memory that it can give and, if some must not
    /// be kept, to be [purged](super::blocks::purge).
    pub(super) fn put_slot(&mut self, mut slot: Box<Slot>) {
        let id = slot.id;
        if slot.sleep_state.is_awake() {
            slot.memory_taken();
        }
        let drains = self.terms.drains(id.tenant);
        // Memory beyond a lowered limit is reclaimed as it becomes free.
        self.has_deferred |= self.lowered && slot.has_spare();
        if slot.is_to_purge(self.hardening.is_some() || drains) {
            self.queues.list(&mut slot, drains);
            // A slot of a draining tenant is purged when the operation ends.
            self.has_deferred |= drains;
        }
        self.slots.put(slot);
    }

    /// Puts back a listed slot that could not be purged.
    pub(super) fn put_unlisted(&mut self, mut slot: Box<Slot>) {
        slot.memory_taken();
        self.slots.put(slot);
    }

    pub(super) fn is_out(&self, id: SlotId) -> bool {
        // Usually no operation is in flight.
        !self.gate.is_idle() && self.slots.is_out(id)
    }

    pub(super) fn remove_slot(&mut self, id: SlotId) {
        self.slots.remove(id);
        self.forget_if_drained(id.tenant);
    }

    /// Keeps the charge for memory that is in a slot, which is out, now.
    pub(super) fn keep_for(&mut self, slot: &Slot, charge: Charge) {
        self.slots.renew(slot);
        self.budget.keep(charge);
    }

    pub(crate) fn check_usable(&self, id: TenantId) -> Result<(), BlockError> {
        self.device.usable()?;
        match self.terms.is_registered(id) {
            true => Ok(()),
            false => Err(BlockError::Unregistered(self.terms.name_of(id))),
        }
    }

    /// Updates a tenant's blocks and holders for its terms. Freed blocks bypass the stream caches
    /// while a block of the tenant sleeps and while the pool or the tenant exceeds a lowered limit.
    /// Holders report freed memory while a limit is exceeded, and when they ended or the tenant
    /// drains.
    pub(super) fn update_bypass(&mut self, id: TenantId) {
        if let (Some(terms), Some(tenancy)) = (self.terms.get(id), self.slots.of_mut(id)) {
            let exceeds = self.lowered && self.budget.excess() > 0;
            let bypassed = exceeds || terms.is_beyond() || tenancy.has_sleepers();
            tenancy.unswept.bypass(bypassed);
            tenancy.may_grow = terms.may_grow();
            let reports = exceeds || !terms.may_grow();
            let report = |held: &Held| held.holder().report_freed(reports || held.has_ended());
            self.holders.of(id).iter().for_each(report);
        }
    }

    /// Removes an unregistered tenant without slots.
    pub(super) fn forget_if_drained(&mut self, id: TenantId) {
        let is_empty = self.slots.of(id).is_some_and(Tenancy::is_empty);
        if is_empty && self.holders.of(id).is_empty() && self.terms.drains(id) {
            self.slots.close(id);
            self.terms.close(id);
            self.budget.close(id);
        }
    }

    pub(super) fn check_addresses(&self, wanted: u64) -> Result<(), BlockError> {
        match wanted <= self.budget.addresses_left() {
            true => Ok(()),
            false => Err(self.out_of_addresses(wanted)),
        }
    }

    fn out_of_addresses(&self, wanted: u64) -> BlockError {
        BlockError::OutOfAddresses {
            wanted,
            held: self.budget.addresses(),
            limit: self.budget.limits().addresses,
        }
    }

    pub(super) fn out_of_memory(&self, id: TenantId, wanted: u64) -> BlockError {
        BlockError::OutOfMemory(self.shortage(id, wanted, 0))
    }

    pub(super) fn captured(&self, id: TenantId, wanted: u64) -> BlockError {
        BlockError::Capturing(self.shortage(id, wanted, 0))
    }

    pub(super) fn driver_out_of_memory(
        &self,
        id: TenantId,
        wanted: u64,
        cause: CallError,
    ) -> BlockError {
        let mut shortage = self.shortage(id, wanted, 0);
        shortage.memory_set_by = memory_option(self.device.driver().kind());
        BlockError::DriverOutOfMemory { cause, shortage }
    }

    /// Returns the option that sets the device's memory, if that memory is the pool's limit.
    pub(super) fn memory_set_by(&self) -> Option<&'static str> {
        let option = memory_option(self.device.driver().kind());
        let all = self.device.granule().round_down(self.device.total_memory());
        option.filter(|_| self.policy.leave_free > 0 || self.budget.limits().bytes >= all)
    }

    pub(crate) fn shortage(&self, id: TenantId, wanted: u64, reclaimable: u64) -> Box<Shortage> {
        let account = self.budget.account(id);
        let mut holders: Vec<(String, u64)> = self
            .budget
            .accounts()
            .filter(|&(other, account)| other != id && account.held > 0)
            .filter_map(|(other, account)| {
                Some((self.terms.get(other)?.name().to_owned(), account.held))
            })
            .collect();
        holders.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        let tenancies = self.slots.iter();
        let figures = tenancies.flat_map(|(_, it)| it.figures().map(|(figures, _)| figures));
        let (mut pending_free, mut leased, mut stranded) = (0, 0, 0);
        for figures in figures {
            // Stranded memory does not become free with its fence.
            let idle = figures.idle + figures.precommitted;
            let gives = idle.saturating_sub(figures.stranded);
            match figures.freed {
                Freed::Cached => {}
                Freed::PendingFree => pending_free += gives,
                Freed::Leased => leased += gives,
            }
            stranded += figures.stranded;
        }
        for (id, tenancy) in self.slots.iter() {
            pending_free += tenancy.shared_pending_free() + self.holders.pending_of(id);
        }
        for held in self.holders.all() {
            let figures = held.holder().figures();
            stranded += figures.stranded() + figures.kept;
        }
        let creatable = self.budget.creatable().min(self.policy.largest_extent);
        Box::new(Shortage {
            tenant: self.terms.name_of(id),
            wanted,
            available: self.budget.available_to(id).saturating_add(reclaimable),
            largest_run: self
                .device
                .granule()
                .round_down(creatable)
                .max(self.supply.largest_free()),
            limit: self.budget.limits().bytes,
            tenant_limit: self.budget.limit_of(id),
            tenant_held: account.held,
            guaranteed_to_others: self.budget.guaranteed_to_others(id),
            pending_free,
            leased,
            stranded,
            quarantined: self.budget.quarantined(),
            holders,
            ledger: None,
            memory_set_by: self.memory_set_by(),
        })
    }
}

pub(super) fn gone() -> BlockError {
    BlockError::Unregistered(String::new())
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}
