//! Memory that a tenant has allocated.
//!
//! `unsafe` here: naming the block's own memory as a range to copy in, and taking what a block
//! holds out of it when it is dropped.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuvmm_driver::DeviceAddress;

use super::budget::TenantId;
use super::core::{Core, Grain, Wanted};
use super::lease::Lease;
use super::pace::Growth;
use super::shelf::{Held, Owner, Shape};
use super::slot::Place;
use super::state::State;
use crate::device::Device;
use crate::error::{AllocateError, CallError, CopyError, FreeError, FreeRefusal, ShrinkError};
use crate::own::{Span, Stream};
use crate::region::{Extent, Registration};

/// Options of a block.
#[derive(Clone, Debug)]
#[must_use = "nothing is allocated before `allocate` or `try_allocate`"]
pub struct BlockBuilder<'a> {
    owner: &'a Arc<Owner>,
    wanted: Wanted<'a>,
    wait: Option<Duration>,
}

impl<'a> BlockBuilder<'a> {
    pub(super) const fn new(owner: &'a Arc<Owner>, size: u64) -> Self {
        let wanted = Wanted {
            size,
            capacity: size,
            home: None,
            tag: None,
            zeroed: false,
            grain: Grain {
                growth: None,
                largest: None,
            },
            snug: false,
        };
        Self {
            owner,
            wanted,
            wait: None,
        }
    }

    /// How large the block may grow, in bytes; by default its size. Takes addresses, not memory.
    pub const fn capacity(mut self, bytes: u64) -> Self {
        self.wanted.capacity = bytes;
        self
    }

    /// The stream the block is used on. Dropping the block frees it there: whoever allocates next
    /// on that stream has the memory at once, and nobody else before the stream's work has passed.
    ///
    /// Without a home stream the memory waits for all work of the device. Asking for that breaks a
    /// capture on any stream of the context, whoever makes it, unless a
    /// [capture guard](super::Pool::capture_guard) lives meanwhile: the driver marks no work of a
    /// context that captures (`cuCtxRecordEvent`). A [hardened pool](super#hardened-pools) asks as
    /// soon as such a block is dropped, and so does any where the block was
    /// [exported](Block::export); others ask when somebody wants the memory.
    pub const fn home_stream(mut self, stream: &'a Stream) -> Self {
        self.wanted.home = Some(stream);
        self
    }

    /// A word that the statistics show beside the block.
    pub fn tag(mut self, tag: impl Into<Arc<str>>) -> Self {
        self.wanted.tag = Some(tag.into());
        self
    }

    /// Whether the block, and whatever it grows by, reads as zero. Growing over what was given up a
    /// moment ago then waits for the work that may still write there: behind it on the home
    /// stream; without one, growing is refused until that has passed. Without it a block may show
    /// what the same tenant wrote before; never what another tenant wrote, unless the pool says
    /// [`Scrub::Never`](super::Scrub::Never).
    pub const fn zeroed(mut self, yes: bool) -> Self {
        self.wanted.zeroed = yes;
        self
    }

    /// How much memory the block gets at once when it outgrows what it has, instead of what
    /// [the pool says](super::PoolBuilder::growth). In a [hardened pool](super#hardened-pools) it
    /// is [exact](Growth::Exact) all the same.
    pub const fn growth(mut self, growth: Growth) -> Self {
        self.wanted.grain.growth = Some(growth);
        self
    }

    /// The largest extent that may lie under the block, in bytes: a power of two granules. More
    /// than [the pool's](super::PoolBuilder::largest_extent) is the same as the pool's, which is
    /// the default. Small extents cost more driver calls and strand less.
    pub const fn largest_extent(mut self, bytes: u64) -> Self {
        self.wanted.grain.largest = Some(bytes);
        self
    }

