//! What a pool knows, behind one lock: budget, free list, tenants and their slots.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuvmm_driver::{HandleTypes, PhysicalProps};

use super::budget::{Amount, Budget, Charge, TenantId};
use super::free_list::FreeList;
use super::hardened::Hardening;
use super::ids::{BlockPlace, SlotId};
use super::pace::Precommit;
use super::queue::Queue;
use super::slot::Freed;
use super::slot::Slot;
use super::tenancy::FreedBlock;
use super::tenancy::Tenancy;
use crate::device::Device;
use crate::error::{BlockError, CallError, Shortage};
use crate::growth::Growth;
use crate::own::{Physical, Stream};
use crate::region::{Fence, Poll, Round, Space, Unmapped};

/// How the pool's memory is made and handed on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) props: PhysicalProps,
    pub(crate) largest_extent: u64,
    pub(crate) scrub: Scrub,
    pub(crate) growth: Growth,
    /// Bytes that must stay free on the device after a creation.
    pub(crate) leave_free: u64,
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
    /// Always, ordered before the new owner's work: the default.
    #[default]
    BetweenTenants,
    /// Never: the pool's tenants trust each other.
    Never,
}

/// The operations in flight.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    /// How many have begun.
    begun: u64,
    /// How many have ended.
    ended: u64,
    /// The numbers of those in flight.
    live: Vec<NonZeroU64>,
}

impl Flights {
    /// How many are in flight.
    pub(super) const fn count(&self) -> usize {
        self.live.len()
    }

    /// How many have ended.
    pub(super) const fn ended(&self) -> u64 {
        self.ended
    }

    /// Those that are in flight.
    pub(super) fn live(&self) -> Vec<NonZeroU64> {
        self.live.clone()
    }

    /// Whether one of these is in flight.
    pub(super) fn has_any(&self, numbers: &[NonZeroU64]) -> bool {
        self.live.iter().any(|live| numbers.contains(live))
    }

    /// The number of a new one.
    pub(super) fn begin(&mut self) -> NonZeroU64 {
        self.begun += 1;
        let number = NonZeroU64::new(self.begun).unwrap_or(NonZeroU64::MIN);
        self.live.push(number);
        number
    }

    pub(super) fn end(&mut self, number: NonZeroU64) {
        self.ended += 1;
        self.live.retain(|&live| live != number);
    }
}

pub(crate) struct State {
    pub(crate) device: Device,
    pub(crate) policy: Policy,
    pub(crate) budget: Budget,
    pub(crate) free_list: FreeList,
    /// Physicals that go to the driver when the operation has put its slots back.
    pub(super) to_release: Vec<Unmapped>,
    pub(crate) tenants: BTreeMap<TenantId, Tenancy>,
    /// Counts uses, to tell what was used least recently. The stream caches move it too.
    pub(crate) clock: Arc<AtomicU64>,
    pub(super) flights: Flights,
    /// How often those who wait were told that memory came idle: an attempt lets the lock go, and may
    /// not see what came idle meanwhile.
    pub(super) told: u64,
    /// How often memory came free while a request waited.
    pub(super) news: u64,
    /// What futures wait for.
    pub(super) queue: Queue,
    /// Whether the pool, or a tenant, may hold more than a limit that was lowered.
    pub(super) lowered: bool,
    /// Whether an operation has something to do before it ends, for itself or for another one.
    pub(super) has_behind: bool,
    /// How many slots of draining tenants were listed to be purged since that was last done.
    pub(super) listed: usize,
    /// Slots of draining tenants with something to be unmapped.
    pub(super) draining: VecDeque<SlotId>,
    /// Blocks from stream caches that are to be freed when their slots are back.
    pub(super) to_free: Vec<FreedBlock>,
    /// Capture guards that live.
    pub(crate) capturing: u64,
    /// Threads that wait for the device, and began before any guard lived.
    pub(super) synchronising: u64,
    /// Set when a poll found that only a synchronisation can tell.
    pub(crate) needs_synchronise: bool,
    /// Physicals that the driver would not take back, and spaces with mappings stuck in them.
    pub(crate) quarantine: (Vec<Physical>, Vec<Space>),
    pub(crate) refusals: u64,
    /// How often it was [audited](super::audit).
    #[cfg(debug_assertions)]
    pub(super) audits: u64,
    /// What the mapper does for it, if it has one.
    pub(crate) precommit: Option<Precommit>,
    /// What it knows besides if it is hardened.
    pub(crate) hardening: Option<Box<Hardening>>,
    /// Slots with memory that is to be unmapped once their fences have passed.
    pub(crate) purging: VecDeque<SlotId>,
    next_tenant: u64,
    scrubber: Option<Stream>,
}

