//! Memory pools: creating and destroying them, their attributes and access, and which pool of a
//! device is the current one.

use std::sync::Arc;

use super::answer::{Answer, INVALID_DEVICE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, require};
use super::backing::{Backing, Change, Part};
use super::device_state::Owner;
use super::exports;
use super::losses::{Loss, Taken};
use super::pool_table::{Pool, PoolKey, SharedMemory, Watermark};
use super::rights::{Rights, Who};
use super::space::Space;
use super::state::State;
use crate::{
    AccessDesc, AccessFlags, AllocationType, Call, CudaVersion, DeviceAttribute, HandleTypes,
    Location, LocationKind, MemPoolAttribute, MemPoolHandle, MemPoolProps, Ordinal,
};

/// The version that introduced the maximum of a pool, whose bytes had to be zero before, and pools
/// of a host NUMA node.
const NUMA_AND_MAXIMUM_SINCE: CudaVersion = CudaVersion::new(12, 2);

/// The version that introduced pools of host memory without a NUMA node.
const HOST_SINCE: CudaVersion = CudaVersion::new(13, 0);

impl<B: Backing> State<B> {
    pub(crate) fn mem_pool_create(
        &mut self,
        device: Ordinal,
        props: &MemPoolProps,
    ) -> Answer<MemPoolHandle> {
        self.context(device)?;
        self.can(device, DeviceAttribute::MEMORY_POOLS, NOT_SUPPORTED)?;
        let pinned = props.allocation_type == AllocationType::PINNED;
        require(pinned && props.usage == 0, INVALID_VALUE)?;
        let owner = self.pool_owner(props)?;
        let refused = HandleTypes::WIN32 | HandleTypes::WIN32_KMT;
        require(!props.handle_types.intersects(refused), INVALID_VALUE)?;
        let known = HandleTypes::POSIX_FD | HandleTypes::FABRIC;
        require(known.contains(props.handle_types), INVALID_VALUE)?;
        let fabric = props.handle_types.contains(HandleTypes::FABRIC);
        require(!fabric || self.rules.fabric, NOT_PERMITTED)?;
        let old = self.rules.version < NUMA_AND_MAXIMUM_SINCE;
        require(props.maximum == 0 || !old, INVALID_VALUE)?;
        let shared = match props.handle_types.is_empty() {
            true => None,
            false => Some(self.shared_memory(props.location)?),
        };
        let mut rights = Rights::default();
        let resident = match owner {
            Owner::Device(_) => Who::Device(props.location.id),
            Owner::Host => Who::Host,
        };
        rights.set(resident, AccessFlags::READ_WRITE);
        let handle = self.handles.take();
        let pool = Pool::new(handle, *props, Some(owner), rights, shared);
        self.pools.add(pool);
        Ok(MemPoolHandle(handle))
    }

    fn pool_owner(&self, props: &MemPoolProps) -> Answer<Owner> {
        let location = props.location;
        match location.kind {
            LocationKind::DEVICE => {
                let index = self.device(Ordinal(location.id));
                index.map(Owner::Device).map_err(|_| INVALID_VALUE)
            }
            _ if self.rules.version < NUMA_AND_MAXIMUM_SINCE => Err(INVALID_VALUE),
            LocationKind::HOST if self.rules.version >= HOST_SINCE => {
                require(props.handle_types.is_empty(), INVALID_VALUE)?;
                Ok(Owner::Host)
            }
            LocationKind::HOST_NUMA => {
                let exists = (0..self.rules.numa_nodes).contains(&location.id);
                require(exists, INVALID_VALUE)?;
                // Memory that the program accesses directly cannot be a range of a file here.
                require(props.handle_types.is_empty(), NOT_SUPPORTED)?;
                Ok(Owner::Host)
            }
            _ => Err(INVALID_VALUE),
        }
    }

