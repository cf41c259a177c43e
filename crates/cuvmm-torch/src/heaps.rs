//! The heap of each device, and the streams that PyTorch names.
//!
//! `unsafe` is used to wrap the streams, for which the caller vouches, and to ask the driver for
//! their contexts.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::{
    CUresult, DeviceAddress, Driver as _, HandleTypes, Location, Ordinal, StreamHandle,
};
use cuvmm::heap::HeapBuilder;
use cuvmm::pool::{Growth, PoolBuilder, PoolStats};
use cuvmm::{Access, CallError, Device, Heap, Ledger, Limit, Mapper, Pool, Stream, Tenant};

use crate::edge::message;
use crate::error::{DEVICES, Error};
use crate::settings::{Configuration, Rdma, Settings};
use crate::table::Table;
use crate::{asked, exit, fork, guards};

const PUBLISHED: &str = "published";

/// The longest wait for the guarantee of this process in a ledger.
const JOIN: Duration = Duration::from_secs(60);

/// The largest extent of publications. Each is released as a whole, and mapped by each process that
/// attaches it.
const PUBLISHED_EXTENT: u64 = 64 << 30;

/// The heaps by device number. They are never dropped: at the exit the driver may be gone before
/// this library's statics, and releases all memory then.
static HEAPS: [OnceLock<DeviceHeap>; DEVICES] = [const { OnceLock::new() }; DEVICES];

/// The number of devices up to the last one that has a heap.
static NUMBERS: AtomicUsize = AtomicUsize::new(0);

/// Parts that all heaps share. Locked while a heap is made.
static COMMON: Mutex<Common> = Mutex::new(Common {
    driver: None,
    configuration: None,
});

struct Common {
    /// Opened for the first heap.
    driver: Option<Arc<CudaDriver>>,
    configuration: Option<Configuration>,
}

impl Common {
    fn open(&mut self) -> Result<Arc<CudaDriver>, Error> {
        Ok(match &self.driver {
            Some(driver) => Arc::clone(driver),
            None => Arc::clone(self.driver.insert(Arc::new(CudaDriver::open()?))),
        })
    }
}

/// The number of streams that have ended. Notes about a handle hold while this number stays.
static ENDED: AtomicU64 = AtomicU64::new(0);

/// The number of kept streams at which unused streams are dropped.
const KEPT: usize = 64;

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

struct Last {
    of: &'static DeviceHeap,
    handle: u64,
    stream: Stream,
    /// The value of `ENDED` at the operation.
    ended: u64,
}

/// The limit of a device, which its heap shares with the pool of shareable memory.
pub(crate) struct SharedLimit {
    /// The most bytes of the device's pools together. `None` for the default, the memory that the
    /// driver has left.
    pub(crate) set: Option<u64>,
    /// The bytes of shareable memory including what is being allocated; 0 while none is.
    pub(crate) promised: u64,
}

pub(crate) struct DeviceHeap {
    driver: Arc<CudaDriver>,
    pub(crate) device: Device,
    pub(crate) heap: Heap,
    pub(crate) pool: Pool,
    tenant: Tenant,
    /// Other devices with access to the pool's memory, which heaps and tags share.
    peers: Vec<Device>,
    ledger: Option<Ledger>,
    settings: Settings,
    pub(crate) limit: Mutex<SharedLimit>,
    /// Held while room for shareable memory is made and used.
    pub(crate) room: Mutex<()>,
    /// The pool of shareable memory and the tenant of publications in it, made when they are first
    /// needed. Memory is created shareable or not, so it has a pool of its own.
    published: OnceLock<(Pool, Tenant)>,
    /// The tenants of tags. `true` if the tag is shareable.
    tagged: Mutex<Vec<(Tenant, bool)>>,
    /// Streams by their handles: allocations for one stream share one table of events.
    streams: RwLock<HashMap<u64, Stream>>,
    table: Mutex<Table>,
    pub(crate) failed: AtomicU64,
}

#[inline]
pub(crate) fn known(device: i32) -> Option<&'static DeviceHeap> {
    HEAPS.get(usize::try_from(device).ok()?)?.get()
}