    /// How long [`allocate`](Self::allocate) and [`Block::grow_to`] may wait for memory in use to
    /// come free. By default they do not wait, but still ask pressure hooks.
    pub const fn deadline(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Allocates, asking other tenants' pressure hooks and waiting until the deadline if memory
    /// is short.
    ///
    /// # Errors
    /// [`AllocateError`] with the figures; every block is as before then.
    pub fn allocate(self) -> Result<Block, AllocateError> {
        if let Some(held) = self.shelved() {
            return Ok(self.block(held));
        }
        let Owner { core, tenant, .. } = &**self.owner;
        let place = core.allocate(*tenant, &self.wanted, self.wait.map(after))?;
        let held = self.held(place);
        Ok(self.block(held))
    }

    /// Allocates if that needs no waiting: neither for the GPU's work nor for anybody's memory.
    /// (Without a home stream a scrub of memory that changes tenant is waited for, about 0.25 ms a
    /// GiB; with one it is ordered on that stream.)
    ///
    /// Warm memory of the home stream: no driver call. Otherwise per extent `cuMemCreate` (or
    /// `cuMemUnmap` where it was idle), `cuMemMap` and `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`AllocateError`] with the figures; every block is as before then.
    pub fn try_allocate(self) -> Result<Block, AllocateError> {
        if let Some(held) = self.shelved() {
            return Ok(self.block(held));
        }
        let Owner { core, tenant, .. } = &**self.owner;
        let place = core.try_allocate(*tenant, &self.wanted)?;
        let held = self.held(place);
        Ok(self.block(held))
    }

    /// Allocates so many blocks that are all like this one, in one go: all of them or none.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn allocate_many(self, count: usize) -> Result<Vec<Block>, AllocateError> {
        let until = self.wait.map(after);
        self.many(count, |core, tenant, wanted, missing| {
            core.allocate_many(tenant, wanted, missing, until, State::allocate_many)
        })
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::try_allocate`].
    pub fn try_allocate_many(self, count: usize) -> Result<Vec<Block>, AllocateError> {
        self.many(count, |core, tenant, wanted, missing| {
            core.try_allocate_many(tenant, wanted, missing, State::allocate_many)
        })
    }

    /// Allocates so many blocks that are all like this one and lie side by side, all of them or none:
    /// from one to the next it is always equally far, so that they are the rows of one strided
    /// tensor, each of which grows in place. [`Tenant::grow_all`](super::Tenant::grow_all) grows
    /// them together.
    ///
    /// The distance is that of the first two addresses: the capacity, rounded up to a power of two
    /// granules, and in a [hardened pool](super#hardened-pools) two guards. Between a block's end and
    /// the next block nothing of another is ever mapped.
    ///
    /// Each is a block like any other. Where as many lay side by side that are gone, and nobody has
    /// their places, these have them, with the memory that is still there. One reservation
    /// (`cuMemAddressReserve`) else: the driver has its addresses again when all of the blocks have
    /// gone and somebody wants them.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn allocate_adjacent(self, count: usize) -> Result<Vec<Block>, AllocateError> {
        let until = self.wait.map(after);
        self.adjacent(count, |core, tenant, wanted| {
            core.allocate_many(tenant, wanted, count, until, State::allocate_adjacent)
        })
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::try_allocate`].
    pub fn try_allocate_adjacent(self, count: usize) -> Result<Vec<Block>, AllocateError> {
        self.adjacent(count, |core, tenant, wanted| {
            core.try_allocate_many(tenant, wanted, count, State::allocate_adjacent)
        })
    }

    fn adjacent(
        self,
        count: usize,
        make: impl FnOnce(&Core, TenantId, &Wanted<'_>) -> Result<Vec<Place>, AllocateError>,
    ) -> Result<Vec<Block>, AllocateError> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let Owner { core, tenant, .. } = &**self.owner;
        let places = make(core, *tenant, &self.wanted)?;
        Ok(self.blocks(places).collect())
    }

