//! Appending to several caches at once: to all of them or to none.
//!
//! All requirements are checked first, then memory is allocated and grown, then tokens are written,
//! and last the caches' lengths change.

use candle_core::Tensor;
use cuvmm::Block;
use cuvmm::error::BlockError;

use super::cache::{Cache, Store};
use crate::error::CacheError;

impl Cache {
    /// Appends tokens. Tensors that were returned before stay unchanged.
    ///
    /// With memory committed ahead, this makes one kernel launch and no other driver call;
    /// otherwise the rows grow in one call first (`cuMemCreate`, `cuMemMap`, `cuMemSetAccess` for
    /// each).
    ///
    /// # Errors
    /// candle's error around a [`CacheError`]; the tokens are then unchanged.
    pub fn append(&mut self, src: &Tensor) -> candle_core::Result<()> {
        Ok(append([self], [src])?)
    }
}

/// Appends a tensor to each cache. All caches use the same memory.
pub(super) fn append<const N: usize>(
    mut caches: [&mut Cache; N],
    tokens: [&Tensor; N],
) -> Result<(), CacheError> {
    let mut wanted = [0; N];
    for ((cache, tokens), wanted) in caches.iter().zip(tokens).zip(&mut wanted) {
        *wanted = cache.wanted(tokens)?;
    }
    let mut new: [Option<Store>; N] = [const { None }; N];
    for (((cache, tokens), wanted), new) in caches.iter().zip(tokens).zip(wanted).zip(&mut new) {
        if cache.store.is_none() && wanted > 0 {
            *new = Some(cache.lay_out(tokens, wanted)?);
        } else if cache.is_cut() && wanted > cache.current_seq_len {
            *new = Some(cache.own(tokens, wanted)?);
        }
    }
    grow(&mut caches, wanted, new.each_ref().map(Option::is_some))?;
    for (((cache, tokens), wanted), new) in caches.iter().zip(tokens).zip(wanted).zip(&new) {
        let store = new.as_ref().or(cache.store.as_ref());
        // Without tokens there may be no store to copy into.
        if let Some(store) = store.filter(|_| wanted > cache.current_seq_len) {
            store.write(tokens, cache.current_seq_len)?;
        }
    }
    for ((cache, wanted), new) in caches.into_iter().zip(wanted).zip(new) {
        if new.is_some() {
            cache.store = new;
            cache.common = cache.common.min(cache.current_seq_len);
        }
        cache.current_seq_len = wanted;
    }
    Ok(())
}

/// Grows together all rows that lack memory for `wanted` tokens, except in caches that get new
/// rows.
fn grow<const N: usize>(
    caches: &mut [&mut Cache; N],
    wanted: [usize; N],
    new: [bool; N],
) -> Result<(), CacheError> {
    let mut steps = [None; N];
    for (((cache, wanted), new), step) in caches.iter().zip(wanted).zip(new).zip(&mut steps) {
        if !new {
            *step = cache.step_to(wanted)?;
        }
    }
    let mut blocks: Vec<(&mut Block, u64)> = Vec::new();
    let mut memory = None;
    for (cache, step) in caches.iter_mut().zip(steps) {
        if let (Some(store), Some(size)) = (&mut cache.store, step) {
            memory = Some(cache.memory.clone());
            blocks.extend(store.blocks_mut().iter_mut().map(|block| (block, size)));
        }
    }
    if let Some(memory) = memory {
        let tenant = memory.tenant();
        memory
            .gpu()
            .allocate(BlockError::is_shortage, || tenant.grow_all(&mut blocks))?;
    }
    Ok(())
}