/// Returns a device's heap, made if needed. A failure is not kept: the next allocation tries again.
#[inline]
pub(crate) fn of(device: i32) -> Result<&'static DeviceHeap, Error> {
    match known(device) {
        Some(heap) => Ok(heap),
        None => make(device),
    }
}

#[cold]
fn make(device: i32) -> Result<&'static DeviceHeap, Error> {
    let index = usize::try_from(device).map_err(|_| Error::NoSuchDevice)?;
    let place = HEAPS.get(index).ok_or(Error::NoSuchDevice)?;
    fork::watch();
    let mut common = COMMON.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(heap) = place.get() {
        return Ok(heap);
    }
    let configured = common.configuration.clone().unwrap_or_default();
    let settings = Settings::read(&configured)?;
    let driver = common.open()?;
    let heap = DeviceHeap::new(driver, index, settings)?;
    guards::add(&heap.pool);
    let heap = place.get_or_init(|| heap);
    NUMBERS.fetch_max(index + 1, Ordering::AcqRel);
    Ok(heap)
}

/// Sets how the heaps are made. Keys that are missing keep their earlier values.
///
/// # Errors
/// A key is set after a heap was made, or settings contradict each other.
pub(crate) fn configure(configuration: Configuration) -> Result<(), Error> {
    fork::check()?;
    let mut common = COMMON.lock().unwrap_or_else(PoisonError::into_inner);
    if configuration == Configuration::default() {
        return Ok(());
    }
    if all().next().is_some() {
        return Err(Error::TooLate);
    }
    let earlier = common.configuration.clone().unwrap_or_default();
    common.configuration = Some(configuration.over(earlier)?);
    Ok(())
}

/// Returns the directory of the ledger, if one is configured.
pub(crate) fn configured_ledger() -> Option<PathBuf> {
    let common = COMMON.lock().unwrap_or_else(PoisonError::into_inner);
    common.configuration.as_ref()?.ledger().cloned()
}

/// Returns the number of the device that has a UUID. Opens the driver if needed, and no heap.
pub(crate) fn number_of(uuid: [u8; 16]) -> Result<Option<i32>, Error> {
    let mut common = COMMON.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = common.open()?;
    drop(common);
    let mut devices = (0..driver.device_count().unwrap_or(0)).map(Ordinal);
    let found = devices.find(|&device| driver.device_uuid(device) == Ok(uuid));
    Ok(found.map(|Ordinal(device)| device))
}

/// Returns the driver, if a heap was made.
pub(crate) fn driver() -> Option<&'static CudaDriver> {
    all().next().map(|(_, of)| &*of.driver)
}

pub(crate) fn all() -> impl Iterator<Item = (usize, &'static DeviceHeap)> {
    let heaps = HEAPS.iter().enumerate();
    let heaps = heaps.take(NUMBERS.load(Ordering::Acquire));
    heaps.filter_map(|(device, place)| Some((device, place.get()?)))
}

/// Returns the access that a device has at an address: 0 none, 1 reading, 3 reading and writing.
///
/// # Errors
/// This process has not mapped the memory, as with `cudaMalloc`.
pub(crate) fn access(address: u64, device: i32) -> Result<i32, Error> {
    let driver = driver().ok_or(Error::NotAllocated)?;
    let location = Location::device(Ordinal(device));
    let found = driver.get_access(DeviceAddress(address), location);
    Ok(found.map_err(CallError::from)?.0)
}

#[inline]
pub(crate) fn ended() -> u64 {
    ENDED.load(Ordering::Acquire)
}

/// Ends a stream. Waits for its work if `waits`, else returns `false`, with nothing changed, if the
/// work is not complete.
///
/// # Errors
/// The stream captures, or its work has failed.
pub(crate) fn end_stream(handle: u64, waits: bool) -> Result<bool, Error> {
    fork::check()?;
    for (_, of) in all() {
        let Some(stream) = of.known_stream(handle) else {
            continue;
        };
        let ends = match waits {
            true => stream.end().map(|()| true),
            false => stream.try_end(),
        };
        if !ends? {
            return Ok(false);
        }
        let mut streams = of.streams.write().unwrap_or_else(PoisonError::into_inner);
        let ended = streams.remove(&handle);
        drop(streams);
        drop(ended);
        ENDED.fetch_add(1, Ordering::AcqRel);
        of.heap.refresh();
    }
    Ok(true)
}

