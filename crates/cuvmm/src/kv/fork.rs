//! Sequences that begin with the tokens of another: the memory of a common prefix is there once.
//!
//! Rows of tokens before the point of a fork are written no more, on either side. A sequence that is
//! truncated to before it and grows again gets memory of its own there, and can be written.

use super::KvCache;
use super::sequences::SequenceId;
use crate::error::{BlockError, KvCacheError};
use crate::pool::{Block, Prefix, Tenant};

/// Forks blocks together.
type Fork = fn(&Tenant, &[&Block], Prefix) -> Result<Vec<Block>, BlockError>;

impl KvCache {
    /// Begins a sequence with the first tokens of another, at least one and at most all: for beams,
    /// for several answers to one prompt, for prompts that begin alike. The cache must have been
    /// built to [fork](super::KvCacheBuilder::may_fork). Asks pressure hooks, and waits as the
    /// builder said; not for work on the GPU.
    ///
    /// Whole extents of the prefix, of at most 8 MiB, are mapped a second time, to be read only:
    /// `cuMemMap` and `cuMemSetAccess` for each, about 25 us, and no memory. What is left of the
    /// prefix is copied behind what the home stream has queued (`cuMemcpyDtoDAsync`). Either
    /// sequence grows, is truncated, forked again and freed as any other, in any order; the last
    /// one that shows an extent gives its memory up. A sequence that shares memory is not kept
    /// warm when it is freed or truncated into what it shares, but unmapped once its work has
    /// passed: by that call, by those that come after, or by the mapper's thread if there is one.
    ///
    /// Rows of these tokens must not be written any more, neither here nor there: a kernel that
    /// writes them in the new sequence loses the context, and one that writes them in the old
    /// sequence changes what the new one reads.
    ///
    /// # Errors
    /// [`KvCacheError`] when the sequence is gone or has fewer tokens, the cache was not built to
    /// fork, there are too many sequences, or memory is short, with the figures. Every sequence is
    /// as before then.
    #[doc(alias = "cuMemMap")]
    pub fn fork(&mut self, id: SequenceId, tokens: u64) -> Result<SequenceId, KvCacheError> {
        self.fork_by(id, tokens, Tenant::fork_blocks)
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::fork`].
    pub fn try_fork(&mut self, id: SequenceId, tokens: u64) -> Result<SequenceId, KvCacheError> {
        self.fork_by(id, tokens, Tenant::try_fork_blocks)
    }

    /// Makes few large extents under the first tokens of a sequence, which many will [fork](Self::fork):
    /// each fork then maps those, instead of one for each 8 MiB. Returns the bytes copied. Call it once,
    /// before the first fork, when the rows of these tokens have been written.
    ///
    /// Waits, as the builder said, for the work that is queued on the sequence; work that is launched
    /// meanwhile must keep off it. Needs room for a copy of the prefix, or 1 GiB of it at a time, and takes
    /// none back from others. On an H200 a fork of 512 MiB takes 1.4 to 2 ms before, and 0.08 to
    /// 0.17 ms after.
    ///
    /// A fork that is truncated to fewer tokens, and grows again, copies what lies before that token
    /// in its extent, as does a fork of fewer tokens than were prepared. The memory of the sequence
    /// is unmapped when it is freed. See [`Tenant::compact_prefix`].
    ///
    /// # Errors
    /// [`KvCacheError`] when the sequence is gone or has fewer tokens, work has not passed, or memory is
    /// short, with the figures. Every sequence has its rows.
    #[doc(alias = "cuMemMap")]
    pub fn compact_prefix(&mut self, id: SequenceId, tokens: u64) -> Result<u64, KvCacheError> {
        let sequence = self.sequences.get(id)?;
        sequence.check_tokens(tokens)?;
        let bytes = self.geometry.bytes_of(tokens);
        let blocks: Vec<&Block> = sequence.blocks.iter().collect();
        let compacted = self.tenant.compact_prefix(&blocks, bytes);
        compacted.map_err(|cause| KvCacheError::Block {
            sequence: id.number(),
            cause,
        })
    }

    fn fork_by(
        &mut self,
        id: SequenceId,
        tokens: u64,
        fork: Fork,
    ) -> Result<SequenceId, KvCacheError> {
        let sequence = self.sequences.get(id)?;
        if !self.options.may_fork {
            return Err(KvCacheError::MayNotFork);
        }
        sequence.check_tokens(tokens)?;
        self.room_for_one()?;
        let Some(size) = self.geometry.size_for(tokens) else {
            return Err(sequence.too_long(tokens));
        };
        let bytes = self.geometry.bytes_of(tokens);
        let blocks: Vec<&Block> = sequence.blocks.iter().collect();
        let blocks = fork(&self.tenant, &blocks, Prefix { bytes, size });
        let blocks = blocks.map_err(|cause| KvCacheError::Block {
            sequence: id.number(),
            cause,
        })?;
        let sequence = self.sequences.get_mut(id)?;
        sequence.fixed = sequence.fixed.max(tokens);
        let room = self.geometry.tokens_in(size);
        let number = self.tenant.number();
        let new = self.sequences.insert(number, tokens, room, blocks)?;
        self.sequences.get_mut(new)?.fixed = tokens;
        self.foresee(|sequence| sequence.id == new);
        Ok(new)
    }
}
