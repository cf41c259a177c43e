//! A map in the order of its keys.
//!
//! Most of a heap's maps have few entries or none. Few are in a list, which keeps its memory when
//! it is empty; a tree would allocate a node for the first entry and free it with the last.

use std::collections::BTreeMap;

/// The most entries in a list. A map can have tens of thousands.
const FEW: usize = 32;

#[derive(Debug)]
pub(super) enum Sorted<K, V> {
    Few(Vec<(K, V)>),
    Many(BTreeMap<K, V>),
}

impl<K, V> Default for Sorted<K, V> {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl<K: Ord + Copy, V> Sorted<K, V> {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Few(list) => list.is_empty(),
            Self::Many(tree) => tree.is_empty(),
        }
    }

    pub(super) fn last(&self) -> Option<(K, &V)> {
        match self {
            Self::Few(list) => list.last().map(by_value),
            Self::Many(tree) => tree.last_key_value().map(|(&key, value)| (key, value)),
        }
    }

    pub(super) fn last_before(&self, key: K) -> Option<(K, &V)> {
        match self {
            Self::Few(list) => list.get(place(list, key).checked_sub(1)?).map(by_value),
            Self::Many(tree) => tree
                .range(..key)
                .next_back()
                .map(|(&key, value)| (key, value)),
        }
    }

    pub(super) fn first_from(&self, key: K) -> Option<(K, &V)> {
        self.from(key).next()
    }

    pub(super) fn from(&self, key: K) -> impl Iterator<Item = (K, &V)> {
        let (list, tree) = match self {
            Self::Few(list) => (list.get(place(list, key)..).unwrap_or_default(), None),
            Self::Many(tree) => (&[][..], Some(tree.range(key..))),
        };
        let tree = tree.into_iter().flatten();
        list.iter()
            .map(by_value)
            .chain(tree.map(|(&key, value)| (key, value)))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (K, &V)> {
        let (list, tree) = match self {
            Self::Few(list) => (list.as_slice(), None),
            Self::Many(tree) => (&[][..], Some(tree)),
        };
        let tree = tree.into_iter().flatten();
        list.iter()
            .map(by_value)
            .chain(tree.map(|(&key, value)| (key, value)))
    }

    pub(super) fn for_each_value(&mut self, mut change: impl FnMut(&mut V)) {
        match self {
            Self::Few(list) => list.iter_mut().for_each(|(_, value)| change(value)),
            Self::Many(tree) => tree.values_mut().for_each(change),
        }
    }

    pub(super) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        match self {
            Self::Few(list) => {
                let index = place(list, key);
                let entry = list.get_mut(index).filter(|(known, _)| *known == key);
                entry.map(|(_, value)| value)
            }
            Self::Many(tree) => tree.get_mut(&key),
        }
    }

    pub(super) fn insert(&mut self, key: K, value: V) {
        let Self::Few(list) = self else {
            return self.insert_in_tree(key, value);
        };
        let index = place(list, key);
        if let Some((_, known)) = list.get_mut(index).filter(|(known, _)| *known == key) {
            *known = value;
        } else if list.len() < FEW {
            list.insert(index, (key, value));
        } else {
            *self = Self::Many(list.drain(..).collect());
            self.insert_in_tree(key, value);
        }
    }

    fn insert_in_tree(&mut self, key: K, value: V) {
        if let Self::Many(tree) = self {
            tree.insert(key, value);
        }
    }

    pub(super) fn remove(&mut self, key: K) -> Option<V> {
        match self {
            Self::Few(list) => {
                let index = place(list, key);
                list.get(index).filter(|(known, _)| *known == key)?;
                Some(list.remove(index).1)
            }
            Self::Many(tree) => {
                let removed = tree.remove(&key);
                if tree.is_empty() {
                    *self = Self::default();
                }
                removed
            }
        }
    }
}

/// Returns the index of the first entry from a key on.
fn place<K: Ord + Copy, V>(list: &[(K, V)], key: K) -> usize {
    list.partition_point(|&(known, _)| known < key)
}

fn by_value<K: Copy, V>((key, value): &(K, V)) -> (K, &V) {
    (*key, value)
}

#[cfg(test)]
mod tests {
    use super::{BTreeMap, FEW, Sorted};

    fn compare(sorted: &Sorted<u64, u64>, tree: &BTreeMap<u64, u64>) {
        let known = |(key, value): (&u64, &u64)| (*key, *value);
        let found = |(key, value): (u64, &u64)| (key, *value);
        assert_eq!(sorted.is_empty(), tree.is_empty());
        assert_eq!(sorted.last().map(found), tree.last_key_value().map(known));
        assert!(sorted.all().map(found).eq(tree.iter().map(known)));
        for key in 0..=240 {
            let before = sorted.last_before(key).map(found);
            assert_eq!(before, tree.range(..key).next_back().map(known));
            let from = tree.range(key..).map(known);
            assert!(sorted.from(key).map(found).eq(from.clone()));
            assert_eq!(sorted.first_from(key).map(found), from.clone().next());
        }
    }

    #[test]
    fn a_list_that_becomes_a_tree_and_a_list_again_has_the_same_entries() {
        let (mut sorted, mut tree) = (Sorted::default(), BTreeMap::new());
        // Every fourth key from 1 on, in another order than theirs.
        let keys: Vec<u64> = (0..60).map(|number| 1 + number * 37 % 60 * 4).collect();
        for &key in &keys {
            sorted.insert(key, key + 2);
            tree.insert(key, key + 2);
            assert_eq!(matches!(sorted, Sorted::Many(_)), tree.len() > FEW);
            compare(&sorted, &tree);
        }
        sorted.insert(1, 4);
        tree.insert(1, 4);
        sorted.for_each_value(|value| *value += 1);
        tree.values_mut().for_each(|value| *value += 1);
        for &key in keys.iter().rev() {
            assert!(sorted.remove(key + 1).is_none());
            assert!(sorted.get_mut(key + 1).is_none());
            assert_eq!(sorted.get_mut(key), tree.get_mut(&key));
            assert_eq!(sorted.remove(key), tree.remove(&key));
            compare(&sorted, &tree);
        }
        assert!(matches!(sorted, Sorted::Few(_)));
    }

    #[test]
    fn a_key_that_is_known_gets_another_value_in_a_full_list() {
        let mut sorted = Sorted::default();
        (0..FEW).for_each(|key| sorted.insert(key, 0));
        sorted.insert(3, 1);
        assert!(matches!(sorted, Sorted::Few(_)));
        assert_eq!(sorted.get_mut(3), Some(&mut 1));
    }
}
