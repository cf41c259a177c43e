//! Memory of a tenant that is mapped ahead of use, which its pool may take until it is committed.
//!
//! It is withdrawn as soon as it is mapped: a commit then takes it back without a driver call.

use std::ops::Range;
use std::sync::Weak;

use super::Region;
use super::holder::{Use, WorksAhead};
use super::lent::sizes;
use crate::error::BlockError;

impl Region {
    /// Maps memory of the tenant under ranges that have none, if nothing is reclaimed for it, and
    /// leaves it to the pool until it is committed: all or nothing. Returns `false` if there is no
    /// such memory.
    pub(crate) fn map_ahead(&mut self, ranges: &[Range<u64>]) -> Result<bool, BlockError> {
        let Some(family) = self.supply.family().cloned() else {
            return Ok(false);
        };
        family.may_grow()?;
        for range in ranges {
            self.check(range)?;
            self.check_not_stuck(range)?;
        }
        let planned = ranges.iter().flat_map(|range| self.plan(range, None));
        let planned: Vec<(u64, u64)> = planned.map(|it| (it.offset, it.size)).collect();
        self.check_mapping_limit(planned.len() as u64, 0)?;
        let Some(lent) = family.lend_spare(&sizes(&planned))? else {
            return Ok(false);
        };
        self.place_lent(&family, &planned, lent)?;
        self.hand_over(&family, ranges, Use::Ahead);
        Ok(true)
    }

    /// Returns `true` if nothing is mapped under a range of a region in a tenant.
    pub(crate) fn is_bare(&self, range: &Range<u64>) -> bool {
        let mut extents = self.space.extents_in(range.start, range.end);
        extents.next().is_none() && self.withdrawn_bytes(range) == 0
    }

    /// Sets the owner that the pool's mapper calls to [map memory ahead](Self::map_ahead).
    pub(crate) fn set_worker(&self, worker: Weak<dyn WorksAhead>) {
        if let Some(family) = self.supply.family() {
            family.shared.worker.get_or_init(|| worker);
        }
    }

    pub(crate) fn call_worker(&self) {
        if let Some(family) = self.supply.family() {
            family.call_worker();
        }
    }

    /// Returns figures of a region in a tenant that has neither forks nor aliases. Looks at no extent.
    pub(crate) fn lent_figures(&self) -> LentFigures {
        let family = self.supply.family();
        let (sums, count) = family.map_or_else(Default::default, |it| it.shared.sums());
        LentFigures {
            held: self.space.bytes() + self.space.stuck_bytes() + sums.bytes,
            withdrawn: sums.bytes,
            ahead: sums.ahead,
            mappings: self.space.count() + self.space.stuck_count() + count,
        }
    }
}

/// Figures of a region that is alone in its holder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LentFigures {
    /// Bytes of memory, committed or withdrawn.
    pub(crate) held: u64,
    pub(crate) withdrawn: u64,
    /// Bytes that are mapped ahead and not committed yet, a part of those withdrawn.
    pub(crate) ahead: u64,
    pub(crate) mappings: u64,
}
