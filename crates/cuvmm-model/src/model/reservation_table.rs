//! The tables of reservations and of recently freed ranges.

use std::collections::{BTreeMap, VecDeque};

use super::backing::Part;

const REMEMBERED: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// Sizes by start.
    pub(crate) ranges: BTreeMap<u64, u64>,
    /// The unused parts of recently freed ranges, as start and end: the driver follows a hint into
    /// them, and the hostile manner places the next reservation there.
    freed: VecDeque<(u64, u64)>,
}

impl Reservations {
    pub(crate) fn containing(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &size) = self.ranges.range(..=address).next_back()?;
        (address - start < size).then_some((start, start + size))
    }

    /// Returns the parts of a range that are in reservations. They are adjacent unless the range
    /// extends over a gap into another reservation.
    pub(crate) fn parts(&self, address: u64, size: u64) -> Vec<Part> {
        let end = address.saturating_add(size);
        let first = self.containing(address).map_or(address, |(start, _)| start);
        let mut parts: Vec<Part> = Vec::with_capacity(1);
        for (&start, &length) in self.ranges.range(first..end) {
            let from = start.max(address);
            let to = (start + length).min(end);
            match parts.last_mut() {
                Some(last) if last.address + last.size == from => last.size += to - from,
                _ => parts.push(Part {
                    address: from,
                    size: to - from,
                    offset: from - address,
                }),
            }
        }
        parts
    }

    /// Returns the freed range that a hint is followed into: it begins there and is large enough.
    pub(crate) fn followed(&self, hint: u64, size: u64) -> Option<usize> {
        let end = hint.checked_add(size)?;
        self.freed
            .iter()
            .position(|&(from, to)| from == hint && end <= to)
    }

    /// Returns the freed ranges that are large enough, the last freed first, each with the address
    /// to use.
    pub(crate) fn with_room(&self, size: u64, alignment: u64) -> Vec<(usize, u64)> {
        let places = self.freed.iter().enumerate().rev();
        places
            .filter_map(|(index, &(from, to))| {
                let start = from.checked_next_multiple_of(alignment)?;
                (start.checked_add(size)? <= to).then_some((index, start))
            })
            .collect()
    }

    /// Removes the beginning of a freed range up to `end`.
    pub(crate) fn use_up(&mut self, index: usize, end: u64) {
        if let Some((from, to)) = self.freed.get_mut(index) {
            *from = end;
            if *from >= *to {
                self.freed.remove(index);
            }
        }
    }

    pub(crate) fn remember(&mut self, start: u64, size: u64) {
        if self.freed.len() == REMEMBERED {
            self.freed.pop_front();
        }
        self.freed.push_back((start, start + size));
    }
}
