//! Futures that wait for memory, for any executor.
//!
//! A future that finds too little memory waits in the pool's queue until it is dropped. The pool's
//! [mapper](crate::Mapper) serves the queue: its thread makes the attempts and polls the fences. So
//! a poll makes no driver call, waits for nothing and calls no hook; the first poll of
//! [`PagedKv::back_async`](crate::PagedKv::back_async) alone makes an attempt itself. Without a mapper
//! the future fails. [`BlockBuilder::timeout`] has no effect; to stop waiting, drop the future, as the
//! timeouts of executors do. A completed future that is polled again stays `Pending` for ever.
//!
//! **Order.** Requests are served first come, first served among those that fit. Each time memory
//! becomes free, the mapper attempts every request from the front of the queue. Memory that becomes
//! free during the attempt of one may serve that one before those in front of it. A request that
//! does not fit keeps its place, and the requests behind it are attempted too, except later requests
//! of its tenant for as much memory or more, beyond what a growing block has behind its end. Of
//! these, two are attempted nevertheless: a block with a home stream, since it may reuse memory on
//! its stream that other requests may not use yet; and a block that need not read as zero, if the
//! earlier one must. Growth of a block that must read as zero, or over shared memory, holds up none:
//! it may wait for the block's own work, or for more memory than it grows by. Requests of paged
//! caches hold up none, and none holds up these: memory that a cache has withdrawn may be enough for
//! one of them. `allocate` and `grow_to`, with and without a timeout, do not queue: they take memory
//! that is free when they are called. While a future waits, freed blocks skip the
//! [stream caches](crate::pool::BlockBuilder::home_stream), so that waiting requests can have them.
//!
//! **Hooks.** [Pressure hooks](crate::pool::TenantBuilder::on_pressure) are called for a future as for a
//! thread that waits: at its first turn, and again about once a second while attempts fail, without a
//! deadline, on the mapper's thread. A request that is not attempted, since an earlier one does not
//! fit, calls no hook again. Memory that hooks free goes to the first request that it is enough for.
//! Wakers are called on that thread too, and should only schedule their task. A slow hook or waker
//! delays all pools that the mapper serves, which it serves between two hooks. So does the device
//! itself on drivers before CUDA 12.5, where only synchronizing with it shows that work on blocks
//! without a home stream is complete. A panic in a hook or waker is logged, and the mapper goes on. A
//! future that is polled first in a hook behaves like the `try_` form of its method, driver calls
//! included. A future that was polled before must not be waited for in a hook, since it may be waiting
//! for that hook.
//!
//! **Dropping.** Dropping a future withdraws its request, and memory that was granted and not taken
//! goes back to the pool. A leaked future (`mem::forget`) of a new block is granted and its memory
//! never freed, as with a leaked block. A leaked future of a block's growth is dropped when the
//! block next grows, shrinks or is dropped. A leaked future of a paged cache keeps what it was granted
//! until the cache is dropped. A future prevents its pool from being closed; it does
//! not prevent its tenant from being unregistered.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use cuvmm::driver::host::{HostDriver, HostOptions};
//! use cuvmm::{Device, Limit, Mapper, Pool};
//!
//! # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
//! # let device = Device::open(driver, 0)?;
//! let mapper = Mapper::start(&device)?;
//! let pool = Pool::builder(&device).limit(Limit::Bytes(16 << 20)).mapper(&mapper).build()?;
//! let model = pool.tenant("model").register()?;
//! // Any executor works.
//! let runtime = tokio::runtime::Builder::new_current_thread().build()?;
//! runtime.block_on(async {
//!     let first = model.allocate_async(12 << 20).await?;
//!     let request = async {
//!         let block = model.allocate_async(8 << 20).await?; // 4 MiB are left: waits
//!         block.write(0, b"served")?;
//!         Ok::<_, cuvmm::Error>(block)
//!     };
//!     let (served, ()) = tokio::join!(request, async { drop(first) });
//!     served
//! })?;
//! # Ok(())
//! # }
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::queue::{Answer, Want};
use super::wanted::OwnedOptions;
use crate::deferred::is_in_hook;
use crate::error::BlockError;
use crate::pool::Pool;
use crate::pool::accounts::TenantId;
use crate::pool::blocks::slots::BlockPlace;
use crate::pool::blocks::{Block, BlockBuilder, Owner};
use crate::pool::core::Core;
use crate::pool::tenant::Tenant;

