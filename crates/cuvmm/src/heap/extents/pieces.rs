//! The free pieces of one extent by their first byte.
//!
//! Most extents have one or none. Few are in a list, which keeps its memory when it is empty; a tree
//! would allocate a node for the first piece and free it with the last.

use std::collections::BTreeMap;

use super::super::tag::Tag;

/// The most pieces in a list. A chunk for small allocations can have tens of thousands.
const FEW: usize = 32;

/// A free piece.
#[derive(Clone, Debug)]
pub(super) struct Free {
    pub(super) end: u64,
    pub(super) tag: Tag,
}

#[derive(Debug)]
pub(super) enum Pieces {
    Few(Vec<(u64, Free)>),
    Many(BTreeMap<u64, Free>),
}

impl Default for Pieces {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl Pieces {
    /// Returns the last piece that begins before an offset.
    pub(super) fn last_before(&self, at: u64) -> Option<(u64, &Free)> {
        match self {
            Self::Few(list) => {
                let (start, free) = list.get(place(list, at).checked_sub(1)?)?;
                Some((*start, free))
            }
            Self::Many(tree) => tree.range(..at).next_back().map(by_value),
        }
    }

    /// Returns the first piece that begins at an offset or behind it.
    pub(super) fn first_from(&self, at: u64) -> Option<(u64, &Free)> {
        match self {
            Self::Few(list) => list
                .get(place(list, at))
                .map(|(start, free)| (*start, free)),
            Self::Many(tree) => tree.range(at..).next().map(by_value),
        }
    }

    /// Returns the pieces of which at least a part lies in a range.
    pub(super) fn meeting(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Free)> {
        let before = self.last_before(start).filter(|(_, free)| free.end > start);
        let mut from = before.map_or(start, |(first, _)| first);
        std::iter::from_fn(move || {
            let piece = self.first_from(from).filter(|&(first, _)| first < end)?;
            from = piece.1.end;
            Some(piece)
        })
    }

    /// Returns all pieces.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, &Free)> {
        let (list, tree) = match self {
            Self::Few(list) => (list.as_slice(), None),
            Self::Many(tree) => (&[][..], Some(tree)),
        };
        let list = list.iter().map(|(start, free)| (*start, free));
        list.chain(tree.into_iter().flatten().map(by_value))
    }

    /// Calls `change` with the tag of each piece.
    pub(super) fn for_each_tag(&mut self, mut change: impl FnMut(&mut Tag)) {
        match self {
            Self::Few(list) => list.iter_mut().for_each(|(_, free)| change(&mut free.tag)),
            Self::Many(tree) => tree.values_mut().for_each(|free| change(&mut free.tag)),
        }
    }

    /// Returns the piece that begins at an offset.
    pub(super) fn get_mut(&mut self, start: u64) -> Option<&mut Free> {
        match self {
            Self::Few(list) => {
                let index = place(list, start);
                let piece = list.get_mut(index).filter(|(first, _)| *first == start);
                piece.map(|(_, free)| free)
            }
            Self::Many(tree) => tree.get_mut(&start),
        }
    }

    /// Adds a piece, or replaces the one that begins where it does.
    pub(super) fn insert(&mut self, start: u64, free: Free) {
        if let Some(known) = self.get_mut(start) {
            *known = free;
            return;
        }
        match self {
            Self::Few(list) if list.len() < FEW => list.insert(place(list, start), (start, free)),
            Self::Few(list) => {
                let mut tree: BTreeMap<u64, Free> = list.drain(..).collect();
                tree.insert(start, free);
                *self = Self::Many(tree);
            }
            Self::Many(tree) => drop(tree.insert(start, free)),
        }
    }

    /// Removes the piece that begins at an offset.
    pub(super) fn remove(&mut self, start: u64) -> Option<Free> {
        match self {
            Self::Few(list) => {
                let index = place(list, start);
                list.get(index).filter(|(first, _)| *first == start)?;
                Some(list.remove(index).1)
            }
            Self::Many(tree) => {
                let removed = tree.remove(&start);
                if tree.is_empty() {
                    *self = Self::default();
                }
                removed
            }
        }
    }
}

/// Returns the index of the first piece that begins at an offset or behind it.
fn place(list: &[(u64, Free)], at: u64) -> usize {
    list.partition_point(|&(start, _)| start < at)
}

fn by_value<'a>((&start, free): (&u64, &'a Free)) -> (u64, &'a Free) {
    (start, free)
}

#[cfg(test)]
mod tests {
    use super::{BTreeMap, FEW, Free, Pieces, Tag};

    fn free(end: u64) -> Free {
        let tag = Tag::Ready;
        Free { end, tag }
    }

    /// Compares all answers with those of a tree.
    fn compare(pieces: &Pieces, tree: &BTreeMap<u64, u64>) {
        let known: Vec<_> = tree.iter().map(|(&start, &end)| (start, end)).collect();
        let all = pieces.all().map(|(start, free)| (start, free.end));
        assert_eq!(all.collect::<Vec<_>>(), known);
        for at in 0..=240 {
            let before = known.iter().rev().find(|&&(start, _)| start < at);
            let found = pieces.last_before(at);
            assert_eq!(
                found.map(|(start, free)| (start, free.end)),
                before.copied()
            );
            let from = known.iter().find(|&&(start, _)| start >= at);
            let found = pieces.first_from(at);
            assert_eq!(found.map(|(start, free)| (start, free.end)), from.copied());
            let meeting = known
                .iter()
                .filter(|&&(start, end)| start < at + 5 && end > at);
            let found = pieces.meeting(at, at + 5);
            let found = found.map(|(start, free)| (start, free.end));
            assert_eq!(
                found.collect::<Vec<_>>(),
                meeting.copied().collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn a_list_that_becomes_a_tree_and_a_list_again_has_the_same_pieces() {
        let (mut pieces, mut tree) = (Pieces::default(), BTreeMap::new());
        // Every 4 bytes from 1 on, in another order than theirs.
        let starts: Vec<u64> = (0..60).map(|number| 1 + number * 37 % 60 * 4).collect();
        for &start in &starts {
            pieces.insert(start, free(start + 2));
            tree.insert(start, start + 2);
            assert_eq!(matches!(pieces, Pieces::Many(_)), tree.len() > FEW);
            compare(&pieces, &tree);
        }
        pieces.insert(1, free(4));
        tree.insert(1, 4);
        for &start in starts.iter().rev() {
            assert!(pieces.remove(start + 1).is_none());
            assert!(pieces.get_mut(start + 1).is_none());
            assert_eq!(
                pieces.get_mut(start).map(|free| free.end),
                tree.get(&start).copied()
            );
            assert_eq!(
                pieces.remove(start).map(|free| free.end),
                tree.remove(&start)
            );
            compare(&pieces, &tree);
        }
        assert!(matches!(pieces, Pieces::Few(_)));
    }
}
