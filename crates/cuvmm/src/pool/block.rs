//! Memory that a tenant has allocated.
//!
//! `unsafe` here: naming the block's own memory as a range to copy in, and taking what a block
//! holds out of it when it is dropped.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuvmm_driver::DeviceAddress;

use super::core::Core;
use super::gate::Use;
use super::ids::BlockPlace;
use super::lease::Lease;
use super::stream_cache::Held;
use super::wait::Wait;
use crate::device::Device;
use crate::error::{ArgumentError, BlockError, CallError, HandedBack, MemoryError};
use crate::own::{Access, Span, Stream};
use crate::region::{Extent, Registration};

/// Memory of a tenant, at an address that is fixed for life. Freed when dropped.
///
/// Dropping makes no driver call and never waits: the memory stays mapped, stays charged to the
/// tenant, and is handed on only after the work that may use it. In a
/// [hardened pool](super#hardened-pools) it does not wait either, but fills the memory and unmaps
/// what has passed; so does, without the filling, a block that was [exported](Self::export).
pub struct Block {
    held: ManuallyDrop<Held>,
    /// Whether only the home stream used it, no lease was taken on it, and no zeros are owed in
    /// it: then the next block of its shape can have it as it is.
    plain: AtomicBool,
    wait: Option<Duration>,
}

impl Block {
    /// `plain`: no zeros are owed in it.
    #[inline]
    pub(super) const fn new(held: Held, plain: bool, wait: Option<Duration>) -> Self {
        Self {
            held: ManuallyDrop::new(held),
            plain: AtomicBool::new(plain),
            wait,
        }
    }

    pub(super) fn core(&self) -> &Arc<Core> {
        &self.held.owner.core
    }

    pub(super) fn place(&self) -> &BlockPlace {
        &self.held.place
    }

    /// How long it may wait for memory.
    pub(super) const fn patience(&self) -> Option<Duration> {
        self.wait
    }

    /// The pool has grown or shrunk it.
    pub(super) fn has_size(&mut self, size: u64) {
        self.held.size = size;
    }

    /// When it is dropped its slot is looked at: what is special about it is not kept for the next block.
    pub(super) fn goes_in_no_cache(&self) {
        self.plain.store(false, Ordering::Relaxed);
    }

    /// A block at another place that shares memory with this one: neither goes in a stream cache.
    pub(super) fn forked(&self, place: BlockPlace, size: u64) -> Self {
        self.goes_in_no_cache();
        let held = Held {
            place,
            size,
            ..Held::clone(&self.held)
        };
        Self::new(held, false, self.wait)
    }

    /// Whether it is of a pool.
    pub(super) fn is_of(&self, core: &Arc<Core>) -> bool {
        Arc::ptr_eq(self.core(), core)
    }

