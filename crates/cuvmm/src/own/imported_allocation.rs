//! Allocations of other processes' memory pools.
//!
//! `unsafe` is used to import. The imported pool is alive; the imported memory is owned here and
//! freed once.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cuvmm_driver::{Call, DeviceAddress, Location, MemPoolTicket, PointerAttribute};

use super::close::CloseError;
use super::imported_pool::ImportedPool;
use super::pool_allocation::attribute_of;
use super::pool_memory::{Ownership, PoolMemory};
use super::processes::GivingProcess;
use super::{Access, Stream};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};
use crate::size::range_within;

/// The longest wait of an import until the allocation is freed.
const PATIENCE: Duration = Duration::from_secs(10);

/// The given part of an allocation, with the exporter's description.
#[derive(Clone, Debug)]
pub(crate) struct AllocationPart {
    pub(crate) ticket: MemPoolTicket,
    /// The bytes of the whole allocation.
    pub(crate) size: u64,
    pub(crate) range: Range<u64>,
}

impl ImportedPool {
    /// Imports an allocation of the pool (`cuMemPoolImportPointer`, and `cuPointerGetAttribute`
    /// three times to check it).
    ///
    /// # Errors
    /// [`MemoryError`] when the data is of another pool, the allocation is smaller than `size` or
    /// on another device, the stream belongs to another device, or the driver refuses; with
    /// [`CallError::InUse`] when this process is freeing the allocation and its work takes longer
    /// than 10 seconds.
    ///
    /// # Safety
    /// Until the returned value is dropped or closed, the exporter must neither free the allocation
    /// nor end. The allocation must be complete on its stream in the exporter. It must not be
    /// imported through another import of the pool at the same time: the driver may give both the
    /// same address, and the first to end would free it.
    #[doc(alias = "cuMemPoolImportPointer")]
    pub unsafe fn import_allocation(
        &self,
        stream: &Stream,
        ticket: MemPoolTicket,
        size: u64,
    ) -> Result<ImportedAllocation, MemoryError> {
        let range = 0..size;
        let part = AllocationPart {
            ticket,
            size,
            range,
        };
        self.import_part(stream, &part, Access::ReadWrite, None, PATIENCE)
    }

    /// Imports part of an allocation, which `giver` keeps. If this process is freeing the
    /// allocation, waits for that, at most `patience`.
    pub(crate) fn import_part(
        &self,
        stream: &Stream,
        part: &AllocationPart,
        access: Access,
        giver: Option<Arc<dyn GivingProcess>>,
        patience: Duration,
    ) -> Result<ImportedAllocation, MemoryError> {
        ArgumentError::not_zero("bytes of an allocation", part.size)?;
        let (offset, length) = (
            part.range.start,
            part.range.end.saturating_sub(part.range.start),
        );
        if length == 0 || range_within(offset, length, part.size).is_none() {
            return Err(ArgumentError::bytes(offset, length, part.size).into());
        }
        stream.check_on(self.device())?;
        self.device().own_process()?;
        // The import could not be freed again if a later step fails.
        if stream.is_capturing()? {
            return Err(MemoryError::Capturing);
        }
        let memory = self.join(&part.ticket, giver.as_ref(), patience, || {
            self.import_pointer(stream, part)
        })?;
        // Owned from here on, so that a refusal frees it.
        let imported = ImportedAllocation {
            memory,
            range: part.range.clone(),
            access,
            pool: self.clone(),
            giver,
            left: false,
            ended: false,
        };
        let checked = imported.check(part.size);
        match checked.and_then(|()| Ok(imported.record_use(stream)?)) {
            Ok(()) => Ok(imported),
            Err(error) => {
                imported.discard();
                Err(error)
            }
        }
    }

    fn import_pointer(
        &self,
        stream: &Stream,
        part: &AllocationPart,
    ) -> Result<PoolMemory, MemoryError> {
        let pool = self.as_raw();
        let imported = self
            .device()
            .call(Call::MemPoolImportPointer, |driver, device| {
                // SAFETY: the handle is alive.
                unsafe { driver.mem_pool_import_pointer(device, pool, &part.ticket) }
            });
        let address = imported.map_err(MemoryError::ImportPointer)?;
        Ok(PoolMemory::new(stream, address, part.size, Ownership::Ours))
    }
}

