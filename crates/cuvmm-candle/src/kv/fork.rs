//! Caches that begin with the tokens of another: the memory of a common prefix is there once.
//!
//! What several caches have is written by none of them. One that was truncated to before the end of
//! that, and is appended to, moves to rows of its own, which begin as a fork of the old ones at its
//! last token: nothing waits for work, and what was handed out keeps the old rows.

use candle_core::Tensor;
use cuvmm::Block;
use cuvmm::error::BlockError;

use super::cache::{Cache, Store};
use crate::error::CacheError;

impl Cache {
    /// A cache of the same settings that begins with the first tokens of this one.
    ///
    /// Whole extents of them, of at most 8 MiB, are mapped a second time, to be read only (`cuMemMap` and
    /// `cuMemSetAccess` for each), and charged once; the rest is copied (`cuMemcpyDtoDAsync`). Both go
    /// on as any other cache: they are appended to, truncated, forked and dropped in any order. Tensors
    /// that were handed out stay as they were.
    ///
    /// # Errors
    /// [`CacheError`] when there are fewer tokens, the cache was not made [to
    /// fork](Self::with_forks), it sleeps, or memory is short; all is as before then.
    pub fn fork(&mut self, seq_len: usize) -> Result<Self, CacheError> {
        let [fork] = fork([self], seq_len)?;
        Ok(fork)
    }

    /// Whether the next token would be written where other caches read.
    pub(super) const fn is_cut(&self) -> bool {
        self.current_seq_len < self.common
    }

    /// Rows of its own with its tokens, and memory for more of the kind.
    pub(super) fn own(&self, more: &Tensor, wanted: usize) -> Result<Store, CacheError> {
        match self.forked(self.current_seq_len, wanted)? {
            Some(store) => Ok(store),
            None => self.lay_out(more, wanted),
        }
    }

    /// Rows that begin with the first tokens, and have memory for more; none without tokens.
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

/// Forks all caches, or none.
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
