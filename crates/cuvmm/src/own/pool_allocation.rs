//! Stream-ordered memory of the driver's memory pools.
//!
//! `unsafe` is used to allocate, and to wrap memory that another library has allocated and keeps.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use cuvmm_driver::{Call, DeviceAddress, PointerAttribute};

use super::close::{CloseError, CloseRefusal};
use super::given_memory::GivenMemory;
use super::pool_memory::{Ownership, PoolMemory};
use super::processes::Recipients;
use super::{MemPool, Stream};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};

/// Memory of a [`MemPool`], allocated and freed in the order of a stream. Its contents are
/// undefined at first.
///
/// Its drop frees the memory behind the queued work of its stream and of the streams named to
/// [`record_use`](Self::record_use). The host does not wait. If its stream captures, or the driver
/// refuses, the memory stays allocated and counts in [`Device::leaked`](crate::Device::leaked).
///
/// An [`AllocationOffer`](crate::share::AllocationOffer) gives memory of a
/// [shareable](super::MemPoolBuilder::shareable) pool to another process.
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
    /// Dropped before the pool, which may end with the memory.
    memory: Arc<GivenMemory>,
    pool: MemPool,
}

impl MemPool {
    /// Allocates `size` bytes in the order of a stream (`cuStreamIsCapturing`,
    /// `cuMemAllocFromPoolAsync`).
    ///
    /// # Errors
    /// [`MemoryError`] when the size is 0, the stream captures or belongs to another device than
    /// the pool was created through, the pool is part of a [`TenantMemPool`](crate::TenantMemPool),
    /// or the pool has no more memory ([`is_out_of_memory`](MemoryError::is_out_of_memory)).
    #[doc(alias = "cuMemAllocFromPoolAsync")]
    pub fn allocate_on(&self, stream: &Stream, size: u64) -> Result<PoolAllocation, MemoryError> {
        self.check_not_managed()?;
        self.allocate_within(stream, size)
    }

    /// Allocates, also from a tenant's pool.
    pub(crate) fn allocate_within(
        &self,
        stream: &Stream,
        size: u64,
    ) -> Result<PoolAllocation, MemoryError> {
        ArgumentError::not_zero("bytes of an allocation", size)?;
        stream.check_on(self.device())?;
        self.free_some_returned();
        // The graph would own the memory.
        if stream.is_capturing()? {
            return Err(MemoryError::Capturing);
        }
        let allocated = match self.allocate(stream, size) {
            Err(cause) if cause.is_out_of_memory() && self.free_returned() => {
                self.allocate(stream, size)
            }
            allocated => allocated,
        };
        let address = allocated.map_err(|cause| MemoryError::Create {
            size,
            location: self.location(),
            cause,
        })?;
        Ok(self.holding(PoolMemory::new(stream, address, size, Ownership::Ours)))
    }

    fn allocate(&self, stream: &Stream, size: u64) -> Result<DeviceAddress, CallError> {
        let queue = stream.handle()?;
        self.call(Call::MemAllocFromPoolAsync, |driver, device, pool| {
            // SAFETY: both handles are alive.
            unsafe { driver.alloc_from_pool_async(device, size, pool, queue) }
        })
    }

    /// Wraps memory of this pool that another library has allocated and frees, for example with
    /// `cuMemAllocAsync` while the pool was [current](Self::make_current). It can then be given to
    /// another process.
    ///
    /// Makes three calls of `cuPointerGetAttribute`. Work of the memory's owner is queued on
    /// `stream`; other streams are named with [`record_use`](PoolAllocation::record_use).
    ///
    /// # Errors
    /// [`MemoryError::NotOfPool`] when the memory is of another pool or of none, and
    /// [`MemoryError`] when it begins elsewhere, is smaller than `size`, or the stream belongs to
    /// another device.
    ///
    /// # Safety
    /// The memory must stay allocated while the returned value lives, and after that while
    /// [`is_held`](PoolAllocation::is_held) would be `true`.
    pub unsafe fn borrow(
        &self,
        stream: &Stream,
        address: DeviceAddress,
        size: u64,
    ) -> Result<PoolAllocation, MemoryError> {
        ArgumentError::not_zero("bytes of an allocation", size)?;
        stream.check_on(self.device())?;
        self.device().usable()?;
        let wanted = PointerAttribute::MEMPOOL_HANDLE;
        let ask = |attribute| attribute_of(self.device(), address, attribute);
        if ask(wanted).ok() != Some(self.as_raw().0) {
            return Err(MemoryError::NotOfPool(address.0));
        }
        let start = ask(PointerAttribute::RANGE_START_ADDR)?;
        let there = ask(PointerAttribute::RANGE_SIZE)?;
        let offset = address.0.saturating_sub(start);
        if offset != 0 || size > there {
            return Err(ArgumentError::bytes(offset, size, there).into());
        }
        Ok(self.holding(PoolMemory::new(stream, address, size, Ownership::Borrowed)))
    }