    fn many(
        self,
        count: usize,
        make: impl Fn(&Core, TenantId, &Wanted<'_>, usize) -> Result<Vec<Place>, AllocateError>,
    ) -> Result<Vec<Block>, AllocateError> {
        let shelved = std::iter::from_fn(|| self.shelved()).take(count);
        let mut blocks: Vec<Block> = shelved.map(|held| self.block(held)).collect();
        let missing = count - blocks.len();
        if missing > 0 {
            let Owner { core, tenant, .. } = &**self.owner;
            let mut made = make(core, *tenant, &self.wanted, missing);
            if matches!(&made, Err(error) if error.is_shortage()) && !blocks.is_empty() {
                // Taken apart, what lay on the shelf may go further.
                blocks.clear();
                made = make(core, *tenant, &self.wanted, count);
            }
            blocks.extend(self.blocks(made?));
        }
        Ok(blocks)
    }

    fn blocks(&self, places: Vec<Place>) -> impl Iterator<Item = Block> {
        let block = |place| self.block(self.held(place));
        places.into_iter().map(block)
    }

    /// A block of the same shape that was freed on the home stream a moment ago.
    #[inline]
    fn shelved(&self) -> Option<Held> {
        let Wanted {
            size,
            capacity,
            home,
            ref tag,
            zeroed,
            grain,
            ..
        } = self.wanted;
        let device = &self.owner.core.device;
        let usable = !zeroed && device.lost().is_none() && device.forked().is_none();
        let home = home.filter(|_| usable)?;
        let tag = tag.as_ref();
        let shape = Shape {
            size,
            capacity,
            tag,
            grain,
        };
        self.owner.shelves.of(home)?.take(home, shape)
    }

    #[inline]
    fn held(&self, place: Place) -> Held {
        Held {
            owner: Arc::clone(self.owner),
            place,
            size: self.wanted.size,
            tag: self.wanted.tag.clone(),
            grain: self.wanted.grain,
            home: self.wanted.home.cloned(),
            shelf: self
                .wanted
                .home
                .and_then(|home| self.owner.shelves.of(home))
                .cloned(),
        }
    }

    #[inline]
    fn block(&self, held: Held) -> Block {
        Block {
            held: ManuallyDrop::new(held),
            plain: AtomicBool::new(!self.wanted.zeroed),
            wait: self.wait,
        }
    }
}

/// The moment so long from now, or one that is as good as never.
pub(super) fn after(wait: Duration) -> Instant {
    let now = Instant::now();
    let century = Duration::from_secs(100 * 365 * 86_400);
    now.checked_add(wait.min(century)).unwrap_or(now)
}

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
    pub(super) fn core(&self) -> &Arc<Core> {
        &self.held.owner.core
    }

    pub(super) fn place(&self) -> &Place {
        &self.held.place
    }

    /// How long it may wait for memory.
    pub(super) const fn patience(&self) -> Option<Duration> {
        self.wait
    }

    /// The pool has grown it.
    pub(super) fn has_grown(&mut self, size: u64) {
        self.held.size = size;
    }

    /// A block at another place that shares memory with this one: neither goes on a shelf.
    pub(super) fn forked(&self, place: Place, size: u64) -> Self {
        self.plain.store(false, Ordering::Relaxed);
        let held = Held {
            place,
            size,
            ..Held::clone(&self.held)
        };
        Self {
            held: ManuallyDrop::new(held),
            plain: AtomicBool::new(false),
            wait: self.wait,
        }
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
    /// [`AllocateError`] with the figures; the block is as before then.
    pub fn grow_to(&mut self, size: u64) -> Result<(), AllocateError> {
        let deadline = self.wait.map(after);
        self.core().grow(self.place(), size, deadline)?;
        self.held.size = size;
        Ok(())
    }

    /// Grows in place if that needs no waiting. Where a mapper is just placing the block's next
    /// extent it returns behind those driver calls, instead of making its own beside them.
    ///
    /// # Errors
    /// [`AllocateError`] with the figures; the block is as before then.
    pub fn try_grow_to(&mut self, size: u64) -> Result<(), AllocateError> {
        self.core().try_grow(self.place(), size)?;
        self.held.size = size;
        Ok(())
    }

    /// Gives up the end of the block. Makes no driver call; growing again before somebody else
    /// needs the memory revives it with what it held. (A [hardened pool](super#hardened-pools)
    /// fills and unmaps it as a block that is dropped.)
    ///
    /// # Errors
    /// [`ShrinkError`] when `size` is zero or more than the block has.
    pub fn shrink_to(&mut self, size: u64) -> Result<(), ShrinkError> {
        self.core().shrink(self.place(), size)?;
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
        self.core().lock().record_use(self.place(), stream)
    }

    /// Notes that work which is on no stream of this library uses the block too: that of another
    /// library which was given the address, say. The memory is handed on only after all work of
    /// the device that is queued when it is freed.
    pub fn record_use_anywhere(&self) {
        self.plain.store(false, Ordering::Relaxed);
        self.core().lock().record_use_anywhere(self.place());
    }

    /// The streams whose work may use the block, the home first; nothing where that is all work of
    /// the device.
    #[must_use]
    pub fn streams(&self) -> Option<Vec<Stream>> {
        self.core().lock().streams(self.place())
    }

    /// Proof that somebody uses the block: while it lives, nothing under the block is unmapped or
    /// handed on, whatever becomes of the block.
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.plain.store(false, Ordering::Relaxed);
        self.keep()
    }

