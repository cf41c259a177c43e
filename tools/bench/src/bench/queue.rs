//! Fills and copies queued on a stream by hand, without the library, and waited for.
//!
//! `unsafe` here: the `Driver` methods that take addresses. All work has ended when [`waited`]
//! returns, and host memory is borrowed for that long. Device memory whose owner is dropped earlier
//! is returned by a call that waits: a container's drop, or `cuMemFree`. The driver refuses memory
//! that is not mapped or that the stream's device has no access to.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range as Bytes;

use anyhow::Context as _;
use cuvmm::driver::{DeviceAddress, Ordinal};
use cuvmm::{Block, DeviceVec, Region, Stream};

use super::by_hand::{Hand, Plain, Range};

pub(super) const FILLED: u8 = 0x5a;

#[derive(Clone, Copy, Debug)]
pub(super) struct Memory<'a> {
    address: DeviceAddress,
    size: u64,
    owner: PhantomData<&'a ()>,
}

impl<'a> Memory<'a> {
    const fn new(address: DeviceAddress, size: u64) -> Self {
        Self {
            address,
            size,
            owner: PhantomData,
        }
    }

    /// Returns the part at `bytes`.
    ///
    /// # Errors
    /// `bytes` is not within this memory.
    pub(super) fn part(self, bytes: Bytes<u64>) -> anyhow::Result<Self> {
        let size = bytes.end.checked_sub(bytes.start);
        let size = size.filter(|_| bytes.end <= self.size);
        let size =
            size.with_context(|| format!("{bytes:?} of {}", cuvmm::display::Bytes(self.size)))?;
        Ok(Self::new(DeviceAddress(self.address.0 + bytes.start), size))
    }
}

impl<'a> From<&'a Plain<'_>> for Memory<'a> {
    fn from(plain: &'a Plain<'_>) -> Self {
        Self::new(plain.address(), plain.size())
    }
}

impl<'a> From<&'a Range<'_>> for Memory<'a> {
    fn from(range: &'a Range<'_>) -> Self {
        Self::new(range.address_at(0), range.mapped())
    }
}

impl<'a> From<&'a Block> for Memory<'a> {
    fn from(block: &'a Block) -> Self {
        Self::new(block.address(), block.size())
    }
}

impl<'a> From<&'a Region> for Memory<'a> {
    fn from(region: &'a Region) -> Self {
        Self::new(region.address(), region.size())
    }
}

/// Covers the whole capacity.
impl<'a> From<&'a DeviceVec<u8>> for Memory<'a> {
    fn from(vec: &'a DeviceVec<u8>) -> Self {
        Self::new(vec.address(), vec.capacity() as u64)
    }
}

/// A stream that [`waited`] synchronizes with.
pub(super) struct Queue<'q> {
    hand: &'q Hand,
    stream: &'q Stream,
    /// Makes `'q` invariant: memory borrowed for the queue stays borrowed until the wait for the
    /// stream.
    borrowed: PhantomData<Cell<&'q ()>>,
}

/// Queues work on a stream and waits for it, even if queueing fails.
///
/// # Errors
/// The first error of `act` or of the wait.
pub(super) fn waited<'q, T>(
    hand: &'q Hand,
    stream: &'q Stream,
    act: impl FnOnce(&Queue<'q>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let queue = Queue {
        hand,
        stream,
        borrowed: PhantomData,
    };
    let outcome = act(&queue);
    // SAFETY: the stream is borrowed, so it is live.
    let ended = unsafe {
        hand.driver()
            .stream_synchronize(queue.device(), stream.as_raw())
    };
    let outcome = outcome?;
    ended?;
    Ok(outcome)
}

impl<'q> Queue<'q> {
    fn device(&self) -> Ordinal {
        self.stream.device().ordinal()
    }

    /// Queues `cuMemsetD8Async` with [`FILLED`].
    pub(super) fn fill(&self, memory: Memory<'_>) -> anyhow::Result<()> {
        self.set(memory, FILLED)
    }

    /// Queues `cuMemsetD8Async` with zeros.
    pub(super) fn clear(&self, memory: Memory<'_>) -> anyhow::Result<()> {
        self.set(memory, 0)
    }

    fn set(&self, memory: Memory<'_>, byte: u8) -> anyhow::Result<()> {
        let Memory { address, size, .. } = memory;
        let (device, stream) = (self.device(), self.stream.as_raw());
        let driver = self.hand.driver();
        // SAFETY: see the module; a row fills only memory that no other work uses.
        unsafe { driver.fill_async(device, address, byte, size, stream)? };
        Ok(())
    }

    /// Queues `cuMemcpyDtoDAsync` of all of `from` to the beginning of `to`.
    pub(super) fn copy(&self, to: Memory<'_>, from: Memory<'_>) -> anyhow::Result<()> {
        let to = to.part(0..from.size)?;
        let (device, stream) = (self.device(), self.stream.as_raw());
        let driver = self.hand.driver();
        // SAFETY: see the module; a row copies only memory that no other work uses.
        unsafe {
            driver.copy_on_device_async(device, to.address, from.address, from.size, stream)?;
        }
        Ok(())
    }

    /// Queues `cuMemcpyHtoDAsync` of all of `from` to the beginning of `to`.
    pub(super) fn upload(&self, to: Memory<'_>, from: &'q [u8]) -> anyhow::Result<()> {
        let to = to.part(0..from.len() as u64)?;
        let (device, stream) = (self.device(), self.stream.as_raw());
        let driver = self.hand.driver();
        // SAFETY: see the module; the source is borrowed until the copy has ended.
        unsafe {
            driver.copy_to_device_async(device, to.address, from.as_ptr(), to.size, stream)?;
        }
        Ok(())
    }

    /// Queues `cuMemcpyDtoHAsync` from the beginning of `from` until `to` is full.
    pub(super) fn download(&self, to: &'q mut [u8], from: Memory<'_>) -> anyhow::Result<()> {
        let from = from.part(0..to.len() as u64)?;
        let (device, stream) = (self.device(), self.stream.as_raw());
        let driver = self.hand.driver();
        // SAFETY: see the module; the destination is borrowed mutably until the copy has ended.
        unsafe {
            driver.copy_to_host_async(device, to.as_mut_ptr(), from.address, from.size, stream)?;
        }
        Ok(())
    }
}