/// An allocation of another process's memory pool, or part of one. It is no copy: writes of either
/// process are visible in both.
///
/// Its drop frees the memory in this process, behind the work of its stream and of the streams
/// named to [`record_use`](Self::record_use), waits for that, and then tells the giver, which may
/// free the memory from then on. If one of its streams captures at the drop, the memory stays
/// imported and the giver keeps it until this process ends.
///
/// The memory ends with the giver. [`read`](Self::read), [`write`](Self::write) and
/// [`check_giver`](Self::check_giver) then return [`MemoryError::GiverGone`]. A kernel may read
/// anything.
///
/// [`Channel::recv_allocations`](crate::Channel::recv_allocations) shows how to get one.
#[must_use = "the memory is let go when this is dropped"]
pub struct ImportedAllocation {
    memory: Arc<PoolMemory>,
    range: Range<u64>,
    access: Access,
    pool: ImportedPool,
    giver: Option<Arc<dyn GivingProcess>>,
    /// Set once this value no longer uses the memory, except in pending work.
    left: bool,
    /// Set once the pending work is complete.
    ended: bool,
}

impl ImportedAllocation {
    /// Checks the driver's figures of the memory against its description.
    fn check(&self, size: u64) -> Result<(), MemoryError> {
        let base = self.memory.address();
        let ask = |attribute| attribute_of(self.device(), base, attribute);
        let start = ask(PointerAttribute::RANGE_START_ADDR)?;
        let there = ask(PointerAttribute::RANGE_SIZE)?;
        let there = there.saturating_sub(base.0.saturating_sub(start));
        // An earlier import may have had a smaller size.
        let there = there.min(self.memory.size());
        if there < size {
            return Err(ArgumentError::bytes(0, size, there).into());
        }
        let device = ask(PointerAttribute::DEVICE_ORDINAL)?;
        let wanted = self.device().location();
        match i32::try_from(device) {
            Ok(id) if id == wanted.id => Ok(()),
            _ => Err(MemoryError::Elsewhere {
                offset: 0,
                found: Location {
                    id: i32::try_from(device).unwrap_or(-1),
                    ..wanted
                },
                wanted,
            }),
        }
    }

