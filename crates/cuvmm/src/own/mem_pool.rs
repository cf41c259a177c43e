//! Memory pools of the driver: its own stream-ordered allocator.
//!
//! What a [`Pool`](crate::Pool) of this library gives out is not part of them. They matter for
//! memory that other libraries allocate with `cuMemAllocAsync`: that comes from the current memory
//! pool of the device, and a [`MemPool`] with a maximum caps it.
//!
//! `unsafe` is used for calls that take a pool's handle. The handle is owned here, or is that of a
//! device's default pool, which the driver never destroys.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{
    Call, CudaVersion, DeviceAttribute, Driver, DriverError, HandleTypes, Location, LocationKind,
    MemPoolAttribute, MemPoolHandle, MemPoolProps, Ordinal,
};

use super::close::{CloseError, CloseRefusal};
use super::given_memory::GivenMemory;
use super::physical::creatable_as;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};

/// The version that introduced the maximum of a memory pool.
const MAXIMUM_SINCE: CudaVersion = CudaVersion::new(12, 2);

/// The most parts of kept memory that an allocation looks at. Each costs system calls.
const FEW: usize = 4;

/// A memory pool of the driver. Clones are the same pool.
///
/// It is destroyed when the last clone, the last [`PoolAllocation`](super::PoolAllocation) and the
/// last [`CurrentPoolGuard`](super::CurrentPoolGuard) are dropped. The driver releases its memory when all that was
/// allocated from it is freed, also by other libraries. A pool that was [current](Self::make_current)
/// once is not destroyed but [kept](Device::kept_memory_pools).
///
/// What another process still uses when the pool ends stays allocated, and counts in
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
    /// Its owner is a tenant, which is charged for it and replaces it.
    managed: bool,
    kind: Kind,
    /// Memory that was dropped while another process could use it.
    kept: Mutex<Vec<Arc<GivenMemory>>>,
    /// Set when the pool is made current: it is never destroyed then (see `device/kept_pools.rs`).
    was_current: AtomicBool,
    /// Set when a handle of the pool was exported: its allocations can be exported from then on.
    exported: AtomicBool,
    /// Set when something is changed that a new pool does not have: rules of reuse, access, handles
    /// that other processes have.
    is_changed: AtomicBool,
}

/// Whose a pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It was created here and is destroyed here.
    Own,
    /// It is the default pool of its device, which is never destroyed.
    Default,
    /// Another library destroys it.
    Foreign,
    /// It was destroyed.
    Destroyed,
}

/// Options of a [`MemPool`].
#[derive(Debug)]
pub struct MemPoolBuilder<'a> {
    device: &'a Device,
    props: MemPoolProps,
}

impl MemPoolBuilder<'_> {
    /// Sets the maximum of the bytes that the pool holds (CUDA 12.2). By default the driver
    /// chooses. The driver rounds it up: on an H200 to whole steps of 32 MiB.
    ///
    /// An allocation that would exceed it fails as if the device had no more memory.
    #[must_use]
    pub const fn maximum(mut self, bytes: u64) -> Self {
        self.props.maximum = bytes;
        self
    }

    /// Sets the handle types that the pool may be shared as; none by default, and fixed at
    /// creation. See [`AllocationOffer`](crate::share::AllocationOffer). A process that was given
    /// one allocation can reach all of the pool, also for writing, and what is allocated later. By NVIDIA's documentation the driver releases no memory of such a pool before the
    /// pool ends; on an H200 it does, as with other pools.
    #[must_use]
    pub const fn shareable(mut self, types: HandleTypes) -> Self {
        self.props.handle_types = types;
        self
    }

    /// Places the memory on the host instead of the device (CUDA 13). At first only the host's
    /// processors have access.
    #[must_use]
    pub const fn on_host(mut self) -> Self {
        self.props.location = Location::HOST;
        self
    }

    /// Places the memory on a host NUMA node instead of the device (CUDA 12.2). At first only the
    /// host's processors have access.
    #[must_use]
    pub const fn on_host_numa(mut self, node: i32) -> Self {
        self.props.location = Location::host_numa(node);
        self
    }

    /// Creates the pool (`cuMemPoolCreate`; before it `cuDeviceGetAttribute`, and
    /// `cuDriverGetVersion` if there is a maximum). Takes a pool that is
    /// [kept](Device::kept_memory_pools) instead, if one has the same options.
    ///
    /// # Errors
    /// [`MemoryError`] when the device has no memory pools, the driver is older than CUDA 11.2 (or
    /// 12.2, if there is a maximum), or the driver refuses.
    #[doc(alias = "cuMemPoolCreate")]
    pub fn create(self) -> Result<MemPool, MemoryError> {
        let Self { device, props } = self;
        let location = props.location;
        if location.kind == LocationKind::HOST_NUMA && location.id < 0 {
            return Err(ArgumentError::NoSuch {
                what: "NUMA node",
                number: location.id.into(),
            }
            .into());
        }
        creatable_as(props.handle_types)?;
        let attribute = DeviceAttribute::MEMORY_POOLS;
        let supported = device.call(Call::DeviceGetAttribute, |driver, device| {
            driver.device_attribute(device, attribute)
        })?;
        if supported == 0 {
            return Err(unsupported(device, "memory pools (attribute 115)"));
        }
        if props.maximum != 0 {
            let version = device.call(Call::DriverGetVersion, |driver, _| driver.version())?;
            if version < MAXIMUM_SINCE {
                let what = "memory pools with a maximum, which need CUDA 12.2";
                return Err(unsupported(device, what));
            }
        }
        if let Some(kept) = MemPool::of_kept(device, props)? {
            return Ok(kept);
        }
        let handle = device
            .call(Call::MemPoolCreate, |driver, device| {
                driver.mem_pool_create(device, &props)
            })
            .map_err(|cause| MemoryError::CreatePool { location, cause })?;
        Ok(MemPool::with_handle(device, handle, props, Kind::Own))
    }
}

