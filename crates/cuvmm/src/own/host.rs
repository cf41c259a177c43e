//! Host memory for copies to and from device memory: pages of the process, pinned by the driver or
//! not, or memory that the driver allocates.
//!
//! `unsafe` is used because the memory comes as pointers. Each allocation is divided once into
//! disjoint parts, every part has one owner, and the allocation is freed with the last part.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use cuvmm_driver::{CUresult, Call, DriverError};

use super::pages::Pages;
use crate::deferred::defer;
use crate::device::Device;
use crate::error::CallError;

/// The smallest page size of the systems that the library runs on.
const PAGE: usize = 4096;

/// The flag that pins memory for all contexts (`CU_MEMHOSTALLOC_PORTABLE`,
/// `CU_MEMHOSTREGISTER_PORTABLE`).
const PORTABLE: u32 = 1;

/// The states of an allocation. A later one is a greater number.
mod state {
    /// No part has bytes: the system may have no memory behind it.
    pub(super) const MAPPED: u8 = 0;
    pub(super) const PAGEABLE: u8 = 1;
    pub(super) const PINNED: u8 = 2;
}

struct HostMemory {
    device: Device,
    base: NonNull<u8>,
    size: usize,
    /// The pages; without, the driver allocated the memory.
    pages: Option<Pages>,
    state: AtomicU8,
    is_kept: AtomicBool,
}

// SAFETY: plain memory, accessed only through its parts, which are disjoint, and before that by
// the one `Piece`.
unsafe impl Send for HostMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    fn is(&self, state: u8) -> bool {
        self.state.load(Ordering::Acquire) >= state
    }
}

impl Drop for HostMemory {
    /// Frees the memory. Its last owner may be a sleeping block, dropped under its pool's lock.
    fn drop(&mut self) {
        let pinned = self.is(state::PINNED);
        let (device, base, size) = (self.device.clone(), self.base.as_ptr(), self.size as u64);
        let pages = self.pages.take();
        defer(move || match (pages, pinned) {
            // A child has not inherited the pages: at their addresses may be other memory.
            (Some(pages), _) if device.is_forked() => std::mem::forget(pages),
            (Some(pages), false) => drop(pages),
            (Some(pages), true) => unregister(&device, pages, size),
            (None, _) => free(&device, base, size),
        });
    }
}

