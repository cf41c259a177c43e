//! Waiting for memory as a future, which any executor polls.
//!
//! A future that finds too little memory waits in the pool's queue until it is dropped, and the
//! [mapper](crate::Mapper) of the pool serves the queue: on its thread it attempts what is asked for
//! and asks the fences. So a poll makes no driver call, waits for nothing and calls no hook, and
//! without a mapper a future is an error. [`BlockBuilder::timeout`] is not looked at: drop the future
//! to wait no longer, as every executor's own timeout does. A future that has completed is
//! `Pending` for ever if it is polled again.
//!
//! **First come, first served among those that fit.** Each time memory comes free the queue is gone
//! through from the front, and each request has its turn. One that does not fit keeps its place, and
//! those after it have their turns: but one of the same tenant that asks for as much or more is not
//! attempted, unless it has a home stream of its own, on which it may reuse what others may not yet.
//! `allocate` and `grow_to`, with and without a timeout, do not queue: they take what is there when
//! they ask. While any future waits, blocks that are freed skip the
//! [cache of their stream](super::BlockBuilder::home_stream), so that those who wait can have them.
//!
//! **Hooks.** [Pressure hooks](super::TenantBuilder::on_pressure) are called for a future as for a
//! thread that waits, each once, in its first turn, with a deadline that is far away: on the mapper's
//! thread. What they give goes to the first request that it is enough for. Wakers are called there too, and should do no more
//! than schedule their task. Both hold up all pools of the device that the mapper serves, and so does
//! the device itself on drivers before CUDA 12.5, where only waiting for it tells that the work on
//! blocks without a home stream has passed. What panics in either is logged, and the mapper goes on.
//! In a hook nothing waits: a future that is polled there first is as the `try_` form of its method,
//! driver calls included, and one that was polled before may wait for the very hook.
//!
//! **Dropping a future** takes its request back. What was granted and not taken goes back to the pool.
//! One that is leaked (`mem::forget`) is granted and never freed, as a leaked block is. A future keeps
//! the pool from being closed, and not its tenant from being unregistered.
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
//! // Any executor will do.
//! let runtime = tokio::runtime::Builder::new_current_thread().build()?;
//! runtime.block_on(async {
//!     let first = model.allocate_async(12 << 20).await?;
//!     let request = async {
//!         let block = model.allocate_async(8 << 20).await?; // there are 4 MiB left: waits
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

use super::Pool;
use super::block::Block;
use super::budget::TenantId;
use super::builder::BlockBuilder;
use super::core::Core;
use super::ids::BlockPlace;
use super::queue::{Answer, Want};
use super::stream_cache::Owner;
use super::tenant::Tenant;
use super::wanted::Wish;
use crate::deferred::is_in_hook;
use crate::error::BlockError;
use crate::own::Stream;

/// A request as its future has it.
#[derive(Clone, Copy, Debug)]
enum Request {
    /// Not made yet.
    New,
    /// In the queue, under its number.
    Queued(u64),
    /// Answered.
    Ended,
}

impl Request {
    /// Looks for its answer; makes it first, as `want` says.
    fn poll(
        &mut self,
        core: &Core,
        tenant: TenantId,
        context: &Context<'_>,
        want: impl FnOnce() -> Want,
    ) -> Poll<Answer> {
        let polled = match *self {
            Self::New => match core.enqueue(tenant, want(), context.waker().clone()) {
                Ok(number) => {
                    *self = Self::Queued(number);
                    return Poll::Pending;
                }
                Err(error) => Poll::Ready(Err(error)),
            },
            Self::Queued(number) => core.poll_request(number, context.waker()),
            Self::Ended => Poll::Pending,
        };
        if polled.is_ready() {
            *self = Self::Ended;
        }
        polled
    }

    /// Takes it back; returns the answer, if there is one that the future has not seen.
    fn withdraw(&mut self, core: &Core) -> Option<Answer> {
        match std::mem::replace(self, Self::Ended) {
            Self::Queued(number) => core.withdraw_request(number),
            Self::New | Self::Ended => None,
        }
    }
}

/// A block that is to be allocated: see [`BlockBuilder::allocate_async`].
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct AllocateFuture {
    owner: Arc<Owner>,
    wish: Arc<Wish>,
    request: Request,
}

