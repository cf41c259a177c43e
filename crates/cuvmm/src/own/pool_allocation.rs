//! Stream-ordered memory of the driver's memory pools.
//!
//! `unsafe` is used to allocate and to free. The pool and the stream are kept alive here; the
//! memory is owned here and freed once, behind the work of every stream that was named.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{Call, DeviceAddress};

use super::close::{CloseError, CloseRefusal};
use super::{Event, MemPool, Stream};
use crate::error::{ArgumentError, CallError, MemoryError};

/// Memory of a [`MemPool`], allocated and freed in the order of a stream. Its contents are
/// undefined at first.
///
/// Dropping it frees the memory behind the work that its stream has queued, and behind the work of
/// the streams named to [`record_use`](Self::record_use). Nothing is waited for on the host.
///
/// The memory stays allocated, and is counted in [`Device::leaked`](crate::Device::leaked), if it
/// is dropped while its stream captures or if the driver refuses.
///
/// ```rust
/// # use cuvmm::driver::auto;
/// # use cuvmm::{Device, MemPool, Stream};
/// # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
/// let (stream, other) = (Stream::new(&device)?, Stream::new(&device)?);
/// let pool = MemPool::default_of(&device)?;
/// let memory = pool.allocate_on(&stream, 1 << 20)?;
/// // Work of `stream` may use it at once, work of `other` from here on:
/// memory.record_use(&other)?;
/// memory.close()?; // as dropping it, with the driver's answer
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "cuMemAllocFromPoolAsync")]
#[doc(alias = "cudaMallocAsync")]
#[must_use = "the memory is freed when this is dropped"]
pub struct PoolAllocation {
    pool: MemPool,
    stream: Stream,
    address: DeviceAddress,
    size: u64,
    /// The other streams that use the memory.
    others: Mutex<Vec<Stream>>,
    freed: bool,
}

impl MemPool {
    /// Allocates `size` bytes in the order of a stream (`cuStreamIsCapturing`,
    /// `cuMemAllocFromPoolAsync`).
    ///
    /// # Errors
    /// [`MemoryError`] when the size is 0, the stream belongs to another device than the pool was
    /// created through, the stream captures, the pool is a part of a
    /// [`TenantMemPool`](crate::TenantMemPool), or the pool has no more memory
    /// ([`is_out_of_memory`](MemoryError::is_out_of_memory)).
    #[doc(alias = "cuMemAllocFromPoolAsync")]
    pub fn allocate_on(&self, stream: &Stream, size: u64) -> Result<PoolAllocation, MemoryError> {
        self.check_not_managed()?;
        self.allocate_within(stream, size)
    }

    /// Allocates in the order of a stream, also from a pool that belongs to a tenant.
    pub(crate) fn allocate_within(
        &self,
        stream: &Stream,
        size: u64,
    ) -> Result<PoolAllocation, MemoryError> {
        ArgumentError::not_zero("bytes of an allocation", size)?;
        if !stream.device().is_same(self.device()) {
            return Err(ArgumentError::STREAM.into());
        }
        // The graph would own the memory.
        if stream.is_capturing()? {
            return Err(MemoryError::Capturing);
        }
        let (pool, queue) = (self.as_raw(), stream.as_raw());
        let address = self
            .device()
            .call(Call::MemAllocFromPoolAsync, |driver, device| {
                // SAFETY: both handles are alive.
                unsafe { driver.alloc_from_pool_async(device, size, pool, queue) }
            })
            .map_err(|cause| MemoryError::Create {
                size,
                location: self.location(),
                cause,
            })?;
        Ok(PoolAllocation {
            pool: self.clone(),
            stream: stream.clone(),
            address,
            size,
            others: Mutex::default(),
            freed: false,
        })
    }
}

impl PoolAllocation {
    /// Returns the first address, which the driver chose.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Returns the size in bytes, as requested.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the pool.
    #[must_use]
    pub const fn pool(&self) -> &MemPool {
        &self.pool
    }

    /// Returns the stream that the memory is allocated and freed on.
    #[must_use]
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Lets work of another stream use the memory: work that is queued on it from now on runs
    /// behind the allocation, and the memory is freed behind the work that it has queued by then
    /// (`cuEventCreate`, `cuEventRecord`, `cuStreamWaitEvent`, `cuEventDestroy`).
    ///
    /// The stream may belong to another device with [access](MemPool::set_access) to the pool.
    ///
    /// # Errors
    /// [`CallError`] when the stream belongs to another driver, one of the streams captures, or the
    /// driver refuses. The stream must not use the memory then.
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        if !stream.device().same_driver(self.stream.device()) {
            return Err(CallError::WrongDriver);
        }
        self.stream.device().own_process()?;
        let mut others = self.others();
        if *stream == self.stream || others.contains(stream) {
            return Ok(());
        }
        if self.stream.is_capturing()? || stream.is_capturing()? {
            return Err(CallError::InUse);
        }
        run_behind(stream, &self.stream)?;
        others.push(stream.clone());
        Ok(())
    }

    fn others(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the memory in the order of its stream (`cuMemFreeAsync`, and for each other stream
    /// the calls of [`record_use`](Self::record_use)), or returns it with the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the allocation in it when one of its streams captures or the driver
    /// refuses.
    #[doc(alias = "cuMemFreeAsync")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        self.free().map_err(|cause| CloseError {
            owner: self,
            reason: CloseRefusal::Call(cause),
        })
    }

    fn free(&mut self) -> Result<(), CallError> {
        if self.freed {
            return Ok(());
        }
        let device = self.stream.device();
        device.own_process()?;
        let others = self.others.get_mut();
        let others = others.unwrap_or_else(PoisonError::into_inner);
        // A captured free would be a node of the graph.
        if self.stream.is_capturing()? {
            return Err(CallError::InUse);
        }
        // Each stream that is waited for is struck off, so that trying again does not repeat it.
        while let Some(other) = others.last() {
            if other.is_capturing()? {
                return Err(CallError::InUse);
            }
            run_behind(&self.stream, other)?;
            others.pop();
        }
        let (address, queue) = (self.address, self.stream.as_raw());
        device.give_back(Call::MemFreeAsync, |driver, device| {
            // SAFETY: the memory is owned here and is freed once: `freed` is set below, and a
            // refused call has changed nothing. The stream is behind all work that was named.
            unsafe { driver.free_async(device, address, queue) }
        })?;
        self.freed = true;
        Ok(())
    }
}

/// Makes later work of a stream wait for the work that another one has queued.
fn run_behind(stream: &Stream, other: &Stream) -> Result<(), CallError> {
    let event = Event::new(other.device())?;
    event.record(other)?;
    stream.wait(&event)
}

impl Drop for PoolAllocation {
    fn drop(&mut self) {
        let freed = self.free();
        let device = self.stream.device();
        // The memory of a lost context is gone with it.
        if let (Err(error), None) = (freed, device.lost()) {
            if !device.is_forked() {
                device.report_leak(self.size);
            }
            device.report_drop("pool allocation", self.size, error);
        }
    }
}

impl fmt::Debug for PoolAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolAllocation")
            .field("address", &self.address)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
