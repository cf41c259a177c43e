//! Caches that start with the tokens of another cache, with one copy of the common prefix in
//! memory.
//!
//! No cache writes shared tokens. An append to a cache that was truncated within its shared tokens
//! first moves the cache to rows of its own, a fork of the old rows at its last token. This waits
//! for no work, and tensors that were returned before keep the old rows.

use candle_core::Tensor;
use cuvmm::Block;
use cuvmm::error::BlockError;

use super::cache::{Cache, Store};
use crate::error::CacheError;

impl Cache {
    /// Creates a cache with the same settings that starts with the first `seq_len` tokens of this
    /// cache.
    ///
    /// Whole extents of these tokens, of at most 8 MiB each, are mapped a second time as read-only
    /// (`cuMemMap` and `cuMemSetAccess` for each) and charged once; the rest is copied
    /// (`cuMemcpyDtoDAsync`). Both caches can be appended to, truncated, forked and dropped in any
    /// order. Tensors that were returned before stay unchanged.
    ///
    /// # Errors
    /// [`CacheError`], with nothing changed, if there are fewer tokens, the cache was created
    /// without [`with_forks`](Self::with_forks), it is asleep, or memory is short.
    pub fn fork(&mut self, seq_len: usize) -> Result<Self, CacheError> {
        let [fork] = fork([self], seq_len)?;
        Ok(fork)
    }

    /// Returns `true` if the next token would be written among shared tokens.
    pub(super) const fn is_cut(&self) -> bool {
        self.current_seq_len < self.common
    }

    /// Makes rows for this cache alone: its tokens, and memory for `wanted` tokens shaped like
    /// `more`.
    pub(super) fn own(&self, more: &Tensor, wanted: usize) -> Result<Store, CacheError> {
        match self.forked(self.current_seq_len, wanted)? {
            Some(store) => Ok(store),
            None => self.lay_out(more, wanted),
        }
    }

    /// Makes rows that start with the first `seq_len` tokens and have memory for `wanted`, or
    /// returns `None` if `seq_len` is 0.
    fn forked(&self, seq_len: usize, wanted: usize) -> Result<Option<Store>, CacheError> {
        let Some(store) = self.store.as_ref().filter(|_| seq_len > 0) else {
            return Ok(None);
        };
        let geometry = &store.geometry;
        let blocks: Vec<&Block> = store.held.blocks().iter().collect();
        let most = blocks.first().map_or(0, |block| block.capacity());
        let size = self.whole(geometry.row(wanted)?, most);
        let tenant = self.memory.tenant();
        let bytes = geometry.row(seq_len)?;
        let gpu = self.memory.gpu();
        let forks = gpu.allocate(BlockError::is_shortage, || {
            tenant.fork_all(&blocks, bytes, size)
        })?;
        Store::over(&self.memory, geometry.clone(), forks).map(Some)
    }
}

pub(super) fn fork<const N: usize>(
    caches: [&mut Cache; N],
    seq_len: usize,
) -> Result<[Cache; N], CacheError> {
    for cache in &caches {
        if !cache.may_fork {
            return Err(CacheError::MayNotFork);
        }
        cache.check_there(seq_len)?;
        cache.check_awake()?;
    }
    let mut stores = [const { None }; N];
    for (cache, store) in caches.iter().zip(&mut stores) {
        *store = cache.forked(seq_len, seq_len)?;
    }
    let mut stores = stores.into_iter();
    Ok(caches.map(|cache| {
        cache.common = cache.common.max(seq_len);
        cache.with_common(seq_len, stores.next().flatten())
    }))
}
