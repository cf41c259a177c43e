//! Physical allocations: their handles, and the memory that handles, mappings and exported
//! descriptors keep alive together.

use std::sync::Arc;

use super::answer::{Answer, INVALID_DEVICE, INVALID_VALUE, NOT_PERMITTED, UNKNOWN, require};
use super::backing::{Backing, MemoryKey};
use super::clock::micros;
use super::device_state::Owner;
use super::exports;
use super::physical_table::{Memory, Physical};
use super::state::State;
use cuvmm_driver::{
    AllocationType, DeviceAddress, Exported, HandleTypes, ImportSource, Location, LocationKind,
    Ordinal, PhysicalHandle, PhysicalProps,
};

impl<B: Backing> State<B> {
    pub(crate) fn create(
        &mut self,
        size: u64,
        props: &PhysicalProps,
        flags: u64,
    ) -> Answer<PhysicalHandle> {
        require(flags == 0, INVALID_VALUE)?;
        require(size != 0 && self.aligned(size), INVALID_VALUE)?;
        require(
            props.allocation_type == AllocationType::PINNED,
            INVALID_VALUE,
        )?;
        let owner = self.owner_of(props.location)?;
        let refused = props.handle_types.intersects(exports::REFUSED);
        require(!refused, INVALID_VALUE)?;
        if self.strict() {
            let known = HandleTypes::OS | HandleTypes::FABRIC;
            require(known.contains(props.handle_types), INVALID_VALUE)?;
        }
        let fabric = props.handle_types.contains(HandleTypes::FABRIC);
        require(!fabric || self.rules.fabric, NOT_PERMITTED)?;
        let compressed = props.compression != 0;
        // As recorded: memory for tile pools is neither, and memory for RDMA is not compressed.
        require(
            props.usage == 0 || !(compressed || props.rdma_capable),
            INVALID_VALUE,
        )?;
        let props = &PhysicalProps {
            compression: if props.rdma_capable {
                0
            } else {
                props.compression
            },
            ..*props
        };

        self.sweep();
        self.charge(owner, size)?;
        let made = self.new_memory(size, props, owner);
        let key = made.inspect_err(|_| self.refund(owner, size))?;
        let handle = self.new_physical(key, size, *props);
        let cold = self.spend_create(props.location, size);
        if let Some(physical) = self.physicals.by_handle.get_mut(&handle.0) {
            physical.cold = cold;
        }
        Ok(handle)
    }

    fn owner_of(&self, location: Location) -> Answer<Owner> {
        match location.kind {
            LocationKind::DEVICE => self.device(Ordinal(location.id)).map(Owner::Device),
            LocationKind::HOST => Ok(Owner::Host),
            LocationKind::HOST_NUMA => {
                require(
                    (0..self.rules.numa_nodes).contains(&location.id),
                    INVALID_VALUE,
                )?;
                Ok(Owner::Host)
            }
            _ => Err(INVALID_VALUE),
        }
    }

    fn new_memory(&mut self, size: u64, props: &PhysicalProps, owner: Owner) -> Answer<MemoryKey> {
        let at_once = B::FILES_AT_ONCE && props.handle_types.contains(HandleTypes::OS);
        let file = match at_once {
            true => Some(Arc::new(exports::new_file(size, props.location)?)),
            false => None,
        };
        self.adopt(Memory {
            size,
            location: props.location,
            owner: Some(owner),
            handles: 0,
            identity: file
                .as_ref()
                .map(|file| exports::identity(file))
                .transpose()?,
            file,
            exported: false,
        })
    }

    fn adopt(&mut self, memory: Memory) -> Answer<MemoryKey> {
        let key = self.physicals.new_key();
        self.backing
            .create(key, memory.size, memory.file.as_ref())?;
        if let Some(identity) = memory.identity {
            self.physicals.by_identity.insert(identity, key);
        }
        self.physicals.memories.insert(key, memory);
        Ok(key)
    }

