//! Host memory for copies to and from device memory: pinned by the driver, or allocated from the
//! system.
//!
//! `unsafe` is used because both kinds of memory come as pointers. Each allocation is divided once
//! into disjoint parts, every part has one owner, and the allocation is freed with the last part.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use cuvmm_driver::{CUresult, Call, DriverError};

use crate::deferred::defer;
use crate::device::Device;
use crate::error::CallError;

/// The system's page size.
const PAGE: usize = 4096;

struct HostMemory {
    base: NonNull<u8>,
    size: usize,
    origin: Origin,
}

enum Origin {
    Pinned(Device),
    System(Layout),
}

// SAFETY: plain memory, accessed only through its parts, which are disjoint.
unsafe impl Send for HostMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for HostMemory {}

impl Drop for HostMemory {
    /// Frees the memory. Its last owner may be a sleeping block, dropped under its pool's lock.
    fn drop(&mut self) {
        let (base, size) = (self.base.as_ptr(), self.size as u64);
        match &self.origin {
            Origin::Pinned(device) => {
                let device = device.clone();
                defer(move || free_pinned(&device, base, size));
            }
            // SAFETY: it was allocated with this layout, and no reference to it is left.
            Origin::System(layout) => unsafe { dealloc(base, *layout) },
        }
    }
}

/// Frees pinned memory without an owner (`cuMemFreeHost`).
fn free_pinned(device: &Device, base: *mut u8, size: u64) {
    // Otherwise the call breaks captures of other threads.
    let freed = device.relaxed(|| {
        // SAFETY: the caller owned the memory, and its last part is gone. Copies were waited for,
        // or the parts that they may use were leaked.
        device.give_back(Call::MemFreeHost, |driver, ordinal| unsafe {
            driver.host_free(ordinal, base)
        })
    });
    if let Err(error) = freed.and_then(|freed| freed) {
        device.report_drop("pinned host memory", size, error);
    }
}

/// A part of host memory with one owner. The allocation is freed with its last part.
pub(crate) struct HostPart {
    memory: Arc<HostMemory>,
    offset: usize,
    size: usize,
}

impl HostPart {
    /// Allocates `size` bytes, more than zero, of pinned memory (`cuMemHostAlloc`), reachable from
    /// each device, in parts of `part` bytes; the last may be smaller.
    pub(crate) fn pinned(
        device: &Device,
        size: usize,
        part: usize,
    ) -> Result<Vec<Self>, CallError> {
        // Otherwise the call breaks captures of other threads.
        let pointer = device.relaxed(|| {
            device.call(Call::MemHostAlloc, |driver, ordinal| {
                driver.host_alloc(ordinal, size as u64, PORTABLE)
            })
        })??;
        let none = || DriverError::new(Call::MemHostAlloc, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let base = NonNull::new(pointer).ok_or_else(none)?;
        let origin = Origin::Pinned(device.clone());
        Ok(Self::cut(HostMemory { base, size, origin }, part))
    }

    /// Allocates `size` zeroed bytes of the system's memory in parts of `part` bytes. `None` if the
    /// system does not have as much.
    pub(crate) fn ordinary(size: usize, part: usize) -> Option<Vec<Self>> {
        let layout = Layout::from_size_align(size, PAGE).ok()?;
        if size == 0 {
            return None;
        }
        // SAFETY: the layout is not of zero size.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let origin = Origin::System(layout);
        Some(Self::cut(HostMemory { base, size, origin }, part))
    }

    fn cut(memory: HostMemory, part: usize) -> Vec<Self> {
        let whole = memory.size;
        let memory = Arc::new(memory);
        let part = part.max(1);
        let offsets = (0..whole).step_by(part);
        offsets
            .map(|offset| Self {
                memory: Arc::clone(&memory),
                offset,
                size: part.min(whole - offset),
            })
            .collect()
    }

    /// Returns `true` if a device can access the part directly.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.memory.origin, Origin::Pinned(_))
    }

    pub(crate) const fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the part is within the allocation, which lives and is initialized (zeroed by the
        // system, any bytes from the driver), and this is its only owner.
        unsafe { std::slice::from_raw_parts(self.memory.base.as_ptr().add(self.offset), self.size) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the exclusive borrow excludes other accesses.
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.base.as_ptr().add(self.offset), self.size)
        }
    }

    /// Makes the system back the memory, which happens at the first write to each page.
    pub(crate) fn touch(&mut self) {
        self.bytes_mut()
            .iter_mut()
            .step_by(PAGE)
            // SAFETY: a valid, exclusive reference; volatile so that the write stays.
            .for_each(|byte| unsafe { std::ptr::from_mut(byte).write_volatile(0) });
    }
}

/// The flag that pins memory for all contexts (`CU_MEMHOSTALLOC_PORTABLE`).
const PORTABLE: u32 = 1;

impl fmt::Debug for HostPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPart")
            .field("pinned", &self.is_pinned())
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
