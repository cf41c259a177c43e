//! One device of one driver, and the gate through which every driver call goes.
//!
//! The gate counts and times calls, refuses them in a forked child, and remembers a lost context.
//! It neither retries nor checks arguments: whoever calls has done so.

mod events;
mod synchronise;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use cuvmm_driver::{
    Call, CaptureMode, DeviceAttribute, Driver, DriverError, GranularityKind, Location, MemoryInfo,
    Ordinal, PhysicalProps,
};

use crate::calls::{CallCounts, Calls};
use crate::deferred::{defer, is_locked};
use crate::drops::{DropFailure, DropHook, Drops};
use crate::error::{CallError, DeviceError};
use crate::fork::Birthplace;
use crate::size::Granularity;
use crate::sync::{let_others_run, thread::ThreadId};

pub(crate) use events::{Events, Progress, Stamp, Work};

/// A device of a driver. Clones are the same device and share its counters.
///
/// Open a device once and clone it. Two that were [opened](Self::open) separately count as the same
/// device, but each keeps its own counters, learns of a lost context by its own calls, may have a
/// mapper of its own, and records events of its own.
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
    birthplace: Birthplace,
    lost: OnceLock<DriverError>,
    /// Whether its memory can be made reachable for RDMA, once somebody has asked.
    rdma: OnceLock<bool>,
    drops: Drops,
    /// Whether a mapper runs for it.
    mapped_for: AtomicBool,
    /// Bytes that were dropped and stay mapped.
    leaked: AtomicU64,
    /// Stamps uses that end, and events.
    clock: AtomicU64,
    /// The events behind all work of the context.
    events: Events,
}

