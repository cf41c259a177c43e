//! The table of reservations, and of ranges freed lately.

use std::collections::{BTreeMap, VecDeque};

use super::backing::Part;

/// How many freed ranges are remembered for hints.
const REMEMBERED: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// Start to size.
    pub(crate) ranges: BTreeMap<u64, u64>,
    /// What is left of ranges freed lately, start and end: where the driver follows a hint, and
    /// where the hostile manner puts what is reserved next.
    freed: VecDeque<(u64, u64)>,
}

impl Reservations {
    /// Start and end of the reservation that an address lies in.
    pub(crate) fn containing(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &size) = self.ranges.range(..=address).next_back()?;
        (address - start < size).then_some((start, start + size))
    }

    /// The parts of a range that lie in reservations. They are neighbours unless the range runs
    /// out of one reservation and into another further up.
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

    /// The freed range that a hint is followed into: one that begins there and is large enough.
    pub(crate) fn followed(&self, hint: u64, size: u64) -> Option<usize> {
        let end = hint.checked_add(size)?;
        self.freed
            .iter()
            .position(|&(from, to)| from == hint && end <= to)
    }

    /// The freed ranges that have room, the last freed first, and where in them it is.
    pub(crate) fn with_room(&self, size: u64, alignment: u64) -> Vec<(usize, u64)> {
        let places = self.freed.iter().enumerate().rev();
        places
            .filter_map(|(index, &(from, to))| {
                let start = from.checked_next_multiple_of(alignment)?;
                (start.checked_add(size)? <= to).then_some((index, start))
            })
            .collect()
    }

    /// Takes the beginning of a freed range, which then begins here.
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
