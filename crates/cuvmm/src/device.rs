//! Devices of a driver, and the one path that every driver call takes.
//!
//! [`Device::call`] and [`Device::give_back`] count and time calls, refuse them in a forked child,
//! and remember a lost context. They neither retry nor check arguments, which is up to the caller.
//!
//! Keeps I-40.

mod captures;
mod events;
mod kept_pools;
#[cfg(all(test, debug_assertions))]
mod locked_calls;
mod synchronise;

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher as _, Hash, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::time::Instant;

use cuvmm_driver::{
    Call, CaptureMode, DeviceAttribute, Driver, DriverError, GranularityKind, Location, MemoryInfo,
    Ordinal, PhysicalProps, StreamHandle,
};

use crate::calls::{CallCounts, Calls};
use crate::deferred::{defer, is_locked};
use crate::descriptors;
use crate::drops::{DropFailure, DropHook, Drops};
use crate::error::{ArgumentError, CallError, DeviceError, MemoryError};
use crate::fork::OpeningProcess;
use crate::size::Granularity;
use crate::sync::{Mutex, MutexGuard, thread::ThreadId, yield_point};

use self::captures::Captures;
use self::kept_pools::KeptPools;

pub(crate) use self::kept_pools::KeptPool;

pub(crate) use events::{Events, Stamp, Work, WorkState};

/// A device of a driver. Clones are the same device and share its counters.
///
/// Open a device once and clone it. Two handles that were [opened](Self::open) separately count as
/// the same device, but each has its own counters, learns of a lost context by its own calls, may
/// have its own mapper, records its own events, keeps its own memory pools, and imports those of other
/// processes by itself.
///
/// ```rust
/// use cuvmm::Device;
/// use cuvmm::driver::auto;
///
/// let opened = auto::open(auto::OpenOptions::new())?; // a GPU, or else host memory
/// let device = Device::open(opened.driver, 0)?;
/// println!("{}: granules of {} bytes", device.name(), device.granularity());
/// assert!(device.memory_info()?.free <= device.total_memory());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
    calls: Arc<Calls>,
}

struct Shared {
    driver: Arc<dyn Driver>,
    ordinal: Ordinal,
    name: String,
    uuid: [u8; 16],
    total: u64,
    granularity: Granularity,
    birthplace: OpeningProcess,
    lost: OnceLock<DriverError>,
    /// Set once queried: `true` if it says that its memory can be made reachable for RDMA.
    rdma: OnceLock<bool>,
    /// The outcome of the probe for such memory, once there is one.
    rdma_probe: OnceLock<Result<(), MemoryError>>,
    drops: Drops,
    /// Set while the device has a mapper.
    mapped_for: AtomicBool,
    /// Bytes that were dropped and stay mapped.
    leaked: AtomicU64,
    /// The clock that stamps ends of uses, and events.
    clock: AtomicU64,
    /// The events recorded behind all work of the context.
    events: Events,
    captures: Captures,
    /// Memory pools of the driver that may not be destroyed.
    kept_pools: KeptPools,
    /// Names objects to other processes.
    secret: [RandomState; 2],
    /// Set once something of other processes is imported.
    imports: OnceLock<Arc<dyn Any + Send + Sync>>,
    /// Held while a memory pool is found to be current and another one is set, so that no thread
    /// replaces what another one has set.
    setting_pool: Mutex<()>,
    /// How often a stream with a handle has ended. The driver uses handles again.
    ended_streams: Mutex<BTreeMap<StreamHandle, u64>>,
}

