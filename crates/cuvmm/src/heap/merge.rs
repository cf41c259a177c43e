//! Large extents in place of many small ones.
//!
//! Extents are as large as allocations were when they were created. If allocations grow, each stitch
//! maps many small extents, and later unmaps them. So a plan that would map many small extents which
//! are wholly free gets few large ones instead. The small ones go to the driver first: the heap holds
//! no more than before. It merges only where the tenant could get that memory anyway, so that a
//! request which free memory serves is not refused.
//!
//! Keeps I-118.

use std::collections::HashSet;

use super::build::Build;
use super::core::State;
use super::extents::{Extent, ExtentId};
use super::stitch::{Plan, Planner};
use super::tag::Tag;

/// The least number of mappings of a plan whose extents are merged.
const LEAST: u64 = 4;

/// The least number of small extents for each new extent: unmapping and releasing them, and creating
/// the new one, takes about as long as stitching them once more.
const GAIN: usize = 4;

/// The mean sizes of live allocations in a new extent, if extents may be as large.
const MEANS: u64 = 2;

impl Plan {
    /// Returns `true` if the plan maps so much free memory that merging may gain.
    pub(super) fn may_merge(&self) -> bool {
        self.grown() == 0 && self.mappings() >= LEAST && self.whole.len() >= GAIN
    }
}

impl Planner<'_> {
    /// Returns a plan with new, large extents in place of the small extents of a plan that are
    /// `idle`, and those. `None` if they are too few, if they have more than `room` bytes, or if new
    /// extents are small because little more may be held.
    pub(super) fn merged(
        &self,
        plan: &Plan,
        room: u64,
        is_idle: impl Fn(ExtentId) -> bool,
    ) -> Option<(Plan, Vec<ExtentId>)> {
        if self.is_near_limit() || self.levels.refused.is_some() {
            return None;
        }
        let large = self.levels.mean.saturating_mul(MEANS);
        let large = self.granule.extent_within(large, self.largest());
        let large = large.max(self.extent_size());
        let is_small = |id: ExtentId| self.size(id) <= large / 2 && is_idle(id);
        let (small, whole): (Vec<_>, Vec<_>) = plan.whole.iter().partition(|&&id| is_small(id));
        let bytes: u64 = small.iter().map(|&id| self.size(id)).sum();
        let mut plan = Plan {
            whole,
            ..plan.clone()
        };
        plan.set_new(bytes, large, 0);
        plan.new_used = bytes;
        let gains = small.len() >= GAIN * plan.new.len().max(1);
        (gains && bytes <= room).then_some((plan, small))
    }
}

impl State {
    /// Returns those extents of a plan that can be unmapped: their bytes and mappings wait for no
    /// work. Polls that work, and no other.
    pub(super) fn idle_in(&self, plan: &Plan) -> HashSet<ExtentId> {
        let is_leaving = |id| self.large.extent(id).is_none_or(Extent::is_leaving);
        let whole = plan.whole.iter().copied();
        let ids: Vec<ExtentId> = whole.filter(|&id| !is_leaving(id)).collect();
        let work: Vec<Tag> = ids.iter().map(|&id| self.large.all_work_of(id)).collect();
        let complete = self.streams.are_complete(&work);
        let idle = ids.into_iter().zip(complete);
        idle.filter_map(|(id, complete)| complete.then_some(id))
            .collect()
    }

    /// [Begins](Self::begin) a plan in place of extents, which no request finds from here on.
    pub(super) fn begin_merged(
        &mut self,
        (plan, merged): (Plan, Vec<ExtentId>),
        margin: u64,
    ) -> Option<Build> {
        let mut build = self.begin(plan, margin).ok()?;
        for &id in &merged {
            self.large.settle(id, false);
        }
        build.merged = merged;
        Some(build)
    }
}
