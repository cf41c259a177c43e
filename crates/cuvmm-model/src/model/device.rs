//! Devices: names, attributes, free memory.

use super::answer::{Answer, INVALID_DEVICE, INVALID_VALUE, require};
use super::attributes::ATTRIBUTES;
use super::backing::Backing;
use super::state::State;
use cuvmm_driver::{
    CUresult, DeviceAttribute, DriverKind, GranularityKind, LocationKind, MemoryInfo, Ordinal,
    PhysicalProps,
};

impl<B: Backing> State<B> {
    pub(crate) fn device_name(&self, device: Ordinal) -> Answer<String> {
        self.device(device)?;
        Ok(self.rules.name.clone())
    }

    /// Returns a UUID made of the backend's name and the ordinal: the same in every process.
    pub(crate) fn device_uuid(&self, device: Ordinal) -> Answer<[u8; 16]> {
        self.device(device)?;
        let mut uuid = match B::KIND {
            DriverKind::Model => *b"cuvmm model\0....",
            _ => *b"cuvmm host\0\0....",
        };
        uuid[12..].copy_from_slice(&device.0.to_be_bytes());
        Ok(uuid)
    }

    pub(crate) fn device_attribute(
        &self,
        device: Ordinal,
        attribute: DeviceAttribute,
    ) -> Answer<i32> {
        self.device(device)?;
        let told = self.rules.attributes.get(&attribute.0).copied();
        let usual = || {
            let found = ATTRIBUTES.binary_search_by_key(&attribute.0, |&(known, _)| known);
            found.ok().map(|index| ATTRIBUTES[index].1)
        };
        told.or_else(usual).ok_or(INVALID_VALUE)
    }

    pub(crate) fn can(
        &self,
        device: Ordinal,
        ability: DeviceAttribute,
        otherwise: CUresult,
    ) -> Answer {
        require(self.device_attribute(device, ability)? != 0, otherwise)
    }

    pub(crate) fn total_memory(&self, device: Ordinal) -> Answer<u64> {
        self.device(device)?;
        Ok(self.rules.capacity)
    }

    pub(crate) fn memory_info(&mut self, device: Ordinal) -> Answer<MemoryInfo> {
        let index = self.context(device)?;
        self.sweep();
        let total = self.rules.capacity;
        let device = &self.devices[index];
        let taken = device.used.saturating_add(device.elsewhere);
        Ok(MemoryInfo {
            free: total.saturating_sub(taken),
            total,
        })
    }

    pub(crate) fn can_access_peer(&self, device: Ordinal, peer: Ordinal) -> Answer<bool> {
        self.device(device)?;
        self.device(peer)?;
        Ok(device != peer && self.reaches(device.0, peer.0))
    }

    /// Returns `true` if `device` can access the memory of `owner`, which may be itself.
    pub(crate) fn reaches(&self, device: i32, owner: i32) -> bool {
        device == owner || !self.rules.unreachable.contains(&(device, owner))
    }

    pub(crate) fn allocation_granularity(
        &self,
        props: &PhysicalProps,
        kind: GranularityKind,
    ) -> Answer<u64> {
        let known = [GranularityKind::MINIMUM, GranularityKind::RECOMMENDED].contains(&kind);
        require(known, INVALID_VALUE)?;
        // As measured, a device that does not exist has a granularity too.
        if self.strict() && props.location.kind == LocationKind::DEVICE {
            self.device(Ordinal(props.location.id))
                .map_err(|_| INVALID_DEVICE)?;
        }
        Ok(self.rules.granularity)
    }
}
