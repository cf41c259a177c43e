//! Large extents in place of many small ones.
//!
//! Extents are as large as allocations were when they were created. If allocations grow, each stitch
//! maps many small extents, and later unmaps them. So a plan that would map many small extents which
//! are wholly free gets few large ones instead. As many bytes of small extents go to the driver first,
//! those of the plan or others that are wholly free: the heap holds no more than before. If too few of
//! them wait for no work, the plan gets large extents all the same, as long as the heap holds little
//! more than its peak. The small ones then stay until another plan finds that their work is complete.
//! Extents are merged only where the tenant could get the memory anyway, so that a request which free
//! memory serves is not refused.
//!
//! Keeps I-118.

use super::build::Build;
use super::core::State;
use super::extents::{Extent, ExtentId};
use super::stitch::{Head, Plan, Planner};
use super::tag::Tag;

/// The least number of mappings of a plan whose extents are merged.
const LEAST: u64 = 4;

/// The least number of small extents for each new extent: unmapping and releasing them, and creating
/// the new one, takes about as long as stitching them once more.
const GAIN: usize = 4;

/// The mean sizes of live allocations in a new extent, if extents may be as large.
const MEANS: u64 = 2;

/// The bytes that the heap may hold beyond the peak of live bytes, in 1/1024, to get new extents while
/// work uses the small ones.
const BEHIND: u64 = 80;

impl Plan {
    /// Returns `true` if the plan maps so much free memory that merging may gain.
    pub(super) fn may_merge(&self) -> bool {
        self.grown() == 0 && self.mappings() >= LEAST && self.whole.len() >= GAIN
    }
}

impl Planner<'_> {
    /// Returns a plan with new, large extents in place of the smallest extents of a plan, and extents
    /// to be released before. These wait for no work, and are none of `exported`. `None` if it gains
    /// too little, if the new extents have more than `room` bytes, or if new extents are small because
    /// little more may be held.
    pub(super) fn merged(
        &self,
        plan: &Plan,
        room: u64,
        exported: &[ExtentId],
    ) -> Option<(Plan, Vec<ExtentId>)> {
        if self.is_near_limit() || self.levels.refused.is_some() {
            return None;
        }
        let large = self.levels.mean.saturating_mul(MEANS);
        let large = self.granule.extent_within(large, self.most_merged());
        let large = large.max(self.extent_size());
        let is_small = |id: ExtentId| self.size(id) <= large / 2;
        let wholes = self.extents.whole(None).map(|(_, id)| id);
        let idle =
            wholes.filter(|&id| is_small(id) && self.is_idle(id) && !self.is_at_end(plan, id));
        let mut idle: Vec<ExtentId> = idle.filter(|id| !exported.contains(id)).collect();
        let peak = self.levels.peak;
        let more = peak.saturating_add(peak / 1024 * BEHIND);
        let far = self.near_limit().saturating_sub(self.wanted.size);
        let more = more.min(far).saturating_sub(self.levels.held);

        // Of the plan's extents, which are sorted, the largest stay.
        let (mut small, mut whole): (Vec<_>, Vec<_>) =
            plan.whole.iter().partition(|&&id| is_small(id));
        let most = self.bytes(&idle).saturating_add(more).min(room);
        let excess = self.bytes(&small).saturating_sub(most);
        whole.extend(small.drain(..self.first_with(&small, excess)));
        let bytes = self.bytes(&small);

        idle.retain(|id| !whole.contains(id));
        idle.sort_by_key(|id| !small.contains(id));
        idle.truncate(self.first_with(&idle, bytes));
        let mut plan = Plan {
            whole,
            ..plan.clone()
        };
        plan.set_new(bytes, large, 0);
        plan.new_used = bytes;
        let gains = small.len() >= GAIN * plan.new.len().max(1);
        let suffices = bytes <= self.bytes(&idle).saturating_add(more);
        (gains && suffices).then_some((plan, idle))
    }

    fn bytes(&self, extents: &[ExtentId]) -> u64 {
        extents.iter().map(|&id| self.size(id)).sum()
    }

    /// Returns the least number of extents, from the first one on, that have this number of bytes
    /// together, or the number of all.
    fn first_with(&self, extents: &[ExtentId], bytes: u64) -> usize {
        let mut sum = 0;
        let lacks = |&&id: &&ExtentId| {
            let lacks = sum < bytes;
            sum += self.size(id);
            lacks
        };
        extents.iter().take_while(lacks).count()
    }

    /// Returns `true` if a wholly free extent may lie in the head or the tail of a plan.
    fn is_at_end(&self, plan: &Plan, id: ExtentId) -> bool {
        let is_head = match plan.head {
            Head::Run { at, .. } => self.extents.is_searched_beside(id, at),
            _ => false,
        };
        is_head || plan.tail.is_some_and(|(tail, _)| tail == id)
    }

    /// Returns `true` if an extent can be unmapped: its bytes and mappings wait for no work.
    fn is_idle(&self, id: ExtentId) -> bool {
        let extent = self.extents.extent(id);
        extent.is_some_and(|extent| !extent.is_leaving())
            && self.extents.all_work_of(id) == Tag::Ready
    }
}

impl State {
    /// [Begins](Self::begin) a plan in place of extents, which no request finds from here on.
    pub(super) fn begin_merged(
        &mut self,
        (plan, merged): (Plan, Vec<ExtentId>),
        margin: u64,
    ) -> Option<Build> {
        let mut build = self.begin(plan, margin).ok()?;
        for &id in &merged {
            let extent = self.large.extent(id);
            debug_assert!(extent.is_some_and(Extent::is_free), "{id} is in use");
            self.large.settle(id, false);
        }
        build.merged = merged;
        Some(build)
    }
}