    /// The first address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.place().address
    }

    /// The device it lies on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core().device
    }

    /// The size in bytes, as asked for.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.held.size
    }

    /// What it may grow to, in bytes.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.place().capacity
    }

    /// The stream it was allocated on.
    #[must_use]
    pub fn home_stream(&self) -> Option<&Stream> {
        self.held.home.as_ref()
    }

    /// Grows in place, asking pressure hooks and waiting as its builder said.
    ///
    /// # Errors
    /// [`BlockError`] with the figures; the block is as before then, except that one which has
    /// shrunk into what it [shares](Self::fork) may have memory of its own there, with the same bytes.
    pub fn grow_to(&mut self, size: u64) -> Result<(), BlockError> {
        self.core()
            .grow(self.place(), size, || Wait::of(self.wait))?;
        self.held.size = size;
        Ok(())
    }

    /// Grows in place if that needs no waiting. Where a mapper is just placing the block's next
    /// extent it returns behind those driver calls, instead of making its own beside them.
    ///
    /// # Errors
    /// As [`Self::grow_to`].
    pub fn try_grow_to(&mut self, size: u64) -> Result<(), BlockError> {
        self.core().grow(self.place(), size, || Wait::Never)?;
        self.held.size = size;
        Ok(())
    }

    /// Gives up the end of the block. Makes no driver call; growing again before somebody else
    /// needs the memory revives it with what it held. (A [hardened pool](super#hardened-pools)
    /// fills and unmaps it as a block that is dropped, and any pool unmaps what the block
    /// [shares](Self::fork).)
    ///
    /// # Errors
    /// [`BlockError`] when `size` is zero or more than the block has.
    pub fn shrink_to(&mut self, size: u64) -> Result<(), BlockError> {
        self.core().shrink(&[(*self.place(), size)])?;
        self.held.size = size;
        Ok(())
    }

    /// Notes that another stream uses the block too: the memory is handed on only after that
    /// stream's work as well. A block without a home stream waits for all streams anyway.
    ///
    /// # Errors
    /// [`CallError::WrongDriver`] when the stream is another driver's.
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        self.plain.store(false, Ordering::Relaxed);
        let mut state = self.core().lock_with(self.place().slot);
        state.record_use(self.place().slot, stream)
    }

    /// Notes that work which is on no stream of this library uses the block too: that of another
    /// library which was given the address, say. The memory is handed on only after all work of
    /// the device that is queued when it is freed.
    pub fn record_use_anywhere(&self) {
        self.plain.store(false, Ordering::Relaxed);
        let mut state = self.core().lock_with(self.place().slot);
        state.record_use_anywhere(self.place().slot);
    }

    /// The streams whose work may use the block, the home first; nothing where that is all work of
    /// the device.
    #[must_use]
    pub fn streams(&self) -> Option<Vec<Stream>> {
        self.core()
            .lock_with(self.place().slot)
            .streams(self.place().slot)
    }

    /// Keeps what lies under the block in place: while the lease lives, nothing under the block is
    /// unmapped or handed on, whatever becomes of the block. It asks nothing;
    /// [`lease_for`](Self::lease_for) says whether the block may be used.
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.plain.store(false, Ordering::Relaxed);
        Lease::new(Arc::clone(self.core()), self.held.place, self.size())
    }

    /// A [lease](Self::lease) with the exact list of the extents under the block, those behind its
    /// end included, for registering the memory with a NIC or with NCCL. What the block grows by
    /// later is not in it.
    ///
    /// # Errors
    /// [`MemoryError`] when the block sleeps or has lost memory, when the context is lost, and in a
    /// forked child.
    pub fn register(&self) -> Result<Registration, MemoryError> {
        Ok(self.lease_for(Access::Read)?.registered())
    }

    /// A lease for a use of a range that lies in the block.
    pub(crate) fn admit(&self, wanted: Use, range: Range<u64>) -> Result<Lease, MemoryError> {
        if !matches!(wanted, Use::Copy(_)) {
            self.plain.store(false, Ordering::Relaxed);
        }
        let of = (self.held.place, self.size());
        self.core().admit(of, wanted, range)
    }

    /// Every extent under the block, those behind its end included, in order: what whoever
    /// registers memory must register. It is exact while a [`Lease`] lives and the block does not
    /// grow.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.core().extents(self.place())
    }

    /// Writes bytes behind what the home stream (or the legacy default stream) has queued, and
    /// returns when they are there.
    ///
    /// # Errors
    /// [`MemoryError`] when the range leaves the block or begins where it is
    /// [read only](Self::read_only), when the block sleeps, or while a capture guard lives.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let (stream, _lease) = self.copied(Access::ReadWrite, offset, bytes.len() as u64)?;
        self.span().write(&stream, offset, bytes)
    }

    /// Reads bytes behind what the home stream (or the legacy default stream) has queued.
    ///
    /// # Errors
    /// [`MemoryError`] when the range leaves the block or the block sleeps, or while a capture guard
    /// lives.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let (stream, _lease) = self.copied(Access::Read, offset, bytes.len() as u64)?;
        self.span().read(&stream, offset, bytes)
    }

    /// Frees the block as dropping it does, but not while its home stream is capturing.
    ///
    /// # Errors
    /// [`HandedBack`] with the block in it.
    #[allow(clippy::result_large_err, reason = "the block is handed back as it is")]
    pub fn free(self) -> Result<(), HandedBack<Self, MemoryError>> {
        match self.may_be_freed() {
            Ok(()) => Ok(()),
            Err(reason) => Err(HandedBack::new(self, reason)),
        }
    }

    /// Whether [`Self::free`] would free it now.
    pub(crate) fn may_be_freed(&self) -> Result<(), MemoryError> {
        // Asked only while a guard says that there are captures: the usual free asks nobody.
        if !self.core().is_capturing() {
            return Ok(());
        }
        match &self.held.home {
            Some(home) if home.is_capturing()? => Err(MemoryError::Capturing),
            _ => Ok(()),
        }
    }

    /// Whether the block [sleeps](super::Tenant::blocks): its addresses are kept and nothing is
    /// mapped there, so that a kernel that touches them faults. True too while another thread is
    /// putting it to sleep or waking it.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        // Asks no lock where none of the tenant's does.
        self.held.owner.stream_caches.is_bypassed() && self.core().lock().is_asleep(self.place())
    }

    /// Whether a capture guard of its pool lives.
    #[cfg(feature = "dlpack")]
    pub(crate) fn is_capturing(&self) -> bool {
        self.core().is_capturing()
    }

    fn span(&self) -> Span<'_> {
        // SAFETY: the memory of a block stays mapped while the block lives, which the borrow sees
        // to: taking back takes only what lies behind its end.
        unsafe { Span::new(&self.core().device, self.address(), self.size()) }
    }

    /// The stream that a copy runs on, and what keeps the memory in place until it has ended.
    fn copied(
        &self,
        access: Access,
        offset: u64,
        size: u64,
    ) -> Result<(Stream, Lease), MemoryError> {
        let outside = ArgumentError::bytes(offset, size, self.size());
        let end = offset.checked_add(size).filter(|&end| end <= self.size());
        let end = end.ok_or(outside)?;
        let lease = self.admit(Use::Copy(access), offset..end)?;
        let legacy = || Stream::legacy(self.device());
        let stream = self.home_stream().cloned().unwrap_or_else(legacy);
        Ok((stream, lease))
    }
}

