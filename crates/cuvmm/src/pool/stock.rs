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

    /// Only [`State::keep`](super::state::State::keep) does, which knows what may be kept.
    pub(crate) fn add(&mut self, mut piece: Piece) {
        piece.fresh = false;
        self.bytes += piece.size();
        self.by_size.entry(piece.size()).or_default().push(piece);
    }

    /// A piece of exactly `size`: one that nobody wrote to, or nobody but `own`, if there is one.
    /// Without `scrub`, only such a one.
    pub(crate) fn take(&mut self, size: u64, own: Option<u64>, scrub: bool) -> Option<Piece> {
        let pieces = self.by_size.get_mut(&size)?;
        let as_it_is = |piece: &Piece| piece.stain.is_none_or(|stain| Some(stain.by) == own);
        let index = match pieces.iter().rposition(as_it_is) {
            Some(index) => index,
            None if scrub => pieces.len().checked_sub(1)?,
            None => return None,
        };
        self.take_at(size, index)
    }

    fn take_at(&mut self, size: u64, index: usize) -> Option<Piece> {
        let pieces = self.by_size.get_mut(&size)?;
        let piece = pieces.swap_remove(index);
        if pieces.is_empty() {
            self.by_size.remove(&size);
        }
        self.bytes -= size;
        Some(piece)
    }

    /// The largest piece of at most `size`, as [`Self::take`].
    pub(crate) fn take_within(
        &mut self,
        size: u64,
        own: Option<u64>,
        scrub: bool,
    ) -> Option<Piece> {
        let mut below = size;
        loop {
            let (&size, _) = self.by_size.range(..=below).next_back()?;
            if let Some(piece) = self.take(size, own, scrub) {
                return Some(piece);
            }
            below = size.checked_sub(1)?;
        }
    }

    /// How many pieces make up `bytes`, the largest that fit first; as good as endless if they do
    /// not suffice.
    pub(crate) fn pieces_for(&self, bytes: u64) -> u64 {
        let mut left = bytes;
        let mut count = 0;
        for (&size, pieces) in self.by_size.range(..=bytes).rev() {
            let fit = (left / size).min(pieces.len() as u64);
            count += fit;
            left -= fit * size;
        }
        if left == 0 { count } else { u64::MAX }
    }

    /// The largest piece, whoever wrote to it, to be given back to the driver.
    pub(crate) fn take_largest(&mut self) -> Option<Piece> {
        let size = self.largest();
        self.take(size, None, true)
    }

    /// The smallest piece, to be given back.
    pub(crate) fn take_smallest(&mut self) -> Option<Piece> {
        let (&size, _) = self.by_size.first_key_value()?;
        self.take(size, None, true)
    }

    /// The smallest piece that is smaller than `size`, to be given back.
    pub(crate) fn take_below(&mut self, size: u64) -> Option<Piece> {
        let (&smallest, _) = self.by_size.first_key_value()?;
        (smallest < size).then(|| self.take(smallest, None, true))?
    }

    /// The smallest piece larger than `size`, to be given back.
    pub(crate) fn take_smallest_above(&mut self, size: u64) -> Option<Piece> {
        let (&size, _) = self.by_size.range(size.checked_add(1)?..).next()?;
        self.take(size, None, true)
    }
}
