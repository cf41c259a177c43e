//! The access that locations have to mappings.

use super::answer::{Answer, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, require};
use super::backing::{Backing, Change};
use super::device_state::Device;
use super::losses::{Loss, Taken};
use super::rights::{Rights, Who};
use super::state::State;
use cuvmm_driver::{
    AccessDesc, AccessFlags, CUresult, Call, DeviceAddress, Location, LocationKind, Ordinal,
};

impl<B: Backing> State<B> {
    /// Grants access to the run of mappings that begins at the start of the range.
    ///
    /// As measured: the first and the last mapping must be entirely in the range; a hole between
    /// them is accepted, and mappings behind the hole are left unchanged.
    pub(crate) fn set_access(
        &mut self,
        address: DeviceAddress,
        size: u64,
        access: &[AccessDesc],
    ) -> Answer {
        require(size != 0 && !access.is_empty(), INVALID_VALUE)?;
        require(self.aligned(address.0) && self.aligned(size), INVALID_VALUE)?;
        let grants = self.grants(access)?;
        let end = address.checked_add(size).ok_or(INVALID_VALUE)?.0;
        let (first, _) = self.mappings.containing(address.0).ok_or(INVALID_VALUE)?;
        let (last, mapping) = self.mappings.containing(end - 1).ok_or(INVALID_VALUE)?;
        require(
            first == address.0 && last + mapping.size == end,
            INVALID_VALUE,
        )?;
        require(
            !self.strict() || self.mappings.cover(address.0, size),
            INVALID_VALUE,
        )?;

        let plan = self.plan(address.0, size, &grants)?;
        self.backing.protect(&plan.changes)?;
        for (index, opened) in plan.opened.into_iter().enumerate() {
            self.devices[index].opened = opened;
        }
        let mut taken: Vec<Taken> = Vec::new();
        for (start, rights) in plan.rights {
            let Some(mapping) = self.mappings.by_address.get_mut(&start) else {
                continue;
            };
            let (size, after) = (mapping.size, rights.clone());
            let before = std::mem::replace(&mut mapping.rights, rights);
            if !self.streams.is_idle() {
                let loss = Loss::Mapping { before, after };
                taken.push(Taken { start, size, loss });
            }
        }
        self.note_hazards(Call::MemSetAccess, &taken);
        for handle in plan.warmed {
            if let Some(physical) = self.physicals.by_handle.get_mut(&handle) {
                physical.cold = false;
            }
        }
        self.clock.spend(plan.cost);
        Ok(())
    }

    pub(crate) fn grants(&self, access: &[AccessDesc]) -> Answer<Vec<(Who, AccessFlags)>> {
        let known = [
            AccessFlags::NONE,
            AccessFlags::READ,
            AccessFlags::READ_WRITE,
        ];
        let one = |desc: &AccessDesc| {
            require(known.contains(&desc.flags), INVALID_VALUE)?;
            Ok((self.who(desc.location)?, desc.flags))
        };
        access.iter().map(one).collect()
    }

    pub(crate) fn who(&self, location: Location) -> Answer<Who> {
        match location.kind {
            LocationKind::DEVICE => {
                self.device(Ordinal(location.id))
                    .map_err(|_| INVALID_VALUE)?;
                Ok(Who::Device(location.id))
            }
            LocationKind::HOST => Ok(Who::Host),
            LocationKind::HOST_NUMA => {
                require(
                    (0..self.rules.numa_nodes).contains(&location.id),
                    INVALID_VALUE,
                )?;
                Ok(Who::Host)
            }
            _ => Err(INVALID_VALUE),
        }
    }

    /// Computes all changes of a grant before any is made.
    fn plan(&self, address: u64, size: u64, grants: &[(Who, AccessFlags)]) -> Answer<Plan> {
        let costs = &self.rules.costs;
        let mut plan = Plan {
            opened: self.devices.iter().map(|device| device.opened).collect(),
            rights: Vec::new(),
            changes: Vec::new(),
            warmed: Vec::new(),
            cost: 0.0,
        };
        let mut at = address;
        for (start, mapping) in self.mappings.touching(address, size) {
            if start != at {
                break;
            }
            at = start + mapping.size;
            let owner = self.physicals.get(mapping.handle)?.props.location;
            let opens = grants.iter().any(|&(_, flags)| flags != AccessFlags::NONE);
            let first = opens && self.physicals.get(mapping.handle)?.cold;
            plan.cost += match first {
                true => costs.set_access_cold.at(mapping.size),
                false => costs.set_access.at(mapping.size),
            };
            if first {
                plan.warmed.push(mapping.handle);
            }
            let mut rights = mapping.rights.clone();
            for &(who, flags) in grants {
                if self.is_peer(who, owner)? && flags != AccessFlags::NONE {
                    plan.cost += costs.set_access_peer.at(mapping.size);
                }
                rights.set(who, flags);
            }
            for (index, opened) in plan.opened.iter_mut().enumerate() {
                let who = Who::Device(index as i32);
                let had = mapping.rights.of(who) != AccessFlags::NONE;
                let has = rights.of(who) != AccessFlags::NONE;
                *opened = *opened - u64::from(had) + u64::from(has);
            }
            let (from, to) = (mapping.rights.reach(), rights.reach());
            let parts = self.reservations.parts(start, mapping.size);
            plan.changes
                .extend(parts.into_iter().map(|part| Change { part, from, to }));
            plan.rights.push((start, rights));
        }
        let ceiling = self.rules.mapping_ceiling;
        let over = |(device, &opened): (&Device, &u64)| opened > ceiling.max(device.opened);
        require(
            !self.devices.iter().zip(&plan.opened).any(over),
            OUT_OF_MEMORY,
        )?;
        Ok(plan)
    }

    /// Returns `true` if memory at `owner` belongs to a device other than `who`. Refuses memory
    /// that `who` cannot access.
    pub(crate) fn is_peer(&self, who: Who, owner: Location) -> Answer<bool> {
        match (who, owner.kind) {
            (Who::Host, LocationKind::DEVICE) => Err(NOT_SUPPORTED),
            (Who::Device(device), LocationKind::DEVICE) => {
                let unreachable = CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
                require(self.reaches(device, owner.id), unreachable)?;
                Ok(device != owner.id)
            }
            _ => Ok(false),
        }
    }

    pub(crate) fn get_access(
        &self,
        address: DeviceAddress,
        location: Location,
    ) -> Answer<AccessFlags> {
        let who = self.who(location)?;
        let (_, mapping) = self.mappings.containing(address.0).ok_or(INVALID_VALUE)?;
        Ok(mapping.rights.of(who))
    }

    /// Updates the devices' counts of accessible mappings after a mapping with these rights was
    /// removed.
    pub(crate) fn close_for_all(&mut self, rights: &Rights) {
        for (who, _) in rights.iter() {
            if let Who::Device(device) = who
                && let Ok(index) = self.device(Ordinal(device))
            {
                self.devices[index].opened -= 1;
            }
        }
    }
}

struct Plan {
    /// For each device, the new number of mappings that it has access to.
    opened: Vec<u64>,
    rights: Vec<(u64, Rights)>,
    changes: Vec<Change>,
    /// Handles whose cold memory gets its first access.
    warmed: Vec<u64>,
    cost: f64,
}