impl Device {
    /// Opens a device of a driver.
    ///
    /// Makes `cuDeviceGetCount`, `cuDeviceGetName`, `cuDeviceGetUuid`, `cuDeviceGetAttribute`,
    /// `cuDeviceTotalMem` and `cuMemGetAllocationGranularity`. Creates no context yet.
    ///
    /// # Errors
    /// [`DeviceError`] when the device does not exist or has no virtual memory management.
    #[doc(alias("is_vmm_supported", "new_cuda"))]
    pub fn open(driver: Arc<dyn Driver>, ordinal: u32) -> Result<Self, DeviceError> {
        let ask = |error: DriverError| DeviceError::Call(error.into());
        let count = driver.device_count().map_err(ask)?;
        let device = match i32::try_from(ordinal) {
            Ok(number) if number < count => Ordinal(number),
            _ => return Err(DeviceError::NoSuchDevice { ordinal, count }),
        };
        let name = driver.device_name(device).map_err(ask)?;
        let attribute = DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT;
        if driver.device_attribute(device, attribute).map_err(ask)? == 0 {
            return Err(DeviceError::NoVirtualMemory { ordinal, name });
        }
        let bytes = driver
            .allocation_granularity(&PhysicalProps::device(device), GranularityKind::MINIMUM)
            .map_err(ask)?;
        let granularity = Granularity::new(bytes).ok_or(DeviceError::UnsupportedGranularity {
            ordinal,
            granularity: bytes,
        })?;
        let uuid = driver.device_uuid(device).map_err(ask)?;
        let total = driver.total_memory(device).map_err(ask)?;
        Ok(Self {
            shared: Arc::new(Shared {
                driver,
                ordinal: device,
                name,
                uuid,
                total,
                granularity,
                birthplace: OpeningProcess::new(),
                lost: OnceLock::new(),
                rdma: OnceLock::new(),
                rdma_probe: OnceLock::new(),
                drops: Drops::default(),
                mapped_for: AtomicBool::new(false),
                leaked: AtomicU64::new(0),
                clock: AtomicU64::new(0),
                events: Events::default(),
                captures: Captures::default(),
                kept_pools: KeptPools::default(),
                secret: Default::default(),
                imports: OnceLock::new(),
                setting_pool: Mutex::default(),
                ended_streams: Mutex::default(),
            }),
            calls: Arc::new(Calls::new()),
        })
    }

