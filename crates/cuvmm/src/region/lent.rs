//! Regions in a tenant: their memory is lent by the tenant's pool, and goes back to it.
//!
//! A commit takes withdrawn extents of its range back first. It then plans, lets the pool obtain
//! memory without any lock of the region, and maps it. Used memory is zeroed before the commit
//! returns.

use std::ops::Range;

use super::Region;
use super::family::Family;
use crate::error::BlockError;
use crate::extents::{Fence, Unmapped};
use crate::ledger::InLine;

impl Region {
    /// Takes the withdrawn extents of a range back from the pool of the region's tenant, except for
    /// those that could not be zeroed.
    pub(super) fn take_back(&mut self, family: &Family, range: &Range<u64>) {
        for (placed, fence) in family.shared.take_back(&self.addresses(range)) {
            let offset = placed.address().0 - self.address().0;
            self.withdrawn.insert(offset, fence);
            self.space.adopt(placed);
        }
    }

    /// Makes a change to all mapped memory, withdrawn memory included.
    pub(super) fn with_withdrawn<T>(&mut self, change: impl FnOnce(&mut Self) -> T) -> T {
        let Some(family) = self.supply.family().cloned() else {
            return change(self);
        };
        let all = 0..self.size();
        if !self.device().is_forked() {
            self.take_back(&family, &all);
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
        let sizes: Vec<u64> = planned.iter().map(|&(_, size)| size).collect();
        let lent = family.lend(&sizes, place)?;
        let charged = self.space.count() + self.space.stuck_count() + lent.len() as u64;
        let offsets = offsets(planned, &lent);
        let mut back = Vec::new();
        let placed = self.place_lent(family, &offsets, lent, &mut back);
        let placed = placed.map_err(|error| (error, Fence::complete()));
        let cleared = placed.and_then(|used| family.clear(&self.space, &used));
        let Err((error, running)) = cleared else {
            return Ok(());
        };
        let mut unclean = Vec::new();
        for &offset in offsets.iter().rev() {
            let Some(mut completed) = running.completed(&mut self.space) else {
                let placed = self.space.remove(offset);
                unclean.extend(placed.map(|placed| (placed, running.clone())));
                continue;
            };
            match completed.withdraw_back(offset) {
                Ok(unmapped) => back.extend(unmapped),
                Err(error) => {
                    log!(error, %error, offset, "a roll-back could not unmap: quarantined");
                    back.extend(self.space.physical_at(offset).map(Unmapped::fresh));
                    self.space.quarantine(offset);
                }
            }
        }
        let left = self.space.count() + self.space.stuck_count() + unclean.len() as u64;
        family.shared.withdraw_unclean(unclean.into_iter());
        family.give_back(back, charged - left);
        Err(error)
    }

    /// Maps lent extents. Returns the ranges that were used before. On failure, `back` has the
    /// physicals that are not placed.
    fn place_lent(
        &mut self,
        family: &Family,
        offsets: &[u64],
        lent: Vec<Unmapped>,
        back: &mut Vec<Unmapped>,
    ) -> Result<Vec<Range<u64>>, BlockError> {
        let mut used: Vec<Range<u64>> = Vec::new();
        let checked = self.check_mapping_limit(lent.len() as u64, 0);
        let mut refused = checked.err().map(BlockError::from);
        for (&offset, unmapped) in offsets.iter().zip(lent) {
            if refused.is_some() {
                back.push(unmapped);
                continue;
            }
            let end = offset + unmapped.size();
            if unmapped.last_writer.is_some() {
                match used.last_mut() {
                    Some(last) if last.end == offset => last.end = end,
                    _ => used.push(offset..end),
                }
            }
            let physical = unmapped.physical.clone();
            if let Err(failed) = self.space.place(offset, vec![unmapped]) {
                // The pool quarantines a physical that is stuck in a mapping.
                back.extend((failed.stuck > 0).then(|| Unmapped::fresh(physical)));
                back.extend(failed.physicals);
                refused = Some(family.tenant.not_placed(failed.error));
            }
        }
        refused.map_or(Ok(used), Err)
    }
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
