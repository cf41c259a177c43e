//! Help for a tenant whose request was refused: which memory would be enough, which pressure hooks
//! to call, and whether waiting can help at all.
//!
//! Nothing is taken here. The figures come from plans of a reclaim, which poll the fences of idle
//! memory. Only refusals use this module.
//!
//! Keeps I-48.

use std::time::Instant;

use super::needs::Needs;
use super::pressure::{Pressure, PressureHook};
use crate::deferred;
use crate::error::{BlockError, Shortage};
use crate::pool::accounts::{Budget, TenantId};
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::BlockPlace;
use crate::pool::core::Locked;
use crate::pool::memory::Memory;
use crate::pool::reclaim::Plan;

#[derive(Clone, Copy, Debug)]
pub(in crate::pool) enum Demand<'a> {
    Bytes(u64),
    Holder(&'a Needs),
    /// Blocks, and their new sizes in bytes.
    Growth(&'a [(BlockPlace, u64)]),
}

impl Demand<'_> {
    fn asked(self, blocks: &Blocks) -> Asked {
        let whole = |bytes| blocks.granule.round_up(bytes).unwrap_or(u64::MAX);
        let of_bytes = |more, least| Asked {
            more: whole(more),
            within: 0,
            least: whole(least),
        };
        let steps = match self {
            Self::Bytes(bytes) => return of_bytes(bytes, bytes),
            Self::Holder(needs) => return of_bytes(needs.more(), needs.least()),
            Self::Growth(steps) => steps,
        };
        let mut asked = Asked::default();
        for (place, size) in steps {
            let (used, has) = blocks.used_and_held(place.slot);
            let (size, more) = (whole(*size), whole(*size).saturating_sub(used));
            asked.more = asked.more.saturating_add(more);
            asked.within += has.saturating_sub(used).min(more);
            asked.least = asked.least.saturating_add(size);
        }
        asked
    }

    /// Returns the bytes that the tenant must be able to hold for the request.
    pub(super) fn least(self, blocks: &Blocks) -> u64 {
        self.asked(blocks).least
    }
}

impl From<u64> for Demand<'_> {
    fn from(bytes: u64) -> Self {
        Self::Bytes(bytes)
    }
}

/// A demand in bytes, in whole granules.
#[derive(Clone, Copy, Debug, Default)]
struct Asked {
    /// Bytes to be in use beyond those in use now.
    more: u64,
    /// The part of `more` behind the blocks' ends in their own slots: charged already, and the
    /// blocks' even with an incomplete fence.
    within: u64,
    /// The bytes that the blocks then use.
    least: u64,
}

pub(in crate::pool) struct HookCall {
    to: TenantId,
    hook: PressureHook,
    pressure: Pressure,
}

impl HookCall {
    /// Returns the tenant whose hook is called.
    pub(in crate::pool) const fn to(&self) -> TenantId {
        self.to
    }

    /// Calls the hook without a lock. The thread may be the hook's last owner by now.
    pub(in crate::pool) fn call(self) {
        let Self { hook, pressure, .. } = self;
        deferred::call_hook(move || hook(&pressure));
    }
}

#[derive(Default)]
struct Relief {
    bytes: u64,
    mappings: u64,
    addresses: u64,
    /// The amount that the tenant itself could give.
    own: u64,
    /// Other tenants, with the missing amount that each could give.
    givers: Vec<HookGiver>,
}

struct HookGiver {
    tenant: TenantId,
    priority: i32,
    hook: PressureHook,
    gives: u64,
}

/// The needs of a refused request, and the memory that it could have now.
struct Reach {
    asked: Asked,
    own: u64,
    others: Plan,
    available: u64,
}

impl Relief {
    fn is_enough(&self) -> bool {
        let missing = self.bytes.max(self.mappings).max(self.addresses);
        let given = self.givers.iter().map(|giver| giver.gives);
        given.fold(self.own, u64::saturating_add) >= missing
    }
}