pub(crate) fn note_failure(device: i32) {
    if let Some(heap) = known(device) {
        heap.failed.fetch_add(1, Ordering::Relaxed);
    }
}

impl Last {
    fn is(&self, of: &DeviceHeap, handle: u64) -> bool {
        self.handle == handle && ptr::eq(self.of, of) && self.ended == ended()
    }
}

impl DeviceHeap {
    /// Builds a heap in the device's primary context. Takes no memory yet.
    fn new(driver: Arc<CudaDriver>, index: usize, settings: Settings) -> Result<Self, Error> {
        let device = Device::open(driver.clone(), u32::try_from(index).unwrap_or(u32::MAX))?;
        let mut builder = settings.with_rdma(Pool::builder(&device))?;
        if let Some(value) = settings.limit {
            let (least, most) = (device.granularity(), device.total_memory());
            if !(least..=most).contains(&value) {
                return Err(Error::Limit {
                    name: settings.limit_name,
                    value,
                    least,
                    most,
                });
            }
            builder = builder.limit(Limit::Bytes(value));
        }
        let ledger = match &settings.ledger {
            Some(directory) => {
                let ledger = Ledger::builder(&device, directory).name(settings.tenant.as_str());
                let ledger = ledger.on_group(asked::answer);
                let ledger = ledger
                    .guarantee(settings.guarantee)
                    .timeout(JOIN)
                    .priority(settings.priority);
                Some(match settings.ledger_limit {
                    Some(bytes) => ledger.limit(bytes).open()?,
                    None => ledger.open()?,
                })
            }
            None => None,
        };
        if let Some(ledger) = &ledger {
            builder = builder.ledger(ledger);
        }
        let mapper = match settings.mapper && exit::watch() {
            true => mapper(&device),
            false => None,
        };
        if let Some(mapper) = &mapper {
            builder = builder.mapper(mapper);
        }
        let peers = settings
            .peers
            .iter()
            .filter(|&&peer| peer as usize != index);
        let peers = peers.map(|&peer| Device::open(driver.clone(), peer));
        let peers: Vec<Device> = peers.collect::<Result<_, _>>()?;
        for peer in &peers {
            builder = builder.open_to(peer, Access::ReadWrite);
        }
        if settings.shareable {
            builder = builder.shareable(HandleTypes::POSIX_FD);
        }
        let pool = builder.build()?;
        let tenant = pool.tenant(settings.tenant.as_str()).register()?;
        let heap = settings.apply(Heap::builder(&tenant)).build()?;
        if let Some(mapper) = mapper {
            exit::at_end(move || drop(mapper));
        }
        Ok(Self {
            driver,
            device,
            heap,
            pool,
            tenant,
            peers,
            ledger,
            limit: Mutex::new(SharedLimit {
                set: settings.limit,
                promised: 0,
            }),
            room: Mutex::default(),
            published: OnceLock::new(),
            settings,
            tagged: Mutex::default(),
            streams: RwLock::default(),
            table: Mutex::default(),
            failed: AtomicU64::new(0),
        })
    }

    pub(crate) fn graph_heap(&self, tenant: &Tenant) -> Result<Heap, Error> {
        let builder = self.settings.apply(Heap::builder(tenant));
        Ok(builder.for_graphs(true).build()?)
    }

    /// Returns the tenant of a tag, registered if needed. The tag with the name of the heap's tenant
    /// has that tenant, unless it is shareable.
    pub(crate) fn tag_tenant(&self, name: &str, is_shareable: bool) -> Result<Tenant, Error> {
        let pool = match is_shareable {
            true => &self.publishing()?.0,
            false if self.tenant.name() == name => return Ok(self.tenant.clone()),
            false => &self.pool,
        };
        let tagged = self.tagged.lock();
        let mut tagged = tagged.unwrap_or_else(PoisonError::into_inner);
        let known = |(tenant, shareable): &&(Tenant, bool)| {
            *shareable == is_shareable && tenant.name() == name
        };
        if let Some((tenant, _)) = tagged.iter().find(known) {
            return Ok(tenant.clone());
        }
        let tenant = pool.tenant(name).register()?;
        tagged.push((tenant.clone(), is_shareable));
        Ok(tenant)
    }