impl Device {
    /// Opens a device of a driver.
    ///
    /// Calls `cuDeviceGetCount`, `cuDeviceGetName`, `cuDeviceGetUuid`, `cuDeviceGetAttribute`,
    /// `cuDeviceTotalMem` and `cuMemGetAllocationGranularity`; makes no context yet.
    ///
    /// # Errors
    /// [`DeviceError`] when there is no such device or it has no virtual memory management.
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
        let granularity = Granularity::new(bytes).ok_or(DeviceError::OddGranularity {
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
                birthplace: Birthplace::new(),
                lost: OnceLock::new(),
                rdma: OnceLock::new(),
                drops: Drops::default(),
                mapped_for: AtomicBool::new(false),
                leaked: AtomicU64::new(0),
                clock: AtomicU64::new(0),
                events: Events::default(),
            }),
            calls: Arc::new(Calls::new()),
        })
    }

    /// The same device with counters of its own, starting at zero.
    #[must_use]
    pub fn with_own_counters(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            calls: Arc::new(Calls::new()),
        }
    }

    /// Returns a handle of this device that counts its calls together with those of another handle.
    pub(crate) fn counted_with(&self, other: &Self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            calls: Arc::clone(&other.calls),
        }
    }

    /// The driver's number for the device.
    #[must_use]
    pub fn ordinal(&self) -> Ordinal {
        self.shared.ordinal
    }

    /// The product name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The identity that is the same in every process.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.shared.uuid
    }

    /// All memory of the device in bytes.
    #[must_use]
    pub fn total_memory(&self) -> u64 {
        self.shared.total
    }

    /// The granule in bytes: what the driver maps is always a multiple of it.
    #[must_use]
    pub fn granularity(&self) -> u64 {
        self.shared.granularity.bytes()
    }

    /// The device as a location for memory and access.
    #[must_use]
    pub fn location(&self) -> Location {
        Location::device(self.shared.ordinal)
    }

    /// The driver behind the device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// Free and total memory by the driver's own count (`cuMemGetInfo`).
    ///
    /// # Errors
    /// [`CallError`] when the driver does not answer.
    pub fn memory_info(&self) -> Result<MemoryInfo, CallError> {
        self.call(Call::MemGetInfo, |driver, device| {
            driver.memory_info(device)
        })
    }

    /// Whether this device can reach the memory of another (`cuDeviceCanAccessPeer`). A device
    /// reaches itself; no device reaches those of another driver.
    ///
    /// # Errors
    /// [`CallError`] when the driver does not answer.
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

    /// Whether its memory can be made reachable for RDMA (attribute 110).
    pub(crate) fn has_rdma(&self) -> Result<bool, CallError> {
        if let Some(&known) = self.shared.rdma.get() {
            return Ok(known);
        }
        let attribute = DeviceAttribute::GPU_DIRECT_RDMA_WITH_VMM;
        let value = self.call(Call::DeviceGetAttribute, |driver, device| {
            driver.device_attribute(device, attribute)
        })?;
        Ok(*self.shared.rdma.get_or_init(|| value != 0))
    }

    /// Driver calls made through this handle and its clones.
    #[must_use]
    pub fn calls(&self) -> CallCounts {
        self.calls.snapshot()
    }

    /// The same, as far as a [mapper](crate::region::Mapper)'s thread made them.
    #[must_use]
    pub fn mapper_calls(&self) -> CallCounts {
        self.calls.snapshot_of_mapper()
    }

    /// Counts what a thread calls from now on as the mapper's.
    pub(crate) fn count_apart(&self, mapper: ThreadId) {
        self.calls.count_apart(mapper);
    }

    /// Whether the device had no mapper until now, and has one from now on.
    pub(crate) fn claim_mapper(&self) -> bool {
        !self.shared.mapped_for.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn disclaim_mapper(&self) {
        self.shared.mapped_for.store(false, Ordering::SeqCst);
    }

    /// A moment that is after every earlier one of this device.
    pub(crate) fn tick(&self) -> Stamp {
        // Whatever was queued before an earlier tick was queued before what follows this one.
        self.shared.clock.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Whether the stamps of both can be compared: one was cloned from the other.
    pub(crate) fn shares_clock(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The events behind all work of the context.
    pub(crate) fn events(&self) -> &Events {
        &self.shared.events
    }

    /// How many drops could not give back what they owned.
    #[must_use]
    pub fn drop_failures(&self) -> u64 {
        self.shared.drops.count()
    }

    /// Has `hook` called for each drop that cannot give back what it owns; `None` removes it.
    ///
    /// The hook is called with no lock of this library held, so it may use the library. Where
    /// something was dropped while a pool of the device was locked, the thread that had locked it
    /// calls the hook right after. In a forked child this does nothing.
    pub fn on_drop_failure(&self, hook: Option<DropHook>) {
        if !self.is_forked() {
            self.shared.drops.set_hook(hook);
        }
    }

    /// The error that lost the context, if it is lost.
    #[must_use]
    pub fn lost(&self) -> Option<DriverError> {
        self.shared.lost.get().copied()
    }

    /// Whether `other` is the same device of the same driver.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
            || (self.same_driver(other) && self.ordinal() == other.ordinal())
    }

    /// Whether `other` is a device of the same driver.
    #[must_use]
    pub fn same_driver(&self, other: &Self) -> bool {
        std::ptr::addr_eq(
            Arc::as_ptr(&self.shared.driver),
            Arc::as_ptr(&other.shared.driver),
        )
    }

    pub(crate) fn granule(&self) -> Granularity {
        self.shared.granularity
    }

    /// Whether this process is not the one that opened the device.
    pub(crate) fn forked(&self) -> Option<CallError> {
        let opened_by = self.shared.birthplace.id();
        self.is_forked().then_some(CallError::Forked { opened_by })
    }

    /// Refuses in a forked child.
    pub(crate) fn own_process(&self) -> Result<(), CallError> {
        self.forked().map_or(Ok(()), Err)
    }

    /// Whether this process is a forked child. Asked before every lock is taken: a thread that the
    /// child does not have may have held it at the fork.
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

    /// Whether anything new may be done: not on a lost context, and not in a forked child.
    pub(crate) fn usable(&self) -> Result<(), CallError> {
        match (self.lost(), self.forked()) {
            (Some(error), _) => Err(CallError::ContextLost(error)),
            (None, Some(forked)) => Err(forked),
            (None, None) => Ok(()),
        }
    }

    /// Makes a driver call that gives something back: made on a lost context too.
    pub(crate) fn give_back<T>(
        &self,
        call: Call,
        make: impl FnOnce(&dyn Driver, Ordinal) -> Result<T, DriverError>,
    ) -> Result<T, CallError> {
        if let Some(forked) = self.forked() {
            return Err(forked);
        }
        debug_assert!(
            !(takes_long(call) && is_locked()),
            "{call:?} is called while a pool is locked"
        );
        let_others_run();
        let begun = Instant::now();
        let answer = make(&*self.shared.driver, self.shared.ordinal);
        self.calls.add(call, begun.elapsed());
        answer.map_err(|error| {
            if error.is_sticky() && self.shared.lost.set(error).is_ok() {
                tracing::error!(%error, device = %self.shared.ordinal, "context lost");
            }
            CallError::Driver(error)
        })
    }

    /// Runs `ask` with this thread in relaxed capture mode, so that its queries break no capture
    /// that another library is making.
    pub(crate) fn relaxed<T>(&self, ask: impl FnOnce() -> T) -> Result<T, CallError> {
        let exchange = |mode: CaptureMode| {
            self.give_back(Call::ThreadExchangeStreamCaptureMode, |driver, _| {
                driver.exchange_capture_mode(mode)
            })
        };
        let before = exchange(CaptureMode::RELAXED)?;
        let answer = ask();
        // What was asked is answered: one refusal is no reason to ask again in another mode.
        exchange(before).or_else(|_| exchange(before))?;
        Ok(answer)
    }

    /// Bytes of memory that stay mapped until the process ends, because their owner was dropped while
    /// work of the GPU could have been using them, or because the driver did not unmap them.
    ///
    /// Each such drop also counts as one of the [`drop_failures`](Self::drop_failures). To keep what
    /// cannot be given back, and try again later, close the owner instead of dropping it.
    ///
    /// Host memory of a [`HostStore`](crate::HostStore) that went while a copy may have been using it
    /// counts here too, and not as a failed drop. It stays allocated, with the allocation of the store
    /// that it is a part of.
    #[must_use]
    pub fn leaked(&self) -> u64 {
        self.shared.leaked.load(Ordering::Relaxed)
    }

    pub(crate) fn report_leak(&self, bytes: u64) {
        self.shared.leaked.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn report_drop(&self, what: &'static str, bytes: u64, error: CallError) {
        let failure = DropFailure { what, bytes, error };
        if let Some(hook) = self.shared.drops.count_failure(&failure) {
            defer(move || hook(&failure));
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other)
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

/// Whether a call changes page tables or waits for the GPU: no pool is locked while it runs.
const fn takes_long(call: Call) -> bool {
    matches!(
        call,
        Call::MemCreate
            | Call::MemRelease
            | Call::MemMap
            | Call::MemUnmap
            | Call::MemSetAccess
            | Call::MemAddressReserve
            | Call::MemAddressFree
            | Call::StreamSynchronize
            | Call::CtxSynchronize
    )
}