impl State {
    pub(crate) fn new(device: Device, policy: Policy, budget: Budget) -> Self {
        Self {
            device,
            policy,
            budget,
            free_list: FreeList::new(),
            to_release: Vec::new(),
            tenants: BTreeMap::new(),
            clock: Arc::default(),
            flights: Flights::default(),
            told: 0,
            news: 0,
            queue: Queue::default(),
            lowered: false,
            has_behind: false,
            listed: 0,
            draining: VecDeque::new(),
            to_free: Vec::new(),
            capturing: 0,
            synchronising: 0,
            needs_synchronise: false,
            quarantine: (Vec::new(), Vec::new()),
            refusals: 0,
            #[cfg(debug_assertions)]
            audits: 0,
            precommit: None,
            hardening: None,
            purging: VecDeque::new(),
            next_tenant: 0,
            scrubber: None,
        }
    }

    pub(crate) fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    pub(crate) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn register(&mut self, tenancy: Tenancy, guarantee: u64, limit: u64) -> TenantId {
        let id = TenantId(self.next_tenant);
        self.next_tenant += 1;
        self.budget.open(id, guarantee, limit);
        self.tenants.insert(id, tenancy);
        self.update_bypass(id);
        id
    }

    /// Bytes of a tenant that cannot be taken back, however long one waits for the GPU.
    pub(crate) fn kept_by(&self, id: TenantId) -> u64 {
        self.tenants.get(&id).map_or(0, Tenancy::kept)
    }

    pub(crate) fn slot(&self, id: SlotId) -> Option<&Slot> {
        self.tenants.get(&id.tenant)?.slot(id.index)
    }

    /// For changes that do not alter where a slot is listed.
    pub(crate) fn slot_mut(&mut self, id: SlotId) -> Option<&mut Slot> {
        self.tenants.get_mut(&id.tenant)?.slot_mut(id.index)
    }

    /// Works on a slot that is not in its place meanwhile, so that nothing done for it can take from
    /// it. Nothing if there is no such slot, or if it is out.
    pub(crate) fn with_slot<T>(
        &mut self,
        id: SlotId,
        work: impl FnOnce(&mut Self, &mut Slot) -> T,
    ) -> Option<T> {
        let mut slot = self.take_slot(id)?;
        let done = work(self, &mut slot);
        self.put_slot(slot);
        Some(done)
    }

    /// Takes a slot from its place, for as long as the lock is not let go. What is known of its
    /// memory is brought up to date: a block that [grows within](Self::grow_within) has no time for
    /// that.
    pub(crate) fn take_slot(&mut self, id: SlotId) -> Option<Box<Slot>> {
        let mut slot = self.tenants.get_mut(&id.tenant)?.take(id.index)?;
        slot.note_writer();
        Some(slot)
    }

    /// Puts a slot where it was taken out, lists it for what it has to give, and has it
    /// [looked after](super::purge) if some of that is not to be kept.
    pub(crate) fn put_slot(&mut self, mut slot: Box<Slot>) {
        let id = slot.id;
        let Some(tenancy) = self.tenants.get_mut(&id.tenant) else {
            return;
        };
        if slot.sleep_state.is_awake() {
            slot.receded();
        }
        let drains = !tenancy.registered;
        // A limit that was lowered is kept to as memory comes free.
        self.has_behind |= self.lowered && slot.has_spare();
        if slot.is_to_purge(self.hardening.is_some() || drains) {
            self.list(&mut slot, drains);
        }
        if let Some(tenancy) = self.tenants.get_mut(&id.tenant) {
            tenancy.put(slot);
        }
    }