fn unsupported(device: &Device, what: &'static str) -> MemoryError {
    let device = device.location();
    MemoryError::NotSupported { device, what }
}

impl MemPool {
    /// Creates a pool of a device's memory with default settings.
    ///
    /// # Errors
    /// Those of [`MemPoolBuilder::create`].
    pub fn new(device: &Device) -> Result<Self, MemoryError> {
        Self::builder(device).create()
    }

    /// Returns a builder for a pool.
    #[must_use]
    pub fn builder(device: &Device) -> MemPoolBuilder<'_> {
        MemPoolBuilder {
            device,
            props: MemPoolProps::device(device.ordinal()),
        }
    }

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

    /// Wraps a pool that another library has created. It is not destroyed here. The location, the
    /// maximum and the handle types that this value reports are those of a plain pool of the
    /// device, because the driver tells none of them.
    ///
    /// # Safety
    /// `handle` must be a pool of the device's memory that was created in this process, and must
    /// not be destroyed before the last clone, allocation and guard of it is dropped.
    #[must_use]
    pub unsafe fn from_raw(device: &Device, handle: MemPoolHandle) -> Self {
        let props = MemPoolProps::device(device.ordinal());
        Self::with_handle(device, handle, props, Kind::Foreign)
    }

    /// Makes a new pool of one that is kept and empty, if there is one (`cuMemPoolGetAttribute`,
    /// `cuMemPoolSetAttribute`).
    fn of_kept(device: &Device, props: MemPoolProps) -> Result<Option<Self>, CallError> {
        let attribute = MemPoolAttribute::RESERVED_MEM_CURRENT;
        let taken = device.take_kept_pool(&props, |handle| {
            let held = device.call(Call::MemPoolGetAttribute, |driver, device| {
                // SAFETY: kept pools are never destroyed.
                unsafe { driver.mem_pool_attribute(device, handle, attribute) }
            });
            // Where the driver does not say, a pool is created instead.
            held.is_ok_and(|held| held == 0)
        });
        let Some(handle) = taken else {
            return Ok(None);
        };
        let pool = Self::with_handle(device, handle, props, Kind::Own);
        // It goes back to the kept ones if this fails.
        pool.shared.was_current.store(true, Ordering::Relaxed);
        for peak in [
            MemPoolAttribute::USED_MEM_HIGH,
            MemPoolAttribute::RESERVED_MEM_HIGH,
        ] {
            pool.call(Call::MemPoolSetAttribute, |driver, device, pool| {
                // SAFETY: the handle is alive.
                unsafe { driver.mem_pool_set_attribute(device, pool, peak, 0) }
            })?;
        }
        Ok(Some(pool))
    }

    /// Notes that the pool is about to be the current one.
    pub(super) fn note_current(&self) {
        self.shared.was_current.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if a handle of the pool was exported.
    pub(super) fn is_exported(&self) -> bool {
        self.shared.exported.load(Ordering::Acquire)
    }

    /// Notes that a handle of the pool was exported.
    pub(super) fn note_exported(&self) {
        self.shared.exported.store(true, Ordering::Release);
    }

    /// Notes a change that a new pool does not have.
    pub(super) fn note_changed(&self) {
        self.shared.is_changed.store(true, Ordering::Relaxed);
    }

    fn with_handle(
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
            kept: Mutex::default(),
            was_current: AtomicBool::new(false),
            exported: AtomicBool::new(false),
            is_changed: AtomicBool::new(false),
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

    /// Checks that the pool does not belong to a tenant.
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

    /// Returns a number that names the driver's pool to other processes, and that none of them can
    /// guess. Values that wrap the same pool have the same one.
    pub(crate) fn identity(&self) -> [u8; 16] {
        self.device().name_of(self.as_raw().0)
    }

    /// Frees memory that was dropped while another process could use it and that was let go since,
    /// and returns the bytes of the rest.
    ///
    /// An [allocation](Self::allocate_on) from this value or a clone of it does so for a part of the
    /// memory, and for all of it before it fails for lack of memory.
    #[must_use]
    pub fn held_elsewhere(&self) -> u64 {
        self.free_returned();
        if self.device().is_forked() {
            return 0;
        }
        let kept = self.shared.kept();
        kept.iter().map(|kept| kept.memory().size()).sum()
    }

    /// Keeps memory that another process may use, until it is returned.
    pub(super) fn keep(&self, memory: &Arc<GivenMemory>) {
        let mut kept = self.shared.kept();
        if !kept.iter().any(|known| Arc::ptr_eq(known, memory)) {
            kept.push(Arc::clone(memory));
        }
    }

    /// Frees kept memory that was returned, and returns whether there was any.
    pub(super) fn free_returned(&self) -> bool {
        self.shared.free_returned(usize::MAX)
    }

    /// Looks at a few parts of the kept memory, in turn, and frees those that were returned.
    pub(super) fn free_some_returned(&self) {
        self.shared.free_returned(FEW);
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

    /// Destroys the pool (`cuMemPoolDestroy`), or returns it with the reason. A default pool is
    /// only let go, and a pool that was current once is emptied and
    /// [kept](Device::kept_memory_pools) (`cuDeviceGetMemPool`, `cuMemPoolSetAttribute`,
    /// `cuMemPoolTrimTo`).
    ///
    /// # Errors
    /// [`CloseError`] with the pool in it while clones, allocations, offers or guards live, another
    /// process uses its memory, or when the driver refuses.
    #[doc(alias = "cuMemPoolDestroy")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let Some(shared) = Arc::get_mut(&mut self.shared) else {
            return Err(CloseError {
                owner: self,
                reason: CloseRefusal::InUse,
            });
        };
        shared.free_returned(usize::MAX);
        if !shared.device.is_forked() && !shared.kept().is_empty() {
            return Err(CloseError {
                owner: self,
                reason: CloseRefusal::InUse,
            });
        }
        match shared.destroy() {
            Ok(()) => Ok(()),
            Err(cause) => Err(CloseError {
                owner: self,
                reason: CloseRefusal::Call(cause),
            }),
        }
    }
}