    /// Proof for whoever registers memory with a NIC or with NCCL: a [lease](Self::lease) with the
    /// exact list of the extents under the block, those behind its end included. What the block
    /// grows by later is not in it.
    #[must_use]
    pub fn register(&self) -> Registration {
        self.lease().register()
    }

    /// Keeps what lies under the block in place.
    fn keep(&self) -> Lease {
        Lease::new(Arc::clone(self.core()), self.held.place, self.size())
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
    /// [`CopyError`] when the range leaves the block, or while a capture guard lives.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), CopyError> {
        let stream = self.copy_stream(offset, bytes.len() as u64)?;
        let _stays = self.keep();
        self.span().write(&stream, offset, bytes)
    }

    /// Reads bytes behind what the home stream (or the legacy default stream) has queued.
    ///
    /// # Errors
    /// [`CopyError`] when the range leaves the block, or while a capture guard lives.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), CopyError> {
        let stream = self.copy_stream(offset, bytes.len() as u64)?;
        let _stays = self.keep();
        self.span().read(&stream, offset, bytes)
    }

    /// Frees the block as dropping it does, but not while its home stream is capturing.
    ///
    /// # Errors
    /// [`FreeError`] with the block in it.
    #[allow(clippy::result_large_err, reason = "the block is handed back as it is")]
    pub fn free(self) -> Result<(), FreeError<Self>> {
        match self.may_be_freed() {
            Ok(()) => Ok(()),
            Err(reason) => Err(FreeError {
                block: self,
                reason,
            }),
        }
    }

    /// Whether [`Self::free`] would free it now.
    pub(crate) fn may_be_freed(&self) -> Result<(), FreeRefusal> {
        // Asked only while a guard says that there are captures: the usual free asks nobody.
        if !self.core().is_capturing() {
            return Ok(());
        }
        match &self.held.home {
            Some(home) if home.is_capturing()? => Err(FreeRefusal::Capturing),
            _ => Ok(()),
        }
    }

    /// Whether the block [sleeps](super::Tenant::blocks): its addresses are kept and nothing is
    /// mapped there, so that a kernel that touches them faults. True too while another thread is
    /// putting it to sleep or waking it.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        // Asks no lock where none of the tenant's does.
        self.held.owner.shelves.is_bypassed() && self.core().lock().is_asleep(self.place())
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

    fn copy_stream(&self, offset: u64, size: u64) -> Result<Stream, CopyError> {
        if offset.checked_add(size).is_none_or(|end| end > self.size()) {
            return Err(CopyError::OutOfRange {
                offset,
                size,
                bytes: self.size(),
            });
        }
        let state = self.core().lock();
        if state.capturing > 0 {
            return Err(CopyError::Capturing);
        }
        if state.is_asleep(self.place()) {
            return Err(CopyError::Asleep);
        }
        drop(state);
        Ok(self
            .home_stream()
            .cloned()
            .unwrap_or_else(|| Stream::legacy(&self.core().device)))
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
        let shelf = held.shelf.clone().filter(|_| plain);
        let held = match shelf {
            Some(shelf) => shelf.put(held).err(),
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
