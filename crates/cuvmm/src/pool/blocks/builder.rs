//! The options of a block, and the ways to allocate blocks: one, several, or side by side.

use std::sync::Arc;
use std::time::Duration;

use super::adjacent::Placement;
use super::block::Block;
use super::slots::BlockPlace;
use super::stream_cache::{Held, Owner, Shape};
use crate::error::{ArgumentError, BlockError};
use crate::growth::Growth;
use crate::own::Stream;
use crate::pool::line::{Wait, Wanted};

/// A builder of blocks, made by [`Tenant::block`](crate::pool::Tenant::block).
#[derive(Clone, Debug)]
#[must_use = "nothing is allocated before `allocate` or `try_allocate`"]
pub struct BlockBuilder<'a> {
    owner: &'a Arc<Owner>,
    wanted: Wanted<'a>,
    wait: Option<Duration>,
}

impl<'a> BlockBuilder<'a> {
    pub(in crate::pool) fn new(owner: &'a Arc<Owner>, size: u64) -> Self {
        let wanted = Wanted {
            size,
            capacity: size,
            stride: 1,
            ..Wanted::default()
        };
        Self::of(owner, wanted)
    }

    pub(in crate::pool) const fn of(owner: &'a Arc<Owner>, wanted: Wanted<'a>) -> Self {
        Self {
            owner,
            wanted,
            wait: None,
        }
    }

    /// Sets the size in bytes that the block may grow to: at least its size, which is the default.
    /// Takes addresses, not memory.
    ///
    /// With a capacity the size may be zero: the block is then a range of addresses, charged as
    /// such ([`PoolBuilder::address_limit`](crate::pool::PoolBuilder::address_limit)), and neither
    /// memory nor mappings are charged, nor precommitted by a mapper, before it first
    /// [grows](Block::grow_to).
    pub const fn capacity(mut self, bytes: u64) -> Self {
        self.wanted.capacity = bytes;
        self
    }

    /// Sets the stream that the block is used on. A dropped block is freed on that stream: the next
    /// allocation on it can use the memory at once, and any other only when the stream's work is
    /// complete.
    ///
    /// Without a home stream the memory waits for all work of the device and of the devices that
    /// [the pool is open to](crate::pool::PoolBuilder::open_to). Marking that work (`cuCtxRecordEvent`)
    /// breaks every graph capture on the context, also a capture by another library, unless a
    /// [capture guard](crate::pool::Pool::capture_guard) lives meanwhile. A [hardened
    /// pool](crate::pool#hardened-pools) marks the work as soon as such a block is dropped, and so does
    /// any pool if the block was [exported](Block::export); otherwise the pool marks it when the
    /// memory is requested.
    ///
    /// A stream of another device makes the allocation fail.
    #[doc(alias = "stream-ordered")]
    pub const fn home_stream(mut self, stream: &'a Stream) -> Self {
        self.wanted.home = Some(stream);
        self
    }

    /// Sets a tag for the block. [`TenantStats::tags`](crate::pool::TenantStats::tags) shows the bytes in
    /// use by tag.
    pub fn tag(mut self, tag: impl Into<Arc<str>>) -> Self {
        self.wanted.tag = Some(tag.into());
        self
    }

    /// Makes the block, and the memory that it grows by, read as zero; `false` by default.
    ///
    /// To grow again over memory that the block has just given up must then wait for the work that
    /// may still write there. On the home stream the zeros are written behind that work; without a
    /// home stream the growth is refused until the work is complete. A block that is not zeroed may
    /// show bytes that its own tenant wrote before. It never shows another tenant's bytes, unless
    /// the pool is set to [`Scrub::Never`](crate::pool::Scrub::Never).
    pub const fn zeroed(mut self, yes: bool) -> Self {
        self.wanted.zeroed = yes;
        self
    }

    /// Sets how much memory the block gets at once when it outgrows its memory, instead of [the
    /// pool's setting](crate::pool::PoolBuilder::growth). In a [hardened pool](crate::pool#hardened-pools)
    /// growth is always [exact](Growth::Exact).
    pub const fn growth(mut self, growth: Growth) -> Self {
        self.wanted.grain.growth = Some(growth);
        self
    }

    /// Sets the largest extent under the block, in bytes: a granule times a power of two. The
    /// default and the maximum is [the pool's](crate::pool::PoolBuilder::largest_extent). Small extents
    /// cost more driver calls and strand less memory.
    pub const fn largest_extent(mut self, bytes: u64) -> Self {
        self.wanted.grain.largest = Some(bytes);
        self
    }

