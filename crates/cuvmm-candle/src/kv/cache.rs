//! One tensor that grows along one dimension, in place: the keys or the values of a layer.
//!
//! What is written is written by candle's own kernels; when it may be written over is for whoever
//! appends.

use std::fmt;

use candle_core::Tensor;
use cuvmm::error::BlockError;
use cuvmm::{Access, Block};

use super::geometry::{Geometry, Order, distance_of};
use crate::error::CacheError;
use crate::loan::Wanted;
use crate::memory::{Held, Memory};

/// The keys or the values of a layer: candle-nn's `Cache`, over a tenant.
pub struct Cache {
    pub(super) memory: Memory,
    dim: usize,
    pub(super) current_seq_len: usize,
    max_seq_len: usize,
    order: Order,
    pub(super) may_fork: bool,
    /// How many of the first tokens other caches have too, or had: what writes there makes the cache
    /// one of its own first.
    pub(super) common: usize,
    pub(super) store: Option<Store>,
}

/// The largest extent of a cache that may be forked, in bytes.
const SHARED: u64 = 8 << 20;

/// Rows, and the tensor that spans them with all tokens there may be.
pub(super) struct Store {
    pub(super) geometry: Geometry,
    // Goes before the blocks, so that these are free at once if nobody else has it.
    all: Tensor,
    pub(super) held: Held,
}

impl Cache {
    /// An empty cache of at most so many tokens along a dimension of what is appended. Nothing is
    /// allocated before the first tokens come; then addresses for all of them, and memory for those
    /// that are there.
    #[must_use]
    pub fn new(memory: &Memory, dim: usize, max_seq_len: usize) -> Self {
        Self {
            memory: memory.clone(),
            dim,
            current_seq_len: 0,
            max_seq_len,
            order: Order::default(),
            may_fork: false,
            common: 0,
            store: None,
        }
    }

    /// What lies side by side in a row. It holds from the next first append on.
    #[must_use]
    pub fn with_order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Lets it be [forked](Self::fork). Its memory comes in extents of at most 8 MiB then, from the next
    /// first append on: forks share whole extents.
    #[must_use]
    pub fn with_forks(mut self) -> Self {
        self.may_fork = true;
        self
    }

    /// The dimension of tokens.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Tokens there are.
    #[must_use]
    pub const fn current_seq_len(&self) -> usize {
        self.current_seq_len
    }

    /// Tokens there may be. Unlike candle's own the cache never has more.
    #[must_use]
    pub const fn max_seq_len(&self) -> usize {
        self.max_seq_len
    }

    /// What lies side by side in a row.
    #[must_use]
    pub const fn order(&self) -> Order {
        self.order
    }