    /// Returns the pool of shareable memory, made if needed, and the tenant of publications in it.
    pub(crate) fn publishing(&self) -> Result<&(Pool, Tenant), Error> {
        let _common = COMMON.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(published) = self.published.get() {
            return Ok(published);
        }
        let mut builder = self.settings.with_rdma(Pool::builder(&self.device))?;
        builder = builder
            .shareable(HandleTypes::POSIX_FD)
            .growth(Growth::Exact)
            .largest_extent(PUBLISHED_EXTENT);
        if let Some(ledger) = &self.ledger {
            builder = builder.ledger(ledger);
        }
        if self.settings.limit.is_some() {
            // The heap's pool leaves room for this pool.
            builder = builder.limit(Limit::Bytes(self.device.total_memory()));
        }
        let pool = builder.build()?;
        let tenant = pool.tenant(PUBLISHED).register()?;
        guards::add(&pool);
        Ok(self.published.get_or_init(|| (pool, tenant)))
    }

    /// Returns `true` if other processes may get the heap's memory.
    pub(crate) const fn is_shareable(&self) -> bool {
        self.settings.shareable
    }

    /// Returns the pool of shareable memory, if it was made.
    pub(crate) fn shareable(&self) -> Option<&Pool> {
        self.published.get().map(|(pool, _)| pool)
    }

    /// Returns the bytes of publications.
    pub(crate) fn published(&self) -> u64 {
        let published = self.published.get();
        published.map_or(0, |(_, tenant)| tenant.stats().committed)
    }

    /// Returns the bytes that the pool of shareable memory holds for tags.
    pub(crate) fn held_shareable(&self) -> u64 {
        let all = self.shareable().map_or(0, held);
        all.saturating_sub(self.published())
    }

    pub(crate) const fn driver(&self) -> &Arc<CudaDriver> {
        &self.driver
    }

    pub(crate) const fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    pub(crate) fn peers(&self) -> &[Device] {
        &self.peers
    }

    pub(crate) fn synchronize(&self) -> Result<(), CallError> {
        let mut devices = std::iter::once(&self.device).chain(&self.peers);
        devices.try_for_each(Device::synchronize)
    }

    pub(crate) const fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Returns `true` if streams may be made to wait for each other's work.
    pub(crate) const fn waits(&self) -> bool {
        self.settings.waits
    }

    #[inline]
    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes held for allocations: of the heap, and of tags in either pool.
    pub(crate) fn held(&self) -> u64 {
        held(&self.pool) + self.held_shareable()
    }

    /// Gives free memory whose work is complete back to the driver.
    pub(crate) fn trim(&self) -> Result<(), CallError> {
        let held = self.held();
        self.table().figures.look(held);
        // The heap gives extents to the pool, and the pool its free memory to the driver.
        self.heap.trim()?;
        self.pool.trim(0)?;
        if let Some(shareable) = self.shareable() {
            shareable.trim(0)?;
        }
        Ok(())
    }

    /// Calls a function with the stream of a handle. A default stream is that of the heap's device.
    ///
    /// # Errors
    /// The per-thread default stream, for whose work another thread could not wait; or a stream
    /// outside the contexts of the heap's device and its peers, for whose work the heap could not
    /// wait.
    #[inline]
    pub(crate) fn with_stream<T, E: From<Error>>(
        &'static self,
        handle: u64,
        act: impl FnOnce(&Stream) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut act = Some(act);
        let acted = LAST.try_with(|last| {
            let last = last.try_borrow().ok()?;
            let last = last.as_ref().filter(|last| last.is(self, handle))?;
            Some(act.take()?(&last.stream))
        });
        match (acted.ok().flatten(), act) {
            (None, Some(act)) => act(&self.other_stream(handle)?),
            (acted, _) => {
                acted.unwrap_or_else(|| Err(Error::OtherContext(self.device.ordinal().0).into()))
            }
        }
    }

