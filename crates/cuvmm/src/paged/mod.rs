//! Paged caches of attention keys and values: tensors over all block numbers, with memory only under
//! the blocks in use.
//!
//! Engines such as vLLM and SGLang, and the kernels that they call, address one tensor by block
//! numbers. Usually it is allocated whole when a server starts. A [`PagedKv`] has the addresses of
//! the whole tensor and the memory of the part in use: models that are not busy at the same time
//! share a GPU. A block number is an offset: `base + number * block_stride + ...`
//! ([`PagedView`]), so kernels and block tables stay as they are.
//!
//! [`KvCache`](crate::KvCache) is the other way: each sequence contiguous, without a block table.
//! Use that where kernels take a pointer and strides for each sequence, and this where they take
//! block tables.
//!
//! - **Numbers** belong to the engine, and so do the counts of who uses a block. [`FreeNumbers`] is a
//!   free list in place of the engine's: it gives out the lowest number first, so that blocks in use
//!   lie close together. Choosing numbers and backing them are separate calls, which may be in
//!   different processes.
//! - **Backing.** [`back`](PagedKv::back) returns when the blocks have memory, and makes no driver
//!   call if blocks in use touch the same extents, or the extents have not been taken meanwhile.
//!   [`release`](PagedKv::release) gives blocks up; an extent goes when no block in use touches it,
//!   behind the work of the [home stream](PagedKv::home_stream) and of
//!   [recorded](PagedKv::record_use) streams.
//! - **Waiting.** [`back_async`](PagedKv::back_async) waits in line for memory, in a future, while the
//!   engine goes on. [`try_back`](PagedKv::try_back) has no place in the line.
//! - **Steps.** An engine frees blocks of a sequence while it prepares a step whose kernels still use
//!   them. Blocks that are released while a [`Step`] lives keep their memory until it is dropped.
//! - **[Layouts](Layout).** Block-major and token-major are *interleaved*: a block is contiguous, and
//!   an extent of 2 to 32 MiB is one mapping for one or many blocks. Layer-major has an extent for
//!   each layer and part: with 32 layers, 16 tokens and 8 heads of 128 elements of 2 bytes, 64 blocks
//!   are 64 extents of 2 MiB, and all come back together or not at all.
//! - **The pool** charges the tenant for all extents, with or without a block in use. It takes those
//!   without one when another request needs memory. [`emptiest`](PagedKv::emptiest) chooses blocks
//!   for a pressure hook to evict.
//! - **Ahead of use.** With [`PagedKvBuilder::precommit`], the pool's mapper maps memory for the next
//!   blocks after each `back`, so that the next one makes no driver call. [`reserve`](PagedKv::reserve)
//!   is memory that no other tenant gets.
//! - **Contents.** A block that is backed again has the bytes that it had, or zeros if its memory was
//!   gone meanwhile; never another tenant's.
//!
//! - **[Sleep](crate::sleep#paged-caches).** A cache gives up all its memory and gets it back at the same
//!   addresses, with the bytes of its blocks or without, alone ([`PagedKv::alone`]) or with a tenant's
//!   blocks ([`Blocks::paged`](crate::sleep::Blocks::paged)).
//!
//! A cache is shared between threads by reference. Its lock is held while memory is mapped and
//! copied, but not while a call waits for memory or runs hooks, so a hook may release blocks of it.
//!
//! Keeps I-100.
//!
//! # Not provided
//! Kernels, a scheduler, block tables, and a table of prefixes.
//!
//! Reads of blocks that are not in use fault. Zeros mapped there would not end that: the driver maps
//! memory only where nothing is mapped. To give such a block memory, or to take it, would unmap its
//! addresses for a moment, in which a kernel of the engine may read them. So each `back` of a new extent
//! would wait for all queued kernels, and the pool could take no extent while kernels may be queued.
//! Mask the entries of block tables, or [pin](PagedKvBuilder::pinned) a block for them.

mod back;
mod builder;
mod copies;
mod core;
mod emptiest;
mod grants;
mod numbers;
mod planes;
mod requests;
mod rest;
#[cfg(test)]
mod rig;
mod shape;
mod sleep;
mod state;
mod stats;
mod step;
mod view;
mod wake;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cuvmm_driver::DeviceAddress;

