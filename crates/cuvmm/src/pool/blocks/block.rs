//! Memory that a tenant has allocated.
//!
//! `unsafe` here: naming the block's own memory as a range to copy in, and moving a dropped block's
//! contents out of it.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuvmm_driver::DeviceAddress;

use super::lease::Lease;
use super::slots::BlockPlace;
use super::stream_cache::Held;
use super::uses::Use;
use crate::device::Device;
use crate::error::{ArgumentError, BlockError, CallError, HandedBack, MemoryError};
use crate::extents::{Extent, Registration};
use crate::own::{Access, Span, Stream};
use crate::pool::core::Core;
use crate::pool::line::Wait;

/// Memory of a tenant at an address that is fixed for life. The block grows and shrinks in place.
/// It is freed when dropped.
///
/// Dropping a block makes no driver call and never waits: the memory stays mapped and charged to
/// the tenant, and is reused only after the work that may use it. In a [hardened
/// pool](crate::pool#hardened-pools) a drop does not wait either, but fills the memory and unmaps memory
/// whose fence is complete. If the block was [exported](Self::export), the drop unmaps without
/// filling.
///
/// # Examples
/// ```rust
/// use cuvmm::Stream;
/// # use cuvmm::{Device, Limit, Pool};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = Device::open(opened.driver, 0)?;
/// # let pool = Pool::builder(&device).limit(Limit::Bytes(64 << 20)).build()?;
/// # let tenant = pool.tenant("model").register()?;
/// let stream = Stream::new(&device)?;
/// let mut block = tenant.block(2 << 20).capacity(32 << 20).home_stream(&stream).allocate()?;
/// let address = block.address();
/// block.write(0, b"keys")?;
///
/// block.grow_to(16 << 20)?; // in place: no copy, no new address
/// assert_eq!(block.address(), address);
/// let mut bytes = [0; 4];
/// block.read(0, &mut bytes)?;
/// assert_eq!(&bytes, b"keys");
/// drop(block); // no driver call; cached for the next block on `stream`
/// # Ok(())
/// # }
/// ```
pub struct Block {
    held: ManuallyDrop<Held>,
    /// `true` while only the home stream has used the block, no lease was taken on it, and no zeros
    /// are owed in it. The next block of the same shape can then take it over unchanged.
    plain: AtomicBool,
    wait: Option<Duration>,
    /// The number of a growth future's request and its size, until the future has ended. The future
    /// borrows the block, so other code finds a request here only if the future was leaked.
    growth: Option<Box<(u64, u64)>>,
}

impl Block {
    #[inline]
    pub(super) const fn new(held: Held, plain: bool, wait: Option<Duration>) -> Self {
        Self {
            held: ManuallyDrop::new(held),
            plain: AtomicBool::new(plain),
            wait,
            growth: None,
        }
    }

    pub(in crate::pool) fn core(&self) -> &Arc<Core> {
        &self.held.owner.core
    }

    pub(in crate::pool) fn place(&self) -> &BlockPlace {
        &self.held.place
    }

    pub(super) const fn patience(&self) -> Option<Duration> {
        self.wait
    }

    pub(in crate::pool) fn awaits_growth(&mut self, request: Option<(u64, u64)>) {
        self.growth = request.map(Box::new);
    }

    /// Withdraws the request of a growth future that was dropped or leaked, and gives back the
    /// granted memory.
    #[inline]
    pub(in crate::pool) fn withdraw_growth(&mut self) {
        if let Some(growth) = self.growth.take() {
            self.undo_growth(*growth);
        }
    }

    #[cold]
    fn undo_growth(&mut self, (number, size): (u64, u64)) {
        let core = self.core();
        if let Some(Ok(_)) = core.withdraw_request(number)
            && let Err(error) = core.shrink(&[(*self.place(), self.size())])
        {
            log!(debug, %error, "a block keeps the growth of a dropped future");
            self.has_size(size);
        }
    }

    pub(in crate::pool) fn has_size(&mut self, size: u64) {
        self.held.size = size;
    }

    /// Keeps the block out of the stream caches: when the block is dropped, the pool frees its
    /// slot.
    pub(super) fn goes_in_no_cache(&self) {
        self.plain.store(false, Ordering::Relaxed);
    }

    /// Makes a block at another place that shares memory with this block. Neither goes to a stream
    /// cache.
    pub(super) fn forked(&self, place: BlockPlace, size: u64) -> Self {
        self.goes_in_no_cache();
        let held = Held {
            place,
            size,
            ..Held::clone(&self.held)
        };
        Self::new(held, false, self.wait)
    }

    pub(in crate::pool) fn is_of(&self, core: &Arc<Core>) -> bool {
        Arc::ptr_eq(self.core(), core)
    }

