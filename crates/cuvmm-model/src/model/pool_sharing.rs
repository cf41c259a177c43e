//! Export and import of memory pools, and of their allocations.

use std::sync::Arc;

use super::advice::Advised;
use super::allocation_table::Allocation;
use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::Backing;
use super::exports::{self, Identity};
use super::pool_memory::kind_of;
use super::pool_table::{Pool, SharedMemory};
use super::pools::resident;
use super::rights::Rights;
use super::slabs::PIECE;
use super::state::State;
use cuvmm_driver::{
    AccessFlags, DeviceAddress, Exported, HandleTypes, ImportSource, Location, LocationKind,
    MemPoolHandle, MemPoolProps, MemPoolTicket, Ordinal,
};

/// The first bytes of a pool's fabric handle and of a ticket.
const FABRIC: &[u8; 8] = b"cuvmmfpl";
const TICKET: &[u8; 8] = b"cuvmmptr";

impl<B: Backing> State<B> {
    pub(crate) fn mem_pool_export(
        &mut self,
        device: Ordinal,
        pool: MemPoolHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Answer<Exported> {
        self.context(device)?;
        require(flags == 0, INVALID_VALUE)?;
        let key = self.pools.key(pool)?;
        let pool = self.pools.by_key.get_mut(&key).ok_or(INVALID_VALUE)?;
        let one = handle_type.bits().is_power_of_two();
        let asked_for = pool.props.handle_types.contains(handle_type);
        require(one && asked_for, INVALID_VALUE)?;
        let shared = pool.shared.as_mut().ok_or(INVALID_VALUE)?;
        shared.exported = true;
        if handle_type == HandleTypes::FABRIC {
            return Ok(Exported::Fabric(numbers(FABRIC, &[key.0])));
        }
        exports::hand_out(&shared.file).map(Exported::from)
    }

    pub(crate) fn mem_pool_import(
        &mut self,
        device: Ordinal,
        source: ImportSource,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Answer<MemPoolHandle> {
        self.context(device)?;
        require(flags == 0, INVALID_VALUE)?;
        require(source.handle_type() == handle_type, INVALID_VALUE)?;
        let (file, location) = match source {
            ImportSource::Fabric(name) => {
                let [key] = read(FABRIC, &name)?;
                let mut pools = self.pools.by_key.iter();
                let found = pools.find(|(known, _)| known.0 == key);
                let (_, pool) = found.ok_or(INVALID_VALUE)?;
                let shared = pool.shared.as_ref().ok_or(INVALID_VALUE)?;
                (Arc::clone(&shared.file), pool.props.location)
            }
            other => {
                let handle = other.os_handle().ok_or(INVALID_VALUE)?;
                let found = exports::examine_pool(handle)?;
                (Arc::new(found.file), found.location)
            }
        };
        let identity = exports::identity(&file)?;
        let key = self.physicals.new_key();
        self.backing.create(key, exports::POOL_FILE, Some(&file))?;
        let shared = SharedMemory {
            key,
            file,
            identity,
            space: None,
            exported: false,
        };
        let here = match location.kind {
            LocationKind::DEVICE if self.device(Ordinal(location.id)).is_err() => {
                Location::device(Ordinal(0))
            }
            _ => location,
        };
        let mut rights = Rights::default();
        rights.set(resident(here), AccessFlags::READ_WRITE);
        let handle = self.handles.take();
        let props = MemPoolProps::at(here);
        let pool = Pool::new(handle, props, None, rights, Some(shared));
        self.pools.add(pool);
        Ok(MemPoolHandle(handle))
    }

    pub(crate) fn mem_pool_export_pointer(
        &mut self,
        device: Ordinal,
        address: DeviceAddress,
    ) -> Answer<MemPoolTicket> {
        self.context(device)?;
        let found = self.allocations.by_address.get(&address.0);
        let allocation = found.ok_or(INVALID_VALUE)?;
        require(!allocation.ending, INVALID_VALUE)?;
        let (_, offset) = allocation.memory.ok_or(INVALID_VALUE)?;
        let pool = allocation.pool.and_then(|key| self.pools.by_key.get(&key));
        // An allocation of an imported pool belongs to the process that exported the pool.
        let own = pool.filter(|pool| pool.owner.is_some());
        let shared = own.and_then(|pool| pool.shared.as_ref());
        // As measured: the pool is exported before its allocations.
        let shared = shared.filter(|shared| shared.exported);
        let Identity([device, inode]) = shared.ok_or(INVALID_VALUE)?.identity;
        let says = [device, inode, offset, allocation.size];
        Ok(MemPoolTicket(numbers(TICKET, &says)))
    }

    pub(crate) fn mem_pool_import_pointer(
        &mut self,
        device: Ordinal,
        pool: MemPoolHandle,
        ticket: &MemPoolTicket,
    ) -> Answer<DeviceAddress> {
        self.context(device)?;
        let key = self.pools.key(pool)?;
        let [device, inode, offset, size] = read(TICKET, &ticket.0)?;
        let pool = self.pools.get(pool)?;
        let shared = pool.shared.as_ref().ok_or(INVALID_VALUE)?;
        let imported = pool.owner.is_none();
        let same = shared.identity == Identity([device, inode]);
        require(imported && same && size != 0, INVALID_VALUE)?;
        // Whole granules are mapped, and a small allocation is a piece of one.
        let granule = self.rules.granularity;
        let first = offset - offset % granule;
        let end = offset
            .checked_add(size)
            .and_then(|end| end.checked_next_multiple_of(granule))
            .filter(|&end| end <= exports::POOL_FILE);
        let (start, memory) = self.show(key, first, end.ok_or(INVALID_VALUE)? - first)?;
        let address = start + (offset - first);
        let Some(pool) = self.pools.by_key.get_mut(&key) else {
            return Err(INVALID_VALUE);
        };
        pool.allocations += 1;
        let (kind, device) = kind_of(pool);
        let allocation = Allocation {
            size,
            kind,
            device,
            advised: Advised::new(address),
            owner: None,
            taken: size.next_multiple_of(PIECE),
            slab: None,
            name: None,
            ending: false,
            pool: Some(key),
            memory: Some((memory, offset)),
        };
        self.allocations.by_address.insert(address, allocation);
        Ok(DeviceAddress(address))
    }
}

fn numbers(tag: &[u8; 8], numbers: &[u64]) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(tag);
    for (place, number) in bytes[8..].chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

fn read<const N: usize>(tag: &[u8; 8], bytes: &[u8; 64]) -> Answer<[u64; N]> {
    require(bytes.starts_with(tag), INVALID_VALUE)?;
    let (numbers, _) = bytes[8..].as_chunks::<8>();
    let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
    Ok(std::array::from_fn(|_| numbers.next().unwrap_or_default()))
}
