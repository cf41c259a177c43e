//! Statistics of a region.

use std::fmt;

use super::Region;
use crate::display::{Bytes, Count};
use crate::extents::Extent;

/// The memory of a region, in bytes.
///
/// `held` is the sum of `committed`, `pending_free`, `stranded`, `quarantined` and the memory of
/// [zeros](Region::back_with_zeros). A part of the held memory may be `registered`, `exported` or
/// `shared`: it stays in place. Memory with an [alias](Region::alias) counts once in `held`, and in
/// the parts at both addresses.
#[doc(alias = "MemoryStats")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct RegionStats {
    /// Addresses.
    pub reserved: u64,
    /// Committed bytes.
    pub committed: u64,
    /// Physical memory that the region holds.
    pub held: u64,
    /// Memory without a committed byte, which [`purge`](Region::purge) releases once the work on it
    /// is complete.
    pub pending_free: u64,
    /// Withdrawn memory in one extent with committed bytes, which [`compact`](Region::compact)
    /// releases.
    pub stranded: u64,
    /// Memory of extents that a [registration](Region::register) keeps in place.
    pub registered: u64,
    /// Memory of extents that were [exported](Region::export).
    pub exported: u64,
    /// Memory of extents that a [fork](Region::fork) or another mapping shows too.
    pub shared: u64,
    /// Memory that a failed roll-back left mapped.
    pub quarantined: u64,
    /// The number of mapped extents.
    pub extents: u64,
    /// The size of the largest extent.
    pub largest_extent: u64,
}

impl RegionStats {
    /// Returns the share of held memory that is withdrawn and cannot be released as it is:
    /// `stranded / held`, or 0 for a region without memory.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        match self.held {
            0 => 0.0,
            held => self.stranded as f64 / held as f64,
        }
    }
}

/// Shows the figures in one line; those that are 0 are left out behind `held`.
impl fmt::Display for RegionStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (committed, held) = (Bytes(self.committed), Bytes(self.held));
        let reserved = Bytes(self.reserved);
        write!(f, "{committed} committed of {reserved}, {held} held")?;
        let parts = [
            (self.pending_free, "pending free"),
            (self.stranded, "stranded"),
            (self.registered, "registered"),
            (self.exported, "exported"),
            (self.shared, "shared"),
            (self.quarantined, "quarantined"),
        ];
        for (bytes, what) in parts.into_iter().filter(|&(bytes, _)| bytes > 0) {
            write!(f, ", {} {what}", Bytes(bytes))?;
        }
        write!(f, ", {}", Count(self.extents, "extent"))
    }
}

impl Region {
    /// Returns the figures of the region's memory. Makes no driver call; takes time in proportion
    /// to the number of extents.
    #[must_use]
    pub fn stats(&self) -> RegionStats {
        let sum = |is: &dyn Fn(&Extent) -> bool| -> u64 {
            let extents = self.space.extents().filter(is);
            extents.map(|extent| extent.size).sum()
        };
        let kept = self.kept();
        RegionStats {
            reserved: self.size(),
            committed: self.committed(),
            held: self.held(),
            pending_free: kept.pending_free,
            stranded: kept.stranded(),
            registered: sum(&|extent| self.unregistered(&(extent.offset..extent.end())).is_err()),
            exported: self.space.exported().map(|extent| extent.size).sum(),
            shared: self.shared(),
            quarantined: kept.quarantined,
            extents: self.space.count(),
            largest_extent: self.space.extents().map(|it| it.size).max().unwrap_or(0),
        }
    }
}
