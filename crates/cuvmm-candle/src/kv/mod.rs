//! Keys and values of attention, with the methods of candle-nn's caches.
//!
//! A model that has `candle_nn::kv_cache::KvCache` takes this one by the line that makes it. Nothing is
//! copied as a cache grows, and memory is taken for the tokens that are there: `max_seq_len` costs
//! addresses. No attention is computed here.

mod append;
mod cache;
mod fork;
mod geometry;

use std::fmt;

use candle_core::{Result, Tensor};

use crate::error::CacheError;
use crate::memory::Memory;

pub use cache::Cache;
pub use geometry::Order;

/// The keys and values of a layer: candle-nn's `KvCache`, over a tenant.
pub struct KvCache {
    k: Cache,
    v: Cache,
}

impl KvCache {
    /// An empty cache of at most so many tokens along a dimension of what is appended, 2 where that is
    /// (batch, heads, tokens, size). See [`Cache::new`].
    #[must_use]
    pub fn new(memory: &Memory, dim: usize, max_seq_len: usize) -> Self {
        Self {
            k: Cache::new(memory, dim, max_seq_len),
            v: Cache::new(memory, dim, max_seq_len),
        }
    }

    /// What lies side by side in a row. It holds from the next first append on.
    #[must_use]
    pub fn with_order(self, order: Order) -> Self {
        Self {
            k: self.k.with_order(order),
            v: self.v.with_order(order),
        }
    }

    /// Lets it be forked. See [`Cache::with_forks`].
    #[must_use]
    pub fn with_forks(self) -> Self {
        Self {
            k: self.k.with_forks(),
            v: self.v.with_forks(),
        }
    }

    /// A cache that begins with the first tokens of this one, keys and values. See [`Cache::fork`].
    ///
    /// # Errors
    /// As [`Cache::fork`]; all is as before then.
    pub fn fork(&mut self, seq_len: usize) -> std::result::Result<Self, CacheError> {
        let [k, v] = fork::fork([&mut self.k, &mut self.v], seq_len)?;
        Ok(Self { k, v })
    }

    /// The keys.
    #[must_use]
    pub const fn k_cache(&self) -> &Cache {
        &self.k
    }

    /// The values.
    #[must_use]
    pub const fn v_cache(&self) -> &Cache {
        &self.v
    }

    /// The keys.
    pub const fn k_cache_mut(&mut self) -> &mut Cache {
        &mut self.k
    }

    /// The values.
    pub const fn v_cache_mut(&mut self) -> &mut Cache {
        &mut self.v
    }

    /// The keys that are there; nothing before the first append.
    ///
    /// # Errors
    /// What candle says.
    pub fn k(&self) -> Result<Option<Tensor>> {
        self.k.current_data()
    }

    /// The values that are there; nothing before the first append.
    ///
    /// # Errors
    /// What candle says.
    pub fn v(&self) -> Result<Option<Tensor>> {
        self.v.current_data()
    }

    /// Appends tokens, of both or of neither, and hands out all there are. What was handed out before
    /// stays where it is and as it was.
    ///
    /// Where there is memory ahead these are two kernels and no driver call besides; else the rows of
    /// both grow in one call first (`cuMemCreate`, `cuMemMap`, `cuMemSetAccess` for each).
    ///
    /// # Errors
    /// candle's error with [`CacheError`] in it; the tokens are as before then. Where memory was short
    /// [`shortage`](crate::shortage) has the figures.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        append::append([&mut self.k, &mut self.v], [k, v])?;
        // Of a cache without a token there is nothing, and what was appended is just that.
        let all_k = self.k()?.unwrap_or_else(|| k.clone());
        let all_v = self.v()?.unwrap_or_else(|| v.clone());
        Ok((all_k, all_v))
    }

    /// Tokens there are.
    #[must_use]
    pub const fn current_seq_len(&self) -> usize {
        self.k.current_seq_len()
    }

    /// Bytes that the blocks have: whole granules, up to what they may have.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.k.allocated() + self.v.allocated()
    }

    /// Keeps the first tokens. See [`Cache::truncate`].
    ///
    /// # Errors
    /// [`CacheError::NotThere`] when there are fewer; nothing is changed then.
    pub fn truncate(&mut self, seq_len: usize) -> std::result::Result<(), CacheError> {
        self.k.check_there(seq_len)?;
        self.v.truncate(seq_len)?;
        self.k.truncate(seq_len)
    }

    /// Forgets all tokens. See [`Cache::reset`].
    pub fn reset(&mut self) {
        self.k.reset();
        self.v.reset();
    }
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("k", &self.k)
            .field("v", &self.v)
            .finish()
    }
}