    /// Bytes that its blocks have: whole granules, up to what they may have.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.held.bytes())
    }

    /// The tokens that are there; nothing before the first append.
    ///
    /// # Errors
    /// What candle says.
    pub fn current_data(&self) -> candle_core::Result<Option<Tensor>> {
        let Some(store) = &self.store else {
            return Ok(None);
        };
        let Store { geometry, all, .. } = store;
        let data = all.narrow(geometry.stored_dim(), 0, self.current_seq_len)?;
        match geometry.is_straight() {
            true => Ok(Some(data)),
            false => data.permute(geometry.inverse()).map(Some),
        }
    }

    /// Keeps the first tokens. Their memory stays with the cache, and what is appended next is written
    /// over the others, wherever they were handed out.
    ///
    /// # Errors
    /// [`CacheError::NotThere`] when there are fewer; nothing is changed then.
    pub fn truncate(&mut self, seq_len: usize) -> Result<(), CacheError> {
        self.check_there(seq_len)?;
        self.current_seq_len = seq_len;
        Ok(())
    }

    pub(super) const fn check_there(&self, seq_len: usize) -> Result<(), CacheError> {
        let has = self.current_seq_len;
        match seq_len <= has {
            true => Ok(()),
            false => Err(CacheError::NotThere {
                wanted: seq_len,
                has,
            }),
        }
    }

    /// Forgets all tokens. The memory goes back to the tenant, warm, when the last tensor that was handed
    /// out has gone; the next append may be of another shape, type and batch.
    pub fn reset(&mut self) {
        self.current_seq_len = 0;
        self.common = 0;
        self.store = None;
    }

    /// One with the same settings, of tokens that it has in common with this one.
    pub(super) fn with_common(&self, seq_len: usize, store: Option<Store>) -> Self {
        Self {
            memory: self.memory.clone(),
            current_seq_len: seq_len,
            common: seq_len,
            store,
            ..*self
        }
    }

    pub(super) fn check_awake(&self) -> Result<(), CacheError> {
        let store = self.store.as_ref();
        match store.is_some_and(|store| store.held.is_asleep()) {
            true => Err(CacheError::Asleep),
            false => Ok(()),
        }
    }

    /// How many tokens there will be with these, if they can be appended.
    pub(super) fn wanted(&self, src: &Tensor) -> Result<usize, CacheError> {
        let tokens = match &self.store {
            Some(store) => store.geometry.check(src.dims(), src.dtype())?,
            None => src.dim(self.dim)?,
        };
        if !src.device().same_device(self.memory.gpu().candle()) {
            return Err(CacheError::WrongDevice);
        }
        self.check_awake()?;
        let held = self.current_seq_len;
        match held.checked_add(tokens) {
            Some(wanted) if wanted <= self.max_seq_len => Ok(wanted),
            _ => Err(CacheError::TooManyTokens {
                held,
                more: tokens,
                most: self.max_seq_len,
            }),
        }
    }

    /// Rows with memory for so many tokens of the kind.
    pub(super) fn lay_out(&self, src: &Tensor, wanted: usize) -> Result<Store, CacheError> {
        let geometry = Geometry::new(src.dims(), src.dtype(), self.dim, self.order)?;
        let most = geometry.row(self.max_seq_len)?;
        geometry.check_stride(most)?;
        let size = self.whole(geometry.row(wanted)?, most);
        let gpu = self.memory.gpu();
        let blocks = gpu.allocate(BlockError::is_shortage, || {
            let block = self.memory.block(size, "kv").capacity(most);
            let block = block.stride_multiple(geometry.token_bytes());
            let block = match self.may_fork {
                true => block.largest_extent(gpu.device().granularity().max(SHARED)),
                false => block,
            };
            block.allocate_adjacent(geometry.rows)
        })?;
        Store::over(&self.memory, geometry, blocks)
    }

    /// What rows that are there must grow to for so many tokens, in bytes each; nothing if they have it.
    pub(super) fn step_to(&self, wanted: usize) -> Result<Option<u64>, CacheError> {
        let Some(Store { geometry, held, .. }) = &self.store else {
            return Ok(None);
        };
        let bytes = geometry.row(wanted)?;
        let [first, ..] = held.blocks() else {
            return Ok(None);
        };
        let grows = bytes > first.size();
        Ok(grows.then(|| self.whole(bytes, first.capacity())))
    }

    /// So many bytes and the rest of what is mapped with them, which then needs no call.
    pub(super) fn whole(&self, bytes: u64, most: u64) -> u64 {
        let granule = self.memory.gpu().device().granularity();
        let whole = bytes.checked_next_multiple_of(granule);
        whole.unwrap_or(most).min(most)
    }
}

impl Store {
    /// Rows over blocks that lie side by side.
    pub(super) fn over(
        memory: &Memory,
        geometry: Geometry,
        blocks: Vec<Block>,
    ) -> Result<Self, CacheError> {
        let rows: Vec<u64> = blocks.iter().map(|block| block.address().0).collect();
        let single = || blocks.first().map_or(0, Block::capacity);
        let stride = distance_of(&rows)?.unwrap_or_else(single);
        let tokens = geometry.tokens_between(stride)?;
        let mut held = Held::new(memory, blocks);
        let wanted = Wanted {
            offset: 0,
            bytes: held.backing().span(),
            dtype: geometry.dtype,
            shape: geometry.stored(tokens),
            // What is written lies behind what is shared, or the cache moves to rows of its own first.
            access: Access::Read,
        };
        let all = held.backing().lend(memory.gpu().cuda(), wanted)?;
        Ok(Self {
            geometry,
            all,
            held,
        })
    }

    pub(super) fn blocks_mut(&mut self) -> &mut [Block] {
        self.held.backing().blocks_mut()
    }

    /// Writes tokens behind so many, which must have memory.
    pub(super) fn write(&self, src: &Tensor, behind: usize) -> candle_core::Result<()> {
        let Self { geometry, all, .. } = self;
        let src = match geometry.is_straight() {
            true => src.contiguous()?,
            false => src.permute(geometry.permutation())?.contiguous()?,
        };
        all.slice_set(&src, geometry.stored_dim(), behind)
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("dim", &self.dim)
            .field("current_seq_len", &self.current_seq_len)
            .field("max_seq_len", &self.max_seq_len)
            .field("order", &self.order)
            .field("may_fork", &self.may_fork)
            .field("allocated", &self.allocated())
            .finish_non_exhaustive()
    }
}
