//! Regions in a tenant: their memory is lent by the tenant's pool, and goes back to it.
//!
//! A commit takes withdrawn extents of its range back first. It then plans, lets the pool obtain
//! memory without any lock of the region, and maps it. Used memory is zeroed before the commit
//! returns.
//!
//! Keeps I-101.

use std::ops::Range;

use super::Region;
use super::family::Family;
use super::holder::Use;
use crate::error::BlockError;
use crate::extents::{Fence, Placed, Unmapped};
use crate::ledger::InLine;

impl Region {
    /// Takes the withdrawn extents of ranges back from the pool of the region's tenant, except for
    /// those that could not be zeroed. Returns `true` if there are some of these.
    pub(super) fn take_back(&mut self, family: &Family, ranges: &[Range<u64>]) -> bool {
        let ranges: Vec<Range<u64>> = ranges.iter().map(|it| self.addresses(it)).collect();
        let (taken, left) = family.shared.take_back(&ranges);
        for (placed, fence) in taken {
            let offset = placed.address().0 - self.address().0;
            self.withdrawn.insert(offset, fence);
            self.space.adopt(placed);
        }
        left
    }

    /// Makes a change to all mapped memory, withdrawn memory included.
    pub(super) fn with_withdrawn<T>(&mut self, change: impl FnOnce(&mut Self) -> T) -> T {
        let Some(family) = self.supply.family().cloned() else {
            return change(self);
        };
        let all = 0..self.size();
        if !self.device().is_forked() {
            self.take_back(&family, std::slice::from_ref(&all));
        }
        let done = change(self);
        self.note_pending(&all);
        done
    }

    /// Commits planned extents, each with its offset and size, with memory that the tenant's pool
    /// lends. All or nothing, except that memory whose zeroing failed and may still run is left to
    /// the pool behind it.
    pub(super) fn commit_lent(
        &mut self,
        family: &Family,
        planned: &[(u64, u64)],
        place: Option<InLine>,
    ) -> Result<(), BlockError> {
        let lent = family.lend(&sizes(planned), place)?;
        self.place_lent(family, planned, lent)
    }

    /// Maps lent extents at the places of planned ones, and zeroes what was used before.
    pub(super) fn place_lent(
        &mut self,
        family: &Family,
        planned: &[(u64, u64)],
        mut lent: Vec<Unmapped>,
    ) -> Result<(), BlockError> {
        let charged = self.space.count() + self.space.stuck_count() + lent.len() as u64;
        let offsets = offsets(planned, &lent);
        lent.reverse();
        let mut placing = Placing {
            region: self,
            family,
            offsets,
            back: lent,
        };
        let placed = placing.place().map_err(|error| (error, Fence::complete()));
        let cleared = placed.and_then(|used| family.clear(&placing.region.space, &used));
        let Err((error, running)) = cleared else {
            placing.offsets.clear();
            return Ok(());
        };
        placing.undo(&running, charged);
        Err(error)
    }
}

/// Lent extents on their way to their places, where they are zeroed. A panic of the driver leaves
/// those that are placed to the pool, as memory that may hold bytes of other tenants, and gives the
/// rest back.
struct Placing<'a> {
    region: &'a mut Region,
    family: &'a Family,
    /// Empty once nothing is to be undone.
    offsets: Vec<u64>,
    /// The extents that are not placed; before a failure the first is the last.
    back: Vec<Unmapped>,
}

impl Placing<'_> {
    /// Maps the extents. Returns the ranges that were used before.
    fn place(&mut self) -> Result<Vec<Range<u64>>, BlockError> {
        let mut used: Vec<Range<u64>> = Vec::new();
        self.region.check_mapping_limit(self.back.len() as u64, 0)?;
        for &offset in &self.offsets {
            let Some(unmapped) = self.back.pop() else {
                break;
            };
            let end = offset + unmapped.size();
            if unmapped.last_writer.is_some() {
                match used.last_mut() {
                    Some(last) if last.end == offset => last.end = end,
                    _ => used.push(offset..end),
                }
            }
            let physical = unmapped.physical.clone();
            if let Err(failed) = self.region.space.place(offset, vec![unmapped]) {
                // The pool quarantines a physical that is stuck in a mapping.
                let stuck = (failed.stuck > 0).then(|| Unmapped::fresh(physical));
                self.back.extend(stuck);
                self.back.extend(failed.physicals);
                return Err(self.family.tenant.not_placed(failed.error));
            }
        }
        Ok(used)
    }

    /// Unmaps the extents that are placed, and gives all back, of `charged` mappings those that are
    /// gone. What a fill may still write to is left to the pool behind it.
    fn undo(&mut self, running: &Fence, charged: u64) {
        let (space, mut unclean) = (&mut self.region.space, Vec::new());
        for offset in std::mem::take(&mut self.offsets).into_iter().rev() {
            let Some(mut completed) = running.completed(space) else {
                let placed = space.remove(offset);
                unclean.extend(placed.map(|placed| (placed, running.clone())));
                continue;
            };
            match completed.withdraw_back(offset) {
                Ok(unmapped) => self.back.extend(unmapped),
                Err(error) => {
                    log!(error, %error, offset, "a roll-back could not unmap: quarantined");
                    let physical = space.physical_at(offset).map(Unmapped::fresh);
                    self.back.extend(physical);
                    space.quarantine(offset);
                }
            }
        }
        let left = space.count() + space.stuck_count() + unclean.len() as u64;
        let unclean = unclean.into_iter();
        self.family.shared.withdraw(unclean, Use::Unclean);
        // A mapping is more than there were if the driver panicked meanwhile when the pool unmapped it.
        let gone = charged.saturating_sub(left);
        self.family.give_back(std::mem::take(&mut self.back), gone);
    }
}

impl Drop for Placing<'_> {
    fn drop(&mut self) {
        if self.offsets.is_empty() {
            return;
        }
        // The call that panicked may have mapped its extent, which stays charged.
        let fills = self.family.fills();
        let placed = |&offset: &u64| self.region.space.remove(offset);
        let placed: Vec<Placed> = self.offsets.iter().filter_map(placed).collect();
        let unclean = placed.into_iter().map(|placed| (placed, fills.clone()));
        self.family.shared.withdraw(unclean, Use::Unclean);
        let back = std::mem::take(&mut self.back);
        let mappings = back.len() as u64;
        self.family.give_back(back, mappings);
    }
}

pub(super) fn sizes(planned: &[(u64, u64)]) -> Vec<u64> {
    planned.iter().map(|&(_, size)| size).collect()
}

/// Returns the offsets at which lent extents take the places of planned ones.
fn offsets(planned: &[(u64, u64)], lent: &[Unmapped]) -> Vec<u64> {
    let mut planned = planned.iter();
    let mut hole = 0..0;
    let next = |unmapped: &Unmapped| {
        if hole.is_empty()
            && let Some(&(offset, size)) = planned.next()
        {
            hole = offset..offset + size;
        }
        let offset = hole.start;
        hole.start += unmapped.size();
        offset
    };
    lent.iter().map(next).collect()
}
