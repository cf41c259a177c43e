//! Figures, settings and access of the driver's memory pools.
//!
//! `unsafe` is used for calls that take a pool's handle, which the pool keeps alive.
#![allow(unsafe_code)]

use cuvmm_driver::{AccessDesc, AccessFlags, Call, LocationKind, MemPoolAttribute};

use super::{Access, AccessGrant, MemPool, Place};
use crate::error::{ArgumentError, CallError, MemoryError};

/// The rules by which a [`MemPool`] reuses freed memory on another stream, all on by default. On
/// the stream that freed it, memory is always reused at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolReuse {
    /// Memory may be used where an event orders the allocation behind the free.
    pub follow_events: bool,
    /// Memory may be used when the free is found to be complete.
    pub opportunistic: bool,
    /// The driver may make the allocating stream wait for the stream that freed the memory.
    pub internal_dependencies: bool,
}

/// The figures of a [`MemPool`] in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemPoolStats {
    /// Bytes in use.
    pub used: u64,
    /// The maximum of `used` since the last [`MemPool::reset_peaks`].
    pub used_peak: u64,
    /// Bytes that the pool holds, in use or not.
    pub reserved: u64,
    /// The maximum of `reserved` since the last [`MemPool::reset_peaks`].
    pub reserved_peak: u64,
}

impl MemPool {
    fn get(&self, attribute: MemPoolAttribute) -> Result<u64, CallError> {
        self.call(Call::MemPoolGetAttribute, |driver, device, pool| {
            // SAFETY: the handle is alive.
            unsafe { driver.mem_pool_attribute(device, pool, attribute) }
        })
    }

    fn set(&self, attribute: MemPoolAttribute, value: u64) -> Result<(), CallError> {
        self.call(Call::MemPoolSetAttribute, |driver, device, pool| {
            // SAFETY: the handle is alive.
            unsafe { driver.mem_pool_set_attribute(device, pool, attribute, value) }
        })
    }

    pub(crate) fn used(&self) -> Result<u64, CallError> {
        self.get(MemPoolAttribute::USED_MEM_CURRENT)
    }

    pub(crate) fn reserved(&self) -> Result<u64, CallError> {
        self.get(MemPoolAttribute::RESERVED_MEM_CURRENT)
    }

    /// Returns the pool's figures (`cuMemPoolGetAttribute`, four times). They are not taken at one
    /// instant.
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    pub fn stats(&self) -> Result<MemPoolStats, CallError> {
        Ok(MemPoolStats {
            used: self.get(MemPoolAttribute::USED_MEM_CURRENT)?,
            used_peak: self.get(MemPoolAttribute::USED_MEM_HIGH)?,
            reserved: self.get(MemPoolAttribute::RESERVED_MEM_CURRENT)?,
            reserved_peak: self.get(MemPoolAttribute::RESERVED_MEM_HIGH)?,
        })
    }

    /// Starts the peaks of used and of reserved bytes anew (`cuMemPoolSetAttribute`, twice).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses. The peak of used bytes may have been reset.
    pub fn reset_peaks(&self) -> Result<(), CallError> {
        self.set(MemPoolAttribute::USED_MEM_HIGH, 0)?;
        self.set(MemPoolAttribute::RESERVED_MEM_HIGH, 0)
    }