    /// Returns the block's first address, which never changes.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.place().address
    }

    /// Returns the device of the block's memory.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core().device
    }

    /// Returns the size in bytes, as requested.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.held.size
    }

    /// Returns the size in bytes that the block may grow to.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.place().capacity
    }

    /// Returns the stream that the block was allocated on, if it has a home stream.
    #[must_use]
    pub fn home_stream(&self) -> Option<&Stream> {
        self.held.home.as_ref()
    }

    /// Grows the block in place to `size` bytes: at least its size, at most its capacity. If memory
    /// is short, calls pressure hooks and waits for at most the
    /// [timeout](crate::pool::BlockBuilder::timeout). Growth within memory that is precommitted or was
    /// just given up makes no driver call; otherwise each new extent takes `cuMemCreate`,
    /// `cuMemMap` and `cuMemSetAccess`.
    ///
    /// A block that had shrunk into memory that it [shares](Self::fork) first gets memory of its
    /// own there. Each attempt needs all work queued on the block before it to be complete. If the
    /// block's streams are never idle, the call fails with [`BlockError::SharedInUse`], at the
    /// latest when the timeout has passed. Work that another thread launches while the call unmaps
    /// the shared memory must not use it.
    ///
    /// # Errors
    /// [`BlockError`], with the figures. The block is then as before, except that a block which had
    /// shrunk into memory that it [shares](Self::fork) may have memory of its own there, with the
    /// same bytes.
    pub fn grow_to(&mut self, size: u64) -> Result<(), BlockError> {
        self.withdraw_growth();
        self.core()
            .grow(self.place(), size, || Wait::of(self.wait))?;
        self.held.size = size;
        Ok(())
    }

    /// Grows the block in place to `size` bytes if that needs no waiting, and calls no hook. While
    /// a mapper is placing the block's next extent, the call waits for the mapper's driver calls
    /// instead of making its own.
    ///
    /// # Errors
    /// As [`Self::grow_to`].
    pub fn try_grow_to(&mut self, size: u64) -> Result<(), BlockError> {
        self.withdraw_growth();
        self.core().grow(self.place(), size, || Wait::Never)?;
        self.held.size = size;
        Ok(())
    }

    /// Shrinks the block to `size` bytes, which may be zero: the block keeps its addresses. Makes
    /// no driver call. If the block grows again before the
    /// memory is reclaimed, it gets the memory back with its old contents. A [hardened
    /// pool](crate::pool#hardened-pools) fills and unmaps the memory as for a dropped block, and any pool
    /// unmaps memory that the block [shares](Self::fork).
    ///
    /// **When the memory returns.** Whole extents behind the block's end are cached, and pending
    /// free until the work on them is complete: a request that lacks memory reclaims them then, and
    /// so does [`Pool::trim`](crate::Pool::trim). The rest of the extent in which the block ends is
    /// [stranded](crate::pool::TenantStats::stranded) until
    /// [`Tenant::compact`](crate::Tenant::compact);
    /// [`expect_shrink`](crate::pool::BlockBuilder::expect_shrink) bounds it. A lease keeps all of it.
    ///
    /// What `nvidia-smi` shows as used stays the same when memory is cached or reclaimed, since the
    /// pool holds it, and falls when `trim` releases it to the driver.
    ///
    /// # Errors
    /// [`BlockError`] when `size` is more than the block's size, or the block sleeps.
    #[doc(alias = "deallocate_for_model")]
    pub fn shrink_to(&mut self, size: u64) -> Result<(), BlockError> {
        self.withdraw_growth();
        self.core().shrink(&[(*self.place(), size)])?;
        self.held.size = size;
        Ok(())
    }

    /// Records that another stream uses the block too: the memory is reused only after that
    /// stream's work too. A block without a home stream waits for all streams in any case.
    ///
    /// # Errors
    /// [`CallError::WrongDriver`] when the stream belongs to another driver.
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        self.plain.store(false, Ordering::Relaxed);
        self.core().record_use(self.place().slot, stream)
    }

    /// Records that work which is on no stream of this library uses the block too, such as work of
    /// another library that was given the address. The memory is reused only after all work queued
    /// on the devices with access when the block is freed.
    pub fn record_use_anywhere(&self) {
        self.plain.store(false, Ordering::Relaxed);
        self.core().record_use_anywhere(self.place().slot);
    }

    /// Returns the streams whose work may use the block, the home stream first. Returns `None` if
    /// any work of the devices with access may use the block.
    #[must_use]
    pub fn streams(&self) -> Option<Vec<Stream>> {
        self.core().streams(self.place().slot)
    }

    /// Takes a lease on the block. While the lease lives, no memory under the block is unmapped or
    /// reused, even if the block is dropped. Does not check whether the block may be used;
    /// [`lease_for`](Self::lease_for) does.
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.plain.store(false, Ordering::Relaxed);
        Lease::new(Arc::clone(self.core()), self.held.place, self.size())
    }

    /// Takes a [lease](Self::lease) with the exact list of the extents under the block, including
    /// those behind its end, for registering the memory with a NIC or with NCCL. The list does not
    /// contain memory that the block grows by later.
    ///
    /// # Errors
    /// [`MemoryError`] when the block sleeps or has lost memory, when the context is lost, and in a
    /// forked child.
    pub fn register(&self) -> Result<Registration, MemoryError> {
        Ok(self.lease_for(Access::Read)?.registered())
    }

    pub(crate) fn admit(&self, wanted: Use, range: Range<u64>) -> Result<Lease, MemoryError> {
        if !matches!(wanted, Use::Copy(_)) {
            self.plain.store(false, Ordering::Relaxed);
        }
        let of = (self.held.place, self.size());
        self.core().admit(of, wanted, range)
    }

    /// Returns every extent under the block in order, including those behind its end: a
    /// registration of the block must cover them all. The list stays exact while a [`Lease`] lives
    /// and the block does not grow.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.core().extents(self.place())
    }

    /// Writes `bytes` at `offset` behind the work queued on the home stream (or on the legacy
    /// default stream), and waits until they are written (`cuMemcpyHtoDAsync`).
    ///
    /// # Errors
    /// [`MemoryError`] when the range exceeds the block or begins where it is [read
    /// only](Self::read_only), when the block sleeps, or while a capture guard lives.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let (stream, _lease) = self.copied(Access::ReadWrite, offset, bytes.len() as u64)?;
        self.span().write(&stream, offset, bytes)
    }

    /// Reads bytes at `offset` behind the work queued on the home stream (or on the legacy default
    /// stream), and waits until they are read (`cuMemcpyDtoHAsync`).
    ///
    /// # Errors
    /// [`MemoryError`] when the range exceeds the block, when the block sleeps, or while a capture
    /// guard lives.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let (stream, _lease) = self.copied(Access::Read, offset, bytes.len() as u64)?;
        self.span().read(&stream, offset, bytes)
    }

    /// Frees the block as a drop does, unless its home stream is capturing.
    ///
    /// # Errors
    /// [`HandedBack`], which contains the block, while the home stream is capturing.
    #[doc(alias = "deallocate")]
    #[allow(clippy::result_large_err, reason = "the block is handed back as it is")]
    pub fn free(self) -> Result<(), HandedBack<Self, MemoryError>> {
        match self.may_be_freed() {
            Ok(()) => Ok(()),
            Err(reason) => Err(HandedBack::new(self, reason)),
        }
    }

    pub(crate) fn may_be_freed(&self) -> Result<(), MemoryError> {
        // The stream is queried only while a capture guard lives: the usual free makes no driver
        // call.
        if !self.core().is_capturing() {
            return Ok(());
        }
        match &self.held.home {
            Some(home) if home.is_capturing()? => Err(MemoryError::Capturing),
            _ => Ok(()),
        }
    }

    /// Returns `true` if the block [sleeps](crate::pool::Tenant::blocks): its addresses are kept, nothing
    /// is mapped there, and a kernel that accesses them faults. Also `true` while another thread is
    /// putting the block to sleep or waking it.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        // Caches are bypassed while a block may be asleep. Otherwise the lock is not needed.
        self.held.owner.stream_caches.is_bypassed()
            && self.core().lock().blocks.slots.sleeps(self.place().slot)
    }

    #[cfg(feature = "dlpack")]
    pub(crate) fn users(&self) -> Vec<Device> {
        self.core().users().cloned().collect()
    }

    fn span(&self) -> Span<'_> {
        // SAFETY: the memory of a block stays mapped while the block lives, which the borrow
        // ensures: reclaim takes only memory behind the block's end.
        unsafe { Span::new(&self.core().device, self.address(), self.size()) }
    }

    /// Returns the stream that a copy runs on, and a lease for the time of the copy.
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

    /// Takes a [lease](Self::lease) for a use of the whole block with `access`. Check and lease are
    /// one step: the block cannot be put to sleep or moved in between.
    ///
    /// # Errors
    /// [`MemoryError`] when the block sleeps or has lost memory, when `access` includes writing and
    /// the block shares memory with [forks](Self::fork), when the context is lost, and in a forked
    /// child.
    pub fn lease_for(&self, access: Access) -> Result<Lease, MemoryError> {
        self.admit(Use::Lend(access), 0..self.size())
    }

    /// Checks whether the whole block may be used with `access` now. Only a lease keeps the answer
    /// valid: [`lease_for`](Self::lease_for) checks and takes a lease.
    ///
    /// # Errors
    /// As [`lease_for`](Self::lease_for).
    pub fn check_for(&self, access: Access) -> Result<(), MemoryError> {
        let core = self.core();
        core.device.usable()?;
        let range = 0..self.size();
        let state = core.lock_with(self.place().slot);
        let capturing = state.memory.gate.is_capturing();
        let wanted = Use::Lend(access);
        state.blocks.check(self.place(), wanted, &range, capturing)
    }
}

crate::size::bounds!(Block);

impl Drop for Block {
    fn drop(&mut self) {
        self.withdraw_growth();
        // SAFETY: `held` is taken here and nowhere else, and not used after.
        let held = unsafe { ManuallyDrop::take(&mut self.held) };
        let core = &held.owner.core;
        // A forked child owns nothing, and another thread may have held the lock at the fork.
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