    fn shared_memory(&mut self, location: Location) -> Answer<SharedMemory> {
        let file = exports::new_pool_file(location)?;
        let identity = exports::identity(&file)?;
        let file = Arc::new(file);
        let key = self.physicals.new_key();
        self.backing.create(key, exports::POOL_FILE, Some(&file))?;
        Ok(SharedMemory {
            exported: false,
            key,
            file,
            identity,
            space: Some(Space::new(0..exports::POOL_FILE)),
        })
    }

    pub(crate) fn mem_pool_destroy(&mut self, device: Ordinal, pool: MemPoolHandle) -> Answer {
        self.device(device)?;
        let key = self.pools.key(pool)?;
        require(!self.pools.is_default(key), INVALID_VALUE)?;
        self.pools.by_handle.remove(&pool.0);
        self.handles.give_back(pool.0);
        for (index, current) in self.pools.current.iter_mut().enumerate() {
            if *current == key {
                *current = PoolKey(index as u64);
            }
        }
        if let Some(pool) = self.pools.by_key.get_mut(&key) {
            pool.handle = None;
        }
        self.end_pool_if_unused(key);
        Ok(())
    }

    /// Returns an attribute.
    ///
    /// An imported pool has none that can be read, as measured: figures of it on an H200, and its release
    /// threshold on an H100.
    pub(crate) fn mem_pool_attribute(
        &mut self,
        device: Ordinal,
        pool: MemPoolHandle,
        attribute: MemPoolAttribute,
    ) -> Answer<u64> {
        self.context(device)?;
        let pool = self.pools.get(pool)?;
        require(pool.owner.is_some(), INVALID_VALUE)?;
        Ok(match attribute {
            MemPoolAttribute::REUSE_FOLLOW_EVENT_DEPENDENCIES => pool.reuse.follow_events.into(),
            MemPoolAttribute::REUSE_ALLOW_OPPORTUNISTIC => pool.reuse.opportunistic.into(),
            MemPoolAttribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES => pool.reuse.internal.into(),
            MemPoolAttribute::RELEASE_THRESHOLD => pool.threshold,
            MemPoolAttribute::RESERVED_MEM_CURRENT => pool.reserved.current,
            MemPoolAttribute::RESERVED_MEM_HIGH => pool.reserved.high,
            MemPoolAttribute::USED_MEM_CURRENT => pool.used.current,
            MemPoolAttribute::USED_MEM_HIGH => pool.used.high,
            _ => return Err(INVALID_VALUE),
        })
    }

