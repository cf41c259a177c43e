//! What a block is to be like, and the ways to allocate such blocks: one, several, side by side.

use std::sync::Arc;
use std::time::Duration;

use super::adjacent::Placement;
use super::block::Block;
use super::ids::BlockPlace;
use super::stream_cache::{Held, Owner, Shape};
use super::wait::Wait;
use super::wanted::{Grain, Wanted};
use crate::error::{ArgumentError, BlockError};
use crate::growth::Growth;
use crate::own::Stream;

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
            stride: 1,
        };
        Self::of(owner, wanted)
    }

    pub(super) const fn of(owner: &'a Arc<Owner>, wanted: Wanted<'a>) -> Self {
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

    /// Has blocks that are allocated [side by side](Self::allocate_adjacent) lie a multiple of so many
    /// bytes apart, so that rows of elements of that size are one tensor of them. By default that is
    /// the elements whose size is a power of two, up to a granule. Others take more addresses: up to
    /// twice the capacity and twice the least number of granules that is a multiple.
    #[doc(alias = "pitch")]
    pub const fn stride_multiple(mut self, bytes: u64) -> Self {
        self.wanted.stride = bytes;
        self
    }

    /// How long [`allocate`](Self::allocate) and [`Block::grow_to`] may wait for memory in use to
    /// come free. By default they do not wait, but still ask pressure hooks.
    #[doc(alias = "deadline")]
    pub const fn timeout(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Allocates, asking other tenants' pressure hooks and waiting for at most the [timeout](Self::timeout) if memory
    /// is short. A request that no giving back could serve is refused at once: one above the
    /// tenant's own limit, or above what the guarantees of other tenants leave of the pool's.
    ///
    /// # Errors
    /// [`BlockError`] with the figures; every block is as before then.
    pub fn allocate(self) -> Result<Block, BlockError> {
        self.one(|builder| Wait::of(builder.wait))
    }

    /// Allocates if that needs no waiting: neither for the GPU's work nor for anybody's memory.
    /// (Without a home stream a scrub of memory that changes tenant is waited for, about 0.25 ms a
    /// GiB; with one it is ordered on that stream.)
    ///
    /// Cached memory of the home stream: no driver call. Otherwise per extent `cuMemCreate` (or
    /// `cuMemUnmap` where it was idle), `cuMemMap` and `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`BlockError`] with the figures; every block is as before then.
    pub fn try_allocate(self) -> Result<Block, BlockError> {
        self.one(|_| Wait::Never)
    }

    /// Allocates so many blocks that are all like this one, in one go: all of them or none.
    ///
    /// # Errors
    /// As [`Self::allocate`], and [`ArgumentError::TooLarge`] where they are more than the device has
    /// memory for.
    pub fn allocate_many(self, count: usize) -> Result<Vec<Block>, BlockError> {
        let wait = Wait::of(self.wait);
        self.many(count, wait)
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::try_allocate`].
    pub fn try_allocate_many(self, count: usize) -> Result<Vec<Block>, BlockError> {
        self.many(count, Wait::Never)
    }

    /// Allocates so many blocks that are all like this one and lie side by side, all of them or none:
    /// from one to the next it is always equally far, so that they are the rows of one strided
    /// tensor, each of which grows in place. [`Tenant::grow_all`](super::Tenant::grow_all) grows
    /// them together.
    ///
    /// The distance is that of the first two addresses: the capacity, rounded up to a power of two
    /// granules or to what makes it a [multiple](Self::stride_multiple), and in a
    /// [hardened pool](super#hardened-pools) two guards. Between a block's end and
    /// the next block nothing of another is ever mapped.
    ///
    /// Each is a block like any other. Where as many lay side by side that are gone, and nobody has
    /// their places, these have them, with the memory that is still there. One reservation
    /// (`cuMemAddressReserve`) else: the driver has its addresses again when all of the blocks have
    /// gone and somebody wants them.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn allocate_adjacent(self, count: usize) -> Result<Vec<Block>, BlockError> {
        let wait = Wait::of(self.wait);
        self.adjacent(count, wait)
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::try_allocate`].
    pub fn try_allocate_adjacent(self, count: usize) -> Result<Vec<Block>, BlockError> {
        self.adjacent(count, Wait::Never)
    }

    pub(super) fn into_parts(self) -> (&'a Arc<Owner>, Wanted<'a>) {
        (self.owner, self.wanted)
    }

    /// A block of the same shape that was freed on the home stream a moment ago.
    pub(super) fn stream_cached_block(&self) -> Option<Block> {
        self.stream_cached().map(|held| self.block(held))
    }

    /// The block at a place that was made for it.
    pub(super) fn block_at(&self, place: BlockPlace) -> Block {
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

    fn adjacent(self, count: usize, wait: Wait) -> Result<Vec<Block>, BlockError> {
        if count == 0 {
            return Ok(Vec::new());
        }
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
                // Taken apart, what lay in the stream cache may go further.
                blocks.clear();
                made = make(count);
            }
            blocks.extend(self.blocks(made?));
        }
        Ok(blocks)
    }

    /// Refuses a number of blocks that no memory could hold, so that all that is made for each of
    /// them is bounded.
    fn check_count(&self, count: usize) -> Result<(), BlockError> {
        let device = &self.owner.core.device;
        let (size, total) = (self.wanted.size, device.total_memory());
        let each = device.granule().round_up(size.max(1)).unwrap_or(u64::MAX);
        let all = each.checked_mul(count as u64);
        if count > 1 && all.is_none_or(|all| all > total) {
            let most = total.checked_div(each).unwrap_or(0);
            return Err(ArgumentError::TooLarge {
                what: "blocks",
                value: count as u64,
                most,
            }
            .into());
        }
        Ok(())
    }

    fn blocks(&self, places: Vec<BlockPlace>) -> impl Iterator<Item = Block> {
        places.into_iter().map(|place| self.block_at(place))
    }

    /// A block of the same shape that was freed on the home stream a moment ago.
    #[inline]
    fn stream_cached(&self) -> Option<Held> {
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
        self.owner.stream_caches.of(home)?.take(home, shape)
    }

    #[inline]
    fn held(&self, place: BlockPlace) -> Held {
        Held {
            owner: Arc::clone(self.owner),
            place,
            size: self.wanted.size,
            tag: self.wanted.tag.clone(),
            grain: self.wanted.grain,
            home: self.wanted.home.cloned(),
            stream_cache: self
                .wanted
                .home
                .and_then(|home| self.owner.stream_caches.of(home))
                .cloned(),
        }
    }

    #[inline]
    fn block(&self, held: Held) -> Block {
        Block::new(held, !self.wanted.zeroed, self.wait)
    }
}