impl Locked<'_> {
    /// Counts a refusal, and puts the figures of the whole request in its error.
    pub(super) fn refuse(
        &mut self,
        id: TenantId,
        demand: Demand<'_>,
        mut error: BlockError,
    ) -> BlockError {
        self.memory.count_refusal(id, &error);
        if shortage_of(&mut error).is_none() {
            return error;
        }
        let (wanted, available) = self.wanted_and_available(id, demand, &error);
        if let Some(shortage) = shortage_of(&mut error) {
            shortage.wanted = wanted;
            let less = wanted.saturating_sub(self.memory.device.granule().bytes());
            shortage.available = available.min(less);
        }
        error
    }

    /// Returns the bytes that a refused request needs, and the bytes available to it now.
    pub(super) fn wanted_and_available(
        &mut self,
        id: TenantId,
        demand: Demand<'_>,
        error: &BlockError,
    ) -> (u64, u64) {
        let reach = self.reach_of(id, demand, error);
        (reach.asked.more, reach.available)
    }

    fn reach_of(&mut self, id: TenantId, demand: Demand<'_>, error: &BlockError) -> Reach {
        let asked = demand.asked(&self.blocks);
        let (own, others) = self.reach(id);
        let own = own_of(demand, asked, &own);
        let ledger = error.shortage().and_then(|it| it.ledger);
        let left = ledger.map_or(0, |it| it.left);
        let budget = &self.memory.budget;
        let mut available = budget.available_after(id, own, others.gained(), left);
        if matches!(error, BlockError::DriverOutOfMemory { .. }) {
            // Nothing can be created: all memory has to come from the pool's own.
            let there = self.memory.supply.free().saturating_add(own);
            available = available.min(there.saturating_add(others.gained()));
        }
        Reach {
            asked,
            own,
            others,
            available,
        }
    }

    /// Returns the next hook for a request refused with `error`: first the tenant's own hook for
    /// shortages, then the hooks of other tenants whose memory would help, each once. For a request
    /// that does not wait, returns `None` if the hooks together could not give all that is missing.
    pub(super) fn next_hook_call(
        &mut self,
        id: TenantId,
        demand: Demand<'_>,
        error: &BlockError,
        (waits, deadline): (bool, Option<Instant>),
        asked: &[TenantId],
    ) -> Option<HookCall> {
        let mut relief = self.relief(id, demand, error);
        relief.givers.retain(|it| !asked.contains(&it.tenant));
        let own = self.memory.budget.account(id).hooks.1.clone();
        let own = own.filter(|_| relief.own > 0 && !asked.contains(&id));
        if own.is_none() {
            relief.own = 0;
        }
        if !waits && !relief.is_enough() {
            return None;
        }
        let (to, hook) = match own {
            Some(hook) => (id, hook),
            None => lowest_priority(relief.givers)?,
        };
        let pressure = Pressure {
            wanted_by: self.memory.budget.account(id).name.clone(),
            bytes: relief.bytes,
            mappings: relief.mappings,
            addresses: relief.addresses,
            waits,
            deadline,
        };
        Some(HookCall { to, hook, pressure })
    }

    /// Returns the next hook for another process's request that lacks `bytes`: of the tenant with
    /// the lowest priority that holds memory above its guarantee, each once.
    pub(in crate::pool) fn next_hook_for_process(
        &mut self,
        bytes: u64,
        wanted_by: &str,
        asked: &[TenantId],
    ) -> Option<HookCall> {
        // No tenant makes the request, so every tenant's guarantee counts.
        let no_tenant = TenantId::NONE;
        let (_, others) = self.reach(no_tenant);
        let budget = &self.memory.budget;
        let mut givers = givers(budget, no_tenant, |other| others.spare_of(budget, other));
        givers.retain(|it| !asked.contains(&it.tenant));
        let (to, hook) = lowest_priority(givers)?;
        let pressure = Pressure {
            wanted_by: wanted_by.to_owned(),
            bytes,
            mappings: 0,
            addresses: 0,
            waits: true,
            deadline: None,
        };
        Some(HookCall { to, hook, pressure })
    }

    fn relief(&mut self, id: TenantId, demand: Demand<'_>, error: &BlockError) -> Relief {
        let mut relief = Relief::default();
        match *error {
            BlockError::OutOfMemory(_) | BlockError::DriverOutOfMemory { .. } => {
                let reach = self.reach_of(id, demand, error);
                relief.bytes = reach.asked.more.saturating_sub(reach.available);
                if relief.bytes == 0 {
                    return relief;
                }
                // Beyond a lowered limit more is missing than the request needs.
                let (own, all) = self.memory.budget.missing(id, reach.asked.more);
                let own = own.saturating_sub(reach.own);
                let gained = reach.own.saturating_add(reach.others.gained());
                relief.bytes = relief.bytes.max(own).max(all.saturating_sub(gained));
                relief.own = self.kept_by(id);
                // The tenant's own limit or its own work is the cause: no other tenant can help.
                if own > 0 {
                    return relief;
                }
                let budget = &self.memory.budget;
                relief.givers = givers(budget, id, |other| reach.others.spare_of(budget, other));
            }
            BlockError::OutOfMappings {
                wanted,
                held,
                limit,
            } => {
                let (_, others) = self.reach(id);
                relief.mappings = wanted.saturating_sub(limit.saturating_sub(held));
                relief.own = self.memory.budget.account(id).mappings;
                let budget = &self.memory.budget;
                relief.givers = givers(budget, id, |other| {
                    let gives = others.spare_of(budget, other) > 0;
                    u64::from(gives) * budget.account(other).mappings
                });
            }
            BlockError::OutOfAddresses {
                wanted,
                held,
                limit,
            } => {
                relief.addresses = wanted.saturating_sub(limit.saturating_sub(held));
                relief.own = self.memory.budget.account(id).addresses;
                let budget = &self.memory.budget;
                relief.givers = givers(budget, id, |other| budget.account(other).addresses);
            }
            // Other tenants cannot help: a capture has to end, or the tenant's own work.
            _ => {}
        }
        relief
    }
}