    /// Returns a handle of the same device with its own counters, starting at zero.
    #[must_use]
    pub fn with_own_counters(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            calls: Arc::new(Calls::new()),
        }
    }

    /// Returns the driver's number of the device.
    #[doc(alias = "device_ordinal")]
    #[must_use]
    pub fn ordinal(&self) -> Ordinal {
        self.shared.ordinal
    }

    /// Returns the product name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the identity, which is the same in every process.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.shared.uuid
    }

    /// Returns the total memory of the device in bytes.
    #[must_use]
    pub fn total_memory(&self) -> u64 {
        self.shared.total
    }

    /// Returns the granule in bytes, of which every mapping is a multiple.
    #[doc(alias("allocation_granularity", "get_minimum_granularity"))]
    #[must_use]
    #[doc(alias = "page_size")]
    pub fn granularity(&self) -> u64 {
        self.shared.granularity.bytes()
    }

    /// Returns the granule in bytes that the driver recommends for the best performance
    /// (`CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`), a multiple of [`granularity`](Self::granularity).
    /// 2 MiB on the GPUs of today, as the least is.
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    #[doc(alias("cuMemGetAllocationGranularity", "get_recommended_granularity"))]
    pub fn recommended_granularity(&self) -> Result<u64, CallError> {
        self.call(Call::MemGetAllocationGranularity, |driver, device| {
            let props = PhysicalProps::device(device);
            driver.allocation_granularity(&props, GranularityKind::RECOMMENDED)
        })
    }

    /// Returns the location of the device, for memory and access.
    #[must_use]
    pub fn location(&self) -> Location {
        Location::device(self.shared.ordinal)
    }

    /// Returns the driver of the device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// Returns a handle that does not own the device.
    pub(crate) fn downgrade(&self) -> WeakDevice {
        WeakDevice(Arc::downgrade(&self.shared), Arc::downgrade(&self.calls))
    }

    /// Returns how often a stream with this handle has ended.
    pub(crate) fn generation(&self, handle: StreamHandle) -> u64 {
        self.ended_streams().get(&handle).copied().unwrap_or(0)
    }

    /// Notes that the stream with this handle has ended: the next one is another stream.
    pub(crate) fn note_ended(&self, handle: StreamHandle) {
        *self.ended_streams().entry(handle).or_default() += 1;
    }

    fn ended_streams(&self) -> MutexGuard<'_, BTreeMap<StreamHandle, u64>> {
        let ended = self.shared.ended_streams.lock();
        ended.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns free and total memory by the driver's count (`cuMemGetInfo`).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    pub fn memory_info(&self) -> Result<MemoryInfo, CallError> {
        self.call(Call::MemGetInfo, |driver, device| {
            driver.memory_info(device)
        })
    }

    /// Returns `true` if this device can access the memory of another (`cuDeviceCanAccessPeer`). A
    /// device can access its own memory, and none of another driver's devices.
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    #[doc(alias = "cuDeviceCanAccessPeer")]
    pub fn can_reach(&self, other: &Self) -> Result<bool, CallError> {
        if self.is_same(other) || !self.same_driver(other) {
            return Ok(self.is_same(other));
        }
        let peer = other.ordinal();
        self.call(Call::DeviceCanAccessPeer, |driver, device| {
            driver.can_access_peer(device, peer)
        })
    }

    /// Returns `true` if it says that its memory can be made reachable for RDMA (attribute 110).
    pub(crate) fn promises_rdma(&self) -> Result<bool, CallError> {
        if let Some(&known) = self.shared.rdma.get() {
            return Ok(known);
        }
        let attribute = DeviceAttribute::GPU_DIRECT_RDMA_WITH_VMM;
        let value = self.call(Call::DeviceGetAttribute, |driver, device| {
            driver.device_attribute(device, attribute)
        })?;
        Ok(*self.shared.rdma.get_or_init(|| value != 0))
    }

    /// Returns the outcome of the probe for memory that is reachable for RDMA, or the place for it.
    pub(crate) fn rdma_probe(&self) -> &OnceLock<Result<(), MemoryError>> {
        &self.shared.rdma_probe
    }

    /// Returns the driver calls made through this handle and its clones.
    #[must_use]
    pub fn calls(&self) -> CallCounts {
        self.calls.snapshot()
    }

    /// Returns the part of [`calls`](Self::calls) that a [mapper](crate::region::Mapper)'s thread
    /// made.
    #[must_use]
    pub fn mapper_calls(&self) -> CallCounts {
        self.calls.snapshot_of_mapper()
    }

    /// Counts the calls of a thread as the mapper's, from now on.
    pub(crate) fn count_apart(&self, mapper: ThreadId) {
        self.calls.count_apart(mapper);
    }

    /// Marks the device as having a mapper; `false` if it had one already.
    pub(crate) fn claim_mapper(&self) -> bool {
        !self.shared.mapped_for.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn release_mapper(&self) {
        self.shared.mapped_for.store(false, Ordering::SeqCst);
    }

    /// A stamp that is later than every earlier one of this device.
    pub(crate) fn tick(&self) -> Stamp {
        // Work queued before an earlier tick was queued before whatever follows this one.
        self.shared.clock.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Returns `true` if the stamps of both can be compared: one was cloned from the other.
    pub(crate) fn shares_clock(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The events recorded behind all work of the context.
    pub(crate) fn events(&self) -> &Events {
        &self.shared.events
    }

    /// Returns the number of drops that failed to release what they owned.
    #[must_use]
    pub fn drop_failures(&self) -> u64 {
        self.shared.drops.count()
    }

    /// Sets a hook called for each drop that fails to release what it owns; `None` removes it.
    ///
    /// The hook is called with no lock of this library held, so it may use the library. If a drop
    /// fails while a pool of the device is locked, the thread that holds the lock calls the hook
    /// after releasing it. In a forked child this does nothing.
    pub fn on_drop_failure(&self, hook: Option<DropHook>) {
        if !self.is_forked() {
            self.shared.drops.set_hook(hook);
        }
    }

    /// Returns the error that lost the context, if it is lost.
    #[must_use]
    pub fn lost(&self) -> Option<DriverError> {
        self.shared.lost.get().copied()
    }

    /// Returns `true` if `other` is the same device of the same driver.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
            || (self.same_driver(other) && self.ordinal() == other.ordinal())
    }

    /// Returns `true` if `other` is a device of the same driver.
    #[must_use]
    pub fn same_driver(&self, other: &Self) -> bool {
        std::ptr::addr_eq(
            Arc::as_ptr(&self.shared.driver),
            Arc::as_ptr(&other.shared.driver),
        )
    }

    pub(crate) fn check_driver(&self, other: &Self) -> Result<(), ArgumentError> {
        match self.same_driver(other) {
            true => Ok(()),
            false => Err(ArgumentError::WrongDriver("the device")),
        }
    }

    /// Returns a number that names an object of the device to other processes, none of which can
    /// guess it.
    pub(crate) fn name_of(&self, object: u64) -> [u8; 16] {
        let object = (std::process::id(), object);
        let [high, low] = self.shared.secret.each_ref().map(|s| s.hash_one(object));
        (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
    }

    /// Returns what is imported for the device and its clones, which is of one type. A handle that was
    /// opened separately has a list of its own: nothing here belongs to the process.
    pub(crate) fn imports<T: Any + Send + Sync + Default>(&self) -> Arc<T> {
        let imports = self.shared.imports.get_or_init(|| Arc::new(T::default()));
        Arc::clone(imports).downcast().unwrap_or_default()
    }

    pub(crate) fn granule(&self) -> Granularity {
        self.shared.granularity
    }

    /// The error for a process other than the one that opened the device.
    pub(crate) fn forked(&self) -> Option<CallError> {
        let opened_by = self.shared.birthplace.id();
        self.is_forked().then_some(CallError::Forked { opened_by })
    }

    /// Keeps other threads from setting the current memory pool. No owner of a pool may be dropped
    /// meanwhile: the end of a pool sets it too.
    pub(crate) fn set_pool_alone(&self) -> Result<MutexGuard<'_, ()>, CallError> {
        self.own_process()?;
        let alone = self.shared.setting_pool.lock();
        Ok(alone.unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn own_process(&self) -> Result<(), CallError> {
        self.forked().map_or(Ok(()), Err)
    }

    /// Returns `true` if this process is a forked child. Checked before every lock is taken: a
    /// thread that does not exist in the child may have held the lock at the fork.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        !self.shared.birthplace.is_here()
    }

    /// Makes a driver call that acquires or uses something: refused once the context is lost.
    pub(crate) fn call<T>(
        &self,
        call: Call,
        make: impl FnOnce(&dyn Driver, Ordinal) -> Result<T, DriverError>,
    ) -> Result<T, CallError> {
        self.usable()?;
        self.give_back(call, make)
    }

    /// Refuses an operation on a lost context and in a forked child.
    pub(crate) fn usable(&self) -> Result<(), CallError> {
        match (self.lost(), self.forked()) {
            (Some(error), _) => Err(CallError::ContextLost(error)),
            (None, Some(forked)) => Err(forked),
            (None, None) => Ok(()),
        }
    }

    /// Makes a driver call that releases something: made on a lost context too.
    pub(crate) fn give_back<T>(
        &self,
        call: Call,
        make: impl FnOnce(&dyn Driver, Ordinal) -> Result<T, DriverError>,
    ) -> Result<T, CallError> {
        if let Some(forked) = self.forked() {
            return Err(forked);
        }
        debug_assert!(
            is_short(call) || !is_locked(),
            "{call:?} is called while a pool is locked"
        );
        yield_point();
        let begun = Instant::now();
        let answer = make(&*self.shared.driver, self.shared.ordinal);
        self.calls.add(call, begun.elapsed());
        answer.map_err(|error| {
            if error.is_sticky() && self.shared.lost.set(error).is_ok() {
                log!(error, %error, device = %self.shared.ordinal, "context lost");
            }
            match descriptors::lacking(call) {
                Some(limit) => CallError::Descriptors { error, limit },
                None => CallError::Driver(error),
            }
        })
    }

    /// Runs `ask` with this thread in relaxed capture mode, so that its queries of events and of
    /// streams that take no part in a capture do not break one that another library is making.
    /// Calls that concern the whole context break the captures there in this mode too.
    pub(crate) fn relaxed<T>(&self, ask: impl FnOnce() -> T) -> Result<T, CallError> {
        let exchange = |mode: CaptureMode| {
            self.give_back(Call::ThreadExchangeStreamCaptureMode, |driver, _| {
                driver.exchange_capture_mode(mode)
            })
        };
        let before = exchange(CaptureMode::RELAXED)?;
        let answer = ask();
        // The answer is kept: a refused switch back is tried once more.
        exchange(before).or_else(|_| exchange(before))?;
        Ok(answer)
    }

    /// Returns the bytes of memory that stay mapped until the process ends, because their owner was
    /// dropped while work of the GPU could have been using them, or because the driver did not
    /// unmap them.
    ///
    /// Each such drop also counts in [`drop_failures`](Self::drop_failures). To keep what cannot be
    /// released, and try again later, close the owner instead of dropping it.
    ///
    /// Host memory of a [`HostStore`](crate::HostStore) that was dropped while a copy may have been
    /// using it counts here too, but not as a failed drop. It stays allocated, with the allocation
    /// of the store that it is part of.
    #[must_use]
    pub fn leaked(&self) -> u64 {
        self.shared.leaked.load(Ordering::Relaxed)
    }

    pub(crate) fn report_leak(&self, bytes: u64) {
        self.shared.leaked.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Reports an object that could not be ended, except on a lost context, which takes its objects
    /// with it.
    pub(crate) fn report_end(&self, what: &'static str, bytes: u64, ended: Result<(), CallError>) {
        if let (Err(error), None) = (ended, self.lost()) {
            self.report_drop(what, bytes, error);
        }
    }

    pub(crate) fn report_drop(&self, what: &'static str, bytes: u64, error: CallError) {
        let failure = DropFailure { what, bytes, error };
        if let Some(hook) = self.shared.drops.count_failure(&failure) {
            defer(move || hook(&failure));
        }
    }
}

/// A device that others own.
#[derive(Clone, Debug, Default)]
pub(crate) struct WeakDevice(Weak<Shared>, Weak<Calls>);

impl WeakDevice {
    /// Returns the device, or `None` if no handle of it is left.
    pub(crate) fn upgrade(&self) -> Option<Device> {
        Some(Device {
            shared: self.0.upgrade()?,
            calls: self.1.upgrade()?,
        })
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other)
    }
}

impl Eq for Device {}

impl Hash for Device {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.shared.driver).cast::<()>().hash(state);
        self.shared.ordinal.0.hash(state);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("driver", &self.shared.driver.kind())
            .field("ordinal", &self.shared.ordinal.0)
            .field("name", &self.shared.name)
            .finish_non_exhaustive()
    }
}

/// Returns `true` for calls that ask, queue or record, events included, and return soon. While a
/// pool is locked only these are made: the others change page tables, create or release memory,
/// addresses and contexts, or wait for the GPU.
const fn is_short(call: Call) -> bool {
    matches!(
        call,
        Call::CtxRecordEvent
            | Call::EventCreate
            | Call::EventDestroy
            | Call::EventQuery
            | Call::EventRecord
            | Call::MemFreeAsync
            | Call::MemcpyDtoDAsync
            | Call::MemsetD8Async
            | Call::StreamIsCapturing
            | Call::StreamQuery
            | Call::StreamWaitEvent
            | Call::ThreadExchangeStreamCaptureMode
    )
}
