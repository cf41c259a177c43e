//! Pinned host memory.
//!
//! `unsafe` here: the `Driver` methods that take addresses, and slices of the memory. The driver
//! allocated the memory, which stays valid until its drop.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use cuvmm::driver::{CUresult, Call, DriverError, Result};

use super::by_hand::Hand;

#[derive(Debug)]
pub(super) struct Pinned<'a> {
    hand: &'a Hand,
    pointer: NonNull<u8>,
    size: usize,
}

impl<'a> Pinned<'a> {
    /// Allocates memory with `cuMemHostAlloc` and sets every byte to 1.
    pub(super) fn new(hand: &'a Hand, size: usize) -> Result<Self> {
        let pointer = hand.driver().host_alloc(hand.device(), size as u64, 0)?;
        let none = DriverError::new(Call::MemHostAlloc, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let pointer = NonNull::new(pointer).ok_or(none)?;
        // SAFETY: the driver allocated `size` bytes there.
        unsafe { pointer.write_bytes(1, size) };
        Ok(Self {
            hand,
            pointer,
            size,
        })
    }

    pub(super) fn numbers(&self) -> &[f32] {
        // SAFETY: the memory is that large, is initialized, is aligned to a page, and any bits are
        // a valid `f32`; nothing writes to it while it is borrowed.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr().cast(), self.size / 4) }
    }

    pub(super) fn numbers_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `numbers`, and the exclusive borrow prevents every other access.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr().cast(), self.size / 4) }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: as in `numbers`.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.size) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `numbers_mut`.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.size) }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // SAFETY: this value owns the memory and frees it once. Memory that cannot be freed stays
        // with the driver.
        let _ = unsafe {
            let hand = self.hand;
            hand.driver()
                .host_free(hand.device(), self.pointer.as_ptr())
        };
    }
}
