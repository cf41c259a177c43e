//! Rows: slots whose addresses were reserved together and that are at equal distances.
//!
//! A row serves blocks that are allocated [side by side](crate::pool::blocks::adjacent), and each of its slots
//! other blocks too. The addresses of a whole row go back together.

use std::collections::BTreeMap;

/// The rows of a tenant. A row that loses a slot ends.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// In the order of their addresses.
    rows: BTreeMap<u64, Vec<usize>>,
    of: BTreeMap<usize, u64>,
    next: u64,
}

impl Rows {
    pub(super) const fn new() -> Self {
        Self {
            rows: BTreeMap::new(),
            of: BTreeMap::new(),
            next: 0,
        }
    }

    pub(in crate::pool::blocks) fn add(&mut self, slots: Vec<usize>) {
        let row = self.next;
        self.next += 1;
        self.of.extend(slots.iter().map(|&slot| (slot, row)));
        self.rows.insert(row, slots);
    }

    /// Removes a slot that is gone, and its row.
    pub(super) fn forget(&mut self, slot: usize) {
        let row = self.of.remove(&slot).and_then(|row| self.rows.remove(&row));
        for other in row.into_iter().flatten() {
            self.of.remove(&other);
        }
    }

    pub(in crate::pool::blocks) fn forget_all(&mut self) {
        self.rows.clear();
        self.of.clear();
    }

    #[inline]
    pub(in crate::pool::blocks) fn has(&self, slot: usize) -> bool {
        !self.of.is_empty() && self.of.contains_key(&slot)
    }

    /// Returns the row that a slot is in.
    pub(in crate::pool::blocks) fn around(&self, slot: usize) -> Option<&[usize]> {
        let row = self.of.get(&slot)?;
        self.rows.get(row).map(Vec::as_slice)
    }

    pub(in crate::pool::blocks) fn iter(&self) -> impl Iterator<Item = &[usize]> {
        self.rows.values().map(Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::Rows;

    #[test]
    fn a_row_ends_with_its_first_slot_that_goes() {
        let mut rows = Rows::new();
        rows.add(vec![3, 1, 2]);
        rows.add(vec![7, 8]);
        assert!(rows.has(2) && rows.has(7) && !rows.has(4));
        assert_eq!((rows.around(8), rows.around(4)), (Some(&[7, 8][..]), None));
        assert_eq!(rows.iter().collect::<Vec<_>>(), [&[3, 1, 2][..], &[7, 8]]);
        rows.forget(4);
        rows.forget(1);
        assert!(!rows.has(3) && !rows.has(2) && rows.has(8));
        assert_eq!(rows.iter().collect::<Vec<_>>(), [&[7, 8]]);
        // The number may be another slot's by now.
        rows.add(vec![1, 2]);
        rows.forget(3);
        assert!(rows.has(1));
        rows.forget_all();
        assert!(!rows.has(1) && rows.iter().next().is_none());
    }
}