#[derive(Clone, Copy, Debug)]
pub(super) enum Request {
    /// Not queued yet.
    New,
    /// In the queue, with its number.
    Queued(u64),
    /// Answered or withdrawn.
    Ended,
}

impl Request {
    fn poll(
        &mut self,
        core: &Core,
        tenant: TenantId,
        context: &Context<'_>,
        want: impl FnOnce() -> Want,
    ) -> Poll<Answer> {
        match *self {
            Self::New => self.queue(core, tenant, context, want()),
            Self::Queued(_) | Self::Ended => self.poll_queued(core, context),
        }
    }

    /// Queues the request. It is refused at once if waiting cannot help.
    pub(super) fn queue(
        &mut self,
        core: &Core,
        tenant: TenantId,
        context: &Context<'_>,
        want: Want,
    ) -> Poll<Answer> {
        match core.enqueue(tenant, want, context.waker().clone()) {
            Ok(number) => {
                *self = Self::Queued(number);
                Poll::Pending
            }
            Err(error) => {
                *self = Self::Ended;
                Poll::Ready(Err(error))
            }
        }
    }

    pub(super) fn poll_queued(&mut self, core: &Core, context: &Context<'_>) -> Poll<Answer> {
        let Self::Queued(number) = *self else {
            return Poll::Pending;
        };
        let polled = core.poll_request(number, context.waker());
        if polled.is_ready() {
            *self = Self::Ended;
        }
        polled
    }

    /// Returns the request's number, unless its answer was taken.
    const fn queued(self) -> Option<u64> {
        match self {
            Self::Queued(number) => Some(number),
            Self::New | Self::Ended => None,
        }
    }

    /// Withdraws the request. Returns an answer that the future has not seen.
    pub(super) fn withdraw(&mut self, core: &Core) -> Option<Answer> {
        let ended = std::mem::replace(self, Self::Ended);
        core.withdraw_request(ended.queued()?)
    }
}

/// A future that allocates a block; returned by [`BlockBuilder::allocate_async`].
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct AllocateFuture {
    owner: Arc<Owner>,
    wish: Arc<OwnedOptions>,
    request: Request,
}

impl Future for AllocateFuture {
    type Output = Result<Block, BlockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let core = &this.owner.core;
        let builder = BlockBuilder::of(&this.owner, this.wish.wanted());
        // Requests that wait come before requests that would find memory at once.
        if matches!(this.request, Request::New)
            && core.has_mapper()
            && !core.is_awaited()
            && let Some(block) = builder.stream_cached_block()
        {
            this.request = Request::Ended;
            return Poll::Ready(Ok(block));
        }
        if matches!(this.request, Request::New) && is_in_hook() {
            this.request = Request::Ended;
            return Poll::Ready(builder.try_allocate());
        }
        let want = || Want::Block(Arc::clone(&this.wish));
        let tenant = this.owner.tenant;
        match this.request.poll(core, tenant, context, want) {
            Poll::Ready(Ok(Some(place))) => Poll::Ready(Ok(builder.block_at(place))),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(None)) | Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for AllocateFuture {
    fn drop(&mut self) {
        let core = &self.owner.core;
        if let Some(Ok(Some(place))) = self.request.withdraw(core) {
            core.free(&place);
        }
    }
}

/// A future that grows a block; returned by [`Block::grow_to_async`].
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct GrowFuture<'a> {
    block: &'a mut Block,
    size: u64,
    request: Request,
}

impl Future for GrowFuture<'_> {
    type Output = Result<(), BlockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if matches!(this.request, Request::New) {
            this.block.withdraw_growth();
        }
        let core = Arc::clone(this.block.core());
        let (place, size) = (*this.block.place(), this.size);
        let polled = match this.request {
            Request::New if is_in_hook() => {
                this.request = Request::Ended;
                return Poll::Ready(this.block.try_grow_to(size));
            }
            Request::New if core.has_mapper() && core.grows_at_once(&place, size) => {
                this.request = Request::Ended;
                Poll::Ready(Ok(None))
            }
            _ => {
                let want = || Want::Growth(place, size, this.block.size());
                this.request.poll(&core, place.slot.tenant, context, want)
            }
        };
        let queued = this.request.queued();
        this.block
            .awaits_growth(queued.map(|number| (number, size)));
        polled.map_ok(|_| this.block.has_size(size))
    }
}