    /// Has a slot [looked after](super::purge), sooner than those that wait already. What belongs to a
    /// tenant that drains is purged when the operation ends.
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
            self.has_behind = true;
        } else {
            self.purging.push_front(slot.id);
        }
    }

    /// Puts a slot back that is listed already and could not be purged.
    pub(super) fn put_unlisted(&mut self, mut slot: Box<Slot>) {
        slot.receded();
        if let Some(tenancy) = self.tenants.get_mut(&slot.id.tenant) {
            tenancy.put(slot);
        }
    }

    /// Whether an operation has a slot out.
    pub(crate) fn is_out(&self, id: SlotId) -> bool {
        // Mostly nothing is in flight.
        if self.flights.count() == 0 {
            return false;
        }
        let tenancy = self.tenants.get(&id.tenant);
        tenancy.is_some_and(|tenancy| tenancy.is_out(id.index))
    }

    /// No slot has a number any more.
    pub(super) fn vacate(&mut self, id: SlotId) {
        if let Some(tenancy) = self.tenants.get_mut(&id.tenant) {
            tenancy.vacate(id.index);
        }
        self.forget_if_drained(id.tenant);
    }

    /// Charges bytes for a slot that is out.
    pub(super) fn charge_for(&mut self, id: SlotId, bytes: u64) -> Charge {
        let charge = self.budget.charge(Some(id.tenant), Amount::bytes(bytes));
        if let Some(tenancy) = self.tenants.get_mut(&id.tenant) {
            tenancy.note_charge(id.index, |charged| charged + bytes);
        }
        charge
    }

    /// Takes such a charge back.
    pub(super) fn refund_for(&mut self, id: SlotId, bytes: u64, charge: Charge) {
        self.budget.refund(charge);
        if let Some(tenancy) = self.tenants.get_mut(&id.tenant) {
            tenancy.note_charge(id.index, |charged| charged - bytes);
        }
    }

    /// Notes what a slot that is out counts for now: what was charged for it is there, or refunded.
    pub(super) fn renew(&mut self, slot: &Slot) {
        if let Some(tenancy) = self.tenants.get_mut(&slot.id.tenant) {
            tenancy.renew(slot);
        }
    }

    /// Gives up what an operation had taken out, which was ended by a panic.
    pub(super) fn lose(&mut self, flight: NonZeroU64) {
        let tenants = self.tenants.values_mut();
        tenants.for_each(|tenancy| tenancy.lose(flight));
    }

    pub(crate) fn check_usable(&self, id: TenantId) -> Result<(), BlockError> {
        if let Some(error) = self.device.lost() {
            return Err(CallError::ContextLost(error).into());
        }
        if let Some(forked) = self.device.forked() {
            return Err(forked.into());
        }
        match self.tenants.get(&id) {
            Some(tenancy) if tenancy.registered => Ok(()),
            tenancy => Err(BlockError::Unregistered {
                tenant: tenancy
                    .map(|tenancy| tenancy.name.clone())
                    .unwrap_or_default(),
            }),
        }
    }

    /// Whether a block has no memory, or somebody is moving it.
    pub(super) fn is_asleep(&self, place: &BlockPlace) -> bool {
        let tenancy = self.tenants.get(&place.slot.tenant);
        tenancy.is_some_and(|tenancy| tenancy.sleeps(place.slot.index))
    }

    /// Blocks go into stream caches again when none of a tenant sleeps, and neither the pool nor the
    /// tenant exceeds a limit that was lowered.
    pub(super) fn update_bypass(&self, id: TenantId) {
        if let Some(tenancy) = self.tenants.get(&id) {
            let exceeds = self.lowered && self.budget.excess() > 0;
            let bypassed = exceeds || tenancy.beyond || tenancy.has_sleepers();
            tenancy.unswept.bypass(bypassed);
        }
    }

    /// Forgets a tenant that is unregistered and has nothing left.
    pub(crate) fn forget_if_drained(&mut self, id: TenantId) {
        let drained = self
            .tenants
            .get(&id)
            .is_some_and(|tenancy| !tenancy.registered && tenancy.is_empty());
        if drained {
            self.tenants.remove(&id);
            self.budget.close(id);
        }
    }

    /// Whether a fence has passed, as far as may be asked now.
    pub(crate) fn poll(
        capturing: u64,
        needs_synchronise: &mut bool,
        fence: &mut Fence,
    ) -> Result<bool, CallError> {
        if fence.is_complete() {
            return Ok(true);
        }
        if capturing > 0 {
            return Ok(false);
        }
        match fence.poll()? {
            Poll::Complete => Ok(true),
            Poll::Pending => Ok(false),
            Poll::NeedsSynchronise => {
                *needs_synchronise = true;
                Ok(false)
            }
        }
    }

    /// Whether a fence has passed, by what the driver said in this round where it was asked already.
    /// One for which the driver fails is pending: it holds up no other.
    pub(crate) fn poll_in(
        capturing: u64,
        needs_synchronise: &mut bool,
        fence: &mut Fence,
        round: &Round,
    ) -> bool {
        if fence.is_complete() || capturing > 0 {
            return fence.is_complete();
        }
        match fence.poll_in(round) {
            Ok(Poll::Complete) => true,
            Ok(Poll::Pending) => false,
            Ok(Poll::NeedsSynchronise) => {
                *needs_synchronise = true;
                false
            }
            Err(error) => {
                tracing::debug!(%error, "a fence could not be asked: it counts as pending");
                false
            }
        }
    }

    /// The stream that scrubs for blocks without a home stream.
    pub(crate) fn scrubber(&mut self) -> Result<Stream, CallError> {
        if let Some(stream) = &self.scrubber {
            return Ok(stream.clone());
        }
        let stream = self.device.relaxed(|| Stream::new(&self.device))??;
        self.scrubber = Some(stream.clone());
        Ok(stream)
    }

    /// The figures for whoever is refused.
    pub(crate) fn shortage(&self, id: TenantId, wanted: u64, reclaimable: u64) -> Box<Shortage> {
        let account = self.budget.account(id);
        let mut holders: Vec<(String, u64)> = self
            .budget
            .accounts()
            .filter(|&(other, account)| other != id && account.held > 0)
            .filter_map(|(other, account)| {
                Some((self.tenants.get(&other)?.name.clone(), account.held))
            })
            .collect();
        holders.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        let tenants = self.tenants.values();
        let figures = tenants.flat_map(|tenancy| tenancy.figures().map(|(figures, _)| figures));
        let (mut pending_free, mut leased, mut stranded) = (0, 0, 0);
        for figures in figures {
            // What is stranded does not come free with its fence.
            let idle = figures.idle + figures.precommitted;
            let gives = idle.saturating_sub(figures.stranded);
            match figures.freed {
                Freed::Cached => {}
                Freed::PendingFree => pending_free += gives,
                Freed::Leased => leased += gives,
            }
            stranded += figures.stranded;
        }
        let tenants = self.tenants.values();
        pending_free += tenants.map(Tenancy::shared_pending_free).sum::<u64>();
        let creatable = self.budget.creatable().min(self.policy.largest_extent);
        Box::new(Shortage {
            tenant: self
                .tenants
                .get(&id)
                .map(|tenancy| tenancy.name.clone())
                .unwrap_or_default(),
            wanted,
            available: self.budget.available_to(id).saturating_add(reclaimable),
            largest_run: self
                .device
                .granule()
                .round_down(creatable)
                .max(self.free_list.largest()),
            limit: self.budget.limits().bytes,
            tenant_limit: self.budget.limit_of(id),
            tenant_held: account.held,
            guaranteed_to_others: self.budget.guaranteed_to_others(id),
            pending_free,
            leased,
            stranded,
            quarantined: self.budget.quarantined(),
            holders,
        })
    }
}

/// A block whose tenant has gone.
pub(super) fn gone() -> BlockError {
    BlockError::Unregistered {
        tenant: String::new(),
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}