impl Future for AllocateFuture {
    type Output = Result<Block, BlockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let core = &this.owner.core;
        let builder = BlockBuilder::of(&this.owner, this.wish.wanted());
        // Those who wait for memory come before those who find some at once.
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

/// A block that is to grow: see [`Block::grow_to_async`].
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
        polled.map_ok(|_| this.block.has_size(size))
    }
}

impl Drop for GrowFuture<'_> {
    fn drop(&mut self) {
        let core = Arc::clone(self.block.core());
        if let Some(Ok(_)) = self.request.withdraw(&core) {
            let before = (*self.block.place(), self.block.size());
            if let Err(error) = core.shrink(&[before]) {
                tracing::debug!(%error, "a block keeps what it was granted and did not take");
                self.block.has_size(self.size);
            }
        }
    }
}

/// News of memory that came free: see [`Pool::freed`].
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
        let want = || Want::News(0, 0);
        let polled = this
            .request
            .poll(&this.core, TenantId(u64::MAX), context, want);
        polled.map_ok(|_| ())
    }
}

impl Drop for FreedFuture {
    fn drop(&mut self) {
        self.request.withdraw(&self.core);
    }
}

impl Pool {
    /// Waits until memory of the pool comes free: a block or a lease has ended, a block has shrunk, a
    /// limit was raised, or work has passed that memory was pending for. It listens from this call on, so
    /// what is attempted between the call and the `await` misses nothing. Others may have the memory
    /// first; and memory that was pending and is reused meanwhile may count as having passed. One that is
    /// only held has the mapper ask fences all the while.
    ///
    /// For the usual wait there are [`Tenant::allocate_async`] and [`Block::grow_to_async`].
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
    /// Allocates a block, and [waits for memory](self) as a future does.
    ///
    /// # Errors
    /// As [`BlockBuilder::allocate_async`].
    pub fn allocate_async(&self, size: u64) -> AllocateFuture {
        self.block(size).allocate_async()
    }

    /// Allocates a block whose home stream is `stream`, and waits for memory as a future does.
    ///
    /// # Errors
    /// As [`BlockBuilder::allocate_async`].
    pub fn allocate_on_async(&self, stream: &Stream, size: u64) -> AllocateFuture {
        self.block(size).home_stream(stream).allocate_async()
    }
}

impl BlockBuilder<'_> {
    /// Allocates, and waits as a future does until there is memory.
    ///
    /// While no other waits, cached memory of the home stream comes with the first poll. Otherwise the
    /// mapper's thread makes the calls of [`try_allocate`](Self::try_allocate).
    ///
    /// # Errors
    /// [`BlockError::NoMapper`] when the pool has no mapper or the mapper ends, and what
    /// [`allocate`](Self::allocate) says of requests that no waiting can serve.
    pub fn allocate_async(self) -> AllocateFuture {
        let (owner, wanted) = self.into_parts();
        AllocateFuture {
            owner: Arc::clone(owner),
            wish: Arc::new(Wish::of(&wanted)),
            request: Request::New,
        }
    }
}

impl Block {
    /// Grows in place, and waits as a future does until there is memory.
    ///
    /// While no other waits, what lies behind the block's end already comes with the first poll. Otherwise
    /// the mapper's thread makes the calls of [`try_grow_to`](Self::try_grow_to). A future that is
    /// dropped leaves the block with the size and the bytes that it had; what it
    /// [shared](Self::fork) where it was to grow may be its own by then. One that was granted and is
    /// dropped while the block sleeps leaves it grown.
    ///
    /// # Errors
    /// [`BlockError::NoMapper`] when the pool has no mapper or the mapper ends, and what
    /// [`grow_to`](Self::grow_to) says of requests that no waiting can serve.
    pub const fn grow_to_async(&mut self, size: u64) -> GrowFuture<'_> {
        GrowFuture {
            block: self,
            size,
            request: Request::New,
        }
    }
}

impl Core {
    /// Grows a block into what it has, unless others wait for memory.
    fn grows_at_once(&self, place: &BlockPlace, size: u64) -> bool {
        let mut state = self.lock();
        let grown = !self.is_awaited() && state.grow_within(place, size);
        Self::let_go(state);
        grown
    }
}