    /// Returns the stream of a handle, and notes it as the thread's last.
    fn other_stream(&'static self, handle: u64) -> Result<Stream, Error> {
        let ended = ended();
        let stream = match self.known_stream(handle) {
            Some(stream) => stream,
            None => self.new_stream(handle)?,
        };
        let last = Last {
            of: self,
            handle,
            stream: stream.clone(),
            ended,
        };
        // A thread that ends or is using its last stream notes nothing.
        let before = LAST.try_with(|place| Some(place.try_borrow_mut().ok()?.replace(last)));
        drop(before);
        Ok(stream)
    }

    fn known_stream(&self, handle: u64) -> Option<Stream> {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        streams.get(&handle).cloned()
    }

    /// Returns `true` if the handle's stream was used and has not ended.
    pub(crate) fn knows(&self, handle: u64) -> bool {
        self.known_stream(handle).is_some()
    }

    fn new_stream(&self, handle: u64) -> Result<Stream, Error> {
        let device = self.device_of(handle);
        let device = device.ok_or_else(|| Error::OtherContext(self.device.ordinal().0))?;
        // SAFETY: the library's caller vouches that the stream is one and stays one. By the
        // driver's answer it belongs to the device's context.
        let stream = unsafe { Stream::from_raw(device, StreamHandle(handle), Arc::new(())) }?;
        let is_full = |len: usize| len >= KEPT && len.is_multiple_of(KEPT);
        if is_full(
            self.streams
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .len(),
        ) {
            // The driver is asked without the lock.
            self.heap.refresh();
        }
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        let mut unused = HashMap::new();
        if is_full(streams.len()) {
            let all = std::mem::take(&mut *streams);
            (unused, *streams) = all.into_iter().partition(|(_, stream)| stream.is_last());
        }
        let stream = streams.entry(handle).or_insert(stream).clone();
        drop(streams);
        drop(unused);
        Ok(stream)
    }

    /// Returns the device in whose context a stream is: the heap's own or one with access to its
    /// memory. Default streams belong to each context, and a driver older than CUDA 9.2 does not
    /// name the context.
    fn device_of(&self, handle: u64) -> Option<&Device> {
        let Ok(ask) = self.driver.api().cuStreamGetCtx.get() else {
            return Some(&self.device);
        };
        if matches!(
            StreamHandle(handle),
            StreamHandle::NULL | StreamHandle::PER_THREAD
        ) {
            return Some(&self.device);
        }
        let stream = ptr::with_exposed_provenance_mut(usize::try_from(handle).unwrap_or(0));
        let mut found = ptr::null_mut();
        // SAFETY: the result is written to a local, and the library's caller vouches for the
        // stream.
        let code = unsafe { ask(stream, &mut found) };
        let mut devices = std::iter::once(&self.device).chain(&self.peers);
        devices.find(|device| {
            code == CUresult::CUDA_SUCCESS && self.driver.context(device.ordinal()) == Ok(found)
        })
    }
}

impl Settings {
    const fn apply<'a>(&self, builder: HeapBuilder<'a>) -> HeapBuilder<'a> {
        builder
            .preset(self.preset)
            .aliases(self.aliases)
            .stream_waits(self.waits)
    }

    fn with_rdma<'a>(&self, builder: PoolBuilder<'a>) -> Result<PoolBuilder<'a>, Error> {
        Ok(match self.rdma {
            Rdma::Auto => builder.rdma_if_supported()?,
            Rdma::On => builder.rdma_capable(true),
            Rdma::Off => builder,
        })
    }
}

pub(crate) fn held(pool: &Pool) -> u64 {
    held_of(&pool.stats())
}

pub(crate) const fn held_of(stats: &PoolStats) -> u64 {
    stats.committed + stats.free + stats.quarantined
}

/// Starts a device's mapper. The heap works without it too.
fn mapper(device: &Device) -> Option<Mapper> {
    match Mapper::start(device) {
        Ok(mapper) => Some(mapper),
        Err(error) => {
            message(&format!("no thread unmaps memory ahead: {error}"));
            None
        }
    }
}
