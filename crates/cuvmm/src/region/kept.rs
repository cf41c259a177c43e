//! Memory that a region holds and that is not committed, by the reason why it stays.

use std::fmt;

use super::Region;
use crate::display::Bytes;
use crate::extents::Extent;

/// The memory that a region holds beside its committed bytes, in bytes, by the reason why it stays.
/// Each byte of mapped addresses counts once: memory with an [alias](Region::alias) counts at both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Kept {
    /// Extents without a committed byte: the work that may use them is not known to be complete, a
    /// capture guard lives, or the driver refused to unmap them. A later
    /// [`purge`](Region::purge) gives them back.
    pub pending_free: u64,
    /// Withdrawn parts of extents with committed bytes: an extent is unmapped as a whole.
    /// [`compact`](Region::compact) gives them back; if it left them, memory or mappings
    /// were short for the copy.
    pub partly_used: u64,
    /// Withdrawn parts of extents that a [registration](Region::register) keeps in place. End it,
    /// then compact.
    pub registered: u64,
    /// Withdrawn parts of extents that were [exported](Region::export), and that importers would
    /// go on using. They come back when the rest of their extent is decommitted.
    pub exported: u64,
    /// Withdrawn parts of extents that a [fork](Region::fork) or an [alias](Region::alias) shows
    /// too.
    pub shared: u64,
    /// Memory that a failed roll-back left mapped; closing the region tries to unmap it again.
    pub quarantined: u64,
}

/// The result of a [purge](Region::purge), in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Purged {
    /// Memory given back: to the driver, or to the pool of the region's tenant. What a
    /// [fork](Region::fork) or an [alias](Region::alias) shows too goes back with the last of them.
    pub given_back: u64,
    /// The memory that stays although it is not committed.
    pub kept: Kept,
}

impl Kept {
    /// Returns the sum of all reasons.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.pending_free + self.stranded() + self.quarantined
    }

    /// The withdrawn memory in one extent with committed bytes.
    pub(super) const fn stranded(&self) -> u64 {
        self.partly_used + self.registered + self.exported + self.shared
    }

    fn parts(&self) -> impl Iterator<Item = (u64, &'static str)> {
        let parts = [
            (self.pending_free, "pending on GPU work"),
            (self.partly_used, "in extents partly used"),
            (self.registered, "in registered extents"),
            (self.exported, "in exported extents"),
            (self.shared, "in shared extents"),
            (self.quarantined, "quarantined"),
        ];
        parts.into_iter().filter(|&(bytes, _)| bytes > 0)
    }
}

/// Shows the reasons with their bytes in one line, or `nothing`.
impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = self.parts();
        let Some((bytes, why)) = parts.next() else {
            return f.write_str("nothing");
        };
        write!(f, "{} {why}", Bytes(bytes))?;
        parts.try_for_each(|(bytes, why)| write!(f, ", {} {why}", Bytes(bytes)))
    }
}

/// Shows what went and what stays in one line.
impl fmt::Display for Purged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} given back, kept: {}",
            Bytes(self.given_back),
            self.kept
        )
    }
}

/// The reason why an extent that is committed in part stays in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stays {
    Registered,
    Exported,
    Shared,
}

impl Region {
    /// Returns the memory held that is not committed. Takes time in proportion to the number of
    /// extents only if some are committed in part.
    pub(super) fn kept(&self) -> Kept {
        let mut kept = Kept {
            pending_free: self.pending_free(),
            quarantined: self.quarantined(),
            ..Kept::default()
        };
        if self.space.bytes() == self.pending.bytes() + self.committed() {
            return kept;
        }
        let aliased = self.is_aliased();
        for extent in self.space.extents() {
            let parts = self.committed.parts(extent.offset..extent.end());
            let live: u64 = parts.map(|part| part.end - part.start).sum();
            if !(1..extent.size).contains(&live) {
                continue;
            }
            let why = match self.stays(&extent, aliased) {
                None => &mut kept.partly_used,
                Some(Stays::Registered) => &mut kept.registered,
                Some(Stays::Exported) => &mut kept.exported,
                Some(Stays::Shared) => &mut kept.shared,
            };
            *why += extent.size - live;
        }
        kept
    }

    /// Returns why an extent that is committed in part cannot be replaced; `aliased` is `true` if
    /// the region maps some memory twice.
    pub(super) fn stays(&self, extent: &Extent, aliased: bool) -> Option<Stays> {
        let (offset, end) = (extent.offset, extent.end());
        let mut physicals = self.space.parts_in(offset, end);
        if self.unregistered(&(offset..end)).is_err() {
            Some(Stays::Registered)
        } else if physicals.any(|(_, physical)| physical.is_exported()) {
            Some(Stays::Exported)
        } else if aliased || !self.space.is_own(offset) {
            Some(Stays::Shared)
        } else {
            None
        }
    }
}