    /// Returns the first address in this process, which differs from the giver's.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        let base = self.memory.address();
        base.checked_add(self.range.start).unwrap_or(base)
    }

    /// Returns the size of the given part in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Returns the access that the giver grants. The driver does not enforce it.
    #[must_use]
    pub const fn access(&self) -> Access {
        self.access
    }

    /// Returns the pool.
    #[must_use]
    pub const fn pool(&self) -> &ImportedPool {
        &self.pool
    }

    /// Returns the stream that the memory is freed on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.memory.stream()
    }

    fn device(&self) -> &Device {
        self.memory.device()
    }

    /// Lets work of another stream use the memory, which is then freed behind all work that the
    /// stream has queued by then (`cuEventCreate`, `cuEventRecord`, `cuStreamWaitEvent`,
    /// `cuEventDestroy`).
    ///
    /// # Errors
    /// [`CallError`] when the stream belongs to another driver, one of the streams captures, or the
    /// driver refuses. The stream must not use the memory then.
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        self.memory.record_use(stream)
    }

    /// Checks that the giver still keeps the memory, as far as is known.
    ///
    /// # Errors
    /// [`MemoryError::GiverGone`], and [`MemoryError`] in a forked child.
    pub fn check_giver(&self) -> Result<(), MemoryError> {
        self.device().own_process()?;
        match &self.giver {
            Some(giver) if !giver.keeps() => Err(MemoryError::GiverGone),
            _ => Ok(()),
        }
    }

    fn within(&self, offset: u64, size: usize) -> Result<u64, MemoryError> {
        self.check_giver()?;
        range_within(offset, size as u64, self.size())
            // Memory whose close failed may have been freed.
            .filter(|_| !self.left)
            .and_then(|range| range.start.checked_add(self.range.start))
            .ok_or(ArgumentError::bytes(offset, size as u64, self.size()).into())
    }

    /// Copies bytes to the host behind the stream's queued work. The stream
    /// [uses](Self::record_use) the memory from then on (`cuMemcpyDtoHAsync`,
    /// `cuStreamSynchronize`).
    ///
    /// # Errors
    /// [`MemoryError`] when the giver is gone, the range is not within the memory, the stream
    /// belongs to another device, or the driver refuses.
    pub fn read(&self, stream: &Stream, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let at = self.within(offset, bytes.len())?;
        self.memory.read(stream, at, bytes)?;
        // Bytes read after the end of the giver may be another owner's.
        self.check_giver()
    }

    /// Writes bytes behind the stream's queued work, and waits for the copy. The stream
    /// [uses](Self::record_use) the memory from then on (`cuMemcpyHtoDAsync`,
    /// `cuStreamSynchronize`).
    ///
    /// # Errors
    /// [`MemoryError`] when the memory was given for reading, and as for [`read`](Self::read).
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.device().own_process()?;
        if self.access != Access::ReadWrite {
            return Err(MemoryError::ReadOnly(0..self.size()));
        }
        let at = self.within(offset, bytes.len())?;
        self.memory.write(stream, at, bytes)
    }

    /// Frees the memory in this process like a drop (`cuMemFreeAsync`, `cuStreamSynchronize`), or
    /// returns the value with the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the allocation in it when one of its streams captures or the driver
    /// refuses.
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let ended = self.end();
        CloseError::of(self, ended)
    }

    /// Ends a use without work. Waits for nothing if another value uses the memory, which then
    /// frees it.
    fn discard(mut self) {
        if self.pool.leave(&self.memory) {
            self.pool.stay(&self.memory);
        } else {
            (self.left, self.ended) = (true, true);
        }
    }

    fn end(&mut self) -> Result<(), CallError> {
        if self.ended {
            return Ok(());
        }
        self.device().own_process()?;
        // A wait would break a capture.
        if self.memory.is_captured()? {
            return Err(CallError::InUse);
        }
        if self.left {
            self.memory.settle()?;
        } else {
            self.leave()?;
        }
        self.ended = true;
        Ok(())
    }

    /// Waits for the work of this value without a lock, and frees the memory after its last use.
    /// The giver frees it afterwards.
    fn leave(&mut self) -> Result<(), CallError> {
        let last = self.pool.leave(&self.memory);
        if last && let Err(error) = self.memory.free() {
            self.pool.stay(&self.memory);
            return Err(error);
        }
        self.left = true;
        let settled = self.memory.settle();
        if last && let Some(first) = self.pool.freed(&self.memory) {
            keep_unless(settled.is_ok(), first);
        }
        settled
    }
}

impl Drop for ImportedAllocation {
    fn drop(&mut self) {
        let Err(error) = self.end() else { return };
        let (device, size) = (self.memory.device(), self.memory.size());
        // A lost context takes its memory with it, and nothing runs there.
        let lost = device.lost().is_some();
        if !device.is_forked() {
            if lost && !self.left && self.pool.leave(&self.memory) {
                drop(self.pool.freed(&self.memory));
            } else if !lost && !self.left && self.pool.keep(&self.memory) {
                device.report_leak(size);
            }
            if let Some(giver) = self.giver.take() {
                keep_unless(lost, giver);
            }
        }
        if !lost {
            device.report_drop("imported allocation", size, error);
        }
    }
}

/// Tells the giver, or lets it keep its memory until this process has ended.
fn keep_unless(done: bool, giver: Arc<dyn GivingProcess>) {
    if !done {
        std::mem::forget(giver);
    }
}

impl fmt::Debug for ImportedAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportedAllocation")
            .field("address", &self.address())
            .field("size", &self.size())
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}
