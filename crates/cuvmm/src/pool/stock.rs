//! Physical memory that the pool has and nobody holds, by size.

use std::collections::BTreeMap;

use crate::region::Piece;

/// Unmapped pieces, kept for reuse.
#[derive(Debug, Default)]
pub(crate) struct Stock {
    by_size: BTreeMap<u64, Vec<Piece>>,
    bytes: u64,
}

impl Stock {
    pub(crate) const fn new() -> Self {
        Self {
            by_size: BTreeMap::new(),
            bytes: 0,
        }
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn largest(&self) -> u64 {
        self.by_size.keys().next_back().copied().unwrap_or(0)
    }

    pub(crate) fn add(&mut self, mut piece: Piece) {
        piece.fresh = false;
        self.bytes += piece.size();
        self.by_size.entry(piece.size()).or_default().push(piece);
    }

    /// A piece of exactly `size`: one that `tenant` may have as it is, if there is one. Without
    /// `scrub`, only such a one.
    pub(crate) fn take(&mut self, size: u64, tenant: u64, scrub: bool) -> Option<Piece> {
        let pieces = self.by_size.get_mut(&size)?;
        let as_it_is = |piece: &Piece| piece.stain.is_none_or(|stain| stain == tenant);
        let index = match pieces.iter().rposition(as_it_is) {
            Some(index) => index,
            None if scrub => pieces.len().checked_sub(1)?,
            None => return None,
        };
        let piece = pieces.swap_remove(index);
        if pieces.is_empty() {
            self.by_size.remove(&size);
        }
        self.bytes -= size;
        Some(piece)
    }

    /// The largest piece of at most `size`, as [`Self::take`].
    pub(crate) fn take_within(&mut self, size: u64, tenant: u64, scrub: bool) -> Option<Piece> {
        let sizes: Vec<u64> = self
            .by_size
            .range(..=size)
            .map(|(&size, _)| size)
            .rev()
            .collect();
        sizes
            .into_iter()
            .find_map(|size| self.take(size, tenant, scrub))
    }

    /// The largest piece, whoever wrote to it, to be given back to the driver.
    pub(crate) fn take_largest(&mut self) -> Option<Piece> {
        let size = self.largest();
        self.take(size, 0, true)
    }
}
