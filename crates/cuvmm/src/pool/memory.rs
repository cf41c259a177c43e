//! Physical memory under a limit: what tenants are charged, what is free, which operations are in
//! flight, who waits, and what is lent to holders.

use cuvmm_driver::{HandleTypes, PhysicalProps};

use super::accounts::{Budget, Tenants};
use super::gate::Gate;
use super::holders::Holders;
use super::line::Line;
use super::supply::Supply;
use crate::device::Device;
use crate::growth::Growth;

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

/// The memory of a pool's device that the pool has or may have, without the blocks that hold some of
/// it.
pub(crate) struct Memory {
    pub(crate) device: Device,
    pub(crate) policy: Policy,
    pub(super) budget: Budget,
    pub(crate) supply: Supply,
    pub(crate) terms: Tenants,
    pub(super) gate: Gate,
    pub(super) line: Line,
    /// `true` if the pool or a tenant may exceed a lowered limit.
    pub(super) lowered: bool,
    /// `true` if work is left to do before an operation ends, its own or another operation's.
    pub(super) has_deferred: bool,
    pub(super) holders: Holders,
    pub(crate) refusals: u64,
}

impl Memory {
    pub(super) fn new(device: Device, policy: Policy, budget: Budget) -> Self {
        Self {
            device,
            policy,
            budget,
            supply: Supply::default(),
            terms: Tenants::default(),
            gate: Gate::default(),
            line: Line::default(),
            lowered: false,
            has_deferred: false,
            holders: Holders::default(),
            refusals: 0,
        }
    }
}
