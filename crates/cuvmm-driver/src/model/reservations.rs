//! Ranges of addresses that are taken and have nothing of their own behind them.

use std::collections::{BTreeMap, VecDeque};

use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::{Backing, Part};
use super::options::Manner;
use super::state::State;
use crate::DeviceAddress;

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
    fn followed(&self, hint: u64, size: u64) -> Option<usize> {
        let end = hint.checked_add(size)?;
        self.freed
            .iter()
            .position(|&(from, to)| from == hint && end <= to)
    }

    /// The freed ranges that have room, the last freed first, and where in them it is.
    fn with_room(&self, size: u64, alignment: u64) -> Vec<(usize, u64)> {
        let places = self.freed.iter().enumerate().rev();
        places
            .filter_map(|(index, &(from, to))| {
                let start = from.checked_next_multiple_of(alignment)?;
                (start.checked_add(size)? <= to).then_some((index, start))
            })
            .collect()
    }

    /// Takes the beginning of a freed range, which then begins here.
    fn use_up(&mut self, index: usize, end: u64) {
        if let Some((from, to)) = self.freed.get_mut(index) {
            *from = end;
            if *from >= *to {
                self.freed.remove(index);
            }
        }
    }

    fn remember(&mut self, start: u64, size: u64) {
        if self.freed.len() == REMEMBERED {
            self.freed.pop_front();
        }
        self.freed.push_back((start, start + size));
    }
}

impl<B: Backing> State<B> {
    /// A hint is followed to the start of what is left of a range freed lately, and nowhere else:
    /// the one rule found that fits all that was measured. In the middle of such a range it was
    /// not, twice; behind a reservation that had taken its start it was.
    pub(crate) fn reserve(
        &mut self,
        size: u64,
        alignment: u64,
        hint: DeviceAddress,
        flags: u64,
    ) -> Answer<DeviceAddress> {
        require(flags == 0, INVALID_VALUE)?;
        require(size != 0 && self.aligned(size), INVALID_VALUE)?;
        require(alignment == 0 || alignment.is_power_of_two(), INVALID_VALUE)?;
        require(self.aligned(hint.0), INVALID_VALUE)?;
        let alignment = alignment.max(self.rules.granularity);
        let chosen = match self.rules.manner {
            Manner::Hostile => self.reserve_freed(size, alignment),
            _ => self.reserve_hinted(size, alignment, hint),
        };
        let address = match chosen {
            Some(address) => address,
            None => self.backing.reserve(size, alignment, None)?,
        };
        self.reservations.ranges.insert(address, size);
        self.clock.spend(self.rules.costs.reserve.at(size));
        Ok(DeviceAddress(address))
    }

    fn reserve_hinted(&mut self, size: u64, alignment: u64, hint: DeviceAddress) -> Option<u64> {
        if hint.is_null() || !hint.0.is_multiple_of(alignment) {
            return None;
        }
        let index = self.reservations.followed(hint.0, size)?;
        let address = self.backing.reserve(size, alignment, Some(hint.0)).ok()?;
        self.reservations.use_up(index, address + size);
        Some(address)
    }

    /// What was freed last is reserved again, so that whoever still uses it meets another owner.
    fn reserve_freed(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let places = self.reservations.with_room(size, alignment);
        let (index, address) = places.into_iter().find_map(|(index, start)| {
            let address = self.backing.reserve(size, alignment, Some(start)).ok()?;
            Some((index, address))
        })?;
        self.reservations.use_up(index, address + size);
        Some(address)
    }

    pub(crate) fn free_reservation(&mut self, address: DeviceAddress, size: u64) -> Answer {
        let whole = self.reservations.ranges.get(&address.0) == Some(&size);
        require(whole, INVALID_VALUE)?;
        require(!self.mappings.any_in(address.0, size), INVALID_VALUE)?;
        self.backing.unreserve(address.0, size)?;
        self.reservations.ranges.remove(&address.0);
        self.reservations.remember(address.0, size);
        self.clock.spend(self.rules.costs.address_free.at(size));
        Ok(())
    }
}
