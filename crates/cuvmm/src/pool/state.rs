//! The state of a pool behind its lock: budget, free list, tenants and their slots.

use std::fmt;
use std::sync::atomic::Ordering;

use super::accounts::{Budget, Charge, TenantId, Terms};
use super::blocks::Blocks;
use super::blocks::slots::{Freed, Slot, SlotId, Tenancy};
use super::gate::Gate;
use super::holders::Held;
use super::memory::{Memory, Policy};
use crate::device::Device;
use crate::driver::memory_option;
use crate::error::{BlockError, CallError, Shortage};
use crate::own::Stream;

pub(crate) struct State {
    pub(super) memory: Memory,
    pub(super) blocks: Blocks,
}

impl State {
    pub(crate) fn new(device: Device, policy: Policy, budget: Budget) -> Self {
        Self {
            memory: Memory::new(device, policy, budget),
            blocks: Blocks::default(),
        }
    }

    pub(crate) fn now(&self) -> u64 {
        self.blocks.clock.load(Ordering::Relaxed)
    }

    pub(crate) fn tick(&self) -> u64 {
        self.blocks.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn register(
        &mut self,
        terms: Terms,
        tenancy: Tenancy,
        (guarantee, limit): (u64, u64),
    ) -> TenantId {
        let id = self.memory.terms.open(terms);
        self.memory.budget.open(id, guarantee, limit);
        self.blocks.slots.open(id, tenancy);
        self.update_bypass(id);
        id
    }

    /// Returns the bytes of a tenant that cannot be reclaimed, however long a request waits for the
    /// GPU.
    pub(super) fn kept_by(&self, id: TenantId) -> u64 {
        let kept = self.blocks.slots.of(id).map_or(0, Tenancy::kept);
        kept + self.memory.holders.kept_by(id) + self.memory.budget.account(id).in_flight
    }

    /// Returns a slot for changes that do not alter its place on the lists, and the gate that polls
    /// its fence.
    pub(super) fn slot_and_gate(&mut self, id: SlotId) -> Option<(&mut Slot, &mut Gate)> {
        Some((self.blocks.slots.get_mut(id)?, &mut self.memory.gate))
    }

    pub(super) const fn is_capturing(&self) -> bool {
        self.memory.gate.is_capturing()
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
        let mut slot = self.blocks.slots.take(id)?;
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
        let drains = self.memory.terms.drains(id.tenant);
        // Memory beyond a lowered limit is reclaimed as it becomes free.
        self.memory.has_deferred |= self.memory.lowered && slot.has_spare();
        if slot.is_to_purge(self.blocks.hardening.is_some() || drains) {
            self.blocks.queues.list(&mut slot, drains);
            // A slot of a draining tenant is purged when the operation ends.
            self.memory.has_deferred |= drains;
        }
        self.blocks.slots.put(slot);
    }

    /// Puts back a listed slot that could not be purged.
    pub(super) fn put_unlisted(&mut self, mut slot: Box<Slot>) {
        slot.memory_taken();
        self.blocks.slots.put(slot);
    }

    pub(super) fn is_out(&self, id: SlotId) -> bool {
        // Usually no operation is in flight.
        !self.memory.gate.is_idle() && self.blocks.slots.is_out(id)
    }

    pub(super) fn remove_slot(&mut self, id: SlotId) {
        self.blocks.slots.remove(id);
        self.forget_if_drained(id.tenant);
    }

    /// Keeps the charge for memory that is in a slot, which is out, now.
    pub(super) fn keep_for(&mut self, slot: &Slot, charge: Charge) {
        self.blocks.slots.renew(slot);
        self.memory.budget.keep(charge);
    }

    pub(crate) fn check_usable(&self, id: TenantId) -> Result<(), BlockError> {
        self.memory.device.usable()?;
        match self.memory.terms.is_registered(id) {
            true => Ok(()),
            false => Err(BlockError::Unregistered(self.memory.terms.name_of(id))),
        }
    }

    /// Updates a tenant's blocks and holders for its terms. Freed blocks bypass the stream caches
    /// while a block of the tenant sleeps and while the pool or the tenant exceeds a lowered limit.
    /// Holders report freed memory while a limit is exceeded, and when they ended or the tenant
    /// drains.
    pub(super) fn update_bypass(&mut self, id: TenantId) {
        if let (Some(terms), Some(tenancy)) =
            (self.memory.terms.get(id), self.blocks.slots.of_mut(id))
        {
            let exceeds = self.memory.lowered && self.memory.budget.excess() > 0;
            let bypassed = exceeds || terms.is_beyond() || tenancy.has_sleepers();
            tenancy.unswept.bypass(bypassed);
            tenancy.may_grow = terms.may_grow();
            let reports = exceeds || !terms.may_grow();
            let report = |held: &Held| held.holder().report_freed(reports || held.has_ended());
            self.memory.holders.of(id).iter().for_each(report);
        }
    }

    /// Removes an unregistered tenant without slots.
    pub(super) fn forget_if_drained(&mut self, id: TenantId) {
        let is_empty = self.blocks.slots.of(id).is_some_and(Tenancy::is_empty);
        if is_empty && self.memory.holders.of(id).is_empty() && self.memory.terms.drains(id) {
            self.blocks.slots.close(id);
            self.memory.terms.close(id);
            self.memory.budget.close(id);
        }
    }

    pub(super) fn check_addresses(&self, wanted: u64) -> Result<(), BlockError> {
        match wanted <= self.memory.budget.addresses_left() {
            true => Ok(()),
            false => Err(self.out_of_addresses(wanted)),
        }
    }

    fn out_of_addresses(&self, wanted: u64) -> BlockError {
        BlockError::OutOfAddresses {
            wanted,
            held: self.memory.budget.addresses(),
            limit: self.memory.budget.limits().addresses,
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
        shortage.memory_set_by = memory_option(self.memory.device.driver().kind());
        BlockError::DriverOutOfMemory { cause, shortage }
    }

    /// Returns the option that sets the device's memory, if that memory is the pool's limit.
    pub(super) fn memory_set_by(&self) -> Option<&'static str> {
        let option = memory_option(self.memory.device.driver().kind());
        let all = self
            .memory
            .device
            .granule()
            .round_down(self.memory.device.total_memory());
        option.filter(|_| {
            self.memory.policy.leave_free > 0 || self.memory.budget.limits().bytes >= all
        })
    }

    pub(crate) fn shortage(&self, id: TenantId, wanted: u64, reclaimable: u64) -> Box<Shortage> {
        let account = self.memory.budget.account(id);
        let mut holders: Vec<(String, u64)> = self
            .memory
            .budget
            .accounts()
            .filter(|&(other, account)| other != id && account.held > 0)
            .filter_map(|(other, account)| {
                Some((
                    self.memory.terms.get(other)?.name().to_owned(),
                    account.held,
                ))
            })
            .collect();
        holders.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        let tenancies = self.blocks.slots.iter();
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
        for (id, tenancy) in self.blocks.slots.iter() {
            pending_free += tenancy.shared_pending_free() + self.memory.holders.pending_of(id);
        }
        for held in self.memory.holders.all() {
            let figures = held.holder().figures();
            stranded += figures.stranded() + figures.kept;
        }
        let creatable = self
            .memory
            .budget
            .creatable()
            .min(self.memory.policy.largest_extent);
        Box::new(Shortage {
            tenant: self.memory.terms.name_of(id),
            wanted,
            available: self
                .memory
                .budget
                .available_to(id)
                .saturating_add(reclaimable),
            largest_run: self
                .memory
                .device
                .granule()
                .round_down(creatable)
                .max(self.memory.supply.largest_free()),
            limit: self.memory.budget.limits().bytes,
            tenant_limit: self.memory.budget.limit_of(id),
            tenant_held: account.held,
            guaranteed_to_others: self.memory.budget.guaranteed_to_others(id),
            pending_free,
            leased,
            stranded,
            quarantined: self.memory.budget.quarantined(),
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
            .field("budget", &self.memory.budget)
            .finish_non_exhaustive()
    }
}