    fn new_physical(
        &mut self,
        memory: MemoryKey,
        size: u64,
        props: PhysicalProps,
    ) -> PhysicalHandle {
        let handle = self.handles.take();
        let physical = Physical {
            size,
            props,
            references: 1,
            mappings: 0,
            memory,
            cold: false,
        };
        self.physicals.by_handle.insert(handle, physical);
        if let Some(memory) = self.physicals.memories.get_mut(&memory) {
            memory.handles += 1;
        }
        PhysicalHandle(handle)
    }

    /// Spends the cost of a create. Recently released memory is cheap to create again, once the
    /// driver has finished the release. Returns `true` if the memory was created cold.
    fn spend_create(&mut self, location: Location, size: u64) -> bool {
        if let Some(released) = self.physicals.released.get_mut(&location) {
            released.created = released.created.saturating_add(size);
            let again = released.created.min(released.bytes);
            let busy = micros(self.rules.costs.busy.at(again));
            self.clock.reach(released.last.saturating_add(busy));
        }
        let now = self.clock.now();
        let limit = micros(self.rules.costs.warm_for_us);
        let released = self.physicals.warm.get_mut(&(location, size));
        let warm = released.is_some_and(|times| {
            while times
                .front()
                .is_some_and(|&then| now.saturating_sub(then) >= limit)
            {
                times.pop_front();
            }
            times.pop_front().is_some()
        });
        let costs = &self.rules.costs;
        let curve = if warm {
            &costs.create_warm
        } else {
            &costs.create_cold
        };
        self.clock.spend(curve.at(size));
        !warm
    }

    /// Records a release, on which the cost of later creates depends.
    fn note_release(&mut self, location: Location, size: u64) {
        let now = self.clock.now();
        let times = self.physicals.warm.entry((location, size)).or_default();
        times.push_back(now);
        let limit = micros(self.rules.costs.warm_for_us);
        let released = self.physicals.released.entry(location).or_default();
        if released.created > 0 || now.saturating_sub(released.last) >= limit {
            (released.bytes, released.created) = (0, 0);
        }
        released.bytes = released.bytes.saturating_add(size);
        released.last = now;
    }

    pub(crate) fn release(&mut self, handle: PhysicalHandle) -> Answer {
        let physical = self
            .physicals
            .by_handle
            .get_mut(&handle.0)
            .ok_or(INVALID_VALUE)?;
        // If the handle was released before, only its mappings keep the physical alive.
        require(physical.references != 0, INVALID_VALUE)?;
        physical.references -= 1;
        self.remove_if_unused(handle.0);
        Ok(())
    }

    pub(crate) fn retain(&mut self, address: DeviceAddress) -> Answer<PhysicalHandle> {
        let (_, mapping) = self.mappings.containing(address.0).ok_or(INVALID_VALUE)?;
        let handle = mapping.handle;
        let physical = self
            .physicals
            .by_handle
            .get_mut(&handle)
            .ok_or(INVALID_VALUE)?;
        physical.references += 1;
        Ok(PhysicalHandle(handle))
    }

    pub(crate) fn physical_props(&self, handle: PhysicalHandle) -> Answer<PhysicalProps> {
        Ok(self.physicals.get(handle.0)?.props)
    }

    /// Ends a physical without references and mappings, and its memory if this was its last handle.
    pub(crate) fn remove_if_unused(&mut self, handle: u64) {
        let Some(physical) = self.physicals.by_handle.get(&handle) else {
            return;
        };
        if physical.references != 0 || physical.mappings != 0 {
            return;
        }
        let key = physical.memory;
        self.physicals.by_handle.remove(&handle);
        self.handles.give_back(handle);
        let Some(memory) = self.physicals.memories.get_mut(&key) else {
            return;
        };
        memory.handles -= 1;
        if memory.handles == 0 {
            self.end_memory(key);
        }
    }