impl Block {
    /// A [lease](Self::lease) for a use of the whole block with this access: nothing puts the block
    /// to sleep or moves it between the check and the lease.
    ///
    /// # Errors
    /// [`MemoryError`] when the block sleeps, is to be written and shares memory with
    /// [forks](Self::fork), or has lost memory, when the context is lost, and in a forked child.
    pub fn lease_for(&self, access: Access) -> Result<Lease, MemoryError> {
        self.admit(Use::Lend(access), 0..self.size())
    }

    /// Whether the whole block may be used with this access now. Nothing keeps it so but a lease:
    /// [`lease_for`](Self::lease_for) asks the same and takes one.
    ///
    /// # Errors
    /// As [`lease_for`](Self::lease_for).
    pub fn check_for(&self, access: Access) -> Result<(), MemoryError> {
        let core = self.core();
        core.device.usable()?;
        let range = 0..self.size();
        let state = core.lock_with(self.place().slot);
        state.check(self.place(), Use::Lend(access), &range)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `held` is taken here and nowhere else, and not used after.
        let held = unsafe { ManuallyDrop::take(&mut self.held) };
        let core = &held.owner.core;
        // A forked child owns nothing, and the lock may have been held when it was forked.
        if core.device.forked().is_some() {
            return;
        }
        let plain = self.plain.load(Ordering::Relaxed);
        let stream_cache = held.stream_cache.clone().filter(|_| plain);
        let held = match stream_cache {
            Some(stream_cache) => stream_cache.put(held).err(),
            None => Some(held),
        };
        if let Some(held) = held {
            held.owner.core.free(&held.place);
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("address", &self.address())
            .field("size", &self.size())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}