    /// Returns the bytes that the pool may hold after a synchronization
    /// (`cuMemPoolGetAttribute`).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    pub fn release_threshold(&self) -> Result<u64, CallError> {
        self.get(MemPoolAttribute::RELEASE_THRESHOLD)
    }

    /// Sets the bytes that the pool may hold after a synchronization (`cuMemPoolSetAttribute`); 0
    /// at first.
    ///
    /// The next synchronization of a stream, an event or the context releases unused memory above
    /// that.
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    #[doc(alias = "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD")]
    pub fn set_release_threshold(&self, bytes: u64) -> Result<(), CallError> {
        self.set(MemPoolAttribute::RELEASE_THRESHOLD, bytes)
    }

    /// Returns the rules of reuse between streams (`cuMemPoolGetAttribute`, three times).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    pub fn reuse(&self) -> Result<PoolReuse, CallError> {
        let get = |attribute| self.get(attribute).map(|value| value != 0);
        Ok(PoolReuse {
            follow_events: get(MemPoolAttribute::REUSE_FOLLOW_EVENT_DEPENDENCIES)?,
            opportunistic: get(MemPoolAttribute::REUSE_ALLOW_OPPORTUNISTIC)?,
            internal_dependencies: get(MemPoolAttribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES)?,
        })
    }

    /// Sets the rules of reuse between streams (`cuMemPoolSetAttribute`, three times).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses. Rules set before that are set back, if the driver
    /// permits it.
    pub fn set_reuse(&self, reuse: PoolReuse) -> Result<(), CallError> {
        let before = self.reuse()?;
        self.note_changed();
        self.put_reuse(reuse).inspect_err(|_| {
            if let Err(error) = self.put_reuse(before) {
                log!(warn, %error, "rules of reuse could not be set back");
            }
        })
    }

    fn put_reuse(&self, reuse: PoolReuse) -> Result<(), CallError> {
        let set = |attribute, value: bool| self.set(attribute, value.into());
        set(
            MemPoolAttribute::REUSE_FOLLOW_EVENT_DEPENDENCIES,
            reuse.follow_events,
        )?;
        set(
            MemPoolAttribute::REUSE_ALLOW_OPPORTUNISTIC,
            reuse.opportunistic,
        )?;
        set(
            MemPoolAttribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES,
            reuse.internal_dependencies,
        )
    }

    /// Releases unused memory to the device, and leaves the pool at least `keep` bytes
    /// (`cuMemPoolTrimTo`).
    ///
    /// Waits for nothing. Memory whose free no synchronization has seen complete may stay, and so
    /// does memory of a [shareable](super::MemPoolBuilder::shareable) pool.
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    #[doc(alias = "cuMemPoolTrimTo")]
    pub fn trim_to(&self, keep: u64) -> Result<(), CallError> {
        self.call(Call::MemPoolTrimTo, |driver, device, pool| {
            // SAFETY: the handle is alive.
            unsafe { driver.mem_pool_trim(device, pool, keep) }
        })
    }

    /// Sets the access of devices to the pool's memory, present and later (`cuMemPoolSetAccess`;
    /// before it `cuDeviceCanAccessPeer` for each other device). Other devices keep their access,
    /// the device of the memory full access. Queued work faults if it needs access that is lowered.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed then.
    #[doc(alias = "cuMemPoolSetAccess")]
    pub fn set_access(&self, access: &[AccessGrant]) -> Result<(), MemoryError> {
        ArgumentError::not_zero("devices to give access to", access.len() as u64)?;
        for grant in access {
            self.check(grant)?;
        }
        Ok(self.put_access(access)?)
    }

    /// Sets the access of devices known to reach the memory.
    pub(crate) fn put_access(&self, access: &[AccessGrant]) -> Result<(), CallError> {
        self.device().usable()?;
        let mut granted = self.granted();
        for place in access.iter().map(AccessGrant::location) {
            if place != self.location() && !granted.contains(&place) {
                granted.push(place);
            }
        }
        drop(granted);
        let descs = access.iter().map(|grant| grant.desc(Access::ReadWrite));
        let descs: Vec<AccessDesc> = descs.collect();
        self.call_to_set_access(&descs)
    }

    /// Takes back all access that was set, except that of the memory's own place.
    pub(super) fn reset_access(&self) -> Result<(), CallError> {
        let none = |&location: &_| AccessDesc {
            location,
            flags: AccessFlags::NONE,
        };
        let descs: Vec<AccessDesc> = self.granted().iter().map(none).collect();
        if !descs.is_empty() {
            self.call_to_set_access(&descs)?;
            self.granted().clear();
        }
        Ok(())
    }

    fn call_to_set_access(&self, descs: &[AccessDesc]) -> Result<(), CallError> {
        self.call(Call::MemPoolSetAccess, |driver, device, pool| {
            // SAFETY: the handle is alive. Work that needs lowered access faults, as documented; no
            // memory is freed.
            unsafe { driver.mem_pool_set_access(device, pool, descs) }
        })
    }

    fn check(&self, grant: &AccessGrant) -> Result<(), MemoryError> {
        grant.check_driver(self.device())?;
        let (device, place) = (grant.location(), self.location());
        if device == place && grant.access() != Access::ReadWrite {
            return Err(MemoryError::Access(device));
        }
        if place.kind == LocationKind::DEVICE
            && let Some(peer) = grant.named()
            && !peer.can_reach(self.device())?
        {
            return Err(MemoryError::Unreachable { device, place });
        }
        Ok(())
    }

    /// Returns the access that a device or a host NUMA node has to the pool's memory
    /// (`cuMemPoolGetAccess`).
    ///
    /// # Errors
    /// [`MemoryError`] when the device belongs to another driver or the driver refuses.
    #[doc(alias = "cuMemPoolGetAccess")]
    pub fn access_of(&self, place: impl Into<Place>) -> Result<Access, MemoryError> {
        let place = place.into();
        place.through(self.device()).check_driver(self.device())?;
        let location = place.location();
        let flags = self.call(Call::MemPoolGetAccess, |driver, device, pool| {
            // SAFETY: the handle is alive.
            unsafe { driver.mem_pool_access(device, pool, location) }
        })?;
        Ok(Access::from_flags(flags))
    }
}