    fn end_memory(&mut self, key: MemoryKey) {
        let Some(memory) = self.physicals.memories.get(&key) else {
            return;
        };
        let held = memory.exported
            && memory
                .file
                .as_ref()
                .is_some_and(|file| exports::held_elsewhere(file));
        if held {
            self.physicals.lingering.insert(key);
            return;
        }
        self.physicals.lingering.remove(&key);
        let Some(memory) = self.physicals.memories.remove(&key) else {
            return;
        };
        if let Some(identity) = memory.identity {
            self.physicals.by_identity.remove(&identity);
        }
        self.backing.destroy(key);
        if let Some(shadow) = &mut self.shadow {
            shadow.end_memory(key);
        }
        if let Some(owner) = memory.owner {
            self.refund(owner, memory.size);
            self.clock.spend(self.rules.costs.release.at(memory.size));
            self.note_release(memory.location, memory.size);
        }
    }

    /// Checks again the memory that only exported descriptors held.
    pub(crate) fn sweep(&mut self) {
        for key in self.physicals.lingering.clone() {
            self.end_memory(key);
        }
    }

    pub(crate) fn export(
        &mut self,
        handle: PhysicalHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Answer<Exported> {
        require(flags == 0, INVALID_VALUE)?;
        let physical = self.physicals.get(handle.0)?;
        let one = handle_type.bits().is_power_of_two();
        let asked_for = physical.props.handle_types.contains(handle_type);
        // An imported physical has no types, so it is not exported again.
        require(one && asked_for, INVALID_VALUE)?;
        let key = physical.memory;
        if handle_type == HandleTypes::FABRIC {
            let mut name = [0; 64];
            name[..8].copy_from_slice(b"cuvmmfab");
            name[8..16].copy_from_slice(&key.0.to_le_bytes());
            return Ok(Exported::Fabric(name));
        }
        require(handle_type == HandleTypes::OS, INVALID_VALUE)?;
        let memory = self.physicals.memories.get_mut(&key).ok_or(INVALID_VALUE)?;
        let file = match &memory.file {
            Some(file) => Arc::clone(file),
            None => {
                let file = Arc::new(exports::new_file(memory.size, memory.location)?);
                let identity = exports::identity(&file)?;
                memory.identity = Some(identity);
                self.physicals.by_identity.insert(identity, key);
                Arc::clone(memory.file.insert(file))
            }
        };
        let given = exports::hand_out(&file)?;
        memory.exported = true;
        Ok(given.into())
    }

    /// Imports a physical. Memory of this machine is recognized; a descriptor of another machine or
    /// process brings memory that is not charged here.
    pub(crate) fn import(
        &mut self,
        source: ImportSource,
        handle_type: HandleTypes,
    ) -> Answer<PhysicalHandle> {
        require(source.handle_type() == handle_type, INVALID_VALUE)?;
        let key = match source {
            ImportSource::Fabric(name) => fabric_key(&name)?,
            // The driver takes a descriptor as a pointer, and this one is null.
            #[cfg(unix)]
            ImportSource::Fd(0) => return Err(INVALID_VALUE),
            other => {
                let handle = other.os_handle().ok_or(INVALID_VALUE)?;
                let found = exports::examine(handle)?;
                match self.physicals.by_identity.get(&found.identity) {
                    Some(&key) => key,
                    None => self.adopt(Memory {
                        size: found.size,
                        location: found.location,
                        owner: None,
                        handles: 0,
                        file: Some(Arc::new(found.file)),
                        identity: Some(found.identity),
                        exported: false,
                    })?,
                }
            }
        };
        let memory = self.physicals.memories.get(&key).ok_or(UNKNOWN)?;
        let (size, location) = (memory.size, self.place_here(memory.location));
        self.physicals.lingering.remove(&key);
        Ok(self.new_physical(key, size, PhysicalProps::at(location)))
    }

    /// Returns a location of this machine: another process may have more devices.
    fn place_here(&self, location: Location) -> Location {
        match self.owner_of(location) {
            Ok(_) => location,
            Err(INVALID_DEVICE) => Location::device(Ordinal(0)),
            Err(_) => Location::HOST,
        }
    }
}

fn fabric_key(name: &[u8; 64]) -> Answer<MemoryKey> {
    let (tag, rest) = name.split_at(8);
    require(tag == b"cuvmmfab", UNKNOWN)?;
    let key = rest.first_chunk::<8>().ok_or(UNKNOWN)?;
    Ok(MemoryKey(u64::from_le_bytes(*key)))
}
