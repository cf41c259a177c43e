//! Memory pools of the driver: its own stream-ordered allocator.
//!
//! Memory of this library's [`Pool`](crate::Pool) is not part of them. They matter for other
//! libraries, which allocate with `cuMemAllocAsync` from the device's current memory pool: a
//! [`MemPool`] with a maximum caps that memory.
//!
//! `unsafe` is used for calls that take a pool's handle. The handle is owned here, or is that of a
//! device's default pool, which the driver never destroys.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{
    Call, Driver, DriverError, HandleTypes, Location, MemPoolHandle, MemPoolProps, Ordinal,
};

use super::close::{CloseError, CloseRefusal};
use super::kept_memory::KeptMemory;
use super::kept_pool;
use crate::device::{Device, KeptPool};
use crate::error::{CallError, MemoryError};

/// A memory pool of the driver. Clones are the same pool.
///
/// It is destroyed when the last clone, the last [`PoolAllocation`](super::PoolAllocation) and the
/// last [`CurrentPoolGuard`](super::CurrentPoolGuard) are dropped. The driver releases its memory
/// when all of its allocations are freed, those of other libraries included. A pool that was ever
/// [current](Self::make_current) is [kept](Device::kept_memory_pools) instead.
///
/// Memory that another process still uses when the pool ends stays allocated, and counts in
/// [`Device::leaked`].
///
/// ```rust
/// # use cuvmm::driver::auto;
/// # use cuvmm::{Device, MemPool, Stream};
/// # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
/// const MIB: u64 = 1 << 20;
/// let pool = MemPool::builder(&device).maximum(64 * MIB).create()?;
/// pool.set_release_threshold(u64::MAX)?; // keep what is freed
/// let stream = Stream::new(&device)?;
/// let memory = pool.allocate_on(&stream, 8 * MIB)?;
/// assert!(pool.stats()?.used >= 8 * MIB);
/// drop(memory); // freed behind the stream's work
/// stream.synchronize()?;
/// assert_eq!(pool.stats()?.used, 0);
/// pool.trim_to(0)?;
///
/// let guard = pool.make_current()?; // caps what others allocate by `cuMemAllocAsync`
/// assert!(pool.is_current()?);
/// drop(guard);
/// assert!(MemPool::default_of(&device)?.is_current()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "CUmemoryPool")]
#[doc(alias = "cudaMemPool_t")]
#[derive(Clone)]
pub struct MemPool {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    handle: MemPoolHandle,
    props: MemPoolProps,
    /// The owner is a tenant, which is charged for the pool and replaces it.
    managed: bool,
    kind: Kind,
    /// Memory that was dropped while another process could use it.
    kept: KeptMemory,
    /// Set when the pool is made current: it is never destroyed then (see `device/kept_pools.rs`).
    was_current: AtomicBool,
    /// Set when a handle of the pool was exported: its allocations can be exported from then on.
    exported: AtomicBool,
    /// Set by a change that a new pool does not have, except access: rules of reuse, handles of
    /// other processes.
    is_changed: AtomicBool,
    granted: Mutex<Vec<Location>>,
}

/// The owner of a driver's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Created and destroyed here.
    Own,
    /// The default pool of its device, which is never destroyed.
    Default,
    /// Another library destroys it.
    Foreign,
    /// It was destroyed.
    Destroyed,
}

impl MemPool {
    /// Returns the default pool of a device (`cuDeviceGetDefaultMemPool`), which is not destroyed.
    ///
    /// # Errors
    /// [`CallError`] when the driver is older than CUDA 11.2 or refuses.
    #[doc(alias = "cuDeviceGetDefaultMemPool")]
    pub fn default_of(device: &Device) -> Result<Self, CallError> {
        let handle = device.call(Call::DeviceGetDefaultMemPool, |driver, device| {
            driver.default_mem_pool(device)
        })?;
        let props = MemPoolProps::device(device.ordinal());
        Ok(Self::with_handle(device, handle, props, Kind::Default))
    }

    /// Wraps a pool that another library has created and destroys. This value reports the location,
    /// the maximum and the handle types of a plain pool of the device, because the driver does not
    /// report the real ones.
    ///
    /// # Safety
    /// `handle` must be a pool of the device's memory created in this process, and must not be
    /// destroyed before the last clone, allocation and guard of it is dropped.
    #[must_use]
    pub unsafe fn from_raw(device: &Device, handle: MemPoolHandle) -> Self {
        let props = MemPoolProps::device(device.ordinal());
        Self::with_handle(device, handle, props, Kind::Foreign)
    }

    pub(super) fn is_exported(&self) -> bool {
        self.shared.exported.load(Ordering::Acquire)
    }

    pub(super) fn note_exported(&self) {
        self.shared.exported.store(true, Ordering::Release);
    }

    pub(super) fn note_changed(&self) {
        self.shared.is_changed.store(true, Ordering::Relaxed);
    }

