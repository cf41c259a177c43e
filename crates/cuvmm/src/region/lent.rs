//! Regions in a tenant: their memory is lent by the tenant's pool, and goes back to it.
//!
//! A commit takes withdrawn extents of its range back first. It then plans, lets the pool obtain
//! memory without any lock of the region, and maps it. Used memory is zeroed before the commit
//! returns.

use std::ops::Range;

use super::Region;
use super::family::Family;
use crate::error::{BlockError, MemoryError};
use crate::extents::{Fence, PlaceError, Placed, Unmapped};
use crate::ledger::InLine;

/// A commit that failed: the memory to give back, and the work that may use what is mapped.
struct Failed {
    error: BlockError,
    back: Vec<Unmapped>,
    running: Fence,
}

impl Region {
    /// Takes the withdrawn extents of a range back from the pool of the region's tenant, to commit
    /// them again.
    pub(super) fn revive(
        &mut self,
        family: &Family,
        range: &Range<u64>,
    ) -> Result<(), MemoryError> {
        family.may_grow()?;
        let addresses = self.addresses(range);
        let revived = family.revive(&addresses)?;
        let revived = revived.map_err(|bytes| MemoryError::PendingFree {
            range: range.clone(),
            bytes,
        })?;
        self.adopt_all(revived);
        Ok(())
    }

    fn adopt_all(&mut self, extents: Vec<(Placed, Fence)>) {
        let base = self.address().0;
        for (placed, fence) in extents {
            self.withdrawn.insert(placed.address().0 - base, fence);
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
            let extents = family.take_back(&self.addresses(&all));
            self.adopt_all(extents);
        }
        let done = change(self);
        self.note_pending(&all);
        done
    }

    /// Commits planned extents, each with its offset and size, with memory that the tenant's pool
    /// lends. All or nothing; memory whose zeroing failed and may still run is pending free.
    pub(super) fn commit_lent(
        &mut self,
        family: &Family,
        planned: &[(u64, u64)],
        place: Option<InLine>,
    ) -> Result<(), BlockError> {
        let sizes: Vec<u64> = planned.iter().map(|&(_, size)| size).collect();
        let lent = family.lend(&sizes, 0, place)?;
        let (mappings, stuck) = (lent.len() as u64, self.space.stuck_count());
        let offsets = offsets(planned, &lent);
        let Err(failed) = self.place_lent(family, &offsets, lent) else {
            return Ok(());
        };
        let (back, pending) = self.undo_lent(family, &offsets, &failed.running, failed.back);
        let kept = pending + self.space.stuck_count() - stuck;
        family.give_back(back, mappings - kept);
        Err(failed.error)
    }

    fn place_lent(
        &mut self,
        family: &Family,
        offsets: &[u64],
        lent: Vec<Unmapped>,
    ) -> Result<(), Box<Failed>> {
        let mut used: Vec<Range<u64>> = Vec::new();
        let checked = self.check_mapping_limit(lent.len() as u64, 0);
        let mut refused = checked.err().map(BlockError::from);
        let mut lent = offsets.iter().zip(lent);
        let mut back = Vec::new();
        while refused.is_none()
            && let Some((&offset, unmapped)) = lent.next()
        {
            let end = offset + unmapped.size();
            if unmapped.last_writer.is_some() {
                match used.last_mut() {
                    Some(last) if last.end == offset => last.end = end,
                    _ => used.push(offset..end),
                }
            }
            let physical = unmapped.physical.clone();
            let Err(failed) = self.space.place(offset, vec![unmapped]) else {
                continue;
            };
            let PlaceError {
                error,
                physicals,
                stuck,
            } = failed;
            // The pool quarantines a physical that is stuck in a mapping.
            back.extend((stuck > 0).then(|| Unmapped::fresh(physical)));
            back.extend(physicals);
            refused = Some(family.tenant.not_placed(error));
        }
        back.extend(lent.map(|(_, unmapped)| unmapped));
        let (error, running) = match refused {
            Some(error) => (error, Fence::complete()),
            None => match family.clear(&self.space, &used) {
                Ok(()) => return Ok(()),
                Err(failed) => failed,
            },
        };
        Err(Box::new(Failed {
            error,
            back,
            running,
        }))
    }

    /// Takes out the extents that a failed commit has placed. Returns the physicals to give back,
    /// and the number of extents that stay mapped behind running work.
    fn undo_lent(
        &mut self,
        family: &Family,
        offsets: &[u64],
        running: &Fence,
        mut back: Vec<Unmapped>,
    ) -> (Vec<Unmapped>, u64) {
        let mut kept = Vec::new();
        for &offset in offsets.iter().rev() {
            let Some(mut completed) = running.completed(&mut self.space) else {
                let placed = self.space.remove(offset);
                kept.extend(placed.map(|placed| (placed, running.clone())));
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
        let count = kept.len() as u64;
        family.withdraw(kept.into_iter());
        (back, count)
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
