//! Ranges of addresses that are taken and have nothing of their own behind them.

use std::collections::{BTreeMap, VecDeque};

use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::{Backing, Part};
use super::state::State;
use crate::DeviceAddress;

/// How many freed ranges are remembered for hints.
const REMEMBERED: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// Start to size.
    pub(crate) ranges: BTreeMap<u64, u64>,
    /// What is left of ranges freed lately, start and end: where the driver follows a hint.
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

    /// Takes the start of a freed range, which then begins behind it.
    fn use_up(&mut self, index: usize, size: u64) {
        if let Some((from, to)) = self.freed.get_mut(index) {
            *from += size;
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
        let followed = match hint.is_null() || !hint.0.is_multiple_of(alignment) {
            true => None,
            false => self.reservations.followed(hint.0, size),
        };
        let at_hint = followed.and_then(|index| {
            let address = self.backing.reserve(size, alignment, Some(hint.0)).ok()?;
            self.reservations.use_up(index, size);
            Some(address)
        });
        let address = match at_hint {
            Some(address) => address,
            None => self.backing.reserve(size, alignment, None)?,
        };
        self.reservations.ranges.insert(address, size);
        self.clock.spend(self.rules.costs.reserve.at(size));
        Ok(DeviceAddress(address))
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