    /// Makes the block's extents small in proportion to what lies before them, so that most of the
    /// memory behind its end is free for other blocks after a [shrink](Block::shrink_to); `false`
    /// by default. An extent has at most 16 MiB, or a quarter of the bytes before it if that is
    /// more, and at most the [largest extent](Self::largest_extent).
    ///
    /// An extent is unmapped whole. So the block's end strands at most a quarter of the block's
    /// size, or 16 MiB, where it may strand 1 GiB by default. In return a block of 1 GiB takes the
    /// driver calls of 20 extents instead of one.
    ///
    /// The rule holds for all memory that the block gets: by allocation, growth, wake and
    /// compaction. Only [`compact_prefix`](Block::compact_prefix) makes larger extents. A freed
    /// block goes to the pool instead of a stream cache. Its memory serves later blocks with this
    /// option without a driver call, and other blocks when it is unmapped.
    #[doc(alias = "ladder")]
    pub const fn expect_shrink(mut self, yes: bool) -> Self {
        self.wanted.shrinks = yes;
        self
    }

    /// Lets the pool replace the block's memory when a request lacks memory, at the same addresses;
    /// `false` by default. With `true` all work on the block must be launched under a
    /// [`Lease`](crate::pool::Lease), with [uses](crate::pool::Lease::record_use) on further streams
    /// recorded before it ends.
    ///
    /// When such a block has [shrunk](Block::shrink_to), the part that it gave up of the extent in
    /// which it ends can serve other blocks: before a request is refused or waits, the bytes before
    /// the end are copied to smaller extents (`cuMemcpyDtoDAsync`, waited for), as
    /// [`Pool::compact`](crate::pool::Pool::compact) does. That happens while no lease lives, all
    /// work on the home stream and the recorded streams is complete, and no capture guard lives, if
    /// there is room for the copy. A lease that is taken meanwhile waits for the copy.
    #[doc(alias = "relocatable")]
    pub const fn movable(mut self, yes: bool) -> Self {
        self.wanted.movable = yes;
        self
    }

    /// Makes the distance between blocks that are allocated [side by side](Self::allocate_adjacent)
    /// a multiple of `bytes`, so that rows of elements of that size form one tensor. At least 1. By
    /// default the distance is a multiple of every power of two up to a granule. Other multiples
    /// take more addresses: up to twice the capacity and twice the smallest multiple that is a
    /// whole number of granules.
    #[doc(alias = "pitch")]
    pub const fn stride_multiple(mut self, bytes: u64) -> Self {
        self.wanted.stride = bytes;
        self
    }

    /// Sets how long [`allocate`](Self::allocate) and [`Block::grow_to`] may wait for memory in use
    /// to become free. By default they do not wait, but they call pressure hooks.
    #[doc(alias = "deadline")]
    pub const fn timeout(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Allocates the block. If memory is short, calls pressure hooks and waits for at most the
    /// [timeout](Self::timeout). A request above the tenant's own limit or the pool's is refused at
    /// once. A request that only the guarantees of other tenants prevent waits: guarantees can
    /// change, and tenants can be unregistered.
    ///
    /// Makes the driver calls of [`try_allocate`](Self::try_allocate). In a
    /// [hook](crate::pool::TenantBuilder::on_pressure) the call runs no hooks and does not wait.
    ///
    /// # Errors
    /// [`BlockError`], with the figures, when memory, mappings or addresses are short; when the
    /// capacity is zero or below the size, an extent or stride is out of range, or the home stream
    /// is another device's; when the tenant is unregistered; and when a driver call fails. Every
    /// block is then as before.
    pub fn allocate(self) -> Result<Block, BlockError> {
        self.one(|builder| Wait::of(builder.wait))
    }

    /// Allocates the block if that needs no waiting, neither for the GPU's work nor for memory, and
    /// calls no hook. Without a home stream the call waits for the scrub of memory that changes
    /// tenants, about 0.25 ms for each GiB; with a home stream the scrub is ordered on that stream.
    ///
    /// Cached memory of the home stream takes no driver call. Otherwise each extent takes
    /// `cuMemCreate` (or `cuMemUnmap` if it was idle elsewhere), `cuMemMap` and `cuMemSetAccess`,
    /// and a new slot `cuMemAddressReserve`.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn try_allocate(self) -> Result<Block, BlockError> {
        self.one(|_| Wait::Never)
    }

