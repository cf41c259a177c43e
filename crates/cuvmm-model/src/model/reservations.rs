//! Reserved ranges of addresses.

use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::Backing;
use super::options::Manner;
use super::state::State;
use cuvmm_driver::DeviceAddress;

impl<B: Backing> State<B> {
    /// Reserves a range. A hint is followed only to the start of the unused part of a recently
    /// freed range.
    ///
    /// This is the one rule found that fits all measurements: a hint to the middle of such a range
    /// was not followed, twice; a hint directly behind a reservation that had taken the range's
    /// start was.
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

    /// Reserves the range that was freed last again, so that a stale user of it meets another
    /// owner.
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
