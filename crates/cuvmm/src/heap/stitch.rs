//! Plans for a request that no free run fits: memory free in several places, shown side by side in
//! a new window, or new memory.
//!
//! A plan names, in the order of their addresses: a *head*, which is the free end of an extent, or
//! of a window that has unused addresses behind it; wholly free extents; and a *tail*, which is the
//! free start of an extent, or new memory. Together they have exactly the requested bytes, except
//! that the last new extent may be larger. Old windows stay, so nothing is unmapped on the way.
//!
//! A plan of many small extents may get larger ones ([merge](super::merge)).
//!
//! As long as the heap holds little more than the peak of its live bytes, it takes new memory,
//! which costs no more mappings than stitching, and cuts no run. Otherwise candidates are scored by
//! the time of their mappings and by their damage: free bytes that are left between used bytes are
//! worth less than a whole run.

use super::extents::{ExtentId, Extents};
use super::gaps::Gaps;
use super::tag::StreamId;
use crate::size::Granularity;

/// The time of one mapping, in nanoseconds (`docs/measurements.md`).
const MAPPING: u64 = 23_600;

/// The damage of breaking up one MiB of a run, in nanoseconds, at [`HELD`] bytes.
const DAMAGE: u64 = 300;

/// The size of heap that [`DAMAGE`] is meant for. The less a heap holds, the more a free MiB is
/// worth.
const HELD: u64 = 32 << 30;

const HEADS: usize = 8;

/// The most bytes of an extent in mean sizes of live allocations, unless the least size is more or
/// the request would have very many extents.
const MEANS: u64 = 2;

/// A request that would be made of more extents gets larger extents, of which it has this number to
/// twice as many: each costs a mapping whenever such a request is stitched.
const MANY: u64 = 16;

/// The smallest extents that the peak of live bytes is worth: the bytes lost in extents are then
/// part of the heap, however large it is.
const PEAK_PARTS: u64 = 512;

/// The least number of the largest extents within the limit: the larger extents are, the more
/// memory is missing in their parts when it is short.
const LIMIT_PARTS: u64 = 256;

/// The part of the limit, in 1/16, from which extents are small.
const NEAR: u64 = 7;

/// From then on, the number of extents of an allocation of the mean size.
const NEAR_PARTS: u64 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    /// An extent has at most a [`LIMIT_PARTS`]th of the limit, but may have the first size here, and
    /// never has more than the second, in whole granules.
    pub(super) largest: (u64, u64),
    /// The bytes that are held beyond the peak of live bytes before memory is stitched, in 1/1024.
    pub(super) slack: u64,
    /// The least number of extents of a request that is much larger than others, as far as `least`
    /// allows, so that its memory can be reused in pieces.
    pub(super) parts: u64,
    /// A request is always one extent up to a [`PEAK_PARTS`]th of the peak of live bytes, but at
    /// least the first and at most the second size here, in whole granules.
    pub(super) least: (u64, u64),
    /// The size of extents in whole granules once [`NEAR`] of the limit is held, unless the mean
    /// size of live allocations is more than [`NEAR_PARTS`] times as much.
    pub(super) near: u64,
    /// The most bytes by which new memory is larger than requested.
    pub(super) extra: u64,
    /// `false` if memory is never shown in two windows.
    pub(super) aliases: bool,
    /// `true` if small extents are [merged](super::merge).
    pub(super) merges: bool,
    /// `true` if each request that its stream's cache cannot serve empties the cache first, so that
    /// all free memory decides where the request lies.
    pub(super) drains: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Levels {
    pub(super) held: u64,
    /// The peak of live bytes, with the request.
    pub(super) peak: u64,
    /// Of live allocations, without small ones.
    pub(super) mean: u64,
    pub(super) limit: u64,
    /// The bytes of new memory that the pool has refused for the request, if any.
    pub(super) refused: Option<u64>,
    /// `true` if new memory is better than another mapping of memory that is there.
    pub(super) spares_mappings: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    None,
    /// The last bytes of an extent, which gets a new window.
    Suffix {
        id: ExtentId,
        size: u64,
    },
    /// The last bytes of a window, behind which addresses are unused.
    Run {
        at: u64,
        size: u64,
    },
}