    fn holding(&self, memory: PoolMemory) -> PoolAllocation {
        PoolAllocation {
            pool: self.clone(),
            memory: Arc::new(GivenMemory::new(memory)),
        }
    }
}

pub(super) fn attribute_of(
    device: &Device,
    address: DeviceAddress,
    attribute: PointerAttribute,
) -> Result<u64, CallError> {
    device.call(Call::PointerGetAttribute, |driver, device| {
        driver.pointer_attribute(device, address, attribute)
    })
}

impl PoolAllocation {
    /// Returns the first address, which the driver chose.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.memory.memory().address()
    }

    /// Returns the size in bytes, as requested.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.memory.memory().size()
    }

    /// Returns the pool.
    #[must_use]
    pub const fn pool(&self) -> &MemPool {
        &self.pool
    }

    /// Returns the stream that the memory is allocated and freed on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.memory.memory().stream()
    }

    /// Returns `true` if another process that was [given](crate::share::AllocationOffer) the memory
    /// may still use it. A drop does not free such memory. Once the process has released it or has
    /// ended, one of the next allocations from its pool,
    /// [`held_elsewhere`](MemPool::held_elsewhere) or [`close`](MemPool::close) frees it.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.memory.is_held()
    }

    /// Copies bytes to the host behind the stream's queued work. The stream
    /// [uses](Self::record_use) the memory from then on (`cuMemcpyDtoHAsync`,
    /// `cuStreamSynchronize`).
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not within the memory, the stream belongs to another
    /// device, or the driver refuses.
    pub fn read(&self, stream: &Stream, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.memory.memory().read(stream, offset, bytes)
    }

    /// Writes bytes behind the stream's queued work, and waits for the copy. The stream
    /// [uses](Self::record_use) the memory from then on (`cuMemcpyHtoDAsync`,
    /// `cuStreamSynchronize`).
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not within the memory, the stream belongs to another
    /// device, or the driver refuses.
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.memory.memory().write(stream, offset, bytes)
    }

    /// Lets work of another stream use the memory. The stream's later work runs behind the
    /// allocation, and the memory is freed behind all work that the stream has queued by then
    /// (`cuEventCreate`, `cuEventRecord`, `cuStreamWaitEvent`, `cuEventDestroy`). The stream may
    /// belong to another device with [access](MemPool::set_access) to the pool.
    ///
    /// # Errors
    /// [`CallError`] when the stream belongs to another driver, one of the streams captures, or the
    /// driver refuses. The stream must not use the memory then.
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        self.memory.memory().record_use(stream)
    }

    pub(crate) fn settle(&self) -> Result<(), MemoryError> {
        let memory = self.memory.memory();
        // A wait would break a capture.
        if memory.is_captured()? {
            return Err(MemoryError::Capturing);
        }
        Ok(memory.settle()?)
    }

    /// Returns another owner of the memory, which is freed with its last owner.
    pub(crate) fn share(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            memory: Arc::clone(&self.memory),
        }
    }

    /// Notes processes that are about to get the memory. It is not freed before they release it.
    pub(crate) fn hold(&self, holder: Arc<dyn Recipients>) {
        self.memory.hold(holder);
    }

    /// Frees the memory in the order of its stream (`cuMemFreeAsync`, and for each other stream
    /// the calls of [`record_use`](Self::record_use)), or returns it with the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the allocation in it when one of its streams captures, an offer or
    /// another process still has it, or the driver refuses.
    #[doc(alias = "cuMemFreeAsync")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        self.pool.free_returned();
        let freed = match Arc::get_mut(&mut self.memory) {
            Some(memory) if !memory.is_held() => memory.free().map_err(CloseRefusal::Call),
            _ => Err(CloseRefusal::InUse),
        };
        CloseError::of(self, freed)
    }
}

impl Drop for PoolAllocation {
    fn drop(&mut self) {
        // Otherwise the memory is freed with its last owner.
        if self.memory.is_held() {
            self.pool.keep(&self.memory);
        }
    }
}

impl fmt::Debug for PoolAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolAllocation")
            .field("address", &self.address())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}