    /// Allocates `count` blocks with these options in one operation: all of them or none.
    ///
    /// # Errors
    /// As [`Self::allocate`], and [`ArgumentError::TooLarge`] when they need more memory than the
    /// device has, where a block of zero bytes counts as a granule.
    pub fn allocate_many(self, count: usize) -> Result<Vec<Block>, BlockError> {
        let wait = Wait::of(self.wait);
        self.many(count, wait)
    }

    /// Allocates `count` blocks with these options, all of them or none, if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::allocate_many`].
    pub fn try_allocate_many(self, count: usize) -> Result<Vec<Block>, BlockError> {
        self.many(count, Wait::Never)
    }

    /// Allocates `count` blocks with these options side by side, all of them or none. The distance
    /// from each block to the next is constant, so the blocks are the rows of one strided tensor,
    /// and each row grows in place. [`Tenant::grow_all`](crate::pool::Tenant::grow_all) grows them
    /// together.
    ///
    /// The distance is the difference of the first two addresses: the capacity, rounded up to a
    /// granule times a power of two, or to a [multiple](Self::stride_multiple), plus two guards in
    /// a [hardened pool](crate::pool#hardened-pools). Between a block's end and the next block no memory
    /// of another block is ever mapped.
    ///
    /// Each block is otherwise an ordinary block. After one was dropped,
    /// [`allocate_beside`](Self::allocate_beside) puts another in its place. If `count` blocks that were side by side, at most
    /// 1,024, have been freed and their places are unused, the new blocks take over these places
    /// with the memory that is still mapped there. Otherwise the call makes one reservation
    /// (`cuMemAddressReserve`), once there is memory for all blocks. Its addresses go back to the
    /// driver when all of its blocks have been freed and addresses are needed.
    ///
    /// # Errors
    /// As [`Self::allocate_many`].
    pub fn allocate_adjacent(self, count: usize) -> Result<Vec<Block>, BlockError> {
        let wait = Wait::of(self.wait);
        self.adjacent(count, wait)
    }

    /// Allocates `count` blocks with these options side by side, all of them or none, if that needs
    /// no waiting. See [`allocate_adjacent`](Self::allocate_adjacent).
    ///
    /// # Errors
    /// As [`Self::allocate_many`].
    pub fn try_allocate_adjacent(self, count: usize) -> Result<Vec<Block>, BlockError> {
        self.adjacent(count, Wait::Never)
    }

    /// Allocates the block at a free place beside another block of the tenant: `distance` places
    /// behind it in its row, or before it if negative. So a row of blocks that were allocated [side
    /// by side](Self::allocate_adjacent), or forked from such a row, is whole again after one of
    /// them was freed. If memory is short, or the last block's work there is not complete, calls
    /// pressure hooks and waits for at most the [timeout](Self::timeout).
    ///
    /// The options have to be those of the row: the same [largest extent](Self::largest_extent), and
    /// a capacity of at most the distance between the blocks. The
    /// [stride multiple](Self::stride_multiple) has no effect, and the row's
    /// [`expect_shrink`](Self::expect_shrink) holds.
    ///
    /// The place is free once the last block there was dropped and no lease on it lives. On the home
    /// stream of that block it is used again at once; any other stream is ordered behind its work,
    /// and without a home stream the work must be complete. Until the place is filled, the tenant's
    /// other allocations may take it too.
    ///
    /// Memory that is still mapped there is used again, except that too large an extent is unmapped,
    /// for which the work must be complete. Makes the driver calls of
    /// [`try_allocate`](Self::try_allocate), without a new slot.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate), and
    /// - [`BlockError::PlaceInUse`] if a block is there, or a lease or queued work keeps the memory;
    /// - [`ArgumentError::NoSuch`] if there is no such place: the row ends before it, has more than
    ///   1,024 blocks, or is in a [hardened pool](crate::pool#hardened-pools), which uses no
    ///   address again;
    /// - [`BlockError::WrongTenant`] if `block` is another tenant's.
    pub fn allocate_beside(self, block: &Block, distance: isize) -> Result<Block, BlockError> {
        let wait = Wait::of(self.wait);
        self.beside(block, distance, wait)
    }

    /// Allocates the block at a free place beside another block, if that needs no waiting. See
    /// [`allocate_beside`](Self::allocate_beside).
    ///
    /// # Errors
    /// As [`Self::allocate_beside`].
    pub fn try_allocate_beside(self, block: &Block, distance: isize) -> Result<Block, BlockError> {
        self.beside(block, distance, Wait::Never)
    }

    pub(in crate::pool) fn into_parts(self) -> (&'a Arc<Owner>, Wanted<'a>) {
        (self.owner, self.wanted)
    }