impl Shared {
    fn kept(&self) -> MutexGuard<'_, Vec<Arc<GivenMemory>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn free_returned(&self, most: usize) -> bool {
        if self.device.is_forked() {
            return false;
        }
        let returned: Vec<_> = {
            let mut kept = self.kept();
            let looked_at = most.min(kept.len());
            // The others come first the next time.
            kept.rotate_left(looked_at);
            let from = kept.len() - looked_at;
            kept.extract_if(from.., |kept| kept.is_returned()).collect()
        };
        // Freed when they are dropped, without the lock.
        !returned.is_empty()
    }

    fn destroy(&mut self) -> Result<(), CallError> {
        if self.kind != Kind::Own {
            return Ok(());
        }
        let handle = self.handle;
        if *self.was_current.get_mut() {
            self.leave_current()?;
            self.empty()?;
            let reusable = !*self.is_changed.get_mut();
            self.device.keep_pool(handle, self.props, reusable);
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

impl Shared {
    /// Makes the default pool current if this one is, as the end of a pool does.
    fn leave_current(&self) -> Result<(), CallError> {
        let _one_by_one = self.device.set_pool_alone()?;
        let current = self
            .device
            .give_back(Call::DeviceGetMemPool, |driver, device| {
                driver.current_mem_pool(device)
            })?;
        if current != self.handle {
            return Ok(());
        }
        let default = self
            .device
            .give_back(Call::DeviceGetDefaultMemPool, |driver, device| {
                driver.default_mem_pool(device)
            })?;
        self.device
            .give_back(Call::DeviceSetMemPool, |driver, device| {
                // SAFETY: a default pool is never destroyed.
                unsafe { driver.set_current_mem_pool(device, default) }
            })
    }

    /// Returns what the pool holds and does not use, and lets the driver take back the rest as it is
    /// freed.
    fn empty(&self) -> Result<(), CallError> {
        let handle = self.handle;
        self.device
            .give_back(Call::MemPoolSetAttribute, |driver, device| {
                let attribute = MemPoolAttribute::RELEASE_THRESHOLD;
                // SAFETY: the handle is alive.
                unsafe { driver.mem_pool_set_attribute(device, handle, attribute, 0) }
            })?;
        self.device
            .give_back(Call::MemPoolTrimTo, |driver, device| {
                // SAFETY: the handle is alive.
                unsafe { driver.mem_pool_trim(device, handle, 0) }
            })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.free_returned(usize::MAX);
        // The driver may not destroy it on a lost context, which allocates nothing any more.
        if let (Err(error), None) = (self.destroy(), self.device.lost()) {
            self.device.report_drop("memory pool", 0, error);
        }
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
