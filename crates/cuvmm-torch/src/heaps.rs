//! The heap of each device, and the streams that PyTorch names.
//!
//! `unsafe` is used to wrap the streams, for which the caller of the library's functions vouches, and
//! to ask the driver for their contexts.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::{CUresult, StreamHandle};
use cuvmm::{CallError, Device, Heap, Limit, Pool, Stream};

use crate::error::{DEVICES, Error};
use crate::fork;
use crate::settings::{LIMIT, Settings};

/// The name of the tenant in messages.
const TENANT: &str = "torch";

/// The heaps, by the device's number. They are never dropped: when the process exits, the driver may
/// be gone before the statics of this library would be, and the driver gives all memory back then.
static HEAPS: [OnceLock<DeviceHeap>; DEVICES] = [const { OnceLock::new() }; DEVICES];

/// The driver, which is opened for the first heap. Held while a heap is made.
static DRIVER: Mutex<Option<Arc<CudaDriver>>> = Mutex::new(None);

/// A device's heap.
pub(crate) struct DeviceHeap {
    driver: Arc<CudaDriver>,
    pub(crate) heap: Heap,
    pub(crate) pool: Pool,
    /// Streams by their handles. One that is used for two allocations has one table of events.
    streams: RwLock<HashMap<u64, Stream>>,
    /// Allocations that returned null since the heap was made.
    pub(crate) failed: AtomicU64,
}

/// Returns a device's heap, if there is one already.
pub(crate) fn known(device: i32) -> Option<&'static DeviceHeap> {
    HEAPS.get(usize::try_from(device).ok()?)?.get()
}

/// Returns a device's heap, which is made now if there is none. A failure is not remembered: the
/// next allocation tries again.
pub(crate) fn of(device: i32) -> Result<&'static DeviceHeap, Error> {
    let index = usize::try_from(device).map_err(|_| Error::NoSuchDevice)?;
    let place = HEAPS.get(index).ok_or(Error::NoSuchDevice)?;
    if let Some(heap) = place.get() {
        return Ok(heap);
    }
    fork::watch();
    let settings = Settings::read()?;
    let mut driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(heap) = place.get() {
        return Ok(heap);
    }
    let driver = match &*driver {
        Some(driver) => Arc::clone(driver),
        None => Arc::clone(driver.insert(Arc::new(CudaDriver::open()?))),
    };
    let heap = DeviceHeap::new(driver, index, settings)?;
    Ok(place.get_or_init(|| heap))
}

/// Trims all heaps. Returns the devices whose trim failed.
pub(crate) fn trim() -> Vec<(usize, CallError)> {
    if fork::is_child() {
        return Vec::new();
    }
    let heaps = HEAPS.iter().enumerate();
    let failed = |(device, place): (usize, &OnceLock<DeviceHeap>)| {
        let DeviceHeap { heap, pool, .. } = place.get()?;
        // The first gives extents to the pool, the second what the pool has to the driver.
        let trimmed = heap.trim().and_then(|_| pool.trim(0));
        Some((device, trimmed.err()?))
    };
    heaps.filter_map(failed).collect()
}

/// Counts an allocation that failed.
pub(crate) fn note_failure(device: i32) {
    if let Some(heap) = known(device) {
        heap.failed.fetch_add(1, Ordering::Relaxed);
    }
}

impl DeviceHeap {
    /// Builds a heap in the device's primary context. Takes no memory yet.
    fn new(driver: Arc<CudaDriver>, index: usize, settings: Settings) -> Result<Self, Error> {
        let device = Device::open(driver.clone(), u32::try_from(index).unwrap_or(u32::MAX))?;
        let mut pool = Pool::builder(&device);
        if let Some(value) = settings.limit {
            let (least, most) = (device.granularity(), device.total_memory());
            if !(least..=most).contains(&value) {
                return Err(Error::Limit {
                    name: LIMIT,
                    value,
                    least,
                    most,
                });
            }
            pool = pool.limit(Limit::Bytes(value));
        }
        let pool = pool.build()?;
        let tenant = pool.tenant(TENANT).register()?;
        let heap = Heap::builder(&tenant)
            .preset(settings.preset)
            .aliases(settings.aliases)
            .stream_waits(settings.waits)
            .build()?;
        Ok(Self {
            driver,
            heap,
            pool,
            streams: RwLock::default(),
            failed: AtomicU64::new(0),
        })
    }

    /// Returns the stream of a handle.
    ///
    /// # Errors
    /// The per-thread default stream: another thread could not wait for its work. A stream of another
    /// device or context, whose work the heap cannot wait for.
    pub(crate) fn stream(&self, handle: u64) -> Result<Stream, Error> {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = streams.get(&handle) {
            return Ok(stream.clone());
        }
        drop(streams);
        let device = self.heap.device();
        // SAFETY: the caller of the library's functions vouches that the stream is one and stays
        // one. The driver says below that it belongs to the context in which the heap works.
        let stream = unsafe { Stream::from_raw(device, StreamHandle(handle), Arc::new(())) }?;
        if !self.has(handle) {
            return Err(Error::OtherContext(device.ordinal().0));
        }
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        Ok(streams.entry(handle).or_insert(stream).clone())
    }
    /// Returns `true` if a stream belongs to the context in which the heap works. A default stream
    /// belongs to each context, and a driver older than CUDA 9.2 does not say.
    fn has(&self, handle: u64) -> bool {
        let Ok(ask) = self.driver.api().cuStreamGetCtx.get() else {
            return true;
        };
        if handle == StreamHandle::NULL.0 {
            return true;
        }
        let stream = std::ptr::with_exposed_provenance_mut(usize::try_from(handle).unwrap_or(0));
        let mut found = std::ptr::null_mut();
        // SAFETY: the result is written to a local, and the caller of the library's functions
        // vouches for the stream.
        let code = unsafe { ask(stream, &mut found) };
        let ours = self.driver.context(self.heap.device().ordinal());
        code == CUresult::CUDA_SUCCESS && ours == Ok(found)
    }
}
