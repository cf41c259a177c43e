//! The table of mappings.

use std::collections::BTreeMap;

use super::rights::Rights;

#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) size: u64,
    pub(crate) handle: u64,
    pub(crate) rights: Rights,
}

/// All mappings by address. They never overlap.
///
/// One map covers the whole address space, because the driver lets a mapping extend from one
/// reservation into the next.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    pub(crate) by_address: BTreeMap<u64, Mapping>,
}

impl Mappings {
    pub(crate) fn containing(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.by_address.range(..=address).next_back()?;
        (address - start < mapping.size).then_some((start, mapping))
    }

    pub(crate) fn touching(
        &self,
        address: u64,
        size: u64,
    ) -> impl Iterator<Item = (u64, &Mapping)> {
        let end = address.saturating_add(size);
        let first = self.containing(address).map_or(address, |(start, _)| start);
        self.by_address
            .range(first..end.max(first))
            .map(|(&start, mapping)| (start, mapping))
    }

    pub(crate) fn any_in(&self, address: u64, size: u64) -> bool {
        self.touching(address, size).next().is_some()
    }

    pub(crate) fn cover(&self, address: u64, size: u64) -> bool {
        let mut at = address;
        for (start, mapping) in self.touching(address, size) {
            if start > at {
                return false;
            }
            at = start + mapping.size;
        }
        at >= address.saturating_add(size)
    }
}
