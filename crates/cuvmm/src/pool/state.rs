//! The state of a pool behind its lock: budget, free list, tenants and their slots.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuvmm_driver::{HandleTypes, PhysicalProps};

use super::accounts::{Budget, Charge, TenantId, Tenants, Terms};
use super::blocks::ahead::Precommit;
use super::blocks::slots::{BlockPlace, Freed, FreedBlock, Hardening, Slot, SlotId, Tenancy};
use super::gate::Gate;
use super::holders::{Held, Holders};
use super::line::Line;
use super::supply::Supply;
use crate::device::Device;
use crate::error::{BlockError, CallError, Shortage};
use crate::growth::Growth;
use crate::own::Stream;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    pub(crate) tenants: BTreeMap<TenantId, Tenancy>,
    /// Counts uses, to order memory by its last use. Stream caches advance it too.
    pub(crate) clock: Arc<AtomicU64>,
    pub(super) gate: Gate,
    pub(super) line: Line,
    /// `true` if the pool or a tenant may exceed a lowered limit.
    pub(super) lowered: bool,
    /// `true` if work is left to do before an operation ends, its own or another operation's.
    pub(super) has_deferred: bool,
    /// Slots of draining tenants that were listed to be purged since the last purge.
    pub(super) listed: usize,
    /// Slots of draining tenants with memory to be unmapped.
    pub(super) draining: VecDeque<SlotId>,
    pub(super) holders: Holders,
    pub(super) to_free: Vec<FreedBlock>,
    pub(crate) refusals: u64,
    #[cfg(debug_assertions)]
    pub(super) audits: u64,
    /// The slots that the locked section has opened or taken, and the most of one section.
    #[cfg(debug_assertions)]
    pub(super) worked_on: usize,
    #[cfg(debug_assertions)]
    pub(super) most_worked_on: usize,
    pub(crate) precommit: Option<Precommit>,
    pub(super) hardening: Option<Box<Hardening>>,
    pub(super) purging: VecDeque<SlotId>,
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
            tenants: BTreeMap::new(),
            clock: Arc::default(),
            gate: Gate::default(),
            line: Line::default(),
            lowered: false,
            has_deferred: false,
            listed: 0,
            draining: VecDeque::new(),
            holders: Holders::default(),
            to_free: Vec::new(),
            refusals: 0,
            #[cfg(debug_assertions)]
            audits: 0,
            #[cfg(debug_assertions)]
            worked_on: 0,
            #[cfg(debug_assertions)]
            most_worked_on: 0,
            precommit: None,
            hardening: None,
            purging: VecDeque::new(),
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
        self.tenants.insert(id, tenancy);
        self.update_bypass(id);
        id
    }

    /// Returns the bytes of a tenant that cannot be reclaimed, however long a request waits for the
    /// GPU.
    pub(super) fn kept_by(&self, id: TenantId) -> u64 {
        let kept = self.tenants.get(&id).map_or(0, Tenancy::kept);
        kept + self.holders.kept_by(id) + self.budget.account(id).in_flight
    }

    pub(crate) fn slot(&self, id: SlotId) -> Option<&Slot> {
        self.tenants.get(&id.tenant)?.slot(id.index)
    }

    /// Returns a slot for changes that do not alter its place on the lists.
    pub(super) fn slot_mut(&mut self, id: SlotId) -> Option<&mut Slot> {
        Some(self.slot_and_gate(id)?.0)
    }

    /// Returns a slot as [`slot_mut`](Self::slot_mut) does, and the gate that polls its fence.
    pub(super) fn slot_and_gate(&mut self, id: SlotId) -> Option<(&mut Slot, &mut Gate)> {
        let slot = self.tenants.get_mut(&id.tenant)?.slot_mut(id.index)?;
        Some((slot, &mut self.gate))
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
        let mut slot = self.take_slot(id)?;
        let done = work(self, &mut slot);
        self.put_slot(slot);
        Some(done)
    }

    /// Takes a slot from its place until the lock is released, and updates the last writers of its
    /// memory, which [growing within](Self::grow_within) postpones.
    pub(crate) fn take_slot(&mut self, id: SlotId) -> Option<Box<Slot>> {
        self.note_slot();
        let mut slot = self.tenants.get_mut(&id.tenant)?.take(id.index)?;
        slot.note_writer();
        Some(slot)
    }

    #[inline]
    pub(super) const fn note_slot(&mut self) {
        #[cfg(debug_assertions)]
        {
            self.worked_on += 1;
        }
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
            self.list(&mut slot, drains);
        }
        if let Some(tenancy) = self.tenants.get_mut(&id.tenant) {
            tenancy.put(slot);
        }
    }

    /// Lists a slot to be [purged](super::blocks::purge), before the slots listed already. A slot of a
    /// draining tenant is purged when the operation ends.
    pub(super) fn list(&mut self, slot: &mut Slot, drains: bool) {
        if slot.purging && drains {
            self.purging.retain(|&id| id != slot.id);
            self.draining.retain(|&id| id != slot.id);
        } else if slot.purging {
            return;
        }
        slot.purging = true;
        if drains {
            self.draining.push_front(slot.id);
            self.listed += 1;
            self.has_deferred = true;
        } else {
            self.purging.push_front(slot.id);
        }
    }

    /// Puts back a listed slot that could not be purged.
    pub(super) fn put_unlisted(&mut self, mut slot: Box<Slot>) {
        slot.memory_taken();
        if let Some(tenancy) = self.tenants.get_mut(&slot.id.tenant) {
            tenancy.put(slot);
        }
    }

    pub(super) fn is_out(&self, id: SlotId) -> bool {
        // Usually no operation is in flight.
        if self.gate.is_idle() {
            return false;
        }
        let tenancy = self.tenants.get(&id.tenant);
        tenancy.is_some_and(|tenancy| tenancy.is_out(id.index))
    }

    pub(super) fn remove_range(&mut self, id: SlotId) {
        if let Some(tenancy) = self.tenants.get_mut(&id.tenant) {
            tenancy.remove_range(id.index);
        }
        self.forget_if_drained(id.tenant);
    }

    /// Keeps the charge for memory that is in a slot, which is out, now.
    pub(super) fn keep_for(&mut self, slot: &Slot, charge: Charge) {
        self.renew(slot);
        self.budget.keep(charge);
    }

    /// Updates the figures of a slot that is out.
    pub(super) fn renew(&mut self, slot: &Slot) {
        if let Some(tenancy) = self.tenants.get_mut(&slot.id.tenant) {
            tenancy.renew(slot);
        }
    }

    /// Gives up the slots that an operation had out when a panic ended it.
    pub(super) fn lose(&mut self, flight: NonZeroU64) {
        let tenants = self.tenants.values_mut();
        tenants.for_each(|tenancy| tenancy.lose(flight));
    }

    pub(crate) fn check_usable(&self, id: TenantId) -> Result<(), BlockError> {
        self.device.usable()?;
        match self.terms.is_registered(id) {
            true => Ok(()),
            false => Err(BlockError::Unregistered(self.terms.name_of(id))),
        }
    }

    pub(super) fn is_asleep(&self, place: &BlockPlace) -> bool {
        let tenancy = self.tenants.get(&place.slot.tenant);
        tenancy.is_some_and(|tenancy| tenancy.sleeps(place.slot.index))
    }

    /// Updates a tenant's blocks and holders for its terms. Freed blocks bypass the stream caches
    /// while a block of the tenant sleeps and while the pool or the tenant exceeds a lowered limit.
    /// Holders report freed memory while a limit is exceeded, and when they ended or the tenant
    /// drains.
    pub(super) fn update_bypass(&mut self, id: TenantId) {
        if let (Some(terms), Some(tenancy)) = (self.terms.get(id), self.tenants.get_mut(&id)) {
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
        let is_empty = self.tenants.get(&id).is_some_and(Tenancy::is_empty);
        if is_empty && self.holders.of(id).is_empty() && self.terms.drains(id) {
            self.tenants.remove(&id);
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
        let shortage = self.shortage(id, wanted, 0);
        BlockError::DriverOutOfMemory { cause, shortage }
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
        let tenants = self.tenants.values();
        let figures = tenants.flat_map(|tenancy| tenancy.figures().map(|(figures, _)| figures));
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
        for (&id, tenancy) in &self.tenants {
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
