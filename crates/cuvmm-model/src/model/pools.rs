//! Memory pools: creating and destroying them, their attributes and access, and each device's
//! current pool.

use std::sync::Arc;

use super::answer::{Answer, INVALID_DEVICE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, require};
use super::backing::{Backing, Change};
use super::device_state::Owner;
use super::exports;
use super::losses::{Loss, Taken};
use super::pool_table::{Pool, PoolKey, SharedMemory, Watermark};
use super::rights::{Rights, Who};
use super::space::Space;
use super::state::State;
use cuvmm_driver::{
    AccessDesc, AccessFlags, AllocationType, Call, CudaVersion, DeviceAttribute, DriverKind,
    HandleTypes, Location, LocationKind, MemPoolAttribute, MemPoolHandle, MemPoolProps, Ordinal,
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
        let managed = props.allocation_type == AllocationType::MANAGED;
        let known = match managed {
            true => self.rules.version >= HOST_SINCE && props.handle_types.is_empty(),
            false => props.allocation_type == AllocationType::PINNED,
        };
        let unlimited = !managed || props.maximum == 0;
        require(known && unlimited && props.usage == 0, INVALID_VALUE)?;
        let owner = self.pool_owner(props)?;
        let known = HandleTypes::OS | HandleTypes::FABRIC;
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
        // As recorded: access to a pool of managed memory, which everything may access, is not
        // reported.
        if !managed {
            rights.set(resident(props.location), AccessFlags::READ_WRITE);
        }
        let handle = self.handles.take();
        let pool = Pool::new(handle, *props, Some(owner), rights, shared);
        self.pools.add(pool);
        Ok(MemPoolHandle(handle))
    }

    /// Managed pages are charged to no device, because they are where they were last accessed.
    fn pool_owner(&self, props: &MemPoolProps) -> Answer<Owner> {
        let location = props.location;
        let managed = props.allocation_type == AllocationType::MANAGED;
        match location.kind {
            LocationKind::DEVICE => {
                let index = self.device(Ordinal(location.id));
                let index = index.map_err(|_| INVALID_VALUE)?;
                Ok(if managed {
                    Owner::Host
                } else {
                    Owner::Device(index)
                })
            }
            LocationKind::INVALID if managed => Ok(Owner::Host),
            _ if self.rules.version < NUMA_AND_MAXIMUM_SINCE => Err(INVALID_VALUE),
            LocationKind::HOST if self.rules.version >= HOST_SINCE => {
                require(props.handle_types.is_empty(), INVALID_VALUE)?;
                Ok(Owner::Host)
            }
            LocationKind::HOST_NUMA => {
                let exists = (0..self.rules.numa_nodes).contains(&location.id);
                require(exists, INVALID_VALUE)?;
                // The model has no memory that two processes could access.
                let memory = B::KIND != DriverKind::Model;
                require(memory || props.handle_types.is_empty(), NOT_SUPPORTED)?;
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

    /// Returns an attribute. An imported pool has none that can be read, as measured for its
    /// figures on an H200, and for its release threshold on an H100.
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
        // Only the peak of an imported pool was tried, on an H100.
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
            if allocation.memory.is_some() {
                let part = self.granules_of(start, allocation);
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
        changes.dedup_by_key(|change| change.part);
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

    /// Returns the default pool of memory other than a device's, made at the first call.
    pub(crate) fn default_mem_pool_of(&mut self, props: &MemPoolProps) -> Answer<MemPoolHandle> {
        require(self.rules.version >= HOST_SINCE, NOT_SUPPORTED)?;
        if let Some((_, key)) = self.pools.default.iter().find(|(of, _)| of == props) {
            return self.pool_handle(*key);
        }
        let made = self.mem_pool_create(Ordinal(0), props)?;
        self.pools.default.push((*props, self.pools.key(made)?));
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
        let local = pool.owner.is_some() && pool.props.location == Location::device(device);
        require(local, INVALID_VALUE)?;
        self.pools.current[index] = key;
        Ok(())
    }
}

/// Returns the place of a location's memory, which always has access.
pub(crate) fn resident(location: Location) -> Who {
    match location.kind {
        LocationKind::DEVICE => Who::Device(location.id),
        _ => Who::Host,
    }
}

/// Refuses to take access from the memory's own place, with the codes of an H200.
fn keeps_own_access(flags: AccessFlags) -> Answer {
    match flags {
        AccessFlags::READ_WRITE => Ok(()),
        AccessFlags::READ => Err(NOT_SUPPORTED),
        _ => Err(INVALID_DEVICE),
    }
}
