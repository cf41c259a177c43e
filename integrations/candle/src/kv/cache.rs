//! One tensor that grows in place along one dimension: the keys or the values of a layer.
//!
//! candle's own kernels write the tokens. The caller of an append decides when old tokens may be
//! overwritten.

use std::fmt;

use candle_core::Tensor;
use cuvmm::error::BlockError;
use cuvmm::{Access, Block};

use super::geometry::{Geometry, Order, distance_of};
use crate::error::CacheError;
use crate::loan::Wanted;
use crate::memory::{Held, Memory};

/// The keys or the values of one layer: candle-nn's `Cache`, in a tenant's memory.
pub struct Cache {
    pub(super) memory: Memory,
    dim: usize,
    pub(super) current_seq_len: usize,
    max_seq_len: usize,
    order: Order,
    pub(super) may_fork: bool,
    /// The number of leading tokens that are or were shared with other caches. An append within
    /// them first moves the cache to rows of its own.
    pub(super) common: usize,
    pub(super) store: Option<Store>,
}

/// The largest extent of a cache that may be forked, in bytes.
const SHARED: u64 = 8 << 20;

/// Rows, and the tensor that spans them with the largest number of tokens.
pub(super) struct Store {
    pub(super) geometry: Geometry,
    // Dropped before the blocks, which are then free at once unless other tensors exist.
    all: Tensor,
    pub(super) held: Held,
}

impl Cache {
    /// Creates an empty cache for at most `max_seq_len` tokens along dimension `dim` of the
    /// appended tensors. The first append reserves addresses for all tokens, and allocates memory
    /// for the existing tokens.
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

    /// Sets the order of elements in rows, from the next append to an empty cache on.
    #[must_use]
    pub fn with_order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Permits [forks](Self::fork), from the next append to an empty cache on. Extents are then at
    /// most 8 MiB, because forks share whole extents.
    #[must_use]
    pub fn with_forks(mut self) -> Self {
        self.may_fork = true;
        self
    }

    /// Returns the dimension of tokens.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Returns the number of tokens.
    #[must_use]
    pub const fn current_seq_len(&self) -> usize {
        self.current_seq_len
    }

    /// Returns the largest number of tokens. Unlike candle's own cache, this cache never exceeds
    /// it.
    #[must_use]
    pub const fn max_seq_len(&self) -> usize {
        self.max_seq_len
    }

    /// Returns the order of elements in rows.
    #[must_use]
    pub const fn order(&self) -> Order {
        self.order
    }

    /// Returns the bytes of the blocks: whole granules, up to their capacity.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.held.bytes())
    }

    /// Returns the tokens, or `None` before the first append.
    ///
    /// # Errors
    /// An error of candle.
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

    /// Keeps the first `seq_len` tokens. The memory of the others stays with the cache, and the
    /// next append overwrites them, also in tensors that were returned before.
    ///
    /// # Errors
    /// [`CacheError::NotThere`], with nothing changed, if there are fewer tokens.
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

    /// Removes all tokens. The memory returns to the tenant as cached memory when the last returned
    /// tensor is dropped. The next append may have another shape, type and batch size.
    pub fn reset(&mut self) {
        self.current_seq_len = 0;
        self.common = 0;
        self.store = None;
    }

    /// Returns a cache with the same settings that shares the first `seq_len` tokens.
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

    /// Returns the number of tokens after appending `src`, if it can be appended.
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

    /// Allocates rows with memory for `wanted` tokens shaped like `src`.
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

    /// Returns the size in bytes to which each row must grow for `wanted` tokens, or `None` if the
    /// rows are large enough.
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

    /// Rounds up to whole granules, at most `most`, because the rest of a granule is mapped anyway.
    pub(super) fn whole(&self, bytes: u64, most: u64) -> u64 {
        let granule = self.memory.gpu().device().granularity();
        let whole = bytes.checked_next_multiple_of(granule);
        whole.unwrap_or(most).min(most)
    }
}

impl Store {
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
            // Writes go after the shared tokens, or to rows of its own that the cache moves to
            // first.
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

    /// Writes tokens after the first `behind`. Their memory must be committed.
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
