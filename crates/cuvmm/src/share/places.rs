//! Addresses of this process in an offer.
//!
//! A heap may have an extent mapped at several addresses. Mappings side by side are a *window*. A window
//! whose extents are side by side in another window too is shown there: its extents are offered once.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use cuvmm_driver::PhysicalHandle;

use crate::own::Physical;

/// Where the memory of an offer is mapped in this process: for each physical the first address, the
/// offset in the offer and the size, in the order of the addresses.
#[derive(Debug, Default)]
pub(super) struct Places(Vec<(u64, u64, u64)>);

/// Mappings side by side, each with its address.
type Window<'a> = Vec<(u64, &'a Physical)>;

impl Places {
    /// Lays out an offer of mapped physicals, by their addresses. Returns the physicals in the order of
    /// their offsets in it as well.
    pub(super) fn of(mapped: &BTreeMap<u64, Physical>) -> (Self, Vec<(u64, Physical)>) {
        let mut windows: Vec<Window<'_>> = Vec::new();
        let mut end = None;
        for (&at, physical) in mapped {
            match windows.last_mut() {
                Some(window) if end == Some(at) => window.push((at, physical)),
                _ => windows.push(vec![(at, physical)]),
            }
            end = at.checked_add(physical.size());
        }
        let hosts = hosts(&windows);
        let (mut offsets, mut parts, mut size) = (BTreeMap::new(), Vec::new(), 0);
        let own = windows
            .iter()
            .zip(&hosts)
            .filter(|(_, host)| host.is_none());
        for &(at, physical) in own.flat_map(|(window, _)| window) {
            offsets.insert(at, size);
            parts.push((size, physical.clone()));
            size += physical.size();
        }
        let mut places = Vec::with_capacity(mapped.len());
        for (window, host) in windows.iter().zip(hosts) {
            let first = window.first().map_or(0, |&(at, _)| at);
            let Some(&offset) = offsets.get(&host.unwrap_or(first)) else {
                continue;
            };
            let place =
                |&(at, physical): &(u64, &Physical)| (at, offset + (at - first), physical.size());
            places.extend(window.iter().map(place));
        }
        (Self(places), parts)
    }

    /// Returns the offset of the bytes at an address, which may go on in the physicals behind.
    pub(super) fn offset_of(&self, address: u64, size: u64) -> Option<u64> {
        let behind = self.0.partition_point(|&(at, ..)| at <= address);
        let (at, offset, bytes) = *self.0.get(behind.checked_sub(1)?)?;
        let mut end = at.checked_add(bytes)?;
        let last = address.checked_add(size)?;
        for &(next, _, bytes) in self.0.get(behind..)? {
            if next != end || end >= last {
                break;
            }
            end = next.checked_add(bytes)?;
        }
        (address < end && last <= end).then(|| offset + (address - at))
    }
}

/// Returns for each window the address at which another window shows the same extents, if one does.
/// Windows that show others are shown by none: they are the largest, and of equal ones the first.
fn hosts(windows: &[Window<'_>]) -> Vec<Option<u64>> {
    let mut mappings: BTreeMap<PhysicalHandle, Vec<(usize, usize)>> = BTreeMap::new();
    for (index, window) in windows.iter().enumerate() {
        for (place, (_, physical)) in window.iter().enumerate() {
            let all = mappings.entry(physical.as_raw()).or_default();
            all.push((index, place));
        }
    }
    let handle = |(_, physical): &(u64, &Physical)| physical.as_raw();
    let host = |(index, window): (usize, &Window<'_>)| {
        let (_, first) = window.first()?;
        let others = mappings.get(&first.as_raw())?.iter();
        let shown = others.filter_map(|&(other, place)| {
            let all = windows.get(other)?;
            let same = all.get(place..place + window.len())?;
            let comes_first = (all.len(), index) > (window.len(), other);
            let is_shown = comes_first && same.iter().map(handle).eq(window.iter().map(handle));
            is_shown.then_some((all.len(), Reverse(other), same.first()?.0))
        });
        shown.max().map(|(.., at)| at)
    };
    windows.iter().enumerate().map(host).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::extents::rig::{G, Rig, rig};

    /// Lays out windows of physicals of these numbers. Returns the places, and the
    /// numbers in the order of the offer.
    fn laid_out(memory: &[Physical], windows: &[&[usize]]) -> (Places, Vec<usize>) {
        let mut mapped = BTreeMap::new();
        for (at, window) in (0..).step_by(100).zip(windows) {
            let mut at = at * G;
            for &number in *window {
                mapped.insert(at, memory[number].clone());
                at += memory[number].size();
            }
        }
        let (places, parts) = Places::of(&mapped);
        let mut end = 0;
        let number = |(offset, physical): (u64, Physical)| {
            assert_eq!(offset, end);
            end += physical.size();
            let mut all = memory.iter();
            all.position(|it| it.as_raw() == physical.as_raw()).unwrap()
        };
        (places, parts.into_iter().map(number).collect())
    }

    fn memory(rig: &Rig) -> Vec<Physical> {
        // Number 1 has two granules, the others one.
        let sizes = [1, 2, 1, 1, 1];
        sizes.map(|granules| rig.memory(granules).physical).into()
    }

    #[test]
    fn an_extent_that_is_mapped_several_times_is_offered_once() {
        let rig = rig();
        let memory = memory(&rig);
        let windows: [&[usize]; 5] = [&[1], &[0, 1, 2], &[3], &[1, 2], &[0, 1, 2]];
        let (places, order) = laid_out(&memory, &windows);
        assert_eq!(order, [0, 1, 2, 3]);
        let offset =
            |window: u64, at: u64, size| places.offset_of((100 * window + at) * G, size * G);
        assert_eq!(offset(0, 0, 2), Some(G));
        assert_eq!(offset(0, 1, 2), None);
        assert_eq!(offset(1, 0, 4), Some(0));
        assert_eq!(offset(2, 0, 1), Some(4 * G));
        assert_eq!(offset(3, 1, 2), Some(2 * G));
        assert_eq!(offset(4, 3, 1), Some(3 * G));
        assert_eq!(offset(4, 3, 2), None);
    }

    #[test]
    fn an_extent_beside_others_each_time_is_offered_each_time() {
        let rig = rig();
        let memory = memory(&rig);
        let (places, order) = laid_out(&memory, &[&[0, 1], &[2, 1], &[1], &[1]]);
        assert_eq!(order, [0, 1, 2, 1]);
        let offset = |window: u64, size| places.offset_of(100 * window * G, size * G);
        assert_eq!((offset(0, 3), offset(1, 3)), (Some(0), Some(3 * G)));
        assert_eq!((offset(2, 2), offset(3, 2)), (Some(G), Some(G)));
    }
}