    pub(in crate::pool) fn stream_cached_block(&self) -> Option<Block> {
        self.stream_cached().map(|held| self.block(held))
    }

    pub(in crate::pool) fn block_at(&self, place: BlockPlace) -> Block {
        self.block(self.held(place))
    }

    fn one(self, wait: impl FnOnce(&Self) -> Wait) -> Result<Block, BlockError> {
        let held = match self.stream_cached() {
            Some(held) => held,
            None => {
                let Owner { core, tenant, .. } = &**self.owner;
                self.held(core.allocate(*tenant, &self.wanted, wait(&self))?)
            }
        };
        Ok(self.block(held))
    }

    fn beside(self, block: &Block, distance: isize, wait: Wait) -> Result<Block, BlockError> {
        let Owner { core, tenant, .. } = &**self.owner;
        let slot = block.place().slot;
        if !block.is_of(core) || slot.tenant != *tenant {
            return Err(BlockError::WrongTenant { index: 0 });
        }
        let place = core.allocate_beside(*tenant, &self.wanted, (slot, distance), wait)?;
        Ok(self.block_at(place))
    }

    fn adjacent(self, count: usize, wait: Wait) -> Result<Vec<Block>, BlockError> {
        if count == 0 {
            return Ok(Vec::new());
        }
        self.check_count(count)?;
        let Owner { core, tenant, .. } = &**self.owner;
        let placement = (count, Placement::Adjacent);
        let places = core.allocate_many(*tenant, &self.wanted, placement, wait)?;
        Ok(self.blocks(places).collect())
    }

    fn many(self, count: usize, wait: Wait) -> Result<Vec<Block>, BlockError> {
        self.check_count(count)?;
        let stream_cached = std::iter::from_fn(|| self.stream_cached()).take(count);
        let mut blocks: Vec<Block> = stream_cached.map(|held| self.block(held)).collect();
        let missing = count - blocks.len();
        if missing > 0 {
            let Owner { core, tenant, .. } = &**self.owner;
            let make = |count| {
                let placement = (count, Placement::Anywhere);
                core.allocate_many(*tenant, &self.wanted, placement, wait)
            };
            let mut made = make(missing);
            if matches!(&made, Err(error) if error.is_shortage()) && !blocks.is_empty() {
                // Freed to the pool, the memory of the cached blocks may serve more of the request.
                blocks.clear();
                made = make(count);
            }
            blocks.extend(self.blocks(made?));
        }
        Ok(blocks)
    }

    /// Refuses more blocks than the device's memory could hold, which bounds the work for each
    /// block.
    fn check_count(&self, count: usize) -> Result<(), BlockError> {
        let device = &self.owner.core.device;
        let (size, total) = (self.wanted.size, device.total_memory());
        let each = device.granule().round_up(size.max(1)).unwrap_or(u64::MAX);
        if count > 1 {
            let most = total.checked_div(each).unwrap_or(0);
            ArgumentError::at_most("blocks", count as u64, most)?;
        }
        Ok(())
    }

    fn blocks(&self, places: Vec<BlockPlace>) -> impl Iterator<Item = Block> {
        places.into_iter().map(|place| self.block_at(place))
    }

    /// Takes a block of this shape freed on the home stream out of the stream cache.
    #[inline]
    fn stream_cached(&self) -> Option<Held> {
        let wanted = &self.wanted;
        let device = &self.owner.core.device;
        let cacheable = wanted.is_cacheable() && !wanted.zeroed;
        let usable = cacheable && device.lost().is_none() && device.forked().is_none();
        let home = wanted.home.filter(|_| usable)?;
        let shape = Shape {
            size: wanted.size,
            capacity: wanted.capacity,
            tag: wanted.tag.as_ref(),
            grain: wanted.grain,
        };
        self.owner.stream_caches.of(home).take(home, shape)
    }

    #[inline]
    fn held(&self, place: BlockPlace) -> Held {
        let home = self.wanted.home.filter(|_| self.wanted.is_cacheable());
        Held {
            owner: Arc::clone(self.owner),
            place,
            size: self.wanted.size,
            tag: self.wanted.tag.clone(),
            grain: self.wanted.grain,
            home: self.wanted.home.cloned(),
            // The cache does not know whether a block is movable or expected to shrink.
            stream_cache: home.map(|home| self.owner.stream_caches.of(home)).cloned(),
        }
    }

    #[inline]
    fn block(&self, held: Held) -> Block {
        Block::new(held, !self.wanted.zeroed, self.wait)
    }
}
