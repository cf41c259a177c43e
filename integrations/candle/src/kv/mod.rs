//! Keys and values of attention, with the methods of candle-nn's caches.
//!
//! A model that uses `candle_nn::kv_cache::KvCache` switches to this cache by changing the line
//! that creates it. A growing cache copies nothing, and only existing tokens take memory:
//! `max_seq_len` costs addresses. This module computes no attention.

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

/// The keys and values of one layer: candle-nn's `KvCache`, in a tenant's memory.
pub struct KvCache {
    k: Cache,
    v: Cache,
}

impl KvCache {
    /// Creates an empty cache for at most `max_seq_len` tokens along dimension `dim` of the
    /// appended tensors: 2 for (batch, heads, tokens, size). See [`Cache::new`].
    #[must_use]
    pub fn new(memory: &Memory, dim: usize, max_seq_len: usize) -> Self {
        Self {
            k: Cache::new(memory, dim, max_seq_len),
            v: Cache::new(memory, dim, max_seq_len),
        }
    }

    /// Sets the order of elements in rows. See [`Cache::with_order`].
    #[must_use]
    pub fn with_order(self, order: Order) -> Self {
        Self {
            k: self.k.with_order(order),
            v: self.v.with_order(order),
        }
    }

    /// Permits forks. See [`Cache::with_forks`].
    #[must_use]
    pub fn with_forks(self) -> Self {
        Self {
            k: self.k.with_forks(),
            v: self.v.with_forks(),
        }
    }

    /// Creates a cache that starts with the first `seq_len` keys and values of this cache. See
    /// [`Cache::fork`].
    ///
    /// # Errors
    /// Those of [`Cache::fork`].
    pub fn fork(&mut self, seq_len: usize) -> std::result::Result<Self, CacheError> {
        let [k, v] = fork::fork([&mut self.k, &mut self.v], seq_len)?;
        Ok(Self { k, v })
    }

    /// Returns the cache of the keys.
    #[must_use]
    pub const fn k_cache(&self) -> &Cache {
        &self.k
    }

    /// Returns the cache of the values.
    #[must_use]
    pub const fn v_cache(&self) -> &Cache {
        &self.v
    }

    /// Returns the cache of the keys.
    pub const fn k_cache_mut(&mut self) -> &mut Cache {
        &mut self.k
    }

    /// Returns the cache of the values.
    pub const fn v_cache_mut(&mut self) -> &mut Cache {
        &mut self.v
    }

    /// Returns the keys, or `None` before the first append.
    ///
    /// # Errors
    /// An error of candle.
    pub fn k(&self) -> Result<Option<Tensor>> {
        self.k.current_data()
    }

    /// Returns the values, or `None` before the first append.
    ///
    /// # Errors
    /// An error of candle.
    pub fn v(&self) -> Result<Option<Tensor>> {
        self.v.current_data()
    }

    /// Appends tokens to both keys and values, or to neither, and returns all of them. Tensors that
    /// were returned before stay unchanged.
    ///
    /// With memory committed ahead, this makes two kernel launches and no other driver call;
    /// otherwise the rows of both grow in one call first (`cuMemCreate`, `cuMemMap`,
    /// `cuMemSetAccess` for each).
    ///
    /// # Errors
    /// candle's error around a [`CacheError`]; the tokens are then unchanged. If memory was short,
    /// [`shortage`](crate::shortage) returns the figures.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        append::append([&mut self.k, &mut self.v], [k, v])?;
        // A cache without tokens has no tensor; then the appended tensor, also without tokens, is
        // returned.
        let all_k = self.k()?.unwrap_or_else(|| k.clone());
        let all_v = self.v()?.unwrap_or_else(|| v.clone());
        Ok((all_k, all_v))
    }

    /// Returns the number of tokens.
    #[must_use]
    pub const fn current_seq_len(&self) -> usize {
        self.k.current_seq_len()
    }

    /// Returns the bytes of the blocks: whole granules, up to their capacity.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.k.allocated() + self.v.allocated()
    }

    /// Keeps the first `seq_len` tokens. See [`Cache::truncate`].
    ///
    /// # Errors
    /// [`CacheError::NotThere`], with nothing changed, if there are fewer tokens.
    pub fn truncate(&mut self, seq_len: usize) -> std::result::Result<(), CacheError> {
        self.k.check_there(seq_len)?;
        self.v.truncate(seq_len)?;
        self.k.truncate(seq_len)
    }

    /// Removes all tokens. See [`Cache::reset`].
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