impl Drop for GrowFuture<'_> {
    fn drop(&mut self) {
        if self.request.queued().is_some() {
            self.block.withdraw_growth();
        }
    }
}

/// A future that completes when memory becomes free; returned by [`Pool::freed`].
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct FreedFuture {
    core: Arc<Core>,
    request: Request,
    refused: Option<BlockError>,
}

impl Future for FreedFuture {
    type Output = Result<(), BlockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(refused) = this.refused.take() {
            return Poll::Ready(Err(refused));
        }
        let want = || Want::Notification(0, 0);
        let polled = this.request.poll(&this.core, TenantId::NONE, context, want);
        polled.map_ok(|_| ())
    }
}

impl Drop for FreedFuture {
    fn drop(&mut self) {
        self.request.withdraw(&self.core);
    }
}

impl Pool {
    /// Waits until memory of the pool becomes free: a block or lease has ended, a block has shrunk,
    /// a limit was raised, or work that memory was pending for is complete. The future listens from
    /// this call on, so an attempt between the call and the `await` misses nothing. Another request
    /// may take the memory first, and pending memory that is reused meanwhile may count as freed.
    /// While the future lives, polled or not, the mapper polls fences.
    ///
    /// [`Tenant::allocate_async`] and [`Block::grow_to_async`] serve the usual wait.
    ///
    /// # Errors
    /// [`BlockError::NoMapper`] when the pool has no mapper or the mapper ends;
    /// [`CallError`](crate::error::CallError) when the context is lost, and in a forked child.
    pub fn freed(&self) -> FreedFuture {
        let core = Arc::clone(&self.core);
        let (request, refused) = match core.listen() {
            Ok(number) => (Request::Queued(number), None),
            Err(error) => (Request::Ended, Some(error)),
        };
        FreedFuture {
            core,
            request,
            refused,
        }
    }
}

impl Tenant {
    /// Allocates a block of `size` bytes in a future that [waits for memory](self).
    ///
    /// # Errors
    /// As [`BlockBuilder::allocate_async`].
    pub fn allocate_async(&self, size: u64) -> AllocateFuture {
        self.block(size).allocate_async()
    }
}

impl BlockBuilder<'_> {
    /// Allocates the block in a future that [waits for memory](super::futures).
    ///
    /// While no other request waits, the first poll returns a cached block of the home stream if
    /// any. Otherwise the mapper's thread makes the driver calls of
    /// [`try_allocate`](Self::try_allocate).
    ///
    /// # Errors
    /// [`BlockError::NoMapper`] when the pool has no mapper or the mapper ends, and the errors of
    /// [`allocate`](Self::allocate) for requests that no waiting can serve.
    pub fn allocate_async(self) -> AllocateFuture {
        let (owner, wanted) = self.into_parts();
        AllocateFuture {
            owner: Arc::clone(owner),
            wish: Arc::new(OwnedOptions::of(&wanted)),
            request: Request::New,
        }
    }
}

impl Block {
    /// Grows the block in place in a future that [waits for memory](super::futures).
    ///
    /// While no other request waits, the first poll grows the block into memory that is already
    /// behind its end. Otherwise the mapper's thread makes the driver calls of
    /// [`try_grow_to`](Self::try_grow_to). Growth over [shared](Self::fork) memory is granted only
    /// when all work queued on the block is complete, and so never while its streams are always
    /// busy. A dropped future leaves the block with its size and bytes; shared memory where the
    /// block was to grow may be its own by then. If the growth was granted and the future is
    /// dropped while the block sleeps, the block stays grown.
    ///
    /// # Errors
    /// [`BlockError::NoMapper`] when the pool has no mapper or the mapper ends, and the errors of
    /// [`grow_to`](Self::grow_to) for requests that no waiting can serve.
    pub const fn grow_to_async(&mut self, size: u64) -> GrowFuture<'_> {
        GrowFuture {
            block: self,
            size,
            request: Request::New,
        }
    }
}

impl Core {
    /// Grows a block into memory that it already has, unless another request waits for memory.
    fn grows_at_once(&self, place: &BlockPlace, size: u64) -> bool {
        let mut state = self.lock();
        let (memory, blocks) = state.halves();
        let grown = !self.is_awaited() && blocks.grow_within(memory, place, size);
        Self::unlock(state);
        grown
    }
}