impl Head {
    const fn size(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Suffix { size, .. } | Self::Run { size, .. } => size,
        }
    }

    const fn mappings(self) -> u64 {
        matches!(self, Self::Suffix { .. }) as u64
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) head: Head,
    pub(super) whole: Vec<ExtentId>,
    /// An extent, and the number of its first bytes that are used.
    pub(super) tail: Option<(ExtentId, u64)>,
    pub(super) new: Vec<u64>,
    pub(super) new_used: u64,
}

impl Plan {
    const fn from(head: Head) -> Self {
        Self {
            head,
            whole: Vec::new(),
            tail: None,
            new: Vec::new(),
            new_used: 0,
        }
    }

    /// Sets the new extents to the fewest of up to `largest` bytes that have `whole` bytes, of which
    /// the last, if it is smaller than the others, has up to `spare` bytes more.
    pub(super) fn set_new(&mut self, whole: u64, largest: u64, spare: u64) {
        let left = |from: u64| (from < whole).then(|| largest.min(whole - from + spare));
        let starts = (0..).map(|number: u64| number.saturating_mul(largest));
        self.new = starts.map_while(left).collect();
    }

    pub(super) fn grown(&self) -> u64 {
        self.new.iter().sum()
    }

    pub(super) fn mappings(&self) -> u64 {
        let parts = self.whole.len() + self.new.len() + usize::from(self.tail.is_some());
        self.head.mappings() + parts as u64
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) size: u64,
    /// `true` if the allocation may begin at any multiple of the least alignment.
    pub(super) anywhere: bool,
    /// The stream that must be able to use free memory, or `None` for all free memory.
    pub(super) stream: Option<StreamId>,
}

#[derive(Clone, Copy)]
pub(super) struct Planner<'a> {
    pub(super) extents: &'a Extents,
    pub(super) gaps: &'a Gaps,
    pub(super) granule: Granularity,
    pub(super) policy: &'a Policy,
    pub(super) levels: Levels,
    pub(super) wanted: Wanted,
}

