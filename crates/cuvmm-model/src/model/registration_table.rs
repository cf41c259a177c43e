//! The table of the program's registered host memory.

use std::collections::BTreeMap;

/// Registered ranges by their first byte, with their sizes. They do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Registrations {
    pub(crate) sizes: BTreeMap<u64, u64>,
}

impl Registrations {
    pub(crate) fn count(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the last range that overlaps `size` bytes, at least one, from an address.
    pub(crate) fn overlapping(&self, start: u64, size: u64) -> Option<(u64, u64)> {
        let end = start.saturating_add(size);
        let (&first, &length) = self.sizes.range(..end).next_back()?;
        (start < first + length).then_some((first, length))
    }
}
