//! Advice and prefetch locations of the pages of a managed allocation.

use std::collections::{BTreeMap, BTreeSet};

use super::pages::page_size;
use cuvmm_driver::Location;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) read_mostly: bool,
    pub(crate) preferred: Option<Location>,
    pub(crate) prefetched: Option<Location>,
    pub(crate) accessed_by: BTreeSet<Location>,
}

/// Attributes by address; each entry applies up to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Advised(BTreeMap<u64, Attributes>);

impl Advised {
    pub(crate) fn new(start: u64) -> Self {
        Self(BTreeMap::from([(start, Attributes::default())]))
    }

    fn split(&mut self, at: u64) {
        if let Some((_, attributes)) = self.0.range(..=at).next_back() {
            let attributes = attributes.clone();
            self.0.insert(at, attributes);
        }
    }

    /// Changes the attributes of a range, extended to whole pages of the host as the driver does.
    pub(crate) fn change(&mut self, start: u64, end: u64, change: impl Fn(&mut Attributes)) {
        let page = page_size();
        let (start, end) = (start - start % page, end.next_multiple_of(page));
        self.split(start);
        self.split(end);
        self.0
            .range_mut(start..end)
            .for_each(|(_, attributes)| change(attributes));
    }

    pub(crate) fn over(&self, start: u64, end: u64) -> impl Iterator<Item = &Attributes> {
        let first = self
            .0
            .range(..=start)
            .next_back()
            .map_or(start, |(&first, _)| first);
        self.0.range(first..end).map(|(_, attributes)| attributes)
    }

    /// Returns the location of the whole range, if it is the same everywhere.
    pub(crate) fn same(
        &self,
        (start, end): (u64, u64),
        place: impl Fn(&Attributes) -> Option<Location>,
    ) -> Option<Location> {
        let mut places = self.over(start, end).map(place);
        let first = places.next()?;
        if places.all(|other| other == first) {
            first
        } else {
            None
        }
    }
}