    pub(crate) fn mem_pool_set_attribute(
        &mut self,
        device: Ordinal,
        pool: MemPoolHandle,
        attribute: MemPoolAttribute,
        value: u64,
    ) -> Answer {
        self.context(device)?;
        let pool = self.pools.get_mut(pool)?;
        // Of an imported pool only its peak was tried, on an H100.
        require(pool.owner.is_some(), INVALID_VALUE)?;
        // The driver reads an `int` here.
        let yes = value as u32 != 0;
        let again = |mark: &mut Watermark| {
            require(value == 0, INVALID_VALUE)?;
            mark.high = mark.current;
            Ok(())
        };
        match attribute {
            MemPoolAttribute::REUSE_FOLLOW_EVENT_DEPENDENCIES => pool.reuse.follow_events = yes,
            MemPoolAttribute::REUSE_ALLOW_OPPORTUNISTIC => pool.reuse.opportunistic = yes,
            MemPoolAttribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES => pool.reuse.internal = yes,
            MemPoolAttribute::RELEASE_THRESHOLD => pool.threshold = value,
            MemPoolAttribute::RESERVED_MEM_HIGH => again(&mut pool.reserved)?,
            MemPoolAttribute::USED_MEM_HIGH => again(&mut pool.used)?,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    pub(crate) fn mem_pool_trim(
        &mut self,
        device: Ordinal,
        pool: MemPoolHandle,
        keep: u64,
    ) -> Answer {
        self.context(device)?;
        let key = self.pools.key(pool)?;
        self.trim_pool(key, keep);
        Ok(())
    }

    pub(crate) fn mem_pool_access(
        &mut self,
        device: Ordinal,
        pool: MemPoolHandle,
        location: Location,
    ) -> Answer<AccessFlags> {
        self.context(device)?;
        let who = self.who(location)?;
        Ok(self.pools.get(pool)?.rights.of(who))
    }

    pub(crate) fn mem_pool_set_access(
        &mut self,
        device: Ordinal,
        pool: MemPoolHandle,
        access: &[AccessDesc],
    ) -> Answer {
        self.context(device)?;
        let key = self.pools.key(pool)?;
        for desc in access {
            if desc.location.kind == LocationKind::DEVICE {
                self.device(Ordinal(desc.location.id))?;
            }
        }
        let grants = self.grants(access)?;
        let pool = self.pools.by_key.get(&key).ok_or(INVALID_VALUE)?;
        let (location, before) = (pool.props.location, pool.rights.clone());
        let mut after = before.clone();
        for &(who, flags) in &grants {
            self.is_peer(who, location)?;
            if who.location() == location {
                keeps_own_access(flags)?;
            }
            after.set(who, flags);
        }
        let allocations = self.allocations.by_address.iter();
        let ours = allocations.filter(|(_, allocation)| allocation.pool == Some(key));
        let (mut changes, mut taken) = (Vec::new(), Vec::new());
        for (&start, allocation) in ours {
            if let Some((_, offset)) = allocation.memory {
                let part = Part {
                    address: start,
                    size: allocation.taken,
                    offset,
                };
                let (from, to) = (before.reach(), after.reach());
                changes.push(Change { part, from, to });
            }
            taken.push(Taken {
                start,
                size: allocation.size,
                loss: Loss::Mapping {
                    before: before.clone(),
                    after: after.clone(),
                },
            });
        }
        self.backing.protect(&changes)?;
        self.note_hazards(Call::MemPoolSetAccess, &taken);
        if let Some(pool) = self.pools.by_key.get_mut(&key) {
            pool.rights = after;
        }
        Ok(())
    }

    pub(crate) fn default_mem_pool(&mut self, device: Ordinal) -> Answer<MemPoolHandle> {
        let index = self.context(device)?;
        self.can(device, DeviceAttribute::MEMORY_POOLS, NOT_SUPPORTED)?;
        self.pool_handle(PoolKey(index as u64))
    }

    /// Returns the default pool of the host, which is made when it is first asked for.
    pub(crate) fn host_mem_pool(&mut self) -> Answer<MemPoolHandle> {
        require(self.rules.version >= HOST_SINCE, NOT_SUPPORTED)?;
        if let Some(key) = self.pools.of_host {
            return self.pool_handle(key);
        }
        let made = self.mem_pool_create(Ordinal(0), &MemPoolProps::at(Location::HOST))?;
        self.pools.of_host = Some(self.pools.key(made)?);
        Ok(made)
    }

    pub(crate) fn current_mem_pool(&mut self, device: Ordinal) -> Answer<MemPoolHandle> {
        let index = self.context(device)?;
        self.can(device, DeviceAttribute::MEMORY_POOLS, NOT_SUPPORTED)?;
        self.pool_handle(self.pools.current[index])
    }

    fn pool_handle(&self, key: PoolKey) -> Answer<MemPoolHandle> {
        let handle = self.pools.by_key.get(&key).and_then(|pool| pool.handle);
        handle.map(MemPoolHandle).ok_or(INVALID_VALUE)
    }

    pub(crate) fn set_current_mem_pool(&mut self, device: Ordinal, pool: MemPoolHandle) -> Answer {
        let index = self.context(device)?;
        let key = self.pools.key(pool)?;
        let pool = self.pools.get(pool)?;
        let local = pool.owner == Some(Owner::Device(index));
        require(local, INVALID_VALUE)?;
        self.pools.current[index] = key;
        Ok(())
    }
}

/// Refuses to take access from the place that has the memory, with the codes of an H200.
fn keeps_own_access(flags: AccessFlags) -> Answer {
    match flags {
        AccessFlags::READ_WRITE => Ok(()),
        AccessFlags::READ => Err(NOT_SUPPORTED),
        _ => Err(INVALID_DEVICE),
    }
}