impl Memory {
    /// Returns `true` if the request could be met if every tenant gave back all memory above its
    /// guarantee, which hooks can bring about, or, with `alone`, if the tenant were alone, which
    /// waiting can bring about.
    pub(super) fn can_be_met(
        &self,
        id: TenantId,
        least: u64,
        error: &BlockError,
        alone: bool,
    ) -> bool {
        let most = self.budget.most_for(id, alone);
        // The limit of a ledger does not change while a process uses it.
        let ledger = error.shortage().and_then(|it| it.ledger);
        let most = ledger.map_or(most, |it| most.min(it.limit));
        match error {
            BlockError::OutOfMemory(_)
            | BlockError::DriverOutOfMemory { .. }
            | BlockError::Capturing(_) => least <= most,
            BlockError::OutOfMappings { wanted, limit, .. }
            | BlockError::OutOfAddresses { wanted, limit, .. } => wanted <= limit,
            _ => true,
        }
    }

    fn count_refusal(&mut self, id: TenantId, error: &BlockError) {
        if error.is_shortage() {
            self.refusals += 1;
            self.budget.count_refusal(id);
        }
    }
}

/// Returns the tenants with a hook that a request of `id` calls, and what each gives.
fn givers(budget: &Budget, id: TenantId, gives: impl Fn(TenantId) -> u64) -> Vec<HookGiver> {
    let others = budget.accounts().filter(|&(other, _)| other != id);
    let givers = others.filter_map(|(tenant, account)| {
        Some(HookGiver {
            tenant,
            priority: account.priority,
            hook: account.hooks.0.clone()?,
            gives: gives(tenant),
        })
    });
    givers.filter(|giver| giver.gives > 0).collect()
}

/// Returns a tenant's own bytes for a request: behind the ends of blocks that grow, and
/// reclaimable from its other slots.
fn own_of(demand: Demand<'_>, asked: Asked, own: &Plan) -> u64 {
    let growing = match demand {
        Demand::Growth(steps) => steps,
        Demand::Bytes(_) | Demand::Holder { .. } => &[],
    };
    let growing = growing.iter().map(|(place, _)| place.slot).collect();
    let elsewhere = own.gained().saturating_sub(own.takes_from(&growing));
    elsewhere.saturating_add(asked.within)
}

fn lowest_priority(givers: Vec<HookGiver>) -> Option<(TenantId, PressureHook)> {
    let giver = givers.into_iter().min_by_key(|giver| giver.priority)?;
    Some((giver.tenant, giver.hook))
}

fn shortage_of(error: &mut BlockError) -> Option<&mut Shortage> {
    match error {
        BlockError::OutOfMemory(shortage)
        | BlockError::DriverOutOfMemory { shortage, .. }
        | BlockError::Capturing(shortage) => Some(shortage),
        _ => None,
    }
}