impl Planner<'_> {
    /// Returns a plan with new memory if the heap holds little, or else with free memory only.
    pub(super) fn cheap(&self) -> Option<Plan> {
        self.within_bound().or_else(|| self.stitched(false))
    }

    /// Returns `true` if new memory serves the request before memory is stitched or waited for.
    pub(super) fn may_grow(&self) -> bool {
        self.within_bound().is_some()
    }

    /// Returns a plan with new memory if the heap holds little and the pool has refused none.
    fn within_bound(&self) -> Option<Plan> {
        let growth = self.growth().filter(|_| self.levels.refused.is_none());
        growth.filter(|growth| self.levels.held.saturating_add(growth.grown()) <= self.bound())
    }

    pub(super) fn stitch(&self) -> Option<Plan> {
        self.stitched(false)
    }

    /// Returns a plan with as little new memory as possible, and less than the pool has refused.
    pub(super) fn dear(&self) -> Option<Plan> {
        let refused = self.levels.refused.unwrap_or(u64::MAX);
        let plan = self.stitched(true).or_else(|| self.growth());
        plan.filter(|plan| plan.grown() < refused)
    }

    fn bound(&self) -> u64 {
        if self.levels.spares_mappings {
            return u64::MAX;
        }
        let peak = self.levels.peak;
        peak.saturating_add(peak / 1024 * self.policy.slack)
    }

    /// Returns the longest usable run that has unused addresses behind it.
    fn open_run(&self) -> Option<Head> {
        if !self.wanted.anywhere {
            return None;
        }
        let open = self.gaps.largest(HEADS).filter_map(|(start, _)| {
            let run = self.extents.runs.ending_at(start)?;
            let usable = self
                .wanted
                .stream
                .is_none_or(|stream| run.mark.serves(stream));
            let (at, size) = (run.start, start - run.start);
            (usable && size < self.wanted.size).then_some(Head::Run { at, size })
        });
        open.max_by_key(|head| head.size())
    }

    /// Returns a plan with new memory behind the longest open run.
    fn growth(&self) -> Option<Plan> {
        let mut plan = Plan::from(self.open_run().unwrap_or(Head::None));
        let missing = self.wanted.size - plan.head.size();
        self.add_new(&mut plan, missing)?;
        if !self.fits_behind(&plan) {
            plan = Plan::from(Head::None);
            self.add_new(&mut plan, self.wanted.size)?;
        }
        Some(plan)
    }

    /// Adds new extents for `bytes` at the end of a plan. The last extent may be larger than needed
    /// within the limits, unless the pool has refused memory.
    fn add_new(&self, plan: &mut Plan, bytes: u64) -> Option<()> {
        let extra = match self.levels.refused {
            Some(_) => 0,
            None => self.policy.extra,
        };
        self.add_extents(plan, bytes, extra)
    }

    /// Adds new extents for `bytes` to a plan, with at most `extra` bytes more.
    fn add_extents(&self, plan: &mut Plan, bytes: u64, extra: u64) -> Option<()> {
        let whole = self.granule.round_up(bytes)?;
        let largest = self.extent_size();
        let most = self.bound().min(self.levels.limit);
        let spare = most.saturating_sub(self.levels.held + whole);
        let spare = self.granule.round_down(spare.min(extra));
        plan.set_new(whole, largest, spare);
        plan.new_used = bytes;
        Some(())
    }

    /// Returns the largest size of an extent, in bytes.
    pub(super) fn largest(&self) -> u64 {
        let (low, high) = self.policy.largest;
        (self.levels.limit / LIMIT_PARTS).clamp(low, high)
    }

    /// Returns the size of new extents. Extents are smaller if little more may be held, because
    /// unused bytes in extents would be missing then.
    pub(super) fn extent_size(&self) -> u64 {
        let Policy {
            parts, least, near, ..
        } = *self.policy;
        let largest = self.largest();
        let Levels { mean, peak, .. } = self.levels;
        let within = |bytes| self.granule.extent_within(bytes, largest);
        if self.is_near_limit() {
            return within(near.max(mean / NEAR_PARTS));
        }
        let most = mean.saturating_mul(MEANS).max(self.wanted.size / MANY);
        let part = (self.wanted.size / parts).min(most);
        let least = within(peak / PEAK_PARTS).clamp(least.0, least.1);
        within(part.max(mean)).max(least.min(largest))
    }

    /// Returns `true` if so much may be held soon that new extents are small.
    pub(super) const fn is_near_limit(&self) -> bool {
        self.levels.held.saturating_add(self.wanted.size) > self.levels.limit / 16 * NEAR
    }

    /// Returns `true` if the addresses behind the head suffice for a plan.
    fn fits_behind(&self, plan: &Plan) -> bool {
        let Head::Run { at, size } = plan.head else {
            return true;
        };
        let old = plan
            .whole
            .iter()
            .copied()
            .chain(plan.tail.map(|(id, _)| id));
        let mut bytes = plan.grown() + self.granule.bytes();
        for id in old {
            if self.extents.is_searched_beside(id, at) {
                return false;
            }
            bytes += self.size(id);
        }
        self.gaps.has(at + size, bytes)
    }

    pub(super) fn size(&self, id: ExtentId) -> u64 {
        self.extents.extent(id).map_or(0, |extent| extent.size)
    }

    /// Returns the best plan that uses free memory; with `grows`, new memory for the rest.
    fn stitched(&self, grows: bool) -> Option<Plan> {
        if !self.policy.aliases {
            return None;
        }
        let whole: Vec<(u64, ExtentId)> = self.extents.whole(self.wanted.stream).collect();
        let plans = self.heads().into_iter();
        let plans = plans.filter_map(|head| self.behind(head, &whole, grows));
        let scored = plans.map(|(plan, damage)| (self.score(&plan, damage), plan));
        scored.min_by_key(|&(score, _)| score).map(|(_, plan)| plan)
    }

    fn heads(&self) -> Vec<Head> {
        let mut heads = vec![Head::None];
        if !self.wanted.anywhere {
            return heads;
        }
        heads.extend(self.open_run());
        let suffixes = self
            .extents
            .suffixes(self.wanted.size - 1, self.wanted.stream);
        let suffixes = suffixes.map(|(size, id)| Head::Suffix { id, size });
        heads.extend(suffixes.take(HEADS - heads.len()));
        heads
    }

    /// Returns a plan with this head, and its damage in bytes times 1,024.
    fn behind(&self, head: Head, whole: &[(u64, ExtentId)], grows: bool) -> Option<(Plan, u64)> {
        let mut plan = Plan::from(head);
        let mut left = self.wanted.size - head.size();
        let mut rest: Vec<(u64, ExtentId)> = Vec::new();
        for &(size, id) in whole {
            if size <= left {
                plan.whole.push(id);
                left -= size;
            } else {
                rest.push((size, id));
            }
        }
        let mut damage = 0;
        if left > 0 {
            let used = |id: ExtentId| matches!(head, Head::Suffix { id: head, .. } if head == id);
            let mut prefixes = self.extents.prefixes(left, self.wanted.stream);
            let prefix = prefixes.find(|&(_, id)| !used(id));
            let cut = rest.last().copied();
            match (prefix, cut) {
                (Some((length, id)), cut) => {
                    let hole = (length - left) * 1024;
                    let end = cut.map_or(u64::MAX, |(size, _)| (size - left) * 410);
                    let tail = if hole <= end {
                        Some(id)
                    } else {
                        cut.map(|(_, id)| id)
                    };
                    plan.tail = tail.map(|id| (id, left));
                    damage += hole.min(end);
                }
                (None, Some((size, id))) => {
                    plan.tail = Some((id, left));
                    damage += (size - left) * 410;
                }
                (None, None) if grows => damage += self.add_between(&mut plan, left)?,
                (None, None) => return None,
            }
        }
        self.fits_behind(&plan).then_some((plan, damage))
    }

    /// Adds new extents for `bytes` to a plan, less the longest free start of an extent that can be
    /// behind them. Returns the damage.
    fn add_between(&self, plan: &mut Plan, bytes: u64) -> Option<u64> {
        let used = match plan.head {
            Head::Suffix { id, .. } => Some(id),
            _ => None,
        };
        let mut prefixes = self.extents.longest_prefixes(self.wanted.stream);
        let prefix = prefixes.find(|&(length, id)| Some(id) != used && length < bytes);
        let Some((length, id)) = prefix else {
            self.add_new(plan, bytes)?;
            return Some(0);
        };
        let new = self.granule.round_up(bytes - length)?;
        let Some(tail) = bytes.checked_sub(new).filter(|&tail| tail > 0) else {
            self.add_new(plan, bytes)?;
            return Some(0);
        };
        self.add_extents(plan, new, 0)?;
        plan.tail = Some((id, tail));
        Some((length - tail) * 1024)
    }

    /// Returns the time of a plan in nanoseconds. New memory costs more than any stitch.
    fn score(&self, plan: &Plan, damage: u64) -> (u64, u64) {
        let damage = u128::from(damage) * u128::from(DAMAGE * HELD);
        let scaled = damage / (u128::from(self.levels.held.max(1)) << 30);
        let damage = u64::try_from(scaled).unwrap_or(u64::MAX);
        (
            plan.grown(),
            (plan.mappings() * MAPPING).saturating_add(damage),
        )
    }
}