    pub(super) fn with_handle(
        device: &Device,
        handle: MemPoolHandle,
        props: MemPoolProps,
        kind: Kind,
    ) -> Self {
        let shared = Shared {
            device: device.clone(),
            handle,
            props,
            managed: false,
            kind,
            kept: KeptMemory::default(),
            was_current: AtomicBool::new(false),
            exported: AtomicBool::new(false),
            is_changed: AtomicBool::new(false),
            granted: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Makes this the pool of a tenant, which alone allocates from it and makes it current. There
    /// must be no clone yet.
    pub(crate) fn managed(mut self) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.managed = true;
        }
        self
    }

    pub(super) fn check_not_managed(&self) -> Result<(), MemoryError> {
        match self.shared.managed {
            true => Err(MemoryError::ManagedPool),
            false => Ok(()),
        }
    }

    /// Returns the device that the pool was created through.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Returns the driver's handle, which stays owned by this pool.
    #[must_use]
    pub fn as_raw(&self) -> MemPoolHandle {
        self.shared.handle
    }

    /// Returns the location of the memory.
    #[must_use]
    pub fn location(&self) -> Location {
        self.shared.props.location
    }

    /// Returns the maximum in bytes that the pool was created with, if any.
    #[must_use]
    pub fn maximum(&self) -> Option<u64> {
        Some(self.shared.props.maximum).filter(|&maximum| maximum != 0)
    }

    /// Returns the handle types that the pool may be shared as.
    #[must_use]
    pub fn shareable(&self) -> HandleTypes {
        self.shared.props.handle_types
    }

    pub(super) fn kind(&self) -> Kind {
        self.shared.kind
    }

    pub(super) fn kept(&self) -> &KeptMemory {
        &self.shared.kept
    }

    pub(super) fn granted(&self) -> MutexGuard<'_, Vec<Location>> {
        let granted = self.shared.granted.lock();
        granted.unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn call<T>(
        &self,
        call: Call,
        make: impl FnOnce(&dyn Driver, Ordinal, MemPoolHandle) -> Result<T, DriverError>,
    ) -> Result<T, CallError> {
        let handle = self.as_raw();
        self.device()
            .call(call, |driver, device| make(driver, device, handle))
    }

    /// Notes that the pool is about to be current.
    pub(super) fn note_current(&self) {
        self.shared.was_current.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if the pool was ever made current here.
    pub(crate) fn was_current(&self) -> bool {
        self.shared.was_current.load(Ordering::Relaxed)
    }

    /// Makes the pool current (`cuDeviceSetMemPool`). The caller keeps it alive meanwhile.
    pub(super) fn set_current(&self) -> Result<(), CallError> {
        self.note_current();
        self.call(Call::DeviceSetMemPool, |driver, device, pool| {
            // SAFETY: the handle is alive, and the caller keeps it alive.
            unsafe { driver.set_current_mem_pool(device, pool) }
        })
    }

    /// Destroys the pool (`cuMemPoolDestroy`), or returns it with the reason. A default pool stays,
    /// and a pool that was ever current is emptied and [kept](Device::kept_memory_pools)
    /// (`cuDeviceGetMemPool`, `cuMemPoolSetAttribute`, `cuMemPoolTrimTo`).
    ///
    /// # Errors
    /// [`CloseError`] with the pool in it while clones, allocations, offers or guards live, another
    /// process uses its memory, or when the driver refuses.
    #[doc(alias = "cuMemPoolDestroy")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let closed = match Arc::get_mut(&mut self.shared) {
            Some(shared) => shared.close(),
            None => Err(CloseRefusal::InUse),
        };
        CloseError::of(self, closed)
    }
}

impl Shared {
    fn close(&mut self) -> Result<(), CloseRefusal> {
        self.kept.free_returned(&self.device, usize::MAX);
        if !self.device.is_forked() && !self.kept.is_empty() {
            return Err(CloseRefusal::InUse);
        }
        Ok(self.destroy()?)
    }

    fn destroy(&mut self) -> Result<(), CallError> {
        if self.kind != Kind::Own {
            return Ok(());
        }
        let handle = self.handle;
        if *self.was_current.get_mut() {
            kept_pool::retire(&self.device, handle)?;
            let granted = self.granted.get_mut();
            let granted = granted.unwrap_or_else(PoisonError::into_inner);
            self.device.keep_pool(KeptPool {
                handle,
                props: self.props,
                granted: std::mem::take(granted),
                reusable: !*self.is_changed.get_mut(),
            });
            self.kind = Kind::Destroyed;
            return Ok(());
        }
        self.device
            // SAFETY: the handle is owned here and is destroyed once: `kind` is set below, and a
            // refused call has changed nothing. Memory that is still in use lives on.
            .give_back(Call::MemPoolDestroy, |driver, device| unsafe {
                driver.mem_pool_destroy(device, handle)
            })?;
        self.kind = Kind::Destroyed;
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.kept.free_returned(&self.device, usize::MAX);
        let destroyed = self.destroy();
        self.device.report_end("memory pool", 0, destroyed);
    }
}

impl fmt::Debug for MemPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemPool")
            .field("handle", &self.shared.handle)
            .field("location", &self.shared.props.location)
            .finish_non_exhaustive()
    }
}