use self::core::Core;
use self::shape::Geometry;
use self::state::{State, Use};
use crate::deferred::Locked;
use crate::error::{BlockError, CallError, PagedKvError};
use crate::ledger::InLine;
use crate::own::Stream;
use crate::pool::{CanSleep, Needs, Tenant, Wait};
use crate::region::Purged;

pub use back::BackFuture;
pub use builder::{DEFAULT_EXTENT, PagedKvBuilder};
pub use emptiest::Evictions;
pub use numbers::FreeNumbers;
pub use shape::{LayerGroup, Layout};
pub use stats::PagedStats;
pub use step::Step;
pub use view::PagedView;

/// A cache of keys and values that kernels address by block numbers, in a tenant's memory.
///
/// Kernels run on the home stream; other streams are named with [`record_use`](Self::record_use).
/// Dropping the cache waits for nothing: the pool takes memory and addresses once the work on these
/// streams is complete.
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let pool = cuvmm::Pool::builder(&device).limit(cuvmm::Limit::Bytes(64 << 20)).build()?;
/// # let tenant = pool.tenant("model").register()?;
/// # let stream = cuvmm::Stream::new(&device)?;
/// use cuvmm::PagedKv;
/// use cuvmm::paged::{FreeNumbers, LayerGroup};
///
/// // 16 GiB of addresses: 8,192 blocks of 16 tokens.
/// let group = LayerGroup::new(32, 16).keys_and_values(8, 128, 2);
/// let kv = PagedKv::builder(&tenant, &stream, 8_192).group(group).pinned([0]).build()?;
/// let mut free = FreeNumbers::new(8_192)?;
/// free.remove(0)?; // always backed, for padding
///
/// let numbers = free.take_many(5).ok_or("no free block")?;
/// kv.back(&numbers)?; // they have memory now
/// let keys = kv.view(0, 3, 0).ok_or("no such layer")?;
/// assert_eq!(keys.block(numbers[4]), Some(keys.address() + 5 * keys.byte_strides()[0]));
///
/// let step = kv.step();
/// kv.release(&numbers[..2])?; // a sequence ended, but the next kernels still read it
/// # let launch = || ();
/// launch();
/// drop(step); // from here on the memory of these blocks may go, behind the kernels
/// free.give_back_many(&numbers[..2])?;
/// assert_eq!(kv.stats()?.in_use, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias("kvcached", "paged KV", "paged attention", "block table", "vAttention"))]
pub struct PagedKv {
    core: Arc<Core>,
    base: DeviceAddress,
    geometry: Geometry,
    extent: u64,
    timeout: Option<Duration>,
}

