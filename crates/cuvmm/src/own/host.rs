//! Memory of the host that a device's memory is copied to and from: pinned by the driver, or the
//! system's own.
//!
//! `unsafe` here: the driver's pinned memory and the system's come as pointers. Each is cut once
//! into parts that do not meet, every part has one owner, and the whole goes with the last of them.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use cuvmm_driver::{CUresult, Call, DriverError};

use crate::device::Device;
use crate::error::CallError;

/// What the system's memory is aligned to: its pages.
const PAGE: usize = 4096;

/// One allocation.
struct HostMemory {
    base: NonNull<u8>,
    size: usize,
    origin: Origin,
}

enum Origin {
    /// Pinned through a device's driver.
    Pinned(Device),
    System(Layout),
}

// SAFETY: it is memory, and only its parts, which do not meet, give access to it.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl Drop for HostMemory {
    fn drop(&mut self) {
        match &self.origin {
            Origin::Pinned(device) => {
                let base = self.base.as_ptr();
                // SAFETY: the memory is ours, and with the last part the last reference into it has
                // gone; copies were waited for, or the parts that they may use were forgotten.
                let freed = device.give_back(Call::MemFreeHost, |driver, ordinal| unsafe {
                    driver.host_free(ordinal, base)
                });
                if let Err(error) = freed {
                    device.report_drop("pinned host memory", self.size as u64, error);
                }
            }
            // SAFETY: it was allocated with this layout, and nobody refers to it any more.
            Origin::System(layout) => unsafe { dealloc(self.base.as_ptr(), *layout) },
        }
    }
}

/// A part of host memory, with one owner. The memory is freed with the last part of it.
pub(crate) struct HostPart {
    memory: Arc<HostMemory>,
    offset: usize,
    size: usize,
}

impl HostPart {
    /// `size` bytes, more than none, of pinned memory (`cuMemHostAlloc`), reachable from every
    /// device, cut into parts of `part` bytes; the last may be smaller.
    pub(crate) fn pinned(
        device: &Device,
        size: usize,
        part: usize,
    ) -> Result<Vec<Self>, CallError> {
        let pointer = device.call(Call::MemHostAlloc, |driver, ordinal| {
            driver.host_alloc(ordinal, size as u64, PORTABLE)
        })?;
        let none = || DriverError::new(Call::MemHostAlloc, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let base = NonNull::new(pointer).ok_or_else(none)?;
        let origin = Origin::Pinned(device.clone());
        Ok(Self::cut(HostMemory { base, size, origin }, part))
    }

    /// The same of the system's own memory, which reads as zero; nothing if there is not so much.
    pub(crate) fn ordinary(size: usize, part: usize) -> Option<Vec<Self>> {
        let layout = Layout::from_size_align(size, PAGE).ok()?;
        if size == 0 {
            return None;
        }
        // SAFETY: the layout is not of no bytes.
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

    /// Whether a device reaches it as it is.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.memory.origin, Origin::Pinned(_))
    }

    /// Its size in bytes.
    pub(crate) const fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the part lies in the allocation, which lives, is initialised (zeroed by the
        // system, any bytes from the driver), and this is its only owner.
        unsafe { std::slice::from_raw_parts(self.memory.base.as_ptr().add(self.offset), self.size) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and nobody else has it while the borrow lasts.
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.base.as_ptr().add(self.offset), self.size)
        }
    }

    /// Has the system put memory behind it, which it does at the first touch of each page.
    pub(crate) fn touch(&mut self) {
        self.bytes_mut()
            .iter_mut()
            .step_by(PAGE)
            // SAFETY: a valid, exclusive reference; volatile so that it is not left out.
            .for_each(|byte| unsafe { std::ptr::from_mut(byte).write_volatile(0) });
    }
}

/// Pinned for all contexts (`CU_MEMHOSTALLOC_PORTABLE`).
const PORTABLE: u32 = 1;

impl fmt::Debug for HostPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPart")
            .field("pinned", &self.is_pinned())
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