/// Frees memory that the driver allocated (`cuMemFreeHost`).
fn free(device: &Device, base: *mut u8, size: u64) {
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

/// Unregisters pages (`cuMemHostUnregister`) and unmaps them. If the driver refuses, they stay:
/// devices could still reach them.
fn unregister(device: &Device, pages: Pages, size: u64) {
    // A panic of the driver does not unmap them either.
    let pages = ManuallyDrop::new(pages);
    let base = pages.base().as_ptr();
    let unregistered = device.relaxed(|| {
        // SAFETY: as in `free`.
        device.give_back(Call::MemHostUnregister, |driver, ordinal| unsafe {
            driver.host_unregister(ordinal, base)
        })
    });
    match unregistered.and_then(|unregistered| unregistered) {
        Ok(()) => drop(ManuallyDrop::into_inner(pages)),
        Err(error) => device.report_drop("registered host memory", size, error),
    }
}

/// Host memory on its way to use: its parts exist, and have no bytes before it is finished. Unless
/// it is [kept](Self::keep), it is freed as soon as its parts are no longer in use.
pub(crate) struct Piece {
    memory: Arc<HostMemory>,
}

impl Piece {
    /// Maps `size` bytes, more than zero, and divides them into parts of `part` bytes; the last may
    /// be smaller. Returns `None` if the system has too few addresses.
    pub(crate) fn new(device: &Device, size: usize, part: usize) -> Option<(Self, Vec<HostPart>)> {
        let pages = Pages::new(size)?;
        let memory = HostMemory {
            device: device.clone(),
            base: pages.base(),
            size,
            pages: Some(pages),
            state: AtomicU8::new(state::MAPPED),
            is_kept: AtomicBool::new(false),
        };
        let memory = Arc::new(memory);
        let parts = HostPart::cut(&memory, part);
        Some((Self { memory }, parts))
    }

    /// Allocates `size` bytes, more than zero, of pinned memory (`cuMemHostAlloc`), reachable from
    /// each device, and finishes it. Divides it into parts of `part` bytes; the last may be
    /// smaller.
    pub(crate) fn allocated(
        device: &Device,
        size: usize,
        part: usize,
    ) -> Result<(Self, Vec<HostPart>), CallError> {
        let none = || DriverError::new(Call::MemHostAlloc, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        // Otherwise the call breaks captures of other threads.
        let memory = device.relaxed(|| {
            let pointer = device.call(Call::MemHostAlloc, |driver, ordinal| {
                driver.host_alloc(ordinal, size as u64, PORTABLE)
            })?;
            // An owner at once: an error in what follows frees the memory.
            Ok::<_, CallError>(HostMemory {
                device: device.clone(),
                base: NonNull::new(pointer).ok_or_else(none)?,
                size,
                pages: None,
                state: AtomicU8::new(state::PINNED),
                is_kept: AtomicBool::new(false),
            })
        })??;
        let memory = Arc::new(memory);
        let parts = HostPart::cut(&memory, part);
        Ok((Self { memory }, parts))
    }

    pub(crate) fn size(&self) -> usize {
        self.memory.size
    }

    /// Writes to each page, so that the system backs all of them. The process is killed if the
    /// system has too little memory. Does nothing to finished memory.
    pub(crate) fn touch(&mut self) {
        if self.memory.is(state::PAGEABLE) {
            return;
        }
        for offset in (0..self.memory.size).step_by(PAGE) {
            // SAFETY: within the allocation. No part has bytes yet, and there is one `Piece`.
            // Volatile, so that the write stays.
            unsafe { self.memory.base.add(offset).write_volatile(0) };
        }
    }

    /// Finishes memory that stays pageable.
    pub(crate) fn finish(&mut self) {
        self.memory.state.store(state::PAGEABLE, Ordering::Release);
    }

    /// Marks finished memory as usable again when its parts are no longer in use.
    pub(crate) fn keep(self) {
        self.memory.is_kept.store(true, Ordering::Release);
    }

    /// Pins the memory for all contexts (`cuMemHostRegister`) and finishes it. Meanwhile launches
    /// of other threads wait.
    pub(crate) fn register(&mut self) -> Result<(), CallError> {
        let HostMemory {
            device,
            base,
            size,
            state,
            ..
        } = &*self.memory;
        // Otherwise the call breaks captures of other threads.
        let registered = device.relaxed(|| {
            // Before the call: after a panic of the driver the memory counts as registered, and is
            // unmapped only if the driver unregisters it.
            state.store(state::PINNED, Ordering::Release);
            // SAFETY: the pages stay mapped until they are unregistered.
            let registered = device.call(Call::MemHostRegister, |driver, ordinal| unsafe {
                driver.host_register(ordinal, base.as_ptr(), *size as u64, PORTABLE)
            });
            if registered.is_err() {
                state.store(state::MAPPED, Ordering::Release);
            }
            registered
        });
        registered.and_then(|registered| registered)
    }
}

/// A part of host memory with one owner. The allocation is freed with its last part.
pub(crate) struct HostPart {
    memory: Arc<HostMemory>,
    offset: usize,
    size: usize,
}

impl HostPart {
    fn cut(memory: &Arc<HostMemory>, part: usize) -> Vec<Self> {
        let (whole, part) = (memory.size, part.max(1));
        let offsets = (0..whole).step_by(part);
        offsets
            .map(|offset| Self {
                memory: Arc::clone(memory),
                offset,
                size: part.min(whole - offset),
            })
            .collect()
    }

    /// Returns `true` if the part has bytes: its memory is finished.
    pub(crate) fn is_ready(&self) -> bool {
        self.memory.is(state::PAGEABLE)
    }

    /// Returns `true` if a device can access the part directly.
    pub(crate) fn is_pinned(&self) -> bool {
        self.memory.is(state::PINNED)
    }

    /// Returns `true` if the memory is to be used again.
    pub(crate) fn is_kept(&self) -> bool {
        self.memory.is_kept.load(Ordering::Acquire)
    }

    /// Returns a number that all parts of one allocation have in common, and no others.
    pub(crate) fn allocation(&self) -> usize {
        Arc::as_ptr(&self.memory).addr()
    }

    /// Returns the number of parts of the same allocation that exist.
    pub(crate) fn siblings(&self) -> usize {
        Arc::strong_count(&self.memory)
    }

    pub(crate) const fn size(&self) -> usize {
        self.size
    }

    /// Returns the bytes; none before the memory is finished.
    pub(crate) fn bytes(&self) -> &[u8] {
        let size = if self.is_ready() { self.size } else { 0 };
        // SAFETY: the part is within the allocation, which lives and is initialized (zeroed by the
        // system, any bytes from the driver), and this is its only owner.
        unsafe { std::slice::from_raw_parts(self.memory.base.as_ptr().add(self.offset), size) }
    }

    /// Returns the bytes; none before the memory is finished.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let size = if self.is_ready() { self.size } else { 0 };
        // SAFETY: as in `bytes`; the exclusive borrow excludes other accesses.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base.as_ptr().add(self.offset), size) }
    }
}

impl fmt::Debug for HostPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPart")
            .field("pinned", &self.is_pinned())
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