impl PagedKv {
    /// Returns a builder for a cache of `blocks` block numbers, 1 to 2,147,483,647, in a tenant's
    /// memory, used on the stream `home`.
    pub const fn builder<'a>(
        tenant: &'a Tenant,
        home: &'a Stream,
        blocks: u32,
    ) -> PagedKvBuilder<'a> {
        PagedKvBuilder::new(tenant, home, blocks)
    }

    /// Backs blocks with memory, all or none, which are in use then. Blocks in use stay as they are,
    /// and a number that is named several times counts once. Calls pressure hooks, and waits up to
    /// the builder's [timeout](PagedKvBuilder::timeout).
    ///
    /// Makes no driver call and does not lock the pool if other blocks in use touch the extents of
    /// these. Makes none either for extents that were emptied, or
    /// [mapped ahead](PagedKvBuilder::precommit), and not taken since; the pool is locked only to
    /// call its mapper. For a new extent makes `cuMemCreate`, `cuMemMap` and `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`PagedKvError`] if a block does not exist, the cache sleeps, or memory is short, with the
    /// figures. No block has changed then.
    #[doc(alias("map", "alloc"))]
    pub fn back(&self, numbers: &[u32]) -> Result<(), PagedKvError> {
        self.back_as(numbers, Use::Backed, Wait::of(self.timeout))
    }

    /// Backs blocks like [`back`](Self::back), without waiting or calling hooks: with memory that is
    /// free, idle in the pool, or charged to no process of a ledger.
    ///
    /// # Errors
    /// Those of [`back`](Self::back). [`is_shortage`](PagedKvError::is_shortage) tells whether another
    /// attempt may succeed.
    pub fn try_back(&self, numbers: &[u32]) -> Result<(), PagedKvError> {
        self.back_as(numbers, Use::Backed, Wait::Never)
    }

    /// Backs blocks in a future that waits for memory in the pool's queue, and in the line of a ledger,
    /// while other calls use the cache. The future owns the numbers, borrows nothing, and is for any
    /// executor. `numbers`, callers and blocks in use are as for [`back`](Self::back).
    ///
    /// The first poll makes an attempt, with the driver calls of [`try_back`](Self::try_back), unless
    /// the blocks need memory and an earlier request waits for some. Then the pool's
    /// [mapper](crate::Mapper) makes the attempts, in the [order](crate::pool::futures) of the queue,
    /// and calls hooks in the first one and again about once a second. The builder's
    /// [timeout](PagedKvBuilder::timeout) has no effect.
    ///
    /// Memory that was granted is the future's until it is polled again: then the blocks are in use.
    /// It does not matter whether they were backed or released meanwhile. If the future is dropped
    /// before, the request is withdrawn, and blocks stay as they are: those that other calls backed
    /// stay in use, and granted memory of others is withdrawn. Until then the cache does not fall
    /// asleep, as while a step is prepared. No limit in time ends that: [`PagedStats::granted`] has the
    /// bytes.
    ///
    /// A request that waits is refused when the cache falls asleep. It does not keep the cache: if that
    /// is dropped, the future fails. Polled first in a hook, it behaves like `try_back`. While the home
    /// stream captures it may wait.
    ///
    /// # Errors
    /// Those of [`back`](Self::back) that waiting cannot end; [`BlockError::NoMapper`] as the cause of
    /// [`PagedKvError::Back`] if the pool has no mapper, or the mapper ends;
    /// [`PagedKvError::Ended`].
    ///
    /// ```
    /// # use cuvmm::driver::host::{HostDriver, HostOptions};
    /// # use cuvmm::paged::LayerGroup;
    /// # use cuvmm::{Device, Limit, Mapper, PagedKv, Pool, Stream};
    /// # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
    /// # let device = Device::open(driver, 0)?;
    /// # let mapper = Mapper::start(&device)?;
    /// # let pool = Pool::builder(&device).limit(Limit::Bytes(16 << 20)).mapper(&mapper).build()?;
    /// # let (tenant, home) = (pool.tenant("model").register()?, Stream::new(&device)?);
    /// # let group = LayerGroup::new(32, 16).keys_and_values(8, 128, 2);
    /// # let kv = PagedKv::builder(&tenant, &home, 64).group(group).build()?;
    /// # let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    /// # runtime.block_on(async {
    /// kv.back(&[0, 1])?; // an extent: all memory of the pool
    /// let engine = async {
    ///     kv.release(&[0, 1]) // it goes on meanwhile
    /// };
    /// let (backed, released) = tokio::join!(kv.back_async(&[8, 9]), engine);
    /// # released?;
    /// backed?;
    /// assert!(kv.is_backed(8)? && !kv.is_backed(0)?);
    /// # Ok::<(), cuvmm::error::PagedKvError>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias("admission", "request", "standing request"))]
    pub fn back_async(&self, numbers: &[u32]) -> BackFuture {
        BackFuture::new(&self.core, numbers)
    }

    fn back_as(&self, numbers: &[u32], to: Use, wait: Wait) -> Result<(), PagedKvError> {
        let attempt = |state: &mut State, place| state.attempt(numbers, to, place);
        let needs = |state: &State| state.needs(numbers);
        let backed = self.request(wait, needs, attempt);
        backed.map_err(|cause| refused(numbers.len(), cause))
    }

    /// Gives up blocks in use, all or none; a number that is named several times counts once. Extents
    /// that no block in use touches any more can be taken by the pool, behind the work that is queued
    /// by now on the home stream and the recorded streams. While a [step](Self::step) lives, that is
    /// done when it is dropped. Never waits for memory, and makes no driver call.
    ///
    /// The numbers may be backed again at once. They have their memory while it was not taken, and
    /// work of different streams on one block is for the engine to order.
    ///
    /// # Errors
    /// [`PagedKvError`] if a block is not in use or is pinned, or the cache sleeps. No block has changed
    /// then.
    #[doc(alias("free", "unmap"))]
    pub fn release(&self, numbers: &[u32]) -> Result<(), PagedKvError> {
        self.lock()?.release(numbers, &self.core.home)
    }

    /// Begins a step of the engine: blocks that are released while it lives keep their memory until
    /// it is dropped, after the launch.
    pub fn step(&self) -> Step<'_> {
        let number = self.lock().ok().map(|mut state| state.begin_step());
        Step::new(self, number)
    }

    fn end_step(&self, number: u64) {
        if let Ok(mut state) = self.lock() {
            state.end_step(number, &self.core.home);
        }
    }

    /// Reserves memory for exactly `count` blocks: for the lowest numbers that are not in use. Until
    /// they are used up, backing these finds memory; the reserve moves to lower numbers as those are
    /// released. Each block of it that is backed is used up. With 0, gives the reserve up. Calls
    /// pressure hooks, and waits as [`back`](Self::back) does.
    ///
    /// The memory is mapped, charged to the tenant, and counts in its ledger: no other tenant or
    /// process gets it. It is for engines that take the [lowest number](FreeNumbers::take) first;
    /// other numbers may find no memory.
    ///
    /// # Errors
    /// [`PagedKvError`] if fewer blocks are unused, the cache sleeps, or memory is short, with the
    /// figures. The reserve is then as before.
    #[doc(alias("precommit", "admission"))]
    pub fn reserve(&self, count: u32) -> Result<(), PagedKvError> {
        self.reserve_as(count, Wait::of(self.timeout))
    }

    /// Reserves memory like [`reserve`](Self::reserve), without waiting or calling hooks.
    ///
    /// # Errors
    /// Those of [`reserve`](Self::reserve).
    pub fn try_reserve(&self, count: u32) -> Result<(), PagedKvError> {
        self.reserve_as(count, Wait::Never)
    }

    fn reserve_as(&self, count: u32, wait: Wait) -> Result<(), PagedKvError> {
        let attempt = |state: &mut State, place| state.reserve(count, &self.core.home, place);
        let needs = |state: &State| state.needs_of_reserve(count);
        let reserved = self.request(wait, needs, attempt);
        reserved.map_err(|cause| refused(count as usize, cause))
    }

    /// Returns `true` if `count` more blocks, the lowest that are not in use, can have memory now: a
    /// hint, since another tenant or process may be faster. `false` while the cache sleeps.
    ///
    /// It counts memory whose work is complete and that [`back`](Self::back) gets without calling a
    /// hook: free memory, what the tenant and others of the pool have idle, memory that is charged to
    /// no process of the ledger, and what other processes last found idle, about once a second. Of
    /// others it counts only what is above their guarantees. [`try_back`](Self::try_back) does not get
    /// the part of other processes, for which `back` waits. While an older request of another process
    /// waits, that part does not count.
    ///
    /// The only driver calls are those of [`Tenant::headroom`].
    ///
    /// # Errors
    /// [`PagedKvError`] in a forked child.
    #[doc(alias = "admission")]
    pub fn can_allocate(&self, count: u32) -> Result<bool, PagedKvError> {
        let missing = {
            let state = self.lock()?;
            let lowest = state.lowest(count);
            if !state.rest.is_awake() || lowest.len() < count as usize {
                return Ok(false);
            }
            state.missing(&lowest)
        };
        Ok(missing == 0 || missing <= self.core.tenant.room_in_ledger()?)
    }

    /// Records that kernels on another stream use blocks, now and later: memory waits for the work of
    /// that stream too.
    ///
    /// # Errors
    /// [`PagedKvError`] if the stream belongs to another device.
    #[doc(alias = "record_stream")]
    pub fn record_use(&self, stream: &Stream) -> Result<(), PagedKvError> {
        stream.check_on(self.core.tenant.device())?;
        self.lock()?.region.record_use(stream);
        Ok(())
    }

    /// Gives the pool the extents that no block in use touches and whose work is complete. The result
    /// says how much that was, and what stays. Makes `cuMemUnmap` for each extent, and the calls that
    /// poll the fences.
    ///
    /// # Errors
    /// [`PagedKvError`] with the first error of the driver. The extents concerned stay.
    #[doc(alias = "trim")]
    pub fn purge(&self) -> Result<Purged, PagedKvError> {
        Ok(self.lock()?.region.purge()?)
    }

    /// Returns the view of one part of a layer for kernels, or `None` if there is no such group,
    /// layer or part. All are counted from 0; keys are part 0 and values part 1 of
    /// [`LayerGroup::keys_and_values`].
    #[must_use]
    pub fn view(&self, group: usize, layer: u32, part: usize) -> Option<PagedView> {
        let place = self.geometry.place(group, layer, part)?;
        Some(place.view(self.base))
    }

    /// Returns `true` if a block is in use or pinned.
    ///
    /// # Errors
    /// [`PagedKvError`] if there is no such block.
    pub fn is_backed(&self, number: u32) -> Result<bool, PagedKvError> {
        let found = self.lock()?.use_of(number)?;
        Ok(matches!(found, Use::Backed | Use::Pinned))
    }

    /// Returns `true` if the cache is asleep, falling asleep or waking: see
    /// [`PagedKv::alone`]. Makes no driver call; `false` in a forked child.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.lock().is_ok_and(|state| !state.rest.is_awake())
    }

    /// Returns the cache as an owner that can sleep.
    pub(crate) fn sleeper(&self) -> Arc<dyn CanSleep> {
        Arc::clone(&self.core) as Arc<dyn CanSleep>
    }

    /// Returns the number of block numbers.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.geometry.blocks
    }

    /// Returns the layout.
    #[must_use]
    pub const fn layout(&self) -> Layout {
        self.geometry.layout
    }

    /// Returns the bytes of a block in all layers and parts.
    #[must_use]
    pub const fn block_bytes(&self) -> u64 {
        self.geometry.block_bytes
    }

    /// Returns the bytes of an extent, of which memory consists.
    #[must_use]
    pub const fn extent(&self) -> u64 {
        self.extent
    }

    /// Returns the home stream.
    #[must_use]
    pub fn home_stream(&self) -> &Stream {
        &self.core.home
    }

    /// Returns the tenant whose memory it uses.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        &self.core.tenant
    }

    /// Makes an attempt, and repeats it while memory is short as [`Tenant::request`] does, without the
    /// lock in between. `needs` returns what [`Needs`] notes.
    fn request(
        &self,
        wait: Wait,
        needs: impl Fn(&State) -> (u64, u64),
        attempt: impl Fn(&mut State, Option<InLine>) -> Result<(), BlockError>,
    ) -> Result<(), BlockError> {
        // Most calls need no memory.
        match attempt(&mut *self.lock()?, None) {
            Err(error) if error.is_shortage() => {}
            done => return done,
        }
        let noted = Needs::default();
        let attempt = |place| {
            let mut state = self.lock()?;
            let outcome = attempt(&mut state, place);
            if matches!(&outcome, Err(error) if error.is_shortage()) {
                noted.note(needs(&state));
            }
            outcome
        };
        let (tenant, home) = (&self.core.tenant, Some(&self.core.home));
        tenant.request_for(&noted, home, wait, attempt)
    }

    fn lock(&self) -> Result<Locked<'_, State>, CallError> {
        self.core.lock()
    }
}

fn refused(blocks: usize, cause: BlockError) -> PagedKvError {
    match cause {
        BlockError::Argument(error) => PagedKvError::Argument(error),
        cause => PagedKvError::Back { blocks, cause },
    }
}

impl fmt::Debug for PagedKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedKv")
            .field("blocks", &self.geometry.blocks)
            .field("layout", &self.geometry.layout)
            .field("block_bytes", &self.geometry.block_bytes)
            .finish_non_exhaustive()
    }
}
