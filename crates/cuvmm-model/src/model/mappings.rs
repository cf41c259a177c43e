//! Physicals mapped in reservations.

use super::answer::{Answer, INVALID_VALUE, NOT_SUPPORTED, require};
use super::backing::{Backing, Part};
use super::losses::Taken;
use super::mapping_table::Mapping;
use super::rights::Rights;
use super::state::State;
use cuvmm_driver::{Call, DeviceAddress, PhysicalHandle};

impl<B: Backing> State<B> {
    /// Maps a physical. The order of the checks fits every measured case. The end may be outside
    /// the reservation that contains the start.
    pub(crate) fn map(
        &mut self,
        address: DeviceAddress,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
        flags: u64,
    ) -> Answer {
        require(flags == 0 && size != 0, INVALID_VALUE)?;
        require(self.aligned(address.0) && self.aligned(size), INVALID_VALUE)?;
        let physical = self.physicals.get(handle.0)?;
        require(!self.strict() || physical.references != 0, INVALID_VALUE)?;
        let (_, end) = self
            .reservations
            .containing(address.0)
            .ok_or(INVALID_VALUE)?;
        require(!self.strict() || size <= end - address.0, INVALID_VALUE)?;
        require(address.checked_add(size).is_some(), INVALID_VALUE)?;
        require(offset == 0 && size == physical.size, NOT_SUPPORTED)?;
        require(!self.mappings.any_in(address.0, size), INVALID_VALUE)?;

        let parts = self.reservations.parts(address.0, size);
        self.backing.map(physical.memory, &parts)?;
        if let Some(physical) = self.physicals.by_handle.get_mut(&handle.0) {
            physical.mappings += 1;
        }
        let mapping = Mapping {
            size,
            handle: handle.0,
            rights: Rights::default(),
        };
        self.mappings.by_address.insert(address.0, mapping);
        self.clock.spend(self.rules.costs.map.at(size));
        Ok(())
    }

    /// Unmaps whole mappings. Refuses to split a mapping; accepts holes and an end outside the
    /// reservation.
    pub(crate) fn unmap(&mut self, address: DeviceAddress, size: u64) -> Answer {
        require(size != 0, INVALID_VALUE)?;
        require(self.aligned(address.0) && self.aligned(size), INVALID_VALUE)?;
        let (_, reserved_end) = self
            .reservations
            .containing(address.0)
            .ok_or(INVALID_VALUE)?;
        let end = address.checked_add(size).ok_or(INVALID_VALUE)?.0;
        if self.strict() {
            require(end <= reserved_end, INVALID_VALUE)?;
            require(self.mappings.cover(address.0, size), INVALID_VALUE)?;
        }
        let mut parts: Vec<Part> = Vec::new();
        let mut gone: Vec<u64> = Vec::new();
        for (start, mapping) in self.mappings.touching(address.0, size) {
            require(
                start >= address.0 && start + mapping.size <= end,
                INVALID_VALUE,
            )?;
            parts.extend(self.reservations.parts(start, mapping.size));
            gone.push(start);
        }
        self.backing.unmap(&parts)?;
        let mut taken: Vec<Taken> = Vec::new();
        for start in gone {
            let Some(mapping) = self.mappings.by_address.remove(&start) else {
                continue;
            };
            self.close_for_all(&mapping.rights);
            self.clock.spend(self.rules.costs.unmap.at(mapping.size));
            if let Some(physical) = self.physicals.by_handle.get_mut(&mapping.handle) {
                physical.mappings -= 1;
            }
            self.remove_if_unused(mapping.handle);
            if !self.streams.is_idle() {
                taken.push(Taken::unmapped(start, mapping.size, mapping.rights));
            }
        }
        self.note_hazards(Call::MemUnmap, &taken);
        Ok(())
    }
}
